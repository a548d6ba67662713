"""Max-load (Tarnawski et al. 2020) by nodes of a quotient and classes of like devices.

What ``cost.objectives.tarnawski`` says of a plan, put in columns that a search can add up: seconds
of each node on each class of devices, a net for every op with readers elsewhere, bytes of each node
and of parameters that several nodes share. The value of a plan that is found is always measured by
the cost model itself.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from partita.core.columns import Array, Flags, Floats, sum_by
from partita.core.graph import DeviceKind
from partita.core.problem import Mode, Problem
from partita.cost.durations import op_seconds
from partita.cost.tables import device_classes, held_bytes
from partita.objectives.placed import seconds_on
from partita.objectives.tarnawski import transfer_seconds
from partita.planners.lattice.nets import Nets, nets_by_node, nets_of
from partita.planners.lattice.quotient import Quotient, collapse, node_sums


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SplitModel:
    """A quotient with its costs.

    Attributes:
        q: The quotient.
        devices: The devices of each class of like ones, as indices into the cluster.
        seconds: ``[class, node]``; infinite where the node may not run.
        pays: Whether the devices of a class pay for transfers (accelerators) or not (CPUs).
        limit_bytes: What a device of each class holds; infinite for CPUs.
        nets: A net (``key``: its op) for every op that is read in another node.
        net_s: Seconds of each net, on every device that it leaves or enters.
        node_bytes: What each node holds for itself alone.
        shared: A net (``key``: its parameter) for every parameter that several nodes use.
        shared_bytes: What it holds, once on every device.
    """

    q: Quotient
    devices: tuple[tuple[int, ...], ...]
    seconds: Floats
    pays: Flags
    limit_bytes: Floats
    nets: Nets
    net_s: Floats
    node_bytes: Floats
    shared: Nets
    shared_bytes: Floats

    @property
    def num_classes(self) -> int:
        """Number of classes of devices."""
        return len(self.devices)

    @property
    def num_devices(self) -> int:
        """Number of devices in all classes."""
        return sum(map(len, self.devices))

    @property
    def class_of(self) -> dict[int, int]:
        """The class of each device of the cluster."""
        return {device: c for c, members in enumerate(self.devices) for device in members}


def split_model(
    problem: Problem, q: Quotient, *, mode: Mode | None = None, cpus_are_hosts: bool = True
) -> SplitModel:
    """Return the columns of a problem on one of its quotients.

    Args:
        problem: The problem.
        q: The quotient.
        mode: What runs; ``None`` = what the problem says.
        cpus_are_hosts: Whether CPUs have all data and room for everything, as max-load has it;
            else they pay and are limited like accelerators.
    """
    graph = problem.graph
    mode = problem.objective.mode if mode is None else mode
    classes = split_classes(problem)
    firsts = [problem.cluster.devices[members[0]] for members in classes]
    row_of, table = seconds_on(graph, firsts, mode)
    seconds = np.stack([node_sums(q, table[row]) for row in row_of.tolist()])
    barred = np.stack([_barred(problem, q, members[0]) for members in classes])
    implicit = mode is Mode.TRAINING and any(
        bool(op_seconds(graph, device).backward_s.any()) for device in firsts
    )
    inner = graph.edge_source >= 0
    source = graph.edge_source[inner]
    nets = nets_of(source, q.node_of[source], q.node_of[graph.edges.reader[inner]], q.num_nodes)
    both_ways = np.where(implicit & graph.is_forward, 2.0, 1.0)
    node_bytes, shared, shared_bytes = _memory(problem, q, mode)
    accelerator = np.array([device.kind is not DeviceKind.CPU for device in firsts])
    accelerator |= not cpus_are_hosts
    return SplitModel(
        q=q,
        devices=classes,
        seconds=np.where(barred, np.inf, seconds),
        pays=accelerator,
        limit_bytes=np.where(
            accelerator, problem.limit_bytes[[members[0] for members in classes]], np.inf
        ),
        nets=nets,
        net_s=(transfer_seconds(problem) * both_ways)[nets.key],
        node_bytes=node_bytes,
        shared=shared,
        shared_bytes=shared_bytes,
    )


def split_classes(problem: Problem) -> tuple[tuple[int, ...], ...]:
    """Return the devices that no plan can tell apart, accelerators first."""
    classes, devices = device_classes(problem), problem.cluster.devices
    members = [np.flatnonzero(classes.of == number) for number in range(len(classes.first))]
    ordered = sorted(members, key=lambda rows: devices[rows[0]].kind is DeviceKind.CPU)
    return tuple(tuple(rows.tolist()) for rows in ordered)


def _barred(problem: Problem, q: Quotient, device: int) -> Flags:
    row_of, matrix = problem.allowed
    barred = np.zeros(q.num_nodes, dtype=bool)
    barred[q.node_of[~matrix[row_of, device]]] = True
    return barred


def _memory(problem: Problem, q: Quotient, mode: Mode) -> tuple[Floats, Nets, Floats]:
    """Return bytes of nodes, and the parameters that several nodes share with their bytes."""
    graph, table = problem.graph, problem.graph.parameters
    held = held_bytes(table, problem.objective, mode=mode).total
    user = q.node_of[table.use_op]
    first = np.full(len(table), q.num_nodes, dtype=np.int64)
    np.minimum.at(first, table.use_parameter, user)
    shared = nets_of(table.use_parameter, first[table.use_parameter], user, q.num_nodes)
    own = np.setdiff1d(np.flatnonzero(first < q.num_nodes), shared.key)
    saved = node_sums(q, graph.ops.saved_bytes)
    return saved + sum_by(first[own], held[own], q.num_nodes), shared, held[shared.key]


def memory_binds(model: SplitModel) -> bool:
    """Return whether some device cannot hold everything at once."""
    total = float(model.node_bytes.sum() + model.shared_bytes.sum())
    return bool((model.limit_bytes < total).any())


def without_idle_nodes(
    model: SplitModel, rebuild: Callable[[Quotient], SplitModel], *, any_size: bool = False
) -> SplitModel:
    """Return a model with nodes merged that cost nothing, where some best split has them together.

    Let v take no time anywhere and no memory that could be short, and w be its only successor or
    its only predecessor, with no right that v lacks. If the nets of just v and w cost at least what
    the nets of v without w do, v can move to w's device in any split, and no load rises: w's device
    saves the former and pays at most the latter, so does v's; a net of both loses at most a pin.
    Where nothing is ordered, w may be any node.

    Args:
        model: The model.
        rebuild: Makes the model of a smaller quotient.
        any_size: Merge nodes that take memory too, which may lose the best splits.
    """
    while True:
        label = _idle_labels(model, ignore_bytes=any_size or not memory_binds(model))
        if label is None:
            return model
        model = rebuild(collapse(model.q, label))


def _idle_labels(model: SplitModel, *, ignore_bytes: bool) -> Array | None:
    """Return labels that merge idle nodes with a neighbour each, or ``None``."""
    q, nets = model.q, model.nets
    idle = ((model.seconds == 0) | np.isinf(model.seconds)).all(axis=0)
    if not ignore_bytes:
        idle &= model.node_bytes == 0
        idle[model.shared.pins] = False
    ptr, of_node = nets_by_node(nets, q.num_nodes)
    may = np.isfinite(model.seconds)
    label = np.full(q.num_nodes, -1, dtype=np.int64)
    for node in np.flatnonzero(idle).tolist():
        mine = of_node[ptr[node] : ptr[node + 1]].tolist()
        for other in _neighbours(model, node, mine):
            free = label[node] < 0 and label[other] < 0
            if free and (may[:, node] | ~may[:, other]).all() and _may_join(model, mine, other):
                label[[node, other]] = node
    return label if bool((label >= 0).any()) else None


def _neighbours(model: SplitModel, node: int, nets_of_node: list[int]) -> list[int]:
    """Return the nodes that a node may go to: its only successor, its only predecessor.

    Without any precedence, the other node of each net of two.
    """
    q, nets = model.q, model.nets
    after = q.succ[q.succ_ptr[node] : q.succ_ptr[node + 1]].tolist()
    before = q.pred[q.pred_ptr[node] : q.pred_ptr[node + 1]].tolist()
    if len(q.succ):
        return [found[0] for found in (after, before) if len(found) == 1]
    pins = [nets.pins[nets.ptr[net] : nets.ptr[net + 1]].tolist() for net in nets_of_node]
    return sorted({sum(pair) - node for pair in pins if len(pair) == 2})


def _may_join(model: SplitModel, nets_of_node: list[int], other: int) -> bool:
    """Return whether what a node saves by joining another is at least what it may cost."""
    saved = 0.0
    for net in nets_of_node:
        pins = model.nets.pins[model.nets.ptr[net] : model.nets.ptr[net + 1]]
        if not (pins == other).any():
            saved -= float(model.net_s[net])
        elif len(pins) == 2:
            saved += float(model.net_s[net])
    return saved >= 0.0
