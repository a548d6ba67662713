"""Merak's ``autopipe``: a balanced cut, improved by playing it and unloading the critical stage.

Liu et al., "AutoPipe: A Fast Pipeline Parallelism Approach with Balanced Partitioning and
Micro-batch Slicing", CLUSTER 2022, as Merak uses it. With w_l the forward and backward time of
layer l, the start is the cut whose heaviest stage is lightest. Then the pipeline is played for
twice as many microbatches as stages (for each replica). The stage with the most time on the
critical path gives a layer to the stage before or after it, and the stages on that side are
balanced anew or left as they are; the best of these cuts is taken as long as the play gets shorter.

A cut takes ``O(n² log n)`` to balance, n the number of layers, and a simulated step to play.

Departures from Merak: times are those of the graph, measured or estimated, instead of FLOPs with a
backward of three times the forward; the play is that of the cost model, in the schedule of the
problem and with transfers; balanced cuts are exact; layers that must share a device count as one.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np

from partita.core.columns import Array
from partita.core.plan import equal_microbatches
from partita.core.problem import Mode, Problem
from partita.core.program import LAST_COMPUTE
from partita.core.solution import Solution
from partita.cost.durations import op_seconds
from partita.cost.predict import simulate
from partita.planners.merak import lightest_cut, number_of_stages, solved_cut
from partita.planners.pipeline import (
    cut_layers,
    layer_of_ops,
    legal_boundaries,
    main_devices,
    pipeline_plan,
)

Cut: TypeAlias = tuple[int, ...]
"""Units at which stages begin, and the number of units."""


def plan_autopipe(problem: Problem, *, stages: int = 0, replicas: int = 1) -> Solution:
    """Balance the stages, then shift layers off the critical one while a step gets shorter.

    Args:
        problem: The problem.
        stages: Number of stages; 0 = as many as the devices allow.
        replicas: Replicas of every stage.

    Raises:
        InfeasibleError: A device has too little memory.
        InvalidInputError: Too few devices for the stages.
    """
    starts = legal_boundaries(problem.graph, range(layer_of_ops(problem.graph)[1] + 1))
    count = number_of_stages(problem, stages, replicas, len(starts) - 1)
    weights = _unit_seconds(problem, starts)
    cut = _searched(_Player(problem=problem, starts=starts, replicas=replicas), weights, count)
    boundaries = [starts[unit] for unit in cut]
    return solved_cut(problem, boundaries, "autopipe", stages, replicas)


def _unit_seconds(problem: Problem, starts: Sequence[int]) -> Array:
    """Return the seconds of the layers between places where a cut is allowed."""
    graph = problem.graph
    times = op_seconds(graph, problem.cluster.devices[main_devices(problem)[0]])
    seconds = times.forward_s
    if problem.objective.mode is Mode.TRAINING:
        seconds = seconds + times.backward_s
    layer, count = layer_of_ops(graph)
    counted = layer >= 0
    by_layer = np.bincount(layer[counted], weights=seconds[counted], minlength=count)
    return np.asarray(np.add.reduceat(by_layer, starts[:-1]))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Player:
    """Plays cuts of a problem's layers by the cost model."""

    problem: Problem
    starts: Sequence[int]
    replicas: int

    def play(self, cut: Cut) -> tuple[float, int]:
        """Return the seconds of a short step, and the stage with the most of its critical path."""
        problem, count = self.problem, len(cut) - 1
        devices = main_devices(problem)
        groups = [devices[s * self.replicas : (s + 1) * self.replicas] for s in range(count)]
        stage_of = cut_layers(problem.graph, [self.starts[unit] for unit in cut])
        sizes = equal_microbatches(2 * count * self.replicas, problem.microbatch_size)
        plan = replace(pipeline_plan(problem, stage_of, groups), microbatch_sizes=sizes)
        timeline = simulate(problem, plan)
        path = timeline.critical_path
        path = path[(timeline.stage[path] >= 0) & (timeline.kind[path] <= LAST_COMPUTE)]
        spent = np.bincount(
            timeline.stage[path],
            weights=timeline.end_s[path] - timeline.start_s[path],
            minlength=count,
        )
        return timeline.makespan_s, int(np.argmax(spent))


def _searched(player: _Player, weights: Array, stages: int) -> Cut:
    """Return the best cut that shifting layers off the critical stage leads to."""
    best: Cut = tuple(lightest_cut(weights, stages))
    length, critical = player.play(best)
    while True:
        found = [(*player.play(cut), cut) for cut in _unloaded(weights, best, critical)]
        shortest = min(found, default=(math.inf, 0, best))
        if shortest[0] >= length * (1 - 1e-12):
            return best
        length, critical, best = shortest


def _unloaded(weights: Array, cut: Cut, critical: int) -> Iterator[Cut]:
    """Yield the cuts in which the critical stage has a unit less, at its begin or at its end."""
    if cut[critical + 1] - cut[critical] < 2:
        return
    if critical > 0:
        begin = cut[critical] + 1
        yield (*cut[:critical], begin, *cut[critical + 1 :])
        yield (*lightest_cut(weights[:begin], critical), *cut[critical + 1 :])
    if critical < len(cut) - 2:
        end = cut[critical + 1] - 1
        yield (*cut[: critical + 1], end, *cut[critical + 2 :])
        rest = lightest_cut(weights[end:], len(cut) - 2 - critical)
        yield (*cut[: critical + 1], *(end + unit for unit in rest))
