"""Plays a Program on a cluster: when does each instruction start and end.

Compute runs one at a time in list order. A SEND is issued when the compute before it has ended and
occupies one port out and one port in for as long as it takes; ports serve in order of issue, ties
by device. A collective is issued when all members have come to it and occupies the ports of its
ring. Issued at one time, SENDs go first, then collectives in the order of the lists, then by
device. A compute instruction waits for its RECVs and reductions.

Blocking transfers hold both devices. The messages that stand together in a list are one batch, as
in ``batch_isend_irecv``: all are posted when the device comes to them, each starts when both ends
have posted it, and the device goes on when all have ended. Opposite messages of a pair travel
together, so a pipeline exchanges an activation for a gradient in the time of the larger.
"""

import dataclasses
import heapq

import numpy as np

from partita.core.cluster import Cluster, Links, ring_order
from partita.core.columns import Array, derived
from partita.core.program import FIRST_COLLECTIVE, Kind, Program, TransferMode
from partita.core.timeline import Timeline, TimelineOrigin
from partita.errors import InvalidInputError
from partita.kernels import Column, kernel, run
from partita.program.matching import Matching, match
from partita.program.order import longest_levels

_UPDATE, _SEND, _RECV = int(Kind.UPDATE), int(Kind.SEND), int(Kind.RECV)


def repeat_program(program: Program, times: int) -> tuple[Program, Array]:
    """Return a Program that does its step several times, and the row that each row repeats."""
    parts = [np.arange(a, b) for a, b in zip(program.ptr[:-1], program.ptr[1:], strict=True)]
    rows = np.concatenate([np.tile(part, times) for part in parts])
    copy = np.concatenate([np.repeat(np.arange(times), len(part)) for part in parts])
    count = program.num_microbatches
    # Each copy has microbatches of its own, so that messages and waits match within a copy.
    turn = program.microbatch[rows]
    shifted = np.where(turn < 0, turn, turn + copy * count)
    names = ("kind", "stage", "tensor", "gradient", "peer", "group", "bucket", "bytes", "version")
    repeated = dataclasses.replace(
        program,
        ptr=program.ptr * times,
        microbatch=shifted,
        microbatch_sizes=np.tile(program.microbatch_sizes, times),
        **{name: getattr(program, name)[rows] for name in names},
    )
    return repeated, rows


def play(
    program: Program,
    cluster: Cluster,
    seconds: Array,
    transfers: TransferMode = TransferMode.OVERLAPPED,
) -> Timeline:
    """Return the timeline of a Program whose instructions take the given seconds.

    Raises:
        InvalidInputError: The Program cannot run to its end; names what is stuck.
    """
    start, end, cause = _times(program, cluster, seconds, transfers, len(program))
    instruction = np.arange(len(program), dtype=np.int32)
    for column in (start, end, cause, instruction):
        column.flags.writeable = False
    return Timeline(
        origin=TimelineOrigin.SIMULATED,
        devices=program.devices,
        device=program.device,
        instruction=instruction,
        kind=program.kind,
        stage=program.stage,
        microbatch=program.microbatch,
        peer=program.peer,
        start_s=start,
        end_s=end,
        bytes=program.bytes,
        cause=cause,
    )


def step_lengths(program: Program, cluster: Cluster, seconds: Array) -> Array:
    """Return the length of a step for each row of durations: that of ``play``, and no timeline.

    Raises:
        InvalidInputError: The Program cannot run to its end; names what is stuck.
    """
    overlapped = TransferMode.OVERLAPPED
    ends = (_times(program, cluster, row, overlapped, seconds.size)[1] for row in seconds)
    return np.array([end.max(initial=0.0) for end in ends])


def _times(
    program: Program, cluster: Cluster, seconds: Array, transfers: TransferMode, effort: int
) -> tuple[Array, Array, Array]:
    """Return start, end and cause of every row; ``effort`` = rows that are played in all."""
    matching = match(program)
    out_port, in_port, num_ports, by_time = _kept_ports(program, cluster)
    rows, devices, joints = len(program), len(program.devices), len(matching.joint_size)
    start, end = np.zeros(rows), np.full(rows, -1.0)
    cause, position = np.full(rows, -1, dtype=np.int32), program.ptr[:-1].copy()
    blocking = transfers is TransferMode.BLOCKING
    run(
        play_rows,
        effort,
        [
            *(program.ptr, program.kind, seconds, program.device, out_port, in_port),
            np.array([int(by_time), int(joints > 0), int(blocking)]),
            *(matching.partner, matching.joint, matching.joint_size),
            *(matching.first_wait, matching.next_wait, collective_turns(program, matching)),
        ],
        [start, end, cause, position, *_scratch(rows, devices, joints, num_ports)],
    )
    stuck = np.flatnonzero(position < program.ptr[1:])
    if len(stuck):
        _refuse_stuck(program, _waiting_rows(program, position, end, stuck, blocking=blocking))
    # A RECV ends with its message, which may have come before the RECV was reached.
    np.maximum(start, end, out=end)
    return start, end, cause


def _waiting_rows(
    program: Program, position: Array, end: Array, stuck: Array, *, blocking: bool
) -> list[int]:
    """Return the row that each stuck device waits at: with blocking transfers its open message."""
    rows = []
    for device in stuck.tolist():
        first, row = int(program.ptr[device]), int(position[device])
        # A blocking device runs on over its batch of messages; the one that holds it stands before
        # its position.
        unfinished = first + np.flatnonzero(end[first:row] < 0)
        rows.append(int(unfinished[0]) if blocking and len(unfinished) else row)
    return rows


def _refuse_stuck(program: Program, stuck: list[int]) -> None:
    where = "; ".join(program.describe(row) for row in stuck[:4])
    more = f" and {len(stuck) - 4} more" if len(stuck) > 4 else ""
    raise InvalidInputError(f"the program cannot go on, these wait for each other: {where}{more}")


def _scratch(rows: int, devices: int, joints: int, ports: int) -> list[Array]:
    """Return working columns of the kernel: by device, by joint instruction, by port."""
    return [
        np.zeros(devices),
        *(np.full(devices, -1, dtype=np.int64) for _ in range(3)),
        np.zeros(devices, dtype=np.int64),
        np.zeros(joints, dtype=np.int64),
        *(np.zeros(joints) for _ in range(2)),
        *(np.full(joints, -1, dtype=np.int64) for _ in range(2)),
        np.full(rows if joints else 0, -1, dtype=np.int64),
        np.zeros(ports),
        np.full(ports, -1, dtype=np.int64),
    ]


def program_ports(program: Program, cluster: Cluster) -> tuple[Array, Array]:
    """Return the ports that each SEND and collective member occupies; -1 = none."""
    first, second, _, _ = _kept_ports(program, cluster)
    return first, second


def _kept_ports(program: Program, cluster: Cluster) -> tuple[Array, Array, int, bool]:
    """Return the ports of a Program, found once and kept with it."""
    # The key is good as long as the cluster lives, and it is kept with its ports.
    _, ports = derived(program, ("ports", id(cluster)), lambda: (cluster, _ports(program, cluster)))
    return ports


def _ports(program: Program, cluster: Cluster) -> tuple[Array, Array, int, bool]:
    """Return the ports of every row, how many, and whether they must be served by time of issue.

    A SEND has one port out and one in; a collective member the two ports of its place in the ring.
    Ports in are numbered after ports out; -1 = none. Where every port serves one ordered pair of
    devices its transfers come in order anyway.
    """
    to_cluster = np.array([cluster.index_of[name] for name in program.devices], dtype=np.int32)
    sends = np.flatnonzero(program.kind == Kind.SEND)
    links = cluster.links(to_cluster[program.device[sends]], to_cluster[program.peer[sends]])
    collectives = np.flatnonzero(program.kind >= FIRST_COLLECTIVE)
    after = _ring_successor(program, collectives, to_cluster)
    ring = cluster.links(to_cluster[program.device[collectives]], after)
    # The last cell takes the writes of rows whose port is -1, and is cleared after.
    used = np.zeros(2 * cluster.num_ports + 1, dtype=bool)
    pairs = []
    for rows, way in ((sends, links), (collectives, ring)):
        inward = np.where(way.in_port < 0, -1, cluster.num_ports + way.in_port)
        pairs.append((rows, way.out_port, inward))
        used[way.out_port] = True
        used[inward] = True
    used[-1] = False
    # Ports that nobody uses get no number: the kernel's columns stay as small as the Program.
    number = (np.cumsum(used) - 1).astype(np.int32)
    number[-1] = -1
    first = np.full(len(program), -1, dtype=np.int32)
    second = first.copy()
    for rows, outward, inward in pairs:
        first[rows], second[rows] = number[outward], number[inward]
    by_time = len(collectives) > 0 or _any_port_shared(program, sends, links)
    return first, second, max(1, int(used.sum())), by_time


def _any_port_shared(program: Program, sends: Array, links: Links) -> bool:
    """Return whether some port serves more than one ordered pair of devices."""
    if not len(sends):
        return False
    size = len(program.devices)
    pair = program.device[sends].astype(np.int64) * size + program.peer[sends]
    # One SEND stands for each ordered pair; a port that two of them name is shared.
    some = np.full(size * size, -1, dtype=np.int64)
    some[pair] = np.arange(len(pair))
    one_each = some[some >= 0]
    return any(
        len(np.unique(port[one_each])) != len(one_each)
        for port in (links.out_port, links.in_port)
        # A cluster has ports in for all links or for none (a matrix).
        if port[0] >= 0
    )


def collective_turns(program: Program, matching: Matching) -> Array:
    """Return the place of each joint number among collectives: as in all lists, then by device."""
    size = len(matching.joint_size)
    rows = np.flatnonzero(program.kind >= FIRST_COLLECTIVE)
    if not len(rows):
        return np.zeros(size, dtype=np.int64)
    number, device = matching.joint[rows], program.device[rows]
    # Neighbours in a device's list of collectives: their order must hold in the order of service.
    follows = device[1:] == device[:-1]
    source, target = number[:-1][follows], number[1:][follows]
    # Sorted by level, every collective comes after those that any list has before it.
    level, _ = longest_levels(source, target, size)
    first = np.full(size, len(program.devices), dtype=np.int64)
    np.minimum.at(first, number, device)
    turn = np.empty(size, dtype=np.int64)
    turn[np.lexsort((first, level))] = np.arange(size)
    return turn


def _ring_successor(program: Program, rows: Array, to_cluster: Array) -> Array:
    """Return the cluster's device after each member in the ring of its group."""
    table: dict[tuple[int, int], int] = {}
    for group in np.unique(program.group[rows]).tolist():
        members = program.group_devices[program.group_ptr[group] : program.group_ptr[group + 1]]
        ring = ring_order(to_cluster[members]).tolist()
        table |= {(group, a): b for a, b in zip(ring, [*ring[1:], ring[0]], strict=True)}
    device = to_cluster[program.device[rows]]
    pairs = zip(program.group[rows].tolist(), device.tolist(), strict=True)
    return np.array([table[pair] for pair in pairs], dtype=np.int64)


@kernel(allocates=True)
def play_rows(  # noqa: C901, PLR0912, PLR0913, PLR0915, PLR0917 (one compiled event loop)
    ptr: Column,
    kind: Column,
    seconds: Column,
    device_of: Column,
    out_port: Column,
    in_port: Column,
    flags: Column,
    partner: Column,
    joint: Column,
    joint_size: Column,
    first_wait: Column,
    next_wait: Column,
    turn: Column,
    start: Column,
    end: Column,
    cause: Column,
    position: Column,
    clock: Column,
    last: Column,
    blocked: Column,
    stack: Column,
    held: Column,
    come: Column,
    ready: Column,
    longest: Column,
    reason: Column,
    head: Column,
    chain: Column,
    free: Column,
    holder: Column,
) -> None:
    """Run every device as far as it goes, then serve the earliest transfer, until all is done.

    Times are in seconds from the start of the step; -1 stands for no row, no port, no member.

    - Inputs by row: ``kind``, ``seconds``, ``device_of``, the ports ``out_port`` and ``in_port``,
      and from the matching ``partner``, ``joint`` (empty where there are no groups), ``first_wait``
      and ``next_wait``. Rows of device d are ``ptr[d]`` to ``ptr[d + 1]``.
    - Inputs by joint number: ``joint_size``, and ``turn``, which orders collectives that are issued
      at one time. ``flags``: ports are served by time; there are joint instructions; transfers are
      blocking.
    - Results by row: ``start``, ``end`` (-1 until it is known), and ``cause``, the row whose end
      set the start.
    - By device: ``position`` is the next row; ``clock`` the time at which the device is free and
      ``last`` the row that made it so, its last compute row unless transfers block;
      ``blocked`` is 1 for a device that waits for the end of a transfer; ``stack`` holds the
      ``height`` devices that can go on; ``held`` counts posted messages that hold the device.
    - By joint number: ``come`` counts the members that have arrived, ``ready`` is when the last of
      them did and ``reason`` what made it late, ``longest`` the seconds of the slowest member.
      ``head`` and, by row, ``chain`` list the members that have arrived, the latest first.
    - By port: ``free`` is when its last transfer ends, ``holder`` the row of that transfer.

    A device is on the stack, blocked, waiting in a joint compute, or done: each at most once, so
    that the stack never holds more than all devices.
    """
    num_devices = len(ptr) - 1
    height = num_devices
    for d in range(num_devices):
        # Device 0 is on top and runs first.
        stack[d] = num_devices - 1 - d
    # Issue time; device, for collectives one after all; place among those of one device; row.
    # One entry, taken out at once, tells the compiler the type of the heap.
    pending = [(0.0, 0, 0, 0)]
    heapq.heappop(pending)
    while height > 0 or len(pending) > 0:
        # Transfers are served only when no device can run. From there a device goes on after some
        # pending transfer has ended, so nothing can still be issued before the earliest one, and
        # ports serve in order of issue.
        if height == 0:
            issued, _, _, row = heapq.heappop(pending)
            begin = issued
            why = reason[joint[row]] if kind[row] > _RECV else cause[row]
            # The entry of a collective is the member that came last, which heads the chain of all
            # of them; a SEND is alone. The transfer begins when every port of every member is free.
            members = row
            while members >= 0:
                for port in (out_port[members], in_port[members]):
                    if port >= 0 and free[port] > begin:
                        begin = free[port]
                        why = holder[port]
                members = chain[members] if kind[row] > _RECV else -1
            finish = begin + (longest[joint[row]] if kind[row] > _RECV else seconds[row])
            # Now all ports are known to be free together: occupy them and write the times.
            members = row
            while members >= 0:
                start[members] = begin
                end[members] = finish
                cause[members] = why
                for port in (out_port[members], in_port[members]):
                    if port >= 0:
                        free[port] = finish
                        holder[port] = members
                # The end of a message is known at the RECV, whose compute looks there for it.
                waiter = members if kind[row] > _RECV else partner[members]
                end[waiter] = finish
                # The device may wait for another row as well; then it looks again and stops again.
                if blocked[device_of[waiter]] == 1:
                    blocked[device_of[waiter]] = 0
                    stack[height] = device_of[waiter]
                    height += 1
                members = chain[members] if kind[row] > _RECV else -1
            # A blocking message also lets go of both its devices, which run on after the last of
            # their batch. At equal times the message served later is named as the cause.
            for side in range(2 if flags[2] == 1 and kind[row] == _SEND else 0):
                d = device_of[row] if side == 0 else device_of[partner[row]]
                held[d] -= 1
                if finish >= clock[d]:
                    clock[d] = finish
                    last[d] = row
                if held[d] == 0 and blocked[d] == 1:
                    blocked[d] = 0
                    stack[height] = d
                    height += 1
            continue
        height -= 1
        d = stack[height]
        row = position[d]
        while row < ptr[d + 1]:
            # The batch of messages ends at the first row that is none; its end is not known yet.
            if held[d] > 0 and kind[row] != _SEND and kind[row] != _RECV:
                blocked[d] = 1
                break
            if kind[row] <= _UPDATE:
                # Compute starts when the device is free and all rows it waits for have ended. At a
                # tie the compute before it is the cause.
                begin = clock[d]
                why = last[d]
                waited = first_wait[row]
                while waited >= 0 and end[waited] >= 0.0:
                    if end[waited] > begin:
                        begin = end[waited]
                        why = partner[waited] if kind[waited] == _RECV else waited
                    waited = next_wait[waited]
                # Some wait has no end yet. The row stays at the position and all waits are read
                # anew.
                if waited >= 0:
                    blocked[d] = 1
                    break
                # The flag comes first, since ``joint`` has no rows where there are no groups.
                if flags[1] == 0 or joint[row] < 0:
                    start[row] = begin
                    end[row] = begin + seconds[row]
                    cause[row] = why
                    clock[d] = end[row]
                    last[d] = row
                    row += 1
                    continue
                # Tensor-parallel compute runs on all members at once, from the last arrival on and
                # for as long as the slowest takes.
                group = joint[row]
                chain[row] = head[group]
                head[group] = row
                come[group] += 1
                longest[group] = max(longest[group], seconds[row])
                if begin >= ready[group]:
                    ready[group] = begin
                    reason[group] = why
                # Not ``blocked``: only the last member may put this device back on the stack, not
                # the end of some transfer.
                if come[group] < joint_size[group]:
                    break
                # This is the last member. It moves all others past the row and lets them run.
                members = row
                while members >= 0:
                    start[members] = ready[group]
                    end[members] = ready[group] + longest[group]
                    cause[members] = reason[group]
                    other = device_of[members]
                    clock[other] = end[members]
                    last[other] = members
                    position[other] = members + 1
                    if other != d:
                        stack[height] = other
                        height += 1
                    members = chain[members]
                row += 1
            elif flags[2] == 1 and kind[row] <= _RECV:
                # Post the message and go on to the rest of the batch. Whichever end comes second
                # issues it, at the later of both times; the sender stands for the pair.
                held[d] += 1
                start[row] = clock[d]
                cause[row] = last[d]
                other = partner[row]
                # Only one device runs at a time, and it writes its position when it stops: the
                # other one's is up to date.
                if position[device_of[other]] > other:
                    late = other if start[other] > clock[d] else row
                    sender = row if kind[row] == _SEND else other
                    cause[sender] = cause[late]
                    cause[partner[sender]] = sender
                    # The sum is as wide as the other places, which the compiled heap needs.
                    heapq.heappush(pending, (start[late], 0 + device_of[sender], sender, sender))
                row += 1
            elif kind[row] == _SEND:
                cause[row] = last[d]
                if flags[0] == 1:
                    heapq.heappush(pending, (clock[d], d, row, row))
                else:
                    # No port serves two pairs, so the transfers of a port come in the order of one
                    # list and can be timed at once. Port out and port in have the same transfers:
                    # one tells.
                    begin = clock[d]
                    port = out_port[row]
                    if free[port] > begin:
                        begin = free[port]
                        cause[row] = holder[port]
                    start[row] = begin
                    end[row] = begin + seconds[row]
                    free[port] = end[row]
                    holder[port] = row
                    waiter = partner[row]
                    end[waiter] = end[row]
                    if blocked[device_of[waiter]] == 1:
                        blocked[device_of[waiter]] = 0
                        stack[height] = device_of[waiter]
                        height += 1
                row += 1
            elif kind[row] == _RECV:
                # A RECV only posts; the compute that consumes it waits.
                start[row] = clock[d]
                cause[row] = partner[row]
                row += 1
            else:
                # A collective does not hold its devices; it is issued when the last member has come
                # to it. It sorts after the SENDs of that time, whose second place is a real device.
                group = joint[row]
                chain[row] = head[group]
                head[group] = row
                come[group] += 1
                longest[group] = max(longest[group], seconds[row])
                if clock[d] >= ready[group]:
                    ready[group] = clock[d]
                    reason[group] = last[d]
                if come[group] == joint_size[group]:
                    heapq.heappush(pending, (ready[group], num_devices, turn[group], row))
                row += 1
        position[d] = row
