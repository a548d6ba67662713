"""One rank of a run: carries out its list step by step, under a watchdog."""

import math
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple, TypeAlias

from torch import Tensor

from partita.core.program import LAST_COMPUTE, Program
from partita.energy.client.counter import EnergyUse
from partita.errors import InvalidInputError, PartitaError, WorkerError
from partita.ranks.failures import PeerError, first_line, speaks_of_peer
from partita.ranks.member import Member
from partita.ranks.status import Phase, Place, StatusBoard, place_of
from partita.runtime.clocks import ClockReading, read_clock
from partita.runtime.data import NO_HELD_OUT
from partita.runtime.device_loop import DeviceLoop
from partita.runtime.device_parts import DeviceStatistics, Runner, StepRecord, Store
from partita.runtime.ownership import agree_on_holders
from partita.runtime.parameters import ParameterStore
from partita.runtime.parts import Part
from partita.runtime.power import Power, open_power
from partita.runtime.process_transport import ProcessTransport, used_devices
from partita.runtime.rank_capture import (
    Capture,
    Captured,
    MemoryUse,
    ProcessMemory,
    capturing,
    most_memory,
)
from partita.runtime.stage_pass import StageRunner
from partita.runtime.task import Task
from partita.runtime.tensor_parallel import slices_of
from partita.runtime.training.evaluation import Evaluation, Evaluator, loss_share
from partita.runtime.training.not_finite import NumberCheck
from partita.runtime.training.recipe import NanPolicy, Recipe
from partita.runtime.training.saving import Saver, Saving, random_state, set_random_state
from partita.runtime.workload import Workload

EXIT_CODE = WorkerError.exit_code
KEPT_STAMPS = 16
"""Of how many steps, the last ones, it is kept when each instruction began and ended, where results
are not kept: for a long run all of them would fill the memory."""
_BEAT_S = 0.1
_MEMORY_STEPS = 16
"""Steps after which a rank says how much memory it has used; asking takes some microseconds."""
_AFTER: Mapping[Phase, Phase] = {Phase.STEPS: Phase.PAUSED, Phase.REPORT: Phase.ENDED}
"""What a rank is at when what it was at has ended; if it is not here, it is yet to begin."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankOptions:
    """How a rank runs.

    Attributes:
        steps: Number of steps.
        seed: Seed of all random numbers.
        recipe: What it trains with.
        blocking: Whether SEND and RECV wait at their place.
        stall_limit_s: How long an instruction may take before the run is given up.
        keep_results: Whether outputs and gradients of the steps are kept for a comparison, and the
            stamps of more than the last ``KEPT_STAMPS`` steps.
        capture: What else is noted of the last step.
        power: How it sees to its energy; None = it does not.
        evaluation: When it is evaluated on held-out data.
        saving: When it saves, and what it goes on from; None = it saves nothing.
    """

    steps: int
    recipe: Recipe = field(default_factory=Recipe)
    seed: int = 0
    blocking: bool = False
    stall_limit_s: float = 300.0
    keep_results: bool = True
    capture: Capture = Capture.NONE
    power: Power | None = None
    evaluation: Evaluation = field(default_factory=Evaluation)
    saving: Saving | None = None

    def again(self) -> "RankOptions":
        """Return how a rank of a run that is started again runs: from what the run has saved."""
        return self if self.saving is None else replace(self, saving=self.saving.again())


@dataclass(frozen=True, kw_only=True, eq=False)
class RankReport:
    """What a rank has to say after a run.

    Attributes:
        device: Its device of the plan.
        records: What it saw in each step.
        state: Its parameters and buffers at the end; empty unless results are kept.
        statistics: What it has done.
        step_ns: Begin and end of each step, by its clock.
        first_step: Number of the first of them; above 0 where a run was resumed.
        clock: How far its clock is ahead of rank 0's, before and after; empty where it is the same.
        memory: The memory of the last step, or what the process grew by; None = not known.
        trace: The trace of torch's profiler, if there is one.
        energy: What it used; None = that was not asked for.
        held_out: Its part of the loss on held-out data after some steps, by step. Such a step is
            followed by a pause, which is no part of the next one.
        has_stopped: Whether it was asked to stop, and did so before its last step.
        weight_bytes: Bytes of first weights that it has read from files.
    """

    device: int
    records: list[StepRecord]
    state: Mapping[str, Tensor | Part]
    statistics: DeviceStatistics
    step_ns: list[tuple[int, int]]
    first_step: int = 0
    clock: tuple[ClockReading, ...] = ()
    memory: MemoryUse | None = None
    trace: str = ""
    energy: EnergyUse | None = None
    held_out: Mapping[int, float] = field(default_factory=dict)
    has_stopped: bool = False
    weight_bytes: int = 0


Held: TypeAlias = Callable[[], Sequence[Tensor]]
"""Returns tensors that a rank holds."""


class StepNews(NamedTuple):
    """A step that a rank has done.

    Attributes:
        step: The step.
        loss: The rank's share of the loss of the step; 0 where it does not compute it.
        held_out: Its share of the loss on held-out data after the step; None = it was not taken.
        memory_bytes: Most memory that it has used; 0 = it does not say so after this step.
        compute_s: Seconds of its forwards and backwards in the step; 0 = not known.
    """

    step: int
    loss: float
    held_out: float | None = None
    memory_bytes: float = 0.0
    compute_s: float = 0.0


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
        self._thread: threading.Thread | None = None
        # Held while the thread looks and writes: once it sleeps, it writes nothing any more.
        self._lock, self._is_awake = threading.Lock(), False
        self._awake = _Awake(self._wake, self._sleep)

    def __enter__(self) -> "Watchdog":
        self._write()
        self._wake()
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self._sleep(failed=kind is not None)
        self.close()

    def awake(self) -> "_Awake":
        """Watch while something is done, again and again: the thread stays until it is closed.

        Whoever calls it says then what the rank is at.
        """
        return self._awake

    def _wake(self) -> None:
        self._is_awake = True
        if self._thread is None:
            self._thread = threading.Thread(target=self._watch, daemon=True, name="watchdog")
            self._thread.start()

    def _sleep(self, *, failed: bool = False) -> None:
        with self._lock:
            self._is_awake = False
        if failed:
            self._write()
        else:
            self.enter(_AFTER.get(self._phase, Phase.IDLE))

    def close(self) -> None:
        """End the thread."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()

    def enter(self, phase: Phase) -> None:
        """Say what the rank is at from now on."""
        self._since_ns = time.perf_counter_ns()
        self._phase = phase
        self._write()

    def follow(self, loop: DeviceLoop, program: Program) -> None:
        """Watch the loop of a device from now on; its first step says so on the board."""
        if self._loop is not loop:
            self._loop, self._program = loop, program
            if isinstance(loop, WatchedLoop):
                loop.write_to(self._board.place_line(self._rank))
        self._since_ns = time.perf_counter_ns()
        self._phase = Phase.STEPS

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
        return self._phase in (Phase.AGREE, Phase.OPEN, Phase.CLOCKS, Phase.EVALUATE)

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
            with self._lock:
                if not self._is_awake:
                    continue
                self._write()
                waited_s = (time.perf_counter_ns() - self._place.since_ns) / 1e9
                if self._is_limited and waited_s > self._limit_s:
                    give_up(f"no progress for {waited_s:.1f} s: {self.where()}")


class _Awake:
    """A context in which a watchdog is awake.

    A class, as every step enters it: a generator takes several times as long.
    """

    __slots__ = ("_sleep", "_wake")

    def __init__(self, wake: Callable[[], None], sleep: Callable[..., None]) -> None:
        self._wake, self._sleep = wake, sleep

    def __enter__(self) -> None:
        self._wake()

    def __exit__(self, kind: object, *_: object) -> None:
        self._sleep(failed=kind is not None)


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
    saving = options.saving
    if saving is not None:
        player.resume(saving)
    player.play(options.steps - player.next_step, on_step)
    if saving is not None and (saving.every or player.has_stopped):
        player.save()
    return player.report()


class RankPlayer:
    """One rank of a run, step by step.

    Attributes:
        store: Its parameters.
        saver: Saves it; None = nobody asked for that.
        loop: The loop of its device.
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
        self.store = ParameterStore(
            task,
            device,
            workload.state,
            options.recipe,
            slices=slices_of(task, device),
            keeps_gradients=options.keep_results,
        )
        with Watchdog(member.rank, board, options.stall_limit_s, phase=Phase.AGREE):
            agree_on_holders(task, member, self.store.names(), job)
        runner = StageRunner(
            task, self.store, seed=options.seed, group=self._transport.tensor_group
        )
        loop = make_loop(task, device, self._transport, self.store, runner, workload, options)
        with Watchdog(member.rank, board, options.stall_limit_s):
            self._meter = open_power(options.power, task, member, job=job).meter
        loop.meter = self._meter
        self._watchdog = Watchdog(member.rank, board, options.stall_limit_s)
        self._steps = StepPlayer(
            loop, task, device, member, options=options, board=board, watchdog=self._watchdog
        )
        if options.evaluation.every:
            self._steps.evaluator = self.evaluator(task, device, workload)
        if options.recipe.on_nan.acts:
            self._steps.numbers = NumberCheck(options.recipe.on_nan, task, self.store, member, job)
        self._member, self._options, self._board = member, options, board
        self._task, self._batches = task, workload.batches
        self._steps.settle = self._wait_for_saver
        self.saver: Saver | None = None
        self.loop, self._device = loop, device

    @property
    def next_step(self) -> int:
        """Number of the step that comes next."""
        return self._steps.next_step

    @property
    def has_stopped(self) -> bool:
        """Whether the ranks were asked to stop, and all have agreed to do so here."""
        return self._steps.has_stopped

    def resume(self, saving: Saving, saver: Saver | None = None) -> Path | None:
        """Save from now on, and go on from a checkpoint where one is asked for.

        Args:
            saving: When it saves, and what it goes on from.
            saver: What saves it, where that is open already.

        Returns:
            The checkpoint; None = the run begins.
        """
        member, limit_s = self._member, self._options.stall_limit_s
        # Reading may take any time.
        with Watchdog(member.rank, self._board, limit_s, phase=Phase.BUILD):
            task = self._task
            self.saver = saver or Saver(
                saving, member, plan=task.plan, model=task.graph.name, warn=member.notify
            )
            path = self.saver.found()
            if path is not None:
                self._load(self.saver, path)
                if member.rank == 0:
                    member.notify(f"going on from {path}, after step {self.next_step}")
        return path

    def _load(self, saver: Saver, path: Path) -> None:
        self.store.optimizer.prepare()
        extra = saver.load(path, self.holdings())
        self.after_load()
        self.store.load_small_state(extra)
        if extra.get("data") and self._batches is not None:
            self._batches.load_state(extra["data"])
        if extra.get("random"):
            set_random_state(extra["random"])
        self._steps.first_step = int(extra["step"])

    def save(self) -> None:
        """Save what the steps so far have come to, and wait until it is written."""
        assert self.saver is not None
        self._save(self.saver)
        self.saver.wait()

    def _save(self, saver: Saver) -> None:
        done = self.next_step
        extra = {
            **self.store.small_state(),
            "data": {} if self._batches is None else self._batches.state(done),
            "random": random_state(),
            "seed": self._options.seed,
        }
        saver.save(done, self.holdings(), extra)

    def _wait_for_saver(self) -> None:
        """Let a checkpoint that is being written count, before the run goes back to the newest."""
        if self.saver is not None:
            self.saver.wait()

    def holdings(self) -> dict[str, Tensor | Part]:
        """Return what this rank holds, live, by the names that checkpoints have."""
        return self.store.holdings()

    def after_load(self) -> None:
        """Go on from what holdings were filled with."""
        self.store.after_load()

    def evaluator(self, task: Task, device: int, workload: Workload) -> Evaluator:
        """Return what evaluates the weights of this rank on held-out data.

        Raises:
            InvalidInputError: There are none.
        """
        if workload.held_out is None:
            raise InvalidInputError(NO_HELD_OUT)
        return Evaluator(
            task,
            device,
            self._transport,
            self.store,
            workload.held_out,
            group=self._transport.tensor_group,
        )

    def other(self, task: Task, workload: Workload, *, job: str) -> "OtherSteps":
        """Return what plays another Program of the same stages on the same parameters.

        Args:
            task: Other microbatches of the plan, or its stages forward alone.
            workload: What it computes.
            job: Name in the store; another one for every call. All ranks call it.
        """
        member, options, board = self._member, self._options, self._board
        with Watchdog(member.rank, board, options.stall_limit_s) as watchdog:
            transport = ProcessTransport(
                task, member, workload.shape_of, job=job, entered=watchdog.enter
            )
        runner = StageRunner(task, self.store, seed=options.seed, group=transport.tensor_group)
        with self.store.serving(task):
            loop = make_loop(task, self._device, transport, self.store, runner, workload, options)
        loop.meter = self._meter
        player = StepPlayer(
            loop, task, self._device, member, options=options, board=board, watchdog=self._watchdog
        )
        policy = options.recipe.on_nan
        if policy.acts and task.is_training:
            player.numbers = NumberCheck(policy, task, self.store, member, job)
            player.settle = self._wait_for_saver
        return OtherSteps(self, loop, player)

    def play(self, steps: int, on_step: Callable[[StepNews], None]) -> None:
        """Play some steps, saving when it is time; the last one is noted as the options want."""

        def step_done(news: StepNews) -> None:
            on_step(news)
            if self.saver is not None and self.saver.is_due(news.step + 1):
                self._save(self.saver)

        try:
            self._steps.play(steps, step_done, held=self.store.tensors)
        except BaseException:
            self._close()
            raise

    def play_as(self, number: int, on_step: Callable[[StepNews], None]) -> None:
        """Play one step for a caller who counts steps, looks for stops and saves."""
        try:
            self._steps.play_as(number, on_step, held=self.store.tensors)
        except BaseException:
            self._close()
            raise

    def _close(self) -> None:
        self._watchdog.close()
        self._meter.close()  # gives the device's clocks back

    def report(self) -> RankReport:
        """Return what was seen."""
        self._watchdog.close()
        report = replace(self._steps.report(), energy=self._meter.close())
        member, limit_s = self._member, self._options.stall_limit_s
        with Watchdog(member.rank, self._board, limit_s, phase=Phase.CLOCKS) as watchdog:
            clock = (*self._clock, *clock_reading(self._transport, member))
            watchdog.enter(Phase.REPORT)
            state = self.store.state() if self._options.keep_results else {}
            memory = report.memory or self._memory.use()
        return replace(report, state=state, clock=clock, memory=memory)


class OtherSteps:
    """Plays another Program on the parameters of a rank.

    Attributes:
        loop: The loop of its device.
    """

    def __init__(self, rank: RankPlayer, loop: DeviceLoop, steps: "StepPlayer") -> None:
        self._rank, self.loop, self._steps, self._task = rank, loop, steps, loop.task

    def play_as(self, number: int, on_step: Callable[[StepNews], None]) -> None:
        """Play one step for a caller who counts steps."""
        with self._rank.store.serving(self._task):
            self._steps.play_as(number, on_step)


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
    watchdog = Watchdog(member.rank, board, options.stall_limit_s)
    player = StepPlayer(loop, task, device, member, options=options, board=board, watchdog=watchdog)
    try:
        player.play(options.steps, on_step)
    finally:
        watchdog.close()
    return player.report()


class StepPlayer:
    """Plays the steps of a device, under a watchdog.

    Attributes:
        first_step: Number of the first step, above 0 where a run is resumed.
        has_stopped: Whether the ranks were asked to stop, and all have agreed to do so here.
        evaluator: What evaluates the weights; None = nothing does.
        numbers: Looks whether gradients are numbers; None = nothing does.
        settle: Called before it is looked for why they are not, on all ranks.
    """

    def __init__(
        self,
        loop: DeviceLoop,
        task: Task,
        device: int,
        member: Member,
        *,
        options: RankOptions,
        board: StatusBoard,
        watchdog: Watchdog,
    ) -> None:
        self._loop, self._task, self._device, self._member = loop, task, device, member
        self._options, self._board, self._watchdog = options, board, watchdog
        self.first_step, self.has_stopped, self._has_warned = 0, False, False
        self.evaluator: Evaluator | None = None
        self.numbers: NumberCheck | None = None
        self.settle: Callable[[], None] = lambda: None
        self._held_out: dict[int, float] = {}
        self._step_ns: list[tuple[int, int]] = []
        self._captured = Captured()

    @property
    def next_step(self) -> int:
        """Number of the step that comes next."""
        return self.first_step + len(self._step_ns)

    def play(self, steps: int, on_step: Callable[[StepNews], None], *, held: Held = tuple) -> None:
        """Play some more steps.

        Args:
            steps: How many; fewer are played where the ranks are asked to stop.
            on_step: Called with each step that is done.
            held: Returns tensors that are there already, for the count of memory.
        """
        with self._watchdog.awake():
            self._watchdog.follow(self._loop, self._task.program)
            for turn in range(steps):
                number = self.next_step
                if self._board.stops_before(self._member.rank, number):
                    self.has_stopped = True
                    break
                kind = self._options.capture if turn == steps - 1 else Capture.NONE
                self._one_step(number, on_step, kind, held)

    def play_as(
        self, number: int, on_step: Callable[[StepNews], None], *, held: Held = tuple
    ) -> None:
        """Play one step for a caller who counts steps over several players, and looks for stops.

        Args:
            number: Its number, from which random numbers follow.
            on_step: Called when it is done.
            held: Returns tensors that are there already, for the count of memory.
        """
        with self._watchdog.awake():
            self._watchdog.follow(self._loop, self._task.program)
            self._one_step(number, on_step, self._options.capture, held)

    def _one_step(
        self,
        number: int,
        on_step: Callable[[StepNews], None],
        kind: Capture,
        held: Held,
    ) -> None:
        if kind is Capture.NONE:
            self._timed(number)
        else:
            with capturing(kind, self._member.device, held()) as self._captured:
                self._timed(number)
        if self.numbers is not None and self.numbers.is_bad:
            self.settle()
            self.numbers.explain(self._loop, number)
        record = self._loop.records[-1]
        evaluated = None if self.evaluator is None else self._evaluate(self.evaluator)
        memory = 0.0
        if number % _MEMORY_STEPS in (0, 1):
            memory = most_memory(self._member.device)
        share = loss_share(self._task, record)
        if not math.isfinite(share):
            self._warn_of(number, share)
        on_step(StepNews(number, share, evaluated, memory, self._loop.compute_s))
        if not self._options.keep_results:
            record.forget_results(self._task.graph.loss)
            if len(self._loop.records) > KEPT_STAMPS:
                self._loop.records[-1 - KEPT_STAMPS].forget_stamps()

    def _evaluate(self, evaluator: Evaluator) -> float | None:
        """Evaluate where it is time; returns this rank's part of the loss."""
        due, done, watchdog = self._options.evaluation, self.next_step, self._watchdog
        if not due.is_due(done, self._options.steps):
            return None
        try:
            share = evaluator.loss_share(
                due.batches, lambda: watchdog.enter(Phase.EVALUATE)
            )  # fmt: skip
        except RuntimeError as exc:
            kind = PeerError if speaks_of_peer(exc) else WorkerError
            raise kind(f"{watchdog.where()}: {first_line(exc)}") from exc
        watchdog.enter(Phase.STEPS)
        self._held_out[done - 1] = share
        return share

    def _warn_of(self, number: int, loss: float) -> None:
        """Say, once, that a loss is no number, where nothing else is done about it."""
        if self._options.recipe.on_nan is NanPolicy.WARN and not self._has_warned:
            self._has_warned = True
            self._member.notify(
                f"the loss of step {number + 1} is {loss}; the run goes on with it: --on-nan stop "
                "would name rank, stage and op"
            )

    def _timed(self, number: int) -> None:
        self._watchdog.begin_step(number)
        begin = time.perf_counter_ns()
        _play(self._loop, number, self._task.program, self._watchdog)
        self._step_ns.append((begin, time.perf_counter_ns()))

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
            held_out=self._held_out,
            first_step=self.first_step,
            has_stopped=self.has_stopped,
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
            awaited >= 0
            or _travels(program, row)
            or ((row < 0 or program.group[row] >= 0) and speaks_of_peer(exc))
        )
        what = first_line(exc) if lost else f"{type(exc).__name__}: {first_line(exc)}"
        raise (PeerError if lost else WorkerError)(f"{watchdog.where()}: {what}") from exc


def _travels(program: Program, row: int) -> bool:
    """Return whether an instruction needs another rank."""
    return row >= 0 and program.kind[row] > LAST_COMPUTE
