"""Processes of this machine that measure it, one a device, and the wait for them.

Forked from the caller where it is fresh (fifty times quicker), spawned where it is not or where
there are GPUs. A rank that dies, or that is not done in time, ends the measurement, and the error
names it and what it was doing.
"""

import multiprocessing
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any, NoReturn

import torch
from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]  # not in its stubs

from partita.errors import InvalidInputError, WorkerError
from partita.processes import die_with_parent, how_it_ended, machine_cores
from partita.profiler.calibrate.ranks import Rank, measure
from partita.profiler.calibrate.records import (
    Measurement,
    MeasureOptions,
    read_measurement,
    write_measurement,
)
from partita.ranks import local_device

MAX_RANKS = 16
_GRACE_S = 5.0


@dataclass(slots=True)
class _Worker:
    """A rank's process, as the caller sees it."""

    rank: int
    process: Any
    pipe: Connection
    step: str = "starting"
    done: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class _Setup:
    """What a rank's process is told."""

    rank: int
    num_ranks: int
    gpu: bool
    options: MeasureOptions = field(default_factory=MeasureOptions)


def measure_local(
    num_ranks: int | None = None,
    options: MeasureOptions | None = None,
    *,
    fork: bool = False,
    report: Callable[[str], None] = lambda _: None,
) -> Measurement:
    """Measure this machine with one process a GPU, or with CPU processes where there is none.

    Args:
        num_ranks: Number of processes, 1 to 16; one a GPU, or a core, if not given.
        options: How much to measure.
        fork: Fork instead of spawn: only from a process with one thread that has not computed with
            torch. Not used with GPUs.
        report: Told each step.

    Raises:
        InvalidInputError: More processes than GPUs, or not 1 to 16.
        WorkerError: A process died or hung.
    """
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if num_ranks is None:
        num_ranks = min(gpus or machine_cores(), MAX_RANKS)
    if not 1 <= num_ranks <= MAX_RANKS:
        raise InvalidInputError(f"{num_ranks} processes; expected 1 to {MAX_RANKS}")
    if gpus and num_ranks > gpus:
        raise InvalidInputError(f"{num_ranks} devices are asked for; this machine has {gpus} GPUs")
    options = MeasureOptions() if options is None else options
    method = "fork" if fork and not gpus else "spawn"
    context = multiprocessing.get_context(method)
    workers = []
    try:
        for rank in range(num_ranks):
            ours, theirs = context.Pipe()
            setup = _Setup(rank=rank, num_ranks=num_ranks, gpu=bool(gpus), options=options)
            process = context.Process(  # type: ignore[attr-defined]  # every context has it
                target=_run_rank, args=(setup, theirs), daemon=True, name=f"rank {rank}"
            )
            process.start()
            theirs.close()
            workers.append(_Worker(rank, process, ours))
        return _collect(workers, options, report)
    finally:
        _end(workers)


def _collect(
    workers: list[_Worker], options: MeasureOptions, report: Callable[[str], None]
) -> Measurement:
    """Return rank 0's result; pass the port of its store on to the others."""
    deadline = time.monotonic() + _longest_s(len(workers), options)
    result: Measurement | None = None
    while not all(worker.done for worker in workers):
        open_pipes = {worker.pipe: worker for worker in workers if not worker.done}
        ready = wait(list(open_pipes), timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            stuck = "; ".join(f"rank {w.rank}: {w.step}" for w in workers if not w.done)
            raise WorkerError(f"calibration was not done in time; {stuck}")
        for pipe in ready:
            assert isinstance(pipe, Connection)
            worker = open_pipes[pipe]
            try:
                kind, value = pipe.recv()
            except (EOFError, ConnectionResetError):
                _refuse_dead(worker)
            if kind == "step":
                worker.step = value
                if worker.rank == 0 or value.startswith("link"):
                    report(value)
            elif kind == "port":
                for other in workers[1:]:
                    other.pipe.send(value)
            elif kind == "error":
                raise WorkerError(value)
            else:
                worker.done = True
                result = read_measurement(value) if worker.rank == 0 else result
    assert result is not None
    return result


def _refuse_dead(worker: _Worker) -> NoReturn:
    worker.process.join(_GRACE_S)
    how = how_it_ended(worker.process.exitcode)
    raise WorkerError(f"rank {worker.rank} {how} while {worker.step}")


def _longest_s(num_ranks: int, options: MeasureOptions) -> float:
    """Return a time that no sound measurement needs."""
    pairs = num_ranks * (num_ranks - 1)
    links_s = 8 * pairs * options.pair_budget_s(num_ranks)
    rest_s = 20 * options.compute_s + 60 * options.reduce_s
    return 60.0 + 10.0 * num_ranks + options.limit_s + links_s + rest_s


def _end(workers: list[_Worker]) -> None:
    """Let the processes end, or end them: these and no others."""
    for worker in workers:
        worker.pipe.close()
    deadline = time.monotonic() + _GRACE_S
    failed = not all(worker.done for worker in workers)
    for worker in workers:
        if failed:
            worker.process.kill()
        worker.process.join(max(0.0, deadline - time.monotonic()))
        if worker.process.is_alive():
            worker.process.kill()
            worker.process.join()


def _run_rank(setup: _Setup, pipe: Connection) -> None:
    """Be one rank: meet, measure, hand over."""
    die_with_parent()
    if sys.platform.startswith("linux"):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # gloo would resolve the host's name
    try:
        store = _open_store(setup, pipe)
        rank = Rank(
            rank=setup.rank,
            num_ranks=setup.num_ranks,
            store=store,
            device=local_device(setup.rank, gpu=setup.gpu, num_local_ranks=setup.num_ranks),
            backend="nccl" if setup.gpu else "gloo",
            limit_s=setup.options.limit_s,
            report=lambda step: pipe.send(("step", step)),
        )
        measured = measure(rank, setup.options)
        # As text: a pickle would need every type inside to allow it.
        pipe.send(("done", None if measured is None else write_measurement(measured)))
    except Exception as exc:  # noqa: BLE001 (a process border: the parent raises it)
        text = str(exc) if isinstance(exc, WorkerError) else f"rank {setup.rank}: {exc!r}"
        pipe.send(("error", text))
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(5)


def _open_store(setup: _Setup, pipe: Connection) -> Store:
    """Return the store of rank 0, which chooses a free port and tells the others."""
    limit_s = setup.options.limit_s
    timeout = timedelta(seconds=limit_s)
    if setup.rank == 0:
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timeout)
        pipe.send(("port", store.port))
        return store
    if not pipe.poll(limit_s):
        raise WorkerError(f"rank {setup.rank}: nothing from rank 0 within {limit_s:g} s")
    return TCPStore(
        "127.0.0.1", pipe.recv(), is_master=False, wait_for_workers=False, timeout=timeout
    )
