"""One round of an allocator that selects by GPUs, places, and divides: fair, tune, joint, opt.

For joint, jobs then change servers where that pays: the server on which a share would gain most is
paired with the one where it would gain least, and the swap of two jobs (or the move of one to free
GPUs) with the highest weighted gain over what the restarts cost is made, again and again while one
pays, up to a limit.
"""

from partita.fleet.policies.kernels.dividing import (
    divide_by_gain,
    divide_in_order,
    gain_on,
    take,
    take_floors,
    value_on,
    worth,
)
from partita.fleet.policies.kernels.placing import (
    EPS,
    EPS_BYTES,
    NUM_PIECES,
    Queue,
    Site,
    Table,
    add_piece,
    best_class,
    left_over,
    list_of,
    place_jobs,
    select_jobs,
    stays,
    wish_of,
)
from partita.kernels import Column, kernel

FLOORS, IN_ORDER, BY_GAIN, TO_TARGETS = range(4)


@kernel
def redo(s: int, queue: Queue, site: Site, table: Table) -> float:
    """Divide one server anew; return what its jobs' choices are worth."""
    # Back to the floors first; what a job has from an earlier division must not bind this one.
    p = site.head[s]
    while p >= 0:
        j = queue.piece_job[p]
        if queue.pieces[j] == 1:
            take(j, table.floor[list_of(j, queue, table)], queue, site, table)
        p = queue.piece_next[p]
    gain_on(s, queue, site, table)
    return value_on(s, queue, site, table)


@kernel
def shift(p: int, to: int, queue: Queue, site: Site, table: Table) -> None:
    """Move the only piece of a job to another server, with its choice."""
    j, s, gpus = queue.piece_job[p], queue.piece_server[p], queue.piece_gpus[p]
    at = queue.choice[j]
    top = wish_of(j, queue, table)
    # The same amounts leave one server and go to the other, at the choice it has now.
    for server, sign in ((s, 1), (to, -1)):
        site.free_gpus[server] += sign * gpus
        site.free_cpus[server] += sign * table.cpus[at] * gpus
        site.free_memory[server] += sign * table.memory[at] * gpus
        site.claim_cpus[server] -= sign * table.cpus[top] * gpus
        site.claim_memory[server] -= sign * table.memory[top] * gpus
    if site.head[s] == p:
        site.head[s] = queue.piece_next[p]
    else:
        q = site.head[s]
        while queue.piece_next[q] != p:
            q = queue.piece_next[q]
        queue.piece_next[q] = queue.piece_next[p]
    queue.piece_next[p] = site.head[to]
    site.head[to] = p
    queue.piece_server[p] = to


@kernel
def exchange(p: int, q: int, hot: int, cold: int, queue: Queue, site: Site, table: Table) -> float:
    """Swap a piece of the hot server with one of the cold (-1 = free GPUs); return their value."""
    # Both move at their floors, the least that they need; then both servers are divided anew.
    floor_p = table.floor[list_of(queue.piece_job[p], queue, table)]
    take(queue.piece_job[p], floor_p, queue, site, table)
    if q >= 0:
        take(
            queue.piece_job[q],
            table.floor[list_of(queue.piece_job[q], queue, table)],
            queue,
            site,
            table,
        )
    shift(p, cold, queue, site, table)
    if q >= 0:
        shift(q, hot, queue, site, table)
    # The gain is that of both servers divided anew, not of the two jobs alone.
    value = redo(hot, queue, site, table) + redo(cold, queue, site, table)
    for s in (hot, cold):  # jobs over several servers may hold more than their floor
        if site.free_cpus[s] < -EPS or site.free_memory[s] < -EPS_BYTES:
            return -1.0e300
    return value


@kernel
def cost_of(p: int, queue: Queue) -> float:
    """Return what moving a piece costs: nothing for a job that starts anyway."""
    j = queue.piece_job[p]
    return 0.0 if queue.fresh[j] else float(queue.move_cost[j])


@kernel
def may_move(p: int, to: int, queue: Queue, site: Site, table: Table) -> bool:
    """Return whether a piece is a whole job that the class of another server can run."""
    j = queue.piece_job[p]
    return bool(queue.pieces[j] == 1 and site.klass[to] == queue.klass[j])


@kernel
def best_exchange(hot: int, cold: int, queue: Queue, site: Site, table: Table) -> bool:
    """Make the swap between two servers that gains most, if one pays; return whether one did."""
    before = value_on(hot, queue, site, table) + value_on(cold, queue, site, table)
    best, best_p, best_q = EPS * before, -1, -1
    p = site.head[hot]
    while p >= 0:
        # Read before a try: swap and undo put both pieces at the head of their lists.
        following = queue.piece_next[p]
        if may_move(p, cold, queue, site, table):
            # Where the GPUs are free the job simply moves; else it needs a partner of its size. Two
            # of one profile are passed over.
            q = site.head[cold] if site.free_gpus[cold] < queue.piece_gpus[p] else -1
            while True:
                after_q = queue.piece_next[q] if q >= 0 else -1
                same = q < 0 or (
                    may_move(q, hot, queue, site, table)
                    and queue.piece_gpus[q] == queue.piece_gpus[p]
                    and queue.profile[queue.piece_job[q]] != queue.profile[queue.piece_job[p]]
                )
                if same and (q >= 0 or site.free_gpus[cold] >= queue.piece_gpus[p]):
                    gain = exchange(p, q, hot, cold, queue, site, table) - before
                    gain -= cost_of(p, queue) + (cost_of(q, queue) if q >= 0 else 0.0)
                    if gain > best:
                        best, best_p, best_q = gain, p, q
                    undo(p, q, hot, cold, queue, site, table)
                if after_q < 0:
                    break
                q = after_q
        p = following
    if best_p >= 0:
        exchange(best_p, best_q, hot, cold, queue, site, table)
        # It restarts now; moving it once more costs nothing further.
        queue.fresh[queue.piece_job[best_p]] = 1
        if best_q >= 0:
            queue.fresh[queue.piece_job[best_q]] = 1
    return best_p >= 0


@kernel
def undo(p: int, q: int, hot: int, cold: int, queue: Queue, site: Site, table: Table) -> None:
    """Take a swap back; the servers are divided as before, their lists in another order."""
    exchange(p, q, cold, hot, queue, site, table)


@kernel
def price_on(s: int, queue: Queue, site: Site, table: Table) -> float:
    """Return the highest weighted gain for its share of the server that a job there still lacks."""
    best = 0.0
    p = site.head[s]
    while p >= 0:
        j, gpus = queue.piece_job[p], queue.piece_gpus[p]
        p = queue.piece_next[p]
        if queue.pieces[j] > 1:
            continue
        at = queue.choice[j]
        now = worth(j, at, queue, table)
        for to in range(at + 1, table.first[list_of(j, queue, table) + 1]):
            cpus = (table.cpus[to] - table.cpus[at]) * gpus / site.cpus[s]
            memory = (table.memory[to] - table.memory[at]) * gpus / site.memory[s]
            gain = worth(j, to, queue, table) - now
            best = max(best, gain / (max(cpus, 0.0) + max(memory, 0.0) + EPS))
    return best


@kernel
def rebalance(limit: int, queue: Queue, site: Site, table: Table) -> None:
    """Swap jobs between the servers where a share is worth most and least, while that pays."""
    for s in range(len(site.klass)):
        up = site.free_gpus[s] >= 0
        site.price[s] = price_on(s, queue, site, table) if up else -1.0
        site.settled[s] = 0
    # The dearest server that is not settled, with the cheapest one of its class. One with no swap
    # that pays is settled for this round.
    for _ in range(limit):
        hot, cold = -1, -1
        for s in range(len(site.klass)):
            if site.price[s] > 0 and not site.settled[s]:
                hot = s if hot < 0 or site.price[s] > site.price[hot] else hot
        for s in range(len(site.klass)):
            if hot >= 0 and s != hot and site.price[s] >= 0 and site.klass[s] == site.klass[hot]:
                cold = s if cold < 0 or site.price[s] < site.price[cold] else cold
        if cold < 0:
            return
        if best_exchange(hot, cold, queue, site, table):
            site.price[hot] = price_on(hot, queue, site, table)
            site.price[cold] = price_on(cold, queue, site, table)
        else:
            site.settled[hot] = 1


@kernel
def may_hold(j: int, gpus: int, queue: Queue, quota: Column) -> bool:
    """Return whether the tenant of a job may hold so many GPUs more."""
    tenant = queue.tenant[j]
    return bool(tenant < 0 or quota[tenant] < 0 or quota[tenant] >= gpus)


@kernel
def hold(j: int, gpus: int, queue: Queue, class_free: Column, quota: Column) -> None:
    """Give GPUs of its class to a job, and charge its tenant."""
    class_free[queue.klass[j]] -= gpus
    tenant = queue.tenant[j]
    if tenant >= 0 and quota[tenant] >= 0:
        quota[tenant] -= gpus


@kernel
def shrink_jobs(
    order: Column, queue: Queue, table: Table, class_free: Column, quota: Column, span: Column
) -> bool:
    """Give jobs with a range fewer GPUs where that lets them run; return whether some still wait.

    Who only waits for the quota of its tenant does not count.
    """
    waiting = False
    for i in range(len(order)):
        j = order[i]
        if queue.klass[j] >= 0:
            continue
        while queue.klass[j] < 0 and queue.gpus[j] > span[2 * j]:
            queue.gpus[j] -= 1
            # Rows of profiles with one GPU less and more are neighbours for a job with a range.
            queue.profile[j] -= 1
            if may_hold(j, queue.gpus[j], queue, quota):
                queue.klass[j] = best_class(j, queue, table, class_free)
        if queue.klass[j] >= 0:
            hold(j, queue.gpus[j], queue, class_free, quota)
        elif may_hold(j, queue.gpus[j], queue, quota):
            waiting = True
    return waiting


@kernel
def grow_jobs(
    order: Column, queue: Queue, table: Table, class_free: Column, quota: Column, span: Column
) -> None:
    """Give free GPUs to jobs with a range, one by one, to whom they speed up most."""
    while True:
        best, most = -1, 0.0
        for i in range(len(order)):
            j = order[i]
            k = queue.klass[j]
            if k < 0 or queue.gpus[j] >= span[2 * j + 1] or class_free[k] <= 0:
                continue
            if not may_hold(j, 1, queue, quota):
                continue
            here = list_of(j, queue, table)
            now = table.fair_speed[here]
            # The list of the next row on the same class: one GPU more.
            gain = table.fair_speed[here + table.num_classes[0]] / now - 1 if now > 0 else 0.0
            if gain > most + EPS:
                best, most = j, gain
        if best < 0:
            return
        queue.gpus[best] += 1
        queue.profile[best] += 1
        hold(best, 1, queue, class_free, quota)


@kernel
def share(
    mode: int,
    order: Column,
    newest: Column,
    queue: Queue,
    site: Site,
    table: Table,
    limits: tuple[Column, Column, Column, int],
) -> None:
    """Select, place and divide; ``limits``: free GPUs by class, quotas, spans of jobs, swaps.

    Spans hold the fewest and the most GPUs of each job, flat; none = no job has a range. A job that
    holds more than it asked for gives them back while others wait.
    """
    class_free, quota, span, swaps = limits
    select_jobs(order, queue, site, table, class_free, quota)
    # Nobody grows while somebody waits.
    if len(span) > 0 and not shrink_jobs(order, queue, table, class_free, quota, span):
        grow_jobs(order, queue, table, class_free, quota, span)
    place_jobs(newest, queue, site, table, mode != FLOORS)
    if mode == FLOORS:
        take_floors(order, queue, site, table)
    elif mode == IN_ORDER:
        divide_in_order(newest, queue, site, table)
    else:
        divide_by_gain(order, queue, site, table, mode == TO_TARGETS)
        rebalance(swaps, queue, site, table)


@kernel
def greedy_server(j: int, queue: Queue, site: Site, table: Table) -> int:
    """Return the server where the whole ideal demand fits with the least left over, -1 = none."""
    best, best_left, n = -1, 0.0, queue.gpus[j]
    for s in range(len(site.klass)):
        if site.klass[s] != queue.klass[j] or site.free_gpus[s] < n:
            continue
        left = left_over(j, s, n, queue, site, table)
        if left >= -EPS and (best < 0 or left < best_left - EPS):
            best, best_left = s, left
    return best


@kernel
def greedy_stays(j: int, queue: Queue, site: Site, table: Table) -> bool:
    """Return whether a job's ideal demand fits where it runs, given who was placed before."""
    if not stays(j, queue, site):
        return False
    for p in range(queue.held_first[j], queue.held_first[j + 1]):
        s, gpus = queue.held_server[p], queue.held_gpus[p]
        if site.klass[s] != queue.klass[j] or site.free_gpus[s] < gpus:
            return False
        if left_over(j, s, gpus, queue, site, table) < -EPS:
            return False
    return True


@kernel
def greedy_split(j: int, queue: Queue, site: Site, table: Table) -> bool:
    """Place a job over several servers with its ideal demand; return whether it fits."""
    begin = queue.count[NUM_PIECES]
    left = queue.gpus[j]
    for s in range(len(site.klass)):
        gpus = 0
        if site.klass[s] == queue.klass[j]:
            while gpus < min(left, site.free_gpus[s]) and (
                left_over(j, s, gpus + 1, queue, site, table) >= -EPS
            ):
                gpus += 1
        if gpus > 0:
            add_piece(j, s, gpus, queue, site, table)
            left -= gpus
        if left == 0:
            return True
    # It does not fit: take its pieces off again, in full.
    top = table.first[list_of(j, queue, table) + 1] - 1
    for p in range(begin, queue.count[NUM_PIECES]):
        s, gpus = queue.piece_server[p], queue.piece_gpus[p]
        site.free_gpus[s] += gpus
        site.claim_cpus[s] -= table.cpus[top] * gpus
        site.claim_memory[s] -= table.memory[top] * gpus
    queue.count[NUM_PIECES] = begin
    queue.pieces[j] = 0
    return False


@kernel
def greedy_place(j: int, queue: Queue, site: Site, table: Table) -> bool:
    """Place a job with its ideal demand on its class; return whether it fits."""
    if greedy_stays(j, queue, site, table):
        for p in range(queue.held_first[j], queue.held_first[j + 1]):
            add_piece(j, queue.held_server[p], queue.held_gpus[p], queue, site, table)
        return True
    s = greedy_server(j, queue, site, table)
    if s >= 0:
        add_piece(j, s, queue.gpus[j], queue, site, table)
        return True
    return queue.gpus[j] > 1 and greedy_split(j, queue, site, table)


@kernel
def greedy_serve(
    j: int, queue: Queue, site: Site, table: Table, class_free: Column, quota: Column
) -> bool:
    """Give a job its ideal demand on the first class that has it; return whether one has.

    The class on which it runs comes first: a move costs a restart.
    """
    if not may_hold(j, queue.gpus[j], queue, quota):
        return False
    classes = table.num_classes[0]
    held = -1
    if stays(j, queue, site):
        held = site.klass[queue.held_server[queue.held_first[j]]]
    for turn in range(-1, classes):
        k = held if turn < 0 else turn
        if k < 0 or (turn == held and turn >= 0):
            continue
        if not queue.may_run[j * classes + k] or class_free[k] < queue.gpus[j]:
            continue
        # Set before it is known to fit, since the choices of a job depend on its class.
        queue.klass[j] = k
        if greedy_place(j, queue, site, table):
            hold(j, queue.gpus[j], queue, class_free, quota)
            queue.choice[j] = table.first[list_of(j, queue, table) + 1] - 1
            return True
    queue.klass[j] = -1
    return False


@kernel
def take_all_off(queue: Queue, site: Site, class_free: Column, quota: Column) -> None:
    """Take every job off its servers again."""
    for p in range(queue.count[NUM_PIECES]):
        site.free_gpus[queue.piece_server[p]] += queue.piece_gpus[p]
    queue.count[NUM_PIECES] = 0
    for s in range(len(site.klass)):
        site.claim_cpus[s] = 0.0
        site.claim_memory[s] = 0.0
    for j in range(len(queue.klass)):
        if queue.klass[j] >= 0:
            hold(j, -queue.gpus[j], queue, class_free, quota)
        queue.klass[j] = -1
        queue.choice[j] = -1
        queue.pieces[j] = 0


@kernel
def is_moved(j: int, queue: Queue, site: Site) -> bool:
    """Return whether a job that may stay was placed on other servers than it holds."""
    if queue.klass[j] < 0 or not stays(j, queue, site):
        return False
    begin = queue.held_first[j]
    if queue.held_first[j + 1] - begin != queue.pieces[j]:
        return True
    for i in range(queue.pieces[j]):
        p = queue.first[j] + i
        if queue.piece_server[p] != queue.held_server[begin + i]:
            return True
        if queue.piece_gpus[p] != queue.held_gpus[begin + i]:
            return True
    return False


@kernel
def serve_again(
    order: Column,
    rank: Column,
    queue: Queue,
    site: Site,
    table: Table,
    class_free: Column,
    quota: Column,
) -> bool:
    """Place those who keep their place, then the other jobs that run; return whether all fit.

    ``rank`` is 2 for who keeps its place, 1 for who runs, 0 for who does not.
    """
    for least in (2, 1):
        for i in range(len(order)):
            j = order[i]
            if rank[j] == least and not greedy_serve(j, queue, site, table, class_free, quota):
                return False
    return True


@kernel
def share_greedily(
    order: Column,
    rank: Column,
    queue: Queue,
    site: Site,
    table: Table,
    class_free: Column,
    quota: Column,
) -> None:
    """Give each job in order its ideal demand or nothing, and move as few as that lets.

    The order alone says who runs. It would also let a job that starts take the room of one behind
    it, which then moves although both have room elsewhere. So those who run and hold a place keep
    it, and the others are placed around them; where one of these does not fit, the last holders
    give up their claim, ever more of them, until all fit. With no claims left this is the order
    again. ``rank`` is the room that `serve_again` needs, by job.
    """
    moved = False
    for i in range(len(order)):
        greedy_serve(order[i], queue, site, table, class_free, quota)
    for i in range(len(order)):
        j = order[i]
        moved = moved or is_moved(j, queue, site)
        rank[j] = 0
        if queue.klass[j] >= 0:
            rank[j] = 2 if stays(j, queue, site) else 1
    if not moved:
        return
    last, step = len(order), 1
    take_all_off(queue, site, class_free, quota)
    while not serve_again(order, rank, queue, site, table, class_free, quota) and last > 0:
        given_up = 0
        while last > 0 and given_up < step:
            last -= 1
            if rank[order[last]] == 2:
                rank[order[last]] = 1
                given_up += 1
        step *= 2
        take_all_off(queue, site, class_free, quota)
    for i in range(len(order)):
        if queue.klass[order[i]] < 0:  # one that does not run by the order alone may fit now
            greedy_serve(order[i], queue, site, table, class_free, quota)
