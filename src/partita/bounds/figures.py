"""Figures that all bounds use: seconds of ops on classes of devices, samples of a step.

An op may run in several *ways*: the tensor-parallel degrees of the graph's variants (1 where there
are none), recomputing or not. What one way costs follows ``cost/durations.py``.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

import numpy as np

from partita.core.cluster import Cluster
from partita.core.columns import Array, derived
from partita.core.graph import Graph
from partita.core.problem import Metric, Mode, Problem
from partita.cost.durations import OpSeconds, op_seconds
from partita.cost.tables import device_classes, fold_backward


class Effort(StrEnum):
    """Effort that a bound may take."""

    QUICK = "quick"
    FULL = "full"


@dataclass(frozen=True, slots=True)
class Bound:
    """A value that no plan of a problem can beat.

    Attributes:
        value: In the unit of the problem's metric; 0 = nothing is known.
        term: What gives it, for people.
    """

    value: float
    term: str


class Way(NamedTuple):
    """Seconds of the graph's batch on one of the devices that share an op; rows are classes.

    Attributes:
        degree: Number of devices that share it.
        forward: Forward.
        backward: Backward, without recomputation.
        backward_input: The part of backward that the gradient of the inputs needs.
        again: Recomputation.
    """

    degree: int
    forward: Array
    backward: Array
    backward_input: Array
    again: Array


def ways(problem: Problem) -> tuple[Way, ...]:
    """Return every way in which ops may run; barred classes have infinite seconds."""
    return derived(problem, "ways", lambda: tuple(_ways(problem)))


def _ways(problem: Problem) -> Iterator[Way]:
    graph, classes = problem.graph, device_classes(problem)
    tables = [op_seconds(graph, device) for device in classes.devices(problem)]
    degrees = sorted({1, *graph.variants.tp.tolist()})
    for degree in degrees:
        if degree > len(problem.cluster):
            continue
        for again in (False, True) if len(graph.variants) else (False,):
            rows = [_way(graph, table, degree, recompute=again) for table in tables]
            parts = (np.stack(part) for part in zip(*rows, strict=True))
            yield Way(degree, *(np.where(classes.allowed, part, np.inf) for part in parts))


def _way(
    graph: Graph, seconds: OpSeconds, degree: int, *, recompute: bool
) -> tuple[Array, Array, Array, Array]:
    """Return forward, backward, backward for the inputs, and recomputation of each op."""
    forward, backward = seconds.forward_s / degree, seconds.backward_s / degree
    variants = graph.variants
    rows = np.flatnonzero((variants.tp == degree) & (variants.recompute == recompute))
    if len(rows):
        ops, reference = variants.op[rows], graph.costs[0]
        here = seconds.forward_s[ops] + seconds.backward_s[ops]
        there = reference.forward_s[ops] + reference.backward_s[ops]
        scale = np.divide(here, there, out=np.ones(len(ops)), where=there > 0)
        forward[ops] = variants.forward_s[rows] * scale
        backward[ops] = variants.backward_s[rows] * scale
        if recompute:
            backward[ops] = np.maximum(backward[ops] - forward[ops], 0.0)
    forward, backward = fold_backward(graph, forward, backward)
    return forward, backward, backward * seconds.input_share, forward * recompute


class Batch(NamedTuple):
    """The samples of a step: as asked, with what is left open at its best.

    Attributes:
        turns: Microbatches that a step has at least.
        most_turns: Microbatches that it has at most.
        batches: Samples of a step over the graph's batch size.
        largest: Samples that the largest microbatch has at least, over the graph's batch size.
        smallest: Samples that each microbatch has at least, likewise.
        equal: Whether all microbatches have one given size.
    """

    turns: int
    most_turns: int
    batches: float
    largest: float
    smallest: float
    equal: bool


def batch_of(problem: Problem) -> Batch:
    """Return the samples of a step.

    Count and size give the samples of a step, which are fixed. Where neither is given, there may be
    from one microbatch to one for each sample. A latency is that of the problem's microbatch.
    """
    objective, graph = problem.objective, problem.graph
    total = problem.microbatches * problem.microbatch_size
    sized = objective.microbatch_size is not None or objective.metric is Metric.LATENCY
    given = sized or objective.microbatches is not None
    return Batch(
        turns=problem.microbatches if given else 1,
        most_turns=problem.microbatches if given else total,
        batches=total / graph.batch_size,
        largest=(problem.microbatch_size if given else 1) / graph.batch_size,
        smallest=(problem.microbatch_size if sized else 1) / graph.batch_size,
        equal=sized,
    )


def step_factor(problem: Problem) -> Array:
    """Return how many times its seconds each op takes in a step at least."""
    batch = batch_of(problem)
    return problem.graph.ops.time_factor(batch.batches, batch.turns)


class Links(NamedTuple):
    """The best that any two different devices have.

    Attributes:
        bandwidth_bytes_per_s: Largest bandwidth.
        latency_s: Smallest latency.
    """

    bandwidth_bytes_per_s: float
    latency_s: float


def best_link(cluster: Cluster) -> Links:
    """Return the best link of a cluster with several devices; infinite where there is none."""
    if cluster.matrix is not None and len(cluster) > 1:
        apart = ~np.eye(len(cluster), dtype=bool).ravel()
        matrix = cluster.matrix
        return Links(
            float(matrix.bandwidth_bytes_per_s[apart].max()), float(matrix.latency_s[apart].min())
        )
    if not cluster.levels:
        return Links(math.inf, 0.0)
    return Links(
        max(float(level.bandwidth_bytes_per_s.max()) for level in cluster.levels),
        min(float(level.latency_s.min()) for level in cluster.levels),
    )


def trains(problem: Problem) -> bool:
    """Return whether the problem is one of training."""
    return problem.objective.mode is Mode.TRAINING
