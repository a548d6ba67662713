"""Devices for Piper's stages: which a search may use, which stage gets which, and why none do."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from partita.core.columns import Array
from partita.core.problem import Problem
from partita.errors import InfeasibleError
from partita.planners.obstacle import Needs, obstacle, places, unfound
from partita.planners.pipeline import main_devices
from partita.planners.piper.choices import Allowed, Choices
from partita.planners.piper.search import Search, limits_of
from partita.planners.piper.space import BRIEF, Space, space_of

MAX_POOLS = 4


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Pool:
    """Devices that count as alike.

    Attributes:
        devices: Their numbers in the cluster.
        size: Bytes that each may use.
    """

    devices: Array
    size: float


def pools(problem: Problem) -> list[Pool]:
    """Return the devices with at least m bytes, for every (at most ``MAX_POOLS``) m there is.

    Of several kinds of devices only the main one counts, unless it cannot run some op.
    """
    usable = np.array(main_devices(problem))
    if not problem.allowed[1][:, usable].any(axis=1).all():
        usable = np.arange(len(problem.cluster))
    memory = problem.limit_bytes[usable]
    sizes = np.unique(memory)
    step = -(-len(sizes) // MAX_POOLS)
    return [Pool(devices=usable[memory >= m], size=float(m)) for m in sizes[::step].tolist()]


def search_in(
    problem: Problem, allowed: Allowed, choices: Choices, space: Space, pool: Pool
) -> Search:
    """Return a search of a space over a pool."""
    microbatches = problem.microbatches
    most = min(microbatches, len(pool.devices)) if allowed.data_parallel else 1
    divisors = np.array([d for d in range(1, most + 1) if microbatches % d == 0])
    limits = limits_of(
        space,
        choices,
        devices=len(pool.devices),
        divisors=divisors,
        microbatches=microbatches,
        size=pool.size,
    )
    return Search(space, limits)


def assign_devices(
    problem: Problem, stage_of: Array, counts: Sequence[int], devices: Array
) -> list[list[int]]:
    """Return the devices of each stage: in their order, or as rules allow.

    Raises:
        InfeasibleError: The rules leave a stage too few devices.
    """
    row_of, matrix = problem.allowed
    ends = np.cumsum([0, *counts])
    if matrix[:, devices].all():
        return [devices[a:b].tolist() for a, b in pairwise(ends)]
    rights = [
        matrix[np.unique(row_of[stage_of == stage])].all(axis=0)[devices]
        for stage in range(len(counts))
    ]
    owner = np.full(len(devices), -1)
    for stage in np.argsort([right.sum() for right in rights], kind="stable").tolist():
        for _ in range(counts[stage]):
            if not _take_one(rights, owner, stage):
                op = problem.graph.ops.names[int(np.argmax(stage_of == stage))]
                raise InfeasibleError(
                    f"the stage of op {op!r} needs {counts[stage]} devices; the rules leave it "
                    f"{int(rights[stage].sum())} that others need too"
                )
    return [devices[owner == stage].tolist() for stage in range(len(counts))]


def _take_one(rights: Sequence[Array], owner: Array, stage: int) -> bool:
    """Give a stage one device more, moving those of others along a chain where need be."""
    given: dict[int, tuple[int, int]] = {}
    queue = [stage]
    for taker in queue:
        for device in np.flatnonzero(rights[taker]).tolist():
            holder = int(owner[device])
            if holder < 0:
                owner[device] = gainer = taker
                while gainer != stage:
                    moved, gainer = given[gainer]
                    owner[moved] = gainer
                return True
            if holder != stage and holder not in given:
                given[holder] = (device, taker)
                queue.append(holder)
    return False


def why_nothing_fits(problem: Problem, allowed: Allowed, choices: Choices, pool: Pool) -> str:
    """Return which limit no plan keeps, with an op or a device, and what would do."""
    unlimited = space_of(problem.graph, choices, math.inf, BRIEF)
    nodes = unlimited.nodes
    need = np.where(np.isfinite(nodes.seconds), nodes.least, math.inf).min(axis=0)
    worst = int(np.argmax(need))
    if need[worst] == math.inf:
        op = problem.graph.ops.names[int(np.argmax(unlimited.node_of == worst))]
        return (
            f"op {op!r} and those that it must share a device with have no tensor-parallel degree "
            f"in common that {len(pool.devices)} devices allow"
        )
    needs = Needs(
        problem=problem,
        unit_of=unlimited.node_of,
        unit_bytes=need,
        devices=pool.devices,
        limit_bytes=np.full(len(pool.devices), pool.size),
        may=places(problem, unlimited.node_of, len(need))[:, pool.devices].T,
        total_bytes=float(need.sum()),
        counted="at least, with one microbatch in flight",
    )
    plain = obstacle(needs)
    if plain:
        return plain
    by_rules = search_in(problem, allowed, choices, unlimited, pool).fits()
    return unfound(needs, "order of stages" if by_rules else "split", by_rules=by_rules)
