"""The search of PipeDream's ``optimizer_graph_hierarchical.py`` as released, faults included.

A state is an antichain, standing for the ideal of all that it and its ancestors are. States are
reached from the first source alone (B2): with one source these are all ideals; with several, what
cannot be reached from it is left out of the search, and goes with the ops that it reads here. With
O the outputs of the augmented antichain (B5), c the compression, on a level of n units at rate B

    A[i, j, m] = min( (t(i,j) + 4 (m-1) P / (B m w)) / m,
                      max(A[i, k, m-m'], (t(k,j) + 4 (m'-1) P / (B m')) / m',
                          2 O(k) / (B m' c), 2 O(j) / (B m' c) unless j ends the model) )

over states k between i and j and m' < m. The first stage's output is free (B4), the all-reduce is
divided by w, the units of the level below, for it alone (B8). The outer level takes t = A[.., n] of
the inner one. Memory (B9): ceil(units after / units) x (activations + parameters) up to the limit.

One departure: on two levels, states k that do not follow i are left out (B3). The released code
takes them, and then splits ops that cannot be split. ``O(states^2 n^2)`` on one level, times the
states on two.
"""

import math
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from partita.core.columns import Array, Longs
from partita.core.problem import Problem
from partita.core.solution import Solution
from partita.errors import InfeasibleError, InvalidInputError
from partita.kernels import run
from partita.objectives.cuts import counted_ops, produced_bytes
from partita.planners.lattice.ideals import Ideals, enumerate_ideals
from partita.planners.lattice.quotient import Quotient, node_sums
from partita.planners.pipedream.build import check_positive, plan_on
from partita.planners.pipedream.model import Model, model_of
from partita.planners.pipedream.planner import ONE_DEVICE_AN_OP
from partita.planners.pipedream.site import Site, site_of
from partita.planners.pipeline import solution_of
from partita.released.pipedream_kernel import released_cuts, released_level

NEVER = 1e299


class Options(NamedTuple):
    """Options of the released optimizer; ``compression`` ``None`` = transfers are free."""

    straight: bool
    fewer: bool
    memory: bool
    compression: float | None


class ReleasedPlan(NamedTuple):
    """What the released optimizer finds: its period, the stage of each node, and the devices."""

    period_s: float
    stage_of: Longs
    devices: tuple[tuple[int, ...], ...]
    model: Model
    num_states: int


class _States(NamedTuple):
    """The states with the empty one before them, ascending by size.

    Attributes:
        sets: Nodes of each, as rows of bits.
        within: Whether one follows another, a dense table.
        seconds: Work below each.
        parameter: Parameter bytes below.
        kept: Activation and parameter bytes below.
        out: Bytes of the cut after each.
    """

    sets: Array
    within: Array
    seconds: Array
    parameter: Array
    kept: Array
    out: Array


class _Stage(NamedTuple):
    low: int
    high: int
    units: int


def plan_pipedream_released(
    problem: Problem,
    *,
    straight: bool = False,
    fewer: bool | None = None,
    memory: bool | None = None,
    compression: float | None = None,
    ideals: int = 3000,
    orders: int = 32,
    **_limits: object,
) -> Solution:
    """Return what the released optimizer finds; the stats have the period that it prints.

    Limits of our search are accepted and change nothing: the released one always runs to its end.

    Args:
        problem: The problem.
        straight: One device per stage.
        fewer: Whether devices may stay unused; by default not.
        memory: Whether the search keeps the released rule of memory; by default not.
        compression: Activation compression ratio; by default transfers cost nothing.
        ideals: States up to which it searches; more are refused.
        orders: Linear orders, which only our search looks at.

    Raises:
        InfeasibleError: No plan keeps the memory or uses every device.
        InvalidInputError: An option is out of range, the cluster is not equal servers of equal
            devices, or there are too many states.
    """
    for name, value in (("compression", compression), ("ideals", ideals), ("orders", orders)):
        check_positive(name, value)
    options: dict[str, Any] = {"as_released": True, "straight": straight}
    given = {"fewer": fewer, "memory": memory, "compression": compression}
    options |= {name: value for name, value in given.items() if value is not None}
    straight = straight or problem.objective.metric in ONE_DEVICE_AN_OP
    asked = Options(straight, fewer is True, memory is True, compression)
    found = released_plan(problem, asked, ideals)
    plan = plan_on(problem, found.stage_of[found.model.q.node_of], found.devices)
    stats = {"predicted_s": found.period_s, "states": found.num_states}
    return solution_of(problem, plan, "pipedream", options, stats=stats)


def released_plan(problem: Problem, options: Options, limit: int) -> ReleasedPlan:
    """Return the plan of the released optimizer.

    Raises:
        InfeasibleError: No plan keeps the memory or uses every device.
        InvalidInputError: The cluster is not equal servers of equal devices, or there are more than
            ``limit`` states.
    """
    site, model = site_of(problem), model_of(problem, reduce=False)
    inner = _checked_size(site, model)
    states = _states(problem, model, site, limit)
    memory = float(site.memory_bytes[0]) if options.memory else math.inf
    count = len(states.out)
    work = states.seconds[None, :] - states.seconds[:, None]
    rates = (float(site.rate[0]), site.outer_rate)
    levels = [(inner, rates[0], 1)] + [(site.num_servers, rates[1], inner)] * (site.num_servers > 1)
    for level, (units, rate, amortised) in enumerate(levels):
        setting = (units, rate, amortised, options, memory)
        if level == len(levels) - 1:
            break
        work = np.stack(
            [_level(states, work, start, setting)[0][:, units] for start in range(count)]
        )
    value, chosen = _level(states, work, 0, setting)
    if not value[-1, units] < NEVER:
        raise InfeasibleError(_why_not(problem, site, options, count - 1))
    outer = _chain(chosen, count - 1, units)
    if len(levels) == 1:
        stages, groups = outer, _row_groups(site, outer)
    else:
        stages, groups = _inside(states, outer, levels[0], options, memory, site)
    return ReleasedPlan(
        float(value[-1, units]), _stage_of(model.q, states, stages), groups, model, count - 1
    )


def _checked_size(site: Site, model: Model) -> int:
    """Return the devices of a server; refuse clusters that the optimizer cannot describe."""
    sizes = np.bincount(site.server)
    kinds = np.unique(model.class_of[site.devices])
    if len(set(sizes.tolist())) > 1 or len(kinds) > 1 or len(set(site.rate.tolist())) > 1:
        raise InvalidInputError(
            "as_released knows equal devices in equal servers alone; leave it out for this cluster"
        )
    return int(sizes[0])


def _why_not(problem: Problem, site: Site, options: Options, states: int) -> str:
    count = len(site.devices)
    if options.straight and not options.fewer and states < count:
        return (
            f"{count} stages of one device each, but graph {problem.graph.name!r} has {states} "
            f"states to cut at: device {problem.cluster.device_names[site.devices[states]]!r} "
            "would stay empty; use fewer=true or fewer devices"
        )
    name = problem.cluster.device_names[site.devices[0]]
    return (
        f"the released optimizer finds no plan that keeps {site.memory_bytes[0]:.0f} bytes on "
        f"device {name!r} and all {count} in use; use larger devices, or leave as_released out"
    )


def _level(
    states: _States, work: Array, start: int, setting: tuple[int, float, int, Options, float]
) -> tuple[Array, tuple[Longs, Longs]]:
    """Return the periods from a state to all others by units, and how they come about."""
    units, rate, amortised, options, memory = setting
    count = len(states.out)
    value = np.full(count * (units + 1), 1e300)
    via, taken = np.zeros((2, count * (units + 1)), dtype=np.int64)
    flags = (options.compression or 0.0, options.fewer, options.straight, memory)
    run(
        released_level,
        count * count * units,
        (
            np.array([start, units, rate, amortised, *flags], dtype=np.float64),
            *(states.within, work.ravel(), states.parameter, states.kept, states.out),
        ),
        (np.zeros(units + 1), value, via, taken),
    )
    shape = (count, units + 1)
    return value.reshape(shape), (via.reshape(shape), taken.reshape(shape))


def _chain(chosen: tuple[Longs, Longs], last: int, units: int, start: int = 0) -> list[_Stage]:
    """Return the stages that lead to a state, first stage first."""
    via, taken = chosen
    stages: list[_Stage] = []
    while last != start:
        before, used = int(via[last, units]), int(taken[last, units])
        stages.append(_Stage(before, last, used))
        last, units = before, units - used
    return stages[::-1]


def _row_groups(site: Site, stages: list[_Stage]) -> tuple[tuple[int, ...], ...]:
    ends = np.cumsum([0, *(stage.units for stage in stages)]).tolist()
    return tuple(tuple(site.devices[begin:end].tolist()) for begin, end in pairwise(ends))


def _inside(
    states: _States,
    outer: list[_Stage],
    level: tuple[int, float, int],
    options: Options,
    memory: float,
    site: Site,
) -> tuple[list[_Stage], tuple[tuple[int, ...], ...]]:
    """Return the stages inside the servers of each outer stage, with their devices."""
    each = level[0]
    work = states.seconds[None, :] - states.seconds[:, None]
    stages: list[_Stage] = []
    groups: list[tuple[int, ...]] = []
    server = 0
    for part in outer:
        _, chosen = _level(states, work, part.low, (*level, options, memory))
        first = 0
        for stage in _chain(chosen, part.high, each, part.low):
            places = [
                (server + copy) * each + first + replica
                for replica in range(stage.units)
                for copy in range(part.units)
            ]
            stages.append(stage)
            groups.append(tuple(site.devices[places].tolist()))
            first += stage.units
        server += part.units
    return stages, tuple(groups)


def _stage_of(q: Quotient, states: _States, stages: list[_Stage]) -> Longs:
    """Return the stage of each node; nodes that no state holds go with the last that they read."""
    found = np.full(q.num_nodes, -1, dtype=np.int64)
    for number, stage in reversed(list(enumerate(stages))):
        bits = states.sets[stage.high].astype("<u8").view(np.uint8)
        found[np.unpackbits(bits, count=q.num_nodes, bitorder="little") > 0] = number
    for node in np.flatnonzero(found < 0).tolist():
        before = q.pred[q.pred_ptr[node] : q.pred_ptr[node + 1]]
        found[node] = max(found[before].tolist(), default=0)
    return found


def _states(problem: Problem, model: Model, site: Site, limit: int) -> _States:
    graph, q = problem.graph, model.q
    sources = np.flatnonzero(np.diff(q.pred_ptr) == 0)
    if len(sources) == 1:
        ideals = enumerate_ideals(q, limit)
        sets = None if ideals is None else ideals.sets
        within = None if ideals is None else _contained(ideals)
    else:
        sets, within = _reached(q, _first_source(q, sources), limit)
    if sets is None or within is None:
        raise InvalidInputError(
            f"graph {graph.name!r} has more than {limit} states, too many for as_released; "
            "leave it out, or raise the option ideals"
        )
    counted = counted_ops(graph)
    kind = int(model.class_of[site.devices[0]])
    size = node_sums(q, produced_bytes(graph) * counted)
    parameter = node_sums(q, graph.parameter_bytes * counted)
    member = np.unpackbits(
        sets.astype("<u8").view(np.uint8), axis=1, count=q.num_nodes, bitorder="little"
    ).astype(np.float64)
    out = np.zeros(len(sets))
    words = sets.shape[1]
    bit = np.left_shift(np.uint64(1), np.arange(64, dtype=np.uint64))
    run(
        released_cuts,
        len(sets) * q.num_nodes * words,
        (q.succ_ptr, q.succ, size, np.ascontiguousarray(sets).ravel(), bit, np.array([words])),
        (np.zeros(q.num_nodes * words, dtype=np.uint64), out),
    )
    return _States(
        sets=sets,
        within=within,
        seconds=member @ model.seconds[kind],
        parameter=member @ parameter,
        kept=member @ (parameter + size),
        out=out,
    )


def _contained(ideals: Ideals) -> Array:
    """Return whether an ideal lies inside another, as a dense table."""
    sets = ideals.sets
    inside = np.ones((len(sets), len(sets)), dtype=bool)
    for word in range(sets.shape[1]):
        column = sets[:, word]
        inside &= (column[:, None] & column[None, :]) == column[:, None]
    return inside.astype(np.int8).ravel()


def _first_source(q: Quotient, sources: Longs) -> int:
    """Return the source whose first op stands first in the graph."""
    first = np.full(q.num_nodes, len(q.node_of))
    np.minimum.at(first, q.node_of, np.arange(len(q.node_of)))
    return int(sources[np.argmin(first[sources])])


def _reached(q: Quotient, source: int, limit: int) -> tuple[Array | None, Array | None]:
    """Return the states that the released search reaches from one source, and who follows whom.

    From an antichain, a node of its augmented list gives way to one of its successors; what then
    lies below another node of the list is dropped.
    """
    after = [
        q.succ[q.succ_ptr[node] : q.succ_ptr[node + 1]].tolist() for node in range(q.num_nodes)
    ]
    below = [0] * q.num_nodes
    for node in range(q.num_nodes):
        for other in after[node]:
            below[other] |= below[node] | 1 << node
    succ_mask = [sum(1 << other for other in others) for others in after]

    def augmented(antichain: frozenset[int]) -> list[int]:
        extra = {
            node
            for top in antichain
            for node in _bits(below[top])
            if succ_mask[node] & ~(below[top] | 1 << top)
        }
        return sorted(antichain | extra)

    begin = frozenset([source])
    found = {begin: 1 << source | below[source]}
    steps: list[tuple[frozenset[int], frozenset[int]]] = []
    queue = [begin]
    for state in queue:
        tops = augmented(state)
        for node in tops:
            for after_node in after[node]:
                if after_node in state or any(below[top] >> after_node & 1 for top in tops):
                    continue
                fresh = {*tops, after_node} - {node}
                lower = 0
                for top in fresh:
                    lower |= below[top]
                target = frozenset(top for top in fresh if not lower >> top & 1)
                steps.append((state, target))
                if target not in found:
                    found[target] = lower | sum(1 << top for top in target)
                    queue.append(target)
                    if len(found) > limit:
                        return None, None
    return _table(q.num_nodes, found, steps)


def _bits(mask: int) -> list[int]:
    return [place for place in range(mask.bit_length()) if mask >> place & 1]


def _table(
    num_nodes: int,
    found: dict[frozenset[int], int],
    steps: list[tuple[frozenset[int], frozenset[int]]],
) -> tuple[Array, Array]:
    """Return rows of bits by ascending size, the empty state first, and reachability."""
    order = sorted(found, key=lambda state: (found[state].bit_count(), found[state]))
    number = {state: index for index, state in enumerate(order, 1)}
    words = -(-num_nodes // 64)
    raw = b"".join(found[state].to_bytes(8 * words, "little") for state in order)
    sets = np.vstack(
        [
            np.zeros((1, words), dtype=np.uint64),
            np.frombuffer(raw, dtype="<u8").reshape(len(order), words).astype(np.uint64),
        ]
    )
    count = len(order) + 1
    reach = np.zeros((count, count), dtype=np.int8)
    reach[0, 1:] = 1
    into: list[list[int]] = [[] for _ in range(count)]
    for before, after in steps:
        into[number[after]].append(number[before])
    for state in range(1, count):
        for earlier in into[state]:
            reach[:, state] |= reach[:, earlier]
            reach[earlier, state] = 1
    return sets, reach.ravel()
