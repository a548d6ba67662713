"""Tables of jobs: lists with a header, and what Slurm's ``sacct`` prints.

A table needs a time of submission, a duration and a number of GPUs; each column is known by several
names, in upper or lower case, and other columns are skipped. Cells are separated by whichever of
``,``, ``;``, ``|`` and tabs gives the most such columns; a comma within a number is a decimal mark
where cells are not separated by commas. Times are seconds, or stamps such as ``2017-10-03
07:29:14`` or ``2017-10-03T07:29:14+01:00`` (UTC without a zone); durations are numbers in the unit
of their column's name, or ``1-02:03:04``; start and end will do, too.

GPUs of ``sacct`` are those of ``AllocTRES`` or ``AllocGRES``. The steps of its jobs are no jobs,
and a job that never started is none, either.

The result are rows ``(submitted_s, duration_s, gpus)``, times from the first submission on. Nothing
goes silently: what cannot be a job (no GPU, a negative duration) is left out and counted, and so
are values that are not taken as they stand.
"""

import csv
import io
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import NamedTuple

from partita.errors import FormatError

SUBMITTED = (
    "timestamp",
    "submitted",
    "submitted_at",
    "submitted_time",
    "submit",
    "submit_time",
    "submission_time",
    "arrival_s",
    "arrival",
)
DURATION = ("duration", "run_time", "runtime", "elapsedraw", "elapsed")
UNITS = {"s": 1.0, "sec": 1.0, "seconds": 1.0, "min": 60.0, "minutes": 60.0, "h": 3600.0}
UNITS |= {"hours": 3600.0, "d": 86400.0, "days": 86400.0}
"""Units that the name of a column of durations may end in, ``duration_h``; without one, seconds."""
_SECONDS_OF = dict.fromkeys(DURATION, 1.0) | {
    f"{name}_{unit}": size for name in DURATION for unit, size in UNITS.items()
}
"""Names of columns of durations, and the seconds of their unit."""
START = ("start", "start_time", "started", "started_at")
END = ("end", "end_time", "ended", "ended_at", "finished", "finished_at")
GPUS = ("num_gpus", "gpus", "gpu_num", "num_gpu", "ngpus", "gpu_count")
TRES = ("alloctres", "allocgres", "reqtres", "reqgres")
"""Columns of ``sacct`` that hold GPUs among other things, the first that is there."""
TENANT = ("tenant", "vc", "user", "account")
"""Columns that say whose job it is, the first that is there; there need be none."""
MODEL = ("model", "class")
"""Columns that say what a job trains, likewise."""
STATE = ("state", "status")
_OF_SLURM = {"elapsedraw", "submit", *TRES}
SACCT = (
    "sacct --allusers --allocations --parsable2 "
    "--format=JobID,User,Submit,Start,ElapsedRaw,State,AllocTRES"
)
"""The command that prints all that is needed."""

_SEPARATORS = (",", ";", "|", "\t")
_MISSING = {"", "unknown", "none", "n/a", "nan", "null", "invalid"}
_CLOCK = re.compile(r"(?:(\d+)(?:-| days?,? ))?(?:(\d+):)?(\d+):(\d+(?:\.\d+)?)")
_STEP = re.compile(r"\d+(?:[_+]\d+)?\.\S+")
_FIXED_WIDTH = re.compile(r"\s*JobID(?:Raw)?\b[^|;,\n]*\n[- ]*---[- ]*\n")
"""What ``sacct`` prints for people: a line of dashes under its head."""
_GPU = re.compile(r"(?:gres/)?gpu(:[^=:,(]+)?[=:](\d+)")
_LATEST_S = 1e11
"""Seconds since 1970 above which a time must be in another unit; the year is 5138."""


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


def is_submission_table(text: str) -> bool:
    """Return whether a text begins as a table of jobs: its head has all columns, or all but one.

    Whoever reads it says which one is missing.
    """
    line = text.lstrip().partition("\n")[0]
    return (
        _known_columns(_head(line, _separator(line))) >= 2 or _FIXED_WIDTH.match(text) is not None
    )


def _known_columns(head: Sequence[str]) -> int:
    """Return how many of submission, duration and GPUs a head has a column for."""
    cells = set(head)
    return sum(
        (
            bool(cells & set(SUBMITTED)),
            bool(cells & set(_SECONDS_OF)) or bool(cells & set(START) and cells & set(END)),
            bool(cells & {*GPUS, *TRES}),
        )
    )


def _separator(line: str) -> str:
    """Return what separates the cells of a first line; the comma where nothing tells."""
    return max(_SEPARATORS, key=lambda mark: (_known_columns(_head(line, mark)), mark == ","))


def _head(line: str, separator: str) -> list[str]:
    """Return the names of columns: lower case, ``Num GPUs`` and ``Duration (h)`` with ``_``."""
    try:
        _, cells = next(_lines([line], separator), (1, []))
    except FormatError:  # a quotation mark that does not end, in a file of another kind
        return []
    return _names(cells)


def _names(cells: list[str]) -> list[str]:
    return [re.sub(r"[^0-9a-z]+", "_", cell.lower()).strip("_") for cell in cells]


def _lines(text: Iterable[str], separator: str) -> Iterator[tuple[int, list[str]]]:
    """Yield the number and the cells of each line."""
    # sacct quotes nothing: a quotation mark is part of a job's name.
    reader = (
        csv.reader(text, delimiter=separator, skipinitialspace=True, quoting=csv.QUOTE_NONE)
        if separator == "|"
        else csv.reader(text, delimiter=separator, skipinitialspace=True)
    )
    try:
        for cells in reader:
            yield reader.line_num, [cell.strip() for cell in cells]
    except csv.Error as exc:
        raise FormatError(f"not a table: {exc}", line=reader.line_num) from exc


@dataclass(frozen=True, slots=True, kw_only=True)
class _Columns:
    """Where a table has what; -1 = nowhere.

    Attributes:
        submitted: The time of submission.
        duration: The duration, in ``unit_s``.
        unit_s: Seconds of a duration's unit.
        start: When a job began to run.
        end: When it ended.
        gpus: Number of GPUs, or where ``is_tres`` all that is held.
        is_tres: Whether ``gpus`` holds more than GPUs.
        state: What became of it.
        job: Its number, where it is one of Slurm.
        tenant: Whose it is.
        model: What it trains.
    """

    submitted: int
    duration: int
    unit_s: float
    start: int
    end: int
    gpus: int
    is_tres: bool
    state: int
    job: int
    tenant: int
    model: int


def _columns(head: list[str]) -> _Columns:
    """Return where a head has what.

    Raises:
        FormatError: It lacks a column; names those that would do.
    """
    is_slurm = bool(_OF_SLURM & set(head))
    duration = _first(head, tuple(_SECONDS_OF))
    start, end = _first(head, START), _first(head, END)
    counted, tres = _first(head, GPUS), _first(head, TRES)
    submitted = _first(head, SUBMITTED)
    if submitted < 0:
        raise _missing("time of submission", SUBMITTED, is_slurm=is_slurm)
    if duration < 0 and min(start, end) < 0:
        known = (*DURATION, "duration_h", "duration_min")
        raise _missing("duration", known, "start and end", is_slurm=is_slurm)
    if max(counted, tres) < 0:
        raise _missing("number of GPUs", GPUS, "AllocTRES", is_slurm=is_slurm)
    return _Columns(
        submitted=submitted,
        duration=duration,
        unit_s=_SECONDS_OF[head[duration]] if duration >= 0 else 1.0,
        start=start,
        end=end,
        gpus=counted if counted >= 0 else tres,
        is_tres=counted < 0,
        state=_first(head, STATE),
        job=_first(head, ("jobid", "jobidraw")) if is_slurm else -1,
        tenant=_first(head, TENANT),
        model=_first(head, MODEL),
    )


def _first(head: list[str], names: Sequence[str]) -> int:
    return next((head.index(name) for name in names if name in head), -1)


def _missing(what: str, names: Sequence[str], other: str = "", *, is_slurm: bool) -> FormatError:
    known = ", ".join(names) + (f" (or {other})" if other else "")
    remedy = f"; '{SACCT}' prints all that is needed" if is_slurm else ""
    return FormatError(
        f"no column has the {what}, such as {known}; a log of jobs has a time of submission, a "
        f"duration and a number of GPUs{remedy}",
        line=1,
    )


def read_submissions(text: str) -> SubmissionLog:
    """Return the jobs of a table; a part of a GPU counts as a whole one.

    Raises:
        FormatError: A column is missing, or a cell is no number; knows the line.
    """
    if _FIXED_WIDTH.match(text):
        raise FormatError(f"columns of fixed width cut what they hold; save what '{SACCT}' prints")
    separator = _separator(text.lstrip().partition("\n")[0])
    table = _Table(separator)
    for line, cells in _lines(io.StringIO(text, newline=""), separator):
        try:
            table.take(cells)
        except FormatError as exc:
            raise FormatError(exc.reason, line=line) from exc
    return table.log()


class _Table:
    """The jobs of a table, line by line."""

    def __init__(self, separator: str) -> None:
        self.separator = separator
        self.head: list[str] = []
        self.columns: _Columns | None = None
        self.rows: list[tuple[float, float, int]] = []
        self.notes: Counter[str] = Counter()
        self.tenants: list[str] = []
        self.models: list[str] = []

    def log(self) -> SubmissionLog:
        """Return what was taken."""
        named = self.columns is not None and self.columns.model >= 0
        owned = self.columns is not None and self.columns.tenant >= 0
        return submission_log(
            self.rows, self.notes, self.tenants if owned else (), self.models if named else ()
        )

    def take(self, cells: list[str]) -> None:
        """Take a line: the head, a job, or what is no job and is counted."""
        if not any(cells):
            return
        if self.columns is None:
            self.head = _names(cells)
            self.columns = _columns(self.head)
            return
        if any(cells[len(self.head) :]):
            raise FormatError(
                f"{len(cells)} cells, and the first line names {len(self.head)} columns; a cell "
                "with a separator in it must be quoted (sacct: --parsable2 without --delimiter)"
            )
        found = self._job(cells + [""] * (len(self.head) - len(cells)), self.columns)
        if isinstance(found, str):
            self.notes[found] += 1
            return
        self.rows.append(found)
        self.tenants.append(cells[self.columns.tenant] if self.columns.tenant >= 0 else "")
        self.models.append(cells[self.columns.model] if self.columns.model >= 0 else "")

    def _job(self, cells: list[str], columns: _Columns) -> tuple[float, float, int] | str:
        """Return submission, duration and GPUs of a job, or why it is left out."""
        if columns.job >= 0 and _STEP.fullmatch(cells[columns.job]):
            return "steps of jobs left out"
        given = self._gpus(cells, columns)
        if not given > 0:
            return "without a GPU left out"
        if cells[columns.submitted].lower() in _MISSING:
            return "without a time of submission left out"
        submitted = self._time(cells, columns.submitted)
        duration = self._duration(cells, columns)
        if isinstance(duration, str):
            return duration
        if columns.state >= 0 and cells[columns.state].upper().startswith("RUNNING"):
            self.notes["still running taken with the time they ran so far"] += 1
        if given % 1:
            self.notes["with parts of GPUs taken as whole ones"] += 1
        if duration == 0:
            self.notes["without a duration taken as one iteration"] += 1
        return submitted, duration, math.ceil(given)

    def _gpus(self, cells: list[str], columns: _Columns) -> float:
        """Return the GPUs of a job; of Slurm's resources the sum where types are told apart."""
        cell = cells[columns.gpus]
        if not columns.is_tres:
            return self._number(cells, columns.gpus, "a number of GPUs")
        found = _GPU.findall(cell)
        alike = [int(count) for kind, count in found if not kind]
        return float(alike[0] if alike else sum(int(count) for _, count in found))

    def _duration(self, cells: list[str], columns: _Columns) -> float | str:
        """Return the seconds that a job ran, or why it is left out."""
        if columns.start >= 0 and cells[columns.start].lower() in _MISSING:
            return "that never started left out"
        if columns.duration < 0 and cells[columns.end].lower() in _MISSING:
            return "that had not ended left out"
        if columns.duration < 0:
            seconds = self._time(cells, columns.end) - self._time(cells, columns.start)
        elif clock := _CLOCK.fullmatch(cells[columns.duration]):
            days, hours, minutes, rest = (float(part or 0) for part in clock.groups())
            seconds = 86400 * days + 3600 * hours + 60 * minutes + rest
        else:
            expected = "a number, or days-hours:minutes:seconds"
            seconds = self._number(cells, columns.duration, expected) * columns.unit_s
        if seconds < 0:
            return "with a negative duration left out"
        state = cells[columns.state].upper() if columns.state >= 0 else ""
        if seconds == 0 and state.startswith(("CANCELLED", "PENDING", "REVOKED")):
            return "that never started left out"
        return seconds

    def _time(self, cells: list[str], column: int) -> float:
        """Return a time: seconds, or those of a stamp."""
        cell = cells[column]
        try:
            stamp = datetime.fromisoformat(cell)
        except ValueError:
            expected = "seconds, or a stamp such as 2017-10-03T07:29:14"
            value = self._number(cells, column, expected)
            if abs(value) > _LATEST_S:
                raise self._refused(column, cell, f"{expected} (not milliseconds)") from None
            return value
        return stamp.replace(tzinfo=stamp.tzinfo or UTC).timestamp()

    def _number(self, cells: list[str], column: int, expected: str) -> float:
        """Return a finite number, with a decimal point or a decimal comma."""
        text = cells[column]
        if self.separator != "," and "," in text:
            grouping = "," if text.rfind(".") > text.rfind(",") else "."
            text = text.replace(grouping, "").replace(",", ".")
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not math.isfinite(value):
            raise self._refused(column, cells[column], expected)
        return value

    def _refused(self, column: int, cell: str, expected: str) -> FormatError:
        shown = cell if len(cell) <= 60 else cell[:57] + "..."
        return FormatError(f"{self.head[column]} is {shown!r}; expected {expected}")
