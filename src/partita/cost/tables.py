"""Tables that follow from a problem once and serve everyone: by parameter, op and device.

* Bytes that a parameter holds on a device: weights, gradients, master copy and optimizer state,
  divided as sharding says (``held_bytes``).
* Devices that are alike: in time alone (``alike_in_time``), and in all that a plan may ask of them
  (``device_classes``).
* Ops that must stay together (``joined_ops``, ``units``).
* Explicit backward ops as part of backward (``fold_backward``).
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from partita.core.cluster import Cluster, Device
from partita.core.columns import Array, Flags, Floats, Longs, derived, frozen_array
from partita.core.graph import Graph, ParameterTable
from partita.core.plan import Shard
from partita.core.problem import Mode, Objective, Problem

SHARD_LEVEL = {shard: level for level, shard in enumerate(Shard)}
"""Level of sharding: replicas divide what the level below does, and one thing more."""


class HeldBytes(NamedTuple):
    """Bytes that parameters and buffers hold, a row each.

    Attributes:
        weights: What forward and backward read.
        gradients: Gradients; 0 for what is not trained.
        master: Copy in a higher precision that the optimizer steps; 0 where it steps the weights.
        optimizer: Optimizer state; 0 for what is not trained.
        trained: Whether it is trained: has a gradient, and is updated.
    """

    weights: Floats
    gradients: Floats
    master: Floats
    optimizer: Floats
    trained: Flags

    @property
    def stepped(self) -> Floats:
        """Master copy and state, which the optimizer keeps for itself."""
        return self.master + self.optimizer

    @property
    def trained_state(self) -> Floats:
        """All that training adds to the weights."""
        return self.gradients + self.stepped

    @property
    def total(self) -> Floats:
        """Everything."""
        return self.weights + self.trained_state

    @property
    def update_traffic(self) -> Floats:
        """Bytes that an update moves: gradients are read, all else is read and written."""
        moved = 2 * self.weights + self.gradients + 2 * self.stepped
        return np.where(self.trained, moved, 0.0)

    def at(self, rows: Array) -> "HeldBytes":
        """Return the rows of some parameters."""
        return HeldBytes(
            weights=self.weights[rows],
            gradients=self.gradients[rows],
            master=self.master[rows],
            optimizer=self.optimizer[rows],
            trained=self.trained[rows],
        )

    def on_device(
        self, *, level: Array | int, replicas: Array | int, tp: Array | int = 1
    ) -> "HeldBytes":
        """Return what one device holds of each row.

        Only what is trained is divided among replicas: frozen parameters and buffers, which nobody
        reduces, are whole everywhere.

        Args:
            level: ``SHARD_LEVEL`` of what the replicas divide.
            replicas: Replicas that divide it.
            tp: Tensor-parallel devices that share each parameter.
        """

        def part(values: Floats, shard: Shard) -> Floats:
            divided = (level >= SHARD_LEVEL[shard]) & self.trained
            return values / tp / np.where(divided, replicas, 1)

        return HeldBytes(
            part(self.weights, Shard.PARAMETERS),
            part(self.gradients, Shard.GRADIENTS),
            part(self.master, Shard.OPTIMIZER),
            part(self.optimizer, Shard.OPTIMIZER),
            self.trained,
        )


def held_bytes(
    parameters: ParameterTable, objective: Objective, *, mode: Mode | None = None
) -> HeldBytes:
    """Return what every parameter holds where it is whole, under the precision and the optimizer.

    Args:
        parameters: The parameters and buffers.
        objective: Names the optimizer's bytes per element.
        mode: What runs; ``None`` = the objective's mode.
    """
    mode = objective.mode if mode is None else mode
    key = ("held bytes", mode, objective.optimizer_bytes_per_element)
    return derived(parameters, key, lambda: _held_bytes(parameters, objective, mode))


def _held_bytes(parameters: ParameterTable, objective: Objective, mode: Mode) -> HeldBytes:
    trained = parameters.trainable & (mode is Mode.TRAINING)
    # Gradients have the dtype of their weights, and the optimizer steps the weights themselves.
    state = parameters.elements * objective.optimizer_bytes_per_element
    return HeldBytes(
        weights=parameters.bytes,
        gradients=frozen_array(np.where(trained, parameters.bytes, 0.0), np.float64),
        master=frozen_array(np.zeros(len(parameters)), np.float64),
        optimizer=frozen_array(np.where(trained, state, 0.0), np.float64),
        trained=frozen_array(trained, np.bool_),
    )


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
        limit_bytes=problem.cluster.memory_bytes[list(first)] * problem.objective.memory_factor,
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
