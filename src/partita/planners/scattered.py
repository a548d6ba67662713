"""A random placement: a check of everything that must not depend on a plan being a good one."""

import random

import numpy as np

from partita.core.graph import KIND_BIT
from partita.core.placement import placement_plan
from partita.core.plan import equal_microbatches
from partita.core.problem import Problem
from partita.core.solution import Solution
from partita.errors import InfeasibleError
from partita.planners.pipeline import solution_of

_TRIES = 20


def plan_random(problem: Problem, *, seed: int = 0) -> Solution:
    """Place every colocation class on a random device that may run it.

    Args:
        problem: The problem.
        seed: Of the random numbers. Placements that do not fit are drawn again, a few times.

    Raises:
        InfeasibleError: None of the placements that were drawn fits.
    """
    rng = random.Random(seed)
    refusal = InfeasibleError("no random placement was tried")
    schedule = problem.objective.placement_schedule
    for _ in range(_TRIES):
        plan = placement_plan(
            problem.graph,
            problem.cluster.device_names,
            np.array(_draw(problem, rng)),
            schedule=schedule,
            microbatch_sizes=equal_microbatches(problem.microbatches, problem.microbatch_size),
        )
        try:
            return solution_of(problem, plan, "random", {"seed": seed})
        except InfeasibleError as exc:
            refusal = exc
    raise InfeasibleError(f"none of {_TRIES} random placements fits; the last: {refusal}")


def _draw(problem: Problem, rng: random.Random) -> list[int]:
    """Return a device for each op; ops of a class share one that all of them may run on."""
    graph, devices = problem.graph, problem.cluster.devices
    kinds = graph.ops.device_kinds.tolist()
    colors = graph.ops.colocation.tolist()
    allowed_of: dict[int, int] = {}
    for color, kind in zip(colors, kinds, strict=True):
        if color >= 0:
            allowed_of[color] = allowed_of.get(color, kind) & kind
    able = {
        bits: [i for i, device in enumerate(devices) if KIND_BIT[device.kind] & bits]
        for bits in {*kinds, *allowed_of.values()}
    }
    home: dict[int, int] = {}
    placed = []
    for op, (color, kind) in enumerate(zip(colors, kinds, strict=True)):
        choices = able[allowed_of[color] if color >= 0 else kind]
        if not choices:
            from partita.planners.obstacle import no_device  # noqa: PLC0415 (says why)

            together = (
                np.flatnonzero(graph.ops.colocation == color) if color >= 0 else np.array([op])
            )
            raise InfeasibleError(no_device(problem, together))
        if color < 0:
            placed.append(rng.choice(choices))
        else:
            if color not in home:
                home[color] = rng.choice(choices)
            placed.append(home[color])
    return placed
