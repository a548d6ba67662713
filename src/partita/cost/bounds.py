"""Times that no plan of a problem can beat.

* Work: whatever runs where, ``sum over ops min over types (w t) / sum over devices w`` bounds the
  step from below for any weights w of device types (a dual solution of the fractional assignment);
  weights by each type's speed on the whole graph are used.
* Path: a microbatch passes a longest path of the graph on the fastest devices: forward along all
  edges, or forward and back along edges that gradients flow through (without the weight part of
  backward, unless the schedule keeps it whole). It holds for steps that begin from idle, so not
  where the schedule may stash weights.

Both hold for all plans that use the tensor-parallel degrees for which the graph has variants.
"""

import numpy as np

from partita.core.columns import Array
from partita.core.graph import KIND_BIT, Graph
from partita.core.problem import Metric, Mode, Problem, Schedule
from partita.cost.durations import op_seconds
from partita.cost.kernels import Column, csr, run_kernel


def lower_bound(problem: Problem) -> float:
    """Return seconds that no plan can beat for the problem's metric; 0 = nothing is known."""
    objective = problem.objective
    if objective.metric is Metric.LATENCY:
        return _forward_path(problem)
    if objective.metric is not Metric.THROUGHPUT:
        return 0.0
    bounds = [_work_bound(problem)]
    if objective.mode is Mode.INFERENCE:
        bounds.append(_forward_path(problem))
    elif objective.schedule not in (None, Schedule.PIPEDREAM):
        bounds += [_forward_path(problem), _return_path(problem)]
    return max(bounds)


def _op_times(problem: Problem, mode: Mode) -> tuple[Array, Array]:
    """Return the size of each class of devices, and seconds of every op there (inf = barred)."""
    graph = problem.graph
    classes: dict[object, list[int]] = {}
    for index, device in enumerate(problem.cluster.devices):
        rates = (tuple(device.peak_flop_per_s.items()), device.memory_bytes_per_s)
        key = (device.type, device.kind, device.speed, rates)
        classes.setdefault(key, []).append(index)
    counts, times = [], []
    for members in classes.values():
        device = problem.cluster.devices[members[0]]
        seconds = op_seconds(graph, device)
        total = seconds.forward_s + (seconds.backward_s if mode is Mode.TRAINING else 0.0)
        if mode is Mode.INFERENCE:
            total = np.where(graph.is_forward, total, 0.0)
        total = np.minimum(total, _variant_work(graph, total, mode))
        allowed = (graph.ops.device_kinds & KIND_BIT[device.kind]) > 0
        counts.append(len(members))
        times.append(np.where(allowed, total, np.inf))
    return np.array(counts, dtype=np.float64), np.stack(times)


def _variant_work(graph: Graph, total: Array, mode: Mode) -> Array:
    """Return the least work of each op over its variants, relative to the reference costs."""
    best = np.full(len(graph), np.inf)
    variants = graph.variants
    if len(variants):
        seconds = variants.forward_s + (variants.backward_s if mode is Mode.TRAINING else 0.0)
        np.minimum.at(best, variants.op, seconds * variants.tp)
        reference = graph.forward_s + (graph.backward_s if mode is Mode.TRAINING else 0.0)
        scale = np.divide(total, reference, out=np.ones(len(graph)), where=reference > 0)
        best *= np.where(np.isfinite(best), scale, 1.0)
    return best


def _samples(problem: Problem) -> tuple[float, float]:
    """Return how often fixed costs are paid in a step at least, and its batches of samples."""
    turns = problem.microbatches
    paid = float(turns) if problem.objective.microbatches is not None else 1.0
    return paid, turns * problem.microbatch_size / problem.graph.batch_size


def _work_bound(problem: Problem) -> float:
    counts, times = _op_times(problem, problem.objective.mode)
    paid, batches = _samples(problem)
    fixed = problem.graph.ops.fixed_share
    total = times * (fixed * paid + (1 - fixed) * batches)
    finite = np.where(np.isfinite(total), total, 0.0).sum(axis=1)
    weights = 1.0 / np.maximum(finite, 1e-300)
    weights /= weights.max()
    with np.errstate(invalid="ignore"):
        least = np.nanmin(np.where(np.isfinite(total), weights[:, None] * total, np.inf), axis=0)
    return float(least.sum() / (counts * weights).sum())


def _least_samples(problem: Problem) -> float:
    """Return the batches of samples in the smallest microbatch that a plan may have."""
    objective, batch = problem.objective, problem.graph.batch_size
    free = objective.microbatch_size is None and objective.microbatches is None
    return (1.0 if free else problem.microbatch_size) / batch


def _best_seconds(problem: Problem, kind: str) -> Array:
    """Return the least seconds of each forward op over all devices that may run it."""
    graph = problem.graph
    best = np.full(len(graph), np.inf)
    for device in {
        (d.type, d.kind, d.speed, d.memory_bytes_per_s): d for d in problem.cluster.devices
    }.values():
        seconds = op_seconds(graph, device)
        times = seconds.forward_s
        if kind == "input":
            times = times + seconds.backward_s * seconds.input_share
        elif kind == "whole":
            times = times + seconds.backward_s
        allowed = (graph.ops.device_kinds & KIND_BIT[device.kind]) > 0
        best = np.minimum(best, np.where(allowed, times, np.inf))
    fixed = graph.ops.fixed_share
    scaled = best * (fixed + (1 - fixed) * _least_samples(problem))
    return np.where(graph.is_forward, scaled, 0.0)


def _forward_path(problem: Problem) -> float:
    """Return the longest path of one microbatch forward."""
    every = np.ones(len(problem.graph.tensors), dtype=bool)
    return _heaviest(problem, _best_seconds(problem, "forward"), every)


def _return_path(problem: Problem) -> float:
    """Return the longest path of one microbatch forward and back."""
    split = problem.objective.schedule is Schedule.ZERO_BUBBLE
    seconds = _best_seconds(problem, "input" if split else "whole")
    return _heaviest(problem, seconds, problem.graph.tensors.differentiable)


def _heaviest(problem: Problem, seconds: Array, through: Array) -> float:
    """Return the heaviest path over the tensors that may be passed through."""
    graph = problem.graph
    if len(graph.variants):
        return 0.0
    source, reader = graph.edge_source, graph.edges.reader
    kept = (source >= 0) & through[graph.edges.tensor]
    kept[kept] = graph.is_forward[source[kept]] & graph.is_forward[reader[kept]]
    ptr, targets = csr(source[kept], reader[kept], len(graph))
    finish = np.zeros(len(graph))
    order = graph.topological_order
    run_kernel(_longest_path, len(targets), [order, ptr, targets, seconds], [finish])
    return float(finish.max())


def _longest_path(
    order: Column, ptr: Column, targets: Column, weight: Column, finish: Column
) -> None:
    """Fill ``finish`` with the heaviest path that ends with each node."""
    for node in order:
        finish[node] += weight[node]
        for edge in range(ptr[node], ptr[node + 1]):
            finish[targets[edge]] = max(finish[targets[edge]], finish[node])
