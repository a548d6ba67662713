"""The best plan that a trainer can run: its rules are the space that is searched.

All numbers of stages, replicas, stages per rank, levels of sharding and ways to split the batch are
tried with blocks dealt by their time; then blocks move between neighbouring stages of the best one
as long as that helps. Ties go to the first that was tried.
"""

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

import numpy as np

from partita.core.grid import (
    WHOLE,
    Grid,
    block_chain,
    complete_grid,
    grid_of,
    is_tied,
    plan_of_grid,
    unit_cuts,
)
from partita.core.plan import Shard
from partita.core.problem import Problem
from partita.core.schedules import Schedule
from partita.core.solution import Solution
from partita.cost.judge import judge_candidate
from partita.errors import InfeasibleError, InvalidInputError
from partita.planners.auto.frame import batch_choices
from partita.planners.pipeline import main_devices, solution_of
from partita.trainers.rules import Trainer, get_trainer

MOST_CHUNKS = 4
"""Stages of a rank that are tried."""
MOVES = 40
"""Moves of a block that are tried at the end."""


def plan_regular(problem: Problem, *, trainer: str) -> Solution:
    """Return the best plan that a trainer can run.

    Raises:
        InfeasibleError: None fits.
    """
    rules = get_trainer(trainer)
    best: Grid | None = None
    value, why = float("inf"), ""
    for recompute in ("", WHOLE):
        for grid in _grids(problem, rules, recompute):
            found, reason = _value(problem, grid)
            why = why or reason
            if found < value:
                best, value = grid, found
        if best is not None:
            break
    if best is None:
        raise InfeasibleError(f"no plan for {rules.title} fits: {why or 'none can be made'}")
    best = _moved(problem, best, value)
    return solution_of(problem, plan_of_grid(problem, best), "regular", {"trainer": trainer})


def holds(problem: Problem, solution: Solution, trainer: str) -> bool:
    """Return whether a trainer can run a plan."""
    try:
        get_trainer(trainer).check(grid_of(problem, solution.plan))
    except InfeasibleError:
        return False
    return True


def _value(problem: Problem, grid: Grid) -> tuple[float, str]:
    try:
        found = judge_candidate(problem, plan_of_grid(problem, grid))
    except (InfeasibleError, InvalidInputError) as exc:
        return float("inf"), str(exc)
    return (float("inf"), found.reason) if found.limit is not None else (found.value.value, "")


def _grids(problem: Problem, rules: Trainer, recompute: str) -> Iterator[Grid]:
    """Yield the regular grids that a trainer can run, on the first devices of the cluster."""
    chain = block_chain(problem.graph)
    blocks, tied = len(chain.names), is_tied(problem.graph, chain)
    names = problem.cluster.device_names
    devices = [names[device] for device in main_devices(problem)]
    weights = _weights(problem)
    for size in range(1, len(devices) + 1):
        if len(devices) % size:
            continue
        for pp in (n for n in range(1, min(size, blocks) + 1) if size % n == 0):
            for shard in Shard if size > pp else (Shard.NONE,):
                for chunks in range(1, MOST_CHUNKS + 1 if pp > 1 else 2):
                    if pp * chunks > blocks:
                        break
                    units = pp == 1 and shard is Shard.PARAMETERS
                    cuts = unit_cuts(blocks) if units else _dealt(weights, pp * chunks)
                    for batch in batch_choices(problem):
                        grid = Grid(
                            pp=pp,
                            dp=size // pp,
                            chunks=len(cuts) // pp,
                            cuts=cuts,
                            ranks=tuple(devices[:size]),
                            shard=shard,
                            recompute=recompute,
                            batch_size=batch.count * batch.size,
                            microbatch_size=batch.size,
                            schedule=Schedule.INTERLEAVED
                            if len(cuts) > pp
                            else Schedule.ONE_F_ONE_B,
                            tied=tied,
                        )
                        if grid.microbatches and not any(rules.refusals(grid)):
                            yield grid


def _weights(problem: Problem) -> list[float]:
    """Return the seconds of each block; the first and the last have what is before and after."""
    graph = problem.graph
    chain = block_chain(graph)
    count = len(chain.names)
    place = np.clip(chain.place, 1, count) - 1
    seconds = (graph.forward_s + graph.backward_s) * graph.is_forward
    return [float(total) for total in np.bincount(place, weights=seconds, minlength=count)]


def _dealt(weights: list[float], stages: int) -> tuple[int, ...]:
    """Return the blocks of each stage so that the slowest is as quick as can be."""
    count = len(weights)
    total = np.concatenate([[0.0], np.cumsum(weights)])
    least = total.copy()
    cut_at: list[list[int]] = []
    for stage in range(1, stages):
        now, cuts = np.full(count + 1, np.inf), [0] * (count + 1)
        for end in range(stage + 1, count + 1):
            worst = np.maximum(least[stage:end], total[end] - total[stage:end])
            first = int(np.argmin(worst))
            now[end], cuts[end] = worst[first], first + stage
        least = now
        cut_at.append(cuts)
    ends = [count]
    for cuts in reversed(cut_at):
        ends.append(cuts[ends[-1]])
    bounds = [0, *reversed(ends)]
    return tuple(b - a for a, b in pairwise(bounds))


def _moved(problem: Problem, grid: Grid, value: float) -> Grid:
    """Return the grid after moves of a block to a neighbouring stage that make it quicker."""
    tried = 0
    improves = grid.pp > 1
    while improves and tried < MOVES:
        improves = False
        for stage in range(grid.num_stages - 1):
            for step in (1, -1):
                cuts = list(grid.cuts)
                cuts[stage] -= step
                cuts[stage + 1] += step
                if min(cuts) < 0:
                    continue
                other = replace(grid, cuts=tuple(cuts))
                found, _ = _value(problem, other)
                tried += 1
                if found < value:
                    grid, value, improves = other, found, True
    return complete_grid(problem, grid)
