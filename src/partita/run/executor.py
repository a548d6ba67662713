"""Runs a plan for real: a process for each device, and what they saw put together."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from partita.core.plan import Plan, Shard
from partita.core.problem import Problem
from partita.core.program import Program
from partita.core.timeline import Timeline, TimelineOrigin
from partita.cost.lower import lower
from partita.errors import UnsupportedError
from partita.run.board import Board, describe
from partita.run.local_ranks import RankPool
from partita.run.process_transport import Member, used_devices
from partita.run.rank import RankOptions, RankReport, run_rank
from partita.run.results import RunResult, merged, step_result
from partita.run.task import Task
from partita.run.workload import Workload


@dataclass(frozen=True, kw_only=True, eq=False)
class Run:
    """A run that has ended well.

    Attributes:
        result: Losses, outputs, gradients and weights.
        timelines: What happened when, for each step; the clocks of all ranks aligned.
        step_s: Seconds of each step, from its first instruction to its last on any rank.
    """

    result: RunResult
    timelines: tuple[Timeline, ...]
    step_s: tuple[float, ...]


def check_runnable(plan: Plan) -> None:
    """Check that the executor can run a plan.

    Raises:
        UnsupportedError: It cannot yet; names the stage and what it needs.
    """
    for index, stage in enumerate(plan.stages):
        if len(stage.devices[0]) > 1:
            raise UnsupportedError(
                f"stage {index} is split over {len(stage.devices[0])} devices by tensor "
                "parallelism, which can be planned and simulated but not run yet; plan with tp 1"
            )
        if stage.shard is not Shard.NONE:
            raise UnsupportedError(
                f"stage {index} shards its {stage.shard.value}, which can be planned and simulated "
                "but not run yet; plan without sharding, or run --baseline fsdp"
            )


def make_task(problem: Problem, plan: Plan, workload: Workload) -> Task:
    """Return what the ranks of a run share.

    Raises:
        UnsupportedError: The executor cannot run the plan.
    """
    check_runnable(plan)
    return Task(problem, plan, lower(problem, plan), workload.code)


def run_forked(
    task: Task,
    workload: Workload,
    *,
    options: RankOptions,
    log_directory: Path | None = None,
    told: Callable[[int, Any], None] = lambda _, __: None,
) -> Run:
    """Run a plan in forked processes of this machine.

    Args:
        task: What is run.
        workload: What it computes.
        options: How.
        log_directory: Where what the ranks print goes.
        told: Told a rank and what it says on the way.

    Raises:
        WorkerError: A rank failed, died or stood still; names it.
    """
    world = len(used_devices(task.program))
    board = Board(world)

    def main(member: Member, _: object) -> RankReport:
        return run_rank(task, member, workload, options=options, board=board)

    limit_s = options.stall_limit_s
    with RankPool(world, main, limit_s=limit_s, board=board, log_directory=log_directory) as pool:
        reports = pool.call(
            None, told=told, why_stuck=lambda: where_all_stand(board, task.program, world)
        )
    return put_together(task, reports)


def where_all_stand(board: Board, program: Program, world: int) -> str:
    """Return what every rank was doing, a line each."""
    return "\n".join(f"  {describe(board.read(rank), rank, program)}" for rank in range(world))


def put_together(
    task: Task,
    reports: list[RankReport],
    origin: TimelineOrigin = TimelineOrigin.MEASURED,
) -> Run:
    """Return what all ranks saw as one."""
    by_device = {report.device: report for report in reports}
    steps = range(len(reports[0].records))
    names = task.plan.devices
    timelines = tuple(_timeline(task.program, by_device, step, origin) for step in steps)
    return Run(
        result=RunResult(
            steps=tuple(
                step_result(task, [report.records[step] for report in reports]) for step in steps
            ),
            state=merged([report.state for report in reports], task),
            statistics={names[device]: report.statistics for device, report in by_device.items()},
        ),
        timelines=timelines,
        step_s=tuple(
            (
                max(report.step_ns[step][1] for report in reports)
                - min(report.step_ns[step][0] for report in reports)
            )
            / 1e9
            for step in steps
        ),
    )


def _timeline(
    program: Program, reports: dict[int, RankReport], step: int, origin: TimelineOrigin
) -> Timeline:
    begin, end = np.zeros(len(program)), np.zeros(len(program))
    first = min(report.step_ns[step][0] for report in reports.values())
    for device, report in reports.items():
        rows = slice(int(program.ptr[device]), int(program.ptr[device + 1]))
        record = report.records[step]
        begin[rows] = (np.array(record.begin_ns) - first) / 1e9
        end[rows] = (np.array(record.end_ns) - first) / 1e9
    return Timeline(
        origin=origin,
        devices=program.devices,
        device=program.device,
        instruction=np.arange(len(program), dtype=np.int32),
        kind=program.kind,
        stage=program.stage,
        microbatch=program.microbatch,
        peer=program.peer,
        start_s=begin,
        end_s=end,
        bytes=program.bytes,
    )
