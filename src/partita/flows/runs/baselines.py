"""Which plan a baseline stands for: what people do without a planner."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from partita.core.plan import Shard, Stage
from partita.core.problem import Mode, Problem
from partita.core.solution import Solution
from partita.errors import InvalidInputError
from partita.planners.pipeline import main_devices, pipeline_plan, solution_of
from partita.planners.table import solve
from partita.runtime.baselines.names import BASELINES, TORCH_WAYS


def baseline_plan(name: str, problem: Problem, *, device: str = "", seed: int = 0) -> Solution:
    """Return the plan that a baseline stands for, with its predicted value.

    Args:
        name: One of ``BASELINES``.
        problem: The problem.
        device: Where everything runs, for ``single``; empty = the fastest.
        seed: Of ``random``.

    Raises:
        InfeasibleError: It does not fit.
        InvalidInputError: There is no such baseline, or it does not take a device.
    """
    if name not in BASELINES:
        raise InvalidInputError(f"there is no baseline {name!r}; there are {', '.join(BASELINES)}")
    if device and name != "single":
        raise InvalidInputError(f"baseline {name} uses all devices; only single takes a device")
    if name == "torch-1f1b":
        return solve(problem, "uniform")
    if name in TORCH_WAYS:
        return _replicated(name, problem)
    options: Mapping[str, Mapping[str, Any]] = {
        "single": {"device": device},
        "random": {"seed": seed},
    }
    return solve(problem, name, **options.get(name, {}))


def _replicated(name: str, problem: Problem) -> Solution:
    """Return the whole model on every device, its weights divided for the training of ``fsdp``.

    Where the devices do not divide the microbatches, the first ones take one more.
    """
    devices = main_devices(problem)
    each, more = divmod(problem.microbatches, len(devices))
    if not each:
        raise InvalidInputError(
            f"{name} gives every device a microbatch; {problem.microbatches} are too few for "
            f"{len(devices)} devices: use as many microbatches or more, or fewer devices"
        )
    if more and name == "fsdp":
        raise InvalidInputError(
            f"fsdp gathers weights in every microbatch, so that all devices need as many; "
            f"{problem.microbatches} microbatches do not divide by {len(devices)} devices"
        )
    divides = name == "fsdp" and problem.objective.mode is Mode.TRAINING
    first = pipeline_plan(problem, np.zeros(len(problem.graph), dtype=np.int32), [devices[:1]])
    stage = Stage(
        devices=tuple((place,) for place in range(len(devices))),
        shares=tuple(each + (place < more) for place in range(len(devices))) if more else (),
        shard=Shard.PARAMETERS if divides and len(devices) > 1 else Shard.NONE,
    )
    names = tuple(problem.cluster.device_names[device] for device in devices)
    return solution_of(problem, replace(first, devices=names, stages=(stage,)), "", {})
