"""Rehearses a plan: every device sleeps through its compute, and messages are really sent.

The loops, messages and collectives are those of a real run, over processes and torch.distributed;
compute is a sleep as long as the cost model says. So a plan can be tried that is larger than this
machine, of a graph that has no code, and split by tensor parallelism or sharded, which the executor
cannot run. What comes out is called emulated everywhere.

Sleeps of a millisecond are not exact enough, so all compute is made longer by one factor
(``Emulation.scale``); what travels is not. ``predicted`` is what the simulator says of just that.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor

from partita.capture.splits import Split
from partita.core.cluster import Cluster, LinkMatrix
from partita.core.columns import Array, frozen_array
from partita.core.graph import ANY_KIND
from partita.core.plan import Plan
from partita.core.problem import Problem
from partita.core.program import FIRST_COLLECTIVE, Kind, Program, TransferMode
from partita.core.timeline import Timeline, TimelineOrigin
from partita.cost.durations import instruction_seconds
from partita.errors import InvalidInputError
from partita.processes import run_soon
from partita.program.lower import lower
from partita.program.matching import match
from partita.program.simulate import play
from partita.ranks.member import Member
from partita.ranks.status import Phase, StatusBoard, StatusView
from partita.runtime.emulation.device import (
    DeviceFigures,
    EmulatedRunner,
    EmulatedStore,
    EmulatedTransport,
    EmulatedWork,
    Pacer,
)
from partita.runtime.executor import MEETING_LIMIT_S, Run, aligned, put_together, reports_of_forked
from partita.runtime.power import Power, open_power
from partita.runtime.process_transport import used_devices
from partita.runtime.rank import (
    RankOptions,
    RankReport,
    StepNews,
    Watchdog,
    clock_reading,
    make_loop,
    play_steps,
)
from partita.runtime.restarts import Stopper, never
from partita.runtime.stage_code import Call
from partita.runtime.task import Task
from partita.runtime.workload import Shape, Workload

SHORTEST_S = 0.01
_NEGLECTED = 0.01
_DEFAULT_CAP_BYTES = 16 * 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Emulation:
    """How a plan is emulated.

    Attributes:
        scale: Factor on all compute; 0 = as much as makes instructions last 10 ms, at least 1.
        cap_bytes: Most bytes of a message or collective; larger ones are cut to it, and said.
        steps: Number of steps.
        blocking: Whether SEND and RECV wait at their place.
        power: How it sees to its energy; None = it does not. Compute then takes as long as on the
            modelled devices, at the clocks that are set.
        slow: Devices that compute so many times as long as is predicted, by name.
    """

    scale: float = 0.0
    cap_bytes: int = _DEFAULT_CAP_BYTES
    steps: int = 1
    blocking: bool = False
    power: Power | None = None
    slow: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.power is not None:
            self.power.check_emulated()
        for name, factor in self.slow.items():
            if not 0 < factor < float("inf"):
                _refuse(f"the factor of {name}", factor, "more than 0")
        if not 0 <= self.scale < float("inf"):
            _refuse("scale", self.scale, "more than 0, or 0 for a suitable one")
        if not 1 <= self.cap_bytes <= 2**40:
            _refuse("cap_bytes", self.cap_bytes, "1 to 2^40")
        if not 1 <= self.steps <= 1_000_000:
            _refuse("steps", self.steps, "1 to 1000000")


def _refuse(what: str, value: float, expected: str) -> NoReturn:
    raise InvalidInputError(f"{what} of an emulation is {value}; expected {expected}")


class EmulatedTask(Task):
    """A Program to emulate: needs no code, and no loss to train on."""

    def _check_has_code(self) -> None:
        """Accept every graph."""

    @cached_property
    def results(self) -> frozenset[int]:
        """Nothing is looked at: the values have no meaning."""
        return frozenset()


class NoCode:
    """Stands for the code of stages that are never run."""

    def run(
        self,
        stage: int,
        inputs: Mapping[str, Tensor],
        parameters: Mapping[str, Tensor],
        call: Call,
    ) -> Mapping[str, Tensor]:
        """Refuse."""
        del inputs, parameters, call
        raise InvalidInputError(
            f"stage {stage} has no code here: the run was emulated, or made elsewhere"
        )

    def parameter_splits(self, degree: int) -> Mapping[str, Split]:
        """Return nothing: nothing is held."""
        del degree
        return {}

    def split_notes(self, degree: int) -> list[str]:
        """Return that nothing is divided."""
        del degree
        return []


@dataclass(frozen=True, kw_only=True, eq=False)
class EmulatedWorkload:
    """What the ranks of an emulated run share. It follows from a problem, a plan and an Emulation.

    Attributes:
        task: The Program with its plan.
        emulation: How it is emulated; its scale is the one used, never 0.
        seconds: Scaled seconds of each instruction that computes.
        bytes: What each message and collective carries.
    """

    task: EmulatedTask
    emulation: Emulation
    seconds: Array
    bytes: Array

    @cached_property
    def message_bytes(self) -> Mapping[tuple[int, int], int]:
        """Bytes of each tensor and microbatch that travels; its gradient has as many."""
        program = self.task.program
        rows = np.flatnonzero(program.kind == Kind.SEND)
        columns = (program.tensor[rows], program.microbatch[rows], self.bytes[rows])
        cells = zip(*(column.tolist() for column in columns), strict=True)
        return {(tensor, microbatch): size for tensor, microbatch, size in cells}

    @cached_property
    def buffer(self) -> Tensor:
        """What is sent: as much of it as needed. Forked ranks share it."""
        most = int(self.bytes.max(initial=0))
        rows = int(np.diff(self.task.program.group_ptr).max(initial=1))
        return torch.ones(most // 4 + rows + 1, dtype=torch.float32).view(torch.uint8)

    def shape_of(self, tensor: int, microbatch: int) -> Shape:
        """Return what travels of a tensor; nothing where it stays on its device."""
        return (self.message_bytes.get((tensor, microbatch), 0),), torch.uint8

    @property
    def remarks(self) -> tuple[str, ...]:
        """What differs from a real run, for people."""
        program, cap = self.task.program, self.emulation.cap_bytes
        lines = [f"emulated: compute is slept through, {self.emulation.scale:.4g} times as long"]
        lines += [f"{name} computes {f:g} times as long" for name, f in self.emulation.slow.items()]
        travels = (program.kind == Kind.SEND) | (program.kind >= FIRST_COLLECTIVE)
        cut = travels & (program.bytes > cap)
        if cut.any():
            lines.append(
                f"{np.count_nonzero(cut)} of {np.count_nonzero(travels)} messages and collectives "
                f"carry {cap} bytes instead of up to {int(program.bytes[cut].max())}"
            )
        given = ~np.isnan(self.task.graph.tensors.transfer_s[program.tensor])
        if (timed := (program.kind == Kind.SEND) & given).any():
            lines.append(
                f"{np.count_nonzero(timed)} messages have seconds in the graph's file; their bytes "
                "are sent and take what they take here"
            )
        return tuple(lines)

    def figures(self, device: int) -> DeviceFigures:
        """Return what a device has to know."""
        slow = self.emulation.slow.get(self.task.plan.devices[device], 1.0)
        program, names = self.task.program, self.task.graph.tensors.names
        compute_s: dict[tuple[Kind, int, int], float] = {}
        load_s: dict[tuple[str, int], float] = {}
        update_s: dict[int, float] = {}
        collective_bytes: dict[tuple[Kind, int], int] = {}
        group_of: dict[tuple[int, int], tuple[int, ...]] = {}
        for row in range(int(program.ptr[device]), int(program.ptr[device + 1])):
            kind, seconds = Kind(int(program.kind[row])), slow * float(self.seconds[row])
            stage, microbatch = int(program.stage[row]), int(program.microbatch[row])
            if kind is Kind.LOAD:
                load_s[names[int(program.tensor[row])], microbatch] = seconds
            elif kind is Kind.UPDATE:
                update_s[stage] = seconds
            elif kind < Kind.UPDATE:
                compute_s[kind, stage, microbatch] = seconds
                if program.group[row] >= 0:
                    group_of[stage, microbatch] = tuple(program.group_of(row).tolist())
            elif kind >= FIRST_COLLECTIVE:
                parts = len(program.group_of(row))
                size = _brought_bytes(kind, int(self.bytes[row]), parts)
                collective_bytes[kind, int(program.bucket[row])] = size
        return DeviceFigures(
            compute_s=compute_s,
            load_s=load_s,
            update_s=update_s,
            collective_bytes=collective_bytes,
            group_of=group_of,
            buffer=self.buffer,
        )


def _brought_bytes(kind: Kind, size: int, members: int) -> int:
    """Return what a member brings to a collective: whole numbers, as many for each part."""
    if kind is Kind.ALL_REDUCE:
        return -(-size // 4) * 4
    part = -(-size // (4 * members)) * 4
    return part if kind is Kind.ALL_GATHER else part * members


def emulated_workload(
    problem: Problem, plan: Plan, emulation: Emulation | None = None
) -> EmulatedWorkload:
    """Return what the ranks of an emulated run share.

    Raises:
        InvalidInputError: The plan does not fit the problem.
    """
    emulation = Emulation() if emulation is None else emulation
    for name in emulation.slow:
        if name not in plan.devices:
            raise InvalidInputError(
                f"there is no device {name!r} to slow down; the plan is for "
                f"{', '.join(plan.devices)}"
            )
    program = lower(problem, plan)
    seconds = np.where(program.is_compute, instruction_seconds(problem, plan, program), 0.0)
    seconds = _as_long_as_the_group(program, seconds)
    scale = emulation.scale or suitable_scale(program, seconds)
    return EmulatedWorkload(
        task=EmulatedTask(problem, plan, program, NoCode()),
        emulation=replace(emulation, scale=scale),
        seconds=frozen_array(seconds * scale, np.float64),
        bytes=frozen_array(np.minimum(program.bytes, emulation.cap_bytes), np.int64),
    )


def _as_long_as_the_group(program: Program, seconds: Array) -> Array:
    """Return the seconds with those of joint compute as long as the slowest member takes."""
    joint = match(program).joint
    rows = np.flatnonzero(program.is_compute & (program.group >= 0))
    if not len(rows):
        return seconds
    longest = np.zeros(int(joint.max()) + 1)
    np.maximum.at(longest, joint[rows], seconds[rows])
    seconds = seconds.copy()
    seconds[rows] = longest[joint[rows]]
    return seconds


def suitable_scale(program: Program, seconds: Array, shortest_s: float = SHORTEST_S) -> float:
    """Return the factor, at least 1, that makes the instructions that matter last long enough.

    The shortest ones that together are less than a hundredth of all compute do not matter.
    """
    times = np.sort(seconds[program.is_compute & (program.kind < Kind.UPDATE)])
    matter = times[np.cumsum(times) > _NEGLECTED * times.sum()]
    return max(1.0, shortest_s / float(matter[0])) if len(matter) and matter[0] > 0 else 1.0


def predicted(workload: EmulatedWorkload, links: Cluster | None = None) -> Timeline:
    """Return what the simulator says of an emulated run: scaled compute, and the bytes that travel.

    Args:
        workload: What is emulated.
        links: The machines that emulate, calibrated, a device per rank; if not given, the links are
            taken to be those of the problem's cluster.

    Raises:
        InvalidInputError: There are fewer machines than ranks.
    """
    task, program = workload.task, workload.task.program
    sent = replace(program, bytes=workload.bytes)
    # What a file says of transfers elsewhere has no meaning here: bytes travel.
    tensors = replace(task.graph.tensors, transfer_s=np.full(len(task.graph.tensors), np.nan))
    cluster = task.problem.cluster
    if links is not None:
        cluster = relinked(cluster, program, links)
    # And what may run where does not matter: nothing is run.
    ops = replace(task.graph.ops, device_kinds=np.full(len(task.graph), ANY_KIND))
    graph = replace(task.graph, tensors=tensors, ops=ops)
    here = replace(task.problem, graph=graph, cluster=cluster)
    travel = instruction_seconds(here, task.plan, sent)
    seconds = np.where(program.is_compute, workload.seconds, travel)
    blocking = workload.emulation.blocking
    mode = TransferMode.BLOCKING if blocking else TransferMode.OVERLAPPED
    return play(sent, cluster, seconds, mode)


def relinked(cluster: Cluster, program: Program, links: Cluster) -> Cluster:
    """Return the devices of a Program, joined by the links of other machines: rank r by device r.

    They are of the kind of those machines, too, as collectives depend on that.

    Raises:
        InvalidInputError: There are fewer machines than ranks.
    """
    ranks = used_devices(program)
    if len(ranks) > len(links):
        raise InvalidInputError(
            f"cluster {links.name!r} has {len(links)} devices for {len(ranks)} ranks; calibrate "
            f"with {len(ranks)}"
        )
    # A device without instructions is no rank; it stands at rank 0's place.
    place = np.zeros(len(program.devices), dtype=np.int64)
    place[ranks] = np.arange(len(ranks))
    matrix = links.matrix
    if matrix is not None:
        pairs = (place[:, None] * len(links) + place[None, :]).ravel()
        matrix = LinkMatrix(
            bandwidth_bytes_per_s=matrix.bandwidth_bytes_per_s[pairs],
            latency_s=matrix.latency_s[pairs],
        )
    return Cluster(
        name=links.name,
        hosts=links.hosts,
        devices=tuple(
            replace(
                cluster.devices[cluster.index_of[name]],
                host=links.devices[at].host,
                kind=links.devices[at].kind,
            )
            for name, at in zip(program.devices, place.tolist(), strict=True)
        ),
        levels=tuple(level.taken(place) for level in links.levels),
        matrix=matrix,
    )


def run_emulated_rank(
    workload: EmulatedWorkload,
    member: Member,
    *,
    board: StatusBoard,
    job: str = "job",
    limit_s: float | None = None,
    on_step: Callable[[StepNews], None] = lambda _: None,
) -> RankReport:
    """Be one rank of an emulated run.

    Args:
        workload: What is emulated.
        member: This process.
        board: Where it says what it is doing.
        job: Name of the run in the store.
        limit_s: How long it may wait for others, besides for what they sleep; that of the member
            if not given.
        on_step: Called with each step that is done.

    Raises:
        WorkerError: Another rank went away; names the instruction.
    """
    task = workload.task
    options = _rank_options(workload, member.limit_s if limit_s is None else limit_s)
    device = used_devices(task.program)[member.rank]
    pacer, figures = Pacer(), workload.figures(device)
    with Watchdog(member.rank, board, options.stall_limit_s) as watchdog:
        transport = EmulatedTransport(
            task, member, workload.shape_of, pacer, job=job, entered=watchdog.enter
        )
        before = clock_reading(transport, member)
        metered = open_power(
            workload.emulation.power, task, member, job=job, clock=lambda: pacer.now_s
        )
    work = EmulatedWork(pacer, metered.worker)
    runner = EmulatedRunner(task, figures, workload.shape_of, work, transport)
    store = EmulatedStore(figures, pacer, work, transport)
    real = Workload(code=task.code, state={}, load=runner.load, shape_of=workload.shape_of)
    loop = make_loop(task, device, transport, store, runner, real, options)
    loop.meter = metered.meter
    run_soon()  # with the threads that torch has made by now
    report = play_steps(loop, task, device, member, options=options, board=board, on_step=on_step)
    with Watchdog(member.rank, board, options.stall_limit_s, phase=Phase.CLOCKS) as watchdog:
        clock = (*before, *clock_reading(transport, member))
        watchdog.enter(Phase.REPORT)
    ends = [end for _, end in report.step_ns]
    return replace(
        report,
        step_ns=list(zip(store.began_ns, ends, strict=True)),
        clock=clock,
        energy=metered.meter.close(),
    )


def _rank_options(workload: EmulatedWorkload, limit_s: float) -> RankOptions:
    """Return how a rank runs; a device may wait for all that the others compute."""
    emulation = workload.emulation
    return RankOptions(
        steps=emulation.steps,
        blocking=emulation.blocking,
        stall_limit_s=limit_s + float(workload.seconds.sum()),
        keep_results=False,
    )


def put_emulated_together(workload: EmulatedWorkload, reports: Sequence[RankReport]) -> Run:
    """Return what all ranks saw as one; a step lasts from idle to its last instruction."""
    reports = [aligned(report) for report in reports]
    run = put_together(workload.task, reports, TimelineOrigin.EMULATED)
    step_s = tuple(
        (max(report.step_ns[step][1] for report in reports)
         - min(report.step_ns[step][0] for report in reports)) / 1e9
        for step in range(len(reports[0].step_ns))
    )  # fmt: skip
    return replace(run, step_s=step_s)


def emulate_forked(
    workload: EmulatedWorkload,
    *,
    limit_s: float = 300.0,
    log_directory: Path | None = None,
    on_step: Callable[[int, Any], None] = lambda _, __: None,
    move: Callable[[Member], Member] = lambda member: member,
    stop: Callable[[], str] = never,
) -> Run:
    """Emulate a plan in forked processes of this machine.

    Args:
        workload: What is emulated.
        limit_s: How long ranks may wait for one another, besides for what they sleep.
        log_directory: Where what the ranks print goes.
        on_step: Called with a rank and each message that it sends.
        move: What a rank does first, such as to join the others over another network.
        stop: Returns why the ranks are to stop before their last step; empty = they are not.

    Raises:
        WorkerError: A rank failed, died or stood still; names it.
    """
    program = workload.task.program
    world = len(used_devices(program))
    board = StatusBoard(world)
    _ = workload.buffer  # made here once, the ranks share it

    def main(member: Member, _: object) -> RankReport:
        return run_emulated_rank(
            workload, move(member), board=board, limit_s=limit_s, on_step=member.notify
        )

    stopper = Stopper(board, range(world), stop)
    reports = reports_of_forked(
        main,
        StatusView(board, program, range(world)),
        stall_limit_s=limit_s,
        wait_limit_s=max(MEETING_LIMIT_S, limit_s + float(workload.seconds.sum())),
        log_directory=log_directory,
        on_step=on_step,
        on_look=stopper.look,
    )
    stopped = stopper.why if reports[0].has_stopped else ""
    return replace(put_emulated_together(workload, reports), stopped=stopped)
