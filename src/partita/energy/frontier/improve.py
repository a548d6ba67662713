"""Better clocks by search: a few neighbouring activities are sped up and slowed down anew.

Where few clocks are useful, or their costs are steep, the slack of a step is best used in another
pattern than rounding finds: two stages take turns, one microbatch in five runs slowly. Each try
takes a random connected group of activities, sets most of them to their fastest clock, hands the
slack out again in a random order, and keeps the result if it is cheaper, or, early on, if it is
little worse (simulated annealing). What helped is then tried at the same activities of the other
microbatches, since the steady state of a pipeline repeats itself.

The seed is fixed and the generator is our own: the same input gives the same clocks. A try costs
what its changes reach.
"""

import numpy as np

from partita.core.columns import Array
from partita.energy.frontier.draws import draw_below, draw_share, new_draws
from partita.energy.frontier.rounding import (
    LEAST_GAIN_J,
    TOLERANCE,
    Draft,
    Web,
    choose,
    choose_all,
    set_times,
    slowest_within,
    spend_slack_of,
)
from partita.kernels import compiled, kernel

LARGEST_GROUP = 12
HEAT = 0.01
"""How much worse a result may be at first, relative to the mean energy of an activity."""
SEED = 0
MISSES = 3
"""Neighbouring microbatches at which a change may fail before the rest is left alone."""


def improve(web: Web, draft: Draft, limit_s: float, *, tries: int, enough_j: float) -> float:
    """Improve a draft that is in time; return the joules that were saved.

    Args:
        web: The columns.
        draft: Changed.
        limit_s: The step must end by then.
        tries: Number of groups to try.
        enough_j: Stop once that much was saved.
    """
    variable = np.flatnonzero(web.last > web.first)
    if tries < 1 or not len(variable):
        return 0.0
    heat = HEAT * float(np.abs(web.joules[draft.choice[variable]]).mean())
    limit_s *= 1 + TOLERANCE
    scratch = np.zeros((3, LARGEST_GROUP), dtype=np.int64)
    draws = new_draws(SEED)
    search = compiled(_search)
    return float(search(web, draft, limit_s, variable, scratch, tries, heat, enough_j, draws))


@kernel(allocates=True)
def _search(  # noqa: PLR0913, PLR0917 (columns of a kernel)
    web: Web,
    draft: Draft,
    limit_s: float,
    variable: Array,
    scratch: Array,
    tries: int,
    heat: float,
    enough_j: float,
    draws: Array,
) -> float:
    """Try groups; leave the best draft that was met, and return what it saves."""
    set_times(web, draft, limit_s)
    # ``saved`` is of the current draft, ``most`` of the best one, in joules against the first. Rows
    # of ``scratch``: the nodes of a group, their options before, and room.
    best, saved, most = draft.choice.copy(), 0.0, 0.0
    marked = np.zeros(len(draft.choice), np.bool_)
    for attempt in range(tries):
        seed = variable[draw_below(draws, len(variable))]
        wanted = 2 + draw_below(draws, scratch.shape[1] - 1)
        size = _group(web, seed, wanted, scratch[0], marked, draws)
        group, before = scratch[0, :size], scratch[1, :size]
        for k in range(size):
            before[k] = draft.choice[group[k]]
        _rebuild(web, draft, limit_s, group, before, scratch[2, :size], draws)
        gain = _gain(web, draft, group, before)
        # The temperature ``bearable`` (joules) falls to zero with the tries. One uniform draw does
        # the Metropolis rule: a loss g is kept with probability exp(-g / bearable), a gain always.
        bearable = heat * (1 - attempt / tries) ** 2
        if gain < bearable * np.log(1 - draw_share(draws)):
            choose_all(web, draft, limit_s, group, before)
            continue
        saved += gain
        # Only true gains are worth copying to other microbatches.
        if gain > LEAST_GAIN_J:
            saved += _spread(web, draft, limit_s, group, before, scratch[2, :size])
        if saved > most + LEAST_GAIN_J:
            most = saved
            best[:] = draft.choice
            if most >= enough_j:
                break
    # The search may have ended on a worse draft that it bore.
    draft.choice[:] = best
    set_times(web, draft, limit_s)
    return most


@kernel
def _group(web: Web, seed: int, wanted: int, group: Array, marked: Array, draws: Array) -> int:
    """Fill ``group`` with a random connected set of nodes around one; return its size."""
    group[0], size = seed, 1
    marked[seed] = True
    # Drawn neighbours are often members already; the number of draws is bounded.
    for _ in range(4 * wanted):
        if size == wanted:
            break
        node = group[draw_below(draws, size)]
        before = web.pred_ptr[node + 1] - web.pred_ptr[node]
        after = web.succ_ptr[node + 1] - web.succ_ptr[node]
        if before + after == 0:
            break
        k = draw_below(draws, before + after)
        if k < before:
            other = web.pred[web.pred_ptr[node] + k]
        else:
            other = web.succ[web.succ_ptr[node] + k - before]
        if not marked[other]:
            marked[other] = True
            group[size] = other
            size += 1
    # Unmarked one by one: a try must not cost a pass over all nodes.
    for k in range(size):
        marked[group[k]] = False
    return size


@kernel
def _rebuild(
    web: Web,
    draft: Draft,
    limit_s: float,
    group: Array,
    before: Array,
    fast: Array,
    draws: Array,
) -> None:
    """Speed most of a group up, then hand the slack out in a random order and random parts."""
    # The share of the group that keeps its options differs from try to try, up to a half.
    kept = 0.5 * draw_share(draws)
    # Fisher and Yates; options before move along with their nodes.
    for k in range(len(group)):
        fast[k] = web.first[group[k]] if draw_share(draws) > kept else before[k]
    choose_all(web, draft, limit_s, group, fast)
    for k in range(len(group)):
        other = k + draw_below(draws, len(group) - k)
        group[k], group[other] = group[other], group[k]
        before[k], before[other] = before[other], before[k]
    for k in range(len(group)):
        node = group[k]
        now = web.seconds[draft.choice[node]]
        # A third of the draws takes all of the slack, the others leave some to the next nodes.
        part = min(1.0, 1.5 * draw_share(draws))
        room = now + part * (draft.latest[node] - draft.start[node] - now)
        option = slowest_within(web, node, draft.choice[node], room)
        if option > draft.choice[node]:
            choose(web, draft, limit_s, node, option)
    # Slack that the random parts left over is never wasted.
    spend_slack_of(web, draft, limit_s, group, False)


@kernel
def _gain(web: Web, draft: Draft, group: Array, before: Array) -> float:
    """Return the joules that a group saves against its options before."""
    gain = 0.0
    for k in range(len(group)):
        gain += web.joules[before[k]] - web.joules[draft.choice[group[k]]]
    return gain


@kernel(allocates=True)
def _spread(
    web: Web, draft: Draft, limit_s: float, group: Array, before: Array, there: Array
) -> float:
    """Make the same change at other microbatches, near ones first; return what that saves."""
    saved = 0.0
    old = np.empty(len(group), np.int64)
    for direction in (1, -1):
        misses, by = 0, direction
        while misses <= MISSES and _moved(web, group, by, there):
            gain = 0.0
            # The change is a difference: it means the same only where the starting point was the
            # same.
            if _same_before(web, draft, group, before, there):
                gain = _copied(web, draft, limit_s, group, there, old)
            misses = 0 if gain > 0 else misses + 1
            saved += gain
            by += direction
    return saved


@kernel
def _moved(web: Web, group: Array, by: int, there: Array) -> bool:
    """Fill ``there`` with the nodes some places further in their teams; whether all exist."""
    for k in range(len(group)):
        team, place = web.team[group[k]], web.place[group[k]] + by
        if place < 0 or place >= web.member_ptr[team + 1] - web.member_ptr[team]:
            return False
        there[k] = web.member[web.member_ptr[team] + place]
    return True


@kernel
def _same_before(web: Web, draft: Draft, group: Array, before: Array, there: Array) -> bool:
    """Whether other nodes have the options that a group had, out of as many."""
    for k in range(len(group)):
        node, other = group[k], there[k]
        if web.last[node] - web.first[node] != web.last[other] - web.first[other]:
            return False
        if draft.choice[other] - web.first[other] != before[k] - web.first[node]:
            return False
    return True


@kernel
def _copied(
    web: Web, draft: Draft, limit_s: float, group: Array, there: Array, old: Array
) -> float:
    """Give other nodes the options of a group; return what that saves, 0 where it does not fit."""
    # Those that get faster go first: they make the slack that the others then need.
    for k in range(len(group)):
        old[k] = draft.choice[there[k]]
        option = draft.choice[group[k]] - web.first[group[k]] + web.first[there[k]]
        if option < old[k]:
            choose(web, draft, limit_s, there[k], option)
    fits = True
    for k in range(len(group)):
        other = there[k]
        option = draft.choice[group[k]] - web.first[group[k]] + web.first[other]
        if option > old[k]:
            # The slack is up to date with what the nodes before have taken.
            if web.seconds[option] > draft.latest[other] - draft.start[other]:
                fits = False
                break
            choose(web, draft, limit_s, other, option)
    # A change that did not fit is taken back with the rest, whatever part of it was made.
    gain = _gain(web, draft, there, old)
    if fits and gain > 0:
        return gain
    choose_all(web, draft, limit_s, there, old)
    return 0.0
