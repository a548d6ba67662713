"""``partita robustness``: how much worse a plan gets when costs are not what was thought."""

from collections.abc import Sequence

import click

from partita.cli.console import (
    format_value,
    model_line,
    percent,
    print_json,
    print_remarks,
    progress,
    stdout_console,
    step_line,
    table,
)
from partita.cli.from_request import takes
from partita.cli.help import Documented
from partita.cli.options import output_options
from partita.flows.problem import objective_remarks
from partita.flows.robustness import (
    Contender,
    Robustness,
    RobustnessRequest,
    robustness_request,
)


@click.command(
    cls=Documented,
    epilog="Example: partita robustness gpt-small --cluster 2x4xa100 --perturb 0.2 --seed 1\n\n"
    "partita robustness best.plan.json other.plan.json --samples 200",
)
@takes(RobustnessRequest)
@output_options
def command(request: RobustnessRequest, *, as_json: bool, quiet: bool, debug: bool) -> None:
    """Draw other costs around those of PLAN, and see how much worse it gets.

    PLAN is what 'partita plan' wrote, or a MODEL that is planned first. Every op and every link
    gets a factor of its own from uniform(1 - P, 1 + P), as in Baechi's experiments; memory stays as
    it is. The plan's alternatives and OTHERS, more plans for the same model and cluster, are
    measured on the same draws. Some draws are planned again by the plan's own planner: the regret
    is how much was lost by not knowing the costs. The same seed gives the same draws.
    """
    del debug  # read by main
    with progress("robustness", quiet=quiet or as_json) as on_progress:
        found = robustness_request(request, on_progress)
    print_remarks(objective_remarks(request))
    if as_json:
        print_json(found.to_json())
    else:
        _show(found)


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
        f"{solution.metric.words} relative to the nominal one:"
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
