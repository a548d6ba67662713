"""Layouts put on the devices of a cluster: as a plan with its graph, and played exactly.

A pipeline is a row of places, one per stage, each with a layout of its own: on equal devices all
are the same, on a mixed cluster every type has its own degrees. Chunks of layers go round the
places (virtual stages). ``played_s`` plays the microbatches of one replica through the chunks, with
the seconds of ``price.py``, by the same simulator that plays every other plan; ``graph_of`` and
``plan_of`` say it all as documents: blocks are ops with costs at their degrees.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from partita.core.cluster import Cluster, Device, Level
from partita.core.columns import Array
from partita.core.graph import (
    BLOCK,
    DTYPE_BYTES,
    EMBEDDING,
    HEAD,
    CostOrigin,
    DegreeTable,
    EdgeTable,
    Graph,
    Labels,
    OpCosts,
    OpTable,
    ParameterTable,
    TensorTable,
)
from partita.core.plan import Plan, Shard, Stage, equal_microbatches
from partita.core.precision import parse_precision
from partita.core.problem import Objective, Problem, Schedule
from partita.core.program import Kind, TransferMode
from partita.cost.links import Fabric, group_collective_s
from partita.cost.predict import makespan_s
from partita.transformer.activations import kept_bytes, layer_bytes
from partita.transformer.kernels import Machine
from partita.transformer.layout import Layout
from partita.transformer.price import Groups, Passes, held_params, passes_of
from partita.transformer.search import Task, case_of
from partita.transformer.shape import Numbers

SHARDS = (Shard.NONE, Shard.OPTIMIZER, Shard.GRADIENTS, Shard.PARAMETERS)


@dataclass(frozen=True, kw_only=True)
class Place:
    """One stage of a pipeline: equal replicas on devices of one type.

    Attributes:
        layout: Degrees; ``dp`` counts all replicas of the stage, of other lanes too.
        devices: Indices into the cluster, ``devices[replica][cp * tp]``.
        machine: The device and its links.
        device_type: Its type.
    """

    layout: Layout
    devices: tuple[tuple[int, ...], ...]
    machine: Machine
    device_type: str

    @property
    def kind(self) -> str:
        """Its type, with its speed where that is not the usual one."""
        speed = self.machine.speed
        return self.device_type if speed == 1 else f"{self.device_type} at {speed:.0%}"


@dataclass(frozen=True, kw_only=True)
class Pipeline:
    """Replicas of a transformer over places.

    Replicas on other types of devices, which take other shares of the microbatches, are lanes of
    their own: pipelines with the same chunks.

    Attributes:
        task: What is trained.
        places: The stages of one round of chunks.
        layers: Layers of each chunk; chunk k is on place ``k % len(places)``.
        microbatches: Microbatches that each replica takes in a step.
        joined: Links between places of different types; None = there is one type.
        more: Microbatches in flight beside those of a pipeline whose replicas have equal shares.
    """

    task: Task
    places: tuple[Place, ...]
    layers: tuple[int, ...]
    microbatches: int
    joined: Fabric | None = None
    more: int = 0

    @property
    def layout(self) -> Layout:
        """The layout of the first place."""
        return self.places[0].layout

    @property
    def replicas(self) -> int:
        """Replicas of this lane."""
        return len(self.places[0].devices)

    @property
    def num_devices(self) -> int:
        """Devices that it uses."""
        return sum(len(place.devices) * len(place.devices[0]) for place in self.places)

    def limit_bytes(self, number: int) -> float:
        """Memory that a device of a place may use: the share that the task leaves of its own."""
        share = self.task.limit_bytes / self.task.machine.memory_bytes
        return self.places[number].machine.memory_bytes * share


def regular_pipeline(
    task: Task, layout: Layout, cluster: Cluster, devices: Array | None = None
) -> Pipeline:
    """Return a layout on equal devices of a cluster, in the order of its ranks.

    Args:
        task: What is trained.
        layout: Degrees.
        cluster: The cluster.
        devices: The devices; the first ones unless given.
    """
    used = np.arange(task.devices) if devices is None else devices
    kind = cluster.devices[int(used[0])].type
    places = tuple(
        Place(layout=layout, devices=stage, machine=task.machine, device_type=kind)
        for stage in stage_devices(used, layout, layout.dp)
    )
    turns = task.batch // (layout.dp * layout.microbatch)
    layers = even_layers(task.shape.layers, layout)
    return Pipeline(task=task, places=places, layers=layers, microbatches=turns)


def stage_devices(
    devices: Array, layout: Layout, replicas: int
) -> tuple[tuple[tuple[int, ...], ...], ...]:
    """Return devices by stage, replica and rank."""
    sizes = {"tp": layout.tp, "cp": layout.cp, "dp": replicas, "pp": -1}
    order = layout.rank_order.split("-")[::-1]
    grid = devices.reshape([sizes[name] for name in order])
    grid = grid.transpose([order.index(name) for name in ("pp", "dp", "cp", "tp")])
    grid = grid.reshape(-1, replicas, layout.cp * layout.tp)
    return tuple(tuple(tuple(group) for group in stage) for stage in grid.tolist())


def even_layers(layers: int, layout: Layout) -> tuple[int, ...]:
    """Return equal chunks of layers; where they do not divide, the ends have less.

    >>> even_layers(7, Layout(pp=4))
    (1, 2, 2, 2)
    """
    chunks = layout.chunks
    each, more = divmod(layers, chunks)
    sizes = [each] * chunks
    # The ends also hold embedding and head: what is left over goes to the middle first.
    order = [*range(1, chunks - 1), chunks - 1, 0] if chunks > 1 else [0]
    for chunk in order[:more]:
        sizes[chunk] += 1
    return tuple(sizes)


def place_passes(task: Task, place: Place, held: int = 0) -> Passes:
    """Return the seconds of one place's blocks and ends, as numbers.

    Args:
        task: What is trained.
        place: The place.
        held: Layers that it holds, which are reduced and updated; 0 = an even part of them.
    """
    case = case_of(task, [place.layout], place.machine)
    if held and place.layout.pp > 1:
        case = case._replace(sizes=case.sizes._replace(layers=float(held * place.layout.pp)))
    return Passes(*map(as_number, passes_of(case)))


def as_number(value: Numbers) -> float:
    """Return the number that all rows have."""
    return float(np.ravel(value)[0])


def played_s(lanes: Sequence[Pipeline]) -> float:
    """Return the seconds of a step, one replica of each lane played exactly."""
    played, after = [], []
    for lane in lanes:
        problem, plan, ends = _folded(lane)
        # Interleaved stages send and receive at once; what of it shows is in their seconds.
        mode = TransferMode.OVERLAPPED if lane.layout.vp > 1 else TransferMode.BLOCKING
        played.append(makespan_s(problem, plan, mode))
        after.append(max(ends))
    return max(played) + max(after)


def _folded(pipeline: Pipeline) -> tuple[Problem, Plan, list[float]]:
    """Return one replica with a device per place, and the seconds that each place's end takes.

    A place's devices do the same at the same time, so that one stands for all of them, with the
    communication among them in its seconds.
    """
    task, places, chunks = pipeline.task, pipeline.places, pipeline.layers
    known: dict[tuple[Layout, str, int], Passes] = {}
    passes = []
    for number, place in enumerate(places):
        key = (place.layout, place.kind, sum(chunks[number :: len(places)]))
        if key not in known:
            known[key] = place_passes(task, place, key[-1])
        passes.append(known[key])
    names = [f"stage{number}" for number in range(len(places))]
    count = len(chunks)
    costs = []
    for name, of in zip(names, passes, strict=True):
        shown = of.tensor_s + of.context_s + of.expert_s
        forward = of.forward_s + shown + of.units_s / 3 + of.offload_s / 2
        both = of.block_s
        ahead = np.array([forward * layers + of.chunk_s for layers in chunks])
        back = np.array([(both - forward) * layers + of.chunk_s for layers in chunks])
        # A third of an end's seconds is its forward.
        ahead[0] += of.embedding_s / 3
        back[0] += of.embedding_s * 2 / 3
        ahead[-1] += of.head_s / 3
        back[-1] += of.head_s * 2 / 3
        costs.append(OpCosts(device_type=name, forward_s=ahead, backward_s=back))
    sends = _sends(pipeline, passes)
    graph = Graph(
        name="folded",
        ops=OpTable(names=tuple(f"chunk{chunk}" for chunk in range(count))),
        costs=tuple(costs),
        tensors=TensorTable(
            names=tuple(f"out{chunk}" for chunk in range(count - 1)),
            producer=np.arange(count - 1, dtype=np.int32),
            bytes=np.ones(count - 1),
            transfer_s=np.array([sends[chunk % len(places)] for chunk in range(count - 1)]),
        ),
        edges=EdgeTable(
            tensor=np.arange(count - 1, dtype=np.int32), reader=np.arange(1, count, dtype=np.int32)
        ),
    )
    cluster = Cluster(
        name="folded",
        devices=tuple(Device(name=name, type=name) for name in names),
        levels=(
            Level(
                name="host",
                group_of=np.zeros(len(names), dtype=np.int32),
                bandwidth_bytes_per_s=np.array([1e12]),
                port_per_device=True,
            ),
        ),
    )
    schedule = Schedule.INTERLEAVED if count > len(places) else Schedule.ONE_F_ONE_B
    plan = Plan(
        fingerprint=graph.fingerprint,
        devices=tuple(names),
        stage_of=np.arange(count, dtype=np.int32),
        stages=tuple(Stage(devices=((chunk % len(places),),)) for chunk in range(count)),
        schedule=schedule,
        microbatch_sizes=equal_microbatches(pipeline.microbatches, 1),
    )
    ends = [as_number(of.data_s + of.update_s) for of in passes]
    return Problem(graph=graph, cluster=cluster, objective=Objective()), plan, ends


def _sends(pipeline: Pipeline, passes: Sequence[Passes]) -> list[float]:
    """Return the seconds that each place takes to send to the next, the last to the first."""
    places, sends = pipeline.places, [of.send_s for of in passes]
    for number, place in enumerate(places):
        after = places[(number + 1) % len(places)]
        if pipeline.joined is None:
            apart, host = place.layout.strides["pp"], place.machine.fabric.devices_per_host
            same = number * apart // host == (number + 1) % len(places) * apart // host
            sends[number] = passes[number].near_s if same else passes[number].far_s
            continue
        if after.device_type == place.device_type:
            continue
        layout = place.layout
        tokens = layout.microbatch * pipeline.task.sequence_length / layout.cp
        ways = min(layout.tp, after.layout.tp) if layout.sp and after.layout.sp else 1
        element = DTYPE_BYTES[parse_precision(pipeline.task.precision).activations]
        size = element * tokens * pipeline.task.shape.hidden / ways
        found = group_collective_s(pipeline.joined, Kind.SEND, *map(np.asarray, (2.0, 1.0, size)))
        sends[number] = as_number(found)
    return [as_number(send) for send in sends]


def plan_of(lanes: Sequence[Pipeline], graph: Graph, cluster: Cluster) -> Plan:
    """Return lanes as a plan for their graph."""
    first = lanes[0]
    used = [d for lane in lanes for place in lane.places for group in place.devices for d in group]
    index = {device: number for number, device in enumerate(used)}
    # A round has the least whole number of microbatches for each replica.
    turns = int(np.gcd.reduce([lane.microbatches for lane in lanes]))
    shares = tuple(lane.microbatches // turns for lane in lanes for _ in range(lane.replicas))
    chunks = first.layers
    stages = tuple(
        _stage([lane.places[chunk % len(first.places)] for lane in lanes], index, shares)
        for chunk in range(len(chunks))
    )
    stage_of = [0, *(chunk for chunk, n in enumerate(chunks) for _ in range(n)), len(chunks) - 1]
    layout = first.layout
    # Fully sharded blocks are gathered one by one, and gradients of equal replicas leave in buckets
    # as layers finish: each unit is a stage of its own on all devices. Beside a pipeline a bucket
    # is a chunk, as in Megatron.
    whole = layout.zero == len(SHARDS) - 1
    by_unit = layout.pp == 1 and len(used) > 1
    by_unit = by_unit and (whole or (len(lanes) == 1 and layout.dp * layout.cp > 1))
    if by_unit:
        stage_of = _units(first.task, layout)
        stages *= stage_of[-1] + 1
    return Plan(
        fingerprint=graph.fingerprint,
        devices=tuple(cluster.device_names[device] for device in used),
        stage_of=np.array(stage_of),
        stages=stages,
        schedule=Schedule.INTERLEAVED if layout.vp > 1 or by_unit else Schedule.ONE_F_ONE_B,
        microbatch_sizes=equal_microbatches(turns * sum(shares), layout.microbatch),
    )


LEAST_BUCKET, BUCKET_PER_RANK = 4e7, 1e6
"""Parameters of a bucket of gradients: at least, and for each rank (Megatron's)."""


def _units(task: Task, layout: Layout) -> list[int]:
    """Return the unit of each op: a block, or as many as a bucket of gradients takes.

    Embedding and head are units of their own. Fully sharded blocks are one each.
    """
    layers, count = task.shape.layers, 1
    if layout.zero < len(SHARDS) - 1:
        held = held_params(case_of(task, [layout], task.machine))
        each = as_number(held.block + held.experts)
        bucket = max(LEAST_BUCKET, BUCKET_PER_RANK * layout.dp * layout.cp)
        count = min(layers, math.ceil(bucket / each))
    of_layers = [1 + layer // count for layer in range(layers)]
    return [0, *of_layers, of_layers[-1] + 1]


def _stage(places: Sequence[Place], index: Mapping[int, int], shares: tuple[int, ...]) -> Stage:
    layout = places[0].layout
    groups = [group for place in places for group in place.devices]
    shared = len(groups) * layout.cp > 1
    return Stage(
        devices=tuple(tuple(index[device] for device in group) for group in groups),
        shares=shares,
        shard=SHARDS[layout.zero] if shared else Shard.NONE,
        shard_group=layout.shard_group if shared and layout.zero else 0,
        cp=layout.cp,
        sequence_parallel=layout.sp,
        ep=layout.ep,
        etp=layout.etp if layout.ep > 1 else 0,
        recompute="+".join(layout.recompute) or "none",
        offload_optimizer=layout.offload_optimizer,
        offload_activations=layout.offload_activations,
    )


def graph_of(pipelines: Sequence[Pipeline]) -> Graph:
    """Return the graph of a transformer: a block is an op, with costs at all degrees in use.

    Raises:
        ValueError: Pipelines of several microbatch sizes; a graph has the figures of one.
    """
    task = pipelines[0].task
    shape, size = task.shape, pipelines[0].places[0].layout.microbatch
    if {place.layout.microbatch for p in pipelines for place in p.places} != {size}:
        raise ValueError("a graph has the figures of one microbatch size")
    count = shape.layers + 2
    element = DTYPE_BYTES[parse_precision(task.precision).activations]
    width = element * size * task.sequence_length * shape.hidden
    tokens = size * task.sequence_length
    block = (
        shape.forward_flops(tokens, task.sequence_length) - 2.0 * tokens * shape.embedding_params
    )
    flops = [0.0, *[block / shape.layers] * shape.layers, 2.0 * tokens * shape.embedding_params]
    names = ("embedding", *(f"layers.{layer}" for layer in range(shape.layers)), "head")
    degrees, costs = _degrees(pipelines)
    return Graph(
        name=shape.name or "transformer",
        ops=OpTable(
            names=names,
            flops=np.array(flops),
            blocks=Labels(names=names[1:-1], of=np.array([-1, *range(shape.layers), -1])),
        ),
        costs=costs,
        tensors=TensorTable(
            names=("tokens", *(f"{name}.out" for name in names[:-1])),
            producer=np.array([-1, *range(count - 1)]),
            bytes=np.array([8.0 * tokens, *[width] * (count - 1)]),
            differentiable=np.array([False, *[True] * (count - 1)]),
        ),
        edges=EdgeTable(
            tensor=np.arange(count, dtype=np.int32), reader=np.arange(count, dtype=np.int32)
        ),
        parameters=_parameters(task),
        degrees=degrees,
        batch_size=size,
        tokens_per_sample=task.sequence_length,
        dtype=parse_precision(task.precision).compute,
    )


class _Parameter(NamedTuple):
    """A parameter of the graph: its name, elements, the op that uses it, and what it is."""

    name: str
    elements: float
    op: int
    expert: bool = False
    trained: bool = True


def _parameters(task: Task) -> ParameterTable:
    """Return dense parameters and experts of each block, adapters, the embedding and the head."""
    shape, last = task.shape, task.shape.layers + 1
    trains = task.frozen == 0
    # Adapters count among the parameters, and are divided like the dense ones of their block.
    adapters = 0.0 if trains else (1.0 - task.frozen) * shape.params / shape.layers
    rows = [_Parameter("embedding", shape.embedding_params, 0, trained=trains)]
    for layer in range(shape.layers):
        name, op = f"layers.{layer}", layer + 1
        dense = shape.dense_params / shape.layers - adapters
        rows.append(_Parameter(name, dense, op, trained=trains))
        if shape.experts:
            each = shape.routed_params / shape.layers
            rows.append(_Parameter(f"{name}.experts", each, op, expert=True, trained=trains))
        if adapters:
            rows.append(_Parameter(f"{name}.adapters", adapters, op))
    if not shape.tied:
        rows.append(_Parameter("head", shape.embedding_params, last, trained=trains))
    uses = list(range(len(rows)))
    dtype = parse_precision(task.precision).weights
    return ParameterTable(
        names=tuple(row.name for row in rows),
        bytes=np.array([row.elements * DTYPE_BYTES[dtype] for row in rows], dtype=np.float64),
        dtypes=(dtype,) * len(rows),
        trainable=np.array([row.trained for row in rows]),
        expert=np.array([row.expert for row in rows]),
        use_op=np.array([row.op for row in rows] + [last] * shape.tied),
        use_parameter=np.array(uses + [0] * shape.tied),
    )


def _degrees(pipelines: Sequence[Pipeline]) -> tuple[DegreeTable, tuple[OpCosts, ...]]:
    """Return the costs of blocks and ends at the degrees of all places, and the whole ones."""
    task = pipelines[0].task
    rows: dict[tuple[object, ...], list[float]] = {}
    machines: dict[str, Machine] = {}
    for pipeline in pipelines:
        for slowed in pipeline.places:
            # The cost model itself divides by the speed of each device.
            place = replace(slowed, machine=slowed.machine.at_speed(1.0))
            layout, kind = place.layout, place.device_type
            machines[kind] = place.machine
            again = "+".join(layout.recompute) or "none"
            for op, values in _rows(task, place).items():
                rows[op, kind, layout.tp, layout.cp, layout.ep, again] = values
    types = tuple(dict.fromkeys(str(key[1]) for key in rows))
    sets = tuple(dict.fromkeys(str(key[5]) for key in rows))
    columns = np.array(list(rows.values())).T
    layers = task.shape.layers
    table = DegreeTable(
        kind_of=np.array([EMBEDDING, *[BLOCK] * layers, HEAD]),
        device_types=types,
        recompute_sets=sets,
        kind=np.array([key[0] for key in rows]),
        device_type=np.array([types.index(str(key[1])) for key in rows]),
        tp=np.array([key[2] for key in rows]),
        cp=np.array([key[3] for key in rows]),
        ep=np.array([key[4] for key in rows]),
        recompute=np.array([sets.index(str(key[5])) for key in rows]),
        **dict(zip(_COLUMNS, columns, strict=True)),
    )
    size = pipelines[0].places[0].layout.microbatch
    return table, tuple(_whole(task, kind, machine, size) for kind, machine in machines.items())


_COLUMNS = (
    *("forward_s", "backward_s", "recompute_s", "saved_bytes", "workspace_bytes"),
    *("tensor_bytes", "tensor_calls", "tensor_calls_back"),
    *("context_bytes", "context_calls", "context_calls_back"),
    *("expert_bytes", "expert_calls", "expert_calls_back"),
)


def _rows(task: Task, place: Place) -> dict[int, list[float]]:
    """Return the figures of embedding, block and head at one place, in the order of columns.

    Calls are the seconds that show over those of one call, so that the cost model, which prices
    calls on the links of the stage, comes to the same seconds.
    """
    layout = place.layout
    case = case_of(task, [layout], place.machine)
    of = place_passes(task, place)
    saved, whole = as_number(kept_bytes(case)), as_number(layer_bytes(case))
    sizes, tokens, element = case.sizes, as_number(case.tokens), case.job.element_bytes
    groups = Groups(place.machine.fabric, case.layouts)

    def calls(
        kind: Kind, ranks: int, near: Numbers, moved: Numbers, shown: Numbers
    ) -> tuple[float, float]:
        size = as_number(moved)
        once = as_number(groups.seconds(kind, np.asarray(ranks), near, size))
        return size, as_number(shown) / once if once > 0 else 0.0

    tensor = calls(
        Kind.ALL_GATHER, layout.tp, groups.tensor, element * tokens * sizes.hidden, of.tensor_s
    )
    keys = 2.0 * element * tokens * layout.cp
    keys = keys * np.maximum(sizes.kv_heads / layout.tp, 1.0) * sizes.key_dim
    context = calls(Kind.ALL_GATHER, layout.cp, groups.context, keys, of.context_s)
    sent = element * case.split_tokens * np.maximum(sizes.top_k, 1) * sizes.hidden
    near = groups.experts(max(layout.etp, 1))
    experts = calls(Kind.ALL_TO_ALL, layout.ep, near, sent, of.expert_s)
    forward, embedding, head = map(as_number, (of.forward_s, of.embedding_s, of.head_s))
    replay, expert_replay = as_number(of.replay), as_number(of.expert_replay)
    # Collectives of sharded units are in the Program, beside the compute that they slow down.
    units = of.slowed_s if layout.pp == 1 else of.units_s
    forward, away = forward + as_number(of.offload_s) / 2, as_number(of.offload_s) / 2
    block = [forward, as_number(of.backward_s + units) + away, as_number(of.recompute_s)]
    # While a block runs backward, what it computes again and about its own gradients live.
    block += [saved, (2.0 if "full" in layout.recompute else 0.5) * whole]
    block += [*tensor, tensor[1] * (1.0 + replay)]
    block += [*context, context[1] * (2.0 + replay)]
    block += [*experts, experts[1] * (1.0 + expert_replay)]
    logits = as_number(tokens * sizes.vocab / layout.tp * case.software.logit_bytes)
    calls_of_none = [0.0] * 9
    return {
        EMBEDDING: [embedding / 3, embedding * 2 / 3, 0.0, 0.0, 0.0, *calls_of_none],
        BLOCK: block,
        HEAD: [head / 3, head * 2 / 3, 0.0, 0.0, logits, *calls_of_none],
    }


def _whole(task: Task, kind: str, machine: Machine, microbatch: int) -> OpCosts:
    """Return the costs of ops on one device that holds everything."""
    layout = Layout(microbatch=microbatch, precision=task.precision, framework=task.framework)
    place = Place(layout=layout, devices=((0,),), machine=machine, device_type=kind)
    of = place_passes(task, place)
    layers = task.shape.layers
    forward = [of.embedding_s / 3, *[of.forward_s] * layers, of.head_s / 3]
    backward = [of.embedding_s * 2 / 3, *[of.backward_s] * layers, of.head_s * 2 / 3]
    return OpCosts(
        device_type=kind,
        origin=CostOrigin.ESTIMATED,
        forward_s=np.array(forward),
        backward_s=np.array(backward),
        peak_flop_per_s=machine.peak_flop_per_s,
        memory_bytes_per_s=machine.memory_bytes_per_s,
    )
