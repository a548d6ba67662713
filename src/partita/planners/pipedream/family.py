"""Ideals with what the search asks of them: sums below each, and the bytes of the cut after each.

A stage is a pair of ideals, one inside the other; its costs are differences of sums. All pairs are
listed once, so that each step of a search is one pass over columns. A family is a lattice of
ideals, or the prefixes of one linear order; a long order is thinned to the prefixes with small
cuts.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from partita.core.columns import Array, Longs
from partita.kernels import run
from partita.planners.lattice.ideals import Ideals
from partita.planners.pipedream.kernels import list_pairs, live_cuts
from partita.planners.pipedream.model import Model


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Family:
    """Some ideals of a model by ascending size; row 0 is the empty set, the last row all nodes.

    Attributes:
        pair_ptr: Ideal i lies inside ``pair_to[pair_ptr[i]:pair_ptr[i + 1]]``, ascending.
        pair_to: See ``pair_ptr``.
        seconds: Work below each ideal, by class of devices.
        trained: Trained bytes below.
        fixed: Bytes below that do not grow with the minibatches in flight.
        version: Bytes below that each minibatch in flight keeps.
        cut: Bytes charged for the cut after each ideal; 0 at both ends.
        entering: Bytes that cross it, whatever is charged.
        members: The ideals, where they are a lattice.
        place: Place of each node in the order, and the number of nodes in each ideal, where they
            are prefixes.
    """

    pair_ptr: Longs
    pair_to: Longs
    seconds: Array
    trained: Array
    fixed: Array
    version: Array
    cut: Array
    entering: Array
    members: Ideals | None = None
    place: tuple[Longs, Longs] | None = None

    def __len__(self) -> int:
        return len(self.cut)

    @property
    def num_pairs(self) -> int:
        """Number of pairs of ideals."""
        return len(self.pair_to)

    def below(self, weight: Array) -> Array:
        """Return the sum of a column of the nodes below each ideal."""
        if self.place is not None:
            place, size = self.place
            return np.concatenate([[0.0], np.cumsum(weight[np.argsort(place)])])[size]
        assert self.members is not None
        return self.members.sums(weight)

    def stage_of(self, tops: Sequence[int], num_nodes: int) -> Longs:
        """Return the stage of each node, given the ideal that each stage completes."""
        if self.place is not None:
            place, size = self.place
            return np.searchsorted(size[list(tops)], place, side="right")
        assert self.members is not None
        stage = np.full(num_nodes, -1, dtype=np.int64)
        for number, top in reversed(list(enumerate(tops))):
            stage[self.members.holds(top, num_nodes)] = number
        return stage


def lattice_family(model: Model, ideals: Ideals, *, charge: float = 1.0) -> Family:
    """Return the columns of ideals; ``charge`` is what a byte of a cut counts."""
    count, words = ideals.sets.shape
    size = count * (count - 1) // 2
    ptr, to = np.zeros(count + 1, dtype=np.int64), np.zeros(size, dtype=np.int64)
    sets = ideals.sets.ravel()
    run(list_pairs, size, (sets, np.array([words])), (ptr, to))
    nets = model.q.nets
    cut = np.zeros(count)
    bit = np.left_shift(np.uint64(1), np.arange(64, dtype=np.uint64))
    inputs = (sets, np.array([words]), bit, nets.source, nets.ptr, nets.pins, model.net_bytes)
    run(live_cuts, count * len(nets.pins), inputs, (cut,))
    return Family(
        pair_ptr=ptr,
        pair_to=to[: ptr[-1]],
        seconds=np.stack([ideals.sums(row) for row in model.seconds]),
        trained=ideals.sums(model.trained_bytes),
        fixed=ideals.sums(model.fixed_bytes),
        version=ideals.sums(model.version_bytes),
        cut=cut * charge,
        entering=cut,
        members=ideals,
    )


def order_family(model: Model, order: Longs, *, charge: float = 1.0, limit: int = 1500) -> Family:
    """Return the columns of at most ``limit`` prefixes of an order; ``charge`` as above."""
    count = len(order)
    place = np.empty(count, dtype=np.int64)
    place[order] = np.arange(count)
    cut = _prefix_cuts(model, place)

    def below(weight: Array) -> Array:
        return np.concatenate([[0.0], np.cumsum(weight[order])])

    work = below(model.seconds.max(axis=0))
    kept = _thinned(work, cut, limit) if count > limit else np.arange(count + 1)
    low, high = np.triu_indices(len(kept), 1)
    return Family(
        pair_ptr=np.searchsorted(low, np.arange(len(kept) + 1)),
        pair_to=high,
        seconds=np.stack([below(row)[kept] for row in model.seconds]),
        trained=below(model.trained_bytes)[kept],
        fixed=below(model.fixed_bytes)[kept],
        version=below(model.version_bytes)[kept],
        cut=cut[kept] * charge,
        entering=cut[kept],
        place=(place, kept),
    )


def _prefix_cuts(model: Model, place: Longs) -> Array:
    """Return the bytes that cross the cut after each prefix."""
    nets = model.q.nets
    change = np.zeros(len(place) + 1)
    if len(nets):
        last = np.maximum.reduceat(place[nets.pins], nets.ptr[:-1])
        np.add.at(change, place[nets.source] + 1, model.net_bytes)
        np.add.at(change, last + 1, -model.net_bytes)
    cut = np.maximum(np.cumsum(change), 0.0)
    cut[-1] = 0.0
    return cut


def _thinned(work: Array, cut: Array, limit: int) -> Longs:
    """Return the prefixes to keep: the smallest cut of each slice of equal work, and the ends."""
    share = work / max(float(work[-1]), 1e-300) + np.arange(len(work)) / len(work)
    part = np.minimum((share * (limit / 2)).astype(np.int64), limit)
    order = np.lexsort((cut, part))
    first = np.unique(part[order], return_index=True)[1]
    return np.unique(np.concatenate([[0], order[first], [len(work) - 1]]))
