"""Merak's rules over layers: ``uniform_floor``, ``parameters`` and ``uniform_transformer``.

Each gives boundaries over the layers that a graph counts; stage k is the layers from boundary k up
to boundary k + 1, on consecutive devices. ``uniform`` has a file of its own, ``custom`` takes any
boundaries. Departures from Merak: ``parameters`` is exact instead of a bisection with a tolerance,
and blocks and embeddings are found by the graph's block labels instead of by class name.
"""

import re

import numpy as np

from partita.core.columns import Array
from partita.core.graph import Graph
from partita.core.problem import Problem
from partita.core.solution import Solution
from partita.errors import InvalidInputError
from partita.planners.pipeline import (
    layer_of_ops,
    layered_plan,
    legal_boundaries,
    main_devices,
    solution_of,
)


def plan_uniform_floor(problem: Problem, *, stages: int = 0, replicas: int = 1) -> Solution:
    """Give every stage floor(layers / stages) layers and the last one the rest.

    Args:
        problem: The problem.
        stages: Number of stages; 0 = as many as the devices allow.
        replicas: Replicas of every stage.
    """
    _, layers = layer_of_ops(problem.graph)
    count = number_of_stages(problem, stages, replicas, layers)
    each = layers // count
    boundaries = [each * stage for stage in range(count)] + [layers]
    return solved_cut(problem, boundaries, "uniform_floor", stages, replicas)


def plan_parameters(problem: Problem, *, stages: int = 0, replicas: int = 1) -> Solution:
    """Make the stage with the most trainable parameters as light as it can be.

    A parameter counts for the first layer that uses it. Of several best cuts the one is taken whose
    early stages are fullest.

    Args:
        problem: The problem.
        stages: Number of stages; 0 = as many as the devices allow.
        replicas: Replicas of every stage.
    """
    weights = _layer_parameters(problem.graph)
    count = number_of_stages(problem, stages, replicas, len(weights))
    boundaries = lightest_cut(weights, count)
    return solved_cut(problem, boundaries, "parameters", stages, replicas)


def plan_uniform_transformer(problem: Problem, *, stages: int = 0, replicas: int = 1) -> Solution:
    """Give every stage ceil(blocks / stages) blocks; embeddings go first, the head goes last.

    A model with an encoder and a decoder gives half of its stages to each, so that their number
    must be even.

    Args:
        problem: The problem.
        stages: Number of stages; 0 = as many as the devices allow.
        replicas: Replicas of every stage.

    Raises:
        InvalidInputError: The graph has no blocks, or an odd number of stages for two stacks.
    """
    stacks, layers = _stacks(problem.graph)
    count = number_of_stages(problem, stages, replicas, sum(last - first for first, last in stacks))
    if count % len(stacks):
        raise InvalidInputError(
            f"uniform_transformer gives an encoder and a decoder half of the stages each, "
            f"{count} is odd; use an even number"
        )
    share = count // len(stacks)
    boundaries = [0]
    for number, (first, last) in enumerate(stacks):
        each = -(-(last - first) // share)
        inner = [min(first + each * stage, last) for stage in range(1, share)]
        end = layers if number == len(stacks) - 1 else last
        boundaries += [*inner, end]
    boundaries = sorted(set(boundaries))
    return solved_cut(problem, boundaries, "uniform_transformer", stages, replicas)


def number_of_stages(problem: Problem, stages: int, replicas: int, units: int) -> int:
    """Return the number of stages to make of some units."""
    devices = len(main_devices(problem))
    if not 1 <= replicas <= devices:
        raise InvalidInputError(f"replicas is {replicas}; expected 1 to {devices}")
    if not 0 <= stages * replicas <= devices:
        raise InvalidInputError(
            f"{stages} stages of {replicas} replicas need {stages * replicas} devices; "
            f"there are {devices}"
        )
    return min(stages or devices // replicas, units)


def solved_cut(
    problem: Problem, boundaries: list[int], planner: str, stages: int, replicas: int
) -> Solution:
    """Return the solution of a rule that gives boundaries, moved to where a cut is allowed."""
    boundaries = legal_boundaries(problem.graph, boundaries)
    options = {"stages": stages, "replicas": replicas}
    plan = layered_plan(problem, boundaries, replicas)
    return solution_of(problem, plan, planner, options, stats={"boundaries": boundaries})


def _layer_parameters(graph: Graph) -> Array:
    """Return the trainable elements of each layer, every parameter counted once."""
    layer, count = layer_of_ops(graph)
    table = graph.parameters
    first = np.full(len(table), count, dtype=np.int64)
    used_in = layer[table.use_op]
    forward = used_in >= 0
    np.minimum.at(first, table.use_parameter[forward], used_in[forward])
    held = table.trainable & (first < count)
    return np.bincount(first[held], weights=table.elements[held], minlength=count)


def lightest_cut(weights: Array, stages: int) -> list[int]:
    """Return the boundaries of a cut into non-empty parts whose heaviest part is lightest.

    The optimum is one of the sums of consecutive layers: they are bisected, and each candidate is
    tried by filling part after part. O(n² log n) in the number of layers.
    """
    total = np.concatenate([[0.0], np.cumsum(weights)])
    sums = np.unique((total[None, :] - total[:, None])[np.triu_indices(len(total), 1)])
    low, high = 0, len(sums) - 1
    while low < high:
        middle = (low + high) // 2
        if _filled(weights, stages, float(sums[middle])) is not None:
            high = middle
        else:
            low = middle + 1
    found = _filled(weights, stages, float(sums[low]))
    assert found is not None
    return found


def _filled(weights: Array, stages: int, limit: float) -> list[int] | None:
    """Fill part after part up to a limit, at least a layer each; None = the limit is too low."""
    boundaries, count = [0], len(weights)
    for part in range(stages):
        begin, latest = boundaries[-1], count - (stages - part - 1)
        end, held = begin, 0.0
        while end < latest and (end == begin or held + weights[end] <= limit * (1 + 1e-12)):
            held += float(weights[end])
            end += 1
        if held > limit * (1 + 1e-12):
            return None
        boundaries.append(end)
    return boundaries if boundaries[-1] == count else None


def _stacks(graph: Graph) -> tuple[list[tuple[int, int]], int]:
    """Return the first layer and the layer after the last of each stack of blocks, and the layers.

    Blocks whose names differ only in their last number belong to one stack.
    """
    layer, count = layer_of_ops(graph)
    blocks = graph.ops.blocks
    if not bool((blocks.of >= 0).any()) or not len(graph.ops.layers.names):
        raise InvalidInputError(
            f"uniform_transformer needs a graph with transformer blocks; {graph.name!r} has none"
        )
    family_of = [re.sub(r"\d+\D*$", "", name) or name for name in blocks.names]
    family = [""] * count
    for op in np.flatnonzero(blocks.of >= 0).tolist():
        if layer[op] >= 0:
            family[int(layer[op])] = family_of[int(blocks.of[op])]
    starts = [i for i in range(count) if family[i] and (i == 0 or family[i - 1] != family[i])]
    ends = [
        i + 1 for i in range(count) if family[i] and (i + 1 == count or family[i + 1] != family[i])
    ]
    stacks = list(zip(starts, ends, strict=True))
    if len(stacks) not in (1, 2):
        raise InvalidInputError(
            f"uniform_transformer needs one stack of blocks, or an encoder and a decoder; "
            f"{graph.name!r} has {len(stacks)}"
        )
    return stacks, count
