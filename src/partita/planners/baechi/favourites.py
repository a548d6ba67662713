"""Favourite children: which reader of an op should follow it on its device, by a linear program.

Hanen and Munier's relaxation for small communication times, as Baechi solves it. With x(i, j) = 0
where j is the favourite child of i, so that no transfer is paid between them, s(i) the start and
p(i) the seconds of op i, c(i, j) those of the transfer:

    minimise w     s(i) + p(i) + c(i, j) x(i, j) <= s(j)      for every edge
                   s(i) + p(i) <= w                           for every op
                   sum over j of x(i, j) >= readers(i) - 1    at most one favourite child
                   sum over i of x(i, j) >= inputs(j) - 1     favourite of at most one
                   0 <= x <= 1,  s >= 0

It has no devices and no memory, and its optimum is no bound: it forbids two readers next to the op
they read, which a device could run one after the other. Edges with x up to a threshold make
favourites.

The released code gives every bound as a row and solves all of it; its rounding lets a later edge
overwrite a favourite and leaves the other end in place. Here bounds are bounds, only ops without
readers are held against w (the others follow), sums that say nothing are left out, and favourites
are taken in the order of x, the longest transfer first, as a matching. The program is degenerate:
many optima, and which of them a solver returns depends on its version and on the order of the rows.
``overwriting_favourites`` has all of those rows, in the order that HiGHS's dual simplex was
recorded with, and that rounding: other favourites, which are sometimes better.
"""

from typing import Any, NamedTuple

import numpy as np

from partita.core.columns import Array
from partita.errors import InvalidInputError, UnsupportedError
from partita.planners.baechi.instance import Instance

MS_PER_S = 1000.0


class _Edges(NamedTuple):
    """Out-edges in the order of the ops they leave, with the seconds of ops and transfers in ms."""

    source: Array
    reader: Array
    transfer: Array
    duration: Array
    readers: Array
    inputs: Array


def check_threshold(threshold: float) -> None:
    """Raise ``InvalidInputError`` where the threshold of favourites is not in 0 to 1."""
    if not 0 <= threshold <= 1:
        raise InvalidInputError(f"option 'threshold' is {threshold}; expected 0 to 1")


def lp_favourites(g: Instance, threshold: float) -> Array:
    """Return the favourite child of each op, -1 = none.

    Args:
        g: The instance.
        threshold: Largest value of an edge's variable that makes a favourite.

    Raises:
        UnsupportedError: The solver fails.
    """
    if not len(g.succ):
        return np.full(g.num_ops, -1, dtype=np.int64)
    edges = _edges(g)
    values = _solve(*_program(g, edges))[: len(g.succ)]
    near = np.flatnonzero(values <= threshold)
    return _match(g, edges, near[np.lexsort((-edges.transfer[near], np.round(values[near], 9)))])


def overwriting_favourites(g: Instance, threshold: float) -> Array:
    """Return favourites by the program with every row, where a later edge overwrites an earlier.

    Args:
        g: The instance.
        threshold: Largest value of an edge's variable that makes a favourite.

    Raises:
        UnsupportedError: The solver fails.
    """
    if not len(g.succ):
        return np.full(g.num_ops, -1, dtype=np.int64)
    edges = _edges(g)
    values = _solve(*_program_of_rows(g, edges))[: len(g.succ)]
    return _overwritten(g, edges, values, threshold)


def greedy_favourites(g: Instance, rank: Array) -> Array:
    """Return favourites without a program: the edges with the longest way behind them first.

    Args:
        g: The instance.
        rank: Longest path from the start of each op.
    """
    edges = _edges(g)
    key = edges.transfer / MS_PER_S + rank[edges.reader]
    return _match(g, edges, np.argsort(-key, kind="stable"))


def _edges(g: Instance) -> _Edges:
    source = np.repeat(np.arange(g.num_ops), np.diff(g.succ_ptr))
    apart = ~np.eye(g.num_devices, dtype=bool).ravel()
    given, size = g.given[g.succ_row], g.size[g.succ_row]
    latency = float(g.latency[apart].mean()) if g.num_devices > 1 else 0.0
    slowness = float((1 / g.bandwidth[apart]).mean()) if g.num_devices > 1 else 0.0
    transfer = np.where(np.isnan(given), latency + size * slowness, given)
    duration = g.seconds.reshape(-1, g.num_ops)[g.class_of].mean(axis=0)
    return _Edges(
        source,
        g.succ,
        np.round(transfer * MS_PER_S, 12),
        np.round(duration * MS_PER_S, 12),
        np.diff(g.succ_ptr),
        np.diff(g.pred_ptr),
    )


def _solve(matrix: Any, most: Array, bounds: Array) -> Array:  # noqa: ANN401 (a sparse matrix)
    """Return the optimum that HiGHS's dual simplex finds; the last variable is minimised."""
    from scipy.optimize import linprog  # noqa: PLC0415 (loaded only where it pays)

    cost = np.zeros(matrix.shape[1])
    cost[-1] = 1.0
    found = linprog(cost, A_ub=matrix, b_ub=most, bounds=bounds, method="highs-ds")
    if found.x is None:
        raise UnsupportedError(f"the favourite-child program has no solution: {found.message}")
    values: Array = found.x
    return values


def _sparse(parts: list[tuple[Array, Array, Array | float]], shape: tuple[int, int]) -> Any:  # noqa: ANN401
    """Return a sparse matrix of rows, columns and values."""
    from scipy.sparse import csc_array  # noqa: PLC0415 (loaded only where it pays)

    rows, columns = (np.concatenate([part[i] for part in parts]) for i in range(2))
    values = np.concatenate([np.broadcast_to(part[2], len(part[0])) for part in parts])
    return csc_array((values, (rows, columns)), shape=shape)


def _program(g: Instance, edges: _Edges) -> tuple[Any, Array, Array]:
    """Return matrix, right-hand side and bounds, without what follows from the rest."""
    count, ops = len(g.succ), g.num_ops
    row = np.arange(count)
    sinks = np.flatnonzero(edges.readers == 0)
    last = np.arange(count, count + len(sinks))
    parts: list[tuple[Array, Array, Array | float]] = [
        (row, count + edges.source, 1.0),
        (row, count + edges.reader, -1.0),
        (row, row, edges.transfer),
        (last, count + sinks, 1.0),
        (last, np.full(len(sinks), count + ops), -1.0),
    ]
    most = [-edges.duration[edges.source], -edges.duration[sinks]]
    height = count + len(sinks)
    for ends, degree in ((edges.source, edges.readers), (edges.reader, edges.inputs)):
        several = np.flatnonzero(degree > 1)
        at = np.full(ops, -1)
        at[several] = height + np.arange(len(several))
        tied = np.flatnonzero(degree[ends] > 1)
        parts.append((at[ends[tied]], tied, -1.0))
        most.append(1.0 - degree[several])
        height += len(several)
    bounds = np.zeros((count + ops + 1, 2))
    bounds[:count, 1], bounds[count:, 1] = 1.0, np.inf
    return _sparse(parts, (height, count + ops + 1)), np.concatenate(most), bounds


def _program_of_rows(g: Instance, edges: _Edges) -> tuple[Any, Array, Array]:
    """Return the program with every bound as a row, in the recorded order."""
    count, ops = len(g.succ), g.num_ops
    row, op = np.arange(count), np.arange(ops)
    parents, children = np.flatnonzero(edges.readers), np.flatnonzero(edges.inputs)
    blocks: list[tuple[int, list[tuple[Array, Array, Array | float]], Array]] = [
        (count, [(row, row, -1.0)], np.zeros(count)),
        (count, [(row, row, 1.0)], np.ones(count)),
        (ops, [(op, count + op, -1.0)], np.zeros(ops)),
        (
            count,
            [
                (row, count + edges.source, 1.0),
                (row, count + edges.reader, -1.0),
                (row, row, edges.transfer),
            ],
            -edges.duration[edges.source],
        ),
        (
            len(parents),
            [(np.searchsorted(parents, edges.source), row, -1.0)],
            1.0 - edges.readers[parents],
        ),
        (
            len(children),
            [(np.searchsorted(children, edges.reader), row, -1.0)],
            1.0 - edges.inputs[children],
        ),
        (
            ops,
            [(op, count + op, 1.0), (op, np.full(ops, count + ops), -1.0)],
            -edges.duration,
        ),
    ]
    heights = np.cumsum([0, *(height for height, _, _ in blocks)])
    parts = [
        (rows + base, columns, values)
        for base, (_, inner, _) in zip(heights[:-1].tolist(), blocks, strict=True)
        for rows, columns, values in inner
    ]
    bounds = np.tile([-np.inf, np.inf], (count + ops + 1, 1))
    shape = (int(heights[-1]), count + ops + 1)
    return _sparse(parts, shape), np.concatenate([most for _, _, most in blocks]), bounds


def _match(g: Instance, edges: _Edges, order: Array) -> Array:
    """Take edges in an order where both ends are still without a favourite."""
    child = np.full(g.num_ops, -1, dtype=np.int64)
    taken = np.zeros(g.num_ops, dtype=bool)
    for source, reader in zip(
        edges.source[order].tolist(), edges.reader[order].tolist(), strict=True
    ):
        if child[source] < 0 and not taken[reader]:
            child[source], taken[reader] = reader, True
    return child


def _overwritten(g: Instance, edges: _Edges, values: Array, threshold: float) -> Array:
    """Round edge by edge: a later edge overwrites, and the other end may be stale."""
    child = np.full(g.num_ops, -1, dtype=np.int64)
    parent = np.full(g.num_ops, -1, dtype=np.int64)
    # Rounding half to even, as Python's round does.
    for edge in np.flatnonzero(np.round(values - threshold + 0.5) == 0).tolist():
        source, reader = edges.source[edge], edges.reader[edge]
        if parent[reader] >= 0:
            child[parent[reader]] = -1
        child[source], parent[reader] = reader, source
    return child
