"""Energy profiles from what Perseus's and Zeus's servers and clients left of a run.

* ``%d.sched.json`` and ``%d.prof.json``: the clocks that ranks were told and what they reported.
  The n-th instruction of a name in a step ran at the n-th clock of that name. The artifact's
  schedules have clocks alone (``power_states``), whose names ``ranks.json`` lists.
* ``%d.freqevents.csv``: ``freq,start,end`` in nanoseconds, from when to when a clock was in force
  on a device; -1 = it was not locked. It tells the clocks of an ``instructions-%d.csv`` that does
  not say them. A row ends wherever the clock is set, also to what it was, so that rows of one
  clock in a row count as one. Instructions that lie in none of these are left out.
"""

import csv
import io
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from partita.core.energy import EnergyOrigin, EnergyProfile
from partita.core.program import Kind
from partita.errors import FormatError, InvalidInputError
from partita.formats.perseus import INSTRUCTIONS, Logged, Sampled, profile_of_samples

WARM_UP = 0.1
"""Share of the steps of a report that is left out, at least one where there are several."""
_NANOSECONDS = 1e9


class Rank(NamedTuple):
    """A rank in ``ranks.json``: its stage, and the names of its instructions."""

    stage: int
    names: tuple[str, ...]


def ranks_of(found: Iterable[Mapping[str, Any]]) -> dict[int, Rank]:
    """Return the ranks of a ``ranks.json``.

    Raises:
        FormatError: A rank has no stage.
    """
    ranks = {}
    for each in found:
        stage = each.get("pp_rank")
        if not isinstance(stage, int) or isinstance(stage, bool) or stage < 0:
            raise FormatError(f"pp_rank of rank {each['rank']} is {stage!r}; expected a number")
        names = each.get("pipe_schedule") or []
        if not isinstance(names, list):
            raise FormatError(f"pipe_schedule of rank {each['rank']} is {names!r}; expected a list")
        ranks[each["rank"]] = Rank(stage, tuple(map(str, names)))
    return ranks


def profile_from_reports(
    reports: Sequence[tuple[Sequence[Mapping[str, Any]], Sequence[Mapping[str, Any]]]],
    ranks: Mapping[int, Rank],
    *,
    name: str = "profile",
    blocking_w: Mapping[str, float] | None = None,
    warm_up: float = WARM_UP,
) -> EnergyProfile:
    """Return the profile that pairs of schedules and reports add up to.

    Args:
        reports: For each plan that was tried: the ranks' schedules, and what they reported.
        ranks: Stages and instructions of the ranks; a rank that is not there is its own stage.
        name: Its name.
        blocking_w: Power of a device that waits.
        warm_up: Share of the steps of each report that is left out.

    Raises:
        InvalidInputError: The energies were not recorded, or lists do not match.
    """
    seen: dict[tuple[int, int, Kind, float], list[tuple[float, float]]] = {}
    for schedules, results in reports:
        clocks_of = {each["rank"]: _clocks(each, ranks.get(each["rank"])) for each in schedules}
        for result in results:
            rank = result["rank"]
            if rank not in clocks_of:
                raise InvalidInputError(f"rank {rank} reported, but was told no schedule")
            stage = ranks[rank].stage if rank in ranks else rank
            for kind, clock, took, used in _windows(result, clocks_of[rank], warm_up):
                seen.setdefault((rank, stage, kind, clock), []).append((took, used))
    gathered: dict[Sampled, list[tuple[float, float]]] = {}
    for (_, stage, kind, clock), values in sorted(seen.items()):
        mean = np.array(values).mean(axis=0)
        gathered.setdefault(Sampled(stage, kind, clock), []).append(
            (float(mean[0]), float(mean[1]))
        )
    return profile_of_samples(name, EnergyOrigin.MEASURED, gathered, blocking_w)


def _clocks(schedule: Mapping[str, Any], rank: Rank | None) -> dict[str, list[float]]:
    """Return the clocks of each name of instruction, in their order."""
    found: dict[str, list[float]] = {}
    for name, clock in _entries(schedule, rank):
        found.setdefault(name.lower(), []).append(clock)
    return found


def _entries(schedule: Mapping[str, Any], rank: Rank | None) -> list[tuple[str, float]]:
    number = schedule["rank"]
    try:
        if "frequencies" in schedule:
            return [(str(name), float(clock)) for name, clock in schedule["frequencies"]]
        states = [float(state) for state in schedule["power_states"]]
    except (KeyError, TypeError, ValueError):
        raise FormatError(
            f"the schedule of rank {number} has neither frequencies nor power_states"
        ) from None
    names = rank.names if rank is not None else ()
    if len(names) != len(states):
        raise FormatError(
            f"the schedule of rank {number} has {len(states)} clocks without names, and ranks.json "
            f"{len(names)} names for them"
        )
    return list(zip(names, states, strict=True))


def _windows(
    result: Mapping[str, Any], clocks: Mapping[str, Sequence[float]], warm_up: float
) -> Iterable[tuple[Kind, float, float, float]]:
    """Yield kind, clock, seconds and joules of every instruction that was reported."""
    rank = result["rank"]
    times, energies = (_breakdown(result, key) for key in ("time_breakdown", "energy_breakdown"))
    for name, steps in times.items():
        kind = INSTRUCTIONS.get(name.lower())
        if kind is None or name.lower() not in clocks:
            continue
        used = energies.get(name, [])
        if len(used) != len(steps):
            raise InvalidInputError(
                f"rank {rank} reported {len(steps)} steps of {name!r} and the energy of "
                f"{len(used)}; energy that was not recorded is unknown"
            )
        first = min(max(int(len(steps) * warm_up), 1), len(steps) - 1)
        for took, joules in zip(steps[first:], used[first:], strict=True):
            known = clocks[name.lower()]
            if not len(took) == len(joules) == len(known):
                raise InvalidInputError(
                    f"rank {rank}: a step has {len(took)} times and {len(joules)} "
                    f"energies of {name!r} for {len(known)} clocks"
                )
            for clock, seconds, energy in zip(known, took, joules, strict=True):
                yield kind, clock, seconds, energy


def _breakdown(result: Mapping[str, Any], key: str) -> dict[str, list[list[float]]]:
    """Return the figures of a report by name of instruction: a list a step."""
    found = result.get(key) or {}
    try:
        return {
            str(name): [[float(value) for value in step] for step in steps or ()]
            for name, steps in found.items()
        }
    except (AttributeError, TypeError, ValueError):
        raise FormatError(
            f"{key} of rank {result['rank']} is not a list of numbers a step, by instruction"
        ) from None


def read_clock_events(text: str) -> list[tuple[float, float, float]]:
    """Return clock, start and end in seconds of a ``%d.freqevents.csv``, by start.

    Rows of one clock in a row are one.

    Raises:
        FormatError: A row is not of that form; knows the line.
    """
    rows = []
    for number, row in enumerate(csv.reader(io.StringIO(text)), 1):
        if number == 1 and row and not row[0].strip().lstrip("-").replace(".", "").isdigit():
            continue
        try:
            clock, start, end = (float(cell) for cell in row[:3])
        except ValueError:
            raise FormatError("expected clock, start and end", line=number) from None
        if not (math.isfinite(clock) and -math.inf < start <= end < math.inf):
            raise FormatError(
                f"clock {clock:g} from {start:g} to {end:g}; expected numbers, the end last",
                line=number,
            )
        rows.append((clock, start / _NANOSECONDS, end / _NANOSECONDS))
    found: list[tuple[float, float, float]] = []
    for clock, start, end in sorted(rows, key=lambda event: event[1]):
        if found and found[-1][0] == clock:
            found[-1] = (clock, found[-1][1], max(end, found[-1][2]))
        else:
            found.append((clock, start, end))
    return found


def with_clocks(
    logged: Sequence[Logged], events: Sequence[tuple[float, float, float]]
) -> list[Logged]:
    """Return instructions with the clock that held, without those that none held all through."""
    starts = np.array([event[1] for event in events])
    kept = []
    for one in logged:
        if not math.isnan(one.clock_mhz):
            kept.append(one)
            continue
        last = int(np.searchsorted(starts, one.start_s, side="right")) - 1
        if last >= 0 and events[last][0] > 0 and one.end_s <= events[last][2]:
            kept.append(one._replace(clock_mhz=events[last][0]))
    return kept
