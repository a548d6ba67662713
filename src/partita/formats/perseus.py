"""Files of Perseus, Merak and Zeus's pipeline-frequency optimizer.

* ``profile.csv``: ``stage,instruction,frequency,time,energy`` (MHz, seconds, joules of one
  instruction), further columns before or after; with ``rank`` columns several ranks share a stage:
  the slowest counts for time, the mean for energy, as a row here is one device.
* ``instructions-%d.csv``: ``instruction,start,end`` of one rank, UNIX seconds. Ours has a fourth
  column ``clock``, the clock that was set; theirs does not say, so that the profile has to be told
  which clock held when.
* ``time-energy-%d.csv``: ``time,energy``, the counter of joules when it changed. The energy of an
  instruction is that of its two ends on the straight line between readings.
* ``%d.prof.json`` / ``%d.sched.json``: what ranks reported, and the clocks they had been told.
* ``freqs_pipeline_%05d.py``: a list by stage of ``(name, clock)`` or of clocks. It is read as a
  literal; code in it is refused.
* ``iteration_time_energy.csv``: ``time,energy``, a point of the frontier a row.
"""

import ast
import csv
import io
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from partita.core.columns import Array
from partita.core.energy import (
    LONGEST_S,
    MOST_J,
    SHORTEST_S,
    EnergyOrigin,
    EnergyProfile,
    Frontier,
)
from partita.core.program import Kind, Program
from partita.errors import FormatError, InvalidInputError

INSTRUCTIONS: Mapping[str, Kind] = {
    "load": Kind.LOAD,
    "batch_input": Kind.LOAD,
    "forward": Kind.FORWARD,
    "forward_microstep": Kind.FORWARD,
    "backward": Kind.BACKWARD,
    "backward_microstep": Kind.BACKWARD,
    "recompute": Kind.RECOMPUTE,
    "backward_input": Kind.BACKWARD_INPUT,
    "backward_weight": Kind.BACKWARD_WEIGHT,
    "step": Kind.UPDATE,
}
"""Names of instructions in these files; the first for a kind is what we write in profiles."""

LOGGED: Mapping[Kind, str] = {
    Kind.LOAD: "batch_input",
    Kind.FORWARD: "forward_microstep",
    Kind.BACKWARD: "backward_microstep",
}
"""Names in ``instructions-%d.csv``; other kinds have those of profiles."""

_COLUMNS = ("stage", "instruction", "frequency", "time", "energy")
_NAMES = {kind: name for name, kind in reversed(list(INSTRUCTIONS.items()))}
MAX_PLAN_BYTES = 2**26
MAX_CLOCK_MHZ = 1_000_000


class Sampled(NamedTuple):
    """Subject of a row of a profile; the type of device is ``""`` where it is not known."""

    stage: int
    kind: Kind
    mhz: float
    device_type: str = ""


class Logged(NamedTuple):
    """One instruction of a rank's log; the clock is NaN where the file does not say."""

    kind: Kind
    start_s: float
    end_s: float
    clock_mhz: float = math.nan


def read_energy_csv(
    text: str, *, name: str = "profile", blocking_w: Mapping[str, float] | None = None
) -> EnergyProfile:
    """Return the profile in a ``profile.csv``.

    Args:
        text: The file.
        name: Its name.
        blocking_w: Power of a device that waits, by type; the file does not say.

    Raises:
        FormatError: A column is missing, or a row does not make sense; names the line.
    """
    gathered: dict[Sampled, list[tuple[float, float]]] = {}
    modelled = False
    for line, row in _rows(text, _COLUMNS, instead={"stage": "pp_rank"}):
        stage = _number(row, "stage" if "stage" in row else "pp_rank", line)
        if stage != int(stage) or stage < 0:
            raise FormatError(f"stage is {stage:g}; expected a whole number from 0", line=line)
        kind = _kind(row, line)
        clock = _number(row, "frequency", line, low=1)
        values = (
            _number(row, "time", line, low=SHORTEST_S, high=LONGEST_S),
            _number(row, "energy", line, low=0, high=MOST_J),
        )
        modelled = modelled or row.get("origin") == EnergyOrigin.MODELLED.value
        key = Sampled(int(stage), kind, clock, row.get("device") or "")
        gathered.setdefault(key, []).append(values)
    origin = EnergyOrigin.MODELLED if modelled else EnergyOrigin.PUBLISHED
    try:
        return profile_of_samples(name, origin, gathered, blocking_w)
    except InvalidInputError as exc:
        raise FormatError(str(exc)) from exc


def profile_of_samples(
    name: str,
    origin: EnergyOrigin,
    gathered: Mapping[Sampled, Sequence[tuple[float, float]]],
    blocking_w: Mapping[str, float] | None,
) -> EnergyProfile:
    """Return a profile in which a row is the slowest time and the mean energy of what was seen."""
    keys = sorted(gathered, key=lambda key: (key.stage, int(key.kind), key.device_type, -key.mhz))
    seen = [np.array(gathered[key]) for key in keys]
    types = sorted({key.device_type for key in keys}) or [""]
    return EnergyProfile(
        name=name,
        origin=origin,
        device_types=tuple(types),
        stage=np.array([key.stage for key in keys]),
        kind=np.array([int(key.kind) for key in keys]),
        device_type=np.array([types.index(key.device_type) for key in keys]),
        clock_mhz=np.array([key.mhz for key in keys]),
        seconds=np.array([values[:, 0].max() for values in seen]),
        joules=np.array([values[:, 1].mean() for values in seen]),
        blocking_w=blocking_w or {},
    )


def write_energy_csv(profile: EnergyProfile) -> str:
    """Return a profile as ``profile.csv``.

    The type of device is a column where there are types; another says so where it was modelled.
    """
    typed = profile.device_types != ("",)
    modelled = profile.origin is EnergyOrigin.MODELLED
    head = [*_COLUMNS, *["device"] * typed, *["origin"] * modelled]
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(head)
    for row in range(len(profile)):
        values = [
            int(profile.stage[row]),
            _NAMES[Kind(int(profile.kind[row]))],
            _short(float(profile.clock_mhz[row])),
            repr(float(profile.seconds[row])),
            repr(float(profile.joules[row])),
        ]
        if typed:
            values.append(profile.device_types[int(profile.device_type[row])])
        if modelled:
            values.append(profile.origin.value)
        writer.writerow(values)
    return out.getvalue()


def read_instruction_log(text: str) -> list[Logged]:
    """Return the instructions in an ``instructions-%d.csv``, in their order of time."""
    found = []
    for line, row in _rows(text, ("instruction", "start", "end")):
        start, end = _number(row, "start", line), _number(row, "end", line)
        if end < start:
            raise FormatError(f"the instruction ends at {end}, before it starts", line=line)
        clock = _number(row, "clock", line) if row.get("clock") else math.nan
        found.append(Logged(_kind(row, line), start, end, clock))
    return sorted(found, key=lambda logged: logged.start_s)


def write_instruction_log(logged: Iterable[Logged]) -> str:
    """Return instructions as an ``instructions-%d.csv``, grouped by kind, with their clock."""
    rows = sorted(logged, key=lambda one: (int(one.kind), one.start_s))
    known = any(not math.isnan(one.clock_mhz) for one in rows)
    lines = ["instruction,start,end" + (",clock" if known else "")]
    for one in rows:
        cells = [LOGGED.get(one.kind, _NAMES[one.kind]), repr(one.start_s), repr(one.end_s)]
        if known:
            cells.append("" if math.isnan(one.clock_mhz) else _short(one.clock_mhz))
        lines.append(",".join(cells))
    return "\n".join(lines) + "\n"


def read_energy_log(text: str) -> tuple[Array, Array]:
    """Return times and joules of a ``time-energy-%d.csv``."""
    times, joules = [], []
    for line, row in _rows(text, ("time", "energy")):
        times.append(_number(row, "time", line))
        joules.append(_number(row, "energy", line))
        if len(times) > 1 and (times[-1] < times[-2] or joules[-1] < joules[-2]):
            raise FormatError("a reading is earlier or lower than the one before", line=line)
    if len(times) < 2:
        raise FormatError("a log of energy needs two readings or more")
    return np.array(times), np.array(joules)


def write_energy_log(
    times: Iterable[float], joules: Iterable[float], *, modelled: bool = False
) -> str:
    """Return readings of an energy counter as a ``time-energy-%d.csv``.

    Args:
        times: When the counter was read.
        joules: Its readings.
        modelled: Whether the counter is that of a modelled device; a third column then says so.
    """
    end = f",{EnergyOrigin.MODELLED.value}" if modelled else ""
    lines = [f"{time!r},{energy!r}{end}" for time, energy in zip(times, joules, strict=True)]
    return "\n".join([f"time,energy{',origin' if modelled else ''}", *lines]) + "\n"


def is_modelled_log(text: str) -> bool:
    """Return whether a ``time-energy-%d.csv`` says that its counter was modelled."""
    rows = _rows(text, ("time", "energy"))
    return any(row.get("origin") == EnergyOrigin.MODELLED.value for _, row in rows)


def profile_from_logs(
    ranks: Sequence[tuple[int, Sequence[Logged], tuple[Array, Array]]],
    *,
    name: str = "profile",
    blocking_w: Mapping[str, float] | None = None,
    origin: EnergyOrigin = EnergyOrigin.MEASURED,
) -> EnergyProfile:
    """Return the profile that logs of instructions and of energy add up to.

    Args:
        ranks: For each rank its stage, its instructions with their clocks, and its readings.
        name: Its name.
        blocking_w: Power of a device that waits.
        origin: Origin of the readings.

    Raises:
        InvalidInputError: A clock is not known, or an instruction lies outside the readings.
    """
    gathered: dict[Sampled, list[tuple[float, float]]] = {}
    for stage, logged, (times, joules) in ranks:
        own: dict[Sampled, list[tuple[float, float]]] = {}
        for one in logged:
            if math.isnan(one.clock_mhz):
                raise InvalidInputError(
                    f"the clock of {one.kind.name.lower()} at {one.start_s} on stage {stage} is "
                    "not known; the log needs a column 'clock'"
                )
            if one.start_s < times[0] or one.end_s > times[-1]:
                raise InvalidInputError(
                    f"{one.kind.name.lower()} at {one.start_s} on stage {stage} lies outside the "
                    f"readings of energy, {times[0]} to {times[-1]}"
                )
            used = np.interp([one.start_s, one.end_s], times, joules)
            own.setdefault(Sampled(stage, one.kind, one.clock_mhz), []).append(
                (one.end_s - one.start_s, float(used[1] - used[0]))
            )
        for key, seen in own.items():
            mean = np.array(seen).mean(axis=0)
            gathered.setdefault(key, []).append((float(mean[0]), float(mean[1])))
    return profile_of_samples(name, origin, gathered, blocking_w)


def read_clock_plan(text: str) -> list[list[tuple[str, int]]]:
    """Return the clocks by stage of a ``freqs_pipeline_%05d.py``.

    Entries without a name, as in the artifact's files, have the name ``""``.

    Raises:
        FormatError: It is not a plain list of lists; code is never run.
    """
    if len(text) > MAX_PLAN_BYTES:
        raise FormatError(f"a clock plan of {len(text)} bytes is too large")
    try:
        found = ast.literal_eval(text.strip())
    except (ValueError, SyntaxError, MemoryError, RecursionError) as exc:
        raise FormatError("not a plain list of clocks; code in a plan is not run") from exc
    if not isinstance(found, list) or not all(isinstance(stage, list) for stage in found):
        raise FormatError("expected a list of clocks for each stage")
    return [[_entry(entry, stage) for entry in row] for stage, row in enumerate(found)]


def _entry(entry: object, stage: int) -> tuple[str, int]:
    name, clock = entry if isinstance(entry, tuple) and len(entry) == 2 else ("", entry)
    if not isinstance(name, str) or not isinstance(clock, int) or isinstance(clock, bool):
        raise FormatError(f"stage {stage}: {entry!r} is not a clock or a (name, clock)")
    if not 0 <= clock <= MAX_CLOCK_MHZ:
        raise FormatError(
            f"stage {stage}: the clock is {str(clock)[:24]}; expected 0 to {MAX_CLOCK_MHZ} MHz"
        )
    return name, clock


def write_clock_plan(
    program: Program, clocks: Array, *, named: bool = True, comment: str = ""
) -> str:
    """Return the clocks of a Program by device as a ``freqs_pipeline_%05d.py``.

    Args:
        program: The Program.
        clocks: The clock of each row; 0 = leave it alone. A device lists all instructions of the
            kinds that have clocks there, and only those.
        named: Whether entries are ``(name, clock)`` as Zeus reads them, or clocks alone.
        comment: Lines to add as comments.
    """
    lines = []
    for device in range(len(program.devices)):
        rows = range(int(program.ptr[device]), int(program.ptr[device + 1]))
        kinds = {int(program.kind[row]) for row in rows if clocks[row] > 0}
        entries: list[object] = []
        for row in rows:
            if int(program.kind[row]) in kinds:
                name = _NAMES[Kind(int(program.kind[row]))]
                clock = round(float(clocks[row]))
                entries.append((name, clock) if named else clock)
        lines.append(f"    {entries!r},")
    notes = "".join(f"# {line}\n" for line in comment.splitlines())
    return "[\n" + "\n".join(lines) + "\n]\n" + notes


def write_frontier_csv(frontier: Frontier) -> str:
    """Return the points of a frontier as an ``iteration_time_energy.csv``."""
    pairs = zip(frontier.time_s.tolist(), frontier.energy_j.tolist(), strict=True)
    return "\n".join(["time,energy", *(f"{t!r},{e!r}" for t, e in pairs)]) + "\n"


def read_frontier_csv(text: str) -> tuple[Array, Array]:
    """Return times and energies of an ``iteration_time_energy.csv``, the fastest point first."""
    pairs = [
        (_number(row, "time", line), _number(row, "energy", line))
        for line, row in _rows(text, ("time", "energy"))
    ]
    for line, (time_s, energy_j) in enumerate(pairs, 2):
        if not (time_s > 0 and energy_j > 0):
            raise FormatError(
                f"time {time_s:g} s and energy {energy_j:g} J; expected numbers above 0", line=line
            )
    times, joules = np.array(sorted(pairs)).T
    return times, joules


def read_results(text: str) -> list[dict[str, Any]]:
    """Return what ranks reported in a ``%d.prof.json`` or were told in a ``%d.sched.json``."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as exc:
        raise FormatError("not valid JSON") from exc
    if not isinstance(found, list) or not all(
        isinstance(part, dict) and isinstance(part.get("rank"), int) for part in found
    ):
        raise FormatError("expected a list of objects with a rank each")
    return found


def _rows(
    text: str, needed: Sequence[str], *, instead: Mapping[str, str] | None = None
) -> Iterable[tuple[int, dict[str, str | None]]]:
    """Yield the rows below the head by column, and their lines.

    Args:
        text: The file.
        needed: Columns that have to be there.
        instead: Those that may be there in the place of others.
    """
    reader = csv.DictReader(io.StringIO(text))
    empty = True
    try:
        head = reader.fieldnames or ()
        for column in needed:
            if column not in head and (instead or {}).get(column) not in head:
                raise FormatError(
                    f"there is no column {column!r}; expected {', '.join(needed)}", line=1
                )
        for row in reader:
            empty = False
            yield reader.line_num, row
    except csv.Error as exc:
        raise FormatError(str(exc), line=reader.line_num) from exc
    if empty:
        raise FormatError("there is no row below the head")


def _cell(row: Mapping[str, str | None], column: str, line: int) -> str:
    value = row.get(column)
    if value is None:
        raise FormatError(f"the row is short: it has no {column}", line=line)
    return value


def _number(
    row: Mapping[str, str | None],
    column: str,
    line: int,
    *,
    low: float = -math.inf,
    high: float = math.inf,
) -> float:
    cell = _cell(row, column, line)
    try:
        value = float(cell)
    except ValueError:
        raise FormatError(f"{column} is {cell!r}; expected a number", line=line) from None
    if not math.isfinite(value):
        raise FormatError(f"{column} is {value}; expected a finite number", line=line)
    if not low <= value <= high:
        limits = f"{low:g} to {high:g}" if high < math.inf else f"{low:g} or more"
        raise FormatError(f"{column} is {value:g}; expected {limits}", line=line)
    return value


def _kind(row: Mapping[str, str | None], line: int) -> Kind:
    name = _cell(row, "instruction", line)
    kind = INSTRUCTIONS.get(name.strip().lower())
    if kind is None:
        raise FormatError(
            f"instruction {name!r} is not known; there are {', '.join(INSTRUCTIONS)}", line=line
        )
    return kind


def _short(value: float) -> str:
    return str(int(value)) if value == int(value) else repr(value)
