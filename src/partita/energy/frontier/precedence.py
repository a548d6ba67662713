"""The activities that have a clock to choose, and how long each has to wait for which others.

A Program has many activities of one fixed duration: transfers, reductions, loading. Most of them
lie between two others and only say how long the second waits after the first, so they become the
*lag* of an edge. Edges that another path implies go too. What is left is the network that the
solver and the rounding work on: for a pipeline about half of the activities and edges.

A transfer that takes no time holds no port: those after it wait for the ones before it instead.
"""

from typing import NamedTuple

import numpy as np

from partita.core.columns import Array
from partita.core.order import csr
from partita.core.program import LAST_COMPUTE, Program
from partita.energy.frontier.options import Options
from partita.program.dependencies import Dependencies

MOST_WAITS = 4
"""A fixed activity that waits for more others than that stays an activity."""

Waits = dict[int, float]
"""Lag after the end of each activity that is waited for; ``START`` = the start of the step."""

START = -1


class Precedence(NamedTuple):
    """Activities, numbered along the edges, with lags between them.

    Attributes:
        activity: The activity of each node in ``Dependencies``.
        source: With ``target`` and ``lag``: the target starts no earlier than ``lag`` seconds after
            the source has ended.
        target: See ``source``.
        lag: See ``source``.
        release: Earliest start of each node, whoever it waits for.
        tail: Seconds that follow the end of each node before the step can end.
        floor_s: The step takes at least that long, whatever the nodes do.
    """

    activity: Array
    source: Array
    target: Array
    lag: Array
    release: Array
    tail: Array
    floor_s: float

    def __len__(self) -> int:
        return len(self.activity)


def precedence_of(program: Program, found: Dependencies, options: Options) -> Precedence:
    """Return the network of a Program's activities."""
    shortest = options.seconds[options.ptr[:-1]].tolist()
    choices = np.diff(options.ptr).tolist()
    rows = found.row.tolist()
    compute = program.kind <= LAST_COMPUTE
    device = np.where(compute, program.device, -1)[found.row].tolist()
    order = _Order(shortest, device, rows)
    ptr, before = csr(found.target, found.source, len(found))
    first, sources = ptr.tolist(), before.tolist()
    followed = np.zeros(len(found), dtype=bool)
    followed[found.source] = True
    node: dict[int, int] = {}
    passed: dict[int, Waits] = {}
    queued: dict[int, Waits] = {}
    edges: list[tuple[int, int, float]] = []
    release: list[float] = []
    final: Waits = {}
    for i in range(len(found)):
        own = sources[first[i] : first[i + 1]]
        data = [j for j in own if device[i] >= 0 or device[j] >= 0]
        ports = [j for j in own if device[i] < 0 and device[j] < 0]
        held = order.joined([(j, passed.get(j) if shortest[j] > 0 else queued[j]) for j in ports])
        if device[i] < 0:
            queued[i] = held
        waits = order.joined([(j, passed.get(j)) for j in data], held) or {START: 0.0}
        order.earliest.append(order.after(waits))
        # The last activity stays, so that there is always one.
        if choices[i] == 1 and len(waits) <= MOST_WAITS and i + 1 < len(found):
            passed[i] = {j: lag + shortest[i] for j, lag in waits.items()}
        else:
            release.append(waits.pop(START, 0.0))
            edges += [(node[j], len(node), lag) for j, lag in waits.items()]
            node[i] = len(node)
        if not followed[i]:
            final = order.joined([(i, passed.get(i))], final)
    floor_s = final.pop(START, 0.0)
    tail = np.zeros(len(node))
    tail[[node[i] for i in final]] = list(final.values())
    columns = np.array(edges).reshape(-1, 3)
    return Precedence(
        activity=np.fromiter(node, dtype=np.int64, count=len(node)),
        source=columns[:, 0].astype(np.int64),
        target=columns[:, 1].astype(np.int64),
        lag=columns[:, 2].copy(),
        release=np.array(release),
        tail=tail,
        floor_s=floor_s,
    )


class _Order:
    """What is known of the order of activities, to leave out what follows from the rest."""

    def __init__(self, shortest: list[float], device: list[int], rows: list[int]) -> None:
        self.shortest = shortest
        self.device = device
        self.rows = rows
        self.earliest: list[float] = []
        """Earliest start of each activity seen so far."""

    def after(self, waits: Waits) -> float:
        """Return the earliest start that some waits allow."""
        return max(
            (
                lag + (self.earliest[j] + self.shortest[j] if j != START else 0.0)
                for j, lag in waits.items()
            ),
            default=0.0,
        )

    def joined(self, sources: list[tuple[int, Waits | None]], known: Waits | None = None) -> Waits:
        """Return the waits for some activities, those that were passed replaced by their own."""
        waits = dict(known or {})
        for j, own in sources:
            for other, lag in ({j: 0.0} if own is None else own).items():
                waits[other] = max(lag, waits.get(other, 0.0))
        if len(waits) > 1:
            for j in [j for j, lag in waits.items() if self._implied(j, lag, waits)]:
                del waits[j]
        return waits

    def _implied(self, early: int, lag: float, waits: Waits) -> bool:
        """Whether another wait holds an activity up at least as long as this one does.

        Computations of one device follow one another, so that a later one has ended no earlier than
        its own shortest time after the end of an earlier one.
        """
        if early == START:
            return lag <= self.after({j: other for j, other in waits.items() if j != START})
        return any(
            self.device[late] == self.device[early] >= 0
            and self.rows[late] > self.rows[early]
            and lag <= other + self.shortest[late]
            for late, other in waits.items()
            if late not in {START, early}
        )
