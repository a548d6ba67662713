"""What the search knows of a problem: units that stay together, classes of devices, and sums.

A *unit* is a set of ops that the search keeps together (``units``). A
*class* is a set of devices that run every op at the same speed, have the same memory and may run
the same ops. Times are ``fixed + per_sample * n`` for n samples, as in ``cost.durations``.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from partita.core.columns import Array
from partita.core.plan import Shard
from partita.core.problem import Mode, Problem, Schedule
from partita.cost.durations import op_seconds
from partita.cost.tables import SHARD_LEVEL, device_classes, fold_backward, held_bytes
from partita.planners.auto.units import units_of
from partita.planners.lattice.quotient import Quotient

MAX_MICROBATCHES = 128
"""Microbatches up to which a split is tried where the count is free; or two for each device."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """How the samples of a step are split.

    Attributes:
        count: Microbatches.
        size: Samples in each.
    """

    count: int
    size: int


@dataclass(frozen=True, kw_only=True, eq=False)
class Frame:
    """Tables of a problem by unit and class of device.

    Attributes:
        problem: The problem.
        units: Its contracted graph.
        class_of: The class of each device of the cluster.
        forward: ``(fixed, per_sample)`` seconds by class and unit.
        backward: Likewise, both parts of backward.
        input_share: Share of each unit's backward that computes input gradients.
        saved: ``(fixed, per_sample)`` bytes that each unit keeps from forward to backward.
        static_bytes: Weights, gradients and optimizer state of each unit.
        weight_bytes: Weights of each unit.
        reduced_bytes: Gradients of each unit that replicas must reduce.
        allowed: Whether a class may run a unit.
        limit_bytes: Memory that a plan may use on a device of each class.
    """

    problem: Problem
    units: Quotient
    class_of: Array
    forward: tuple[Array, Array]
    backward: tuple[Array, Array]
    input_share: Array
    saved: tuple[Array, Array]
    static_bytes: Array
    weight_bytes: Array
    reduced_bytes: Array
    allowed: Array
    limit_bytes: Array

    @property
    def num_units(self) -> int:
        """Number of units."""
        return self.units.num_nodes

    @cached_property
    def trains(self) -> bool:
        """Whether plans have a backward pass."""
        return self.problem.objective.mode is Mode.TRAINING

    @cached_property
    def devices(self) -> list[int]:
        """The devices that a search deals out: all that are as good as any for some unit.

        A class that may run nothing that the accelerators may not, slower than a tenth of them (a
        CPU beside GPUs), is left to units that run nowhere else.
        """
        work = (self.forward[1] + self.backward[1]).sum(axis=1) + (
            self.forward[0] + self.backward[0]
        ).sum(axis=1)
        full = self.allowed.all(axis=1)
        best = work[full].min() if full.any() else 0.0
        weak = full & (work > 10 * best)
        return [d for d, c in enumerate(self.class_of.tolist()) if not weak[c]]

    def held_bytes(self, shard: Shard, replicas: int) -> Array:
        """Return what each unit holds all the time on one of some replicas that shard."""
        level = SHARD_LEVEL[shard] if replicas > 1 else 0
        if not level:
            return self.static_bytes
        key = (level, replicas)
        if key not in self._held:
            table = self.problem.graph.parameters
            held = held_bytes(table, self.problem.objective)
            part = held.on_device(level=level, replicas=replicas).total
            self._held[key] = _by_unit(self.problem, self.units, part)
        return self._held[key]

    @cached_property
    def _held(self) -> dict[tuple[int, int], Array]:
        return {}

    def seconds(self, size: int) -> tuple[Array, Array]:
        """Return forward and backward seconds by class and unit for a microbatch."""
        forward, backward = (
            fixed + per_sample * size for fixed, per_sample in (self.forward, self.backward)
        )
        return forward, backward

    def saved_bytes(self, size: int) -> Array:
        """Return what each unit keeps of a microbatch."""
        result: Array = self.saved[0] + self.saved[1] * size
        return result

    @cached_property
    def nets(self) -> tuple[Array, Array, Array]:
        """Forward tensors between units: ``(tensor, source, ends)``, ends by ``net_rows``."""
        forward = self.problem.graph.is_forward
        tensor = self.units.net_tensor
        kept = forward[self.problem.graph.tensors.producer[tensor]]
        return tensor[kept], self.units.net_source[kept], np.flatnonzero(kept)

    @cached_property
    def net_pairs(self) -> tuple[Array, Array]:
        """``(net, reader)`` of every unit that reads a forward tensor of another one."""
        q = self.units
        _, _, kept = self.nets
        number = np.full(len(q.net_tensor), -1)
        number[kept] = np.arange(len(kept))
        net = np.repeat(np.arange(len(q.net_tensor)), np.diff(q.net_ptr))
        rows = np.flatnonzero((number[net] >= 0) & (q.net_pins != q.net_source[net]))
        return number[net[rows]], q.net_pins[rows]

    def net_bytes(self, size: int) -> Array:
        """Return the bytes of each forward tensor between units for a microbatch."""
        tensors, (tensor, _, _) = self.problem.graph.tensors, self.nets
        return tensors.bytes_at(size / self.problem.graph.batch_size, rows=tensor)

    @cached_property
    def batches(self) -> tuple[Batch, ...]:
        """The ways to split a step's batch into microbatches, the default first."""
        return batch_choices(self.problem)

    @cached_property
    def schedules(self) -> tuple[Schedule, ...]:
        """The schedules to choose from, the usual one first.

        Weight stashing trains on stale weights, so it is used where it is asked for only.
        """
        asked = self.problem.objective.schedule
        if asked is not None:
            return (asked,)
        if not self.trains:
            return (Schedule.INFERENCE,)
        return (
            Schedule.ONE_F_ONE_B,
            Schedule.ZERO_BUBBLE,
            Schedule.SPLIT,
            Schedule.GPIPE,
            Schedule.INTERLEAVED,
            Schedule.EARLY_RECOMPUTE,
        )


def batch_choices(problem: Problem) -> tuple[Batch, ...]:
    """Return the ways to split a step's batch into equal microbatches, the default first.

    The batch is fixed, and so is what the objective gives; with one of the two given the other
    follows. A metric about a single microbatch leaves no choice.
    """
    usual = Batch(count=problem.microbatches, size=problem.microbatch_size)
    objective = problem.objective
    given = objective.microbatches is not None or objective.microbatch_size is not None
    if given or objective.metric.row.one_microbatch:
        return (usual,)
    samples = usual.count * usual.size
    most = min(samples, max(MAX_MICROBATCHES, 2 * len(problem.cluster)))
    counts = [n for n in range(1, most + 1) if samples % n == 0]
    counts.sort(key=lambda n: (abs(np.log(n / usual.count)), n))
    return tuple(Batch(count=count, size=samples // count) for count in counts)


def frame_of(problem: Problem) -> Frame:
    """Return the tables of a problem."""
    units = units_of(problem)
    class_of, representatives = device_classes(problem)[:2]
    row_of, matrix = problem.allowed
    forward, backward, allowed = [], [], []
    for device in representatives:
        ahead, back = _unit_seconds(problem, units, device)
        forward.append(ahead)
        backward.append(back)
        barred = np.bincount(
            units.node_of, weights=~matrix[row_of, device], minlength=units.num_nodes
        )
        allowed.append(barred == 0)
    weight, static, reduced = _parameter_bytes(problem, units)
    return Frame(
        problem=problem,
        units=units,
        class_of=class_of,
        forward=_stacked(forward),
        backward=_stacked(backward),
        input_share=_input_share(problem, units, representatives[0]),
        saved=_saved(problem, units),
        static_bytes=static,
        weight_bytes=weight,
        reduced_bytes=reduced,
        allowed=np.stack(allowed),
        limit_bytes=problem.limit_bytes[list(representatives)],
    )


def _stacked(parts: list[tuple[Array, Array]]) -> tuple[Array, Array]:
    return np.stack([part[0] for part in parts]), np.stack([part[1] for part in parts])


def _unit_seconds(
    problem: Problem, units: Quotient, device: int
) -> tuple[tuple[Array, Array], tuple[Array, Array]]:
    graph = problem.graph
    seconds = op_seconds(graph, problem.cluster.devices[device])
    ahead, back = fold_backward(graph, seconds.forward_s, seconds.backward_s)
    if problem.objective.mode is Mode.INFERENCE:
        back = np.zeros(len(graph))
    return _parts(problem, units, ahead), _parts(problem, units, back)


def _input_share(problem: Problem, units: Quotient, device: int) -> Array:
    seconds = op_seconds(problem.graph, problem.cluster.devices[device])
    whole, part = (
        np.bincount(units.node_of, weights=values, minlength=units.num_nodes)
        for values in (seconds.backward_s, seconds.backward_s * seconds.input_share)
    )
    result: Array = np.divide(part, whole, out=np.full(units.num_nodes, 0.5), where=whole > 0)
    return result


def _parts(problem: Problem, units: Quotient, values: Array) -> tuple[Array, Array]:
    """Return the fixed part, and the part for each sample, of a column by unit."""
    fixed, linear = (
        np.bincount(units.node_of, weights=part, minlength=units.num_nodes)
        for part in problem.graph.ops.time_parts(values)
    )
    return fixed, linear / problem.graph.batch_size


def _saved(problem: Problem, units: Quotient) -> tuple[Array, Array]:
    ops, count = problem.graph.ops, units.num_nodes
    if problem.objective.mode is Mode.INFERENCE:
        return np.zeros(count), np.zeros(count)
    fixed, whole = (
        np.bincount(units.node_of, weights=ops.saved_at(share), minlength=count)
        for share in (0.0, 1.0)
    )
    return fixed, (whole - fixed) / problem.graph.batch_size


def _by_unit(problem: Problem, units: Quotient, values: Array) -> Array:
    """Return sums by unit of a column of parameters; what several units use counts in each."""
    table, count = problem.graph.parameters, units.num_nodes
    pairs = np.unique(
        units.node_of[table.use_op] * np.int64(max(1, len(table))) + table.use_parameter
    )
    unit, parameter = pairs // max(1, len(table)), pairs % max(1, len(table))
    result: Array = np.bincount(unit, weights=values[parameter], minlength=count)
    return result


def _parameter_bytes(problem: Problem, units: Quotient) -> tuple[Array, Array, Array]:
    """Return weights, weights with gradients and optimizer state, and reduced bytes by unit."""
    held = held_bytes(problem.graph.parameters, problem.objective)
    weight, static, gradient = (
        _by_unit(problem, units, values) for values in (held.weights, held.total, held.gradients)
    )
    return weight, static, gradient
