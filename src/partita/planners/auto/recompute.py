"""Units that recompute: those that bring most memory for their time, no more than needed.

What an op keeps from forward to backward and what it takes to compute it again have little to do
with one another: element-wise ops keep as much as products of matrices and take a hundredth of the
time. And what recomputes makes its stage keep what it reads of others, so that neighbours had
better recompute together. ``fitted`` lets every stage gain what its devices need in the least
seconds, about (``recompute_kernel``). The chain program chooses among a few *levels*: sets that are
as good for the whole graph.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property

import numpy as np

from partita.core.columns import Array
from partita.core.plan import Shard, Stage
from partita.kernels import Threshold, run
from partita.planners.auto.estimate import Estimator, StageMemory
from partita.planners.auto.recompute_kernel import least_seconds
from partita.planners.auto.sketch import Sketch

LEVEL_SHARES = (0.02, 0.1, 0.35, 1.0)
"""Shares of all forward seconds that the units of a level take; the last holds all that help."""
EFFORT = Threshold(size=30_000, total=30_000, loaded=True)
STEPS_PER_UNIT = 20
"""Size of a choice for each of its units; all together are soon worth compiling."""
_STEPS = (1, 4, 16)
"""By what a stage gains less or more, in units that it holds."""
_GAIN_SHARES = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
"""Shares of what recomputing gains at most among which levels are chosen."""
_LEVEL_FLYING = 4
"""Microbatches in flight that levels count with: about the middle of a pipeline."""


def levels(estimator: Estimator, size: int) -> Array:
    """Return whether each unit recomputes at each level, a row per level, none first.

    The sets that gain most for the seconds of their level in the whole graph, so that stages, which
    are parts of it, have few tensors that they keep for them.
    """
    found = estimator.levels.get(size)
    if found is None:
        found = estimator.levels[size] = _levels(estimator, size)
    return found


def _levels(estimator: Estimator, size: int) -> Array:
    frame = estimator.frame
    saved, forward = frame.saved_bytes(size), estimator.seconds(size)[0].mean(axis=0)
    rows = np.zeros((len(LEVEL_SHARES) + 1, frame.num_units), dtype=bool)
    total, units = float(forward.sum()), np.arange(frame.num_units)
    # Where any device holds everything, for as many microbatches as there are devices, all fits.
    most = float(frame.static_bytes.sum()) + len(frame.devices) * float(saved.sum())
    if most <= frame.limit_bytes.min() or not saved.any():
        return rows
    inside = _Inside(estimator, size, np.zeros(frame.num_units, dtype=np.int64))
    rows[-1], most = inside.least(0, units, forward, _LEVEL_FLYING, np.inf)
    for share in _GAIN_SHARES:
        again, _ = inside.least(0, units, forward, _LEVEL_FLYING, share * most)
        for level, part in enumerate(LEVEL_SHARES[:-1], 1):
            if forward[again].sum() <= part * total:
                rows[level] = again
    return rows


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
    inside = _Inside(estimator, sketch.batch.size, sketch.stage_of)
    again, stages = sketch.recompute.copy(), list(sketch.stages)
    for number, stage in enumerate(sketch.stages):
        if kept is not None and kept[number]:
            continue
        units = np.flatnonzero(sketch.stage_of == number)
        flying = memory.flying[number]
        room = memory.room[number] - reserve[number] - memory.received[number]
        bytes_ = flying * float(saved[units].sum()) - room
        again[units] = False
        ways = (stage.shard, *_sharding(stage))
        for way, shard in enumerate(ways):
            static = memory.static[number]
            if way:
                static = float(frame.held_bytes(shard, stage.num_replicas)[units].sum())
                stages[number] = replace(stage, shard=shard)
            if static + bytes_ <= 0:
                break
            # Optimizers are divided for next to nothing, gradients where nothing else does.
            if Shard.OPTIMIZER in ways[way + 1 :]:
                continue
            need = static + bytes_ + flying * memory.inputs[number]
            seconds = _slowest_seconds(estimator, sketch, number, units)
            again[units], gained = inside.least(number, units, seconds, flying, need)
            if gained >= need:
                break
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


class _Inside:
    """What units of a stage read of one another, and which of them are worth computing again."""

    def __init__(self, estimator: Estimator, size: int, stage_of: Array) -> None:
        self.frame, self.stage_of = estimator.frame, stage_of
        self.bytes, self.saved = estimator.net_bytes(size), self.frame.saved_bytes(size)

    @cached_property
    def _pairs(self) -> tuple[Array, Array, Array]:
        """Tensor, reader and stage of what stays in a stage, by tensor."""
        net, reader = self.frame.net_pairs
        stage = self.stage_of[reader]
        here = np.flatnonzero(self.stage_of[self.frame.nets[1]][net] == stage)
        return net[here], reader[here], stage[here]

    def gained(self, stage: int, units: Array, flying: int, again: Array) -> float:
        """Return the bytes that a stage gains by what recomputes."""
        nets, readers, stages = self._pairs
        kept = np.unique(nets[(stages == stage) & again[readers]])
        kept = kept[~again[self.frame.nets[1][kept]]]
        freed = max(flying - 1, 1) * float(self.saved[units][again[units]].sum())
        return freed - flying * float(self.bytes[kept].sum())

    def least(
        self, stage: int, units: Array, seconds: Array, flying: int, need: float
    ) -> tuple[Array, float]:
        """Return the units of a stage that gain some bytes in the least seconds, and what they do.

        Args:
            stage: The stage.
            units: Its units.
            seconds: To compute each of them again.
            flying: Microbatches in flight on a device of it.
            need: Bytes to gain.
        """
        nets, readers, stages = self._pairs
        here = stages == stage
        net, first = np.unique(nets[here], return_index=True)
        ends = np.append(first, np.count_nonzero(here))
        place = np.empty(len(self.saved), dtype=np.int64)
        place[units] = np.arange(len(units))
        # What is recomputed comes back for one microbatch: alone in flight it gains nothing.
        gain = max(flying - 1, 1) * self.saved[units]
        again = np.zeros(len(units), dtype=np.int64)
        inputs = [
            gain,
            seconds,
            place[self.frame.nets[1][net]],
            ends,
            place[readers[here]],
            flying * self.bytes[net],
            need if flying > 1 else np.inf,
        ]
        gained = run(least_seconds, STEPS_PER_UNIT * len(units), inputs, [again], EFFORT)
        return again == 1, float(gained)


def beyond_estimate(
    estimator: Estimator, sketch: Sketch, excess: Mapping[int, float]
) -> list[float]:
    """Return what the fullest device of each stage needs beyond the estimate, once measured.

    Args:
        estimator: Figures of the frame.
        sketch: The sketch.
        excess: What each device needs beyond its limit; negative = that much is free.
    """
    memory = estimator.stage_memory(sketch)
    limit, class_of = estimator.frame.limit_bytes, estimator.frame.class_of
    used: dict[int, float] = {}
    for number, stage in enumerate(sketch.stages):
        use = memory.static[number] + memory.received[number] + memory.brought[number]
        use += memory.flying[number] * memory.kept[number]
        for group in stage.devices:
            used[group[0]] = used.get(group[0], 0.0) + float(use)
    beyond = {d: float(limit[class_of[d]]) + excess[d] - use for d, use in used.items()}
    return [max(beyond[group[0]] for group in stage.devices) for stage in sketch.stages]


def regained(estimator: Estimator, sketch: Sketch) -> Iterator[Sketch]:
    """Yield sketches of which a stage gains less or more memory by recomputing, or none or all."""
    memory = estimator.stage_memory(sketch)
    inside = _Inside(estimator, sketch.batch.size, sketch.stage_of)
    met = {sketch.recompute.tobytes()}
    for number in range(len(sketch.stages)):
        units, flying = np.flatnonzero(sketch.stage_of == number), memory.flying[number]
        bytes_ = inside.saved[units]
        if flying < 2 or not bytes_.any():
            continue
        seconds = _slowest_seconds(estimator, sketch, number, units)
        now = inside.gained(number, units, flying, sketch.recompute)
        step = flying * float(bytes_[bytes_ > 0].mean())
        needs = [now + sign * count * step for count in _STEPS for sign in (-1, 1)]
        for need in (*needs, 0.0, np.inf):
            again = sketch.recompute.copy()
            again[units] = False
            if need > 0:
                again[units] = inside.least(number, units, seconds, flying, need)[0]
            if again.tobytes() not in met:
                met.add(again.tobytes())
                yield replace(sketch, recompute=again)


def _slowest_seconds(estimator: Estimator, sketch: Sketch, number: int, units: Array) -> Array:
    """Return the forward seconds of units on the slowest class of a stage's devices."""
    forward, class_of = estimator.seconds(sketch.batch.size)[0], estimator.frame.class_of
    classes = sorted({int(class_of[group[0]]) for group in sketch.stages[number].devices})
    return max((forward[c, units] for c in classes), key=lambda part: float(part.sum()))


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


def level_sums(estimator: Estimator, size: int, order: Array, rows: Array) -> tuple[Array, Array]:
    """Return by level, as ``levels`` has them, what recomputes along an order, a column per place.

    Bytes that it keeps no longer, and its forward seconds by class.
    """
    masks = rows[:, order]
    saved = estimator.frame.saved_bytes(size)[order]
    forward = estimator.seconds(size)[0][:, order]
    return saved * masks, forward * masks[:, None, :]
