"""``partita train``: profile, plan, check and run a model in one command."""

import dataclasses
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from partita.catalogue.catalogue import load_catalogue
from partita.catalogue.shorthand import local_cluster, read_shorthand
from partita.cli.console import (
    basis_line,
    progress,
    reserve_line,
    stdout_console,
    summary_row,
    summary_table,
)
from partita.cli.inputs import (
    ProblemOptions,
    evaluated,
    read_objective,
    read_planner,
    with_usual_reserve,
)
from partita.cli.options import estimate_options, output_options, source_options, step_options
from partita.cli.profile import (
    estimate_lines,
    find_modules_here,
    measured_lines,
    model_estimator,
    profile_cache,
    read_source_options,
)
from partita.cli.run_options import (
    StepLine,
    check_together,
    gpus_wanted,
    read_job,
    refuse_given,
    run_options,
    show_outcome,
    use_device_ids,
)
from partita.core.cluster import Cluster
from partita.core.graph import DeviceKind, Graph
from partita.core.problem import Objective, Problem
from partita.core.solution import Solution
from partita.errors import InvalidInputError, UnsupportedError
from partita.flows.extras import torch_needed
from partita.flows.summary import Summary, summarise
from partita.planners.table import get_planner
from partita.processes import machine_cores
from partita.runtime.baseline_names import BASELINES, TORCH_WAYS

if TYPE_CHECKING:
    from partita.flows.training_model import ProfiledModel

_USUAL_DEVICES = 2
_STAGED = ("uniform", "uniform_floor", "uniform_transformer", "parameters", "autopipe")


@click.command(
    epilog="Example: partita train gpt3-small --scale 0.1 --devices 2 --steps 20 --check"
)
@click.argument("model", required=False)
@click.option("--devices", type=click.IntRange(1, 16), help="N of this machine. [its GPUs, or 2]")
@click.option("--cluster", "-c", help="With --emulate: machines that are not here, 2x4xa100.")
@click.option(
    "--planner",
    "-p",
    help="Planner, such as uniform or custom:0,8,14. [auto; uniform with --pp or --dp]",
)
@click.option("--partition", help="The same as --planner.")
@click.option("--option", "-O", "options", multiple=True, help="Option of the planner, k=v.")
@click.option("--pp", type=click.IntRange(1), help="Stages of the pipeline.")
@click.option("--dp", type=click.IntRange(1), help="Replicas of every stage.")
@click.option("--tp", type=click.IntRange(1), default=1, help="Devices of an op: 1 for now.")
@step_options
@source_options
@estimate_options
@click.option("--loss", help="cross_entropy, mse, or package.module:callable. [the model's own]")
@click.option("--perturb", type=float, default=0.0, help="Plan with times x uniform(1 +- P).")
@click.option("--rounds", type=click.IntRange(1), default=8, show_default=True, help="To profile.")
@click.option("--no-cache", is_flag=True, help="Profile anew.")
@click.option(
    "--baseline",
    type=click.Choice(BASELINES),
    help="Run this instead, on the same data by the same rules.",
)
@click.option("--device", type=int, help="Where --baseline single runs.")
@run_options
@output_options
@click.pass_context
def command(context: click.Context, /, model: str | None, **rest: Any) -> None:
    """Profile MODEL, plan it over this machine's devices, and train it by the plan.

    MODEL is what 'partita profile' takes: a built-in name, a Hugging Face configuration, or
    package.module:callable. Profiles are kept, so that the next run starts at once. Several hosts
    are told of one another by NNODES, NODE_RANK, MASTER_ADDR and MASTER_PORT.
    """
    rest.pop("debug")
    if model is None:
        raise click.UsageError("name a MODEL, or one in the --config file")
    _check_options(context, rest)
    with torch_needed("training needs"):
        from partita.flows import train  # noqa: PLC0415 (imports torch)
        from partita.ranks import visible_gpus  # noqa: PLC0415 (likewise)
        from partita.runtime.directory import make_run_directory  # noqa: PLC0415 (likewise)
        from partita.runtime.launch import Host  # noqa: PLC0415 (likewise)
    find_modules_here()
    silent = rest["quiet"] or rest["as_json"]
    host, gpus = Host.of(os.environ), use_device_ids(rest["device_ids"], visible_gpus())
    cluster = _cluster(rest, gpus)
    stages, replicas = train.degrees(len(cluster.devices), rest["pp"], rest["dp"], rest["tp"])
    with progress("train", quiet=silent) as tell:
        tell(f"profiling {model}")
        profiled, graph = _profile(model, rest, cluster)
        problem = Problem(
            graph=graph,
            cluster=cluster,
            objective=_objective(graph, cluster, _problem_options(rest)),
        )
        tell("planning")
        noisy = dataclasses.replace(
            problem, graph=train.perturbed(graph, rest["perturb"], rest["seed"])
        )
        found = _plan(noisy, rest, stages, replicas)
        summary = summarise(evaluated(problem, found.plan, found))
    solution = summary.solution
    if not silent:
        _show_plan(profiled, graph, summary)
    emulated = rest["emulate"]
    kind = (
        DeviceKind.CPU
        if emulated
        else train.device_kind(cluster, solution.plan, gpus, host.num_hosts)
    )
    job = read_job(rest, None if profiled is None else profiled.origin, kind)
    used, kinds = train.used_names(solution.plan), sorted({d.type for d in cluster.devices})
    directory = make_run_directory(
        Path(rest["runs"]),
        graph.name,
        f"{len(used)}x{'+'.join(kinds)}",
        rest["baseline"] or solution.plan.schedule.value,
        "emulated" if emulated else "",
    )
    execution = train.Execution(
        job=job,
        directory=directory,
        check=rest["check"],
        launcher=rest["launcher"],
        host=host,
        baseline=rest["baseline"] or "",
        tell=lambda text: None if silent else click.echo(f"train: {text}", err=True),
        told=StepLine(rest["steps"], summary, emulated=emulated, quiet=silent),
    )
    outcome = train.execute(solution, execution, None if profiled is None else profiled.source)
    if outcome is not None:
        show_outcome(outcome, directory, rest)


def _check_options(context: click.Context, rest: dict[str, Any]) -> None:
    """Refuse options that would be ignored."""
    check_together(context, rest["baseline"])
    if rest["device"] is not None and rest["baseline"] != "single":
        raise InvalidInputError("--device says where --baseline single runs; name both")
    if rest["baseline"]:
        why = "a baseline brings its own plan"
        refuse_given(context, why, "planner", "partition", "options", "pp", "dp", "emulate")
    if rest["cluster"] is None:
        why = "is for estimates of machines that are not here: add --cluster and --emulate"
        refuse_given(context, why, "recompute", "kernels", "arithmetic")
        return
    if not rest["emulate"]:
        raise InvalidInputError("--cluster names machines that are not here: add --emulate")
    why = "machines that are not here are estimated, not measured"
    refuse_given(context, why, "devices", "device_ids", "rounds", "no_cache", "loss")


def _cluster(rest: dict[str, Any], gpus: int) -> Cluster:
    """Return the machines to plan for.

    Raises:
        UnsupportedError: More GPUs are wanted than there are.
    """
    if rest["cluster"] is not None:
        return read_shorthand(rest["cluster"], load_catalogue())
    wanted = max(gpus_wanted(), (rest["devices"] or 0) if gpus else 0)
    if wanted > gpus:
        raise UnsupportedError(
            f"{wanted} GPUs are wanted, this machine has {gpus}; --emulate --cluster rehearses a "
            "plan for machines that are not here"
        )
    if gpus:
        from partita.profiler.measure.measure import this_gpu_type  # noqa: PLC0415 (imports torch)

        return read_shorthand(f"1x{wanted or gpus}x{this_gpu_type()}", load_catalogue())
    return local_cluster(rest["devices"] or _USUAL_DEVICES)


def _profile(
    model: str, rest: dict[str, Any], cluster: Cluster
) -> "tuple[ProfiledModel | None, Graph]":
    """Return the model with its measured costs, or its graph with estimated ones."""
    from partita.flows.training_model import ModelRequest, profiled_model  # noqa: PLC0415 (torch)
    from partita.runtime.local_ranks import limit_threads  # noqa: PLC0415 (likewise)

    options = {**rest, "batch_size": rest["microbatch_size"]}
    if rest["cluster"] is not None:
        types = sorted({device.type for device in cluster.devices})
        return None, model_estimator(model, options)(types)
    on_gpu = cluster.devices[0].kind is DeviceKind.GPU
    ranks = 1 if rest["baseline"] == "single" else len(cluster.devices)
    if rest["baseline"] in TORCH_WAYS:
        ranks = machine_cores()  # a thread each: these ranks are forked
    threads = limit_threads(ranks)
    profiled = profiled_model(
        ModelRequest(
            text=model,
            options=read_source_options(
                {**options, "profile_device": "cuda:0" if on_gpu else "cpu"}
            ),
            granularity=rest["granularity"],
            inference=rest["mode"] == "inference",
            loss=rest["loss"] or "",
            rounds=rest["rounds"],
            threads=threads,
        ),
        cache=None if rest["no_cache"] else profile_cache(),
    )
    return profiled, profiled.graph


def _objective(graph: Graph, cluster: Cluster, options: ProblemOptions) -> Objective:
    """Return what counts as good, with the usual reserve of GPUs."""
    return with_usual_reserve(read_objective(graph, Objective(), options), cluster, options)


def _problem_options(rest: dict[str, Any]) -> ProblemOptions:
    """Return what the options say of the step."""
    named = {field.name for field in dataclasses.fields(ProblemOptions)}
    return ProblemOptions(**{name: rest[name] for name in named & rest.keys()})


def _plan(problem: Problem, rest: dict[str, Any], stages: int, replicas: int) -> Solution:
    if rest["baseline"]:
        return _baseline(problem, rest)
    degrees = rest["pp"] is not None or rest["dp"] is not None
    planner = rest["planner"]
    if degrees and planner is None and rest["partition"] is None:
        planner = "uniform"
    name, options = read_planner(planner, rest["partition"], rest["options"], None)
    if degrees:
        if name in _STAGED:
            options.setdefault("stages", stages)
        elif name != "custom":
            raise InvalidInputError(
                f"--pp and --dp say nothing to planner {name!r}; leave them out"
            )
        options.setdefault("replicas", replicas)
    if name == "random":
        options.setdefault("seed", rest["seed"])
    solution = get_planner(name, **options)(problem)
    if rest["pp"] is not None and len(solution.plan.stages) != stages:
        raise InvalidInputError(
            f"--pp {stages} does not match the {len(solution.plan.stages)} stages of {name}"
        )
    return solution


def _baseline(problem: Problem, rest: dict[str, Any]) -> Solution:
    from partita.flows.baselines import baseline_plan  # noqa: PLC0415 (imports torch)

    names = problem.cluster.device_names
    if rest["device"] is not None and not 0 <= rest["device"] < len(names):
        raise InvalidInputError(f"--device {rest['device']}; expected 0 to {len(names) - 1}")
    device = "" if rest["device"] is None else names[rest["device"]]
    return baseline_plan(rest["baseline"], problem, device=device, seed=rest["seed"])


def _show_plan(profiled: "ProfiledModel | None", graph: Graph, summary: Summary) -> None:
    console = stdout_console()
    if profiled is None:
        lines = [basis_line(graph), *estimate_lines(graph)]
    else:
        lines = measured_lines(profiled.measured)
    for line in lines:
        console.print(f"profile   {line}")
    row = summary_row(1, summary, summary.solution.planner or "-")
    console.print(summary_table([row]))
    if line := reserve_line(summary.solution.problem):
        console.print(line)
