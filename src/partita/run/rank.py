"""One rank of a run: carries out its list step by step, under a watchdog."""

import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor

from partita.errors import PartitaError, WorkerError
from partita.run.board import Board, describe
from partita.run.device_loop import DeviceLoop, DeviceStatistics, Runner, StepRecord, Store
from partita.run.parameters import Optimizer, ParameterStore, Part
from partita.run.process_transport import Member, ProcessTransport, used_devices
from partita.run.stage_pass import StageRunner
from partita.run.task import Task
from partita.run.workload import Workload

EXIT_CODE = WorkerError.exit_code
_BEAT_S = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class RankOptions:
    """How a rank runs.

    Attributes:
        steps: Number of steps.
        seed: Seed of all random numbers.
        make_optimizer: Makes its optimizer.
        blocking: Whether SEND and RECV wait at their place.
        stall_limit_s: How long an instruction may take before the run is given up.
        keep_results: Whether outputs and gradients of the steps are kept for a comparison.
    """

    steps: int
    make_optimizer: Callable[[], Optimizer]
    seed: int = 0
    blocking: bool = False
    stall_limit_s: float = 300.0
    keep_results: bool = True


@dataclass(frozen=True, kw_only=True, eq=False)
class RankReport:
    """What a rank has to say after a run.

    Attributes:
        device: Its device of the plan.
        records: What it saw in each step.
        state: Its parameters and buffers at the end; empty unless results are kept.
        statistics: What it has done.
        step_ns: Begin and end of each step.
    """

    device: int
    records: list[StepRecord]
    state: Mapping[str, Tensor | Part]
    statistics: DeviceStatistics
    step_ns: list[tuple[int, int]]


class Watchdog:
    """Ends the process when an instruction takes longer than it may.

    A thread, as a rank that waits for another one sits inside torch; that wait lets other threads
    run. It keeps the rank's line of the board fresh, so that the launcher can name who is stuck.
    """

    def __init__(
        self, loop: DeviceLoop, task: Task, rank: int, board: Board, limit_s: float
    ) -> None:
        self._loop, self._task, self._rank, self._board = loop, task, rank, board
        self._limit_s, self.step = limit_s, 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True, name="watchdog")

    def __enter__(self) -> "Watchdog":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self._board.write(self._rank, self._loop.place, self.step)

    def _watch(self) -> None:
        while not self._stop.wait(_BEAT_S):
            place = self._loop.place
            self._board.write(self._rank, place, self.step)
            waited = (time.perf_counter_ns() - place.since_ns) / 1e9
            if place.row >= 0 and waited > self._limit_s:
                line = self._board.read(self._rank)
                give_up(f"no progress: {describe(line, self._rank, self._task.program)}")


def give_up(text: str) -> None:
    """End this process at once, saying why; ends threads that wait inside torch too."""
    sys.stderr.write(f"partita: {text}\n")
    sys.stderr.flush()
    sys.stdout.flush()
    os._exit(EXIT_CODE)


def run_rank(
    task: Task,
    member: Member,
    workload: Workload,
    *,
    options: RankOptions,
    board: Board,
    job: str = "job",
    told: Callable[[int, StepRecord], None] = lambda _, __: None,
) -> RankReport:
    """Be one rank of a run.

    Args:
        task: What is run.
        member: This process.
        workload: What it computes.
        options: How.
        board: Where it says what it is doing.
        job: Name of the run in the store.
        told: Told the record of each step.

    Raises:
        WorkerError: Another rank went away; names the instruction.
    """
    device = used_devices(task.program)[member.rank]
    transport = ProcessTransport(task, member, workload.shape_of, job=job)
    store = ParameterStore(task, device, workload.state, options.make_optimizer())
    runner = StageRunner(task, store, seed=options.seed)
    loop = make_loop(task, device, transport, store, runner, workload, options)
    report = play_steps(loop, task, device, member, options=options, board=board, told=told)
    transport.close()
    if not options.keep_results:
        return report
    return RankReport(
        device=device,
        records=report.records,
        state=store.state(),
        statistics=report.statistics,
        step_ns=report.step_ns,
    )


def make_loop(
    task: Task,
    device: int,
    transport: ProcessTransport,
    store: Store,
    runner: Runner,
    workload: Workload,
    options: RankOptions,
) -> DeviceLoop:
    """Return the loop of a device over processes."""
    return DeviceLoop(
        task,
        device,
        transport,
        store=store,
        runner=runner,
        load=workload.load,
        blocking=options.blocking,
    )


def play_steps(
    loop: DeviceLoop,
    task: Task,
    device: int,
    member: Member,
    *,
    options: RankOptions,
    board: Board,
    told: Callable[[int, StepRecord], None],
) -> RankReport:
    """Play all steps of a device, under a watchdog."""
    step_ns = []
    with Watchdog(loop, task, member.rank, board, options.stall_limit_s) as watchdog:
        for step in range(options.steps):
            watchdog.step = step
            begin = time.perf_counter_ns()
            _play(loop, step, task, member.rank, board)
            step_ns.append((begin, time.perf_counter_ns()))
            record = loop.records[-1]
            told(step, record)
            if not options.keep_results:
                record.gradients.clear()
    return RankReport(
        device=device,
        records=loop.records,
        state={},
        statistics=loop.statistics,
        step_ns=step_ns,
    )


def _play(loop: DeviceLoop, step: int, task: Task, rank: int, board: Board) -> None:
    """Play one step; whatever goes wrong names the instruction."""
    try:
        for wait in loop.play(step):
            raise AssertionError(f"a transport over processes waits itself: {wait.reason}")
    except PartitaError:
        raise
    except RuntimeError as exc:
        board.write(rank, loop.place, step)
        where = describe(board.read(rank), rank, task.program)
        raise WorkerError(f"{where}: {str(exc).strip().splitlines()[0]}") from exc
