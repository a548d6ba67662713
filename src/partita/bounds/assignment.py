"""Work that has to be done somewhere: fractional assignment of ops to devices, and its dual.

For weights w of the classes of devices, whatever runs where,

    T x (sum of the k largest device weights)  >=  sum over ops of min over classes w_c cost_co

if at most k devices are ever busy at once, because a busy device d brings w_d a second. Weights by
speed give work over speed; the best weights are a dual solution of the linear program

    min T    sum_c x_co = 1,   sum_o cost_co x_co <= n_c T,   sum_o bytes_o x_co <= n_c limit_c

whose last rows are memory. Every weight gives a bound, so an approximate dual is a proof too.
Replicas with shares are fractions; an op that stands on a class takes at least its share of bytes.
"""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from partita.bounds.figures import Effort
from partita.core.columns import Array

SAMPLED_UNITS: Mapping[Effort, int] = {Effort.QUICK: 2_000, Effort.FULL: 1_000_000}
ASCENT_STEPS: Mapping[Effort, int] = {Effort.QUICK: 50, Effort.FULL: 600}


class Need(NamedTuple):
    """Work that has to be done.

    Attributes:
        cost: ``[classes, units]``: device-seconds of each unit on a class; inf = barred.
        held_bytes: Memory that a unit takes where it runs; empty = not limited.
    """

    cost: Array
    held_bytes: Array


class Room(NamedTuple):
    """Devices that can do it.

    Attributes:
        devices: Devices of each class.
        limit_bytes: Memory of all devices of a class together.
    """

    devices: Array
    limit_bytes: Array


def speed_weights(cost: Array) -> Array:
    """Return weights of the classes by their speed on everything that they may run."""
    finite = np.isfinite(cost)
    known = finite.all(axis=0)
    # Compared on the same units; where no unit runs on all classes, on what each may run.
    both = cost[:, known] if known.any() else np.where(finite, cost, 0.0)
    total = both.sum(axis=1)
    weights = 1.0 / np.maximum(total, 1e-300)
    result: Array = weights / weights.max()
    # A weight of zero would leave a class free of charge, and the bound with nothing.
    return np.maximum(result, 1e-9)


def least_cost(cost: Array, weights: Array) -> Array:
    """Return the least weighted cost of each unit."""
    result: Array = (cost * weights[:, None]).min(axis=0)
    return result


def heaviest(weights: Array, count: Array, busy: float) -> float:
    """Return the sum of the largest weights of ``busy`` devices."""
    order = np.argsort(-weights)
    before = np.cumsum(count[order]) - count[order]
    # Devices of each class among the ``busy`` of most weight.
    taken = np.clip(busy - before, 0, count[order])
    return float((taken * weights[order]).sum())


def work_over_speed(cost: Array, count: Array) -> float:
    """Return total work over the speed of all devices."""
    weights = speed_weights(cost)
    return float(least_cost(cost, weights).sum() / heaviest(weights, count, np.inf))


def largest_units(cost: Array, count: Array, weights: Array) -> float:
    """Return what the largest units need where each unit runs on one device.

    The k largest stand on at most k devices; of k n + 1 units on n equal devices, k + 1 share one.
    """
    cost_of = np.sort(least_cost(cost, weights))[::-1]
    devices = int(count.sum())
    # For each k: the k largest units, over the weight of the k heaviest devices.
    several = np.cumsum(cost_of[:devices])
    room = np.cumsum(np.sort(np.repeat(weights, count.astype(np.int64)))[::-1])
    best = float((several / room[: len(several)]).max())
    alone = float(cost.min(axis=0).max())
    together = 0.0
    if len(count) == 1:
        # Unit k n in this order is the least of k n + 1: the device that has k + 1 of them has at
        # least k + 1 times its cost.
        shared = cost_of[::devices]
        together = float((shared * np.arange(1, len(shared) + 1)).max() / weights[0])
    return max(best, alone, together)


class Dual(NamedTuple):
    """A dual solution.

    Attributes:
        value: The bound that it proves.
        weights: Weight of each class of devices.
    """

    value: float
    weights: Array


def assignment_dual(need: Need, room: Room, effort: Effort = Effort.QUICK) -> Dual:
    """Return a good dual solution.

    On drawn problems the bound is within 2 % of the program's value where memory binds hard, and
    within 1e-3 elsewhere; a tenth of that with full effort. Many units are represented by some of
    them while weights are looked for, and all count in the end.
    """
    weights, prices = speed_weights(need.cost), np.zeros(len(room.devices))
    found = Dual(_dual_value(need, room, weights, prices)[0], weights)
    if len(room.devices) == 1:
        return found
    # Every so many-th unit, with as much less memory: the weights that are best for the sample are
    # good for all, and any weights prove a bound.
    every = need.cost.shape[1] // SAMPLED_UNITS[effort] + 1
    sample = Need(need.cost[:, ::every], need.held_bytes[::every])
    weights, prices = _ascended(sample, Room(room.devices, room.limit_bytes / every), effort)
    value = _dual_value(need, room, weights, prices)[0]
    return Dual(value, weights) if value > found.value else found


def _ascended(need: Need, room: Room, effort: Effort) -> tuple[Array, Array]:
    """Return the best weights and prices on the way of a multiplicative ascent.

    Devices that are loaded more than the bound says gain weight; memory that overflows, a price.
    """
    classes, units = len(room.devices), np.arange(need.cost.shape[1])
    weights, prices = speed_weights(need.cost), np.zeros(classes)
    limited = len(need.held_bytes) > 0 and bool(np.isfinite(room.limit_bytes).any())
    best, chosen = -np.inf, (weights, prices)
    for step in range(ASCENT_STEPS[effort]):
        value, taker = _dual_value(need, room, weights, prices)
        if value > best:
            best, chosen = value, (weights, prices)
        # A subgradient: the load of each class if every unit goes where it is cheapest.
        load = np.bincount(taker, weights=need.cost[taker, units], minlength=classes)
        # A subgradient ascent asks for steps that tend to zero while their sum has no limit.
        pace = 2.0 / (4.0 + step) ** 0.8
        if limited:
            held = np.bincount(taker, weights=need.held_bytes, minlength=classes)
            over = np.where(np.isfinite(room.limit_bytes), held / room.limit_bytes - 1, -1.0)
            # From a share of memory to the unit of prices, weighted seconds a byte.
            scale = best * float((room.devices * weights).sum()) / room.limit_bytes
            prices = np.maximum(prices + pace * scale * over, 0.0)
        # Multiplied, so that weights stay positive; only their ratios matter, and the largest is 1.
        excess = load / room.devices / max(value, 1e-300) - 1
        weights = weights * np.exp(pace * np.clip(excess, -1.0, 1.0))
        weights = np.maximum(weights / weights.max(), 1e-9)
    return chosen


def _dual_value(need: Need, room: Room, weights: Array, prices: Array) -> tuple[float, Array]:
    """Return the bound of weights of time and prices of memory, and who takes each unit."""
    cost = need.cost * weights[:, None]
    # Units pay for the bytes they hold; what all memory is worth at these prices comes off.
    paid = 0.0
    if prices.any():
        cost = cost + prices[:, None] * need.held_bytes
        priced = prices > 0
        paid = float((prices[priced] * room.limit_bytes[priced]).sum())
    taker = cost.argmin(axis=0)
    least = float(np.take_along_axis(cost, taker[None], axis=0).sum())
    return (least - paid) / float((room.devices * weights).sum()), taker
