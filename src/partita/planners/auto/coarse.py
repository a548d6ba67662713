"""A smaller problem that stands for a large one: an op for every unit.

Seconds, saved bytes and parameters of a unit's ops add up, tensors inside a unit vanish, all others
stay. A plan of the small problem is one of the large problem with the same times, as far as the ops
of a unit have one fixed share, and nearly the same memory (scratch memory inside a unit is taken at
its peak). What the search returns is measured on the large problem again.
"""

from dataclasses import dataclass, replace

import numpy as np

from partita.core.columns import Array, frozen_array
from partita.core.graph import EdgeTable, Graph, OpCosts, OpTable, ParameterTable, TensorTable
from partita.core.plan import Plan
from partita.core.problem import Problem
from partita.cost.durations import op_seconds
from partita.cost.tables import fold_backward
from partita.planners.auto.units import most_units, units_of
from partita.planners.lattice.quotient import Quotient

WORTH = 1.5
"""Graphs are made smaller where they have this many times the ops that a search likes."""


@dataclass(frozen=True, slots=True)
class WorkingProblem:
    """What the search works on.

    Attributes:
        problem: The problem that was asked.
        work: The problem to search on: the same, or a smaller one.
        unit_of: The op of ``work`` that each op is part of; ``None`` where they are the same.
    """

    problem: Problem
    work: Problem
    unit_of: Array | None

    def expanded(self, plan: Plan) -> Plan:
        """Return a plan for the problem that was asked."""
        if self.unit_of is None:
            return plan
        return replace(
            plan,
            fingerprint=self.problem.graph.fingerprint,
            stage_of=plan.stage_of[self.unit_of],
            recompute=plan.recompute[self.unit_of],
        )

    def contracted(self, plan: Plan) -> Plan | None:
        """Return a plan of the problem that was asked as one to search on; None = it cuts units."""
        if self.unit_of is None:
            return plan
        stage_of = np.zeros(len(self.work.graph), dtype=np.int32)
        again = np.zeros(len(self.work.graph), dtype=bool)
        stage_of[self.unit_of], again[self.unit_of] = plan.stage_of, plan.recompute
        same = np.array_equal(stage_of[self.unit_of], plan.stage_of)
        if not (same and np.array_equal(again[self.unit_of], plan.recompute)):
            return None
        fingerprint = self.work.graph.fingerprint
        return replace(plan, fingerprint=fingerprint, stage_of=stage_of, recompute=again)


def working_problem(problem: Problem) -> WorkingProblem:
    """Return the problem to search on."""
    graph = problem.graph
    if len(graph) <= WORTH * most_units(problem) or len(graph.variants):
        return WorkingProblem(problem, problem, None)
    units = units_of(problem)
    row_of, _ = problem.allowed
    rights = np.zeros(units.num_nodes, dtype=row_of.dtype)
    rights[units.node_of] = row_of
    if not np.array_equal(rights[units.node_of], row_of):
        return WorkingProblem(problem, problem, None)
    small = Graph(
        name=graph.name,
        ops=_ops(problem, units),
        costs=_costs(problem, units),
        tensors=(tensors := _kept_tensors(graph, units))[0],
        edges=tensors[1],
        parameters=_parameters(graph, units),
        batch_size=graph.batch_size,
        sample_unit=graph.sample_unit,
        tokens_per_sample=graph.tokens_per_sample,
        dtype=graph.dtype,
    )
    return WorkingProblem(problem, replace(problem, graph=small), units.node_of)


def _sums(units: Quotient, values: Array) -> Array:
    return np.bincount(units.node_of, weights=values, minlength=units.num_nodes)


def _ops(problem: Problem, units: Quotient) -> OpTable:
    graph, ops = problem.graph, problem.graph.ops
    order = graph.topological_order
    first = np.zeros(units.num_nodes, dtype=np.int64)
    first[units.node_of[order[::-1]]] = order[::-1]
    kinds = np.full(units.num_nodes, 3, dtype=np.int64)
    np.bitwise_and.at(kinds, units.node_of, ops.device_kinds.astype(np.int64))
    weight = graph.forward_s + graph.backward_s
    total = _sums(units, weight)
    fixed = _sums(units, weight * ops.fixed_share)
    return OpTable(
        names=tuple(ops.names[op] for op in first.tolist()),
        fixed_share=np.clip(
            np.divide(fixed, total, out=np.zeros_like(fixed), where=total > 0), 0, 1
        ),
        flops=_sums(units, ops.flops),
        saved_bytes=_sums(units, ops.saved_bytes),
        saved_fixed_bytes=np.minimum(
            _sums(units, ops.saved_fixed_bytes), _sums(units, ops.saved_bytes)
        ),
        workspace_bytes=_workspace(graph, units),
        device_kinds=frozen_array(kinds, np.int8),
    )


def _workspace(graph: Graph, units: Quotient) -> Array:
    """Return the scratch memory of a unit beyond what its later ops save."""
    order = graph.topological_order
    order = order[np.argsort(units.node_of[order], kind="stable")]
    unit = units.node_of[order]
    until = np.cumsum(graph.ops.saved_bytes[order])
    last = np.searchsorted(unit, unit, side="right") - 1
    above = graph.ops.workspace_bytes[order] - (until[last] - until)
    result = np.zeros(units.num_nodes)
    np.maximum.at(result, unit, above)
    return result


def _costs(problem: Problem, units: Quotient) -> tuple[OpCosts, ...]:
    """Return the seconds of units on every type of device of the cluster."""
    graph = problem.graph
    result = {}
    for device in problem.cluster.devices:
        if device.type in result:
            continue
        seconds = op_seconds(graph, device)
        folded = fold_backward(graph, seconds.forward_s, seconds.backward_s)
        forward, backward = (part * device.speed for part in folded)
        whole = _sums(units, backward)
        result[device.type] = OpCosts(
            device_type=device.type,
            origin=graph.costs[0].origin,
            forward_s=_sums(units, forward),
            backward_s=whole,
            backward_input_s=np.minimum(_sums(units, backward * seconds.input_share), whole),
        )
    return tuple(result.values())


def _kept_tensors(graph: Graph, units: Quotient) -> tuple[TensorTable, EdgeTable]:
    """Return the forward tensors that cross units, and the inputs of the model."""
    source, reader = graph.edge_source, graph.edges.reader
    forward = graph.is_forward[reader] & ((source < 0) | graph.is_forward[source])
    inside = (source >= 0) & (units.node_of[source] == units.node_of[reader])
    rows = np.flatnonzero(forward & ~inside)
    pairs = np.unique(
        graph.edges.tensor[rows].astype(np.int64) * units.num_nodes + units.node_of[reader[rows]]
    )
    kept, number = np.unique(pairs // units.num_nodes, return_inverse=True)
    keeping = rows[graph.edges.keeper[rows] >= 0]
    place = graph.edges.tensor[keeping].astype(np.int64) * units.num_nodes
    place = np.searchsorted(pairs, place + units.node_of[reader[keeping]])
    keeper = np.full(len(pairs), -1, dtype=np.int64)
    keeper[place] = units.node_of[graph.edges.keeper[keeping]]
    table = graph.tensors
    producer = table.producer[kept]
    tensors = TensorTable(
        names=tuple(table.names[tensor] for tensor in kept.tolist()),
        producer=np.where(producer < 0, -1, units.node_of[producer]),
        bytes=table.bytes[kept],
        fixed_bytes=table.fixed_bytes[kept],
        transfer_s=table.transfer_s[kept],
        differentiable=table.differentiable[kept],
        load_s=table.load_s[kept],
    )
    return tensors, EdgeTable(
        tensor=frozen_array(number.ravel(), np.int32),
        reader=frozen_array(pairs % units.num_nodes, np.int32),
        keeper=frozen_array(keeper, np.int32),
    )


def _parameters(graph: Graph, units: Quotient) -> ParameterTable:
    """Return the parameters: those of one unit alone joined by type, tied ones as they are."""
    table = graph.parameters
    if not len(table) or not len(table.use_op):
        return ParameterTable()
    pairs = np.unique(
        table.use_parameter.astype(np.int64) * units.num_nodes + units.node_of[table.use_op]
    )
    parameter, unit = pairs // units.num_nodes, pairs % units.num_nodes
    tied = np.bincount(parameter, minlength=len(table)) > 1
    dtypes = {dtype: number for number, dtype in enumerate(dict.fromkeys(table.dtypes))}
    rows: dict[tuple[int, ...], list[int]] = {}
    for p, u in zip(parameter.tolist(), unit.tolist(), strict=True):
        sort = (dtypes[table.dtypes[p]], int(table.trainable[p]), int(table.buffer[p]))
        rows.setdefault((-1 - p,) if tied[p] else (u, *sort), []).append(p)
    groups = [sorted(set(members)) for members in rows.values()]
    number = np.empty(len(table), dtype=np.int64)
    for index, members in enumerate(groups):
        number[members] = index
    heads = [members[0] for members in groups]
    return ParameterTable(
        names=tuple(table.names[head] for head in heads),
        bytes=frozen_array([float(table.bytes[members].sum()) for members in groups], np.float64),
        dtypes=tuple(table.dtypes[head] for head in heads),
        trainable=table.trainable[heads],
        buffer=table.buffer[heads],
        copy_bytes=frozen_array(
            [float(table.copy_bytes[members].sum()) for members in groups], np.float64
        ),
        **_uses(number[parameter], unit, units.num_nodes),
    )


def _uses(parameter: Array, unit: Array, num_units: int) -> dict[str, Array]:
    pairs = np.unique(parameter * num_units + unit)
    return {"use_parameter": pairs // num_units, "use_op": pairs % num_units}
