"""``partita energy profile``: seconds and joules of each stage by clock, from whatever there is."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click
import numpy as np

from partita.cli.console import print_json, progress, stdout_console, table
from partita.cli.energy.logs import numbered, read_logs
from partita.cli.from_request import takes
from partita.cli.options import output_options
from partita.core.energy import EnergyOrigin, EnergyProfile
from partita.core.program import Kind
from partita.core.solution import Solution
from partita.documents import open_file, read_text, save, write_text
from partita.energy.frontier.replay import RankLog
from partita.errors import FormatError, InvalidInputError
from partita.flows.energy import ORIGIN_WORDS, BlockingFields, read_blocking
from partita.flows.energy_plan import modelled
from partita.flows.fields import ClusterFields
from partita.flows.solutions import SolutionRequest, read_solution
from partita.formats.perseus import profile_from_logs, read_results, write_energy_csv
from partita.formats.perseus_runs import WARM_UP, profile_from_reports, ranks_of
from partita.requests import declare, fields_of
from partita.units import format_joules, format_seconds


@dataclass(frozen=True, kw_only=True)
class EnergyProfileRequest(ClusterFields, BlockingFields):
    """Where an energy profile comes from."""

    source: str = declare("", is_argument=True, help="A profile, a folder of logs, or a plan.")
    modelled: bool = declare(False, help="Model the devices of a PLAN.")
    graph: str | None = declare(None, help="The graph, where PLAN is a bare plan.")
    ranks_per_stage: int = declare(
        1, minimum=1, help="Ranks that share a stage in a folder of logs."
    )
    clock: float | None = declare(None, help="MHz of a log that does not say its clocks.")
    warm_up: float = declare(
        WARM_UP,
        minimum=0,
        maximum=0.9,
        help="Share of the steps of each report that is left out.",
    )
    name: str | None = declare(None, usual="SOURCE's name", help="Name of the profile.")


@click.command(
    epilog="Example: partita energy profile gpt-small.plan.json --modelled -o profile.csv\n\n"
    "partita energy profile logs --ranks-per-stage 2 --blocking-power 83.64 -o profile.json"
)
@takes(EnergyProfileRequest)
@click.option("-o", "--output", help="Where to write it: FILE.json, or FILE.csv as Perseus's.")
@output_options
def command(
    request: EnergyProfileRequest, *, output: str | None, as_json: bool, quiet: bool, debug: bool
) -> None:
    """Make an energy profile of SOURCE.

    SOURCE is a profile.csv or a profile of ours; a folder with instructions-%d.csv and
    time-energy-%d.csv of each rank (their clocks from a column 'clock', from %d.freqevents.csv, or
    from --clock); a folder with %d.sched.json and %d.prof.json (and ranks.json); or a plan, with
    --modelled, for devices that nobody has here.
    """
    del debug  # read by main
    is_folder = Path(request.source).is_dir()
    _refuse_ignored(request, is_folder=is_folder)
    with progress("profile", quiet=quiet or as_json) as on_progress:
        on_progress(f"reading {request.source}")
        found = _from_folder(request) if is_folder else _from_file(request)
    if output:
        if Path(output).suffix.lower() == ".csv":
            write_text(output, write_energy_csv(found))
        else:
            save(found, output)
    if as_json:
        print_json({**_figures(found), "written": output})
        return
    console = stdout_console()
    console.print(
        f"{found.name} · {found.num_stages} stages, {len(found)} rows · "
        f"{ORIGIN_WORDS[found.origin]} · {_blocking_words(found)}"
    )
    console.print(table(_COLUMNS, [list(row.values()) for row in _rows(found)]))
    if output:
        console.print(f"written: {output}")
        if Path(output).suffix.lower() == ".csv" and found.blocking_w:
            console.print(
                "a profile.csv does not hold the blocking power; give it again", style="dim"
            )


def _refuse_ignored(request: EnergyProfileRequest, *, is_folder: bool) -> None:
    """Refuse options that say nothing of such a source."""
    given = request.given()
    names: tuple[str, ...] = ("ranks_per_stage", "clock", "warm_up")
    why = "is for a folder of logs; this is a file"
    if is_folder:
        names = ("graph", "cluster", "devices")
        why = "is for a PLAN; this is a folder of logs"
    for name in names:
        if name in given:
            raise InvalidInputError(f"--{name.replace('_', '-')} {why}")


def _from_file(request: EnergyProfileRequest) -> EnergyProfile:
    file, blocking = open_file(request.source), read_blocking(request.blocking_power)
    found = None if request.graph is not None else file.load()
    if isinstance(found, EnergyProfile):
        if request.modelled:
            raise InvalidInputError("--modelled needs a PLAN; this is a profile already")
        return _changed(found, request.name or found.name, {**found.blocking_w, **blocking})
    if found is not None and not isinstance(found, Solution) and not request.modelled:
        kind = type(found).__name__.lower()
        raise InvalidInputError(
            f"{request.source!r} holds a {kind}; expected an energy profile or a plan"
        )
    if not request.modelled:
        raise InvalidInputError(
            "a plan has no measured energy; say --modelled to model its devices"
        )
    cluster = {field.name: getattr(request, field.name) for field in fields_of(ClusterFields)}
    plan = SolutionRequest(plan=file, graph=request.graph, **cluster)
    profile = modelled(read_solution(plan))
    return _changed(profile, request.name or profile.name, {**profile.blocking_w, **blocking})


def _changed(profile: EnergyProfile, name: str, blocking: dict[str, float]) -> EnergyProfile:
    return replace(profile, name=name, blocking_w=blocking)


def _from_folder(request: EnergyProfileRequest) -> EnergyProfile:
    if request.modelled:
        raise InvalidInputError("--modelled needs a PLAN; this is a folder of logs")
    folder, blocking = Path(request.source), read_blocking(request.blocking_power)
    name = request.name or folder.resolve().name
    logs = read_logs(folder, request.clock)
    if logs:
        return _from_logs(logs, request.ranks_per_stage, name, blocking)
    reports = numbered(folder, r"(\d+)\.prof\.json")
    if not reports:
        raise InvalidInputError(
            f"{folder} holds neither instructions-%d.csv nor %d.prof.json files"
        )
    pairs = []
    for number, path in sorted(reports.items()):
        schedule = folder / f"{number}.sched.json"
        pairs.append((_results(schedule), _results(path)))
    known = folder / "ranks.json"
    ranks = ranks_of(_results(known)) if known.exists() else {}
    return profile_from_reports(
        pairs, ranks, name=name, blocking_w=blocking, warm_up=request.warm_up
    )


def _results(path: Path) -> list[dict[str, Any]]:
    try:
        return read_results(read_text(str(path)))
    except FormatError as exc:
        raise (exc if exc.path else exc.at(str(path))) from exc


def _from_logs(
    logs: dict[int, RankLog], ranks_per_stage: int, name: str, blocking: dict[str, float]
) -> EnergyProfile:
    ranks = []
    for rank, log in logs.items():
        if log.readings is None:
            raise InvalidInputError(
                f"there is no time-energy-{rank}.csv; the energy of rank {rank} is not known, so "
                "there is no profile of it"
            )
        ranks.append((rank // ranks_per_stage, log.logged, log.readings))
    modelled = any(log.is_modelled for log in logs.values())
    origin = EnergyOrigin.MODELLED if modelled else EnergyOrigin.MEASURED
    return profile_from_logs(ranks, name=name, blocking_w=blocking, origin=origin)


_COLUMNS = (
    *(("stage", "right"), ("instruction", "left"), ("device", "left"), ("clocks", "right")),
    ("MHz", "right"),
    *(("fastest", "right"), ("slowest", "right"), ("most", "right"), ("least energy", "right")),
)


def _rows(profile: EnergyProfile) -> list[dict[str, str]]:
    rows = []
    keys = np.stack([profile.stage, profile.kind, profile.device_type], axis=1)
    for stage, kind, type_ in np.unique(keys, axis=0).tolist():
        here = np.flatnonzero((keys == [stage, kind, type_]).all(axis=1))
        clocks, seconds = profile.clock_mhz[here], profile.seconds[here]
        joules = profile.joules[here]
        rows.append(
            {
                "stage": str(stage),
                "instruction": Kind(kind).name.lower(),
                "device": profile.device_types[type_],
                "clocks": str(len(here)),
                "range": f"{clocks.min():g} to {clocks.max():g}",
                "fastest": format_seconds(float(seconds.min())),
                "slowest": format_seconds(float(seconds.max())),
                "most": format_joules(float(joules.max())),
                "least": f"{format_joules(float(joules.min()))} at "
                f"{clocks[int(np.argmin(joules))]:g} MHz",
            }
        )
    return rows


def _blocking_words(profile: EnergyProfile) -> str:
    if not profile.blocking_w:
        return "blocking power not known"
    parts = (f"{name} {power:.4g} W".strip() for name, power in profile.blocking_w.items())
    return f"waiting {', '.join(parts)}"


def _figures(profile: EnergyProfile) -> dict[str, Any]:
    return {
        "name": profile.name,
        "origin": profile.origin.value,
        "stages": profile.num_stages,
        "rows": len(profile),
        "device_types": list(profile.device_types),
        "clocks_mhz": sorted({float(clock) for clock in profile.clock_mhz}),
        "blocking_w": dict(profile.blocking_w) or None,
    }
