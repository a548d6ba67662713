"""Ranks on this machine: started, watched, asked and ended together.

They are forked from a process that has everything ready, or fresh. Forking takes milliseconds where
a fresh interpreter that imports torch takes seconds, and what the parent has prepared is shared; it
is for CPUs, and the parent must have one thread and must not have computed with several
(``why_not_fork``). A fresh rank gets what it does, and what it is asked, by pickle.

Ranks die with their parent. A rank that dies, fails or stands still ends the pool, and the error
names it and what every rank was doing.
"""

import io
import math
import os
import pickle
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
from multiprocessing import get_context
from multiprocessing.connection import Connection, Pipe, wait
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any, NoReturn, Protocol, TypeAlias

import torch
from torch.distributed import (  # type: ignore[attr-defined]  # not in its stubs
    PrefixStore,
    Store,
    TCPStore,
)

from partita.errors import PartitaError, WorkerError
from partita.processes import STOP_SIGNALS, die_with_parent, redirect_output
from partita.ranks.failures import (
    Failure,
    PeerError,
    as_partita_error,
    error_of,
    first_cause,
    first_line,
)
from partita.ranks.member import Member
from partita.ranks.setup import keep_freed_memory, warm_up_autograd
from partita.ranks.status import STALE_S, Phase, Place, StatusBoard

Main: TypeAlias = Callable[[Member, Any], Any]
"""What a rank does with a request; returns its answer."""
OnMessage: TypeAlias = Callable[[int, Any], None]
"""Called with a rank and a message that it sends on the way."""

_GRACE_S = 3.0
_LOOK_S = 0.2


class View(Protocol):
    """What can be seen of the ranks from outside, for errors."""

    def where(self, rank: int) -> str:
        """Return where a rank stands."""
        ...

    def all(self) -> str:
        """Return what every rank is doing, a line each; empty = nothing is known."""
        ...

    def stands_still(self, rank: int) -> str:
        """Return that a rank shows no sign of life, and where it stands."""
        ...

    def culprit(self) -> str:
        """Return which rank holds up the others; empty if none can be told."""
        ...


@dataclass(slots=True)
class _Worker:
    """A rank's process, as the pool sees it; ``process`` is None for a forked one."""

    rank: int
    pid: int
    pipe: Connection
    log: Path
    process: SpawnProcess | None = None
    exit_code: int | None = None
    error: PartitaError | None = None

    def has_ended(self) -> bool:
        """Return whether the process is gone, and keep how it ended."""
        if self.exit_code is not None:
            return True
        if self.process is not None:  # multiprocessing waits for its own children
            self.exit_code = self.process.exitcode
        else:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.exit_code = os.waitstatus_to_exitcode(status)
        return self.exit_code is not None

    def kill(self) -> None:
        """End the process."""
        if self.has_ended():
            return
        os.kill(self.pid, signal.SIGKILL)
        if self.process is not None:
            self.process.join()
            self.exit_code = self.process.exitcode
        else:
            _, status = os.waitpid(self.pid, 0)
            self.exit_code = os.waitstatus_to_exitcode(status)


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """How ranks are started.

    Attributes:
        fork: Whether they are forked from this process, or fresh.
        joins: Whether they are made ready to train: a thread each, and one process group of all.
            Otherwise they share a store, and the rest is their own business.
        limit_s: How long fresh ones may take until they begin to wait for one another.
    """

    fork: bool = True
    joins: bool = True
    limit_s: float = 0.0


class RankPool:
    """Ranks that answer requests, all of them at a time."""

    def __init__(
        self,
        world: int,
        main: Main,
        *,
        start: "Start | None" = None,
        limit_s: float = 300.0,
        stall_limit_s: float | None = None,
        board: StatusBoard | None = None,
        log_directory: Path | None = None,
    ) -> None:
        """Start the ranks and let them meet.

        Args:
            world: Number of ranks.
            main: What they do. Forked ranks share everything that it refers to; for fresh ones it
                must be a function of a module, or a partial of one.
            start: How they are started; forked and ready to train if not given.
            limit_s: How long they may wait for one another.
            stall_limit_s: How long one may show no sign of life on the board; ``limit_s`` if not
                given.
            board: Where they say what they are doing.
            log_directory: Where what they print goes; a temporary one if not given.

        Raises:
            WorkerError: They did not meet.
        """
        start = Start() if start is None else start
        self._silence_s = (limit_s if stall_limit_s is None else stall_limit_s) + STALE_S
        self._scratch = tempfile.TemporaryDirectory(prefix="partita-")
        scratch = Path(self._scratch.name)
        logs = log_directory or scratch
        if board is None:  # fresh processes share a file, forked ones memory
            board = StatusBoard(world, None if start.fork else scratch / "board")
        self.board = board
        self._workers: list[_Worker] = []
        self._view: View | None = None
        self._ended_by = ""
        if start.fork and start.joins:
            warm_up_autograd()
        begin = self._fork if start.fork else self._spawn
        try:
            with socket.create_server(("127.0.0.1", 0)) as listener:
                for rank in range(world):
                    log = logs / f"rank{rank}.log"
                    birth = _Birth(rank, world, limit_s, listener, log, os.getpid(), start.joins)
                    self._workers.append(begin(birth, main))
            self._collect(start.limit_s + limit_s + _GRACE_S)
        except BaseException as exc:
            self._end_by(exc)
            raise

    def _fork(self, birth: "_Birth", main: Main) -> _Worker:
        ours, theirs = Pipe()
        sys.stdout.flush()
        sys.stderr.flush()
        pid = os.fork()
        if pid == 0:
            code = WorkerError.exit_code
            try:
                # Nothing may ever return into what the parent was doing.
                die_with_parent(birth.parent)
                for pipe in (ours, *(worker.pipe for worker in self._workers)):
                    pipe.close()
                code = _be_rank(birth, theirs, main, self.board)
            finally:
                os._exit(code)
        theirs.close()
        return _Worker(birth.rank, pid, ours, birth.log)

    def _spawn(self, birth: "_Birth", main: Main) -> _Worker:
        context = get_context("spawn")
        ours, theirs = context.Pipe()
        process = context.Process(
            target=_be_fresh_rank, args=(birth, theirs, main, self.board), daemon=True
        )
        process.start()
        theirs.close()
        assert process.pid is not None  # it was started
        return _Worker(birth.rank, process.pid, ours, birth.log, process)

    @property
    def pids(self) -> list[int]:
        """The process of each rank."""
        return [worker.pid for worker in self._workers]

    def call(
        self,
        request: object,
        *,
        limit_s: float | None = None,
        on_message: OnMessage = lambda _, __: None,
        on_look: Callable[[], None] = lambda: None,
        view: View | None = None,
    ) -> list[Any]:
        """Return the answers of all ranks to a request, by rank.

        Args:
            request: Anything that can be pickled.
            limit_s: How long it may take; no limit if not given, as a rank that stands still ends
                by itself.
            on_message: Called with a rank and each message that it sends on the way; also with
                those that a rank had sent before it, or another one, failed.
            on_look: Called a few times a second while they are waited for.
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
            return self._collect(limit_s, on_message, on_look)
        except BaseException as exc:  # the answers that are still to come must not be mixed up
            self._end_by(exc, on_message)
            raise

    def _end_by(self, exc: BaseException, on_message: OnMessage | None = None) -> None:
        if on_message is not None and isinstance(exc, WorkerError):
            # All end first: what one of them says after this may be in nobody's record.
            for worker in self._workers:
                worker.kill()
            for worker in self._workers:
                _hear_out(worker, on_message)
        self.close(kill=True)
        self._ended_by = first_line(exc)

    def _collect(
        self,
        limit_s: float | None,
        on_message: OnMessage = lambda _, __: None,
        on_look: Callable[[], None] = lambda: None,
    ) -> list[Any]:
        looked_s = time.monotonic()
        deadline = math.inf if limit_s is None else time.monotonic() + limit_s
        answers: dict[int, Any] = {}
        while len(answers) < len(self._workers):
            waiting = {w.pipe: w for w in self._workers if w.rank not in answers}
            left_s = max(0.0, deadline - time.monotonic())
            ready = wait(list(waiting), timeout=min(left_s, _LOOK_S))
            if time.monotonic() - looked_s >= _LOOK_S:
                looked_s = time.monotonic()
                on_look()
            for pipe in ready:
                assert isinstance(pipe, Connection)
                worker = waiting[pipe]
                kind, value = _receive(worker)
                if kind == "message":
                    on_message(worker.rank, value)
                elif kind == "done":
                    answers[worker.rank] = value
                else:
                    self._refuse(worker, on_message)
            if not ready:
                self._look(list(waiting.values()), on_message)
                if not left_s:
                    late = ", ".join(self._late(worker.rank) for worker in waiting.values())
                    failure = WorkerError(f"no answer of {late} in {limit_s:g} s")
                    raise self._explained(Failure(rank=-1, error=failure))
        return [answers[worker.rank] for worker in self._workers]

    def _late(self, rank: int) -> str:
        return f"rank {rank} {self._view.where(rank) if self._view else ''}".rstrip()

    def _look(self, waiting: Sequence[_Worker], on_message: OnMessage) -> None:
        """Look whether one of the ranks has ended or stands still without a word."""
        for worker in waiting:
            if worker.has_ended() and not worker.pipe.poll():
                self._refuse(worker, on_message)
        frozen = self.board.frozen([worker.rank for worker in waiting], self._silence_s)
        if frozen:
            silent = f"rank {frozen[0]} shows no sign of life"
            who = self._view.stands_still(frozen[0]) if self._view else silent
            raise self._explained(Failure(rank=frozen[0], error=WorkerError(who)))

    def _refuse(self, first: _Worker, on_message: OnMessage) -> NoReturn:
        """Raise the error of a rank that has failed, or of the one that it has lost.

        The others are given a moment to fail as well: the one that failed first of its own may be
        heard last.
        """
        who = self._view.culprit() if self._view else ""
        seen = [first]
        deadline = time.monotonic() + _GRACE_S / 3
        while time.monotonic() < deadline and not any(_failure(w).is_own for w in seen):
            for worker in self._workers:
                if worker not in seen:
                    _hear_out(worker, on_message)
                    if worker.error is not None or worker.has_ended():
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
        self._scratch.cleanup()

    def __enter__(self) -> "RankPool":
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self.close(kill=kind is not None)


@dataclass(frozen=True, slots=True)
class _Birth:
    """What a new rank must know: see ``RankPool``; the store listens where the parent did."""

    rank: int
    world: int
    limit_s: float
    listener: socket.socket
    log: Path
    parent: int
    joins: bool


def _be_fresh_rank(birth: _Birth, pipe: Connection, main: Main, board: StatusBoard) -> None:
    """Be a rank in a process that has just started."""
    code = WorkerError.exit_code
    try:
        die_with_parent(birth.parent)
        code = _be_rank(birth, pipe, main, board)
    finally:
        os._exit(code)


def _be_rank(birth: _Birth, pipe: Connection, main: Main, board: StatusBoard) -> int:
    """Answer requests until the parent closes the pipe; returns the exit code."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends its ranks itself
    for number in STOP_SIGNALS:  # a scheduler may send them to all processes of a job
        signal.signal(number, signal.SIG_IGN)
    if sys.platform.startswith("linux"):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # gloo would resolve the host's name
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


def _stand(rank: int, board: StatusBoard, phase: Phase) -> None:
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


def _hear_out(worker: _Worker, on_message: OnMessage) -> None:
    """Take what a rank has said so far: that it failed, or messages, which are passed on."""
    with suppress(OSError):
        while worker.error is None and worker.pipe.poll():
            kind, value = _receive(worker)
            if kind == "message":
                on_message(worker.rank, value)
            elif kind == "gone":
                break


def _failure(worker: _Worker) -> Failure:
    return Failure(
        rank=worker.rank, exit_code=worker.exit_code, error=worker.error, log=worker.log
    )  # fmt: skip


def _meet(birth: _Birth, pipe: Connection) -> Member:
    """Open the store, and join the group of all ranks if there is to be one."""
    if birth.joins:
        torch.set_num_threads(1)
        keep_freed_memory()
    member = Member(
        rank=birth.rank,
        world=birth.world,
        store=PrefixStore("pool", _open_store(birth)),
        limit_s=birth.limit_s,
        notify=lambda value: pipe.send_bytes(_pack_small(("message", value))),
    )
    if birth.joins:
        member.join()
    return member


def _open_store(birth: _Birth) -> Store:
    """Return the store that all ranks share, on the port that the parent has taken."""
    port = birth.listener.getsockname()[1]
    timeout = timedelta(seconds=birth.limit_s)
    if birth.rank == 0:
        return TCPStore(
            "127.0.0.1",
            port,
            is_master=True,
            wait_for_workers=False,
            timeout=timeout,
            master_listen_fd=os.dup(birth.listener.fileno()),
        )
    birth.listener.close()
    try:
        return TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False, timeout=timeout)
    except RuntimeError as exc:
        raise PeerError(
            f"rank {birth.rank}: nothing from rank 0 within {birth.limit_s:g} s"
        ) from exc


_SMALL, _LARGE = b"s", b"l"
"""How a message begins: pickled, as news of every step are, or by torch, which copies no tensor
twice but takes a hundred times as long for a few numbers."""


def _pack(value: object) -> bytes:
    buffer = io.BytesIO(_LARGE)
    buffer.seek(1)
    torch.save(value, buffer)
    return buffer.getvalue()


def _pack_small(value: object) -> bytes:
    return _SMALL + pickle.dumps(value)


def _unpack(data: bytes) -> Any:  # noqa: ANN401  # whatever was packed
    if data[:1] == _SMALL:
        return pickle.loads(data[1:])
    return torch.load(io.BytesIO(data[1:]), weights_only=False)
