"""Runs commands of ``partita``, each in a process forked from this one, which is warm.

A process of its own imports torch and what captures models for seconds, the parts of partita for
another half. Here a request is a line of JSON on standard input (arguments, folder, environment,
files for what is printed), the answer a line with the exit code.
"""

import atexit
import gc
import importlib
import json
import os
import pkgutil
import sys
import traceback

import partita
import partita.cli.main

WARM = ("numba", "scipy.optimize", "torch._dynamo", "torch.distributed.fsdp", "torch.export")
"""What the parts import only when they are called."""


def warm_up() -> None:
    """Import what commands import."""
    parts = [part.name for part in pkgutil.walk_packages(partita.__path__, "partita.")]
    for name in (*WARM, *parts):
        if not name.endswith(".__main__") and ".inside" not in name:  # those run when imported
            importlib.import_module(name)
    # Children need not look through what is here for garbage, and share its pages.
    gc.collect()
    gc.freeze()


def run(request: dict) -> int:
    """Run a command in this process, which ends with it; return the exit code."""
    os.setsid()
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])
    for number, name in enumerate((os.devnull, request["out"], request["err"])):
        flags = os.O_RDONLY if number == 0 else os.O_WRONLY | os.O_CREAT | os.O_TRUNC
        opened = os.open(name, flags)
        os.dup2(opened, number)
        os.close(opened)
    sys.argv = ["partita", *request["arguments"]]
    code: object = 0
    try:
        partita.cli.main.main(request["arguments"])
    except SystemExit as stop:
        code = stop.code
    except BaseException:  # noqa: BLE001 (a process border)
        traceback.print_exc()
        code = 1
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    return code if isinstance(code, int) else int(code is not None)


def main() -> None:
    """Serve requests until there are no more."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    warm_up()
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            os._exit(run(json.loads(line)))
        answers.write(f"{child}\n")
        answers.flush()
        _, status = os.waitpid(child, 0)
        answers.write(f"{os.waitstatus_to_exitcode(status)}\n")
        answers.flush()


if __name__ == "__main__":
    main()
