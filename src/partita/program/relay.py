"""Values passed on from stage to stage, instead of sent to each of their readers.

A tensor with readers in many stages (a mask, T5's position bias, a long skip connection) goes from
its producer straight to every device that reads it. Pipelines that only talk to their neighbours,
as Merak's and DeepSpeed's do, ship it across every cut up to its last reader instead. That is the
same plan for a graph in which each stage on the way passes the tensor on, so everything that reads
plans and Programs holds for it.
"""

from dataclasses import fields, replace
from typing import Any, NamedTuple, TypeVar

import numpy as np

from partita.core.columns import Array
from partita.core.graph import EdgeTable, Graph, Labels, OpCosts, OpTable, TensorTable
from partita.core.plan import Plan
from partita.core.problem import Problem
from partita.errors import UnsupportedError
from partita.program.layout import crossings

_Table = TypeVar("_Table", bound=OpTable | TensorTable | OpCosts)


class _Relays(NamedTuple):
    """The added ops, a row each; op i makes the i-th added tensor.

    Attributes:
        tensor: The tensor of the graph that is passed on.
        stage: The stage that passes it on.
        source: The tensor that it reads: the graph's, or what the stage before has made.
        first: By tensor of the graph, the tensor that the first stage on its way makes.
    """

    tensor: Array
    stage: Array
    source: Array
    first: Array


def relayed(problem: Problem, plan: Plan) -> tuple[Problem, Plan]:
    """Return the problem and plan in which every stage sends to the next one only.

    A stage between the producer of a tensor and its last reader gets an op without costs that
    makes a copy; what lies behind reads the copy, and gradients are summed on their way back.

    Raises:
        UnsupportedError: The graph has tensor-parallel variants, which list the readers of ops.
    """
    graph = problem.graph
    if len(graph.variants):
        raise UnsupportedError(
            f"graph {graph.name!r} has variants of ops, whose readers cannot change; "
            "send its tensors to their readers"
        )
    relays = _relays(graph, plan)
    count = len(relays.tensor)
    changed = replace(
        graph,
        ops=_longer(graph.ops, names=_names(graph, relays)),
        costs=tuple(_longer(costs, forward_s=np.zeros(count)) for costs in graph.costs),
        tensors=_copies(graph, relays),
        edges=_edges(graph, plan, relays),
    )
    moved = replace(
        plan,
        fingerprint=changed.fingerprint,
        stage_of=np.append(plan.stage_of, relays.stage),
        recompute=np.append(plan.recompute, np.zeros(count, dtype=bool)),
    )
    return replace(problem, graph=changed), moved


def _relays(graph: Graph, plan: Plan) -> _Relays:
    """Return the stages between the producer of each tensor and its last reader."""
    crossing = crossings(graph, plan)
    is_last = np.diff(crossing.tensor, append=-1) != 0
    tensor, producer, reader = (column[is_last] for column in crossing)
    hops = reader - producer - 1
    begin = np.cumsum(hops) - hops
    place = np.arange(hops.sum()) - np.repeat(begin, hops)
    passed = np.repeat(tensor, hops)
    made = len(graph.tensors) + np.arange(len(place))
    first = np.full(len(graph.tensors), -1)
    first[tensor] = len(graph.tensors) + begin
    return _Relays(
        tensor=passed,
        stage=np.repeat(producer, hops) + 1 + place,
        source=np.where(place == 0, passed, made - 1),
        first=first,
    )


def _names(graph: Graph, relays: _Relays) -> tuple[str, ...]:
    pairs = zip(relays.tensor.tolist(), relays.stage.tolist(), strict=True)
    return tuple(f"{graph.tensors.names[tensor]}/relay{stage}" for tensor, stage in pairs)


def _copies(graph: Graph, relays: _Relays) -> TensorTable:
    """Return the tensors of the graph and their copies, each as the tensor it is a copy of."""
    table = graph.tensors
    same = ("bytes", "fixed_bytes", "transfer_s", "differentiable")
    return _longer(
        table,
        names=_names(graph, relays),
        producer=len(graph.ops) + np.arange(len(relays.tensor)),
        **{name: getattr(table, name)[relays.tensor] for name in same},
    )


def _edges(graph: Graph, plan: Plan, relays: _Relays) -> EdgeTable:
    """Return the edges: a forward op reads what the stage before its own has."""
    source, reader, tensor = graph.edge_source, graph.edges.reader, graph.edges.tensor.copy()
    inner = np.flatnonzero(source >= 0)
    inner = inner[graph.is_forward[source[inner]] & graph.is_forward[reader[inner]]]
    behind = plan.stage_of[reader[inner]] - plan.stage_of[source[inner]] - 2
    far = inner[behind >= 0]
    tensor[far] = relays.first[tensor[far]] + behind[behind >= 0]
    added = len(graph.ops) + np.arange(len(relays.tensor))
    return EdgeTable(tensor=np.append(tensor, relays.source), reader=np.append(reader, added))


def _longer(table: _Table, **added: Array | tuple[str, ...]) -> _Table:
    """Return a table with rows added; columns that are not given have their usual value there."""
    count = len(next(iter(added.values())))
    longer: dict[str, Any] = {}
    for field in fields(table):
        value = getattr(table, field.name)
        if field.name in added and isinstance(value, tuple):
            longer[field.name] = (*value, *added[field.name])
        elif isinstance(value, np.ndarray):
            rows = added.get(field.name, np.full(count, field.default))
            longer[field.name] = np.append(value, rows)
        elif isinstance(value, Labels) and len(value.of):
            longer[field.name] = replace(value, of=np.append(value.of, np.full(count, -1)))
    return replace(table, **longer)
