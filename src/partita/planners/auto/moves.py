"""The neighbours of a sketch: what the local search tries next.

* ``shift``: the last units of a stage go to the next one, or the first ones to the one before;
* ``relocate``: one unit goes to another stage that its neighbours in the graph allow;
* ``regroup``: a device goes from a stage to another, or from the unused ones;
* ``exchange``: two stages exchange devices that differ;
* ``merge`` and ``split``: two neighbouring stages become replicas of one, or one becomes two;
* ``reshare``: replicas take other shares of a round;
* ``reshard``: they shard more or less of their state;
* ``reschedule``: another schedule; interleaving deals each device several stages;
* ``rebatch``: the same samples in another number of microbatches;
* ``recompute``: a stage, or a part of one, recomputes its activations, or no longer does.

Nothing that the problem's objective gives is changed. Every function yields valid sketches as far
as they can be told without simulating; the order is fixed.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TypeAlias

import numpy as np

from partita.core.columns import Array
from partita.core.plan import Shard, Stage
from partita.core.problem import Schedule
from partita.cost.condensed import CondensedModel
from partita.planners.auto.estimate import Estimator
from partita.planners.auto.frame import Batch, Frame
from partita.planners.auto.recompute import regained
from partita.planners.auto.sketch import Sketch, fair_shares, replicated

MAX_PAIRS = 24
"""Pairs of stages that a move between any two of them looks at, the most unequal first."""
_EVEN = (Shard.GRADIENTS, Shard.PARAMETERS)
"""What only replicas with equal shares can shard."""


@dataclass(frozen=True, slots=True)
class Position:
    """Where the search stands.

    Attributes:
        frame: The frame.
        estimator: Its estimator.
        sketch: The sketch to change.
        load: Seconds of compute of each stage on its most loaded replica.
    """

    frame: Frame
    estimator: Estimator
    sketch: Sketch
    load: Array

    @property
    def by_load(self) -> list[int]:
        """The stages, most loaded first."""
        return sorted(range(len(self.load)), key=lambda s: (-self.load[s], s))


def shift(position: Position) -> Iterator[Sketch]:
    """Move the units at a boundary across it, by one, two, four, ... of them."""
    sketch = position.sketch
    members = [sketch.members(stage) for stage in range(len(sketch.stages))]
    for before, after in pairwise(range(len(sketch.stages))):
        for source, target in ((before, after), (after, before)):
            units = members[source]
            step = 1
            # At least one unit stays; ``merge`` is the move that ends a stage.
            while step < len(units):
                moved = units[-step:] if target > source else units[:step]
                yield _moved(position, moved, target)
                step *= 2


def relocate(position: Position) -> Iterator[Sketch]:
    """Move one unit to another stage than its neighbours'."""
    q, sketch = position.frame.units, position.sketch
    stage_of = sketch.stage_of.tolist()
    last = len(sketch.stages) - 1
    heavy = set(position.by_load[: max(2, len(sketch.stages) // 4)])
    for unit, stage in enumerate(stage_of):
        before = q.pred[q.pred_ptr[unit] : q.pred_ptr[unit + 1]].tolist()
        after = q.succ[q.succ_ptr[unit] : q.succ_ptr[unit + 1]].tolist()
        # Data flow from lower to higher stages: the unit may go anywhere between its neighbours.
        low = max((stage_of[other] for other in before), default=0)
        high = min((stage_of[other] for other in after), default=last)
        for target in range(low, high + 1):
            # A light stage does not hand work to a heavy one.
            if target != stage and (stage in heavy or target not in heavy):
                yield _moved(position, np.array([unit]), target)


def _moved(position: Position, units: Array, target: int) -> Sketch:
    # Both stages recompute as they need to afterwards: ``recompute.refitted``.
    stage_of = position.sketch.stage_of.copy()
    stage_of[units] = target
    return _compact(replace(position.sketch, stage_of=stage_of))


def _compact(sketch: Sketch) -> Sketch:
    """Leave out stages without units."""
    held = np.unique(sketch.stage_of)
    if len(held) == len(sketch.stages):
        return sketch
    number = np.zeros(len(sketch.stages), dtype=np.int64)
    number[held] = np.arange(len(held))
    stages = tuple(sketch.stages[stage] for stage in held.tolist())
    return replace(sketch, stage_of=number[sketch.stage_of], stages=stages)


def regroup(position: Position) -> Iterator[Sketch]:
    """Give a device to a loaded stage: an unused one, or a replica of another stage."""
    sketch = position.sketch
    if not _is_plain(sketch):
        return
    idle = _spare(position, sketch.used)
    order = position.by_load
    for target in order[: max(2, len(order) // 2)]:
        grown = sketch.stages[target].devices
        for device in idle:
            yield from _with_groups(position, {target: [*_flat(grown), device]})
        # The least loaded gives first.
        for source in reversed(order):
            own = _flat(sketch.stages[source].devices)
            if source == target or len(own) < 2:
                continue
            for device in _distinct(position, own):
                rest = [d for d in own if d != device]
                yield from _with_groups(position, {source: rest, target: [*_flat(grown), device]})
    # Fewer replicas can be better, too: less to reduce.
    for stage in reversed(order):
        own = _flat(sketch.stages[stage].devices)
        for device in _distinct(position, own) if len(own) > 1 else []:
            yield from _with_groups(position, {stage: [d for d in own if d != device]})


def exchange(position: Position) -> Iterator[Sketch]:
    """Exchange devices that differ: between two stages, or with an unused one."""
    sketch = position.sketch
    if not _is_plain(sketch):
        return
    places = [_flat(stage.devices) for stage in sketch.stages]
    order = position.by_load
    # The most loaded with the least loaded first: there another device changes most.
    pairs = [(a, b) for index, a in enumerate(order) for b in reversed(order[index + 1 :])]
    for a, b in pairs[:MAX_PAIRS]:
        for first in _distinct(position, places[a]):
            for second in _distinct(position, places[b]):
                if _kind(position, first) != _kind(position, second):
                    yield from _with_groups(
                        position,
                        {
                            a: [second if d == first else d for d in places[a]],
                            b: [first if d == second else d for d in places[b]],
                        },
                    )
        yield from _with_groups(position, {a: places[b], b: places[a]})
    for device in _spare(position, sketch.used):
        for stage in order[:MAX_PAIRS]:
            for own in _distinct(position, places[stage]):
                if _kind(position, own) != _kind(position, device):
                    swapped = [device if d == own else d for d in places[stage]]
                    yield from _with_groups(position, {stage: swapped})


def _is_plain(sketch: Sketch) -> bool:
    """Return whether every device runs one stage, alone, without degrees that moves would lose."""
    return (
        sketch.is_divided
        and all(stage.ranks == 1 for stage in sketch.stages)
        and CondensedModel.covers_plan(sketch.stages, sketch.schedule)
    )


def _flat(devices: tuple[tuple[int, ...], ...]) -> list[int]:
    return [device for group in devices for device in group]


def _kind(position: Position, device: int) -> tuple[int, int]:
    """Return what tells devices apart: their class and host."""
    return int(position.frame.class_of[device]), position.frame.problem.cluster.devices[device].host


def _distinct(position: Position, devices: Sequence[int]) -> list[int]:
    """Return one device of each kind, the last of them."""
    # Devices of one class on one host are interchangeable: one neighbour stands for all.
    return sorted({_kind(position, device): device for device in devices}.values())


def _spare(position: Position, used: Sequence[int]) -> list[int]:
    """Return an unused device of each kind."""
    taken = set(used)
    return _distinct(position, [d for d in position.frame.devices if d not in taken])


def _with_groups(position: Position, groups: dict[int, list[int]]) -> Iterator[Sketch]:
    """Yield the sketch with other devices on some stages, where shares can be found for them."""
    stages = list(position.sketch.stages)
    for number, devices in groups.items():
        units, shard = position.sketch.members(number), stages[number].shard
        stage = _stage(position, devices, units, position.sketch.batch, shard)
        if stage is None:
            return
        stages[number] = stage
    yield replace(position.sketch, stages=tuple(stages))


def _stage(
    position: Position,
    devices: Sequence[int],
    units: Array,
    batch: Batch,
    shard: Shard = Shard.NONE,
) -> Stage | None:
    """Return a stage whose shares follow the speeds of its devices; ``None`` if it cannot be.

    Replicas that shard more than their optimizers take equal shares.
    """
    classes = position.frame.class_of[list(devices)].tolist()
    if not bool(position.frame.allowed[classes][:, units].all()):
        return None
    forward, backward = position.estimator.seconds(batch.size)
    spent = {c: float((forward[c, units] + backward[c, units]).sum()) for c in set(classes)}
    speeds = tuple(1.0 / max(spent[c], 1e-12) for c in classes)
    # Only ratios matter: any equal speeds are one entry in the cache of ``fair_shares``.
    if len(set(speeds)) == 1:
        speeds = (1.0,) * len(speeds)
    if shard in _EVEN:
        speeds = (1.0,) * len(speeds)
    shares = fair_shares(speeds, batch.count)
    if shares is None or (shard in _EVEN and len(set(shares)) > 1):
        return None
    return replicated(devices, shares, shard)


def merge(position: Position) -> Iterator[Sketch]:
    """Make one stage of two neighbours, on the devices of both, of one, or of the other."""
    sketch = position.sketch
    if not _is_plain(sketch):
        return
    for a, b in pairwise(range(len(sketch.stages))):
        # Stages after the first of the two move up by one.
        stage_of = np.where(sketch.stage_of > a, sketch.stage_of - 1, sketch.stage_of)
        units = np.flatnonzero(stage_of == a)
        both = [_flat(sketch.stages[a].devices), _flat(sketch.stages[b].devices)]
        # Of the two, what shards more fits better.
        shard = max(sketch.stages[a].shard, sketch.stages[b].shard, key=list(Shard).index)
        for devices in (both[0] + both[1], *both):
            stage = _stage(position, devices, units, sketch.batch, shard)
            if stage is not None:
                stages = (*sketch.stages[:a], stage, *sketch.stages[b + 1 :])
                yield replace(sketch, stage_of=stage_of, stages=stages)


def split(position: Position) -> Iterator[Sketch]:
    """Make two stages of one: its devices divided, or an unused one added."""
    sketch = position.sketch
    if not _is_plain(sketch):
        return
    for number in position.by_load[:MAX_PAIRS]:
        own = _flat(sketch.stages[number].devices)
        middle = len(own) // 2
        ways = [(own[:middle], own[middle:])] if middle else []
        for device in _spare(position, sketch.used):
            ways += [(own, [device]), ([device], own)]
        for first, second in ways:
            yield from _split(position, number, first, second)


def _split(
    position: Position, number: int, first: Sequence[int], second: Sequence[int]
) -> Iterator[Sketch]:
    """Cut a stage so that both parts carry work as their devices can, and one unit beside."""
    sketch = position.sketch
    units = sketch.members(number)
    forward, backward = position.estimator.seconds(sketch.batch.size)
    spent = (forward + backward)[:, units]
    power = [
        sum(1.0 / max(float(spent[c].sum()), 1e-12) for c in position.frame.class_of[list(part)])
        for part in (first, second)
    ]
    # Cut where the work before is the share of the first part's speed.
    until = np.cumsum(spent.mean(axis=0))
    at = int(np.searchsorted(until, until[-1] * power[0] / sum(power)))
    for cut in dict.fromkeys((at, at + 1)):
        if not 0 < cut < len(units):
            continue
        parts = [
            _stage(position, part, chosen, sketch.batch, sketch.stages[number].shard)
            for part, chosen in ((first, units[:cut]), (second, units[cut:]))
        ]
        if parts[0] is None or parts[1] is None:
            continue
        stage_of = np.where(sketch.stage_of > number, sketch.stage_of + 1, sketch.stage_of)
        stage_of[units[cut:]] = number + 1
        before, after = sketch.stages[:number], sketch.stages[number + 1 :]
        yield replace(sketch, stage_of=stage_of, stages=(*before, parts[0], parts[1], *after))


def reshare(position: Position) -> Iterator[Sketch]:
    """Let replicas of a stage take other shares."""
    sketch = position.sketch
    for number, stage in enumerate(sketch.stages):
        if stage.num_replicas < 2 or stage.shard in _EVEN:
            continue
        for shares in _other_shares(stage.shares, sketch.batch.count):
            stages = list(sketch.stages)
            stages[number] = replace(stage, shares=shares)
            yield replace(sketch, stages=tuple(stages))


def _other_shares(shares: tuple[int, ...], count: int) -> Iterator[tuple[int, ...]]:
    """Yield equal shares, and those in which one replica gives a microbatch to another."""
    size = len(shares)
    if count % size == 0 and len(set(shares)) > 1:
        yield (1,) * size
    # Longer rounds have finer shares; a step must be a whole number of rounds.
    for times in (1, 2, 4):
        whole = [share * times for share in shares]
        if count % sum(whole):
            continue
        # Thousands of replicas with a share of one each would make millions of pairs for nothing.
        for giver in (replica for replica in range(size) if whole[replica] > 1):
            for taker in range(size):
                if giver != taker:
                    other = list(whole)
                    other[giver] -= 1
                    other[taker] += 1
                    yield tuple(other)


def reschedule(position: Position) -> Iterator[Sketch]:
    """Run by another schedule; interleaved, every device takes two or more stages in turn."""
    sketch, frame = position.sketch, position.frame
    if len(sketch.stages) < 2:
        return
    for schedule in frame.schedules:
        if schedule.row.interleaves:
            yield from _interleaved(position)
        elif schedule.row.recomputes_early and not sketch.recompute.any():
            continue
        elif schedule is not sketch.schedule:
            yield replace(sketch, schedule=schedule)


def _interleaved(position: Position) -> Iterator[Sketch]:
    """Deal the units in turns over the devices of a pipeline whose stages have equal replicas."""
    sketch = position.sketch
    ring = len(sketch.stages)
    same = len({stage.num_replicas for stage in sketch.stages}) == 1
    even = all(set(stage.shares) == {1} for stage in sketch.stages)
    if ring < 2 or not (same and even and _is_plain(sketch)):
        return
    # Units along the pipeline; each stage gets work by the speed of its device, once a turn.
    order = np.lexsort((np.arange(position.frame.num_units), sketch.stage_of))
    forward, backward = position.estimator.seconds(sketch.batch.size)
    classes = [int(position.frame.class_of[stage.devices[0][0]]) for stage in sketch.stages]
    spent = (forward + backward)[classes]
    power = 1.0 / np.maximum(spent.sum(axis=1), 1e-12)
    until = np.cumsum(spent.mean(axis=0)[order])
    for turns in (2, 3, 4):
        wanted = np.cumsum(np.tile(power, turns))
        cut = np.searchsorted(until, until[-1] * wanted[:-1] / wanted[-1])
        # Too few units for a stage each: more turns would not do either.
        bounds = np.concatenate([[0], np.maximum(cut, 1), [len(order)]])
        if bool((np.diff(bounds) < 1).any()):
            return
        stage_of = np.empty(len(order), dtype=np.int64)
        stage_of[order] = np.repeat(np.arange(ring * turns), np.diff(bounds))
        dealt = replace(sketch, stage_of=stage_of, stages=sketch.stages * turns)
        for schedule in (Schedule.INTERLEAVED, Schedule.ZERO_BUBBLE):
            if schedule in position.frame.schedules:
                yield replace(dealt, schedule=schedule)


def rebatch(position: Position) -> Iterator[Sketch]:
    """Split the samples into another number of microbatches."""
    sketch, choices = position.sketch, position.frame.batches
    counts = sorted(choices, key=lambda batch: batch.count)
    here = next((i for i, batch in enumerate(counts) if batch == sketch.batch), None)
    if here is None:
        return
    for batch in counts[max(0, here - 2) : here + 3]:
        if batch != sketch.batch:
            yield from _rebatched(position, batch)


def _rebatched(position: Position, batch: Batch) -> Iterator[Sketch]:
    stages: list[Stage] = []
    for number, stage in enumerate(position.sketch.stages):
        # Shares hold for any number of whole rounds; else they are found anew.
        if batch.count % stage.round == 0:
            stages.append(stage)
            continue
        if stage.ranks > 1:
            return
        units = position.sketch.members(number)
        fair = _stage(position, _flat(stage.devices), units, batch, stage.shard)
        if fair is None:
            return
        stages.append(fair)
    yield replace(position.sketch, stages=tuple(stages), batch=batch)


def recompute(position: Position) -> Iterator[Sketch]:
    """Let units of a stage, or all of them, recompute or no longer do."""
    sketch = position.sketch
    if not position.frame.trains:
        return
    if sketch.recompute.any():
        yield replace(sketch, recompute=np.zeros(len(sketch.recompute), dtype=bool))
    helps = position.frame.saved_bytes(sketch.batch.size) > 0
    if not sketch.recompute[helps].all():
        yield replace(sketch, recompute=helps)
    yield from regained(position.estimator, sketch)


def reshard(position: Position) -> Iterator[Sketch]:
    """Let the replicas of a stage, or of all, shard more or less of their state."""
    sketch = position.sketch
    if not position.frame.trains:
        return
    several = [number for number, stage in enumerate(sketch.stages) if stage.num_replicas > 1]
    for shard in Shard:
        for chosen in (several, *([number] for number in several if len(several) > 1)):
            stages = list(sketch.stages)
            for number in chosen:
                even = len(set(stages[number].shares)) == 1
                if even or shard not in _EVEN:
                    stages[number] = replace(stages[number], shard=shard)
            if tuple(stages) != sketch.stages:
                yield replace(sketch, stages=tuple(stages))


Move: TypeAlias = Callable[[Position], Iterator[Sketch]]

CHEAP: Sequence[Sequence[Move]] = ((shift, recompute), (relocate,))
"""Groups of moves that leave the stages as they are: such a plan is measured as fast as guessed."""
NEIGHBOURHOODS: Sequence[Sequence[Move]] = (
    CHEAP[0],
    (reshard, reshare, reschedule, rebatch, merge, split, regroup, exchange),
    CHEAP[1],
)
"""The moves, in groups: a group is tried where those before it no longer help."""
