"""One function over many inputs: in processes of this machine, or on a Ray.

Results come in the order of the inputs and are those of this process bit for bit: the same code
runs on the same numbers, and nothing is shared. Functions and inputs travel by pickle, so a
function stands at the top of a module, or is a ``functools.partial`` of one.
"""

import copyreg
import io
import itertools
import os
import pickle
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from types import MappingProxyType
from typing import Any, Protocol, TypeVar

from partita.errors import InvalidInputError, WorkerError
from partita.processes import die_with_parent, how_it_ended, job_environment
from partita.ray_link import connected_ray

_T = TypeVar("_T")
_R = TypeVar("_R")
_MOST = 1024
_SIZE_BYTES = 8


class Workers(Protocol):
    """What works.

    Attributes:
        size: How many inputs are worked on at a time.
    """

    size: int

    def map(self, function: Callable[[_T], _R], items: Iterable[_T]) -> Iterator[_R]:
        """Yield what a function makes of each input, in their order.

        Raises:
            PartitaError: What the function raises.
            WorkerError: A worker has died.
        """
        ...


def check_workers(text: str) -> None:
    """Check what names workers: a number, ``ray`` or ``ray:ADDRESS``.

    Raises:
        InvalidInputError: It names none.
    """
    if text.partition(":")[0] == "ray":
        return
    if not text.isdecimal() or not 1 <= int(text) <= _MOST:
        raise InvalidInputError(f"--workers {text!r}; expected 1 to {_MOST}, or ray[:ADDRESS]")


@contextmanager
def open_workers(text: str) -> Iterator[Workers]:
    """Yield workers by their name; they end with the block.

    Raises:
        InvalidInputError: There are none of that name.
        UnsupportedError: There is no Ray.
    """
    check_workers(text)
    if text.isdecimal():
        with _Processes(int(text)) as processes:
            yield processes
    else:
        with connected_ray(text.partition(":")[2], noun="--workers ray") as ray:
            yield _OnRay(ray)


class _Processes:
    """Processes of this machine, each with a thread here that waits for it."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._threads = ThreadPoolExecutor(size, "worker")
        self._own = threading.local()
        self._all: list[_Process] = []

    def __enter__(self) -> "_Processes":
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._all:
            process.end()
        self._threads.shutdown(cancel_futures=True)  # they see the end of what they wait for
        for process in self._all:
            process.close()

    def map(self, function: Callable[[_T], _R], items: Iterable[_T]) -> Iterator[_R]:
        """Yield what a function makes of each input; a few are worked on ahead."""
        source = iter(items)
        waiting: deque[Future[_R]] = deque()
        for item in itertools.islice(source, 2 * self.size):
            waiting.append(self._threads.submit(self._work, function, item))
        while waiting:
            yield waiting.popleft().result()
            for item in itertools.islice(source, 1):
                waiting.append(self._threads.submit(self._work, function, item))

    def _work(self, function: Callable[[_T], _R], item: _T) -> _R:
        if not hasattr(self._own, "process"):
            self._own.process = _Process()
            self._all.append(self._own.process)
        found: _R = self._own.process.call(function, item)
        return found


class _Process:
    """A worker of this machine."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "partita.workers", str(os.getpid())],
            env=job_environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )

    def call(self, function: Callable[[Any], Any], item: Any) -> Any:  # noqa: ANN401 (any input)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            packed = _packed((function, item))
            self._process.stdin.write(len(packed).to_bytes(_SIZE_BYTES) + packed)
            self._process.stdin.flush()
            is_well, answer = pickle.load(self._process.stdout)
        except (OSError, EOFError, pickle.UnpicklingError, ValueError) as exc:
            how = how_it_ended(self._process.wait())
            raise WorkerError(f"a worker {how} while it worked on {function}") from exc
        if not is_well:
            raise answer
        return answer

    def end(self) -> None:
        """End it, also while it works."""
        self._process.kill()
        self._process.wait()

    def close(self) -> None:
        """Close the way to it, once nobody waits for it."""
        for stream in (self._process.stdin, self._process.stdout):
            assert stream is not None
            with suppress(BrokenPipeError, ValueError):
                stream.close()


class _OnRay:
    """Tasks of a Ray, as many at a time as it has CPUs."""

    def __init__(self, ray: Any) -> None:  # noqa: ANN401 (an optional package)
        self._ray = ray
        self.size = max(1, int(ray.cluster_resources().get("CPU", 1)))

    def map(self, function: Callable[[_T], _R], items: Iterable[_T]) -> Iterator[_R]:
        """Yield what a function makes of each input; a few are worked on ahead."""
        task, source = self._ray.remote(_call), iter(items)
        waiting: deque[Any] = deque()
        for item in itertools.islice(source, 2 * self.size):
            waiting.append(task.remote(_packed((function, item))))
        while waiting:
            is_well, answer = pickle.loads(self._ray.get(waiting.popleft()))
            if not is_well:
                raise answer
            yield answer
            for item in itertools.islice(source, 1):
                waiting.append(task.remote(_packed((function, item))))


def _call(packed: bytes) -> bytes:
    """Return whether a function succeeds on an input, and its result or what it raised; packed."""
    function, item = pickle.loads(packed)
    try:
        return _packed((True, function(item)))
    except Exception as exc:  # noqa: BLE001 (a process border: it is raised where it was asked)
        return _packed((False, exc))


def _view_of(values: dict[Any, Any]) -> MappingProxyType[Any, Any]:
    """Return a view of a mapping; the type itself has no name that pickle finds."""
    return MappingProxyType(values)


def _packed(value: object) -> bytes:
    """Return a value as bytes; our types hold views of mappings, which pickle alone refuses."""
    buffer = io.BytesIO()
    pickler = pickle.Pickler(buffer)
    pickler.dispatch_table = {
        **copyreg.dispatch_table,
        MappingProxyType: lambda view: (_view_of, (dict(view),)),
    }
    pickler.dump(value)
    return buffer.getvalue()


def main() -> None:
    """Work on what standard input says until there is no more."""
    die_with_parent(int(sys.argv[1]))
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what is printed must not be among the answers
    while True:
        size = int.from_bytes(sys.stdin.buffer.read(_SIZE_BYTES))
        if not size:
            return
        answers.write(_call(sys.stdin.buffer.read(size)))
        answers.flush()


if __name__ == "__main__":
    main()
