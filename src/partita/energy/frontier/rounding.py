"""From the durations of the relaxed problem to a real clock for every activity.

Relaxed durations lie between two measured clocks. Each activity takes the slowest clock within its
relaxed duration, which keeps the step in time; then the slack that is left is handed out one
activity at a time, to whoever saves most (or most a second) by the slowest clock that its slack
allows. ``improve.py`` goes on from there.

A ``Draft`` keeps the earliest start and the latest end of every activity while clocks change:
``choose`` follows a change only as far as it reaches.

``mixed`` makes points between two good ones: the first microbatches run as in one, the others as in
the other. Between two clocks that are far apart the relaxed problem counts on something in between
that no clock gives, and rounding each activity down wastes it. Over many microbatches the same mean
is reached in time: some run as in a faster point, the rest as in a slower one, all stages alike, so
that no stage waits for another but where the two meet. That reaches about the straight line between
the two points, which is cheaper where the point that rounding found lies above it.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from partita.core.columns import Array
from partita.core.order import csr
from partita.core.program import Program
from partita.energy.frontier.options import Options
from partita.energy.frontier.precedence import Precedence
from partita.kernels import compiled, kernel
from partita.program.dependencies import Dependencies

TOLERANCE = 1e-10
"""Times that differ by less, relative to the step, are equal."""
LEAST_GAIN_J = 1e-9


class Web(NamedTuple):
    """Activities, whom they wait for, and their options, as plain columns of the kernels.

    Attributes:
        pred_ptr: Predecessors of node i are rows ``pred_ptr[i]`` to ``pred_ptr[i + 1]``.
        pred: The predecessor.
        pred_lag: Seconds between its end and the start of the node.
        succ_ptr: Successors of node i are rows ``succ_ptr[i]`` to ``succ_ptr[i + 1]``.
        succ: The successor.
        succ_lag: Seconds between the end of the node and its start.
        release: Earliest start of each node, whoever it waits for.
        tail: Seconds between the end of each node and that of the step.
        first: First option of each node, the fastest.
        last: Its last option, the slowest.
        seconds: Duration of each option.
        joules: Effective energy of each option.
        team: Nodes that differ in their microbatch alone have one number.
        place: Place of each node in its team.
        member_ptr: Nodes of team t are ``member[member_ptr[t]:member_ptr[t + 1]]``.
        member: See ``member_ptr``.
    """

    pred_ptr: Array
    pred: Array
    pred_lag: Array
    succ_ptr: Array
    succ: Array
    succ_lag: Array
    release: Array
    tail: Array
    first: Array
    last: Array
    seconds: Array
    joules: Array
    team: Array
    place: Array
    member_ptr: Array
    member: Array


class Draft(NamedTuple):
    """An option for each node of a ``Web``, and the times that follow.

    Attributes:
        choice: The option, a row of ``seconds`` and ``joules``.
        start: Earliest start, in seconds from the start of the step.
        latest: Latest end that keeps the step in time, in the same seconds.
        dirty: Scratch: nodes whose time has to be found anew. All False between calls.
    """

    choice: Array
    start: Array
    latest: Array
    dirty: Array


def web_of(program: Program, found: Dependencies, precedence: Precedence, options: Options) -> Web:
    """Return the columns that rounding works on."""
    count = len(precedence)
    rows = found.row[precedence.activity]
    pred_ptr, pred_edge = csr(precedence.target, np.arange(len(precedence.lag)), count)
    succ_ptr, succ_edge = csr(precedence.source, np.arange(len(precedence.lag)), count)
    key = np.stack([program.device[rows], program.kind[rows], program.stage[rows]])
    team = np.unique(key, axis=1, return_inverse=True)[1].ravel().astype(np.int64)
    member_ptr, member = csr(team, np.arange(count), int(team.max()) + 1)
    place = np.empty(count, dtype=np.int64)
    place[member] = np.arange(count) - member_ptr[team[member]]
    return Web(
        pred_ptr=pred_ptr,
        pred=precedence.source[pred_edge],
        pred_lag=precedence.lag[pred_edge],
        succ_ptr=succ_ptr,
        succ=precedence.target[succ_edge],
        succ_lag=precedence.lag[succ_edge],
        release=precedence.release,
        tail=precedence.tail,
        first=options.ptr[precedence.activity],
        last=options.ptr[precedence.activity + 1] - 1,
        seconds=options.seconds,
        joules=options.joules,
        team=team,
        place=place,
        member_ptr=member_ptr,
        member=member,
    )


def fastest_draft(web: Web) -> Draft:
    """Return the draft with every node at its fastest; its times are not set."""
    count = len(web.first)
    dirty = np.zeros(count, dtype=np.bool_)
    return Draft(web.first.copy(), np.zeros(count), np.zeros(count), dirty)


def longest_s(web: Web, draft: Draft) -> float:
    """Return the length of the step with a draft's choices."""
    return float(compiled(set_times)(web, draft, np.inf))


def round_down(web: Web, wanted_s: Array, limit_s: float) -> Draft:
    """Return the cheaper of two drafts: slowest clocks within wanted durations, slack handed out.

    Args:
        web: The columns.
        wanted_s: Relaxed duration of each node.
        limit_s: The step must end by then.
    """
    drafts = [fastest_draft(web) for _ in range(2)]
    for draft, by_second in zip(drafts, (False, True), strict=True):
        # Relaxed durations come from whole units of time; without the tolerance a duration right at
        # a clock could miss it.
        compiled(fit)(web, draft, wanted_s + TOLERANCE * limit_s)
        compiled(spend_slack)(web, draft, limit_s * (1 + TOLERANCE), by_second)
    return min(drafts, key=lambda draft: float(web.joules[draft.choice].sum()))


@kernel
def fit(web: Web, draft: Draft, room: Array) -> None:
    """Move every choice to the slowest option within its room."""
    for i in range(len(room)):
        draft.choice[i] = slowest_within(web, i, draft.choice[i], room[i])


@kernel
def slowest_within(web: Web, node: int, option: int, room_s: float) -> int:
    """Return the slowest option of a node, from a given one on, that takes no longer."""
    while option < web.last[node] and web.seconds[option + 1] <= room_s:
        option += 1
    return option


@kernel
def set_times(web: Web, draft: Draft, limit_s: float) -> float:
    """Set all starts and latest ends; return the length of the step."""
    length = 0.0
    # Nodes are in topological order: predecessors have lower numbers.
    for i in range(len(draft.choice)):
        draft.start[i] = _earliest_start(web, draft, i)
        length = max(length, draft.start[i] + web.seconds[draft.choice[i]] + web.tail[i])
    for i in range(len(draft.choice) - 1, -1, -1):
        draft.latest[i] = _latest_end(web, draft, i, limit_s)
    return length


@kernel
def _earliest_start(web: Web, draft: Draft, node: int) -> float:
    start: float = web.release[node]
    for k in range(web.pred_ptr[node], web.pred_ptr[node + 1]):
        before = web.pred[k]
        end = draft.start[before] + web.seconds[draft.choice[before]] + web.pred_lag[k]
        start = max(start, end)
    return start


@kernel
def _latest_end(web: Web, draft: Draft, node: int, limit_s: float) -> float:
    latest: float = limit_s - web.tail[node]
    for k in range(web.succ_ptr[node], web.succ_ptr[node + 1]):
        after = web.succ[k]
        begin = draft.latest[after] - web.seconds[draft.choice[after]] - web.succ_lag[k]
        latest = min(latest, begin)
    return latest


@kernel
def choose(web: Web, draft: Draft, limit_s: float, node: int, option: int) -> None:
    """Give a node an option; starts and latest ends are kept up to date."""
    draft.choice[node] = option
    # A new duration changes the starts of those after the node and the latest ends of those before
    # it, and neither of its own.
    _forward(web, draft, node, _mark(web.succ_ptr, web.succ, draft.dirty, node))
    _backward(web, draft, limit_s, node, _mark(web.pred_ptr, web.pred, draft.dirty, node))


@kernel
def choose_all(web: Web, draft: Draft, limit_s: float, nodes: Array, options: Array) -> None:
    """Give some nodes their options, all at once."""
    lowest, highest, pending = len(draft.choice), 0, 0
    for k in range(len(nodes)):
        if draft.choice[nodes[k]] != options[k]:
            draft.choice[nodes[k]] = options[k]
            lowest, highest = min(lowest, nodes[k]), max(highest, nodes[k])
            pending += _mark(web.succ_ptr, web.succ, draft.dirty, nodes[k])
    # One pass for all changes: what two of them reach is found once.
    _forward(web, draft, lowest, pending)
    pending = 0
    for node in nodes:
        # The pass runs down from the highest changed node, so nothing above it may be marked: it
        # would not be met. Predecessors of unchanged nodes are looked at in vain, which does no
        # harm.
        if node <= highest:
            pending += _mark(web.pred_ptr, web.pred, draft.dirty, node)
    _backward(web, draft, limit_s, highest, pending)


@kernel
def _forward(web: Web, draft: Draft, node: int, pending: int) -> None:
    """Set the starts of marked nodes, which come after one, and of those they reach."""
    # Marks lie ahead only, and ``pending`` counts them: the scan ends with the last one.
    while pending > 0:
        node += 1
        if draft.dirty[node]:
            draft.dirty[node] = False
            pending -= 1
            start = _earliest_start(web, draft, node)
            # Exactly: the same sums give the same bits, and an equal time changes nothing after it.
            if start != draft.start[node]:
                draft.start[node] = start
                pending += _mark(web.succ_ptr, web.succ, draft.dirty, node)


@kernel
def _backward(web: Web, draft: Draft, limit_s: float, node: int, pending: int) -> None:
    """Set the latest ends of marked nodes, which come before one, and of those they reach."""
    while pending > 0:
        node -= 1
        if draft.dirty[node]:
            draft.dirty[node] = False
            pending -= 1
            latest = _latest_end(web, draft, node, limit_s)
            if latest != draft.latest[node]:
                draft.latest[node] = latest
                pending += _mark(web.pred_ptr, web.pred, draft.dirty, node)


@kernel
def _mark(ptr: Array, others: Array, dirty: Array, node: int) -> int:
    """Mark the neighbours of a node; return how many were not marked yet."""
    marked = 0
    for k in range(ptr[node], ptr[node + 1]):
        if not dirty[others[k]]:
            dirty[others[k]] = True
            marked += 1
    return marked


@kernel(allocates=True)
def spend_slack(web: Web, draft: Draft, limit_s: float, by_second: bool) -> None:
    """Hand out slack until nobody can use any: the largest saving first, or that a second."""
    set_times(web, draft, limit_s)
    everyone = np.arange(len(draft.choice))
    spend_slack_of(web, draft, limit_s, everyone, by_second)


@kernel
def spend_slack_of(web: Web, draft: Draft, limit_s: float, nodes: Array, by_second: bool) -> None:
    """Hand out slack to some nodes."""
    while True:
        best, option, most = -1, -1, LEAST_GAIN_J
        for i in nodes:
            now = draft.choice[i]
            # Earliest start to latest end is the room while all others keep their options.
            slow = slowest_within(web, i, now, draft.latest[i] - draft.start[i])
            if slow > now:
                gain = web.joules[now] - web.joules[slow]
                if by_second:
                    gain /= web.seconds[slow] - web.seconds[now]
                if gain > most:
                    best, option, most = i, slow, gain
        if best < 0:
            return
        # One at a time: what one takes, its neighbours on the path have no longer.
        choose(web, draft, limit_s, best, option)


def lower_hull(time_s: Sequence[float], energy_j: Sequence[float]) -> list[int]:
    """Return the points that lie on no line above two others; times ascend."""
    hull: list[int] = []
    for i, (time, energy) in enumerate(zip(time_s, energy_j, strict=True)):
        while len(hull) > 1:
            a, b = hull[-2], hull[-1]
            rise = (energy_j[b] - energy_j[a]) * (time - time_s[a])
            if rise < (energy - energy_j[a]) * (time_s[b] - time_s[a]):
                break
            hull.pop()
        hull.append(i)
    return hull


def mixed(web: Web, fast: Draft, slow: Draft, limit_s: float) -> Draft:
    """Return the cheaper of two mixes: as many microbatches as the limit allows run slowly.

    Args:
        web: The columns.
        fast: A draft that is in time.
        slow: One that is cheaper.
        limit_s: The step must end by then.
    """
    limit_s *= 1 + TOLERANCE
    drafts = []
    for place in (web.place, web.place.max() - web.place):
        draft = fastest_draft(web)
        _take_slow(web, draft, (fast.choice, slow.choice), place, limit_s)
        compiled(spend_slack)(web, draft, limit_s, False)
        drafts.append(draft)
    return min(drafts, key=lambda draft: float(web.joules[draft.choice].sum()))


def _take_slow(
    web: Web, draft: Draft, choices: tuple[Array, Array], place: Array, limit_s: float
) -> None:
    """Give the activities of the lowest places the slow choice: as many places as fit."""
    fast, slow = choices
    fits, too_many = 0, int(place.max()) + 2
    while too_many - fits > 1:
        middle = (fits + too_many) // 2
        draft.choice[:] = np.where(place < middle, slow, fast)
        if longest_s(web, draft) <= limit_s:
            fits = middle
        else:
            too_many = middle
    draft.choice[:] = np.where(place < fits, slow, fast)
