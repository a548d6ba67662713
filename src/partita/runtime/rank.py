"""One rank of a run: carries out its list step by step, under a watchdog."""

import os
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from torch import Tensor

from partita.core.program import LAST_COMPUTE, Program
from partita.energy.client.usage import EnergyUse
from partita.errors import PartitaError, WorkerError
from partita.ranks.failures import PeerError, first_line
from partita.ranks.member import Member
from partita.ranks.status import Phase, Place, StatusBoard, place_of
from partita.runtime.clocks import ClockReading, read_clock
from partita.runtime.device_loop import DeviceLoop
from partita.runtime.device_parts import DeviceStatistics, Runner, StepRecord, Store
from partita.runtime.ownership import agree_on_holders
from partita.runtime.parameters import Optimizer, ParameterStore, Part
from partita.runtime.power import Power, open_power
from partita.runtime.process_transport import ProcessTransport, used_devices
from partita.runtime.rank_capture import Capture, Captured, MemoryUse, ProcessMemory, capturing
from partita.runtime.stage_pass import StageRunner
from partita.runtime.task import Task
from partita.runtime.workload import Workload

EXIT_CODE = WorkerError.exit_code
KEPT_STAMPS = 16
"""Of how many steps, the last ones, it is kept when each instruction began and ended, where results
are not kept: for a long run all of them would fill the memory."""
_BEAT_S = 0.1
_LOST_PEER = ("gloo", "NCCL", "Connection")
"""What torch's errors speak of when another rank went away or did not come."""
_AFTER: Mapping[Phase, Phase] = {Phase.STEPS: Phase.PAUSED, Phase.REPORT: Phase.ENDED}
"""What a rank is at when what it was at has ended; if it is not here, it is yet to begin."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankOptions:
    """How a rank runs.

    Attributes:
        steps: Number of steps.
        seed: Seed of all random numbers.
        make_optimizer: Makes its optimizer.
        blocking: Whether SEND and RECV wait at their place.
        stall_limit_s: How long an instruction may take before the run is given up.
        keep_results: Whether outputs and gradients of the steps are kept for a comparison, and the
            stamps of more than the last ``KEPT_STAMPS`` steps.
        capture: What else is noted of the last step.
        power: How it sees to its energy; None = it does not.
    """

    steps: int
    make_optimizer: Callable[[], Optimizer]
    seed: int = 0
    blocking: bool = False
    stall_limit_s: float = 300.0
    keep_results: bool = True
    capture: Capture = Capture.NONE
    power: Power | None = None


@dataclass(frozen=True, kw_only=True, eq=False)
class RankReport:
    """What a rank has to say after a run.

    Attributes:
        device: Its device of the plan.
        records: What it saw in each step.
        state: Its parameters and buffers at the end; empty unless results are kept.
        statistics: What it has done.
        step_ns: Begin and end of each step, by its clock.
        clock: How far its clock is ahead of rank 0's, before and after; empty where it is the same.
        memory: The memory of the last step, or what the process grew by; None = not known.
        trace: The trace of torch's profiler, if there is one.
        energy: What it used; None = that was not asked for.
    """

    device: int
    records: list[StepRecord]
    state: Mapping[str, Tensor | Part]
    statistics: DeviceStatistics
    step_ns: list[tuple[int, int]]
    clock: tuple[ClockReading, ...] = ()
    memory: MemoryUse | None = None
    trace: str = ""
    energy: EnergyUse | None = None


class StepNews(NamedTuple):
    """A step that a rank has done.

    Attributes:
        step: The step.
        loss: The rank's share of the loss of the step; 0 where it does not compute it.
    """

    step: int
    loss: float


def loss_share(task: Task, record: StepRecord) -> float:
    """Return the part of a step's loss that a rank has computed."""
    sizes = task.plan.microbatch_sizes
    return sum(
        float(value) * int(sizes[microbatch]) / task.plan.samples
        for (tensor, microbatch), value in record.outputs.items()
        if tensor == task.graph.loss and value.numel() == 1
    )


class WatchedLoop(DeviceLoop):
    """The loop of a device that says on the board where it stands, at every instruction.

    So that even of a process that dies without a word it is known what it was doing.
    """

    _line: memoryview | None = None

    def write_to(self, line: memoryview) -> None:
        """Say on a line of the board where it stands, from now on."""
        self._line = line

    @property
    def place(self) -> Place:
        """Where it stands."""
        return self._place

    @place.setter
    def place(self, place: Place) -> None:
        self._place = place
        line = self._line
        if line is not None:
            line[0], line[1], line[2] = place


class Watchdog:
    """Ends the process when it stands still for longer than it may.

    A thread, as a rank that waits for another one sits inside torch; that wait lets other threads
    run. It keeps the rank's line of the board fresh, so that the launcher can name who is stuck.

    Attributes:
        step: The step that is played.
    """

    def __init__(
        self, rank: int, board: StatusBoard, limit_s: float, *, phase: Phase = Phase.BUILD
    ) -> None:
        """Watch this process.

        Args:
            rank: Its rank.
            board: Where it says what it is doing.
            limit_s: How long an instruction, or what comes before the first, may take; a step,
                where no loop is followed. Building a model and handing over results may take any
                time.
            phase: What it is at.
        """
        self._rank, self._board, self._limit_s = rank, board, limit_s
        self._phase, self._since_ns = phase, time.perf_counter_ns()
        self._loop: DeviceLoop | None = None
        self._program: Program | None = None
        self.step = -1
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True, name="watchdog")

    def __enter__(self) -> "Watchdog":
        self._write()
        self._thread.start()
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        if kind is None:
            self.enter(_AFTER.get(self._phase, Phase.IDLE))
        else:
            self._write()

    def enter(self, phase: Phase) -> None:
        """Say what the rank is at from now on."""
        self._since_ns = time.perf_counter_ns()
        self._phase = phase
        self._write()

    def follow(self, loop: DeviceLoop, program: Program) -> None:
        """Watch the loop of a device from now on."""
        self._loop, self._program = loop, program
        self.enter(Phase.STEPS)
        if isinstance(loop, WatchedLoop):
            loop.write_to(self._board.place_line(self._rank))

    def begin_step(self, step: int) -> None:
        """Say which step is played from now on."""
        self.step, self._since_ns = step, time.perf_counter_ns()
        self._write()

    @property
    def _place(self) -> Place:
        if self._phase is Phase.STEPS and self._loop is not None:
            return self._loop.place
        return Place(-1, -1, self._since_ns)

    @property
    def _is_limited(self) -> bool:
        """Whether what the rank is at may only take so long."""
        if self._phase is Phase.STEPS:
            return self.step >= 0 if self._loop is None else self._place.row >= 0
        return self._phase in (Phase.AGREE, Phase.OPEN, Phase.CLOCKS)

    def _write(self) -> None:
        self._board.write(
            self._rank, self._place, self.step, phase=self._phase, pid=os.getpid()
        )  # fmt: skip

    def where(self) -> str:
        """Return where the rank stands, for people."""
        self._write()
        return f"rank {self._rank} {place_of(self._board.read(self._rank), self._program)}"

    def _watch(self) -> None:
        while not self._stop.wait(_BEAT_S):
            self._write()
            waited_s = (time.perf_counter_ns() - self._place.since_ns) / 1e9
            if self._is_limited and waited_s > self._limit_s:
                give_up(f"no progress for {waited_s:.1f} s: {self.where()}")


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
    board: StatusBoard,
    job: str = "job",
    on_step: Callable[[StepNews], None] = lambda _: None,
) -> RankReport:
    """Be one rank of a run.

    Args:
        task: What is run.
        member: This process.
        workload: What it computes.
        options: How.
        board: Where it says what it is doing.
        job: Name of the run in the store.
        on_step: Called with each step that is done.

    Raises:
        WorkerError: Something went wrong, or another rank went away; names the instruction.
    """
    player = RankPlayer(task, member, workload, options=options, board=board, job=job)
    player.play(options.steps, on_step)
    return player.report()


class RankPlayer:
    """One rank of a run, step by step.

    Attributes:
        store: Its parameters.
    """

    def __init__(
        self,
        task: Task,
        member: Member,
        workload: Workload,
        *,
        options: RankOptions,
        board: StatusBoard,
        job: str = "job",
    ) -> None:
        """Agree with the others on what will travel; the arguments are those of ``run_rank``."""
        self._memory = ProcessMemory()
        device = used_devices(task.program)[member.rank]
        with Watchdog(member.rank, board, options.stall_limit_s) as watchdog:
            self._transport = ProcessTransport(
                task, member, workload.shape_of, job=job, entered=watchdog.enter
            )
            self._clock = clock_reading(self._transport, member)
        self.store = ParameterStore(task, device, workload.state, options.make_optimizer())
        with Watchdog(member.rank, board, options.stall_limit_s, phase=Phase.AGREE):
            agree_on_holders(task, member, self.store.names(), job)
        runner = StageRunner(task, self.store, seed=options.seed)
        loop = make_loop(task, device, self._transport, self.store, runner, workload, options)
        with Watchdog(member.rank, board, options.stall_limit_s):
            self._meter = open_power(options.power, task, member, job=job).meter
        loop.meter = self._meter
        self._steps = StepPlayer(loop, task, device, member, options=options, board=board)
        self._member, self._options, self._board = member, options, board

    def play(self, steps: int, on_step: Callable[[StepNews], None]) -> None:
        """Play some steps; of the last one is noted what the options want."""
        held = self.store.tensors()
        try:
            self._steps.play(steps, on_step, held=held)
        except BaseException:
            self._meter.close()  # gives the device's clocks back
            raise

    def report(self) -> RankReport:
        """Return what was seen."""
        report = replace(self._steps.report(), energy=self._meter.close())
        member, limit_s = self._member, self._options.stall_limit_s
        with Watchdog(member.rank, self._board, limit_s, phase=Phase.CLOCKS) as watchdog:
            clock = (*self._clock, *clock_reading(self._transport, member))
            watchdog.enter(Phase.REPORT)
            state = self.store.state() if self._options.keep_results else {}
            memory = report.memory or self._memory.use()
        return replace(report, state=state, clock=clock, memory=memory)


def clock_reading(transport: ProcessTransport, member: Member) -> tuple[ClockReading, ...]:
    """Compare this rank's clock with rank 0's, unless all read the same; all ranks call it."""
    return () if transport.shares_clock else (read_clock(member),)


def make_loop(
    task: Task,
    device: int,
    transport: ProcessTransport,
    store: Store,
    runner: Runner,
    workload: Workload,
    options: RankOptions,
) -> DeviceLoop:
    """Return the loop of a device over processes; it keeps the loss, and results if asked for."""
    loop = WatchedLoop(
        task,
        device,
        transport,
        store=store,
        runner=runner,
        load=workload.load,
        blocking=options.blocking,
    )
    if not options.keep_results:
        loop.seen = task.results & {task.graph.loss}
    return loop


def play_steps(
    loop: DeviceLoop,
    task: Task,
    device: int,
    member: Member,
    *,
    options: RankOptions,
    board: StatusBoard,
    on_step: Callable[[StepNews], None],
) -> RankReport:
    """Play all steps of a device, under a watchdog."""
    player = StepPlayer(loop, task, device, member, options=options, board=board)
    player.play(options.steps, on_step)
    return player.report()


class StepPlayer:
    """Plays the steps of a device, under a watchdog."""

    def __init__(
        self,
        loop: DeviceLoop,
        task: Task,
        device: int,
        member: Member,
        *,
        options: RankOptions,
        board: StatusBoard,
    ) -> None:
        self._loop, self._task, self._device, self._member = loop, task, device, member
        self._options, self._board = options, board
        self._step_ns: list[tuple[int, int]] = []
        self._captured = Captured()

    def play(
        self, steps: int, on_step: Callable[[StepNews], None], *, held: Sequence[Tensor] = ()
    ) -> None:
        """Play some more steps.

        Args:
            steps: How many.
            on_step: Called with each step that is done.
            held: Tensors that are there already, for the count of memory.
        """
        rank, options = self._member.rank, self._options
        with Watchdog(rank, self._board, options.stall_limit_s) as watchdog:
            watchdog.follow(self._loop, self._task.program)
            for turn in range(steps):
                kind = options.capture if turn == steps - 1 else Capture.NONE
                with capturing(kind, self._member.device, held) as self._captured:
                    number = self._one_step(watchdog)
                record = self._loop.records[-1]
                on_step(StepNews(number, loss_share(self._task, record)))
                if not options.keep_results:
                    record.forget_results(self._task.graph.loss)
                    if len(self._loop.records) > KEPT_STAMPS:
                        self._loop.records[-1 - KEPT_STAMPS].forget_stamps()

    def _one_step(self, watchdog: Watchdog) -> int:
        number = len(self._step_ns)
        watchdog.begin_step(number)
        begin = time.perf_counter_ns()
        _play(self._loop, number, self._task.program, watchdog)
        self._step_ns.append((begin, time.perf_counter_ns()))
        return number

    def report(self) -> RankReport:
        """Return what was seen."""
        return RankReport(
            device=self._device,
            records=self._loop.records,
            state={},
            statistics=self._loop.statistics,
            step_ns=self._step_ns,
            memory=self._captured.memory,
            trace=self._captured.trace,
        )


def _play(loop: DeviceLoop, step: int, program: Program, watchdog: Watchdog) -> None:
    """Play one step; whatever goes wrong names rank and instruction."""
    try:
        for wait in loop.play(step):
            raise AssertionError(f"a transport over processes waits itself: {wait.reason}")
    except PartitaError:
        raise
    except Exception as exc:
        row, awaited, _ = loop.place
        lost = isinstance(exc, RuntimeError) and (
            awaited >= 0 or _travels(program, row) or (row < 0 and speaks_of_peer(exc))
        )
        what = first_line(exc) if lost else f"{type(exc).__name__}: {first_line(exc)}"
        raise (PeerError if lost else WorkerError)(f"{watchdog.where()}: {what}") from exc


def speaks_of_peer(exc: BaseException) -> bool:
    """Return whether an error of torch says that another rank went away or did not come."""
    return any(word in first_line(exc) for word in _LOST_PEER)


def _travels(program: Program, row: int) -> bool:
    """Return whether an instruction needs another rank."""
    return row >= 0 and program.kind[row] > LAST_COMPUTE
