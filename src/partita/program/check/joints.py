"""Proof that the members of every group list the same joint instructions in the same order."""

from typing import NamedTuple

import numpy as np

from partita.core.columns import Array
from partita.core.program import FIRST_COLLECTIVE
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
    home = group * case.num_devices + program.device[rows]
    order = np.argsort(home, kind="stable")
    begins = np.flatnonzero(np.r_[True, np.diff(home[order]) != 0])
    lengths = np.diff(np.r_[begins, len(order)])
    turn = np.empty(len(rows), dtype=np.int64)
    turn[order] = np.arange(len(order)) - np.repeat(begins, lengths)
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
