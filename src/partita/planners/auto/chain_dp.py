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
from collections.abc import Sequence
from dataclasses import dataclass, field
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
SHORT_LINE = 32
LIMITS = 6
"""Bottlenecks Q that are tried between the least and none."""
SHARDS = (Shard.NONE, Shard.OPTIMIZER, Shard.GRADIENTS, Shard.PARAMETERS)
"""What stages shard."""
_GRADIENTS, _ALL = 2, 3
_CELLS = Threshold(size=1_000_000, total=2_000_000, loaded=True)
"""When tables and splits are compiled, in cells that are looked at; a cell of a table takes about
as long to make as eight to look at."""
_MAKING = 8


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
        level_of: The level at which each unit recomputes.
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
    level_of: Array
    reduced: Array
    barred: Array
    cut: Array
    messages: Array


def line_of(frame: Frame, estimator: Estimator, order: Array, batch: Batch) -> Line:
    """Return the sums along an order for microbatches of a size."""
    forward, backward = estimator.seconds(batch.size)
    cut, messages = _cuts(frame, order, estimator.net_bytes(batch.size))
    whole = sums_before((forward + backward).mean(axis=0)[order])
    points = cut_points(whole, cut, min(MAX_POINTS, max(96, 4 * len(frame.devices))))

    def at(values: Array) -> Array:
        return sums_before(values[..., order])[..., points]

    freed, rerun = level_sums(estimator, batch.size, order)
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
        level_of=levels(estimator, batch.size),
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
        known: Tables of places, which other lines of devices over the same units may share.
    """

    frame: Frame
    estimator: Estimator
    line: Line
    devices: Sequence[int]
    batch: Batch
    replicas: Sequence[int]
    schedule: Schedule
    shards: bool = True
    known: "dict[tuple[object, ...], _Table | None]" = field(default_factory=dict)

    def sketches(self) -> list[Sketch]:
        """Return the splits for several bottlenecks, without repeats."""
        tables = self._tables
        # The range of limits: the least bottleneck of any split, and that of the split which is
        # fastest without a limit. Limits outside of it change nothing.
        least = self._solve(tables, None)
        if least is None:
            return []
        limits = [np.inf]
        loosest = self._solve(tables, np.inf)
        wants_latency = self.frame.problem.objective.metric is Metric.LATENCY
        if not wants_latency and loosest is not None and loosest[1] > least[1] > 0:
            limits += np.geomspace(loosest[1], least[1], LIMITS).tolist()[1:-1]
        limits.append(least[1])
        found: dict[tuple[object, ...], Sketch] = {}
        for limit in limits:
            # Widened, so that rounding does not shut out the split that gave the limit.
            split = self._solve(tables, limit * (1 + 1e-12))
            if split is not None:
                sketch = self._sketch(tables, split[0])
                found.setdefault(sketch.key, sketch)
        return list(found.values())

    def even_sketches(self) -> list[Sketch]:
        """Return for each number of replicas the split into stages that all have so many."""
        found = []
        for count in self.replicas:
            tables = {key: table for key, table in self._tables.items() if key[1] == count}
            split = self._solve(tables, None)
            if split is not None:
                found.append(self._sketch(tables, split[0]))
        return found

    @cached_property
    def _tables(self) -> dict[tuple[int, int], "_Table"]:
        """The table of each (first device, replicas)."""
        # Places that look alike (classes, microbatches in flight, links) share one table.
        known, tables = self.known, {}
        total = len(self.devices)
        for d in range(total):
            for r in self.replicas:
                if not self._is_place(d, r):
                    continue
                key = self._key(d, r)
                if key not in known:
                    known[key] = self._table(d, r)
                table = known[key]
                if table is not None:
                    tables[(d, r)] = table
        return tables

    def _is_place(self, d: int, r: int) -> bool:
        """Return whether a stage may begin at a device: on long lines, large ones only in step."""
        total = len(self.devices)
        in_step = r < ALIGNED_FROM or total <= SHORT_LINE or d % r == 0 or (total - d) % r == 0
        return in_step and d + r <= total and len(set(self.devices[d : d + r])) == r

    def _key(self, d: int, r: int) -> tuple[object, ...]:
        members = tuple(int(c) for c in self.frame.class_of[list(self.devices[d : d + r])])
        shards = self.shards and r > 1
        splits = self.schedule.row.splits_backward
        link, reduction = self._link(d, r), self._reduction(d, r)
        return (members, self._flying(d, r), link, reduction, shards, splits)

    def _flying(self, d: int, r: int) -> int:
        """Return the microbatches in flight on a replica."""
        most = -(-self.batch.count // r)
        if self.schedule.row.fills_first:
            return most
        return min(most, -(-(len(self.devices) - d) // r))

    def _link(self, d: int, r: int) -> tuple[float, float, int]:
        """Return latency, seconds per byte and number of ports of the link behind a stage."""
        if d + r >= len(self.devices):
            return 0.0, 0.0, 1
        return self.estimator.link_behind(tuple(self.devices[d : d + r]), self.devices[d + r])

    def _reduction(self, d: int, r: int) -> tuple[float, float]:
        if r < 2 or not self.frame.trains:
            return 0.0, 0.0
        return self.estimator.reduction(tuple(sorted(self.devices[d : d + r])))

    def _table(self, d: int, r: int) -> "_Table | None":
        line, frame, count = self.line, self.frame, self.batch.count
        classes = frame.class_of[list(self.devices[d : d + r])].tolist()
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
        latency, slope, ports = self._link(d, r)
        fixed, per_byte = self._reduction(d, r)
        place = _Place(
            forward=line.forward[kinds].ravel(),
            backward=line.backward[kinds].ravel(),
            barred=line.barred[kinds].ravel(),
            load=np.array([most[c] * turns for c in kinds]),
            level=np.array([level for level, _ in ways]),
            again=np.array([again for _, again in ways]),
            freed=line.freed.ravel(),
            rerun=line.rerun[:, kinds].ravel(),
            weight_s=line.weight_s[kinds].ravel() * self.schedule.row.splits_backward,
            held=np.concatenate([self._held(SHARDS[level], r) for level, _ in ways]),
            saved=line.saved,
            cut=line.cut,
            reduced=line.reduced,
            # Over the link behind the stage, by end point.
            moved=latency * line.messages + slope * line.cut,
            room=float(frame.limit_bytes[kinds].min()),
            flying=self._flying(d, r),
            passes=2.0 if frame.trains else 1.0,
            # Replicas with ports of their own send side by side.
            sends=count / ports - 1,
            fixed=fixed if r > 1 else 0.0,
            per_byte=per_byte if r > 1 else 0.0,
            # Sharded parameters are gathered for each pass of every round, and reduced after it.
            rounds=1.5 * count / r,
        )
        cells = len(line.points) ** 2
        made = _Table(np.full(cells, np.inf), np.zeros(cells), shares, np.zeros(cells, np.int64))
        size = _MAKING * cells * len(kinds)
        run(fill_table, size, (place,), (made.p, made.q, made.way), _CELLS)
        return made

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

    def _solve(
        self, tables: "dict[tuple[int, int], _Table]", limit: float | None
    ) -> tuple[list[tuple[int, int, int, int]], float] | None:
        """Return the ranges of the best split and its bottleneck; without a limit, the least one.

        A range is (first point, end point, first device, replicas).
        """
        points, total = len(self.line.points), len(self.devices)
        p, q, place_of = self._stacked
        table_of = np.full((total, len(self.replicas)), -1)
        for number, r in enumerate(self.replicas):
            for d in range(total):
                if (d, r) in tables:
                    table_of[d, number] = place_of[d, r]
        best = np.full(points * (total + 1), np.inf)
        end = np.full(points * (total + 1), -1)
        replicas = end.copy()
        stacked = _Tables(points, np.array(self.replicas), table_of.ravel(), p, q)
        size = points * points * int((table_of >= 0).sum())
        given = (stacked, np.nan if limit is None else limit)
        run(relax, size, given, (best, end, replicas), _CELLS)
        if not np.isfinite(best[0]):
            return None
        shape = (points, total + 1)
        choice = np.stack([end, replicas], axis=1).reshape(*shape, 2)
        return self._walk(tables, best.reshape(shape), choice)

    @cached_property
    def _stacked(self) -> tuple[Array, Array, dict[tuple[int, int], int]]:
        """Seconds of all tables in one column each, and the place of each table in it."""
        unlike = {id(table): table for table in self._tables.values()}
        rank = {key: number for number, key in enumerate(unlike)}
        columns = [np.concatenate([np.zeros(0), *(t[k] for t in unlike.values())]) for k in (0, 1)]
        places = {key: rank[id(table)] for key, table in self._tables.items()}
        return columns[0], columns[1], places

    def _walk(
        self, tables: "dict[tuple[int, int], _Table]", best: Array, choice: Array
    ) -> tuple[list[tuple[int, int, int, int]], float]:
        ranges, bottleneck = [], 0.0
        i, d, end = 0, 0, len(self.line.points) - 1
        while i < end:
            # The device is unused, as a choice at d would have been strictly better.
            if best[i, d] == best[i, d + 1]:
                d += 1
                continue
            j, r = choice[i, d].tolist()
            ranges.append((i, j, d, r))
            bottleneck = max(bottleneck, float(tables[(d, r)].q[i * (end + 1) + j]))
            i, d = j, d + r
        return ranges, bottleneck

    def _sketch(
        self, tables: "dict[tuple[int, int], _Table]", ranges: list[tuple[int, int, int, int]]
    ) -> Sketch:
        line = self.line
        boundaries = [int(line.points[i]) for i, _, _, _ in ranges] + [len(line.order)]
        stage_of = cut_order(line.order, boundaries)
        stages, recompute = [], np.zeros(len(line.order), dtype=bool)
        for number, (i, j, d, r) in enumerate(ranges):
            table = tables[(d, r)]
            ways = self._ways(r, even=len(set(table.shares)) == 1)
            level, again = ways[int(table.way[i * len(line.points) + j])]
            stages.append(replicated(self.devices[d : d + r], table.shares, SHARDS[level]))
            recompute |= (stage_of == number) & (line.level_of <= again)
        return Sketch(
            stage_of=stage_of,
            stages=tuple(stages),
            recompute=recompute,
            schedule=self.schedule if len(stages) > 1 else self.frame.schedules[0],
            batch=self.batch,
        )


class _Table(NamedTuple):
    """Figures of the ranges on some devices, at ``first point * number of points + end point``.

    Attributes:
        p: Seconds of one microbatch; ``inf`` where the range cannot run there.
        q: What the other microbatches add.
        shares: Microbatches of each replica in a round.
        way: What the range does to fit, a place in ``ChainProgram._ways``.
    """

    p: Array
    q: Array
    shares: tuple[int, ...]
    way: Array


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
                once = max(once, both - weight)
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
def relax(tables: _Tables, limit: Number, best: Column, end: Column, count: Column) -> None:
    """Fill the best value of every rest, at ``point * (devices + 1) + device``.

    Args:
        tables: The tables.
        limit: Most that others may add; NaN = the least such value is looked for instead.
        best: Infinite; filled.
        end: Where the first stage of a rest ends.
        count: Its replicas.
    """
    points, replicas, p, q = tables.points, tables.replicas, tables.p, tables.q
    table_of, cells = tables.table_of, points * points
    total = len(table_of) // len(replicas)
    width = total + 1
    # Nothing left costs nothing.
    for d in range(width):
        best[(points - 1) * width + d] = 0.0
    for d in range(total - 1, -1, -1):
        # Without device d; only a strictly better way uses it.
        for i in range(points):
            best[i * width + d] = best[i * width + d + 1]
        for number in range(len(replicas)):
            table = table_of[d * len(replicas) + number]
            if table < 0:
                continue
            r = replicas[number]
            for i in range(points - 1):
                least, last = math.inf, -1
                first = table * cells + i * points
                for j in range(i + 1, points):
                    # What lies behind has the devices after these.
                    rest = best[j * width + d + r]
                    if limit != limit:  # noqa: PLR0124 (NaN)
                        value = max(q[first + j], rest) if p[first + j] < math.inf else math.inf
                    elif q[first + j] <= limit:
                        value = p[first + j] + rest
                    else:
                        continue
                    if value < least:
                        least, last = value, j
                if least < best[i * width + d]:
                    best[i * width + d] = least
                    end[i * width + d] = last
                    count[i * width + d] = r
