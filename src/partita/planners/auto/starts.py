"""Where the search starts: data parallelism and splits of the chain program, by estimate."""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any

import numpy as np

from partita.core.plan import Shard
from partita.core.problem import Metric
from partita.planners.auto.chain_dp import ChainProgram, line_of
from partita.planners.auto.estimate import Estimator
from partita.planners.auto.frame import Batch, Frame
from partita.planners.auto.lines import device_lines, unit_orders
from partita.planners.auto.moves import Position, reschedule
from partita.planners.auto.portfolio import SHARE
from partita.planners.auto.sketch import Sketch, fair_shares, replicated, shape
from partita.planners.effort import Effort

MAX_ORDERS = 3
MAX_LIKELY = 14
"""Starts that are measured."""
MAX_ALIKE = 2
"""Starts of one shape among them."""
MAX_REPLICA_COUNTS = 12


def likely_starts(frame: Frame, estimator: Estimator, effort: Effort) -> list[Sketch]:
    """Return the most promising starts by estimate, each with the schedule that suits it.

    Those that seem to fit come first; of each shape there are ``MAX_ALIKE`` at most.
    """
    plain = _sifted(
        estimator, [*data_parallel_starts(frame), *chain_starts(frame, estimator, effort)]
    )
    scheduled: list[Sketch] = []
    for sketch in plain:
        position = Position(frame, estimator, sketch, estimator.estimate(sketch).load)
        scheduled += [sketch, *reschedule(position)]
    return _sifted(estimator, scheduled)


def _sifted(estimator: Estimator, sketches: Sequence[Sketch]) -> list[Sketch]:
    """Return the most promising sketches by estimate, no more than a few of each shape."""
    estimates = [estimator.estimate(sketch) for sketch in sketches]
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
    for number, (order, batch) in enumerate(product(orders, likely_batches(frame))):
        line = line_of(frame, estimator, order, batch)
        known: dict[tuple[object, ...], Any] = {}
        # Plans without shards first: those with them are the same lines, cut otherwise.
        sharding = (False, True) if frame.trains else (False,)
        for shards, devices in product(sharding, device_lines(frame, order)):
            if (number or shards) and not effort.is_counted and effort.used() >= SHARE:
                return
            program = ChainProgram(
                frame=frame,
                estimator=estimator,
                line=line,
                devices=devices,
                batch=batch,
                replicas=replica_counts(frame, len(devices), batch),
                schedule=frame.schedules[0],
                shards=shards,
                known=known,
            )
            yield from program.sketches()
            yield from program.even_sketches()


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
    cluster = frame.problem.cluster
    sets: dict[tuple[int, ...], None] = {tuple(frame.devices): None}
    for of in ([device.host for device in cluster.devices], frame.class_of.tolist()):
        for value in dict.fromkeys(of[d] for d in frame.devices):
            sets[tuple(d for d in frame.devices if of[d] == value)] = None
    for devices, batch in product(sets, frame.batches):
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
