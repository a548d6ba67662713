"""The plan of a ``gpus=N.txt`` for a model: whose node is which call of a module.

A file that Partita wrote names the ops. PipeDream's profiler numbers nodes and describes the layers
that they are. A node and a call of the model are the same if the layers before them and after them
are, so that the order in which branches are computed does not matter. What is between the layers
(additions, reshapes) goes with what it reads.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from torch import nn

from partita.capture.captured import CapturedModel
from partita.capture.op import CapturedOp
from partita.core.columns import frozen_array
from partita.core.graph import Graph
from partita.core.plan import Plan, Stage
from partita.errors import InvalidInputError
from partita.exporters.layers import constructor_of

_WEIGHTED = (
    nn.Linear,
    nn.Bilinear,
    nn.Embedding,
    nn.EmbeddingBag,
    nn.RNNBase,
    nn.LayerNorm,
    nn.GroupNorm,
    nn.modules.conv._ConvNd,  # noqa: SLF001  # torch has no public name for all of them
    nn.modules.batchnorm._NormBase,  # noqa: SLF001  # likewise
)


def matched_plan(graph: Graph, plan: Plan, captured: CapturedModel) -> Plan:
    """Return a plan for the graph of a model, out of one for a graph of the same layers.

    Raises:
        InvalidInputError: A node is no call of the model; says which.
    """
    own = captured.graph
    if graph.fingerprint == own.fingerprint:
        return plan
    stages = plan.stage_of.tolist()
    given = dict(zip(graph.ops.names, stages, strict=True))
    if not all(name in given for name in own.ops.names):
        given = _by_calls(graph, given, captured)
    stage_of = stages_along_data(own, captured.ops, given)
    used = sorted(set(stage_of))
    if len(used) != len(plan.stages):
        missing = next(stage for stage in range(len(plan.stages)) if stage not in used)
        raise InvalidInputError(
            f"no op of {own.name!r} is in stage {missing} of the plan; its nodes compute nothing"
        )
    kept: tuple[Stage, ...] = plan.stages
    return Plan(
        fingerprint=own.fingerprint,
        devices=plan.devices,
        stage_of=frozen_array(stage_of, np.int32),
        stages=kept,
        schedule=plan.schedule,
        microbatch_sizes=frozen_array([own.batch_size] * len(plan.microbatch_sizes), np.int32),
    )


@dataclass(frozen=True, slots=True)
class _Call:
    """A layer in a graph of layers.

    Attributes:
        name: Node of the file, or path of the module.
        constructor: Source that makes the layer.
        parents: Calls whose results it reads, with no other layer between.
        ops: Names of its ops.
    """

    name: str
    constructor: str
    parents: frozenset[int]
    ops: tuple[str, ...]


def _by_calls(graph: Graph, stage_of: Mapping[str, int], captured: CapturedModel) -> dict[str, int]:
    """Return the stage of each op of a model that a node of the file stands for.

    All layers are compared; if they differ, those with parameters alone: pools and activations of
    a model have changed over the years.
    """
    for only_weights in (False, True):
        nodes = _file_calls(graph, only_weights=only_weights)
        calls = _model_calls(captured, only_weights=only_weights)
        pairs, odd = _pairs(nodes, calls)
        if odd is None:
            return {op: stage_of[node.name] for node, call in pairs for op in call.ops}
    raise InvalidInputError(
        f"{odd}: the file has {len(nodes)} layers with parameters, {captured.graph.name!r} "
        f"{len(calls)}; it is another model, or of another scale"
    )


def _pairs(
    nodes: Sequence[_Call], calls: Sequence[_Call]
) -> tuple[list[tuple[_Call, _Call]], str | None]:
    """Return which node is which call, and the first that has no partner."""
    waiting: dict[str, list[int]] = {}
    for row, key in enumerate(_keys(calls)):
        waiting.setdefault(key, []).append(row)
    pairs = []
    for node, key in zip(nodes, _keys(nodes), strict=True):
        if not waiting.get(key):
            return [], f"node {node.name!r} ({node.constructor}) is at no such place of the model"
        pairs.append((node, calls[waiting[key].pop(0)]))
    left = [calls[rows[0]].name for rows in waiting.values() if rows]
    return pairs, f"module {left[0]!r} of the model is not in the file" if left else None


def _keys(calls: Sequence[_Call]) -> list[str]:
    """Return a text for each layer that says what it is, all before it and all after it."""
    before: list[str] = []
    children: list[list[int]] = [[] for _ in calls]
    for row, call in enumerate(calls):
        above = sorted(before[parent] for parent in call.parents)
        before.append(_hashed(call.constructor, *above))
        for parent in call.parents:
            children[parent].append(row)
    after = [""] * len(calls)
    for row in reversed(range(len(calls))):
        after[row] = _hashed(calls[row].constructor, *sorted(after[c] for c in children[row]))
    return [_hashed(*pair) for pair in zip(before, after, strict=True)]


def _hashed(*parts: str) -> str:
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def _file_calls(graph: Graph, *, only_weights: bool) -> list[_Call]:
    """Return the layers that the nodes of a file describe."""
    notes = graph.annotations.get("pipedream", {}).get("descriptions", {})
    row_of = {name: row for row, name in enumerate(graph.ops.names)}
    pointers, edges = graph.in_edges
    near: dict[int, frozenset[int]] = {}
    calls: list[_Call] = []
    for name in _in_order(graph):
        row = row_of[name]
        feeding = graph.edge_source[edges[pointers[row] : pointers[row + 1]]].tolist()
        above = frozenset[int]().union(*(near[op] for op in feeding if op >= 0))
        source = constructor_of(str(notes.get(name, "")), in_place=False)
        if source is None or (only_weights and not _has_weights(source)):
            near[row] = above
            continue
        near[row] = frozenset({len(calls)})
        calls.append(_Call(name, source, above, ()))
    return calls


def _model_calls(captured: CapturedModel, *, only_weights: bool) -> list[_Call]:
    """Return the calls of layers that a model makes."""
    modules = dict(captured.model.named_modules())
    near: dict[int, frozenset[int]] = {}
    row_of: dict[str, int] = {}
    calls: list[_Call] = []
    for op in captured.ops:
        above = frozenset[int]().union(*(near.get(value, frozenset()) for value in op.reads))
        module = modules.get(op.module) if op.module and op.scopes else None
        leaf = module is not None and not any(module.children())
        source = constructor_of(repr(module), in_place=False) if leaf else None
        if source is None or (only_weights and not _has_weights(source)):
            near.update((value, above) for value in op.makes)
            continue
        row = row_of.setdefault(op.scopes[-1], len(calls))
        if row == len(calls):
            calls.append(_Call(op.module, source, above, (op.name,)))
        else:
            known = calls[row]
            calls[row] = replace(
                known, parents=known.parents | (above - {row}), ops=(*known.ops, op.name)
            )
        near.update((value, frozenset({row})) for value in op.makes)
    return calls


def _has_weights(source: str) -> bool:
    made: type[nn.Module] = getattr(nn, source.removeprefix("nn.").partition("(")[0])
    return issubclass(made, _WEIGHTED)


def _in_order(graph: Graph) -> list[str]:
    """Return the nodes in the order of the data."""
    return [graph.ops.names[op] for op in graph.topological_order.tolist()]


def stages_along_data(
    graph: Graph, ops: Sequence[CapturedOp], given: Mapping[str, int]
) -> list[int]:
    """Return the lowest stage for each op, such that data never goes back.

    Ops that must be together are: each pass raises some stages, until all of them agree.
    """
    groups = graph.ops.colocation.tolist() if len(graph.ops.colocation) else [-1] * len(ops)
    stages = [given.get(op.name, 0) for op in ops]
    while True:
        before = list(stages)
        made_in: dict[int, int] = {}
        together: dict[int, int] = {}
        for row, (op, group) in enumerate(zip(ops, groups, strict=True)):
            stages[row] = max(stages[row], *(made_in.get(value, 0) for value in op.reads), 0)
            made_in.update((value, stages[row]) for value in op.makes)
            if group >= 0:
                together[group] = max(together.get(group, 0), stages[row])
        stages = [together.get(group, own) for group, own in zip(groups, stages, strict=True)]
        if stages == before:
            return stages
