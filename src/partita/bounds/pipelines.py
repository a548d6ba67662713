"""Bounds of the published pipeline times: PipeDream's, repaired and as released, and Piper's.

All are the time of the slowest stage or transfer, so devices of a stage with r replicas give

    r T  >=  seconds of its ops + what its parameters cost to reduce among r replicas

An op that alone takes longer than T on the fastest device must be in a stage with several replicas.
The smallest T that leaves room for all is the bound by work, indivisible ops and reductions.

A part H of the graph that cannot be split below a price (``traffic``) is in one stage, on r
devices, or is split, and then a cut carries that price.
"""

import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np

from partita.bounds.assignment import (
    Need,
    Room,
    assignment_dual,
    heaviest,
    least_cost,
    speed_weights,
    work_over_speed,
)
from partita.bounds.figures import Bound, Effort, batch_of
from partita.bounds.traffic import parts
from partita.core.columns import Array
from partita.core.problem import Metric, Mode, Problem
from partita.cost.tables import at_first_user, device_classes, held_bytes, units
from partita.objectives.cuts import counted_ops
from partita.objectives.placed import seconds_on
from partita.objectives.value import least_held_bytes

ALLREDUCE_FACTOR = 4.0
SEARCH_STEPS = 50
MIXED = 17


class _Servers(NamedTuple):
    """The cluster as servers.

    Attributes:
        size: Devices in the largest server.
        num_servers: Servers.
        inside: Largest bandwidth inside a server, bytes/s.
        between: Bandwidth of a server's port; inf = there is one server.
    """

    size: int
    num_servers: int
    inside: float
    between: float


def _servers(problem: Problem) -> _Servers | None:
    """Return the servers; ``None`` where the objectives do not apply."""
    cluster = problem.cluster
    if cluster.matrix is not None or len(cluster.levels) > 2:
        return None
    if not cluster.levels:
        return _Servers(len(cluster), 1, math.inf, math.inf)
    inner = cluster.levels[0]
    sizes = np.bincount(inner.group_of)
    between = math.inf
    if len(cluster.levels) == 2:
        between = cluster.levels[1].slowest_bytes_per_s
    inside = float(inner.bandwidth_bytes_per_s.max())
    return _Servers(int(sizes.max()), int((sizes > 0).sum()), inside, between)


class _Stages(NamedTuple):
    """Costs of ops in stages.

    Attributes:
        seconds: ``[classes, ops]``: forward and backward; inf = barred.
        reduced: Bytes of parameters of each op that replicas reduce.
        sync_s: Seconds to reduce a byte among at least r replicas, by r from 0 on.
    """

    seconds: Array
    reduced: Array
    sync_s: Array


def pipedream_bounds(problem: Problem, effort: Effort) -> Iterator[Bound]:
    """Yield bounds of PipeDream's time, repaired or as released."""
    servers = _servers(problem)
    if servers is None or problem.objective.mode is not Mode.TRAINING:
        return
    graph, classes = problem.graph, device_classes(problem)
    counted = counted_ops(graph)
    of, table = seconds_on(graph, classes.devices(problem), Mode.TRAINING)
    seconds = np.where(classes.allowed, np.where(counted, table[of], 0.0), np.inf)
    repaired = problem.objective.metric is Metric.PIPEDREAM_REPAIRED
    if repaired:
        held = held_bytes(graph.parameters, problem.objective)
        reduced = at_first_user(graph, held.gradients, counted)
    else:
        reduced = np.where(counted, graph.parameter_bytes, 0.0)
    stages = _Stages(seconds, reduced, _sync_s(problem, servers, released=not repaired))
    cost = units(graph).total(seconds)
    yield Bound(work_over_speed(cost, classes.sizes), "work over speed")
    least = least_held_bytes(problem)
    assert least is not None
    room = Room(classes.sizes, classes.sizes * classes.limit_bytes)
    dual = assignment_dual(Need(cost, units(graph).total(least)), room, effort)
    yield Bound(dual.value, "assignment LP")
    yield Bound(_with_reductions(problem, stages, dual.weights), "indivisible op")
    if repaired:
        yield from _stage_or_cut(problem, stages, servers, least)


def _sync_s(problem: Problem, servers: _Servers, *, released: bool) -> Array:
    """Return the least seconds to reduce a byte among at least r replicas, by r.

    m replicas in each of q servers: ``4 (m - 1) / m / B1 + 4 (q - 1) / q / B2``; as released, the
    second part may be divided by the devices of a server.
    """
    count = len(problem.cluster)
    divisor = servers.size if released else 1
    best = np.full(count + 2, np.inf)
    for inside in range(1, servers.size + 1):
        for outside in range(1, servers.num_servers + 1):
            sync = (inside - 1) / inside / servers.inside
            sync += (outside - 1) / outside / servers.between / divisor
            replicas = min(inside * outside, count)
            best[replicas] = min(best[replicas], ALLREDUCE_FACTOR * sync)
    least = np.minimum.accumulate(best[::-1])[::-1]
    return np.where(np.isfinite(least), least, 0.0)


def _with_reductions(problem: Problem, stages: _Stages, weights: Array) -> float:
    """Return the smallest T that leaves room for the ops and for the reductions that T forces."""
    group, classes = units(problem.graph), device_classes(problem)
    cost = group.total(stages.seconds)
    work, fastest = least_cost(cost, weights), cost.min(axis=0)
    reduced = group.total(stages.reduced) * float(weights.min())
    speed = heaviest(weights, classes.sizes, math.inf)
    devices = len(problem.cluster)

    def lacks_room(limit: float) -> bool:
        replicas = np.ceil(fastest / limit * (1 - 1e-9))
        if float(replicas.max()) > devices:
            return True
        need = work + reduced * stages.sync_s[np.maximum(replicas, 1).astype(np.int64)]
        return float(need.sum()) > speed * limit

    low = max(float(work.sum()) / speed, float(fastest.max()) / devices)
    return _smallest(lacks_room, low)


def _smallest(lacks_room: Callable[[float], bool], low: float) -> float:
    """Return a value at which there is still no room, just below the smallest with room."""
    if not low > 0 or not lacks_room(low * (1 + 1e-9)):
        return low
    high = 2 * low
    while lacks_room(high):
        low, high = high, 2 * high
    for _ in range(SEARCH_STEPS):
        middle = (low + high) / 2
        low, high = (middle, high) if lacks_room(middle) else (low, middle)
    return low


def _stage_or_cut(
    problem: Problem, stages: _Stages, servers: _Servers, state: Array
) -> Iterator[Bound]:
    """Yield what parts of the graph cost: in one stage, or cut.

    A cut with b bytes between r and r' devices, a share F of it inside servers, loads a link with
    ``2 b F / (B1 min(r, r'))`` and the ports of X servers with ``4 b (1 - F) / (B2 X)`` on average.
    """
    graph, classes = problem.graph, device_classes(problem)
    devices = len(problem.cluster)
    weights = speed_weights(stages.seconds)
    replicas = np.arange(1, devices + 1)
    speed = np.array([heaviest(weights, classes.sizes, r) for r in replicas.tolist()])
    half = max(1, devices // 2)
    ports = servers.between * servers.num_servers / 2 if servers.num_servers > 1 else 0.0
    carried = 2.0 / (servers.inside * half + ports)
    limit = float(classes.limit_bytes.max())
    live = _live_bytes(problem, counted_ops(graph))
    for part in parts(graph, live, stages.seconds.min(axis=0)):
        fits = float(state[part.holds].sum()) <= limit
        work = float(least_cost(stages.seconds[:, part.holds], weights).sum())
        sync = stages.sync_s[replicas] * float(stages.reduced[part.holds].sum()) * weights.min()
        whole = float(((work + sync) / speed).min()) if fits else math.inf
        cut = part.price * carried
        if not fits:
            yield Bound(cut, "memory forces a split")
        yield Bound(min(whole, cut), "cut" if cut < whole else "gradient reduction")


def _live_bytes(problem: Problem, counted: Array) -> Array:
    """Return the bytes of tensors that counted ops make and read; 0 for others."""
    graph = problem.graph
    read = np.zeros(len(graph.tensors), dtype=bool)
    read[graph.edges.tensor[counted[graph.edges.reader]]] = True
    made = (graph.tensors.producer >= 0) & read
    return np.where(made, graph.tensors.bytes, 0.0)


class _Choices(NamedTuple):
    """Variants of ops as Piper may run them, a row each; sorted by op.

    Attributes:
        op: The op.
        tp: Devices of a replica.
        seconds: Forward and backward.
        reduced_s: Seconds that each replica more costs: ``4 parameters / N`` over the bandwidth.
        memory_bytes: Memory of a device with one microbatch in flight.
    """

    op: Array
    tp: Array
    seconds: Array
    reduced_s: Array
    memory_bytes: Array


def piper_bounds(problem: Problem, effort: Effort) -> Iterator[Bound]:
    """Yield bounds of Piper's time: by work and replicas, and by work and memory."""
    del effort
    graph = problem.graph
    if not len(graph.variants) or problem.cluster.matrix is not None:
        return
    choices = _choices(problem)
    if len(np.unique(choices.op)) < len(graph):
        return
    devices = len(problem.cluster)
    plain = _least(choices, choices.tp * choices.seconds, len(graph)).sum() / devices
    yield Bound(float(plain), "work over speed")
    yield Bound(_piper_replicas(problem, choices), "indivisible op")
    yield Bound(_piper_turns(problem, choices), "few microbatches")
    yield Bound(_piper_memory(problem, choices), "memory forces a split")


def _choices(problem: Problem) -> _Choices:
    """Return the variants that some device group can hold."""
    variants = problem.graph.variants
    rates = [level.slowest_bytes_per_s for level in problem.cluster.levels]
    rate = min(rates, default=math.inf)
    turns = batch_of(problem).most_turns
    memory = variants.saved_bytes + variants.fixed_memory_bytes
    limit = float(device_classes(problem).limit_bytes.max())
    fits = (memory <= limit) & (variants.tp <= len(problem.cluster))
    rows = np.flatnonzero(fits)
    rows = rows[np.argsort(variants.op[rows], kind="stable")]
    return _Choices(
        variants.op[rows],
        variants.tp[rows].astype(np.float64),
        (variants.forward_s + variants.backward_s)[rows],
        4 * variants.parameter_bytes[rows] / turns / rate,
        memory[rows],
    )


def _least(choices: _Choices, values: Array, size: int) -> Array:
    """Return the least value of each op's variants."""
    best = np.full(size, np.inf)
    np.minimum.at(best, choices.op, values)
    return best


def _piper_replicas(problem: Problem, choices: _Choices) -> float:
    """Return the smallest T that leaves room for all ops and their reductions.

    A variant with t devices and d replicas takes ``t (seconds + (d - 1) reduced)`` of them, and
    needs ``seconds + (d - 1) reduced <= d T``.
    """
    devices, size = len(problem.cluster), len(problem.graph)
    turns = batch_of(problem).most_turns

    def lacks_room(limit: float) -> bool:
        spare = limit - choices.reduced_s
        with np.errstate(divide="ignore", invalid="ignore"):
            more = np.ceil((choices.seconds - limit) / spare * (1 - 1e-9))
        alone = choices.seconds <= limit * (1 + 1e-9)
        replicas = np.where(alone, 1.0, np.where(spare > 0, 1 + np.maximum(more, 1), np.inf))
        replicas[replicas > min(turns, devices)] = np.inf
        extra = np.where(np.isfinite(replicas), replicas - 1, 0.0) * choices.reduced_s
        need = np.where(np.isfinite(replicas), choices.tp * (choices.seconds + extra), np.inf)
        return float(_least(choices, need, size).sum()) > devices * limit

    low = float(_least(choices, choices.tp * choices.seconds, size).sum()) / devices
    return _smallest(lacks_room, low)


def _piper_turns(problem: Problem, choices: _Choices) -> float:
    """Return the bound by devices and by replicas, of which there are N in all at the most.

    ``devices T >= sum of t seconds`` and ``N T >= sum of seconds``, mixed in any proportion.
    """
    devices, turns = len(problem.cluster), batch_of(problem).most_turns
    best = 0.0
    for share in np.linspace(0.0, 1.0, MIXED).tolist():
        cost = (share * choices.tp / devices + (1 - share) / turns) * choices.seconds
        best = max(best, float(_least(choices, cost, len(problem.graph)).sum()))
    return best


def _piper_memory(problem: Problem, choices: _Choices) -> float:
    """Return the bound by work and memory: a price p for memory makes leaner variants pay.

    ``devices T >= sum of min (t seconds + p t memory) - p (all memory)`` for every p >= 0; the
    right side is concave in p.
    """
    limit = problem.limit_bytes.sum()
    devices, size = len(problem.cluster), len(problem.graph)
    work, memory = choices.tp * choices.seconds, choices.tp * choices.memory_bytes

    def value(price: float) -> float:
        least = _least(choices, work + price * memory, size)
        return (float(least.sum()) - price * float(limit)) / devices

    if not math.isfinite(limit):
        return 0.0
    high = float(work.sum()) / float(limit)
    low, best = 0.0, value(0.0)
    for _ in range(SEARCH_STEPS):
        a, b = low + (high - low) / 3, high - (high - low) / 3
        first, second = value(a), value(b)
        best = max(best, first, second)
        low, high = (a, high) if first < second else (low, b)
    return best
