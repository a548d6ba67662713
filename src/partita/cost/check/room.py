"""That every device has room for what its list makes it hold."""

import numpy as np

from partita.core.columns import Array
from partita.cost.check.case import Case
from partita.cost.memory import memory_events, peak_memory, static_memory
from partita.errors import InfeasibleError
from partita.units import format_bytes


def check_memory(case: Case) -> tuple[Array, Array]:
    """Check the peak of every device against its limit, and return both.

    The limit is the device's memory times the objective's memory factor.

    Raises:
        InfeasibleError: A device needs more than it may use; says how much, where, and what
            would do.
    """
    cluster, factor = case.problem.cluster, case.problem.objective.memory_factor
    index = np.array([cluster.index_of[name] for name in case.plan.devices])
    limit = cluster.memory_bytes[index] * factor
    peak = peak_memory(case.problem, case.plan, case.program)
    over = peak - limit
    if not (over > 0).any():
        return peak, limit
    device = int(np.argmax(over))
    raise InfeasibleError(
        f"device {case.name(device)!r} needs {format_bytes(peak[device])} at "
        f"{_peak_place(case, device)}, {format_bytes(over[device])} above the "
        f"{format_bytes(limit[device])} it may use; recompute activations, make microbatches "
        "smaller, shard its stages over replicas, or move ops to a device with more room"
    )


def _peak_place(case: Case, device: int) -> str:
    """Return the instruction at which a device holds most."""
    program = case.program
    events = memory_events(case.problem, case.plan, program)
    mine = np.flatnonzero(program.device[events.row] == device)
    row, at_end, delta = (part[mine] for part in events)
    order = np.lexsort((delta > 0, 2 * row + at_end))
    used = np.cumsum(delta[order])
    if not len(used) or used.max() <= 0:
        total = static_memory(case.problem, case.plan, program).total[device]
        return f"rest (weights, gradients, optimizer state and workspace are {format_bytes(total)})"
    return program.describe(int(row[order[np.argmax(used)]]))
