"""Does anything fit, and if not, why.

When list scheduling strands ops, devices are filled one after the other along several orders, with
the memory inflated until everything is placed; what is too much is then annealed away under the
true limits. When that fails, too, one of these may prove that nothing fits:

* ops that must share a device (or a single op) need more than every device they may run on has;
* what all ops keep is more than all devices have, each less the least workspace of its last op;
* bin packing: no packing of what the ops keep into devices of the largest size uses so few
  (Martello and Toth's L2 bound);
* small problems: a search over all placements, pruned where a device holds more than it has,
  ends without one. It counts what ops keep and the copies they need, whatever the order.
"""

import numpy as np

from partita.core.columns import Array
from partita.core.problem import Problem
from partita.errors import InfeasibleError
from partita.kernels import Column, Number, kernel, run
from partita.planners.baechi.annealing import Annealer
from partita.planners.baechi.fill import HALVINGS, depth_first, fastest_first, fill_devices
from partita.planners.baechi.instance import LONG, Instance, forward_ops, op_name
from partita.planners.baechi.list_schedule import Schedule
from partita.planners.baechi.placement import Placed, placed
from partita.planners.obstacle import Needs, obstacle
from partita.units import format_bytes

_MOST_INFLATED = 1e12
_REPAIR_MOVES, _REPAIR_MOVES_PER_OP = 30_000, 1_000
_REPAIR_HEATS = (10.0, 1.0, 0.1, 0.01, 0.0)
_SLACK = 1e-9
_MOST_SEARCHED, _FEW_STEPS, _MANY_STEPS = 200, 50_000, 10_000_000
_GAVE_UP, _NONE, _FOUND = 0, 1, 2


def fitted(problem: Problem, g: Instance, planner: str) -> list[Placed]:
    """Return placements of an instance whose ops were stranded.

    By our own rule, which the instance only approximates, they are placements that spread what is
    kept, and whoever measures the plan decides.

    Raises:
        InfeasibleError: Nothing fits, proven or not.
    """
    found = find_fit(g)
    if found is not None:
        return [found]
    inflated = [_inflated_fill(g, sequence) for sequence in (g.topological, depth_first(g))]
    starts = [schedule for schedule, _ in inflated if schedule is not None]
    if not g.stays and starts:
        return [placed(schedule) for schedule in starts]
    reason = why_nothing_fits(problem, g, _FEW_STEPS)
    if reason is None:
        for start in starts:
            fixed = _repaired(g, start)
            if fixed is not None:
                return [fixed]
        reason = why_nothing_fits(problem, g, _MANY_STEPS)
    factor = min(factor for _, factor in inflated)
    would_do = f"; {factor:.4g} times the memory would do" if starts else ""
    if reason is not None:
        raise InfeasibleError(f"nothing fits: {reason}{would_do}")
    stuck = fill_devices(g, g.topological, g.limit, visit=fastest_first(g)).refused
    raise InfeasibleError(
        f"{planner} found no placement that fits: op {op_name(problem, stuck)} is left over"
        f"{would_do}"
    )


def find_fit(g: Instance) -> Placed | None:
    """Return a fill that fits, or ``None`` where there is none."""
    for sequence in (g.topological, depth_first(g)):
        found = fill_devices(g, sequence, g.limit, visit=fastest_first(g))
        if found.complete:
            return placed(found)
    return None


def _inflated_fill(g: Instance, sequence: Array) -> tuple[Schedule | None, float]:
    """Return the fill with about the least factor on the memory that places all, and the factor."""
    visit = fastest_first(g)

    def fill(factor: float) -> Schedule | None:
        larger = g._replace(limit=g.limit * factor)
        found = fill_devices(larger, sequence, larger.limit, visit=visit)
        return found if found.complete else None

    low, high = 1.0, 2.0
    best = fill(high)
    while best is None and high < _MOST_INFLATED:
        low, high = high, high * 2
        best = fill(high)
    for _ in range(HALVINGS):
        # Four digits, as the factor is written.
        middle = float(f"{(low + high) / 2:.4g}")
        found = fill(middle)
        if found is not None:
            best, high = found, middle
        else:
            low = middle
    return best, high if best is not None else np.inf


def _repaired(g: Instance, start: Schedule) -> Placed | None:
    """Return a placement without excess, annealed from one with some."""
    moves = min(_REPAIR_MOVES, _REPAIR_MOVES_PER_OP * g.num_ops)
    search = Annealer(g, start.device_of, start.order, effort=moves)
    # The makespan counts little here: a hundredth of a device's memory costs ten times as much.
    scale = max(start.makespan, 1e-12)
    price = 1e3 * scale / float(g.limit[np.isfinite(g.limit)].max(initial=1.0))
    for heat in _REPAIR_HEATS:
        search.run(moves // len(_REPAIR_HEATS), heat * scale, price)
        if search.excess <= 0:
            return Placed(search.device_of, search.order, search.makespan)
    return None


def why_nothing_fits(problem: Problem, g: Instance, steps: int = 50_000) -> str | None:
    """Return why no placement fits, if that can be proven.

    Args:
        problem: The problem.
        g: Its instance, by Baechi's rule.
        steps: How long to search through placements, where the graph is small.
    """
    reason = obstacle(_needs(problem, g)) or _too_many(problem, g)
    if reason:
        return reason
    return _searched(problem, g, steps) if g.num_ops <= _MOST_SEARCHED else None


def _needs(problem: Problem, g: Instance) -> Needs:
    """Return what ops that share a device need; all devices keep the least workspace free."""
    unit_of = np.full(len(problem.graph), -1, dtype=np.int64)
    unit_of[forward_ops(problem.graph)] = g.group
    need = g.group_kept.copy()
    np.maximum.at(need, g.group, g.kept + g.scratch)
    first = np.unique(g.group, return_index=True)[1]
    return Needs(
        problem=problem,
        unit_of=unit_of,
        unit_bytes=need,
        devices=np.arange(g.num_devices),
        limit_bytes=g.limit,
        may=g.may.reshape(g.num_ops, g.num_devices)[first].T > 0,
        total_bytes=float(g.kept.sum()),
        room_bytes=float(np.maximum(g.limit - g.scratch.min(), 0.0).sum()),
    )


def _too_many(problem: Problem, g: Instance) -> str | None:
    """Return that what the ops keep cannot be packed into so few devices of the largest size."""
    size = float(g.limit.max())
    if not np.isfinite(size):
        return None
    weight = np.sort(g.group_kept)[::-1]
    total = np.concatenate([[0.0], np.cumsum(weight)])
    large = int(np.searchsorted(-weight, -size / 2, side="left"))
    for threshold in [0.0, *np.unique(weight[large:]).tolist()]:
        full = int(np.searchsorted(-weight, -(size - threshold), side="left"))
        small = int(np.searchsorted(-weight, -threshold, side="right"))
        spare = (large - full) * size - (total[large] - total[full])
        rest = total[small] - total[large] - spare
        need = large + max(0, int(np.ceil(rest / size - _SLACK)))
        if need > g.num_devices:
            last = int(np.argsort(-g.group_kept, kind="stable")[g.num_devices])
            op = op_name(problem, int(np.argmax(g.group == last)))
            return (
                f"what the ops keep fills at least {need} devices of {format_bytes(size)}, and "
                f"there are {g.num_devices}: op {op} is left"
            )
    return None


def _searched(problem: Problem, g: Instance, steps: int) -> str | None:
    """Return that a search over all placements found none."""
    used, count = np.zeros(g.num_devices), np.zeros(g.num_devices, dtype=np.int64)
    choice = np.full(g.num_ops, -1, dtype=np.int64)
    result = np.array([_GAVE_UP, 0], dtype=np.int64)
    columns = (used, count, choice, choice.copy(), np.zeros(g.num_ops), result)
    run(_search, steps, (g, _alike(g), steps), columns, LONG)
    if result[0] != _NONE:
        return None
    op = op_name(problem, int(result[1]))
    return (
        f"no placement has room for op {op} and the ops before it, with copies of what they read "
        "from other devices"
    )


def _alike(g: Instance) -> Array:
    """Return for each device the one before it that is the same in every way; -1 = none."""
    may = g.may.reshape(g.num_ops, g.num_devices)
    same = np.full(g.num_devices, -1, dtype=np.int64)
    for device in range(1, g.num_devices):
        for other in range(device):
            if g.limit[device] == g.limit[other] and bool((may[:, device] == may[:, other]).all()):
                same[device] = other
    return same


@kernel
def _search(g: Column, same: Column, most: int, *columns: Column) -> None:
    """Go through the placements, op by op along the data, and give up after so many steps.

    The columns: bytes and ops of each device; the choice at each depth; the device of each op; what
    each op added; the outcome and the op that was never placed.
    """
    used, count, choice, device_of, added, result = columns
    depth, deepest = 0, 0
    for _ in range(most):
        op = g.topological[depth]
        device = choice[depth]
        if device >= 0:
            used[device] -= added[depth]
            count[device] -= 1
        device += 1
        need = -1.0
        while device < g.num_devices:
            # Of devices that are alike an idle one is as good as the next.
            if same[device] < 0 or count[same[device]] > 0:
                need = _least_need(g, device_of, op, device)
                if need >= 0 and used[device] + need <= g.limit[device] * (1 + _SLACK):
                    break
            device += 1
        if device == g.num_devices:
            choice[depth] = -1
            depth -= 1
            if depth < 0:
                result[0], result[1] = _NONE, g.topological[deepest]
                return
            continue
        choice[depth], device_of[op], added[depth] = device, device, need
        used[device] += need
        count[device] += 1
        depth += 1
        if depth == g.num_ops:
            result[0] = _FOUND
            return
        deepest = max(deepest, depth)


@kernel
def _least_need(g: Column, device_of: Column, op: int, device: int) -> Number:
    """Return what an op adds to a device whatever the order; -1 where it may not run there."""
    if not g.may[op * g.num_devices + device]:
        return -1.0
    need = g.kept[op]
    if g.stays and not g.once:
        for row in range(g.pred_ptr[op], g.pred_ptr[op + 1]):
            if device_of[g.pred[row]] != device:
                need += g.size[row]
    return need
