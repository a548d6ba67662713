"""``partita plan``: from a model and a cluster to a plan."""

import shlex
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from partita.catalogue.catalogue import Catalogue
from partita.cli.console import (
    alternatives_table,
    basis_line,
    bound_line,
    effort_line,
    memory_table,
    model_line,
    overfull_line,
    print_json,
    progress,
    reserve_line,
    rules_line,
    stdout_console,
    step_line,
    summary_row,
    summary_table,
    unused_line,
)
from partita.cli.inputs import (
    Asked,
    read_asked,
    read_catalogue,
    read_planner,
    take_effort_options,
    take_problem_options,
    takes,
)
from partita.cli.options import (
    change_options,
    cluster_options,
    estimate_options,
    output_options,
    planner_options,
    problem_options,
    rule_options,
    shape_options,
    trace_option,
)
from partita.cli.slowdown import read_slowdown
from partita.cli.traced import traced_search
from partita.core.codec import encode
from partita.core.problem import Problem
from partita.core.solution import Solution
from partita.documents import save, unused_path
from partita.errors import InfeasibleError
from partita.flows.answer import Answer, answer_of
from partita.flows.relax import PRECISION, Relaxation, Ways, relaxations
from partita.planners.table import get_planner

if TYPE_CHECKING:
    from partita.flows.energy_plan import EnergyAnswer

MOST_CHANGES = 3
"""Changes that are searched where nothing fits."""
CHANGES_LIMIT_S = 10.0
"""Seconds after which no further change is tried."""
TRIAL_LIMIT_S = 0.5
"""Seconds that a planner with a time limit may search for each change that is tried."""
SEARCHED_PRECISION = 1e-2
"""How exactly the least memory is found for such a planner, whose plans depend on its time."""


@click.command(
    epilog="Example: partita plan gpt-small --cluster 2x4xa100+1x2xv100 --microbatches 32\n\n"
    "partita plan gpt3-xl --cluster 2x4xa100+4xv100 --pin 'blocks.0=host0/*'\n\n"
    "partita plan resnet50 --cluster 6xa40+2xa100 --microbatches 16 --objective energy"
)
@click.argument("model", required=False)
@cluster_options
@change_options
@planner_options
@problem_options
@rule_options
@shape_options
@estimate_options
@click.option(
    "--slowdown",
    type=click.FloatRange(0),
    help="With --objective energy: slower than the fastest plan by at most that. [0.02]",
)
@click.option("-o", "--output", help="Where to write the plan; - is stdout. [NAME.plan.json]")
@trace_option
@output_options
def command(model: str | None, output: str | None, as_json: bool, quiet: bool, **rest: Any) -> None:
    """Plan MODEL over a cluster and write the plan.

    MODEL is a built-in example (gpt-small, resnet50, chain201, ...), a Partita document, or any
    graph file that 'partita convert' reads; - is stdin. A model of 'partita models', a Hugging Face
    configuration (hf:tiny-llama) or package.module:callable is estimated for the devices of the
    cluster. MODEL may be left out where the cluster file names its profiles. With --json no file is
    written unless -o names one.

    With --objective energy the plan and the clocks of least joules a sample are searched, by a
    model of the devices, among plans that are at most --slowdown slower than the fastest.

    Where no plan fits it exits with 3, and says what is the least that makes it fit.
    """
    rest.pop("debug")
    chosen = (rest.pop("planner"), rest.pop("partition"), rest.pop("options"), rest.pop("seed"))
    name, options = read_planner(*chosen, take_effort_options(rest))
    planner = get_planner(name, **options)
    traced = traced_search(name, rest.pop("trace_file"))
    asked_options = take_problem_options(rest)
    asked = read_asked(model, asked_options)
    slowdown = read_slowdown(asked.problem, rest.pop("slowdown"))
    powered: EnergyAnswer | None = None
    with progress("planning", quiet=quiet or as_json) as tell:
        tell(f"{asked.problem.graph.name} with {name}")
        try:
            if slowdown is not None:
                from partita.flows.energy_plan import plan_for_energy  # noqa: PLC0415 (numba)

                powered = plan_for_energy(
                    asked.problem,
                    partial(traced.run, planner),
                    quick=_hasty(name, options),
                    slowdown=slowdown,
                    progress=tell,
                )
                answer = answer_of(powered.solution)
            else:
                answer = answer_of(traced.run(planner, asked.problem))
        except InfeasibleError as exc:
            tell("nothing fits; looking for the least change with which it would")
            changes = _changes(asked, (name, options), read_catalogue(asked_options))
            if as_json:
                print_json(_refusal(name, exc, changes))
            raise InfeasibleError(f"{exc}; {_advice(changes)}") from exc
    solution = answer.summary.solution
    stem = asked.problem.graph.name
    target = output or (None if as_json else str(unused_path(Path(f"{stem}.plan.json"))))
    if target is not None and target != "-":
        save(solution, target)
    drawn = traced.write(solution if powered is None else powered.best.solution)
    if as_json:
        written = {"written": target, "traced": drawn}
        energy = {} if powered is None else {"energy": powered.figures()}
        print_json({**answer.figures(), **energy, **written, "solution": encode(solution)})
    elif target == "-":
        save(solution, "-")
    else:
        _show(asked, answer, name, str(target), powered)
        if drawn:
            stdout_console().print(f"search traced in {' and '.join(drawn)}")


def _changes(
    asked: Asked, chosen: tuple[str, dict[str, Any]], catalogue: Catalogue
) -> list[Relaxation]:
    """Return a few changes with which the planner finds a plan, the first of their kinds."""
    deadline_s = time.monotonic() + CHANGES_LIMIT_S
    ways = Ways(
        graph_at=asked.graph_at,
        catalogue=catalogue,
        precision=SEARCHED_PRECISION if takes(chosen[0], "time_limit") else PRECISION,
        stop=lambda: time.monotonic() > deadline_s,
    )
    return list(islice(relaxations(asked.problem, _hasty(*chosen), ways), MOST_CHANGES))


def _hasty(name: str, options: dict[str, Any]) -> Callable[[Problem], Solution]:
    """Return the planner for trials: with a short limit where it has one."""
    if not takes(name, "time_limit") or "iterations" in options:
        return get_planner(name, **options)
    limit = min(TRIAL_LIMIT_S, options.get("time_limit", TRIAL_LIMIT_S))
    return get_planner(name, **{**options, "time_limit": limit})


def _advice(changes: Sequence[Relaxation]) -> str:
    """Return what makes it fit, in one line."""
    if not changes:
        return "nothing that was tried makes it fit"
    return f"enough is {', or '.join(map(_words, changes))}"


def _words(change: Relaxation) -> str:
    """Return a change as it is typed, and what it means."""
    left_out = " and ".join(
        f"--{'forbid' if rule.forbids else 'pin'} {shlex.quote(f'{rule.ops}={rule.devices}')}"
        for rule in change.without
    )
    parts = [f"to leave out {left_out}"] if left_out else []
    if change.arguments:
        parts.insert(0, f"{shlex.join(change.arguments)} ({change.words})")
    return " and ".join(parts)


def _refusal(name: str, why: InfeasibleError, changes: Sequence[Relaxation]) -> dict[str, Any]:
    return {
        "planner": name,
        "refusal": str(why),
        "changes": [change.figures() for change in changes],
    }


def _show(
    asked: Asked, answer: Answer, name: str, target: str, powered: "EnergyAnswer | None"
) -> None:
    console, summary = stdout_console(), answer.summary
    problem = asked.problem
    console.print(model_line(problem.graph))
    if line := basis_line(problem.graph):
        console.print(line)
    console.print(step_line(problem, summary.solution.plan))
    console.print(summary_table([summary_row(1, summary, name)]))
    console.print(memory_table(summary))
    if line := reserve_line(problem):
        console.print(line)
    console.print(f"bound by: {summary.evaluation.bottleneck}")
    if summary.overfull:
        console.print(overfull_line(summary), style="yellow")
    console.print(bound_line(summary))
    for line in (unused_line(summary), effort_line(answer), rules_line(problem)):
        if line:
            console.print(line)
    if powered is not None:
        from partita.cli.plan_energy import show_energy  # noqa: PLC0415 (numba)

        show_energy(console, powered)
    elif answer.alternatives:
        console.print(alternatives_table(answer))
    console.print(f"written to {target}")
    for line in summary.evaluation.assumptions:
        console.print(f"assumed: {line}", style="dim")
    more = f" · partita energy frontier {target}" if powered is not None else ""
    console.print(f"next: partita explain {target} · partita simulate {target}{more}", style="dim")
