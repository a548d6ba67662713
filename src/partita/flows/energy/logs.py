"""Folders of logs that ranks wrote: instructions, energy counters, changes of the clock."""

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from partita.documents import read_text
from partita.energy.frontier.replay import RankLog
from partita.errors import FormatError, InvalidInputError
from partita.formats.perseus import (
    Logged,
    is_modelled_log,
    read_energy_log,
    read_instruction_log,
)
from partita.formats.perseus_runs import read_clock_events, with_clocks

_T = TypeVar("_T")


def numbered(folder: Path, pattern: str) -> dict[int, Path]:
    """Return the files of a folder by the number in their names, ascending."""
    matches = ((re.fullmatch(pattern, path.name), path) for path in folder.iterdir())
    return dict(sorted((int(match[1]), path) for match, path in matches if match))


def read_logs(folder: Path, clock: float | None = None) -> dict[int, RankLog]:
    """Return the logs of the ranks in a folder; empty where it has none.

    The clocks are those of the logs themselves, those of ``%d.freqevents.csv``, or one for all.

    Raises:
        FormatError: A file breaks the rules of its format; names it.
        InvalidInputError: No instruction of a rank has a clock in its log of clocks.
    """
    ranks = {}
    for rank, path in numbered(folder, r"instructions-(\d+)\.csv").items():
        logged = _read(path, read_instruction_log)
        events = folder / f"{rank}.freqevents.csv"
        if events.exists():
            logged = with_clocks(logged, _read(events, read_clock_events))
            if not logged:
                raise InvalidInputError(
                    f"no instruction of {path} lies within one clock of {events}; leave the latter "
                    "out and give --clock MHZ, or a column 'clock' in the former"
                )
        energy = folder / f"time-energy-{rank}.csv"
        readings = _read(energy, read_energy_log) if energy.exists() else None
        modelled = readings is not None and _read(energy, is_modelled_log)
        ranks[rank] = RankLog([_clocked(one, clock) for one in logged], readings, modelled)
    return ranks


def _clocked(one: Logged, clock: float | None) -> Logged:
    return one if clock is None or not math.isnan(one.clock_mhz) else one._replace(clock_mhz=clock)


def _read(path: Path, read: Callable[[str], _T]) -> _T:
    try:
        return read(read_text(str(path)))
    except FormatError as exc:
        raise (exc if exc.path else exc.at(str(path))) from exc
