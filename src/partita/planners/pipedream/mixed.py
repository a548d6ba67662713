"""Pipelines on one server with several classes of devices: any devices for any stage, exactly.

A stage of r devices takes ``max_d w_d C(d) + g (r - 1) P / (B r^2)`` with equal shares w = 1/r, or
with shares by speed, where all replicas take ``1 / sum_d 1/C(d)``; a cut of b bytes takes ``2 b w /
B`` of the largest share beside it. Devices of a class are alike, so that a state is an ideal with a
number of devices of each class. Given a period, all pairs of ideals, states and choices of devices
for the next stage are gone through: ``O(pairs x choices^2)``, choices the product of the class
sizes plus one. For a server with a few classes; a row of devices (``row``) serves the rest.
"""

from collections.abc import Callable, Sequence
from itertools import product
from typing import NamedTuple

import numpy as np

from partita.core.columns import Array, Longs
from partita.kernels import run
from partita.planners.pipedream.family import Family
from partita.planners.pipedream.flat import PROBES
from partita.planners.pipedream.mixed_kernel import choose_devices
from partita.planners.pipedream.search import SHORTEST_S

MAX_STEPS = 5_000_000
"""Steps of one test up to which all choices are gone through."""


class Chosen(NamedTuple):
    """A stage: the ops between two ideals, on so many devices of each class."""

    low: int
    high: int
    counts: tuple[int, ...]


class Server(NamedTuple):
    """Devices of one server, and the rules of the pipeline; classes are rows of the seconds.

    Attributes:
        classes: The classes that there are.
        counts: Devices of each.
        memory_bytes: Memory of each.
        rate: Bytes per second between two devices.
        factor: Factor of the all-reduce.
        weighted: Whether replicas take shares by their speed.
        straight: Whether stages have one replica each.
        exact: Whether every device must be used.
        allowed: ``allowed[r]`` = least permitted number of replicas from r on.
    """

    classes: Longs
    counts: tuple[int, ...]
    memory_bytes: Array
    rate: float
    factor: float
    weighted: bool
    straight: bool
    exact: bool
    allowed: Longs

    @property
    def num_choices(self) -> int:
        """Numbers of devices of each class that a stage may have, none included."""
        return int(np.prod([count + 1 for count in self.counts]))


def is_small(family: Family, server: Server) -> bool:
    """Return whether all choices can be gone through."""
    return family.num_pairs * server.num_choices**2 <= MAX_STEPS


class MixedSearch:
    """Tests of periods for one family of ideals on one server."""

    def __init__(
        self,
        family: Family,
        server: Server,
        value_of: Callable[[Sequence[Chosen], float], float],
    ) -> None:
        self._family = family
        self._server = server
        self._value_of = value_of
        ranges = [range(count + 1) for count in server.counts]
        digits = [tuple(reversed(choice)) for choice in product(*reversed(ranges))]
        self._digits = np.array(digits, dtype=np.int64)
        present = np.where(self._digits > 0, server.memory_bytes, np.inf)
        self._limit = present.min(axis=1)
        self._fewer = not server.exact and bool(np.isinf(server.memory_bytes).all())

    def probe(self, period: float) -> tuple[float, list[Chosen]] | None:
        """Return a pipeline within a period with its value, or ``None``."""
        period = max(period, SHORTEST_S)
        family, server = self._family, self._server
        choices = len(self._digits)
        total = self._digits.sum(axis=1)
        flags = (server.weighted, server.straight, self._fewer)
        reached, via, taken = np.zeros((3, len(family) * choices), dtype=np.int64)
        run(
            choose_devices,
            PROBES * family.num_pairs * choices,
            (
                np.array([period, server.rate, server.factor, *flags], dtype=np.float64),
                *(family.pair_ptr, family.pair_to, family.seconds[server.classes].ravel()),
                *(family.trained, family.version, family.fixed, family.cut, family.entering),
                *(self._digits.ravel(), total, self._limit, server.allowed),
            ),
            (np.zeros(choices, dtype=np.int64), reached, via, taken),
        )
        ends = np.flatnonzero(reached[:choices])
        if server.exact:
            ends = ends[ends == choices - 1]
        if not len(ends):
            return None
        state = int(ends[np.argmin(total[ends])])
        stages, low = [], 0
        while low < len(family) - 1:
            row = low * choices + state
            high, choice = int(via[row]), int(taken[row])
            stages.append(Chosen(low, high, tuple(self._digits[choice].tolist())))
            low, state = high, state - choice
        return self._value_of(stages, period), stages
