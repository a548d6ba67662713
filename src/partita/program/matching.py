"""Pairs of a Program that wait for each other: messages, their consumers, joint instructions."""

from typing import NamedTuple

import numpy as np

from partita.core.columns import Array, derived
from partita.core.program import FIRST_COLLECTIVE, Kind, Program
from partita.errors import InvalidInputError
from partita.kernels import Column, kernel, run

_FORWARD, _BACKWARD, _BACKWARD_INPUT = (
    int(Kind.FORWARD),
    int(Kind.BACKWARD),
    int(Kind.BACKWARD_INPUT),
)
_UPDATE, _SEND, _RECV = int(Kind.UPDATE), int(Kind.SEND), int(Kind.RECV)
_ALL_GATHER = int(Kind.ALL_GATHER)


class Matching(NamedTuple):
    """Relations between the rows of a Program; -1 = none.

    Attributes:
        partner: The RECV of each SEND, and the SEND of each RECV.
        consumer: The compute row that waits for each RECV or collective.
        first_wait: The first row that each compute row waits for.
        next_wait: The row after this one that the same compute row waits for.
        joint: A number shared by the rows that run together (a collective, tensor-parallel
            compute); empty where the Program has no groups.
        joint_size: Number of members of each joint number.
    """

    partner: Array
    consumer: Array
    first_wait: Array
    next_wait: Array
    joint: Array
    joint_size: Array


def match(program: Program) -> Matching:
    """Return the relations of a Program, found once and kept with it.

    Raises:
        InvalidInputError: A message without partner, or members of a group that disagree.
    """
    return derived(program, "matching", lambda: _matched(program))


def _matched(program: Program) -> Matching:
    rows, devices = len(program), len(program.devices)
    columns = [np.full(rows, -1, dtype=np.int32) for _ in range(4)]
    sends = int(np.count_nonzero(program.kind == Kind.SEND))
    recvs = int(np.count_nonzero(program.kind == Kind.RECV))
    error = np.full(3, -1, dtype=np.int64)
    cells = program.num_stages * program.num_microbatches
    run(
        _match,
        rows,
        [
            *(program.ptr, program.kind, program.stage, program.microbatch, program.tensor),
            *(program.gradient, program.peer, program.bytes, program.device),
        ],
        [
            *columns,
            *(np.zeros(size, dtype=np.int32) for size in (sends, recvs, recvs)),
            np.zeros(devices + 1, dtype=np.int64),
            *(np.full(size, -1, dtype=np.int32) for size in (cells, cells)),
            *(np.full(program.num_stages, -1, dtype=np.int32) for _ in range(2)),
            error,
        ],
    )
    if error[0] >= 0:
        _refuse(program, int(error[0]), int(error[1]))
    return Matching(columns[0], columns[1], columns[2], columns[3], *joints(program))


def _refuse(program: Program, row: int, other: int) -> None:
    if other < 0:
        partner = "RECV" if program.kind[row] == Kind.SEND else "SEND"
        raise InvalidInputError(f"{program.describe(row)} has no {partner} at the other end")
    wrong = [
        what
        for what in ("tensor", "microbatch", "gradient", "bytes")
        if getattr(program, what)[row] != getattr(program, what)[other]
    ]
    raise InvalidInputError(
        f"{program.describe(row)} meets {program.describe(other)}: their {wrong[0]} differ; both "
        "ends must list their messages in one order"
    )


@kernel
def _match(  # noqa: C901, PLR0912, PLR0913, PLR0915, PLR0917 (one compiled pass over all rows)
    ptr: Column,
    kind: Column,
    stage: Column,
    microbatch: Column,
    tensor: Column,
    gradient: Column,
    peer: Column,
    size_bytes: Column,
    device: Column,
    partner: Column,
    consumer: Column,
    first_wait: Column,
    next_wait: Column,
    sends: Column,
    recvs: Column,
    by_source: Column,
    count: Column,
    forward: Column,
    backward: Column,
    update: Column,
    compute: Column,
    error: Column,
) -> None:
    """Match the k-th SEND of an ordered pair with its k-th RECV, and find what waits for them.

    SENDs are sorted by destination, RECVs by source and then by destination (counting sorts), so
    that both lists are by (destination, source, place). A backwards scan over each device finds the
    consumers.

    ``sends``, ``recvs`` and ``by_source`` hold rows; ``count`` is the counting sort's first free
    place by device. During the backwards scan ``forward`` and ``backward``, by (stage, microbatch),
    and ``update`` and ``compute``, by stage, hold the nearest such row further down the list.
    ``error`` becomes the row at fault, and the row it meets.
    """
    num_devices = len(ptr) - 1
    turns = len(forward) // max(1, len(update))
    # Counting sorts keep the order of equal keys, and rows come by device: the SENDs, sorted by
    # peer once, are by (destination, source, place); the RECVs need two passes, by source and then
    # by their own device.
    for pass_ in range(3):
        for d in range(num_devices + 1):
            count[d] = 0
        if pass_ < 2:
            wanted = _SEND if pass_ == 0 else _RECV
            for row in range(len(kind)):
                if kind[row] == wanted:
                    count[peer[row] + 1] += 1
        else:
            for k in range(len(by_source)):
                count[device[by_source[k]] + 1] += 1
        # Counts become the first place of each key.
        for d in range(num_devices):
            count[d + 1] += count[d]
        if pass_ < 2:
            for row in range(len(kind)):
                if kind[row] == wanted:
                    if pass_ == 0:
                        sends[count[peer[row]]] = row
                    else:
                        by_source[count[peer[row]]] = row
                    count[peer[row]] += 1
        else:
            for k in range(len(by_source)):
                row = by_source[k]
                recvs[count[device[row]]] = row
                count[device[row]] += 1
    # The lists agree place by place, or the first difference is the error.
    for k in range(max(len(sends), len(recvs))):
        if k >= len(sends):
            error[0] = recvs[k]
            return
        if k >= len(recvs):
            error[0] = sends[k]
            return
        s = sends[k]
        r = recvs[k]
        if device[s] != peer[r] or peer[s] != device[r]:
            # The smaller key is the one without a partner: the other list has gone past it.
            ahead = peer[s] < device[r] or (peer[s] == device[r] and device[s] < peer[r])
            error[0] = s if ahead else r
            return
        if (
            tensor[s] != tensor[r]
            or microbatch[s] != microbatch[r]
            or gradient[s] != gradient[r]
            or size_bytes[s] != size_bytes[r]
        ):
            error[0] = s
            error[1] = r
            return
        partner[s] = r
        partner[r] = s
    # Rows that an earlier device left behind are lower than all rows of this one, so that the test
    # for a target further down the list refuses them and nothing has to be cleared.
    for d in range(num_devices):
        for row in range(ptr[d + 1] - 1, ptr[d] - 1, -1):
            what = kind[row]
            if what <= _UPDATE:
                if what == _UPDATE:
                    update[stage[row]] = row
                else:
                    compute[stage[row]] = row
                if what == _FORWARD:
                    forward[stage[row] * turns + microbatch[row]] = row
                elif what in (_BACKWARD, _BACKWARD_INPUT):
                    backward[stage[row] * turns + microbatch[row]] = row
                continue
            # Nobody on this device waits for what leaves it, or for what belongs to no stage.
            if what == _SEND or stage[row] < 0:
                continue
            if what == _RECV:
                cell = stage[row] * turns + microbatch[row]
                target = backward[cell] if gradient[row] else forward[cell]
            else:
                # Gathered parameters are for the next compute of the stage, reduced gradients for
                # its update. A gather after the last update has no consumer in this step.
                target = compute[stage[row]] if what == _ALL_GATHER else update[stage[row]]
            if target > row and target < ptr[d + 1]:
                consumer[row] = target
                # Put in front while scanning backwards: the waits of a row are in list order.
                next_wait[row] = first_wait[target]
                first_wait[target] = row


def forward_rows(program: Program, device: Array, stage: Array, microbatch: Array) -> Array:
    """Return the FORWARD of each (device, stage, microbatch); -1 where there is none."""
    rows = np.flatnonzero(program.kind == Kind.FORWARD)
    if not len(rows):
        return np.full(len(device), -1)

    def number(d: Array, s: Array, m: Array) -> Array:
        home = d.astype(np.int64) * program.num_stages + s
        result: Array = home * program.num_microbatches + m
        return result

    keys = number(program.device[rows], program.stage[rows], program.microbatch[rows])
    wanted = number(device, stage, microbatch)
    order = np.argsort(keys)
    # A key beyond all others would be found past the end; the comparison below refuses the last.
    found = order[np.minimum(np.searchsorted(keys[order], wanted), len(keys) - 1)]
    return np.where(keys[found] == wanted, rows[found], -1)


class Joints(NamedTuple):
    """Instructions that several devices do together.

    Attributes:
        number: A number shared by the rows that run together, -1 = the row runs alone; empty where
            the Program has no groups.
        size: Rows of each number.
    """

    number: Array
    size: Array


def joints(program: Program) -> Joints:
    """Number the joint instructions: the k-th of a group on each member is the same one.

    Collectives and tensor-parallel compute of a group count together. A member that computes
    waits for the others before it issues what follows, and an executor has one communicator for a
    group, which pairs whatever its members issue, in their order.

    Raises:
        InvalidInputError: A member lists another instruction than the others, or lacks one.
    """
    if len(program.group_ptr) == 1:
        return Joints(np.zeros(0, dtype=np.int32), np.zeros(0, dtype=np.int64))
    number = np.full(len(program), -1, dtype=np.int32)
    rows = np.flatnonzero(program.group >= 0)
    group = program.group[rows].astype(np.int64)
    home = group * len(program.devices) + program.device[rows]
    # The turn of a row is its place among the rows of its group on its device; the sort is stable,
    # so that places are in list order.
    order = np.argsort(home, kind="stable")
    begins = np.flatnonzero(np.r_[True, np.diff(home[order]) != 0])[: len(order)]
    lengths = np.diff(np.r_[begins, len(order)])
    turn = np.empty(len(rows), dtype=np.int64)
    turn[order] = np.arange(len(order)) - np.repeat(begins, lengths)
    # Rows of one group and turn are one joint instruction, whatever their device.
    span = int(turn.max(initial=0)) + 1
    _, joint = np.unique(group * span + turn, return_inverse=True)
    number[rows] = joint
    found = Joints(number, np.bincount(joint))
    _check_alike(program, rows, joint)
    short = found.size[joint] != np.diff(program.group_ptr)[group]
    if short.any():
        row = int(rows[np.argmax(short)])
        there = set(program.device[number == number[row]].tolist())
        group_of = set(program.group_of(row).tolist())
        absent = ", ".join(program.devices[d] for d in sorted(group_of - there))
        beside = ", ".join(program.devices[d] for d in sorted(there - group_of))
        why = f"{absent} of its group does not list it"
        if not absent:
            why = f"{beside} lists it and is not of its group"
        raise InvalidInputError(f"{program.describe(row)} waits for ever: {why}")
    return found


def _check_alike(program: Program, rows: Array, joint: Array) -> None:
    """Check that members list the same: all are compared with the lowest row of their number."""
    first = np.full(int(joint.max(initial=-1)) + 1, len(program), dtype=np.int64)
    np.minimum.at(first, joint, rows)
    others = first[joint]
    for what in ("kind", "stage", "microbatch", "bucket", "bytes"):
        values = getattr(program, what)
        differs = values[rows] != values[others]
        if what == "stage":
            # A collective is for all stages that share its parameters; each member names its own.
            differs &= program.kind[rows] < FIRST_COLLECTIVE
        if differs.any():
            row, other = (int(side[np.argmax(differs)]) for side in (rows, others))
            raise InvalidInputError(
                f"{program.describe(row)} meets {program.describe(other)}: members of a group must "
                f"list their joint instructions in one order (their {what} differ)"
            )
