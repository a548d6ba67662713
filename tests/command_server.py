"""Runs commands of ``partita``, or a text in Python, each in a process forked from this warm one.

A process of its own imports torch and what captures models for seconds, the parts of partita for
another half. All test processes connect to this one, by a socket that was opened for it and whose
number is its argument; with ``--now`` it gets warm before anybody asks. A request is a line of JSON
(arguments, folder, environment, text of Python if it is no command, files for what is printed and
for the exit code), the answer a line with the number of the process. Several may run at a time. It
ends with its standard input.

What such a process starts in Python (ranks, mostly) is forked from it as well, unless its
environment has ``FRESH`` set: each would import the same again for seconds. It gets what a fresh
interpreter gets: its arguments, files, environment and signals, and seeds of its own.
"""

import atexit
import gc
import importlib
import json
import os
import pkgutil
import random
import runpy
import selectors
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import pairwise
from multiprocessing import context, popen_fork
from pathlib import Path
from types import ModuleType
from typing import Any

WARM = ("numba", "scipy.optimize", "torch._dynamo", "torch.distributed.fsdp", "torch.export")
"""What the parts import only when they are called."""


os.getloadavg = lambda: (0.0, 0.0, 0.0)  # as in conftest.py: every machine is idle


def warm_up() -> None:
    """Import what commands import."""
    package = importlib.import_module("partita")
    parts = [part.name for part in pkgutil.walk_packages(package.__path__, "partita.")]
    for name in (*WARM, *parts):
        if not name.endswith(".__main__") and ".inside" not in name:  # those run when imported
            importlib.import_module(name)
    # What Numba sets up for its first function, each child would set up anew.
    importlib.import_module("numba").njit(lambda number: number)(1.0)
    load_kernels()
    # Children need not look through what is here for garbage, and share its pages.
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 100)


def load_kernels() -> None:
    """Load the machine code of what plans a pipeline: children use it at any size.

    Each would interpret the same loops, for most of the time that a small plan takes.
    """
    kernels, partita = map(importlib.import_module, ("partita.kernels", "partita"))
    pays, kernels.pays = kernels.pays, lambda *_: True
    try:
        partita.plan("gpt-small", cluster="2xa100+2xv100", microbatches=8, iterations=30)
    finally:
        kernels.pays = pays


START = subprocess.Popen._execute_child
MOST_FILES = 4096
KEPT: list[Any] = []
"""Files of a parent, which its children do not close."""


def start_warm() -> None:
    """Let Python that this process starts be forked from it."""
    subprocess.Popen._execute_child = start_process
    context.SpawnProcess._Popen = staticmethod(WarmSpawn)


class WarmSpawn(popen_fork.Popen):
    """A process of ``multiprocessing`` that would begin as a fresh interpreter."""

    method = "spawn"


def start_process(self: Any, args: Any, executable: Any, *rest: Any) -> None:
    """Start what ``subprocess.Popen`` is to start: in a fork if that is Python."""
    names = ("preexec_fn", "close_fds", "pass_fds", "cwd", "env", "startupinfo", "flags", "shell")
    files = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
    given = dict(zip((*names, *files), rest[:14], strict=True))
    start_new_session = rest[-2]
    what = None if given["shell"] or given["preexec_fn"] else python_of(args)
    if what is None:
        START(self, args, executable, *rest)
        return
    ends = [given[name] for name in ("p2cread", "c2pwrite", "errwrite")]
    self.pid = os.fork()
    if self.pid == 0:
        code = 1
        try:
            if start_new_session:
                os.setsid()
            code = be_fresh(what, ends, given["pass_fds"], given["cwd"], given["env"])
        finally:
            os._exit(code)
    self._child_created = True
    self._close_pipe_fds(*rest[8:14])


def python_of(args: Any) -> Callable[[], None] | None:
    """Return what an interpreter would run, if arguments start one in a way that is known here."""
    if isinstance(args, (str, bytes, os.PathLike)):
        return None
    words = [os.fsdecode(word) for word in args]
    if words[:1] != [sys.executable]:
        return None
    rest = [word for index, word in enumerate(words[1:]) if not (index == 0 and word == "-u")]
    if rest[:1] == ["-m"] and len(rest) > 1:
        return lambda: run_module(rest[1], rest[2:])
    if rest and not rest[0].startswith("-"):
        return lambda: run_script(rest[0], rest[1:])
    return None


def run_module(name: str, arguments: Sequence[str]) -> None:
    """Run a module as ``python -m`` does."""
    sys.argv = [name, *arguments]
    sys.path.insert(0, str(Path.cwd()))
    runpy.run_module(name, run_name="__main__", alter_sys=True)


def run_script(path: str, arguments: Sequence[str]) -> None:
    """Run a script as ``python`` does."""
    sys.argv = [path, *arguments]
    text = Path(path).read_bytes()
    sys.path.insert(0, str(Path(path).resolve().parent))
    module = sys.modules["__main__"] = ModuleType("__main__")
    module.__file__ = path
    exec(compile(text, path, "exec"), module.__dict__)


def be_fresh(
    what: Callable[[], None],
    ends: Sequence[int],
    kept: Sequence[int],
    folder: Any,
    environment: dict[str, str] | None,
) -> int:
    """Run something in this process as if it had begun with that; return the exit code."""
    gc.freeze()  # nothing of the parent's is to be closed later, when its number is another file's
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number, end in enumerate(ends):
        if end not in (-1, number):
            os.dup2(end, number)
        os.set_inheritable(number, True)
    bounds = [2, *sorted(number for number in kept if number > 2), MOST_FILES]
    for before, after in pairwise(bounds):
        os.closerange(before + 1, after)
    if folder is not None:
        os.chdir(folder)
    if environment is not None:
        os.environ.clear()
        os.environ.update(environment)
    buffering = 1 if os.environ.get("PYTHONUNBUFFERED") else -1
    # A thread of the parent may have been reading: the lock of its file would be waited for here
    # for ever, when the file goes.
    KEPT.extend((sys.stdin, sys.__stdin__, sys.stdout, sys.__stdout__, sys.stderr, sys.__stderr__))
    sys.stdin = sys.__stdin__ = os.fdopen(0, closefd=False)
    sys.stdout = sys.__stdout__ = os.fdopen(1, "w", buffering, closefd=False)
    sys.stderr = sys.__stderr__ = os.fdopen(2, "w", 1, closefd=False)
    random.seed()
    sys.modules["torch"].seed()
    return code_of(what)


def code_of(what: Callable[[], None]) -> int:
    """Run something that ends this process; return the exit code."""
    code: object = 0
    try:
        what()
    except SystemExit as stop:
        code = stop.code
        if isinstance(code, str):
            sys.stderr.write(f"{code}\n")
    except KeyboardInterrupt:  # ends as an interpreter does: by the signal itself
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    except BaseException:  # noqa: BLE001 (a process border)
        traceback.print_exc()
        code = 1
    atexit._run_exitfuncs()
    with suppress(OSError):  # said by the command, if its output cannot be written
        sys.stdout.flush()
    sys.stderr.flush()
    return code if isinstance(code, int) else int(code is not None)


def run(request: dict) -> int:
    """Run a request in this process, which ends with it; return the exit code."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.setsid()
    # A shell that starts tests in the background lets them ignore it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])
    for number, name in enumerate((os.devnull, request["out"], request["err"])):
        flags = os.O_RDONLY if number == 0 else os.O_WRONLY | os.O_CREAT | os.O_TRUNC
        opened = os.open(name, flags)
        os.dup2(opened, number)
        os.close(opened)
    if os.environ.get("PYTHONUNBUFFERED"):
        sys.stdout.reconfigure(write_through=True)
    if not os.environ.get("FRESH"):
        start_warm()
    if steps := os.environ.get("PARTITA_TEST_STEPS"):
        planner = sys.modules["partita.planners.auto.planner"]
        planner.USUAL_STEPS, planner.FEWEST_STEPS = int(steps), 4
    text, arguments = request["python"], request["arguments"]
    sys.argv = ["partita" if text is None else "-c", *arguments]
    if text is None:
        return code_of(lambda: sys.modules["partita.cli.main"].main(arguments))
    sys.path.insert(0, request["folder"])
    module = sys.modules["__main__"] = ModuleType("__main__")
    return code_of(lambda: exec(compile(text, "<string>", "exec"), module.__dict__))


def write_codes(running: dict[int, Path]) -> None:
    """Write the exit codes of the processes that have ended, each to its file."""
    for child, file in list(running.items()):
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            whole = file.with_suffix(".part")
            whole.write_text(str(os.waitstatus_to_exitcode(status)))
            whole.rename(file)
            del running[child]


def fork(request: dict, own: Sequence[int]) -> int:
    """Run a request in a process without this one's own files; return the number of that."""
    child = os.fork()
    if child == 0:
        signal.set_wakeup_fd(-1)
        for file in own:
            os.close(file)
        os._exit(run(request))
    return child


def main() -> None:
    """Serve requests until there are no more."""
    listening = socket.socket(fileno=int(sys.argv[1]))
    wakes, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # it ends with those whom it serves
    ready = selectors.DefaultSelector()
    for file in (0, wakes, listening):
        ready.register(file, selectors.EVENT_READ)
    connections: dict[socket.socket, Any] = {}
    running: dict[int, Path] = {}
    is_warm = "--now" in sys.argv
    if is_warm:
        warm_up()
    while True:
        for key, _ in ready.select():
            if key.fileobj == 0:  # nothing is ever written there
                return
            if key.fileobj == wakes:
                os.read(wakes, 4096)
                write_codes(running)
            elif key.fileobj is listening:
                connection, _ = listening.accept()
                connections[connection] = connection.makefile("rw", encoding="utf-8")
                ready.register(connection, selectors.EVENT_READ)
            else:
                words = connections[key.fileobj]
                line = words.readline()  # one at a time: the next comes after the answer
                if not line:
                    ready.unregister(key.fileobj)
                    words.close()
                    connections.pop(key.fileobj).close()
                    key.fileobj.close()
                    continue
                if not is_warm:
                    warm_up()
                    is_warm = True
                request = json.loads(line)
                others = (file.fileno() for file in (ready, listening, *connections))
                child = fork(request, [wakes, wake, *others])
                running[child] = Path(request["code"])
                words.write(f"{child}\n")
                words.flush()


if __name__ == "__main__":
    main()
