"""``partita energy profile``: seconds and joules of each stage by clock, from whatever there is."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import numpy as np

from partita.cli.console import print_json, progress, stdout_console, table
from partita.cli.energy.inputs import (
    ORIGIN_WORDS,
    blocking_option,
    read_blocking,
)
from partita.cli.energy.logs import numbered, read_logs
from partita.cli.inputs import ProblemOptions, read_solution, take_problem_options
from partita.cli.options import FiniteRange, cluster_options, output_options
from partita.core.energy import EnergyOrigin, EnergyProfile
from partita.core.program import Kind
from partita.core.solution import Solution
from partita.documents import open_file, read_text, save, write_text
from partita.energy.frontier.replay import RankLog
from partita.errors import FormatError, InvalidInputError
from partita.flows.energy_plan import modelled
from partita.formats.perseus import profile_from_logs, read_results, write_energy_csv
from partita.formats.perseus_runs import WARM_UP, profile_from_reports, ranks_of
from partita.units import format_joules, format_seconds


@click.command(
    epilog="Example: partita energy profile gpt-small.plan.json --modelled -o profile.csv\n\n"
    "partita energy profile logs --ranks-per-stage 2 --blocking-power 83.64 -o profile.json"
)
@click.argument("source")
@click.option("--modelled", "is_modelled", is_flag=True, help="Model the devices of a PLAN.")
@click.option("--graph", help="The graph, where PLAN is a bare plan.")
@cluster_options
@click.option(
    "--ranks-per-stage", type=click.IntRange(1), default=1, help="Of a folder of logs. [1]"
)
@click.option("--clock", type=float, help="MHz of a log that does not say its clocks.")
@click.option(
    "--warm-up",
    type=FiniteRange(0, 0.9),
    default=WARM_UP,
    show_default=True,
    help="Share of the steps of each report that is left out.",
)
@click.option("--name", help="What to call the profile. [SOURCE's name]")
@blocking_option
@click.option("-o", "--output", help="Where to write it: FILE.json, or FILE.csv as Perseus's.")
@output_options
def command(source: str, **rest: Any) -> None:
    """Make an energy profile of SOURCE.

    SOURCE is a profile.csv or a profile of ours; a folder with instructions-%d.csv and
    time-energy-%d.csv of each rank (their clocks from a column 'clock', from %d.freqevents.csv, or
    from --clock); a folder with %d.sched.json and %d.prof.json (and ranks.json); or a plan, with
    --modelled, for devices that nobody has here.
    """
    rest.pop("debug")
    options = take_problem_options(rest)
    _refuse_ignored(rest, options, is_folder=Path(source).is_dir())
    blocking = read_blocking(rest["blocking"])
    with progress("profile", quiet=rest["quiet"] or rest["as_json"]) as tell:
        tell(f"reading {source}")
        if Path(source).is_dir():
            found = _from_folder(Path(source), rest, blocking)
        else:
            found = _from_file(source, rest, options, blocking)
    if rest["output"]:
        if Path(rest["output"]).suffix.lower() == ".csv":
            write_text(rest["output"], write_energy_csv(found))
        else:
            save(found, rest["output"])
    if rest["as_json"]:
        print_json({**_figures(found), "written": rest["output"]})
        return
    console = stdout_console()
    console.print(
        f"{found.name} · {found.num_stages} stages, {len(found)} rows · "
        f"{ORIGIN_WORDS[found.origin]} · {_blocking_words(found)}"
    )
    console.print(table(_COLUMNS, [list(row.values()) for row in _rows(found)]))
    if rest["output"]:
        console.print(f"written: {rest['output']}")
        if Path(rest["output"]).suffix.lower() == ".csv" and found.blocking_w:
            console.print(
                "a profile.csv does not hold the blocking power; give it again", style="dim"
            )


def _refuse_ignored(rest: dict[str, Any], options: ProblemOptions, *, is_folder: bool) -> None:
    """Refuse options that say nothing of such a source."""
    if is_folder:
        given = {"graph": rest["graph"], "cluster": options.cluster, "devices": options.devices}
        why = "is for a PLAN; this is a folder of logs"
    else:
        given = {
            "ranks-per-stage": rest["ranks_per_stage"] != 1 or None,
            "clock": rest["clock"],
            "warm-up": rest["warm_up"] != WARM_UP or None,
        }
        why = "is for a folder of logs; this is a file"
    for name, value in given.items():
        if value is not None:
            raise click.UsageError(f"--{name} {why}")


def _from_file(
    source: str, rest: dict[str, Any], options: ProblemOptions, blocking: dict[str, float]
) -> EnergyProfile:
    file = open_file(source)
    found = None if rest["graph"] is not None else file.load()
    if isinstance(found, EnergyProfile):
        if rest["is_modelled"]:
            raise click.UsageError("--modelled needs a PLAN; this is a profile already")
        return _changed(found, rest["name"] or found.name, {**found.blocking_w, **blocking})
    if found is not None and not isinstance(found, Solution) and not rest["is_modelled"]:
        kind = type(found).__name__.lower()
        raise InvalidInputError(f"{source!r} holds a {kind}; expected an energy profile or a plan")
    if not rest["is_modelled"]:
        raise click.UsageError("a plan has no measured energy; say --modelled to model its devices")
    profile = modelled(read_solution(file, rest["graph"], options))
    return _changed(profile, rest["name"] or profile.name, {**profile.blocking_w, **blocking})


def _changed(profile: EnergyProfile, name: str, blocking: dict[str, float]) -> EnergyProfile:
    return replace(profile, name=name, blocking_w=blocking)


def _from_folder(folder: Path, rest: dict[str, Any], blocking: dict[str, float]) -> EnergyProfile:
    if rest["is_modelled"]:
        raise click.UsageError("--modelled needs a PLAN; this is a folder of logs")
    name = rest["name"] or folder.resolve().name
    logs = read_logs(folder, rest["clock"])
    if logs:
        return _from_logs(logs, rest["ranks_per_stage"], name, blocking)
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
        pairs, ranks, name=name, blocking_w=blocking, warm_up=rest["warm_up"]
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
