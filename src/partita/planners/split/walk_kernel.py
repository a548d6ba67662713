r"""The walk over pieces between ideals that the planners of splits have in common.

From a base ideal B, every larger ideal J that can be reached is visited once, depth first, one node
more at each step. The piece J \ B is then the nodes on the path, so that what it costs follows from
what the piece before it costs, by the node that was added: a net is cut by a piece while some of
its pins are inside and some are not, and shared bytes are held once however many nodes use them.
What a visit is for (the cut of an ideal, the load of a device, the time of a call) is left to the
kernels that walk; they decide as well whether a piece is entered, since none that contains a piece
too large for every device can fit.

Tables with two indices are flat: row times the length of a row, plus the column.
"""

from typing import NamedTuple

import numpy as np

from partita.core.columns import Array
from partita.kernels import Column, kernel
from partita.planners.lattice.ideals import Ideals
from partita.planners.lattice.nets import nets_by_node
from partita.planners.split.model import SplitModel


class Steps(NamedTuple):
    """Covering steps of the lattice: ideal i leads by ``ptr[i]`` to ``ptr[i + 1]``.

    Attributes:
        ptr: First step of each ideal.
        node: The node that a step adds.
        target: The ideal that it leads to.
    """

    ptr: Column
    node: Column
    target: Column


class Costs(NamedTuple):
    """What nodes cost on classes of devices, alone and by what they share with others.

    Attributes:
        seconds: ``[class, node]``: seconds of a node; inf = it may not run there.
        pays: Whether each class pays for the nets that it cuts.
        limit_bytes: Memory of a device of each class.
        node_bytes: Bytes that a node needs by itself.
        net_ptr: Node n is a pin of the nets ``net_of[net_ptr[n]:net_ptr[n + 1]]``.
        net_of: See ``net_ptr``.
        net_size: Pins of each net.
        net_s: Seconds that a device pays for each net that it cuts.
        share_ptr: Node n uses the shared parts ``share_of[share_ptr[n]:share_ptr[n + 1]]``.
        share_of: See ``share_ptr``.
        share_size: Nodes that use each shared part.
        share_bytes: Its bytes, held once on every device with one of these nodes.
    """

    seconds: Column
    pays: Column
    limit_bytes: Column
    node_bytes: Column
    net_ptr: Column
    net_of: Column
    net_size: Column
    net_s: Column
    share_ptr: Column
    share_of: Column
    share_size: Column
    share_bytes: Column


class Path(NamedTuple):
    """The path from a base ideal to the one that is visited: depth d has d nodes.

    Invariant: ``inside``, ``held`` and ``finish`` describe the piece at the current depth; all are
    as at the start again when the walk has come back to its base.

    Attributes:
        seen: ``[ideal]``: the last base from which it was visited.
        inside: ``[net]``: pins of a net in the piece.
        held: ``[shared part]``: nodes of the piece that use it.
        ideal: ``[depth]``: the ideal.
        step: ``[depth]``: the next step to try from there.
        node: ``[depth]``: the node that led there.
        seconds: ``[depth, class]``: seconds of the piece's nodes.
        bytes: ``[depth]``: bytes of the piece.
        cut_s: ``[depth]``: seconds of the nets that it cuts.
        cpu_s: ``[depth]``: its longest path on CPUs, in seconds.
        finish: ``[node]``: seconds from the start of the piece to the end of a node on CPUs; -1 =
            the node is not in the piece.
    """

    seen: Column
    inside: Column
    held: Column
    ideal: Column
    step: Column
    node: Column
    seconds: Column
    bytes: Column
    cut_s: Column
    cpu_s: Column
    finish: Column


class Table(NamedTuple):
    """The dynamic programme, ``[ideal, state]``; a state says which devices are used up.

    Attributes:
        value: The least value of a chain of pieces up to the ideal.
        origin: The ideal before its last piece.
        came_by: The state before that piece and the class of its device, as state times classes
            plus class; other numbers are the kernel's own.
    """

    value: Column
    origin: Column
    came_by: Column


def steps_of(ideals: Ideals) -> Steps:
    """Return the steps of a lattice."""
    return Steps(ideals.step_ptr, ideals.step_node, ideals.step_target)


def costs_of(model: SplitModel, devices: SplitModel | None) -> Costs:
    """Return the costs of a model's nodes on the devices of another; ``None`` = on no device."""
    nodes = model.q.num_nodes
    return Costs(
        np.zeros(0) if devices is None else devices.seconds.ravel(),
        np.zeros(0, dtype=bool) if devices is None else devices.pays,
        np.zeros(0) if devices is None else devices.limit_bytes,
        model.node_bytes,
        *nets_by_node(model.nets, nodes),
        np.diff(model.nets.ptr),
        model.net_s,
        *nets_by_node(model.shared, nodes),
        np.diff(model.shared.ptr),
        model.shared_bytes,
    )


def new_path(costs: Costs, num_ideals: int) -> Path:
    """Return a path that has seen nothing."""
    nodes, classes = len(costs.node_bytes), len(costs.limit_bytes)
    inside, held = (
        np.zeros(len(size), dtype=np.int64) for size in (costs.net_size, costs.share_size)
    )
    ideal, step, node = np.zeros((3, nodes + 2), dtype=np.int64)
    seconds = np.zeros((nodes + 2) * classes)
    used, cut_s, cpu_s = np.zeros((3, nodes + 2))
    seen, finish = np.full(num_ideals, -1, dtype=np.int64), np.full(nodes, -1.0)
    return Path(seen, inside, held, ideal, step, node, seconds, used, cut_s, cpu_s, finish)


def new_table(num_ideals: int, num_states: int) -> Table:
    """Return a table in which only the empty chain is known."""
    value: Array = np.full(num_ideals * num_states, np.inf)
    value[0] = 0.0
    origin, came_by = np.full((2, len(value)), -1, dtype=np.int32)
    return Table(value, origin, came_by)


@kernel(inline=True)
def note_chain(table: Table, cell: int, value: float, origin: int, by: int) -> None:
    """Note the best chain of a cell."""
    table.value[cell] = value
    table.origin[cell] = origin
    table.came_by[cell] = by


@kernel(inline=True)
def begin_walk(steps: Steps, costs: Costs, path: Path, base: int) -> None:
    """Begin at an ideal, with an empty piece."""
    path.ideal[0], path.step[0] = base, steps.ptr[base]
    path.bytes[0], path.cut_s[0], path.cpu_s[0] = 0.0, 0.0, 0.0
    for kind in range(len(costs.limit_bytes)):
        path.seconds[kind] = 0.0


@kernel(inline=True)
def next_step(steps: Steps, costs: Costs, path: Path, base: int, depth: int) -> tuple[int, int]:
    """Return the next step to an ideal not seen from the base, and the depth it starts from.

    Goes back along the path where an ideal has no more steps; a depth of -1 is the end.
    """
    while depth >= 0:
        step = path.step[depth]
        if step < steps.ptr[path.ideal[depth] + 1]:
            path.step[depth] = step + 1
            there = steps.target[step]
            if path.seen[there] != base:
                path.seen[there] = base
                return step, depth
        else:
            if depth > 0:
                _leave(costs, path, path.node[depth])
            depth -= 1
    return -1, -1


@kernel(inline=True)
def _leave(costs: Costs, path: Path, node: int) -> None:
    """Take the last node of a piece away."""
    path.finish[node] = -1.0
    for row in range(costs.net_ptr[node], costs.net_ptr[node + 1]):
        path.inside[costs.net_of[row]] -= 1
    for row in range(costs.share_ptr[node], costs.share_ptr[node + 1]):
        path.held[costs.share_of[row]] -= 1


@kernel(inline=True)
def bytes_with(costs: Costs, path: Path, depth: int, node: int) -> float:
    """Return the bytes of a piece with one node more."""
    used: float = path.bytes[depth] + costs.node_bytes[node]
    for row in range(costs.share_ptr[node], costs.share_ptr[node + 1]):
        if path.held[costs.share_of[row]] == 0:
            used += costs.share_bytes[costs.share_of[row]]
    return used


@kernel(inline=True)
def any_class_fits(
    costs: Costs, path: Path, depth: int, node: int, used: float, room_s: float
) -> bool:
    """Return whether some class takes a piece with one node more, its cut left out.

    Fills in the seconds of the next depth.
    """
    classes, nodes = len(costs.limit_bytes), len(costs.node_bytes)
    fits = False
    for kind in range(classes):
        total = path.seconds[depth * classes + kind] + costs.seconds[kind * nodes + node]
        path.seconds[(depth + 1) * classes + kind] = total
        if total <= room_s and used <= costs.limit_bytes[kind]:
            fits = True
    return fits


@kernel(inline=True)
def enter(steps: Steps, costs: Costs, path: Path, depth: int, step: int, used: float) -> float:
    """Add the node of a step to the piece, one deeper; return the seconds of the nets it cuts."""
    node, there = steps.node[step], steps.target[step]
    cut_s: float = path.cut_s[depth]
    for row in range(costs.net_ptr[node], costs.net_ptr[node + 1]):
        net = costs.net_of[row]
        path.inside[net] += 1
        # The first pin inside cuts a net, the last one heals it; both, where it has one pin.
        if path.inside[net] == 1:
            cut_s += costs.net_s[net]
        if path.inside[net] == costs.net_size[net]:
            cut_s -= costs.net_s[net]
    for row in range(costs.share_ptr[node], costs.share_ptr[node + 1]):
        path.held[costs.share_of[row]] += 1
    path.ideal[depth + 1], path.step[depth + 1] = there, steps.ptr[there]
    path.node[depth + 1], path.bytes[depth + 1], path.cut_s[depth + 1] = node, used, cut_s
    return cut_s
