"""Contiguous pipelines with replication over a line of units and a line of devices.

A stage is a range of the units on a range of the devices, one replica each. For every number of
units and devices that are left, the program finds

    A(i, d) = min over j > i, R   p(i, j, d, R) + A(j, d + R)       where q(i, j, d, R) <= Q

p being the seconds of one microbatch through the stage and over the link behind it, and q what the
other microbatches add there: compute on the slowest share, the link, the reduction of gradients. A
step takes about ``sum p + max q``, so the program runs for several limits Q, from the least that
any split has to none (Alpa, Zheng et al. 2022, section 5.2, does so on equal devices). A device
may stay unused. A stage that does not fit recomputes its activations; if that does not do, it is
out. What is in flight on a stage follows from the devices behind it, as in 1F1B.

Differences from PipeDream's program: fill and drain count, a device line may mix types (shares
follow their speeds) and link levels, and each boundary pays for its own link. O(D R U^2) for each
Q, on arrays; U is the number of cut points, at most ``MAX_POINTS``.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from partita.core.columns import Array
from partita.core.problem import Metric, Schedule
from partita.planners.auto.estimate import Estimator
from partita.planners.auto.frame import Batch, Frame
from partita.planners.auto.sketch import Sketch, cut_order, fair_shares, replicated
from partita.planners.auto.units import crossing_sums, cut_points, sums_before

MAX_POINTS = 192
ALIGNED_FROM = 8
SHORT_LINE = 32
LIMITS = 6
"""Bottlenecks Q that are tried between the least and none."""


class Line(NamedTuple):
    """Sums along an order of units, by place (0 to the number of units).

    Attributes:
        order: The units.
        points: Places where a cut is tried, from 0 to the end.
        forward: Seconds of the units before each point, by class.
        backward: Likewise.
        static: Bytes of weights, gradients and optimizer state before each point.
        saved: Bytes kept of a microbatch before each point.
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

    return Line(
        order=order,
        points=points,
        forward=at(forward),
        backward=at(backward),
        static=at(frame.static_bytes),
        saved=at(frame.saved_bytes(batch.size)),
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
    """

    frame: Frame
    estimator: Estimator
    line: Line
    devices: Sequence[int]
    batch: Batch
    replicas: Sequence[int]
    schedule: Schedule

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
        known: dict[tuple[object, ...], _Table | None] = {}
        tables = {}
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
        return (members, self._flying(d, r), self._link(d, r), self._reduction(d, r))

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
        after = self.devices[d + r]
        own = np.array(self.devices[d : d + r])
        links = self.frame.problem.cluster.links(own, np.full(r, after))
        latency, slope = self.estimator.link(int(own[-1]), after)
        return latency, slope, len(np.unique(links.out_port))

    def _reduction(self, d: int, r: int) -> tuple[float, float]:
        if r < 2 or not self.frame.trains:
            return 0.0, 0.0
        return self.estimator.reduction(tuple(sorted(self.devices[d : d + r])))

    def _table(self, d: int, r: int) -> "_Table | None":
        line, frame = self.line, self.frame
        classes = frame.class_of[list(self.devices[d : d + r])].tolist()
        work = line.forward[:, -1] + line.backward[:, -1]
        speeds = tuple(1.0 / max(float(work[c]), 1e-12) for c in classes)
        shares = fair_shares(speeds, self.batch.count)
        if shares is None:
            return None
        # Rounds of a step; each replica takes its share of microbatches in every one.
        turns = self.batch.count / sum(shares)
        # Only the most loaded replica of each class can be the slowest.
        most = {c: max(s for s, k in zip(shares, classes, strict=True) if k == c) for c in classes}
        ahead = {c: _ranges(line.forward[c]) for c in most}
        spent = {c: ahead[c] + _ranges(line.backward[c]) for c in most}
        # Arrays ``[first point, end point]`` in seconds: a microbatch on the slowest class, its
        # forward again, and all microbatches of the most loaded replica.
        once = np.max([spent[c] for c in most], axis=0)
        again = np.max([ahead[c] for c in most], axis=0)
        load = np.max([spent[c] * (most[c] * turns) for c in most], axis=0)
        fits, fits_again = self._fits(d, r, classes)
        latency, slope, ports = self._link(d, r)
        # Over the link behind the stage, by end point.
        moved = latency * line.messages + slope * line.cut
        fixed, per_byte = self._reduction(d, r)
        reduced = fixed + per_byte * _ranges(line.reduced) if r > 1 else 0.0
        recomputes = ~fits & fits_again
        factor = np.where(recomputes, again, 0.0)
        passes = 2.0 if frame.trains else 1.0
        p = once + factor + (passes * moved)[None, :]
        # All microbatches less the one that ``p`` counts.
        beyond = load + factor * (max(shares) * turns) - once - factor + reduced
        # Replicas with ports of their own send side by side.
        link_load = (self.batch.count / ports - 1) * moved
        q = np.maximum(beyond, link_load[None, :])
        possible = (fits | fits_again) & self._permitted(classes)
        p = np.where(possible, p, np.inf)
        return _Table(p, np.maximum(q, 0.0), shares, recomputes)

    def _fits(self, d: int, r: int, classes: Sequence[int]) -> tuple[Array, Array]:
        """Return whether a range fits in memory, and whether it does when it recomputes."""
        line = self.line
        room = float(self.frame.limit_bytes[sorted(set(classes))].min())
        flying = self._flying(d, r)
        static, saved = _ranges(line.static), _ranges(line.saved)
        # Two buffers for what comes in, as in the estimates.
        inputs = 2 * line.cut[:, None]
        fits = static + flying * saved + inputs <= room
        if not self.frame.trains:
            return fits, np.zeros_like(fits)
        # Recomputing keeps the inputs of all in flight, and everything of the one at work.
        return fits, static + saved + (flying + 2) * line.cut[:, None] <= room

    def _permitted(self, classes: Sequence[int]) -> Array:
        result: Array = np.all([_ranges(self.line.barred[c]) == 0 for c in set(classes)], axis=0)
        return result & np.triu(np.ones(result.shape, dtype=bool), 1)

    def _solve(
        self, tables: "dict[tuple[int, int], _Table]", limit: float | None
    ) -> tuple[list[tuple[int, int, int, int]], float] | None:
        """Return the ranges of the best split and its bottleneck; without a limit, the least one.

        A range is (first point, end point, first device, replicas).
        """
        points, total = len(self.line.points), len(self.devices)
        best = np.full((points, total + 1), np.inf)
        # ``best[i, d]``: units from point i on, devices from d on. Nothing left costs nothing.
        best[-1, :] = 0.0
        choice = np.full((points, total + 1, 2), -1, dtype=np.int64)
        rows = np.arange(points)
        for d in range(total - 1, -1, -1):
            # Without device d; only a strictly better way uses it.
            best[:, d] = best[:, d + 1]
            for r in self.replicas:
                table = tables.get((d, r))
                if table is None:
                    continue
                # By end point: what lies behind has the devices after these.
                rest = best[None, :, d + r]
                if limit is None:
                    value = np.where(np.isinf(table.p), np.inf, np.maximum(table.q, rest))
                else:
                    value = np.where(table.q <= limit, table.p, np.inf) + rest
                end = value.argmin(axis=1)
                least = value[rows, end]
                better = least < best[:, d]
                best[better, d] = least[better]
                choice[better, d, 0] = end[better]
                choice[better, d, 1] = r
        if not np.isfinite(best[0, 0]):
            return None
        return self._walk(tables, best, choice)

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
            bottleneck = max(bottleneck, float(tables[(d, r)].q[i, j]))
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
            stages.append(replicated(self.devices[d : d + r], table.shares))
            recompute[stage_of == number] = bool(table.recomputes[i, j])
        return Sketch(
            stage_of=stage_of,
            stages=tuple(stages),
            recompute=recompute,
            schedule=self.schedule,
            batch=self.batch,
        )


class _Table(NamedTuple):
    """Figures of the ranges (first point, end point) on some devices.

    Attributes:
        p: Seconds of one microbatch; ``inf`` where the range cannot run there.
        q: What the other microbatches add.
        shares: Microbatches of each replica in a round.
        recomputes: Whether the range fits only if it recomputes.
    """

    p: Array
    q: Array
    shares: tuple[int, ...]
    recomputes: Array


def _ranges(before: Array) -> Array:
    """Return the sum of every range (first, end) from the sums before each point."""
    result: Array = before[None, :] - before[:, None]
    return result
