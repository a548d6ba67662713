"""Branch and bound over all placements: depth first, one node after the other, a device each.

At a partial placement with loads W, nothing below it costs less than

    cut so far
    + Σ over nodes left of the cheapest device for their edges to placed nodes
    + the least Σ_g (W_g + x_g - mean)² with x >= 0, Σ x = weight left      (water filling)

and it is left when that is not below the best known (by more than a billionth). Devices that can be
exchanged without changing any cost (equal rows and columns of the matrix, equal rights) are opened
in the order of their numbers only, and as many nodes are kept as there are devices still empty. The
order takes the node with the most edges to those before it, the heaviest first. O(k (k + degree))
for a step; the search stops after any number of steps and goes on from there.
"""

import heapq
from typing import NamedTuple

import numpy as np

from partita.core.columns import Array
from partita.kernels import Threshold, kernel, run
from partita.planners.assignment.instance import Instance, neighbours
from partita.planners.effort import Effort

_FIRST_STEPS = 20_000
_STEPS = 400_000
_MAX_TWINS = 256
_MAX_CELLS = 4_000_000


class _Given(NamedTuple):
    """The instance, nodes numbered in the order in which they are placed.

    ``twin`` is the next lower device that can stand for a device (-1 = none), ``after`` the weight
    of the nodes from each on, ``sizes`` the numbers of nodes and devices.
    """

    weight: Array
    ptr: Array
    other: Array
    out: Array
    back: Array
    matrix: Array
    allowed: Array
    twin: Array
    after: Array
    sizes: Array


class _State(NamedTuple):
    """Where the search is.

    Attributes:
        place: Device of each node; -1 = none yet.
        following: The next device to try for each node.
        pull: What the edges from each node to placed nodes cost, by device.
        least: The cheapest of these.
        load: Weight of each device.
        held: Nodes of each device.
        cut: Cost of the edges among the first nodes, by their number.
        best: The best placement.
        filled: Room for sorted loads.
        value: Its cost, and the sum of ``least`` of nodes not placed.
        at: Number of nodes placed, of empty devices, of steps left and of steps done.
    """

    place: Array
    following: Array
    pull: Array
    least: Array
    load: Array
    held: Array
    cut: Array
    best: Array
    filled: Array
    value: Array
    at: Array


class Found(NamedTuple):
    """What a search found.

    Attributes:
        place: The best placement.
        cost: Its cost.
        complete: Whether no other can be better.
        steps: Partial placements looked at.
    """

    place: Array
    cost: float
    complete: bool
    steps: int


def search_all(
    instance: Instance, start: Array, effort: Effort, *, iterations: int | None = None
) -> Found:
    """Return the best of all placements, or of those that were looked at within the limits.

    Args:
        instance: A whole problem: no field, one node for each device at least.
        start: A placement that breaks nothing.
        effort: Limits.
        iterations: Partial placements to look at; ``None`` = no limit.
    """
    cost = instance.cost(start)
    if effort.is_enough(cost) or instance.num_nodes * instance.num_devices > _MAX_CELLS:
        return Found(place=start, cost=cost, complete=effort.reached(cost), steps=0)
    order = _order(instance)
    given = _given(instance, order)
    state = _begin(instance, order, start)
    limit = np.inf if iterations is None else iterations
    steps = _FIRST_STEPS
    while state.at[0] >= 0 and state.at[3] < limit and not effort.is_enough(float(state.value[0])):
        state.at[2] = min(steps, limit - state.at[3])
        run(_descend, steps, (given,), (state,), Threshold())
        steps = _STEPS
    effort.is_enough(float(state.value[0]))
    place = np.empty(instance.num_nodes, dtype=np.int64)
    place[order] = state.best
    cost = instance.cost(place)
    done = bool(state.at[0] < 0) or effort.reached(cost)
    return Found(place=place, cost=cost, complete=done, steps=int(state.at[3]))


def _order(instance: Instance) -> Array:
    """Return the nodes, each with as many edges as possible to those before, heaviest first."""
    ptr, other, out, back = (array.tolist() for array in neighbours(instance))
    weight = instance.weight.tolist()
    near = [0.0] * instance.num_nodes
    taken = [False] * instance.num_nodes
    ready = [(-0.0, -weight[node], node) for node in range(instance.num_nodes)]
    heapq.heapify(ready)
    order = []
    while ready:
        edges, _, node = heapq.heappop(ready)
        if taken[node] or -edges < near[node]:
            continue
        taken[node] = True
        order.append(node)
        for row in range(ptr[node], ptr[node + 1]):
            after = other[row]
            near[after] += out[row] + back[row]
            if not taken[after]:
                heapq.heappush(ready, (-near[after], -weight[after], after))
    return np.array(order)


def _given(instance: Instance, order: Array) -> _Given:
    rank = np.empty(len(order), dtype=np.int64)
    rank[order] = np.arange(len(order))
    ptr, other, out, back = neighbours(instance)
    rows = np.concatenate([np.arange(ptr[node], ptr[node + 1]) for node in order.tolist()])
    size = np.diff(ptr)[order]
    weight = instance.weight[order]
    allowed = instance.allowed
    return _Given(
        weight=weight,
        ptr=np.concatenate([[0], np.cumsum(size)]),
        other=rank[other[rows]],
        out=out[rows],
        back=back[rows],
        matrix=instance.matrix.ravel(),
        allowed=np.zeros(0, dtype=bool) if allowed is None else allowed[order].ravel(),
        twin=twins(instance),
        after=np.append(np.cumsum(weight[::-1])[::-1], 0.0),
        sizes=np.array([instance.num_nodes, instance.num_devices]),
    )


def twins(instance: Instance) -> Array:
    """Return for each device the next lower one that it can be exchanged with; -1 = none.

    Two devices can be exchanged where that changes neither the matrix nor what may run on them.
    Not looked for among hundreds of devices, where no search comes to its end.
    """
    size = instance.num_devices
    result = np.full(size, -1, dtype=np.int64)
    if size > _MAX_TWINS:
        return result
    for device in range(1, size):
        for lower in range(device - 1, -1, -1):
            if _exchangeable(instance, lower, device):
                result[device] = lower
                break
    return result


def _exchangeable(instance: Instance, one: int, other: int) -> bool:
    matrix, allowed = instance.matrix, instance.allowed
    if allowed is not None and not np.array_equal(allowed[:, one], allowed[:, other]):
        return False
    rest = np.ones(instance.num_devices, dtype=bool)
    rest[[one, other]] = False
    return bool(
        matrix[one, other] == matrix[other, one]
        and np.array_equal(matrix[one, rest], matrix[other, rest])
        and np.array_equal(matrix[rest, one], matrix[rest, other])
    )


def _begin(instance: Instance, order: Array, start: Array) -> _State:
    nodes, devices = instance.num_nodes, instance.num_devices
    return _State(
        place=np.full(nodes, -1, dtype=np.int64),
        following=np.zeros(nodes, dtype=np.int64),
        pull=np.zeros(nodes * devices),
        least=np.zeros(nodes),
        load=np.zeros(devices),
        held=np.zeros(devices, dtype=np.int64),
        cut=np.zeros(nodes + 1),
        best=start[order].astype(np.int64),
        filled=np.zeros(devices),
        value=np.array([instance.cost(start), 0.0]),
        at=np.array([0, devices, 0, 0]),
    )


@kernel(inline=True)
def _spread(given: _Given, state: _State, left: float) -> float:
    """Return the least spread with some weight left to fill in where the loads are lowest."""
    devices = given.sizes[1]
    total = left
    for device in range(devices):
        level = state.load[device]
        total += level
        row = device
        while row > 0 and state.filled[row - 1] > level:
            state.filled[row] = state.filled[row - 1]
            row -= 1
        state.filled[row] = level
    mean = total / devices
    wet = 0
    poured = left
    while wet < devices and poured + state.filled[wet] > state.filled[wet] * (wet + 1):
        poured += state.filled[wet]
        wet += 1
    spread = 0.0
    if wet > 0:
        spread = wet * (poured / wet - mean) * (poured / wet - mean)
    for row in range(wet, devices):
        spread += (state.filled[row] - mean) * (state.filled[row] - mean)
    return spread


@kernel(inline=True)
def _attach(given: _Given, state: _State, node: int, device: int, sign: float) -> None:
    """Add the edges of a node on a device to what its neighbours see, or take them away."""
    devices = given.sizes[1]
    for edge in range(given.ptr[node], given.ptr[node + 1]):
        near = given.other[edge]
        if near <= node:
            continue
        cheapest = 1e300
        for g in range(devices):
            cell = near * devices + g
            state.pull[cell] += sign * (
                given.back[edge] * given.matrix[g * devices + device]
                + given.out[edge] * given.matrix[device * devices + g]
            )
            if len(given.allowed) == 0 or given.allowed[cell]:
                cheapest = min(cheapest, state.pull[cell])
        state.value[1] += cheapest - state.least[near]
        state.least[near] = cheapest


@kernel(inline=True)
def _put(given: _Given, state: _State, node: int, device: int) -> None:
    """Place a node."""
    state.place[node] = device
    state.value[1] -= state.least[node]
    state.cut[node + 1] = state.cut[node] + state.pull[node * given.sizes[1] + device]
    state.load[device] += given.weight[node]
    state.held[device] += 1
    if state.held[device] == 1:
        state.at[1] -= 1
    _attach(given, state, node, device, 1.0)


@kernel(inline=True)
def _take(given: _Given, state: _State, node: int) -> None:
    """Take a node away again."""
    device = state.place[node]
    _attach(given, state, node, device, -1.0)
    state.place[node] = -1
    state.value[1] += state.least[node]
    state.load[device] -= given.weight[node]
    state.held[device] -= 1
    if state.held[device] == 0:
        state.at[1] += 1


@kernel(inline=True)
def _open(given: _Given, state: _State, node: int, device: int) -> bool:
    """Return whether a node may go to a device: by the rules, by symmetry, and with enough left."""
    if len(given.allowed) > 0 and not given.allowed[node * given.sizes[1] + device]:
        return False
    if state.held[device] == 0:
        twin = given.twin[device]
        return bool(twin < 0 or state.held[twin] > 0)
    return bool(given.sizes[0] - node - 1 >= state.at[1])


@kernel(inline=True)
def _descend(given: _Given, state: _State) -> None:
    """Go on with the search for some steps; a number of placed nodes below 0 is its end."""
    nodes, devices = given.sizes[0], given.sizes[1]
    node = state.at[0]
    while node >= 0 and state.at[2] > 0:
        if node < nodes and state.place[node] >= 0:
            _take(given, state, node)
        device = state.following[node] if node < nodes else devices
        if device >= devices:
            if node < nodes:
                state.following[node] = 0
            node -= 1
            continue
        state.following[node] = device + 1
        if not _open(given, state, node, device):
            continue
        state.at[2] -= 1
        state.at[3] += 1
        _put(given, state, node, device)
        low = state.cut[node + 1] + state.value[1] + _spread(given, state, given.after[node + 1])
        if low < state.value[0] * (1 - 1e-9):
            node += 1
            if node == nodes:
                state.value[0] = low
                for row in range(nodes):
                    state.best[row] = state.place[row]
    state.at[0] = node
