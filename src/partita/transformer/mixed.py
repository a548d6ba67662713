"""Layouts over devices of several types: every type with degrees and a share of its own.

Two regular ways to use them all, and mixtures with fewer types:

* *in a row*: stages of a pipeline, each type with its own tensor-parallel degree, recomputation and
  number of stages, and as many layers as it is quick (and has memory) for;
* *side by side*: replicas of one pipeline, each type taking microbatches as it is quick. That
  includes all layouts that take the devices for equal ones.

Candidates are priced for whole columns of degrees at once and ranked by what balanced places could
reach; the best of those get their layers and shares, and are ranked by their slowest place.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, product
from math import gcd, lcm
from typing import NamedTuple

import numpy as np

from partita.core.cluster import Cluster
from partita.core.columns import Array
from partita.core.precision import parse_precision
from partita.cost.links import Fabric, fabric_of
from partita.transformer.activations import edge_bytes, kept_bytes, logit_bytes
from partita.transformer.kernels import Machine, machine_of
from partita.transformer.layout import FRAMEWORKS, Layout
from partita.transformer.memory import Held, Memory, in_flight, stage_memory
from partita.transformer.pipelines import (
    Pipeline,
    Place,
    as_number,
    even_layers,
    stage_devices,
)
from partita.transformer.price import passes_of
from partita.transformer.search import (
    Task,
    case_of,
    context_kind,
    divisors,
    offload_shares,
    regular_layouts,
)

MOST_STAGES = 32
MOST_MICROBATCH = 4
MOST_TRIED = 400
"""Rows, and layouts side by side, whose layers or shares are found: the best by a bound."""
KEPT = 48
"""Candidates that are returned, of each way."""
NEAR = 3
"""Microbatches around a type's part by speed that are tried."""


@dataclass(frozen=True, kw_only=True)
class Group:
    """Devices of one type.

    Attributes:
        device_type: The type.
        devices: Indices into the cluster.
        machine: The device and its links among each other.
        limit_bytes: Memory that one of them may use.
    """

    device_type: str
    devices: Array
    machine: Machine
    limit_bytes: float

    def __len__(self) -> int:
        return len(self.devices)

    def some(self, cluster: Cluster, devices: Sequence[int]) -> "Group":
        """Return some of the devices, with the links that those have."""
        used = np.array(devices)
        machine = self.machine._replace(fabric=fabric_of(cluster, used))
        return replace(self, devices=used, machine=machine)


def groups_of(cluster: Cluster, memory_factor: float, *, compute: str = "bfloat16") -> list[Group]:
    """Return the devices of a cluster by type, memory and speed, the quickest first.

    Devices of a host work in step: all are as quick as the slowest of their type there.

    Args:
        cluster: The devices.
        memory_factor: Share of a device's memory that may be used.
        compute: Dtype of the arithmetic.
    """
    hosts = cluster.levels[0].group_of.tolist() if cluster.levels else [0] * len(cluster)
    speed: dict[tuple[int, str], float] = {}
    for host, device in zip(hosts, cluster.devices, strict=True):
        key = (host, device.type)
        speed[key] = min(device.speed, speed.get(key, device.speed))
    found: dict[tuple[str, float, float], list[int]] = {}
    for index, (host, device) in enumerate(zip(hosts, cluster.devices, strict=True)):
        alike = (device.type, device.memory_bytes, speed[host, device.type])
        found.setdefault(alike, []).append(index)
    groups = []
    for (kind, memory, quick), indices in found.items():
        devices = np.array(indices)
        fabric = fabric_of(cluster, devices)
        machine = machine_of(cluster.devices[indices[0]], fabric, compute=compute)
        groups.append(
            Group(
                device_type=kind,
                devices=devices,
                machine=machine.at_speed(quick),
                limit_bytes=memory * memory_factor,
            )
        )
    return sorted(groups, key=lambda group: -group.machine.peak_flop_per_s * len(group))


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """Lanes and about how long their step takes."""

    lanes: tuple[Pipeline, ...]
    step_s: float


def mixed_candidates(task: Task, cluster: Cluster, groups: Sequence[Group]) -> list[Candidate]:
    """Return layouts over all types, or all but some, that fit; the quickest first."""
    found: list[Candidate] = []
    for size in range(len(groups), 1, -1):
        for some in combinations(groups, size):
            joined = fabric_of(cluster, np.concatenate([group.devices for group in some]))
            for way in (_in_a_row, _side_by_side):
                best = sorted(way(task, some, joined), key=lambda candidate: candidate.step_s)
                found += best[:KEPT]
    return sorted(found, key=lambda candidate: candidate.step_s)


class Figures(NamedTuple):
    """Seconds and bytes of layouts on one type of device: columns, or one layout's numbers.

    Attributes:
        block_s: Both passes of a block.
        embedding_s: Both passes of the embedding.
        head_s: The same of head and loss.
        send_s: Sending activations to the next stage.
        after_s: Reductions and the update.
        base_bytes: Bytes that are there anyway.
        end_bytes: State of an embedding or a head.
        logit_bytes: Logits and their gradient.
        edge_bytes: Inputs and outputs of a stage and microbatch.
        state_bytes: State of a layer.
        kept_bytes: Activations of a layer and microbatch.
    """

    block_s: Array
    embedding_s: Array
    head_s: Array
    send_s: Array
    after_s: Array
    base_bytes: Array
    end_bytes: Array
    logit_bytes: Array
    edge_bytes: Array
    state_bytes: Array
    kept_bytes: Array

    def most_layers(
        self, limit_bytes: Array, flight: Array, is_first: Array, is_last: Array
    ) -> Array:
        """Return how many layers fit, by microbatches in flight and the ends that are held."""
        room = limit_bytes - self.base_bytes - self.edge_bytes * flight
        room = room - self.end_bytes * (is_first + 1.0 * is_last) - self.logit_bytes * is_last
        each = self.state_bytes + self.kept_bytes * flight
        most: Array = np.floor(np.maximum(room, 0.0) / each + 1e-9).astype(np.int64)
        return most


def figures_of(task: Task, layouts: Sequence[Layout], machine: Machine) -> Figures:
    """Return the figures of layouts on one type of device."""
    case = case_of(task, layouts, machine)
    passes = passes_of(case)
    policy = parse_precision(task.precision)

    def memory(layers: int, ends: int) -> Memory:
        held = Held(float(layers), float(ends), 1.0, 0.0)
        return stage_memory(case, policy, held, optimizer=task.optimizer, frozen=task.frozen)

    one, two, end = memory(1, 0), memory(2, 0), memory(1, 1)
    each = two.held - one.held
    # On one device of its own a stage has both ends.
    ends = (end.held - one.held) / np.where(np.asarray(case.layouts.pp) > 1, 1.0, 2.0)
    stays = 1.0 - case.layouts.offload_activations
    columns = (
        *(passes.block_s, passes.embedding_s, passes.head_s, passes.send_s),
        *(passes.data_s + passes.update_s, end.buffers + end.fixed, ends),
        *(logit_bytes(case), edge_bytes(case), each, kept_bytes(case) * stays),
    )
    return Figures(
        *(np.broadcast_to(np.asarray(column, dtype=float), len(layouts)) for column in columns)
    )


def place_memory(lane: Pipeline, number: int) -> Memory:
    """Return the bytes of the devices of one place."""
    place, depth, task = lane.places[number], len(lane.places), lane.task
    case = case_of(task, [place.layout], place.machine)
    turns, is_last = float(lane.microbatches), number == depth - 1
    held = Held(
        blocks=float(sum(lane.layers[number::depth])),
        ends=float(number == 0 or is_last),
        flight=in_flight(depth, place.layout.vp, turns, number, more=lane.more),
        is_last=float(is_last),
    )
    policy = parse_precision(task.precision)
    return stage_memory(case, policy, held, optimizer=task.optimizer, frozen=task.frozen)


class _Option(NamedTuple):
    """What one type does in a row: its degree, its recomputation, and how many stages it makes."""

    tp: int
    again: tuple[str, ...]
    stages: int


class _Row(NamedTuple):
    """Types one after the other.

    Attributes:
        whole: What all stages have in common, with their number.
        options: What each type does.
        at: Row of each type's figures.
    """

    whole: Layout
    options: tuple[_Option, ...]
    at: tuple[int, ...]

    def layout(self, number: int) -> Layout:
        """Return the layout of a type."""
        return _with(self.whole, self.options[number])


def _with(whole: Layout, option: _Option) -> Layout:
    split = option.tp > 1 and FRAMEWORKS[whole.framework].sequence_parallel
    return replace(whole, tp=option.tp, sp=split, recompute=option.again)


def _in_a_row(task: Task, groups: Sequence[Group], joined: Fabric) -> Iterator[Candidate]:
    """Yield pipelines whose stages are on one type after the other."""
    # The first stages have most in flight: the order by speed, its reverse, and that by memory.
    numbers = range(len(groups))
    roomy = sorted(numbers, key=lambda number: -groups[number].limit_bytes)
    for order in dict.fromkeys(map(tuple, (numbers, reversed(numbers), roomy))):
        yield from _ordered(task, [groups[number] for number in order], joined)


def _ordered(task: Task, groups: Sequence[Group], joined: Fabric) -> Iterator[Candidate]:
    """Yield the best rows of types in one order."""
    wanted: list[dict[tuple[Layout, _Option], int]] = [{} for _ in groups]
    rows = list(_rows(task, groups, wanted))
    if not rows:
        return
    figures = [
        figures_of(task, [_with(*key) for key in found], group.machine)
        for found, group in zip(wanted, groups, strict=True)
    ]
    layers, index = task.shape.layers, np.array([row.at for row in rows])
    stages = np.array([[option.stages for option in row.options] for row in rows])
    turns = np.array([task.batch // (row.whole.dp * row.whole.microbatch) for row in rows])
    speed, room = np.zeros(len(rows)), np.zeros(len(rows))
    for number, (group, of) in enumerate(zip(groups, figures, strict=True)):
        most = of.most_layers(np.asarray(group.limit_bytes), np.ones(1), np.zeros(1), np.zeros(1))
        speed += stages[:, number] / of.block_s[index[:, number]]
        room += stages[:, number] * most[index[:, number]]
    # What balanced places would take; layers and ends that do not divide take more.
    virtual = np.array([row.whole.vp for row in rows])
    bound = layers / speed * (turns + (stages.sum(axis=1) - 1) / virtual)
    bound[room < layers] = np.inf
    fitting = 0
    for number in np.argsort(bound, kind="stable").tolist():
        if fitting == MOST_TRIED or not np.isfinite(bound[number]):
            return
        found = _row(task, groups, rows[number], figures, joined)
        if found is not None:
            fitting += 1
            yield found


def _rows(
    task: Task, groups: Sequence[Group], wanted: Sequence[dict[tuple[Layout, _Option], int]]
) -> Iterator[_Row]:
    """Yield all rows; what figures they need is entered in ``wanted``."""
    fixed, framework = task.fixed, FRAMEWORKS[task.framework]
    common = gcd(*(len(group) for group in groups))
    deepest = min(MOST_STAGES, task.shape.layers)
    for dp, cp in product(divisors(common), _fixed(fixed, "cp", [1, 2, 4, 8])):
        if common % (dp * cp) or task.batch % dp or _fixed(fixed, "dp", [dp]) != [dp]:
            continue
        if cp > 1 and (task.sequence_length % (2 * cp) or not framework.context):
            continue
        options = [_options(task, group, dp * cp) for group in groups]
        sizes = [n for n in divisors(task.batch // dp) if n <= MOST_MICROBATCH]
        for size, chosen in product(_fixed(fixed, "microbatch", sizes), product(*options)):
            depth = sum(option.stages for option in chosen)
            if depth > deepest or _fixed(fixed, "pp", [depth]) != [depth]:
                continue
            if (task.batch // dp) % size:
                continue
            for zero in _zero(task, dp * cp, depth):
                whole = _whole(task, (dp, cp, depth, size, zero))
                index = tuple(
                    wanted[n].setdefault((whole, option), len(wanted[n]))
                    for n, option in enumerate(chosen)
                )
                for vp in _fixed(fixed, "vp", _virtual(task, whole)):
                    yield _Row(replace(whole, vp=vp) if vp > 1 else whole, chosen, index)


def _whole(task: Task, degrees: tuple[int, int, int, int, int]) -> Layout:
    dp, cp, depth, size, zero = degrees
    # Of shares that are searched the most: types that do not fit otherwise are why it is asked for.
    return Layout(
        offload_optimizer=max(offload_shares(task.fixed, "offload_optimizer")),
        offload_activations=max(offload_shares(task.fixed, "offload_activations")),
        pp=depth,
        cp=cp,
        cp_kind=context_kind(task),
        dp=dp,
        zero=zero,
        microbatch=size,
        precision=task.precision,
        framework=task.framework,
    )


def _virtual(task: Task, whole: Layout) -> list[int]:
    """Return numbers of chunks per place."""
    turns = task.batch // (whole.dp * whole.microbatch)
    if not FRAMEWORKS[task.framework].interleaving or turns % whole.pp:
        return [1]
    return [v for v in (1, 2, 4) if v == 1 or v * whole.pp <= task.shape.layers]


def _options(task: Task, group: Group, divided: int) -> list[_Option]:
    """Return what one type may do in a row."""
    return [
        _Option(tp, again, len(group) // (divided * tp))
        for tp in _tensor_degrees(task, group, divided)
        for again in _recompute(task)
    ]


def _zero(task: Task, replicas: int, depth: int) -> list[int]:
    """Return the levels of sharding: as little as there is where there is somebody to share it."""
    framework = FRAMEWORKS[task.framework]
    most = framework.max_zero_with_pp if depth > 1 else framework.max_zero
    least = 1 if framework.optimizer_alone else 2
    usual = [least if least <= most else 0] if replicas > 1 else [0]
    return [zero for zero in _fixed(task.fixed, "zero", usual) if zero <= most]


def _row(
    task: Task, groups: Sequence[Group], row: _Row, figures: Sequence[Figures], joined: Fabric
) -> Candidate | None:
    """Return a pipeline with layers as each place is quick, or None where they do not fit."""
    owner = np.repeat(np.arange(len(groups)), [option.stages for option in row.options])
    depth, vp = len(owner), row.whole.vp
    turns = task.batch // (row.whole.dp * row.whole.microbatch)
    of = Figures(
        *(
            np.array([column[row.at[n]] for n, column in enumerate(columns)])[owner]
            for columns in zip(*figures, strict=True)
        )
    )
    place = np.arange(depth)
    limits = np.array([group.limit_bytes for group in groups])[owner]
    flight = np.asarray(in_flight(depth, vp, turns, place))
    most = of.most_layers(limits, flight, place == 0, place == depth - 1)
    if int((most // vp * vp).sum()) < task.shape.layers or (most < vp).any():
        return None
    each, extra = of.block_s, of.embedding_s * (place == 0) + of.head_s * (place == depth - 1)
    held = balance(each * vp, extra, most // vp, task.shape.layers // vp) * vp
    # Layers that virtual stages leave over go where they cost least.
    for _ in range(task.shape.layers - int(held.sum())):
        cost = np.where(held < most, each * (held + 1) + extra, np.inf)
        if not np.isfinite(cost.min()):
            return None
        held[int(np.argmin(cost))] += 1
    load = each * held + extra
    total = turns * load.max() + (load.sum() - load.max()) / vp
    total += 2 * of.send_s.max() * (turns + depth) + of.after_s.max()
    places: list[Place] = []
    for number, group in enumerate(groups):
        layout = row.layout(number)
        places += [
            Place(
                layout=layout,
                devices=devices,
                machine=group.machine,
                device_type=group.device_type,
            )
            for devices in stage_devices(group.devices, layout, layout.dp)
        ]
    lane = Pipeline(
        task=task,
        places=tuple(places),
        layers=chunk_layers(held, vp),
        microbatches=turns,
        joined=joined,
    )
    return Candidate(lanes=(lane,), step_s=float(total))


def chunk_layers(held: Array, vp: int) -> tuple[int, ...]:
    """Return the layers of each chunk, of which every place has ``vp``."""
    rows = [[int(n) // vp + (turn < int(n) % vp) for n in held] for turn in range(vp)]
    return tuple(count for row in rows for count in row)


def balance(each: Array, extra: Array, most: Array, layers: int) -> Array:
    """Return layers per place so that the slowest is as quick as can be, within ``most``.

    >>> balance(np.array([1.0, 2.0]), np.zeros(2), np.array([9, 9]), 6).tolist()
    [4, 2]
    """
    held = np.ones(len(each), dtype=np.int64)
    for _ in range(layers - len(each)):
        cost = np.where(held < most, each * (held + 1) + extra, np.inf)
        held[int(np.argmin(cost))] += 1
    return held


def fits_place(lane: Pipeline, number: int) -> bool:
    """Return whether a place's devices hold what they must."""
    return as_number(place_memory(lane, number).total) <= lane.limit_bytes(number)


def fits_places(lane: Pipeline) -> bool:
    """Return whether the devices of all places hold what they must."""
    depth = len(lane.places)
    held: dict[tuple[object, ...], int] = {}
    for number, place in enumerate(lane.places):
        # Of places that hold the same the first has most in flight; the last has the loss.
        layers = sum(lane.layers[number::depth])
        held.setdefault(
            (place.layout, place.kind, layers, number == 0, number == depth - 1), number
        )
    return all(fits_place(lane, number) for number in held.values())


def _side_by_side(task: Task, groups: Sequence[Group], joined: Fabric) -> Iterator[Candidate]:
    """Yield replicas of one pipeline, some on each type, with shares by their speed."""
    machines = [group.machine._replace(fabric=joined) for group in groups]
    slowest = min(machines, key=lambda of: (of.peak_flop_per_s, of.bytes_per_s))
    total = sum(len(group) for group in groups)
    # Shares need not be equal, so that the replicas need not divide the batch.
    every = replace(task, devices=total, machine=slowest, batch=lcm(task.batch, total))
    layouts = [layout for layout in regular_layouts(every) if _divides(task, layout, groups)]
    if not layouts:
        return
    figures = [figures_of(task, layouts, machine) for machine in machines]
    tied = np.array([layout.vp > 1 or _is_tied(layout) for layout in layouts])
    inner = np.array([layout.tp * layout.cp * layout.pp for layout in layouts])
    depth = np.array([layout.pp for layout in layouts])
    each = -(-task.shape.layers // depth)
    turn_s = np.stack(
        [of.block_s * each + (of.head_s + of.embedding_s) / depth for of in figures], axis=1
    )
    replicas = np.stack([len(group) // inner for group in groups], axis=1)
    microbatches = task.batch // np.array([layout.microbatch for layout in layouts])
    # Each microbatch goes where it ends soonest; layouts in lockstep wait for the slowest.
    free = microbatches / (replicas / turn_s).sum(axis=1)
    bound = np.where(tied, microbatches / replicas.sum(axis=1) * turn_s.max(axis=1), free)
    bound = bound + np.max([of.after_s for of in figures], axis=0)
    fitting = 0
    for row in np.argsort(bound, kind="stable").tolist():
        if fitting == MOST_TRIED:
            return
        here = [Figures(*(float(column[row]) for column in of)) for of in figures]  # type: ignore[arg-type]
        found = _beside(
            task,
            list(zip(groups, machines, here, replicas[row].tolist(), strict=True)),
            layouts[row],
            _shares(turn_s[row], replicas[row], int(microbatches[row]), tied=bool(tied[row])),
        )
        if found is not None:
            fitting += 1
            yield found


def _divides(task: Task, layout: Layout, groups: Sequence[Group]) -> bool:
    """Return whether every type has whole replicas, and experts of its own."""
    if task.batch % layout.microbatch or (layout.pp > 1 and layout.microbatch > MOST_MICROBATCH):
        return False
    inner = layout.tp * layout.cp * layout.pp
    inside = layout.ep * layout.etp
    return all(
        len(group) % inner == 0 and len(group) // layout.pp % inside == 0 for group in groups
    )


def _is_tied(layout: Layout) -> bool:
    """Return whether replicas gather or reduce each microbatch together."""
    return layout.zero == 3 or (layout.zero == 2 and layout.pp == 1)


def _beside(
    task: Task,
    parts: Sequence[tuple[Group, Machine, Figures, int]],
    layout: Layout,
    shares: tuple[int, ...] | None,
) -> Candidate | None:
    """Return lanes with shares by speed, or None where they do not fit or divide."""
    # Chunks in turns keep to the places' order only where all replicas have the same turns.
    if shares is None or (layout.vp > 1 and (len(set(shares)) > 1 or shares[0] % layout.pp)):
        return None
    sizes = even_layers(task.shape.layers, layout)
    held = np.array(sizes).reshape(layout.vp, layout.pp).sum(axis=0)
    place = np.arange(layout.pp)
    # With uneven shares a replica may begin its next microbatch before the last has come back.
    more = int(len(set(shares)) > 1)
    lanes, ends = [], []
    for (group, machine, of, count), turns in zip(parts, shares, strict=True):
        flight = np.asarray(in_flight(layout.pp, layout.vp, turns, place, more=more))
        limit = np.full(layout.pp, group.limit_bytes)
        if (of.most_layers(limit, flight, place == 0, place == layout.pp - 1) < held).any():
            return None
        places = tuple(
            Place(layout=layout, devices=devices, machine=machine, device_type=group.device_type)
            for devices in stage_devices(group.devices, layout, count)
        )
        lanes.append(
            Pipeline(task=task, places=places, layers=sizes, microbatches=turns, more=more)
        )
        load = of.block_s * held + of.embedding_s * (place == 0)
        load = load + of.head_s * (place == layout.pp - 1)
        filled = (load.sum() - load.max()) / layout.vp
        sends = 2 * of.send_s * (turns + layout.pp) * (layout.pp > 1)
        ends.append(float(turns * load.max() + filled + sends + of.after_s))
    return Candidate(lanes=tuple(lanes), step_s=max(ends))


def _shares(
    turn_s: Array, replicas: Array, microbatches: int, *, tied: bool
) -> tuple[int, ...] | None:
    """Return microbatches of each type's replicas that end soonest; None = they do not divide."""
    if tied:
        each, left = divmod(microbatches, int(replicas.sum()))
        return None if left or not each else (each,) * len(replicas)
    ideal = microbatches / (replicas / turn_s).sum() / turn_s
    near = [
        range(max(1, int(share) - NEAR), int(share) + NEAR + 2) for share in ideal[:-1].tolist()
    ]
    best: tuple[float, tuple[int, ...]] | None = None
    for some in product(*near):
        left = microbatches - sum(n * m for n, m in zip(replicas.tolist(), some, strict=False))
        last, rest = divmod(left, int(replicas[-1]))
        if rest or last < 1:
            continue
        shares = (*some, last)
        cost = max(m * each for m, each in zip(shares, turn_s.tolist(), strict=True))
        if best is None or cost < best[0] * (1 - 1e-9):
            best = (cost, shares)
    return None if best is None else best[1]


def _tensor_degrees(task: Task, group: Group, divided: int) -> list[int]:
    """Return tensor-parallel degrees of a group whose devices also divide otherwise."""
    size = len(group) // divided
    domain = group.machine.fabric.devices_per_host
    usual = [tp for tp in divisors(size) if tp <= min(domain, 8) and task.shape.heads % tp == 0]
    return [tp for tp in _fixed(task.fixed, "tp", usual) if size % tp == 0]


def _recompute(task: Task) -> list[tuple[str, ...]]:
    if "recompute" in task.fixed:
        return [tuple(task.fixed["recompute"])]  # type: ignore[arg-type]
    return [(), ("full",)]


def _fixed(fixed: Mapping[str, object], name: str, usual: Sequence[int]) -> list[int]:
    return [int(fixed[name])] if name in fixed else list(usual)  # type: ignore[call-overload]
