"""Splits of a ``dnn-partitioning`` input: which device runs each node, as JSON.

Either ``{"fpgas": [{"nodes": [...]}, ...], "cpus": [...]}``, as the published programs write it, or
``{"assignment": {"<node>": device}}`` with ``"acc0"``, ``"cpu0"``, or a number: 0 = the CPU, i from
1 on = accelerator i - 1. A split of the forward nodes alone places the backward nodes by their
colour class. Loads are not read, and not written: the cost model says them.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from partita.core.columns import frozen_array
from partita.core.graph import DeviceKind
from partita.core.placement import placement_plan
from partita.core.plan import Plan
from partita.core.problem import Mode, Problem, Schedule
from partita.errors import FormatError, InvalidInputError
from partita.formats.dnn_partitioning import op_ids
from partita.formats.json_fields import (
    MAX_ID,
    Fields,
    as_integer,
    format_errors,
    read_object,
    refuse,
    write_rows,
)

MAX_NAMED = 5


@format_errors()
def read_split(text: str, problem: Problem) -> Plan:
    """Return the plan of a split.

    Raises:
        FormatError: A node is not there, stands twice or is not placed, or a device is not there.
    """
    document = read_object(text)
    row_of = {name: row for row, name in enumerate(op_ids(problem.graph))}
    if "assignment" in document.values:
        named = _assigned(document.object("assignment"), row_of)
    else:
        named = _listed(document, row_of)
    device_of = [-1] * len(problem.graph)
    devices = {kind: _devices(problem, kind) for kind in DeviceKind}
    for row, (kind, number, place) in named.items():
        if number >= len(devices[kind]):
            raise FormatError(
                f"{place} uses {kind.value} {number}; the problem has {len(devices[kind])} of them"
            )
        device_of[row] = devices[kind][number]
    _follow_colors(problem, device_of)
    missing = [problem.graph.ops.names[row] for row, one in enumerate(device_of) if one < 0]
    if missing:
        raise FormatError(
            f"{len(missing)} nodes are not placed, such as {', '.join(missing[:MAX_NAMED])}"
        )
    inference = problem.objective.mode is Mode.INFERENCE
    return placement_plan(
        problem.graph,
        problem.cluster.device_names,
        frozen_array(device_of, np.int32),
        schedule=Schedule.INFERENCE if inference else Schedule.GPIPE,
    )


def _devices(problem: Problem, kind: DeviceKind) -> list[int]:
    devices = problem.cluster.devices
    return [index for index, device in enumerate(devices) if device.kind is kind]


_Named = Mapping[int, tuple[DeviceKind, int, str]]


def _listed(document: Fields, row_of: Mapping[str, int]) -> _Named:
    """Return kind, number and place for each row named in the lists of machines."""
    found: dict[int, tuple[DeviceKind, int, str]] = {}
    for key, kind in (("fpgas", DeviceKind.GPU), ("cpus", DeviceKind.CPU)):
        machines = document.rows(key) if key in document.values else []
        for number, machine in enumerate(machines):
            for item in machine.items("nodes"):
                place = machine.at("nodes")
                row = row_of.get(str(as_integer(item, place, low=-MAX_ID)))
                if row is None or row in found:
                    refuse(place, item, "the id of a node that is not placed before")
                found[row] = (kind, number, place)
    return found


def _assigned(assignment: Fields, row_of: Mapping[str, int]) -> _Named:
    found: dict[int, tuple[DeviceKind, int, str]] = {}
    for key, value in assignment.values.items():
        if key not in row_of:
            refuse("assignment", key, "the id of a node")
        found[row_of[key]] = (*_device(value, assignment.at(key)), assignment.at(key))
    return found


def _device(value: Any, place: str) -> tuple[DeviceKind, int]:  # noqa: ANN401 (JSON is any value)
    if isinstance(value, str):
        prefix, digits = value[:3], value[3:]
        kinds = {"acc": DeviceKind.GPU, "cpu": DeviceKind.CPU}
        if prefix in kinds and _is_short_number(digits):
            return kinds[prefix], int(digits)
        if not _is_short_number(value):
            refuse(place, value, "a device such as 'acc0', 'cpu0', 0 (the CPU) or 1 (acc0)")
        value = int(value)
    number = as_integer(value, place)
    return (DeviceKind.GPU, number - 1) if number else (DeviceKind.CPU, 0)


def _is_short_number(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= 9


def _follow_colors(problem: Problem, device_of: list[int]) -> None:
    """Put ops that are not placed where an op of their colocation class is."""
    colors = problem.graph.ops.colocation.tolist()
    device_of_color = {
        color: device for color, device in zip(colors, device_of, strict=True) if device >= 0
    }
    for row, color in enumerate(colors):
        if device_of[row] < 0 and color >= 0:
            device_of[row] = device_of_color.get(color, -1)


def write_split(problem: Problem, plan: Plan) -> str:
    """Return a plan as a split, with an entry for every device of the problem.

    Raises:
        InvalidInputError: The plan does not fit the problem, or runs an op on several devices.
    """
    plan.check_fits(problem)
    if any(stage.num_replicas * stage.tp > 1 for stage in plan.stages):
        raise InvalidInputError("a split has one device for each op; the plan has replicas")
    ids = op_ids(problem.graph)
    nodes: dict[str, list[int]] = {name: [] for name in problem.cluster.device_names}
    for row, device in enumerate(plan.device_of.tolist()):
        nodes[plan.devices[device]].append(int(ids[row]))
    names = problem.cluster.device_names
    return write_rows(
        {
            key: [{"nodes": nodes[names[index]]} for index in _devices(problem, kind)]
            for key, kind in (("fpgas", DeviceKind.GPU), ("cpus", DeviceKind.CPU))
        }
    )
