"""``partita energy replay``: clocks from elsewhere, or a recorded log, in the simulator."""

import math
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import click

from partita.cli.console import print_json, progress, stdout_console, table
from partita.cli.energy.frontier import write_picture
from partita.cli.energy.logs import read_logs
from partita.cli.from_request import takes
from partita.cli.options import output_options
from partita.core.json_values import number_or_none
from partita.documents import open_file
from partita.energy.frontier.frontier import EnergyModel
from partita.energy.frontier.replay import replay_log
from partita.energy.frontier.savings import model_of, planned_clocks, played
from partita.errors import InvalidInputError
from partita.flows.energy import (
    ORIGIN_WORDS,
    EnergySource,
    EnergySourceFields,
    read_clock_file,
    read_source,
    share,
)
from partita.flows.summary import describe_plan
from partita.report.charts import ORIGINS
from partita.report.clock_svg import clock_svg
from partita.requests import declare, part
from partita.units import format_joules


@dataclass(frozen=True, kw_only=True)
class ReplayRequest(EnergySourceFields):
    """Clocks or a log, and the plan or profile to play them on."""

    source: str = declare("", is_argument=True, help="A plan, an energy profile or a frontier.")
    clocks: str = declare("", is_argument=True, help="A clock plan, or a folder of logs.")
    clock: float | None = declare(None, help="MHz of a log that does not say its clocks.")
    claimed_time: float | None = declare(
        None, usual="its comment", help="Seconds that CLOCKS claims."
    )
    claimed_energy: float | None = declare(
        None, usual="its comment", help="Joules that CLOCKS claims."
    )
    picture: str | None = declare(None, help="Write the step coloured by clock, an SVG file.")


@click.command(
    epilog="Example: partita energy replay profile.csv freqs_pipeline_00000.py --microbatches 12 "
    "--blocking-power 83.64\n\n"
    "partita energy replay gpt-small.plan.json logs"
)
@takes(ReplayRequest)
@output_options
def command(request: ReplayRequest, *, as_json: bool, quiet: bool, debug: bool) -> None:
    """Play CLOCKS on SOURCE and compare with what was claimed or measured.

    SOURCE is a plan, an energy profile or a frontier, as for 'partita energy frontier'. CLOCKS is a
    clock plan (ours, Zeus's or Perseus's; it is read as data and never run), or a folder with
    instructions-%d.csv, and time-energy-%d.csv if energy was read, of each rank of a run.
    """
    del debug  # read by main
    with progress("replay", quiet=quiet or as_json) as on_progress:
        on_progress(f"{request.clocks} on {request.source}")
        found = read_source(request.source, part(EnergySourceFields, request))
        model = model_of(found.solution, found.profile)
        if Path(request.clocks).is_dir():
            _refuse_claims(request)
            figures = _log_figures(model, Path(request.clocks), request.clock)
        else:
            if request.clock is not None:
                raise InvalidInputError("--clock is for a log; a clock plan says its clocks")
            figures = _plan_figures(model, request)
    figures = {"origin": found.profile.origin.value, "assumed": list(found.assumed), **figures}
    if as_json:
        print_json(figures)
        return
    _show(found, request.clocks, figures)


def _refuse_claims(request: ReplayRequest) -> None:
    for name in ("claimed_time", "claimed_energy", "picture"):
        if getattr(request, name) is not None:
            given = name.replace("_", "-")
            raise InvalidInputError(f"--{given} is for a clock plan; a log says what was measured")


def _plan_figures(model: EnergyModel, request: ReplayRequest) -> dict[str, Any]:
    file = read_clock_file(open_file(request.clocks))
    step = played(model, planned_clocks(model.program, file.entries))
    if request.picture:
        title = f"{Path(request.clocks).name} ({ORIGINS[model.profile.origin]})"
        facts = [f"{format_joules(step.energy_j)}, {format_joules(step.waiting_j)} of it waiting"]
        write_picture(request.picture, clock_svg(step.timeline, title=title, facts=facts))
    all_max_s, all_max_j = model.all_max()
    time_s, energy_j = request.claimed_time, request.claimed_energy
    return {
        "time_s": step.time_s,
        "energy_j": step.energy_j,
        "waiting_j": step.waiting_j,
        "all_max_s": all_max_s,
        "all_max_j": all_max_j,
        "claimed_s": number_or_none(file.time_s if time_s is None else time_s),
        "claimed_j": number_or_none(file.energy_j if energy_j is None else energy_j),
        "written": [request.picture] if request.picture else [],
    }


def _log_figures(model: EnergyModel, folder: Path, clock: float | None) -> dict[str, Any]:
    logs = read_logs(folder, clock)
    if not logs:
        raise InvalidInputError(f"{folder} holds no instructions-%d.csv")
    steps = replay_log(model, list(logs.values()))
    all_max_s, all_max_j = model.all_max()
    measured = [step.measured_j for step in steps]
    return {
        "time_s": median(step.time_s for step in steps),
        "energy_j": median(step.energy_j for step in steps),
        "measured_s": median(step.measured_s for step in steps),
        "measured_j": None if any(map(math.isnan, measured)) else median(measured),
        "counters": "modelled" if any(log.is_modelled for log in logs.values()) else "measured",
        "all_max_s": all_max_s,
        "all_max_j": all_max_j,
        "steps": [step.to_json() for step in steps],
    }


_COLUMNS = (("", "left"), ("step", "right"), ("", "right"), ("energy", "right"), (" ", "right"))


def _show(found: EnergySource, clocks: str, figures: dict[str, Any]) -> None:
    console = stdout_console()
    plan = describe_plan(found.solution.plan)
    console.print(f"{clocks} on {found.name} · {plan} · {ORIGIN_WORDS[found.profile.origin]}")
    time_s, energy_j = figures["time_s"], figures["energy_j"]
    rows = [["simulated", f"{time_s:.5g} s", "", format_joules(energy_j), ""]]
    for word in ("claimed", "measured"):
        told_s, told_j = figures.get(f"{word}_s"), figures.get(f"{word}_j")
        if told_s is not None or told_j is not None:
            rows.append(_row(word, (told_s, told_j), (time_s, energy_j)))
    rows.append(_row("all-max", (figures["all_max_s"], figures["all_max_j"]), (time_s, energy_j)))
    console.print(table(_COLUMNS, rows))
    if "steps" in figures:
        counters = ", energy counters of modelled devices" * (figures["counters"] == "modelled")
        console.print(f"medians of {len(figures['steps'])} recorded steps{counters}")
        if figures["measured_j"] is None:
            console.print("measured energy is unknown: there is no counter for all of it")
    for line in found.assumed:
        console.print(f"assumed: {line}", style="dim")
    for path in figures.get("written", []):
        console.print(f"written: {path}")


def _row(
    word: str, told: tuple[float | None, float | None], ours: tuple[float, float]
) -> list[str]:
    """Return what was told, and how much more or less than that the simulation says."""
    time_s, energy_j = told
    return [
        word,
        "unknown" if time_s is None else f"{time_s:.5g} s",
        "" if not time_s else f"simulated {share(ours[0] / time_s - 1)}",
        "unknown" if energy_j is None else format_joules(energy_j),
        "" if not energy_j else f"simulated {share(ours[1] / energy_j - 1)}",
    ]
