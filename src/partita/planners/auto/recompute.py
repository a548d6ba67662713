"""Units that recompute: those that bring most memory for their time, no more than needed.

What an op keeps from forward to backward and what it takes to compute it again have little to do
with one another: element-wise ops keep as much as products of matrices and take a hundredth of the
time. So units are ranked by seconds of forward per byte that they keep. The chain program chooses
among a few *levels*, the units of least price up to a share of all forward seconds; ``fitted`` lets
every stage recompute as many units, in that order, as its devices need.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from partita.core.columns import Array
from partita.core.plan import Shard, Stage
from partita.planners.auto.estimate import Estimator, StageMemory
from partita.planners.auto.sketch import Sketch

LEVEL_SHARES = (0.02, 0.1, 0.35, 1.0)
"""Shares of all forward seconds that the units of a level take; the last holds all that help."""
NEVER = len(LEVEL_SHARES) + 1
"""The level of units that keep nothing: to compute them again brings nothing."""


def levels(estimator: Estimator, size: int) -> Array:
    """Return the first level at which each unit recomputes, from 1 on."""
    price = estimator.recompute_price(size)
    forward = estimator.seconds(size)[0].mean(axis=0)
    order = np.argsort(price, kind="stable")
    before = np.cumsum(forward[order]) - forward[order]
    total = float(forward.sum()) or 1.0
    level = np.empty(len(order), dtype=np.int64)
    level[order] = 1 + np.searchsorted(np.array(LEVEL_SHARES), before / total, side="right")
    return np.where(np.isfinite(price), np.minimum(level, len(LEVEL_SHARES)), NEVER)


def fitted(
    estimator: Estimator,
    sketch: Sketch,
    *,
    reserve_bytes: Sequence[float] = (),
    kept: Array | None = None,
) -> Sketch:
    """Return a sketch whose stages recompute as little as makes them fit, by estimate.

    Where recomputing all does not do, replicas shard their optimizers, too. Stages of one device
    divide its memory by what each would take.

    Args:
        estimator: Figures of the frame.
        sketch: The sketch.
        reserve_bytes: What the devices of each stage need beyond the estimate; empty = nothing.
        kept: Whether each stage stays as it is; ``None`` = none does.
    """
    frame = estimator.frame
    if not frame.trains or not np.isfinite(frame.limit_bytes).any():
        return sketch
    memory = estimator.stage_memory(sketch)
    saved = frame.saved_bytes(sketch.batch.size)
    reserve = list(reserve_bytes) or [0.0] * len(sketch.stages)
    if not sketch.is_divided:
        memory = memory._replace(room=_rooms(estimator, sketch, memory, reserve))
        reserve = [0.0] * len(sketch.stages)
    price = estimator.recompute_price(sketch.batch.size)
    order = np.lexsort((price, sketch.stage_of))
    ends = np.searchsorted(sketch.stage_of[order], np.arange(len(sketch.stages) + 1))
    place = np.empty(len(order), dtype=np.int64)
    place[order] = np.arange(len(order)) - ends[sketch.stage_of[order]]
    inside = _read_inside(estimator, sketch, place)
    again, stages = sketch.recompute.copy(), list(sketch.stages)
    for number, stage in enumerate(sketch.stages):
        if kept is not None and kept[number]:
            continue
        units = order[ends[number] : ends[number + 1]]
        bytes_ = saved[units]
        beyond = reserve[number]
        read = _kept_by_count(inside, number, len(units))
        count = _least_count(bytes_, read, memory, number, beyond)
        for shard in _sharding(stage):
            # Optimizers are divided for next to nothing, gradients where nothing else does.
            if count == 0 or (count is not None and shard is not Shard.OPTIMIZER):
                break
            held = float(frame.held_bytes(shard, stage.num_replicas)[units].sum())
            gained = memory.static[number] - held
            count = _least_count(bytes_, read, memory, number, beyond - gained)
            stages[number] = replace(stage, shard=shard)
        if count is None:
            count = int((bytes_ > 0).sum())
        again[units] = False
        again[units[:count]] = True
    if tuple(stages) == sketch.stages and np.array_equal(again, sketch.recompute):
        return sketch
    return replace(sketch, recompute=again, stages=tuple(stages))


def _rooms(
    estimator: Estimator, sketch: Sketch, memory: StageMemory, reserve: Sequence[float]
) -> list[float]:
    """Return the bytes that each stage may use where devices run several.

    Each gets the least that it can do with, and of what is left as much as it would save by
    recomputing.
    """
    limit, class_of = estimator.frame.limit_bytes, estimator.frame.class_of
    full, least = _uses(estimator, sketch, memory)
    rooms = [np.inf] * len(sketch.stages)
    held: dict[int, list[int]] = {}
    for number, stage in enumerate(sketch.stages):
        for group in stage.devices:
            held.setdefault(group[0], []).append(number)
    for device, stages in held.items():
        room = float(limit[class_of[device]]) - max(reserve[s] for s in stages)
        spare = room - sum(least[s] for s in stages)
        wanted = sum(full[s] - least[s] for s in stages)
        for s in stages:
            share = (full[s] - least[s]) / wanted if wanted > 0 else 1 / len(stages)
            rooms[s] = min(rooms[s], least[s] + spare * share)
    return rooms


def _uses(
    estimator: Estimator, sketch: Sketch, memory: StageMemory
) -> tuple[list[float], list[float]]:
    """Return what each stage takes without recomputing, and the least that recomputing leaves."""
    saved = estimator.frame.saved_bytes(sketch.batch.size)
    total = np.bincount(sketch.stage_of, weights=saved, minlength=len(sketch.stages)).tolist()
    full, least = [], []
    for number, bytes_ in enumerate(total):
        base, flying = memory.static[number] + memory.received[number], memory.flying[number]
        full.append(base + flying * bytes_)
        least.append(min(full[-1], base + flying * memory.inputs[number] + bytes_))
    return full, least


def _sharding(stage: Stage) -> tuple[Shard, ...]:
    """Return what replicas of a stage may divide beyond what they do, the cheapest first."""
    if stage.num_replicas < 2 or stage.shard in (Shard.GRADIENTS, Shard.PARAMETERS):
        return ()
    more = (Shard.OPTIMIZER,) if stage.shard is Shard.NONE else ()
    return (*more, Shard.GRADIENTS) if len(set(stage.shares)) == 1 else more


def _read_inside(
    estimator: Estimator, sketch: Sketch, place: Array
) -> tuple[Array, Array, Array, Array]:
    """Return tensors that stay in a stage: stage, place of maker and of first reader, and bytes."""
    frame, stage_of = estimator.frame, sketch.stage_of
    _, source, _ = frame.nets
    net, reader = frame.net_pairs
    here = stage_of[source[net]] == stage_of[reader]
    first = np.full(len(source), len(place), dtype=np.int64)
    np.minimum.at(first, net[here], place[reader[here]])
    kept = np.flatnonzero(first < place[source])
    size = estimator.net_bytes(sketch.batch.size)
    return stage_of[source[kept]], place[source[kept]], first[kept], size[kept]


def _kept_by_count(inside: tuple[Array, Array, Array, Array], stage: int, count: int) -> Array:
    """Return what a stage keeps because units read it again, where the first 1, 2, ... units do.

    A tensor is kept from the count at which a reader recomputes to that at which its maker does.
    """
    of_stage, maker, reader, size = inside
    here = of_stage == stage
    change = np.zeros(count + 1)
    np.add.at(change, reader[here], size[here])
    np.add.at(change, maker[here], -size[here])
    result: Array = np.cumsum(change)[:count]
    return result


def _least_count(
    saved: Array, read: Array, memory: StageMemory, stage: int, reserve_bytes: float
) -> int | None:
    """Return the least number of units in their order that make a stage fit; ``None`` = none."""
    room, inputs = memory.room[stage] - reserve_bytes, memory.inputs[stage]
    flying, total = memory.flying[stage], float(saved.sum())
    room -= memory.static[stage] + memory.received[stage]
    if flying * total <= room:
        return 0
    freed = np.cumsum(saved)
    use = flying * (total - freed + inputs + read) + freed
    fits = np.flatnonzero(use <= room)
    return int(fits[0]) + 1 if len(fits) else None


def beyond_estimate(
    estimator: Estimator, sketch: Sketch, excess: Mapping[int, float]
) -> list[float]:
    """Return what the fullest device of each stage needs beyond the estimate, once measured.

    Args:
        estimator: Figures of the frame.
        sketch: The sketch.
        excess: What each device needs beyond its limit; negative = that much is free.
    """
    memory, count = estimator.stage_memory(sketch), len(sketch.stages)
    saved = estimator.frame.saved_bytes(sketch.batch.size)
    total = np.bincount(sketch.stage_of, weights=saved, minlength=count)
    freed = np.bincount(sketch.stage_of, weights=saved * sketch.recompute, minlength=count)
    # Of a unit it only counts whether it recomputes: those that do stand at the first place.
    at, _, _, size = _read_inside(estimator, sketch, np.where(sketch.recompute, 0, 1))
    read = np.bincount(at, weights=size, minlength=count)
    limit, class_of = estimator.frame.limit_bytes, estimator.frame.class_of
    used: dict[int, float] = {}
    for number, stage in enumerate(sketch.stages):
        inputs = memory.inputs[number]
        use = memory.static[number] + memory.received[number] + freed[number]
        again = inputs + read[number] if freed[number] > 0 else 0.0
        use += memory.flying[number] * (total[number] - freed[number] + again)
        for group in stage.devices:
            used[group[0]] = used.get(group[0], 0.0) + float(use)
    beyond = {d: float(limit[class_of[d]]) + excess[d] - use for d, use in used.items()}
    return [max(beyond[group[0]] for group in stage.devices) for stage in sketch.stages]


def refitted(estimator: Estimator, old: Sketch, new: Sketch) -> Sketch:
    """Return a neighbour whose changed stages recompute as they need to; others stay."""
    alike = new.batch == old.batch and new.schedule is old.schedule
    if alike and new.stage_of is old.stage_of and new.stages == old.stages:
        return new
    kept = None
    if alike and len(old.stages) == len(new.stages):
        moved = np.flatnonzero(new.stage_of != old.stage_of)
        kept = np.array([a == b for a, b in zip(old.stages, new.stages, strict=True)])
        kept[old.stage_of[moved]] = False
        kept[new.stage_of[moved]] = False
    return fitted(estimator, new, kept=kept)


def level_sums(estimator: Estimator, size: int, order: Array) -> tuple[Array, Array]:
    """Return by level, none first, what recomputes along an order of units, a column per place.

    Bytes that it keeps no longer, and its forward seconds by class.
    """
    level = levels(estimator, size)[order]
    saved = estimator.frame.saved_bytes(size)[order]
    forward = estimator.seconds(size)[0][:, order]
    masks = np.array([level <= number for number in range(NEVER)])
    return saved * masks, forward * masks[:, None, :]
