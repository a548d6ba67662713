"""From stages on devices to a plan: microbatches that divide, and shares by speed."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from partita.core.columns import Array, Longs
from partita.core.plan import Plan, Stage, equal_microbatches
from partita.core.problem import Metric, Mode, Problem, Schedule
from partita.errors import InfeasibleError, InvalidInputError
from partita.planners.pipedream.family import Family
from partita.planners.pipedream.model import Model

PER_MICROBATCH = (Metric.PIPEDREAM, Metric.PIPEDREAM_REPAIRED)
"""Metrics that are about one microbatch of a steady pipeline, however many a step has."""
MAX_ROUND = 100_000
"""Microbatches after which the route through all stages must repeat."""
MAX_SHARES = 1000
NEAR = 1e-4
"""How much slower than with exact shares a stage with whole ones may be."""


class StageOn(NamedTuple):
    """A stage: the ideals below and above it, devices of the cluster, and their shares."""

    low: int
    high: int
    devices: tuple[int, ...]
    shares: tuple[int, ...] = ()


def free_microbatches(problem: Problem) -> bool:
    """Return whether a plan may choose how many microbatches a step has."""
    objective = problem.objective
    return objective.microbatches is None and objective.metric in PER_MICROBATCH


def permitted_replicas(problem: Problem, most: int, *, divisors_of: int | None = None) -> Longs:
    """Return, for r from 0 to ``most`` + 1, the least permitted number of replicas from r on.

    The microbatches of a step must be dealt evenly: where their number is given, replicas divide
    it.
    """
    if divisors_of is None and not free_microbatches(problem):
        divisors_of = problem.microbatches
    good = np.arange(most + 2)
    if divisors_of is not None:
        fits = [r > most or (r > 0 and divisors_of % r == 0) for r in range(most + 2)]
        good = np.where(fits, good, most + 1)
    return np.minimum.accumulate(good[::-1])[::-1].astype(np.int64)


def pipeline_of(
    problem: Problem, model: Model, family: Family, stages: Sequence[StageOn]
) -> Plan | None:
    """Return the plan of a pipeline; ``None`` where its shares have no common round."""
    rounds = math.lcm(*(sum(stage.shares) or len(stage.devices) for stage in stages))
    count = rounds if free_microbatches(problem) else problem.microbatches
    if count > MAX_ROUND or count % rounds:
        return None
    nodes = family.stage_of([stage.high for stage in stages], model.q.num_nodes)
    stage_of = np.where(model.floating, 0, nodes[model.q.node_of])
    devices = [stage.devices for stage in stages]
    return plan_on(problem, stage_of, devices, [stage.shares for stage in stages])


def plan_on(
    problem: Problem,
    stage_of: Array,
    groups: Sequence[Sequence[int]],
    shares: Sequence[Sequence[int]] = (),
) -> Plan:
    """Return the plan of stages on groups of devices of the cluster.

    A step has as many microbatches as asked for, else the fewest that all replicas can share.

    Raises:
        InfeasibleError: That many microbatches cannot be dealt to the replicas.
    """
    dealt = list(shares) or [()] * len(groups)
    used = dict.fromkeys(device for group in groups for device in group)
    index = {device: number for number, device in enumerate(used)}
    rounds = math.lcm(*(sum(own) or len(group) for own, group in zip(dealt, groups, strict=True)))
    count = rounds if free_microbatches(problem) else problem.microbatches
    names = problem.cluster.device_names
    if count > MAX_ROUND or count % rounds:
        raise InfeasibleError(
            f"stages of {[len(group) for group in groups]} replicas, the first on device "
            f"{names[groups[0][0]]!r}, do not share {count} microbatches evenly; "
            f"use a multiple of {rounds}"
        )
    return Plan(
        fingerprint=problem.graph.fingerprint,
        devices=tuple(names[device] for device in used),
        stage_of=stage_of,
        stages=tuple(
            Stage(devices=tuple((index[device],) for device in group), shares=tuple(own))
            for group, own in zip(groups, dealt, strict=True)
        ),
        schedule=_schedule(problem, stage_of),
        microbatch_sizes=equal_microbatches(count, problem.microbatch_size),
    )


def _schedule(problem: Problem, stage_of: Array) -> Schedule:
    """Return the schedule asked for, else PipeDream's own where its time is what counts.

    It keeps versions of weights stage by stage, so not where stages share a parameter.
    """
    objective = problem.objective
    stashes = objective.metric in PER_MICROBATCH and objective.mode is Mode.TRAINING
    if objective.schedule is None and stashes and not _ties_stages(problem, stage_of):
        return Schedule.PIPEDREAM
    return problem.objective.pipeline_schedule


def _ties_stages(problem: Problem, stage_of: Array) -> bool:
    """Return whether two stages use one parameter."""
    table = problem.graph.parameters
    stage = stage_of[table.use_op]
    first = np.full(len(table), -1)
    first[table.use_parameter] = stage
    return bool((first[table.use_parameter] != stage).any())


def whole_shares(seconds: Array, dealt: int | None = None) -> tuple[int, ...]:
    """Return small whole shares by speed, given the seconds of a minibatch on each replica.

    The slowest replica is at most ``NEAR`` behind exact shares, or as near as ``MAX_SHARES`` go.
    Their sum divides ``dealt`` where that is given; empty = equal shares.

    >>> whole_shares(np.array([1.0, 1.0, 2.0]))
    (2, 2, 1)
    """
    if bool((seconds <= 0).any()) or bool((seconds == seconds[0]).all()):
        return ()
    speed = 1 / seconds
    exact = 1 / speed.sum()
    best: tuple[float, tuple[int, ...]] = (math.inf, ())
    for total in range(len(seconds), MAX_SHARES + 1):
        if dealt is not None and dealt % total:
            continue
        shares = np.maximum(1, np.floor(speed * exact * total)).astype(np.int64)
        for _ in range(total - int(shares.sum())):
            shares[int(np.argmin((shares + 1) * seconds))] += 1
        value = float((shares * seconds).max() / shares.sum())
        if value < best[0] * (1 - 1e-9):
            best = (value, tuple(shares.tolist()))
        if best[0] <= exact * (1 + NEAR):
            break
    return best[1]


def check_positive(name: str, value: float | None) -> None:
    """Check an option that must be above 0 where it is given."""
    if value is not None and not value > 0:
        raise InvalidInputError(f"{name} is {value}; expected more than 0")
