"""Proof that a Program is one for its plan, and every instruction says what its kind needs."""

import numpy as np

from partita.core.plan import Shard
from partita.core.program import FIRST_COLLECTIVE, Kind
from partita.errors import InvalidInputError
from partita.program.check.case import Case

_MESSAGES = (Kind.SEND, Kind.RECV)
_REDUCING = (Kind.ALL_REDUCE, Kind.ALL_GATHER, Kind.REDUCE_SCATTER)
_BY_MICROBATCH = (
    Kind.LOAD,
    Kind.FORWARD,
    Kind.RECOMPUTE,
    Kind.BACKWARD,
    Kind.BACKWARD_INPUT,
    Kind.BACKWARD_WEIGHT,
    *_MESSAGES,
)
_NEEDS = {
    "stage": (*_BY_MICROBATCH, Kind.UPDATE, *_REDUCING),
    "microbatch": _BY_MICROBATCH,
    "tensor": (Kind.LOAD, *_MESSAGES),
    "peer": _MESSAGES,
    "group": _REDUCING,
    "bucket": _REDUCING,
}
_INFERENCE = (Kind.LOAD, Kind.FORWARD, *_MESSAGES, Kind.ALL_GATHER)
_MAY_HAVE = {
    "microbatch": (*_BY_MICROBATCH, *_REDUCING),
    "tensor": _NEEDS["tensor"],
    "peer": _NEEDS["peer"],
    "group": tuple(kind for kind in Kind if kind not in (Kind.LOAD, *_MESSAGES)),
    "bucket": _NEEDS["bucket"],
}


def check_fields(case: Case) -> None:
    """Check what can be seen from each instruction alone.

    Raises:
        InvalidInputError: The Program is for another plan, or an instruction lacks a field, names
            what is not there, or has no place in this kind of step.
    """
    _check_plan(case)
    program, kind = case.program, case.program.kind
    for what, kinds in _NEEDS.items():
        lacks = _is_one_of(kinds)[kind] & (getattr(program, what) < 0)
        if lacks.any():
            case.refuse(int(np.argmax(lacks)), f"has no {what}; its kind needs one")
    for what, kinds in _MAY_HAVE.items():
        idle = ~_is_one_of(kinds)[kind] & (getattr(program, what) >= 0)
        if idle.any():
            case.refuse(int(np.argmax(idle)), f"has a {what}, which its kind does not use")
    _check_kinds(case)
    tensors = len(case.problem.graph.tensors)
    wrong = program.tensor >= tensors
    if wrong.any():
        case.refuse(int(np.argmax(wrong)), f"names a tensor beyond the {tensors} of the graph")
    wrong = program.peer == program.device
    if wrong.any():
        case.refuse(int(np.argmax(wrong)), "goes to its own device; only others are peers")


def _check_plan(case: Case) -> None:
    plan, program = case.plan, case.program
    for what, here, there in (
        ("devices", program.devices, plan.devices),
        ("stages", program.num_stages, len(plan.stages)),
        ("microbatches", program.microbatch_sizes.tolist(), plan.microbatch_sizes.tolist()),
    ):
        if here != there:
            raise InvalidInputError(
                f"the program is for other {what} than the plan; lower the plan again"
            )
    if case.trains == plan.schedule.row.infers:
        mode = case.problem.objective.mode.value
        raise InvalidInputError(f"schedule {plan.schedule.value!r} does not do {mode}")
    shards = {stage.shard for stage in plan.stages} - {Shard.NONE}
    if plan.stashes_weights and shards:
        raise InvalidInputError(
            f"schedule {plan.schedule.value!r} keeps versions of whole weights; shard 'none' only"
        )


def _check_kinds(case: Case) -> None:
    program, kind = case.program, case.program.kind
    if not case.trains:
        wrong = ~_is_one_of(_INFERENCE)[kind] | program.gradient
        if wrong.any():
            case.refuse(int(np.argmax(wrong)), "belongs to training; this is inference")
    meant = _is_one_of((*_BY_MICROBATCH, Kind.UPDATE, *_REDUCING))
    if not meant[kind].all():
        row = int(np.argmin(meant[kind]))
        case.refuse(row, "has no meaning in a step; expected a reduction or a gather")
    wrong = program.gradient & ~_is_one_of(_MESSAGES)[kind]
    if wrong.any():
        case.refuse(int(np.argmax(wrong)), "is marked as a gradient; only messages can be")


def _is_one_of(kinds: tuple[Kind, ...]) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    table = np.zeros(max(Kind) + 1, dtype=bool)
    table[list(kinds)] = True
    return table


def num_collectives(case: Case) -> int:
    """Return how many collectives there are, each counted once for all its members."""
    rows = np.flatnonzero(case.program.kind >= FIRST_COLLECTIVE)
    first = case.program.group_devices[case.program.group_ptr[case.program.group[rows]]]
    return int(np.count_nonzero(first == case.program.device[rows]))
