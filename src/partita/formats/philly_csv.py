"""Logs of submissions as a table (CSV with a header), such as lists derived from Philly's log.

Needed are a time of submission, a duration in seconds and a number of GPUs; each column is known by
several names, other columns are skipped. Times are seconds, or stamps such as ``2017-10-03
07:29:14``. Rows are ``(submitted_s, duration_s, gpus)`` as those of `partita.formats.philly`.
"""

import csv
import io
import math
from datetime import UTC, datetime

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


def is_submission_head(cells: set[str]) -> bool:
    """Return whether the cells of a first line name all columns of a log."""
    return all(cells & set(names) for names in (SUBMITTED, DURATION, GPUS))


def read_submissions(text: str) -> list[tuple[float, float, int]]:
    """Return submission, duration and GPUs of the jobs of a table, in its order.

    Jobs that took no time or no GPU are left out.

    Raises:
        FormatError: A column is missing, or a cell is no number; knows the line.
    """
    rows = csv.DictReader(io.StringIO(text), skipinitialspace=True)
    head = [name.strip() for name in rows.fieldnames or ()]
    rows.fieldnames = head
    columns = [_column(head, names) for names in (SUBMITTED, DURATION, GPUS)]
    found = []
    for row in rows:
        try:
            submitted, duration = _seconds(row[columns[0]]), float(row[columns[1]])
            gpus = int(float(row[columns[2]]))
        except (TypeError, ValueError, OverflowError) as exc:
            raise FormatError(
                f"{exc}; expected a time, seconds and GPUs", line=rows.line_num
            ) from exc
        if not (math.isfinite(submitted) and math.isfinite(duration)):
            raise FormatError("a time is not finite", line=rows.line_num)
        if duration > 0 and gpus > 0:
            found.append((submitted, duration, gpus))
    if not found:
        raise FormatError("the log holds no job that ran")
    first = min(row[0] for row in found)
    return [(submitted - first, duration, gpus) for submitted, duration, gpus in found]


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
