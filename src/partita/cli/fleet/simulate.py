"""``partita fleet simulate``: policies on a trace, ranked, shown and written."""

import csv
import io
import math
import shlex
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from partita.cli.console import (
    paced,
    percent,
    print_json,
    print_remarks,
    progress,
    stdout_console,
    table,
    terminal_width,
)
from partita.cli.from_request import takes
from partita.cli.help import Documented
from partita.cli.options import output_options, report_option, write_page
from partita.core.fleet import SensitivityOrigin
from partita.documents import save, write_bytes, write_text
from partita.errors import InvalidInputError, reason_of
from partita.fleet.policies.metrics import Metrics
from partita.fleet.policies.resources import Servers
from partita.fleet.study.panels import MOST_LINES, panels_of
from partita.fleet.study.study import Capped, Run, Study
from partita.fleet.study.traces import summary_of
from partita.flows.fleet.simulate import SimulateFleetRequest, simulate_fleet_request
from partita.formats.synergy import write_results
from partita.report.charts import ENDINGS, panels_chart, render
from partita.requests import arguments_of
from partita.units import format_bytes, format_joules

_UNITS = ((2 * 3600.0, 3600.0, "hours"), (120.0, 60.0, "minutes"), (0.0, 1.0, "seconds"))


_COLUMNS = (
    *(("#", "right"), ("jobs/h", "right"), ("seed", "right"), ("policy", "left")),
    *(("mean", "right"), ("", "right")),
    *(("median", "right"), ("p99", "right"), ("makespan", "right"), ("queued", "right")),
    *(("stops", "right"), ("moves", "right"), ("fair", "right"), ("worst", "right")),
    *(("GPUs", "right"), ("CPUs", "right"), ("memory", "right"), ("waiting", "right")),
    *(("energy", "right"), ("gap", "right")),
)


DISPENSABLE = ("worst", "memory", "waiting", "moves", "median", "CPUs")
"""Columns that a narrow terminal goes without, in this order."""


_SEED_COLUMNS = (
    *(("#", "right"), ("jobs/h", "right"), ("policy", "left"), ("mean", "right"), ("", "right")),
    *(("deviation", "right"), ("best with", "right")),
)


_KIND_COLUMNS = (
    *(("policy", "left"), ("class", "left"), ("jobs", "right"), ("mean", "right")),
    *(("median", "right"), ("p99", "right"), ("queued", "right"), ("fair", "right")),
    *(("energy", "right"),),
)


_CAP_COLUMNS = (
    *(
        ("jobs/h", "right"),
        ("seed", "right"),
        ("policy", "left"),
        ("clocks", "left"),
        ("peak", "right"),
    ),
    *(
        ("throughput lost", "right"),
        ("in GPU time", "right"),
        ("mean", "right"),
        ("energy", "right"),
    ),
)


MOST_KINDS = 24
"""Rows of classes that are shown; all are in the JSON."""


MOST_RUNS = 200
"""Rows of runs that are shown."""


@click.command(
    cls=Documented,
    name="simulate",
    epilog="Example: partita fleet simulate generated:jobs=200,load=6 --cluster 4x8xv100 "
    "--policy fifo:fair,fifo:tune,srtf:joint --picture study.svg\n\n"
    "partita fleet simulate trace.csv --profiles model_profiles.json --policy fifo:tune "
    "--loads 1:10 --csv sweep.csv",
)
@takes(SimulateFleetRequest, without=("record",))
@click.option("--picture", help="File for all diagrams (.svg, .png or .pdf), or a folder of them.")
@click.option("--csv", "table_file", help="File for the figures of every run, as a table.")
@click.option("--results", help="File for every job's end, in Synergy's columns: FILE.csv.")
@click.option(
    "-o", "--output", help="File for the history: FILE.json; with several runs one per run."
)
@report_option
@output_options
def command(
    request: SimulateFleetRequest,
    *,
    picture: str | None,
    table_file: str | None,
    results: str | None,
    output: str | None,
    report_file: str | None,
    as_json: bool,
    quiet: bool,
    debug: bool,
) -> None:
    """Play the jobs of TRACE under several policies and rank them by mean completion time.

    TRACE is a 'partita.trace' document, Synergy's CSV (with --profiles), a log of submissions
    (Philly's JSON, a CSV, or what sacct --parsable2 prints), or
    generated[:jobs=100,load=9,seed=1,static,short,multi-gpu]. Rounds in which nothing changes cost
    nothing.
    """
    del debug  # read by main
    with progress("fleet", quiet=quiet or as_json) as on_progress:
        result = simulate_fleet_request(replace(request, record=bool(output)), paced(on_progress))
    print_remarks(result.remarks)
    written = write_study(
        result.study, picture=picture, table_file=table_file, results=results, output=output
    )
    if report_file is not None:
        from partita.flows.pages import fleet_page  # noqa: PLC0415 (only where it is asked for)

        again = shlex.join(["partita", "fleet", "simulate", *arguments_of(request)])
        seed = result.study.question.seed  # figures of further seeds are in the tables
        first = [run for run in result.runs if run.seed == seed]
        page = fleet_page(first, title=result.study.question.trace.name, command=again)
        write_page(page, report_file, quiet=quiet or as_json)
    if as_json:
        print_json({**result.to_json(), "written": written})
    else:
        show(stdout_console(), result.study, written)


def show(console: Console, found: Study, written: Sequence[str]) -> None:
    """Print a study: what was asked, the ranked table, classes, the power cap, files."""
    question = found.question
    console.print(summary_of(question.trace).line())
    console.print(_servers_line(question.servers))
    console.print(_rules_line(found))
    scale, unit = _unit(found.runs)
    if found.over_seeds:
        _show_over_seeds(console, found, scale, unit)
    console.print(f"completion times in {unit}, the best mean first:")
    rows = [_row(index, found.runs, scale) for index in range(len(found.runs))]
    console.print(_ranked(rows[:MOST_RUNS]))
    if len(rows) > MOST_RUNS:
        console.print(f"{len(rows) - MOST_RUNS} more runs are in --csv and --json", style="dim")
    if len(question.loads) <= 1 and not question.further:
        _show_kinds(console, found.runs, scale)
    _show_capped(console, found.capped, scale, unit)
    for line in _notes(found):
        console.print(line, style="dim")
    for path in written:
        console.print(f"written: {path}")


def _show_over_seeds(console: Console, found: Study, scale: float, unit: str) -> None:
    """Print what each policy comes to over all seeds."""
    seeds = list(found.question.traces)
    console.print(f"mean completion times in {unit} over {len(seeds)} seeds:")
    rows = []
    for each in found.over_seeds:
        same = [o for o in found.over_seeds if o.load == each.load or math.isnan(each.load)]
        best = same[0].mean_s
        rows.append(
            [
                str(1 + sum(other.mean_s < each.mean_s for other in same)),
                "" if math.isnan(each.load) else f"{each.load:g}",
                each.title,
                _time(each.mean_s, scale),
                "" if each.mean_s == best else percent(each.mean_s / best - 1, sign=True),
                _time(each.deviation_s, scale),
                f"{each.wins} of {len(seeds)}",
            ]
        )
    console.print(table(_SEED_COLUMNS, rows))


def _servers_line(servers: Servers) -> str:
    count = len(servers)
    kinds = ", ".join(kind for kind in servers.gpu_types if kind)
    types = f" ({kinds})" if kinds else ""
    each = ""
    if servers.alike:
        each = (
            f", each {servers.gpus[0]} GPUs, {servers.cpus[0]:g} CPUs, "
            f"{format_bytes(servers.memory_bytes[0])}"
        )
    return f"{servers.num_gpus:,} GPUs{types} in {count:,} server{'s' * (count > 1)}{each}"


def _rules_line(found: Study) -> str:
    question = found.question
    rules = question.rules
    fixed = {run.simulator.fixed_rules for run in found.runs}
    if "" not in fixed:
        return "; ".join(sorted(fixed))
    words = f"simulated in rounds of {rules.round_s:g} s, restarts cost {rules.restart_s:g} s"
    if question.window is not None:
        words += f", jobs {question.window[0]} to {question.window[1]} count"
    for outage in rules.outages:
        end = f"to {outage.end_s:g}" if math.isfinite(outage.end_s) else "on"
        name = question.servers.names[outage.server]
        words += f", {name} down from {outage.start_s:g} {end} s"
    return words


def _unit(runs: Sequence[Run]) -> tuple[float, str]:
    """Return the seconds of a unit that suits the runs, and its name."""
    means = [run.metrics.mean_s for run in runs if math.isfinite(run.metrics.mean_s)]
    longest = max(means, default=0.0)
    return next((scale, name) for least, scale, name in _UNITS if longest >= least)


def _time(value: float, scale: float) -> str:
    return f"{value / scale:,.2f}" if math.isfinite(value) else "-"


def _row(index: int, runs: Sequence[Run], scale: float) -> list[str]:
    """Return a row of the ranked table.

    The rank is that among runs at the same load with the same seed; equal means share it.
    """
    run = runs[index]
    same = [
        other
        for other in runs
        if (other.load == run.load or math.isnan(run.load)) and other.seed == run.seed
    ]
    best = same[0].metrics.mean_s
    found, use = run.metrics, run.use
    return [
        str(1 + sum(other.metrics.mean_s < found.mean_s for other in same)),
        "" if math.isnan(run.load) else f"{run.load:g}",
        "" if len({other.seed for other in runs}) == 1 else str(run.seed),
        run.title,
        _time(found.mean_s, scale),
        "" if found.mean_s == best else percent(found.mean_s / best - 1, sign=True),
        _time(found.median_s, scale),
        _time(found.p99_s, scale),
        _time(found.makespan_s, scale),
        _time(found.queueing_s, scale),
        *(
            "-" if name in run.simulator.not_counted else f"{getattr(found, name):,}"
            for name in ("preemptions", "migrations")
        ),
        f"{found.fairness:.2f}",
        f"{found.worst_stretch:.1f}",
        percent(use.gpus),
        percent(use.cpus),
        percent(use.memory),
        f"{use.waiting:.1f}",
        _energy(found.energy_j),
        "-" if math.isnan(use.mean_gap) else f"{100 * max(use.mean_gap, 0.0):.2f} %",
    ]


def _energy(joules: float) -> str:
    """Return an energy in kWh or MWh, the units of a fleet."""
    if not math.isfinite(joules):
        return "-"
    kwh = joules / 3.6e6
    if kwh < 0.1:
        return format_joules(joules)
    return f"{kwh:,.1f} kWh" if kwh < 1e4 else f"{kwh / 1e3:,.1f} MWh"


def _ranked(rows: Sequence[Sequence[str]]) -> Any:
    """Return the ranked table, without some columns where the terminal is narrow."""
    kept = list(range(len(_COLUMNS)))
    names = [title for title, _ in _COLUMNS]

    def width() -> int:
        shown = [i for i in kept if any(row[i] not in ("", "-") for row in rows)]
        return sum(max(len(names[i]), *(len(row[i]) for row in rows)) + 2 for i in shown)

    for title in DISPENSABLE:
        if width() <= terminal_width():
            break
        kept.remove(names.index(title))
    return table([_COLUMNS[i] for i in kept], [[row[i] for i in kept] for row in rows])


def _show_kinds(console: Console, runs: Sequence[Run], scale: float) -> None:
    rows = [
        _kind_row(run.title, kind, found, scale)
        for run in runs
        for kind, found in run.kinds.items()
        if len(run.kinds) > 1
    ]
    if rows:
        console.print("by class of jobs:")
        console.print(table(_KIND_COLUMNS, rows[:MOST_KINDS]))
    if len(rows) > MOST_KINDS:
        console.print(f"{len(rows) - MOST_KINDS} more rows are in --json", style="dim")


def _kind_row(title: str, kind: str, found: Metrics, scale: float) -> list[str]:
    times = (found.mean_s, found.median_s, found.p99_s, found.queueing_s)
    shown = [_time(value, scale) for value in times]
    return [
        title,
        kind,
        f"{found.jobs:,}",
        *shown,
        f"{found.fairness:.2f}",
        _energy(found.energy_j),
    ]


def _show_capped(console: Console, capped: Sequence[Capped], scale: float, unit: str) -> None:
    if not capped:
        return
    console.print(f"power cap of {capped[0].cap_w / 1e3:g} kW (mean in {unit}):")
    rows: list[list[str]] = []
    has_seeds = len({each.seed for each in capped}) > 1
    for each in capped:
        load = "" if math.isnan(each.load) else f"{each.load:g}"
        seed = str(each.seed) if has_seeds else ""
        lines = (
            ("no cap", each.free_w, None),
            ("chosen job by job", each.peak_w, (each.lost, each.held)),
            ("one limit for all", each.equal_peak_w, (each.equal_lost, each.equal_held)),
        )
        for number, (words, peak, losses) in enumerate(lines):
            lost = ["-", "-"] if losses is None else [f"{100 * value:.2f} %" for value in losses]
            head = [load, seed, each.policy] if number == 0 else ["", "", ""]
            mean, joules = _time(each.mean_s[number], scale), _energy(each.energy_j[number])
            rows.append([*head, words, f"{peak / 1e3:.2f} kW", *lost, mean, joules])
    console.print(table(_CAP_COLUMNS, rows))


def _notes(found: Study) -> list[str]:
    """Return what a reader must know of the figures."""
    trace, runs = found.question.trace, found.runs
    notes = []
    if any(part.origin is SensitivityOrigin.MODELLED for part in trace.sensitivities):
        notes.append("speeds of jobs are modelled, nobody measured them")
    if any(math.isfinite(run.metrics.energy_j) for run in runs):
        notes.append(
            "energy is that of the GPUs while jobs hold them, by the frontiers that jobs carry"
        )
    notes += [
        f"{run.title}: {run.metrics.unfinished} jobs did not end, and count in no time"
        for run in runs
        if run.metrics.unfinished
    ]
    if found.differences:
        notes.append("where our rules depart from the released code's:")
        notes += [f"  {line}" for line in found.differences]
    return notes


def write_study(
    found: Study,
    *,
    picture: str | None,
    table_file: str | None,
    results: str | None,
    output: str | None,
) -> list[str]:
    """Write what was asked for; return the names of the files."""
    written: list[str] = []
    if picture:
        written += _write_pictures(found, picture)
    if table_file:
        write_text(table_file, _csv(found.runs))
        written.append(table_file)
    for run in found.runs:
        has_seeds = bool(found.question.further)
        words = () if len(found.runs) == 1 else _words(run, has_seeds=has_seeds)
        if results:
            assert run.trace is not None  # it was simulated just now
            path = run_path(results, *words)
            write_text(path, write_results(run.history, run.trace))
            written.append(path)
        if output:
            path = run_path(output, *words)
            save(run.history, path)
            written.append(path)
    return written


def _words(run: Run, *, has_seeds: bool) -> list[str]:
    words = [run.title.replace(" as ", "-")]
    if not math.isnan(run.load):
        words.append(f"at-{run.load:g}")
    return [*words, f"seed-{run.seed}"] if has_seeds else words


def run_path(path: str, *words: str) -> str:
    """Return a file's name with words before its ending, for the files of several runs."""
    if not words:
        return path
    if path == "-":
        raise InvalidInputError("several runs cannot all go to stdout; name a file")
    file = Path(path)
    plain = "".join(c if c.isalnum() or c in ".-" else "-" for c in ".".join(words))
    return str(file.with_name(f"{file.stem}.{plain}{file.suffix}"))


def _write_pictures(found: Study, picture: str) -> list[str]:
    question = found.question
    first = [run for run in found.runs if run.seed == question.seed]
    panels = panels_of(first)
    seed = f", seed {question.seed}" if question.further else ""
    name = f"{question.trace.name}, {question.servers.num_gpus:,} GPUs (simulated{seed})"
    titles = {run.title for run in found.runs}
    if len(titles) > MOST_LINES:
        name += f": the best {MOST_LINES} of {len(titles)} policies"
    path = Path(picture)
    if path.suffix.lower() in ENDINGS:
        write_bytes(path, render(lambda: panels_chart(panels, title=name), picture))
        return [picture]
    if path.suffix:
        raise InvalidInputError(
            f"--picture {picture!r}: name a file that ends in {', '.join(ENDINGS)}, or a folder"
        )
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as exc:
        raise InvalidInputError(f"--picture {picture} cannot be made: {reason_of(exc)}") from exc
    files = [path / f"{panel.key}.svg" for panel in panels]
    for file, panel in zip(files, panels, strict=True):
        write_bytes(file, render(partial(panels_chart, [panel], title=name), str(file)))
    return [str(file) for file in files]


def _csv(runs: Sequence[Run]) -> str:
    """Return every run, and every class of its jobs, as a row; times in seconds."""
    rows = []
    for run in runs:
        figures = run.to_json()
        kinds, use = figures.pop("classes"), figures.pop("use")
        shared = {f"use_{name}": value for name, value in use.items()}
        rows.append({**figures, "class": "all", **shared})
        head = {name: figures[name] for name in ("policy", "rules", "load_per_hour", "seed")}
        rows += [{**head, "class": kind, **values} for kind, values in kinds.items()]
    names = list(dict.fromkeys(name for row in rows for name in row))
    names.insert(3, names.pop(names.index("class")))
    text = io.StringIO()
    writer = csv.DictWriter(text, names, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()
