"""``partita run``: carry out a plan for real."""

import os
from pathlib import Path
from typing import Any

import click

from partita.cli.console import stdout_console, step_line
from partita.cli.extras import torch_needed
from partita.cli.inputs import read_solution, take_problem_options
from partita.cli.options import cluster_options, output_options, problem_options
from partita.cli.profile import find_modules_here
from partita.cli.run_options import (
    StepLine,
    check_together,
    read_job,
    run_options,
    show_outcome,
    use_device_ids,
)
from partita.errors import InvalidInputError
from partita.flows.summary import describe_plan


@click.command(epilog="Example: partita run gpt3-small.plan.json --steps 20 --check --report")
@click.argument("plan")
@click.argument("script", nargs=-1, type=click.UNPROCESSED)
@click.option("--graph", help="The graph, where PLAN is a bare plan.")
@click.option("--model", help="The model. [the one that the graph was made from]")
@cluster_options
@problem_options
@click.option("--seed", type=int, default=0, help="Of dropout and other random numbers.")
@run_options
@output_options
def command(plan: str, script: tuple[str, ...], **rest: Any) -> None:
    """Run PLAN over processes, and compare it with its prediction.

    PLAN is what 'partita plan' wrote for a graph that 'partita profile' made; the graph says which
    model it is. 'partita run PLAN -- script.py ARGUMENTS' runs a script of your own in every rank,
    which trains by the plan through partita.parallelize.
    """
    rest.pop("debug")
    check_together(rest)
    with torch_needed("a run needs"):
        from partita.core.graph import DeviceKind  # noqa: PLC0415 (only here)
        from partita.flows import train  # noqa: PLC0415 (imports torch)
        from partita.flows.run_directory import make_run_directory  # noqa: PLC0415 (likewise)
        from partita.flows.training_model import named_origin  # noqa: PLC0415 (likewise)
        from partita.profile.origin import load_origin  # noqa: PLC0415 (likewise)
        from partita.ranks import visible_gpus  # noqa: PLC0415 (likewise)
        from partita.run.launch import Host  # noqa: PLC0415 (likewise)
        from partita.run.local_ranks import limit_threads  # noqa: PLC0415 (likewise)
    find_modules_here()
    if rest["baseline"]:
        raise InvalidInputError("a baseline has its own plan: partita train MODEL --baseline ...")
    options = take_problem_options(rest)
    rest["optimizer"] = options.optimizer
    solution = read_solution(plan, rest["graph"], options)
    silent = rest["quiet"] or rest["as_json"]
    if not silent:
        console = stdout_console()
        console.print(f"plan      {solution.problem.graph.name} · {describe_plan(solution.plan)}")
        console.print(f"          {step_line(solution.problem, solution.plan)}")
    used = train.used_names(solution.plan)
    gpus = use_device_ids(rest["device_ids"], visible_gpus())
    emulate = rest["emulate"]
    kind = (
        DeviceKind.CPU
        if emulate
        else train.device_kind(solution.problem.cluster, solution.plan, gpus)
    )
    types = sorted({d.type for d in solution.problem.cluster.devices if d.name in used})
    directory = make_run_directory(
        Path(rest["runs"]),
        solution.problem.graph.name,
        f"{len(used)}x{'+'.join(types)}",
        solution.plan.schedule.value,
        "emulated" if emulate else "",
    )
    limit_threads(len(used))
    if script and (emulate or rest["check"]):
        raise InvalidInputError("a script computes by itself: --emulate and --check are not for it")
    graph = solution.problem.graph
    origin = None if emulate else named_origin(graph, graph.name if script else rest["model"])
    execution = train.Execution(
        job=read_job(rest, origin, kind),
        directory=directory,
        check=rest["check"],
        launcher=rest["launcher"],
        host=Host.of(os.environ),
        tell=lambda text: None if silent else click.echo(f"run: {text}", err=True),
        told=StepLine(rest["steps"], len(used), solution.value, quiet=silent or bool(script)),
    )
    if script:
        outcome = train.run_script(solution, execution, script)
        if not silent:
            click.echo((directory / "logs" / "rank0.log").read_text(errors="replace"), nl=False)
        show_outcome(outcome, directory, rest)
        return
    outcome = train.execute(solution, execution, None if origin is None else load_origin(origin))
    show_outcome(outcome, directory, rest)
