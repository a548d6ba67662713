"""Ideals: sets of nodes that hold all predecessors of their members; what a pipeline may cut off.

Ideals are held as rows of bits, by ascending size, with the steps that add one node. There are at
most 2^width times nodes of them, often far fewer, sometimes far more than can be held: counting
stops at a limit, and ``window`` gives a sub-lattice that fits.
"""

from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from partita.core.columns import Array, Longs, frozen_array, group_rows
from partita.kernels import ROWS, Threshold, run
from partita.planners.lattice.kernels import COUNT, OVER, STEPS, count_sets, fill_sets
from partita.planners.lattice.quotient import Quotient

INTERPRETED = 3_000
"""Ideals up to which counting and filling is left to the interpreter."""
WORD = 64


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Ideals:
    """Some ideals of a quotient, closed under the steps listed.

    Attributes:
        sets: A row of 64-bit words each, node v in bit v % 64 of word v // 64. Rows ascend by size;
            row 0 is the empty set, the last row all nodes.
        size: Nodes of each.
        parent: An ideal that lacks one node, ``last``; itself for row 0.
        last: The node that the parent lacks; -1 for row 0.
        step_ptr: From ideal i the steps ``step_ptr[i]`` to ``step_ptr[i + 1]`` lead upwards.
        step_target: The ideal with one node more.
        step_node: The node that it has more.
    """

    sets: NDArray[np.uint64]
    size: Longs
    parent: Longs
    last: Longs
    step_ptr: Longs
    step_target: Longs
    step_node: Longs

    def __len__(self) -> int:
        return len(self.size)

    def sums(self, weight: Array) -> Array:
        """Return the sum of a column of the nodes over each ideal."""
        total = np.zeros(len(self))
        added = np.asarray(weight)[self.last]
        for begin, end in _levels(self.size):
            rows = slice(begin, end)
            total[rows] = total[self.parent[rows]] + added[rows]
        return total

    def holds(self, ideal: int, num_nodes: int) -> NDArray[np.bool_]:
        """Return whether each node is in an ideal."""
        return _unpacked(self.sets[ideal], num_nodes)

    def between(self, lower: int, upper: int, num_nodes: int) -> Longs:
        """Return the nodes that one ideal has more than another, ascending."""
        return np.flatnonzero(_unpacked(self.sets[upper] & ~self.sets[lower], num_nodes))


def _unpacked(words: NDArray[np.uint64], num_nodes: int) -> NDArray[np.bool_]:
    little = words.astype("<u8").view(np.uint8)
    return np.unpackbits(little, count=num_nodes, bitorder="little").astype(bool)


def _levels(size: Longs) -> list[tuple[int, int]]:
    """Return the rows of each size from 1 on."""
    begin = np.searchsorted(size, np.arange(1, int(size[-1]) + 2)).tolist()
    return list(pairwise(begin))


class _Precedence(NamedTuple):
    """What comes before what, and a rank of the nodes along which all of it leads upwards."""

    pred_ptr: Longs
    pred: Longs
    succ_ptr: Longs
    succ: Longs
    rank: Longs


def count_ideals(q: Quotient, limit: int) -> int:
    """Return the number of ideals, or ``limit`` + 1 where there are more than ``limit``."""
    count, _ = _count(_own(q), limit)
    return count


def enumerate_ideals(q: Quotient, limit: int) -> Ideals | None:
    """Return all ideals; ``None`` where there are more than ``limit``."""
    return _enumerate(_own(q), limit)


def prefixes(q: Quotient, order: Array) -> Ideals:
    """Return the chain of ideals of a linear order: its prefixes, by steps of one node."""
    count = q.num_nodes
    rows = np.arange(count + 1, dtype=np.int64)
    word_of, bit_of, words = _bits(count)
    sets = np.zeros((count + 1, words), dtype=np.uint64)
    sets[rows[1:], word_of[order]] = bit_of[order]
    np.bitwise_or.accumulate(sets, axis=0, out=sets)
    return Ideals(
        sets=sets,
        size=rows,
        parent=np.maximum(rows - 1, 0),
        last=np.concatenate([[-1], order]).astype(np.int64),
        step_ptr=np.minimum(np.arange(count + 2), count),
        step_target=rows[1:],
        step_node=np.asarray(order, dtype=np.int64),
    )


def window(q: Quotient, order: Array, limit: int) -> Ideals:
    """Return all ideals where ``limit`` allows, else those in the widest window that it allows.

    In a window of width w a node may be taken before another of lower place in the order only where
    the places differ by less than w.
    """
    whole = enumerate_ideals(q, limit)
    if whole is not None:
        return whole
    held, width = prefixes(q, order), 2
    while width < q.num_nodes:
        found = _enumerate(_windowed(q, order, width), limit)
        if found is None:
            return held
        held = found
        width += max(1, width // 2)
    return held


def _own(q: Quotient) -> _Precedence:
    rank = np.arange(q.num_nodes, dtype=np.int64)
    return _Precedence(q.pred_ptr, q.pred, q.succ_ptr, q.succ, rank)


def _windowed(q: Quotient, order: Array, width: int) -> _Precedence:
    """Return the precedence of a quotient with that of an order between distant places added."""
    count = q.num_nodes
    own_source, own_target = q.edges
    # A distance of twice the width or more follows from two shorter ones.
    place = np.repeat(np.arange(count), width)
    after = place + width + np.tile(np.arange(width), count)
    inside = after < count
    source = np.concatenate([own_source, np.asarray(order)[place[inside]]])
    target = np.concatenate([own_target, np.asarray(order)[after[inside]]])
    pairs = np.unique(source * count + target)
    return _joined(count, pairs // count, pairs % count, _places(order))


def _places(order: Array) -> Longs:
    place = np.empty(len(order), dtype=np.int64)
    place[order] = np.arange(len(order))
    return place


def _joined(count: int, source: Array, target: Array, rank: Longs) -> _Precedence:
    succ_ptr, by_source = group_rows(source, count)
    pred_ptr, by_target = group_rows(target, count)
    return _Precedence(pred_ptr, source[by_target], succ_ptr, target[by_source], rank)


def _bits(count: int) -> tuple[Longs, NDArray[np.uint64], int]:
    """Return word and bit of each node, and the words of a set."""
    node = np.arange(count, dtype=np.int64)
    bit = np.left_shift(np.uint64(1), (node % WORD).astype(np.uint64))
    return node // WORD, bit, -(-count // WORD)


def _count(order: _Precedence, limit: int) -> tuple[int, int]:
    """Return the number of ideals (at most ``limit`` + 1) and of their steps."""
    for bound in dict.fromkeys((min(limit, INTERPRETED), limit)):
        totals = _counted(order, bound)
        if not totals[OVER]:
            return int(totals[COUNT]), int(totals[STEPS])
    return limit + 1, 0


def _counted(order: _Precedence, limit: int) -> Longs:
    count = len(order.rank)
    antichain = max(limit, 1).bit_length()
    waiting = np.diff(order.pred_ptr)
    stack = np.zeros((count + 2) * (antichain + 1) + 2 * count, dtype=np.int64)
    begin, place = np.zeros((2, count + 3), dtype=np.int64)
    totals = np.zeros(3, dtype=np.int64)
    run(
        count_sets,
        limit,
        # Frozen, as those of a graph are: Numba would compile again for columns that are not.
        (
            *(frozen_array(x, np.int64) for x in (order.succ_ptr, order.succ, order.rank)),
            np.array([limit, antichain]),
        ),
        (waiting, stack, begin, place, totals),
        Threshold(INTERPRETED + 1, ROWS.total),
    )
    return totals


def _enumerate(order: _Precedence, limit: int) -> Ideals | None:
    count, steps = _count(order, limit)
    if count > limit:
        return None
    word_of, bit_of, words = _bits(len(order.rank))
    sets = np.zeros(count * words, dtype=np.uint64)
    parent, last = np.zeros((2, count), dtype=np.int64)
    last[0] = -1
    step_ptr = np.zeros(count + 1, dtype=np.int64)
    step_node, step_target = np.zeros((2, steps), dtype=np.int64)
    sources = np.flatnonzero(np.diff(order.pred_ptr) == 0)
    step_node[: len(sources)] = sources
    step_ptr[1] = len(sources)
    run(
        fill_sets,
        count,
        (*order, word_of, bit_of, np.array([words])),
        (sets, parent, last, step_ptr, step_node, step_target),
        Threshold(INTERPRETED + 1, ROWS.total),
    )
    return Ideals(
        sets=sets.reshape(count, words),
        size=_sizes(parent),
        parent=parent,
        last=last,
        step_ptr=step_ptr,
        step_target=step_target,
        step_node=step_node,
    )


def _sizes(parent: Longs) -> Longs:
    """Return the size of each ideal: rows are in levels, and parents of a level precede it."""
    size = np.zeros(len(parent), dtype=np.int64)
    end, level = 1, 0
    while end < len(parent):
        # The next level ends before the first row whose parent is not in this one.
        stop = int(np.searchsorted(parent, end, side="left"))
        level += 1
        size[end:stop] = level
        end = stop
    return size
