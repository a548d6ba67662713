"""Every plan of a tiny problem, and the best of them: what planners and bounds are held against.

A plan is a *layout* (stages on devices) with a *setting* (schedule, microbatches, recomputation).

* Placements put each op on one device, in every topological order where the metric sees the order.
* Pipelines cut the graph along the data into stages on disjoint sets of devices, as replicas with
  equal and with uneven shares, in the tensor-parallel degrees of the graph's variants.

Devices that can change places without a difference are used in their order. What the problem gives
stays as it is; what it leaves open takes every value, microbatches up to ``MOST_MICROBATCHES``. The
numbers grow exponentially: up to 7 ops and 4 devices are meant.

>>> from partita.core.problem import Objective
>>> from partita.testing.builders import chain, flat_cluster
>>> objective = Objective(metric=Metric.MAX_LOAD)
>>> problem = Problem(graph=chain(4), cluster=flat_cluster(2), objective=objective)
>>> len(list(all_plans(problem))), brute_force(problem).value
(8, 6.0)
"""

import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import permutations, product

import numpy as np

from partita.core.columns import Array
from partita.core.graph import Graph
from partita.core.placement import placement_plan
from partita.core.plan import Plan, Shard, Stage
from partita.core.problem import Metric, Mode, Problem, Schedule
from partita.core.solution import Proof, Solution
from partita.cost.tables import device_classes
from partita.errors import InfeasibleError, InvalidInputError
from partita.planners.pipeline import solution_of

MOST_MICROBATCHES = 8
MOST_ORDERS = 120

PLACED = frozenset(
    {
        Metric.MAX_LOAD,
        Metric.SINGLE_SAMPLE_LATENCY,
        Metric.MAKESPAN_PARALLEL,
        Metric.MAKESPAN_SEQUENTIAL,
        Metric.SHARDING_COST,
    }
)
"""Metrics of plans with one device for each op."""

PIPELINED = frozenset({Metric.PIPEDREAM, Metric.PIPEDREAM_REPAIRED, Metric.PIPER})
"""Metrics of plans with one stage for each device."""


@dataclass(frozen=True, slots=True)
class Layout:
    """Where the ops run.

    Attributes:
        stage_of: The stage of each op.
        stages: The stages; device numbers are those of the cluster.
    """

    stage_of: tuple[int, ...]
    stages: tuple[Stage, ...]


@dataclass(frozen=True, slots=True)
class Setting:
    """How they run.

    Attributes:
        schedule: The schedule.
        microbatch_sizes: Samples of each microbatch.
        recompute: Whether each op recomputes.
    """

    schedule: Schedule
    microbatch_sizes: tuple[int, ...]
    recompute: tuple[bool, ...]


def all_plans(
    problem: Problem, *, max_stages: int = 3, shards: Sequence[Shard] = (Shard.NONE,)
) -> Iterator[Plan]:
    """Yield every plan of a problem.

    Args:
        problem: A tiny problem.
        max_stages: Most stages of a pipeline; placements have as many as they need.
        shards: What replicas may divide.
    """
    choices = list(settings(problem))
    for layout in layouts(problem, max_stages=max_stages, shards=shards):
        for setting in choices:
            if _fits(layout, setting):
                yield _plan(problem, layout, setting)


def some_plans(
    problem: Problem,
    rng: random.Random,
    count: int,
    *,
    max_stages: int = 3,
    shards: Sequence[Shard] = (Shard.NONE,),
) -> Iterator[Plan]:
    """Yield plans drawn by chance from those of ``all_plans``, like devices told apart."""
    choices = list(settings(problem))
    drawn = _drawn_layouts(problem, rng, max_stages, shards)
    for layout, setting in ((next(drawn), rng.choice(choices)) for _ in range(count)):
        if _fits(layout, setting):
            yield _plan(problem, layout, setting)


def _drawn_layouts(
    problem: Problem, rng: random.Random, max_stages: int, shards: Sequence[Shard]
) -> Iterator[Layout]:
    """Yield layouts without end."""
    graph, devices, metric = problem.graph, len(problem.cluster), problem.objective.metric
    orders = list(_orders(graph, metric))
    most = min(max_stages, len(graph), devices)
    cuts = {count: list(_cuts(graph, count)) for count in range(1, most + 1)}
    while True:
        if metric in PLACED or (metric not in PIPELINED and rng.random() < 0.4):
            device_of = np.array([rng.randrange(devices) for _ in range(len(graph))])
            yield _placed(problem, device_of, rng.choice(orders))
            continue
        count = rng.randint(1, most)
        owner = [rng.randint(0, count) for _ in range(devices)]
        sets = [[d for d, stage in enumerate(owner) if stage == s] for s in range(count)]
        choices = [list(_stages(problem, group, shards)) for group in sets if group]
        if len(choices) == count and all(choices):
            yield Layout(rng.choice(cuts[count]), tuple(map(rng.choice, choices)))


def brute_force(problem: Problem, plans: Iterable[Plan] | None = None) -> Solution:
    """Return the best plan that the problem accepts; the first of equals.

    Args:
        problem: A tiny problem.
        plans: The plans to look at; ``None`` = all of them, and the best is called optimal.

    Raises:
        InfeasibleError: No plan fits.
    """
    best: Solution | None = None
    proof = Proof.OPTIMAL if plans is None else Proof.FEASIBLE
    for plan in all_plans(problem) if plans is None else plans:
        try:
            found = solution_of(problem, plan, "all plans", {}, proof=proof)
        except (InfeasibleError, InvalidInputError):
            continue
        if best is None or found.value < best.value:
            best = found
    if best is None:
        name = problem.cluster.device_names[0]
        raise InfeasibleError(f"no plan of all fits device {name!r} and the others")
    return best


def layouts(
    problem: Problem, *, max_stages: int = 3, shards: Sequence[Shard] = (Shard.NONE,)
) -> Iterator[Layout]:
    """Yield every layout that the problem's metric can measure."""
    metric = problem.objective.metric
    if metric not in PIPELINED:
        yield from _placements(problem)
    if metric not in PLACED:
        yield from _pipelines(problem, max_stages, shards)


def _placements(problem: Problem) -> Iterator[Layout]:
    """Yield a layout for every device of every op, in every order that matters."""
    graph, cluster = problem.graph, problem.cluster
    alike = _interchangeable(problem)
    orders = list(_orders(graph, problem.objective.metric))
    seen: set[Layout] = set()
    for device_of in product(range(len(cluster)), repeat=len(graph)):
        if not _first_used_in_order(device_of, alike):
            continue
        for order in orders:
            layout = _placed(problem, np.array(device_of), order)
            if layout not in seen:
                seen.add(layout)
                yield layout


def _placed(problem: Problem, device_of: Array, order: Array) -> Layout:
    """Return the layout of ops on devices, each device in one order."""
    names = problem.cluster.device_names
    plan = placement_plan(problem.graph, names, device_of, order=order)
    return Layout(tuple(plan.stage_of.tolist()), plan.stages)


def _orders(graph: Graph, metric: Metric) -> Iterator[Array]:
    """Yield the topological orders that a metric can tell apart, the graph's own first."""
    own = graph.topological_order
    yield own
    if metric not in (Metric.MAKESPAN_PARALLEL, Metric.MAKESPAN_SEQUENTIAL):
        return
    source, reader = graph.edge_source, graph.edges.reader
    pairs = [(a, b) for a, b in zip(source.tolist(), reader.tolist(), strict=True) if a >= 0]
    found = 1
    for order in permutations(own.tolist()):
        place = {op: index for index, op in enumerate(order)}
        if found < MOST_ORDERS and all(place[a] < place[b] for a, b in pairs):
            found += 1
            yield np.array(order)


def _pipelines(problem: Problem, max_stages: int, shards: Sequence[Shard]) -> Iterator[Layout]:
    """Yield every cut into stages on disjoint sets of devices."""
    for count in range(1, min(max_stages, len(problem.graph), len(problem.cluster)) + 1):
        cuts = list(_cuts(problem.graph, count))
        for sets in _device_sets(problem, count):
            choices = [list(_stages(problem, devices, shards)) for devices in sets]
            for stages, stage_of in product(product(*choices), cuts):
                yield Layout(stage_of, stages)


def _cuts(graph: Graph, count: int) -> Iterator[tuple[int, ...]]:
    """Yield every stage of each op such that no data flows to a lower stage, and none is empty."""
    ptr, edges = graph.in_edges
    order = graph.topological_order.tolist()
    before = {
        op: [s for s in graph.edge_source[edges[ptr[op] : ptr[op + 1]]].tolist() if s >= 0]
        for op in order
    }
    stage = [0] * len(graph)

    def place(index: int) -> Iterator[tuple[int, ...]]:
        if index == len(order):
            if len(set(stage)) == count:
                yield tuple(stage)
            return
        op = order[index]
        for number in range(max((stage[s] for s in before[op]), default=0), count):
            stage[op] = number
            yield from place(index + 1)

    yield from place(0)


def _device_sets(problem: Problem, count: int) -> Iterator[list[list[int]]]:
    """Yield every choice of disjoint sets of devices, one for each stage, none empty."""
    alike = _interchangeable(problem)
    for owner in product(range(count + 1), repeat=len(problem.cluster)):
        sets = [[d for d, stage in enumerate(owner) if stage == s] for s in range(count)]
        if all(sets) and all(owner[a] <= owner[b] for a, b in alike):
            yield sets


def _stages(problem: Problem, devices: Sequence[int], shards: Sequence[Shard]) -> Iterator[Stage]:
    """Yield every stage on a set of devices whose rounds divide some number of microbatches."""
    counts = {len(sizes) for sizes in _microbatches(problem)}
    for degree in sorted({1, *problem.graph.variants.tp.tolist()}):
        if len(devices) % degree:
            continue
        starts = range(0, len(devices), degree)
        groups = tuple(tuple(devices[first : first + degree]) for first in starts)
        several = len(groups) > 1
        for shard in shards if several else (Shard.NONE,):
            for shares in product((1, 2), repeat=len(groups)):
                uneven = len(set(shares)) > 1
                if (not uneven and shares[0] > 1) or (uneven and shard is not Shard.NONE):
                    continue
                if any(count % sum(shares) == 0 for count in counts):
                    yield Stage(devices=groups, shares=shares, shard=shard)


def _interchangeable(problem: Problem) -> list[tuple[int, int]]:
    """Return pairs of devices, next to each other, that can change places unnoticed."""
    cluster, classes = problem.cluster, device_classes(problem)
    pairs = []
    for a in range(len(cluster) - 1):
        b = a + 1
        same = classes.of[a] == classes.of[b]
        same = same and all(level.group_of[a] == level.group_of[b] for level in cluster.levels)
        if same and _same_links(problem, a, b):
            pairs.append((a, b))
    return pairs


def _same_links(problem: Problem, a: int, b: int) -> bool:
    """Return whether a matrix of links stays the same if two devices change places."""
    matrix, size = problem.cluster.matrix, len(problem.cluster)
    if matrix is None:
        return True
    swapped = np.arange(size)
    swapped[[a, b]] = b, a
    apart = ~np.eye(size, dtype=bool)
    for column in (matrix.bandwidth_bytes_per_s, matrix.latency_s):
        square = column.reshape(size, size)
        if not np.array_equal(square[np.ix_(swapped, swapped)][apart], square[apart]):
            return False
    return True


def _first_used_in_order(device_of: Sequence[int], alike: Sequence[tuple[int, int]]) -> bool:
    """Return whether every device is used no later than its twin."""
    never = len(device_of)
    first = {device: op for op, device in reversed(list(enumerate(device_of)))}
    return all(first.get(a, never) <= first.get(b, never) for a, b in alike)


def settings(problem: Problem) -> Iterator[Setting]:
    """Yield every setting that the problem leaves open."""
    objective, count = problem.objective, len(problem.graph)
    training = objective.mode is Mode.TRAINING
    given = objective.schedule
    schedules = [given] if given is not None else _schedules(problem)
    again = [(False,) * count]
    if training and objective.metric in (Metric.THROUGHPUT, Metric.PIPER):
        again.append((True,) * count)
    for sizes, schedule, recompute in product(_microbatches(problem), schedules, again):
        yield Setting(schedule, sizes, recompute)


def _schedules(problem: Problem) -> list[Schedule]:
    if problem.objective.mode is Mode.INFERENCE:
        return [Schedule.INFERENCE]
    if problem.objective.metric is not Metric.THROUGHPUT:
        return [Schedule.ONE_F_ONE_B]
    return [schedule for schedule in Schedule if schedule is not Schedule.INFERENCE]


def _microbatches(problem: Problem) -> Iterator[tuple[int, ...]]:
    """Yield the sizes of the microbatches: as given, with the samples of a step kept."""
    objective, count, size = problem.objective, problem.microbatches, problem.microbatch_size
    single = objective.metric in PLACED or objective.metric is Metric.LATENCY
    if single or objective.microbatch_size is not None:
        yield (size,) * count
        return
    total = count * size
    counts = [count] if objective.microbatches is not None else range(1, MOST_MICROBATCHES + 1)
    for number in counts:
        if total % number == 0:
            yield (total // number,) * number
        if number > 1 and total > number:
            yield (total - number + 1, *(1,) * (number - 1))


def _fits(layout: Layout, setting: Setting) -> bool:
    """Return whether the rounds of all stages divide the microbatches."""
    count = len(setting.microbatch_sizes)
    return all(count % stage.round == 0 for stage in layout.stages)


def _plan(problem: Problem, layout: Layout, setting: Setting) -> Plan:
    return Plan(
        fingerprint=problem.graph.fingerprint,
        devices=problem.cluster.device_names,
        stage_of=np.array(layout.stage_of),
        stages=layout.stages,
        schedule=setting.schedule,
        microbatch_sizes=np.array(setting.microbatch_sizes),
        recompute=np.array(setting.recompute),
    )
