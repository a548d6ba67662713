"""List scheduling under memory limits: the common part of m-ETF and m-SCT.

Time goes from event to event. An op is ready when all it reads is made; on device d its inputs are
there at ``arrive(v, d) = max over inputs u of end(u) + transfer(u, d)``. At each moment the idle
devices, one after the other, take the first ready op that has arrived and fits; ready ops are
ranked by when they became ready (first come, first served) or by a priority.

m-SCT adds favourite children. An idle device whose last op has a favourite child that is ready,
fits here, and can start nowhere earlier, is *awake*: it takes only that child, or an *urgent* op,
one that waits in vain because no device that has room for it is later than this one.

Complexity: O(ops x ready ops x devices + edges x devices), and O(edges x devices) for the plain
list, where each op in turn goes where it ends first.
"""

from typing import NamedTuple

import numpy as np

from partita.core.columns import Array
from partita.kernels import Column, Number, kernel, run
from partita.planners.baechi.instance import LONG, Instance

READY, PLACED, REFUSED, TURN = 0, 1, 2, 3
NEVER = np.inf


class State(NamedTuple):
    """What a schedule is built in; ``n`` ops, ``D`` devices.

    Attributes:
        device_of: Device of each op; -1 = not placed.
        start: When it starts.
        end: When it ends.
        order: The ops as they were placed.
        count: Ready ops, placed ops, the op whose inputs found no room (-1 = none), ops that became
            ready so far.
        free: When each device is idle next.
        busy: Whether it runs an op that has not ended.
        last: The op it ran last; -1 = none.
        awake: The favourite that it waits for; -1 = none.
        used: Bytes it holds.
        peak: The most it ever held.
        reserved: Bytes promised to ops of groups that have their home there.
        channel: When its channel is idle.
        trial: Scratch for what ``channel`` would become.
        home: Device of each group; -1 = none yet.
        waiting: In-edges of each op whose source has not ended.
        ready: The ready ops, first come first or by rank.
        rank: Place of each op among the ready ones.
        arrive: When the inputs of op v can be on device d, at ``v * D + d``.
        copies: Bytes that have to be copied for it.
        got: When tensor t is on device d, at ``t * D + d``; -1 = not yet.
    """

    device_of: Column
    start: Column
    end: Column
    order: Column
    count: Column
    free: Column
    busy: Column
    last: Column
    awake: Column
    used: Column
    peak: Column
    reserved: Column
    channel: Column
    trial: Column
    home: Column
    waiting: Column
    ready: Column
    rank: Column
    arrive: Column
    copies: Column
    got: Column


class Schedule(NamedTuple):
    """Ops with their devices, in the order in which they were placed.

    Attributes:
        device_of: Device of each forward op; -1 = stranded.
        order: The placed ops.
        start: When each op starts; NaN where it is stranded.
        makespan: When the last one ends.
        refused: The op whose inputs found no room although it was let in; -1 = none.
    """

    device_of: Array
    order: Array
    start: Array
    makespan: float
    refused: int

    @property
    def complete(self) -> bool:
        """Whether every op is placed."""
        return len(self.order) == len(self.device_of)


def new_state(g: Instance, rank: Array | None) -> State:
    """Return the state before the first op; without ranks it is first come, first served."""
    n, size = g.num_ops, g.num_devices
    return State(
        device_of=np.full(n, -1, dtype=np.int64),
        start=np.full(n, np.nan),
        end=np.full(n, np.nan),
        order=np.zeros(n, dtype=np.int64),
        count=np.array([0, 0, -1, 0], dtype=np.int64),
        free=np.zeros(size),
        busy=np.zeros(size, dtype=np.int64),
        last=np.full(size, -1, dtype=np.int64),
        awake=np.full(size, -1, dtype=np.int64),
        used=np.zeros(size),
        peak=np.zeros(size),
        reserved=np.zeros(size),
        channel=np.zeros(size),
        trial=np.zeros(size),
        home=np.full(len(g.group_kept), -1, dtype=np.int64),
        waiting=np.diff(g.pred_ptr),
        ready=np.zeros(n, dtype=np.int64),
        rank=np.zeros(n) if rank is None else rank.astype(np.float64),
        arrive=np.zeros(n * size),
        copies=np.zeros(n * size),
        got=np.full(g.num_tensors * size if g.once else 1, -1.0),
    )


def event_schedule(
    g: Instance,
    *,
    rank: Array | None = None,
    favourite: Array | None = None,
    visit: Array | None = None,
) -> Schedule:
    """Return the schedule that goes from event to event.

    Args:
        g: The instance.
        rank: Ready ops with lower ranks go first; ``None`` = first come, first served.
        favourite: The favourite child of each op, -1 = none; ``None`` = m-ETF.
        visit: The order in which idle devices choose; ``None`` = as they are numbered.
    """
    state = new_state(g, rank)
    children = np.full(g.num_ops, -1, dtype=np.int64) if favourite is None else favourite
    turns = np.arange(g.num_devices) if visit is None else visit
    flags = np.array([rank is None, favourite is not None], dtype=np.int64)
    run(_event_loop, 8 * g.steps, (g, children, turns, flags), (state,), LONG)
    return schedule_of(state)


def plain_schedule(g: Instance, sequence: Array, *, price: float = 0.0) -> Schedule:
    """Return the schedule that puts each op in turn where it ends first.

    Args:
        g: The instance.
        sequence: All ops along the data.
        price: Seconds that a copied byte counts like, where memory is scarce.
    """
    state = new_state(g, None)
    run(_plain_loop, 4 * g.steps, (g, sequence, price), (state,), LONG)
    return schedule_of(state)


def schedule_of(s: State) -> Schedule:
    """Return what a state has come to."""
    placed = int(s.count[PLACED])
    order = s.order[:placed].copy()
    makespan = float(s.end[order].max()) if placed else 0.0
    return Schedule(s.device_of, order, s.start, makespan, int(s.count[REFUSED]))


@kernel
def transfer(g: Column, row: int, source: int, target: int) -> Number:
    """Return the seconds of in-edge ``row`` between two devices."""
    given = g.given[row]
    if given == given:  # noqa: PLR0124 (NaN is not equal to itself)
        return given
    pair = source * g.num_devices + target
    return g.latency[pair] + g.size[row] / g.bandwidth[pair]


@kernel
def look(g: Column, s: Column, op: int, device: int) -> None:
    """Fill in when an op's inputs can be on a device, and what has to be copied."""
    arrive, copies = 0.0, 0.0
    if g.sequential:
        s.trial[device] = s.channel[device]
        for row in range(g.pred_ptr[op], g.pred_ptr[op + 1]):
            other = s.device_of[g.pred[row]]
            s.trial[other] = s.channel[other]
    for row in range(g.pred_ptr[op], g.pred_ptr[op + 1]):
        source = g.pred[row]
        other = s.device_of[source]
        at = s.end[source]
        if other != device:
            known = s.got[g.tensor[row] * g.num_devices + device] if g.once else -1.0
            if known < 0:
                copies += g.size[row]
            if not g.sequential:
                at += transfer(g, row, other, device)
            elif known < 0:
                seconds = transfer(g, row, other, device)
                send = max(at, s.trial[other])
                s.trial[other] = send + seconds
                s.trial[device] = max(send, s.trial[device]) + seconds
                at = s.trial[device]
            else:
                at = known
        arrive = max(arrive, at)
    s.arrive[op * g.num_devices + device] = arrive
    s.copies[op * g.num_devices + device] = copies


@kernel
def _fetch(g: Column, s: Column, op: int, device: int) -> None:
    """Bring an op's inputs to a device: note which are there, and until when channels are busy."""
    for row in range(g.pred_ptr[op], g.pred_ptr[op + 1]):
        source = g.pred[row]
        other = s.device_of[source]
        place = g.tensor[row] * g.num_devices + device
        if other == device or s.got[place] >= 0:
            continue
        seconds = transfer(g, row, other, device)
        s.got[place] = s.end[source] + seconds
        if g.sequential:
            send = max(s.end[source], s.channel[other])
            s.channel[other] = send + seconds
            s.channel[device] = max(send, s.channel[device]) + seconds
            s.got[place] = s.channel[device]


@kernel
def fits(g: Column, s: Column, op: int, device: int) -> Number:
    """Return whether an op may run on a device and has room there, with all of its group."""
    cell = op * g.num_devices + device
    if not g.may[cell]:
        return False
    home = s.home[g.group[op]]
    if home >= 0 and home != device:
        return False
    copies = s.copies[cell]
    need = s.used[device] + s.reserved[device] + copies + g.scratch[op]
    if home < 0:
        need += g.group_kept[g.group[op]]
    return need <= g.limit[device] and s.peak[device] + copies + g.held[op] <= g.limit[device]


@kernel
def place(g: Column, s: Column, op: int, device: int) -> None:
    """Put an op on a device: its inputs, its time and its memory."""
    cell = op * g.num_devices + device
    if g.once:
        look(g, s, op, device)
        _fetch(g, s, op, device)
    group = g.group[op]
    if s.home[group] < 0:
        s.home[group] = device
        s.reserved[device] += g.group_kept[group]
    s.reserved[device] -= g.kept[op]
    copies = s.copies[cell]
    s.peak[device] = max(s.peak[device], s.used[device] + g.kept[op] + g.scratch[op])
    s.used[device] += g.kept[op]
    s.peak[device] = max(s.peak[device], s.used[device] + copies)
    if g.stays:
        s.used[device] += copies
    begin = max(s.free[device], s.arrive[cell])
    s.device_of[op] = device
    s.start[op] = begin
    s.end[op] = begin + g.seconds[g.class_of[device] * g.num_ops + op]
    s.free[device] = s.end[op]
    s.busy[device] = 1
    s.last[device] = op
    s.awake[device] = -1
    s.order[s.count[PLACED]] = op
    s.count[PLACED] += 1


@kernel
def enlist(g: Column, s: Column, op: int, fifo: int) -> None:
    """Put an op among the ready ones, where its rank says."""
    if fifo:
        s.rank[op] = s.count[TURN]
    s.count[TURN] += 1
    at = s.count[READY]
    while at > 0 and s.rank[s.ready[at - 1]] > s.rank[op]:
        s.ready[at] = s.ready[at - 1]
        at -= 1
    s.ready[at] = op
    s.count[READY] += 1
    if not g.once:
        for device in range(g.num_devices):
            look(g, s, op, device)


@kernel
def _discharge(s: Column, op: int) -> None:
    """Take an op out of the ready ones."""
    at = 0
    while s.ready[at] != op:
        at += 1
    s.count[READY] -= 1
    while at < s.count[READY]:
        s.ready[at] = s.ready[at + 1]
        at += 1


@kernel
def inform_readers(g: Column, s: Column, op: int, fifo: int) -> None:
    """Let the readers of an op that has ended become ready, where they wait for no other."""
    for row in range(g.succ_ptr[op], g.succ_ptr[op + 1]):
        reader = g.succ[row]
        s.waiting[reader] -= 1
        if s.waiting[reader] == 0:
            enlist(g, s, reader, fifo)


@kernel
def _settle(g: Column, s: Column, now: float, fifo: int) -> None:
    """Let the ops that end now end, device by device, and their readers become ready."""
    for device in range(g.num_devices):
        if s.busy[device] and s.free[device] <= now:
            s.busy[device] = 0
            inform_readers(g, s, s.last[device], fifo)
        if not s.busy[device]:
            s.free[device] = max(s.free[device], now)


@kernel
def _when(g: Column, s: Column, op: int, device: int) -> Number:
    """Return when an op could start on a device; never where it does not fit."""
    if g.once:
        look(g, s, op, device)
    if not fits(g, s, op, device):
        return NEVER
    return max(s.arrive[op * g.num_devices + device], s.free[device])


@kernel
def _urgent(g: Column, s: Column, op: int) -> Number:
    """Return from when on waiting gains an op nothing: the latest of its devices is as early."""
    latest = -1.0
    for device in range(g.num_devices):
        at = _when(g, s, op, device)
        if at < NEVER:
            latest = max(latest, at)
    return latest if latest >= 0 else NEVER


@kernel
def wake(g: Column, s: Column, favourite: Column, device: int) -> None:
    """Let an idle device wait for the favourite child of its last op, if no other is better."""
    s.awake[device] = -1
    if s.last[device] < 0:
        return
    child = favourite[s.last[device]]
    if child < 0 or s.waiting[child] > 0 or s.device_of[child] >= 0:
        return
    here = _when(g, s, child, device)
    if here == NEVER:
        return
    for other in range(g.num_devices):
        if _when(g, s, child, other) < here:
            return
    s.awake[device] = child


@kernel
def choose(g: Column, s: Column, device: int, now: float) -> tuple[int, float]:
    """Return the op that an idle device takes now, -1 for none, and when it looks again."""
    if s.awake[device] >= 0:
        if s.device_of[s.awake[device]] < 0:
            return _choose_awake(g, s, device, now)
        s.awake[device] = -1
    later = NEVER
    for index in range(s.count[READY]):
        op = s.ready[index]
        at = _when(g, s, op, device)
        if at <= now:
            return op, now
        later = min(later, at)
    return -1, later


@kernel
def _choose_awake(g: Column, s: Column, device: int, now: float) -> tuple[int, float]:
    """Return what a device takes that waits for a favourite: an urgent op, or the favourite."""
    first, later = -1, NEVER
    for index in range(s.count[READY]):
        op = s.ready[index]
        if _when(g, s, op, device) == NEVER:
            continue
        at = _urgent(g, s, op)
        if at < later:
            first, later = op, at
    if later <= now:
        return first, now
    child = s.awake[device]
    at = _when(g, s, child, device)
    if at <= now:
        return child, now
    return -1, min(later, at)


@kernel
def give(g: Column, s: Column, visit: Column, turn: int, op: int, device: int) -> Number:
    """Put a ready op on a device; return whether one before ``turn`` waits for a favourite."""
    _discharge(s, op)
    place(g, s, op, device)
    for before in range(turn):  # noqa: SIM110 (kernels have no generators)
        if s.awake[visit[before]] >= 0:
            return True
    return False


@kernel
def _take_turns(g: Column, s: Column, visit: Column, now: float) -> Number:
    """Let each idle device take an op; return when something happens next."""
    following = NEVER
    turn = 0
    while turn < g.num_devices:
        device = visit[turn]
        turn += 1
        if s.busy[device]:
            following = min(following, s.free[device])
            continue
        op, later = choose(g, s, device, now)
        following = min(following, later)
        if op < 0:
            continue
        if give(g, s, visit, turn, op, device):
            turn, following = 0, NEVER
        following = min(following, s.free[device])
    return following


@kernel
def _event_loop(g: Column, favourite: Column, visit: Column, flags: Column, s: Column) -> None:
    """Schedule from event to event."""
    fifo, has_favourites = flags[0], flags[1]
    for op in range(g.num_ops):
        if s.waiting[op] == 0:
            enlist(g, s, op, fifo)
    now = 0.0
    while now < NEVER:
        _settle(g, s, now, fifo)
        if has_favourites:
            for device in range(g.num_devices):
                if not s.busy[device]:
                    wake(g, s, favourite, device)
        now = _take_turns(g, s, visit, now)


@kernel
def _plain_loop(g: Column, sequence: Column, price: float, s: Column) -> None:
    """Put each op in turn where it ends first; ties where less is copied, then by device."""
    for op in sequence:
        best, least, fewest = -1, NEVER, NEVER
        for device in range(g.num_devices):
            look(g, s, op, device)
            at = _when(g, s, op, device)
            if at == NEVER:
                continue
            copies = s.copies[op * g.num_devices + device]
            at += g.seconds[g.class_of[device] * g.num_ops + op] + price * copies
            if at < least or (at == least and copies < fewest):
                best, least, fewest = device, at, copies
        if best < 0:
            s.count[REFUSED] = op
            return
        place(g, s, op, best)
