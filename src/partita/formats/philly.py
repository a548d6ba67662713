"""The job log of Microsoft's Philly clusters.

``cluster_job_log`` is a list of ``{status, vc, jobid, submitted_time, user, attempts: [{start_time,
end_time, detail: [{ip, gpus: [...]}]}]}``. A job's duration is the sum of its attempts, its GPUs
those of the last. Jobs without a finished attempt or without a GPU are left out and counted.
"""

from collections import Counter
from datetime import datetime
from typing import Any

from partita.core.codec import parse_json
from partita.errors import FormatError
from partita.formats.submissions import SubmissionLog, submission_log

_TIME = "%Y-%m-%d %H:%M:%S"


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
