"""``partita estimate``: does a model fit on a cluster, and what would make it fit."""

import shlex
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from typing import Any

import click
from click.core import ParameterSource

from partita.catalogue.catalogue import Catalogue
from partita.catalogue.examples import EXAMPLES
from partita.catalogue.parse import parse_cluster
from partita.catalogue.shorthand import HostGroup, parse_shorthand, write_shorthand
from partita.catalogue.what_if import what_if
from partita.cli.console import (
    basis_line,
    format_rate,
    model_line,
    print_json,
    progress,
    reserve_line,
    stdout_console,
    step_line,
    table,
)
from partita.cli.estimated import SOURCE_OPTIONS, estimated_graphs, refuse_source_options
from partita.cli.inputs import (
    DEFAULT_CLUSTER,
    ProblemOptions,
    brings_limits,
    changed_cluster,
    changed_objective,
    read_catalogue,
    read_cluster,
    read_graph,
    read_rules,
    take_problem_options,
    with_usual_reserve,
)
from partita.cli.options import (
    change_options,
    cluster_options,
    estimate_options,
    output_options,
    rule_options,
    source_options,
    step_options,
)
from partita.cli.profile import estimate_lines
from partita.core.cluster import Cluster
from partita.core.graph import Graph
from partita.core.plan import Shard
from partita.core.problem import Objective, Problem
from partita.documents import read_text, save
from partita.errors import InfeasibleError, InvalidInputError
from partita.flows.fit import Change, FitReport, Question, Setting, fit, solution_of
from partita.flows.fit_plans import Trial
from partita.planners.pipeline import main_devices_of
from partita.units import format_bytes, format_seconds

MAX_DEVICES = 1024
"""Devices up to which more of them are suggested."""
USUAL_HOST = 8
"""Devices of a host that is filled up before another is added."""
_NOT_REPEATED = ("model", "output", "as_json", "quiet", "debug")
_CHANGED = ("microbatch_size", "microbatches", "batch_size", "recompute", "shard")


@click.command(
    epilog="Example: partita estimate gpt3-xl --cluster 8xa100\n\n"
    "partita estimate gpt3-175b --cluster 8xa100 --dtype bfloat16 --recompute"
)
@click.argument("model")
@cluster_options
@change_options
@step_options
@rule_options
@click.option(
    "--shard",
    type=click.Choice([level.value for level in Shard]),
    default=Shard.NONE.value,
    show_default=True,
    help="What the replicas of every plan divide.",
)
@source_options
@estimate_options
@click.option("-o", "--output", help="Write the best plan to this file.")
@output_options
@click.pass_context
def command(context: click.Context, /, model: str, **rest: Any) -> None:
    """Say whether MODEL fits on a cluster, what it needs, and what would make it fit.

    MODEL is a built-in name (see 'partita models'), package.module:callable or a Hugging Face
    configuration, all priced by shapes alone; or a graph: a document, a file that 'partita convert'
    reads, or a built-in example. Nothing is launched. Plans that are tried are pipelines of equal
    numbers of layers with replicas, and data parallelism at each level of sharding. Exits with 3
    where none fits; the smallest changes that make it fit are printed as commands.
    """
    options = take_problem_options({**rest, "metric": None})
    with progress("estimating", quiet=rest["quiet"] or rest["as_json"]) as tell:
        tell(model)
        catalogue = read_catalogue(options)
        base = None if _is_of_zoo(model) else read_graph(model, options)
        cluster = changed_cluster(base, read_cluster(options)[0], options)
        larger = _larger(cluster, options, catalogue)
        graph_at = _graph_at(model, base, rest, (cluster, catalogue))
        question = _question(base, graph_at, options, rest)
        if not brings_limits(model, base, options):
            reserved = with_usual_reserve(question.objective, cluster, options)
            question = replace(question, objective=reserved)
        question = replace(
            question, cluster_at=lambda n: found[1] if (found := larger(n)) else None
        )
        report = fit(question, progress=tell)
    if rest["output"] is not None and report.fits:
        save(solution_of(report.best), rest["output"])
    commands = [_command(context, model, question, change, larger) for change in report.changes]
    searched = _plan_command(context, model, report)
    if rest["as_json"]:
        print_json({**_figures(report, commands), "plan_command": searched or None})
    else:
        show(report, commands, searched)
        if rest["output"] is not None and report.fits:
            click.echo(f"best plan written to {rest['output']}")
    if not report.fits:
        count = len(report.changes)
        told = (
            f"{count} change{'s' * (count != 1)} that would do" if count else "nothing found helps"
        )
        problem = report.problem
        raise InfeasibleError(
            f"{problem.graph.name} does not fit on {problem.cluster.name}; {told}"
        )


def _is_of_zoo(model: str) -> bool:
    """Return whether an example is a model, too, which is then estimated; not without torch."""
    if model not in EXAMPLES:
        return False
    try:
        from partita.models.zoo import MODELS  # noqa: PLC0415 (imports torch)
    except ModuleNotFoundError:
        return False
    return model in MODELS


def _graph_at(
    model: str,
    base: Graph | Problem | None,
    source: Mapping[str, Any],
    where: tuple[Cluster, Catalogue],
) -> Callable[[int], Graph]:
    """Return what gives the graph for a microbatch size; 0 = the usual one."""
    if base is None:
        return estimated_graphs(model, source, *where)
    refuse_source_options(model, (*SOURCE_OPTIONS, "seed"))
    graph = base if isinstance(base, Graph) else base.graph
    return lambda _: graph


def _question(
    base: Graph | Problem | None,
    graph_at: Callable[[int], Graph],
    options: ProblemOptions,
    rest: dict[str, Any],
) -> Question:
    """Return what is asked, but for the cluster."""
    start = base.objective if isinstance(base, Problem) else Objective()
    objective = changed_objective(start, options)
    size, count, batch = options.microbatch_size, options.microbatches, options.batch_size
    if batch is not None and count is not None:
        size = size or max(1, batch // count)
        if size * count != batch:
            raise click.UsageError(
                f"--batch-size {batch} cannot be {count} microbatches of {size} samples"
            )
    if size is None:
        usual = graph_at(0).batch_size
        divides = (n for n in range(min(usual, batch or usual), 0, -1) if (batch or n) % n == 0)
        size = next(divides)
    if batch is None and count is not None:
        batch = count * size
    if batch is not None and batch % size:
        raise click.UsageError(f"--batch-size {batch} cannot be microbatches of {size} samples")
    setting = Setting(microbatch_size=size, recompute=rest["recompute"], shard=Shard(rest["shard"]))
    own = base.rules if isinstance(base, Problem) else ()
    return Question(
        graph_at=graph_at,
        cluster_at=lambda _: None,
        objective=objective,
        start=setting,
        batch_size=batch,
        rules=(*own, *read_rules(options)),
    )


def _larger(
    cluster: Cluster, options: ProblemOptions, catalogue: Catalogue
) -> Callable[[int], tuple[list[str], Cluster] | None]:
    """Return a function of a number of enlargements: the arguments that say it, and the cluster.

    A shorthand of one group fills its host up to eight devices, then gets more hosts; any other
    cluster gets hosts like those of its most frequent type.
    """
    main = [cluster.devices[index] for index in main_devices_of(cluster)]
    types = [device.type for device in main]
    usual = max(dict.fromkeys(types), key=types.count)
    hosts = [device.host for device in main if device.type == usual]
    each = max(hosts.count(host) for host in set(hosts))
    groups = _groups(cluster, options)

    @cache
    def grown(times: int) -> tuple[list[str], Cluster] | None:
        if times == 0:
            return [], cluster
        if options.devices is not None or not usual:
            return None
        if len(groups) == 1:
            room = catalogue.device_type(usual).host_max_devices or USUAL_HOST
            text = write_shorthand([_more(groups[0], times, min(room, USUAL_HOST))])
            found = parse_cluster(
                text, read_text, catalogue, bandwidth=options.bandwidth, latency=options.latency
            )
            arguments = ["--cluster", text]
        else:
            change = f"+{times}x{each}x{usual}"
            try:
                found = what_if(cluster, change, catalogue)
            except InvalidInputError:
                return None
            arguments = ["--what-if", change]
        return (arguments, found) if len(found) <= MAX_DEVICES else None

    return grown


def _groups(cluster: Cluster, options: ProblemOptions) -> tuple[HostGroup, ...]:
    """Return the groups of the shorthand that was typed; none where a file says the cluster."""
    try:
        groups = parse_shorthand(options.cluster or DEFAULT_CLUSTER)
    except InvalidInputError:
        return ()
    return groups if write_shorthand(groups) == cluster.name else ()


def _more(group: HostGroup, times: int, room: int) -> HostGroup:
    """Return a group with one device more each time until the host is full, then hosts."""
    missing = max(0, room - group.num_devices) if group.num_hosts == 1 else 0
    if times <= missing:
        return replace(group, num_devices=group.num_devices + times)
    return replace(
        group,
        num_hosts=group.num_hosts + times - missing,
        num_devices=group.num_devices + missing,
    )


def _command(
    context: click.Context,
    model: str,
    question: Question,
    change: Change,
    larger: Callable[[int], tuple[list[str], Cluster] | None],
) -> str:
    """Return the command that tries a change: the options as typed, with those that differ."""
    setting, start = change.setting, question.start
    grown = larger(setting.growth)
    added = [] if grown is None else grown[0]
    dropped = {*_NOT_REPEATED, *_CHANGED}
    dropped |= {"cluster"} if "--cluster" in added else set()
    words = ["partita", "estimate", model, *_typed(context, dropped), *added]
    same_size = setting.microbatch_size == start.microbatch_size
    if not same_size or _is_typed(context, "microbatch_size"):
        words += ["--microbatch-size", str(setting.microbatch_size)]
    if not same_size or question.batch_size is not None:
        words += ["--batch-size", str(change.samples)]
    if setting.recompute:
        words.append("--recompute")
    if setting.shard is not Shard.NONE:
        words += ["--shard", setting.shard.value]
    return shlex.join(words)


def _plan_command(context: click.Context, model: str, report: FitReport) -> str:
    """Return the command that searches for a faster plan of the same step; empty where none does.

    The default planner starts from plans such as these, but for sharded ones; and a name that an
    example has, too, means the example there.
    """
    plain = any(trial.fits and trial.shape.shard is Shard.NONE for trial in report.trials)
    if not plain or len(report.problem.cluster) == 1 or _is_of_zoo(model):
        return ""
    words = ["partita", "plan", model, *_typed(context, {*_NOT_REPEATED, *_CHANGED, "seed"})]
    problem = report.problem
    words += ["--microbatches", str(problem.microbatches)]
    words += ["--microbatch-size", str(problem.microbatch_size)]
    return shlex.join(words + ["--recompute"] * bool(context.params["recompute"]))


def _typed(context: click.Context, dropped: set[str]) -> list[str]:
    """Return the options as they were typed, without those that are dropped."""
    words: list[str] = []
    for parameter in context.command.params:
        name = str(parameter.name)
        if name in dropped or not _is_typed(context, name):
            continue
        value = context.params[name]
        for part in value if isinstance(value, tuple) else (value,):
            words += [parameter.opts[0]] + ([] if part is True else [str(part)])
    return words


def _is_typed(context: click.Context, name: str) -> bool:
    return context.get_parameter_source(name) is ParameterSource.COMMANDLINE


def _need(trial: Trial) -> str:
    """Return what the fullest device of a plan needs of what it has."""
    worst = trial.worst
    peak, limit = float(trial.peak_bytes[worst]), float(trial.limit_bytes[worst])
    return (
        f"does not fit: of the plans tried the nearest ({trial.shape.title}) needs "
        f"{format_bytes(peak)} of {format_bytes(limit)} on {trial.plan.devices[worst]}"
    )


def verdict(report: FitReport) -> str:
    """Return the answer in one line."""
    best = report.best
    if not report.fits:
        return _need(best)
    worst = best.worst
    peak, limit = float(best.peak_bytes[worst]), float(best.limit_bytes[worst])
    rate = format_rate(best.samples_per_s)
    return (
        f"fits: {best.shape.title}, {format_bytes(peak)} of {format_bytes(limit)} on the fullest "
        f"device; {format_seconds(best.step_s)} a step, {rate} samples/s"
    )


def _figures(report: FitReport, commands: list[str]) -> dict[str, Any]:
    figures = report.to_json()
    for change, text in zip(figures["changes"], commands, strict=True):
        change["command"] = text
    return {"verdict": verdict(report), **figures}


_COLUMNS = (
    ("plan", "left"),
    ("fits", "left"),
    ("peak", "right"),
    ("memory", "right"),
    ("step", "right"),
    ("samples/s", "right"),
)
_PARTS = (
    ("fullest device of", "left"),
    ("parameters", "right"),
    ("gradients", "right"),
    ("optimizer", "right"),
    ("activations", "right"),
    ("workspace", "right"),
    ("peak", "right"),
)


def show(report: FitReport, commands: list[str], searched: str = "") -> None:
    """Print the answer, what was tried, where the memory goes, and what would help.

    Args:
        report: The answer.
        commands: What to type for each change that would help.
        searched: What to type for a faster plan; empty = nothing.
    """
    console = stdout_console()
    console.print(verdict(report), style="bold")
    problem = report.problem
    console.print(model_line(problem.graph))
    if line := basis_line(problem.graph):
        console.print(line)
    console.print(step_line(problem))
    if line := reserve_line(problem):
        console.print(line)
    console.print(table(_COLUMNS, [_row(trial) for trial in report.trials]))
    console.print(table(_PARTS, [_parts_row(trial) for trial in report.trials]))
    for refusal in report.refusals:
        console.print(f"not tried: {refusal}", style="dim")
    if "estimate" in problem.graph.annotations:
        for line in estimate_lines(problem.graph):
            console.print(line, style="dim")
    if not report.fits:
        _show_changes(report, commands)
    if searched:
        plain = report.best.shape.shard is Shard.NONE
        found = "faster plans" if plain else "faster ones without sharding"
        click.echo(f"only equal pipelines were tried; 'partita plan' searches for {found}:")
        click.echo(f"  {searched}")


def _show_changes(report: FitReport, commands: list[str]) -> None:
    if not commands:
        click.echo(f"nothing that was tried makes it fit (at most {MAX_DEVICES} devices are)")
        return
    click.echo("what makes it fit (each was tried):")
    for change, text in zip(report.changes, commands, strict=True):
        trial = change.trial
        peak, limit = float(trial.peak_bytes[trial.worst]), float(trial.limit_bytes[trial.worst])
        click.echo(
            f"  {' and '.join(change.words)}: {trial.shape.title}, {format_bytes(peak)} of "
            f"{format_bytes(limit)}, {format_seconds(trial.step_s)} a step of {change.samples}"
        )
        click.echo(f"    {text}")


def _row(trial: Trial) -> list[str]:
    worst = trial.worst
    return [
        trial.shape.title,
        "yes" if trial.fits else "no",
        format_bytes(float(trial.peak_bytes[worst])),
        format_bytes(float(trial.limit_bytes[worst])),
        format_seconds(trial.step_s),
        format_rate(trial.samples_per_s),
    ]


def _parts_row(trial: Trial) -> list[str]:
    worst = trial.worst
    held = [format_bytes(float(part[worst])) for part in trial.parts.values()]
    return [trial.shape.title, *held, format_bytes(float(trial.peak_bytes[worst]))]
