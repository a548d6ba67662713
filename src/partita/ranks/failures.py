"""Why a run failed: the rank that failed first of its own, among those that only lost it.

When one rank dies, the others see a closed connection a moment later; when one stands still, the
others run into their limit. All of them fail, and one of them is to be named.
"""

import json
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from signal import SIGTERM

from partita.errors import (
    InfeasibleError,
    InvalidInputError,
    PartitaError,
    UnsupportedError,
    WorkerError,
)
from partita.processes import how_it_ended, last_lines

_LOG_LINES = 5
_STANDARD = Path(json.__file__).resolve().parents[1]
"""Where Python's own modules are."""
_LOST_PEER = ("gloo", "NCCL", "Connection")
"""What torch's errors speak of when another rank went away or did not come."""


class PeerError(WorkerError):
    """A rank lost another one: it is not to blame."""


class NotFiniteError(WorkerError):
    """A loss or gradient is no number: all ranks have agreed on that, before any weight changed."""


class BadDataError(NotFiniteError):
    """The same, in a run that is to go back to its newest checkpoint and leave out the data."""


_ERRORS: Mapping[str, type[PartitaError]] = {
    kind.__name__: kind
    for kind in (
        InvalidInputError,
        InfeasibleError,
        UnsupportedError,
        WorkerError,
        PeerError,
        NotFiniteError,
        BadDataError,
    )
}


@dataclass(frozen=True, kw_only=True, eq=False)
class Failure:
    """How a rank failed.

    Attributes:
        rank: The rank.
        exit_code: How its process ended; None if it is not known.
        error: What it said of it; None if it could not say anything.
        log: Where it printed.
    """

    rank: int
    exit_code: int | None = None
    error: PartitaError | None = None
    log: Path | None = None

    @property
    def is_lost_peer(self) -> bool:
        """Whether it only lost another rank."""
        return isinstance(self.error, PeerError)

    @property
    def is_stall(self) -> bool:
        """Whether its watchdog ended it: it may have waited for another rank."""
        return self.error is None and self.exit_code == WorkerError.exit_code

    @property
    def is_own(self) -> bool:
        """Whether it failed for a reason of its own that is known."""
        return self.error is not None and not self.is_lost_peer


def first_cause(failures: Sequence[Failure]) -> Failure:
    """Return the failure that the others follow from.

    Args:
        failures: In the order in which they were seen, which breaks ties.
    """

    def weight(place: int) -> tuple[int, int]:
        failure = failures[place]
        if failure.is_own:
            return 0, place
        if failure.is_lost_peer:
            return 3, place
        if failure.is_stall:
            return 2, place
        # Whoever starts the ranks ends them by this signal when one has failed.
        return 4 if failure.exit_code == -SIGTERM and place else 1, place

    return failures[min(range(len(failures)), key=weight)]


def error_of(
    failure: Failure, *, culprit: str = "", where: str = "", stands: str = ""
) -> PartitaError:
    """Return the error of a run.

    Args:
        failure: The first cause.
        culprit: Which rank holds up the others, where that can be told.
        where: Where the failed rank stood.
        stands: What every rank was doing, a line each.
    """
    error = failure.error
    if error is not None and not isinstance(error, WorkerError):
        return error
    held_up = failure.is_stall or failure.is_lost_peer
    ended = f"rank {failure.rank} {how_it_ended(failure.exit_code)} {where}".rstrip()
    parts = [culprit] if culprit and held_up else []
    parts.append(str(error) if error is not None else ended)
    if error is None and failure.log is not None:
        lines = last_lines(failure.log, _LOG_LINES)
        parts += [f"  rank {failure.rank} said: {line}" for line in lines]
    elif failure.log is not None and not held_up:
        parts.append(f"  rank {failure.rank} printed: {failure.log}")
    if stands:
        parts.append(stands)
    if isinstance(error, NotFiniteError):
        return type(error)(str(error))  # where ranks stood says nothing about it
    found = WorkerError("\n".join(parts))
    if not held_up:
        found.rank = failure.rank
    return found


def speaks_of_peer(exc: BaseException) -> bool:
    """Return whether an error of torch says that another rank went away or did not come."""
    return any(word in first_line(exc) for word in _LOST_PEER)


def as_partita_error(rank: int, exc: BaseException) -> PartitaError:
    """Return an error of a rank as one that its launcher can raise; names the rank."""
    text = str(exc) or type(exc).__name__
    if not isinstance(exc, PartitaError):
        place = _own_line(exc)
        where = f" ({place})" if place else ""
        return WorkerError(f"rank {rank}: {type(exc).__name__}: {text}{where}")
    named = text if text.startswith(f"rank {rank}") else f"rank {rank}: {text}"
    kind = next((kind for kind in type(exc).__mro__ if kind.__name__ in _ERRORS), WorkerError)
    return _ERRORS[kind.__name__](named)


def _own_line(exc: BaseException) -> str:
    """Return file and line of the user's own code that an error comes from; empty = of none."""
    ours = Path(__file__).resolve().parents[1]
    for frame in reversed(traceback.extract_tb(exc.__traceback__)):
        file = Path(frame.filename)
        near = file.resolve()
        installed = "site-packages" in file.parts or _STANDARD in file.parents
        if near.is_file() and not installed and ours not in near.parents:
            here = Path.cwd()
            shown = near.relative_to(here) if near.is_relative_to(here) else near
            return f"{shown}:{frame.lineno}"
    return ""


def write_error(error: PartitaError) -> str:
    """Return an error as text that ``read_error`` reads."""
    return json.dumps({"kind": type(error).__name__, "text": str(error)})


def read_error(text: str) -> PartitaError:
    """Return the error of a text that ``write_error`` wrote."""
    record = json.loads(text)
    return _ERRORS.get(record["kind"], WorkerError)(record["text"])


def first_line(exc: BaseException) -> str:
    """Return the first line of what an error says."""
    return str(exc).strip().splitlines()[0] if str(exc).strip() else type(exc).__name__
