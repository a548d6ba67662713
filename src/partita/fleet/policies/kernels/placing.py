"""Who runs, and on which servers: selection in order, then sticky and consolidated placement.

Jobs are taken in their order while their class of servers has GPUs for them (those behind fill in
where one does not fit). Who runs already stays where it is. Others go, large ones first, to one
server if one has the GPUs: where the ideal demand fits with the least left over, else where most is
left. A job that no server can hold is split over the fewest.
"""

from typing import NamedTuple

from partita.kernels import Column, kernel

EPS = 1e-9
"""Rounding of CPUs, and of shares of what a server has, that is passed over."""
EPS_BYTES = 1.0
"""Rounding of memory: the share of a GPU need not be whole bytes, and sums of such shares are exact
to far less than one."""
NUM_PIECES = 0


class Table(NamedTuple):
    """The choices of `Profiles`, and the speed of fair shares by list.

    List l is ``profile * num_classes[0] + class``, with choices ``first[l]`` to ``first[l + 1]``,
    ascending by speed. By choice: ``cpus`` and ``memory`` (bytes) per GPU, ``speed``. By list:
    ``floor``, the choice that always fits (-1 = the job cannot run there), and ``fair_speed``.
    """

    first: Column
    cpus: Column
    memory: Column
    speed: Column
    floor: Column
    fair_speed: Column
    num_classes: Column


class Site(NamedTuple):
    """The servers: class, what they have, what is free, what their jobs would like to have.

    All by server. ``free_gpus`` is -1 where the server is down; memory is in bytes. ``claim_cpus``
    and ``claim_memory`` sum what the jobs placed there would like to have, which may be more than
    there is. ``head`` is the first piece in the server's list, linked by ``piece_next``. ``price``
    and ``settled`` belong to the swaps of ``sharing``.
    """

    klass: Column
    cpus: Column
    memory: Column
    free_gpus: Column
    free_cpus: Column
    free_memory: Column
    claim_cpus: Column
    claim_memory: Column
    head: Column
    price: Column
    settled: Column


class Queue(NamedTuple):
    """The jobs of a snapshot, and the pieces of those that run.

    - By job, given: ``profile`` (a row of lists), ``gpus``, ``tenant`` (-1 = none), ``weight``,
      ``freed``, ``need`` and ``bonus`` (see ``dividing.worth``), ``target`` (a choice, -1 = none),
      ``move_cost`` in the unit of worth. ``may_run`` is by job and class, flat.
    - What job j holds now: rows ``held_first[j]`` to ``held_first[j + 1]`` of ``held_server`` and
      ``held_gpus``.
    - By job, decided: ``klass`` of servers (-1 = it waits), ``choice``, ``pieces`` from piece
      ``first`` on, ``fresh`` = it starts or moves in this round.
    - A piece is the GPUs of a job on one server: ``piece_job``, ``piece_server``, ``piece_gpus``,
      ``piece_next`` on the same server. ``count[NUM_PIECES]`` is their number.
    """

    profile: Column
    gpus: Column
    may_run: Column
    tenant: Column
    weight: Column
    freed: Column
    need: Column
    bonus: Column
    target: Column
    move_cost: Column
    held_first: Column
    held_server: Column
    held_gpus: Column
    klass: Column
    choice: Column
    first: Column
    pieces: Column
    fresh: Column
    piece_job: Column
    piece_server: Column
    piece_gpus: Column
    piece_next: Column
    count: Column


@kernel
def stays(j: int, queue: Queue, site: Site) -> bool:
    """Return whether a job holds its GPUs on servers that all work."""
    begin, end = queue.held_first[j], queue.held_first[j + 1]
    if begin == end:
        return False
    held = 0
    for p in range(begin, end):
        if site.free_gpus[queue.held_server[p]] < 0:
            return False
        held += queue.held_gpus[p]
    return bool(held == queue.gpus[j])


@kernel
def best_class(j: int, queue: Queue, table: Table, class_free: Column) -> int:
    """Return the class of servers with GPUs for a job on which it is fastest, -1 = none."""
    best = -1
    classes = table.num_classes[0]
    for k in range(classes):
        if not queue.may_run[j * classes + k] or class_free[k] < queue.gpus[j]:
            continue
        here = table.fair_speed[queue.profile[j] * classes + k]
        if here <= 0:  # not with as few GPUs
            continue
        if best < 0 or here > table.fair_speed[queue.profile[j] * classes + best]:
            best = k
    return best


@kernel
def select_jobs(
    order: Column, queue: Queue, site: Site, table: Table, class_free: Column, quota: Column
) -> None:
    """Set the class of every job that runs, in order; -1 = it waits."""
    for i in range(len(order)):
        j = order[i]
        queue.klass[j] = -1
        tenant = queue.tenant[j]
        # A quota of -1 has no limit.
        if tenant >= 0 and 0 <= quota[tenant] < queue.gpus[j]:
            continue
        best = -1
        # A job that runs keeps its class even where another one is faster: a move costs a restart.
        if stays(j, queue, site):
            k = site.klass[queue.held_server[queue.held_first[j]]]
            if class_free[k] >= queue.gpus[j] and queue.may_run[j * table.num_classes[0] + k]:
                best = k
        if best < 0:
            best = best_class(j, queue, table, class_free)
        if best < 0:
            continue
        queue.klass[j] = best
        class_free[best] -= queue.gpus[j]
        if tenant >= 0 and quota[tenant] >= 0:
            quota[tenant] -= queue.gpus[j]


@kernel
def list_of(j: int, queue: Queue, table: Table) -> int:
    """Return the list of choices of a job on its class."""
    return int(queue.profile[j] * table.num_classes[0] + queue.klass[j])


@kernel
def wish_of(j: int, queue: Queue, table: Table) -> int:
    """Return the choice that a job would like to have: its target, else its fastest."""
    if queue.target[j] >= 0:
        return int(queue.target[j])
    return int(table.first[list_of(j, queue, table) + 1] - 1)


@kernel
def add_piece(j: int, s: int, gpus: int, queue: Queue, site: Site, table: Table) -> None:
    """Put GPUs of a job on a server, and note what it would like to have there."""
    p = queue.count[NUM_PIECES]
    queue.count[NUM_PIECES] = p + 1
    # Pieces of a job are added one after the other, so first and number tell them all.
    if queue.pieces[j] == 0:
        queue.first[j] = p
    queue.pieces[j] += 1
    queue.piece_job[p] = j
    queue.piece_server[p] = s
    queue.piece_gpus[p] = gpus
    site.free_gpus[s] -= gpus
    top = wish_of(j, queue, table)
    site.claim_cpus[s] += table.cpus[top] * gpus
    site.claim_memory[s] += table.memory[top] * gpus


@kernel
def left_over(j: int, s: int, n: int, queue: Queue, site: Site, table: Table) -> float:
    """Return the least share of a resource that a job's ideal leaves on a server; < 0 = misses."""
    top = wish_of(j, queue, table)
    cpus = (site.cpus[s] - site.claim_cpus[s] - table.cpus[top] * n) / site.cpus[s]
    memory = (site.memory[s] - site.claim_memory[s] - table.memory[top] * n) / site.memory[s]
    return float(min(cpus, memory))


@kernel
def one_server(j: int, queue: Queue, site: Site, table: Table, by_need: bool) -> int:
    """Return the server to hold a whole job, -1 = none has the GPUs."""
    best, best_left, n = -1, 0.0, queue.gpus[j]
    for s in range(len(site.klass)):
        if site.klass[s] != queue.klass[j] or site.free_gpus[s] < n:
            continue
        # Compared: fits the ideal or not; then the least left over if it fits, which keeps large
        # gaps for others, or the most if not, which lacks least; then the fewest free GPUs.
        left = left_over(j, s, n, queue, site, table) if by_need else 0.0
        if best < 0:
            better = True
        elif by_need and (left >= -EPS) != (best_left >= -EPS):
            better = left >= -EPS
        elif by_need and abs(left - best_left) > EPS:
            better = left < best_left if left >= -EPS else left > best_left
        else:
            better = site.free_gpus[s] < site.free_gpus[best]
        if better:
            best, best_left = s, left
    return best


@kernel
def split_job(j: int, queue: Queue, site: Site, table: Table) -> None:
    """Put a job on the fewest servers: those with the most free GPUs first."""
    left = queue.gpus[j]
    while left > 0:
        best = -1
        for s in range(len(site.klass)):
            if site.klass[s] != queue.klass[j] or site.free_gpus[s] <= 0:
                continue
            if best < 0 or site.free_gpus[s] > site.free_gpus[best]:
                best = s
        gpus = min(left, site.free_gpus[best])
        add_piece(j, best, gpus, queue, site, table)
        left -= gpus


@kernel
def place_jobs(newest: Column, queue: Queue, site: Site, table: Table, by_need: bool) -> None:
    """Place the jobs that were selected: who stays first, then the others in the order given."""
    queue.count[NUM_PIECES] = 0
    # Who stays is placed before all others, so that no newcomer takes its GPUs.
    for j in range(len(queue.klass)):
        queue.pieces[j] = 0
        queue.fresh[j] = 0
        queue.choice[j] = -1
        if queue.klass[j] < 0 or not stays(j, queue, site):
            continue
        begin, end = queue.held_first[j], queue.held_first[j + 1]
        if site.klass[queue.held_server[begin]] != queue.klass[j]:
            continue
        for p in range(begin, end):
            add_piece(j, queue.held_server[p], queue.held_gpus[p], queue, site, table)
    # Selection has counted the GPUs of each class: those selected always find theirs, on one server
    # or on several.
    for i in range(len(newest)):
        j = newest[i]
        if queue.klass[j] < 0 or queue.pieces[j] > 0:
            continue
        queue.fresh[j] = 1
        s = one_server(j, queue, site, table, by_need)
        if s >= 0:
            add_piece(j, s, queue.gpus[j], queue, site, table)
        else:
            split_job(j, queue, site, table)
