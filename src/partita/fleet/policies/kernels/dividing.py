"""How the CPUs and memory of servers are divided among the jobs on them.

Every job gets its floor first, which is as fast as its GPU-proportional share and always fits.
*In order* (tune): each job in turn takes the fastest choice that still fits, so who comes late, or
whom the floors of others press, is demoted along its matrix only as far as needed. *By gain*
(joint): again and again the choice with the highest gain in worth for its share of what the server
has, so that CPUs go where they speed up most. *To targets* (opt): each job its target
where that fits, then by gain.
"""

from partita.fleet.policies.kernels.placing import (
    EPS,
    EPS_BYTES,
    NUM_PIECES,
    Queue,
    Site,
    Table,
    list_of,
)
from partita.kernels import Column, kernel


@kernel
def fits(j: int, at: int, to: int, queue: Queue, site: Site, table: Table) -> bool:
    """Return whether a job can go from one choice to another on all its servers."""
    for p in range(queue.first[j], queue.first[j] + queue.pieces[j]):
        s, gpus = queue.piece_server[p], queue.piece_gpus[p]
        if (table.cpus[to] - table.cpus[at]) * gpus > site.free_cpus[s] + EPS:
            return False
        if (table.memory[to] - table.memory[at]) * gpus > site.free_memory[s] + EPS_BYTES:
            return False
    return True


@kernel
def take(j: int, to: int, queue: Queue, site: Site, table: Table) -> None:
    """Let a job go from its choice (-1 = none) to another."""
    at = queue.choice[j]
    cpus = table.cpus[to] - (table.cpus[at] if at >= 0 else 0.0)
    memory = table.memory[to] - (table.memory[at] if at >= 0 else 0.0)
    # Choices are per GPU: each server gives for the GPUs that the job has there.
    for p in range(queue.first[j], queue.first[j] + queue.pieces[j]):
        site.free_cpus[queue.piece_server[p]] -= cpus * queue.piece_gpus[p]
        site.free_memory[queue.piece_server[p]] -= memory * queue.piece_gpus[p]
    queue.choice[j] = to


@kernel
def take_floors(order: Column, queue: Queue, site: Site, table: Table) -> None:
    """Give every job that runs its floor."""
    for i in range(len(order)):
        j = order[i]
        queue.choice[j] = -1
        if queue.pieces[j] > 0:
            take(j, table.floor[list_of(j, queue, table)], queue, site, table)


@kernel
def upgrade(j: int, queue: Queue, site: Site, table: Table) -> None:
    """Let a job take the fastest choice that fits."""
    at = queue.choice[j]
    # Choices ascend by speed: the first that fits is the fastest.
    for to in range(table.first[list_of(j, queue, table) + 1] - 1, at, -1):
        if fits(j, at, to, queue, site, table):
            take(j, to, queue, site, table)
            return


@kernel
def divide_in_order(order: Column, queue: Queue, site: Site, table: Table) -> None:
    """Divide all servers, the first job first."""
    take_floors(order, queue, site, table)
    for i in range(len(order)):
        if queue.pieces[order[i]] > 0:
            upgrade(order[i], queue, site, table)


@kernel
def link_pieces(queue: Queue, site: Site) -> None:
    """List the pieces on each server."""
    for s in range(len(site.head)):
        site.head[s] = -1
    # Backwards and in front, which lists the pieces of a server in ascending order.
    for p in range(queue.count[NUM_PIECES] - 1, -1, -1):
        queue.piece_next[p] = site.head[queue.piece_server[p]]
        site.head[queue.piece_server[p]] = p


@kernel
def worth(j: int, at: int, queue: Queue, table: Table) -> float:
    """Return what a choice of a job is worth: its own speed, and its GPUs being free sooner.

    GPUs are handed on with rounds: speed beyond what ends the job within this one frees nothing
    more, and to reach it frees half a round on average (``bonus``).
    """
    speed = table.speed[at]
    freed = speed if speed < queue.need[j] else queue.need[j] + queue.bonus[j]
    return float(queue.weight[j] * speed + queue.freed[j] * freed)


@kernel
def gain_on(s: int, queue: Queue, site: Site, table: Table) -> None:
    """Hand out what is free on a server by the highest gain; jobs over several servers wait."""
    # One choice at a time: each changes what is free, and so what the others can reach.
    while True:
        best_job, best_to, best = -1, -1, 0.0
        p = site.head[s]
        while p >= 0:
            j, gpus = queue.piece_job[p], queue.piece_gpus[p]
            p = queue.piece_next[p]
            if queue.pieces[j] > 1:
                continue
            at = queue.choice[j]
            now = worth(j, at, queue, table)
            for to in range(at + 1, table.first[list_of(j, queue, table) + 1]):
                cpus = (table.cpus[to] - table.cpus[at]) * gpus
                memory = (table.memory[to] - table.memory[at]) * gpus
                if cpus > site.free_cpus[s] + EPS or memory > site.free_memory[s] + EPS_BYTES:
                    continue
                # Shares of what the server has, so that CPUs and memory add up; giving some back is
                # free.
                cost = max(cpus, 0.0) / site.cpus[s] + max(memory, 0.0) / site.memory[s]
                gain = worth(j, to, queue, table) - now
                # Without a division, and a choice that costs nothing is not infinitely good.
                if gain > best * (cost + EPS):
                    best, best_job, best_to = gain / (cost + EPS), j, to
        if best_job < 0:
            return
        take(best_job, best_to, queue, site, table)


@kernel
def value_on(s: int, queue: Queue, site: Site, table: Table) -> float:
    """Return what the choices of the jobs that are on a server alone are worth."""
    total = 0.0
    p = site.head[s]
    while p >= 0:
        j = queue.piece_job[p]
        if queue.pieces[j] == 1:
            total += worth(j, queue.choice[j], queue, table)
        p = queue.piece_next[p]
    return total


@kernel
def take_targets(order: Column, queue: Queue, site: Site, table: Table) -> None:
    """Let jobs that run take their targets where they fit."""
    for i in range(len(order)):
        j = order[i]
        to = queue.target[j]
        if queue.pieces[j] > 0 and to >= 0 and fits(j, queue.choice[j], to, queue, site, table):
            take(j, to, queue, site, table)


@kernel
def divide_by_gain(order: Column, queue: Queue, site: Site, table: Table, targets: bool) -> None:
    """Divide all servers by gain; jobs over several servers take what is left, in order."""
    take_floors(order, queue, site, table)
    if targets:
        take_targets(order, queue, site, table)
    link_pieces(queue, site)
    for s in range(len(site.head)):
        gain_on(s, queue, site, table)
    for i in range(len(order)):
        if queue.pieces[order[i]] > 1:
            # Last, as a gain on one of their servers is worth nothing without the others.
            upgrade(order[i], queue, site, table)
