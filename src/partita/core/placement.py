"""From "which op on which device" to a plan with stages.

Contracting all ops of a device into one stage is cyclic for most placements. Instead the ops are
walked in one global topological order; on each device a stage ends before every op with a remote
input and after every op with a remote reader, and stages are numbered by their first op. The result
is never cyclic, and nothing is sent later or awaited earlier than op by op.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from partita.core.columns import Ints
from partita.core.graph import Graph
from partita.core.order import is_acyclic
from partita.core.plan import Plan, Stage, equal_microbatches
from partita.core.problem import Schedule
from partita.errors import InvalidInputError


def placement_plan(
    graph: Graph,
    devices: Sequence[str],
    device_of: NDArray[Any],
    *,
    order: NDArray[Any] | None = None,
    schedule: Schedule = Schedule.GPIPE,
    microbatch_sizes: NDArray[Any] | None = None,
) -> Plan:
    """Return the plan that runs each op on its device.

    Args:
        graph: The graph.
        devices: Names of the devices.
        device_of: Index into ``devices`` for each op.
        order: A topological order of all ops, in which each device runs its own; ``None`` = the
            graph's.
        schedule: Schedule of the plan.
        microbatch_sizes: Samples of the microbatches; ``None`` = one of the graph's batch size.

    Raises:
        InvalidInputError: The order is not topological, or a device is not there.
    """
    device_of = np.asarray(device_of)
    if device_of.shape != (len(graph),):
        raise InvalidInputError(f"{device_of.size} placements for {len(graph)} ops")
    if device_of.min() < 0 or device_of.max() >= len(devices):
        raise InvalidInputError(f"a placement names a device beyond the {len(devices)} there are")
    order = graph.topological_order if order is None else np.asarray(order)
    _check_order(graph, order)
    stage_of, stage_device = _cut(graph, device_of, order)
    single = {int(d): Stage(devices=((int(d),),)) for d in np.unique(stage_device)}
    sizes = (
        equal_microbatches(1, graph.batch_size) if microbatch_sizes is None else microbatch_sizes
    )
    return Plan(
        fingerprint=graph.fingerprint,
        devices=tuple(devices),
        stage_of=stage_of,
        stages=tuple(single[device] for device in stage_device.tolist()),
        schedule=schedule,
        microbatch_sizes=sizes,
    )


def is_pipeline(graph: Graph, part_of: NDArray[Any]) -> bool:
    """Return whether parts can be one stage each: no cycle between them on forward ops."""
    source, reader = _forward_edges(graph)
    cut = part_of[source] != part_of[reader]
    return is_acyclic(int(part_of.max()) + 1, part_of[source[cut]], part_of[reader[cut]])


def _forward_edges(graph: Graph) -> tuple[Ints, Ints]:
    source, reader = graph.edge_source, graph.edges.reader
    inner = source >= 0
    source, reader = source[inner], reader[inner]
    forward = graph.is_forward[source] & graph.is_forward[reader]
    return source[forward], reader[forward]


def _check_order(graph: Graph, order: NDArray[Any]) -> None:
    if not np.array_equal(np.sort(order), np.arange(len(graph))):
        raise InvalidInputError(
            f"an order of {len(order)} ops does not hold each of {len(graph)} once"
        )
    position = np.empty(len(graph), dtype=np.int64)
    position[order] = np.arange(len(order))
    source, reader = _forward_edges(graph)
    wrong = position[source] > position[reader]
    if wrong.any():
        edge = int(np.argmax(wrong))
        names = graph.ops.names
        raise InvalidInputError(
            f"the order runs {names[reader[edge]]!r} before {names[source[edge]]!r}, which it reads"
        )


def _cut(graph: Graph, device_of: NDArray[Any], order: NDArray[Any]) -> tuple[Ints, Ints]:
    """Return the stage of each op and the device of each stage."""
    source, reader = _forward_edges(graph)
    remote = device_of[source] != device_of[reader]
    opens = np.zeros(len(graph), dtype=bool)
    closes = np.zeros(len(graph), dtype=bool)
    opens[reader[remote]] = True
    closes[source[remote]] = True
    forward = order[graph.is_forward[order]]
    # Sorted by device and then by order, a stage begins where the device changes, the op has a
    # remote input, or the op before it has a remote reader.
    by_device = forward[np.argsort(device_of[forward], kind="stable")]
    device = device_of[by_device]
    begins = np.ones(len(by_device), dtype=bool)
    begins[1:] = (device[1:] != device[:-1]) | opens[by_device[1:]] | closes[by_device[:-1]]
    run = np.cumsum(begins) - 1
    position = np.empty(len(graph), dtype=np.int64)
    position[order] = np.arange(len(order))
    first = position[by_device[begins]]
    number = np.empty(len(first), dtype=np.int32)
    number[np.argsort(first)] = np.arange(len(first))
    stage_of = np.full(len(graph), -1, dtype=np.int32)
    stage_of[by_device] = number[run]
    stage_device = np.empty(len(first), dtype=np.int32)
    stage_device[number] = device[begins]
    return _place_backward(graph, device_of, stage_of, stage_device)


def _place_backward(
    graph: Graph, device_of: NDArray[Any], stage_of: Ints, stage_device: Ints
) -> tuple[Ints, Ints]:
    """Put explicit backward ops with a forward op of their class, else anywhere on their device."""
    backward = np.flatnonzero(stage_of < 0)
    if not len(backward):
        return stage_of, stage_device
    stage_of_class: dict[tuple[int, int], int] = {}
    for op in np.flatnonzero(stage_of >= 0).tolist():
        key = (int(graph.ops.colocation[op]), int(device_of[op]))
        stage_of_class.setdefault(key, int(stage_of[op]))
    devices = stage_device.tolist()
    first_on = {device: stage for stage, device in reversed(list(enumerate(devices)))}
    for op in backward.tolist():
        color, device = int(graph.ops.colocation[op]), int(device_of[op])
        if device not in first_on:
            first_on[device] = len(devices)
            devices.append(device)
        known = stage_of_class.get((color, device)) if color >= 0 else None
        stage_of[op] = first_on[device] if known is None else known
    return stage_of, np.array(devices, dtype=np.int32)
