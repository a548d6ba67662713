"""Bounds of the seconds of a step.

Weight stashing has no start and no end, so what a step waits for at its ends counts only where the
schedule is given and flushes. All plans with the problem's samples are meant: any split into
stages, several of them on a device, replicas with any shares, sharding, recomputation, and the
tensor-parallel degrees for which the graph has variants.
"""

from bisect import bisect_left
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from partita.bounds.assignment import (
    Need,
    Room,
    assignment_dual,
    heaviest,
    least_cost,
    work_over_speed,
)
from partita.bounds.figures import (
    Bound,
    Effort,
    batch_of,
    best_link,
    step_factor,
    trains,
    ways,
)
from partita.bounds.paths import Pieces, Steps, num_paths, path_ends, steps, window_bound
from partita.bounds.traffic import traffic_bounds
from partita.core.columns import Array
from partita.core.problem import Problem
from partita.cost.tables import at_first_user, device_classes, held_bytes, units


class _Work(NamedTuple):
    """Least seconds of ops for the graph's batch; rows are classes of devices.

    Attributes:
        shared: Device-seconds of forward and backward.
        forward: Seconds of forward on one device.
        backward: Seconds of backward there.
        backward_input: Seconds of the part that gradients wait for.
    """

    shared: Array
    forward: Array
    backward: Array
    backward_input: Array


def step_bounds(problem: Problem, effort: Effort) -> Iterator[Bound]:
    """Yield bounds of the seconds of a step."""
    work = _work(problem)
    classes = device_classes(problem)
    total = work.shared * step_factor(problem)
    cost = units(problem.graph).total(total + _once_a_step(problem))
    yield Bound(work_over_speed(cost, classes.sizes), "work over speed")
    need = Need(cost, _held_bytes(problem))
    room = Room(classes.sizes, classes.sizes * classes.limit_bytes)
    dual = assignment_dual(need, room, effort)
    yield Bound(dual.value, "assignment LP")
    yield Bound(_one_turn(problem, work), "indivisible op")
    yield from traffic_bounds(
        problem, total if batch_of(problem).equal else _by_sample(problem, work)
    )
    if _flushes(problem):
        yield from _flush_bounds(problem, work, dual.weights)


def _by_sample(problem: Problem, work: _Work) -> Array:
    """Return the device-seconds of a step that grow with its samples."""
    return work.shared * problem.graph.ops.time_factor(batch_of(problem).batches, microbatches=0)


def _flushes(problem: Problem) -> bool:
    """Return whether every plan begins a step from idle and ends it so."""
    schedule = problem.objective.schedule
    return not trains(problem) or (schedule is not None and schedule.row.flushes)


def _work(problem: Problem) -> _Work:
    found: _Work | None = None
    training = trains(problem)
    for way in ways(problem):
        backward = way.backward if training else np.zeros_like(way.backward)
        seconds = way.forward + (backward + way.again if training else 0.0)
        inputs = way.backward_input if training else np.zeros_like(way.backward_input)
        least = (way.degree * seconds, way.forward, backward, inputs)
        found = _Work(*least) if found is None else _Work(*map(np.minimum, found, least))
    assert found is not None
    return found


def _once_a_step(problem: Problem) -> Array:
    """Return the seconds to load inputs and to update parameters, where an op brings them."""
    graph, classes = problem.graph, device_classes(problem)
    loads = _loads(problem) * batch_of(problem).batches
    if not trains(problem):
        return np.tile(loads, (len(classes.sizes), 1))
    held = held_bytes(graph.parameters, problem.objective)
    touched = at_first_user(graph, held.update_traffic)
    rates = [device.memory_bytes_per_s for device in classes.devices(problem)]
    return np.stack([loads + (touched / rate if rate else 0.0) for rate in rates])


def _loads(problem: Problem) -> Array:
    """Return the seconds to load the model's inputs for a batch, each at its first reader."""
    graph = problem.graph
    edges = np.flatnonzero((graph.edge_source < 0) & graph.is_forward[graph.edges.reader])
    tensor, first = np.unique(graph.edges.tensor[edges], return_index=True)
    reader = graph.edges.reader[edges[first]]
    result: Array = np.bincount(reader, weights=graph.tensors.load_s[tensor], minlength=len(graph))
    return result


def _held_bytes(problem: Problem) -> Array:
    """Return the memory of weights and gradients; optimizer state may be with other replicas."""
    held = held_bytes(problem.graph.parameters, problem.objective)
    least = at_first_user(problem.graph, held.weights + held.gradients)
    return units(problem.graph).total(least)


def _one_turn(problem: Problem, work: _Work) -> float:
    """Return what a unit takes that is never spread: every replica takes a whole microbatch.

    Microbatches of one size are dealt out one by one, so some device takes several of them where
    there are more than devices.
    """
    batch, classes = batch_of(problem), device_classes(problem)
    seconds = (work.forward + work.backward) * problem.graph.ops.time_factor(batch.largest)
    one = units(problem.graph).total(seconds)
    least = one.min(axis=0)
    unit = int(np.argmax(least))
    if not batch.equal or not least[unit] > 0:
        return float(least[unit])
    runs = np.isfinite(one[:, unit])
    each, count = one[runs, unit], classes.sizes[runs]
    turns = min(batch.turns, 1000)

    def is_short(limit: float) -> bool:
        return float((count * np.floor(limit / each * (1 + 1e-9))).sum()) < turns

    ends = np.unique(np.outer(np.arange(1, turns + 1), each))
    return float(ends[bisect_left(ends, True, key=lambda limit: not is_short(limit))])


def _flush_bounds(problem: Problem, work: _Work, weights: Array) -> Iterator[Bound]:
    """Yield what holds for steps that begin and end idle."""
    classes = device_classes(problem)
    schedule = problem.objective.schedule
    split = schedule is not None and schedule.row.splits_backward
    if not len(problem.graph.variants) and not split:
        way = steps(problem.graph, gradients=trains(problem))
        total = work.shared * step_factor(problem)
        busy = num_paths(way, total.min(axis=0) > 0) * batch_of(problem).most_turns
        if 0 < busy < classes.sizes.sum():
            needed = least_cost(total[:, problem.graph.is_forward], weights).sum()
            speed = heaviest(weights, classes.sizes, busy)
            yield Bound(float(needed) / speed, "few microbatches")
    yield from _path_bounds(problem, work, weights, split=split)


class _Way(NamedTuple):
    """The way of one microbatch, by op.

    Attributes:
        forward_s: Seconds of forward.
        backward_s: Seconds of backward.
        forward_end_s: When forward has ended at the earliest.
        backward_end_s: When backward has.
        after_forward_s: Seconds that follow forward at least.
        left_s: Seconds from the start of backward to the end at least.
    """

    forward_s: Array
    backward_s: Array
    forward_end_s: Array
    backward_end_s: Array
    after_forward_s: Array
    left_s: Array


def _path_bounds(problem: Problem, work: _Work, weights: Array, *, split: bool) -> Iterator[Bound]:
    """Yield the way of one microbatch forward and back, and the work between its ends."""
    batch, classes = batch_of(problem), device_classes(problem)
    one = _way_of(problem, work, batch.largest, split=split)
    longest = float((one.backward_end_s - one.backward_s + one.left_s).max())
    yield Bound(longest, "critical path")
    if not batch.equal:
        one = _way_of(problem, work, batch.smallest, split=split)
    turns = step_factor(problem) * problem.graph.is_forward
    pieces = Pieces(
        np.concatenate([one.forward_end_s - one.forward_s, one.backward_end_s - one.backward_s]),
        np.concatenate([one.after_forward_s, one.left_s - one.backward_s]),
        np.concatenate([least_cost(part, weights) * turns for part in _shared(problem, split)]),
    )
    speed = heaviest(weights, classes.sizes, np.inf)
    yield Bound(window_bound(pieces, speed), "pipeline fill")


def _way_of(problem: Problem, work: _Work, samples: float, *, split: bool) -> _Way:
    """Return the way of a microbatch with some samples, over the graph's batch size."""
    graph = problem.graph
    factor = graph.ops.time_factor(samples) * graph.is_forward
    ahead = work.forward.min(axis=0) * factor
    back = (work.backward_input if split else work.backward).min(axis=0) * factor
    moved = _moved_s(problem, samples)

    def ends(way: Steps, seconds: Array, first: Array | None = None) -> Array:
        return path_ends(way, seconds, moved[way.tensor], first)

    end = ends(steps(graph), ahead, _loads(problem) * samples)
    left = ends(steps(graph, gradients=True), back)
    turned = ends(steps(graph, gradients=True, backward=True), back, end)
    after = ends(steps(graph, backward=True), ahead, left) - ahead
    return _Way(ahead, back, end, turned, after, left)


def _shared(problem: Problem, split: bool) -> tuple[Array, Array]:
    """Return the least device-seconds of forward and of backward (for the inputs, if split)."""
    forward, backward = [], []
    for way in ways(problem):
        forward.append(way.degree * way.forward)
        back = way.backward_input if split else way.backward
        backward.append(way.degree * (back if trains(problem) else np.zeros_like(back)))
    return np.minimum.reduce(forward), np.minimum.reduce(backward)


def _moved_s(problem: Problem, samples: float) -> Array:
    """Return the least seconds to move each tensor of a microbatch between devices."""
    tensors, link = problem.graph.tensors, best_link(problem.cluster)
    size = tensors.bytes_at(samples)
    given = tensors.transfer_s * samples
    return np.where(np.isnan(given), link.latency_s + size / link.bandwidth_bytes_per_s, given)
