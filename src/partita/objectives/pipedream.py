"""PipeDream's pipeline time as its optimizer computes it: Narayanan et al., SOSP 2019.

Seconds per minibatch of the slowest stage or transfer, as in ``optimizer_graph_hierarchical.py``.
With C the forward and backward seconds of a stage, P its parameter bytes, O the bytes of the cut
after it (see ``cuts``), r its replicas, B the bandwidth and c the compression, on one level:

    max over stages s of   (C_s + 4 (r_s - 1) P_s / (B r_s)) / r_s
                           2 O_{s-1} / (B r_s c)    s after the first
                           2 O_s / (B r_s c)        s neither the first nor the last

On two levels an outer stage is a run of stages on the same servers, each with the same number of
replicas in every one of them. Its time inside a server is the formula above with the inner
bandwidth, where its last stage pays for its output too unless it is the only one or ends the model;
the formula is then applied to the outer stages, servers as replicas. The all-reduce of the first
outer stage is divided by the devices of a server.

The released faults stay as they are, so that the numbers agree: the first stage's output is free of
its own replicas (B4), cuts are over-counted (B5, unless ``true_cut_bytes``), the all-reduce between
servers is divided for one stage only (B8), memory is one version short and never binds the last
stage (B9). The repaired objective is in ``repaired``. A stage of unequal devices takes the slowest.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from partita.core.columns import Floats, Ints, sum_by
from partita.core.plan import Plan
from partita.core.problem import Metric, Problem
from partita.cost.memory import memory_limits
from partita.cost.tables import at_first_user
from partita.errors import InvalidInputError
from partita.objectives.cuts import (
    counted_ops,
    live_cut_bytes,
    produced_bytes,
    released_cut_bytes,
)
from partita.objectives.placed import (
    placement_errors,
    plan_devices,
    seconds_on,
    why_not_implicit_training,
    why_not_one_stage_each,
)
from partita.objectives.value import Value, check_applies


class Servers(NamedTuple):
    """Servers of a cluster.

    Attributes:
        server_of: The server of each device of the plan.
        inside_bytes_per_s: Bandwidth between devices of a server, by server.
        between_bytes_per_s: Bandwidth of a server's port; ``inf`` on a flat cluster.
        size: Devices in the largest server.
        num_servers: Number of servers.
    """

    server_of: Ints
    inside_bytes_per_s: Floats
    between_bytes_per_s: float
    size: int
    num_servers: int


def why_no_servers(problem: Problem) -> str | None:
    """Return why a cluster is not a set of servers, or ``None``."""
    if problem.cluster.matrix is not None:
        return "the cluster is a matrix of links; expected one or two levels"
    levels = problem.cluster.levels
    if len(levels) > 2:
        return f"the cluster has {len(levels)} levels; expected one or two"
    return None


def servers(problem: Problem, plan: Plan) -> Servers:
    """Return the servers; a cluster of one level is one server."""
    cluster = problem.cluster
    here = np.array([cluster.index_of[name] for name in plan.devices], dtype=np.int32)
    if not cluster.levels:
        return Servers(np.zeros(len(here), np.int32), np.array([np.inf]), np.inf, len(cluster), 1)
    inner = cluster.levels[0]
    between = np.inf
    if len(cluster.levels) == 2:
        between = cluster.levels[1].slowest_bytes_per_s
    sizes = np.bincount(inner.group_of)
    return Servers(
        inner.group_of[here], inner.bandwidth_bytes_per_s, between, int(sizes.max()), len(sizes)
    )


class _Part(NamedTuple):
    """A stage of one level: seconds of one unit, its sizes, and how many units run it."""

    name: str
    seconds: float
    parameter_bytes: float
    kept_bytes: float
    output_bytes: float
    replicas: int


class _Rule(NamedTuple):
    """Options of the formula."""

    compression: float | None
    allreduce_factor: float


def why_not_pipedream(problem: Problem, plan: Plan) -> str | None:
    """Return why PipeDream's objective does not apply, or ``None``."""
    reason = why_not_pipeline(problem, plan)
    if reason is not None:
        return reason
    if any(len(set(stage.shares)) > 1 for stage in plan.stages):
        return "replicas have unequal shares"
    return _why_not_tied(plan, servers(problem, plan))


def why_not_pipeline(problem: Problem, plan: Plan) -> str | None:
    """Return why a plan is not a pipeline of replicated stages on servers, or ``None``."""
    reason = why_not_implicit_training(problem) or why_no_servers(problem)
    if reason is None and any(stage.tp > 1 for stage in plan.stage_index):
        reason = "a stage is tensor-parallel"
    return reason or why_not_one_stage_each(plan)


def _why_not_tied(plan: Plan, here: Servers) -> str | None:
    """Return why the stages do not form outer stages on servers of their own, or ``None``."""
    used: set[int] = set()
    before: frozenset[int] = frozenset()
    for index, stage in enumerate(plan.stages):
        server = here.server_of[[group[0] for group in stage.devices]]
        found, counts = np.unique(server, return_counts=True)
        if len(set(counts.tolist())) > 1:
            return f"stage {index} has unequal numbers of replicas in its servers"
        now = frozenset(found.tolist())
        if now != before and now & used:
            return (
                f"stage {index} shares a server with an earlier stage that uses other servers too"
            )
        used |= now
        before = now
    return None


def pipedream_time(
    problem: Problem,
    plan: Plan,
    *,
    compression: float | None = 1.0,
    allreduce_factor: float = 4.0,
    true_cut_bytes: bool = False,
) -> Value:
    """Return the seconds per minibatch that PipeDream's optimizer would print for a plan.

    Args:
        problem: The problem; the cluster has one or two levels.
        plan: A pipeline, each device in one stage.
        compression: Activation compression ratio; ``None`` = transfers cost nothing.
        allreduce_factor: 4 as released; 2 in SparsePipedream.
        true_cut_bytes: Whether to count live bytes instead of the augmented antichain.

    Raises:
        InvalidInputError: The objective does not apply.
    """
    check_applies(Metric.PIPEDREAM, why_not_pipedream(problem, plan))
    if compression is not None and not compression > 0:
        raise InvalidInputError(f"compression is {compression}; expected more than 0, or None")
    rule = _Rule(compression, allreduce_factor)
    here = servers(problem, plan)
    parts = _parts(problem, plan, here, true_cut_bytes)
    inside = float(here.inside_bytes_per_s[np.unique(here.server_of)].min())
    outer: list[_Part] = []
    runs = _runs(plan, here)
    for number, (rows, num_servers) in enumerate(runs):
        inner = [parts[row] for row in rows]
        seconds, what = max(
            _terms(inner, inside, ends=number == len(runs) - 1, divisor=1, rule=rule),
            key=lambda term: term[0],
        )
        outer.append(_joined(inner, what, seconds, num_servers))
    terms = _terms(outer, here.between_bytes_per_s, ends=True, divisor=here.size, rule=rule)
    value, bottleneck = max(terms, key=lambda term: term[0])
    return Value(
        metric=Metric.PIPEDREAM,
        value=value,
        bottleneck=bottleneck,
        details={
            "stage_s": tuple(part.seconds for part in parts),
            "cut_bytes": tuple(part.output_bytes for part in parts[:-1]),
            "replicas": tuple(part.replicas for part in parts),
            "servers": tuple(count for rows, count in runs for _ in rows),
        },
        errors=(
            *placement_errors(problem, plan),
            *_memory_errors(problem, plan, parts, outer, runs),
        ),
    )


def _runs(plan: Plan, here: Servers) -> list[tuple[list[int], int]]:
    """Return the outer stages: rows of the stages, and the number of their servers."""
    runs: list[tuple[list[int], int]] = []
    before: frozenset[int] = frozenset()
    for index, stage in enumerate(plan.stages):
        now = frozenset(here.server_of[[group[0] for group in stage.devices]].tolist())
        if now != before:
            runs.append(([], len(now)))
        runs[-1][0].append(index)
        before = now
    return runs


def _parts(problem: Problem, plan: Plan, here: Servers, true_cut_bytes: bool) -> list[_Part]:
    """Return the stages with their replicas inside one server."""
    graph = problem.graph
    count = len(plan.stages)
    counted = counted_ops(graph)
    cut = live_cut_bytes if true_cut_bytes else released_cut_bytes
    output = cut(graph, plan.stage_of, count, counted)
    seconds = stage_seconds(problem, plan)
    stage_of = plan.stage_of[counted]

    parameters = sum_by(stage_of, graph.parameter_bytes[counted], count)
    kept = sum_by(stage_of, produced_bytes(graph)[counted], count)
    parts = []
    for index, stage in enumerate(plan.stages):
        devices = [group[0] for group in stage.devices]
        num_servers = len(np.unique(here.server_of[devices]))
        slowest = max(seconds[index][device] for device in devices)
        parts.append(
            _Part(
                f"stage {index}",
                *(slowest, float(parameters[index]), float(kept[index])),
                *(float(output[index]), len(devices) // num_servers),
            )
        )
    return parts


def stage_seconds(problem: Problem, plan: Plan) -> list[dict[int, float]]:
    """Return for each stage the seconds of its counted ops on each of its devices."""
    devices = plan_devices(problem, plan)
    class_of, seconds = seconds_on(problem.graph, devices, problem.objective.mode)
    counted = counted_ops(problem.graph)
    count = len(plan.stages)
    table = [sum_by(plan.stage_of[counted], row[counted], count).tolist() for row in seconds]
    return [
        {device: table[class_of[device]][index] for group in stage.devices for device in group}
        for index, stage in enumerate(plan.stages)
    ]


def _joined(inner: Sequence[_Part], what: str, seconds: float, num_servers: int) -> _Part:
    name = what if num_servers == 1 else f"{what} on {num_servers} servers"
    return _Part(
        name,
        seconds,
        sum(part.parameter_bytes for part in inner),
        sum(part.kept_bytes for part in inner),
        inner[-1].output_bytes,
        num_servers,
    )


def _terms(
    parts: Sequence[_Part], bandwidth: float, *, ends: bool, divisor: float, rule: _Rule
) -> list[tuple[float, str]]:
    """Return the candidates for the maximum on one level.

    Args:
        parts: The stages of the level.
        bandwidth: Bytes per second between its units.
        ends: Whether the last part ends the model.
        divisor: What the all-reduce of the first part is divided by.
        rule: The options.
    """
    terms = []
    for index, part in enumerate(parts):
        units = part.replicas
        sync = rule.allreduce_factor * (units - 1) * part.parameter_bytes / (bandwidth * units)
        sync /= 1 if index else divisor
        terms.append(((part.seconds + sync) / units, part.name))
        if rule.compression is None or not index:
            continue
        rate = bandwidth * units * rule.compression
        terms.append((2 * parts[index - 1].output_bytes / rate, f"transfer into {part.name}"))
        if not (ends and index == len(parts) - 1):
            terms.append((2 * part.output_bytes / rate, f"transfer out of {part.name}"))
    return terms


def _memory_errors(
    problem: Problem,
    plan: Plan,
    parts: Sequence[_Part],
    outer: Sequence[_Part],
    runs: Sequence[tuple[list[int], int]],
) -> list[str]:
    """Return stages above the released limit: ceil(units after / units) times all they keep."""
    limit = float(memory_limits(problem, plan).min())
    levels = [[parts[row] for row in rows] for rows, _ in runs] + [list(outer)]
    errors = []
    for level in levels:
        after = 0
        for part in reversed(level):
            need = math.ceil(after / part.replicas) * (part.kept_bytes + part.parameter_bytes)
            if need > limit:
                errors.append(f"{part.name} needs {need:.0f} bytes, limit {limit:.0f}")
            after += part.replicas
    return errors


def held_bytes_released(problem: Problem) -> Floats:
    """Return what each op holds at least by the released rule and by ours: its parameters."""
    return at_first_user(problem.graph, problem.graph.parameters.bytes)
