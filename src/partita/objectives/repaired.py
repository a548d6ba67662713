"""PipeDream's objective with its faults repaired: one value for any pipeline on one or two levels.

Stages s on devices D_s, disjoint; w_d the share of device d, r_s the replicas, servers x. C_s(d)
are forward and backward seconds, P_s parameter bytes, B1 the bandwidth inside a server and B2 that
of a server's one port, g the all-reduce factor. The value is the largest of

1. stage s: ``max_d w_d C_s(d) + sync / r_s`` with ``sync = g (m-1)/m P_s/B1 + g (q-1)/q P_s/B2``,
   m the most replicas in one server, q the number of servers;
2. the cut after s with its live bytes b, a_x and b_x the shares of stages s and s+1 in server x:
   port of x: ``2 b (a_x (1-b_x) + b_x (1-a_x)) / B2``; link of device d: ``2 b w_d f / B1``, f the
   share of the other stage in d's server.

Two stages on the same servers with the same shares are tied: what the one computes in a server the
other takes up there, so the port carries nothing and f is 1. Stages and cuts overlap fully. On a
flat cluster this is ``max((C + g (r-1) P / (B r)) / r, 2 b / (B min(r, r')))``.

Memory of a device in stage s, with v = ceil(L/r) + 1 versions and L the replicas after s: v times
the parameters, their gradients, optimizer state, and v times the saved and the input bytes.
A port per device at the upper level is not part of this objective: a server has one port.
"""

import math
from typing import NamedTuple

import numpy as np

from partita.core.columns import Floats, sum_by
from partita.core.plan import Plan
from partita.core.problem import Metric, Problem
from partita.cost.tables import at_first_user, held_bytes
from partita.errors import InvalidInputError
from partita.objectives.cuts import counted_ops, live_cut_bytes
from partita.objectives.pipedream import Servers, servers, stage_seconds, why_not_pipeline
from partita.objectives.placed import memory_errors, placement_errors
from partita.objectives.value import Value, check_applies


class _Sizes(NamedTuple):
    """Bytes of each stage: trained, held, for the optimizer, saved, read, and sent on."""

    trained: Floats
    held: Floats
    optimizer: Floats
    saved: Floats
    model_input: Floats
    cut: Floats


def why_not_repaired(problem: Problem, plan: Plan) -> str | None:
    """Return why the repaired objective does not apply, or ``None``."""
    return why_not_pipeline(problem, plan)


def pipedream_repaired_time(
    problem: Problem,
    plan: Plan,
    *,
    allreduce_factor: float = 4.0,
    compression: float | None = 1.0,
) -> Value:
    """Return the seconds per minibatch of the slowest stage or transfer.

    Args:
        problem: The problem; the cluster has one or two levels.
        plan: A pipeline, each device in one stage.
        allreduce_factor: 4 to compare with PipeDream, 2 for links of full duplex.
        compression: Activation compression ratio; ``None`` = transfers cost nothing.

    Raises:
        InvalidInputError: The objective does not apply.
    """
    check_applies(Metric.PIPEDREAM_REPAIRED, why_not_repaired(problem, plan))
    if compression is not None and not compression > 0:
        raise InvalidInputError(f"compression is {compression}; expected more than 0, or None")
    charged = 0.0 if compression is None else 1 / compression
    here = servers(problem, plan)
    sizes = _sizes(problem, plan)
    seconds = stage_seconds(problem, plan)
    shares = [_server_shares(plan, here, index) for index in range(len(plan.stages))]
    stage_s, cut_s = [], []
    terms: list[tuple[float, str]] = []
    for index in range(len(plan.stages)):
        stage_s.append(
            _stage_s(plan, here, index, seconds[index], allreduce_factor * sizes.trained[index])
        )
        terms.append((stage_s[-1], f"stage {index}"))
        if index + 1 < len(plan.stages):
            cut = _cut_terms(plan, here, index, shares, float(sizes.cut[index]) * charged)
            terms.append(max(cut, key=lambda term: term[0]))
            cut_s.append(terms[-1][0])
    value, bottleneck = max(terms, key=lambda term: term[0])
    return Value(
        metric=Metric.PIPEDREAM_REPAIRED,
        value=value,
        bottleneck=bottleneck,
        details={
            "stage_s": tuple(stage_s),
            "cut_s": tuple(cut_s),
            "cut_bytes": tuple(sizes.cut[:-1].tolist()),
            "replicas": tuple(stage.num_replicas for stage in plan.stages),
        },
        errors=(*placement_errors(problem, plan), *_memory_errors(problem, plan, sizes)),
    )


def _sizes(problem: Problem, plan: Plan) -> _Sizes:
    graph = problem.graph
    table = graph.parameters
    count = len(plan.stages)
    counted = counted_ops(graph)
    uses = counted[table.use_op]
    pairs = np.stack([plan.stage_of[table.use_op[uses]], table.use_parameter[uses]])
    stage, parameter = np.unique(pairs, axis=1) if pairs.size else pairs

    def total(values: Floats) -> Floats:
        return sum_by(stage, values[parameter], count)

    held = held_bytes(table, problem.objective)
    saved = sum_by(plan.stage_of[counted], graph.ops.saved_bytes[counted], count)
    return _Sizes(
        total(held.gradients),
        total(held.weights),
        total(held.copy + held.stepped),
        saved,
        _model_input_bytes(problem, plan),
        live_cut_bytes(graph, plan.stage_of, count, counted),
    )


def _model_input_bytes(problem: Problem, plan: Plan) -> Floats:
    """Return the bytes of the model's inputs that each stage reads, each input once."""
    graph = problem.graph
    edges = np.flatnonzero(graph.edge_source < 0)
    pairs = np.stack([plan.stage_of[graph.edges.reader[edges]], graph.edges.tensor[edges]])
    stage, tensor = np.unique(pairs, axis=1) if pairs.size else pairs
    return sum_by(stage, graph.tensors.bytes[tensor], len(plan.stages))


def _server_shares(plan: Plan, here: Servers, index: int) -> dict[int, float]:
    """Return the share of a stage's microbatches that each of its servers takes."""
    stage = plan.stages[index]
    counts: dict[int, int] = {}
    for group, share in zip(stage.devices, stage.shares, strict=True):
        server = int(here.server_of[group[0]])
        counts[server] = counts.get(server, 0) + share
    return {server: count / stage.round for server, count in sorted(counts.items())}


def _stage_s(
    plan: Plan, here: Servers, index: int, seconds: dict[int, float], reduced_bytes: float
) -> float:
    stage = plan.stages[index]
    compute = max(
        share / stage.round * seconds[group[0]]
        for group, share in zip(stage.devices, stage.shares, strict=True)
    )
    found, counts = np.unique(
        here.server_of[[group[0] for group in stage.devices]], return_counts=True
    )
    most, num_servers = int(counts.max()), len(found)
    sync = (most - 1) / most * reduced_bytes / float(here.inside_bytes_per_s[found].min())
    sync += (num_servers - 1) / num_servers * reduced_bytes / here.between_bytes_per_s
    return compute + sync / stage.num_replicas


def _cut_terms(
    plan: Plan, here: Servers, index: int, shares: list[dict[int, float]], size_bytes: float
) -> list[tuple[float, str]]:
    """Return the loads of the ports and device links by the cut after a stage."""
    before, after = shares[index], shares[index + 1]
    tied = before == after
    terms = [(0.0, f"cut after stage {index}")]
    for server in sorted(before.keys() | after.keys()) if not tied else ():
        leaving, entering = before.get(server, 0.0), after.get(server, 0.0)
        outside = leaving * (1 - entering) + entering * (1 - leaving)
        load = 2 * size_bytes * outside / here.between_bytes_per_s
        terms.append((load, f"port of server {server}, cut after stage {index}"))
    for row, other in ((index, after), (index + 1, before)):
        stage = plan.stages[row]
        for group, share in zip(stage.devices, stage.shares, strict=True):
            server = int(here.server_of[group[0]])
            inside = 1.0 if tied else other.get(server, 0.0)
            load = (
                2
                * size_bytes
                * share
                / stage.round
                * inside
                / float(here.inside_bytes_per_s[server])
            )
            name = plan.devices[group[0]]
            terms.append((load, f"link of {name}, cut after stage {index}"))
    return terms


def _memory_errors(problem: Problem, plan: Plan, sizes: _Sizes) -> list[str]:
    need: dict[int, float] = {}
    after = 0
    for index in reversed(range(len(plan.stages))):
        stage = plan.stages[index]
        versions = math.ceil(after / stage.num_replicas) + 1
        entering = sizes.model_input[index] + (sizes.cut[index - 1] if index else 0.0)
        total = versions * sizes.held[index] + sizes.trained[index] + sizes.optimizer[index]
        total += versions * (sizes.saved[index] + entering)
        need |= {group[0]: float(total) for group in stage.devices}
        after += stage.num_replicas
    return memory_errors(problem, plan, need)


def held_bytes_repaired(problem: Problem) -> Floats:
    """Return what each counted op holds at least: one version, gradients, state, saved bytes."""
    graph, counted = problem.graph, counted_ops(problem.graph)
    held = held_bytes(graph.parameters, problem.objective).total
    return at_first_user(graph, held, counted) + np.where(counted, graph.ops.saved_bytes, 0.0)
