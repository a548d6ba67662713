"""The exact time-cost trade-off of a project network, as a parametric flow.

Phillips and Dessouky's problem, with piecewise linear convex costs: minimise ``sum c_a(d_a)`` where
the longest path is at most T. Its dual is a flow of value ``lambda = -dE/dT``; an arc carries up to
the first slope of its cost at its longest duration, up to the next slope at the next breakpoint,
and any amount at its shortest. Starting from the longest durations, paths of the current length T
are filled (a maximum flow on tight arcs), then one shortest-path search in reduced costs says how
far T falls until the next path opens. Event times are the potentials, so every T between two
vertices of the frontier has its durations at hand; no unit of time, no fitted curve.

Times and slopes are whole numbers here (``relaxed.py`` says of what): the flow is exact and ends.
Each vertex costs one Dijkstra and a few breadth-first searches.
"""

import heapq

import numpy as np

from partita.core.columns import Array
from partita.kernels import kernel

NO_LIMIT = 1 << 60
"""Capacity of an arc at its shortest duration."""


@kernel
def fill_tight_paths(  # noqa: C901, PLR0912, PLR0913, PLR0915, PLR0917 (columns of a kernel)
    tail: Array,
    head: Array,
    adjacent_ptr: Array,
    adjacent: Array,
    ahead: Array,
    behind: Array,
    ahead_room: Array,
    behind_room: Array,
    time: Array,
    flow: Array,
    first: Array,
    upto: Array,
    step: Array,
    duration: Array,
    level: Array,
    place: Array,
    trail: Array,
    queue: Array,
    most: int,
) -> int:
    """Send as much as fits from event 0 to the last one over tight arcs; return how much.

    Stops when ``most`` has been sent; returns ``NO_LIMIT`` where a path has no limit.

    This is Dinic's algorithm on the residual arcs that are tight at the current times. By arc:
    ``ahead`` and ``behind`` are the durations, in units of time, at which one more or one less unit
    of flow may run, ``ahead_room`` and ``behind_room`` how much of it (see ``refresh``); ``trail``
    is the path walked. By event: ``time``; ``level``, the distance from event 0 in tight arcs, -1 =
    not reached; ``place``, the next entry of ``adjacent`` to look at; ``queue``. The others are
    those of ``sweep``.

    Invariant: ``ahead <= time[head] - time[tail]`` on every arc, and that is ``<= behind`` where
    there is flow. Only tight arcs are used, so that times stay optimal for the flow.
    """
    sink = len(time) - 1
    sent = 0
    while sent < most:
        # Breadth first: levels, as far as the sink needs them.
        for event in range(len(level)):
            level[event] = -1
        level[0] = 0
        queue[0] = 0
        begin, end = 0, 1
        while begin < end and level[sink] < 0:
            event = queue[begin]
            begin += 1
            for k in range(adjacent_ptr[event], adjacent_ptr[event + 1]):
                arc = adjacent[k]
                if tail[arc] == event:
                    other = head[arc]
                    tight = time[other] - time[event] == ahead[arc]
                else:
                    other = tail[arc]
                    tight = flow[arc] > 0 and time[event] - time[other] == behind[arc]
                if tight and level[other] < 0:
                    level[other] = level[event] + 1
                    queue[end] = other
                    end += 1
        # No tight path is left: the flow is a maximum at this length of the project.
        if level[sink] < 0:
            return sent
        # An entry of ``adjacent`` that led nowhere in this phase is not looked at again.
        for event in range(len(place)):
            place[event] = adjacent_ptr[event]
        # Depth-first, keeping the path in ``trail``.
        depth = 0
        event = 0
        while True:
            if event == sink:
                room = most - sent
                for i in range(depth):
                    arc = trail[i]
                    # The path climbs one level an arc, which tells the way it passes each arc.
                    forward = level[head[arc]] == level[tail[arc]] + 1
                    room = min(room, ahead_room[arc] if forward else behind_room[arc])
                # All arcs of the path are at their shortest: no price makes the project shorter.
                if room >= NO_LIMIT // 2:
                    return NO_LIMIT
                sent += room
                # Go on from where the first arc is full now.
                full = -1
                for i in range(depth):
                    arc = trail[i]
                    forward = level[head[arc]] == level[tail[arc]] + 1
                    if full < 0 and room == (ahead_room[arc] if forward else behind_room[arc]):
                        full = i
                        event = tail[arc] if forward else head[arc]
                    flow[arc] += room if forward else -room
                    # A full arc moves to its next breakpoint and is not tight any more, so that the
                    # walk below needs no test of the room.
                    refresh(
                        arc,
                        flow,
                        first,
                        upto,
                        step,
                        duration,
                        ahead,
                        behind,
                        ahead_room,
                        behind_room,
                    )
                if sent >= most:
                    return sent
                depth = full
                continue
            moved = False
            while place[event] < adjacent_ptr[event + 1]:
                arc = adjacent[place[event]]
                if tail[arc] == event:
                    other = head[arc]
                    tight = time[other] - time[event] == ahead[arc]
                else:
                    other = tail[arc]
                    tight = flow[arc] > 0 and time[event] - time[other] == behind[arc]
                if tight and level[other] == level[event] + 1:
                    trail[depth] = arc
                    depth += 1
                    event = other
                    moved = True
                    break
                place[event] += 1
            if moved:
                continue
            # Every way out of the start has been tried: the flow blocks all shortest paths.
            if event == 0:
                break
            # A dead end: go back one arc and pass it over from now on.
            depth -= 1
            arc = trail[depth]
            event = tail[arc] if head[arc] == event else head[arc]
            place[event] += 1
    return sent


@kernel
def refresh(  # noqa: PLR0913, PLR0917 (columns of a kernel)
    arc: int,
    flow: Array,
    first: Array,
    upto: Array,
    step: Array,
    duration: Array,
    ahead: Array,
    behind: Array,
    ahead_room: Array,
    behind_room: Array,
) -> None:
    """Set what one more, and one less, unit of flow on an arc stands for.

    Breakpoint k of an arc is row ``first[arc] + k``: flow up to ``upto[k]`` runs at
    ``duration[k]``, durations falling. ``step`` is the row of the last known place.
    """
    # Flow changes little at a time, so the last breakpoint is a good place to look from.
    k = step[arc]
    value = flow[arc]
    while k > first[arc] and value < upto[k - 1]:
        k -= 1
    while value >= upto[k]:
        k += 1
    step[arc] = k
    ahead[arc] = duration[k]
    ahead_room[arc] = upto[k] - value
    # Right on a limit both durations are possible: more flow runs at the shorter one, less at the
    # longer one. Elsewhere both are the same.
    if k > first[arc] and value == upto[k - 1]:
        behind[arc] = duration[k - 1]
        behind_room[arc] = value - (upto[k - 2] if k - 1 > first[arc] else 0)
    else:
        behind[arc] = duration[k]
        behind_room[arc] = value - (upto[k - 1] if k > first[arc] else 0)


@kernel(allocates=True)
def fall_of_times(  # noqa: PLR0913, PLR0917 (columns of a kernel)
    tail: Array,
    head: Array,
    adjacent_ptr: Array,
    adjacent: Array,
    ahead: Array,
    behind: Array,
    time: Array,
    flow: Array,
    fall: Array,
) -> int:
    """Fill ``fall`` with how far each event can come down before an arc stops it.

    Returns the fall of the last event, and -1 where nothing stops it.
    """
    sink = len(time) - 1
    for event in range(len(fall)):
        fall[event] = NO_LIMIT
    # Dijkstra: the distances below are slacks of residual arcs, which are never negative by the
    # invariant of ``fill_tight_paths``.
    fall[0] = 0
    heap = [(0, 0)]
    while len(heap) > 0:
        near, event = heapq.heappop(heap)
        # An old entry; a shorter way was found since.
        if near > fall[event]:
            continue
        # Events that are not settled fall by at least as much; ``sweep`` cuts them off at this.
        if event == sink:
            return near
        for k in range(adjacent_ptr[event], adjacent_ptr[event + 1]):
            arc = adjacent[k]
            if tail[arc] == event:
                other = head[arc]
                # The head may come down as far as the tail does, and by the slack above ``ahead``.
                far = near + time[other] - time[event] - ahead[arc]
            elif flow[arc] > 0:
                # An arc with flow must not get longer than ``behind``, so that its tail may come
                # down only little further than its head.
                other = tail[arc]
                far = near + behind[arc] - (time[event] - time[other])
            else:
                continue
            if far < fall[other]:
                fall[other] = far
                heapq.heappush(heap, (far, other))
    return -1


@kernel(allocates=True)
def sweep(  # noqa: PLR0913, PLR0917 (columns of a kernel)
    tail: Array,
    head: Array,
    adjacent_ptr: Array,
    adjacent: Array,
    first: Array,
    upto: Array,
    duration: Array,
    step: Array,
    time: Array,
    flow: Array,
    wanted: Array,
    found: Array,
    until: int,
    sent: int,
) -> int:
    """Shorten the project until the flow reaches ``until`` or nothing can be shorter.

    Args:
        tail: Event that each arc leaves.
        head: Event that it enters.
        adjacent_ptr: Arcs at event e are ``adjacent[adjacent_ptr[e]:adjacent_ptr[e + 1]]``.
        adjacent: See ``adjacent_ptr``.
        first: First breakpoint of each arc; see ``refresh``.
        upto: Flow up to which each breakpoint holds.
        duration: Units of time at each breakpoint.
        step: Current breakpoint of each arc; changed.
        time: Event times; changed.
        flow: Flow on each arc; changed.
        wanted: Lengths of the project, falling, at which the event times are wanted.
        found: Event times at those lengths, a row each; rows that are not reached stay.
        until: Flow value to stop at.
        sent: Flow value so far.

    Returns:
        The flow value at the end; ``NO_LIMIT`` = nothing can be shorter.
    """
    events = len(time)
    arcs = len(tail)
    ahead, behind = np.zeros(arcs, np.int64), np.zeros(arcs, np.int64)
    ahead_room, behind_room = np.zeros(arcs, np.int64), np.zeros(arcs, np.int64)
    for arc in range(arcs):
        refresh(arc, flow, first, upto, step, duration, ahead, behind, ahead_room, behind_room)
    level, place, queue = (
        np.zeros(events, np.int64),
        np.zeros(events, np.int64),
        np.zeros(events, np.int64),
    )
    trail, fall = np.zeros(arcs + 1, np.int64), np.zeros(events, np.int64)
    # Lengths above the current one were passed in an earlier call.
    row = 0
    while row < len(wanted) and wanted[row] > time[events - 1]:
        row += 1
    while True:
        # Flow first, then times: each round raises the price of a second as far as paths of this
        # length allow, and then shortens the project at that price.
        more = fill_tight_paths(
            tail,
            head,
            adjacent_ptr,
            adjacent,
            ahead,
            behind,
            ahead_room,
            behind_room,
            time,
            flow,
            first,
            upto,
            step,
            duration,
            level,
            place,
            trail,
            queue,
            until - sent,
        )
        if more >= NO_LIMIT:
            sent = NO_LIMIT
            break
        sent += more
        if sent >= until:
            break
        length = fall_of_times(tail, head, adjacent_ptr, adjacent, ahead, behind, time, flow, fall)
        if length < 0:
            break
        # Between two vertices the times move evenly, so that wanted lengths in between are read
        # off.
        while row < len(wanted) and wanted[row] >= time[events - 1] - length:
            part = time[events - 1] - wanted[row]
            for event in range(events):
                found[row, event] = time[event] - min(fall[event], part)
            row += 1
        # The usual update of potentials keeps all slacks of residual arcs at 0 or above.
        for event in range(events):
            time[event] -= min(fall[event], length)
    while row < len(wanted) and wanted[row] >= time[events - 1]:
        for event in range(events):
            found[row, event] = time[event]
        row += 1
    return sent
