"""Tables that follow from a problem once and serve everyone: by parameter, op and device.

* Bytes that a parameter holds on a device: weights, gradients, master copy and optimizer state,
  divided as sharding says: of one parameter under a policy of dtypes (``state_bytes``), and of all
  parameters of a graph (``held_bytes``); of these what outlives a step (``lasting_bytes``).
* Devices that are alike: in time alone (``alike_in_time``), and in all that a plan may ask of them
  (``device_classes``).
* Ops that must stay together (``joined_ops``, ``units``).
* Explicit backward ops as part of backward (``fold_backward``).
* Memory that no plan can use: a process, its communicators and its allocator (``fixed_bytes``,
  ``GPU_RESERVE``). Logs and guides of Megatron-LM, NeMo and torchtitan put a CUDA context at 0.5 to
  0.9 GiB, NCCL at 1 to 2 GiB by its communicators, and plan up to 0.90 of the memory with
  expandable segments, 0.80 without.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from partita.core.cluster import Cluster, Device
from partita.core.columns import Array, Flags, Floats, Longs, derived, frozen_array
from partita.core.graph import DTYPE_BYTES, Graph, ParameterTable
from partita.core.plan import Shard
from partita.core.precision import DEFAULT_OPTIMIZER, OPTIMIZERS, Precision, bytes_at
from partita.core.problem import Mode, Objective, Problem

GPU_RESERVE = 0.10
"""Share of a GPU's memory that plans leave free where nobody says how much."""
CONTEXT_BYTES = 0.7 * 2**30
"""Context, kernels and handles of libraries of one process on a GPU."""
COMMUNICATOR_BYTES = 0.35 * 2**30
"""Buffers of one NCCL communicator: tensor, pipeline, context, expert and data groups have one."""
SHARD_LEVEL = {shard: level for level, shard in enumerate(Shard)}
"""Level of sharding: replicas divide what the level below does, and one thing more."""


class StateBytes(NamedTuple):
    """Bytes that parameters and buffers hold, a row each; or those of one parameter, as scalars.

    Attributes:
        weights: What forward and backward read.
        gradients: Gradients; 0 for what is not trained.
        master: Copy in a higher precision that the optimizer steps, and the gradients that it keeps
            beside it; 0 where it steps the weights.
        state: Optimizer state; 0 for what is not trained.
        trained: Whether it is trained: has a gradient, and is updated.
        copy: Copy of wider weights in the type of the arithmetic, one for the step.
    """

    weights: Floats
    gradients: Floats
    master: Floats
    state: Floats
    trained: Flags
    copy: Floats

    @property
    def stepped(self) -> Floats:
        """Master copy and state, which the optimizer keeps for itself."""
        return self.master + self.state

    @property
    def trained_state(self) -> Floats:
        """All that training adds to the weights."""
        return self.copy + self.gradients + self.stepped

    @property
    def total(self) -> Floats:
        """Everything."""
        return self.weights + self.trained_state

    @property
    def update_traffic(self) -> Floats:
        """Bytes that an update moves: gradients are read, all else is read and written.

        Weights beside a master copy are written only.
        """
        written = np.where(self.master > 0, 1.0, 2.0) * self.weights
        return np.where(self.trained, written + self.gradients + 2 * self.stepped, 0.0)

    def at(self, rows: Array) -> "StateBytes":
        """Return the rows of some parameters."""
        return StateBytes(
            weights=self.weights[rows],
            gradients=self.gradients[rows],
            master=self.master[rows],
            state=self.state[rows],
            trained=self.trained[rows],
            copy=self.copy[rows],
        )

    def on_device(
        self, *, level: Array | int, replicas: Array | int, tp: Array | int = 1
    ) -> "StateBytes":
        """Return what one device holds of each row.

        Only what is trained is divided among replicas: frozen parameters and buffers, which nobody
        reduces, are whole everywhere. Where weights are divided, the copy in the type of the
        arithmetic is what a gather brings, and lives as long.

        Args:
            level: ``SHARD_LEVEL`` of what the replicas divide.
            replicas: Replicas that divide it.
            tp: Tensor-parallel devices that share each parameter.
        """

        def part(values: Floats, shard: Shard) -> Floats:
            divided = (level >= SHARD_LEVEL[shard]) & self.trained
            return values / tp / np.where(divided, replicas, 1)

        gathers = (level >= SHARD_LEVEL[Shard.PARAMETERS]) & self.trained
        return StateBytes(
            part(self.weights, Shard.PARAMETERS),
            part(self.gradients, Shard.GRADIENTS),
            part(self.master, Shard.OPTIMIZER),
            part(self.state, Shard.OPTIMIZER),
            self.trained,
            np.where(gathers & (np.asarray(replicas) > 1), 0.0, self.copy / tp),
        )


def state_bytes(
    precision: Precision, optimizer: str = DEFAULT_OPTIMIZER, *, frozen: float = 0.0
) -> StateBytes:
    """Return what one parameter holds where it is whole, under a policy and an optimizer.

    Args:
        precision: The policy of dtypes.
        optimizer: A name of ``OPTIMIZERS``.
        frozen: Share of the parameters that is not trained: nearly all with LoRA, whose adapters
            count among the parameters. Replicas divide frozen weights like trained ones.
    """
    trains = 1.0 - frozen
    parts = _element_bytes(precision, OPTIMIZERS[optimizer].state_bytes(precision))
    weights, gradients, master, state, copy = (np.asarray(part) for part in parts)
    return StateBytes(
        weights, gradients * trains, master * trains, state * trains, np.asarray(True), copy
    )


def _element_bytes(precision: Precision, state: float) -> tuple[float, float, float, float, float]:
    """Return bytes of weights, gradients, master copy, state and copy of a trained element."""

    def size(dtype: str | None) -> float:
        return 0.0 if dtype is None else DTYPE_BYTES[dtype]

    return (
        size(precision.weights),
        size(precision.gradients),
        size(precision.master) + size(precision.master_gradients),
        state,
        size(precision.copy),
    )


def held_bytes(
    parameters: ParameterTable, objective: Objective, *, mode: Mode | None = None
) -> StateBytes:
    """Return what every parameter holds where it is whole, under the precision and the optimizer.

    Args:
        parameters: The parameters and buffers.
        objective: Names the policy of dtypes and the optimizer's bytes per element.
        mode: What runs; ``None`` = the objective's mode.
    """
    mode = objective.mode if mode is None else mode
    key = ("held bytes", mode, objective.optimizer_bytes_per_element, objective.precision)
    return derived(parameters, key, lambda: _held_bytes(parameters, objective, mode))


def _held_bytes(parameters: ParameterTable, objective: Objective, mode: Mode) -> StateBytes:
    trained = parameters.trainable & (mode is Mode.TRAINING)
    precision, state = objective.precision, objective.optimizer_bytes_per_element
    elements = parameters.elements
    if precision is None:
        # Gradients have the dtype of their weights, and the optimizer steps the weights themselves.
        weights, gradients = parameters.bytes, parameters.bytes
        master, copy = np.zeros(len(parameters)), parameters.copy_bytes
    else:
        weights = bytes_at(parameters, precision.weights)
        # What is trained is floating: the figures of an element hold.
        _, gradient, kept, _, copied = _element_bytes(precision, state)
        gradients, master = elements * gradient, elements * kept
        copy = np.where(parameters.buffer, 0.0, elements * copied)
    return StateBytes(
        weights=weights,
        gradients=frozen_array(np.where(trained, gradients, 0.0), np.float64),
        master=frozen_array(np.where(trained, master, 0.0), np.float64),
        state=frozen_array(np.where(trained, elements * state, 0.0), np.float64),
        trained=frozen_array(trained, np.bool_),
        copy=frozen_array(copy * (mode is Mode.TRAINING), np.float64),
    )


def lasting_bytes(parameters: ParameterTable, objective: Objective) -> StateBytes:
    """Return what of every parameter outlives a step, where it is whole: no gradient, no copy."""
    held, precision = held_bytes(parameters, objective), objective.precision
    none = np.zeros(len(parameters))
    beside = None if precision is None else precision.master_gradients
    passing = 0.0 if beside is None else parameters.elements * DTYPE_BYTES[beside]
    master = np.where(held.trained, held.master - passing, 0.0)
    return held._replace(gradients=none, copy=none, master=master)


def at_each_user(graph: Graph, values: Array) -> Floats:
    """Return for each op the sum of values of the parameters that it uses, shared ones at each."""
    table = graph.parameters
    used = values[table.use_parameter]
    return np.asarray(np.bincount(table.use_op, weights=used, minlength=len(graph)))


def first_users(graph: Graph, counted: Array | None = None) -> Longs:
    """Return for each parameter the first op that uses it; -1 = none (of those counted)."""
    table = graph.parameters
    use = np.ones(len(table.use_op), dtype=bool) if counted is None else counted[table.use_op]
    first = np.full(len(table), len(graph), dtype=np.int64)
    np.minimum.at(first, table.use_parameter[use], table.use_op[use])
    return np.where(first < len(graph), first, -1)


def at_first_user(graph: Graph, values: Array, counted: Array | None = None) -> Floats:
    """Return for each op the sum of values of the parameters that it is the first to use."""
    first = first_users(graph, counted)
    held = first >= 0
    return np.asarray(np.bincount(first[held], weights=values[held], minlength=len(graph)))


def time_traits(device: Device) -> tuple[object, ...]:
    """Return all that the seconds of an op on a device depend on."""
    peaks = tuple(sorted(device.peak_flop_per_s.items()))
    return (device.type, device.speed, device.memory_bytes_per_s, peaks)


class Alike(NamedTuple):
    """Devices in classes, in the order of their first devices.

    Attributes:
        of: The class of each device.
        first: The first device of each class.
    """

    of: Longs
    first: tuple[int, ...]


def alike_in_time(devices: Sequence[Device]) -> Alike:
    """Return the classes of devices on which every op takes the same time."""
    return _classed([time_traits(device) for device in devices])


def cluster_classes(cluster: Cluster) -> Alike:
    """Return the classes of a cluster's devices on which every op takes the same time."""
    return derived(cluster, "alike in time", lambda: alike_in_time(cluster.devices))


def _classed(traits: Sequence[object]) -> Alike:
    number: dict[object, int] = {}
    of = np.array([number.setdefault(key, len(number)) for key in traits], dtype=np.int64)
    return Alike(of, tuple(np.unique(of, return_index=True)[1].tolist()))


class DeviceClasses(NamedTuple):
    """Devices that no plan tells apart by speed, memory or rules.

    Attributes:
        of: The class of each device of the cluster.
        first: The first device of each class; classes are in the order of these.
        sizes: Devices in each class.
        limit_bytes: Memory that a plan may use on a device, by class.
        allowed: ``[classes, ops]``: whether an op may run there.
    """

    of: Longs
    first: tuple[int, ...]
    sizes: Floats
    limit_bytes: Floats
    allowed: Flags

    def devices(self, problem: Problem) -> list[Device]:
        """Return the first device of each class."""
        return [problem.cluster.devices[index] for index in self.first]


def device_classes(problem: Problem) -> DeviceClasses:
    """Return the classes of a problem's devices."""
    return derived(problem, "device classes", lambda: _device_classes(problem))


def _device_classes(problem: Problem) -> DeviceClasses:
    row_of, matrix = problem.allowed
    of, first = _classed(
        [
            (time_traits(device), device.kind, device.memory_bytes, matrix[:, index].tobytes())
            for index, device in enumerate(problem.cluster.devices)
        ]
    )
    return DeviceClasses(
        of=of,
        first=first,
        sizes=np.bincount(of).astype(np.float64),
        limit_bytes=problem.limit_bytes[list(first)],
        allowed=matrix[:, first].T[:, row_of],
    )


def joined_ops(label: Array) -> Longs:
    """Return a number for each set of rows that share a label; a row without one, -1, is alone.

    Sets are numbered by their labels, then those that are alone by their place.
    """
    label = label.astype(np.int64)
    alone = int(label.max(initial=-1)) + 1 + np.arange(len(label))
    _, of = np.unique(np.where(label >= 0, label, alone), return_inverse=True)
    return of.ravel().astype(np.int64)


class Units(NamedTuple):
    """Ops that must stay together, as one.

    Attributes:
        of: The unit of each op.
        num_units: Number of units.
    """

    of: Longs
    num_units: int

    def total(self, values: Array) -> Array:
        """Return the sums of values over the ops of each unit; the last axis is that of ops."""
        if self.num_units == values.shape[-1]:
            return values
        flat = values.reshape(-1, values.shape[-1])
        rows = [np.bincount(self.of, weights=row, minlength=self.num_units) for row in flat]
        return np.stack(rows).reshape(*values.shape[:-1], self.num_units)


def units(graph: Graph) -> Units:
    """Return the colocation classes and the free ops of a graph."""
    return derived(graph, "units", lambda: _units(graph))


def _units(graph: Graph) -> Units:
    of = joined_ops(graph.ops.colocation)
    return Units(of, int(of.max(initial=-1)) + 1)


def fold_backward(graph: Graph, forward_s: Array, backward_s: Array) -> tuple[Array, Array]:
    """Return forward and backward seconds of ops, explicit backward ops with all in backward.

    Graphs with explicit backward ops hold the whole cost of such an op as "forward"; it runs in the
    backward of its stage.
    """
    explicit = ~graph.is_forward
    backward = np.where(explicit, forward_s + backward_s, backward_s)
    return np.where(explicit, 0.0, forward_s), backward


def fixed_bytes(communicators: int | Array) -> float | Array:
    """Return what a process takes before the first tensor, by the communicators that it opens."""
    return CONTEXT_BYTES + COMMUNICATOR_BYTES * communicators
