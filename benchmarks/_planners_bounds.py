"""Bounds: which term gives them, how far the best plan is, and that none is above an optimum.

The problems are drawn from one generator: chains, blocks in a row with a large embedding and head,
branches, layered graphs; two or three types of devices on two or three levels; fast and slow links;
ample and tight memory (doubled until a plan is found); schedule and microbatches given or open.
Nothing looks at the bounds.
"""

import math
import random
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
from _planners_common import Group, timed

from partita.bounds import Effort, bound
from partita.core.cluster import Cluster, Device, Host, Level
from partita.core.columns import Array
from partita.core.graph import (
    EdgeTable,
    Graph,
    OpCosts,
    OpTable,
    ParameterTable,
    TensorTable,
    VariantTable,
)
from partita.core.problem import Metric, Objective, Problem, Schedule
from partita.core.solution import Solution
from partita.errors import InfeasibleError, PartitaError
from partita.planners.table import PLANNERS, solve
from partita.testing.brute_force import brute_force, some_plans
from partita.testing.tiny_problems import tiny_problem

PROBLEMS = 20
TINY_PROBLEMS = 60
TINY_PLANS = 40
PLAIN = "work over speed"
DOUBLINGS = 8
FALLBACK = ("uniform", "single", "random")

METRICS = (
    *(Metric.THROUGHPUT,) * 5,
    *(Metric.PIPEDREAM_REPAIRED,) * 3,
    *(Metric.MAKESPAN_PARALLEL, Metric.MAKESPAN_SEQUENTIAL, Metric.LATENCY, Metric.MAX_LOAD) * 2,
    *(Metric.SINGLE_SAMPLE_LATENCY, Metric.PIPER),
)
"""Metrics as often as they are drawn."""

TYPES: Mapping[str, tuple[float, float]] = {
    "large": (1.0, 40e9),
    "middle": (0.45, 32e9),
    "small": (0.2, 16e9),
}
"""Speed and memory of the types of devices."""


class _Ops:
    """A graph while it is drawn: rows of ops, and edges between them."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.parameters: list[float] = []
        self.bytes: list[float] = []
        self.edges: list[tuple[int, int]] = []

    def add(self, seconds: float, parameters: float, size: float, *sources: int) -> int:
        """Add an op that reads from others, and return its number."""
        self.edges += [(source, len(self.seconds)) for source in sources]
        self.seconds.append(seconds)
        self.parameters.append(parameters)
        self.bytes.append(size)
        return len(self.seconds) - 1


def draw_chain(rng: random.Random) -> _Ops:
    """A convolutional net: activations shrink, parameters grow."""
    ops, last = _Ops(), ()
    depth = rng.randint(12, 50)
    for layer in range(depth):
        share = layer / depth
        size = 3e8 * math.exp(-4 * share) * rng.uniform(0.5, 1.5)
        held = 2e5 * math.exp(5 * share) * rng.uniform(0.5, 1.5)
        last = (ops.add(rng.lognormvariate(-4.5, 0.6), held, size, *last),)
    return ops


def draw_blocks(rng: random.Random) -> _Ops:
    """Equal blocks in a row between a large embedding and a large head."""
    ops = _Ops()
    width, blocks = rng.choice((1024, 2048, 4096)), rng.randint(8, 32)
    size, second = 4e3 * width, width**2 * 1.2e-9
    last = ops.add(second, 2e5 * width, size)
    for _ in range(blocks):
        inner = ops.add(4 * second, 16 * width**2, size, last)
        last = ops.add(8 * second, 32 * width**2, size, inner, last)
    ops.add(rng.uniform(5, 20) * second, 2e5 * width, 1e5, last)
    return ops


def draw_branches(rng: random.Random) -> _Ops:
    """Modules of parallel branches that are joined again."""
    ops = _Ops()
    last = ops.add(0.01, 1e6, 5e7)
    for _ in range(rng.randint(4, 10)):
        ends = []
        for _ in range(rng.randint(2, 5)):
            end = last
            for _ in range(rng.randint(1, 4)):
                end = ops.add(rng.lognormvariate(-5, 0.7), rng.uniform(1e5, 5e6), 2e7, end)
            ends.append(end)
        last = ops.add(0.001, 0.0, 4e7, *ends)
    return ops


def draw_layered(rng: random.Random) -> _Ops:
    """Layers of ops that read from some of the layer before."""
    ops = _Ops()
    before: list[int] = []
    for _ in range(rng.randint(8, 25)):
        layer = []
        for _ in range(rng.randint(3, 12)):
            sources = rng.sample(before, min(len(before), rng.randint(1, 3)))
            size = 10 ** rng.uniform(5, 7.3)
            held = rng.uniform(0, 4e6)
            layer.append(ops.add(rng.lognormvariate(-6.9, 0.5), held, size, *sources))
        before = layer
    return ops


DRAWN: Mapping[str, Callable[[random.Random], _Ops]] = {
    "chain": draw_chain,
    "blocks": draw_blocks,
    "branches": draw_branches,
    "layered": draw_layered,
}


def _graph(rng: random.Random, kind: str, types: list[str]) -> Graph:
    """Return a drawn graph with costs for each type; ops differ in what suits them."""
    ops = DRAWN[kind](rng)
    count = len(ops.seconds)
    forward = np.array(ops.seconds) / 3
    producers = np.arange(count)
    return Graph(
        name=kind,
        ops=OpTable(
            names=tuple(f"op{op}" for op in range(count)), saved_bytes=1.5 * np.array(ops.bytes)
        ),
        costs=tuple(_costs(rng, name, forward) for name in types),
        tensors=TensorTable(
            names=tuple(f"t{op}" for op in range(count)), producer=producers, bytes=ops.bytes
        ),
        edges=EdgeTable(
            tensor=np.array([a for a, _ in ops.edges]), reader=np.array([b for _, b in ops.edges])
        ),
        parameters=ParameterTable(
            names=tuple(f"w{op}" for op in range(count)),
            bytes=ops.parameters,
            use_op=producers,
            use_parameter=producers,
        ),
    )


def _costs(rng: random.Random, name: str, forward: Array) -> OpCosts:
    suits = np.array([rng.lognormvariate(0, 0.15) for _ in forward])
    here = forward / TYPES[name][0] * suits
    return OpCosts(device_type=name, forward_s=here, backward_s=2 * here)


def _cluster(rng: random.Random, types: list[str], depth: int, memory: float) -> Cluster:
    """Return hosts with devices of one type each; ``memory`` scales what they have."""
    devices, hosts = [], []
    for number in range(rng.randint(2, 4)):
        name = types[number] if number < len(types) else rng.choice(types)
        hosts.append(Host(name=f"host{number}"))
        devices += [
            Device(
                name=f"host{number}/{name}{index}",
                host=number,
                type=name,
                memory_bytes=TYPES[name][1] * memory,
            )
            for index in range(rng.randint(1, 4))
        ]
    host_of = np.array([device.host for device in devices], dtype=np.int32)
    inside = rng.choice((6e9, 12e9, 100e9))
    group_of = [host_of, host_of // 2, np.zeros(len(devices), np.int32)]
    rates = [inside, rng.choice((3e9, 12e9)), rng.choice((1.25e8, 1.25e9, 3e9))]
    kept = [0, 2] if depth == 2 else [0, 1, 2]
    levels = tuple(
        Level(
            name=("host", "rack", "network")[level],
            group_of=group_of[level].astype(np.int32),
            bandwidth_bytes_per_s=np.full(int(group_of[level].max()) + 1, rates[level]),
            latency_s=np.full(int(group_of[level].max()) + 1, 1e-5),
        )
        for level in kept
    )
    return Cluster(hosts=tuple(hosts), devices=tuple(devices), levels=levels)


def _with_variants(rng: random.Random, graph: Graph) -> Graph:
    """Return the graph with ops that two devices share, or that recompute."""
    rows = []
    for op in range(len(graph)):
        for tp in (1, 2):
            for again in (False, True):
                extra = 1.0 if tp == 1 else rng.uniform(1.05, 1.3)
                forward = graph.forward_s[op] / tp * extra
                backward = 2 * forward + forward * again
                saved = graph.ops.saved_bytes[op] / tp * (0.2 if again else 1.0)
                held = graph.parameter_bytes[op] / tp
                rows.append((op, tp, again, forward, backward, held, saved, 4 * held))
    names = ("op", "tp", "recompute", "forward_s", "backward_s", "parameter_bytes", "saved_bytes")
    columns = map(np.array, zip(*rows, strict=True))
    table = dict(zip((*names, "fixed_memory_bytes"), columns, strict=True))
    return replace(graph, variants=VariantTable(**table))


def mixed_problem(seed: int) -> Problem:
    """Return a problem on a mixed cluster; one seed, one problem."""
    rng = random.Random(seed)
    metric = rng.choice(METRICS)
    kind = rng.choice(list(DRAWN))
    types = rng.sample(list(TYPES), rng.randint(2, 3))
    graph = _graph(rng, kind, types)
    shallow = metric in (Metric.PIPEDREAM_REPAIRED, Metric.PIPER)
    cluster = _cluster(rng, types, 2 if shallow else rng.choice((2, 2, 3)), 1.0)
    if rng.random() < 0.5:
        state = 4 * graph.parameter_bytes.sum() + graph.ops.saved_bytes.sum()
        scale = state / float(cluster.memory_bytes.sum()) * rng.uniform(1.5, 3)
        cluster = replace(
            cluster,
            devices=tuple(
                replace(device, memory_bytes=device.memory_bytes * scale)
                for device in cluster.devices
            ),
        )
    schedules = (None, Schedule.ONE_F_ONE_B, Schedule.GPIPE, Schedule.INTERLEAVED)
    step = metric is Metric.THROUGHPUT
    objective = Objective(
        metric=metric,
        schedule=rng.choice(schedules) if step else None,
        microbatches=rng.choice((2, 4, 8, 32)) if step or metric is Metric.PIPER else None,
        microbatch_size=1 if step else None,
    )
    if metric is Metric.PIPER:
        graph = _with_variants(rng, graph)
    return Problem(graph=graph, cluster=cluster, objective=objective)


def best_solution(problem: Problem) -> Solution:
    """Return the best plan that planners find, with twice the memory until they find one."""
    for _ in range(DOUBLINGS):
        for planner in ("auto",) if "auto" in PLANNERS else FALLBACK:
            try:
                return solve(problem, planner)
            except InfeasibleError:
                continue
        devices = tuple(
            replace(device, memory_bytes=2 * device.memory_bytes)
            for device in problem.cluster.devices
        )
        problem = replace(problem, cluster=replace(problem.cluster, devices=devices))
    return solve(problem, FALLBACK[0])


def tiny_check() -> tuple[int, list[str]]:
    """Return on how many tiny problems a bound was compared, and those where it is too high."""
    compared, wrong = 0, []
    metrics = [*dict.fromkeys(METRICS), Metric.PIPEDREAM, Metric.SHARDING_COST]
    for seed in range(TINY_PROBLEMS):
        rng = random.Random(seed)
        metric = metrics[seed % len(metrics)]
        problem = tiny_problem(rng, metric, max_ops=5)
        try:
            best = brute_force(problem, some_plans(problem, rng, TINY_PLANS))
        except PartitaError:
            continue
        compared += 1
        found = bound(problem, effort=Effort.FULL)
        if found.value > best.value * (1 + 1e-9):
            wrong.append(
                f"tiny problem {seed} ({metric.value}): {found.term} gives {found.value:.6g}, "
                f"a plan has {best.value:.6g}"
            )
    return compared, wrong


def measure_group(data: Path, scale: float) -> Group:
    """Return the table of bounds; the problems are generated, so that no data is read."""
    del data, scale
    group = Group(
        title="Bounds of generated problems on mixed clusters",
        headers=(
            "seed",
            "metric",
            "graph",
            "ops",
            "devices",
            "term",
            "bound",
            "value",
            "gap %",
            "ms",
        ),
    )
    plain, gaps = 0, []
    for seed in range(PROBLEMS):
        best = best_solution(mixed_problem(seed))
        problem, value = replace(best.problem), best.value
        found, seconds = timed(lambda problem=problem: bound(problem))
        gap = 100 * (value / found.value - 1)
        plain += found.term == PLAIN
        gaps.append(gap)
        if found.value > value * (1 + 1e-9):
            group.misses.append(f"problem {seed}: bound {found.value:.6g} above a plan {value:.6g}")
        row = [seed, problem.objective.metric.value, problem.graph.name, len(problem.graph)]
        row += [len(problem.cluster), found.term, found.value, value, gap, 1000 * seconds]
        group.rows.append(row)
    if plain > PROBLEMS // 2:
        group.misses.append(f"{plain} of {PROBLEMS} bounds are plain {PLAIN}; at most half may be")
    compared, wrong = tiny_check()
    group.misses += wrong
    if not wrong:
        group.title += f"; none above the best of 40 drawn plans on {compared} tiny ones"
    group.figures = {
        "plain": plain,
        "median_gap_percent": float(np.median(gaps)),
        "tiny_compared": compared,
    }
    return group
