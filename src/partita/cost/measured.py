"""Costs as a measured step shows them: how much slower each device and each link is than thought.

* **Devices.** The factor of a device is the seconds of its forward and backward passes, measured
  over predicted (medians over microbatches). It goes into the device's speed, so that every op
  takes that much longer there, wherever it was profiled. A device whose factor is within ``NOISE``
  of the usual one of its type takes that one, and so do devices of the type that did not run.
* **Stages.** What is left when devices are taken out (a stage that is slower than the others of the
  same devices, or whose backward is slower than its forward) goes into the costs of its ops, for
  the type of device that it ran on. A device that runs one stage cannot be told from that stage: it
  is the device that is taken to be slow.
* **Links.** That a message has come is only seen when somebody waits for it, so the quickest of the
  large messages counts; of a collective, the member that came last. Messages that should take less
  than ``CLOCK_ERROR_S`` say nothing. The factor of a level's group goes into its bandwidth and
  latency; groups of the level that nothing crossed take the usual one. Traces of other trainers
  have passes alone, and say nothing of links.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from partita.core.cluster import Cluster
from partita.core.columns import Array
from partita.core.graph import Graph
from partita.core.plan import Plan
from partita.core.problem import Problem
from partita.core.program import FIRST_COLLECTIVE, Kind, Program
from partita.core.timeline import Timeline
from partita.cost.durations import cluster_devices, instruction_seconds
from partita.errors import InvalidInputError
from partita.program.lower import lower
from partita.program.matching import match
from partita.program.order import ListOrder

NOISE = 0.03
"""Difference from other devices of its type, relative, up to which a device is one of them."""
CLOCK_ERROR_S = 5e-5
"""Seconds by which clocks of processes may be apart."""
LARGE = 0.5
"""Messages of at least this share of the largest one's bytes are looked at."""
COMPUTE_PASSES = {
    "forward": (Kind.FORWARD,),
    "backward": (Kind.BACKWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT, Kind.RECOMPUTE),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """Factors on predicted seconds that a measured step has shown; above 1 = slower.

    Attributes:
        devices: Factor of every device of the cluster on its compute, by name.
        seen: Factor of each device that ran, as it was measured, by name.
        levels: Factor of the links of each group, by level; empty where nothing is known.
        pairs: Factor of the link of each pair of a matrix; 1 where nothing is known.
        stages: ``(table of costs, stage, pass)`` with the factor on its ops beyond that of its
            devices.
    """

    devices: Mapping[str, float]
    seen: Mapping[str, float]
    levels: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    pairs: tuple[float, ...] = ()
    stages: Mapping[tuple[int, int, str], float] = field(default_factory=dict)

    @property
    def slowest(self) -> tuple[str, float]:
        """The device that is furthest above its prediction, with the factor."""
        name = max(self.seen, key=lambda each: self.seen[each])
        return name, self.seen[name]

    def to_json(self) -> dict[str, Any]:
        """Return the factors as JSON values."""
        return {
            "devices": dict(self.seen),
            "links": {name: list(factors) for name, factors in self.levels.items()},
            "stages": [
                {"stage": stage, "pass": part, "factor": factor}
                for (_, stage, part), factor in self.stages.items()
            ],
        }

    def applied(self, problem: Problem, plan: Plan) -> Problem:
        """Return a problem with costs as they were measured.

        Args:
            problem: The problem that was measured, or another one with the same devices.
            plan: The plan that ran.
        """
        cluster = problem.cluster
        devices = tuple(
            replace(device, speed=device.speed / self.devices.get(device.name, 1.0))
            for device in cluster.devices
        )
        return replace(
            problem,
            graph=_with_stages(problem.graph, plan, self.stages),
            cluster=_with_links(replace(cluster, devices=devices), self.levels, self.pairs),
        )


def calibrate(problem: Problem, plan: Plan, measured: Timeline) -> Calibration:
    """Return what a measured step says of the costs of a problem.

    Raises:
        InvalidInputError: The timeline is of another plan.
    """
    program, row_of = measured_program(problem, plan, measured)
    expected = instruction_seconds(problem, plan, program)
    is_seen = row_of >= 0
    start = np.where(is_seen, measured.start_s[row_of], np.nan)
    end = np.where(is_seen, measured.end_s[row_of], np.nan)
    cells = _compute(program, expected, end - start)
    seen = _device_factors(program, cells)
    levels: dict[str, tuple[float, ...]] = {}
    pairs: tuple[float, ...] = ()
    if bool(is_seen.all()):
        levels, pairs = _link_factors(problem, program, expected, start, end)
    devices = _all_devices(problem.cluster, seen)
    return Calibration(
        devices=devices,
        seen=seen,
        levels=levels,
        pairs=pairs,
        stages=_stage_factors(problem, program, cells, devices),
    )


def measured_program(problem: Problem, plan: Plan, measured: Timeline) -> tuple[Program, Array]:
    """Return the Program that a timeline is of, and the row of the timeline of each instruction.

    The row is -1 of an instruction that is not in the timeline, which has all of them or all
    passes.

    Raises:
        InvalidInputError: It is of none of the plan's Programs.
    """
    for order in ListOrder:
        try:
            program = lower(problem, plan, order=order)
        except InvalidInputError:
            if order is ListOrder.DEVICE:
                raise
            continue  # weight stashing has no program order
        is_pass = np.isin(program.kind, [kind for part in COMPUTE_PASSES.values() for kind in part])
        for wanted in (np.arange(len(program)), np.flatnonzero(is_pass)):
            if len(wanted) != len(measured) or program.devices != measured.devices:
                continue
            rows = np.argsort(measured.instruction, kind="stable")
            same = np.array_equal(measured.instruction[rows], wanted)
            columns = ("kind", "device", "stage", "microbatch")
            if same and all(
                np.array_equal(getattr(measured, name)[rows], getattr(program, name)[wanted])
                for name in columns
            ):
                row_of = np.full(len(program), -1)
                row_of[wanted] = rows
                return program, row_of
    raise InvalidInputError(
        f"the timeline has {len(measured)} instructions on {len(measured.devices)} devices, which "
        "are not those of the plan; expected one of a run of this plan"
    )


@dataclass(frozen=True, slots=True)
class _Cell:
    """Passes of one stage on one device: seconds predicted, and measured over predicted."""

    device: int
    stage: int
    part: str
    expected_s: float
    factor: float


def _compute(program: Program, expected: Array, spent: Array) -> list[_Cell]:
    cells = []
    for part, kinds in COMPUTE_PASSES.items():
        rows = np.flatnonzero(np.isin(program.kind, kinds) & (expected > 0))
        keys = np.stack([program.device[rows], program.stage[rows]])
        for device, stage in np.unique(keys, axis=1).T.tolist():
            here = rows[(keys[0] == device) & (keys[1] == stage)]
            factor = float(np.median(spent[here] / expected[here]))
            if factor > 0:
                cells.append(_Cell(device, stage, part, float(expected[here].sum()), factor))
    return cells


def _device_factors(program: Program, cells: Sequence[_Cell]) -> dict[str, float]:
    total: dict[str, tuple[float, float]] = {}
    for cell in cells:
        name = program.devices[cell.device]
        expected, spent = total.get(name, (0.0, 0.0))
        total[name] = (expected + cell.expected_s, spent + cell.expected_s * cell.factor)
    if not total:
        raise InvalidInputError("the timeline has no forward or backward pass to learn from")
    return {name: spent / expected for name, (expected, spent) in total.items()}


def _usual(factors: Sequence[float]) -> float:
    """Return the median; of two in the middle the lower, as it is rather slow that is unusual."""
    return sorted(factors)[(len(factors) - 1) // 2]


def _all_devices(cluster: Cluster, seen: Mapping[str, float]) -> dict[str, float]:
    by_type: dict[str, list[float]] = {}
    for device in cluster.devices:
        if device.name in seen:
            by_type.setdefault(device.type, []).append(seen[device.name])
    usual = {name: _usual(factors) for name, factors in by_type.items()}
    result = {}
    for device in cluster.devices:
        common = usual.get(device.type, 1.0)
        own = seen.get(device.name, common)
        result[device.name] = own if abs(own / common - 1) > NOISE else common
    return result


def _table_of(graph: Graph, device_type: str) -> int:
    """Return the table of costs that a type of device uses as it is; -1 = it is modelled."""
    types = [costs.device_type for costs in graph.costs]
    for name in (device_type, ""):
        if name in types:
            return types.index(name)
    return -1 if device_type else 0


def _stage_factors(
    problem: Problem, program: Program, cells: Sequence[_Cell], devices: Mapping[str, float]
) -> dict[tuple[int, int, str], float]:
    # Ops whose costs are known by degrees share them with all ops of their kind.
    if len(problem.graph.degrees):
        return {}
    index = problem.cluster.index_of
    total: dict[tuple[int, int, str], tuple[float, float]] = {}
    for cell in cells:
        name = program.devices[cell.device]
        table = _table_of(problem.graph, problem.cluster.devices[index[name]].type)
        key = (table, cell.stage, cell.part)
        expected, spent = total.get(key, (0.0, 0.0))
        total[key] = (
            expected + cell.expected_s * devices[name],
            spent + cell.expected_s * cell.factor,
        )
    factors = {key: spent / expected for key, (expected, spent) in total.items() if key[0] >= 0}
    return {key: factor for key, factor in factors.items() if abs(factor - 1) > 1e-9}


def _with_stages(graph: Graph, plan: Plan, stages: Mapping[tuple[int, int, str], float]) -> Graph:
    if not stages:
        return graph
    costs = list(graph.costs)
    for index, cost in enumerate(costs):
        factor = {part: np.ones(len(graph)) for part in COMPUTE_PASSES}
        for (table, stage, part), value in stages.items():
            if table == index:
                factor[part][plan.stage_of == stage] = value
        costs[index] = replace(
            cost,
            forward_s=cost.forward_s * factor["forward"],
            backward_s=cost.backward_s * factor["backward"],
            backward_input_s=cost.backward_input_s * factor["backward"],
        )
    return replace(graph, costs=tuple(costs))


def _link_factors(
    problem: Problem, program: Program, expected: Array, start: Array, end: Array
) -> tuple[dict[str, tuple[float, ...]], tuple[float, ...]]:
    """Return the factors of the groups of each level, or of each pair of a matrix."""
    cluster = problem.cluster
    seen: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for (level, group), rows in _crossed(problem, program).items():
        for kinds in (rows[program.kind[rows] == Kind.SEND], rows[program.kind[rows] != Kind.SEND]):
            sent = kinds[expected[kinds] >= CLOCK_ERROR_S]
            if not len(sent):
                continue
            sent = sent[program.bytes[sent] >= LARGE * program.bytes[sent].max()]
            arrived = np.where(program.kind[sent] == Kind.SEND, match(program).partner[sent], sent)
            factor = float(((end[arrived] - start[sent]) / expected[sent]).min())
            if factor > 0:
                weight = float(expected[sent].sum())
                seen.setdefault((level, group), []).append((weight, weight * factor))
    known = {
        key: sum(spent for _, spent in pairs) / sum(weight for weight, _ in pairs)
        for key, pairs in seen.items()
    }
    if cluster.matrix is not None:
        common = _usual(list(known.values())) if known else 1.0
        count = len(cluster) ** 2
        return {}, tuple(known.get((-1, pair), common) for pair in range(count) if known)
    levels = {}
    for index, part in enumerate(cluster.levels):
        here = {group: factor for (of, group), factor in known.items() if of == index}
        if here:
            common = _usual(list(here.values()))
            groups = range(len(part.latency_s))
            levels[part.name] = tuple(here.get(group, common) for group in groups)
    return levels, ()


def _crossed(problem: Problem, program: Program) -> dict[tuple[int, int], Array]:
    """Return messages and collectives by the level, and the group, at which their devices meet."""
    cluster, tensors = problem.cluster, problem.graph.tensors
    place = cluster_devices(problem, program.devices)
    found: dict[tuple[int, int], list[int]] = {}
    sends = np.flatnonzero(program.kind == Kind.SEND)
    # Seconds that a file gives for a tensor are not those of a link.
    sends = sends[np.isnan(tensors.transfer_s[program.tensor[sends]])]
    source, target = place[program.device[sends]], place[program.peer[sends]]
    links = cluster.links(source, target)
    for row, level, sender, port in zip(
        sends.tolist(), links.level.tolist(), source.tolist(), links.out_port.tolist(), strict=True
    ):
        group = port if level < 0 else int(cluster.levels[level].group_of[sender])
        found.setdefault((level, group), []).append(row)
    for row in np.flatnonzero(program.kind >= FIRST_COLLECTIVE).tolist():
        members = place[program.group_of(row)]
        for level, part in enumerate(cluster.levels):
            groups = np.unique(part.group_of[members])
            if len(groups) == 1:
                found.setdefault((level, int(groups[0])), []).append(row)
                break
    return {key: np.array(rows) for key, rows in found.items()}


def _with_links(
    cluster: Cluster, levels: Mapping[str, tuple[float, ...]], pairs: tuple[float, ...]
) -> Cluster:
    if cluster.matrix is not None and pairs:
        matrix = replace(
            cluster.matrix,
            bandwidth_bytes_per_s=cluster.matrix.bandwidth_bytes_per_s / np.array(pairs),
            latency_s=cluster.matrix.latency_s * np.array(pairs),
        )
        return replace(cluster, matrix=matrix)
    return replace(
        cluster,
        levels=tuple(
            replace(
                level,
                bandwidth_bytes_per_s=level.bandwidth_bytes_per_s / np.array(levels[level.name]),
                latency_s=level.latency_s * np.array(levels[level.name]),
            )
            if level.name in levels
            else level
            for level in cluster.levels
        ),
    )
