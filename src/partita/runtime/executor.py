"""Runs a plan for real: a process for each device, and what they saw put together."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from partita.core.plan import Plan
from partita.core.problem import Problem
from partita.core.program import Kind, Program
from partita.core.timeline import Timeline, TimelineOrigin
from partita.energy.client.counter import EnergyUse
from partita.errors import UnsupportedError, WorkerError
from partita.processes import ended_by_signals
from partita.program.lower import lower
from partita.program.order import ListOrder
from partita.ranks.failures import BadDataError, NotFiniteError
from partita.ranks.member import Member
from partita.ranks.pool import Main, RankPool
from partita.ranks.status import StatusBoard, StatusView
from partita.runtime.clocks import to_rank_0
from partita.runtime.process_transport import used_devices
from partita.runtime.rank import RankOptions, RankReport, StepNews, run_rank
from partita.runtime.rank_capture import MemoryUse, merged_trace
from partita.runtime.restarts import (
    Attempts,
    Incident,
    PassedData,
    Stopper,
    Survival,
    newest_step,
)
from partita.runtime.results import RunResult, merged, step_result
from partita.runtime.task import Task
from partita.runtime.training.saving import import_writer
from partita.runtime.workload import Workload

MEETING_LIMIT_S = 60.0
"""How long ranks wait at least for one another to come, however soon an instruction must end."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Run:
    """A run that has ended well.

    Attributes:
        result: Losses, outputs, gradients and weights.
        timelines: What happened when, for each of the last steps whose stamps were kept: all, or
            those of the last ``KEPT_STAMPS`` where results were not kept. The clocks of all ranks
            are aligned.
        step_s: Seconds of every step: from the end of the step before on all ranks to its own end,
            the first from its first instruction. Steps overlap at their edges.
        memory: The memory of each device that it is known of, by name.
        trace: What torch's profiler saw of all ranks, a Chrome trace; empty = nothing.
        energy: What each rank used, by the name of its device, in the order of ranks; empty = that
            was not asked for.
        held_out: Loss on held-out data after some steps, by step.
        losses: The loss of every step that is known of, by its number: also of steps that an
            earlier attempt has done, each once. Of the other figures those of the last attempt
            count.
        incidents: Failures that it has survived.
        stopped: Why it ended before its last step; empty = it did not.
        warnings: Sentences of its ranks that people should read.
        weight_bytes: Bytes of first weights that its ranks have read from files.
    """

    result: RunResult
    timelines: tuple[Timeline, ...]
    step_s: tuple[float, ...]
    memory: Mapping[str, MemoryUse] = field(default_factory=dict)
    trace: str = ""
    energy: Mapping[str, EnergyUse] = field(default_factory=dict)
    held_out: Mapping[int, float] = field(default_factory=dict)
    losses: Mapping[int, float] = field(default_factory=dict)
    incidents: tuple[Incident, ...] = ()
    stopped: str = ""
    warnings: tuple[str, ...] = ()
    weight_bytes: int = 0


def check_runnable(plan: Plan) -> None:
    """Check that the executor can run a plan.

    Raises:
        UnsupportedError: It cannot yet; names the stage and what it needs.
    """
    for index, stage in enumerate(plan.stages):
        for what, degree in (("context", stage.cp), ("expert", stage.ep)):
            if degree > 1:
                raise UnsupportedError(
                    f"stage {index} has {what}-parallel degree {degree}, which can be planned, "
                    "simulated and exported but not run; plan with degree 1"
                )


def make_task(
    problem: Problem, plan: Plan, workload: Workload, *, order: ListOrder = ListOrder.DEVICE
) -> Task:
    """Return what the ranks of a run share.

    Args:
        problem: The problem.
        plan: A plan for it.
        workload: What it computes.
        order: Whose order the devices list their compute in.

    Raises:
        UnsupportedError: The executor cannot run the plan.
    """
    check_runnable(plan)
    return Task(problem, plan, lower(problem, plan, order=order), workload.code)


def run_forked(
    task: Task,
    workload: Workload,
    *,
    options: RankOptions,
    log_directory: Path | None = None,
    on_step: Callable[[int, Any], None] = lambda _, __: None,
    survival: Survival | None = None,
) -> Run:
    """Run a plan in forked processes of this machine.

    Args:
        task: What is run.
        workload: What it computes.
        options: How.
        log_directory: Where what the ranks print goes.
        on_step: Called with a rank and each message that it sends.
        survival: How it goes on when a rank fails; if not given, it does not.

    Raises:
        WorkerError: A rank failed, died or stood still; names it.
    """
    if options.saving is not None:
        import_writer()
    world = len(used_devices(task.program))
    survival = Survival() if survival is None else survival
    attempts = Attempts(survival, partial(newest_step, options.saving))

    warnings: list[str] = []

    def note(rank: int, news: Any) -> None:  # noqa: ANN401 (ranks may send anything)
        if isinstance(news, str):
            warnings.append(news)
            survival.say(news)
            return
        if isinstance(news, StepNews):
            attempts.note(rank, news)
        on_step(rank, news)

    while True:
        board = StatusBoard(world)
        stopper = Stopper(board, range(world), survival.stop)
        main = partial(_be_rank, task, workload, options, board)
        try:
            reports = reports_of_forked(
                main,
                StatusView(board, task.program, range(world)),
                stall_limit_s=options.stall_limit_s,
                log_directory=log_directory,
                on_step=note,
                on_look=stopper.look,
            )
        except WorkerError as exc:
            if isinstance(exc, NotFiniteError):
                workload = _past_bad_data(workload, options, attempts, exc)
            attempts.fail(exc)
            options = options.again()
        else:
            return replace(
                put_together(task, reports),
                losses=attempts.record.losses(),
                incidents=tuple(attempts.incidents),
                stopped=stopper.why if reports[0].has_stopped else "",
                warnings=tuple(warnings),
            )


def _past_bad_data(
    workload: Workload, options: RankOptions, attempts: Attempts, error: NotFiniteError
) -> Workload:
    """Return a workload that leaves out the data since the newest checkpoint.

    The same steps on the same data would come to the same end.

    Raises:
        NotFiniteError: The run is not to go on.
    """
    if not isinstance(error, BadDataError) or options.saving is None:
        raise error
    return passing_over(workload, attempts.passed_data())


def passing_over(workload: Workload, passed: PassedData) -> Workload:
    """Return a workload that leaves out some of its data."""
    load = workload.load

    def shifted(step: int, microbatch: int, name: str) -> Tensor:
        return load(step + passed.count if step >= passed.step else step, microbatch, name)

    return replace(workload, load=shifted)


def _be_rank(
    task: Task,
    workload: Workload,
    options: RankOptions,
    board: StatusBoard,
    member: Member,
    _: object,
) -> RankReport:
    return run_rank(task, member, workload, options=options, board=board, on_step=member.notify)


def reports_of_forked(
    main: Main,
    view: StatusView,
    *,
    stall_limit_s: float,
    wait_limit_s: float = MEETING_LIMIT_S,
    log_directory: Path | None = None,
    on_step: Callable[[int, Any], None] = lambda _, __: None,
    on_look: Callable[[], None] = lambda: None,
) -> list[RankReport]:
    """Let forked ranks do something once; signals that end this process end them first.

    Args:
        main: What each rank does.
        view: The ranks, and where they say what they are doing.
        stall_limit_s: How long one may show no sign of life.
        wait_limit_s: How long they wait for one another, if that is longer.
        log_directory: Where what the ranks print goes.
        on_step: Called with a rank and each message that it sends.
        on_look: Called a few times a second while they run.

    Raises:
        WorkerError: A rank failed, died or stood still; names it.
    """
    with (
        ended_by_signals(),
        RankPool(
            len(view.ranks),
            main,
            limit_s=max(stall_limit_s, wait_limit_s),
            stall_limit_s=stall_limit_s,
            board=view.board,
            log_directory=log_directory,
        ) as pool,
    ):
        return pool.call(None, on_message=on_step, on_look=on_look, view=view)


def put_together(
    task: Task,
    reports: list[RankReport],
    origin: TimelineOrigin = TimelineOrigin.MEASURED,
) -> Run:
    """Return what all ranks saw as one, all times by rank 0's clock."""
    reports = [aligned(report) for report in reports]
    by_device = {report.device: report for report in reports}
    steps = range(len(reports[0].records))
    names = task.plan.devices
    timelines = tuple(
        _timeline(task.program, by_device, step, origin)
        for step in steps
        if all(len(report.records[step].begin_ns) for report in reports)
    )
    return Run(
        result=RunResult(
            steps=tuple(
                step_result(task, [report.records[step] for report in reports]) for step in steps
            ),
            state=merged([report.state for report in reports], task),
            statistics={names[device]: report.statistics for device, report in by_device.items()},
        ),
        timelines=timelines,
        step_s=step_seconds(reports),
        memory={names[r.device]: r.memory for r in reports if r.memory is not None},
        trace=merged_trace({names[r.device]: r.trace for r in reports if r.trace}),
        energy={names[r.device]: r.energy for r in reports if r.energy is not None},
        held_out={
            step: sum(report.held_out[step] for report in reports) for step in reports[0].held_out
        },
        weight_bytes=sum(report.weight_bytes for report in reports),
    )


def aligned(report: RankReport) -> RankReport:
    """Return a report with its times by rank 0's clock."""
    if not report.clock:
        return report
    moved = to_rank_0(report.clock)
    return replace(
        report,
        records=[
            replace(
                record,
                begin_ns=moved(record.begin_ns),
                end_ns=moved(record.end_ns),
            )
            for record in report.records
        ],
        step_ns=[(begin, end) for begin, end in moved(np.array(report.step_ns, np.int64)).tolist()],
        clock=(),
    )


def step_seconds(reports: Sequence[RankReport]) -> tuple[float, ...]:
    """Return the seconds of each step over all ranks, from end to end."""
    steps = range(len(reports[0].step_ns))
    if not steps:
        return ()  # resumed where it had ended
    begin = min(report.step_ns[0][0] for report in reports)
    edges = [begin, *(max(report.step_ns[step][1] for report in reports) for step in steps)]
    seconds = [(after - before) / 1e9 for before, after in pairwise(edges)]
    for step in reports[0].held_out:  # evaluations come between two steps
        after = step + 1 - reports[0].first_step
        if after in steps:
            begin = min(report.step_ns[after][0] for report in reports)
            seconds[after] = (edges[after + 1] - begin) / 1e9
    return tuple(seconds)


def _timeline(
    program: Program, reports: dict[int, RankReport], step: int, origin: TimelineOrigin
) -> Timeline:
    begin, end = np.zeros(len(program), np.int64), np.zeros(len(program), np.int64)
    for device, report in reports.items():
        rows = slice(int(program.ptr[device]), int(program.ptr[device + 1]))
        begin[rows], end[rows] = report.records[step].begin_ns, report.records[step].end_ns
    # Loads and receives of a step may come while another rank is still in the one before.
    first = int(begin[program.kind == Kind.FORWARD].min())
    return Timeline(
        origin=origin,
        devices=program.devices,
        device=program.device,
        instruction=np.arange(len(program), dtype=np.int32),
        kind=program.kind,
        stage=program.stage,
        microbatch=program.microbatch,
        peer=program.peer,
        start_s=np.maximum(begin - first, 0) / 1e9,
        end_s=np.maximum(end - first, 0) / 1e9,
        bytes=program.bytes,
    )
