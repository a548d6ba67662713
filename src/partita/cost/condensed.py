"""The value of many plans of one problem: a stage is one op, and only figures change between plans.

Searches measure thousands of plans that differ in little. All that the ops inside a stage mean to
its Program is a row of sums: seconds of a microbatch on each class of devices, bytes that are kept,
held, reduced and sent. So a plan is *condensed* in two steps.

1. Units (sets of ops that stay together) are summed by stage, and the tensors between two stages
   that would be sent one after the other, to one reader, become one message (``condense``).
2. The *skeleton* of the plan is the Program of a graph with one op per stage and one tensor per
   such message: the same lowering, order, matching and memory as any Program. It depends on the
   stages, the schedule, the microbatches and on who sends to whom, and not on figures or on which
   devices stand behind the plan's numbers, so that most plans of a search find theirs made before.

Filled with the figures, the skeleton is played by the one simulator (``measure``). Value and excess
of memory equal those of ``cost.judge`` but for the order of sums. Not covered: metrics other than
throughput and ops that ranks divide in ways of their own (``covers``), plans that stash weights and
stages with more degrees than replicas, tensor parallelism and sharding (``covers_plan``).
"""

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from partita.core.cluster import ring_order
from partita.core.columns import Array
from partita.core.graph import EdgeTable, Graph, OpCosts, OpTable, ParameterTable, TensorTable
from partita.core.plan import Plan, Shard, Stage, equal_microbatches
from partita.core.precision import wire_bytes
from partita.core.problem import Metric, Mode, Problem, Schedule
from partita.core.program import FIRST_COLLECTIVE, Kind, Program
from partita.cost.condensed_kernel import (
    Figures,
    Links,
    Nets,
    Rows,
    Runs,
    Scratch,
    Sums,
    Terms,
    UnitFigures,
    condense,
    measure,
)
from partita.cost.durations import op_seconds
from partita.cost.links import collective_s
from partita.cost.memory import GATHERED, RECEIVED, TiedUses, memory_terms, tied_uses
from partita.cost.tables import SHARD_LEVEL, cluster_classes, fold_backward, held_bytes
from partita.errors import InvalidInputError
from partita.kernels import Threshold, run
from partita.program.lower import lower
from partita.program.matching import match
from partita.program.simulate import collective_turns

MAX_DEVICES = 512
"""Devices up to which the links of all pairs are tabled."""
MAX_SKELETONS = 3000
"""Skeletons that are kept; then all are dropped."""
EFFORT = Threshold(size=30_000, total=100_000, loaded=True)
"""In rows: a search soon pays for compiled kernels, a look at a few plans does not."""


class Candidate(NamedTuple):
    """A plan by units.

    Attributes:
        stage_of: The stage of each unit.
        stages: The stages; their devices are numbers of the cluster's.
        recompute: Whether each unit recomputes its activations.
        schedule: The schedule.
        microbatches: Number of microbatches.
        size: Samples in each.
    """

    stage_of: Array
    stages: tuple[Stage, ...]
    recompute: Array
    schedule: Schedule
    microbatches: int
    size: int


class Measured(NamedTuple):
    """What becomes of a plan.

    Attributes:
        value: Seconds of a step; ``inf`` where it does not fit or cannot run.
        over_bytes: Bytes that the fullest device needs beyond its limit; ``inf`` = cannot run.
        is_exact: Whether the value is that of the simulation, and not a bound above the cutoff.
    """

    value: float
    over_bytes: float = 0.0
    is_exact: bool = True


CANNOT_RUN = Measured(math.inf, math.inf)


@dataclass(frozen=True, slots=True)
class _Skeleton:
    """The Program of plans without figures.

    Attributes:
        rows: Its columns.
        terms: Its changes of memory.
        calls: Kind, group and bucket of each collective.
        groups: The devices of each group.
        splits: Whether backward is split.
        scratch: Columns to work on.
    """

    rows: Rows
    terms: Terms
    calls: tuple[tuple[Kind, int, int], ...]
    groups: tuple[tuple[int, ...], ...]
    splits: bool
    scratch: Scratch


@dataclass(slots=True)
class CondensedModel:
    """Measures plans of one problem over units.

    Attributes:
        problem: The problem.
        unit_of: The unit of each op.
        num_units: Number of units.
        measured: Plans that were measured.
        skeletons: Skeletons that were made for them.
        excess: Bytes that each device of the plan measured last needs beyond its limit; negative =
            that many are free. Empty where the plan could not run.
    """

    problem: Problem
    unit_of: Array
    num_units: int
    measured: int = 0
    skeletons: int = 0
    excess: dict[int, float] = field(default_factory=dict)
    _tables: "_Tables" = field(init=False)
    _figures: dict[int, UnitFigures] = field(default_factory=dict)
    _held: dict[tuple[int, int, int], tuple[Array, Array]] = field(default_factory=dict)
    _space: dict[int, tuple[Sums, Runs]] = field(default_factory=dict)
    _skeleton_of: dict[Hashable, _Skeleton | None] = field(default_factory=dict)
    _stage_problems: dict[Hashable, Problem] = field(default_factory=dict)
    _call_s: dict[Hashable, float] = field(default_factory=dict)
    _known_links: Links | None = None

    def __post_init__(self) -> None:
        self._tables = _tables_of(self.problem, self.unit_of, self.num_units)

    @staticmethod
    def covers(problem: Problem) -> bool:
        """Return whether plans of a problem can be measured so."""
        graph = problem.graph
        divided = len(graph.variants) or len(graph.degrees) or graph.parameters.expert.any()
        return (
            problem.objective.metric is Metric.THROUGHPUT
            and not divided
            and len(problem.cluster) <= MAX_DEVICES
        )

    @staticmethod
    def covers_plan(stages: Sequence[Stage], schedule: Schedule) -> bool:
        """Return whether a plan with such stages is among those that can be measured so."""
        plain = not any(
            stage.cp > 1
            or stage.ep > 1
            or stage.etp
            or stage.sequence_parallel
            or stage.shard_group
            or stage.recompute
            or stage.offload_optimizer
            or stage.offload_activations
            for stage in stages
        )
        return plain and schedule.row.flushes

    def measure(self, plan: Candidate, cutoff: float = math.inf) -> Measured:
        """Return what becomes of a plan.

        Args:
            plan: A plan that is covered.
            cutoff: Plans whose busiest device computes so long are not played.
        """
        self.measured += 1
        self.excess = {}
        rounds = {stage.round for stage in plan.stages}
        if not self._is_allowed(plan) or any(plan.microbatches % length for length in rounds):
            return CANNOT_RUN
        sums, runs, count = self.condense(plan)
        if count < 0:
            return CANNOT_RUN
        return self._played(plan, sums, runs, count, cutoff)

    def condense(self, plan: Candidate) -> tuple[Sums, Runs, int]:
        """Return the figures of a plan by stage, its messages and their number.

        They are good until the next call. The number is -1 where data flow to an earlier stage.
        What several units share is not in them.
        """
        sums, runs = self._columns(len(plan.stages))
        stage_of = np.ascontiguousarray(plan.stage_of, dtype=np.int64)
        again = np.ascontiguousarray(plan.recompute, dtype=np.bool_)
        units = self._unit_figures(plan)
        inputs = [stage_of, again, self._static(plan), units, self._tables.nets]
        rows = len(units.forward) + len(self._tables.nets.pins)
        return sums, runs, run(condense, rows, inputs, [sums, runs], EFFORT)

    @property
    def _links(self) -> Links:
        if self._known_links is None:
            self._known_links = _links(self.problem)
        return self._known_links

    @property
    def class_of(self) -> Array:
        """The class of each device in time, which orders the times of ``condense``."""
        return self._tables.class_of

    def _is_allowed(self, plan: Candidate) -> bool:
        allowed = self._tables.allowed
        if allowed is None:
            return True
        for number, stage in enumerate(plan.stages):
            devices = [device for group in stage.devices for device in group]
            if not bool(allowed[devices][:, plan.stage_of == number].all()):
                return False
        return True

    def _columns(self, stages: int) -> tuple[Sums, Runs]:
        """Return columns to condense into, kept for each number of stages."""
        found = self._space.get(stages)
        if found is None:
            found = self._space[stages] = _empty_columns(stages, self._tables)
        return found

    def _unit_figures(self, plan: Candidate) -> UnitFigures:
        found = self._figures.get(plan.size)
        if found is None:
            found = _unit_figures(self.problem, self._tables, plan.size)
            self._figures[plan.size] = found
        # Where backward is split, scratch memory does not take the place of what later ops save,
        # and the sum of a tied gradient is made later.
        if plan.schedule.row.splits_backward and len(found.op_saved):
            return found._replace(
                op_saved=np.zeros_like(found.op_saved),
                tied_bytes=np.zeros_like(found.tied_bytes),
            )
        return found

    def _static(self, plan: Candidate) -> Array:
        """Return what each unit holds all the time on a device of its stage."""
        if all(stage.shard is Shard.NONE and stage.tp == 1 for stage in plan.stages):
            return self._held_bytes(_PLAIN)[0]
        result = np.empty(self.num_units)
        for number, stage in enumerate(plan.stages):
            here = plan.stage_of == number
            result[here] = self._held_bytes(_traits(stage))[0][here]
        return result

    def _held_bytes(self, traits: tuple[int, int, int]) -> tuple[Array, Array]:
        """Return what a device holds, by unit of its own parameters, and by shared parameter."""
        found = self._held.get(traits)
        if found is None:
            level, replicas, tp = traits
            held = held_bytes(self.problem.graph.parameters, self.problem.objective)
            part = held.on_device(level=level, replicas=replicas, tp=tp).total
            own = self._tables.by_unit(part)
            found = self._held[traits] = (own, part[self._tables.shared_parameters])
        return found

    def _played(
        self, plan: Candidate, sums: Sums, runs: Runs, count: int, cutoff: float
    ) -> Measured:
        used = list(
            dict.fromkeys(d for stage in plan.stages for group in stage.devices for d in group)
        )
        number = {device: index for index, device in enumerate(used)}
        extra = np.zeros(len(used))
        tied = self._add_shared(plan, sums, number, extra)
        self._add_loads(plan, sums)
        key = self._key(plan, sums, runs, count, number, tied)
        if key not in self._skeleton_of:
            self.skeletons += 1
            if len(self._skeleton_of) >= MAX_SKELETONS:
                self._skeleton_of.clear()
            self._skeleton_of[key] = self._made(plan, sums, runs, count, number, tied)
        skeleton = self._skeleton_of[key]
        if skeleton is None:
            return CANNOT_RUN
        figures = self._plan_figures(plan, skeleton, sums, used, extra, tied, cutoff)
        inputs = [skeleton.rows, skeleton.terms, sums, runs, self._links, figures]
        value = run(measure, len(skeleton.rows.kind), inputs, [skeleton.scratch], EFFORT)
        self.excess = dict(zip(used, skeleton.scratch.excess.tolist(), strict=True))
        if value == -1.0:
            return Measured(math.inf, float(skeleton.scratch.result[0]))
        if value < 0:
            return CANNOT_RUN
        return Measured(value, 0.0, bool(skeleton.scratch.result[1]))

    def _add_shared(
        self, plan: Candidate, sums: Sums, number: dict[int, int], extra: Array
    ) -> dict[tuple[int, ...], float]:
        """Add what several units share; return what sets of stages reduce together, in bytes."""
        tied: dict[tuple[int, ...], float] = {}
        for index, (units, traffic, reduced, gathered) in enumerate(self._tables.shared):
            stages = tuple(np.unique(plan.stage_of[units]).tolist())
            for stage in stages:
                sums.traffic[stage] += traffic
            if len(stages) == 1:
                stage = plan.stages[stages[0]]
                sums.held[stages[0]] += self._held_bytes(_traits(stage))[1][index]
                sums.reduced[stages[0]] += reduced
                sums.gathered[stages[0]] += gathered
                continue
            # Tied over stages it is whole wherever it is used, and once on a device.
            lowest: dict[int, int] = {}
            for stage_number in stages:
                for group in plan.stages[stage_number].devices:
                    for device in group:
                        lowest.setdefault(device, plan.stages[stage_number].tp)
            for device, tp in lowest.items():
                extra[number[device]] += self._held_bytes((0, 1, tp))[1][index]
            if reduced > 0:
                tied[stages] = tied.get(stages, 0.0) + reduced
        return tied

    def _add_loads(self, plan: Candidate, sums: Sums) -> None:
        for units, load_s in self._tables.loads:
            for stage in np.unique(plan.stage_of[units]).tolist():
                sums.load[stage] += load_s * plan.size

    def _key(
        self,
        plan: Candidate,
        sums: Sums,
        runs: Runs,
        count: int,
        number: dict[int, int],
        tied: dict[tuple[int, ...], float],
    ) -> Hashable:
        ends = runs.ptr[count] if count else 0
        return (
            tuple(
                (
                    tuple(tuple(map(number.__getitem__, group)) for group in stage.devices),
                    stage.shares,
                    stage.shard,
                )
                for stage in plan.stages
            ),
            plan.schedule,
            plan.microbatches,
            runs.producer[:count].tobytes(),
            runs.ptr[:count].tobytes(),
            runs.readers[:ends].tobytes(),
            runs.differentiable[:count].tobytes(),
            (sums.reduced > 0).tobytes(),
            (sums.load > 0).tobytes() if self._tables.loads else b"",
            sums.again.tobytes() if plan.schedule.row.recomputes_early else b"",
            tuple(tied),
        )

    def _made(
        self,
        plan: Candidate,
        sums: Sums,
        runs: Runs,
        count: int,
        number: dict[int, int],
        tied: dict[tuple[int, ...], float],
    ) -> _Skeleton | None:
        """Return the skeleton of a plan; ``None`` where its schedule cannot run it."""
        problem = self._stage_problem(sums, runs, count, tied)
        graph = problem.graph
        stages = tuple(
            Stage(
                devices=tuple(tuple(map(number.__getitem__, group)) for group in stage.devices),
                shares=stage.shares,
                shard=stage.shard,
            )
            for stage in plan.stages
        )
        small = Plan(
            fingerprint=graph.fingerprint,
            devices=self.problem.cluster.device_names[: len(number)],
            stage_of=np.arange(len(stages), dtype=np.int32),
            stages=stages,
            schedule=plan.schedule,
            microbatch_sizes=equal_microbatches(plan.microbatches, 1),
            recompute=sums.again.astype(np.bool_),
        )
        try:
            program = lower(problem, small)
        except InvalidInputError:
            return None
        return _skeleton(problem, small, program, self._tables)

    def _stage_problem(
        self, sums: Sums, runs: Runs, count: int, tied: dict[tuple[int, ...], float]
    ) -> Problem:
        """Return the problem with one op per stage; devices and their shares are not in it."""
        ends = runs.ptr[count] if count else 0
        key = (
            len(sums.kept),
            *(part[:count].tobytes() for part in (runs.producer, runs.ptr, runs.differentiable)),
            runs.readers[:ends].tobytes(),
            (sums.reduced > 0).tobytes(),
            (sums.load > 0).tobytes(),
            tuple(tied),
        )
        found = self._stage_problems.get(key)
        if found is None:
            if len(self._stage_problems) >= MAX_SKELETONS:
                self._stage_problems.clear()
            found = self._stage_problems[key] = Problem(
                graph=_stage_graph(sums, runs, count, tied),
                cluster=self.problem.cluster,
                objective=self.problem.objective,
            )
        return found

    def _plan_figures(
        self,
        plan: Candidate,
        skeleton: _Skeleton,
        sums: Sums,
        used: Sequence[int],
        extra: Array,
        tied: dict[tuple[int, ...], float],
        cutoff: float,
    ) -> Figures:
        tables = self._tables
        place = np.array(used, dtype=np.int64)
        tp = np.array([stage.tp for stage in plan.stages], dtype=np.float64)
        shards = [1 if stage.shard is Shard.NONE else stage.num_replicas for stage in plan.stages]
        members = [place[list(group)] for group in skeleton.groups]
        call_bytes = self._call_bytes(plan, skeleton, sums, tied) if skeleton.calls else []
        call_s = [
            self._collective_s(kind, members[group], size)
            for (kind, group, _), size in zip(skeleton.calls, call_bytes, strict=True)
        ]
        successor = [after for group in members for after in _successors(group)]
        return Figures(
            place=place,
            class_of=tables.class_of[place],
            limit=tables.limit[place],
            extra=extra,
            tp=tp,
            split=tp * shards,
            rate=tables.rate,
            call_s=np.array(call_s, dtype=np.float64),
            call_bytes=np.array(call_bytes, dtype=np.float64),
            successor=np.array(successor, dtype=np.int64),
            flags=np.array(
                [plan.schedule.row.recomputes_early and sums.again.any(), len(tables.limit)],
                dtype=np.int64,
            ),
            cutoff=cutoff,
        )

    @staticmethod
    def _call_bytes(
        plan: Candidate, skeleton: _Skeleton, sums: Sums, tied: dict[tuple[int, ...], float]
    ) -> list[int]:
        """Return the bytes of each collective: buckets are those of stages, then what is tied."""
        own = np.flatnonzero(sums.reduced > 0).tolist()
        lowest = [*own, *(key[0] for key in tied)]
        reduced = [*sums.reduced[own].tolist(), *tied.values()]
        # What is tied is never sharded, so that nobody gathers it.
        gathered = [*sums.gathered[own].tolist(), *tied.values()]
        return [
            math.ceil(
                (gathered if kind is Kind.ALL_GATHER else reduced)[bucket]
                / plan.stages[lowest[bucket]].tp
            )
            for kind, _, bucket in skeleton.calls
        ]

    def _collective_s(self, kind: Kind, members: Array, size: int) -> float:
        key = (kind, members.tobytes(), size)
        found = self._call_s.get(key)
        if found is None:
            found = collective_s(self.problem.cluster, kind, members, size)
            self._call_s[key] = found
        return found


_PLAIN = (0, 1, 1)


def _traits(stage: Stage) -> tuple[int, int, int]:
    """Return level of sharding, replicas that divide and tensor-parallel degree."""
    level = SHARD_LEVEL[stage.shard]
    return (level, stage.num_replicas if level else 1, stage.tp)


def _successors(group: Array) -> list[int]:
    """Return for each member the cluster's device after it in the ring."""
    ring = ring_order(group).tolist()
    after = dict(zip(ring, [*ring[1:], ring[0]], strict=True))
    return [after[device] for device in group.tolist()]


class _Tables(NamedTuple):
    """What all plans of a problem share.

    Attributes:
        unit_of: The unit of each op.
        num_units: Number of units.
        nets: Tensors between units.
        net_tensor: The tensor behind each.
        own: The unit of each parameter that one unit uses alone; -1 = shared or unused.
        shared_parameters: The others that are used.
        shared: For each of them its units, the traffic of its update, and the bytes that are
            reduced and gathered.
        loads: Units that read each model input that takes time to load, and seconds per sample.
        allowed: ``[devices, units]``; ``None`` = everything.
        num_ports: Ports in both directions.
        class_of: The class of each device in time.
        first: The first device of each class.
        rate: Memory bandwidth of each class in training, else 0.
        limit: Bytes that a plan may use on each device.
        tied: Which ops use parameters that several use, in training.
    """

    unit_of: Array
    num_units: int
    nets: Nets
    net_tensor: Array
    own: Array
    shared_parameters: Array
    shared: tuple[tuple[Array, float, float, float], ...]
    loads: tuple[tuple[Array, float], ...]
    allowed: Array | None
    num_ports: int
    class_of: Array
    first: tuple[int, ...]
    rate: Array
    limit: Array
    tied: TiedUses

    def by_unit(self, values: Array) -> Array:
        """Return sums by unit of a column of parameters, of those that one unit uses alone."""
        alone = self.own >= 0
        return np.bincount(self.own[alone], weights=values[alone], minlength=self.num_units)


def _tables_of(problem: Problem, unit_of: Array, num_units: int) -> _Tables:
    cluster, objective = problem.cluster, problem.objective
    unit_of = np.asarray(unit_of, dtype=np.int64)
    nets, net_tensor = _nets(problem.graph, unit_of)
    own, shared_parameters, shared = _parameter_users(problem, unit_of, num_units)
    alike = cluster_classes(cluster)
    trains = objective.mode is Mode.TRAINING
    rates = [cluster.devices[d].memory_bytes_per_s if trains else 0.0 for d in alike.first]
    row_of, matrix = problem.allowed
    allowed = None
    if not bool(matrix.all()):
        allowed = np.ones((len(cluster), num_units), dtype=bool)
        for device in range(len(cluster)):
            barred = np.bincount(unit_of, weights=~matrix[row_of, device], minlength=num_units)
            allowed[device] = barred == 0
    return _Tables(
        unit_of=unit_of,
        num_units=num_units,
        nets=nets,
        net_tensor=net_tensor,
        own=own,
        shared_parameters=shared_parameters,
        shared=shared,
        loads=_loads(problem.graph, unit_of),
        allowed=allowed,
        num_ports=2 * cluster.num_ports,
        class_of=alike.of.astype(np.int64),
        first=alike.first,
        rate=np.array(rates),
        limit=problem.limit_bytes,
        tied=tied_uses(problem),
    )


def _nets(graph: Graph, unit_of: Array) -> tuple[Nets, Array]:
    """Return the forward tensors between units, in order, and their numbers."""
    source, reader = graph.edge_source, graph.edges.reader
    inner = np.flatnonzero(source >= 0)
    inner = inner[graph.is_forward[source[inner]] & graph.is_forward[reader[inner]]]
    inner = inner[unit_of[source[inner]] != unit_of[reader[inner]]]
    size = int(unit_of.max()) + 1
    keys = np.unique(graph.edges.tensor[inner].astype(np.int64) * size + unit_of[reader[inner]])
    tensor, first = np.unique(keys // size, return_index=True)
    keeper = np.full(len(graph.tensors), -1, dtype=np.int64)
    keeping = inner[graph.edges.keeper[inner] >= 0]
    keeper[graph.edges.tensor[keeping]] = unit_of[graph.edges.keeper[keeping]]
    kept = graph.edges.tensor[keeping].astype(np.int64) * size + unit_of[reader[keeping]]
    nets = Nets(
        source=unit_of[graph.tensors.producer[tensor]],
        ptr=np.append(first, len(keys)).astype(np.int64),
        pins=keys % size,
        differentiable=graph.tensors.differentiable[tensor].astype(np.int64),
        keeper=keeper[tensor],
        keeps=np.isin(keys, kept).astype(np.int64),
    )
    return nets, tensor


def _parameter_users(
    problem: Problem, unit_of: Array, num_units: int
) -> tuple[Array, Array, tuple[tuple[Array, float, float, float], ...]]:
    table = problem.graph.parameters
    keys = np.unique(
        table.use_parameter.astype(np.int64) * num_units + unit_of[table.use_op.astype(np.int64)]
    )
    parameter, unit = keys // num_units, keys % num_units
    users = np.bincount(parameter, minlength=len(table))
    own = np.full(len(table), -1, dtype=np.int64)
    alone = users[parameter] == 1
    own[parameter[alone]] = unit[alone]
    held = held_bytes(table, problem.objective)
    reduced, gathered = _exchanged(problem)
    several = np.flatnonzero(users > 1)
    shared = tuple(
        (
            unit[parameter == p],
            float(held.update_traffic[p]),
            float(reduced[p]),
            float(gathered[p]),
        )
        for p in several.tolist()
    )
    return own, several, shared


def _exchanged(problem: Problem) -> tuple[Array, Array]:
    """Return the bytes of each parameter that replicas reduce and gather; 0 = not trained."""
    table = problem.graph.parameters
    trained = held_bytes(table, problem.objective).trained
    wire = wire_bytes(table, problem.objective.precision)
    return np.where(trained, wire.reduced, 0.0), np.where(trained, wire.gathered, 0.0)


def _loads(graph: Graph, unit_of: Array) -> tuple[tuple[Array, float], ...]:
    edges = np.flatnonzero((graph.edge_source < 0) & graph.is_forward[graph.edges.reader])
    tensor = graph.edges.tensor[edges]
    return tuple(
        (
            np.unique(unit_of[graph.edges.reader[edges[tensor == t]]]),
            float(graph.tensors.load_s[t]) / graph.batch_size,
        )
        for t in np.unique(tensor).tolist()
        if graph.tensors.load_s[t] > 0
    )


def _links(problem: Problem) -> Links:
    cluster = problem.cluster
    size = len(cluster)
    source, target = (part.ravel() for part in np.indices((size, size)))
    links = cluster.links(source, target)
    inward = np.where(links.in_port < 0, -1, cluster.num_ports + links.in_port)
    return Links(
        latency=np.ascontiguousarray(links.latency_s, dtype=np.float64),
        bandwidth=np.ascontiguousarray(links.bandwidth_bytes_per_s, dtype=np.float64),
        out_port=links.out_port.astype(np.int64),
        in_port=inward.astype(np.int64),
    )


def _unit_figures(problem: Problem, tables: _Tables, size: int) -> UnitFigures:
    graph, ops = problem.graph, problem.graph.ops
    count, unit_of = tables.num_units, tables.unit_of
    scale = size / graph.batch_size
    factor = ops.time_factor(scale)
    times: list[list[Array]] = [[], [], []]
    trains = problem.objective.mode is Mode.TRAINING
    for device in tables.first:
        seconds = op_seconds(graph, problem.cluster.devices[device])
        forward, backward = fold_backward(graph, seconds.forward_s, seconds.backward_s)
        for part, values in zip(
            times, (forward, backward, backward * seconds.input_share), strict=True
        ):
            part.append(np.bincount(unit_of, weights=values * factor, minlength=count))
    saved = ops.saved_at(scale) if trains else np.zeros(len(ops))
    held = held_bytes(graph.parameters, problem.objective)
    reduced, gathered = _exchanged(problem)
    table, tensor = graph.tensors, tables.net_tensor
    net_bytes = table.bytes_at(size, graph.batch_size, tensor)
    given = table.transfer_s[tensor] * size / graph.batch_size
    free = np.isnan(given)
    tied = tables.tied
    has_scratch = bool((ops.workspace_bytes > 0).any()) or len(tied.op) > 0
    order = graph.topological_order if has_scratch else np.zeros(0, int)
    place = np.zeros(len(graph), dtype=np.int64)
    place[order] = np.arange(len(order))
    by_place = np.argsort(place[tied.op], kind="stable")
    return UnitFigures(
        forward=np.concatenate(times[0]),
        backward=np.concatenate(times[1]),
        backward_input=np.concatenate(times[2]),
        saved=np.bincount(unit_of, weights=saved, minlength=count),
        reduced=tables.by_unit(reduced),
        gathered=tables.by_unit(gathered),
        traffic=tables.by_unit(held.update_traffic),
        net_bytes=net_bytes,
        net_sent=np.ceil(net_bytes),
        net_given=np.where(free, 0.0, given),
        net_free=free.astype(np.int64),
        op_unit=unit_of[order],
        op_scratch=ops.workspace_bytes[order] * scale,
        op_saved=saved[order],
        tied_ptr=np.searchsorted(place[tied.op[by_place]], np.arange(len(order) + 1)),
        tied=tied.row[by_place],
        tied_bytes=tied.bytes,
    )


def _empty_columns(stages: int, tables: _Tables) -> tuple[Sums, Runs]:
    cells, nets = stages * len(tables.first), len(tables.nets.source)
    pins = len(tables.nets.pins)
    by_class = [np.zeros(cells) for _ in range(4)]
    by_stage = [np.zeros(stages) for _ in range(len(Sums._fields) - len(by_class))]
    uses = len(tables.tied.bytes) * stages
    sums = Sums._make([*by_class, *by_stage])._replace(
        again=np.zeros(stages, dtype=np.int64),
        users=np.zeros(uses, dtype=np.int64),
        met=np.zeros(uses, dtype=np.int64),
    )

    def whole(size: int) -> Array:
        return np.zeros(size, dtype=np.int64)

    runs = Runs(
        producer=whole(nets),
        ptr=whole(nets + 1),
        readers=whole(pins),
        differentiable=whole(nets),
        sent=np.zeros(nets),
        size=np.zeros(nets),
        given=np.zeros(nets),
        free=whole(nets),
        last_out=whole(stages),
        last_in=whole(stages),
        seen=whole(stages),
    )
    return sums, runs


def _stage_graph(sums: Sums, runs: Runs, count: int, tied: dict[tuple[int, ...], float]) -> Graph:
    """Return the graph with one op per stage and one tensor per run, in their order."""
    stages = len(sums.kept)
    loading = np.flatnonzero(sums.load > 0)
    ends = int(runs.ptr[count]) if count else 0
    readers = np.diff(runs.ptr[: count + 1])
    own = np.flatnonzero(sums.reduced > 0)
    users = [(stage, row) for row, stage in enumerate(own.tolist())]
    users += [(stage, len(own) + row) for row, key in enumerate(tied) for stage in key]
    parameters = len(own) + len(tied)
    return Graph(
        name="stages",
        ops=OpTable(names=tuple(f"stage{stage}" for stage in range(stages))),
        costs=(OpCosts(forward_s=np.ones(stages), backward_s=np.ones(stages)),),
        tensors=TensorTable(
            names=tuple(f"tensor{row}" for row in range(count + len(loading))),
            producer=np.concatenate([runs.producer[:count], np.full(len(loading), -1)]),
            bytes=np.ones(count + len(loading)),
            differentiable=np.concatenate(
                [runs.differentiable[:count] == 1, np.zeros(len(loading), dtype=bool)]
            ),
        ),
        edges=EdgeTable(
            tensor=np.concatenate(
                [np.repeat(np.arange(count), readers), count + np.arange(len(loading))]
            ),
            reader=np.concatenate([runs.readers[:ends], loading]),
        ),
        parameters=ParameterTable(
            names=tuple(f"bucket{row}" for row in range(parameters)),
            bytes=np.ones(parameters),
            use_op=np.array([stage for stage, _ in users], dtype=np.int32),
            use_parameter=np.array([row for _, row in users], dtype=np.int32),
        ),
    )


def _skeleton(problem: Problem, plan: Plan, program: Program, tables: _Tables) -> _Skeleton:
    matching = match(program)
    calls, call, ring = _collectives(program)
    homes = [
        (stage, device)
        for stage, part in enumerate(plan.stages)
        for group in part.devices
        for device in group
    ]
    sends = np.flatnonzero(program.kind == Kind.SEND)
    size = len(plan.devices)
    pairs = np.unique(program.device[sends].astype(np.int64) * size + program.peer[sends])
    rows = Rows(
        ptr=program.ptr,
        kind=program.kind.astype(np.int64),
        device=program.device.astype(np.int64),
        stage=program.stage.astype(np.int64),
        run=program.tensor.astype(np.int64),
        peer=program.peer.astype(np.int64),
        call=call,
        ring=ring,
        partner=matching.partner,
        joint=matching.joint,
        joint_size=matching.joint_size,
        first_wait=matching.first_wait,
        next_wait=matching.next_wait,
        turn=collective_turns(program, matching),
        held_stage=np.array([stage for stage, _ in homes], dtype=np.int64),
        held_device=np.array([device for _, device in homes], dtype=np.int64),
        pair_from=pairs // size,
        pair_to=pairs % size,
    )
    groups = tuple(
        tuple(program.group_devices[a:b].tolist())
        for a, b in zip(program.group_ptr[:-1], program.group_ptr[1:], strict=True)
    )
    return _Skeleton(
        rows=rows,
        terms=_ordered_terms(problem, plan, program, call),
        calls=calls,
        groups=groups,
        splits=bool((program.kind == Kind.BACKWARD_WEIGHT).any()),
        scratch=_scratch(rows, len(plan.stages), tables),
    )


def _collectives(program: Program) -> tuple[tuple[tuple[Kind, int, int], ...], Array, Array]:
    """Return kind, group and bucket of each collective; by row which it is, and who takes part.

    Who takes part is a place in ``group_devices``; both are -1 in rows of other kinds.
    """
    call, ring = np.full((2, len(program)), -1, dtype=np.int64)
    joined = np.flatnonzero(program.kind >= FIRST_COLLECTIVE)
    if not len(joined):
        return (), call, ring
    columns = [part[joined] for part in (program.kind, program.group, program.bucket)]
    named, first, of = np.unique(np.stack(columns), axis=1, return_index=True, return_inverse=True)
    # Numbered as the rows come, whatever their kinds.
    order = np.argsort(first)
    call[joined] = np.argsort(order)[of.ravel()]
    calls = tuple((Kind(kind), group, bucket) for kind, group, bucket in named.T[order].tolist())
    owner = np.repeat(np.arange(len(program.group_ptr) - 1), np.diff(program.group_ptr))
    size = len(program.devices)
    members = owner * size + program.group_devices
    by_member = np.argsort(members)
    wanted = columns[1].astype(np.int64) * size + program.device[joined]
    ring[joined] = by_member[np.searchsorted(members[by_member], wanted)]
    return calls, call, ring


def _ordered_terms(problem: Problem, plan: Plan, program: Program, call: Array) -> Terms:
    """Return the changes of memory in the order of the lists, what is given back before taken."""
    terms = memory_terms(problem, plan, program)
    order = np.lexsort((terms.sign > 0, 2 * terms.row + terms.at_end))
    part, index = terms.part[order], terms.cell[order]
    moved = index.copy()
    received, gathered = part == RECEIVED, part == GATHERED
    moved[received] = program.tensor[index[received]]
    moved[gathered] = call[index[gathered]]
    others = ~(received | gathered)
    moved[others] = index[others] // program.num_microbatches
    return Terms(
        device=program.device[terms.row[order]].astype(np.int64),
        sign=terms.sign[order].astype(np.int64),
        part=part.astype(np.int64),
        index=moved.astype(np.int64),
    )


def _scratch(rows: Rows, stages: int, tables: _Tables) -> Scratch:
    count, devices, joints = len(rows.kind), len(rows.ptr) - 1, len(rows.joint_size)

    def whole(size: int) -> Array:
        return np.zeros(size, dtype=np.int64)

    return Scratch(
        result=np.zeros(2),
        times=np.zeros((int(Kind.UPDATE) + 1) * stages * len(tables.first)),
        used=np.zeros(devices),
        excess=np.zeros(devices),
        busy=np.zeros(devices),
        out_port=whole(count),
        in_port=whole(count),
        seconds=np.zeros(count),
        flags=whole(3),
        start=np.zeros(count),
        end=np.zeros(count),
        cause=whole(count),
        position=whole(devices),
        clock=np.zeros(devices),
        last=whole(devices),
        blocked=whole(devices),
        stack=whole(devices),
        held=whole(devices),
        come=whole(joints),
        ready=np.zeros(joints),
        longest=np.zeros(joints),
        reason=whole(joints),
        head=whole(joints),
        chain=whole(count if joints else 0),
        free=np.zeros(tables.num_ports),
        holder=whole(tables.num_ports),
    )
