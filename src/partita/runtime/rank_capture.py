"""What else a rank notes of a step: a trace of torch's profiler, or the memory that it held.

The trace of a rank has times of its own; ``merged_trace`` puts those of all ranks on one axis. Of
GPUs the allocator tells the memory, of CPUs the bytes of live tensors are counted, which slows the
step down.
"""

import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from partita.profiler.memory import LiveBytes
from partita.ranks.device import seam_of

_BYTES_PER_STATUS_UNIT = 1024


class Capture(StrEnum):
    """What is noted of the last step."""

    NONE = "none"
    PROFILE = "profile"
    MEMORY = "memory"


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryUse:
    """The memory of a rank.

    Attributes:
        begin_bytes: When the step began.
        end_bytes: When it ended.
        peak_bytes: The most in between.
        exact: Whether tensors were counted; else it is what the process grew by.
    """

    begin_bytes: float
    end_bytes: float
    peak_bytes: float
    exact: bool = True


@dataclass(slots=True)
class Captured:
    """What was noted.

    Attributes:
        trace: The trace of torch's profiler, as JSON text; empty = none.
        memory: The memory, if it was asked for.
    """

    trace: str = ""
    memory: MemoryUse | None = None


@contextmanager
def capturing(
    kind: Capture, device: torch.device, held: Sequence[Tensor] = ()
) -> Iterator[Captured]:
    """Note something of what is done inside.

    Args:
        kind: What.
        device: Where the rank computes.
        held: Tensors that are there already.
    """
    found = Captured()
    if kind is Capture.PROFILE:
        with _profiling(found):
            yield found
    elif kind is Capture.MEMORY and seam_of(device).tells_memory:
        with _gpu_memory(found, device):
            yield found
    elif kind is Capture.MEMORY:
        live = LiveBytes()
        for tensor in held:
            live.watch(tensor)
        begin = live.now
        with live:
            yield found
        found.memory = MemoryUse(
            begin_bytes=begin, end_bytes=live.now, peak_bytes=max(live.peak, begin)
        )
    else:
        yield found


@contextmanager
def _profiling(found: Captured) -> Iterator[None]:
    activities = [torch.profiler.ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities) as profiler:
        yield
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        found.trace = path.read_text(encoding="utf-8")


@contextmanager
def _gpu_memory(found: Captured, device: torch.device) -> Iterator[None]:
    seam = seam_of(device)
    seam.reset_peak()
    begin = seam.allocated_bytes()
    yield
    found.memory = MemoryUse(
        begin_bytes=begin, end_bytes=seam.allocated_bytes(), peak_bytes=seam.peak_bytes()
    )


class ProcessMemory:
    """What a process has grown by, as the system sees it; needs no counting."""

    def __init__(self) -> None:
        self._begin = _status_bytes("VmRSS")

    def use(self) -> MemoryUse | None:
        """Return the growth since the beginning; None where the system does not tell."""
        peak, now = _status_bytes("VmHWM"), _status_bytes("VmRSS")
        if not peak:
            return None
        return MemoryUse(
            begin_bytes=0.0,
            end_bytes=max(0.0, now - self._begin),
            peak_bytes=max(0.0, peak - self._begin),
            exact=False,
        )


def most_memory(device: torch.device) -> float:
    """Return the most memory that this process has used, on its GPU where it has one."""
    return seam_of(device).peak_bytes() or _status_bytes("VmHWM")


def _status_bytes(name: str) -> float:
    try:
        text = Path("/proc/self/status").read_text(encoding="ascii")
    except OSError:
        return 0.0
    for line in text.splitlines():
        if line.startswith(f"{name}:"):
            return float(line.split()[1]) * _BYTES_PER_STATUS_UNIT
    return 0.0


def merged_trace(traces: Mapping[str, str]) -> str:
    """Return one Chrome trace of all ranks; empty if there are none.

    The profiler tells wall-clock times, so the clocks of several hosts must agree.

    Args:
        traces: The trace of each rank, by the name of its device.
    """
    if not traces:
        return ""
    events: list[dict[str, Any]] = []
    first_ns: int | None = None
    for place, (name, text) in enumerate(traces.items()):
        document = json.loads(text)
        base_ns = int(document.get("baseTimeNanoseconds", 0))
        first_ns = base_ns if first_ns is None else first_ns
        title = {"name": f"rank {place} {name}"}
        events.append({"ph": "M", "name": "process_name", "pid": place, "args": title})
        events += _moved(document["traceEvents"], place, (base_ns - first_ns) / 1000)
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})


def _moved(events: Sequence[dict[str, Any]], place: int, shift_us: float) -> list[dict[str, Any]]:
    """Return the events of a rank as those of one process, on the common axis."""
    result = []
    for event in events:
        if event.get("ph") == "M" and event.get("name", "").startswith("process_"):
            continue
        moved = {**event, "pid": place}
        if "ts" in event:
            moved["ts"] = float(event["ts"]) + shift_us
        if "id" in event:
            moved["id"] = f"{place}/{event['id']}"
        result.append(moved)
    return result
