"""What our executor is compared with: torch's own ways to train on several devices.

``ddp`` and ``fsdp`` run the untouched model on every rank, ``torch-1f1b`` the stages of a plan
under ``torch.distributed.pipelining``. Each takes the same samples in the same microbatches as a
plan, the same first weights, optimizer and weights of the losses, and is timed by the same rule.
They have no Program, so their runs have no timelines.

Each is in a module of its own, imported when it is asked for: torch takes seconds to import them.
"""

import importlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from partita.capture.origin import Captures
from partita.core.plan import Plan
from partita.core.problem import Problem
from partita.errors import InvalidInputError
from partita.program.lower import lower
from partita.ranks.member import Member
from partita.ranks.status import StatusBoard, StatusView
from partita.runtime.baselines_rank import Baseline, Subject, play_baseline
from partita.runtime.executor import Run, reports_of_forked, step_seconds
from partita.runtime.rank import RankOptions, RankReport
from partita.runtime.results import RunResult, merged, step_result
from partita.runtime.task import Task
from partita.runtime.verify import Verdict
from partita.runtime.workload import Workload

TORCH_BASELINES: Mapping[str, str] = {
    "ddp": "partita.runtime.baselines_ddp",
    "fsdp": "partita.runtime.baselines_fsdp",
    "torch-1f1b": "partita.runtime.baselines_pipeline",
}


def baseline_of(name: str) -> Baseline:
    """Return one of torch's ways by name.

    Raises:
        InvalidInputError: There is no such baseline.
    """
    if name not in TORCH_BASELINES:
        known = ", ".join(TORCH_BASELINES)
        raise InvalidInputError(f"torch has no baseline {name!r}; there are {known}")
    found: Baseline = importlib.import_module(TORCH_BASELINES[name]).BASELINE
    return found


def make_subject(problem: Problem, plan: Plan, captures: Captures, workload: Workload) -> Subject:
    """Return what a baseline trains: a model, with the microbatches of a plan.

    Args:
        problem: The problem.
        plan: Which rank takes which microbatches: one stage with a replica for each rank for
            ``ddp`` and ``fsdp``, a stage for each rank for ``torch-1f1b``.
        captures: The model, as the problem's graph was captured from it.
        workload: First weights, data, and the code of the plan's stages.
    """
    task = Task(problem, plan, lower(problem, plan), workload.code)
    return Subject(task=task, captures=captures, workload=workload)


def run_baseline(
    name: str,
    subject: Subject,
    *,
    options: RankOptions,
    log_directory: Path | None = None,
    on_step: Callable[[int, Any], None] = lambda _, __: None,
) -> Run:
    """Run one of torch's ways in forked processes of this machine.

    Args:
        name: ``ddp``, ``fsdp`` or ``torch-1f1b``.
        subject: What is trained.
        options: How.
        log_directory: Where what the ranks print goes.
        on_step: Called with a rank and each message that it sends.

    Raises:
        InvalidInputError: There is no such baseline.
        UnsupportedError: Torch cannot do what the plan needs; names it.
        WorkerError: A rank failed, died or stood still; names it.
    """
    baseline = baseline_of(name)
    baseline.check(subject)
    world = baseline.world(subject.task)
    board = StatusBoard(world)

    def main(member: Member, _: object) -> RankReport:
        return play_baseline(name, baseline, subject, member, options=options, board=board)

    reports = reports_of_forked(
        main,
        StatusView(board, None, range(world)),
        stall_limit_s=options.stall_limit_s,
        log_directory=log_directory,
        on_step=on_step,
    )
    return Run(result=_result(subject.task, reports), timelines=(), step_s=step_seconds(reports))


def verify_baseline(name: str, subject: Subject, found: RunResult, options: RankOptions) -> Verdict:
    """Run the same microbatches in one process and compare.

    Untouched models are compared with the same untouched model, stages with the interpreter: random
    numbers are drawn in the same way then.
    """
    return baseline_of(name).verify(subject, found, options)


def _result(task: Task, reports: list[RankReport]) -> RunResult:
    """Return what all ranks saw as one."""
    return RunResult(
        steps=tuple(
            step_result(task, list(records))
            for records in zip(*(report.records for report in reports), strict=True)
        ),
        state=merged([report.state for report in reports], task),
        statistics={},
    )
