"""Packing one round by the released rules: first-fit, and tune's all-or-nothing demotion."""

from typing import NamedTuple

from partita.kernels import Column, kernel

FIFO, SRTF, LAS, FTF, DRF, TETRIS = range(6)
FAIR, GREEDY, TUNE = range(3)
STARVED_S = 3_600_000.0
NOW, ROUND_S = range(2)
ROUNDS, EVENTS, ACTIVE, NEXT, ROWS, FREE_GPUS, NUM_PIECES, STATUS = range(8)
QUEUED, TIES_AHEAD, TIES_ACTIVE, COUNTS = range(8, 12)
RUNNING, FULL, DONE, STUCK = range(4)


class Jobs(NamedTuple):
    """The jobs in order of arrival: what is fixed, then what changes.

    ``speed`` is what keys see. ``step`` is the iterations of a round; below 0 while a job that is
    to run at speed 1 has none yet.
    """

    arrival: Column
    total: Column
    iteration_s: Column
    gpus: Column
    demand: Column
    done: Column
    attained: Column
    speed: Column
    last_run: Column
    rank: Column
    key: Column
    slope: Column
    start: Column
    finish: Column
    step: Column
    order: Column
    spare: Column
    chosen: Column
    first_piece: Column
    num_pieces: Column
    cpus: Column
    memory: Column
    storage: Column


class Events(NamedTuple):
    """The clock, and what the released code's heap makes of jobs that arrive at the same time.

    ``tied`` marks these, ``place`` is their place in the order. The heap holds arrivals, ends of
    leases (all the number after the last job) and the next round (the number after that), by
    ``when``.
    """

    clock: Column
    tied: Column
    place: Column
    heap: Column
    when: Column


class Demands(NamedTuple):
    """Distinct demands: what a GPU of the job asks for, its ideal speed, shares of the cluster."""

    cpus: Column
    memory: Column
    storage: Column
    speed: Column
    above_fair: Column
    share_gpus: Column
    share_cpus: Column
    share_memory: Column
    hint: Column


class Room(NamedTuple):
    """The servers, all alike: what is free, the fair share of a GPU, pieces of jobs on each."""

    gpus: Column
    cpus: Column
    memory: Column
    storage: Column
    fair: Column
    capacity: Column
    first: Column
    last: Column
    piece_job: Column
    piece_server: Column
    piece_gpus: Column
    piece_next: Column
    walk: Column


class Rows(NamedTuple):
    """What was in use over stretches of equal rounds."""

    start: Column
    rounds: Column
    running: Column
    waiting: Column
    gpus: Column
    cpus: Column
    memory: Column


@kernel
def empty_room(room: Room, demands: Demands, count: Column) -> None:
    """Free everything."""
    for s in range(len(room.gpus)):
        room.gpus[s] = int(room.capacity[0])
        room.cpus[s] = room.capacity[1]
        room.memory[s] = room.capacity[2]
        room.storage[s] = room.capacity[3]
        room.first[s] = -1
        room.last[s] = -1
    for d in range(len(demands.hint)):
        demands.hint[d] = 0
    count[NUM_PIECES] = 0
    count[FREE_GPUS] = len(room.gpus) * int(room.capacity[0])


@kernel
def hold(j: int, s: int, gpus: int, jobs: Jobs, room: Room, count: Column) -> None:
    """Put GPUs of a job on a server; its vector is taken by the caller."""
    p = count[NUM_PIECES]
    count[NUM_PIECES] = p + 1
    room.piece_job[p] = j
    room.piece_server[p] = s
    room.piece_gpus[p] = gpus
    room.piece_next[p] = -1
    if room.first[s] < 0:
        room.first[s] = p
    else:
        room.piece_next[room.last[s]] = p
    room.last[s] = p
    jobs.num_pieces[j] += 1


@kernel
def walk_gpus(
    n: int,
    hint: Column,
    slot: int,
    cpus: float,
    memory: float,
    storage: float,
    room: Room,
) -> int:
    """Find n GPUs first-fit; return the number of servers walked to, 0 where there are too few.

    Fills ``room.walk`` with pairs of server and GPUs.
    """
    found, steps, leading = 0, 0, True
    s = hint[slot]
    while s < len(room.gpus) and found < n:
        free_c, free_m, free_s = room.cpus[s], room.memory[s], room.storage[s]
        here = 0
        while (
            here < room.gpus[s]
            and found + here < n
            and free_c >= cpus
            and free_m >= memory
            and free_s >= storage
        ):
            here += 1
            free_c -= cpus
            free_m -= memory
            free_s -= storage
        if here > 0:
            leading = False
            room.walk[2 * steps] = s
            room.walk[2 * steps + 1] = here
            steps += 1
            found += here
        elif leading:
            hint[slot] = s + 1
        s += 1
    return steps if found == n else 0


@kernel
def place(
    j: int,
    fair: bool,
    jobs: Jobs,
    demands: Demands,
    room: Room,
    count: Column,
) -> bool:
    """Place a job with its demand or with the fair share; return whether it fits."""
    d = jobs.demand[j]
    slot = d
    cpus, memory, storage = demands.cpus[d], demands.memory[d], demands.storage[d]
    if fair:
        slot = len(demands.cpus)
        cpus, memory, storage = room.fair[0], room.fair[1], room.fair[2]
    steps = walk_gpus(jobs.gpus[j], demands.hint, slot, cpus, memory, storage, room)
    if steps == 0:
        return False
    jobs.first_piece[j] = count[NUM_PIECES]
    jobs.num_pieces[j] = 0
    jobs.cpus[j], jobs.memory[j], jobs.storage[j] = cpus, memory, storage
    for i in range(steps):
        s, gpus = room.walk[2 * i], room.walk[2 * i + 1]
        for _ in range(gpus):
            room.cpus[s] -= cpus
            room.memory[s] -= memory
            room.storage[s] -= storage
        room.gpus[s] -= gpus
        hold(j, s, gpus, jobs, room, count)
    count[FREE_GPUS] -= jobs.gpus[j]
    return True


@kernel
def demote(j: int, jobs: Jobs, demands: Demands, room: Room) -> None:
    """Give a running job the fair share on the GPUs it has, where it holds more of anything.

    It runs at speed 1 in any case; its next key sees that only where it asks for more than fair.
    """
    jobs.step[j] = -1.0
    if demands.above_fair[jobs.demand[j]]:
        jobs.speed[j] = 1.0
    fair = room.fair
    if not (jobs.cpus[j] > fair[0] or jobs.memory[j] > fair[1] or jobs.storage[j] > fair[2]):
        return
    for p in range(jobs.first_piece[j], jobs.first_piece[j] + jobs.num_pieces[j]):
        s, gpus = room.piece_server[p], room.piece_gpus[p]
        room.cpus[s] += (jobs.cpus[j] - fair[0]) * gpus
        room.memory[s] += (jobs.memory[j] - fair[1]) * gpus
        room.storage[s] += (jobs.storage[j] - fair[2]) * gpus
        for d in range(len(demands.hint)):
            demands.hint[d] = min(demands.hint[d], s)
    jobs.cpus[j], jobs.memory[j], jobs.storage[j] = fair[0], fair[1], fair[2]


@kernel
def next_victim(s: int, jobs: Jobs, room: Room) -> int:
    """Return the piece on a server that gives first: few servers, many CPUs, much memory."""
    best = -1
    p = room.first[s]
    while p >= 0:
        if room.piece_gpus[p] > 0 and best >= 0:
            a, b = room.piece_job[p], room.piece_job[best]
            if jobs.num_pieces[a] != jobs.num_pieces[b]:
                better = jobs.num_pieces[a] < jobs.num_pieces[b]
            elif jobs.cpus[a] != jobs.cpus[b]:
                better = jobs.cpus[a] > jobs.cpus[b]
            else:
                better = jobs.memory[a] > jobs.memory[b]
            if better:
                best = p
        elif room.piece_gpus[p] > 0:
            best = p
        p = room.piece_next[p]
    return best


@kernel
def reclaim(
    s: int, cpus: float, memory: float, storage: float, jobs: Jobs, demands: Demands, room: Room
) -> None:
    """Demote jobs on a server until a vector fits there, or all were walked."""
    need_c = max(0.0, cpus - room.cpus[s])
    need_m = max(0.0, memory - room.memory[s])
    need_s = max(0.0, storage - room.storage[s])
    victims = 0
    while need_c > 0 or need_m > 0 or need_s > 0:
        p = next_victim(s, jobs, room)
        if p < 0:
            break
        j, gpus = room.piece_job[p], room.piece_gpus[p]
        need_c = max(0.0, need_c - max(0.0, (jobs.cpus[j] - room.fair[0]) * gpus))
        need_m = max(0.0, need_m - max(0.0, (jobs.memory[j] - room.fair[1]) * gpus))
        need_s = max(0.0, need_s - max(0.0, (jobs.storage[j] - room.fair[2]) * gpus))
        room.walk[victims] = p
        room.piece_gpus[p] = -gpus
        victims += 1
    for i in range(victims):
        p = room.walk[i]
        room.piece_gpus[p] = -room.piece_gpus[p]
    for i in range(victims):
        demote(room.piece_job[room.walk[i]], jobs, demands, room)


@kernel
def target_server(n: int, room: Room) -> int:
    """Return where to make room: the first server with n free GPUs, else the fullest not full."""
    best = -1
    for s in range(len(room.gpus)):
        if n > 1 and room.gpus[s] >= n:
            return s
        if room.gpus[s] > 0 and (best < 0 or room.gpus[s] < room.gpus[best]):
            best = s
    return best


@kernel
def make_room(j: int, fair: bool, jobs: Jobs, demands: Demands, room: Room) -> None:
    """Reclaim on as many servers as the GPUs of a job need."""
    d = jobs.demand[j]
    cpus, memory, storage = demands.cpus[d], demands.memory[d], demands.storage[d]
    if fair:
        cpus, memory, storage = room.fair[0], room.fair[1], room.fair[2]
    left = jobs.gpus[j]
    marked = 0
    while left > 0:
        s = target_server(left if marked == 0 else 1, room)
        if s < 0:
            break
        gpus = min(left, room.gpus[s])
        reclaim(s, cpus * gpus, memory * gpus, storage * gpus, jobs, demands, room)
        left -= gpus
        # A server is looked at once: its free GPUs are hidden until all are found.
        room.gpus[s] = -room.gpus[s]
        marked += 1
    for s in range(len(room.gpus)):
        room.gpus[s] = abs(room.gpus[s])


@kernel
def allocate(
    j: int,
    allocator: int,
    jobs: Jobs,
    demands: Demands,
    room: Room,
    count: Column,
) -> int:
    """Place a job; return 1 where it runs, 0 where it waits, -1 where tune fails."""
    if allocator != TUNE:
        return int(place(j, allocator == FAIR, jobs, demands, room, count))
    if place(j, False, jobs, demands, room, count):
        return 1
    fair = bool(demands.above_fair[jobs.demand[j]])
    if fair:
        jobs.speed[j] = 1.0
        if place(j, True, jobs, demands, room, count):
            return 1
    make_room(j, fair, jobs, demands, room)
    return 1 if place(j, fair, jobs, demands, room, count) else -1
