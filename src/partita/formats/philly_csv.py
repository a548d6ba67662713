"""Logs of submissions as a table (CSV with a header), such as lists derived from Philly's log.

Needed are a time of submission, a duration in seconds and a number of GPUs; each column is known by
several names, other columns are skipped. Times are seconds, or stamps such as ``2017-10-03
07:29:14``. Rows are ``(submitted_s, duration_s, gpus)`` as those of `partita.formats.philly`.

Nothing goes silently: what cannot be a job (no GPU, a negative duration) is left out and counted,
and so are values that are not taken as they stand.
"""

import csv
import io
import math
from collections import Counter
from datetime import UTC, datetime
from typing import NamedTuple

from partita.errors import FormatError

SUBMITTED = (
    "timestamp",
    "submitted_time",
    "submit_time",
    "submission_time",
    "arrival_s",
    "arrival",
)
DURATION = ("duration", "duration_s", "run_time", "runtime")
GPUS = ("num_gpus", "gpus", "gpu_num", "num_gpu")


class SubmissionLog(NamedTuple):
    """The jobs of a log.

    Attributes:
        rows: Submission, duration and GPUs of each, in the log's order; times from the first on.
        notes: What was left out or changed, and how many; a phrase each.
    """

    rows: list[tuple[float, float, int]]
    notes: tuple[str, ...]


def submission_log(rows: list[tuple[float, float, int]], notes: Counter[str]) -> SubmissionLog:
    """Return a log with times from its first submission on.

    Args:
        rows: The jobs that can be.
        notes: How many jobs what happened to.

    Raises:
        FormatError: No job is left.
    """
    words = tuple(f"{count:,} {what}" for what, count in notes.items())
    if not rows:
        raise FormatError("; ".join(["the log holds no job that ran", *words]))
    first = min(row[0] for row in rows)
    return SubmissionLog([(at - first, duration, gpus) for at, duration, gpus in rows], words)


def is_submission_head(cells: set[str]) -> bool:
    """Return whether the cells of a first line name all columns of a log."""
    return all(cells & set(names) for names in (SUBMITTED, DURATION, GPUS))


def read_submissions(text: str) -> SubmissionLog:
    """Return the jobs of a table; a part of a GPU counts as a whole one.

    Raises:
        FormatError: A column is missing, or a cell is no number; knows the line.
    """
    rows = csv.DictReader(io.StringIO(text), skipinitialspace=True)
    head = [name.strip() for name in rows.fieldnames or ()]
    rows.fieldnames = head
    columns = [_column(head, names) for names in (SUBMITTED, DURATION, GPUS)]
    found, notes = [], Counter[str]()
    for row in rows:
        try:
            submitted, duration = _seconds(row[columns[0]]), float(row[columns[1]])
            told = float(row[columns[2]])
            gpus = math.ceil(told)
        except (TypeError, ValueError, OverflowError) as exc:
            raise FormatError(
                f"{exc}; expected a time, seconds and GPUs", line=rows.line_num
            ) from exc
        if not (math.isfinite(submitted) and math.isfinite(duration)):
            raise FormatError("a time is not finite", line=rows.line_num)
        if gpus <= 0:
            notes["without a GPU left out"] += 1
        elif duration < 0:
            notes["with a negative duration left out"] += 1
        else:
            found.append((submitted, duration, gpus))
            notes.update({"with parts of GPUs taken as whole ones": 1} if gpus != told else {})
            notes.update({"without a duration taken as one iteration": 1} if duration == 0 else {})
    return submission_log(found, notes)


def _column(head: list[str], names: tuple[str, ...]) -> str:
    chosen = next((name for name in names if name in head), None)
    if chosen is None:
        raise FormatError(f"no column is one of {', '.join(names)}", line=1)
    return chosen


def _seconds(cell: str) -> float:
    """Return a time: seconds, or those of a stamp."""
    try:
        return float(cell)
    except ValueError:
        stamp = datetime.fromisoformat(cell.strip())
        return stamp.replace(tzinfo=stamp.tzinfo or UTC).timestamp()
