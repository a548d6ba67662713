"""Simulated annealing of a placement: moves, swaps and exchanged labels, evaluated incrementally.

A step picks a node v and a device near one of its neighbours, and tries to

* move v there:  Δ = c_b w (w + 2 (W_b - t_b)) + c_a w (w - 2 (W_a - t_a)) + Σ_{edges of v} ΔM,
* swap v with a node of that device: the same with the difference of the weights, so that balance
  survives, which a single move would break, or
* exchange the labels of two devices: the parts stay, only M changes; rare, as it looks at all edges
  of two parts.

It is accepted where Δ <= 0, else with probability exp(-Δ / T). The nodes of a part lie together in
one array, so that a node of a part is drawn, and a swap done, in O(1); a move between parts a and b
shifts |a - b| borders. A step is O(degree of the nodes).

Deterministic: the random numbers are those of Park and Miller, of the seed alone.
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from partita.core.columns import Array
from partita.kernels import Threshold, kernel, run
from partita.planners.assignment.instance import Instance, neighbours

STEPS = 20_000
"""Steps that one temperature lasts."""

_TINY = 64
_NEAR = 4
_RANDOM = 2147483647


class _Given(NamedTuple):
    """The instance.

    ``sizes`` holds the numbers of nodes, of devices, of near devices of each and of steps, ``heat``
    the temperature and what the edges of two nodes can gain at most.
    """

    weight: Array
    ptr: Array
    other: Array
    out: Array
    back: Array
    matrix: Array
    share: Array
    factor: Array
    least: Array
    field: Array
    allowed: Array
    near: Array
    sizes: Array
    heat: Array


class _State(NamedTuple):
    """A placement: nodes in parts, parts on devices.

    Attributes:
        part: Part of each node.
        device: Device of each part.
        held: Part of each device.
        load: Weight of each part.
        begin: Where the nodes of each part begin in ``member``.
        member: The nodes, part by part.
        position: Where each node is in ``member``.
        cost: The cost.
        word: State of the random numbers.
    """

    part: Array
    device: Array
    held: Array
    load: Array
    begin: Array
    member: Array
    position: Array
    cost: Array
    word: Array


class Annealer:
    """Cools placements of one instance."""

    def __init__(self, instance: Instance) -> None:
        ptr, other, out, back = neighbours(instance)
        nodes, devices = instance.num_nodes, instance.num_devices
        near = _near_devices(instance.matrix)
        tiny = nodes * devices <= _TINY
        none = np.zeros(0)
        self.instance = instance
        self.steps = 2 * nodes * devices if tiny else STEPS
        self._given = _Given(
            weight=instance.weight,
            ptr=ptr,
            other=other,
            out=out,
            back=back,
            matrix=instance.matrix.ravel(),
            share=instance.share,
            factor=instance.factor,
            least=instance.least,
            field=none if instance.field is None else instance.field.ravel(),
            allowed=np.zeros(0, bool) if instance.allowed is None else instance.allowed.ravel(),
            near=near.ravel(),
            sizes=np.array([nodes, devices, near.shape[1], self.steps]),
            heat=np.array([0.0, self._reach(ptr, out + back)]),
        )

    def _reach(self, ptr: Array, edges: Array) -> float:
        """Return what the edges of two nodes can gain at most."""
        total = np.concatenate([[0.0], np.cumsum(edges)])
        degree = float((total[ptr[1:]] - total[ptr[:-1]]).max(initial=0.0))
        outside = 0.0 if self.instance.field is None else float(np.ptp(self.instance.field))
        return 2 * (degree * float(self.instance.matrix.max(initial=0.0)) + outside)

    def temperature(self) -> float:
        """Return the mean cost of a link, or where links are free of a step in balance."""
        links = self.instance.matrix[~np.eye(self.instance.num_devices, dtype=bool)]
        paid = links[links > 0]
        if len(paid):
            return float(paid.mean())
        return float((self.instance.factor.max() * np.mean(self.instance.weight**2)) or 1.0)

    def cool(
        self,
        start: Array,
        temperatures: Sequence[float],
        seed: int,
        *,
        is_enough: Callable[[float], bool],
    ) -> tuple[Array, float]:
        """Return the best placement at the end of a temperature, and its cost.

        Args:
            start: A placement that breaks nothing.
            temperatures: The temperatures, in their order.
            seed: Of the random numbers.
            is_enough: Called with the best cost after each; true stops.
        """
        state = self._state(start, seed)
        best, least = start, self.instance.cost(start)
        for temperature in temperatures:
            self._given.heat[0] = temperature
            run(_walk, self.steps * len(temperatures), (self._given,), (state,), Threshold())
            if state.cost[0] < least * (1 - 1e-12):
                place = state.device[state.part]
                best, least = place, self.instance.cost(place)
            if is_enough(least):
                break
        return best, least

    def _state(self, start: Array, seed: int) -> _State:
        devices = self.instance.num_devices
        member = np.argsort(start, kind="stable")
        position = np.empty(len(start), dtype=np.int64)
        position[member] = np.arange(len(start))
        return _State(
            part=start.astype(np.int64),
            device=np.arange(devices),
            held=np.arange(devices),
            load=np.bincount(start, self.instance.weight, devices),
            begin=np.searchsorted(start[member], np.arange(devices + 1)).astype(np.int64),
            member=member.astype(np.int64),
            position=position,
            cost=np.array([self.instance.cost(start)]),
            word=np.array([1 + (seed * 7919 + 12345) % (_RANDOM - 1)]),
        )


def _near_devices(matrix: Array) -> Array:
    """Return a few of the nearest devices of each; of itself where there is no other."""
    size = len(matrix)
    if size == 1:
        return np.zeros((1, 1), dtype=np.int64)
    cost = np.minimum(matrix, matrix.T).copy()
    np.fill_diagonal(cost, np.inf)
    count = min(_NEAR, size - 1)
    if size <= 64:
        return np.argsort(cost, axis=1, kind="stable")[:, :count].astype(np.int64)
    # Ties in rows of thousands are broken by distance in number, for locality.
    apart = np.abs(np.arange(size)[:, None] - np.arange(size)[None, :]) * (1e-12 / size)
    scale = float(cost[np.isfinite(cost)].max()) or 1.0
    return np.argpartition(cost + apart * scale, count - 1, axis=1)[:, :count].astype(np.int64)


@kernel(inline=True)
def _draw(state: _State) -> int:
    """Return the next random number."""
    state.word[0] = state.word[0] * 48271 % _RANDOM
    return int(state.word[0])


@kernel(inline=True)
def _chosen(state: _State, delta: float, temperature: float) -> bool:
    """Return whether a change is accepted."""
    if delta <= 0:
        return True
    if delta >= 30 * temperature:
        return False
    return _draw(state) / _RANDOM < math.exp(-delta / temperature)


@kernel(inline=True)
def _pull(given: _Given, state: _State, node: int, a: int, b: int, but: int) -> float:
    """Return the change of edge cost when a node goes from device a to b; ``but`` stays out."""
    devices = given.sizes[1]
    delta = 0.0
    for edge in range(given.ptr[node], given.ptr[node + 1]):
        near = given.other[edge]
        if near != but:
            g = state.device[state.part[near]]
            delta += given.out[edge] * (
                given.matrix[b * devices + g] - given.matrix[a * devices + g]
            )
            delta += given.back[edge] * (
                given.matrix[g * devices + b] - given.matrix[g * devices + a]
            )
    if len(given.field) > 0:
        delta += given.field[node * devices + b] - given.field[node * devices + a]
    return delta


@kernel(inline=True)
def _between(given: _Given, node: int, near: int, a: int, b: int) -> float:
    """Return the change for the edges between a node that goes from a to b, and one back."""
    devices = given.sizes[1]
    turn = given.matrix[b * devices + a] - given.matrix[a * devices + b]
    for edge in range(given.ptr[node], given.ptr[node + 1]):
        if given.other[edge] == near:
            return float((given.out[edge] - given.back[edge]) * turn)
    return 0.0


@kernel(inline=True)
def _gain(given: _Given, state: _State, part: int, weight: float) -> float:
    """Return the change of spread when a part gains a weight."""
    device = state.device[part]
    over = state.load[part] - given.share[device]
    return float(given.factor[device] * weight * (weight + 2.0 * over))


@kernel(inline=True)
def _may(given: _Given, node: int, device: int) -> bool:
    """Return whether a node may be on a device."""
    return len(given.allowed) == 0 or bool(given.allowed[node * given.sizes[1] + device])


@kernel(inline=True)
def _target(given: _Given, state: _State, node: int) -> int:
    """Return a part for a node: a neighbour's, one near to a neighbour's, or any."""
    sort = _draw(state) % 100
    first, count = given.ptr[node], given.ptr[node + 1] - given.ptr[node]
    if sort >= 90 or count == 0:
        return int(_draw(state) % given.sizes[1])
    part = state.part[given.other[first + _draw(state) % count]]
    if sort < 75:
        return int(part)
    near = given.sizes[2]
    return int(state.held[given.near[state.device[part] * near + _draw(state) % near]])


@kernel(inline=True)
def _try_move(given: _Given, state: _State, node: int, to: int, temperature: float) -> None:
    """Move a node to a part, if accepted."""
    here = state.part[node]
    a, b = state.device[here], state.device[to]
    if state.begin[here + 1] - state.begin[here] <= given.least[a] or not _may(given, node, b):
        return
    weight = given.weight[node]
    delta = _gain(given, state, to, weight) + _gain(given, state, here, -weight)
    delta += _pull(given, state, node, a, b, -1)
    if _chosen(state, delta, temperature):
        state.cost[0] += delta
        state.load[here] -= weight
        state.load[to] += weight
        _shift(state, node, here, to)


@kernel(inline=True)
def _shift(state: _State, node: int, here: int, to: int) -> None:
    """Carry a node from part to part, each part between giving one end and taking the other."""
    hole = state.position[node]
    step = 1 if to > here else -1
    part = here
    while part != to:
        last = state.begin[part + 1] - 1 if step > 0 else state.begin[part]
        moved = state.member[last]
        state.member[hole] = moved
        state.position[moved] = hole
        hole = last
        if step > 0:
            state.begin[part + 1] -= 1
        else:
            state.begin[part] += 1
        part += step
    state.member[hole] = node
    state.position[node] = hole
    state.part[node] = to


@kernel(inline=True)
def _try_swap(given: _Given, state: _State, node: int, to: int, temperature: float) -> None:
    """Swap a node with one of a part, if accepted."""
    here = state.part[node]
    begin = state.begin[to]
    near = state.member[begin + _draw(state) % (state.begin[to + 1] - begin)]
    a, b = state.device[here], state.device[to]
    if not (_may(given, node, b) and _may(given, near, a)):
        return
    more = given.weight[near] - given.weight[node]
    delta = _gain(given, state, here, more) + _gain(given, state, to, -more)
    if delta >= 30 * temperature + given.heat[1]:
        return
    delta += _pull(given, state, node, a, b, near) + _pull(given, state, near, b, a, node)
    delta += _between(given, node, near, a, b)
    if _chosen(state, delta, temperature):
        state.cost[0] += delta
        state.load[here] += more
        state.load[to] -= more
        one, other = state.position[node], state.position[near]
        state.member[one], state.member[other] = near, node
        state.position[near], state.position[node] = one, other
        state.part[node], state.part[near] = to, here


@kernel(inline=True)
def _labels(given: _Given, state: _State, part: int, other: int) -> float:
    """Return the change of cost when two parts exchange devices."""
    devices = given.sizes[1]
    a, b = state.device[part], state.device[other]
    delta = 0.0
    for p, old, new in ((part, a, b), (other, b, a)):
        over, after = state.load[p] - given.share[old], state.load[p] - given.share[new]
        delta += given.factor[new] * after * after - given.factor[old] * over * over
        for row in range(state.begin[p], state.begin[p + 1]):
            node = state.member[row]
            if len(given.field) > 0:
                delta += given.field[node * devices + new] - given.field[node * devices + old]
            for edge in range(given.ptr[node], given.ptr[node + 1]):
                q = state.part[given.other[edge]]
                # Edges between the two parts are met from both sides: count those going out.
                if q in (part, other):
                    if q != p:
                        turned = given.matrix[new * devices + old]
                        delta += given.out[edge] * (turned - given.matrix[old * devices + new])
                    continue
                g = state.device[q]
                delta += given.out[edge] * (
                    given.matrix[new * devices + g] - given.matrix[old * devices + g]
                )
                delta += given.back[edge] * (
                    given.matrix[g * devices + new] - given.matrix[g * devices + old]
                )
    return delta


@kernel(inline=True)
def _fits(given: _Given, state: _State, part: int, device: int) -> bool:
    """Return whether all of a part may be on a device, and are enough for it."""
    if state.begin[part + 1] - state.begin[part] < given.least[device]:
        return False
    if len(given.allowed) > 0:
        for row in range(state.begin[part], state.begin[part + 1]):
            if not _may(given, state.member[row], device):
                return False
    return True


@kernel(inline=True)
def _try_labels(given: _Given, state: _State, part: int, other: int, temperature: float) -> None:
    """Exchange the devices of two parts, if accepted."""
    a, b = state.device[part], state.device[other]
    if not (_fits(given, state, part, b) and _fits(given, state, other, a)):
        return
    delta = _labels(given, state, part, other)
    if _chosen(state, delta, temperature):
        state.cost[0] += delta
        state.device[part], state.device[other] = b, a
        state.held[b], state.held[a] = part, other


@kernel(inline=True)
def _walk(given: _Given, state: _State) -> None:
    """Try as many steps as asked at one temperature."""
    nodes = given.sizes[0]
    parts = given.sizes[1]
    temperature = given.heat[0]
    for _ in range(given.sizes[3]):
        node = _draw(state) % nodes
        to = _target(given, state, node)
        if to == state.part[node]:
            continue
        sort = _draw(state) % 1000
        if sort < 3 and parts > 1:
            _try_labels(given, state, state.part[node], to, temperature)
        elif sort < 350:
            _try_move(given, state, node, to, temperature)
        else:
            _try_swap(given, state, node, to, temperature)
