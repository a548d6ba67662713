"""``partita.train`` and ``partita.run``: a model or a plan in, a run beside its prediction out.

What they do imports torch, which is said in one line where it is not there.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

from partita.flows.extras import torch_needed
from partita.flows.fields import PlanSource
from partita.flows.options_file import read_options_file
from partita.flows.runs.requests import (
    RUNS,
    OnStep,
    RunRequest,
    TrainRequest,
    check_run,
    check_training,
    unwatched,
)
from partita.requests import OnProgress, Request, make, silent

if TYPE_CHECKING:
    from partita.flows.runs.detached import DetachedRun
    from partita.flows.runs.execute import Outcome

_R = TypeVar("_R", bound=Request)


def train(
    model: str | None = None,
    /,
    *,
    config: str | None = None,
    on_progress: OnProgress = silent,
    on_step: OnStep = unwatched,
    **options: Any,  # noqa: ANN401 (fields of TrainRequest)
) -> "Outcome | DetachedRun | None":
    """Profile a model, plan it over this machine's devices, and train it by the plan.

    Args:
        model: A built-in name, a Hugging Face configuration, or ``package.module:callable``.
        config: A YAML file of options; those that are given here win.
        on_progress: Called with each step of the work.
        on_step: Called with a rank and each training step that it has done.
        **options: The fields of :class:`TrainRequest`: the options of ``partita train``.

    Returns:
        The run beside its prediction; None on other hosts than the first, which has it; where
        ``detach`` leaves it to itself, its directory.

    Raises:
        InvalidInputError: There is no such model or option.
        WorkerError: A rank failed, died or stood still, or a check found a difference.
    """
    given = options if model is None else {**options, "model": model}
    request = check_training(_request(TrainRequest, config, given))
    with torch_needed("training needs"):
        from partita.flows.runs.steps import carry_out, prepare_training  # noqa: PLC0415 (torch)
    prepared = prepare_training(request, on_progress)
    if request.detach:
        from partita.flows.runs.detached import detach  # noqa: PLC0415 (torch)

        return detach(prepared)
    return _checked(carry_out(prepared, on_progress, on_step))


def run(
    plan: PlanSource,
    /,
    *script: str,
    config: str | None = None,
    on_progress: OnProgress = silent,
    on_step: OnStep = unwatched,
    **options: Any,  # noqa: ANN401 (fields of RunRequest)
) -> "Outcome | DetachedRun | None":
    """Run a plan over processes, and compare it with its prediction.

    Args:
        plan: What ``partita plan`` wrote for a graph that ``partita profile`` made: the path of the
            file, or the solution itself.
        *script: A script of your own with its arguments, which every rank runs.
        config: A YAML file of options; those that are given here win.
        on_progress: Called with each step of the work.
        on_step: Called with a rank and each training step that it has done.
        **options: The fields of :class:`RunRequest`: the options of ``partita run``.

    Returns:
        The run beside its prediction; None on other hosts than the first, which has it; where
        ``detach`` leaves it to itself, its directory.

    Raises:
        InvalidInputError: There is no such plan or option.
        UnsupportedError: The devices of the plan are not here.
        WorkerError: A rank failed, died or stood still, or a check found a difference.
    """
    given = {**options, "plan": plan, **({"script": script} if script else {})}
    request = _request(RunRequest, config, given)
    check_run(request)
    with torch_needed("a run needs"):
        from partita.flows.runs.steps import carry_out, prepare_run  # noqa: PLC0415 (torch)
    prepared = prepare_run(request)
    if request.detach:
        from partita.flows.runs.detached import detach  # noqa: PLC0415 (torch)

        return detach(prepared)
    return _checked(carry_out(prepared, on_progress, on_step))


def run_plan(
    plan: PlanSource | Path,
    *,
    steps: int = 10,
    optimizer: str = "adam",
    check: bool = False,
    runs: str | Path = RUNS,
) -> "Outcome":
    """Run a plan of a profiled model on this machine: :func:`run` with its usual options.

    Args:
        plan: What ``partita plan`` wrote, or the path of it.
        steps: Number of steps.
        optimizer: ``sgd``, ``momentum`` or ``adam``.
        check: Whether to compare the first steps with one process.
        runs: Where the run directory is made.

    Raises:
        UnsupportedError: The devices of the plan are not here.
        WorkerError: A rank failed, died or stood still, or a check found a difference.
    """
    source = str(plan) if isinstance(plan, Path) else plan
    outcome = run(source, steps=steps, optimizer=optimizer, check=check, runs=str(runs))
    # One host, and it is waited for.
    return cast("Outcome", outcome)


def _request(request: type[_R], config: str | None, given: dict[str, Any]) -> _R:
    found = {} if config is None else read_options_file(config, request)
    return make(request, **{**found, **given})


def _checked(outcome: "Outcome | None") -> "Outcome | None":
    if outcome is not None:
        outcome.require_equal()
    return outcome
