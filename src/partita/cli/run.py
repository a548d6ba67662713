"""``partita run``: carry out a plan for real."""

import os
from pathlib import Path
from typing import Any

import click

from partita.cli.console import stdout_console, step_line
from partita.cli.inputs import read_solution, take_problem_options
from partita.cli.options import cluster_options, output_options, problem_options
from partita.cli.profile import find_modules_here
from partita.cli.run_options import (
    StepLine,
    check_together,
    read_job,
    refuse_given,
    run_options,
    show_outcome,
    use_device_ids,
)
from partita.flows.extras import torch_needed
from partita.flows.summary import describe_plan, summarise


@click.command(epilog="Example: partita run gpt3-small.plan.json --steps 20 --check --report")
@click.argument("plan")
@click.argument("script", nargs=-1, type=click.UNPROCESSED)
@click.option("--graph", help="The graph, where PLAN is a bare plan.")
@click.option("--model", help="The model. [the one that the graph was made from]")
@cluster_options
@problem_options
@click.option(
    "--seed", type=int, default=0, help="Seed of dropout and other random numbers, a script's too."
)
@run_options
@output_options
@click.pass_context
def command(context: click.Context, /, plan: str, script: tuple[str, ...], **rest: Any) -> None:
    """Run PLAN over processes, and compare it with its prediction.

    PLAN is what 'partita plan' wrote for a graph that 'partita profile' made; the graph says which
    model it is. 'partita run PLAN -- script.py ARGUMENTS' runs a script of your own in every rank,
    which trains by the plan through partita.parallelize.
    """
    rest.pop("debug")
    check_together(context)
    if script:
        why = "the script says that itself"
        refuse_given(context, why, "steps", "optimizer", "learning_rate", "model")
        refuse_given(context, why, "repeatable")
        refuse_given(context, "a script is run for real, by itself", "check", "emulate", "capture")
    with torch_needed("a run needs"):
        from partita.capture.origin import load_origin  # noqa: PLC0415 (likewise)
        from partita.core.graph import DeviceKind  # noqa: PLC0415 (only here)
        from partita.flows import train  # noqa: PLC0415 (imports torch)
        from partita.flows.training_model import named_origin  # noqa: PLC0415 (likewise)
        from partita.ranks import visible_gpus  # noqa: PLC0415 (likewise)
        from partita.runtime.directory import make_run_directory  # noqa: PLC0415 (likewise)
        from partita.runtime.launch import Host  # noqa: PLC0415 (likewise)
        from partita.runtime.local_ranks import limit_threads  # noqa: PLC0415 (likewise)
    find_modules_here()
    options = take_problem_options(rest)
    rest["optimizer"] = options.optimizer
    solution = read_solution(plan, rest["graph"], options)
    silent = rest["quiet"] or rest["as_json"]
    if not silent:
        console = stdout_console()
        console.print(f"plan      {solution.problem.graph.name} · {describe_plan(solution.plan)}")
        console.print(f"          {step_line(solution.problem, solution.plan)}")
    host, gpus = Host.of(os.environ), use_device_ids(rest["device_ids"], visible_gpus())
    emulate, cluster, graph = rest["emulate"], solution.problem.cluster, solution.problem.graph
    kind = (
        DeviceKind.CPU
        if emulate
        else train.device_kind(cluster, solution.plan, gpus, host.num_hosts)
    )
    used = train.used_names(solution.plan)
    limit_threads(len(used))
    origin = None if emulate else named_origin(graph, graph.name if script else rest["model"])
    job = read_job(rest, origin, kind)
    types = sorted({device.type for device in cluster.devices if device.name in used})
    directory = make_run_directory(
        Path(rest["runs"]),
        graph.name,
        f"{len(used)}x{'+'.join(types)}",
        solution.plan.schedule.value,
        "emulated" if emulate else "",
    )
    quiet = silent or bool(script)
    execution = train.Execution(
        job=job,
        directory=directory,
        check=rest["check"],
        launcher=rest["launcher"],
        host=host,
        tell=lambda text: None if silent else click.echo(f"run: {text}", err=True),
        told=StepLine(rest["steps"], summarise(solution), emulated=emulate, quiet=quiet),
    )
    if script:
        outcome = train.run_script(solution, execution, script)
        if outcome is not None and not silent:
            click.echo((directory / "logs" / "rank0.log").read_text(errors="replace"), nl=False)
    else:
        source = None if origin is None else load_origin(origin)
        outcome = train.execute(solution, execution, source)
    if outcome is not None:
        show_outcome(outcome, directory, rest)
