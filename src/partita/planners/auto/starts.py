"""Where the search starts: data parallelism and splits of the chain program, by estimate.

The chain program cuts lines: orders of the units along the data, beside orders of the devices.
"""

import math
import random
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import chain, product

import numpy as np

from partita.core.columns import Array
from partita.core.plan import Shard
from partita.core.problem import Metric, Schedule
from partita.core.schedules import DEFAULT_SCHEDULE
from partita.planners.auto.chain_dp import SHORT_LINE, ChainProgram, Line, TablePool, line_of
from partita.planners.auto.estimate import Estimate, Estimator
from partita.planners.auto.frame import Batch, Frame
from partita.planners.auto.moves import Position, reschedule
from partita.planners.auto.portfolio import SHARE
from partita.planners.auto.recompute import fitted
from partita.planners.auto.sketch import Sketch, fair_shares, replicated, shape
from partita.planners.auto.units import layer_order
from partita.planners.effort import Effort
from partita.planners.lattice.orders import linear_orders

MAX_ORDERS = 3
MAX_LIKELY = 14
"""Starts that are measured."""
MAX_ALIKE = 2
"""Starts of one shape among them."""
MAX_REPLICA_COUNTS = 12
OTHER_BATCH, SHARDED = 0.15, 0.6
"""How often a split anew takes other microbatches, and may shard."""
NEARLY = 0.2
"""Share of the memory by which a plan may exceed it by estimate and still be measured."""
_CUT, _MOVE = 0.4, 0.7
DRAWN_LINES = 4
"""Lines of devices that are drawn for one that is used, the most promising of all drawn so far."""


def likely_starts(frame: Frame, estimator: Estimator, effort: Effort) -> list[Sketch]:
    """Return the most promising starts by estimate, each with the schedule that suits it.

    Those that seem to fit come first; of each shape there are ``MAX_ALIKE`` at most.
    """
    starts = chain(data_parallel_starts(frame), chain_starts(frame, estimator, effort))
    plain = _sifted(estimator, starts, effort)
    if _is_late(frame, effort):
        return plain
    return _sifted(estimator, _scheduled(estimator, plain), effort)


def _is_late(frame: Frame, effort: Effort) -> bool:
    """Return whether starts on many devices have used their share of the time."""
    is_long = len(frame.devices) > SHORT_LINE
    return is_long and not effort.is_counted and effort.used() >= SHARE


def _scheduled(estimator: Estimator, starts: Sequence[Sketch]) -> Iterator[Sketch]:
    """Yield starts as they are, and then by the other schedules."""
    yield from starts
    for sketch in starts:
        position = Position(estimator.frame, estimator, sketch, estimator.estimate(sketch).load)
        yield from reschedule(position)


def _sifted(estimator: Estimator, starts: Iterable[Sketch], effort: Effort) -> list[Sketch]:
    """Return the most promising sketches by estimate, no more than a few of each shape.

    On thousands of devices an estimate takes a while: those that come late are not looked at.
    """
    sketches, estimates = list[Sketch](), list[Estimate]()
    for sketch in starts:
        if estimates and _is_late(estimator.frame, effort):
            break
        sketches.append(sketch)
        estimates.append(estimator.estimate(sketch))
    ranked = sorted(
        range(len(sketches)),
        key=lambda i: (max(0.0, estimates[i].over_bytes), estimates[i].guess, i),
    )
    counts: Counter[tuple[object, ...]] = Counter()
    chosen = []
    for index in ranked:
        kind = shape(sketches[index])
        counts[kind] += 1
        if counts[kind] <= MAX_ALIKE:
            chosen.append(sketches[index])
    return chosen[:MAX_LIKELY]


def chain_starts(frame: Frame, estimator: Estimator, effort: Effort) -> Iterator[Sketch]:
    """Yield splits of lines of units over lines of devices, the usual ones first.

    Every combination of order, device line and split of the batch is one dynamic program, solved
    for any replicas and for the same number of them everywhere; in timed runs they stop when their
    share of the budget is used.
    """
    orders = unit_orders(frame, MAX_ORDERS)
    # Where a schedule may be chosen, one that waits least on the way back without more memory.
    schedule = Schedule.SPLIT if Schedule.SPLIT in frame.schedules else frame.schedules[0]

    def is_late() -> bool:
        return not effort.is_counted and effort.used() >= SHARE

    for number, (order, batch) in enumerate(product(orders, likely_batches(frame))):
        line = line_of(frame, estimator, order, batch)
        pool = TablePool(len(line.points))
        # Plans without shards first: those with them are the same lines, cut otherwise.
        sharding = (False, True) if frame.trains else (False,)
        for shards, devices in product(sharding, device_lines(frame, order)):
            if (number or shards) and is_late():
                return
            program = ChainProgram(
                frame=frame,
                estimator=estimator,
                line=line,
                devices=devices,
                batch=batch,
                replicas=replica_counts(frame, len(devices), batch),
                schedule=schedule,
                shards=shards,
                pool=pool,
                stop=is_late,
            )
            for sketch in (*program.sketches(), *program.even_sketches()):
                yield fitted(estimator, sketch)


@dataclass(slots=True)
class Recuts:
    """Splits along lines of devices near that of a sketch, by the chain program.

    Moves of single devices and units do not lead from one order of device types along a pipeline to
    another; cutting anew does. Lines of units are kept from one call to the next.

    Attributes:
        frame: The frame.
        estimator: Its estimator.
        most: Sketches of a call, the best by estimate.
    """

    frame: Frame
    estimator: Estimator
    most: int = 3
    _lines: dict[tuple[bytes, Batch], tuple[Line, TablePool]] = field(default_factory=dict)
    _orders: list[Array] = field(default_factory=list)
    _tried: set[tuple[object, ...]] = field(default_factory=set)
    _waiting: list[tuple[float, int, list[Sketch]]] = field(default_factory=list)

    def near(self, sketch: Sketch, rng: random.Random, below: float = math.inf) -> list[Sketch]:
        """Return splits along the most promising line of devices that was drawn and not used yet.

        A few lines are drawn near that of the sketch first. Nothing where all were used before, or
        where nothing is estimated to be below a value.
        """
        for _ in range(DRAWN_LINES):
            program = self._drawn(sketch, rng)
            if program is not None and program.guess < math.inf:
                heappush(self._waiting, (program.guess, len(self._tried), program.sketches()))
        if not self._waiting:
            return []
        found = [fitted(self.estimator, one) for one in heappop(self._waiting)[2]]
        ranked = [(self.estimator.estimate(one), one) for one in found]
        limit = self.frame.limit_bytes.max()
        ranked.sort(key=lambda pair: (pair[0].over_bytes > NEARLY * limit, pair[0].guess))
        return [one for estimate, one in ranked[: self.most] if estimate.guess < below]

    def _drawn(self, sketch: Sketch, rng: random.Random) -> ChainProgram | None:
        """Return the program of a line that is drawn near a sketch's; ``None`` = it was before."""
        if not self._orders:
            self._orders = unit_orders(self.frame, MAX_ORDERS)
        order, batch = rng.choice(self._orders), sketch.batch
        if rng.random() < OTHER_BATCH:
            batch = rng.choice(likely_batches(self.frame))
        devices = self._drawn_line(sketch, rng)
        shards = self.frame.trains and rng.random() < SHARDED
        schedule = sketch.schedule if not sketch.schedule.row.interleaves else DEFAULT_SCHEDULE
        key = (order.tobytes(), batch)
        line = tuple(map(self._kind, devices))
        if (key, line, shards, schedule) in self._tried:
            return None
        self._tried.add((key, line, shards, schedule))
        if key not in self._lines:
            sums = line_of(self.frame, self.estimator, order, batch, fine=False)
            self._lines[key] = (sums, TablePool(len(sums.points)))
        sums, pool = self._lines[key]
        if pool.is_full:
            pool.clear()
        return ChainProgram(
            frame=self.frame,
            estimator=self.estimator,
            line=sums,
            devices=devices,
            batch=batch,
            replicas=replica_counts(self.frame, len(devices), batch),
            schedule=schedule,
            shards=shards,
            pool=pool,
        )

    def _drawn_line(self, sketch: Sketch, rng: random.Random) -> list[int]:
        """Return the devices in the order of the sketch's stages, with a few runs moved."""
        used = [d for d in sketch.used if d in set(self.frame.devices)]
        spare = [d for d in self.frame.devices if d not in set(used)]
        runs = self._runs([*used, *spare])
        for _ in range(rng.randint(1, 3)):
            at = rng.randrange(len(runs))
            kind = rng.random()
            if kind < _CUT and len(runs[at]) > 1:
                cut = rng.randrange(1, len(runs[at]))
                runs[at : at + 1] = [runs[at][:cut], runs[at][cut:]]
            if kind < _MOVE:
                run = runs.pop(rng.randrange(len(runs)))
                runs.insert(rng.randint(0, len(runs)), run)
            else:
                other = rng.randrange(len(runs))
                runs[at], runs[other] = runs[other], runs[at]
        return self._in_turn([device for run in runs for device in run])

    def _kind(self, device: int) -> tuple[int, int]:
        """Return class and host: devices of one kind can take each other's places."""
        return int(self.frame.class_of[device]), self.frame.problem.cluster.devices[device].host

    def _in_turn(self, devices: Sequence[int]) -> list[int]:
        """Return a line with devices of a kind in their order, so that lines share tables."""
        own: dict[tuple[int, int], list[int]] = {}
        for device in sorted(devices, reverse=True):
            own.setdefault(self._kind(device), []).append(device)
        return [own[self._kind(device)].pop() for device in devices]

    def _runs(self, devices: Sequence[int]) -> list[list[int]]:
        """Return maximal runs of devices of one class on one host."""
        runs, kinds = list[list[int]](), [self._kind(device) for device in devices]
        for index, device in enumerate(devices):
            if index and kinds[index] == kinds[index - 1]:
                runs[-1].append(device)
            else:
                runs.append([device])
        return runs


def likely_batches(frame: Frame) -> list[Batch]:
    """Return the usual split of the batch, and those with about one and four turns a device."""
    devices = len(frame.devices)
    wanted = (4 * devices, frame.batches[0].count, devices)
    nearest = [
        min(frame.batches, key=lambda batch: abs(math.log(batch.count / count))) for count in wanted
    ]
    return list(dict.fromkeys(nearest))


def replica_counts(frame: Frame, devices: int, batch: Batch) -> list[int]:
    """Return numbers of replicas to try: small ones, divisors of the batch, powers of two."""
    if frame.problem.objective.metric is Metric.LATENCY:
        return [1]
    most = min(devices, batch.count)
    counts = [
        r
        for r in range(1, most + 1)
        if r <= 4 or batch.count % r == 0 or r == most or r & (r - 1) == 0
    ]
    return counts[:MAX_REPLICA_COUNTS]


def data_parallel_starts(frame: Frame) -> Iterator[Sketch]:
    """Yield everything on all devices, on those of each host and of each class, a replica each.

    Whole, with sharded optimizers and, where shares are equal, with all state sharded.
    """
    if frame.problem.objective.metric is Metric.LATENCY:
        return
    for devices, batch in product(_parallel_sets(frame), frame.batches):
        forward, backward = frame.seconds(batch.size)
        work = (forward + backward).sum(axis=1)[frame.class_of[list(devices)]]
        shares = fair_shares(tuple((1.0 / np.maximum(work, 1e-12)).tolist()), batch.count)
        if shares is None or not bool(frame.allowed[frame.class_of[list(devices)]].all()):
            continue
        ways = [(False, Shard.NONE)]
        if frame.trains:
            ways.append((True, Shard.NONE))
        if frame.trains:
            ways += [(False, Shard.OPTIMIZER), (True, Shard.OPTIMIZER)]
            if len(set(shares)) == 1:
                ways += [(False, Shard.PARAMETERS), (True, Shard.PARAMETERS)]
        for again, shard in ways:
            yield Sketch(
                stage_of=np.zeros(frame.num_units, dtype=np.int64),
                stages=(replicated(devices, shares, shard),),
                recompute=np.full(frame.num_units, again),
                schedule=frame.schedules[0],
                batch=batch,
            )


def _parallel_sets(frame: Frame) -> list[tuple[int, ...]]:
    """Return all devices, those of each class, and of hosts that look alike those of the first."""
    cluster, classes = frame.problem.cluster, frame.class_of.tolist()
    hosts: dict[int, list[int]] = {}
    kinds: dict[int, list[int]] = {}
    for d in frame.devices:
        hosts.setdefault(cluster.devices[d].host, []).append(d)
        kinds.setdefault(classes[d], []).append(d)
    alike: dict[tuple[object, ...], list[int]] = {}
    for members in hosts.values():
        links = [
            (float(level.bandwidth_bytes_per_s[group]), float(level.latency_s[group]))
            for level in cluster.levels
            for group in dict.fromkeys(level.group_of[members].tolist())
        ]
        alike.setdefault((*(classes[d] for d in members), *links), members)
    sets = (frame.devices, *alike.values(), *kinds.values())
    return list(dict.fromkeys(tuple(members) for members in sets))


def unit_orders(frame: Frame, count: int) -> list[Array]:
    """Return up to ``count`` distinct orders of the units along the data.

    The one by layers comes first where the graph has layers that agree with the data.
    """
    found: dict[bytes, Array] = {}
    layered = layer_order(frame.problem, frame.units)
    if layered is not None:
        found[layered.tobytes()] = layered
    forward, backward = frame.seconds(frame.batches[0].size)
    weight = (forward + backward).min(axis=0)
    cost = frame.problem.graph.tensors.bytes[frame.units.net_tensor]
    for order in linear_orders(frame.units, weight=weight, net_cost=cost, count=count):
        if len(found) >= count:
            break
        found.setdefault(order.tobytes(), order)
    return list(found.values())


def device_lines(frame: Frame, order: Array) -> list[list[int]]:
    """Return the sequences of devices that data may flow along, the most natural first.

    Host by host as they are listed, types together from fast to slow and from slow to fast, and
    for link matrices from each device to its nearest. Where rules or kinds of devices bar units
    from devices, the order of the units says which devices come when; a device may come twice.
    """
    devices = frame.devices
    runs = _allowed_runs(frame, order)
    if len(runs) > 1:
        return [[d for run in runs for d in _preferred(frame, run, devices)]]
    devices = _preferred(frame, runs[0], devices) if runs else devices
    work = (frame.forward[1] + frame.backward[1] + frame.forward[0] + frame.backward[0]).sum(axis=1)
    slow = [float(work[c]) for c in frame.class_of.tolist()]
    lines = [list(devices)]
    if len({slow[d] for d in devices}) > 1:
        lines.append(sorted(devices, key=lambda d: (slow[d], d)))
        lines.append(sorted(devices, key=lambda d: (-slow[d], d)))
    room = frame.limit_bytes[frame.class_of]
    if len({float(room[d]) for d in devices}) > 1:
        lines.append(sorted(devices, key=lambda d: (-float(room[d]), d)))
    if frame.problem.cluster.matrix is not None:
        lines.append(_nearest(frame, devices))
    return [list(line) for line in dict.fromkeys(tuple(line) for line in lines)]


def _allowed_runs(frame: Frame, order: Array) -> list[Array]:
    """Return for maximal runs of the order the devices that may run all of their units."""
    allowed = frame.allowed[frame.class_of]
    if bool(allowed.all()):
        return [np.ones(len(frame.class_of), dtype=bool)]
    runs: list[Array] = []
    for unit in order.tolist():
        here = allowed[:, unit]
        if runs and bool((runs[-1] & here).any()):
            runs[-1] = runs[-1] & here
        else:
            runs.append(here.copy())
    return runs


def _preferred(frame: Frame, run: Array, devices: Sequence[int]) -> list[int]:
    """Return the devices of a run: those that the search deals out, else any that it allows."""
    able = [d for d in devices if run[d]]
    return able or np.flatnonzero(run).tolist()


def _nearest(frame: Frame, devices: Sequence[int]) -> list[int]:
    """Return the devices, each followed by the one that takes a megabyte from it the soonest."""
    left = list(devices)
    line = [left.pop(0)]
    while left:
        links = frame.problem.cluster.links(np.full(len(left), line[-1]), np.array(left))
        with np.errstate(divide="ignore"):
            seconds = links.latency_s + 1e6 / links.bandwidth_bytes_per_s
        line.append(left.pop(int(seconds.argmin())))
    return line
