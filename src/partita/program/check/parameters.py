"""Proof that gradients are reduced and parameters stepped once, when all of them are there.

A reduction stands after the last backward of the microbatches that it covers, on all devices that
hold the parameters, and before the UPDATE; the backwards of the next cycle stand after that UPDATE.
Sharded parameters are gathered before their first use, or after the UPDATE.
"""

from typing import NamedTuple

import numpy as np

from partita.core.columns import Array
from partita.core.plan import Shard
from partita.core.program import FIRST_COLLECTIVE, Kind
from partita.program.check.case import Case
from partita.program.check.grid import Grid, group_sets, refuse_order
from partita.program.check.held import (
    Buckets,
    Held,
    Owned,
    bucket_rules,
    check_buckets,
    held_buckets,
)

_PARAMETERS = list(Shard).index(Shard.PARAMETERS)
_USES = np.isin(
    np.arange(max(Kind) + 1),
    (Kind.FORWARD, Kind.RECOMPUTE, Kind.BACKWARD, Kind.BACKWARD_INPUT),
)


class Lists(NamedTuple):
    """Rows of the Program by owner, in list order: those of owner i begin at ``start[i]``."""

    rows: Array
    start: Array
    size: Array


def check_parameters(case: Case, grid: Grid) -> None:
    """Check buckets, reductions, updates, gathers and the versions of weights.

    Raises:
        InvalidInputError: One is missing, too many, too early or over the wrong devices, or a
            forward or backward names a version that is not there.
    """
    owned = check_buckets(case)
    held = held_buckets(case, owned)
    rules = bucket_rules(case, owned, held)
    where = _check_collectives(case, held, rules)
    updates = _check_updates(case, held, rules)
    kind = case.program.kind
    reduces = (kind == Kind.ALL_REDUCE) | (kind == Kind.REDUCE_SCATTER)
    reductions = _by_owner(np.flatnonzero(reduces), where, len(held.key))
    gathers = _by_owner(np.flatnonzero(kind == Kind.ALL_GATHER), where, len(held.key))
    _check_reduction_counts(case, held, rules, reductions)
    if case.trains:
        _check_cycles(case, grid, owned, held, rules, (reductions, updates))
    _check_gathers(case, held, rules, (gathers, updates))
    _check_versions(case, grid, updates)


def _by_owner(rows: Array, owner_of: Array, count: int) -> Lists:
    owner = owner_of[rows]
    number = np.bincount(owner, minlength=count)
    return Lists(
        rows[np.argsort(owner, kind="stable")], np.concatenate([[0], np.cumsum(number)]), number
    )


def _check_collectives(case: Case, held: Held, rules: Buckets) -> Array:
    """Check each collective for itself; return the row of ``held`` for each, -1 for other rows."""
    program = case.program
    rows = np.flatnonzero(program.kind >= FIRST_COLLECTIVE)
    bucket = program.bucket[rows]
    holder = held.find(bucket, program.device[rows], case.num_devices)
    if (holder < 0).any():
        case.refuse(
            rows[np.argmax(holder < 0)], "works on parameters that its device does not hold"
        )
    gathers = program.kind[rows] == Kind.ALL_GATHER
    size = np.where(gathers, rules.gathered[bucket], rules.bytes[bucket])
    for wrong, why in (
        (rules.kind[bucket] < 0, "works on parameters that no other device holds"),
        (~gathers & (program.kind[rows] != rules.kind[bucket]), "is not how its stage is sharded"),
        (gathers & (rules.shard[bucket] == 0), "gathers parameters that are not sharded"),
        (program.stage[rows] != held.stage[holder], "names the wrong stage"),
        (_other_group(case, held, rows, holder), "is not over all devices that hold its bucket"),
        (np.abs(program.bytes[rows] - size) > 1, "has the wrong number of bytes"),
    ):
        if wrong.any():
            at = int(np.argmax(wrong))
            case.refuse(rows[at], f"{why}; expected {_expected(case, held, rules, bucket[at])}")
    where = np.full(len(program), -1, dtype=np.int64)
    where[rows] = holder
    return where


def _expected(case: Case, held: Held, rules: Buckets, bucket: int) -> str:
    """Return what collectives a bucket must have, for people."""
    rows = np.flatnonzero(held.bucket == bucket)
    if rules.kind[bucket] < 0:
        return f"no collective, bucket {bucket} is on {case.name(int(held.device[rows[0]]))} alone"
    reduces = [Kind(int(rules.kind[bucket])).name] if case.trains else []
    kinds = [*reduces, *(["ALL_GATHER"] if rules.shard[bucket] else [])]
    teams = [
        " + ".join(
            f"{case.name(int(held.device[row]))} (stage {held.stage[row]})"
            for row in rows[held.team[rows] == team]
        )
        for team in np.unique(held.team[rows])
    ]
    sizes = (*[rules.bytes[bucket]] * len(reduces), rules.gathered[bucket])
    size = " and ".join(dict.fromkeys(f"{each:.0f}" for each in sizes[: len(kinds)]))
    return f"{' and '.join(kinds)} of {size} bytes of bucket {bucket} over " + " or ".join(teams)


def _other_group(case: Case, held: Held, rows: Array, holder: Array) -> Array:
    """Return which collectives are not over exactly the devices that must take part.

    A team reduces; those of it that divide the state gather.
    """
    gathers = case.program.kind[rows] == Kind.ALL_GATHER
    result = np.zeros(len(rows), dtype=bool)
    for of, some in ((held.team, ~gathers), (held.sharding, gathers)):
        result[some] = _over_others(case, held, of, rows[some], holder[some])
    return result


def _over_others(case: Case, held: Held, of: Array, rows: Array, holder: Array) -> Array:
    """Return which collectives are not over the devices with one number."""
    number: dict[tuple[int, ...], int] = {}
    named = [number.setdefault(devices, len(number)) for devices in group_sets(case)]
    used = np.unique(of[holder])
    order = np.argsort(of, kind="stable")
    begin = np.searchsorted(of[order], used)
    end = np.searchsorted(of[order], used, side="right")
    right = np.array(
        [
            number.get(tuple(sorted(held.device[order[a:b]].tolist())), -1)
            for a, b in zip(begin.tolist(), end.tolist(), strict=True)
        ],
        dtype=np.int64,
    )
    known = np.array([*named, -1], dtype=np.int64)
    result: Array = known[case.program.group[rows]] != right[np.searchsorted(used, of[holder])]
    return result


def _check_updates(case: Case, held: Held, rules: Buckets) -> Lists:
    """Check that each device steps what it holds once a cycle; return the UPDATEs by home."""
    program = case.program
    count = len(case.homes.device)
    needed = np.zeros(count, dtype=np.int64)
    home = case.home(held.stage, held.device)
    if case.trains:
        needed[home] = case.num_microbatches // rules.cycle[held.bucket]
    rows = np.flatnonzero(program.kind == Kind.UPDATE)
    at = case.home(program.stage[rows], program.device[rows])
    wrong = (at < 0) | (needed[at] == 0)
    if wrong.any():
        case.refuse(
            rows[np.argmax(wrong)],
            "has nothing to step: its stage trains no parameter on this device, or a lower stage "
            "there steps it",
        )
    owner_of = np.full(len(program), -1, dtype=np.int64)
    owner_of[rows] = at
    updates = _by_owner(rows, owner_of, count)
    differ = np.flatnonzero(updates.size != needed)
    if len(differ):
        _refuse_count(case, updates, needed, int(differ[0]))
    if case.plan.stashes_weights:
        made = np.arange(len(updates.rows)) - np.repeat(updates.start[:-1], updates.size) + 1
        wrong = program.version[updates.rows] != made
        if wrong.any():
            turn = int(np.argmax(wrong))
            row = int(updates.rows[turn])
            case.refuse(row, f"names version {program.version[row]}; it makes {made[turn]}")
    return updates


def _refuse_count(case: Case, updates: Lists, needed: Array, home: int) -> None:
    stage, device = int(case.homes.stage[home]), int(case.homes.device[home])
    if updates.size[home] < needed[home]:
        case.refuse_missing(
            device,
            f"UPDATE(stage {stage})",
            f"expected {needed[home]} in a step, got {updates.size[home]}",
        )
    case.refuse(
        updates.rows[updates.start[home] + needed[home]],
        f"is one too many; stage {stage} is stepped {needed[home]} times in a step",
    )


def _check_reduction_counts(case: Case, held: Held, rules: Buckets, reductions: Lists) -> None:
    times = case.num_microbatches // rules.span[held.bucket]
    needed = np.where((rules.kind[held.bucket] < 0) | (not case.trains), 0, times)
    differ = np.flatnonzero(reductions.size != needed)
    if not len(differ):
        return
    row = int(differ[0])
    bucket = int(held.bucket[row])
    if reductions.size[row] < needed[row]:
        case.refuse_missing(
            int(held.device[row]),
            f"{Kind(int(rules.kind[bucket])).name}(stage {held.stage[row]}, bucket {bucket})",
            f"expected {needed[row]} in a step, got {reductions.size[row]}",
        )
    case.refuse(
        reductions.rows[reductions.start[row] + needed[row]],
        f"is one too many; bucket {bucket} is reduced {needed[row]} times in a step",
    )


def _check_cycles(
    case: Case,
    grid: Grid,
    owned: Owned,
    held: Held,
    rules: Buckets,
    lists: tuple[Lists, Lists],
) -> None:
    """Check backward, then reduction, then UPDATE, then the backward of the next cycle.

    So at every reduction all members have made the same number of updates.
    """
    turns = case.num_microbatches
    bucket, stage = (np.repeat(part, turns) for part in (owned.bucket, owned.stage))
    turn = np.tile(np.arange(turns), len(owned.bucket))
    for rank in range(case.num_ranks):
        here = np.flatnonzero(case.layout.ranks[stage] > rank)
        b, s, m = bucket[here], stage[here], turn[here]
        holder = held.find(b, case.layout.device(s, m, rank), case.num_devices)
        last = grid.last[case.cell(s, m, rank)]
        _check_covered(case, held, rules, lists, (b, m, holder, last))


def _check_covered(
    case: Case,
    held: Held,
    rules: Buckets,
    lists: tuple[Lists, Lists],
    backward: tuple[Array, Array, Array, Array],
) -> None:
    reductions, updates = lists
    bucket, turn, holder, last = backward
    home = case.home(held.stage[holder], held.device[holder])
    cycle = turn // rules.cycle[bucket]
    stepped = updates.rows[updates.start[home] + cycle]
    again = np.flatnonzero(cycle > 0)
    before = updates.rows[updates.start[home[again]] + cycle[again] - 1]
    shared = np.flatnonzero(rules.kind[bucket] >= 0)
    at = reductions.start[holder[shared]] + turn[shared] // rules.span[bucket[shared]]
    reduced = reductions.rows[at]
    for early, late in (
        (reduced, last[shared]),
        (stepped[shared], reduced),
        (stepped, last),
        (last[again], before),
    ):
        wrong = early < late
        if wrong.any():
            refuse_order(case, early, late, int(np.argmax(wrong)))


def _check_gathers(case: Case, held: Held, rules: Buckets, lists: tuple[Lists, Lists]) -> None:
    """Check that sharded parameters are whole when they are used, or after the step."""
    gathers, updates = lists
    shard = rules.shard[held.bucket]
    home = case.home(held.stage, held.device)
    after_step = np.flatnonzero((shard > 0) & (shard != _PARAMETERS))
    wrong = gathers.size[after_step] != 1
    if wrong.any():
        _refuse_gather(case, held, int(after_step[np.argmax(wrong)]), gathers)
    gathered = gathers.rows[gathers.start[after_step]]
    stepped = updates.rows[updates.start[home[after_step]]]
    if (gathered < stepped).any():
        refuse_order(case, gathered, stepped, int(np.argmax(gathered < stepped)))
    before_use = np.flatnonzero(shard == _PARAMETERS)
    if len(before_use):
        _check_copies(case, held, before_use, home[before_use], gathers)


def _refuse_gather(case: Case, held: Held, row: int, gathers: Lists) -> None:
    stage, bucket = int(held.stage[row]), int(held.bucket[row])
    if gathers.size[row]:
        case.refuse(gathers.rows[gathers.start[row] + 1], "is one too many; one follows the UPDATE")
    case.refuse_missing(
        int(held.device[row]),
        f"ALL_GATHER(stage {stage}, bucket {bucket})",
        "sharded parameters must be made whole",
    )


def _check_copies(case: Case, held: Held, rows: Array, homes: Array, gathers: Lists) -> None:
    """Check that a gathered copy is there for each compute; FORWARD and BACKWARD use it up."""
    program = case.program
    used = np.flatnonzero(_USES[program.kind])
    owner_of = np.full(len(program), -1, dtype=np.int64)
    owner_of[used] = case.home(program.stage[used], program.device[used])
    uses = _by_owner(used, owner_of, len(case.homes.device))
    for row, home in zip(rows.tolist(), homes.tolist(), strict=True):
        here = uses.rows[uses.start[home] : uses.start[home + 1]]
        copies = gathers.rows[gathers.start[row] : gathers.start[row + 1]]
        before = np.searchsorted(copies, here)
        gathered = np.where(before > 0, copies[before - 1], -1) if len(copies) else before - 1
        ends = np.where(program.kind[here] == Kind.RECOMPUTE, -1, here)
        dropped = np.maximum.accumulate(np.r_[-1, ends[:-1]])
        if (gathered <= dropped).any():
            case.refuse(
                here[np.argmax(gathered <= dropped)],
                f"needs its sharded parameters; no ALL_GATHER of bucket {held.bucket[row]} brings "
                "a copy since the last FORWARD or BACKWARD of its stage",
            )


def _check_versions(case: Case, grid: Grid, updates: Lists) -> None:
    """Check version of forward = updates of its stage so far, and backward as its forward."""
    program = case.program
    forward = grid.forward
    used = np.flatnonzero(forward >= 0)
    rows = forward[used]
    home = case.home(program.stage[rows], program.device[rows])
    span = len(program) + 1
    keys = np.repeat(np.arange(len(updates.size)), updates.size) * span + updates.rows
    done = np.searchsorted(keys, home * span + rows) - updates.start[home]
    wrong = program.version[rows] != done
    if wrong.any():
        at = int(np.argmax(wrong))
        case.refuse(
            rows[at],
            f"uses version {program.version[rows[at]]} of its weights; {done[at]} updates of its "
            "stage come before it",
        )
    for part in (grid.recompute, grid.backward, grid.last):
        used = np.flatnonzero(part >= 0)
        wrong = program.version[part[used]] != program.version[forward[used]]
        if wrong.any():
            row, made = (int(rows[used[np.argmax(wrong)]]) for rows in (part, forward))
            case.refuse(
                row,
                f"uses version {program.version[row]} of its weights; its FORWARD used "
                f"{program.version[made]}",
            )
