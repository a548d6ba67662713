"""Ranks on this machine, forked from a process that has everything ready.

Forking takes milliseconds where a fresh interpreter that imports torch takes seconds, and what the
parent has prepared is shared. It is for tests, emulation and small local runs on CPUs. The parent
must have one thread and must not have computed with several (``why_not_fork``).

Ranks die with their parent. A rank that dies, fails or stands still ends the pool, and the error
names it and what every rank was doing.
"""

import io
import math
import os
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import Any, NoReturn, TypeAlias

import torch
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]  # not in stubs

from partita.errors import PartitaError, WorkerError
from partita.processes import die_with_parent, machine_cores, redirect_output
from partita.runtime.allocator import keep_freed_memory
from partita.runtime.board import STALE_S, Board, Phase, View
from partita.runtime.device_parts import Place
from partita.runtime.failures import Failure, as_partita_error, error_of, first_cause
from partita.runtime.process_transport import Member, first_line
from partita.runtime.rank import warm_up_autograd

Main: TypeAlias = Callable[[Member, Any], Any]
"""What a rank does with a request; returns its answer."""

_GRACE_S = 3.0
_LOOK_S = 0.2


def why_not_fork() -> str:
    """Return why this process cannot fork ranks; empty if it can."""
    if not sys.platform.startswith("linux"):
        return "ranks are forked on Linux only"
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]  # torch has no types for it
        return "this process uses a GPU"
    if torch.get_num_threads() > 1:
        return f"torch may compute with {torch.get_num_threads()} threads here"
    threads = len(list(Path("/proc/self/task").iterdir()))
    if threads > 1:
        return f"this process has {threads} threads"
    return ""


_ALLOWED_THREADS = torch.get_num_threads()
"""Threads that torch begins with: the machine's cores, or what ``OMP_NUM_THREADS`` says."""


def limit_threads(ranks: int) -> int:
    """Let torch compute with as many threads as each of some ranks here may have.

    More than the cores' share makes all of them slower, up to ten times; no more than the user
    allows by ``OMP_NUM_THREADS``.
    """
    threads = max(1, min(_ALLOWED_THREADS, machine_cores() // ranks))
    torch.set_num_threads(threads)
    return threads


@dataclass(slots=True)
class _Worker:
    rank: int
    pid: int
    pipe: Connection
    log: Path
    exit_code: int | None = None
    error: PartitaError | None = None

    def has_ended(self) -> bool:
        """Return whether the process is gone, and keep how it ended."""
        if self.exit_code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.exit_code = os.waitstatus_to_exitcode(status)
        return self.exit_code is not None

    def kill(self) -> None:
        """End the process."""
        if not self.has_ended():
            os.kill(self.pid, signal.SIGKILL)
            _, status = os.waitpid(self.pid, 0)
            self.exit_code = os.waitstatus_to_exitcode(status)


class RankPool:
    """Ranks that answer requests, all of them at a time."""

    def __init__(
        self,
        world: int,
        main: Main,
        *,
        limit_s: float = 300.0,
        stall_limit_s: float | None = None,
        board: Board | None = None,
        log_directory: Path | None = None,
    ) -> None:
        """Fork the ranks and let them meet.

        Args:
            world: Number of ranks.
            main: What they do; everything that it refers to is shared.
            limit_s: How long they may wait for one another.
            stall_limit_s: How long one may show no sign of life on the board; ``limit_s`` if not
                given.
            board: Where they say what they are doing.
            log_directory: Where what they print goes; a temporary one if not given.

        Raises:
            WorkerError: They did not meet.
        """
        self.board = Board(world) if board is None else board
        self._silence_s = (limit_s if stall_limit_s is None else stall_limit_s) + STALE_S
        self._scratch = None if log_directory else tempfile.TemporaryDirectory(prefix="partita-")
        logs = log_directory or Path(self._scratch.name)  # type: ignore[union-attr]  # one is there
        self._workers: list[_Worker] = []
        self._view: View | None = None
        self._ended_by = ""
        warm_up_autograd()
        try:
            with socket.create_server(("127.0.0.1", 0)) as listener:
                for rank in range(world):
                    birth = _Birth(rank, world, limit_s, listener, logs / f"rank{rank}.log")
                    self._workers.append(self._fork(birth, main))
            self._collect(limit_s + _GRACE_S)
        except BaseException as exc:
            self._end_by(exc)
            raise

    def _fork(self, birth: "_Birth", main: Main) -> _Worker:
        ours, theirs = Pipe()
        sys.stdout.flush()
        sys.stderr.flush()
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            code = WorkerError.exit_code
            try:
                # Nothing may ever return into what the parent was doing.
                die_with_parent(parent)
                for pipe in (ours, *(worker.pipe for worker in self._workers)):
                    pipe.close()
                code = _be_rank(birth, theirs, main, self.board)
            finally:
                os._exit(code)
        theirs.close()
        return _Worker(birth.rank, pid, ours, birth.log)

    @property
    def pids(self) -> list[int]:
        """The process of each rank."""
        return [worker.pid for worker in self._workers]

    def call(
        self,
        request: object,
        *,
        limit_s: float | None = None,
        told: Callable[[int, Any], None] = lambda _, __: None,
        view: View | None = None,
    ) -> list[Any]:
        """Return the answers of all ranks to a request, by rank.

        Args:
            request: Anything that can be pickled.
            limit_s: How long it may take; no limit if not given, as a rank that stands still ends
                by itself.
            told: Told a rank and what it says on the way.
            view: What can be seen of what they run; says who is to blame, and what they were doing.

        Raises:
            WorkerError: A rank failed or died; the pool is closed then.
        """
        if self._ended_by:
            raise WorkerError(f"the ranks have ended: {self._ended_by}; start new ones")
        self._view = view
        try:
            message = _pack(request)
            for worker in self._workers:
                with suppress(OSError):  # its end is seen, and explained, below
                    worker.pipe.send_bytes(message)
            return self._collect(limit_s, told)
        except BaseException as exc:  # the answers that are still to come must not be mixed up
            self._end_by(exc)
            raise

    def _end_by(self, exc: BaseException) -> None:
        self.close(kill=True)
        self._ended_by = first_line(exc)

    def _collect(
        self, limit_s: float | None, told: Callable[[int, Any], None] = lambda _, __: None
    ) -> list[Any]:
        deadline = math.inf if limit_s is None else time.monotonic() + limit_s
        answers: dict[int, Any] = {}
        while len(answers) < len(self._workers):
            waiting = {w.pipe: w for w in self._workers if w.rank not in answers}
            left_s = max(0.0, deadline - time.monotonic())
            ready = wait(list(waiting), timeout=min(left_s, _LOOK_S))
            for pipe in ready:
                assert isinstance(pipe, Connection)
                worker = waiting[pipe]
                kind, value = _receive(worker)
                if kind == "told":
                    told(worker.rank, value)
                elif kind == "done":
                    answers[worker.rank] = value
                else:
                    self._refuse(worker)
            if not ready:
                self._look(list(waiting.values()))
                if not left_s:
                    silent = ", ".join(str(worker.rank) for worker in waiting.values())
                    failure = WorkerError(f"no answer of rank {silent} in {limit_s:g} s")
                    raise self._explained(Failure(rank=-1, error=failure))
        return [answers[worker.rank] for worker in self._workers]

    def _look(self, waiting: Sequence[_Worker]) -> None:
        """Look whether one of the ranks has ended or stands still without a word."""
        for worker in waiting:
            if worker.has_ended() and not worker.pipe.poll():
                self._refuse(worker)
        frozen = self.board.frozen([worker.rank for worker in waiting], self._silence_s)
        if frozen:
            silent = f"rank {frozen[0]} shows no sign of life"
            who = self._view.stands_still(frozen[0]) if self._view else silent
            raise self._explained(Failure(rank=frozen[0], error=WorkerError(who)))

    def _refuse(self, first: _Worker) -> NoReturn:
        """Raise the error of a rank that has failed, or of the one that it has lost.

        The others are given a moment to fail as well: the one that failed first of its own may be
        heard last.
        """
        who = self._view.culprit() if self._view else ""
        seen = [first]
        deadline = time.monotonic() + _GRACE_S / 3
        while time.monotonic() < deadline and not any(_failure(w).is_own for w in seen):
            for worker in self._workers:
                if worker not in seen and (_has_failed(worker) or worker.has_ended()):
                    seen.append(worker)
            if all(worker in seen for worker in self._workers):
                break
            time.sleep(0.01)
        while not first.has_ended() and time.monotonic() < deadline:
            time.sleep(0.01)
        raise self._explained(first_cause([_failure(worker) for worker in seen]), who)

    def _explained(self, failure: Failure, culprit: str = "") -> PartitaError:
        where = self._view.where(failure.rank) if self._view and failure.rank >= 0 else ""
        stands = self._view.all() if self._view else ""
        return error_of(failure, culprit=culprit, where=where, stands=stands)

    def close(self, *, kill: bool = False) -> None:
        """End the ranks: these processes and no others."""
        for worker in self._workers:
            worker.pipe.close()
        deadline = time.monotonic() + _GRACE_S
        for worker in self._workers:
            while not kill and not worker.has_ended() and time.monotonic() < deadline:
                time.sleep(0.005)
            worker.kill()
        self._ended_by = self._ended_by or "the pool was closed"
        if self._scratch is not None:
            self._scratch.cleanup()

    def __enter__(self) -> "RankPool":
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self.close(kill=kind is not None)


@dataclass(frozen=True, slots=True)
class _Birth:
    """What a new rank is told."""

    rank: int
    world: int
    limit_s: float
    listener: socket.socket
    log: Path


def _be_rank(birth: _Birth, pipe: Connection, main: Main, board: Board) -> int:
    """Answer requests until the parent closes the pipe; returns the exit code."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends its ranks itself
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    code = 0
    try:
        redirect_output(birth.log)
        member = _meet(birth, pipe)
        _stand(birth.rank, board, Phase.IDLE)
        pipe.send_bytes(_pack(("done", None)))
        while True:
            try:
                request = _unpack(pipe.recv_bytes())
            except EOFError:
                break
            _stand(birth.rank, board, Phase.IDLE)
            answer = main(member, request)
            _stand(birth.rank, board, Phase.ENDED)
            pipe.send_bytes(_pack(("done", answer)))
    except BaseException as exc:  # noqa: BLE001 (a process border: the parent raises it)
        traceback.print_exc()
        error = as_partita_error(birth.rank, exc)
        code = error.exit_code
        with suppress(OSError):  # the parent may have closed the pipe because of another rank
            pipe.send_bytes(_pack(("error", error)))
    sys.stdout.flush()
    sys.stderr.flush()
    return code


def _stand(rank: int, board: Board, phase: Phase) -> None:
    """Say that a rank has not begun, or has ended, what it was asked for."""
    board.write(rank, Place(-1, -1, time.perf_counter_ns()), -1, phase=phase, pid=os.getpid())


def _receive(worker: _Worker) -> tuple[str, Any]:
    """Return what a rank says; an error is kept with it."""
    try:
        kind, value = _unpack(worker.pipe.recv_bytes())
    except (EOFError, OSError):
        return "gone", None
    if kind == "error":
        worker.error = value
    return kind, value


def _has_failed(worker: _Worker) -> bool:
    """Return whether a rank has said that it failed; what else it says is let go."""
    while worker.error is None and worker.pipe.poll():
        if _receive(worker)[0] == "gone":
            break
    return worker.error is not None


def _failure(worker: _Worker) -> Failure:
    return Failure(
        rank=worker.rank, exit_code=worker.exit_code, error=worker.error, log=worker.log
    )  # fmt: skip


def _meet(birth: _Birth, pipe: Connection) -> Member:
    """Open the store on the port that the parent has taken, and join the group."""
    torch.set_num_threads(1)
    keep_freed_memory()
    port = birth.listener.getsockname()[1]
    timeout = timedelta(seconds=birth.limit_s)
    if birth.rank == 0:
        descriptor = os.dup(birth.listener.fileno())
        store = TCPStore(
            "127.0.0.1",
            port,
            is_master=True,
            wait_for_workers=False,
            timeout=timeout,
            master_listen_fd=descriptor,
        )
    else:
        birth.listener.close()
        store = TCPStore(
            "127.0.0.1", port, is_master=False, wait_for_workers=False, timeout=timeout
        )
    member = Member(
        rank=birth.rank,
        world=birth.world,
        store=PrefixStore("pool", store),
        limit_s=birth.limit_s,
        tell=lambda value: pipe.send_bytes(_pack(("told", value))),
    )
    member.join()
    return member


def _pack(value: object) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def _unpack(data: bytes) -> Any:  # noqa: ANN401  # whatever was packed
    return torch.load(io.BytesIO(data), weights_only=False)
