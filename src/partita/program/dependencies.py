"""A Program as activities and who waits for whom: its longest path is the simulator's makespan.

An activity is a compute instruction (of all members, where they run jointly), a SEND, or a
collective; a RECV vanishes into the edge from its SEND to the compute that waits for it. Transfers
that share a port are kept in the order in which a reference timeline served them: where every port
serves one ordered pair that is the only order there is, elsewhere it is an assumption that a
simulation of the result has to confirm.
"""

from typing import NamedTuple

import numpy as np

from partita.core.cluster import Cluster
from partita.core.columns import Array
from partita.core.order import topological_order
from partita.core.program import FIRST_COLLECTIVE, Kind, Program
from partita.core.timeline import Timeline
from partita.program.matching import Matching, match
from partita.program.simulate import program_ports


class Dependencies(NamedTuple):
    """The activities of a Program, in a topological order.

    Attributes:
        activity: The activity of each row; -1 for a RECV.
        row: The first row of each activity.
        source: With ``target``: pairs of activities of which the second waits for the first.
        target: See ``source``.
    """

    activity: Array
    row: Array
    source: Array
    target: Array

    def __len__(self) -> int:
        return len(self.row)


def dependencies(program: Program, cluster: Cluster, reference: Timeline) -> Dependencies:
    """Return the activities of a Program and the pairs that wait.

    Args:
        program: The Program.
        cluster: The machines that it runs on.
        reference: A timeline of it with overlapped transfers, for the order of shared ports.
    """
    matching = match(program)
    label = _labels(program, matching)
    data = _pairs(label, [_compute_order(program), _issues(program), _waits(program, matching)])
    place = _places(label, data, reference)
    ports = _pairs(label, _port_order(program, cluster, place))
    used = np.flatnonzero(label == np.arange(len(program)))
    row = used[np.argsort(place[used])]
    number = np.full(len(program) + 1, -1, dtype=np.int64)
    number[row] = np.arange(len(row))
    source, target = (np.concatenate(sides) for sides in zip(data, ports, strict=True))
    return Dependencies(
        activity=number[label], row=row, source=number[source], target=number[target]
    )


def _labels(program: Program, matching: Matching) -> Array:
    """Return the first row of the activity of each row; -1 for a RECV."""
    label = np.arange(len(program), dtype=np.int64)
    if len(matching.joint):
        joint = np.flatnonzero(matching.joint >= 0)
        first = np.full(len(matching.joint_size), len(program), dtype=np.int64)
        np.minimum.at(first, matching.joint[joint], joint)
        label[joint] = first[matching.joint[joint]]
    label[program.kind == Kind.RECV] = -1
    return label


def _compute_order(program: Program) -> tuple[Array, Array]:
    """Return each compute row with the next one of its device."""
    rows = np.flatnonzero(program.is_compute)
    same = program.device[rows[1:]] == program.device[rows[:-1]]
    return rows[:-1][same], rows[1:][same]


def _issues(program: Program) -> tuple[Array, Array]:
    """Return the compute row before each SEND and collective, where there is one, with it."""
    last = np.maximum.accumulate(np.where(program.is_compute, np.arange(len(program)), -1))
    rows = np.flatnonzero((program.kind == Kind.SEND) | (program.kind >= FIRST_COLLECTIVE))
    before = last[rows]
    there = before >= program.ptr[program.device[rows]]
    return before[there], rows[there]


def _waits(program: Program, matching: Matching) -> tuple[Array, Array]:
    """Return each SEND and collective with the compute row that waits for it."""
    rows = np.flatnonzero(matching.consumer >= 0)
    giver = np.where(program.kind[rows] == Kind.RECV, matching.partner[rows], rows)
    return giver, matching.consumer[rows]


def _pairs(label: Array, found: list[tuple[Array, Array]]) -> tuple[Array, Array]:
    """Return pairs of rows as distinct pairs of activities."""
    source, target = (label[np.concatenate(side)] for side in zip(*found, strict=True))
    apart = source != target
    both = np.unique(source[apart] * len(label) + target[apart])
    return both // len(label), both % len(label)


def _places(label: Array, data: tuple[Array, Array], reference: Timeline) -> Array:
    """Return the place of each activity: by its start, and where starts are equal, by the data.

    What takes no time may start together with what it waits for.
    """
    size = len(label)
    order = topological_order(size, *data, [str(row) for row in range(size)])
    along = np.empty(size, dtype=np.int64)
    along[order] = np.arange(size)
    place = np.empty(size, dtype=np.int64)
    place[np.lexsort((along, reference.start_s))] = np.arange(size)
    return place


def _port_order(program: Program, cluster: Cluster, place: Array) -> list[tuple[Array, Array]]:
    """Return the rows that use a port one after the other."""
    pairs = []
    for port in program_ports(program, cluster):
        rows = np.flatnonzero(port >= 0)
        order = rows[np.lexsort((place[rows], port[rows]))]
        same = port[order[1:]] == port[order[:-1]]
        pairs.append((order[:-1][same], order[1:][same]))
    return pairs
