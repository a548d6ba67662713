"""What an expert would place by hand: encoder-decoder models, as Baechi's baselines have it.

* A transformer with an encoder and a decoder: the encoder on the first device, the decoder and the
  output on the second.
* A recurrent one, such as GNMT: layer i of each stack on device i mod N. In GNMT layer 0 of the
  encoder is the bidirectional one, so that its other layers start at device 1.

Stacks are told by module paths: an op belongs to the encoder or the decoder if its path has a part
of that name. Modules of the encoder that the decoder calls again, such as a shared embedding, count
for the decoder. Everything that the encoder reads is placed with the encoder, everything else
outside of both stacks with the decoder. There is no rule for other models.
"""

from collections.abc import Sequence

import numpy as np
import rustworkx

from partita.core.columns import Array
from partita.core.graph import Graph
from partita.core.placement import placement_plan
from partita.core.plan import equal_microbatches
from partita.core.problem import Problem
from partita.core.solution import Solution
from partita.errors import InvalidInputError
from partita.planners.pipeline import main_devices, pipeline_plan, solution_of

_ENCODER, _DECODER = 0, 1
_STACKS = {"encoder": _ENCODER, "decoder": _DECODER}
_RECURRENT = ("lstm", "gru", "rnn")


def plan_expert(problem: Problem) -> Solution:
    """Place an encoder-decoder model as people do by hand.

    Raises:
        InfeasibleError: A device has too little memory, or ops that must share one are apart.
        InvalidInputError: There is no rule for the model, or there is one device only.
    """
    devices = main_devices(problem)
    if len(devices) < 2:
        raise InvalidInputError(
            "expert divides an encoder and a decoder over 2 devices or more; there is 1"
        )
    stack = _stack_of_ops(problem.graph)
    layer = _recurrent_layers(problem.graph, stack)
    if layer is None:
        plan = pipeline_plan(problem, stack.astype(np.int32), [devices[:1], devices[1:2]])
        return solution_of(problem, plan, "expert", {})
    plan = placement_plan(
        problem.graph,
        problem.cluster.device_names,
        np.array(devices)[layer % len(devices)],
        schedule=problem.objective.placement_schedule,
        microbatch_sizes=equal_microbatches(problem.microbatches, problem.microbatch_size),
    )
    return solution_of(problem, plan, "expert", {})


def _stack_of_ops(graph: Graph) -> Array:
    """Return for each op whether it is placed with the encoder (0) or with the decoder (1)."""
    labels = _labelled(graph)
    if not {_ENCODER, _DECODER} <= set(labels.tolist()) or not graph.is_forward.all():
        raise InvalidInputError(
            f"expert places models with an encoder and a decoder, told by the paths of their "
            f"modules; {graph.name!r} has no such stacks of forward ops: choose another planner"
        )
    labels[_called_again(graph, labels)] = -1
    stack = np.full(len(graph), _DECODER, dtype=np.int64)
    ptr, edges = graph.in_edges
    for op in graph.topological_order[::-1].tolist():
        if labels[op] == _ENCODER:
            stack[op] = _ENCODER
        if stack[op] != _ENCODER:
            continue
        if labels[op] == _DECODER:
            raise InvalidInputError(
                f"expert places an encoder before its decoder; in {graph.name!r} the encoder reads "
                f"op {graph.ops.names[op]!r} of the decoder"
            )
        sources = graph.edge_source[edges[ptr[op] : ptr[op + 1]]]
        stack[sources[sources >= 0]] = _ENCODER
    return stack


def _labelled(graph: Graph) -> Array:
    """Return the stack that the module of each op is in, -1 = neither."""
    modules = graph.ops.modules
    of_module = [_stack_of_path(path) for path in modules.names]
    if not len(modules.of):
        return np.full(len(graph), -1, dtype=np.int64)
    return np.array([*of_module, -1], dtype=np.int64)[modules.of]


def _stack_of_path(path: str) -> int:
    """Return the stack that a module path names first, -1 = none."""
    return next((_STACKS[part] for part in path.split(".") if part in _STACKS), -1)


def _called_again(graph: Graph, labels: Array) -> list[int]:
    """Return the encoder's ops that another stack runs: modules of it that are called once more.

    Of the connected parts of the encoder's ops the largest is the encoder, the earliest of equal
    ones. Another part belongs to whoever reads it if the encoder itself runs all of its modules.
    """
    parts = _connected(graph, np.flatnonzero(labels == _ENCODER))
    own = max(parts, key=len)
    module = graph.ops.modules.of
    known = set(module[own].tolist())
    others = [part for part in parts if part is not own and set(module[part].tolist()) <= known]
    return [op for part in others for op in part]


def _connected(graph: Graph, ops: Array) -> list[list[int]]:
    """Return some ops in connected parts, in the order of their first ops."""
    place = np.full(len(graph), -1, dtype=np.int64)
    place[ops] = np.arange(len(ops))
    inner = graph.edge_source >= 0
    ends = place[graph.edge_source[inner]], place[graph.edges.reader[inner]]
    joined = rustworkx.PyGraph()
    joined.add_nodes_from(ops.tolist())
    joined.add_edges_from_no_data(
        [(a, b) for a, b in zip(*(end.tolist() for end in ends), strict=True) if min(a, b) >= 0]
    )
    parts = [sorted(int(ops[i]) for i in part) for part in rustworkx.connected_components(joined)]
    return sorted(parts)


def _recurrent_layers(graph: Graph, stack: Array) -> Array | None:
    """Return the layer of each op within its stack; None where a stack has no recurrent layer.

    A layer is a recurrent op. Every other op joins the last layer of its stack that it depends on,
    else the first.
    """
    kinds = graph.ops.types
    is_recurrent = [any(word in name.lower() for word in _RECURRENT) for name in kinds.names]
    if not len(kinds.of):
        return None
    starts = np.array([*is_recurrent, False])[kinds.of]
    if not (starts & (stack == _ENCODER)).any() or not (starts & (stack == _DECODER)).any():
        return None
    layer = np.full(len(graph), -1, dtype=np.int64)
    count = [0, 0]
    ptr, edges = graph.in_edges
    for op in graph.topological_order.tolist():
        side = int(stack[op])
        if starts[op]:
            layer[op] = count[side]
            count[side] += 1
            continue
        sources = graph.edge_source[edges[ptr[op] : ptr[op + 1]]].tolist()
        layer[op] = max((int(layer[s]) for s in sources if s >= 0 and stack[s] == side), default=-1)
    return _together(graph, np.maximum(layer, 0))


def _together(graph: Graph, layer: Array) -> Array:
    """Let ops that must share a device join the layer of the first of them."""
    home: dict[int, int] = {}
    colors: Sequence[int] = graph.ops.colocation.tolist()
    for op, color in enumerate(colors):
        if color >= 0:
            layer[op] = home.setdefault(color, int(layer[op]))
    return layer
