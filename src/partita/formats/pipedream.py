"""PipeDream's profile ``graph.txt``, and ``gpus=N.txt``, the same with a stage for each node.

A node is a line ``<id> -- <description> -- forward_compute_time=<ms>, backward_compute_time=<ms>,
activation_size=<bytes or list>, parameter_size=<bytes>[ -- stage_id=<n>]``, an edge a line
``<TAB><id> -- <id>``. How a Graph holds it:

* A node is an op named by its id, with one output tensor of ``activation_size`` bytes (a list is
  summed and kept as an annotation) and, above 0 bytes, one float32 parameter ``<id>.weight``.
* A node without in-edges whose description begins with ``Input`` is an input of the model: a tensor
  without producer, whose ``load_s`` is the node's forward time. PipeDream's optimizer removes the
  same nodes.
* Tensors stand in the order of the nodes and edges in the order of the file, so that both orders
  survive; the order of the edges into a node is the order of its arguments.
* Saved for backward is the activation, except that in-place ops, Dropout, View, Size and
  ``__getitem__`` store nothing of their own.
* One batch is one published minibatch of unknown size.

Descriptions, lists of activations and stage ids are in ``graph.annotations["pipedream"]`` by id.
What a Graph knows beyond that (device types but one, variants, dtypes) is not written; a parameter
that several ops use is written with the first of them.

The plan that PipeDream's ``gpus=N.txt`` stands for: a profile with a stage for each node.

Replicas, devices and microbatches are not in the file; PipeDream's users copy them by hand from
what its optimizer prints. Unlike PipeDream's own output, ours keeps the inputs of the model in
their place and with their numbers; like there, they are of stage 0.
"""

import math
import re
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from partita.core.columns import MAX_BYTES, MAX_SECONDS, Ints, frozen_array
from partita.core.graph import EdgeTable, Graph, OpCosts, OpTable, SampleUnit, TensorTable
from partita.core.order import is_acyclic
from partita.core.plan import Plan, equal_microbatches, pipeline_stages
from partita.core.problem import Schedule
from partita.errors import FormatError, InvalidInputError
from partita.formats.edge_list import labels, weights
from partita.formats.json_fields import format_errors
from partita.formats.milliseconds import MS_PER_S, milliseconds, seconds

FORMAT = "pipedream"
SEPARATOR = " -- "
KEYS = ("forward_compute_time", "backward_compute_time", "activation_size", "parameter_size")
MAX_MS = MAX_SECONDS * MS_PER_S
_NUMBER = re.compile(r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?", re.ASCII)
_TYPE = re.compile(r"[\w.]+", re.ASCII)
_INPLACE = re.compile(r"[\w.]+\((?:[^()]*, )?inplace(?:=True)?\)")
_STORES_NOTHING = ("Dropout", "View", "Size", "__getitem__")


class NodeLine(NamedTuple):
    """A line of the file that describes a node."""

    line: int
    name: str
    description: str
    forward_ms: float
    backward_ms: float
    activation: tuple[float, ...]
    is_list: bool
    parameter_bytes: float
    stage: int | None

    @property
    def activation_bytes(self) -> float:
        """Bytes of all outputs together."""
        return math.fsum(self.activation)


class EdgeLine(NamedTuple):
    """A line of the file that describes an edge."""

    line: int
    source: str
    target: str


@format_errors()
def read_pipedream(text: str, *, name: str = "graph") -> Graph:
    """Return the graph of a profile, or of an optimizer's output.

    Args:
        text: The file.
        name: Name of the graph.

    Raises:
        FormatError: A line is not understood, a number is out of range, an id stands twice, an edge
            names a node that is not there, or there is a cycle; knows the line.
    """
    nodes, edges = parse_lines(text)
    row_of = _rows(nodes)
    source, target = _ends(edges, row_of)
    _check_acyclic(edges, len(nodes), source, target)
    read = set(target)
    is_input = [n.description.startswith("Input") and i not in read for i, n in enumerate(nodes)]
    ops = [node for node, skip in zip(nodes, is_input, strict=True) if not skip]
    if not ops:
        raise FormatError("no op: every node is an input of the model; expected some that compute")
    op_of = np.cumsum(~np.array(is_input)) - 1
    unread = set(range(len(nodes))) - set(source)
    returned = [i for i in sorted(unread) if not is_input[i]]
    used = [i for i in returned if not nodes[i].description.startswith("__getitem__")]
    return Graph(
        name=name,
        ops=_op_table(ops),
        costs=(
            OpCosts(
                forward_s=frozen_array([seconds(n.forward_ms) for n in ops], np.float64),
                backward_s=frozen_array([seconds(n.backward_ms) for n in ops], np.float64),
            ),
        ),
        tensors=TensorTable(
            names=tuple(node.name for node in nodes),
            producer=frozen_array(np.where(is_input, -1, op_of), np.int32),
            bytes=frozen_array([node.activation_bytes for node in nodes], np.float64),
            differentiable=frozen_array(~np.array(is_input), np.bool_),
            load_s=frozen_array(
                [
                    seconds(n.forward_ms) if skip else 0.0
                    for n, skip in zip(nodes, is_input, strict=True)
                ],
                np.float64,
            ),
        ),
        edges=EdgeTable(
            tensor=frozen_array(source, np.int32),
            reader=frozen_array(op_of[target] if target else [], np.int32),
        ),
        parameters=weights([n.name for n in ops], [n.parameter_bytes for n in ops]),
        outputs=frozen_array(used or returned, np.int32),
        sample_unit=SampleUnit.MINIBATCH,
        annotations={FORMAT: _annotations(nodes, is_input)},
    )


def _op_table(ops: Sequence[NodeLine]) -> OpTable:
    kinds = [_type_of(node.description) for node in ops]
    saved = [0.0 if stores_nothing(node.description) else node.activation_bytes for node in ops]
    return OpTable(
        names=tuple(node.name for node in ops),
        saved_bytes=frozen_array(saved, np.float64),
        types=labels(kinds),
    )


def stores_nothing(description: str) -> bool:
    """Return whether a node keeps nothing of its own for backward.

    >>> [stores_nothing(d) for d in ("ReLU(inplace)", "ReLU()", "View(-1)", "Conv2d(3, 64)")]
    [True, False, True, False]
    """
    return _type_of(description) in _STORES_NOTHING or bool(_INPLACE.fullmatch(description))


def _type_of(description: str) -> str:
    match = _TYPE.match(description)
    return match.group() if match else description


def _annotations(nodes: Sequence[NodeLine], is_input: Sequence[bool]) -> dict[str, Any]:
    found: dict[str, Any] = {"descriptions": {node.name: node.description for node in nodes}}
    lists = {node.name: node.activation for node in nodes if node.is_list}
    if lists:
        found["activation_lists"] = lists
    stages = {node.name: node.stage for node in nodes if node.stage is not None}
    if stages:
        found["stage_ids"] = stages
    odd = {
        node.name: (node.backward_ms, node.parameter_bytes)
        for node, skip in zip(nodes, is_input, strict=True)
        if skip and (node.backward_ms or node.parameter_bytes)
    }
    if odd:
        found["inputs"] = odd
    return found


def parse_lines(text: str) -> tuple[list[NodeLine], list[EdgeLine]]:
    """Return the nodes and edges of a file, line by line; only single lines are checked."""
    nodes, edges = [], []
    lines = text.removeprefix("\ufeff").replace("\r\n", "\n").replace("\r", "\n").split("\n")
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        if "\0" in line:
            raise FormatError("a NUL character; expected text", line=number)
        if line[0] in "\t " and f"{KEYS[0]}=" not in line:
            edges.append(_parse_edge(line.strip(), number))
        else:
            nodes.append(_parse_node(line.strip(), number))
    if not nodes:
        raise FormatError("no node; expected lines such as 'node1 -- Conv2d(3, 64) -- forward_...'")
    return nodes, edges


def _parse_edge(line: str, number: int) -> EdgeLine:
    ends = [part.strip() for part in line.split(SEPARATOR)]
    if len(ends) != 2 or not all(ends):
        raise FormatError(f"edge {_short(line)}; expected '<id> -- <id>'", line=number)
    return EdgeLine(number, ends[0], ends[1])


def _parse_node(line: str, number: int) -> NodeLine:
    fields = line.split(SEPARATOR)
    stage = None
    if fields[-1].startswith("stage_id="):
        stage = _parse_stage(fields.pop().removeprefix("stage_id="), number)
    name = fields[0].strip()
    if len(fields) < 3 or not name:
        expected = "<id> -- <description> -- forward_compute_time=..., ..."
        raise FormatError(f"node {_short(line)}; expected '{expected}'", line=number)
    parts = [item.partition("=") for item in fields[-1].split(", ")]
    values = {key.strip(): value.strip() for key, _, value in parts}
    if len(parts) != len(KEYS) or set(values) != set(KEYS):
        raise FormatError(
            f"node {name!r} has {_short(fields[-1])}; expected the keys {', '.join(KEYS)}",
            line=number,
        )

    def get(key: str, high: float) -> float:
        return _parse_number(values[key], f"{key} of node {name!r}", high, number)

    activation = values["activation_size"]
    is_list = activation.startswith("[") and activation.endswith("]")
    sizes = [part.strip() for part in activation[1:-1].split(";")] if is_list else [activation]
    sizes = [] if sizes == [""] else sizes
    what = f"activation_size of node {name!r}"
    return NodeLine(
        line=number,
        name=name,
        description=SEPARATOR.join(fields[1:-1]),
        forward_ms=get("forward_compute_time", MAX_MS),
        backward_ms=get("backward_compute_time", MAX_MS),
        activation=tuple(_parse_number(size, what, MAX_BYTES, number) for size in sizes),
        is_list=is_list,
        parameter_bytes=get("parameter_size", MAX_BYTES),
        stage=stage,
    )


def _parse_number(text: str, what: str, high: float, line: int) -> float:
    value = float(text) if _NUMBER.fullmatch(text) else math.nan
    if not 0 <= value <= high:
        raise FormatError(
            f"{what} is {_short(text)}; expected a number from 0 to {high:g}", line=line
        )
    return value


def _parse_stage(text: str, line: int) -> int:
    if not (text.isascii() and text.isdigit()) or len(text) > 9:
        raise FormatError(f"stage_id is {_short(text)}; expected 0, 1, 2, ...", line=line)
    return int(text)


def _short(text: str) -> str:
    return repr(text if len(text) <= 60 else f"{text[:57]}...")


def _rows(nodes: Sequence[NodeLine]) -> dict[str, int]:
    row_of: dict[str, int] = {}
    for row, node in enumerate(nodes):
        if node.name in row_of:
            first = nodes[row_of[node.name]].line
            raise FormatError(
                f"node {node.name!r} stands in line {first} too; ids must be unique", line=node.line
            )
        row_of[node.name] = row
    return row_of


def _ends(edges: Sequence[EdgeLine], row_of: Mapping[str, int]) -> tuple[list[int], list[int]]:
    for edge in edges:
        for end in (edge.source, edge.target):
            if end not in row_of:
                raise FormatError(
                    f"edge {edge.source!r} -> {edge.target!r}: there is no node {end!r}",
                    line=edge.line,
                )
    return [row_of[edge.source] for edge in edges], [row_of[edge.target] for edge in edges]


def _check_acyclic(
    edges: Sequence[EdgeLine], num_nodes: int, source: Sequence[int], target: Sequence[int]
) -> None:
    """Refuse a cycle, with the line of the first edge that closes one."""
    first, last = np.array(source, dtype=np.int32), np.array(target, dtype=np.int32)
    if is_acyclic(num_nodes, first, last):
        return
    good, bad = 0, len(edges)
    while bad - good > 1:
        middle = (good + bad) // 2
        if is_acyclic(num_nodes, first[:middle], last[:middle]):
            good = middle
        else:
            bad = middle
    edge = edges[bad - 1]
    raise FormatError(
        f"edge {edge.source!r} -> {edge.target!r} closes a cycle; expected a DAG", line=edge.line
    )


def write_pipedream(graph: Graph, *, device_type: str | None = None) -> str:
    """Return a graph as a profile, with stage ids where the file it came from had them.

    Args:
        graph: The graph.
        device_type: The type whose times are written; ``None`` = the reference.

    Raises:
        InvalidInputError: The format cannot say it: explicit backward ops, or a name with
            ``" -- "`` or a line break.
    """
    stages = graph.annotations.get(FORMAT, {}).get("stage_ids", {})
    return write_with_stages(graph, stages, device_type=device_type)


def write_with_stages(
    graph: Graph, stages: Mapping[str, int], *, device_type: str | None = None
) -> str:
    """Return a graph with the stage ids given by name of node; a node without one gets none."""
    if not graph.is_forward.all():
        name = graph.ops.names[int(np.argmin(graph.is_forward))]
        raise InvalidInputError(f"PipeDream's format cannot say that op {name!r} is backward")
    costs = _costs(graph, device_type)
    notes = graph.annotations.get(FORMAT, {})
    odd, lists = notes.get("inputs", {}), notes.get("activation_lists", {})
    sizes = _owned_bytes(graph)
    names = _node_names(graph)
    lines = []
    for op, tensors in _node_order(graph):
        name = names[0][op] if op >= 0 else names[1][tensors[0]]
        amounts = [float(graph.tensors.bytes[tensor]) for tensor in tensors]
        kept = lists.get(name)
        if kept is not None and [math.fsum(kept)] == amounts:
            amounts = list(kept)
        activation = (
            repr(amounts[0])
            if len(amounts) == 1 and kept is None
            else f"[{'; '.join(map(repr, amounts))}]"
        )
        if op >= 0:
            times = milliseconds(costs.forward_s[op]), milliseconds(costs.backward_s[op])
            parameter = sizes[op]
        else:
            backward, parameter = odd.get(name, (0.0, 0.0))
            times = milliseconds(graph.tensors.load_s[tensors[0]]), backward
        figures = (*map(_three_decimals, times), activation, _three_decimals(parameter))
        line = SEPARATOR.join(
            (
                name,
                _description(graph, op, name),
                ", ".join(f"{key}={value}" for key, value in zip(KEYS, figures, strict=True)),
            )
        )
        lines.append(f"{line}{SEPARATOR}stage_id={stages[name]}" if name in stages else line)
    source, reader = graph.edge_source.tolist(), graph.edges.reader.tolist()
    for tensor, op, after in zip(graph.edges.tensor.tolist(), source, reader, strict=True):
        before = names[0][op] if op >= 0 else names[1][tensor]
        lines.append(f"\t{before}{SEPARATOR}{names[0][after]}")
    return "\n".join(lines)


def _costs(graph: Graph, device_type: str | None) -> OpCosts:
    if device_type is None:
        return graph.costs[0]
    for costs in graph.costs:
        if costs.device_type == device_type:
            return costs
    known = ", ".join(costs.device_type or "any" for costs in graph.costs)
    raise InvalidInputError(f"graph {graph.name!r} has costs for {known}, not for {device_type!r}")


def _owned_bytes(graph: Graph) -> list[float]:
    """Return the bytes of the trainable parameters that each op is the first to use."""
    table = graph.parameters
    total = [0.0] * len(graph)
    seen: set[int] = set()
    for op, parameter in zip(table.use_op.tolist(), table.use_parameter.tolist(), strict=True):
        if table.trainable[parameter] and parameter not in seen:
            seen.add(parameter)
            total[op] += float(table.bytes[parameter])
    return total


def _node_order(graph: Graph) -> list[tuple[int, list[int]]]:
    """Return ``(op, tensors)`` for each node; op -1 is the input that its one tensor stands for.

    Inputs stand where their tensors stand among those of the ops, in a graph with one tensor for
    each op in order (as the reader makes it), else before all ops.
    """
    producer = graph.tensors.producer.tolist()
    made: list[list[int]] = [[] for _ in range(len(graph))]
    for tensor, op in enumerate(producer):
        if op >= 0:
            made[op].append(tensor)
    if [op for op in producer if op >= 0] == list(range(len(graph))):
        return [(op, [tensor]) for tensor, op in enumerate(producer)]
    inputs = [(-1, [tensor]) for tensor, op in enumerate(producer) if op < 0]
    return inputs + list(enumerate(made))


def _node_names(graph: Graph) -> tuple[Sequence[str], Sequence[str]]:
    """Return the ids of ops and of inputs (by tensor), which must differ."""
    ops = graph.ops.names
    taken = set(ops)
    inputs = list(graph.tensors.names)
    for tensor in np.flatnonzero(graph.tensors.producer < 0).tolist():
        while inputs[tensor] in taken:
            inputs[tensor] += ":input"
        taken.add(inputs[tensor])
    for name in taken:
        broken = any(mark in name for mark in "\n\r\0") or name[0] == "\ufeff"
        if broken or SEPARATOR in f" {name} " or name != name.strip():
            raise InvalidInputError(
                f"{name!r} cannot be an id in PipeDream's format; expected no line break, no "
                f"{SEPARATOR!r} and no blanks at the ends"
            )
    return ops, inputs


def _description(graph: Graph, op: int, name: str) -> str:
    kept = graph.annotations.get(FORMAT, {}).get("descriptions", {}).get(name)
    if kept is not None:
        return re.sub(r"[\n\r\0]", " ", str(kept))
    if op < 0:
        return "Input"
    types = graph.ops.types
    known = len(types.of) > 0 and types.of[op] >= 0
    text = types.names[types.of[op]] if known else name
    text = " ".join(text.replace("\0", " ").replace("--", "-").split())
    pointers = graph.in_edges[0]
    source = pointers[op] == pointers[op + 1]
    return f"Module({text})" if source and text.startswith("Input") else text


def _three_decimals(value: float) -> str:
    short = f"{value:.3f}"
    return short if float(short) == value else repr(float(value))


def stage_ids(graph: Graph) -> Ints | None:
    """Return the stage id that the file gave each op, -1 for none; ``None`` = it gave no op one."""
    found = graph.annotations.get(FORMAT, {}).get("stage_ids")
    if not found:
        return None
    return frozen_array([found.get(name, -1) for name in graph.ops.names], np.int32)


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
