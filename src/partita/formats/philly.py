"""Logs of submissions: Philly's own (JSON), and tables of submissions (CSV with a header).

The job log of Microsoft's Philly clusters (``cluster_job_log``) is a list of ``{status, vc, jobid,
submitted_time, user, attempts: [{start_time, end_time, detail: [{ip, gpus: [...]}]}]}``. A job's
duration is the sum of its attempts, its GPUs those of the last. Jobs without a finished attempt or
without a GPU are left out and counted.

A table, such as lists derived from that log, needs a time of submission, a duration and a number of
GPUs; each column is known by several names, other columns are skipped. Times are seconds, or stamps
such as ``2017-10-03 07:29:14``; durations are in the unit of their column's name.

Both give rows ``(submitted_s, duration_s, gpus)``, times from the first submission on. Nothing goes
silently: what cannot be a job (no GPU, a negative duration) is left out and counted, and so are
values that are not taken as they stand.
"""

import csv
import io
import math
from collections import Counter
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from datetime import UTC, datetime
from typing import Any, NamedTuple

from partita.core.codec import parse_json
from partita.errors import FormatError

_TIME = "%Y-%m-%d %H:%M:%S"
SUBMITTED = (
    "timestamp",
    "submitted",
    "submitted_at",
    "submitted_time",
    "submit_time",
    "submission_time",
    "arrival_s",
    "arrival",
)
DURATION = ("duration", "run_time", "runtime", "elapsed")
UNITS = {"s": 1.0, "sec": 1.0, "seconds": 1.0, "min": 60.0, "minutes": 60.0, "h": 3600.0}
UNITS |= {"hours": 3600.0, "d": 86400.0, "days": 86400.0}
"""Units that the name of a column of durations may end in, ``duration_h``; without one, seconds."""
GPUS = ("num_gpus", "gpus", "gpu_num", "num_gpu")
TENANT = ("tenant", "vc", "user")
"""Columns that say whose job it is, the first that is there; there need be none."""
MODEL = ("model", "class")
"""Columns that say what a job trains, likewise."""


class SubmissionLog(NamedTuple):
    """The jobs of a log.

    Attributes:
        rows: Submission, duration and GPUs of each, in the log's order; times from the first on.
        notes: Jobs that were left out or changed, and how many; a phrase each.
        tenants: Whose job each is; empty = the log does not say it.
        models: What each job trains, likewise.
    """

    rows: list[tuple[float, float, int]]
    notes: tuple[str, ...]
    tenants: tuple[str, ...] = ()
    models: tuple[str, ...] = ()


def submission_log(
    rows: list[tuple[float, float, int]],
    notes: Counter[str],
    tenants: Sequence[str] = (),
    models: Sequence[str] = (),
) -> SubmissionLog:
    """Return a log with times from its first submission on.

    Args:
        rows: The jobs that can be.
        notes: Number of jobs for each thing that happened to some.
        tenants: Whose job each is.
        models: What each job trains.

    Raises:
        FormatError: No job is left.
    """
    words = tuple(f"{count:,} {what}" for what, count in notes.items())
    if not rows:
        raise FormatError("; ".join(["the log holds no job that ran", *words]))
    first = min(row[0] for row in rows)
    moved = [(at - first, duration, gpus) for at, duration, gpus in rows]
    return SubmissionLog(moved, words, tuple(tenants), tuple(models))


def is_submission_head(cells: AbstractSet[str]) -> bool:
    """Return whether the cells of a first line name the columns of a log, or all but one.

    Whoever reads it says which one is missing.
    """
    return sum(bool(cells & set(names)) for names in (SUBMITTED, _durations(), GPUS)) >= 2


def _durations() -> dict[str, float]:
    """Return the names of columns of durations, and the seconds of their unit."""
    plain = dict.fromkeys(DURATION, 1.0)
    with_unit = {f"{name}_{unit}": size for name in DURATION for unit, size in UNITS.items()}
    return plain | with_unit


def read_submissions(text: str) -> SubmissionLog:
    """Return the jobs of a table; a part of a GPU counts as a whole one.

    Raises:
        FormatError: A column is missing, or a cell is no number; knows the line.
    """
    rows = csv.DictReader(io.StringIO(text), skipinitialspace=True)
    head = [name.strip() for name in rows.fieldnames or ()]
    rows.fieldnames = head
    durations = _durations()
    columns = [_column(head, names) for names in (SUBMITTED, tuple(durations), GPUS)]
    unit_s = durations[columns[1]]
    tenant = next((name for name in TENANT if name in head), None)
    model = next((name for name in MODEL if name in head), None)
    found, notes, tenants, models = [], Counter[str](), [], []
    for row in rows:
        try:
            submitted, duration = _seconds(row[columns[0]]), float(row[columns[1]]) * unit_s
            given = float(row[columns[2]])
            gpus = math.ceil(given)
        except (TypeError, ValueError, OverflowError) as exc:
            raise FormatError(
                f"{exc}; expected a time, a duration in numbers and GPUs", line=rows.line_num
            ) from exc
        if not (math.isfinite(submitted) and math.isfinite(duration)):
            raise FormatError("a time is not finite", line=rows.line_num)
        if gpus <= 0:
            notes["without a GPU left out"] += 1
        elif duration < 0:
            notes["with a negative duration left out"] += 1
        else:
            found.append((submitted, duration, gpus))
            tenants.append("" if tenant is None else (row[tenant] or "").strip())
            models.append("" if model is None else (row[model] or "").strip())
            notes.update({"with parts of GPUs taken as whole ones": 1} if gpus != given else {})
            notes.update({"without a duration taken as one iteration": 1} if duration == 0 else {})
    return submission_log(found, notes, tenants if tenant else (), models if model else ())


def _column(head: list[str], names: tuple[str, ...]) -> str:
    chosen = next((name for name in names if name in head), None)
    if chosen is None:
        known = names if names[0] != DURATION[0] else (*DURATION, "duration_h", "duration_min")
        raise FormatError(
            f"no column is one of {', '.join(known)}; a log of jobs has a time of submission, a "
            "duration and a number of GPUs",
            line=1,
        )
    return chosen


def _seconds(cell: str) -> float:
    """Return a time: seconds, or those of a stamp."""
    try:
        return float(cell)
    except ValueError:
        stamp = datetime.fromisoformat(cell.strip())
        return stamp.replace(tzinfo=stamp.tzinfo or UTC).timestamp()


def read_philly(text: str) -> SubmissionLog:
    """Return the jobs of a log.

    Raises:
        FormatError: It is no such log; names the first bad job.
    """
    document = parse_json(text)
    if not isinstance(document, list):
        raise FormatError("not a job log of Philly: expected a JSON list of jobs")
    rows, notes, tenants = [], Counter[str](), []
    for number, entry in enumerate(document):
        try:
            row = _job(entry)
        except (KeyError, TypeError, ValueError, AttributeError) as exc:
            raise FormatError(f"job {number} of the log: {exc!r}") from exc
        if isinstance(row, str):
            notes[row] += 1
        else:
            rows.append(row)
            tenants.append(str(entry.get("vc") or entry.get("user") or ""))
    return submission_log(rows, notes, tenants if any(tenants) else ())


def _job(entry: Any) -> tuple[float, float, int] | str:  # noqa: ANN401 (JSON is any value)
    """Return submission, duration and GPUs of a job, or why it is left out."""
    spans = []
    for attempt in entry["attempts"]:
        begin, end = _stamp_seconds(attempt["start_time"]), _stamp_seconds(attempt["end_time"])
        if begin is not None and end is not None:
            spans.append(max(end - begin, 0.0))
    submitted = _stamp_seconds(entry["submitted_time"])
    if submitted is None:
        return "without a time of submission left out"
    if not sum(spans) > 0:
        return "without an attempt that ran and ended left out"
    gpus = sum(len(detail["gpus"]) for detail in entry["attempts"][-1]["detail"])
    return (submitted, sum(spans), gpus) if gpus else "without a GPU left out"


def _stamp_seconds(value: str | None) -> float | None:
    """Return a time stamp in seconds; ``None`` = it is not given."""
    if not value or value == "None":
        return None
    stamp = datetime.strptime(value, _TIME)
    return (stamp - datetime(2017, 1, 1)).total_seconds()
