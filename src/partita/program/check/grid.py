"""Proof that every microbatch passes every stage once, on the right devices, in the right order."""

from itertools import pairwise
from typing import NamedTuple

import numpy as np

from partita.core.columns import Array
from partita.core.program import Kind
from partita.program.check.case import Case, first_repeat, look_up
from partita.program.layout import input_readers


class Grid(NamedTuple):
    """The rows that work on each cell (stage, microbatch, rank); -1 = none.

    Attributes:
        forward: FORWARD.
        recompute: RECOMPUTE.
        backward: BACKWARD or BACKWARD_INPUT: what makes the gradients of inputs.
        last: BACKWARD or BACKWARD_WEIGHT: what completes the gradients of parameters.
    """

    forward: Array
    recompute: Array
    backward: Array
    last: Array


def check_grid(case: Case) -> Grid:
    """Check the compute instructions of all microbatches and return where they stand.

    Raises:
        InvalidInputError: One is missing, stands twice, on a wrong device, or out of order.
    """
    kind = case.program.kind
    there = case.cells[3]
    forward = _placed(case, kind == Kind.FORWARD, there, "FORWARD")
    recompute = _placed(case, kind == Kind.RECOMPUTE, _recomputes(case), "RECOMPUTE")
    split = kind == Kind.BACKWARD_INPUT
    needed = there if case.trains else np.zeros(len(there), dtype=bool)
    whole = kind == Kind.BACKWARD
    what = "BACKWARD_INPUT" if split.any() and not whole.any() else "BACKWARD"
    backward = _placed(case, whole | split, needed, what)
    halved = backward >= 0
    halved[halved] = split[backward[halved]]
    weight = _placed(case, kind == Kind.BACKWARD_WEIGHT, halved, "BACKWARD_WEIGHT")
    grid = Grid(forward, recompute, backward, np.where(halved, weight, backward))
    _check_order(case, grid)
    _check_loads(case, grid)
    _check_groups(case)
    return grid


def _recomputes(case: Case) -> Array:
    """Return the cells that an early-recompute schedule recomputes; elsewhere backward does."""
    stage, _, _, there = case.cells
    if not case.plan.schedule.row.recomputes_early:
        return np.zeros(len(there), dtype=bool)
    flags = case.plan.recompute.astype(np.float64)
    again = np.bincount(case.plan.stage_of, weights=flags, minlength=case.num_stages) > 0
    result: Array = again[stage] & there
    return result


def _placed(case: Case, mask: Array, needed: Array, what: str) -> Array:
    """Return the row of each cell; every needed cell has one, others none."""
    program = case.program
    rows = np.flatnonzero(mask)
    rank = case.ranks(rows)
    _check_devices(case, rows, rank)
    cell = case.cell(program.stage[rows], program.microbatch[rows], rank)
    result = np.full(len(needed), -1, dtype=np.int64)
    result[cell] = rows
    if not np.array_equal(result[cell], rows):
        _refuse_repeat(case, rows, cell)
    extra = ~needed[cell]
    if extra.any():
        case.refuse(rows[np.argmax(extra)], f"is one too many; {_why_extra(what)}")
    missing = needed & (result < 0)
    if missing.any():
        stage, turn, at, _ = (part[int(np.argmax(missing))] for part in case.cells)
        device = case.layout.device(np.array([stage]), np.array([turn]), int(at))[0]
        case.refuse_missing(
            int(device),
            f"{what}(stage {stage}, microbatch {turn})",
            "every microbatch passes every stage once, on each device of its replica",
        )
    return result


def _why_extra(what: str) -> str:
    if what == "RECOMPUTE":
        return "only recomputing stages of an early-recompute schedule have it"
    return "the weight part of backward follows an input part, not a whole BACKWARD"


def _refuse_repeat(case: Case, rows: Array, number: Array) -> None:
    row, again = (int(rows[at]) for at in first_repeat(number))
    place = row - int(case.program.ptr[case.program.device[row]])
    case.refuse(again, f"repeats position {place}; each microbatch passes a stage once")


def _check_devices(case: Case, rows: Array, rank: Array) -> None:
    if not (rank < 0).any():
        return
    row = int(rows[np.argmax(rank < 0)])
    stage, turn = int(case.program.stage[row]), int(case.program.microbatch[row])
    replica = int(case.layout.replica_of[stage, turn])
    group = case.plan.stages[stage].devices[replica]
    case.refuse(
        row,
        f"is on the wrong device; replica {replica} of stage {stage} takes microbatch {turn}, on "
        + ", ".join(case.name(device) for device in group),
    )


def _check_order(case: Case, grid: Grid) -> None:
    """Check FORWARD, then RECOMPUTE, then BACKWARD or BACKWARD_INPUT, then BACKWARD_WEIGHT."""
    split = np.where(grid.last == grid.backward, -1, grid.last)
    for before, after in (
        (grid.forward, grid.recompute),
        (grid.forward, grid.backward),
        (grid.recompute, grid.backward),
        (grid.backward, split),
    ):
        wrong = (before >= 0) & (after >= 0) & (before > after)
        if wrong.any():
            refuse_order(case, after, before, int(np.argmax(wrong)))


def refuse_order(case: Case, early: Array, late: Array, index: int) -> None:
    """Raise the error that a row stands before one of its device that it needs."""
    case.refuse(early[index], f"comes before {case.program.describe(int(late[index]))}")


def _check_loads(case: Case, grid: Grid) -> None:
    """Check that every model input is loaded once by every stage that reads it, before FORWARD."""
    program, turns = case.program, case.num_microbatches
    tensor, stage = input_readers(case.problem.graph, case.plan)
    keys = tensor.astype(np.int64) * case.num_stages + stage
    rows = np.flatnonzero(program.kind == Kind.LOAD)
    rank = case.ranks(rows)
    _check_devices(case, rows, rank)
    wanted = program.tensor[rows].astype(np.int64) * case.num_stages + program.stage[rows]
    pair = look_up(keys, np.arange(len(keys)), wanted)
    if (pair < 0).any():
        case.refuse(rows[np.argmax(pair < 0)], "loads what its stage does not read as an input")
    slot = (pair * turns + program.microbatch[rows]) * case.num_ranks + rank
    _check_all_loaded(case, tensor, stage, slot)
    if len(rows) > len(tensor) and len(np.unique(slot)) < len(slot):
        _refuse_repeat(case, rows, slot)
    forward = grid.forward[case.cell(program.stage[rows], program.microbatch[rows], rank)]
    late = rows > forward
    if late.any():
        refuse_order(case, forward, rows, int(np.argmax(late)))


def _check_all_loaded(case: Case, tensor: Array, stage: Array, slot: Array) -> None:
    shape = (len(tensor), case.num_microbatches, case.num_ranks)
    loaded = np.zeros(shape, dtype=bool)
    loaded.reshape(-1)[slot] = True
    missing = ~loaded & (np.arange(case.num_ranks) < case.layout.ranks[stage][:, None, None])
    if missing.any():
        pair, turn, rank = np.argwhere(missing)[0].tolist()
        device = case.layout.device(stage[[pair]], np.array([turn]), rank)[0]
        case.refuse_missing(
            int(device),
            f"LOAD(stage {stage[pair]}, microbatch {turn}, tensor {tensor[pair]})",
            "inputs of the model are loaded by each stage that reads them, never sent",
        )


def _check_groups(case: Case) -> None:
    """Check that compute of tensor-parallel stages names its group, and other compute none."""
    program = case.program
    number: dict[tuple[int, ...], int] = {}
    expected = np.full(case.num_devices, -1, dtype=np.int64)
    for stage in case.plan.stage_index:
        for group in stage.devices if stage.ranks > 1 else ():
            expected[list(group)] = number.setdefault(tuple(sorted(group)), len(number))
    named = [number.get(devices, -2) for devices in group_sets(case)]
    known = np.array([*named, -1], dtype=np.int64)
    rows = np.flatnonzero(program.is_compute & (program.kind != Kind.LOAD))
    wrong = known[program.group[rows]] != expected[program.device[rows]]
    if wrong.any():
        row = int(rows[np.argmax(wrong)])
        joint = expected[program.device[row]] >= 0
        case.refuse(
            row,
            "does not name the tensor-parallel group of its device"
            if joint
            else "names a group; its stage is not tensor-parallel",
        )


def group_sets(case: Case) -> list[tuple[int, ...]]:
    """Return the devices of each group of the Program, ascending."""
    ptr, devices = case.program.group_ptr.tolist(), case.program.group_devices.tolist()
    return [tuple(sorted(devices[begin:end])) for begin, end in pairwise(ptr)]
