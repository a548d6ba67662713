"""Synergy's released simulator, rule by rule (OSDI 2022, the published code).

Rounds of 300 s re-pack the whole cluster from empty: jobs in policy order, each first-fit over GPUs
in id order, split over servers at will, at no cost for restarts. Three allocators: ``fair`` grants
the GPU-proportional share; ``greedy`` the ideal demand or nothing; ``tune`` falls back to the fair
share, taking from the jobs on the target server what they hold above theirs, all or nothing. A job
does ``floor(300 / iteration)`` iterations a round and ends with a round.

What is kept although it is odd: an order's key sees the speed of the last round; FTF serves the
smallest ratio first; LAS fills by GPU counts before it allocates, and sorts by GPUs under tune; a
job not run for 1000 hours goes first for ever, from the round after the one that finds it; a victim
of tune that asks for no more than fair runs at speed 1 and keeps its key; the run ends with the
first round without a job. Jobs with equal keys and arrivals keep the order of the last round, and
new ones that in which a binary heap gives up equal arrivals.

Departure that changes no result: a round whose order, jobs and so grants equal those of the last
is not computed again. Keys are linear in the rounds that pass, so the number of such rounds is
known; it is taken lower where rounding could matter. A first-fit walk starts at the first server
that may still hold the vector, since free room only shrinks within a round. The heap is kept only
while arrivals that several jobs share are to come; the events of each round pass through it, since
they change the order in which it gives these up.
"""

import math

from partita.fleet.policies.kernels.sorting import sort_jobs
from partita.kernels import Column, kernel
from partita.released.synergy_packing import (
    ACTIVE,
    DONE,
    DRF,
    EVENTS,
    FAIR,
    FIFO,
    FREE_GPUS,
    FTF,
    FULL,
    LAS,
    NEXT,
    NOW,
    QUEUED,
    ROUND_S,
    ROUNDS,
    ROWS,
    RUNNING,
    SRTF,
    STARVED_S,
    STATUS,
    STUCK,
    TETRIS,
    TIES_ACTIVE,
    TIES_AHEAD,
    TUNE,
    Demands,
    Events,
    Jobs,
    Room,
    Rows,
    allocate,
    empty_room,
)

NOISE = 1e-13
"""Keys closer than this share of them may change places by rounding."""


@kernel
def push(event: int, events: Events, count: Column) -> None:
    """Add an event to the heap as Python's ``heapq`` does."""
    heap, when = events.heap, events.when
    at = count[QUEUED]
    count[QUEUED] = at + 1
    while at > 0 and when[event] < when[heap[(at - 1) >> 1]]:
        heap[at] = heap[(at - 1) >> 1]
        at = (at - 1) >> 1
    heap[at] = event


@kernel
def pop(events: Events, count: Column) -> int:
    """Take the first event from the heap as Python's ``heapq`` does."""
    heap, when = events.heap, events.when
    end = count[QUEUED] - 1
    first, event = heap[0], heap[end]
    at = 0
    while 2 * at + 1 < end:
        child = 2 * at + 1
        if child + 1 < end and not when[heap[child]] < when[heap[child + 1]]:
            child += 1
        heap[at] = heap[child]
        at = child
    while at > 0 and when[event] < when[heap[(at - 1) >> 1]]:
        heap[at] = heap[(at - 1) >> 1]
        at = (at - 1) >> 1
    heap[at] = event
    count[QUEUED] = end
    return int(first)


@kernel
def pass_events(rounds: int, running: int, jobs: Jobs, events: Events, count: Column) -> None:
    """Let the events of equal rounds go through the heap; those of the last stay there.

    No job arrives before the last of them.
    """
    lease, start = len(jobs.arrival), len(jobs.arrival) + 1
    arrived = count[NEXT]
    for i in range(rounds):
        if i == rounds - 1:
            while arrived < lease and jobs.arrival[arrived] <= events.clock[NOW]:
                arrived += 1
        events.when[lease], events.when[start] = 3 * arrived - 2, 3 * arrived - 1
        for _ in range(running):
            push(lease, events, count)
        push(start, events, count)
        if i < rounds - 1:
            for _ in range(running + 1):
                pop(events, count)


@kernel
def set_keys(
    ordering: int,
    ahead: int,
    jobs: Jobs,
    demands: Demands,
    clock: Column,
    count: Column,
) -> None:
    """Set the key of every active job at its round or the one ahead, and its change a round."""
    now = clock[NOW] + ahead * clock[ROUND_S]
    for i in range(count[ACTIVE]):
        j = jobs.order[i]
        step = jobs.step[j] if ahead else 0.0
        left = jobs.total[j] - jobs.done[j] - step
        remaining = left * jobs.iteration_s[j] / jobs.speed[j]
        gain = -step * jobs.iteration_s[j] / jobs.speed[j]
        if ordering == SRTF:
            jobs.key[j], jobs.slope[j] = remaining, gain
        elif ordering == LAS:
            slope = clock[ROUND_S] if step > 0 else 0.0
            jobs.key[j] = (jobs.attained[j] + slope) * jobs.gpus[j]
            jobs.slope[j] = slope * jobs.gpus[j]
        elif ordering == FTF:
            alone = jobs.iteration_s[j] * jobs.total[j]
            jobs.key[j] = (now - jobs.arrival[j] + remaining) / alone
            jobs.slope[j] = (clock[ROUND_S] + gain) / alone
        elif ordering == DRF:
            d = jobs.demand[j]
            jobs.key[j] = max(demands.share_gpus[d], demands.share_cpus[d], demands.share_memory[d])
            jobs.slope[j] = 0.0
        elif ordering == TETRIS:
            d = jobs.demand[j]
            a, b, c = demands.share_gpus[d], demands.share_cpus[d], demands.share_memory[d]
            jobs.key[j] = a * remaining + b * remaining + c * remaining
            jobs.slope[j] = gain * (a + b + c)
        else:
            jobs.key[j], jobs.slope[j] = jobs.arrival[j], 0.0


@kernel
def choose(
    ordering: int,
    allocator: int,
    jobs: Jobs,
    room: Room,
    count: Column,
) -> int:
    """Fill ``chosen`` with the jobs to try, in their order; return how many."""
    active = count[ACTIVE]
    if ordering != LAS:
        for i in range(active):
            jobs.chosen[i] = jobs.order[i]
        return int(active)
    free, found = count[FREE_GPUS], 0
    for i in range(active):
        j = jobs.order[i]
        if jobs.gpus[j] <= free:
            free -= jobs.gpus[j]
            jobs.chosen[found] = j
            found += 1
    if allocator == TUNE:
        for i in range(1, found):  # by GPUs, most first; equal ones stay in their order
            j, at = jobs.chosen[i], i
            while at > 0 and jobs.gpus[jobs.chosen[at - 1]] < jobs.gpus[j]:
                jobs.chosen[at] = jobs.chosen[at - 1]
                at -= 1
            jobs.chosen[at] = j
    return found


@kernel
def fill_round(
    ordering: int,
    allocator: int,
    jobs: Jobs,
    demands: Demands,
    room: Room,
    clock: Column,
    count: Column,
) -> int:
    """Allocate one round; sets ``step`` of each job, and returns how many run (-1 = stuck)."""
    empty_room(room, demands, count)
    for i in range(count[ACTIVE]):
        j = jobs.order[i]
        jobs.step[j] = 0.0
        jobs.speed[j] = 1.0 if allocator == FAIR else demands.speed[jobs.demand[j]]
    running = 0
    tried = choose(ordering, allocator, jobs, room, count)
    for i in range(tried):
        j = jobs.chosen[i]
        if count[FREE_GPUS] < jobs.gpus[j]:
            continue
        placed = allocate(j, allocator, jobs, demands, room, count)
        if placed < 0:
            return -1
        if placed > 0:
            jobs.chosen[running] = j
            running += 1
    for i in range(running):
        j = jobs.chosen[i]
        speed = 1.0 if jobs.step[j] < 0 else jobs.speed[j]
        jobs.step[j] = math.floor(clock[ROUND_S] / (jobs.iteration_s[j] / speed))
    return running


@kernel
def equal_rounds(ordering: int, free_order: bool, jobs: Jobs, clock: Column, count: Column) -> int:
    """Return how many rounds from this one on have the same grants."""
    rounds = 1.0e15
    noise = 0.0 if ordering == LAS else NOISE
    if count[NEXT] < len(jobs.arrival):
        wait = jobs.arrival[count[NEXT]] - clock[NOW]
        rounds = float(math.ceil(wait / clock[ROUND_S]))
    for i in range(count[ACTIVE]):
        j = jobs.order[i]
        if jobs.step[j] > 0:
            rounds = min(rounds, math.ceil((jobs.total[j] - jobs.done[j]) / jobs.step[j]))
        elif ordering != FIFO and jobs.rank[j] == 0:
            left = jobs.last_run[j] + STARVED_S - clock[NOW]
            rounds = min(rounds, max(math.floor(left / clock[ROUND_S]), 1.0))
        if i > 0 and not free_order and rounds > 1 and jobs.rank[j] == jobs.rank[jobs.order[i - 1]]:
            rounds = min(rounds, 1 + rounds_in_order(jobs.order[i - 1], j, noise, jobs))
    return max(int(rounds), 1)


@kernel
def twins(a: int, b: int, jobs: Jobs) -> bool:
    """Return whether two jobs have the same key, bit for bit, while neither's grant changes."""
    return bool(
        jobs.demand[a] == jobs.demand[b]
        and jobs.total[a] == jobs.total[b]
        and jobs.done[a] == jobs.done[b]
        and jobs.step[a] == jobs.step[b]
        and jobs.speed[a] == jobs.speed[b]
    )


@kernel
def rounds_in_order(a: int, b: int, noise: float, jobs: Jobs) -> float:
    """Return for how many further rounds job a keeps its place before job b."""
    gap = jobs.key[b] - jobs.key[a]
    if gap < 0 or (gap == 0 and jobs.arrival[b] < jobs.arrival[a]):
        return 0.0
    closing = jobs.slope[a] - jobs.slope[b]
    moving = jobs.step[a] > 0 or jobs.step[b] > 0 or jobs.slope[a] != 0 or jobs.slope[b] != 0
    if noise > 0 and moving:
        gap -= noise * jobs.key[b]
        if gap <= 0:
            return 1.0e15 if twins(a, b, jobs) else 0.0
    if closing <= 0:
        return 1.0e15
    meet = gap / closing
    return max(float(math.ceil(meet * (1 - 1e-9) - 1e-9)), 0.0)


@kernel
def write_row(
    rounds: int, running: int, jobs: Jobs, room: Room, clock: Column, count: Column, rows: Rows
) -> None:
    """Add what is in use over equal rounds."""
    row = count[ROWS]
    count[ROWS] = row + 1
    gpus, cpus, memory = 0, 0.0, 0.0
    for i in range(running):
        j = jobs.chosen[i]
        gpus += jobs.gpus[j]
        cpus += jobs.gpus[j] * jobs.cpus[j]
        memory += jobs.gpus[j] * jobs.memory[j]
    rows.start[row] = clock[NOW]
    rows.rounds[row] = rounds
    rows.running[row] = running
    rows.waiting[row] = count[ACTIVE] - running
    rows.gpus[row] = gpus
    rows.cpus[row] = cpus
    rows.memory[row] = memory


@kernel
def advance(rounds: int, running: int, jobs: Jobs, events: Events, count: Column) -> None:
    """Let equal rounds pass, and end the jobs that are done."""
    clock = events.clock
    begin = clock[NOW]
    clock[NOW] = begin + rounds * clock[ROUND_S]
    count[ROUNDS] += rounds
    count[EVENTS] += rounds * (running + 1)
    for i in range(running):
        j = jobs.chosen[i]
        if jobs.attained[j] == 0:
            jobs.start[j] = begin
        jobs.done[j] += rounds * jobs.step[j]
        jobs.attained[j] += rounds * clock[ROUND_S]
        jobs.last_run[j] = clock[NOW]
        if jobs.done[j] >= jobs.total[j]:
            jobs.finish[j] = clock[NOW]
    kept = 0
    for i in range(count[ACTIVE]):
        j = jobs.order[i]
        if jobs.done[j] < jobs.total[j]:
            jobs.order[kept] = j
            kept += 1
        else:
            count[TIES_ACTIVE] -= events.tied[j]
    count[ACTIVE] = kept


@kernel
def admit(jobs: Jobs, events: Events, count: Column) -> None:
    """Add the jobs that have arrived; equal arrivals in the order of the heap."""
    num_jobs = len(jobs.arrival)
    from_heap = count[TIES_AHEAD] > 0
    while True:
        if from_heap:
            j = pop(events, count)
            if j == num_jobs:
                continue
            if j > num_jobs:
                return
        else:
            j = count[NEXT]
            if j == num_jobs or jobs.arrival[j] > events.clock[NOW]:
                return
        jobs.order[count[ACTIVE]] = j
        count[ACTIVE] += 1
        count[NEXT] += 1
        count[EVENTS] += 1
        count[TIES_AHEAD] -= events.tied[j]
        count[TIES_ACTIVE] += events.tied[j]


@kernel
def sort_active(jobs: Jobs, events: Events, count: Column) -> None:
    """Sort the active jobs by key, then arrival; those equal in both stay in their order."""
    active = count[ACTIVE]
    if count[TIES_ACTIVE] == 0:
        sort_jobs(jobs.order, active, jobs.key, jobs.rank, jobs.spare)
        return
    for i in range(active):
        events.place[jobs.order[i]] = i
    sort_jobs(jobs.order, active, jobs.key, jobs.rank, jobs.spare)
    for i in range(1, active):
        j, at = jobs.order[i], i
        while at > 0:
            before = jobs.order[at - 1]
            if (
                jobs.rank[before] != jobs.rank[j]
                or jobs.key[before] != jobs.key[j]
                or jobs.arrival[before] != jobs.arrival[j]
                or events.place[before] < events.place[j]
            ):
                break
            jobs.order[at] = before
            at -= 1
        jobs.order[at] = j


@kernel
def raise_starving(jobs: Jobs, clock: Column, count: Column) -> bool:
    """Raise the jobs that starve, from the next round on; return whether there are new ones."""
    found = False
    for i in range(count[ACTIVE]):
        j = jobs.order[i]
        if jobs.rank[j] == 0 and clock[NOW] - jobs.last_run[j] > STARVED_S:
            jobs.rank[j] = 1
            found = True
    return found


@kernel
def released_rounds(
    policy: tuple[int, int],
    jobs: Jobs,
    demands: Demands,
    room: Room,
    events: Events,
    count: Column,
    rows: Rows,
) -> None:
    """Play rounds until all is done, or the rows are full; ``count[STATUS]`` says which."""
    ordering, allocator = policy
    clock = events.clock
    count[STATUS] = RUNNING
    while count[STATUS] == RUNNING:
        if count[ROWS] == len(rows.start):
            count[STATUS] = FULL
            return
        admit(jobs, events, count)
        if count[ACTIVE] == 0:
            count[ROUNDS] += 1
            count[EVENTS] += 1
            count[STATUS] = DONE
            return
        set_keys(ordering, 0, jobs, demands, clock, count)
        sort_active(jobs, events, count)
        raised = ordering != FIFO and raise_starving(jobs, clock, count)
        running = fill_round(ordering, allocator, jobs, demands, room, clock, count)
        if running < 0 or (running == 0 and count[NEXT] == len(jobs.arrival)):
            count[STATUS] = STUCK
            return
        free_order = ordering in (FIFO, DRF)  # their keys stay
        if allocator == FAIR and running == count[ACTIVE] and count[TIES_ACTIVE] == 0:
            free_order = True
        if not free_order:
            set_keys(ordering, 1, jobs, demands, clock, count)
        rounds = 1 if raised else equal_rounds(ordering, free_order, jobs, clock, count)
        write_row(rounds, running, jobs, room, clock, count, rows)
        advance(rounds, running, jobs, events, count)
        if count[TIES_AHEAD] > 0:
            pass_events(rounds, running, jobs, events, count)
