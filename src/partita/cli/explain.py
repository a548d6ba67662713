"""``partita explain``: where time and memory of a plan go."""

import json

import click
from rich.console import Group
from rich.table import Table

from partita.cli.console import (
    alike,
    bound_line,
    breakdown_cells,
    breakdown_titles,
    format_value,
    model_line,
    overfull_line,
    percent,
    print_command,
    print_json,
    print_point,
    print_remarks,
    progress,
    rules_line,
    stdout_console,
    step_line,
    table,
)
from partita.cli.from_request import takes
from partita.cli.help import Documented
from partita.cli.options import output_options
from partita.documents import write_text
from partita.flows.answer_first import gain_of
from partita.flows.explain import (
    ExplainRequest,
    Explanation,
    WhatIf,
    explain_request,
    path_words,
)
from partita.flows.problem import objective_remarks
from partita.units import format_bytes, format_seconds

MOST_ROWS = 40
_NOTHING = 0.005
"""Relative change below which a what-if changes nothing."""


@click.command(
    cls=Documented,
    epilog="Example: partita explain gpt-small.plan.json --what-if bandwidth=2x --what-if +1xa100",
)
@takes(ExplainRequest)
@click.option("-o", "--output", help="Write the figures to a JSON file.")
@click.option("--objectives", is_flag=True, help="Show the values of published objectives, too.")
@output_options
def command(
    request: ExplainRequest,
    *,
    output: str | None,
    objectives: bool,
    as_json: bool,
    quiet: bool,
    debug: bool,
) -> None:
    """Say what bounds PLAN, what would make it faster, and where its time and memory go.

    PLAN is a saved plan, or the directory of a run, which is held against what was measured.
    A what-if is planned again by the plan's own planner; a fixed map says that it cannot be.
    """
    del debug  # read by main
    with progress("explaining", quiet=quiet or as_json) as on_progress:
        found = explain_request(request, on_progress)
    print_remarks(objective_remarks(request))
    if output:
        write_text(output, json.dumps(found.to_json(), indent=1, allow_nan=False) + "\n")
    if as_json:
        print_json(found.to_json())
    elif output != "-":
        _show(found, objectives=objectives, asked=bool(request.what_if))


def _show(found: Explanation, *, objectives: bool, asked: bool) -> None:
    console = stdout_console()
    summary = found.summary
    problem = summary.solution.problem
    console.print(model_line(problem.graph))
    console.print(step_line(problem, summary.solution.plan))
    console.print(f"plan: {summary.title} · step {format_seconds(summary.evaluation.step_s)}")
    for line in found.answer:
        print_point(console, "why:  ", line)
    for line in found.advice:
        print_command(console, line, mark="do:   ")
    console.print(table(_STAGE_COLUMNS, _stage_rows(found)))
    console.print(table(_TIME_COLUMNS, _time_rows(found)))
    console.print(_memory_table(found))
    console.print(f"bound by: {summary.evaluation.bottleneck}")
    if summary.overfull:
        console.print(overfull_line(summary), style="yellow")
    if problem.rules:
        console.print(rules_line(problem))
    console.print(f"critical path: {path_words(found.critical_path)}")
    console.print(bound_line(summary))
    for metric, value in summary.evaluation.values.items():
        if objectives and metric.value != "throughput":
            shown = format_value(value.value, value.unit)
            console.print(f"  {metric.value}: {shown} ({value.bottleneck})")
            for error in value.errors:
                console.print(f"    not feasible there: {error}")
    if found.measured:
        console.print(table(_MEASURED_COLUMNS, _measured_rows(found)))
        console.print(
            f"passes of a step: measured {format_seconds(found.measured_s)}, predicted "
            f"{format_seconds(found.predicted_s)} "
            f"({percent(found.measured_s / found.predicted_s - 1, sign=True)})"
        )
    # What was not asked for and changes nothing is no news.
    for answer in found.what_if:
        if asked or not abs(answer.relative) < _NOTHING:
            console.print(_what_if_line(answer))
    for line in summary.evaluation.assumptions:
        console.print(f"assumed: {line}", style="dim")


def _what_if_line(answer: WhatIf) -> str:
    if answer.value != answer.value:
        return f"what if {answer.change}: {answer.note}"
    return f"what if {answer.change}: {gain_of(answer)}, {answer.note}"


_MEASURED_COLUMNS = (
    ("stage", "right"),
    ("forward", "right"),
    ("measured", "right"),
    ("", "right"),
    ("backward", "right"),
    ("measured", "right"),
    ("", "right"),
)


def _measured_rows(found: Explanation) -> list[list[str]]:
    rows = []
    for row in found.measured[:MOST_ROWS]:
        cells = [str(row["stage"])]
        for name in ("forward", "backward"):
            thought, seen = row[f"{name}_predicted_s"], row[f"{name}_measured_s"]
            cells += [format_seconds(one) if one is not None else "-" for one in (thought, seen)]
            cells.append(percent(seen / thought - 1, sign=True) if thought and seen else "-")
        rows.append(cells)
    return rows


_STAGE_COLUMNS = (
    ("stage", "right"),
    ("devices", "left"),
    ("ops", "right"),
    ("from op", "left"),
    ("forward", "right"),
    ("backward", "right"),
    ("parameters", "right"),
    ("sends", "right"),
)


def _stage_rows(found: Explanation) -> list[list[str]]:
    rows = []
    for row in found.stages[:MOST_ROWS]:
        devices = row["devices"]
        more = f" +{len(devices) - 1}" if len(devices) > 2 else ""
        rows.append(
            [
                str(row["stage"]),
                ", ".join(devices[: 1 if more else 2]) + more,
                str(row["ops"]),
                row["first_op"],
                format_seconds(row["forward_s"]),
                format_seconds(row["backward_s"]),
                format_bytes(row["parameter_bytes"]),
                format_bytes(row["sent_bytes"]),
            ]
        )
    if len(found.stages) > MOST_ROWS:
        rows.append(["...", f"{len(found.stages) - MOST_ROWS} more", *[""] * 6])
    return rows


_TIME_COLUMNS = (
    ("device", "left"),
    ("type", "left"),
    ("forward", "right"),
    ("backward", "right"),
    ("recompute", "right"),
    ("load", "right"),
    ("update", "right"),
    ("network", "right"),
    ("idle", "right"),
    ("busy", "right"),
    ("sending", "right"),
)


def _time_rows(found: Explanation) -> list[list[str]]:
    keys = (
        *("forward_s", "backward_s", "recompute_s", "load_s", "update_s"),
        *("communicating_s", "idle_s"),
    )
    rows = [
        [
            row["device"],
            row["type"],
            *(format_seconds(row[key]) if row[key] > 0 else "-" for key in keys),
            percent(row["utilisation"]),
            format_seconds(row["sending_s"]) if row["sending_s"] > 0 else "-",
        ]
        for row in found.devices
    ]
    return alike(rows)[:MOST_ROWS]


def _memory_table(found: Explanation) -> Table | Group:
    memory = found.summary.evaluation.memory
    *titles, _, _ = breakdown_titles(memory)
    columns = [("device", "left"), *((t, "right") for t in (*titles, "peak", "limit", "free"))]
    rows = []
    for index, row in enumerate(found.devices):
        *held, _, free = breakdown_cells(memory, index)
        limit = format_bytes(row["limit_bytes"]) if row["limit_bytes"] is not None else "-"
        rows.append([row["device"], *held, format_bytes(row["peak_bytes"]), limit, free])
    return table(columns, alike(rows)[:MOST_ROWS])
