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

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from partita.core.cluster import Cluster, Level
from partita.core.columns import Array
from partita.core.graph import DeviceKind
from partita.core.plan import Shard, Stage
from partita.core.program import Kind
from partita.cost.condensed import MAX_DEVICES, CondensedModel
from partita.cost.condensed_kernel import Runs
from partita.cost.links import collective_s, transfer_s
from partita.errors import InvalidInputError
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


class StageMemory(NamedTuple):
    """What the memory of a stage consists of, on the device with least room for it.

    Attributes:
        room: Memory that a plan may use there.
        static: Bytes all the time.
        inputs: Bytes of a microbatch that come from earlier stages.
        received: The same with the gradients that come from later ones.
        flying: Microbatches in flight.
        kept: Bytes of a microbatch from forward to backward, as the sketch recomputes.
        brought: Bytes that recomputing brings back.
    """

    room: list[float]
    static: list[float]
    inputs: list[float]
    received: list[float]
    flying: list[int]
    kept: list[float]
    brought: list[float]


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


class _Figures(NamedTuple):
    """What a sketch amounts to, by stage.

    Attributes:
        seconds: Forward and backward, with recomputation, of a microbatch, by class.
        input_share: Share of backward that computes input gradients.
        pairs: What stages send to one another.
        static: Bytes all the time.
        kept: Bytes of a microbatch from forward to backward.
        brought: Bytes that recomputing brings back.
        inputs: Bytes of inputs that are kept because of it.
        reduced: Bytes that replicas reduce.
        gathered: Bytes of the parameters that those which divide them gather.
    """

    seconds: list[tuple[list[float], list[float]]]
    input_share: list[float]
    pairs: list[Crossing]
    static: list[float]
    kept: list[float]
    brought: list[float]
    inputs: list[float]
    reduced: list[float]
    gathered: list[float]


class Estimator:
    """Estimates sketches of one frame; keeps what is the same for all."""

    def __init__(self, frame: Frame, model: CondensedModel | None = None) -> None:
        self.frame = frame
        self.model = model or CondensedModel(frame.problem, frame.units.node_of, frame.num_units)
        self._seconds: dict[int, tuple[Array, Array]] = {}
        self._net_bytes: dict[int, Array] = {}
        self._reduction: dict[tuple[int, ...], tuple[float, float]] = {}
        self._link: dict[tuple[int, int], tuple[float, float]] = {}
        self._reduction_alike: dict[tuple[object, ...], tuple[float, float]] = {}
        # For each level the group of each device, and a number for groups of the same figures.
        self._groups = [_grouped(level) for level in frame.problem.cluster.levels]
        # Devices that neither costs nor memory nor links tell apart have one number.
        self.kind_of = _kinds(frame)
        self._lies: dict[tuple[int, ...], tuple[object, ...]] = {}
        self._ports: dict[int, list[int]] = {}
        self._behind: dict[tuple[tuple[int, ...], int], tuple[float, float, int]] = {}
        self._limit: list[float] = frame.limit_bytes[frame.class_of].tolist()
        self._class_of = self.model.class_of.tolist()
        self._is_cpu = [d.kind is DeviceKind.CPU for d in frame.problem.cluster.devices]
        self._latest: tuple[Sketch, _Figures] | None = None
        # What recomputes at the levels of ``recompute.levels``, by samples of a microbatch.
        self.levels: dict[int, Array] = {}

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
        found = self._reduction.get(devices)
        if found is None:
            # Sets of as many devices of each kind lie alike; so do others, which take longer to
            # tell.
            kinds = tuple(sorted(map(self.kind_of.__getitem__, devices)))
            alike = self._lies.get(kinds)
            if alike is None:
                alike = self._lies[kinds] = self._lie(devices)
            found = self._reduction_alike.get(alike)
            if found is None:
                cluster, members = self.frame.problem.cluster, np.array(devices)
                fixed = collective_s(cluster, Kind.ALL_REDUCE, members, 0.0)
                slope = collective_s(cluster, Kind.ALL_REDUCE, members, 1e9) - fixed
                found = self._reduction_alike[alike] = (fixed, slope / 1e9)
            self._reduction[devices] = found
        return found

    def _lie(self, devices: tuple[int, ...]) -> tuple[object, ...]:
        """Return all that a collective among devices depends on.

        For each level the figures of the groups that they are in, with how many of them are there
        and of how many children of the group; the least share of a port; whether one is a CPU.
        """
        if not self._groups:
            return devices
        parts: list[object] = [any(self._is_cpu[device] for device in devices)]
        children: Sequence[int] = devices
        for groups, figures in self._groups:
            inside: dict[int, list[int]] = {}
            least = 1.0
            for device, child in zip(devices, children, strict=True):
                group, share = groups[device]
                inside.setdefault(group, []).append(child)
                least = min(least, share)
            rows = [(figures[group], len(own), len(set(own))) for group, own in inside.items()]
            parts.append((least, *sorted(rows)))
            children = [groups[device][0] for device in devices]
        return tuple(parts)

    def link(self, source: int, target: int) -> tuple[float, float]:
        """Return latency and seconds per byte between two devices."""
        pair = (source, target)
        if pair not in self._link:
            cluster = self.frame.problem.cluster
            targets = np.array([target])
            if len(cluster) <= MAX_DEVICES:
                targets = np.delete(np.arange(len(cluster)), source)
            sources = np.full(len(targets), source)
            fixed, more = (
                transfer_s(cluster, sources, targets, np.full(len(targets), size))
                for size in (0.0, 1e9)
            )
            found = zip(
                targets.tolist(), fixed.tolist(), ((more - fixed) / 1e9).tolist(), strict=True
            )
            self._link.update({(source, t): (latency, slope) for t, latency, slope in found})
        return self._link[pair]

    def link_behind(self, devices: tuple[int, ...], after: int) -> tuple[float, float, int]:
        """Return latency, seconds per byte and number of ports from devices to the one after."""
        key = (devices, after)
        if key not in self._behind:
            ports = self._ports_to(after, devices)
            self._behind[key] = (*self.link(devices[-1], after), len(set(ports)))
        return self._behind[key]

    def _ports_to(self, after: int, devices: tuple[int, ...]) -> list[int]:
        """Return the port through which each of some devices sends to another one."""
        cluster = self.frame.problem.cluster
        if len(cluster) > MAX_DEVICES:
            return _ports(cluster, np.array(devices), after)
        # All at once: single questions take as long.
        if after not in self._ports:
            others = np.delete(np.arange(len(cluster)), after)
            ports = np.full(len(cluster), -1)
            ports[others] = _ports(cluster, others, after)
            self._ports[after] = ports.tolist()
        row = self._ports[after]
        return [row[device] for device in devices]

    def estimate(self, sketch: Sketch) -> Estimate:
        """Return the estimate of a sketch."""
        figures = self._figures(sketch)
        pairs = figures.pairs
        forward, backward, load, owned = self._stage_seconds(sketch, figures)
        floor = max(f + b for f, b in zip(forward, backward, strict=True))
        if sketch.schedule.row.splits_backward:
            backward = [b * share for b, share in zip(backward, figures.input_share, strict=True)]
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
        tail = max(
            self._reduction_s(stage, figures.reduced[number]) - drain[number]
            for number, stage in enumerate(sketch.stages)
        )
        return Estimate(
            floor, guess + max(0.0, tail), np.array(load), self._over_bytes(sketch, figures)
        )

    def _figures(self, sketch: Sketch) -> _Figures:
        """Return what a sketch amounts to; it is often asked for twice in a row."""
        if self._latest is None or self._latest[0] is not sketch:
            self._latest = (sketch, self._summed(sketch))
        return self._latest[1]

    def _summed(self, sketch: Sketch) -> _Figures:
        """Return what a sketch amounts to, by the one sum over units."""
        sums, runs, count = self.model.condense(sketch.candidate)
        if count < 0:
            raise InvalidInputError("data flow to an earlier stage")
        stages = len(sketch.stages)
        ahead = sums.forward.reshape(-1, stages)
        back = (sums.backward + sums.recompute).reshape(-1, stages)
        whole = sums.backward[:stages]
        share = np.divide(
            sums.backward_input[:stages], whole, out=np.full(stages, 0.5), where=whole > 0
        )
        return _Figures(
            seconds=list(zip(ahead.tolist(), back.tolist(), strict=True)),
            input_share=share.tolist(),
            pairs=self._crossings(sketch, runs, count),
            static=sums.held.tolist(),
            kept=sums.kept.tolist(),
            brought=sums.brought.tolist(),
            inputs=sums.inputs.tolist(),
            reduced=sums.reduced.tolist(),
            gathered=[
                size if stage.shard is Shard.PARAMETERS else 0.0
                for stage, size in zip(sketch.stages, sums.gathered.tolist(), strict=True)
            ],
        )

    def _stage_seconds(
        self, sketch: Sketch, figures: _Figures
    ) -> tuple[list[float], list[float], list[float], dict[tuple[int, int], float]]:
        """Return forward, backward and load of each stage, and the load of each (device, stage)."""
        count = len(sketch.stages)
        forward, backward, load = [0.0] * count, [0.0] * count, [0.0] * count
        owned: dict[tuple[int, int], float] = {}
        for number, stage in enumerate(sketch.stages):
            turns, tp = sketch.batch.count / stage.round, stage.tp
            for group, share in zip(stage.devices, stage.shares, strict=True):
                ahead, back = figures.seconds[self._class_of[group[0]]]
                f, b = ahead[number] / tp, back[number] / tp
                busy = share * turns * (f + b)
                owned[(group[0], number)] = busy
                forward[number] = max(forward[number], f)
                backward[number] = max(backward[number], b)
                load[number] = max(load[number], busy)
        return forward, backward, load, owned

    def _crossings(self, sketch: Sketch, runs: Runs, count: int) -> list[Crossing]:
        """Return who sends what to whom."""
        moved: dict[tuple[int, int], float] = {}
        ptr, readers = runs.ptr[: count + 1].tolist(), runs.readers
        sizes, producers = runs.size[:count].tolist(), runs.producer[:count].tolist()
        for row, (producer, size) in enumerate(zip(producers, sizes, strict=True)):
            for reader in readers[ptr[row] : ptr[row + 1]].tolist():
                moved[producer, reader] = moved.get((producer, reader), 0.0) + size
        result = []
        for (a, b), size in sorted(moved.items()):
            ends = sketch.stages[a].devices[0][0], sketch.stages[b].devices[0][0]
            latency, slope = (0.0, 0.0) if ends[0] == ends[1] else self.link(*ends)
            result.append(Crossing(a, b, latency + slope * size, size))
        return result

    def _reduction_s(self, stage: Stage, size: float) -> float:
        if stage.num_replicas < 2 or not self.frame.trains:
            return 0.0
        latency, slope = self.reduction(tuple(sorted(group[0] for group in stage.devices)))
        return latency + slope * size / stage.tp

    def _over_bytes(self, sketch: Sketch, figures: _Figures) -> float:
        """Return by how much the fullest device exceeds its limit, about.

        Weights, what is in flight by the schedule, and a buffer for everything that is received.
        """
        window = self._window(sketch, figures.pairs)
        _, received = self._received(sketch, figures.pairs, window)
        need: dict[int, float] = {}
        for number, stage in enumerate(sketch.stages):
            kept = figures.kept[number] + figures.inputs[number]
            passing = figures.brought[number] + received[number] + figures.gathered[number]
            # The sum of all shares, once: there may be tens of thousands of them.
            turn, tp = stage.round, stage.tp
            for group, share in zip(stage.devices, stage.shares, strict=True):
                mine = sketch.batch.count * share // turn
                flying = min(mine, -(-window[number] * share // turn))
                total = figures.static[number] + (flying * kept + passing) / tp
                need[group[0]] = need.get(group[0], 0.0) + total
        return max(use - self._limit[device] for device, use in need.items())

    def stage_memory(self, sketch: Sketch) -> StageMemory:
        """Return what the memory of each stage consists of, about."""
        figures = self._figures(sketch)
        window = self._window(sketch, figures.pairs)
        inputs, received = self._received(sketch, figures.pairs, window)
        room, flying = [], []
        for number, stage in enumerate(sketch.stages):
            room.append(min(self._limit[group[0]] for group in stage.devices))
            most = max(stage.shares)
            mine = sketch.batch.count * most // stage.round
            flying.append(min(mine, -(-window[number] * most // stage.round)))
        static = [a + b for a, b in zip(figures.static, figures.gathered, strict=True)]
        kept = [a + b for a, b in zip(figures.kept, figures.inputs, strict=True)]
        return StageMemory(room, static, inputs, received, flying, kept, figures.brought)

    def _received(
        self, sketch: Sketch, pairs: list[Crossing], window: list[int]
    ) -> tuple[list[float], list[float]]:
        """Return what comes from earlier stages, and the buffers for it and for gradients.

        All that an earlier stage has in flight beyond those of this one waits here. Gradients come
        from all replicas of the later stage at once.
        """
        ahead = [0.0] * len(sketch.stages)
        both = ahead.copy()
        for pair in pairs:
            a, b = sketch.stages[pair.source], sketch.stages[pair.target]
            ahead[pair.target] += pair.bytes
            # Every replica may have its whole share in flight.
            turn = a.round
            sent = sum(-(-window[pair.source] * share // turn) for share in a.shares)
            waiting = (min(sent, sketch.batch.count) - window[pair.target]) * max(b.shares)
            both[pair.target] += pair.bytes * max(1, -(-waiting // b.round))
            if self.frame.trains:
                back = -(-b.num_replicas * max(a.shares) // turn)
                both[pair.source] += pair.bytes * back
        return ahead, both

    def _window(self, sketch: Sketch, pairs: list[Crossing]) -> list[int]:
        """Return the microbatches in flight on each stage."""
        if not self.frame.trains:
            return [0] * len(sketch.stages)
        if sketch.schedule.row.fills_first:
            return [sketch.batch.count] * len(sketch.stages)
        window = [stage.num_replicas for stage in sketch.stages]
        for pair in sorted(pairs, key=lambda pair: -pair.source):
            a, b = pair.source, pair.target
            stage = sketch.stages[a]
            behind = stage.num_replicas + window[b]
            # Those that reduce in every round keep whole rounds.
            if stage.shard in (Shard.GRADIENTS, Shard.PARAMETERS):
                behind += -behind % stage.num_replicas
            window[a] = max(window[a], behind)
        if sketch.schedule.row.delays_weights:
            return [max(window)] * len(window)
        return window


def _kinds(frame: Frame) -> list[int]:
    """Return a number for each device that those share which nothing tells apart."""
    cluster = frame.problem.cluster
    if not cluster.levels:
        return list(range(len(cluster)))
    columns = [frame.class_of.tolist(), [device.kind for device in cluster.devices]]
    for level in cluster.levels:
        columns += [level.group_of.tolist(), level.port_share.tolist()]
    number: dict[tuple[object, ...], int] = {}
    return [number.setdefault(traits, len(number)) for traits in zip(*columns, strict=True)]


def _ports(cluster: Cluster, devices: Array, after: int) -> list[int]:
    ports: list[int] = cluster.links(devices, np.full(len(devices), after)).out_port.tolist()
    return ports


def _grouped(level: Level) -> tuple[list[tuple[int, float]], list[int]]:
    """Return group and port of each device, and for each group the first one of its figures."""
    first: dict[tuple[object, ...], int] = {}
    rates = level.collectives or (None,) * len(level.latency_s)
    figures = zip(
        level.bandwidth_bytes_per_s.tolist(),
        level.latency_s.tolist(),
        map(id, rates),
        strict=True,
    )
    alike = [first.setdefault(found, group) for group, found in enumerate(figures)]
    return list(zip(level.group_of.tolist(), level.port_share.tolist(), strict=True)), alike


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
