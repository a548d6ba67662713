"""The job log of Microsoft's Philly clusters (``cluster_job_log``, JSON).

A list of ``{status, vc, jobid, submitted_time, user, attempts: [{start_time, end_time, detail:
[{ip, gpus: [...]}]}]}``. A job's duration is the sum of its attempts, its GPUs those of the last.
Jobs without a finished attempt are left out. Rows are ``(submitted_s, duration_s, gpus)``, times
from the first submission on.
"""

from datetime import datetime
from typing import Any

from partita.core.codec import parse_json
from partita.errors import FormatError

_TIME = "%Y-%m-%d %H:%M:%S"


def read_philly(text: str) -> list[tuple[float, float, int]]:
    """Return submission, duration and GPUs of the jobs of a log, in its order.

    Raises:
        FormatError: It is no such log; names the first bad job.
    """
    document = parse_json(text)
    if not isinstance(document, list):
        raise FormatError("not a job log of Philly: expected a JSON list of jobs")
    rows = []
    for number, entry in enumerate(document):
        try:
            row = _job(entry)
        except (KeyError, TypeError, ValueError, AttributeError) as exc:
            raise FormatError(f"job {number} of the log: {exc!r}") from exc
        if row is not None:
            rows.append(row)
    if not rows:
        raise FormatError("the log holds no job that ran")
    first = min(row[0] for row in rows)
    return [(submitted - first, duration, gpus) for submitted, duration, gpus in rows]


def _job(entry: Any) -> tuple[float, float, int] | None:  # noqa: ANN401 (JSON is any value)
    seconds = 0.0
    for attempt in entry["attempts"]:
        begin, end = _seconds(attempt["start_time"]), _seconds(attempt["end_time"])
        if begin is not None and end is not None:
            seconds += max(end - begin, 0.0)
    submitted = _seconds(entry["submitted_time"])
    if seconds <= 0 or submitted is None:
        return None
    gpus = sum(len(detail["gpus"]) for detail in entry["attempts"][-1]["detail"])
    return (submitted, seconds, gpus) if gpus else None


def _seconds(value: str | None) -> float | None:
    """Return a time stamp in seconds; ``None`` = it is not told."""
    if not value or value == "None":
        return None
    stamp = datetime.strptime(value, _TIME)
    return (stamp - datetime(2017, 1, 1)).total_seconds()
