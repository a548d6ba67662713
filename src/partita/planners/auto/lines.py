"""Lines that the chain program cuts: orders of the units, and orders of the devices."""

from collections.abc import Sequence

import numpy as np

from partita.core.columns import Array
from partita.planners.auto.frame import Frame
from partita.planners.auto.units import layer_order
from partita.planners.lattice.orders import linear_orders


def unit_orders(frame: Frame, count: int) -> list[Array]:
    """Return up to ``count`` distinct orders of the units along the data.

    The one by layers comes first where the graph has layers that agree with the data.
    """
    found: dict[bytes, Array] = {}
    layered = layer_order(frame.problem, frame.units)
    if layered is not None:
        found[layered.tobytes()] = layered
    forward, backward = frame.seconds(frame.batches[0].size)
    weight = (forward + backward).min(axis=0)
    cost = frame.problem.graph.tensors.bytes[frame.units.net_tensor]
    for order in linear_orders(frame.units, weight=weight, net_cost=cost, count=count):
        if len(found) >= count:
            break
        found.setdefault(order.tobytes(), order)
    return list(found.values())


def device_lines(frame: Frame, order: Array) -> list[list[int]]:
    """Return the sequences of devices that data may flow along, the most natural first.

    Host by host as they are listed, types together from fast to slow and from slow to fast, and
    for link matrices from each device to its nearest. Where rules or kinds of devices bar units
    from devices, the order of the units says which devices come when; a device may come twice.
    """
    devices = frame.devices
    runs = _allowed_runs(frame, order)
    if len(runs) > 1:
        return [[d for run in runs for d in _preferred(frame, run, devices)]]
    devices = _preferred(frame, runs[0], devices) if runs else devices
    work = (frame.forward[1] + frame.backward[1] + frame.forward[0] + frame.backward[0]).sum(axis=1)
    slow = [float(work[c]) for c in frame.class_of.tolist()]
    lines = [list(devices)]
    if len({slow[d] for d in devices}) > 1:
        lines.append(sorted(devices, key=lambda d: (slow[d], d)))
        lines.append(sorted(devices, key=lambda d: (-slow[d], d)))
    room = frame.limit_bytes[frame.class_of]
    if len({float(room[d]) for d in devices}) > 1:
        lines.append(sorted(devices, key=lambda d: (-float(room[d]), d)))
    if frame.problem.cluster.matrix is not None:
        lines.append(_nearest(frame, devices))
    return [list(line) for line in dict.fromkeys(tuple(line) for line in lines)]


def _allowed_runs(frame: Frame, order: Array) -> list[Array]:
    """Return for maximal runs of the order the devices that may run all of their units."""
    allowed = frame.allowed[frame.class_of]
    if bool(allowed.all()):
        return [np.ones(len(frame.class_of), dtype=bool)]
    runs: list[Array] = []
    for unit in order.tolist():
        here = allowed[:, unit]
        if runs and bool((runs[-1] & here).any()):
            runs[-1] = runs[-1] & here
        else:
            runs.append(here.copy())
    return runs


def _preferred(frame: Frame, run: Array, devices: Sequence[int]) -> list[int]:
    """Return the devices of a run: those that the search deals out, else any that it allows."""
    able = [d for d in devices if run[d]]
    return able or np.flatnonzero(run).tolist()


def _nearest(frame: Frame, devices: Sequence[int]) -> list[int]:
    """Return the devices, each followed by the one that takes a megabyte from it the soonest."""
    left = list(devices)
    line = [left.pop(0)]
    while left:
        links = frame.problem.cluster.links(np.full(len(left), line[-1]), np.array(left))
        with np.errstate(divide="ignore"):
            seconds = links.latency_s + 1e6 / links.bandwidth_bytes_per_s
        line.append(left.pop(int(seconds.argmin())))
    return line
