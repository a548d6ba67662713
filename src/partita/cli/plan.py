"""``partita plan``: from a model and a cluster to a plan."""

import shlex
from pathlib import Path
from typing import TYPE_CHECKING

import click
from rich.console import Console

from partita.cli.console import (
    alternatives_table,
    basis_line,
    bound_line,
    breakdown_table,
    effort_line,
    memory_table,
    model_line,
    overfull_line,
    precision_line,
    print_json,
    print_remarks,
    progress,
    replacement_table,
    reserve_line,
    rules_line,
    stdout_console,
    step_line,
    summary_row,
    summary_table,
    table,
    unused_line,
)
from partita.cli.from_request import takes
from partita.cli.help import Documented
from partita.cli.options import output_options, own_name, report_option, write_page
from partita.documents import save, write_bytes, write_text
from partita.flows.plan import NothingFitsError, PlanRequest, PlanResult, plan_request
from partita.requests import arguments_of

if TYPE_CHECKING:
    from partita.flows.energy_plan import EnergyAnswer, EnergyCandidate
    from partita.flows.large import LargePlanResult
    from partita.report.page import Page

_MOST_PLANS = 6


_COLUMNS = (
    *(("plan by energy", "left"), ("devices", "right"), ("step, all-max", "right")),
    *(("step", "right"), ("J/sample", "right"), ("all-max", "right"), ("T_min", "right")),
    *(("T*", "right"), ("gap", "right")),
)


@click.command(
    cls=Documented,
    epilog="Example: partita plan gpt-small --cluster 2x4xa100+1x2xv100 --microbatches 32\n\n"
    "partita plan gpt3-xl --cluster 2x4xa100+4xv100 --pin 'blocks.0=host0/*'\n\n"
    "partita plan llama3-70b --cluster 8xdgx-h100 --batch-size 128 --tokens 1T\n\n"
    "partita plan resnet50 --cluster 6xa40+2xh100 --microbatches 16 --objective energy\n\n"
    "partita plan gpt-small --cluster 3xa100 --from gpt-small.plan.json --minimise-moves",
)
@takes(PlanRequest)
@click.option("-o", "--output", help="Write the plan to this file; - is stdout. [NAME.plan.json]")
@report_option
@output_options
def command(
    request: PlanRequest,
    *,
    output: str | None,
    report_file: str | None,
    as_json: bool,
    quiet: bool,
    debug: bool,
) -> None:
    """Plan MODEL over a cluster and write the plan.

    MODEL is a built-in example (gpt-small, resnet50, chain201, ...), a Partita document, or any
    graph file that 'partita convert' reads; - is stdin. A model of 'partita models', a Hugging Face
    configuration (hf:tiny-llama) or package.module:callable is estimated for the devices of the
    cluster. A large transformer (llama3-70b, qwen3-235b-a22b, ...; 'partita models' lists them) or
    its config.json is planned by its shape in all degrees: tensor, pipeline, data, context and
    expert parallelism, sharding, recomputation; a config.json op by op where an option for that is
    given, such as --planner. MODEL may be left out where the cluster file names its profiles. With
    --json no file is written unless -o names one.

    With --objective energy the plan and the clocks of least joules per sample are searched, by a
    model of the devices, among plans that are at most --slowdown slower than the fastest.

    With --from PLAN the plan takes the place of another one (other devices, another batch): bytes
    of weights, master copy and optimizer state that move are shown, and what nobody holds any
    longer is read from a checkpoint. Devices are matched by name.

    Where no plan fits it exits with 3, and says what is the least that makes it fit.
    """
    del debug  # read by main
    with progress("planning", quiet=quiet or as_json) as on_progress:
        try:
            result = plan_request(request, on_progress)
        except NothingFitsError as exc:
            if as_json:
                print_json(exc.to_json())
            raise
    if report_file is not None:
        write_page(_page(result, request), report_file, quiet=quiet or as_json)
    if not isinstance(result, PlanResult):
        from partita.cli.large import finish_large  # noqa: PLC0415 (where one is planned)

        name = f"{result.task.shape.name}.plan.json"
        target = output or (None if as_json else own_name(name))
        finish_large(result, target, as_json=as_json)
        return
    print_remarks(result.posed.remarks)
    name = f"{result.problem.graph.name}.plan.json"
    target = output or (None if as_json else own_name(name))
    if target is not None and target != "-":
        save(result.solution, target)
    traced = _write_trace(result, request.trace_search)
    if as_json:
        print_json({**result.to_json(), "written": target, "traced": traced})
    elif target == "-":
        save(result.solution, "-")
    else:
        _show(result, str(target))
        if traced:
            stdout_console().print(f"search traced in {' and '.join(traced)}")


def _page(result: "PlanResult | LargePlanResult", request: PlanRequest) -> "Page":
    """Return the page of a plan, with the command that makes it again."""
    from partita.flows.answer import answer_of  # noqa: PLC0415 (only where a page is asked for)
    from partita.flows.pages import plan_page  # noqa: PLC0415 (likewise)

    command = shlex.join(["partita", "plan", *arguments_of(request)])
    if not isinstance(result, PlanResult):
        return plan_page(answer_of(result.solution), command=command)
    return plan_page(
        result.answer,
        searched=() if result.trace is None else result.trace.points,
        frontier=None if result.energy is None else result.energy.best.frontier,
        command=command,
    )


def _write_trace(result: PlanResult, file: str | None) -> list[str]:
    """Write what the search found over time, if it was recorded; return the names of the files."""
    if result.trace is None or file is None:
        return []
    from partita.report.charts import (  # noqa: PLC0415 (only where a search is drawn)
        ENDINGS,
        render,
        search_chart,
        search_csv,
    )

    ending = Path(file).suffix
    stem = Path(file).with_suffix("") if ending in (".csv", *ENDINGS) else Path(file)
    picture = f"{stem}{ending if ending in ENDINGS else '.svg'}"
    solution, points = result.searched, result.trace.points
    title = f"{solution.problem.graph.name} by {solution.planner}"
    words = {"title": title, "what": solution.metric.words, "unit": solution.unit}
    drawn = render(lambda: search_chart(points, **words), picture)
    write_text(f"{stem}.csv", search_csv(points))
    write_bytes(picture, drawn)
    return [f"{stem}.csv", picture]


def _show(result: PlanResult, target: str) -> None:
    console, answer, problem = stdout_console(), result.answer, result.problem
    summary = answer.summary
    console.print(model_line(problem.graph))
    if line := basis_line(problem.graph):
        console.print(line)
    if line := precision_line(problem):
        console.print(line)
    console.print(step_line(problem, summary.solution.plan))
    console.print(summary_table([summary_row(1, summary, result.planner.name)]))
    console.print(memory_table(summary))
    console.print(breakdown_table(summary.evaluation.timeline.devices, summary.evaluation.memory))
    if line := reserve_line(problem):
        console.print(line)
    console.print(f"bound by: {summary.evaluation.bottleneck}")
    if summary.overfull:
        console.print(overfull_line(summary), style="yellow")
    console.print(bound_line(summary))
    if cuts := summary.cuts_inside_blocks:
        console.print(f"{cuts}; --granularity block plans whole blocks")
    for line in (unused_line(summary), effort_line(answer), rules_line(problem)):
        if line:
            console.print(line)
    _show_others(console, result)
    console.print(f"written to {target}", soft_wrap=True)
    for line in summary.evaluation.assumptions:
        console.print(f"assumed: {line}", style="dim")
    more = f" · partita energy frontier {target}" if result.energy is not None else ""
    console.print(
        f"next: partita explain {target} · partita simulate {target}{more}",
        style="dim",
        soft_wrap=True,
    )


def _show_others(console: Console, result: PlanResult) -> None:
    """Print other plans: by energy, by what moves, or by value; and what moves to this one."""
    answer, replacement = result.answer, result.replacement
    if result.energy is not None:
        _show_energy(console, result.energy)
    elif replacement is not None and replacement.candidates:
        console.print(replacement_table(replacement, answer.summary.solution.unit))
    elif answer.alternatives:
        console.print(alternatives_table(answer))
    if replacement is not None:
        console.print(replacement.line)


def _show_energy(console: Console, answer: "EnergyAnswer") -> None:
    """Print the candidates, cheapest first, and what was gained."""
    shown = list(answer.candidates[:_MOST_PLANS])
    if answer.fastest not in shown:
        shown[-1] = answer.fastest
    origin = answer.best.frontier.origin.value
    console.print(
        f"energy is {origin}; within {100 * answer.slowdown:g} % of the fastest plan "
        f"({answer.limit_s:.5g} s per step):"
    )
    console.print(table(_COLUMNS, [_energy_row(each, answer) for each in shown]))
    best, fastest = answer.best, answer.fastest
    simulated = f"simulated again: {answer.simulated_s:.5g} s"
    joules = answer.simulated_j / best.solution.plan.samples
    console.print(f"{simulated}, {joules:.5g} J/sample with these clocks")
    if best is fastest:
        console.print("the plan of least energy is the fastest one, with other clocks")
    elif fastest.point is not None:
        less = 1 - best.joules_per_sample / fastest.joules_per_sample
        console.print(
            f"the plan of least energy is not the fastest: {100 * less:.1f} % less energy than the "
            f"fastest plan with its own clocks, {100 * (best.step_s / fastest.step_s - 1):.2f} % "
            "slower at the highest"
        )


def _energy_row(each: "EnergyCandidate", answer: "EnergyAnswer") -> list[str]:
    samples = each.solution.plan.samples
    chosen = each.point is not None
    mark = " (fastest)" if each is answer.fastest else ""
    gap = float(each.frontier.gap[each.point]) if each.point is not None else 0.0
    return [
        each.words + mark,
        str(len(each.solution.plan.devices)),
        f"{each.step_s:.5g} s",
        f"{each.time_s:.5g} s" if chosen else "-",
        f"{each.joules_per_sample:.5g}" if chosen else "-",
        f"{each.frontier.all_max_j / samples:.5g}",
        f"{each.frontier.fastest_s:.5g} s",
        f"{each.frontier.best_s:.5g} s",
        f"{100 * gap:.2f} %" if chosen else "-",
    ]
