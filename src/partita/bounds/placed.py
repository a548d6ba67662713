"""Bounds where every op runs on one device: makespan, latency, single-sample latency, max-load."""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from partita.bounds.assignment import (
    Need,
    Room,
    assignment_dual,
    heaviest,
    largest_units,
    least_cost,
    speed_weights,
    work_over_speed,
)
from partita.bounds.figures import Bound, Effort, batch_of, best_link, trains, ways
from partita.bounds.paths import (
    Pieces,
    Steps,
    has_fastest,
    path_ends,
    path_to,
    place_ends,
    steps,
    window_bound,
)
from partita.bounds.traffic import groups_of, parts, seconds_in_groups
from partita.core.cluster import Cluster
from partita.core.columns import Array
from partita.core.graph import DeviceKind
from partita.core.problem import Mode, Problem
from partita.cost.tables import (
    DeviceClasses,
    at_first_user,
    device_classes,
    held_bytes,
    units,
)
from partita.objectives.placed import seconds_on
from partita.objectives.tarnawski import transfer_seconds
from partita.objectives.value import least_held_bytes


class _ClassLinks(NamedTuple):
    """Best bandwidth and latency between devices of two classes."""

    bandwidth_bytes_per_s: Array
    latency_s: Array


class _Pass(NamedTuple):
    """One pass over the graph, every op on one device.

    Attributes:
        seconds: ``[classes, ops]``: seconds of forward; inf = barred.
        links: The way from class to class.
        given_s: Seconds to move each tensor, where they are given.
        size_bytes: Size of each tensor.
        held_bytes: Memory that each op takes where it stands at least.
        first_s: When each op can start by itself.
    """

    seconds: Array
    links: _ClassLinks
    given_s: Array
    size_bytes: Array
    held_bytes: Array
    first_s: Array


def _class_links(cluster: Cluster, classes: DeviceClasses) -> _ClassLinks:
    """Return the best bandwidth and latency between different devices of every two classes."""
    size = len(classes.sizes)
    rate, wait = np.zeros((size, size)), np.full((size, size), np.inf)
    if cluster.matrix is not None:
        count = len(cluster)
        source, target = np.nonzero(~np.eye(count, dtype=bool))
        pair = (classes.of[source], classes.of[target])
        at = source * count + target
        np.maximum.at(rate, pair, cluster.matrix.bandwidth_bytes_per_s[at])
        np.minimum.at(wait, pair, cluster.matrix.latency_s[at])
        return _ClassLinks(rate, wait)
    for level in cluster.levels:
        found = np.unique(np.stack([level.group_of, classes.of]), axis=1)
        holds = np.zeros((len(level.latency_s), size), dtype=bool)
        holds[found[0], found[1]] = True
        for group in np.unique(level.group_of).tolist():
            here = np.flatnonzero(holds[group])
            pairs = np.ix_(here, here)
            rate[pairs] = np.maximum(rate[pairs], level.bandwidth_bytes_per_s[group])
            wait[pairs] = np.minimum(wait[pairs], level.latency_s[group])
    return _ClassLinks(rate, wait)


def makespan_bounds(problem: Problem, effort: Effort) -> Iterator[Bound]:
    """Yield bounds of Baechi's makespans: one forward pass, memory by Baechi's rule."""
    graph, classes = problem.graph, device_classes(problem)
    of, table = seconds_on(graph, classes.devices(problem), Mode.INFERENCE)
    seconds = np.where(graph.is_forward, table[of], 0.0)
    held = least_held_bytes(problem)
    assert held is not None
    one = _Pass(
        np.where(classes.allowed, seconds, np.inf),
        _class_links(problem.cluster, classes),
        graph.tensors.transfer_s,
        graph.tensors.bytes,
        held,
        np.zeros(len(graph)),
    )
    yield from _pass_bounds(problem, one, effort)


def latency_bounds(problem: Problem, effort: Effort) -> Iterator[Bound]:
    """Yield bounds of the latency of a microbatch."""
    graph, classes = problem.graph, device_classes(problem)
    samples = batch_of(problem).largest
    least = np.minimum.reduce([way.forward for way in ways(problem)])
    tensors = graph.tensors
    one = _Pass(
        least * graph.ops.time_factor(samples),
        _class_links(problem.cluster, classes),
        tensors.transfer_s * samples,
        tensors.bytes_at(samples),
        _state_bytes(problem),
        _first_s(problem) * samples,
    )
    yield from _pass_bounds(problem, one, effort, splits=len(graph.variants) > 0)


def _state_bytes(problem: Problem) -> Array:
    """Return the memory of an op's parameters on its device at least, sharded where that can be."""
    graph = problem.graph
    held = held_bytes(graph.parameters, problem.objective).total
    replicas = min(len(problem.cluster), batch_of(problem).most_turns) if trains(problem) else 1
    degree = int(graph.variants.tp.max()) if len(graph.variants) else 1
    return at_first_user(graph, held) / (replicas * degree)


def _first_s(problem: Problem) -> Array:
    """Return the seconds to load what each op reads of the model's inputs, for a batch."""
    graph = problem.graph
    edges = np.flatnonzero((graph.edge_source < 0) & graph.is_forward[graph.edges.reader])
    pairs = np.unique(np.stack([graph.edges.reader[edges], graph.edges.tensor[edges]]), axis=1)
    weights = graph.tensors.load_s[pairs[1]]
    return np.asarray(np.bincount(pairs[0], weights=weights, minlength=len(graph)))


def _pass_bounds(
    problem: Problem, one: _Pass, effort: Effort, *, splits: bool = False
) -> Iterator[Bound]:
    """Yield bounds of one forward pass.

    Args:
        problem: The problem.
        one: The pass.
        effort: How much it may cost.
        splits: Whether several devices may share an op.
    """
    graph, classes = problem.graph, device_classes(problem)
    way, least = steps(graph), one.seconds.min(axis=0)
    moved = _least_moved(problem, one, way)
    end = path_ends(way, least, moved, one.first_s)
    yield Bound(float(end.max()), "critical path")
    if not has_fastest(one.seconds):
        placed = place_ends(way, one.seconds, _moved_between(one, way))
        yield Bound(float(placed.max()), "critical path")
    yield Bound(_split_path(problem, one, way, end, moved), "memory forces a split")
    if splits:
        return
    cost = units(graph).total(one.seconds)
    yield Bound(work_over_speed(cost, classes.sizes), "work over speed")
    need = Need(cost, units(graph).total(one.held_bytes))
    room = Room(classes.sizes, classes.sizes * classes.limit_bytes)
    dual = assignment_dual(need, room, effort)
    yield Bound(dual.value, "assignment LP")
    yield Bound(largest_units(cost, classes.sizes, dual.weights), "indivisible op")
    upward = steps(graph, backward=True)
    after = path_ends(upward, least, _least_moved(problem, one, upward)) - least
    pieces = Pieces(end - least, after, least_cost(one.seconds, dual.weights))
    window = window_bound(pieces, heaviest(dual.weights, classes.sizes, np.inf))
    yield Bound(window, "work between first and last ops")
    yield from _split_parts(problem, one, dual.weights, end, after)


def _split_parts(
    problem: Problem, one: _Pass, weights: Array, end: Array, after: Array
) -> Iterator[Bound]:
    """Yield what parts of the graph cost: whole in one group of devices, or moved between groups.

    Groups are single devices, hosts, racks. If a part is split, some edge of it is moved between
    groups, and the pass goes through that edge.
    """
    graph, way = problem.graph, steps(problem.graph)
    least, reader = one.seconds.min(axis=0), np.repeat(np.arange(len(graph)), np.diff(way.ptr))
    given = one.given_s[way.tensor]
    for groups in groups_of(problem.cluster):
        moved = groups.latency_s + one.size_bytes[way.tensor] / groups.fastest_bytes_per_s
        moved = np.where(np.isnan(given), moved, given)
        through = end[way.source] + moved + least[reader] + after[reader]
        price = np.zeros(len(graph.tensors))
        price[way.tensor] = moved
        room = np.bincount(groups.of, weights=problem.limit_bytes)
        for part in parts(graph, price, least):
            seconds = seconds_in_groups(problem, groups, one.seconds[:, part.holds], weights)
            fits = float(one.held_bytes[part.holds].sum()) <= room
            whole = float(np.where(fits, seconds, np.inf).min())
            inside = part.holds[way.source] & part.holds[reader] & (moved >= part.price)
            split = float(through[inside].min(initial=np.inf))
            if min(whole, split) < np.inf:
                term = "cut" if np.isfinite(whole) else "memory forces a split"
                yield Bound(min(whole, split), term)


def _least_moved(problem: Problem, one: _Pass, way: Steps) -> Array:
    """Return the least seconds to move each edge's tensor between any two devices."""
    link = best_link(problem.cluster)
    seconds = link.latency_s + one.size_bytes[way.tensor] / link.bandwidth_bytes_per_s
    given = one.given_s[way.tensor]
    return np.where(np.isnan(given), seconds, given)


def _moved_between(one: _Pass, way: Steps) -> Array:
    """Return the least seconds to move each edge's tensor from class to class."""
    rate = one.links.bandwidth_bytes_per_s[:, :, None]
    wait = one.links.latency_s[:, :, None]
    with np.errstate(divide="ignore", invalid="ignore"):
        seconds = wait + one.size_bytes[way.tensor] / rate
    given = one.given_s[way.tensor]
    seconds = np.where(np.isnan(given), seconds, given)
    here = np.arange(len(rate))
    seconds[here, here] = 0.0
    return seconds


def _split_path(problem: Problem, one: _Pass, way: Steps, end: Array, moved: Array) -> float:
    """Return the longest path, and the path that holds most, with the moves that memory forces.

    A path whose ops need the memory of q + 1 devices is cut q times, at the best where it is cheap.
    """
    limits = np.sort(problem.limit_bytes)[::-1]
    room = np.cumsum(limits)
    least = one.seconds.min(axis=0)
    best = 0.0
    held = path_ends(way, one.held_bytes, np.zeros(len(way.source)))
    for ends in (end, held):
        ops, edges = path_to(way, ends, int(np.argmax(ends)))
        cuts = int(np.searchsorted(room, one.held_bytes[ops].sum() * (1 - 1e-12)))
        if 0 < cuts < len(limits):
            cheapest = np.sort(moved[edges])[:cuts].sum()
            best = max(best, float(least[ops].sum() + cheapest))
    return best


def single_sample_bounds(problem: Problem, effort: Effort) -> Iterator[Bound]:
    """Yield bounds of the single-sample latency: paths, as calls of a device may overlap."""
    del effort
    graph, classes = problem.graph, device_classes(problem)
    if not graph.is_forward.all():
        return
    seconds = _published_seconds(problem, Mode.INFERENCE)
    way, out = steps(graph), transfer_seconds(problem)[steps(graph).source]
    kinds = [device.kind for device in classes.devices(problem)]
    calls = np.array([kind is not DeviceKind.CPU for kind in kinds])
    times = calls[:, None].astype(np.float64) + calls[None, :]
    np.fill_diagonal(times, 0.0)
    end = place_ends(way, seconds, times[:, :, None] * out)
    yield Bound(float(end.max()), "critical path")


def _published_seconds(problem: Problem, mode: Mode) -> Array:
    """Return seconds by class and op; inf = barred."""
    classes = device_classes(problem)
    of, table = seconds_on(problem.graph, classes.devices(problem), mode)
    return np.where(classes.allowed, table[of], np.inf)


def max_load_bounds(problem: Problem, effort: Effort) -> Iterator[Bound]:
    """Yield bounds of the largest load of a device."""
    graph, classes = problem.graph, device_classes(problem)
    seconds = _published_seconds(problem, problem.objective.mode)
    cost = units(graph).total(seconds)
    yield Bound(work_over_speed(cost, classes.sizes), "work over speed")
    kinds = [device.kind for device in classes.devices(problem)]
    pays = np.array([kind is not DeviceKind.CPU for kind in kinds])
    held = least_held_bytes(problem)
    assert held is not None
    limit = np.where(pays, classes.limit_bytes, np.inf)
    need = Need(cost, units(graph).total(held))
    room = Room(classes.sizes, classes.sizes * limit)
    dual = assignment_dual(need, room, effort)
    yield Bound(dual.value, "assignment LP")
    yield Bound(largest_units(cost, classes.sizes, dual.weights), "indivisible op")
    yield from _load_cuts(problem, seconds, pays, held, limit)


def _load_cuts(
    problem: Problem, seconds: Array, pays: Array, held: Array, limit: Array
) -> Iterator[Bound]:
    """Yield what parts of the graph cost: whole on one device, or split.

    Split, every accelerator that has a piece of the part pays to move a tensor of it at least. And
    k devices are joined by k - 1 readings of cut ops: an op u with r of them costs ``(1 + r) c_u``
    in all, so that each reading costs at least ``(1 + 1 / readers of u) c_u``.
    """
    graph, classes = problem.graph, device_classes(problem)
    made = graph.tensors.producer >= 0
    out = transfer_seconds(problem) * (2.0 if _pays_twice(problem) else 1.0)
    price = np.zeros(len(graph.tensors))
    price[made] = out[graph.tensors.producer[made]]
    readers = np.bincount(steps(graph).source, minlength=len(graph))
    joined = np.where(readers > 0, out * (1 + 1 / np.maximum(readers, 1)), np.inf)
    weights = speed_weights(seconds)
    by_device = np.sort(np.repeat(weights[pays], classes.sizes[pays].astype(np.int64)))[::-1]
    speed = np.cumsum(by_device)
    others = float((classes.sizes * weights)[~pays].sum())
    for part in parts(graph, price, seconds.min(axis=0)):
        cost = seconds[:, part.holds]
        whole = np.where(held[part.holds].sum() <= limit, cost.sum(axis=1), np.inf)
        work = float(least_cost(cost, weights).sum())
        options = [float(whole.min())]
        reading = float(joined[part.holds & (out >= part.price)].min(initial=np.inf))
        if others > 0:
            options.append(work / others)
        if len(speed) and np.isfinite(reading):
            count = np.arange(1, len(speed) + 1)
            beyond = np.maximum((count - 1) * reading - count * part.price, 0.0) * by_device[-1]
            moving = part.price * speed + (0.0 if others > 0 else beyond)
            options.append(float(((work + moving) / (speed + others))[len(speed) > 1 :].min()))
        term = "memory forces a split" if not np.isfinite(whole).any() else "cut"
        if min(options) < np.inf:
            yield Bound(min(options), term)


def _pays_twice(problem: Problem) -> bool:
    """Return whether gradients travel like activations: some op has backward seconds everywhere."""
    if not trains(problem):
        return False
    members = device_classes(problem).devices(problem)
    both = seconds_on(problem.graph, members, Mode.TRAINING)[1]
    forward = seconds_on(problem.graph, members, Mode.INFERENCE)[1]
    return bool((both > forward).all(axis=0).any())
