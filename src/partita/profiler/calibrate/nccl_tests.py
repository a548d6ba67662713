"""The text that ``nccl-tests`` prints (``all_reduce_perf`` and others), as records of collectives.

A line for each rank names its host and its GPU, then a table has a row for each size, with the
time of the operation out of place and in place. Which collective it is, newer versions say; for
others the name of the file must, or the caller: ``all_reduce=FILE``.
"""

import math
import re
from collections import Counter
from dataclasses import dataclass
from pathlib import PurePath

from partita.errors import FormatError
from partita.names import short
from partita.profiler.calibrate.records import ReduceRecord

KINDS = {
    "all_reduce": "all_reduce",
    "allreduce": "all_reduce",
    "all_gather": "all_gather",
    "allgather": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "reducescatter": "reduce_scatter",
    "alltoall": "all_to_all",
    "all_to_all": "all_to_all",
    "sendrecv": "send_recv",
    "send_recv": "send_recv",
    "broadcast": "broadcast",
}
"""Collectives by the words that name them in texts and names of files."""
_RANK = re.compile(
    r"#\s+Rank\s+(\d+)\s+(?:Group\s+\d+\s+)?Pid\s+\d+\s+on\s+(\S+)\s+device\s+\d+\s+\[\S+\]\s+(.+)"
)
_STARTING = re.compile(r"Collective test starting:\s*(\w+)_perf")
_USUAL_TIME_COLUMN = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class NcclTest:
    """One output of ``nccl-tests``.

    Attributes:
        record: The collective and its times.
        hosts: Host of each rank.
        titles: Name of the GPU of each rank.
    """

    record: ReduceRecord
    hosts: tuple[str, ...]
    titles: tuple[str, ...]


def read_nccl_tests(text: str, *, kind: str = "", path: str = "") -> NcclTest:
    """Return the collective of an output.

    Args:
        text: What the program printed.
        kind: The collective; empty = as the text or the name of the file says.
        path: Name of the file.

    Raises:
        FormatError: There are no ranks or no times, or the collective is not known.
    """
    ranks = [match for line in text.splitlines() if (match := _RANK.match(line.strip()))]
    if len(ranks) < 2:
        raise FormatError(
            f"{len(ranks)} lines that name a rank; expected the output of nccl-tests over 2 ranks "
            "or more",
            path=path,
        )
    hosts = tuple(match.group(2) for match in ranks)
    sizes, seconds = _times(text, path)
    return NcclTest(
        record=ReduceRecord(
            kind=_kind(text, kind, path),
            num_ranks=len(ranks),
            ranks_per_host=max(Counter(hosts).values()),
            sizes_bytes=sizes,
            seconds=seconds,
        ),
        hosts=hosts,
        titles=tuple(match.group(3).strip() for match in ranks),
    )


def _kind(text: str, given: str, path: str) -> str:
    said = _STARTING.search(text)
    name = PurePath(path).name.lower().replace("-", "_")
    for word in (given.lower(), said.group(1).lower() if said else "", name):
        found = [kind for part, kind in KINDS.items() if part in word]
        if found:
            return found[0]
    raise FormatError(
        "it does not say which collective it is of; name the file for it, or write "
        f"KIND=FILE with one of {', '.join(dict.fromkeys(KINDS.values()))}",
        path=path,
    )


def _times(text: str, path: str) -> tuple[tuple[int, ...], tuple[tuple[float, ...], ...]]:
    """Return sizes and the times of each, out of place and in place."""
    at, found = _USUAL_TIME_COLUMN, {}
    for number, line in enumerate(text.splitlines(), 1):
        words = line.split()
        if "algbw" in words and "time" in words:
            at = words.index("time") - (1 if words[0] == "#" else 0)
        if not words or not words[0].isdigit() or len(words) <= at + 2:
            continue
        try:
            times = tuple(float(word) * 1e-6 for word in _pick(words, at))
        except ValueError as exc:
            raise FormatError(
                f"time {short(words[at])} is no number", path=path, line=number
            ) from exc
        if int(words[0]) > 0 and all(0 < time < math.inf for time in times):
            found[int(words[0])] = times
    if len(found) < 2:
        raise FormatError(f"{len(found)} sizes with times; expected 2 or more", path=path)
    sizes = tuple(sorted(found))
    return sizes, tuple(found[size] for size in sizes)


def _pick(words: list[str], at: int) -> list[str]:
    """Return the times of a row: out of place, and in place where that was run (not N/A)."""
    # Behind a time stand algbw and busbw, and in most versions the number of wrong values.
    second = at + 4 if len(words) >= at + 8 else at + 3
    has_second = len(words) >= second + 3 and words[second].upper() != "N/A"
    return [words[at], *([words[second]] if has_second else [])]
