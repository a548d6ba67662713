"""Random problems that are small enough for brute force and differ in everything else.

Mixed devices and costs by type, one to three levels or a matrix of links, tight and ample memory,
CPUs, tied, frozen and shared parameters, colocation, rules, tensors without gradient, given
transfer times, uneven microbatches, variants of ops: one seed, one problem.
"""

import random
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from partita.core.cluster import Cluster, Device, Level, LinkMatrix
from partita.core.columns import Floats
from partita.core.graph import DeviceKind, Graph, OpCosts, VariantTable
from partita.core.problem import Metric, Mode, Objective, Problem, Schedule
from partita.core.rules import Rule
from partita.errors import InvalidInputError
from partita.testing.builders import Edge, Figures, Traits, graph_of

TRAINED = frozenset({Metric.PIPEDREAM, Metric.PIPEDREAM_REPAIRED, Metric.PIPER})
"""Metrics of training alone."""

LEVELLED = TRAINED | {Metric.MAX_LOAD, Metric.SINGLE_SAMPLE_LATENCY}
"""Metrics that need levels instead of a matrix of links."""


def tiny_problem(
    rng: random.Random, metric: Metric, *, max_ops: int = 6, max_devices: int = 4
) -> Problem:
    """Return a random problem of a metric.

    Args:
        rng: Source of chance.
        metric: What is minimised.
        max_ops: Most ops.
        max_devices: Most devices.
    """
    while True:
        num_ops = rng.randint(1, max_ops)
        cluster = _cluster(rng, metric, rng.randint(1, max_devices))
        graph = _graph(rng, metric, num_ops)
        try:
            return Problem(
                graph=graph,
                cluster=cluster,
                objective=_objective(rng, metric),
                rules=_rules(rng, cluster),
            )
        except InvalidInputError:  # an op that may run nowhere; draw again
            continue


def _draw(rng: random.Random, count: int, low: float, high: float) -> Floats:
    return np.array([rng.uniform(low, high) for _ in range(count)])


def _graph(rng: random.Random, metric: Metric, num_ops: int) -> Graph:
    edges: list[Edge] = []
    for op in range(1, num_ops):
        for source in rng.sample(range(op), min(op, rng.choice((0, 1, 1, 1, 2, 3)))):
            edges += [(source, op, int(rng.random() < 0.15))]
    figures = Figures(
        forward_s=[rng.choice((0, 1, 1)) * value for value in _draw(rng, num_ops, 0.1, 3).tolist()],
        backward_s=_draw(rng, num_ops, 0, 4).tolist(),
        saved_bytes=_draw(rng, num_ops, 0, 40).tolist(),
        tensor_bytes=_draw(rng, num_ops, 0, 60).tolist(),
        parameter_bytes=_draw(rng, num_ops, 0, 80).tolist(),
        input_bytes=rng.uniform(0, 20),
        load_s=rng.choice((0.0, 0.3)),
        batch_size=rng.choice((1, 1, 2, 4)),
    )
    tied = [sorted(rng.sample(range(num_ops), 2))] if num_ops > 2 and rng.random() < 0.3 else []
    traits = Traits(
        tied=tied,
        frozen=[op for op in range(num_ops) if rng.random() < 0.1],
        detached=[op for op in range(num_ops) if rng.random() < 0.1],
        bare=[op for op in range(num_ops) if rng.random() < 0.2],
    )
    graph = graph_of(num_ops, edges, figures, traits)
    return _with_variants(rng, _varied(rng, graph), metric)


def _varied(rng: random.Random, graph: Graph) -> Graph:
    """Return the graph with costs by type, fixed parts, colocation, kinds and given transfers."""
    count, tensors = len(graph), graph.tensors
    ops = graph.ops
    if rng.random() < 0.3:
        ops = replace(ops, fixed_share=_draw(rng, count, 0, 1))
    if rng.random() < 0.2:
        ops = replace(ops, colocation=np.array([rng.choice((-1, -1, 0, 1)) for _ in range(count)]))
    if rng.random() < 0.2:
        ops = replace(ops, device_kinds=np.array([rng.choice((1, 3, 3)) for _ in range(count)]))
    if rng.random() < 0.2:
        ops = replace(ops, workspace_bytes=_draw(rng, count, 0, 30))
    if rng.random() < 0.3:
        tensors = replace(tensors, transfer_s=_draw(rng, len(tensors), 0, 2))
    if rng.random() < 0.2:
        tensors = replace(tensors, fixed_bytes=tensors.bytes * rng.random())
    first = replace(graph.costs[0], device_type="a")
    second = OpCosts(
        device_type="b",
        forward_s=first.forward_s * _draw(rng, count, 0.3, 2),
        backward_s=first.backward_s * _draw(rng, count, 0.3, 2),
    )
    return replace(graph, ops=ops, tensors=tensors, costs=(first, second))


def _with_variants(rng: random.Random, graph: Graph, metric: Metric) -> Graph:
    """Return the graph with variants, where the metric needs them or by chance."""
    if metric is not Metric.PIPER and rng.random() < 0.9:
        return graph
    rows = []
    for op in range(len(graph)):
        for tp, again in ((1, False), (1, True), (2, False), (2, True)):
            if metric is not Metric.PIPER and rng.random() < 0.3:
                continue
            forward = graph.forward_s[op] / tp * rng.uniform(0.9, 1.3)
            backward = graph.backward_s[op] / tp + forward * again * rng.uniform(0.5, 1.2)
            saved = graph.ops.saved_bytes[op] / tp * (0.2 if again else 1.0)
            held = graph.parameter_bytes[op] / tp
            rows.append((op, tp, again, forward, backward, held, saved, 4 * held))
    if not rows:
        return graph
    columns = list(zip(*rows, strict=True))
    names = ("op", "tp", "recompute", "forward_s", "backward_s")
    sizes = ("parameter_bytes", "saved_bytes", "fixed_memory_bytes")
    table = dict(zip((*names, *sizes), map(np.array, columns), strict=True))
    return replace(graph, variants=VariantTable(**table))


def _cluster(rng: random.Random, metric: Metric, size: int) -> Cluster:
    ample = rng.random() < 0.5
    devices = tuple(
        Device(
            name=f"d{index}",
            kind=DeviceKind.CPU if index and rng.random() < 0.15 else DeviceKind.GPU,
            type=rng.choice("aab"),
            speed=rng.choice((1.0, 1.0, 0.5, 2.0)),
            memory_bytes=float("inf") if ample else rng.choice((150.0, 400.0, 1000.0)),
            memory_bytes_per_s=rng.choice((0.0, 0.0, 500.0)),
        )
        for index in range(size)
    )
    if metric is Metric.SHARDING_COST or (metric not in LEVELLED and rng.random() < 0.2):
        matrix = LinkMatrix(
            bandwidth_bytes_per_s=_draw(rng, size * size, 5, 500),
            latency_s=_draw(rng, size * size, 0, 0.5),
        )
        return Cluster(devices=devices, matrix=matrix)
    depth = rng.choice((1, 2)) if metric in TRAINED else rng.choice((1, 2, 3))
    return Cluster(devices=devices, levels=tuple(_levels(rng, size, depth)))


def _levels(rng: random.Random, size: int, depth: int) -> Sequence[Level]:
    levels = []
    group = np.arange(size) // rng.choice((1, 2)) if depth > 1 else np.zeros(size, dtype=np.int64)
    for index in range(depth):
        if index:
            group = group // 2 if index < depth - 1 else np.zeros(size, dtype=np.int64)
        count = int(group.max()) + 1
        levels.append(
            Level(
                name=f"level{index}",
                group_of=group.astype(np.int32),
                bandwidth_bytes_per_s=_draw(rng, count, 5, 300),
                latency_s=np.array([rng.choice((0.0, 0.1)) for _ in range(count)]),
                port_per_device=rng.random() < 0.2,
            )
        )
    return levels


def _objective(rng: random.Random, metric: Metric) -> Objective:
    infers = metric not in TRAINED and rng.random() < 0.3
    schedule = None
    if metric is Metric.THROUGHPUT and not infers and rng.random() < 0.7:
        schedule = rng.choice([one for one in Schedule if one is not Schedule.INFERENCE])
    single = metric not in TRAINED and metric is not Metric.THROUGHPUT
    return Objective(
        metric=metric,
        mode=Mode.INFERENCE if infers else Mode.TRAINING,
        schedule=schedule,
        microbatches=None if single else rng.choice((None, 1, 2, 4, 6)),
        microbatch_size=rng.choice((None, 1, 2)),
        memory_factor=rng.choice((1.0, 1.0, 0.9)),
        optimizer_bytes_per_element=rng.choice((0.0, 8.0)),
    )


def _rules(rng: random.Random, cluster: Cluster) -> tuple[Rule, ...]:
    if rng.random() < 0.85:
        return ()
    device = rng.choice(cluster.device_names)
    return (Rule(ops="op0", devices=device, forbids=rng.random() < 0.5),)
