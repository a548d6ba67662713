"""A Timeline as Chrome-trace JSON, which Perfetto and ``chrome://tracing`` open.

A host is a process, a device a thread in it; messages and collectives, which do not occupy their
device, have threads of their own beside it. Slices of one thread never overlap: where they would,
the later one goes to a further lane ("gpu0 out 2"), since viewers drop overlapping slices. A RECV
whose SEND is in the timeline is not a slice: it waits from its post on, and the SEND shows when the
bytes travelled. An arrow leads from each SEND to the compute that reads what it brought.

What Perfetto asks for beyond the format's description: times on a grid of whole nanoseconds (it
truncates to it), ``displayTimeUnit`` before and ``otherData`` after the events, names in UTF-8 and
not as escapes, thread numbers unique over all processes, and each end of an arrow right after the
slice that it belongs to.
"""

import bisect
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, TypeAlias

import numpy as np

from partita.core.columns import Array
from partita.core.program import Kind, Program
from partita.core.timeline import Timeline, TimelineOrigin
from partita.errors import FormatError, InvalidInputError
from partita.report.tracks import Tracks, nanoseconds
from partita.report.tracks import tracks as layout
from partita.report.transfers import transfers

Event: TypeAlias = dict[str, Any]

ORIGIN_LABELS: Mapping[TimelineOrigin, str] = {
    TimelineOrigin.SIMULATED: "simulated: predicted by the cost model, nothing was run",
    TimelineOrigin.EMULATED: "emulated: compute slept through, communication real",
    TimelineOrigin.MEASURED: "measured: a real run",
}
KIND_LABELS: Mapping[Kind, str] = {
    Kind.LOAD: "load",
    Kind.FORWARD: "F",
    Kind.RECOMPUTE: "R",
    Kind.BACKWARD: "B",
    Kind.BACKWARD_INPUT: "BI",
    Kind.BACKWARD_WEIGHT: "BW",
    Kind.UPDATE: "update",
    Kind.SEND: "send",
    Kind.RECV: "recv",
    Kind.ALL_REDUCE: "all-reduce",
    Kind.ALL_GATHER: "all-gather",
    Kind.REDUCE_SCATTER: "reduce-scatter",
    Kind.ALL_TO_ALL: "all-to-all",
    Kind.BROADCAST: "broadcast",
}

_MAX_S = 9e9
_CHUNK = 4096
_FIELDS: Mapping[str, tuple[str, ...]] = {
    "X": ("name", "pid", "tid", "ts", "dur"),
    "B": ("name", "pid", "tid", "ts"),
    "E": ("pid", "tid", "ts"),
    "M": ("name", "pid", "args"),
    "C": ("name", "pid", "ts", "args"),
    "s": ("name", "pid", "tid", "ts", "id"),
    "f": ("name", "pid", "tid", "ts", "id"),
}


def chrome_trace(
    timeline: Timeline,
    *,
    program: Program | None = None,
    tensor_names: Sequence[str] | None = None,
) -> str:
    """Return a timeline as Chrome-trace JSON.

    Args:
        timeline: What to show.
        program: Its Program; lets transfers say which tensor they carry.
        tensor_names: Names of the graph's tensors, used with the Program.

    Raises:
        InvalidInputError: The Program is not the timeline's, or times are beyond 9e9 seconds.
    """
    return "".join(trace_pieces(timeline, program=program, tensor_names=tensor_names))


def trace_pieces(
    timeline: Timeline,
    *,
    program: Program | None = None,
    tensor_names: Sequence[str] | None = None,
) -> Iterator[str]:
    """Yield the text of ``chrome_trace`` in pieces, for a file that is written as it is made."""
    encode = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode
    events = trace_events(timeline, program=program, tensor_names=tensor_names)
    yield '{"displayTimeUnit":"ms","traceEvents":['
    before = "\n"
    while chunk := list(islice(events, _CHUNK)):
        yield before + encode(chunk)[1:-1].replace('},{"ph"', '},\n{"ph"')
        before = ",\n"
    yield f'\n],"otherData":{encode(_other_data(timeline))}}}\n'


def trace_events(
    timeline: Timeline,
    *,
    program: Program | None = None,
    tensor_names: Sequence[str] | None = None,
) -> Iterator[Event]:
    """Yield the events of ``chrome_trace``: names, slices with their arrows, counters."""
    if timeline.makespan_s > _MAX_S:
        raise InvalidInputError(
            f"the timeline takes {timeline.makespan_s:g} s; a trace holds at most {_MAX_S:g} s"
        )
    if program is not None and len(timeline) and timeline.instruction.max() >= len(program):
        raise InvalidInputError(
            f"the timeline has instruction {timeline.instruction.max()}, "
            f"its program {len(program)} instructions; give the program that it ran"
        )
    tracks = layout(timeline)
    yield from _name_events(timeline, tracks)
    yield from _slice_events(timeline, tracks, _tensors(timeline, program, tensor_names))
    yield from _memory_events(timeline, tracks)
    yield from _clock_events(timeline, tracks)
    yield from _energy_events(timeline, tracks)


def _other_data(timeline: Timeline) -> Event:
    data: Event = {
        "origin": timeline.origin.value,
        "label": ORIGIN_LABELS[timeline.origin],
        "makespan_s": timeline.makespan_s,
    }
    if not math.isnan(timeline.period_s):
        data["period_s"] = timeline.period_s
    return data | {"devices": len(timeline.devices), "instructions": len(timeline)}


def _microseconds(nanoseconds: Array) -> list[float]:
    """Return microseconds that give the same nanoseconds back when a viewer truncates them."""
    value = nanoseconds / 1000.0
    low = np.trunc(value * 1000.0) < nanoseconds
    value[low] = np.nextafter(value[low], np.inf)
    result: list[float] = value.tolist()
    return result


def _name_events(timeline: Timeline, tracks: Tracks) -> Iterator[Event]:
    for process, host in enumerate(tracks.hosts, 1):
        name = f"{host or 'devices'} ({timeline.origin.value})"
        yield _metadata("process_name", process, 0, name=name)
        yield _metadata("process_sort_index", process, 0, sort_index=process)
    for thread, (name, device) in enumerate(tracks.names, len(tracks.hosts) + 1):
        process = tracks.host_of[device] + 1
        yield _metadata("thread_name", process, thread, name=name)
        yield _metadata("thread_sort_index", process, thread, sort_index=thread)


def _metadata(what: str, pid: int, tid: int, **args: object) -> Event:
    place = {"pid": pid, "tid": tid} if tid else {"pid": pid}
    return {"ph": "M", "name": what, **place, "args": args}


def _tensors(
    timeline: Timeline, program: Program | None, names: Sequence[str] | None
) -> Sequence[str]:
    """Return the name of the tensor that each row carries, empty where it is not known."""
    if program is None:
        return ()
    column = program.tensor[timeline.instruction].tolist()
    known = dict(enumerate(names or ()))
    return [known.get(tensor, f"tensor {tensor}") if tensor >= 0 else "" for tensor in column]


def _slice_events(timeline: Timeline, tracks: Tracks, tensors: Sequence[str]) -> Iterator[Event]:
    arrow_out, arrows_in = _arrows(timeline)
    labels = _labels(timeline, tracks, tensors)
    rows, first = tracks.rows, len(tracks.hosts) + 1
    begin = nanoseconds(timeline.start_s[rows])
    columns = zip(
        rows.tolist(),
        (tracks.thread + first).tolist(),
        timeline.device[rows].tolist(),
        _microseconds(begin),
        _microseconds(nanoseconds(timeline.end_s[rows]) - begin),
        _arguments(timeline, rows, tensors),
        strict=True,
    )
    for row, tid, device, ts, dur, args in columns:
        pid = tracks.host_of[device] + 1
        name, category = labels(row)
        place = {"pid": pid, "tid": tid, "ts": ts}
        yield {"ph": "X", "name": name, "cat": category, **place, "dur": dur, "args": args}
        end = {"name": "transfer", "cat": "transfer", **place}
        if row in arrow_out:
            yield {"ph": "s", "id": row + 1, **end}
        for send in arrows_in.get(row, ()):
            yield {"ph": "f", "bp": "e", "id": send + 1, **end}


def _arrows(timeline: Timeline) -> tuple[set[int], dict[int, list[int]]]:
    """Return the SENDs that an arrow leaves, and those whose arrows come to each compute row.

    An arrow never leads back in time, as it would where the clocks of two hosts differ.
    """
    send, _, consumer = transfers(timeline)
    drawn = consumer >= 0
    drawn[drawn] &= timeline.start_s[send[drawn]] <= timeline.start_s[consumer[drawn]]
    arrows_in: dict[int, list[int]] = {}
    for row, target in zip(send[drawn].tolist(), consumer[drawn].tolist(), strict=True):
        arrows_in.setdefault(target, []).append(row)
    return set(send[drawn].tolist()), arrows_in


def _labels(
    timeline: Timeline, tracks: Tracks, tensors: Sequence[str]
) -> Callable[[int], tuple[str, str]]:
    """Return a function that gives the name and category of a row."""
    kind, stage = timeline.kind.tolist(), timeline.stage.tolist()
    microbatch, peer = timeline.microbatch.tolist(), timeline.peer.tolist()
    target = dict(zip(*(part.tolist() for part in transfers(timeline)[::2]), strict=True))
    words = {int(k): label for k, label in KIND_LABELS.items()}
    categories = {int(k): k.name.lower() for k in Kind}
    short = len(tracks.hosts) == 1

    def label(row: int) -> tuple[str, str]:
        what = kind[row]
        turn = f" m{microbatch[row]}" if microbatch[row] >= 0 else ""
        if what not in (Kind.SEND, Kind.RECV):
            place = f" s{stage[row]}" if stage[row] >= 0 else ""
            return f"{words[what]}{place}{turn}", categories[what]
        reader = target.get(row, -1)
        gradient = reader >= 0 and kind[reader] != Kind.FORWARD
        tensor = tensors[row] if tensors else ""
        name = f"{'gradient ' if gradient else ''}{tensor}".strip() or words[what]
        other = (tracks.leaf if short else timeline.devices)[peer[row]] if peer[row] >= 0 else "?"
        return f"{name}{turn} {'from' if what == Kind.RECV else 'to'} {other}", categories[what]

    return label


def _arguments(timeline: Timeline, rows: Array, tensors: Sequence[str]) -> Iterator[Event]:
    """Yield the arguments of each row: what is known of it."""
    send, recv, _ = transfers(timeline)
    arrival = dict(zip(send.tolist(), np.where(recv < 0, -1, recv).tolist(), strict=True))
    end_s, devices = timeline.end_s, timeline.devices
    names = {int(k): k.name.lower() for k in Kind}
    columns = zip(
        rows.tolist(),
        timeline.kind[rows].tolist(),
        timeline.stage[rows].tolist(),
        timeline.microbatch[rows].tolist(),
        timeline.peer[rows].tolist(),
        timeline.bytes[rows].tolist(),
        timeline.clock_mhz[rows].tolist(),
        timeline.energy_j[rows].tolist(),
        strict=True,
    )
    for row, kind, stage, microbatch, peer, size, clock_mhz, energy_j in columns:
        args: Event = {"kind": names[kind], "stage": stage, "microbatch": microbatch, "bytes": size}
        if peer >= 0:
            args["peer"] = devices[peer]
        if tensors and tensors[row]:
            args["tensor"] = tensors[row]
        if not math.isnan(clock_mhz):
            args["clock_mhz"] = clock_mhz
        if not math.isnan(energy_j):
            args["energy_j"] = energy_j
        received = arrival.get(row, -1)
        if received >= 0 and end_s[received] != end_s[row]:
            args["arrived_s"] = float(end_s[received])
        yield args


def _counter(tracks: Tracks, device: int, what: str) -> Event:
    """Return what the counters of a device have in common."""
    name = f"{tracks.leaf[device]} {what}"
    return {"ph": "C", "name": name, "pid": tracks.host_of[device] + 1}


def _memory_events(timeline: Timeline, tracks: Tracks) -> Iterator[Event]:
    """Yield the memory of each device; of a moment with several values the largest and the last."""
    device, time_ns = timeline.memory_device, nanoseconds(timeline.memory_s)
    if not len(device):
        return
    begins = np.ones(len(device), dtype=bool)
    begins[1:] = (device[1:] != device[:-1]) | (time_ns[1:] != time_ns[:-1])
    first = np.flatnonzero(begins)
    top = np.maximum.reduceat(timeline.memory_bytes, first)
    last = timeline.memory_bytes[np.append(first[1:], len(device)) - 1]
    common = [_counter(tracks, number, "memory") for number in range(len(timeline.devices))]
    columns = zip(
        device[first].tolist(),
        _microseconds(time_ns[first]),
        top.tolist(),
        last.tolist(),
        strict=True,
    )
    for number, ts, high, end in columns:
        if high != end:
            yield {**common[number], "ts": ts, "args": {"bytes": high}}
        yield {**common[number], "ts": ts, "args": {"bytes": end}}


def _clock_events(timeline: Timeline, tracks: Tracks) -> Iterator[Event]:
    """Yield the clock of each device where it is known and changes."""
    rows = _by_time(timeline, timeline.start_s, ~np.isnan(timeline.clock_mhz))
    device, clock = timeline.device[rows], timeline.clock_mhz[rows]
    new = np.ones(len(rows), dtype=bool)
    new[1:] = (device[1:] != device[:-1]) | (clock[1:] != clock[:-1])
    rows = rows[new]
    times = _microseconds(nanoseconds(timeline.start_s[rows]))
    for row, ts in zip(rows.tolist(), times, strict=True):
        args = {"MHz": float(timeline.clock_mhz[row])}
        yield {**_counter(tracks, int(timeline.device[row]), "clock"), "ts": ts, "args": args}


def _energy_events(timeline: Timeline, tracks: Tracks) -> Iterator[Event]:
    """Yield the energy that the instructions of each device have taken so far, where known."""
    rows = _by_time(timeline, timeline.end_s, ~np.isnan(timeline.energy_j))
    times = _microseconds(nanoseconds(timeline.end_s[rows]))
    total = 0.0
    before = -1
    for row, ts in zip(rows.tolist(), times, strict=True):
        device = int(timeline.device[row])
        common = _counter(tracks, device, "energy")
        if device != before:
            total, before = 0.0, device
            yield {**common, "ts": 0.0, "args": {"J": 0.0}}
        total += float(timeline.energy_j[row])
        yield {**common, "ts": ts, "args": {"J": total}}


def _by_time(timeline: Timeline, time_s: Array, known: Array) -> Array:
    rows = np.flatnonzero(known)
    return rows[np.lexsort((time_s[rows], timeline.device[rows]))]


def check_trace(data: object) -> None:
    """Check that a parsed Chrome trace is one that viewers show whole.

    Every event has a known phase and a time of 0 or more; slices are complete events or balanced
    begin-end pairs, and those of one thread lie apart or inside each other; every thread with
    slices and its process have names; every arrow has one start and one end, not back in time, both
    inside slices.

    Raises:
        FormatError: It is not; names the first event that is wrong.
    """
    events = data.get("traceEvents") if isinstance(data, Mapping) else data
    if not isinstance(events, list) or not events:
        raise FormatError("the trace has no list of traceEvents")
    slices: dict[tuple[Any, Any], list[tuple[int, int]]] = {}
    open_at: dict[tuple[Any, Any], list[int]] = {}
    named: set[tuple[Any, Any]] = set()
    ends: list[tuple[int, Event]] = []
    for number, event in enumerate(events):
        _check_event(number, event)
        track = (event["pid"], event.get("tid"))
        phase = event["ph"]
        begin = round(event.get("ts", 0) * 1000)
        if phase == "X":
            slices.setdefault(track, []).append((begin, begin + round(event["dur"] * 1000)))
        elif phase == "B":
            open_at.setdefault(track, []).append(begin)
        elif phase == "E":
            if not open_at.get(track):
                raise FormatError(f"event {number} ends a slice that did not begin")
            slices.setdefault(track, []).append((open_at[track].pop(), begin))
        elif phase == "M":
            named.add((event["name"], track))
        elif phase in "sf":
            ends.append((number, event))
    if any(open_at.values()):
        raise FormatError("a slice that begins has no end")
    _check_names(slices, named)
    _check_arrows(ends, {track: _check_nested(track, part) for track, part in slices.items()})


def _check_event(number: int, event: object) -> None:
    if not isinstance(event, dict) or event.get("ph") not in _FIELDS:
        raise FormatError(f"event {number} is not an event of phase {', '.join(_FIELDS)}")
    phase = event["ph"]
    missing = [what for what in _FIELDS[phase] if what not in event]
    if missing:
        raise FormatError(f"event {number} of phase {phase} has no {missing[0]}")
    for what in ("ts", "dur"):
        value = event.get(what, 0)
        if not isinstance(value, int | float) or not 0 <= value < math.inf:
            raise FormatError(f"event {number}: {what} is {value!r}; expected 0 or more")
    for what, value in event["args"].items() if phase == "C" else ():
        if not isinstance(value, int | float) or not math.isfinite(value):
            raise FormatError(f"event {number}: counter {what} is {value!r}; expected a number")


def _check_names(
    slices: Mapping[tuple[Any, Any], object], named: set[tuple[str, tuple[Any, Any]]]
) -> None:
    processes = {track[0] for what, track in named if what == "process_name"}
    for pid, tid in slices:
        if ("thread_name", (pid, tid)) not in named:
            raise FormatError(f"thread {tid} of process {pid} has no name")
        if pid not in processes:
            raise FormatError(f"process {pid} has no name")


def _check_nested(
    track: tuple[Any, Any], slices: list[tuple[int, int]]
) -> tuple[list[int], list[int]]:
    """Check the slices of a thread; return their starts in order, and the latest end up to each."""
    slices.sort(key=lambda part: (part[0], -part[1]))
    inside: list[int] = []
    latest: list[int] = []
    for begin, end in slices:
        while inside and inside[-1] <= begin:
            inside.pop()
        if inside and end > inside[-1]:
            raise FormatError(
                f"thread {track[1]} of process {track[0]}: the slice at {begin / 1000} us "
                f"overlaps one that ends at {inside[-1] / 1000} us"
            )
        inside.append(end)
        latest.append(max(end, latest[-1]) if latest else end)
    return [begin for begin, _ in slices], latest


def _check_arrows(
    ends: list[tuple[int, Event]], threads: Mapping[tuple[Any, Any], tuple[list[int], list[int]]]
) -> None:
    sides: dict[str, dict[tuple[Any, ...], int]] = {"s": {}, "f": {}}
    for number, event in ends:
        moment = round(event["ts"] * 1000)
        begins, latest = threads.get((event["pid"], event["tid"]), ([], []))
        at = bisect.bisect_right(begins, moment) - 1
        if at < 0 or latest[at] < moment:
            raise FormatError(f"event {number}: the end of an arrow lies in no slice")
        key = (event.get("cat"), event["name"], event["id"])
        if key in sides[event["ph"]]:
            raise FormatError(f"event {number}: arrow {event['id']} has two ends of one kind")
        sides[event["ph"]][key] = moment
    lonely = sorted(sides["s"].keys() ^ sides["f"].keys(), key=str)
    if lonely:
        missing = "end" if lonely[0] in sides["s"] else "start"
        raise FormatError(f"arrow {lonely[0][2]} has no {missing}")
    for key, moment in sides["s"].items():
        if sides["f"][key] < moment:
            raise FormatError(f"arrow {key[2]} leads back in time")
