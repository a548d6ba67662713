"""The search for a contiguous split: exact where the ideals can be held, near a good order else."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from partita.core.columns import Array, Longs
from partita.planners.effort import Effort
from partita.planners.lattice.ideals import Ideals, enumerate_ideals, window
from partita.planners.lattice.orders import linear_orders
from partita.planners.split.max_load import (
    SLACK,
    Chain,
    States,
    best_chain,
    best_of_orders,
    counted_states,
    ordered_states,
)
from partita.planners.split.model import SplitModel
from partita.planners.split.refine import anneal, devices_in_order, ordered_flow

ORDERS = 12
FIRST_IDEALS = 4_000
"""Ideals of the window that is looked at before all of them."""
WINDOWS = 3
"""Windows around the best order, each around the result of the one before."""
WINDOW_PAIRS = 3e7
"""Pairs of ideals that a window should about have, some seconds."""


class Contiguous(NamedTuple):
    """A contiguous split, and whether none is better."""

    chain: Chain | None
    is_best: bool
    num_ideals: int


def contiguous_split(model: SplitModel, limit: int, effort: Effort) -> Contiguous:
    """Return the best contiguous split that is found.

    Args:
        model: The costs.
        limit: Ideals that may be held.
        effort: How long to look where there are more of them.
    """
    weight = model.seconds.min(axis=0)
    orders = linear_orders(model.q, weight=weight, count=ORDERS, seed=effort.seed)
    best = _along_orders(model, orders, effort)
    ideals = enumerate_ideals(model.q, limit)
    if ideals is not None:
        if best is not None and len(ideals) > FIRST_IDEALS:
            # A better value to prune with, from the ideals near the best order.
            near = _window(model, best, FIRST_IDEALS)
            best = _between(model, near, best, effort)[0] or best
        better, complete = _between(model, ideals, best, effort)
        best = better or best
        if best is not None:
            effort.record(best.value)
        if complete or effort.is_over():
            is_best = complete and counted_states(model, len(ideals)) is not None
            return Contiguous(best, is_best, len(ideals))
    return _near_orders(model, best, orders[0], limit, effort)


def _along_orders(model: SplitModel, orders: Sequence[Array], effort: Effort) -> Chain | None:
    best: Chain | None = None
    for states in _state_sets(model, model.q.num_nodes + 1):
        if best is not None and effort.is_over():
            break
        upper = np.inf if best is None else best.value
        best = best_of_orders(model, orders, states, effort, upper) or best
        if best is not None:
            effort.record(best.value)
    return best


def _state_sets(model: SplitModel, num_ideals: int) -> list[States]:
    """Return the states that count devices, or those of some orders of the devices."""
    counted = counted_states(model, num_ideals)
    if counted is not None:
        return [counted]
    devices = devices_in_order(model).tolist()
    total = np.where(np.isfinite(model.seconds), model.seconds, 0.0).sum(axis=1)
    class_of = model.class_of
    fast_first = sorted(devices, key=lambda device: (total[class_of[device]], device))
    large_first = sorted(devices, key=lambda d: (-model.limit_bytes[class_of[d]], d))
    orders = (sorted(devices), fast_first, fast_first[::-1], large_first)
    distinct = dict.fromkeys(map(tuple, orders))
    return [ordered_states(model, order) for order in distinct]


def _between(
    model: SplitModel, ideals: Ideals, best: Chain | None, effort: Effort
) -> tuple[Chain | None, bool]:
    """Return a chain between ideals that beats the best one, if any, and whether all were tried."""
    better: Chain | None = None
    all_tried = True
    for states in _state_sets(model, len(ideals)):
        known = better or best
        upper = np.inf if known is None else known.value * (1 - 2 * SLACK)
        found, complete = best_chain(model, ideals, states, upper, left_s=effort.left_s)
        all_tried = all_tried and complete
        better = found or better
    return better, all_tried


def _near_orders(
    model: SplitModel, best: Chain | None, order: Array, limit: int, effort: Effort
) -> Contiguous:
    """Return the best chain in windows around the best one, after annealing it."""
    count = 0
    # From an ideal about 1 / devices of the others is visited.
    limit = min(limit, int(np.sqrt(2 * WINDOW_PAIRS * model.num_devices)))
    for _ in range(WINDOWS):
        ideals = _window(model, best, limit) if best else window(model.q, order, limit)
        count = max(count, len(ideals))
        better, _ = _between(model, ideals, best, effort)
        if better is None:
            break
        best = better
        effort.record(best.value)
        if effort.is_over():
            break
    if best is not None and not effort.is_over():
        best = _annealed(model, best, effort)
    return Contiguous(best, False, count)


def _window(model: SplitModel, chain: Chain, limit: int) -> Ideals:
    """Return the ideals near the order of the pieces; within a piece, that of the numbers."""
    return window(model.q, np.concatenate([np.sort(nodes) for nodes, _ in chain.pieces]), limit)


def _annealed(model: SplitModel, chain: Chain, effort: Effort) -> Chain:
    """Return a chain that annealing finds from another one, if it is better."""
    flow = ordered_flow(model)
    found = anneal(
        model,
        flow,
        assignment_of(model, chain),
        effort,
    )
    if found.value >= chain.value:
        return chain
    return chain_of(model, found.device_of, found.value)


def assignment_of(model: SplitModel, chain: Chain) -> Longs:
    """Return the place of each node's device among ``devices_in_order``."""
    place = {device: index for index, device in enumerate(devices_in_order(model).tolist())}
    device_of = np.zeros(model.q.num_nodes, dtype=np.int64)
    for nodes, device in chain.pieces:
        device_of[nodes] = place[device]
    return device_of


def chain_of(model: SplitModel, device_of: Array, value: float) -> Chain:
    """Return an assignment without circles between devices as a chain."""
    devices = devices_in_order(model)
    source, target = model.q.edges
    before, after = device_of[source], device_of[target]
    waiting = {int(device): set[int]() for device in np.unique(device_of)}
    for first, second in zip(before.tolist(), after.tolist(), strict=True):
        if first != second:
            waiting[second].add(first)
    pieces = []
    while waiting:
        device = min(device for device, others in waiting.items() if not others & waiting.keys())
        del waiting[device]
        pieces.append((np.flatnonzero(device_of == device), int(devices[device])))
    return Chain(value, tuple(pieces))
