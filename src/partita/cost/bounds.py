"""Times that no plan of a problem can beat.

* Work: whatever runs where, ``sum over ops min over types (w t) / sum over devices w`` bounds the
  step from below for any weights w of device types (a dual solution of the fractional assignment);
  weights by each type's speed on the whole graph are used.
* Path: a microbatch passes a longest path of the graph, forward and back, on the fastest devices.

Both hold for all plans that use the tensor-parallel degrees for which the graph has variants.
"""

import numpy as np

from partita.core.columns import Array
from partita.core.graph import KIND_BIT, Graph
from partita.core.problem import Metric, Mode, Problem
from partita.cost.durations import op_seconds
from partita.cost.kernels import Column, csr, run_kernel


def lower_bound(problem: Problem) -> float:
    """Return seconds that no plan can beat for the problem's metric; 0 = nothing is known."""
    if problem.objective.metric is Metric.THROUGHPUT:
        return max(_work_bound(problem), _path_bound(problem, problem.objective.mode))
    if problem.objective.metric is Metric.LATENCY:
        return _path_bound(problem, Mode.INFERENCE)
    return 0.0


def _op_times(problem: Problem, mode: Mode) -> tuple[Array, Array]:
    """Return the size of each class of devices, and seconds of every op there (inf = barred)."""
    graph = problem.graph
    classes: dict[object, list[int]] = {}
    for index, device in enumerate(problem.cluster.devices):
        key = (device.type, device.kind, device.speed, tuple(device.peak_flop_per_s.items()))
        classes.setdefault(key, []).append(index)
    counts, times = [], []
    for members in classes.values():
        device = problem.cluster.devices[members[0]]
        seconds = op_seconds(graph, device)
        total = seconds.forward_s + (seconds.backward_s if mode is Mode.TRAINING else 0.0)
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


def _path_bound(problem: Problem, mode: Mode) -> float:
    """Return the longest path of one microbatch through the fastest devices."""
    graph = problem.graph
    _, times = _op_times(problem, mode)
    if len(graph.variants):
        return 0.0
    size = problem.objective.microbatch_size
    if size is None and problem.objective.microbatches is None:
        samples = 1.0 / graph.batch_size
    else:
        samples = problem.microbatch_size / graph.batch_size
    fixed = graph.ops.fixed_share
    best = times.min(axis=0) * (fixed + (1 - fixed) * samples)
    if mode is Mode.INFERENCE:
        best = np.where(graph.is_forward, best, 0.0)
    inner = graph.edge_source >= 0
    ptr, targets = csr(graph.edge_source[inner], graph.edges.reader[inner], len(graph))
    finish = np.zeros(len(graph))
    run_kernel(_longest_path, len(targets), [graph.topological_order, ptr, targets, best], [finish])
    return float(finish.max())


def _longest_path(
    order: Column, ptr: Column, targets: Column, weight: Column, finish: Column
) -> None:
    """Fill ``finish`` with the heaviest path that ends with each node."""
    for node in order:
        finish[node] += weight[node]
        for edge in range(ptr[node], ptr[node + 1]):
            finish[targets[edge]] = max(finish[targets[edge]], finish[node])
