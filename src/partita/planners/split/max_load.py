r"""The contiguous split of least max-load: DP over chains of ideals.

Devices take consecutive pieces of the lattice, so an ideal I and the devices used so far are a
state, and

    value[J, devices + d] = min over I of max(value[I, devices], load of J \ I on d).

Devices that no plan can tell apart are counted instead of told apart; where there are too many
kinds for that, the devices get a fixed order in which they may be used or skipped, and several
orders are tried. With S states the DP takes O(pairs of ideals x S) in the worst case. What is
pruned, without loss: pieces above the best value known (first from single linear orders, which are
solved for a value that grows until one fits), states whose devices could not take the work that is
left even if it were a liquid, and ideals that no piece reaches.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from partita.core.columns import Array, Floats, Longs
from partita.kernels import ROWS, Threshold, run
from partita.planners.effort import Effort
from partita.planners.lattice.ideals import Ideals, prefixes
from partita.planners.split.loads_kernel import (
    MOST_PAIRS,
    PAIRS,
    Devices,
    cut_ideals,
    push_loads,
)
from partita.planners.split.model import SplitModel
from partita.planners.split.walk_kernel import Costs, costs_of, new_path, new_table, steps_of

MAX_CELLS = 20_000_000
"""Pairs of an ideal and a state that a table may have."""
MAX_PAIRS = 2e8
"""Pairs of ideals after which a search gives up, some ten seconds."""
PAIRS_PER_S = 5e6
"""Pairs that a second is about enough for, with many states of devices."""
INTERPRETED_IDEALS = 120
"""Ideals up to which the interpreter is quick enough."""
SLACK = 1e-9
"""Relative room above a bound for sums that are added up in another order."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class States:
    """Which devices of a chain are used up.

    Attributes:
        next_state: ``[state, class]``: the state after one more device of a class; -1 = none left.
        skip_state: The state after a device is left out; -1 = none (devices are counted).
        used: ``[state, class]``: devices of each class used or passed over.
        device: ``[state, class]``: the device of the cluster that leads to the next state.
    """

    next_state: Longs
    skip_state: Longs
    used: Longs
    device: Longs


class Chain(NamedTuple):
    """Pieces of a chain, first to last: the nodes of each and the device that runs them."""

    value: float
    pieces: tuple[tuple[Longs, int], ...]


def counted_states(model: SplitModel, num_ideals: int) -> States | None:
    """Return the states that count the devices used of each class; ``None`` if they are too many.

    Args:
        model: The model.
        num_ideals: Ideals that a table is to have rows for.
    """
    sizes = np.array([len(members) for members in model.devices])
    if float(np.prod(sizes + 1.0)) * num_ideals > MAX_CELLS:
        return None
    used = np.indices(tuple((sizes + 1).tolist())).reshape(len(sizes), -1).T
    stride = np.append(np.cumprod((sizes + 1)[::-1])[::-1][1:], 1)
    left = used < sizes
    state = np.arange(len(used))[:, None]
    device = np.full(used.shape, -1)
    for kind, members in enumerate(model.devices):
        rows = np.flatnonzero(left[:, kind])
        device[rows, kind] = np.array(members, dtype=np.int64)[used[rows, kind]]
    return States(
        next_state=np.where(left, state + stride, -1),
        skip_state=np.full(len(used), -1),
        used=used,
        device=device,
    )


def ordered_states(model: SplitModel, order: Sequence[int]) -> States:
    """Return the states of devices in a fixed order, in which each may be used or passed over."""
    size, kinds = len(order), model.num_classes
    class_of = model.class_of
    used = np.zeros((size + 1, kinds), dtype=np.int64)
    next_state = np.full((size + 1, kinds), -1)
    device = np.full((size + 1, kinds), -1)
    for place, member in enumerate(order):
        kind = class_of[member]
        used[place + 1] = used[place]
        used[place + 1, kind] += 1
        next_state[place, kind] = place + 1
        device[place, kind] = member
    skip = np.append(np.arange(1, size + 1), -1)
    return States(next_state=next_state, skip_state=skip, used=used, device=device)


def best_chain(
    model: SplitModel,
    ideals: Ideals,
    states: States,
    upper: float = math.inf,
    *,
    left_s: float = math.inf,
) -> tuple[Chain | None, bool]:
    """Return the best chain of pieces between ideals, if any, and whether all were looked at.

    Args:
        model: The costs.
        ideals: Where the chain may be cut.
        states: The devices.
        upper: Value that the chain must not exceed.
        left_s: About how many seconds it may take.
    """
    num_ideals, num_states = len(ideals), len(states.next_state)
    table = new_table(num_ideals, num_states)
    bound = np.array([upper * (1 + SLACK), 0.0, min(MAX_PAIRS, PAIRS_PER_S * left_s)])
    costs = costs_of(model, model)
    rest, capacity = _liquid(model, ideals, states)
    devices = Devices(
        next_state=states.next_state.ravel(),
        skip_state=states.skip_state,
        capacity=capacity,
        left=sum(map(len, model.devices)) - states.used.sum(axis=1),
        rest=rest,
        closing=_closing(model, ideals, costs).ravel(),
    )
    run(
        push_loads,
        num_ideals,
        (steps_of(ideals), costs, devices),
        (bound, table, new_path(costs, num_ideals), np.zeros(num_states + 1, dtype=np.int64)),
        Threshold(INTERPRETED_IDEALS + 1, ROWS.total),
    )
    found = table.value.reshape(num_ideals, num_states)[-1]
    complete = bool(bound[PAIRS] <= bound[MOST_PAIRS])
    if not np.isfinite(found).any():
        return None, complete
    pieces = _traced(model, ideals, states, (table.origin, table.came_by, int(np.argmin(found))))
    return Chain(float(found.min()), pieces), complete


def _closing(model: SplitModel, ideals: Ideals, costs: Costs) -> Floats:
    """Return ``[class, ideal]``: the load of a device with all that an ideal lacks; inf = no room.

    The nets that the rest cuts are those that the ideal cuts.
    """
    count = len(ideals)
    cut_s, gone_bytes = np.zeros((2, count))
    run(
        cut_ideals,
        count,
        (steps_of(ideals), costs),
        (cut_s, gone_bytes, new_path(costs, count)),
        Threshold(INTERPRETED_IDEALS + 1, ROWS.total),
    )
    held = model.node_bytes.sum() - ideals.sums(model.node_bytes)
    held += model.shared_bytes.sum() - gone_bytes
    closing = np.empty((model.num_classes, count))
    for kind, seconds in enumerate(model.seconds):
        barred = np.isinf(seconds)
        finite = np.where(barred, 0.0, seconds)
        load = finite.sum() - ideals.sums(finite) + (cut_s if model.pays[kind] else 0.0)
        inside = barred.sum() - ideals.sums(barred) > 0
        closing[kind] = np.where(inside | (held > model.limit_bytes[kind]), np.inf, load)
    return closing


def _weights(model: SplitModel) -> Floats:
    """Return what a second on each class of devices is worth: by speed on the whole graph."""
    total = np.where(np.isfinite(model.seconds), model.seconds, 0.0).sum(axis=1)
    longest = float(total.max(initial=0.0))
    return np.asarray(np.divide(longest, total, out=np.ones(len(total)), where=total > 0))


def _liquid(model: SplitModel, ideals: Ideals, states: States) -> tuple[Floats, Floats]:
    """Return the weighted work beyond each ideal, and the weight of the devices left by state."""
    weight = _weights(model)
    least = np.min(weight[:, None] * model.seconds, axis=0)
    total = float(least.sum())
    sizes = np.array([len(members) for members in model.devices])
    rest = total * (1 - SLACK) - ideals.sums(least)
    return rest, np.asarray((sizes - states.used) @ weight)


def liquid_bound(model: SplitModel) -> float:
    """Return a max-load that no split is below: of the longest node, and of work made liquid."""
    weight = _weights(model)
    least = np.min(weight[:, None] * model.seconds, axis=0)
    sizes = np.array([len(members) for members in model.devices])
    longest = float(model.seconds.min(axis=0).max())
    return max(longest, float(least.sum() / (sizes @ weight)))


def _traced(
    model: SplitModel, ideals: Ideals, states: States, found: tuple[Array, Array, int]
) -> tuple[tuple[Longs, int], ...]:
    """Return the pieces of the chain that ends with all nodes in a state."""
    origin, came_by, state = found
    num_states, kinds = states.next_state.shape
    ideal, pieces = len(ideals) - 1, []
    while ideal > 0:
        cell = ideal * num_states + state
        before, by = int(origin[cell]), int(came_by[cell])
        if by < 0:
            state = -1 - by
            continue
        state, kind = divmod(by, kinds)
        nodes = ideals.between(before, ideal, model.q.num_nodes)
        pieces.append((nodes, int(states.device[state, kind])))
        ideal = before
    return tuple(reversed(pieces))


def best_of_orders(
    model: SplitModel, orders: Sequence[Array], states: States, effort: Effort, upper: float
) -> Chain | None:
    """Return the best chain along any of some linear orders; ``None`` if none is below ``upper``.

    While nothing is known, a value from the liquid bound on is tried that grows by half. When the
    time is up, the orders after the first are left out.
    """
    best: Chain | None = None
    for number, order in enumerate(orders):
        if number and effort.is_over():
            break
        ideals = prefixes(model.q, order)
        if math.isfinite(upper):
            known = upper * (1 - 2 * SLACK)
            found, _ = best_chain(model, ideals, states, known, left_s=effort.left_s)
        else:
            found = _growing(model, ideals, states)
        if found is not None:
            best, upper = found, found.value
    return best


def _growing(model: SplitModel, ideals: Ideals, states: States) -> Chain | None:
    most = float(np.where(np.isfinite(model.seconds), model.seconds, 0.0).sum(axis=1).max())
    most += float(model.net_s.sum())
    guess = liquid_bound(model) * 1.02
    while 0 < guess < most:
        found, _ = best_chain(model, ideals, states, guess)
        if found is not None:
            return found
        guess *= 1.5
    return best_chain(model, ideals, states)[0]
