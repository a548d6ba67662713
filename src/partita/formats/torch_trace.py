"""Traces of torch's profiler (Kineto's Chrome JSON): passes of pipelines, collectives, messages.

torch's runtime schedules (interleaved, zero-bubble, those from a CSV; torchtitan's, too) mark each
action ``PP:<stage><F|B|I|W><microbatch>``, which is an instruction of ours; GPipe marks ``Forward
i`` and ``Backward i``, plain 1F1B marks nothing. Where marks on the GPU's own clock are there,
those count. Collectives are NCCL's kernels with their size and group, or gloo's marks; messages
likewise, where both ends are known: newer versions of torch name them, and in a group of two the
other one is meant.

A file is of one rank: which, ``distributedInfo`` says, else the name of the file.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from partita.core.program import Kind
from partita.errors import FormatError
from partita.names import short

_PASS = re.compile(r"PP:(\d{1,5})([FBIW])(\d{1,6})")
_GPIPE = re.compile(r"(Forward|Backward) (\d{1,6})")
_KINDS = {
    "F": Kind.FORWARD,
    "B": Kind.BACKWARD,
    "I": Kind.BACKWARD_INPUT,
    "W": Kind.BACKWARD_WEIGHT,
    "Forward": Kind.FORWARD,
    "Backward": Kind.BACKWARD,
}
_RANK_IN_NAME = re.compile(r"rank[_-]?(\d{1,6})|[_.-](\d{1,6})(?:\.|$)", re.IGNORECASE)
_MARKS = ("gpu_user_annotation", "user_annotation")
_COLLECTIVES = {
    "allreduce": "all_reduce",
    "all_reduce": "all_reduce",
    "allgather": "all_gather",
    "_allgather_base": "all_gather",
    "all_gather": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "_reduce_scatter_base": "reduce_scatter",
    "alltoall": "all_to_all",
    "all_to_all": "all_to_all",
    "all_to_allv": "all_to_all",
    "broadcast": "broadcast",
}
_BYTES = {
    **dict.fromkeys(("double", "long", "int64", "float64", "long int"), 8),
    **dict.fromkeys(("float", "int", "float32", "int32"), 4),
    **dict.fromkeys(("half", "bfloat16", "c10::half", "c10::bfloat16", "float16", "short"), 2),
    **dict.fromkeys(("byte", "char", "bool", "unsigned char", "signed char"), 1),
}
_MOST_EVENTS = 5_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedPass:
    """A pass of a stage over a microbatch.

    Attributes:
        stage: The stage; -1 = the one stage of the rank.
        kind: Forward, backward, or a part of backward.
        microbatch: The microbatch, counted by the rank.
        start_s: When it began, on the clock of the trace.
        end_s: When it ended.
    """

    stage: int
    kind: Kind
    microbatch: int
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedCollective:
    """A collective as one rank saw it.

    Attributes:
        kind: Such as ``all_reduce``.
        ranks: Ranks of its group; empty = not said.
        num_ranks: Number of them.
        bytes: Bytes of what goes in, or of what comes out where that is more.
        seconds: Seconds of its kernel, which waits for other ranks, too.
    """

    kind: str
    ranks: tuple[int, ...]
    num_ranks: int
    bytes: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedMessage:
    """A message between two ranks as one of them saw it.

    Attributes:
        source: Rank that sends.
        target: Rank that receives.
        is_send: Whether the sender saw it.
        bytes: Bytes of the message.
        seconds: Seconds of its kernel, which waits for the other rank, too.
    """

    source: int
    target: int
    is_send: bool
    bytes: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchTrace:
    """What a trace says of one rank.

    Attributes:
        rank: The rank; -1 = neither the file nor its name says it.
        steps: The passes of each step, in their order.
        collectives: The collectives.
        messages: The messages, in their order.
    """

    rank: int
    steps: tuple[tuple[TracedPass, ...], ...]
    collectives: tuple[TracedCollective, ...]
    messages: tuple[TracedMessage, ...] = ()


def is_torch_trace(value: object) -> bool:
    """Return whether a JSON value is a trace of torch's profiler."""
    return isinstance(value, dict) and "traceEvents" in value and "schemaVersion" in value


def read_torch_trace(value: Any, *, name: str = "") -> TorchTrace:  # noqa: ANN401 (JSON is any value)
    """Return the passes, the collectives and the messages of a trace.

    Args:
        value: The trace.
        name: Name of its file, which may have the rank.

    Raises:
        FormatError: It is no trace, or an event of it is broken.
    """
    whole = complete_events(value)
    base = value.get("baseTimeNanoseconds")
    base_s = float(base) * 1e-9 if isinstance(base, int) and 0 <= base < 2**63 else 0.0
    info = value.get("distributedInfo")
    info = info if isinstance(info, dict) else {}
    rank, calls = _rank(info, name), list(_calls(whole, whole_number(info.get("world_size"))))
    return TorchTrace(
        rank=rank,
        steps=_steps(whole, base_s),
        collectives=tuple(filter(None, map(_collective, calls))),
        messages=tuple(
            one
            for call in sorted(calls, key=lambda call: call.start_s)
            if (one := _message(call, rank)) is not None
        ),
    )


def complete_events(value: Any) -> list[dict[str, Any]]:  # noqa: ANN401 (JSON is any value)
    """Return the events of a trace that have a beginning and an end.

    Raises:
        FormatError: It is no trace.
    """
    events = value.get("traceEvents") if isinstance(value, dict) else None
    if not isinstance(events, list) or len(events) > _MOST_EVENTS:
        raise FormatError("it has no list 'traceEvents'; expected a trace of torch's profiler")
    return [event for event in events if isinstance(event, dict) and event.get("ph") == "X"]


def _rank(info: Mapping[str, Any], name: str) -> int:
    rank = whole_number(info.get("rank"), -1)
    if rank >= 0:
        return rank
    found = list(_RANK_IN_NAME.finditer(name))
    return int(found[-1].group(1) or found[-1].group(2)) if found else -1


def whole_number(value: object, default: int = 0) -> int:
    """Return a count, number or length of an event; a default where it is none."""
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**40:
        return default
    return value


def event_times(event: Mapping[str, Any]) -> tuple[float, float]:
    """Return start and end of an event in seconds.

    Raises:
        FormatError: Its times are no numbers.
    """
    start, spent = event.get("ts"), event.get("dur", 0)
    for value in (start, spent):
        if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < 1e18:
            raise FormatError(
                f"event {short(event.get('name'))} has time {short(value)}; expected microseconds"
            )
    assert isinstance(start, int | float)
    if spent < 0:
        raise FormatError(f"event {short(event.get('name'))} takes {spent} us")
    return start * 1e-6, (start + spent) * 1e-6


def _steps(events: list[dict[str, Any]], base_s: float) -> tuple[tuple[TracedPass, ...], ...]:
    """Return the passes by step: one begins where a pass comes that the step has already."""
    for mark in _MARKS:
        found = [
            one
            for event in events
            if event.get("cat") == mark and (one := _pass(event, base_s)) is not None
        ]
        if found:
            break
    found.sort(key=lambda one: (one.start_s, one.end_s))
    steps: list[list[TracedPass]] = []
    seen: set[tuple[int, Kind, int]] = set()
    for one in found:
        key = (one.stage, one.kind, one.microbatch)
        if not steps or key in seen:
            steps.append([])
            seen = set()
        steps[-1].append(one)
        seen.add(key)
    return tuple(map(tuple, steps))


def _pass(event: Mapping[str, Any], base_s: float) -> TracedPass | None:
    name = str(event.get("name", ""))
    match, gpipe = _PASS.fullmatch(name), _GPIPE.fullmatch(name)
    if match is None and gpipe is None:
        return None
    start_s, end_s = event_times(event)
    words = match.groups() if match else ("-1", *gpipe.groups()) if gpipe else ()
    return TracedPass(
        stage=int(words[0]),
        kind=_KINDS[words[1]],
        microbatch=int(words[2]),
        start_s=base_s + start_s,
        end_s=base_s + end_s,
    )


@dataclass(frozen=True, slots=True)
class _Call:
    """A call of a process group, collective or message, by its own name."""

    name: str
    bytes: int
    ranks: tuple[int, ...]
    num_ranks: int
    ends: tuple[int, int]
    start_s: float
    end_s: float


def _calls(events: list[dict[str, Any]], world: int) -> Iterator[_Call]:
    """Yield the calls of process groups that say their size, and took time."""
    for event in events:
        found = event.get("args")
        args = found if isinstance(found, dict) else {}
        if event.get("cat") == "kernel" and "Collective name" in args:
            name = str(args["Collective name"])
            count = max(
                whole_number(args.get("In msg nelems")), whole_number(args.get("Out msg nelems"))
            )
            width = _BYTES.get(str(args.get("dtype")).lower(), 0)
            ranks = _numbers(str(args.get("Process Group Ranks", "")))
            number = whole_number(args.get("Group size")) or len(ranks)
        elif event.get("cat") == "user_annotation" and str(event.get("name")).startswith("gloo:"):
            name = str(event["name"]).removeprefix("gloo:")
            count, width = _elements(args)
            ranks, number = (), world
        else:
            continue
        start_s, end_s = event_times(event)
        if count and width and number > 1 and end_s > start_s:
            ends = (
                whole_number(args.get("Src Rank"), -1),
                whole_number(args.get("Dst Rank"), -1),
            )
            yield _Call(name.lower(), count * width, ranks, number, ends, start_s, end_s)


def _collective(call: _Call) -> TracedCollective | None:
    kind = _COLLECTIVES.get(call.name)
    if kind is None:
        return None
    return TracedCollective(
        kind=kind,
        ranks=call.ranks,
        num_ranks=call.num_ranks,
        bytes=call.bytes,
        seconds=call.end_s - call.start_s,
    )


def _message(call: _Call, rank: int) -> TracedMessage | None:
    """Return a call as a message; None where it is none, or its other end is not known."""
    if call.name not in ("send", "recv"):
        return None
    is_send = call.name == "send"
    other = call.ends[1] if is_send else call.ends[0]
    if other < 0 and call.num_ranks == 2:
        other = next((one for one in call.ranks or (0, 1) if one != rank), -1)
    if rank < 0 or other < 0 or other == rank:
        return None
    return TracedMessage(
        source=rank if is_send else other,
        target=other if is_send else rank,
        is_send=is_send,
        bytes=call.bytes,
        seconds=call.end_s - call.start_s,
    )


def _numbers(text: str) -> tuple[int, ...]:
    """Return the ranks of a text such as ``[0, 1, 2]``; none where it is cut short."""
    if "..." in text:
        return ()
    return tuple(int(word) for word in re.findall(r"\d{1,9}", text[:100_000]))


def _elements(args: Mapping[str, Any]) -> tuple[int, int]:
    """Return how many elements a mark of gloo names, and the bytes of one."""
    dims, types = args.get("Input Dims"), args.get("Input type")
    if not isinstance(dims, list) or not isinstance(types, list) or not dims or not types:
        return 0, 0
    shape = dims[0] if isinstance(dims[0], list) else []
    count = 1
    for length in shape:
        count *= whole_number(length)
    return min(count, 2**50), _BYTES.get(str(types[0]).lower(), 0)
