"""``partita robustness``: how much worse a plan gets when costs are not what was thought."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from partita.cli.console import (
    format_value,
    model_line,
    percent,
    print_json,
    progress,
    stdout_console,
    step_line,
    table,
)
from partita.cli.estimated import is_path, refuse_source_options
from partita.cli.inputs import (
    changed_solution,
    read_asked,
    read_planner,
    take_effort_options,
    take_problem_options,
)
from partita.cli.options import (
    change_options,
    choice_options,
    cluster_options,
    estimate_options,
    output_options,
    problem_options,
    rule_options,
    shape_options,
)
from partita.core.json_values import thawed
from partita.core.plan import Plan
from partita.core.problem import Problem
from partita.core.solution import Solution
from partita.documents import load
from partita.errors import InvalidInputError
from partita.flows.explain import FIXED
from partita.flows.robustness import Contender, Doubt, Robustness, robustness
from partita.planners.table import get_planner


@click.command(
    epilog="Example: partita robustness gpt-small --cluster 2x4xa100 --perturb 0.2 --seed 1\n\n"
    "partita robustness best.plan.json other.plan.json --samples 200"
)
@click.argument("plan")
@click.argument("others", nargs=-1)
@click.option(
    "--perturb", type=float, default=0.2, show_default=True, help="Costs times 1 - P to 1 + P."
)
@click.option("--samples", type=click.IntRange(1), default=50, show_default=True, help="Draws.")
@click.option(
    "--replans",
    type=click.IntRange(0),
    default=5,
    show_default=True,
    help="Draws for which it is planned again.",
)
@click.option("--seed", type=click.IntRange(0), default=1, show_default=True, help="Of the draws.")
@cluster_options
@change_options
@choice_options
@problem_options
@rule_options
@shape_options
@estimate_options
@output_options
def command(plan: str, others: tuple[str, ...], **rest: Any) -> None:
    """Draw other costs around those of PLAN, and see how much worse it gets.

    PLAN is what 'partita plan' wrote, or a MODEL that is planned first. Every op and every link
    gets a factor of its own from uniform(1 - P, 1 + P), as in Baechi's experiments; memory stays as
    it is. The plan's alternatives and OTHERS, more plans for the same model and cluster, are
    measured on the same draws. Some draws are planned again by the plan's own planner: the regret
    is how much was lost by not knowing the costs. The same seed gives the same draws.
    """
    rest.pop("debug")
    doubt = Doubt(
        perturb=rest.pop("perturb"),
        samples=rest.pop("samples"),
        replans=rest.pop("replans"),
        seed=rest.pop("seed"),
    )
    as_json = rest.pop("as_json")
    with progress("robustness", quiet=rest.pop("quiet") or as_json) as tell:
        effort = take_effort_options(rest)
        solution = _read(plan, rest, effort)
        found = robustness(
            solution,
            doubt,
            rivals=[(Path(path).name, _rival(path, solution.problem)) for path in others],
            planner=_again(solution, effort),
            progress=tell,
        )
    if as_json:
        print_json(found.to_json())
    else:
        _show(found)


def _read(text: str, rest: dict[str, Any], effort: Mapping[str, Any]) -> Solution:
    """Return the plan in a file, or that of a model."""
    chosen = (rest.pop("planner"), rest.pop("partition"), rest.pop("options"), None)
    options = take_problem_options(rest)
    if text == "-" or (is_path(text) and Path(text).is_file()):
        found = load(text)
        if isinstance(found, Solution):
            refuse_source_options(text)
            if any(chosen):
                raise click.UsageError(f"{text} is a plan already: name its model to plan it anew")
            return changed_solution(found, options)
        if text == "-":
            raise InvalidInputError("stdin holds no plan; make one with 'partita plan'")
    name, values = read_planner(*chosen, effort)
    return get_planner(name, **values)(read_asked(text, options).problem)


def _again(solution: Solution, effort: Mapping[str, Any]) -> Callable[[Problem], Solution] | None:
    """Return what plans again as a plan was planned, with other limits where they are given."""
    if solution.planner in FIXED:
        return None
    name, limits = read_planner(solution.planner, None, (), None, effort)
    return get_planner(name, **{**thawed(solution.options), **limits})


def _rival(path: str, problem: Problem) -> Plan:
    """Return another plan for the same problem.

    Raises:
        InvalidInputError: It is none for this problem.
    """
    found = load(path, problem=problem)
    plan = found.plan if isinstance(found, Solution) else found
    if not isinstance(plan, Plan):
        raise InvalidInputError(f"{path!r} holds a {type(found).__name__.lower()}, not a plan")
    try:
        plan.check_fits(problem)
    except InvalidInputError as exc:
        raise InvalidInputError(f"{path}: {exc}") from exc
    return plan


_COLUMNS = (
    ("", "left"),
    ("plan", "left"),
    ("nominal", "right"),
    ("median", "right"),
    ("5 %", "right"),
    ("95 %", "right"),
    ("worst", "right"),
    ("best of all", "right"),
)


def _show(found: Robustness) -> None:
    console, solution = stdout_console(), found.solution
    console.print(model_line(solution.problem.graph))
    console.print(step_line(solution.problem, solution.plan))
    doubt = found.doubt
    console.print(
        f"{doubt.samples} draws of all costs within {percent(doubt.perturb)}, seed {doubt.seed}; "
        f"{solution.metric.value} relative to the nominal one:"
    )
    rows = [_row(contender, solution.unit) for contender in found.contenders]
    console.print(table(_COLUMNS, rows))
    if len(found.contenders) > 1:
        console.print(f"against the best of these plans: {_loss(found.rivals_regret.tolist())}")
    if len(found.regret):
        console.print(
            f"against planning again with the costs known ({len(found.regret)} draws): "
            f"{_loss(found.regret.tolist())}"
        )
    elif doubt.replans:
        console.print("a plan from elsewhere cannot be planned again", style="dim")


def _loss(values: Sequence[float]) -> str:
    mean, worst = sum(values) / len(values), max(values)
    return f"{percent(mean, sign=True)} on average, {percent(worst, sign=True)} at worst"


def _row(contender: Contender, unit: str) -> list[str]:
    figures = contender.to_json()["relative"]
    shown = [percent(figures[key] - 1, sign=True) for key in ("median", "p05", "p95", "max")]
    return [
        contender.name,
        contender.words,
        format_value(contender.nominal, unit),
        *shown,
        percent(contender.wins),
    ]
