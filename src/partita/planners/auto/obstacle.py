"""Why nothing fits, in a line: the op, the cluster, or the device that comes nearest."""

import numpy as np

from partita.core.metrics import MemoryRule
from partita.core.plan import Plan
from partita.core.problem import Problem
from partita.cost.judge import check_memory
from partita.cost.tables import held_bytes
from partita.errors import InfeasibleError, PartitaError
from partita.planners.auto.frame import Frame
from partita.units import format_bytes


def obstacle(
    problem: Problem, frame: Frame, nearest: Plan | None, reasons: list[str]
) -> InfeasibleError:
    """Return the error to raise where no plan fits.

    Args:
        problem: The problem.
        frame: Its tables.
        nearest: The plan that exceeds its limits the least; ``None`` where none could run.
        reasons: Why other planners failed.
    """
    ours = problem.objective.metric.row.memory is not MemoryRule.METRIC
    text = (_too_large(frame) or _too_small(frame)) if ours else ""
    if not text and nearest is not None:
        text = _overfull(problem, nearest)
    named = [*problem.cluster.device_names, *problem.graph.ops.names]
    telling = [reason for reason in reasons if any(repr(name) in reason for name in named)]
    return InfeasibleError(text or (telling or reasons or ["auto found no plan that fits"])[0])


def _least_bytes(frame: Frame) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """Return what a unit needs at the least, alone on a device, with the smallest microbatch."""
    size = min(batch.size for batch in frame.batches)
    return np.asarray(frame.static_bytes + frame.saved_bytes(size))


def _too_large(frame: Frame) -> str:
    """Return which op no device that may run it can hold; empty if there is none."""
    problem, need = frame.problem, _least_bytes(frame)
    room = np.where(frame.allowed, frame.limit_bytes[:, None], 0.0).max(axis=0)
    unit = int(np.argmax(need - room))
    if need[unit] <= room[unit]:
        return ""
    ops = np.flatnonzero(frame.units.node_of == unit)
    best = int(np.argmax(np.where(frame.allowed[:, unit], frame.limit_bytes, -1.0)))
    device = problem.cluster.device_names[int(np.argmax(frame.class_of == best))]
    others = f" with the {len(ops) - 1} ops that must share its device" if len(ops) > 1 else ""
    return (
        f"op {problem.graph.ops.names[int(ops[0])]!r}{others} needs {format_bytes(need[unit])} "
        "(weights, gradients, optimizer state and one microbatch), "
        f"{format_bytes(need[unit] - room[unit])} more than the limit of "
        f"{format_bytes(room[unit])} of {device!r}, the largest device that may run it"
    )


def _too_small(frame: Frame) -> str:
    """Return by how much the weights exceed all devices together; empty if they do not."""
    problem = frame.problem
    table = problem.graph.parameters
    whole = held_bytes(table, problem.objective).total
    used = np.zeros(len(table), dtype=bool)
    used[table.use_parameter] = True
    need, room = float(whole[used].sum()), float(frame.limit_bytes[frame.class_of].sum())
    if need <= room:
        return ""
    names = problem.cluster.device_names
    return (
        f"weights, gradients and optimizer state need {format_bytes(need)}, "
        f"{format_bytes(need - room)} more than all {len(names)} devices ({names[0]!r} to "
        f"{names[-1]!r}) may use together; use more devices or less optimizer state"
    )


def _overfull(problem: Problem, plan: Plan) -> str:
    """Return what the cost model says of the plan that comes nearest."""
    try:
        check_memory(problem, plan)
    except PartitaError as exc:
        return f"no plan fits; of those tried, in the one that comes nearest {exc}"
    return ""
