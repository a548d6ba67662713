"""Proof that a Program comes to its end, however little its transfers are buffered.

A token walks down every list. Alone, compute passes; joint instructions pass when all members stand
at them. A SEND and its RECV pass together (rendezvous: the two are one node), so that the walk ends
if and only if the graph of list orders with merged messages and merged joint instructions has no
cycle. A walk that ends so ends with buffered sends, too, and where receives post instead of waiting
at their place, since those only wait for less. A walk with buffered sends only tells people how bad
it is.

First, the members of every group must list the same joint instructions in the same order.
"""

from typing import NamedTuple

import numpy as np

from partita.core.columns import Array
from partita.core.program import FIRST_COLLECTIVE, Kind
from partita.errors import InvalidInputError
from partita.kernels import Column, kernel, run
from partita.program.check.case import Case

_SAME = ("kind", "microbatch", "bucket", "bytes")


class Joints(NamedTuple):
    """Instructions that several devices do together.

    Attributes:
        number: A number shared by the rows that run together; -1 = the row runs alone.
        size: Rows of each number.
    """

    number: Array
    size: Array


def check_joints(case: Case) -> Joints:
    """Check that the k-th instruction of a group is the same one on each of its members.

    That only members list instructions of a group was proved with the grid and the parameters.

    Raises:
        InvalidInputError: A member lists another one, or one more.
    """
    program = case.program
    number = np.full(len(program), -1, dtype=np.int64)
    rows = np.flatnonzero(program.group >= 0)
    if not len(rows):
        return Joints(number, np.zeros(0, dtype=np.int64))
    group = program.group[rows].astype(np.int64)
    # The turn of a row is its place among its group's rows on its device, in list order.
    home = group * case.num_devices + program.device[rows]
    order = np.argsort(home, kind="stable")
    begins = np.flatnonzero(np.r_[True, np.diff(home[order]) != 0])
    lengths = np.diff(np.r_[begins, len(order)])
    turn = np.empty(len(rows), dtype=np.int64)
    turn[order] = np.arange(len(order)) - np.repeat(begins, lengths)
    # Rows of one group and turn run together.
    _, joint = np.unique(group * (int(turn.max()) + 1) + turn, return_inverse=True)
    first = np.full(int(joint.max()) + 1, len(program), dtype=np.int64)
    np.minimum.at(first, joint, rows)
    _check_equal(case, rows, first[joint])
    size = np.bincount(joint)
    short = size[joint] != np.diff(program.group_ptr)[group]
    if short.any():
        _refuse_short(case, int(rows[np.argmax(short)]), rows[joint == joint[np.argmax(short)]])
    number[rows] = joint
    return Joints(number, size)


def _check_equal(case: Case, rows: Array, others: Array) -> None:
    program = case.program
    compute = program.kind[rows] < FIRST_COLLECTIVE
    wrong = compute & (program.stage[rows] != program.stage[others])
    for what in _SAME:
        column = getattr(program, what)
        wrong |= column[rows] != column[others]
    if wrong.any():
        row, other = (int(part[np.argmax(wrong)]) for part in (rows, others))
        case.refuse(
            row,
            f"meets {program.describe(other)}; the members of a group must list the same "
            "instructions in one order, with equal bytes",
        )


def _refuse_short(case: Case, row: int, together: Array) -> None:
    program = case.program
    there = set(program.device[together].tolist())
    absent = [case.name(d) for d in program.group_of(row).tolist() if d not in there]
    case.refuse(row, f"waits for ever: {', '.join(absent)} of its group does not list it")


_SEND, _RECV = int(Kind.SEND), int(Kind.RECV)
_SHOWN = 6


def check_deadlock(case: Case, partner: Array, joints: Joints) -> None:
    """Check that the Program ends with rendezvous sends, and hence with buffered ones.

    Raises:
        InvalidInputError: It does not; names the instructions that wait for each other, and says
            whether buffered sends would do.
    """
    position = _walked(case, partner, joints, buffered=False)
    if bool((position >= case.program.ptr[1:]).all()):
        return
    buffered = _walked(case, partner, joints, buffered=True)
    if bool((buffered >= case.program.ptr[1:]).all()):
        _refuse(case, partner, joints, position, "with rendezvous sends")
    _refuse(case, partner, joints, buffered, "even with buffered sends")


def _walked(case: Case, partner: Array, joints: Joints, *, buffered: bool) -> Array:
    """Return where the token of each device has come to."""
    program = case.program
    count, devices = len(program), case.num_devices
    position = program.ptr[:-1].copy()
    run(
        _walk,
        count,
        [program.ptr, program.kind, program.device, partner, joints.number, joints.size],
        [
            np.array([int(buffered)]),
            position,
            *(np.zeros(devices, dtype=np.int64) for _ in range(2)),
            *(np.full(len(joints.size), value, dtype=np.int64) for value in (0, -1)),
            np.full(count if len(joints.size) else 0, -1, dtype=np.int64),
        ],
    )
    return position


def _refuse(case: Case, partner: Array, joints: Joints, position: Array, how: str) -> None:
    """Raise the error that names a circle of instructions that wait for each other."""
    program = case.program
    device = int(np.argmax(position < program.ptr[1:]))
    seen: dict[int, int] = {}
    walk: list[int] = []
    # Every device that stands waits for one that stands too, or it would have been woken: going
    # from each to the one it waits for must come back to a device seen before.
    while device not in seen:
        seen[device] = len(walk)
        row = int(position[device])
        walk.append(row)
        if joints.number[row] < 0:
            device = int(program.device[partner[row]])
        else:
            members = np.flatnonzero(joints.number == joints.number[row])
            # Wait for a member that has not come to the joint instruction.
            away = members[position[program.device[members]] < members]
            device = int(program.device[away[0]])
    # What led into the circle is no part of it.
    circle = walk[seen[device] :]
    shown = ", which waits for ".join(program.describe(row) for row in circle[:_SHOWN])
    more = f" and {len(circle) - _SHOWN} more" if len(circle) > _SHOWN else ""
    raise InvalidInputError(f"deadlock {how}: {shown}{more}, which waits for the first")


@kernel
def _walk(  # noqa: C901, PLR0912, PLR0913, PLR0917 (one compiled walk)
    ptr: Column,
    kind: Column,
    device_of: Column,
    partner: Column,
    joint: Column,
    joint_size: Column,
    buffered: Column,
    position: Column,
    stack: Column,
    waits: Column,
    come: Column,
    head: Column,
    chain: Column,
) -> None:
    """Walk every device as far as it goes, waking those that it was waited for by.

    ``position`` is the row at which the token of each device stands. ``stack`` holds the ``height``
    devices to walk. ``waits`` is 1 for a device that stands and is not on the stack. ``come``
    counts by joint number, and ``head`` and ``chain`` list, the rows that have come to a joint
    instruction. ``partner`` is by row, ``buffered[0]`` says which walk it is.
    """
    num_devices = len(ptr) - 1
    height = num_devices
    for d in range(num_devices):
        # The order does not change the result: a step that is possible stays so until it is taken.
        stack[d] = num_devices - 1 - d
    while height > 0:
        height -= 1
        d = stack[height]
        waits[d] = 0
        while position[d] < ptr[d + 1]:
            row = position[d]
            if kind[row] == _SEND or kind[row] == _RECV:
                # Both ends list the messages of a pair in one order (proved before), so that the
                # other device has either not come to its end of this message or stands at it.
                other = device_of[partner[row]]
                met = position[other] == partner[row]
                if buffered[0] == 1:
                    # Buffered: a SEND always passes; a RECV once its SEND has passed.
                    if kind[row] == _RECV and position[other] <= partner[row]:
                        break
                    wake = kind[row] == _SEND and met and waits[other] == 1
                else:
                    # Rendezvous: whoever comes second moves both ends on.
                    if not met:
                        break
                    position[other] += 1
                    wake = waits[other] == 1
                position[d] += 1
                if wake:
                    waits[other] = 0
                    stack[height] = other
                    height += 1
            elif joint[row] >= 0:
                # The last member to come moves all of them on and wakes the others.
                group = joint[row]
                chain[row] = head[group]
                head[group] = row
                come[group] += 1
                if come[group] < joint_size[group]:
                    break
                member = row
                while member >= 0:
                    other = device_of[member]
                    position[other] += 1
                    if other != d:
                        waits[other] = 0
                        stack[height] = other
                        height += 1
                    member = chain[member]
            else:
                position[d] += 1
        if position[d] < ptr[d + 1]:
            waits[d] = 1
