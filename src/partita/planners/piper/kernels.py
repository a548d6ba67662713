"""Loops of Piper's search, interpreted on small inputs and compiled on large ones.

They index their arguments, which are arrays or named tuples of arrays, and call one another. Most
tables have two dimensions, so that they run on arrays either way.
"""

from math import ceil, inf

import numpy as np

from partita.core.columns import Array
from partita.kernels import kernel
from partita.planners.piper.tables import Case, Fronts, Items, Known, Lattice, Limits, Nodes, Stages

EPSILON = 1e-12
"""Relative difference that may come from rounding."""
TINY = 1e-300
UNSEEN = -1


@kernel(allocates=True)
def fill_stages(nodes: Nodes, lattice: Lattice, limit_bytes: float, stages: Stages) -> int:
    """Fill in the stages that fit with one microbatch in flight; return their number, -1 = more.

    From each lower ideal the upper ones are reached step by step, and not beyond one that no degree
    allows: what is above it needs more still.
    """
    count = 0
    num_ideals = len(lattice.step_ptr) - 1
    num_degrees = nodes.seconds.shape[0]
    # By ideal: the row of the stage that ends there, the ideals still to go on from, and the fewest
    # bytes of that stage by degree.
    at = np.full(num_ideals, UNSEEN)
    queue = np.empty(num_ideals, np.int64)
    least = np.zeros((num_ideals, num_degrees))
    for lower in range(num_ideals):
        stages.ptr[lower] = count
        first = count
        queue[0], head, tail = lower, 0, 1
        at[lower] = UNSEEN
        least[lower, :] = 0.0
        while head < tail:
            below = queue[head]
            head += 1
            for step in range(lattice.step_ptr[below], lattice.step_ptr[below + 1]):
                above = lattice.step_target[step]
                # Rows below ``first`` belong to other lower ideals, so that ``at`` is never
                # cleared.
                if at[above] >= first:
                    continue
                if count == len(stages.upper):
                    return -1
                at[above] = count
                node = lattice.step_node[step]
                # Sums grow from the stage without the node, whichever way it was reached.
                before = at[below] if below != lower else UNSEEN
                _add_node(nodes, lattice.member[lower], node, stages, before, count)
                allowed = False
                for degree in range(num_degrees):
                    least[above, degree] = least[below, degree] + nodes.least[degree, node]
                    # Not even with every choice for memory and one microbatch in flight.
                    if least[above, degree] > limit_bytes:
                        stages.seconds[count, degree] = inf
                    allowed = allowed or stages.seconds[count, degree] < inf
                stages.upper[count] = above
                count += 1
                if allowed:
                    queue[tail] = above
                    tail += 1
    stages.ptr[num_ideals] = count
    return count


@kernel
def _add_node(
    nodes: Nodes, outside: Array, node: int, stages: Stages, before: int, row: int
) -> None:
    """Fill in a stage that has one node more than the stage before (-1 = the empty one)."""
    for degree in range(nodes.seconds.shape[0]):
        # All that leaves the node is counted as cut; an edge inside the stage takes its part back
        # when its reader joins.
        seconds = nodes.seconds[degree, node] + nodes.leave_s[degree, node]
        saved = nodes.saved[degree, node]
        for edge in range(nodes.in_ptr[node], nodes.in_ptr[node + 1]):
            if outside[nodes.in_source[edge]]:
                seconds += nodes.in_enter_s[degree, edge]
                saved += nodes.in_kept[edge]
            else:
                seconds -= nodes.in_leave_s[degree, edge]
        fixed = nodes.fixed[degree, node]
        reduce_s = nodes.reduce_s[degree, node]
        if before >= 0:
            seconds += stages.seconds[before, degree]
            saved += stages.saved[before, degree]
            fixed += stages.fixed[before, degree]
            reduce_s += stages.reduce_s[before, degree]
        stages.seconds[row, degree] = seconds
        stages.saved[row, degree] = saved
        stages.fixed[row, degree] = fixed
        stages.reduce_s[row, degree] = reduce_s


@kernel
def cover(
    gain: Array, cost: Array, need: float, most: float, branches: int, taken: Array, best: Array
) -> tuple[float, float, int]:
    """Choose items that gain what is needed at the least cost; ``best`` says which.

    Depth first with the fractional bound (Martello and Toth 1990, chapter 2). Items must be sorted
    by cost over gain; equal ones are left out together. Choices above a cost of ``most`` are not
    looked for.

    Returns:
        A bound from below, the cost found, and the branches taken. The bound is the cost, or above
        ``most``, unless the branches allowed were not enough; both are infinite where all items
        together do not do.
    """
    count = len(gain)
    # Done where the bound and the greedy choice agree, or where nothing can be within ``most``.
    low, high = _greedy(gain, cost, need, best)
    goal = min(high * (1 - EPSILON), most * (1 + EPSILON) + TINY)
    if low >= goal:
        return low, high, 0
    taken[:count] = 0
    spent, left, item = 0.0, need, 0
    # Take the next item while the bound allows; else go back to the last item taken and leave it
    # out. ``spent`` and ``left`` are always those of ``taken``.
    for branch in range(branches):
        if _fractional(gain, cost, spent, left, item) < goal:
            if left > 0:
                taken[item] = 1
                spent += cost[item]
                left -= gain[item]
                item += 1
                continue
            # Enough is gained, at less than the goal: the new best, which later ones must beat.
            high = spent
            goal = high * (1 - EPSILON)
            for place in range(count):
                best[place] = taken[place]
        # Back to the last item taken; if there is none, all choices have been seen.
        item -= 1
        while item >= 0 and taken[item] == 0:
            item -= 1
        if item < 0:
            return goal, high, branch
        taken[item] = 0
        spent -= cost[item]
        left += gain[item]
        item += 1
        # Leaving one of several equal items out and taking the next would be the same choice.
        while item < count and gain[item] == gain[item - 1] and cost[item] == cost[item - 1]:
            item += 1
    return low, high, branches


@kernel
def _fractional(gain: Array, cost: Array, spent: float, left: float, item: int) -> float:
    """Return the least cost if the last item taken may be a part; inf = not enough is left."""
    while left > 0 and item < len(gain):
        if gain[item] >= left:
            return spent + float(cost[item] * left / gain[item])
        spent += cost[item]
        left -= gain[item]
        item += 1
    return inf if left > 0 else spent


@kernel
def _greedy(gain: Array, cost: Array, need: float, best: Array) -> tuple[float, float]:
    """Take items in order until they do, then leave out what is not needed; bound and cost."""
    low = _fractional(gain, cost, 0.0, need, 0)
    best[: len(gain)] = 0
    if low == inf:
        return inf, inf
    item, gained = 0, 0.0
    while gained < need:
        best[item] = 1
        gained += gain[item]
        item += 1
    total = 0.0
    # From the worst rate down: the last item often gains more than was lacking.
    for back in range(item - 1, -1, -1):
        if gained - gain[back] >= need:
            gained -= gain[back]
            best[back] = 0
        else:
            total += cost[back]
    return low, total


@kernel
def sort_items(items: Items, known: Known, degree: int, flight: int, key: int) -> int:
    """Return the row of ``known.order`` for a degree and microbatches in flight.

    By insertion: the items come nearly in order, and like ones stay together.
    """
    # A cache with one place for each remainder; another key takes the place over.
    row = key % len(known.order_key)
    if known.order_key[row] == key:
        return row
    count = 0
    for item in range(len(items.node)):
        gain = items.less_saved[degree, item] * flight + items.less_fixed[degree, item]
        if not (gain > 0 and items.extra_s[degree, item] < inf):
            continue
        # ``known.gain`` holds the rates while sorting; ``gather`` fills it with gains after.
        rate = items.extra_s[degree, item] / gain
        place = count
        while place > 0 and known.gain[place - 1] > rate:
            known.gain[place] = known.gain[place - 1]
            known.order[row, place] = known.order[row, place - 1]
            place -= 1
        known.gain[place] = rate
        known.order[row, place] = item
        count += 1
    known.order_key[row] = key
    known.order_count[row] = count
    return int(row)


@kernel
def gather(case: Case, lower: int, stage: int, degree: int, flight: int) -> int:
    """Gather gains and costs of a stage's items, best first; return their number."""
    items, known = case.items, case.known
    inside, outside = case.lattice.member[case.stages.upper[stage]], case.lattice.member[lower]
    key = degree * (case.limits.replicas + 2) + flight
    row = sort_items(items, known, degree, flight, key)
    count = 0
    for place in range(known.order_count[row]):
        item = known.order[row, place]
        node = items.node[item]
        if inside[node] and not outside[node]:
            gain = items.less_saved[degree, item] * flight + items.less_fixed[degree, item]
            known.item[count] = item
            known.gain[count] = gain
            known.cost[count] = items.extra_s[degree, item]
            count += 1
    return count


@kernel
def _learn(budget: float, case: Case, place: Array) -> None:
    """Bound the extra seconds of a stage by a slot's ``low`` and ``high``.

    The first time by taking items in order; where that does not tell whether the budget is kept, by
    looking for a better choice while there are branches left.
    """
    stages, known = case.stages, case.known
    lower, stage, degree, flight, slot = place[0], place[1], place[2], place[3], place[4]
    count = gather(case, lower, stage, degree, flight)
    # Bytes that have to be saved.
    need = stages.saved[stage, degree] * flight + stages.fixed[stage, degree] - case.limits.bytes
    gain, cost = known.gain[:count], known.cost[:count]
    if known.flight[slot] != flight:
        known.low[slot], known.high[slot] = _greedy(gain, cost, need, known.best)
        known.flight[slot] = flight
        known.tried[slot] = 0
        # More in flight needs more bytes: no larger number fits either.
        if known.low[slot] == inf:
            stages.stuck[stage, degree] = min(stages.stuck[stage, degree], flight)
    # Only where the bounds leave the answer open is it worth a search.
    if known.low[slot] <= budget < known.high[slot]:
        most = min(known.left[0], known.left[1])
        low, high, branches = cover(gain, cost, need, budget, most, known.taken, known.best)
        known.low[slot], known.high[slot] = low, min(high, known.high[slot])
        known.left[1] -= branches
        known.tried[slot] = 1 if branches == most else 0


@kernel
def choose_items(target_s: float, case: Case, placed: Array, slower: Array) -> float:
    """Mark the items of placed stages that take their slower choice; return the slowest time.

    A row of ``placed`` is the lower ideal, the stage, the degree, the microbatches in flight and
    the data-parallel degree.
    """
    stages, known = case.stages, case.known
    slower[:] = 0
    worst = 0.0
    for row in range(len(placed)):
        lower, stage, degree = placed[row, 0], placed[row, 1], placed[row, 2]
        flight, data = placed[row, 3], placed[row, 4]
        seconds, reduce_s = stages.seconds[stage, degree], stages.reduce_s[stage, degree]
        extra = 0.0
        need = stages.saved[stage, degree] * flight + stages.fixed[stage, degree]
        need -= case.limits.bytes
        if need > 0:
            count = gather(case, lower, stage, degree, flight)
            # Solved for the extra seconds: (seconds + extra + reduce_s (data - 1)) / data <=
            # target_s.
            budget = (target_s - reduce_s) * data + (reduce_s - seconds)
            gain, cost = known.gain[:count], known.cost[:count]
            most = known.left[0]
            _, extra, _ = cover(gain, cost, need, budget, most, known.taken, known.best)
            for place in range(count):
                if known.best[place]:
                    slower[known.item[place]] = 1
        worst = max(worst, (seconds + extra + reduce_s * (data - 1)) / data)
    return worst


@kernel(allocates=True)
def fill_fronts(target_s: float, case: Case, fronts: Fronts) -> int:
    """Fill in the ways to run what each ideal leaves with every stage within a time.

    Returns:
        How many answers were left open for want of branches or room: 0 = if the empty ideal has no
        way now, no plan keeps the time.
    """
    limits, stages = case.limits, case.stages
    last = len(case.lattice.step_ptr) - 2
    place = np.empty(5, np.int64)
    fronts.begin[:] = 0
    fronts.end[:] = 0
    fronts.replicas[0], fronts.devices[0] = 0, 0
    fronts.end[last] = 1
    top, still_open = 1, 0
    fronts.least[0, :] = limits.devices + 1
    # From the top down: fronts of the upper ideals are final. Row 0 is the way of nothing left.
    for lower in range(last - 1, -1, -1):
        # What lies below needs so many devices for its work or its memory; the rest may use the
        # others.
        needed = ceil(limits.work[lower] / target_s - 1e-9)
        most = limits.devices - max(needed, limits.room[lower])
        for stage in range(stages.ptr[lower], stages.ptr[lower + 1]):
            upper = stages.upper[stage]
            if fronts.end[upper] == fronts.begin[upper]:
                continue
            for degree in range(len(limits.degrees)):
                if stages.seconds[stage, degree] < inf:
                    place[0], place[1], place[2] = lower, stage, degree
                    still_open += _extend(target_s, most, case, fronts, place)
        kept, dropped = _keep_best(limits, fronts, top, lower)
        top += kept
        still_open += dropped
    return still_open


@kernel
def _extend(target_s: float, most: int, case: Case, fronts: Fronts, place: Array) -> int:
    """Put a stage before every way of its upper ideal, with the least degree that keeps the time.

    A larger degree for the same way is worse in both sums, and the least one grows with the sum of
    degrees of the way, so that both are walked once.
    """
    limits, stages = case.limits, case.stages
    stage, degree = place[1], place[2]
    seconds, reduce_s = stages.seconds[stage, degree], stages.reduce_s[stage, degree]
    tensor = limits.degrees[degree]
    upper = stages.upper[stage]
    choice, still_open = 0, 0
    # Along the ways the sum of degrees rises and that of devices falls; ``choice`` never goes back.
    for way in range(fronts.begin[upper], fronts.end[upper]):
        used = fronts.replicas[way]
        while choice < len(limits.divisors):
            data = limits.divisors[choice]
            if used + data > limits.replicas:
                return still_open
            if data * tensor > stages.most[stage]:
                return still_open
            total = fronts.devices[way] + data * tensor
            # Too many devices with this way; one further on has fewer.
            if total > most:
                break
            budget = (target_s - reduce_s) * data + (reduce_s - seconds)
            # Microbatches in flight: ceil(used / data) + 1.
            place[3] = (used + 2 * data - 1) // data
            fits = _fits(budget, case, place) if budget >= 0 else 0
            if fits == 1:
                if total < fronts.least[0, used + data]:
                    fronts.least[0, used + data] = total
                    fronts.least[1, used + data] = stage
                    fronts.least[2, used + data] = degree
                    fronts.least[3, used + data] = data
                    fronts.least[4, used + data] = way
                break
            if fits < 0:
                still_open += 1
            choice += 1
    return still_open


@kernel
def _fits(budget: float, case: Case, place: Array) -> int:
    """Return whether a stage fits its memory within extra seconds: 1 yes, 0 no, -1 not known."""
    stages, known = case.stages, case.known
    stage, degree, flight = place[1], place[2], place[3]
    if flight <= stages.free[stage, degree]:
        return 1
    if flight >= stages.stuck[stage, degree]:
        return 0
    # Each stage and degree has a few slots of its own, for different numbers in flight.
    slots = len(known.flight) // stages.seconds.size
    slot = (stage * stages.seconds.shape[1] + degree) * slots + flight % slots
    place[4] = slot
    unsure = known.low[slot] <= budget < known.high[slot] and not known.tried[slot]
    if known.flight[slot] != flight or unsure:
        _learn(budget, case, place)
    if known.low[slot] == inf:
        return 0
    if known.high[slot] <= budget * (1 + EPSILON) + TINY:
        return 1
    return 0 if known.low[slot] > budget else -1


@kernel
def _keep_best(limits: Limits, fronts: Fronts, top: int, lower: int) -> tuple[int, int]:
    """Move the ways that none beats from the room to the front of an ideal.

    Returns:
        How many there are, and how many were left out for want of room.
    """
    fronts.begin[lower] = top
    fewest, kept, dropped = limits.devices + 1, 0, 0
    for used in range(fronts.least.shape[1]):
        # By ascending sum of degrees: a way is kept if it takes fewer devices than all before it.
        # The room is cleared on the way, for the next ideal.
        total = fronts.least[0, used]
        fronts.least[0, used] = limits.devices + 1
        if total >= fewest:
            continue
        fewest = total
        if top + kept >= len(fronts.replicas):
            dropped += 1
            continue
        fronts.replicas[top + kept], fronts.devices[top + kept] = used, total
        fronts.stage[top + kept] = fronts.least[1, used]
        fronts.degree[top + kept] = fronts.least[2, used]
        fronts.data[top + kept] = fronts.least[3, used]
        fronts.rest[top + kept] = fronts.least[4, used]
        kept += 1
    fronts.end[lower] = top + kept
    return kept, dropped
