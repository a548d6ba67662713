"""The order of a pipeline as a CSV of torch.distributed.pipelining, a row for each rank.

A cell is ``<stage><F|B|I|W><microbatch>``, an empty one is idle. Torch adds the transfers. Columns
are steps of a clock: whatever a cell needs stands in an earlier column, as the schedules of torch
that walk step by step expect.
"""

import re

import numpy as np

from partita.core.grid import Grid
from partita.core.program import Kind
from partita.errors import FormatError, InfeasibleError
from partita.program.lower import lower
from partita.trainers.target import PlanToWrite, Written, check_options

LETTERS = {
    Kind.FORWARD: "F",
    Kind.BACKWARD: "B",
    Kind.BACKWARD_INPUT: "I",
    Kind.BACKWARD_WEIGHT: "W",
}
MAX_CELLS = 1_000_000
Action = tuple[int, str, int]


def write_schedule_csv(plan: PlanToWrite) -> Written:
    """Return the order of a plan's pipeline as a CSV, and a function that loads it.

    Raises:
        InfeasibleError: It has no pipeline, or what torch's schedules cannot do.
    """
    check_options(plan, (), "schedule-csv")
    grid = plan.grid
    if grid.pp == 1:
        raise InfeasibleError("the plan has no pipeline; a schedule of torch orders one")
    if plan.plan.schedule.row.stashes_weights or plan.plan.schedule.row.infers:
        raise InfeasibleError(f"schedule {grid.schedule.value} is not one of a step; choose 1f1b")
    orders = actions_of(plan, grid)
    file = f"{plan.name}_schedule.csv"
    text = "".join(",".join(map(_cell, row)) + "\n" for row in in_columns(orders))
    module = f"{plan.name.replace('-', '_')}_schedule.py"
    titan = "PipelineScheduleMulti"
    return Written(
        files={file: text, module: _loader(plan, grid, file)},
        command=f"python -c 'import {module.removesuffix('.py')}'",
        left_to_you=("the stages: partita.split(model, plan, batch), or your own",),
        remarks=(
            f"torchtitan: pipeline_parallel_schedule = {titan!r}, "
            f"pipeline_parallel_schedule_csv = {file!r}",
        ),
    )


def actions_of(plan: PlanToWrite, grid: Grid) -> list[list[Action]]:
    """Return what each rank of a pipeline computes, in order, by the first replica's microbatches.

    Raises:
        InfeasibleError: It recomputes in an instruction of its own, which torch has no letter for.
    """
    program = lower(plan.problem, plan.plan)
    index = {name: number for number, name in enumerate(program.devices)}
    number_of: dict[int, int] = {}
    orders = []
    for ranks in grid.pipeline_ranks:
        device = index[grid.ranks[ranks[0]]]
        rows = np.arange(program.ptr[device], program.ptr[device + 1])
        mine = []
        for row in rows.tolist():
            kind, stage = Kind(program.kind[row]), int(program.stage[row])
            if kind is Kind.RECOMPUTE:
                raise InfeasibleError(
                    f"schedule {grid.schedule.value} recomputes ahead of backward; torch's "
                    "schedules have no letter for that: choose 1f1b"
                )
            if kind in LETTERS:
                batch = int(program.microbatch[row])
                mine.append((stage, LETTERS[kind], batch))
        for _, letter, batch in mine:
            if letter == "F":
                number_of.setdefault(batch, len(number_of))
        orders.append(mine)
    # Replica 0 takes some of the microbatches: they are numbered in their order.
    numbers = {batch: number for number, batch in enumerate(sorted(number_of))}
    return [[(stage, letter, numbers[batch]) for stage, letter, batch in mine] for mine in orders]


def in_columns(orders: list[list[Action]]) -> list[list[Action | None]]:
    """Return the orders with idle cells: what an action needs is done in an earlier column."""
    last = max(stage for order in orders for stage, _, _ in order)
    done: set[Action] = set()
    at = [0] * len(orders)
    rows: list[list[Action | None]] = [[] for _ in orders]
    while any(at[rank] < len(order) for rank, order in enumerate(orders)):
        now: list[Action] = []
        for rank, order in enumerate(orders):
            action = order[at[rank]] if at[rank] < len(order) else None
            ready = action is not None and all(need in done for need in _needs(action, last, done))
            rows[rank].append(action if ready else None)
            if ready and action is not None:
                now.append(action)
                at[rank] += 1
        if not now:
            raise InfeasibleError("the ranks of the pipeline wait for one another")
        done.update(now)
    for row in rows:
        while row and row[-1] is None:
            row.pop()
    return rows


def _needs(action: Action, last: int, done: set[Action]) -> list[Action]:
    stage, letter, batch = action
    if letter == "F":
        return [(stage - 1, "F", batch)] if stage else []
    if letter == "W":
        return [(stage, "I", batch)]
    needs = [(stage, "F", batch)]
    if stage < last:
        whole = (stage + 1, "B", batch)
        needs.append(whole if whole in done else (stage + 1, "I", batch))
        if needs[-1] not in done:
            needs[-1] = whole
    return needs


def _cell(action: Action | None) -> str:
    return "" if action is None else f"{action[0]}{action[1]}{action[2]}"


def read_schedule_csv(text: str) -> tuple[tuple[Action, ...], ...]:
    """Return what each rank computes, in order.

    Raises:
        FormatError: A cell is none of ``<stage><F|B|I|W><microbatch>``.
    """
    rows = []
    for line, row in enumerate(text.splitlines(), 1):
        cells = row.split(",")
        if len(cells) > MAX_CELLS:
            raise FormatError(f"a row of {len(cells)} cells", line=line)
        mine = []
        for cell in cells:
            if not cell.strip():
                continue
            found = re.fullmatch(r"([0-9]{1,6})([FBIW])([0-9]{1,6})", cell.strip())
            if found is None:
                raise FormatError(
                    f"cell {cell[:40]!r} is no <stage><F|B|I|W><microbatch>", line=line
                )
            mine.append((int(found[1]), found[2], int(found[3])))
        rows.append(tuple(mine))
    return tuple(rows)


def _loader(plan: PlanToWrite, grid: Grid, file: str) -> str:
    return (
        f"{plan.comment()}"
        f'"""The schedule of {file} for torch.distributed.pipelining."""\n\n'
        "from pathlib import Path\n\n"
        "from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime\n\n"
        f"MICROBATCHES = {grid.microbatches}\n"
        f"STAGES_OF_RANK = {[_stages_of(grid, rank) for rank in range(grid.pp)]}\n\n\n"
        "def build_schedule(stages, loss_fn=None, **options):\n"
        '    """Return the schedule for the stages of this rank, by their numbers."""\n'
        "    schedule = _PipelineScheduleRuntime(\n"
        "        stages, MICROBATCHES, loss_fn=loss_fn, **options\n    )\n"
        f'    schedule._load_csv(str(Path(__file__).with_name("{file}")))\n'
        "    return schedule\n"
    )


def _stages_of(grid: Grid, rank: int) -> list[int]:
    return [stage for stage in range(grid.num_stages) if grid.rank_of(stage) == rank]
