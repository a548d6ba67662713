"""``partita train``: profile, plan, check and run a model in one command."""

from typing import TYPE_CHECKING

import click

from partita.cli.console import (
    basis_line,
    paced,
    print_remarks,
    progress,
    reserve_line,
    stdout_console,
    summary_row,
    summary_table,
)
from partita.cli.from_request import takes
from partita.cli.help import Documented
from partita.cli.options import output_options
from partita.cli.run_options import StepLine, config_option, show_detached, show_outcome
from partita.flows.extras import torch_needed
from partita.flows.profile import estimate_lines, measured_lines
from partita.flows.runs.requests import TrainRequest, check_training

if TYPE_CHECKING:
    from partita.flows.runs.steps import PreparedRun


@click.command(
    cls=Documented,
    epilog="Example: partita train gpt3-small --scale 0.1 --devices 2 --steps 20 --check",
)
@takes(TrainRequest)
@config_option(TrainRequest)
@output_options
def command(request: TrainRequest, *, as_json: bool, quiet: bool, debug: bool) -> None:
    """Profile MODEL, plan it over this machine's devices, and train it by the plan.

    MODEL is what 'partita profile' takes: a built-in name, a Hugging Face configuration, or
    package.module:callable. Profiles are kept, so that the next run starts at once. Several hosts
    are told of one another by NNODES, NODE_RANK, MASTER_ADDR and MASTER_PORT.
    """
    del debug  # read by main
    request = check_training(request)
    with torch_needed("training needs"):
        from partita.flows.runs.steps import carry_out, prepare_training  # noqa: PLC0415 (torch)
    silent = quiet or as_json
    with progress("train", quiet=silent) as on_progress:
        prepared = prepare_training(request, paced(on_progress))
    print_remarks(prepared.remarks)
    if not silent:
        _show_plan(prepared)
    if request.detach:
        show_detached(prepared, as_json=as_json)
        return
    outcome = carry_out(
        prepared,
        lambda text: None if silent else click.echo(f"train: {text}", err=True),
        on_row=StepLine(prepared, quiet=silent),
    )
    if outcome is not None:
        show_outcome(outcome, request, as_json=as_json)


def _show_plan(prepared: "PreparedRun") -> None:
    console, summary = stdout_console(), prepared.summary
    graph = prepared.solution.problem.graph
    lines: list[str] = []  # another host has measured
    if prepared.profiled is not None:
        lines = measured_lines(prepared.profiled.measured)
    elif "estimate" in graph.annotations:
        lines = [basis_line(graph), *estimate_lines(graph)]
    for line in lines:
        console.print(f"profile   {line}")
    row = summary_row(1, summary, summary.solution.planner or "-")
    console.print(summary_table([row]))
    if line := reserve_line(summary.solution.problem):
        console.print(line)
