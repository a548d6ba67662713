"""Bisection on the time of the slowest stage, with a front of ways for each ideal.

Whether a time T can be kept is answered from the end of the pipeline: for an ideal, the ways to run
all that it leaves are kept as pairs (sum of data-parallel degrees, devices), none better than
another in both. More replicas after a stage only mean more of its microbatches in flight, and more
devices fewer for the others, so no other way matters. A stage before a way takes, for each
tensor-parallel degree, the least data-parallel degree that keeps T and the memory.
"""

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from partita.core.columns import Array
from partita.kernels import compiled
from partita.planners.piper.choices import Choices
from partita.planners.piper.kernels import EPSILON, UNSEEN, choose_items, fill_fronts
from partita.planners.piper.space import Space
from partita.planners.piper.tables import Case, Fronts, Known, Limits, Stages

TOLERANCE = 1e-9
"""Relative difference of times that counts as none."""
CLOSE = 1e-3
"""Relative width from which on it is tried to beat the best time by the tolerance alone."""
NEVER = 1e300
"""Stands for what cannot run at all, where 0 times infinity would not be 0."""
MAX_WAYS = 4_000_000
ORDER_CELLS = 20_000_000
SLOT_CELLS = 2_000_000
BRANCHES = {True: (300_000, 20_000_000), False: (500, 20_000)}
"""Branches for one choice of recomputation and for all, where the loops are compiled or not."""


class PlacedStage(NamedTuple):
    """A stage of a plan that was found.

    Attributes:
        lower: The ideal before it.
        stage: Row in the space's stages.
        degree: Tensor-parallel degree, as an index.
        flight: Microbatches in flight.
        data: Data-parallel degree.
    """

    lower: int
    stage: int
    degree: int
    flight: int
    data: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Found:
    """What a search found.

    Attributes:
        stages: The stages, first to last; empty = no plan of the space fits.
        slower: Whether each item takes its slower choice.
        value: Time of the slowest stage; inf = no plan fits.
        bound: No plan of the space takes less.
        trials: How many times were tried.
    """

    stages: tuple[PlacedStage, ...]
    slower: Array
    value: float
    bound: float
    trials: int = 0


class Search:
    """A search for devices of one memory; it keeps what it learns of stages between trials."""

    def __init__(self, space: Space, limits: Limits) -> None:
        """Prepare a search through a space whose stages are those that fit the limits."""
        self._space = space
        self._case = Case(
            limits,
            space.lattice,
            _with_flights(space.stages, limits),
            space.items,
            _known(space, limits),
        )
        self._fronts = _fronts(space, limits)
        self._trials = 0

    def fits(self) -> bool:
        """Return whether some plan keeps the memory, whatever its time."""
        return bool(self._try(math.inf).stages)

    def best(self) -> Found:
        """Return the plan whose slowest stage is fastest, and a bound.

        Times near the bound are tried first, then ever larger ones until one is kept; what is
        between is halved. Close to the end, the best time less the tolerance is tried, too: where
        that is not kept, nothing better is left.
        """
        best = self._try(math.inf)
        if not best.stages:
            return replace(best, trials=self._trials)
        bound, _ = self.start()
        # Where nothing takes time the bound is 0, which no factor leads away from.
        low, step, try_last = max(bound, best.value * TOLERANCE), 0.02, True
        while low < best.value * (1 - TOLERANCE):
            target = min((low + best.value) / 2, low * (1 + step))
            if try_last and best.value <= low * (1 + CLOSE):
                target = best.value * (1 - TOLERANCE)
            found = self._try(target)
            if found.stages:
                best, step, try_last = found, math.inf, False
            else:
                low, step, try_last = target, step * 3, True
                bound = max(bound, found.bound)
        return replace(best, bound=min(bound, best.value), trials=self._trials)

    def start(self) -> tuple[float, str]:
        """Return a time that no plan beats, and why: all work, or a node that stays together."""
        limits, nodes = self._case.limits, self._space.nodes
        data = np.maximum(limits.devices // limits.degrees, 1)
        data = np.minimum(data, limits.divisors[-1])[:, None]
        alone = float((nodes.seconds / data).min(axis=0).max())
        work = float(limits.work[-1]) / limits.devices
        value = max(work, alone) * (1 - TOLERANCE)
        return value, "work over devices" if work >= alone else "an op that is not split further"

    def _try(self, target_s: float) -> Found:
        """Return a plan that keeps a time; without one, the time as a bound if that is proven."""
        self._trials += 1
        space, case = self._space, self._case
        fill, choose = fill_fronts, choose_items
        if space.is_compiled:
            fill, choose = compiled(fill), compiled(choose)
        still_open = fill(target_s, case, self._fronts)
        stages = self._traced()
        slower = np.zeros(len(space.items.node), np.int8)
        if stages:
            placed = np.array(stages, dtype=np.int64)
            value = float(choose(target_s, case, placed, slower))
            # A choice of recomputation that ran out of branches may not be found again.
            if value <= target_s * (1 + EPSILON):
                return Found(stages=stages, slower=slower, value=value, bound=0.0)
            still_open = 1
        bound = 0.0 if still_open else target_s
        return Found(stages=(), slower=slower, value=math.inf, bound=bound)

    def _traced(self) -> tuple[PlacedStage, ...]:
        """Return the stages of the way with the fewest devices for the whole graph."""
        fronts, found = self._fronts, []
        if fronts.end[0] == fronts.begin[0]:
            return ()
        way, lower, last = int(fronts.end[0]) - 1, 0, len(fronts.begin) - 1
        while lower != last:
            data, stage = int(fronts.data[way]), int(fronts.stage[way])
            flight = -(-int(fronts.replicas[way]) // data)
            found.append(PlacedStage(lower, stage, int(fronts.degree[way]), flight, data))
            way, lower = int(fronts.rest[way]), int(self._case.stages.upper[stage])
        return tuple(found)


def limits_of(
    space: Space, choices: Choices, *, devices: int, divisors: Array, microbatches: int, size: float
) -> Limits:
    """Return what a plan has to keep.

    Args:
        space: The space.
        choices: What ops may do.
        devices: Number of devices.
        divisors: Data-parallel degrees that are allowed, ascending.
        microbatches: Most that the data-parallel degrees may add up to.
        size: Bytes of a device.
    """
    degrees = choices.degrees[:, None]
    nodes, member = space.nodes, space.lattice.member.astype(np.float64)
    runs = np.isfinite(nodes.seconds)
    work = np.where(runs, degrees * nodes.seconds, NEVER).min(axis=0)
    held = np.where(runs, degrees * nodes.least, NEVER).min(axis=0)
    room = np.ceil(np.minimum(member @ held / size, devices + 1) - 1e-9)
    return Limits(
        devices,
        min(microbatches, devices),
        size,
        choices.degrees,
        divisors,
        member @ work,
        room.astype(np.int64),
    )


def _with_flights(stages: Stages, limits: Limits) -> Stages:
    """Return stages with how many microbatches in flight fit without a slower choice."""
    top = limits.replicas + 2
    with np.errstate(divide="ignore", invalid="ignore"):
        free = np.floor((limits.bytes - stages.fixed) / stages.saved)
    free = np.where(stages.saved > 0, np.clip(free, -1, top), top)
    # A quotient may round to the whole number next to the true one.
    free = np.where(stages.saved * (free + 1) + stages.fixed <= limits.bytes, free + 1, free)
    free = np.where(stages.saved * free + stages.fixed > limits.bytes, free - 1, free)
    return stages._replace(
        free=free.astype(np.int64), stuck=np.full(free.shape, top + 1, dtype=np.int64)
    )


def _known(space: Space, limits: Limits) -> Known:
    items = len(space.items.node)
    rows = len(limits.degrees) * (limits.replicas + 3)
    rows = min(rows, max(ORDER_CELLS // max(items, 1), 64))
    cells = max(space.stages.seconds.size, 1)
    slots = cells * max(2, min(64, SLOT_CELLS // cells))
    return Known(
        order=np.empty((rows, items), np.int64),
        order_key=np.full(rows, UNSEEN),
        order_count=np.zeros(rows, np.int64),
        flight=np.full(slots, UNSEEN),
        tried=np.zeros(slots, np.int8),
        left=np.array(BRANCHES[space.is_compiled]),
        low=np.empty(slots),
        high=np.empty(slots),
        item=np.empty(items, np.int64),
        gain=np.empty(items),
        cost=np.empty(items),
        taken=np.zeros(items, np.int8),
        best=np.zeros(items, np.int8),
    )


def _fronts(space: Space, limits: Limits) -> Fronts:
    ideals = len(space.lattice.step_ptr) - 1
    ways = min(ideals * (limits.replicas + 1) + 1, MAX_WAYS)
    if len(limits.degrees) == 1:
        ways = ideals + 1
    begin, end = np.zeros((2, ideals), np.int64)
    replicas, devices, stage, degree, data, rest = np.zeros((6, ways), np.int64)
    room = np.zeros((5, limits.replicas + 1), np.int64)
    return Fronts(begin, end, replicas, devices, stage, degree, data, rest, room)
