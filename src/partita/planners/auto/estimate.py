"""What a sketch will cost, roughly and at least, without simulating it.

For stages s with forward f, backward b (seconds of a microbatch on their slowest replica) and the
longest path P through s of ``f + b + transfers`` over the stage graph, a step that flushes takes
about

    max over devices (its load + (P - its own f + b) / its stages) + reductions that no drain hides

where b is the input part alone if the schedule delays the weight part: a device with several stages
waits for one of them in the time of the others. It takes no less than the load of any device. Both
cost microseconds where a simulation costs milliseconds: the second rejects candidates, the first
orders them. On the plans that a search meets the first is within a few per cent of the simulation.
"""

from typing import NamedTuple

import numpy as np

from partita.core.columns import Array
from partita.core.program import Kind
from partita.cost.links import collective_s, transfer_s
from partita.planners.auto.frame import Frame
from partita.planners.auto.sketch import Sketch


class Estimate(NamedTuple):
    """Seconds of a step.

    Attributes:
        floor: No less.
        guess: About.
        load: Compute of each stage on its most loaded replica.
        over_bytes: By how much the fullest device exceeds its memory, about; negative = fits.
    """

    floor: float
    guess: float
    load: Array
    over_bytes: float


class Crossing(NamedTuple):
    """What a stage sends to a later one for a microbatch.

    Attributes:
        source: The stage.
        target: The later stage.
        seconds: Of the transfer.
        bytes: That are moved.
    """

    source: int
    target: int
    seconds: float
    bytes: float


class Estimator:
    """Estimates sketches of one frame; keeps what is the same for all."""

    def __init__(self, frame: Frame) -> None:
        self.frame = frame
        self._seconds: dict[int, tuple[Array, Array]] = {}
        self._net_bytes: dict[int, Array] = {}
        self._reduction: dict[tuple[int, ...], tuple[float, float]] = {}
        self._link: dict[tuple[int, int], tuple[float, float]] = {}

    def seconds(self, size: int) -> tuple[Array, Array]:
        """Return forward and backward by class and unit for a microbatch."""
        if size not in self._seconds:
            self._seconds[size] = self.frame.seconds(size)
        return self._seconds[size]

    def net_bytes(self, size: int) -> Array:
        """Return the bytes of the tensors between units for a microbatch."""
        if size not in self._net_bytes:
            self._net_bytes[size] = self.frame.net_bytes(size)
        return self._net_bytes[size]

    def reduction(self, devices: tuple[int, ...]) -> tuple[float, float]:
        """Return latency and seconds per byte of an all-reduce over devices."""
        if devices not in self._reduction:
            cluster, members = self.frame.problem.cluster, np.array(devices)
            fixed = collective_s(cluster, Kind.ALL_REDUCE, members, 0.0)
            slope = collective_s(cluster, Kind.ALL_REDUCE, members, 1e9) - fixed
            self._reduction[devices] = (fixed, slope / 1e9)
        return self._reduction[devices]

    def link(self, source: int, target: int) -> tuple[float, float]:
        """Return latency and seconds per byte between two devices."""
        pair = (source, target)
        if pair not in self._link:
            ends = np.array([source, source]), np.array([target, target])
            fixed, more = transfer_s(self.frame.problem.cluster, *ends, np.array([0.0, 1e9]))
            self._link[pair] = (float(fixed), float(more - fixed) / 1e9)
        return self._link[pair]

    def estimate(self, sketch: Sketch) -> Estimate:
        """Return the estimate of a sketch."""
        forward, backward, load, owned = self._stage_seconds(sketch)
        pairs = self._crossings(sketch)
        floor = max(f + b for f, b in zip(forward, backward, strict=True))
        if sketch.schedule.row.splits_backward:
            backward = self._input_part(sketch, backward)
        ahead, back = _paths(len(sketch.stages), pairs, forward, backward)
        through = [a + b for a, b in zip(ahead, back, strict=True)]
        drain, _ = _paths(len(sketch.stages), pairs, [0.0] * len(forward), backward, passes=1)
        per_device: dict[int, list[int]] = {}
        for number, stage in enumerate(sketch.stages):
            for group in stage.devices:
                per_device.setdefault(group[0], []).append(number)
        guess = 0.0
        for device, stages in per_device.items():
            busy = sum(owned[(device, s)] for s in stages)
            own = sum(forward[s] + backward[s] for s in stages)
            waits = max(0.0, max(through[s] for s in stages) - own)
            guess = max(guess, busy + waits / len(stages))
            floor = max(floor, busy)
        tail = max(self._reduction_s(sketch, number) - drain[number] for number in range(len(load)))
        return Estimate(
            floor, guess + max(0.0, tail), np.array(load), self._over_bytes(sketch, pairs)
        )

    def _stage_seconds(
        self, sketch: Sketch
    ) -> tuple[list[float], list[float], list[float], dict[tuple[int, int], float]]:
        """Return forward, backward and load of each stage, and the load of each (device, stage)."""
        ahead, back = self.seconds(sketch.batch.size)
        count = len(sketch.stages)
        class_of = self.frame.class_of
        classes = sorted({int(class_of[d]) for d in sketch.used})
        spent = {}
        again = sketch.recompute if sketch.recompute.any() else None
        for c in classes:
            f = np.bincount(sketch.stage_of, weights=ahead[c], minlength=count)
            b = np.bincount(sketch.stage_of, weights=back[c], minlength=count)
            if again is not None:
                b = b + np.bincount(sketch.stage_of, weights=ahead[c] * again, minlength=count)
            spent[c] = (f.tolist(), b.tolist())
        forward, backward, load = [0.0] * count, [0.0] * count, [0.0] * count
        owned: dict[tuple[int, int], float] = {}
        for number, stage in enumerate(sketch.stages):
            turns = sketch.batch.count / stage.round
            for group, share in zip(stage.devices, stage.shares, strict=True):
                f, b = (part[number] / stage.tp for part in spent[int(class_of[group[0]])])
                busy = share * turns * (f + b)
                owned[(group[0], number)] = busy
                forward[number] = max(forward[number], f)
                backward[number] = max(backward[number], b)
                load[number] = max(load[number], busy)
        return forward, backward, load, owned

    def _input_part(self, sketch: Sketch, backward: list[float]) -> list[float]:
        """Return the part of each stage's backward that its predecessors wait for."""
        count, frame = len(sketch.stages), self.frame
        whole = frame.backward[1][0] + frame.backward[0][0]
        total = np.bincount(sketch.stage_of, weights=whole, minlength=count)
        waited = np.bincount(sketch.stage_of, weights=whole * frame.input_share, minlength=count)
        share = np.divide(waited, total, out=np.full(count, 0.5), where=total > 0)
        return [seconds * float(part) for seconds, part in zip(backward, share, strict=True)]

    def _crossings(self, sketch: Sketch) -> list[Crossing]:
        """Return who sends what to whom."""
        _, source, _ = self.frame.nets
        net, reader = self.frame.net_pairs
        count = len(sketch.stages)
        before, after = sketch.stage_of[source[net]], sketch.stage_of[reader]
        cut = np.flatnonzero(before != after)
        if not len(cut):
            return []
        once = np.unique(net[cut] * np.int64(count) + after[cut])
        size = self.net_bytes(sketch.batch.size)[once // count]
        pair = sketch.stage_of[source[once // count]] * count + once % count
        distinct, row = np.unique(pair, return_inverse=True)
        total = np.bincount(row, weights=size)
        result = []
        for code, moved in zip(distinct.tolist(), total.tolist(), strict=True):
            a, b = divmod(code, count)
            ends = sketch.stages[a].devices[0][0], sketch.stages[b].devices[0][0]
            latency, slope = (0.0, 0.0) if ends[0] == ends[1] else self.link(*ends)
            result.append(Crossing(a, b, latency + slope * moved, moved))
        return result

    def _reduction_s(self, sketch: Sketch, number: int) -> float:
        stage = sketch.stages[number]
        if stage.num_replicas < 2 or not self.frame.trains:
            return 0.0
        devices = tuple(sorted(group[0] for group in stage.devices))
        latency, slope = self.reduction(devices)
        size = float(self.frame.reduced_bytes[sketch.stage_of == number].sum()) / stage.tp
        return latency + slope * size

    def _over_bytes(self, sketch: Sketch, pairs: list[Crossing]) -> float:
        """Return by how much the fullest device exceeds its limit, about.

        Weights, what is in flight by the schedule, and two buffers for everything received.
        """
        frame, count = self.frame, len(sketch.stages)
        saved_by_unit = frame.saved_bytes(sketch.batch.size)
        kept = np.where(sketch.recompute, 0.0, saved_by_unit)
        static, saved, brought = (
            np.bincount(sketch.stage_of, weights=values, minlength=count).tolist()
            for values in (frame.static_bytes, kept, saved_by_unit - kept)
        )
        received = [0.0] * count
        for pair in pairs:
            received[pair.target] += pair.bytes
        window = self._window(sketch, pairs)
        need: dict[int, float] = {}
        for number, stage in enumerate(sketch.stages):
            inputs = received[number] if brought[number] else 0.0
            for group, share in zip(stage.devices, stage.shares, strict=True):
                mine = sketch.batch.count * share // stage.round
                flying = min(mine, -(-window[number] * share // stage.round))
                use = static[number] + flying * (saved[number] + inputs)
                use += brought[number] + 2 * received[number]
                need[group[0]] = need.get(group[0], 0.0) + use / stage.tp
        limits = frame.limit_bytes[frame.class_of[list(need)]]
        return float((np.array(list(need.values())) - limits).max())

    def _window(self, sketch: Sketch, pairs: list[Crossing]) -> list[int]:
        """Return the microbatches in flight on each stage."""
        if not self.frame.trains:
            return [0] * len(sketch.stages)
        if sketch.schedule.row.fills_first:
            return [sketch.batch.count] * len(sketch.stages)
        window = [stage.num_replicas for stage in sketch.stages]
        for pair in sorted(pairs, key=lambda pair: -pair.source):
            a, b = pair.source, pair.target
            window[a] = max(window[a], sketch.stages[a].num_replicas + window[b])
        if sketch.schedule.row.splits_backward:
            return [max(window)] * len(window)
        return window


def _paths(
    count: int,
    pairs: list[Crossing],
    forward: list[float],
    backward: list[float],
    passes: int = 2,
) -> tuple[list[float], list[float]]:
    """Return for each stage the longest way before it, and from it to the end.

    A way passes every cut as often as ``passes`` says: there and back, or once.
    """
    before = [0.0] * count
    after = [f + b for f, b in zip(forward, backward, strict=True)]
    for a, b, cost, _ in sorted(pairs):
        before[b] = max(before[b], before[a] + forward[a] + backward[a] + passes * cost)
    for a, b, cost, _ in sorted(pairs, reverse=True):
        after[a] = max(after[a], forward[a] + backward[a] + passes * cost + after[b])
    return before, after
