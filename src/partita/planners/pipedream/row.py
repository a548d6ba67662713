"""Pipelines on a row of devices, each stage on consecutive ones: several servers, mixed devices.

The row goes through the servers one after the other; a stage may span servers and two stages may
share one. With w the share of a device, m the most replicas of a stage in one server, q its
servers, B1 and B2 the bandwidths inside a server and of its port, b the live bytes of a cut, and a,
b' the shares of both stages in a server, the repaired period is the largest of

    max_d w_d C(d) + (g (m - 1)/m P/B1 + g (q - 1)/q P/B2) / r    of every stage
    2 b (a (1 - b') + b' (1 - a)) / B2,   2 b w b' / B1           of every server and link

Given a period, states are (ideal, place in the row) with the sizes that the next stage may have
there: sizes matter, as both stages beside a cut load its ports. All sizes are kept where that costs
little; else, per state, the least ones that do and those that end at a server's edge. With weighted
shares the loads of ports are taken as if shares were equal; the plan is measured as it is.
``O(pairs of ideals x devices^2)`` a test, less what the work that is left rules out.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from partita.core.columns import Array, Longs
from partita.kernels import run
from partita.planners.pipedream.family import Family
from partita.planners.pipedream.flat import PROBES
from partita.planners.pipedream.row_kernel import place_stages
from partita.planners.pipedream.search import SHORTEST_S

WIDE_STEPS = 2_000_000
"""Steps of one test up to which all sizes of stages are kept."""
KEEP = 4


class Placed(NamedTuple):
    """A stage: the ops between two ideals, on devices of the row from ``first`` on."""

    low: int
    high: int
    first: int
    size: int


class Row(NamedTuple):
    """Devices in a row, and the rules of the pipeline.

    Attributes:
        server: Server of each device, numbered along the row without gaps.
        rate: Bytes per second inside each server.
        outer_rate: Bytes per second of a server's port.
        class_of: Class of each device, a row of the family's seconds.
        memory_bytes: Memory of each device that a plan may use.
        factor: Factor of the all-reduce.
        weighted: Whether replicas take shares by their speed.
        straight: Whether stages have one replica each.
        exact: Whether every device must be used.
        allowed: ``allowed[r]`` = least permitted number of replicas from r on.
        banned: Ops below each ideal that a device must not run, ``[device, ideal]``, or empty.
    """

    server: Longs
    rate: Array
    outer_rate: float
    class_of: Longs
    memory_bytes: Array
    factor: float
    weighted: bool
    straight: bool
    exact: bool
    allowed: Longs
    banned: Array


class RowSearch:
    """Tests of periods for one family of ideals on one row of devices.

    Attributes:
        steps: Steps of one test, at most.
        wide: Whether all sizes of stages are kept, so that a failed test is a proof for the row.
    """

    def __init__(
        self, family: Family, row: Row, value_of: Callable[[Sequence[Placed], float], float]
    ) -> None:
        self._family = family
        self._row = row
        self._value_of = value_of
        places = len(row.server)
        self.steps = family.num_pairs * places * places // 4
        self.wide = self.steps <= WIDE_STEPS
        self._keep = places if self.wide else KEEP
        self._tables = _tables(row)

    def probe(self, period: float) -> tuple[float, list[Placed]] | None:
        """Return a pipeline within a period with its value, or ``None``."""
        period = max(period, SHORTEST_S)
        family, row, keep = self._family, self._row, self._keep
        flags = (self.wide, keep, row.weighted, row.straight, row.exact)
        states = len(family) * (len(row.server) + 1)
        count = np.zeros(states, dtype=np.int64)
        replicas, via = np.zeros((2, states * keep), dtype=np.int64)
        goal = np.full(1, -1, dtype=np.int64)
        run(
            place_stages,
            PROBES * family.num_pairs * len(row.server),
            (
                np.array([period, row.outer_rate, *flags], dtype=np.float64),
                *(family.pair_ptr, family.pair_to, family.seconds.ravel(), family.trained),
                *(family.version, family.fixed, family.cut, family.entering),
                *self._tables,
            ),
            (
                np.full((len(row.server) + 1) ** 2, -1, dtype=np.int64),
                *(count, replicas, via, goal),
            ),
        )
        if goal[0] < 0:
            return None
        stages = self._stages(int(goal[0]), replicas, via)
        return self._value_of(stages, period), stages

    def _stages(self, option: int, replicas: Longs, via: Longs) -> list[Placed]:
        width = len(self._row.server) + 1
        stages = []
        low, first = divmod(option // self._keep, width)
        while low < len(self._family) - 1:
            size, option = int(replicas[option]), int(via[option])
            high, after = divmod(option // self._keep, width)
            stages.append(Placed(low, high, first, size))
            low, first = high, after
        return stages


def _tables(row: Row) -> tuple[Array, ...]:
    """Return the columns of the row that the kernel asks for, in its order."""
    places = len(row.server)
    width = places + 1
    begin = np.searchsorted(row.server, row.server)
    end = np.searchsorted(row.server, row.server, side="right")
    kinds = int(row.class_of.max()) + 1
    classes = np.zeros((kinds, width), dtype=np.int64)
    for kind in range(kinds):
        np.cumsum(row.class_of == kind, out=classes[kind, 1:])
    reduce, limit = np.zeros((2, width, width))
    most = np.ones((width, width), dtype=np.int64)
    for last in range(1, width):
        reduce[last, 1 : last + 1], most[last, 1 : last + 1] = _reduction(row, last)
        limit[last, 1 : last + 1] = np.minimum.accumulate(row.memory_bytes[:last][::-1])
    return (
        *(row.server, begin, end, row.rate, classes.ravel(), reduce.ravel(), most.ravel()),
        *(limit.ravel(), row.banned.ravel(), row.allowed),
    )


def _reduction(row: Row, last: int) -> tuple[Array, Longs]:
    """Return by size, for stages that end before a place: seconds a trained byte, most in a server.

    The seconds are those of one minibatch: an all-reduce in the servers and one between them, once
    for as many minibatches as there are replicas.
    """
    size = np.arange(1, last + 1)
    server = row.server[last - size]
    # Devices of the first server of the stage, of the largest of the others, and their number.
    own = np.minimum(np.searchsorted(row.server, server, side="right"), last) - (last - size)
    full = np.diff(np.append(np.unique(row.server[:last], return_index=True)[1], last))
    behind = np.concatenate([np.maximum.accumulate(full[::-1])[::-1], [0]])
    most = np.maximum(own, behind[server + 1])
    servers = row.server[last - 1] - server + 1
    rate = np.minimum.accumulate(row.rate[row.server[:last]][::-1])
    inside = (most - 1) / most / rate
    between = (servers - 1) / servers / row.outer_rate
    return row.factor * (inside + between) / size, most
