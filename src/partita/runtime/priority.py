"""Lets a process that mostly sleeps run as soon as it wakes up.

What stands for a device or a link must not be late because other programs keep the processors busy:
it would look like a slower device or link.
"""

import ctypes
import os
import sys
from contextlib import suppress
from pathlib import Path

_PRIORITY = -10
_SET_TIMER_SLACK = 29


def run_soon() -> None:
    """Put all threads of this process before those of others, as far as the system allows it.

    As root on Linux they are scheduled in real time, in turns; the system keeps some time for
    others even if they never slept.
    """
    if not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None).prctl(_SET_TIMER_SLACK, 1)
    for thread in Path("/proc/self/task").iterdir():
        with suppress(ProcessLookupError):
            _put_first(int(thread.name))


def _put_first(thread: int) -> None:
    with suppress(PermissionError):
        os.setpriority(os.PRIO_PROCESS, thread, _PRIORITY)
        os.sched_setscheduler(thread, os.SCHED_RR, os.sched_param(1))
