"""Why no split fits, in one line that names an op or a device."""

import numpy as np

from partita.core.problem import Problem
from partita.planners.lattice.quotient import members
from partita.planners.split.model import SplitModel


def why_no_split(problem: Problem, model: SplitModel) -> str:
    """Return what keeps all splits of a model from fitting, as far as it is plain."""
    return _barred(problem, model) or _too_large(problem, model) or _too_much(problem, model)


def _barred(problem: Problem, model: SplitModel) -> str:
    stuck = np.flatnonzero(np.isinf(model.seconds).all(axis=0))
    if not len(stuck):
        return ""
    ptr, ops = members(model.q)
    names = problem.graph.ops.names
    first, *rest = ops[ptr[stuck[0]] : ptr[stuck[0] + 1]].tolist()
    others = f" and {len(rest)} ops that stay with it, such as {names[rest[0]]!r}," if rest else ""
    return f"no device may run op {names[first]!r}{others}"


def _too_large(problem: Problem, model: SplitModel) -> str:
    need = model.node_bytes.copy()
    sizes = np.diff(model.shared.ptr)
    np.add.at(need, model.shared.pins, np.repeat(model.shared_bytes, sizes))
    room = np.where(np.isfinite(model.seconds), model.limit_bytes[:, None], -np.inf)
    over = need - room.max(axis=0)
    node = int(np.argmax(over))
    if over[node] <= 0:
        return ""
    ptr, ops = members(model.q)
    inside = ops[ptr[node] : ptr[node + 1]]
    op = problem.graph.ops.names[int(inside[np.argmax(problem.graph.ops.saved_bytes[inside])])]
    device = problem.cluster.device_names[model.devices[int(np.argmax(room[:, node]))][0]]
    tied = f" with the {len(inside) - 1} ops that stay with it" if len(inside) > 1 else ""
    return (
        f"op {op!r}{tied} needs {need[node]:.0f} bytes; the largest device that may run it, "
        f"{device!r}, has limit {room[:, node].max():.0f}"
    )


def _too_much(problem: Problem, model: SplitModel) -> str:
    need = float(model.node_bytes.sum() + model.shared_bytes.sum())
    count = np.array([len(devices) for devices in model.devices])
    smallest = int(np.argmin(model.limit_bytes))
    name = problem.cluster.device_names[model.devices[smallest][0]]
    limit = float(model.limit_bytes[smallest])
    if need > float(count @ model.limit_bytes):
        return (
            f"the ops need {need:.0f} bytes in all, the devices hold "
            f"{count @ model.limit_bytes:.0f} (device {name!r}: limit {limit:.0f})"
        )
    if need > limit:
        return (
            f"no way was found to cut {need:.0f} bytes so that every device has its part within "
            f"its limit (device {name!r}: {limit:.0f})"
        )
    return f"no way was found to cut the graph so that {_choosiest(problem)}"


def _choosiest(problem: Problem) -> str:
    """Return where the op with the fewest devices must be."""
    row_of, matrix = problem.allowed
    op = int(np.argmin(matrix.sum(axis=1)[row_of]))
    device = problem.cluster.device_names[int(np.argmax(matrix[row_of[op]]))]
    kinds = int(matrix[row_of[op]].sum())
    more = f" or one of {kinds - 1} others" if kinds > 1 else ""
    return f"op {problem.graph.ops.names[op]!r} is on device {device!r}{more}"
