"""Synergy's released simulator, rule by rule (OSDI 2022, the published code).

Rounds of 300 s re-pack the whole cluster from empty: jobs in policy order, each first-fit over GPUs
in id order, split over servers at will, at no cost for restarts. Three allocators: ``fair`` grants
the GPU-proportional share; ``greedy`` the ideal demand or nothing; ``tune`` falls back to the fair
share, taking from the jobs on the target server what they hold above theirs, all or nothing. A job
does ``floor(300 / iteration)`` iterations a round and ends with a round.

What is kept although it is odd: an order's key sees the speed of the last round; FTF serves the
smallest ratio first; LAS fills by GPU counts before it allocates, and sorts by GPUs under tune; a
job not run for 1000 hours goes first for ever; the run ends with the first round without a job.

Departure that changes no result: a round whose order, jobs and so grants equal those of the last
is not computed again. Keys are linear in the rounds that pass, so the number of such rounds is
known; it is taken one lower where rounding could matter. A first-fit walk starts at the first
server that may still hold the vector, since free room only shrinks within a round.
"""

import math

from partita.fleet.kernels.compiled import Column
from partita.fleet.kernels.released_packing import (
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
    PACKING,
    ROUND_S,
    ROUNDS,
    ROWS,
    RUNNING,
    SRTF,
    STARVED_S,
    STATUS,
    STUCK,
    TETRIS,
    TUNE,
    Demands,
    Jobs,
    Room,
    Rows,
    allocate,
    empty_room,
)
from partita.fleet.kernels.sorting import SORTING, sort_jobs


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
            jobs.key[j], jobs.slope[j] = demands.largest_share[jobs.demand[j]], 0.0
        elif ordering == TETRIS:
            share = demands.sum_of_shares[jobs.demand[j]]
            jobs.key[j], jobs.slope[j] = remaining * share, gain * share
        else:
            jobs.key[j], jobs.slope[j] = jobs.arrival[j], 0.0


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
        jobs.step[j] = math.floor(clock[ROUND_S] / (jobs.iteration_s[j] / jobs.speed[j]))
    return running


def equal_rounds(ordering: int, free_order: bool, jobs: Jobs, clock: Column, count: Column) -> int:
    """Return how many rounds from this one on have the same grants."""
    rounds = 1.0e15
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
            rounds = min(rounds, 1 + rounds_in_order(jobs.order[i - 1], j, jobs))
    return max(int(rounds), 1)


def rounds_in_order(a: int, b: int, jobs: Jobs) -> float:
    """Return for how many further rounds job a keeps its place before job b."""
    gap = jobs.key[b] - jobs.key[a]
    if gap < 0 or (gap == 0 and b < a):
        return 0.0
    closing = jobs.slope[a] - jobs.slope[b]
    if closing <= 0:
        return 1.0e15
    meet = gap / closing
    return max(float(math.ceil(meet * (1 - 1e-9) - 1e-9)), 0.0)


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


def advance(rounds: int, running: int, jobs: Jobs, clock: Column, count: Column) -> None:
    """Let equal rounds pass, and end the jobs that are done."""
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
    count[ACTIVE] = kept


def admit(ordering: int, jobs: Jobs, clock: Column, count: Column) -> None:
    """Add the jobs that have arrived, and raise those that starve."""
    while count[NEXT] < len(jobs.arrival) and jobs.arrival[count[NEXT]] <= clock[NOW]:
        jobs.order[count[ACTIVE]] = count[NEXT]
        count[ACTIVE] += 1
        count[NEXT] += 1
        count[EVENTS] += 1
    if ordering == FIFO:
        return
    for i in range(count[ACTIVE]):
        j = jobs.order[i]
        if clock[NOW] - jobs.last_run[j] > STARVED_S:
            jobs.rank[j] = 1


def released_rounds(
    policy: tuple[int, int],
    jobs: Jobs,
    demands: Demands,
    room: Room,
    clock: Column,
    count: Column,
    rows: Rows,
) -> None:
    """Play rounds until all is done, or the rows are full; ``count[STATUS]`` says which."""
    ordering, allocator = policy
    count[STATUS] = RUNNING
    while count[STATUS] == RUNNING:
        if count[ROWS] == len(rows.start):
            count[STATUS] = FULL
            return
        admit(ordering, jobs, clock, count)
        if count[ACTIVE] == 0:
            count[ROUNDS] += 1
            count[EVENTS] += 1
            count[STATUS] = DONE
            return
        set_keys(ordering, 0, jobs, demands, clock, count)
        sort_jobs(jobs.order, count[ACTIVE], jobs.key, jobs.rank, jobs.spare)
        running = fill_round(ordering, allocator, jobs, demands, room, clock, count)
        if running < 0 or (running == 0 and count[NEXT] == len(jobs.arrival)):
            count[STATUS] = STUCK
            return
        set_keys(ordering, 1, jobs, demands, clock, count)
        free_order = allocator == FAIR and running == count[ACTIVE]
        rounds = equal_rounds(ordering, free_order, jobs, clock, count)
        write_row(rounds, running, jobs, room, clock, count, rows)
        advance(rounds, running, jobs, clock, count)


FAMILY = (
    *SORTING,
    *PACKING,
    set_keys,
    choose,
    fill_round,
    rounds_in_order,
    equal_rounds,
    write_row,
    advance,
    admit,
    released_rounds,
)
"""Every kernel of this simulator, callees first."""
