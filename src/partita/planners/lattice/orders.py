"""Linear orders of a quotient: a portfolio to cut into pipelines where all ideals are too many.

* depth first: goes on with what became ready last, so that a branch stays together;
* by levels: the earliest step at which a node can run;
* by deadline: the node with the longest remaining path first;
* few live bytes: the node that adds least to (frees most of) what later nodes still need;
* reversed ones: the first two rules from the sinks;
* random: list scheduling with seeded priorities, alternately wild and along one branch.

``O((nodes + edges) log nodes)`` each; ties by number of the node, so an order depends on the
structure and the seed alone.
"""

import heapq
import random
from collections.abc import Callable, Iterator
from itertools import pairwise

import numpy as np

from partita.core.columns import Array, Longs
from partita.planners.lattice.nets import nets_by_node
from partita.planners.lattice.quotient import Quotient

Rows = list[list[int]]


def linear_orders(
    q: Quotient,
    *,
    weight: Array | None = None,
    net_cost: Array | None = None,
    count: int = 8,
    seed: int = 0,
) -> list[Longs]:
    """Return up to ``count`` distinct linear orders, in the order of the list above.

    Args:
        q: The quotient.
        weight: Seconds of each node, for paths; ``None`` = 1 each.
        net_cost: What each net of the quotient costs while live; ``None`` = 1 each.
        count: How many at most.
        seed: Seed of the random ones.
    """
    weights = np.ones(q.num_nodes) if weight is None else np.asarray(weight, dtype=np.float64)
    costs = np.ones(len(q.nets)) if net_cost is None else np.asarray(net_cost, dtype=np.float64)
    found: dict[bytes, Longs] = {}
    for tried, order in enumerate(_portfolio(q, weights, costs, seed)):
        found.setdefault(order.tobytes(), order)
        if len(found) >= count or tried > 2 * count + 8:
            break
    return list(found.values())


def _portfolio(q: Quotient, weight: Array, net_cost: Array, seed: int) -> Iterator[Longs]:
    after, before = _rows(q.succ_ptr, q.succ), _rows(q.pred_ptr, q.pred)
    yield _depth_first(after, before, _longest(after, weight.tolist()))
    yield _by_key(after, before, _levels(before))
    yield _by_key(after, before, [-length for length in _longest(after, weight.tolist())])
    yield _few_live(q, after, before, net_cost)
    yield _depth_first(before, after, _longest_from_sources(before, weight.tolist()))[::-1]
    yield _late(after, before)
    rng = random.Random(seed)
    while True:
        yield _by_key(after, before, [rng.random() for _ in after])
        yield _depth_first(after, before, [rng.random() for _ in after])


def _rows(ptr: Array, values: Array) -> Rows:
    bounds, flat = ptr.tolist(), values.tolist()
    return [flat[begin:end] for begin, end in pairwise(bounds)]


def _longest(after: Rows, weight: list[float]) -> list[float]:
    """Return the heaviest path that starts with each node."""
    total = list(weight)
    for node in range(len(after) - 1, -1, -1):
        total[node] += max((total[other] for other in after[node]), default=0.0)
    return total


def _longest_from_sources(before: Rows, weight: list[float]) -> list[float]:
    total = list(weight)
    for node, others in enumerate(before):
        total[node] += max((total[other] for other in others), default=0.0)
    return total


def _levels(before: Rows) -> list[int]:
    level = [0] * len(before)
    for node, others in enumerate(before):
        level[node] = max((level[other] + 1 for other in others), default=0)
    return level


def _late(after: Rows, before: Rows) -> Longs:
    """Return the nodes by the latest level at which they can run."""
    level = [0] * len(after)
    for node in range(len(after) - 1, -1, -1):
        level[node] = min((level[other] - 1 for other in after[node]), default=0)
    return _by_key(after, before, level)


def _by_key(after: Rows, before: Rows, key: list[float] | list[int]) -> Longs:
    """Return the order that always takes the ready node with the smallest key."""
    waiting = [len(others) for others in before]
    ready = [(key[node], node) for node, count in enumerate(waiting) if count == 0]
    heapq.heapify(ready)
    order = []
    while ready:
        _, node = heapq.heappop(ready)
        order.append(node)
        for other in after[node]:
            waiting[other] -= 1
            if waiting[other] == 0:
                heapq.heappush(ready, (key[other], other))
    return np.array(order, dtype=np.int64)


def _depth_first(after: Rows, before: Rows, key: list[float]) -> Longs:
    """Return the order that goes on with the nodes that became ready last, smallest key first."""
    waiting = [len(others) for others in before]
    sources = [node for node, count in enumerate(waiting) if count == 0]
    stack = sorted(sources, key=lambda node: (-key[node], -node))
    order = []
    while stack:
        node = stack.pop()
        order.append(node)
        ready = []
        for other in after[node]:
            waiting[other] -= 1
            if waiting[other] == 0:
                ready.append(other)
        stack += sorted(ready, key=lambda other: (-key[other], -other))
    return np.array(order, dtype=np.int64)


def _few_live(q: Quotient, after: Rows, before: Rows, net_cost: Array) -> Longs:
    """Return the order that always takes the ready node that adds least to the live nets.

    A net is live from its first pin to its last. Keys change when a net starts or when one pin is
    left of it: the nodes concerned are queued again, and older entries are passed over.
    """
    nets_ptr, nets = nets_by_node(q.nets, q.num_nodes)
    of_node, pins = _rows(nets_ptr, nets), _rows(q.nets.ptr, q.nets.pins)
    cost = net_cost.tolist()
    left = [len(nodes) for nodes in pins]
    begun = [False] * len(pins)
    key = [sum(cost[net] for net in mine) for mine in of_node]
    waiting = [len(others) for others in before]
    placed = [False] * q.num_nodes
    ready = [(key[node], node) for node, count in enumerate(waiting) if count == 0]
    heapq.heapify(ready)

    def change(net: int, amount: float) -> None:
        for node in pins[net]:
            if not placed[node]:
                key[node] += amount
                if waiting[node] == 0:
                    heapq.heappush(ready, (key[node], node))

    order = []
    while ready:
        value, node = heapq.heappop(ready)
        if placed[node] or value != key[node]:
            continue
        placed[node] = True
        order.append(node)
        _note_pins(of_node[node], left, begun, cost, change)
        for other in after[node]:
            waiting[other] -= 1
            if waiting[other] == 0:
                heapq.heappush(ready, (key[other], other))
    return np.array(order, dtype=np.int64)


def _note_pins(
    nets: list[int],
    left: list[int],
    begun: list[bool],
    cost: list[float],
    change: Callable[[int, float], None],
) -> None:
    """Note that a pin of each net is placed: it costs others nothing now, the last one frees it."""
    for net in nets:
        left[net] -= 1
        if not begun[net]:
            begun[net] = True
            change(net, -cost[net])
        if left[net] == 1:
            change(net, -cost[net])
