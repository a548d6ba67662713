"""The plan that PipeDream's ``gpus=N.txt`` stands for: a profile with a stage for each node.

Replicas, devices and microbatches are not in the file; PipeDream's users copy them by hand from
what its optimizer prints. Unlike PipeDream's own output, ours keeps the inputs of the model in
their place and with their numbers; like there, they are of stage 0.
"""

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise

import numpy as np

from partita.core.columns import frozen_array
from partita.core.graph import Graph
from partita.core.plan import Plan, equal_microbatches, pipeline_stages
from partita.core.problem import Schedule
from partita.errors import FormatError, InvalidInputError
from partita.formats.json_fields import format_errors
from partita.formats.pipedream import NodeLine, parse_lines, write_with_stages

MAX_MICROBATCHES = 1_000_000


@format_errors()
def read_pipedream_plan(
    text: str,
    graph: Graph,
    *,
    replicas: Sequence[int] = (),
    devices: Sequence[str] = (),
    microbatches: int | None = None,
) -> Plan:
    """Return the plan that ``gpus=N.txt`` describes for a graph.

    Ops that the file leaves out (PipeDream drops unused ``__getitem__`` nodes) go with the op that
    they read from. Stage ids need not be without gaps.

    Args:
        text: The file.
        graph: The graph that is planned: the profile, or the graph read from the same file.
        replicas: Devices of each stage, first stage first; empty = one each.
        devices: Names of the devices in the order of the stages; empty = ``host0/gpu0`` and so on.
        microbatches: Microbatches in a step; ``None`` = the fewest that all replicas can share.

    Raises:
        FormatError: A node is missing or has no stage, data flows to an earlier stage, or the
            arguments do not fit the stages.
    """
    nodes, _ = parse_lines(text)
    node_of = {node.name: node for node in nodes}
    stage_ids = _planned_stages(graph, node_of)
    numbers = sorted(set(stage_ids))
    dense = {stage: index for index, stage in enumerate(numbers)}
    counts = list(replicas) or [1] * len(numbers)
    if len(counts) != len(numbers) or min(counts) < 1:
        raise FormatError(f"replicas {counts} do not fit the {len(numbers)} stages of the file")
    total = sum(counts)
    known = tuple(devices[:total]) or tuple(f"host0/gpu{device}" for device in range(total))
    if len(known) < total:
        raise FormatError(f"{len(known)} devices for {total} replicas")
    rounds = math.lcm(*counts) if microbatches is None else microbatches
    if not 1 <= rounds <= MAX_MICROBATCHES:
        raise FormatError(f"{rounds} microbatches in a step; expected 1 to {MAX_MICROBATCHES}")
    begins = np.cumsum([0, *counts]).tolist()
    return Plan(
        fingerprint=graph.fingerprint,
        devices=known,
        stage_of=frozen_array([dense[stage] for stage in stage_ids], np.int32),
        stages=pipeline_stages([range(begin, end) for begin, end in pairwise(begins)]),
        schedule=Schedule.PIPEDREAM,
        microbatch_sizes=equal_microbatches(rounds, graph.batch_size),
    )


def _planned_stages(graph: Graph, node_of: Mapping[str, NodeLine]) -> list[int]:
    """Return the stage id of each op, which no edge may lead down from."""
    found: list[int | None] = []
    for name in graph.ops.names:
        node = node_of.get(name)
        if node is not None and node.stage is None:
            raise FormatError(f"node {name!r} has no stage_id", line=node.line)
        found.append(None if node is None else node.stage)
    pointers, edges = graph.in_edges
    for op in graph.topological_order.tolist():
        feeding = graph.edge_source[edges[pointers[op] : pointers[op + 1]]].tolist()
        before = [(found[feeder] or 0, feeder) for feeder in feeding if feeder >= 0]
        stage = found[op]
        if stage is None:
            if not before or not _is_element(graph, op):
                raise FormatError(f"op {graph.ops.names[op]!r} of the graph is not in the plan")
            found[op] = max(before)[0]
        elif before and max(before)[0] > stage:
            late, feeder = max(before)
            raise FormatError(
                f"{graph.ops.names[op]!r} of stage {stage} reads from "
                f"{graph.ops.names[feeder]!r} of the later stage {late}"
            )
    return [stage for stage in found if stage is not None]


def _is_element(graph: Graph, op: int) -> bool:
    types = graph.ops.types
    return len(types.of) > 0 and types.of[op] >= 0 and types.names[types.of[op]] == "__getitem__"


def write_pipedream_plan(graph: Graph, plan: Plan) -> str:
    """Return ``gpus=N.txt``: the graph with the stage of each op.

    Raises:
        InvalidInputError: The plan is for another graph, or the format cannot say it.
    """
    if plan.fingerprint != graph.fingerprint or len(plan.stage_of) != len(graph):
        raise InvalidInputError(f"the plan is not for graph {graph.name!r}")
    stages = dict(zip(graph.ops.names, plan.stage_of.tolist(), strict=True))
    inputs = {graph.tensors.names[i]: 0 for i in np.flatnonzero(graph.tensors.producer < 0)}
    return write_with_stages(graph, inputs | stages)
