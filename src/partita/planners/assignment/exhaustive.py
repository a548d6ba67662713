"""All placements under any metric: each becomes a plan, and the cost model measures it.

Parts that can be one stage each become a pipeline; others are cut into stages by
``core.placement``. A placement is better when it breaks less (bytes above memory, or limits of a
published objective), then when its value is lower, so that a search finds its way into the limits.
"""

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import combinations, product
from typing import NamedTuple

import numpy as np

from partita.core.columns import Array
from partita.core.graph import Graph
from partita.core.metrics import MemoryRule
from partita.core.order import topological_order
from partita.core.placement import is_pipeline, placement_plan
from partita.core.plan import Plan, equal_microbatches
from partita.core.problem import Mode, Problem
from partita.cost.judge import measure, peaks
from partita.errors import InvalidInputError
from partita.objectives.placed import seconds_on
from partita.planners.assignment.instance import joined, places
from partita.planners.effort import Effort
from partita.planners.pipeline import main_devices, pipeline_plan

_MAX_TWINS = 64
"""Devices up to which those that can stand for each other are looked for."""


class Score(NamedTuple):
    """How good a placement is; smaller is better.

    Attributes:
        broken: By how much it breaks limits; 0 = not at all.
        value: Its value by the problem's metric.
    """

    broken: float
    value: float


NOTHING = Score(math.inf, math.inf)
"""Before anything was measured, and what no plan stands for."""


@dataclass(slots=True)
class MeasuredSearch:
    """The placements of one problem that were measured, and the best of them.

    Attributes:
        problem: The problem.
        effort: Limits; the goal is the bound of the cost model.
        node_of: Node of every op; ops that share a device are one node.
        order: The nodes along the data.
        allowed: Where each node may be; ``None`` = anywhere.
        weight: Seconds of each node on the reference device.
        limit: Plans that may be measured; ``inf`` = any number.
        best: The best placement.
        score: How good it is.
        measured: Plans measured.
    """

    problem: Problem
    effort: Effort
    node_of: Array
    order: Array
    allowed: Array | None
    weight: Array
    limit: float = math.inf
    best: Array = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    score: Score = field(default=NOTHING)
    measured: int = 0
    _seen: dict[bytes, Score] = field(default_factory=dict)

    @property
    def is_done(self) -> bool:
        """Whether the search is over: nothing is better, or a limit is reached."""
        if self.score.broken == 0 and self.effort.reached(self.score.value):
            return True
        return self.measured >= self.limit or self.effort.is_over()

    def measure(self, place: Array) -> Score:
        """Return how good a placement of the nodes is, and keep it if it is the best."""
        key = place.astype(np.int32).tobytes()
        if key in self._seen:
            return self._seen[key]
        score = self._score(place)
        self.measured += 1
        self._seen[key] = score
        if score < self.score or not len(self.best):
            self.best, self.score = place.copy(), score
            if score.broken == 0:
                self.effort.record(score.value)
        return score

    def _score(self, place: Array) -> Score:
        try:
            plan = plan_of(self.problem, place[self.node_of])
            value = measure(self.problem, plan)
        except InvalidInputError:
            return NOTHING
        if self.problem.objective.metric.row.memory is MemoryRule.METRIC:
            return Score(float(len(value.errors)), value.value)
        # What is no better by its value needs no check of memory once something fits.
        if self.score.broken == 0 and value.value >= self.score.value:
            return Score(0.0, value.value)
        return Score(_bytes_over(self.problem, plan), value.value)

    def plan(self) -> Plan:
        """Return the plan of the best placement."""
        return plan_of(self.problem, self.best[self.node_of])


def search_of(problem: Problem, effort: Effort, limit: float = math.inf) -> MeasuredSearch:
    """Return a search that has measured nothing yet.

    Raises:
        InfeasibleError: No device may run all ops of a node.
    """
    graph = problem.graph
    node_of, count = joined(graph.ops.colocation)
    seconds = graph.forward_s
    if problem.objective.mode is Mode.TRAINING:
        seconds = seconds + graph.backward_s
    return MeasuredSearch(
        problem=problem,
        effort=effort,
        node_of=node_of,
        order=_along_the_data(graph, node_of, count),
        allowed=places(problem, node_of, count),
        weight=np.bincount(node_of, seconds, count),
        limit=limit,
    )


def _along_the_data(graph: Graph, node_of: Array, count: int) -> Array:
    """Return the nodes by their first forward op, nodes without one last."""
    forward = graph.is_forward[graph.topological_order]
    ops = np.concatenate([graph.topological_order[forward], graph.topological_order[~forward]])
    first = np.full(count, len(graph))
    np.minimum.at(first, node_of[ops], np.arange(len(ops)))
    return np.argsort(first, kind="stable")


def plan_of(problem: Problem, device_of: Array) -> Plan:
    """Return the plan that runs each op on its device: a pipeline where the parts make one."""
    graph, objective = problem.graph, problem.objective
    used, part = np.unique(device_of, return_inverse=True)
    source, reader = graph.edge_source, graph.edges.reader
    inner = np.flatnonzero(source >= 0)
    forward = inner[graph.is_forward[source[inner]] & graph.is_forward[reader[inner]]]
    complete = len(np.unique(part[graph.is_forward])) == len(used)
    if complete and is_pipeline(graph, part):
        a, b = part[source[forward]], part[reader[forward]]
        names = [str(device) for device in used.tolist()]
        order = topological_order(len(used), a[a != b], b[a != b], names)
        rank = np.empty(len(used), dtype=np.int32)
        rank[order] = np.arange(len(used))
        return pipeline_plan(problem, rank[part], [[int(used[index])] for index in order])
    return placement_plan(
        graph,
        [problem.cluster.device_names[device] for device in used.tolist()],
        part,
        schedule=objective.placement_schedule,
        microbatch_sizes=equal_microbatches(problem.microbatches, problem.microbatch_size),
    )


def _bytes_over(problem: Problem, plan: Plan) -> float:
    """Return the bytes above the memory that the devices have."""
    return float(np.maximum(peaks(problem, plan).over_bytes, 0.0).sum())


def _contiguous_starts(search: MeasuredSearch) -> list[Array]:
    """Return placements of runs along the data: on few to all devices, by time and by memory."""
    problem = search.problem
    devices = np.array(main_devices(problem))
    # Whole passes of the graph in a second, by device.
    class_of, seconds = seconds_on(problem.graph, problem.cluster.devices, problem.objective.mode)
    pace: Array = 1.0 / np.maximum(seconds.sum(axis=1), 1e-300)[class_of]
    fast = devices[np.argsort(-pace[devices], kind="stable")]
    count = min(len(devices), len(search.order))
    numbers = sorted({1, 2, 3, 4, *np.geomspace(1, count, 6).astype(int).tolist(), count})
    numbers = [number for number in numbers if number <= count]
    memory = np.bincount(search.node_of, problem.graph.size_bytes, len(search.weight))
    found = [
        _runs(search, np.sort(fast[:number]), weight, pace, lean)
        for weight, lean in (
            *((search.weight, lean) for lean in (0.5, 0.0, 1.0)),
            (memory, 0.5),
        )
        for number in numbers
    ]
    return [_allowed_only(search, place) for place in found]


def ranked_starts(search: MeasuredSearch) -> list[Array]:
    """Return the contiguous placements measured within the limits, best first, at least one."""
    found: list[tuple[Score, int, Array]] = []
    for place in _contiguous_starts(search):
        if found and search.is_done:
            break
        found.append((search.measure(place), len(found), place))
    return [place for _, _, place in sorted(found, key=lambda start: start[:2])]


def _runs(search: MeasuredSearch, devices: Array, weight: Array, pace: Array, lean: float) -> Array:
    """Return the nodes on devices in runs along the data, each as long as its device is fast.

    Args:
        search: Whose nodes.
        devices: The devices in their order.
        weight: What is to be even over time, by node.
        pace: How fast each device is.
        lean: Share of a node that counts when a border would cut it: 0 keeps it before the border,
            1 puts it after.
    """
    place = np.empty(len(search.order), dtype=np.int64)
    nodes = search.order
    filled: Array = np.cumsum(weight[nodes]) - weight[nodes] * (1 - lean)
    total = float(weight[nodes].sum())
    if total <= 0:
        filled, total = np.arange(len(nodes)) + lean, float(len(nodes))
    border = np.cumsum(pace[devices]) / pace[devices].sum()
    rank = np.searchsorted(border[:-1], filled / total, side="left" if lean == 1 else "right")
    place[nodes] = devices[rank]
    return place


def _allowed_only(search: MeasuredSearch, place: Array) -> Array:
    """Return a placement with nodes that may not be where they are moved to where they may."""
    if search.allowed is None:
        return place
    place = place.copy()
    load = np.bincount(place, search.weight, search.allowed.shape[1])
    for node in np.flatnonzero(~search.allowed[np.arange(len(place)), place]).tolist():
        options = np.flatnonzero(search.allowed[node])
        place[node] = int(options[np.argmin(load[options])])
        load[place[node]] += search.weight[node]
    return place


def measure_all(search: MeasuredSearch, start: Array) -> bool:
    """Measure every placement, those that differ from a start in few nodes first.

    Placements that are equal but for devices that can stand for each other are measured once.

    Returns:
        Whether all were measured; else a limit was reached.
    """
    twin = _device_twins(search.problem)
    seen = set()
    for place in _by_distance(search, start):
        key = _canonical(place, twin)
        if key in seen:
            continue
        if search.is_done:
            return False
        seen.add(key)
        search.measure(place)
    return True


def _by_distance(search: MeasuredSearch, start: Array) -> Iterator[Array]:
    """Yield all placements, by the number of nodes that are not where the start has them."""
    everywhere = range(len(search.problem.cluster))
    choices = [
        [
            device
            for device in everywhere
            if device != start[node] and (search.allowed is None or search.allowed[node, device])
        ]
        for node in range(len(start))
    ]
    for distance in range(len(start) + 1):
        for nodes in combinations(range(len(start)), distance):
            for devices in product(*(choices[node] for node in nodes)):
                place = start.copy()
                place[list(nodes)] = devices
                yield place


def _device_twins(problem: Problem) -> Array:
    """Return the class of each device; those of a class can be exchanged with no change of cost.

    Not looked for among many devices, whose placements nobody measures all.
    """
    cluster = problem.cluster
    size = len(cluster)
    label = np.arange(size)
    if size > _MAX_TWINS:
        return label
    source, target = np.divmod(np.arange(size * size), size)
    links = cluster.links(source, target)
    between = np.stack([links.bandwidth_bytes_per_s, links.latency_s, links.level])
    between = between.reshape(3, size, size)
    bare = [
        (replace(device, name="", host=0), replace(cluster.hosts[device.host], name=""))
        for device in cluster.devices
    ]
    rights = problem.allowed[1]
    for device in range(size):
        for other in range(device):
            alike = bare[other] == bare[device] and _links_alike(between, other, device)
            if alike and np.array_equal(rights[:, other], rights[:, device]):
                label[device] = label[other]
                break
    return label


def _links_alike(between: Array, one: int, other: int) -> bool:
    rest = np.ones(between.shape[1], dtype=bool)
    rest[[one, other]] = False
    return bool(
        np.array_equal(between[:, one, other], between[:, other, one])
        and np.array_equal(between[:, one, rest], between[:, other, rest])
        and np.array_equal(between[:, rest, one], between[:, rest, other])
    )


def _canonical(place: Array, twin: Array) -> bytes:
    """Return a name of a placement that does not tell devices of a class apart."""
    new: dict[int, int] = {}
    opened: Counter[int] = Counter()
    result = []
    for device in place.tolist():
        if device not in new:
            kind = int(twin[device])
            new[device] = kind * len(twin) + opened[kind]
            opened[kind] += 1
        result.append(new[device])
    return np.array(result, dtype=np.int64).tobytes()
