"""Searches over measured placements: by random moves, by cuts of groups, and of all of them."""

import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import combinations, product

import numpy as np

from partita.core.columns import Array
from partita.core.problem import Problem
from partita.planners.assignment.measured import MeasuredSearch, allowed_only, device_pace, runs

_MAX_TWINS = 64


def climb(search: MeasuredSearch, start: Array, rng: random.Random, iterations: int) -> None:
    """Take any random move that is no worse, for some plans measured.

    A move shifts a border between two runs along the data, moves a node, swaps two nodes, or
    exchanges two devices.
    """
    place, score = start, search.look(start)
    for _ in range(iterations):
        if search.done:
            return
        moved = _moved(search, place, rng)
        found = search.look(moved)
        if found <= score:
            place, score = moved, found


def _moved(search: MeasuredSearch, place: Array, rng: random.Random) -> Array:
    """Return a random neighbour of a placement; where rules forbid it, the placement itself."""
    moved = place.copy()
    devices = np.unique(place).tolist()
    sort = rng.random()
    if sort < 0.6 and len(devices) > 1:
        _shift_border(search, moved, rng)
    elif sort < 0.75 or len(devices) == 1:
        node = rng.randrange(len(moved))
        moved[node] = rng.randrange(len(search.problem.cluster))
    elif sort < 0.9:
        one, other = rng.choice(devices), rng.randrange(len(search.problem.cluster))
        moved[place == one], moved[place == other] = other, one
    else:
        one, other = rng.randrange(len(moved)), rng.randrange(len(moved))
        moved[one], moved[other] = place[other], place[one]
    allowed = search.allowed
    if allowed is not None and not allowed[np.arange(len(moved)), moved].all():
        return place
    return moved


def _shift_border(search: MeasuredSearch, place: Array, rng: random.Random) -> None:
    """Give some nodes at one side of a border along the data to the device of the other side."""
    line = place[search.order]
    borders = np.flatnonzero(line[1:] != line[:-1])
    at = int(borders[rng.randrange(len(borders))])
    length = 1 << rng.randrange(max(1, (len(line) // 4).bit_length()))
    if rng.random() < 0.5:
        rows = np.arange(max(0, at - length + 1), at + 1)
        rows, device = rows[line[rows] == line[at]], line[at + 1]
    else:
        rows = np.arange(at + 1, min(len(line), at + 1 + length))
        rows, device = rows[line[rows] == line[at + 1]], line[at]
    place[search.order[rows]] = device


def climb_by_cuts(
    search: MeasuredSearch, level: Array, start: Array, rng: random.Random, iterations: int
) -> Array:
    """Shift the cuts between the groups of a level, the devices of a group sharing evenly.

    Args:
        search: The search.
        level: Group of each device; devices of a group follow one another.
        start: A placement, which gives the first cuts.
        rng: Random numbers.
        iterations: Plans to measure.

    Returns:
        The best placement of this kind, or the start.
    """
    pace = device_pace(search.problem)
    count = int(level.max()) + 1
    groups = [np.flatnonzero(level == group) for group in range(count)]
    sizes = np.bincount(level[start], minlength=count)
    cuts = [0, *np.cumsum(sizes).tolist()]
    best, score = start, search.look(start)
    for step in range(iterations):
        if search.done:
            break
        trial = cuts if step == 0 else _shifted(cuts, rng)
        place = allowed_only(search, runs(search, groups, trial, search.weight, pace))
        found = search.look(place)
        if found <= score:
            best, score, cuts = place, found, trial
    return best


def _shifted(cuts: Sequence[int], rng: random.Random) -> list[int]:
    """Return cuts of which one has moved, the others giving way."""
    moved = list(cuts)
    if len(moved) < 3:
        return moved
    at = rng.randrange(1, len(moved) - 1)
    length = 1 << rng.randrange(max(1, (moved[-1] // 4).bit_length()))
    moved[at] += length if rng.random() < 0.5 else -length
    moved[at] = min(max(moved[at], 0), moved[-1])
    low = [min(cut, moved[at]) for cut in moved[:at]]
    high = [max(cut, moved[at]) for cut in moved[at + 1 :]]
    return [*low, moved[at], *high]


def look_at_all(search: MeasuredSearch, start: Array) -> bool:
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
        if search.done:
            return False
        seen.add(key)
        search.look(place)
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
