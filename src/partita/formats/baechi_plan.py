"""Placements of Baechi, as JSON: ``{"placement": [device, ...], "order": [id, ...]}``.

``placement`` has the device of each node: a list by id where the ids are 0, 1, ..., else an object
``{"<id>": device}``. ``order`` has all ids in the order in which they were scheduled, each device
runs its own in that order; without it a topological order is taken. Other keys (start times,
favourite children, results) are ignored.
"""

from collections.abc import Mapping

import numpy as np

from partita.core.columns import Ints, frozen_array
from partita.core.graph import Graph
from partita.core.placement import placement_plan
from partita.core.plan import Plan
from partita.core.problem import Mode, Problem, Schedule
from partita.errors import FormatError, InvalidInputError
from partita.formats.baechi import device_numbers
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


@format_errors()
def read_placement(text: str, problem: Problem) -> Plan:
    """Return the plan of a placement.

    Raises:
        FormatError: A node is not there, not placed or twice in the order, a device is not there,
            or the order is not topological.
    """
    document = read_object(text)
    row_of = {int(name): row for row, name in enumerate(op_ids(problem.graph))}
    device_of = _devices(document, row_of, problem)
    order = None
    if document.values.get("order") is not None:
        rows = []
        for position, item in enumerate(document.items("order")):
            node = as_integer(item, f"order[{position}]", low=-MAX_ID)
            if node not in row_of:
                refuse(f"order[{position}]", item, "the id of a node")
            rows.append(row_of[node])
        order = frozen_array(rows, np.int32)
        if len(set(rows)) != len(problem.graph) or len(rows) != len(problem.graph):
            raise FormatError(
                f"order names {len(set(rows))} nodes in {len(rows)} places; "
                f"expected each of {len(problem.graph)} once"
            )
    return _plan(problem, problem.cluster.device_names, device_of, order)


def _plan(problem: Problem, devices: tuple[str, ...], device_of: Ints, order: Ints | None) -> Plan:
    inference = problem.objective.mode is Mode.INFERENCE
    return placement_plan(
        problem.graph,
        devices,
        device_of,
        order=order,
        schedule=Schedule.INFERENCE if inference else Schedule.GPIPE,
    )


def _devices(document: Fields, row_of: Mapping[int, int], problem: Problem) -> Ints:
    given = document.need("placement")
    if isinstance(given, list):
        values = {str(node): device for node, device in enumerate(given)}
    else:
        values = document.object("placement").values
    index_of = {number: i for i, number in enumerate(device_numbers(problem.cluster))}
    device_of = [-1] * len(row_of)
    for node, value in values.items():
        digits = node.removeprefix("-")
        known = digits.isascii() and digits.isdigit() and len(digits) <= 15
        if not known or int(node) not in row_of:
            refuse("placement", node, "the id of a node")
        number = as_integer(value, f"placement[{node}]")
        if number not in index_of:
            refuse(f"placement[{node}]", value, f"one of {len(index_of)} devices")
        device_of[row_of[int(node)]] = index_of[number]
    missing = [node for node, row in row_of.items() if device_of[row] < 0]
    if missing:
        raise FormatError(f"{len(missing)} nodes are not placed, such as {missing[0]}")
    return frozen_array(device_of, np.int32)


def write_placement(problem: Problem, plan: Plan) -> str:
    """Return a plan as a placement, with an order that gives the same stages again.

    Raises:
        InvalidInputError: The plan does not fit the problem, or runs an op on several devices.
    """
    plan.check_fits(problem)
    if any(stage.num_replicas * stage.tp > 1 for stage in plan.stages):
        raise InvalidInputError("a placement has one device for each op; the plan has replicas")
    # A plan from elsewhere may cut its stages otherwise than a placement does: cut them again.
    order = _order(problem.graph, plan)
    order = _order(problem.graph, _plan(problem, plan.devices, plan.device_of, order))
    ids = [int(name) for name in op_ids(problem.graph)]
    numbers = device_numbers(problem.cluster)
    number = [numbers[problem.cluster.index_of[name]] for name in plan.devices]
    device_of = {
        node: number[device] for node, device in zip(ids, plan.device_of.tolist(), strict=True)
    }
    by_row = sorted(ids) == list(range(len(ids)))
    placement = (
        [device_of[node] for node in range(len(ids))]
        if by_row
        else {str(node): device for node, device in device_of.items()}
    )
    return write_rows({"placement": placement, "order": [ids[op] for op in order.tolist()]})


def _order(graph: Graph, plan: Plan) -> Ints:
    """Return a topological order that runs stage after stage.

    In a stage, an op with an input from another device comes first and one with a reader on another
    device last, where the data allow it: that is where a placement cuts.
    """
    source, reader = graph.edge_source, graph.edges.reader
    inner = (source >= 0) & graph.is_forward[source] & graph.is_forward[reader]
    source, reader = source[inner], reader[inner]
    device_of, stage_of = plan.device_of, plan.stage_of
    remote = device_of[source] != device_of[reader]
    local = stage_of[source] == stage_of[reader]
    rank = np.ones(len(graph), dtype=np.int64)
    opens, closes, follows, leads = (np.zeros(len(graph), dtype=bool) for _ in range(4))
    opens[reader[remote]] = True
    closes[source[remote]] = True
    follows[reader[local]] = True
    leads[source[local]] = True
    rank[closes & ~leads] = 2
    rank[opens & ~follows] = 0
    position = np.empty(len(graph), dtype=np.int64)
    position[graph.topological_order] = np.arange(len(graph))
    return frozen_array(np.lexsort((position, rank, stage_of)), np.int32)
