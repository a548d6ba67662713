"""Memory of placed ops by the rules of Baechi for PyTorch.

An op keeps ``permanent`` bytes (parameters, their gradients, what forward saves), needs
``temporary`` bytes (workspace) while it runs, and copies of its remote inputs stay on its device.
Nothing is ever released. Op by op, in the order of commitment, with ``copies`` the bytes that op v
fetches:

    fits:   used + copies + permanent + temporary <= limit,   peak + copies + parameters <= limit
    then:   peak = max(peak, used + permanent + temporary);   used += permanent
            peak = max(peak, used + copies);                  used += copies

where parameters include gradients. The recorded peak leaves out copies and workspace together.
"""

from typing import NamedTuple

import numpy as np

from partita.core.columns import Floats, Longs
from partita.core.graph import Graph
from partita.core.plan import Plan
from partita.core.problem import Mode, Problem
from partita.objectives.placed import plan_devices


class Footprint(NamedTuple):
    """Memory of the devices of a plan.

    Attributes:
        used_bytes: What each device holds at the end.
        peak_bytes: Its recorded peak.
        errors: The first op on each device that does not fit.
    """

    used_bytes: Floats
    peak_bytes: Floats
    errors: tuple[str, ...]


def footprint(problem: Problem, plan: Plan, order: Longs, copied_bytes: Floats) -> Footprint:
    """Return the memory of each device.

    Args:
        problem: The problem.
        plan: A plan with one device for each op.
        order: The ops in the order of commitment.
        copied_bytes: Bytes that each op fetches from other devices.
    """
    graph = problem.graph
    permanent, temporary, held = baechi_needs(graph, problem.objective.mode)
    limit = [d.memory_bytes * problem.objective.memory_factor for d in plan_devices(problem, plan)]
    device_of = plan.device_of.tolist()
    rows = [values.tolist() for values in (permanent, temporary, held, copied_bytes)]
    used = [0.0] * len(limit)
    peak = [0.0] * len(limit)
    failed: dict[int, str] = {}
    for op in order.tolist():
        device = device_of[op]
        kept, scratch, parameters, copies = (values[op] for values in rows)
        need = max(used[device] + copies + kept + scratch, peak[device] + copies + parameters)
        if need > limit[device] and device not in failed:
            name = f"device {plan.devices[device]!r}"
            failed[device] = (
                f"{name} needs {need:.0f} bytes at op {graph.ops.names[op]!r}, "
                f"limit {limit[device]:.0f}"
            )
        peak[device] = max(peak[device], used[device] + kept + scratch)
        used[device] += kept
        peak[device] = max(peak[device], used[device] + copies)
        used[device] += copies
    return Footprint(
        np.array(used), np.array(peak), tuple(failed[device] for device in sorted(failed))
    )


class Needs(NamedTuple):
    """Bytes of each op by Baechi's rule; every parameter counts as trained, without an optimizer.

    Attributes:
        permanent: What stays from forward on: parameters, their gradients, what forward saves.
        temporary: Workspace.
        parameters: Parameters and their gradients alone.
    """

    permanent: Floats
    temporary: Floats
    parameters: Floats


def held_bytes_baechi(problem: Problem) -> Floats:
    """Return what each forward op holds at least; backward ops hold nothing of their own."""
    held = baechi_needs(problem.graph, problem.objective.mode).permanent
    return np.where(problem.graph.is_forward, held, 0.0)


def baechi_needs(graph: Graph, mode: Mode) -> Needs:
    """Return what each op needs by Baechi's rule."""
    if mode is Mode.INFERENCE:
        return Needs(graph.parameter_bytes, graph.ops.workspace_bytes, graph.parameter_bytes)
    held = 2 * graph.parameter_bytes
    return Needs(graph.ops.saved_bytes + held, graph.ops.workspace_bytes, held)
