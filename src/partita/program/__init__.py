"""The Program, the heart of Partita: for each device an ordered list of instructions.

A plan is laid out (``layout``), ordered by a pipeline schedule (``schedules``, ``order``) and
lowered (``lower``) to a Program (``core/program.py``), which five readers share:

* the checker (``program/check``) proves it complete and free of deadlock;
* the simulator (``program/simulate.py``) gives each instruction a duration and plays it;
* the interpreter (``runtime/interpreter.py``) executes it with torch in one process;
* the executor (``runtime/executor.py``) runs it on real processes;
* the frontier (``energy/frontier/frontier.py``) gives each instruction a clock.
"""
