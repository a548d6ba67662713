"""Traces of torch's profiler: the timeline of a plan as it was measured; links as records."""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from partita.core.cluster import Cluster
from partita.core.codec import parse_json
from partita.core.columns import frozen_array
from partita.core.plan import Plan
from partita.core.problem import Problem
from partita.core.timeline import Timeline, TimelineOrigin
from partita.documents import OpenedFile, open_file
from partita.errors import FormatError, InvalidInputError
from partita.formats.torch_trace import (
    TorchTrace,
    TracedMessage,
    TracedPass,
    is_torch_trace,
    read_torch_trace,
)
from partita.formats.traced_ops import TracedOps, read_traced_ops
from partita.profiler.calibrate.calibrate import TRANSFER
from partita.profiler.calibrate.fit import SMALL_BYTES
from partita.profiler.calibrate.records import ReduceRecord
from partita.program.lower import lower

_Read = TypeVar("_Read")
_ENDINGS = (".json", ".json.gz")
_LEAST_LATENCY_S = 1e-7


def read_traces(names: Sequence[str]) -> tuple[TorchTrace, ...]:
    """Return the traces of files, or of all files of directories, by rank.

    Raises:
        FormatError: A file is no trace; knows the path.
        InvalidInputError: There are none, or two of one rank, or one of none.
    """
    found: dict[int, TorchTrace] = {}
    for path in trace_paths(names):
        trace = read_trace_file(path)
        rank = trace.rank if trace.rank >= 0 or len(names) > 1 else 0
        if rank < 0 or rank in found:
            what = "does not say its rank" if rank < 0 else f"is of rank {rank}, as another one"
            raise InvalidInputError(f"{path} {what}; expected a trace per rank, such as rank0.json")
        found[rank] = trace
    return tuple(found[rank] for rank in sorted(found))


def is_trace(file: OpenedFile) -> bool:
    """Return whether a file looks like a trace of torch's profiler."""
    return b'"traceEvents"' in file.unpacked and b'"schemaVersion"' in file.unpacked[:10_000]


def read_trace_file(path: str) -> TorchTrace:
    """Return the trace of a file.

    Raises:
        FormatError: It is none; knows the path.
    """
    return _read_file(path, partial(read_torch_trace, name=Path(path).name))


def read_ops_file(path: str) -> TracedOps:
    """Return the ops of the trace of a file.

    Raises:
        FormatError: It is none; knows the path.
    """
    return _read_file(path, read_traced_ops)


def _read_file(path: str, read: Callable[[Any], _Read]) -> _Read:
    file = open_file(path)
    try:
        value = parse_json(file.text)
        if not is_torch_trace(value):
            raise FormatError("it is no trace of torch's profiler (schemaVersion, traceEvents)")
        return read(value)
    except FormatError as exc:
        raise (exc if exc.path else exc.at(path)) from exc


def trace_paths(names: Sequence[str]) -> list[str]:
    """Return files, and those of directories, that may be traces.

    Raises:
        InvalidInputError: A directory has none.
    """
    paths: list[str] = []
    for name in names:
        place = Path(name)
        if not place.is_dir():
            paths.append(name)
            continue
        inside = _inside(place)
        if not inside:
            raise InvalidInputError(f"{name} has no traces (*.json, *.json.gz)")
        paths += inside
    return paths


def has_traces(place: Path) -> bool:
    """Return whether a directory's first file that may be a trace is one."""
    inside = _inside(place)
    return bool(inside) and is_trace(open_file(inside[0]))


def _inside(place: Path) -> list[str]:
    return sorted(str(path) for path in place.iterdir() if path.name.endswith(_ENDINGS))


def trace_timeline(problem: Problem, plan: Plan, traces: Sequence[TorchTrace]) -> Timeline:
    """Return the passes of the last step of traces as a measured timeline of a plan.

    Rank r is the r-th device of the plan in the order that trainers count in: by first stage, then
    by replica. The first step of a trace is left out where there are more.

    Raises:
        InvalidInputError: The ranks, stages or microbatches are not those of the plan, or a trace
            has no marks of a pipeline.
    """
    order = _rank_order(plan)
    if len(traces) != len(order) or [trace.rank for trace in traces if trace.rank >= len(order)]:
        raise InvalidInputError(
            f"there are traces of {len(traces)} ranks, the plan has {len(order)} devices; expected "
            "a trace of each"
        )
    program = lower(problem, plan)
    rows: list[int] = []
    passes: list[TracedPass] = []
    for position, trace in enumerate(traces):
        device = order[trace.rank if trace.rank >= 0 else position]
        step = _last_step(trace, position)
        own = defaultdict(list)
        for one in step:
            own[one.stage, one.kind].append(one)
        for (stage, kind), found in own.items():
            is_row = (program.device == device) & (program.kind == kind)
            if stage >= 0:
                is_row &= program.stage == stage
            at = np.flatnonzero(is_row)
            at = at[np.argsort(program.microbatch[at], kind="stable")]
            if len(at) != len(found):
                where = f"stage {stage}" if stage >= 0 else "its stage"
                raise InvalidInputError(
                    f"rank {trace.rank} has {len(found)} passes {kind.name.lower()} of {where}, "
                    f"the plan {len(at)} on {plan.devices[device]}; they are of another plan"
                )
            rows += at.tolist()
            passes += sorted(found, key=lambda one: one.microbatch)
    start = min(one.start_s for one in passes)
    at_rows = frozen_array(rows, np.int32)
    return Timeline(
        origin=TimelineOrigin.MEASURED,
        devices=plan.devices,
        device=program.device[at_rows],
        instruction=at_rows,
        kind=program.kind[at_rows],
        stage=program.stage[at_rows],
        microbatch=program.microbatch[at_rows],
        peer=np.full(len(at_rows), -1),
        start_s=np.array([one.start_s - start for one in passes]),
        end_s=np.array([one.end_s - start for one in passes]),
        bytes=np.zeros(len(at_rows), dtype=np.int64),
    )


def _last_step(trace: TorchTrace, position: int) -> tuple[TracedPass, ...]:
    if not trace.steps:
        raise InvalidInputError(
            f"the trace of rank {max(trace.rank, position)} has no marks of a pipeline (PP:0F0): "
            "torch's plain 1F1B makes none; run the schedule from its CSV, which does"
        )
    longest = max(map(len, trace.steps))
    return [step for step in trace.steps if len(step) == longest][-1]


def _rank_order(plan: Plan) -> list[int]:
    """Return the devices in the order of ranks: by their first stage, then by replica."""
    place: dict[int, tuple[int, int]] = {}
    for index, stage in enumerate(plan.stages):
        for replica, group in enumerate(stage.devices):
            for device in group:
                place.setdefault(device, (index, replica))
    return sorted(place, key=lambda device: place[device])


def reduce_records(traces: Iterable[TorchTrace], cluster: Cluster) -> tuple[ReduceRecord, ...]:
    """Return the collectives of traces by kind and group, and their messages, with all their times.

    Ranks are devices of the cluster, in its order. A kernel waits for the rank that comes last, so
    of several ranks that saw the same the fastest counts when they are fitted; of a message that
    both of its ends saw the shorter time.

    Raises:
        InvalidInputError: There are none that a line can be fitted to, or more ranks than devices.
    """
    times: dict[tuple[str, int, int], dict[int, list[float]]] = defaultdict(
        lambda: defaultdict(list)
    )
    known = list(traces)
    for one in (one for trace in known for one in trace.collectives):
        ranks = one.ranks or tuple(range(one.num_ranks))
        key = (one.kind, one.num_ranks, _ranks_per_host(ranks, cluster))
        times[key][one.bytes].append(one.seconds)
    for ranks, size, seconds in _transfers(known):
        times[TRANSFER, 2, _ranks_per_host(ranks, cluster)][size].append(seconds)
    for (kind, _, per_host), by_size in times.items():
        if kind == TRANSFER and len(by_size) == 1 and cluster.levels:
            # A pipeline sends one size: how long an empty message takes is as the cluster has it.
            level = cluster.levels[0 if per_host == 2 else -1]
            by_size[1].append(max(float(level.latency_s.max()), _LEAST_LATENCY_S))
    records = [
        _record(key, by_size)
        for key, by_size in sorted(times.items())
        if len(by_size) > 1 and max(by_size) > SMALL_BYTES
    ]
    if not records:
        raise InvalidInputError(
            "the traces have no collective of two sizes or more, and no messages above "
            f"{SMALL_BYTES} bytes whose both ends are known; a line cannot be fitted"
        )
    return tuple(records)


def _transfers(traces: Sequence[TorchTrace]) -> Iterator[tuple[tuple[int, int], int, float]]:
    """Yield ends, bytes and seconds of messages; of one that both ends saw the shorter time."""
    sides: dict[tuple[int, int], dict[bool, list[TracedMessage]]] = defaultdict(
        lambda: {True: [], False: []}
    )
    for one in (one for trace in traces for one in trace.messages):
        sides[one.source, one.target][one.is_send].append(one)
    for ends, side in sides.items():
        sent, got = side[True], side[False]
        if [one.bytes for one in sent] == [one.bytes for one in got]:
            for a, b in zip(sent, got, strict=True):
                yield ends, a.bytes, min(a.seconds, b.seconds)
        else:  # one end was not traced, or not as long
            for one in (*sent, *got):
                yield ends, one.bytes, one.seconds


def _ranks_per_host(ranks: Sequence[int], cluster: Cluster) -> int:
    if max(ranks) >= len(cluster):
        raise InvalidInputError(
            f"a collective has rank {max(ranks)}, the cluster {len(cluster)} devices"
        )
    return max(Counter(cluster.devices[rank].host for rank in ranks).values())


def _record(key: tuple[str, int, int], by_size: Mapping[int, list[float]]) -> ReduceRecord:
    sizes = sorted(by_size)
    return ReduceRecord(
        kind=key[0],
        num_ranks=key[1],
        ranks_per_host=key[2],
        sizes_bytes=tuple(sizes),
        seconds=tuple(tuple(by_size[size]) for size in sizes),
    )
