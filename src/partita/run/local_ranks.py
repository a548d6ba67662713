"""Ranks on this machine, forked from a process that has everything ready.

Forking takes milliseconds where a fresh interpreter that imports torch takes seconds, and what the
parent has prepared is shared. It is for tests, emulation and small local runs on CPUs. The parent
must have one thread and must not have computed with several (``why_not_fork``).

Ranks die with their parent. A rank that dies, fails or stands still ends the pool, and the error
names it and what every rank was doing.
"""

import io
import os
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]  # not in stubs

from partita.errors import PartitaError, WorkerError
from partita.profile.calibrate_local import die_with_parent
from partita.run.board import Board
from partita.run.process_transport import Member

Main: TypeAlias = Callable[[Member, Any], Any]
"""What a rank does with a request; returns its answer."""

_GRACE_S = 3.0
_LOG_LINES = 5


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


@dataclass(slots=True)
class _Worker:
    rank: int
    pid: int
    pipe: Connection
    log: Path
    exit_code: int | None = None


class RankPool:
    """Ranks that answer requests, all of them at a time."""

    def __init__(
        self,
        world: int,
        main: Main,
        *,
        limit_s: float = 300.0,
        board: Board | None = None,
        log_directory: Path | None = None,
    ) -> None:
        """Fork the ranks and let them meet.

        Args:
            world: Number of ranks.
            main: What they do; everything that it refers to is shared.
            limit_s: How long they may wait for one another.
            board: Where they say what they are doing.
            log_directory: Where what they print goes; a temporary one if not given.

        Raises:
            WorkerError: They did not meet.
        """
        self.board = Board(world) if board is None else board
        self._scratch = None if log_directory else tempfile.TemporaryDirectory(prefix="partita-")
        logs = log_directory or Path(self._scratch.name)  # type: ignore[union-attr]  # one is there
        self._workers: list[_Worker] = []
        self._why_stuck: Callable[[], str] = lambda: ""
        _warm_up()
        with socket.create_server(("127.0.0.1", 0)) as listener:
            for rank in range(world):
                ours, theirs = Pipe()
                log = logs / f"rank{rank}.log"
                sys.stdout.flush()
                sys.stderr.flush()
                pid = os.fork()
                if pid == 0:
                    ours.close()
                    for worker in self._workers:
                        worker.pipe.close()
                    _be_rank(_Birth(rank, world, limit_s, listener, log), theirs, main)
                theirs.close()
                self._workers.append(_Worker(rank, pid, ours, log))
        try:
            self._collect(limit_s + _GRACE_S)
        except BaseException:
            self.close(kill=True)
            raise

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
        why_stuck: Callable[[], str] = lambda: "",
    ) -> list[Any]:
        """Return the answers of all ranks to a request, by rank.

        Args:
            request: Anything that can be pickled.
            limit_s: How long it may take; no limit if not given, as a rank that stands still ends
                by itself.
            told: Told a rank and what it says on the way.
            why_stuck: Says what the ranks were doing, when something has gone wrong.

        Raises:
            WorkerError: A rank failed or died; the pool is closed then.
        """
        self._why_stuck = why_stuck
        message = _pack(request)
        try:
            for worker in self._workers:
                worker.pipe.send_bytes(message)
            return self._collect(limit_s, told)
        except (WorkerError, PartitaError, OSError, KeyboardInterrupt):
            self.close(kill=True)
            raise

    def _collect(
        self, limit_s: float | None, told: Callable[[int, Any], None] = lambda _, __: None
    ) -> list[Any]:
        deadline = None if limit_s is None else time.monotonic() + limit_s
        answers: dict[int, Any] = {}
        while len(answers) < len(self._workers):
            waiting = {w.pipe: w for w in self._workers if w.rank not in answers}
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            ready = wait(list(waiting), timeout=left)
            if not ready:
                silent = ", ".join(str(worker.rank) for worker in waiting.values())
                raise WorkerError(self._explained(f"no answer of rank {silent} in {limit_s:g} s"))
            for pipe in ready:
                assert isinstance(pipe, Connection)
                worker = waiting[pipe]
                try:
                    kind, value = _unpack(pipe.recv_bytes())
                except (EOFError, ConnectionResetError):
                    self._refuse_dead(worker)
                if kind == "told":
                    told(worker.rank, value)
                elif kind == "error":
                    self._refuse_failed(worker, value)
                else:
                    answers[worker.rank] = value
        return [answers[worker.rank] for worker in self._workers]

    def _refuse_failed(self, worker: _Worker, error: BaseException) -> None:
        """Raise the error of a rank, unless it only saw another one go away."""
        if isinstance(error, WorkerError):
            deadline = time.monotonic() + _GRACE_S / 3
            others = [w for w in self._workers if w is not worker]
            while time.monotonic() < deadline:
                for other in others:
                    if self._has_ended(other):
                        self._refuse_dead(other)
                time.sleep(0.02)
            raise WorkerError(self._explained(str(error))) from error
        raise error

    def _has_ended(self, worker: _Worker) -> bool:
        if worker.exit_code is None:
            pid, status = os.waitpid(worker.pid, os.WNOHANG)
            if pid:
                worker.exit_code = os.waitstatus_to_exitcode(status)
        return worker.exit_code is not None

    def _refuse_dead(self, worker: _Worker) -> None:
        deadline = time.monotonic() + _GRACE_S
        while not self._has_ended(worker) and time.monotonic() < deadline:
            time.sleep(0.01)
        code = worker.exit_code
        how = f"was killed by {signal.Signals(-code).name}" if code and code < 0 else (
            f"ended with exit code {code}"
        )  # fmt: skip
        raise WorkerError(self._explained(f"rank {worker.rank} {how}", worker))

    def _explained(self, text: str, worker: _Worker | None = None) -> str:
        parts = [text]
        if worker is not None and worker.log.exists():
            lines = worker.log.read_text(errors="replace").strip().splitlines()[-_LOG_LINES:]
            parts += [f"  rank {worker.rank} said: {line}" for line in lines]
        if stuck := self._why_stuck():
            parts.append(stuck)
        return "\n".join(parts)

    def close(self, *, kill: bool = False) -> None:
        """End the ranks: these processes and no others."""
        for worker in self._workers:
            worker.pipe.close()
        deadline = time.monotonic() + _GRACE_S
        for worker in self._workers:
            while not kill and not self._has_ended(worker) and time.monotonic() < deadline:
                time.sleep(0.005)
            if not self._has_ended(worker):
                os.kill(worker.pid, signal.SIGKILL)
                _, status = os.waitpid(worker.pid, 0)
                worker.exit_code = os.waitstatus_to_exitcode(status)
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


def _be_rank(birth: _Birth, pipe: Connection, main: Main) -> None:
    """Answer requests until the parent closes the pipe; never returns."""
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends its ranks itself
    _redirect(birth.log)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    code = 0
    try:
        member = _meet(birth, pipe)
        pipe.send_bytes(_pack(("done", None)))
        while True:
            try:
                request = _unpack(pipe.recv_bytes())
            except EOFError:
                break
            pipe.send_bytes(_pack(("done", main(member, request))))
    except BaseException as exc:  # noqa: BLE001 (a process border: the parent raises it)
        traceback.print_exc()
        code = getattr(exc, "exit_code", WorkerError.exit_code)
        error = exc if isinstance(exc, PartitaError) else _unexpected(birth.rank, exc)
        with suppress(OSError):  # the parent may have closed the pipe because of another rank
            pipe.send_bytes(_pack(("error", error)))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _unexpected(rank: int, exc: BaseException) -> WorkerError:
    return WorkerError(f"rank {rank}: {type(exc).__name__}: {exc}")


def _warm_up() -> None:
    """Let torch import what a first backward needs, once for all ranks."""
    leaf = torch.ones(1, requires_grad=True)
    torch.autograd.grad(leaf * 2, leaf, torch.ones(1))


def _redirect(log: Path) -> None:
    """Send what the rank prints to its log."""
    with log.open("ab", buffering=0) as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)


def _meet(birth: _Birth, pipe: Connection) -> Member:
    """Open the store on the port that the parent has taken, and join the group."""
    torch.set_num_threads(1)
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
    )
    member.join()
    return member


def _pack(value: object) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def _unpack(data: bytes) -> Any:  # noqa: ANN401  # whatever was packed
    return torch.load(io.BytesIO(data), weights_only=False)
