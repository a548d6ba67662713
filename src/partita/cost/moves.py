"""Bytes of state that move when a plan takes the place of another, and the seconds that takes.

State is what outlives a step: weights, master copy and optimizer state (``tables.lasting_bytes``).
A device of a plan holds an interval of each parameter that it has a part in: part p of n is the
interval p / n to (p + 1) / n of its elements, a shard likewise an interval of its part. Devices are
matched by name. What a device needs in the new plan and does not hold in the old one comes from the
nearest device that holds it and is still there (ties: from the one that has sent least), or, where
nobody is left that holds it, from a checkpoint. Other degrees keep what intervals have in common:
half of a parameter that two tensor-parallel devices held stays where four divide it.

    seconds = largest over all ports of (sum of bytes / bandwidth) + largest latency

All ports work at the same time. State that rests in the memory of a device's host counts as held by
that device. Weights are not made anew from a master copy, whoever holds one.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from partita.core.columns import Array, number_or_none
from partita.core.graph import Graph
from partita.core.plan import Plan, Shard, Stage
from partita.core.problem import Problem
from partita.cost.durations import cluster_devices
from partita.cost.tables import SHARD_LEVEL, lasting_bytes
from partita.errors import InvalidInputError
from partita.program.layout import owners

KINDS = ("weights", "master", "state")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Moves:
    """State that moves when a plan takes the place of another.

    Attributes:
        devices: Devices of the new plan.
        copied: Bytes that each of them gets from other devices.
        read: Bytes that each of them reads from a checkpoint, as no device is left that holds them.
        kept: Bytes that each of them holds already.
        by_kind: Bytes that are copied or read, of weights, master copy and optimizer state.
        copy_s: Seconds of the copies over the links.
        read_s: Seconds of reading at the rates of the hosts' storage; NaN = not known.
    """

    devices: tuple[str, ...]
    copied: Array
    read: Array
    kept: Array
    by_kind: Mapping[str, float]
    copy_s: float
    read_s: float

    @property
    def copied_bytes(self) -> float:
        """Bytes that come from other devices."""
        return float(self.copied.sum())

    @property
    def read_bytes(self) -> float:
        """Bytes that come from a checkpoint."""
        return float(self.read.sum())

    @property
    def total_bytes(self) -> float:
        """Bytes that are not yet where the new plan needs them."""
        return self.copied_bytes + self.read_bytes

    def to_json(self) -> dict[str, Any]:
        """Return the figures as JSON values; null where a rate is not known."""
        rows = zip(self.devices, self.copied, self.read, self.kept, strict=True)
        return {
            "moved_bytes": self.total_bytes,
            "copied_bytes": self.copied_bytes,
            "read_bytes": self.read_bytes,
            "kept_bytes": float(self.kept.sum()),
            **{f"{kind}_bytes": self.by_kind[kind] for kind in KINDS},
            "copy_s": self.copy_s,
            "read_s": number_or_none(self.read_s),
            "devices": [
                {
                    "device": name,
                    "copied_bytes": float(copied),
                    "read_bytes": float(read),
                    "kept_bytes": float(kept),
                }
                for name, copied, read, kept in rows
            ],
        }


class Spans(NamedTuple):
    """Intervals of one kind of state of some parameters, a row for each device that holds one.

    Attributes:
        device: The device: of the plan, or of the new cluster, -1 = it is gone.
        begin: First element, in parts of ``resolution``.
        end: Element after the last one.
        resolution: Parts of a whole parameter.
    """

    device: Array
    begin: Array
    end: Array
    resolution: int

    def at(self, resolution: int) -> "Spans":
        """Return the same in finer parts."""
        times = resolution // self.resolution
        return Spans(self.device, self.begin * times, self.end * times, resolution)


class _Step(NamedTuple):
    """State of some parameters that the same stages own, before and after.

    Attributes:
        kind: One of ``KINDS``.
        bytes: Bytes of all of it, once.
        before: Who holds it; devices of the new cluster.
        after: Who needs it; devices of the new plan.
    """

    kind: str
    bytes: float
    before: Spans
    after: Spans


def moves(old: Plan, plan: Plan, problem: Problem, old_problem: Problem | None = None) -> Moves:
    """Return what moves when a plan takes the place of another.

    Args:
        old: The plan that ran.
        plan: The plan to come.
        problem: The problem of the plan to come; its cluster has all devices that are still there.
        old_problem: The problem of the plan that ran, where it is another one: its graph, precision
            and optimizer count.

    Raises:
        InvalidInputError: The two plans have no parameter in common.
    """
    size, cluster = len(plan.devices), problem.cluster
    place = cluster_devices(problem, plan.devices).astype(np.int64)
    copied, read, kept = np.zeros(size), np.zeros(size), np.zeros(size)
    by_kind = dict.fromkeys(KINDS, 0.0)
    traffic = _Traffic(problem)
    for step in _steps(old, plan, problem, old_problem or problem):
        share = step.bytes / step.after.resolution
        device, need = step.after.device, step.after.end - step.after.begin
        own = _own(step, place)
        stays = np.minimum(step.after.end, own.end) - np.maximum(step.after.begin, own.begin)
        stays = np.maximum(stays, 0)
        pieces = _missing(step.after, own, stays)
        came = traffic.copy(place[pieces.device], pieces, step.before, share)
        np.add.at(copied, pieces.device, came * share)
        np.add.at(read, pieces.device, (pieces.end - pieces.begin - came) * share)
        np.add.at(kept, device, stays * share)
        by_kind[step.kind] += float((need - stays).sum()) * share
    hosts = np.array([device.host for device in cluster.devices])[place]
    reads = np.bincount(hosts, weights=read, minlength=len(cluster.hosts))
    rates = np.array([host.storage_bytes_per_s or np.nan for host in cluster.hosts])
    return Moves(
        devices=plan.devices,
        copied=copied,
        read=read,
        kept=kept,
        by_kind=by_kind,
        copy_s=traffic.seconds(),
        read_s=float((reads[reads > 0] / rates[reads > 0]).max(initial=0.0)),
    )


def kept_bytes(
    old: Plan, plan: Plan, problem: Problem, old_problem: Problem | None = None
) -> Array:
    """Return by device of a plan and device of the cluster the bytes that need not move.

    Entry (i, j) is what would be there already if device j of the cluster were device i of the
    plan.
    """
    stays = np.zeros((len(plan.devices), len(problem.cluster)))
    for step in _steps(old, plan, problem, old_problem or problem):
        here = step.before.device >= 0
        begin, end = step.before.begin[here], step.before.end[here]
        both = np.minimum(step.after.end[:, None], end) - np.maximum(
            step.after.begin[:, None], begin
        )
        share = step.bytes / step.after.resolution
        # A device stands once on either side of a step.
        stays[np.ix_(step.after.device, step.before.device[here])] += np.maximum(both, 0) * share
    return stays


def _steps(old: Plan, plan: Plan, problem: Problem, old_problem: Problem) -> Iterator[_Step]:
    """Yield the state that plans hold, parameters that the same stages own as one."""
    table, old_table = problem.graph.parameters, old_problem.graph.parameters
    row_of = {name: row for row, name in enumerate(old_table.names)}
    old_stages, stages = _stages_of(old_problem.graph, old), _stages_of(problem.graph, plan)
    need = lasting_bytes(table, problem.objective)
    have = lasting_bytes(old_table, old_problem.objective)
    groups: dict[
        tuple[tuple[int, ...], tuple[int, ...], bool, bool, tuple[bool, bool, bool]], list[int]
    ] = {}
    common = False
    for row, name in enumerate(table.names):
        if not stages[row]:
            continue
        known = row_of.get(name, -1)
        if known >= 0 and not math.isclose(old_table.elements[known], table.elements[row]):
            known = -1  # of another shape
        common |= known >= 0
        before: tuple[int, ...] = ()
        was = (False, True, True)
        if known >= 0:
            before = old_stages[known]
            was = (
                bool(have.trained[known]),
                bool(have.master[known] > 0),
                bool(have.state[known] > 0),
            )
        key = (before, stages[row], bool(table.expert[row]), bool(need.trained[row]), was)
        groups.setdefault(key, []).append(row)
    if groups and not common:
        raise InvalidInputError(
            f"the old plan has no parameter of {problem.graph.name!r}; "
            "expected a plan of the same model"
        )
    # -1 = a device that is gone.
    to_cluster = np.array([problem.cluster.index_of.get(name, -1) for name in old.devices])
    for (before, after, experts, trained, was), rows in groups.items():
        was_trained, had_master, had_state = was
        for kind in KINDS:
            size = float(getattr(need, kind)[rows].sum())
            # State that the old optimizer did not keep begins anew.
            if not size or (kind == "state" and not had_state):
                continue
            # A master copy that was not kept is made from the weights.
            source = "weights" if kind == "master" and not had_master else kind
            held = _spans(old, before, experts=experts, trained=was_trained, kind=source)
            needed = _spans(plan, after, experts=experts, trained=trained, kind=kind)
            common_parts = math.lcm(held.resolution, needed.resolution)
            held = held._replace(device=to_cluster[held.device]) if len(before) else held
            yield _Step(kind, size, held.at(common_parts), needed.at(common_parts))


def _stages_of(graph: Graph, plan: Plan) -> list[tuple[int, ...]]:
    """Return the stages that own each parameter, ascending."""
    found: list[list[int]] = [[] for _ in range(len(graph.parameters))]
    for parameter, stage in zip(*(part.tolist() for part in owners(graph, plan)), strict=True):
        found[parameter].append(stage)
    return [tuple(stages) for stages in found]


def _spans(
    plan: Plan, stages: tuple[int, ...], *, experts: bool, trained: bool, kind: str
) -> Spans:
    """Return what each device of a plan holds of parameters that some stages own."""
    if len(stages) == 1:
        stage = plan.stages[stages[0]]
        divides = Shard.PARAMETERS if kind == "weights" else Shard.OPTIMIZER
        # Nobody reduces what is not trained, so it is whole everywhere.
        sharded = trained and SHARD_LEVEL[stage.shard] >= SHARD_LEVEL[divides]
        return _stage_spans(stage, experts, sharded)
    # Tied parameters are not sharded, and a device holds them once, for its lowest stage.
    parts = [_stage_spans(plan.stages[stage], experts, False) for stage in stages]
    resolution = math.lcm(1, *(part.resolution for part in parts))
    seen: dict[int, tuple[int, int]] = {}
    for part in (part.at(resolution) for part in parts):
        for device, begin, end in zip(*(x.tolist() for x in part[:3]), strict=True):
            seen.setdefault(device, (begin, end))
    device = np.array(list(seen), dtype=np.int64)
    edges = np.array(list(seen.values()), dtype=np.int64).reshape(-1, 2)
    return Spans(device, edges[:, 0], edges[:, 1], resolution)


@lru_cache(maxsize=4096)
def _stage_spans(stage: Stage, experts: bool, sharded: bool) -> Spans:
    parts = stage.parts(experts=experts)
    size = stage.shard_size(experts=experts) if sharded else 1
    rows = [
        (device, part * size + (position if sharded else 0))
        for part, team in enumerate(stage.teams(experts=experts))
        for group in stage.divide(team, experts=experts)
        for position, device in enumerate(group)
    ]
    device, begin = np.array(rows, dtype=np.int64).T
    return Spans(device, begin, begin + 1, parts * size)


def _own(step: _Step, place: Array) -> Spans:
    """Return what the devices that need state hold of it already; nothing is 0 to 0."""
    begin, end = (np.zeros(int(place.max(initial=0)) + 1, dtype=np.int64) for _ in range(2))
    known = (step.before.device >= 0) & (step.before.device < len(begin))
    begin[step.before.device[known]] = step.before.begin[known]
    end[step.before.device[known]] = step.before.end[known]
    at = place[step.after.device]
    return Spans(step.after.device, begin[at], end[at], step.after.resolution)


def _missing(after: Spans, own: Spans, stays: Array) -> Spans:
    """Return what devices need and do not hold: at most a piece before and one behind."""
    apart = stays == 0
    left = Spans(
        after.device,
        after.begin,
        np.where(apart, after.end, np.maximum(own.begin, after.begin)),
        after.resolution,
    )
    right = Spans(
        after.device,
        np.where(apart, after.end, np.minimum(own.end, after.end)),
        after.end,
        after.resolution,
    )
    device, begin, end = (np.concatenate([a, b]) for a, b in zip(left[:3], right[:3], strict=True))
    real = end > begin
    return Spans(device[real], begin[real], end[real], after.resolution)


class _Traffic:
    """Copies between devices of a cluster, as they are added."""

    def __init__(self, problem: Problem) -> None:
        self._cluster = problem.cluster
        self._sent = np.zeros(len(problem.cluster))
        self._copies: list[tuple[Array, Array, Array]] = []

    def copy(self, target: Array, pieces: Spans, held: Spans, share: float) -> Array:
        """Add copies of pieces to devices of the cluster; return what of each has a holder.

        Args:
            target: The device of the cluster that needs each piece.
            pieces: The pieces.
            held: Who holds what; -1 = a device that is gone.
            share: Bytes of one part of the resolution.
        """
        here = held.device >= 0
        device, begin, end = held.device[here], held.begin[here], held.end[here]
        came = np.zeros(len(target))
        if not len(device) or not len(target):
            return came
        edges = np.unique(np.concatenate([begin, end]))
        order = np.argsort(device, kind="stable")
        device, begin, end = device[order], begin[order], end[order]
        # Every piece with every stretch between two edges that it has a part in.
        first = np.maximum(np.searchsorted(edges, pieces.begin, side="right") - 1, 0)
        last = np.minimum(np.searchsorted(edges, pieces.end, side="left"), len(edges) - 1)
        count = np.maximum(last - first, 0)
        piece = np.repeat(np.arange(len(target)), count)
        stretch = np.arange(len(piece)) - np.repeat(np.cumsum(count) - count - first, count)
        size = np.minimum(edges[stretch + 1], pieces.end[piece]) - np.maximum(
            edges[stretch], pieces.begin[piece]
        )
        holders = {
            at: np.flatnonzero((begin <= edges[at]) & (end > edges[at]))
            for at in np.unique(stretch).tolist()
        }
        held_by = np.array([len(holders[at]) for at in stretch.tolist()], dtype=np.int64)
        there = (held_by > 0) & (size > 0)
        np.add.at(came, piece[there], size[there])
        only = there & (held_by == 1)
        sources = np.array([device[holders[at][0]] for at in stretch[only].tolist()], np.int64)
        self._send(sources, target[piece[only]], size[only] * share)
        several = np.flatnonzero(there & (held_by > 1))
        if len(several):
            receivers, row_of = np.unique(target, return_inverse=True)
            speed = self._speeds(receivers, device)
            for row in several.tolist():
                at, rows = int(piece[row]), holders[int(stretch[row])]
                nearest = rows[(found := speed[row_of[at], rows]) == found.max()]
                source = device[nearest[np.argmin(self._sent[device[nearest]])]]
                self._send(source[None], target[at : at + 1], size[row : row + 1] * share)
        return came

    def _speeds(self, receivers: Array, device: Array) -> Array:
        source = np.tile(device, len(receivers))
        links = self._cluster.links(source, np.repeat(receivers, len(device)))
        speed: Array = links.bandwidth_bytes_per_s.reshape(len(receivers), len(device))
        return speed

    def _send(self, source: Array, target: Array, size_bytes: Array) -> None:
        np.add.at(self._sent, source, size_bytes)
        self._copies.append((source, target, size_bytes))

    def seconds(self) -> float:
        """Return the seconds of all copies, every port at work at the same time."""
        columns = [np.concatenate(part) for part in zip(*self._copies, strict=True)]
        if not columns or not len(columns[0]):
            return 0.0
        source, target, size_bytes = columns
        links = self._cluster.links(source, target)
        spent = size_bytes / links.bandwidth_bytes_per_s
        busiest = max(
            float(np.bincount(port[port >= 0], weights=spent[port >= 0]).max(initial=0.0))
            for port in (links.out_port, links.in_port)
        )
        return busiest + float(links.latency_s.max())
