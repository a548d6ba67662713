"""Proof that every tensor and every gradient gets to where it is read, once and in time.

What must travel is derived from the plan. A tensor goes from its producer once to every other
device that reads it for that microbatch, rank j of the reader receiving from rank j mod tp of the
producer. Its gradient comes back once from every such device, after the last of its readers there,
to rank i of the producer from rank i mod tp of the reader. Between stages of one device nothing
travels; there the order of the list must do.
"""

from typing import NamedTuple

import numpy as np

from partita.core.columns import Array
from partita.core.program import Kind
from partita.program.check.case import Case, first_repeat
from partita.program.check.grid import Grid, refuse_order


class _Flows(NamedTuple):
    """Tensors on their way from one stage to another, a row for each microbatch.

    Attributes:
        tensor: The tensor.
        turn: The microbatch.
        producer: The stage that makes it.
        reader: The stage that reads it.
    """

    tensor: Array
    turn: Array
    producer: Array
    reader: Array

    def some(self, rows: Array) -> "_Flows":
        """Return some of the rows."""
        return _Flows(*(part[rows] for part in self))


class _Needed(NamedTuple):
    """The messages that there must be, sorted by key.

    Attributes:
        key: The message: gradient, tensor, microbatch, destination, source.
        after: The row of the source that must come before the SEND.
        before: The row of the destination that must come after the RECV.
    """

    key: Array
    after: Array
    before: Array


def check_messages(case: Case, grid: Grid) -> Array:
    """Check all messages; return the RECV of each SEND and the SEND of each RECV, else -1.

    Raises:
        InvalidInputError: A message that lacks an end, is not needed or comes too late, or two ends
            that disagree.
    """
    flows = _flows(case)
    local = case.layout.device(flows.producer, flows.turn) == case.layout.device(
        flows.reader, flows.turn
    )
    _check_local(case, grid, flows.some(np.flatnonzero(local)))
    needed = _needed(case, grid, flows.some(np.flatnonzero(~local)))
    sends, send_keys = _listed(case, Kind.SEND)
    recvs, recv_keys = _listed(case, Kind.RECV)
    if not np.array_equal(send_keys, needed.key) or not np.array_equal(recv_keys, needed.key):
        _refuse_set(case, needed, (sends, send_keys), (recvs, recv_keys))
    _check_sizes(case, sends, recvs)
    _check_times(case, needed, sends, recvs)
    partner = np.full(len(case.program), -1, dtype=np.int64)
    partner[sends], partner[recvs] = recvs, sends
    _check_pairs(case, partner)
    return partner


def _flows(case: Case) -> _Flows:
    turns = case.num_microbatches
    tensor, producer, reader = (np.repeat(part, turns) for part in case.crossing)
    return _Flows(tensor, np.tile(np.arange(turns), len(case.crossing.tensor)), producer, reader)


def _check_local(case: Case, grid: Grid, flows: _Flows) -> None:
    """Check the order of two stages on one device: forward along the data, backward against it."""
    with_gradient = _differentiable(case, flows)
    for rank in range(case.num_ranks):
        here = flows.some(np.flatnonzero(case.layout.ranks[flows.reader] > rank))
        a = case.cell(here.producer, here.turn, rank)
        b = case.cell(here.reader, here.turn, rank)
        made, read = grid.forward[a], grid.forward[b]
        if (made > read).any():
            refuse_order(case, read, made, int(np.argmax(made > read)))
        back = with_gradient.some(np.flatnonzero(case.layout.ranks[with_gradient.reader] > rank))
        given = grid.backward[case.cell(back.reader, back.turn, rank)]
        taken = grid.backward[case.cell(back.producer, back.turn, rank)]
        if (given > taken).any():
            refuse_order(case, taken, given, int(np.argmax(given > taken)))


def _differentiable(case: Case, flows: _Flows) -> _Flows:
    """Return the flows that have a gradient flowing back."""
    if not case.trains:
        return flows.some(np.zeros(0, dtype=np.int64))
    return flows.some(np.flatnonzero(case.problem.graph.tensors.differentiable[flows.tensor]))


def _keys(case: Case, tensor: Array, turn: Array, gradient: Array | bool) -> Array:
    """Return the first three parts of a message's key as one number.

    With source and destination the whole stays far below 2^63: its span is the number of tensors
    and microbatches, which a Program in memory holds, times the squared number of devices.
    """
    head = np.asarray(gradient, dtype=np.int64) * len(case.problem.graph.tensors) + tensor
    return head * case.num_microbatches + turn


def _ends(case: Case, head: Array, target: Array, source: Array) -> Array:
    result: Array = (head * case.num_devices + target) * case.num_devices + source
    return result


def _needed(case: Case, grid: Grid, flows: _Flows) -> _Needed:
    """Return the messages between devices, with the rows that they must stand between."""
    layout = case.layout
    parts: list[tuple[Array, Array, Array]] = []
    back = _differentiable(case, flows)
    for rank in range(case.num_ranks):
        t, m, a, b = flows.some(np.flatnonzero(layout.ranks[flows.reader] > rank))
        other = rank % layout.ranks[a]
        ends = (layout.device(b, m, rank), layout.device(a, m, other))
        made = grid.forward[case.cell(a, m, other)]
        read = grid.forward[case.cell(b, m, rank)]
        parts.append((_ends(case, _keys(case, t, m, gradient=False), *ends), made, read))
    for rank in range(case.num_ranks):
        t, m, a, b = back.some(np.flatnonzero(layout.ranks[back.producer] > rank))
        other = rank % layout.ranks[b]
        ends = (layout.device(a, m, rank), layout.device(b, m, other))
        made = grid.backward[case.cell(b, m, other)]
        read = grid.backward[case.cell(a, m, rank)]
        parts.append((_ends(case, _keys(case, t, m, gradient=True), *ends), made, read))
    key, after, before = (np.concatenate(columns) for columns in zip(*parts, strict=True))
    if not len(key):
        return _Needed(key, after, before)
    order = np.argsort(key, kind="stable")
    begins = np.flatnonzero(np.r_[True, np.diff(key[order]) != 0])
    return _Needed(
        key[order[begins]],
        np.maximum.reduceat(after[order], begins),
        np.minimum.reduceat(before[order], begins),
    )


def _listed(case: Case, kind: Kind) -> tuple[Array, Array]:
    """Return the rows of a kind and their keys, sorted by key."""
    program = case.program
    rows = np.flatnonzero(program.kind == kind)
    head = _keys(case, program.tensor[rows], program.microbatch[rows], program.gradient[rows])
    here, there = program.device[rows], program.peer[rows]
    ends = (there, here) if kind is Kind.SEND else (here, there)
    keys = _ends(case, head, *ends)
    order = np.argsort(keys, kind="stable")
    return rows[order], keys[order]


def _refuse_set(
    case: Case, needed: _Needed, sends: tuple[Array, Array], recvs: tuple[Array, Array]
) -> None:
    """Raise the error that says how the messages differ from what is needed."""
    for rows, keys in (sends, recvs):
        if (np.diff(keys) == 0).any():
            row, again = (int(rows[at]) for at in first_repeat(keys))
            place = row - int(case.program.ptr[case.program.device[row]])
            case.refuse(again, f"repeats position {place}; a tensor goes once to each device")
    for rows, keys in (sends, recvs):
        extra = ~np.isin(keys, needed.key)
        if extra.any():
            _refuse_extra(case, int(rows[np.argmax(extra)]))
    for (rows, keys), (_, others), other in ((sends, recvs, "RECV"), (recvs, sends, "SEND")):
        lonely = ~np.isin(keys, others)
        if lonely.any():
            row = int(rows[np.argmax(lonely)])
            peer = case.name(int(case.program.peer[row]))
            case.refuse(row, f"has no {other} at the other end; {peer} must list it")
    at = int(np.argmin(np.isin(needed.key, sends[1])))
    head = int(needed.key[at]) // case.num_devices**2 // case.num_microbatches
    tensors = len(case.problem.graph.tensors)
    source = case.name(int(needed.key[at]) % case.num_devices)
    what = f"{'the gradient of ' if head >= tensors else ''}tensor {head % tensors}"
    case.refuse(needed.before[at], f"needs {what} from {source}, which is never sent")


def _refuse_extra(case: Case, row: int) -> None:
    """Raise the error that a message is not one of those needed, with the nearest reason."""
    program = case.program
    tensor = int(program.tensor[row])
    if not (case.crossing.tensor == tensor).any():
        case.refuse(row, "moves a tensor that no other stage reads")
    if program.gradient[row] and not case.problem.graph.tensors.differentiable[tensor]:
        case.refuse(row, "moves a gradient that does not flow; the tensor is not differentiable")
    case.refuse(
        row,
        "is not needed: a tensor goes from its producer once to each device that reads it for that "
        "microbatch, and its gradient comes back",
    )


def _check_sizes(case: Case, sends: Array, recvs: Array) -> None:
    program, graph = case.program, case.problem.graph
    differ = program.bytes[sends] != program.bytes[recvs]
    if differ.any():
        at = int(np.argmax(differ))
        case.refuse(
            sends[at],
            f"sends {program.bytes[sends[at]]} bytes, "
            f"{program.describe(int(recvs[at]))} expects {program.bytes[recvs[at]]}",
        )
    samples = program.microbatch_sizes[program.microbatch[sends]]
    size = graph.tensors.bytes_at(samples, graph.batch_size, program.tensor[sends])
    # The stage of a RECV is the one that holds it there: its ranks may hold a part each.
    parts = case.layout.tensor_parts[program.stage[recvs]]
    wrong = np.abs(program.bytes[sends] - size / parts) > 1
    if wrong.any():
        at = int(np.argmax(wrong))
        case.refuse(
            sends[at],
            f"sends {program.bytes[sends[at]]} bytes; the tensor has {size[at]:.0f} for "
            f"{samples[at]} samples, in {parts[at]} parts",
        )


def _check_times(case: Case, needed: _Needed, sends: Array, recvs: Array) -> None:
    """Check that a SEND comes after what makes its tensor, a RECV before what reads it.

    Readers find what they wait for by the stage of the RECV: it must be the first reader there.
    """
    early = sends < needed.after
    if early.any():
        refuse_order(case, sends, needed.after, int(np.argmax(early)))
    late = recvs > needed.before
    if late.any():
        refuse_order(case, needed.before, recvs, int(np.argmax(late)))
    stage = case.program.stage
    for rows, other, what in (
        (sends, needed.after, "the last that makes or adds to it"),
        (recvs, needed.before, "the first that waits for it"),
    ):
        wrong = stage[rows] != stage[other]
        if wrong.any():
            at = int(np.argmax(wrong))
            right = int(stage[other[at]])
            case.refuse(rows[at], f"names the wrong stage; {right} is {what} on this device")


def _check_pairs(case: Case, partner: Array) -> None:
    """Check that both ends of every ordered pair of devices list their messages in one order."""
    program = case.program
    sends = np.flatnonzero(program.kind == Kind.SEND)
    pair = program.device[sends].astype(np.int64) * case.num_devices + program.peer[sends]
    sends = sends[np.argsort(pair, kind="stable")]
    pair = np.sort(pair)
    recvs = partner[sends]
    wrong = (pair[1:] == pair[:-1]) & (recvs[1:] < recvs[:-1])
    if wrong.any():
        at = int(np.argmax(wrong))
        case.refuse(
            sends[at],
            f"goes before {program.describe(int(sends[at + 1]))}, but "
            f"{program.describe(int(recvs[at + 1]))} is posted before "
            f"{program.describe(int(recvs[at]))}; both ends must list their messages in one order",
        )
