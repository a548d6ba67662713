"""Good placements to start from: nodes in a line, cut into one run for each device.

The nodes are put in several linear orders (topological, breadth first from an end, and two that
keep the cut small as they grow), the devices in one in which neighbours are near. A dynamic
programme then cuts each order into k runs: with P the prefix weights and x(i) the cost of the edges
over position i between two consecutive devices,

    best[g][i] = min over j < i of  best[g-1][j] + c_g (P_i - P_j - t_g)² + x(j)

An edge that leads over several runs is counted at each boundary, so the result is a start and not
an optimum. Prefixes are kept within a band around the weight that the first g devices should have:
O(k × band²) instead of O(k n²). A path is cut into its best runs, which is how the published chains
are solved.
"""

import heapq
from typing import NamedTuple

import numpy as np

from partita.core.columns import Array
from partita.kernels import Threshold, kernel, run
from partita.planners.assignment.instance import Instance, neighbours, one_for_each

_BAND = 4.0
_MAX_WORK = 200_000_000


class _Runs(NamedTuple):
    """What is cut: prefixes, edges over each position, and the devices in their order."""

    prefix: Array
    forward: Array
    backward: Array
    ahead: Array
    astern: Array
    share: Array
    factor: Array
    least: Array
    low: Array
    high: Array
    row: Array


class _Table(NamedTuple):
    """The dynamic programme: best cost and where the run began, by band."""

    best: Array
    begin: Array


def starts(instance: Instance) -> list[Array]:
    """Return placements, cheapest first, at least one; none breaks ``least`` or ``allowed``."""
    sequence = near_sequence(instance.matrix)
    found = [cut_into_runs(instance, order, sequence) for order in node_orders(instance)]
    fixed = [repaired(instance, place) for place in found if place is not None]
    fixed.append(repaired(instance, np.arange(instance.num_nodes) % instance.num_devices))
    return sorted(fixed, key=instance.cost)


def near_sequence(matrix: Array) -> Array:
    """Return the devices so that each is the nearest to the one before that is left; O(k²)."""
    cost = np.minimum(matrix, matrix.T).copy()
    np.fill_diagonal(cost, np.inf)
    sequence = [0]
    cost[:, 0] = np.inf
    while len(sequence) < len(matrix):
        after = int(np.argmin(cost[sequence[-1]]))
        sequence.append(after)
        cost[:, after] = np.inf
    return np.array(sequence)


def node_orders(instance: Instance) -> list[Array]:
    """Return linear orders of the nodes, without repeats."""
    ptr, other, _, _ = neighbours(instance)
    links, ends = ptr.tolist(), other.tolist()
    orders = [_topological(instance, newest=False), _topological(instance, newest=True)]
    first = int(_breadth_first(links, ends, int(orders[0][0]))[-1])
    first = int(_breadth_first(links, ends, first)[-1])
    orders.append(_breadth_first(links, ends, first))
    orders += [_growing(links, ends, first, nearest=nearest) for nearest in (True, False)]
    return [np.array(order) for order in dict.fromkeys(tuple(order.tolist()) for order in orders)]


def _topological(instance: Instance, *, newest: bool) -> Array:
    """Return an order along the edges, cycles of joined nodes broken at the lowest number.

    Args:
        instance: The instance.
        newest: Whether what has become ready last comes first.
    """
    count = instance.num_nodes
    waiting = np.bincount(instance.target, minlength=count).tolist()
    after: list[list[int]] = [[] for _ in range(count)]
    for a, b in zip(instance.source.tolist(), instance.target.tolist(), strict=True):
        after[a].append(b)
    ready = [(0, node) for node in range(count) if waiting[node] == 0]
    seen = [False] * count
    order: list[int] = []
    fallback = 0
    while len(order) < count:
        if not ready:
            while seen[fallback]:
                fallback += 1
            ready.append((0, fallback))
        node = heapq.heappop(ready)[1]
        if seen[node]:
            continue
        seen[node] = True
        order.append(node)
        for reader in after[node]:
            waiting[reader] -= 1
            if waiting[reader] == 0 and not seen[reader]:
                rank = -len(order) if newest else len(order)
                heapq.heappush(ready, (rank, reader))
    return np.array(order)


def _breadth_first(ptr: list[int], other: list[int], first: int) -> Array:
    """Return all nodes breadth first from one; parts that it does not reach follow."""
    count = len(ptr) - 1
    seen = [False] * count
    order: list[int] = []
    for root in (first, *range(count)):
        if seen[root]:
            continue
        seen[root] = True
        head = len(order)
        order.append(root)
        while head < len(order):
            node = order[head]
            head += 1
            for after in other[ptr[node] : ptr[node + 1]]:
                if not seen[after]:
                    seen[after] = True
                    order.append(after)
    return np.array(order)


def _growing(ptr: list[int], other: list[int], first: int, *, nearest: bool) -> Array:
    """Return an order that takes the node with the most edges into what it has taken.

    Args:
        ptr: Pointers to the neighbours of each node.
        other: The neighbours.
        first: The first node.
        nearest: Whether edges out of what is taken count against a node, and the node that was
            reached last wins a tie; otherwise the one that was reached first.
    """
    count = len(ptr) - 1
    inside = [0] * count
    taken = [False] * count
    order: list[int] = []
    ready: list[tuple[int, int, int]] = [(-count, 0, first)]
    rest = iter(range(count))
    while len(order) < count:
        while ready:
            node = heapq.heappop(ready)[2]
            if not taken[node]:
                break
        else:
            node = next(node for node in rest if not taken[node])
        taken[node] = True
        order.append(node)
        for after in other[ptr[node] : ptr[node + 1]]:
            if taken[after]:
                continue
            inside[after] += 1
            gain = 2 * inside[after] - (ptr[after + 1] - ptr[after]) if nearest else inside[after]
            heapq.heappush(ready, (-gain, -len(order) if nearest else len(order), after))
    return np.array(order)


def cut_into_runs(instance: Instance, order: Array, sequence: Array) -> Array | None:
    """Return the best cut of an order into a run for each device, in their sequence.

    Returns:
        Device of each node; ``None`` where the band holds no cut.
    """
    runs = _runs(instance, order, sequence)
    cells = int(runs.row[-1])
    table = _Table(np.full(cells, np.inf), np.full(cells, -1, dtype=np.int64))
    run(_cut, _work(runs.low, runs.high), (runs,), (table,), Threshold())
    place = np.empty(instance.num_nodes, dtype=np.int64)
    end = instance.num_nodes
    for rank in range(len(sequence), 0, -1):
        cell = int(runs.row[rank]) + end - int(runs.low[rank])
        begin = int(table.begin[cell])
        if begin < 0:
            return None
        place[order[begin:end]] = sequence[rank - 1]
        end = begin
    return place


def _runs(instance: Instance, order: Array, sequence: Array) -> _Runs:
    count = instance.num_nodes
    position = np.empty(count, dtype=np.int64)
    position[order] = np.arange(count)
    a, b = position[instance.source], position[instance.target]
    prefix = np.concatenate([[0.0], np.cumsum(instance.weight[order])])
    share, least = instance.share[sequence], instance.least[sequence]
    width = _BAND
    low, high = _bands(prefix, share, least, width)
    while _work(low, high) > _MAX_WORK and width > 0.01:
        width /= 2
        low, high = _bands(prefix, share, least, width)
    row = np.concatenate([[0], np.cumsum(high - low + 1)])
    matrix = instance.matrix
    return _Runs(
        prefix=prefix,
        forward=_over(a, b, count),
        backward=_over(b, a, count),
        ahead=np.append(matrix[sequence[:-1], sequence[1:]], 0.0),
        astern=np.append(matrix[sequence[1:], sequence[:-1]], 0.0),
        share=share,
        factor=instance.factor[sequence],
        least=least,
        low=low,
        high=high,
        row=row,
    )


def _over(begin: Array, end: Array, count: int) -> Array:
    """Return how many of the edges that lead up the order pass over each position."""
    up = begin < end
    change = np.bincount(begin[up] + 1, minlength=count + 2).astype(np.float64)
    change -= np.bincount(end[up] + 1, minlength=count + 2)
    return np.cumsum(change)[: count + 1]


def _work(low: Array, high: Array) -> int:
    """Return the pairs of positions that the dynamic programme looks at."""
    size = (high - low + 1).astype(np.float64)
    return int((size[1:] * size[:-1]).sum())


def _bands(prefix: Array, share: Array, least: Array, width: float) -> tuple[Array, Array]:
    """Return the first and last position at which the first g devices may end, for each g.

    Args:
        prefix: Weight of the first nodes.
        share: Weight that each device should have.
        least: Nodes that it needs.
        width: How far a position may be from what the shares ask, in shares.
    """
    count, devices = len(prefix) - 1, len(share)
    wanted = np.concatenate([[0.0], np.cumsum(share)])
    step = np.diff(prefix)
    reach = width * share.max() + 2.0 * step.max(initial=0.0)
    if prefix[-1] <= 0:
        prefix, wanted = np.arange(count + 1.0), np.arange(devices + 1.0) * count / devices
        reach = width * count / devices + 2.0
    low = np.searchsorted(prefix, wanted - reach, side="left")
    high = np.searchsorted(prefix, wanted + reach, side="right") - 1
    needed = np.concatenate([[0], np.cumsum(least)])
    low = np.clip(low, needed, None)
    high = np.clip(high, None, count - (needed[-1] - needed))
    low[0] = high[0] = 0
    low[-1] = high[-1] = count
    return np.minimum(low, high), high


@kernel(inline=True)
def _cut(runs: _Runs, table: _Table) -> None:
    """Fill the table; see the module."""
    table.best[0] = 0.0
    for rank in range(1, len(runs.low)):
        share, factor, least = runs.share[rank - 1], runs.factor[rank - 1], runs.least[rank - 1]
        before, here = runs.row[rank - 1] - runs.low[rank - 1], runs.row[rank] - runs.low[rank]
        for end in range(runs.low[rank], runs.high[rank] + 1):
            best, chosen = table.best[here + end], -1
            for begin in range(runs.low[rank - 1], min(runs.high[rank - 1], end - least) + 1):
                cost = table.best[before + begin]
                if cost >= best:
                    continue
                over = runs.prefix[end] - runs.prefix[begin] - share
                cost += factor * over * over
                if rank > 1:
                    cost += runs.forward[begin] * runs.ahead[rank - 2]
                    cost += runs.backward[begin] * runs.astern[rank - 2]
                if cost < best:
                    best, chosen = cost, begin
            table.best[here + end] = best
            table.begin[here + end] = chosen


def repaired(instance: Instance, place: Array) -> Array:
    """Return a placement whose nodes are where they may be, and whose devices have enough."""
    place = place.copy()
    if instance.allowed is not None:
        wrong = np.flatnonzero(~instance.allowed[np.arange(instance.num_nodes), place])
        load = np.bincount(place, instance.weight, instance.num_devices)
        for node in wrong.tolist():
            options = np.flatnonzero(instance.allowed[node])
            best = int(options[np.argmin(load[options] / np.maximum(instance.share[options], 1))])
            load[place[node]] -= instance.weight[node]
            load[best] += instance.weight[node]
            place[node] = best
    return _filled(instance, place)


def _filled(instance: Instance, place: Array) -> Array:
    """Move light nodes to devices that have too few.

    Where none is free to go, every device gets one that it may have before the others. Where that
    is not enough, the cost is infinite.
    """
    size = np.bincount(place, minlength=instance.num_devices)
    light = np.argsort(instance.weight, kind="stable")
    for device in np.flatnonzero(size < instance.least).tolist():
        while size[device] < instance.least[device]:
            free = size[place[light]] > instance.least[place[light]]
            if instance.allowed is not None:
                free &= instance.allowed[light, device]
            if not free.any():
                chosen = one_for_each(instance)
                place[chosen[chosen >= 0]] = np.flatnonzero(chosen >= 0)
                return place
            node = int(light[np.argmax(free)])
            size[place[node]] -= 1
            place[node] = device
            size[device] += 1
    return place
