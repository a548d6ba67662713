"""Contiguous pipelines with replication over a line of units and a line of devices.

A stage is a range of the units on a range of the devices, one replica each. For every number of
units and devices that are left, the program finds

    A(i, d) = min over j > i, R   p(i, j, d, R) + A(j, d + R)       where q(i, j, d, R) <= Q

p being the seconds of one microbatch through the stage and over the link behind it, and q what the
other microbatches add there: compute on the slowest share, the link, the reduction of gradients. A
step takes about ``sum p + max q``, so the program runs for several limits Q, from the least that
any split has to none (Alpa, Zheng et al. 2022, section 5.2, does so on equal devices). A device
may stay unused. A stage that does not fit shards its optimizer state over its replicas, which costs
next to nothing; if that does not do, it recomputes the activations that take least time for their
bytes, then both, then more of them (``recompute``), at last it shards all its state and gathers
weights as it needs them; else it is out. What is in flight on a stage follows
from the devices behind it, as in 1F1B.

Differences from PipeDream's program: fill and drain count, a device line may mix types (shares
follow their speeds) and link levels, and each boundary pays for its own link. O(D R U^2) for each
Q, on arrays; U is the number of cut points, at most ``MAX_POINTS``.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from partita.core.columns import Array
from partita.core.plan import Shard
from partita.core.problem import Metric, Schedule
from partita.kernels import Column, Number, Threshold, kernel, run
from partita.planners.auto.estimate import Estimator
from partita.planners.auto.frame import Batch, Frame
from partita.planners.auto.recompute import LEVEL_SHARES, level_sums, levels
from partita.planners.auto.sketch import Sketch, cut_order, fair_shares, replicated
from partita.planners.auto.units import crossing_sums, cut_points, sums_before

MAX_POINTS = 192
ALIGNED_FROM = 8
SHORT_LINE, MAX_FINE_LINE = 32, 512
LIMITS = 6
"""Bottlenecks Q that are tried between the least and none."""
SHARDS = (Shard.NONE, Shard.OPTIMIZER, Shard.GRADIENTS, Shard.PARAMETERS)
"""What stages shard."""
_GRADIENTS, _ALL = 2, 3
_CELLS = Threshold(size=1_000_000, total=2_000_000, loaded=True)
"""When tables and splits are compiled, in cells that are looked at; a cell of a table takes about
as long to make as eight to look at."""
_MAKING = 8
MAX_POOLED = 10_000_000
"""Cells of the tables that are kept, of 17 bytes each."""


class Line(NamedTuple):
    """Sums along an order of units, by place (0 to the number of units).

    Attributes:
        order: The units.
        points: Places where a cut is tried, from 0 to the end.
        forward: Seconds of the units before each point, by class.
        backward: Likewise.
        static: Bytes of weights, gradients and optimizer state before each point.
        saved: Bytes kept of a microbatch before each point.
        freed: Of them, by level of recomputation, what is not kept.
        rerun: Seconds to compute that again, by level and class.
        weight_s: Seconds of the part of backward that is for weights, by class.
        again: Whether each unit recomputes, by level.
        reduced: Bytes that replicas reduce before each point.
        barred: Units before each point that a class may not run.
        cut: Bytes that cross each point.
        messages: Tensors that cross each point.
    """

    order: Array
    points: Array
    forward: Array
    backward: Array
    static: Array
    saved: Array
    freed: Array
    rerun: Array
    weight_s: Array
    again: Array
    reduced: Array
    barred: Array
    cut: Array
    messages: Array


def line_of(
    frame: Frame, estimator: Estimator, order: Array, batch: Batch, *, fine: bool = True
) -> Line:
    """Return the sums along an order for microbatches of a size.

    Args:
        frame: The frame.
        estimator: Seconds of units.
        order: The units.
        batch: The microbatches.
        fine: Whether to cut at many places; where many lines of devices are tried, that takes long.
    """
    forward, backward = estimator.seconds(batch.size)
    cut, messages = _cuts(frame, order, estimator.net_bytes(batch.size))
    whole = sums_before((forward + backward).mean(axis=0)[order])
    size = len(frame.devices)
    most = max(96, 4 * size) if fine else max(48, 2 * size)
    # Beyond, the program itself would take seconds.
    most = most if size <= MAX_FINE_LINE else 96
    points = cut_points(whole, cut, min(MAX_POINTS, most))

    def at(values: Array) -> Array:
        return sums_before(values[..., order])[..., points]

    again = levels(estimator, batch.size)
    freed, rerun = level_sums(estimator, batch.size, order, again)
    return Line(
        order=order,
        points=points,
        forward=at(forward),
        backward=at(backward),
        static=at(frame.static_bytes),
        saved=at(frame.saved_bytes(batch.size)),
        freed=sums_before(freed)[..., points],
        rerun=sums_before(rerun)[..., points],
        weight_s=at(backward * (1 - frame.input_share)),
        again=again,
        reduced=at(frame.reduced_bytes),
        barred=at((~frame.allowed).astype(np.float64)),
        cut=cut[points],
        messages=messages[points],
    )


def _cuts(frame: Frame, order: Array, size: Array) -> tuple[Array, Array]:
    """Return bytes and number of the tensors that cross each place of an order."""
    _, source, _ = frame.nets
    net, reader = frame.net_pairs
    cut, messages = crossing_sums(order, source, net, reader, (size, np.ones(len(size))))
    return cut, messages


@dataclass(kw_only=True)
class ChainProgram:
    """The dynamic program over one line of units and one line of devices.

    Attributes:
        frame: The frame.
        estimator: Link and reduction figures.
        line: The units.
        devices: The devices, as numbers of the cluster's, in the order that data flow.
        batch: The microbatches.
        replicas: Numbers of replicas to try.
        schedule: Of the sketches.
        shards: Whether stages that do not fit may shard their state.
        pool: Tables of places, which other lines of devices over the same units may share.
        stop: Whether the time is up: long lines are then looked at as far as they were.
    """

    frame: Frame
    estimator: Estimator
    line: Line
    devices: Sequence[int]
    batch: Batch
    replicas: Sequence[int]
    schedule: Schedule
    shards: bool = True
    pool: "TablePool"
    stop: Callable[[], bool] = bool

    def sketches(self) -> list[Sketch]:
        """Return the splits for several bottlenecks, without repeats."""
        found = (self._sketch(split.ranges) for split in self._splits)
        return list({sketch.key: sketch for sketch in found}.values())

    @property
    def guess(self) -> float:
        """About the seconds of a step with the best of the splits; ``inf`` where there is none."""
        return min((split.once + split.beyond for split in self._splits), default=math.inf)

    @cached_property
    def _splits(self) -> "list[_Split]":
        """The best split for each of several bottlenecks."""
        # The range of limits: the least bottleneck of any split, and that of the split which is
        # fastest without a limit. Limits outside of it change nothing.
        least, loosest = self._solve(self._places, [math.nan, math.inf])
        if least is None:
            return []
        if len(self.devices) > SHORT_LINE and self.stop():
            return [split for split in (loosest, least) if split is not None]
        limits = []
        wants_latency = self.frame.problem.objective.metric is Metric.LATENCY
        if not wants_latency and loosest is not None and loosest.beyond > least.beyond > 0:
            limits += np.geomspace(loosest.beyond, least.beyond, LIMITS).tolist()[1:-1]
        limits.append(least.beyond)
        # Widened, so that rounding does not shut out the split that gave the limit.
        wide = [limit * (1 + 1e-12) for limit in limits]
        splits = [loosest, *self._solve(self._places, wide)]
        return [split for split in splits if split is not None]

    def even_sketches(self) -> list[Sketch]:
        """Return for each number of replicas the split into stages that all have so many."""
        found = []
        for number in range(len(self.replicas)):
            if len(self.devices) > SHORT_LINE and self.stop():
                break
            alone = np.full_like(self._places, -1)
            alone[:, number] = self._places[:, number]
            (split,) = self._solve(alone, [math.nan])
            if split is not None:
                found.append(self._sketch(split.ranges))
        return found

    @cached_property
    def _places(self) -> Array:
        """The table of each first device and number of replicas; -1 = no stage can be there."""
        total, pool = len(self.devices), self.pool
        found = np.full((total, len(self.replicas)), -1)
        kinds = self.estimator.kind_of
        line, row = tuple(kinds[device] for device in self.devices), self.schedule.row
        for d in range(total):
            # Devices whose places were not looked at stay unused.
            if d >= SHORT_LINE and d % SHORT_LINE == 0 and self.stop():
                break
            for number, r in enumerate(self.replicas):
                if not self._is_place(d, r):
                    continue
                # Devices of the same kinds with such a one behind them are at many places of other
                # lines.
                flying, shards = self._flying(d, r), self.shards and r > 1
                again = self._comes_again(d, r)
                kept = (flying, shards, self._delayed, row.fills_first)
                here = (line[d : d + r + 1], r, again, kept)
                place = pool.place_of.get(here)
                if place is None:
                    # Places that look alike (classes, microbatches in flight, links) share a table.
                    key = self._key(d, r)
                    place = pool.place_of.get(key)
                    if place is None:
                        place = pool.place_of[key] = self._table(d, r)
                    pool.place_of[here] = place
                found[d, number] = place
        return found

    def _is_place(self, d: int, r: int) -> bool:
        """Return whether a stage may begin at a device: on long lines, large ones only in step."""
        total = len(self.devices)
        in_step = r < ALIGNED_FROM or total <= SHORT_LINE or d % r == 0 or (total - d) % r == 0
        return in_step and d + r <= total and len(set(self.devices[d : d + r])) == r

    def _comes_again(self, d: int, r: int) -> int:
        """Return which device of a stage is the next one of the line, too; -1 = none, as a rule."""
        members, after = self.devices[d : d + r], self.devices[d + r : d + r + 1]
        return members.index(after[0]) if after and after[0] in members else -1

    def _key(self, d: int, r: int) -> tuple[object, ...]:
        members = tuple(self._class_of[device] for device in self._members(d, r))
        shards = self.shards and r > 1
        link, reduction = self._link(d, r), self._reduction(d, r)
        return (members, self._flying(d, r), link, reduction, shards, self._delayed)

    def _members(self, d: int, r: int) -> list[int]:
        """Return the devices of a stage by class, so that their order makes no other table."""
        return sorted(self.devices[d : d + r], key=self._class_of.__getitem__)

    @cached_property
    def _class_of(self) -> list[int]:
        of: list[int] = self.frame.class_of.tolist()
        return of

    @property
    def _delayed(self) -> int:
        """How many times the weight part of backward is no part of the way of a microbatch.

        Where it is delayed until a device would wait, it fills as much of that time again.
        """
        row = self.schedule.row
        return int(row.splits_backward) + int(row.delays_weights)

    def _flying(self, d: int, r: int) -> int:
        """Return the microbatches in flight on a replica."""
        most = -(-self.batch.count // r)
        if self.schedule.row.fills_first:
            return most
        # Where the weight part waits, every stage keeps as many as the first one.
        behind = len(self.devices) - (0 if self.schedule.row.delays_weights else d)
        return min(most, -(-behind // r))

    def _link(self, d: int, r: int) -> tuple[float, float, int]:
        """Return latency, seconds per byte and number of ports of the link behind a stage."""
        if d + r >= len(self.devices):
            return 0.0, 0.0, 1
        return self.estimator.link_behind(tuple(self.devices[d : d + r]), self.devices[d + r])

    def _reduction(self, d: int, r: int) -> tuple[float, float]:
        if r < 2 or not self.frame.trains:
            return 0.0, 0.0
        return self.estimator.reduction(tuple(sorted(self.devices[d : d + r])))

    def _table(self, d: int, r: int) -> int:
        """Return the place in the pool of a new table; -1 = no shares suit the microbatches."""
        line, count = self.line, self.batch.count
        crew = self._crew(tuple(self._class_of[device] for device in self._members(d, r)))
        if crew is None:
            return -1
        latency, slope, ports = self._link(d, r)
        fixed, per_byte = self._reduction(d, r)
        place = _Place(
            **crew.columns,
            freed=line.freed.ravel(),
            saved=line.saved,
            cut=line.cut,
            reduced=line.reduced,
            # Over the link behind the stage, by end point.
            moved=latency * line.messages + slope * line.cut,
            room=crew.room,
            flying=self._flying(d, r),
            passes=2.0 if self.frame.trains else 1.0,
            # Replicas with ports of their own send side by side.
            sends=count / ports - 1,
            fixed=fixed if r > 1 else 0.0,
            per_byte=per_byte if r > 1 else 0.0,
            # Sharded parameters are gathered for each pass of every round, and reduced after it.
            rounds=1.5 * count / r,
        )
        number = self.pool.add(crew.shares)
        size = _MAKING * self.pool.cells * len(crew.columns["load"])
        run(fill_table, size, (place,), self.pool.table(number), _CELLS)
        return number

    def _crew(self, classes: tuple[int, ...]) -> "_Crew | None":
        """Return what replicas of some classes bring, wherever they are; ``None`` = no shares."""
        key = (classes, self.shards, self._delayed)
        if key not in self.pool.crew_of:
            self.pool.crew_of[key] = self._made_crew(classes)
        return self.pool.crew_of[key]

    def _made_crew(self, classes: tuple[int, ...]) -> "_Crew | None":
        line, count, r = self.line, self.batch.count, len(classes)
        work = line.forward[:, -1] + line.backward[:, -1]
        speeds = tuple(1.0 / max(float(work[c]), 1e-12) for c in classes)
        shares = fair_shares(speeds, count)
        if shares is None:
            return None
        # Rounds of a step; each replica takes its share of microbatches in every one.
        turns = count / sum(shares)
        # Only the most loaded replica of each class can be the slowest.
        most = {c: max(s for s, k in zip(shares, classes, strict=True) if k == c) for c in classes}
        kinds = list(most)
        ways = self._ways(r, even=len(set(shares)) == 1)
        columns = {
            **self._columns(tuple(kinds)),
            "load": np.array([most[c] * turns for c in kinds]),
            "level": np.array([level for level, _ in ways]),
            "again": np.array([again for _, again in ways]),
            "held": self._held_by_way(r, ways),
        }
        return _Crew(shares, columns, float(self.frame.limit_bytes[kinds].min()))

    def _columns(self, kinds: tuple[int, ...]) -> dict[str, Array]:
        """Return the columns of a place by class of its devices."""
        line, chosen = self.line, list(kinds)
        key = (kinds, self._delayed)
        if key not in self.pool.columns_of:
            self.pool.columns_of[key] = {
                "forward": line.forward[chosen].ravel(),
                "backward": line.backward[chosen].ravel(),
                "barred": line.barred[chosen].ravel(),
                "rerun": line.rerun[:, chosen].ravel(),
                "weight_s": line.weight_s[chosen].ravel() * self._delayed,
            }
        return self.pool.columns_of[key]

    def _held_by_way(self, r: int, ways: Sequence[tuple[int, int]]) -> Array:
        """Return the bytes of weights and state before each point, way by way."""
        key = (r, *(level for level, _ in ways))
        if key not in self.pool.held_of:
            held = {level: self._held(SHARDS[level], r) for level, _ in ways}
            self.pool.held_of[key] = np.concatenate([held[level] for level, _ in ways])
        return self.pool.held_of[key]

    def _ways(self, r: int, *, even: bool) -> list[tuple[int, int]]:
        """Return what a stage may do to fit, the cheapest first: levels of sharding, recomputation.

        Args:
            r: Replicas.
            even: Whether replicas have equal shares, without which only optimizers are sharded.
        """
        if not self.frame.trains:
            return [(0, 0)]
        shards = self.shards and r > 1
        most = len(LEVEL_SHARES)
        # Gradients are reduced in every round, so they are divided only where little else does.
        ways = [
            (shard, again)
            for again in range(most + 1)
            for shard in (0, 1, _GRADIENTS)
            if shard == 0 or (shards and (shard == 1 or (even and again)))
        ]
        return [*ways, (_ALL, 1), (_ALL, most)] if shards and even else ways

    def _held(self, shard: Shard, replicas: int) -> Array:
        """Return the bytes of weights and state before each point, as replicas shard them."""
        if shard is Shard.NONE:
            return self.line.static
        held = self.frame.held_bytes(shard, replicas)
        if shard is Shard.PARAMETERS:
            # A stage has its weights whole while it computes.
            held = held + self.frame.weight_bytes
        return sums_before(held[self.line.order])[self.line.points]

    def _solve(self, places: Array, limits: Sequence[float]) -> "list[_Split | None]":
        """Return the best split for each limit of the bottleneck; NaN stands for the least one."""
        points, total = len(self.line.points), len(self.devices)
        shape = (total + 1, points, len(limits))
        best = np.full(math.prod(shape), np.inf)
        end = np.full(math.prod(shape), -1)
        replicas = end.copy()
        p, q, _ = self.pool.columns
        tables = _Tables(points, np.array(self.replicas), places.ravel(), p, q)
        size = points * points * int((places >= 0).sum()) * len(limits)
        given = (tables, np.array(limits, dtype=np.float64))
        run(relax, size, given, (best, end, replicas), _CELLS)
        columns = [part.reshape(shape) for part in (best, end, replicas)]
        return [
            self._walk(*(part[..., k] for part in columns))
            if np.isfinite(columns[0][0, 0, k])
            else None
            for k in range(len(limits))
        ]

    def _walk(self, best: Array, last: Array, replicas: Array) -> "_Split":
        ranges, once, beyond = [], 0.0, 0.0
        i, d, end = 0, 0, len(self.line.points) - 1
        while i < end:
            # The device is unused, as a choice at d would have been strictly better.
            if best[d, i] == best[d + 1, i]:
                d += 1
                continue
            j, r = int(last[d, i]), int(replicas[d, i])
            ranges.append((i, j, d, r))
            (p, q, _), cell = self.pool.table(self._place(d, r)), i * (end + 1) + j
            once, beyond = once + float(p[cell]), max(beyond, float(q[cell]))
            i, d = j, d + r
        return _Split(ranges, once, beyond)

    def _place(self, d: int, r: int) -> int:
        return int(self._places[d, self.replicas.index(r)])

    def _sketch(self, ranges: list[tuple[int, int, int, int]]) -> Sketch:
        line = self.line
        boundaries = [int(line.points[i]) for i, _, _, _ in ranges] + [len(line.order)]
        stage_of = cut_order(line.order, boundaries)
        stages, recompute = [], np.zeros(len(line.order), dtype=bool)
        for number, (i, j, d, r) in enumerate(ranges):
            place = self._place(d, r)
            shares, way = self.pool.shares[place], self.pool.table(place)[2]
            ways = self._ways(r, even=len(set(shares)) == 1)
            level, again = ways[int(way[i * len(line.points) + j])]
            stages.append(replicated(self._members(d, r), shares, SHARDS[level]))
            recompute |= (stage_of == number) & line.again[again]
        return Sketch(
            stage_of=stage_of,
            stages=tuple(stages),
            recompute=recompute,
            schedule=self.schedule if len(stages) > 1 else self.frame.schedules[0],
            batch=self.batch,
        )


class _Split(NamedTuple):
    """A split of the line.

    Attributes:
        ranges: Its stages: first point, end point, first device, replicas.
        once: Seconds of one microbatch through all of them.
        beyond: Most that the others add at a stage.
    """

    ranges: list[tuple[int, int, int, int]]
    once: float
    beyond: float


class _Crew(NamedTuple):
    """Replicas of some classes of devices, wherever they are.

    Attributes:
        shares: Microbatches of each in a round.
        columns: Those fields of a ``_Place`` that follow from the classes.
        room: Bytes that the fullest may use.
    """

    shares: tuple[int, ...]
    columns: dict[str, Array]
    room: float


class TablePool:
    """Figures of the ranges of one line of units on some devices, a table for each place.

    A table has a cell for every range, at ``first point * number of points + end point``: ``p``,
    seconds of one microbatch (``inf`` where the range cannot run there); ``q``, what the other
    microbatches add; ``way``, what the range does to fit, a place in ``ChainProgram._ways``.

    Attributes:
        cells: Cells of a table.
        shares: Microbatches of each replica in a round, by table.
        place_of: The table of everything that a place looks like; -1 = none.
        crew_of: What replicas of some classes bring; ``None`` = no shares suit the microbatches.
        columns_of: Columns of places, by the classes of their devices.
        held_of: Bytes that places hold, by replicas and ways to fit.
    """

    def __init__(self, points: int) -> None:
        self.cells = points * points
        self.shares: list[tuple[int, ...]] = []
        self.place_of: dict[tuple[object, ...], int] = {}
        self.crew_of: dict[tuple[object, ...], _Crew | None] = {}
        self.columns_of: dict[tuple[object, ...], dict[str, Array]] = {}
        self.held_of: dict[tuple[int, ...], Array] = {}
        self._p, self._q = np.zeros((2, 0))
        self._way = np.zeros(0, dtype=np.int8)

    @property
    def is_full(self) -> bool:
        """Whether it should make room for a new one."""
        return len(self.shares) * self.cells > MAX_POOLED

    @property
    def columns(self) -> tuple[Array, Array, Array]:
        """All tables, one after the other."""
        end = len(self.shares) * self.cells
        return self._p[:end], self._q[:end], self._way[:end]

    def clear(self) -> None:
        """Forget all tables; their memory is used again."""
        self.shares.clear()
        self.place_of.clear()

    def table(self, number: int) -> tuple[Array, Array, Array]:
        """Return one table."""
        begin, end = number * self.cells, (number + 1) * self.cells
        return self._p[begin:end], self._q[begin:end], self._way[begin:end]

    def add(self, shares: tuple[int, ...]) -> int:
        """Return the number of a new table, in which nothing can run yet."""
        number = len(self.shares)
        self.shares.append(shares)
        begin, end = number * self.cells, (number + 1) * self.cells
        if end > len(self._p):
            # All that a pool may hold at once, and a last line: memory costs nothing before it is
            # written to, while to copy tables whenever there are more takes as long as to fill
            # them.
            size = max(MAX_POOLED + MAX_POOLED // 4, end, 2 * len(self._p))
            self._p, self._q, self._way = (
                _grown(part, begin, size) for part in (self._p, self._q, self._way)
            )
        self._p[begin:end] = np.inf
        self._q[begin:end] = 0.0
        self._way[begin:end] = 0
        return number


def _grown(values: Array, used: int, size: int) -> Array:
    """Return a longer array with what is used of a shorter one."""
    result = np.empty(size, dtype=values.dtype)
    result[:used] = values[:used]
    return result


class _Place(NamedTuple):
    """What the figures of a place of the line of devices are made of; sums are by point.

    Attributes:
        forward: Seconds of the units before each point, by class of the devices here.
        backward: Likewise.
        barred: Units before each point that a class may not run.
        load: Microbatches of the most loaded replica of each class.
        level: Of each way to fit, what is sharded.
        again: Its level of recomputation.
        freed: Bytes before each point that are not kept, by level of recomputation.
        rerun: Seconds to compute that again, by level and class of the devices here.
        weight_s: Seconds of backward that the stage before does not wait for, by class.
        held: Bytes of weights and state before each point.
        saved: Bytes kept of a microbatch before each point.
        cut: Bytes that cross each point.
        reduced: Bytes that replicas reduce before each point.
        moved: Seconds over the link behind, by end point.
        room: Bytes that a device may use.
        flying: Microbatches in flight.
        passes: Times that a microbatch crosses a link.
        sends: Messages over the link behind, beyond the first.
        fixed: Seconds of a reduction.
        per_byte: Likewise, for each byte.
        rounds: Reductions where parameters are sharded.
    """

    forward: Column
    backward: Column
    barred: Column
    load: Column
    level: Column
    again: Column
    freed: Column
    rerun: Column
    weight_s: Column
    held: Column
    saved: Column
    cut: Column
    reduced: Column
    moved: Column
    room: Number
    flying: Number
    passes: Number
    sends: Number
    fixed: Number
    per_byte: Number
    rounds: Number


@kernel
def fill_table(place: _Place, p: Column, q: Column, way: Column) -> None:
    """Fill the table of a place: ranges that fit get their figures, others stay without."""
    points, kinds, ways = len(place.saved), len(place.load), len(place.level)
    for i in range(points):
        for j in range(i + 1, points):
            # A buffer for what comes in and one for the gradients of what goes out, as in the
            # estimates. Recomputing keeps the inputs of all in flight, and what it brings back of
            # the one at work.
            saved = place.saved[j] - place.saved[i]
            chosen = 0
            while chosen < ways:
                level = place.again[chosen] * points
                freed = place.freed[level + j] - place.freed[level + i]
                inputs = place.cut[i] if freed > 0 else 0.0
                use = place.flying * (saved - freed + inputs) + freed + place.cut[i] + place.cut[j]
                use += place.held[chosen * points + j] - place.held[chosen * points + i]
                if use <= place.room:
                    break
                chosen += 1
            barred = 0.0
            for kind in range(kinds):
                barred += place.barred[kind * points + j] - place.barred[kind * points + i]
            if chosen == ways or barred != 0:
                continue
            # A microbatch on the slowest class, with what is computed again, and all microbatches
            # of the most loaded replica.
            once, load = 0.0, 0.0
            # Where backward is split, nobody waits for the part that is for weights.
            for kind in range(kinds):
                ahead = place.forward[kind * points + j] - place.forward[kind * points + i]
                behind = place.backward[kind * points + j] - place.backward[kind * points + i]
                row = (place.again[chosen] * kinds + kind) * points
                both = ahead + behind + place.rerun[row + j] - place.rerun[row + i]
                weight = place.weight_s[kind * points + j] - place.weight_s[kind * points + i]
                once = max(once, both - weight, 0.0)
                load = max(load, both * place.load[kind])
            reduced = place.fixed + place.per_byte * (place.reduced[j] - place.reduced[i])
            if place.level[chosen] == _ALL:
                reduced *= place.rounds
            elif place.level[chosen] == _GRADIENTS:
                reduced *= max(1.0, place.rounds / 3)
            cell = i * points + j
            way[cell] = chosen
            p[cell] = once + place.passes * place.moved[j]
            # All microbatches less the one that ``p`` counts.
            beyond = load - once + reduced
            q[cell] = max(0.0, beyond, place.sends * place.moved[j])


class _Tables(NamedTuple):
    """All tables of a line of devices.

    Attributes:
        points: Number of points.
        replicas: Numbers of replicas.
        table_of: By device and number of replicas the place of its table; -1 = none.
        p: Seconds of a microbatch, table by table.
        q: What other microbatches add, likewise.
    """

    points: Number
    replicas: Column
    table_of: Column
    p: Column
    q: Column


@kernel
def relax(  # noqa: C901, PLR0912 (one compiled loop)
    tables: _Tables, limits: Column, best: Column, end: Column, count: Column
) -> None:
    """Fill the best value of every rest, at ``(device * points + point) * limits + limit``.

    All limits are looked at together, as reading the tables takes most of the time.

    Args:
        tables: The tables.
        limits: Most that others may add; NaN = the least such value is looked for instead.
        best: Infinite; filled.
        end: Where the first stage of a rest ends.
        count: Its replicas.
    """
    points, replicas, p, q = tables.points, tables.replicas, tables.p, tables.q
    table_of, cells, width = tables.table_of, points * points, len(limits)
    total = len(table_of) // len(replicas)
    # Nothing left costs nothing.
    for d in range(total + 1):
        for k in range(width):
            best[(d * points + points - 1) * width + k] = 0.0
    for d in range(total - 1, -1, -1):
        # Without device d; only a strictly better way uses it.
        for cell in range(points * width):
            best[d * points * width + cell] = best[(d + 1) * points * width + cell]
        for number in range(len(replicas)):
            table = table_of[d * len(replicas) + number]
            if table < 0:
                continue
            r = replicas[number]
            for i in range(points - 1):
                first = table * cells + i * points
                here = (d * points + i) * width
                for j in range(i + 1, points):
                    once = p[first + j]
                    if once == math.inf:
                        continue
                    others = q[first + j]
                    # What lies behind has the devices after these.
                    behind = ((d + r) * points + j) * width
                    for k in range(width):
                        rest = best[behind + k]
                        if limits[k] != limits[k]:  # NaN
                            value = max(others, rest)
                        elif others <= limits[k]:
                            value = once + rest
                        else:
                            continue
                        if value < best[here + k]:
                            best[here + k] = value
                            end[here + k] = j
                            count[here + k] = r
