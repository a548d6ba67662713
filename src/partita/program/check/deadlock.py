"""Proof that a Program comes to its end, however little its transfers are buffered.

A token walks down every list. Alone, compute passes; joint instructions pass when all members stand
at them. A SEND and its RECV pass together (rendezvous: the two are one node), so that the walk ends
if and only if the graph of list orders with merged messages and merged joint instructions has no
cycle. A walk that ends so ends with buffered sends, too, and where receives post instead of waiting
at their place, since those only wait for less. A walk with buffered sends only tells people how bad
it is.

First, the members of every group must list the same joint instructions in the same order
(``matching.joints``).
"""

import numpy as np

from partita.core.columns import Array
from partita.core.program import Kind
from partita.errors import InvalidInputError
from partita.kernels import Column, kernel, run
from partita.program.check.case import Case
from partita.program.matching import Joints

_SEND, _RECV = int(Kind.SEND), int(Kind.RECV)
_SHOWN = 6


def check_deadlock(case: Case, partner: Array, joints: Joints) -> None:
    """Check that the Program ends with rendezvous sends, and hence with buffered ones.

    Raises:
        InvalidInputError: It does not; names the instructions that wait for each other, and says
            whether buffered sends would do.
    """
    if not len(joints.number):
        joints = joints._replace(number=np.full(len(case.program), -1, dtype=np.int32))
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
