"""From what the user typed to core objects."""

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import click

from partita.bounds import lower_bound
from partita.catalogue.catalogue import Catalogue, load_catalogue
from partita.catalogue.examples import EXAMPLES
from partita.catalogue.overrides import apply_overrides
from partita.catalogue.parse import parse_cluster
from partita.catalogue.shorthand import local_cluster
from partita.catalogue.what_if import what_if
from partita.cli.estimated import (
    SOURCE_OPTIONS,
    estimated_graphs,
    is_path,
    refuse_source_options,
)
from partita.cli.options import GPU_RESERVE, OPTIMIZER_BYTES
from partita.core.cluster import Cluster
from partita.core.graph import DeviceKind, Graph
from partita.core.json_values import thawed
from partita.core.plan import Plan, equal_microbatches
from partita.core.problem import Metric, Mode, Objective, Problem, Schedule
from partita.core.rules import Rule, parse_rule
from partita.core.solution import Solution
from partita.cost.judge import measure
from partita.documents import OpenedFile, load, open_file, read_text
from partita.errors import FormatError, InfeasibleError, InvalidInputError
from partita.objectives.placed import placement_errors
from partita.planners.table import DEFAULT_PLANNER, takes
from partita.profiler.estimate.recompute import with_recomputation
from partita.yaml_nodes import guess_value, parse_yaml, read_table
from partita.yaml_nodes import read_text as read_yaml_text

DEFAULT_CLUSTER = "4xa100"
_MAX_ASSIGNMENT = 2**27
"""Characters of a file that places the ops of a graph one by one."""
_OWN_METRICS = (Metric.THROUGHPUT, Metric.LATENCY, Metric.ENERGY)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ProblemOptions:
    """What the options say of a problem; None = not given."""

    cluster: str | None = None
    devices: int | None = None
    bandwidth: str | None = None
    latency: str | None = None
    catalogue_file: str | None = None
    mode: str | None = None
    metric: str | None = None
    schedule: str | None = None
    microbatches: int | None = None
    microbatch_size: int | None = None
    batch_size: int | None = None
    memory_factor: float | None = None
    reserve: float | None = None
    optimizer: str | None = None
    changes: tuple[str, ...] = ()
    pins: tuple[str, ...] = ()
    bans: tuple[str, ...] = ()
    recompute: bool = False
    source: Mapping[str, Any] | None = None


def take_problem_options(values: dict[str, Any]) -> ProblemOptions:
    """Take the options of a problem out of a command's arguments.

    Commands that take models to be estimated have the options of their source, too.
    """
    fields = dataclasses.fields(ProblemOptions)
    found = {field.name: values.pop(field.name) for field in fields if field.name in values}
    if all(name in values for name in SOURCE_OPTIONS):
        source = {name: values.pop(name) for name in SOURCE_OPTIONS}
        found["source"] = {**source, "mode": found["mode"]}
    return ProblemOptions(**found)


def read_catalogue(options: ProblemOptions) -> Catalogue:
    """Return the catalogue, with the user's own file if there is one."""
    if options.catalogue_file is None:
        return load_catalogue()
    try:
        return load_catalogue(read_text(options.catalogue_file))
    except FormatError as exc:
        raise (exc if exc.path else exc.at(options.catalogue_file)) from exc


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A problem as it was asked, and the same model for other microbatches.

    Attributes:
        problem: The problem.
        graph_at: Returns the model as it is for a microbatch size.
    """

    problem: Problem
    graph_at: Callable[[int], Graph]


def read_problem(model: str | None, options: ProblemOptions) -> Problem:
    """Return the problem that a model, a cluster and options describe, for a plan that is there.

    Nothing is reserved unless the options say so: the plan was made by other rules.
    """
    return read_asked(model, options, reserves=False).problem


def read_asked(model: str | None, options: ProblemOptions, *, reserves: bool = True) -> Asked:
    """Return the problem that a model, a cluster and options describe.

    A file that holds a whole problem (or a cluster file that names its profiles) gives what the
    options leave open. A model without costs is estimated for the devices of the cluster, on a
    microbatch as it is asked for.

    Args:
        model: What the user calls it; None where the cluster file names its profiles.
        options: What the options say.
        reserves: Whether plans leave some memory of GPUs free where nothing says how much.
    """
    base = None if model is None else read_graph(model, options)
    cluster, named = read_cluster(options)
    if model is None:
        if named is None:
            raise click.UsageError("name a MODEL, or a --cluster file that names its profiles")
        base = named
    cluster = changed_cluster(base, cluster, options)
    if base is None:
        assert model is not None
        assert options.source is not None
        found = estimated_graphs(model, options.source, cluster, read_catalogue(options))
    else:
        if options.source is not None:
            refuse_source_options(str(model))
        own = base if isinstance(base, Graph) else base.graph
        found = partial(_always, own)

    def graph_at(size: int) -> Graph:
        graph = found(size)
        return with_recomputation(graph) if options.recompute else graph

    whole = base if isinstance(base, Problem) else None
    graph = graph_at(options.microbatch_size or 0)
    objective = read_objective(graph, whole.objective if whole else Objective(), options)
    if reserves and named is None and not brings_limits(model, base, options):
        objective = with_usual_reserve(objective, cluster, options)
    if objective.microbatch_size is not None:
        graph = graph_at(objective.microbatch_size)
    problem = Problem(
        graph=graph,
        cluster=cluster,
        objective=objective,
        rules=(*(whole.rules if whole else ()), *read_rules(options)),
    )
    return Asked(problem=problem, graph_at=graph_at)


def _always(graph: Graph, _: int) -> Graph:
    """Return a graph whose figures are scaled to any microbatch."""
    return graph


def read_rules(options: ProblemOptions) -> tuple[Rule, ...]:
    """Return the pins and the bans that were given, in their order."""
    pins = (parse_rule(text, forbids=False) for text in options.pins)
    return (*pins, *(parse_rule(text, forbids=True) for text in options.bans))


def changed_cluster(
    base: Graph | Problem | None, cluster: Cluster | None, options: ProblemOptions
) -> Cluster:
    """Return the cluster that was named, else the problem's own, else the usual; with changes."""
    if cluster is None:
        known = base.cluster if isinstance(base, Problem) else None
        cluster = known or parse_cluster(DEFAULT_CLUSTER, read_text, read_catalogue(options))
        cluster = apply_overrides(cluster, bandwidth=options.bandwidth, latency=options.latency)
    for change in options.changes:
        cluster = what_if(cluster, change, read_catalogue(options))
    return cluster


def read_graph(model: str, options: ProblemOptions) -> Graph | Problem | None:
    """Return the graph or problem that MODEL names; None where it is a model to be estimated."""
    if options.source is not None and model not in EXAMPLES and not is_path(model):
        return None
    try:
        return read_model(model)
    except FormatError:
        if options.source is None or Path(model).name != "config.json":
            raise
        return None


def read_model(model: str) -> Graph | Problem:
    """Return the graph, or the whole problem, that a built-in example or a file holds."""
    if model not in EXAMPLES and model != "-" and not Path(model).exists():
        raise InvalidInputError(
            f"{model!r} is neither a file (no such file) nor a built-in example; built in are "
            f"{', '.join(EXAMPLES)}; a model of 'partita models' is planned by 'partita plan'"
        )
    found = EXAMPLES[model]() if model in EXAMPLES else load(model)
    if isinstance(found, Solution):
        return found.problem
    if isinstance(found, Graph | Problem):
        return found
    raise InvalidInputError(
        f"{model!r} holds a {type(found).__name__.lower()}, not a model; built in are "
        f"{', '.join(EXAMPLES)}"
    )


def read_cluster(options: ProblemOptions) -> tuple[Cluster | None, Problem | None]:
    """Return the cluster, and the whole problem where its file holds one."""
    if options.devices is not None:
        if options.cluster is not None:
            raise click.UsageError("--devices and --cluster exclude each other")
        here = local_cluster(options.devices, read_catalogue(options))
        return apply_overrides(here, bandwidth=options.bandwidth, latency=options.latency), None
    if options.cluster is None:
        return None, None
    spec, catalogue = options.cluster, read_catalogue(options)
    opened: list[OpenedFile] = []  # whatever was read, as standard input cannot be read again

    def open_text(name: str) -> str:
        opened.append(open_file(name))
        return opened[-1].text

    try:
        found = parse_cluster(
            spec, open_text, catalogue, bandwidth=options.bandwidth, latency=options.latency
        )
    except FormatError as not_ours:
        try:
            whole = (opened[-1] if opened else open_file(spec)).load()
        except FormatError:
            raise not_ours from None
        if isinstance(whole, Solution):
            whole = whole.problem
        if not isinstance(whole, Problem):
            raise
        cluster = apply_overrides(
            whole.cluster, bandwidth=options.bandwidth, latency=options.latency
        )
        return cluster, whole
    return found, None


def read_objective(graph: Graph, start: Objective, options: ProblemOptions) -> Objective:
    """Return an objective with all that the options say."""
    microbatches, size = _batch(graph, start, options)
    start = dataclasses.replace(start, microbatches=microbatches, microbatch_size=size)
    return changed_objective(start, options)


def changed_objective(start: Objective, options: ProblemOptions) -> Objective:
    """Return an objective with all that the options say but microbatches."""
    changes: dict[str, Any] = {}
    if options.mode is not None:
        changes["mode"] = Mode(options.mode)
    if options.metric is not None:
        changes["metric"] = Metric(options.metric)
    if options.schedule is not None:
        changes["schedule"] = Schedule(options.schedule)
        if changes["schedule"].row.infers:
            changes.setdefault("mode", Mode.INFERENCE)
    if options.reserve is not None:
        if options.memory_factor is not None:
            raise click.UsageError("--reserve R is --memory-factor 1 - R; give one of them")
        changes["memory_factor"] = 1.0 - options.reserve
    if options.memory_factor is not None:
        if options.memory_factor > 1:
            click.echo("memory factor above 1 is clipped to 1", err=True)
        clipped = options.memory_factor > 1
        changes["memory_factor"] = 1.0 if clipped else options.memory_factor
    if options.optimizer is not None:
        changes["optimizer_bytes_per_element"] = OPTIMIZER_BYTES[options.optimizer]
    return dataclasses.replace(start, **changes)


def brings_limits(model: str | None, base: Graph | Problem | None, options: ProblemOptions) -> bool:
    """Return whether the devices are those of a file, whose limits are taken at their word."""
    named = options.cluster is not None or options.devices is not None
    return isinstance(base, Problem) and model not in EXAMPLES and not named


def with_usual_reserve(
    objective: Objective, cluster: Cluster, options: ProblemOptions
) -> Objective:
    """Return an objective that leaves some memory of GPUs free, unless something says how much.

    Published metrics have memory rules of their own, and CPUs no context.
    """
    is_said = options.memory_factor is not None or options.reserve is not None
    is_said |= objective.memory_factor != 1
    if is_said or objective.metric not in _OWN_METRICS:
        return objective
    if all(device.kind is DeviceKind.CPU for device in cluster.devices):
        return objective
    return dataclasses.replace(objective, memory_factor=1.0 - GPU_RESERVE)


def _batch(
    graph: Graph, start: Objective, options: ProblemOptions
) -> tuple[int | None, int | None]:
    """Return microbatches and their size; any two of the three options give the third."""
    count, size, batch = options.microbatches, options.microbatch_size, options.batch_size
    if batch is None:
        return count or start.microbatches, size or start.microbatch_size
    if count is not None and size is not None and count * size != batch:
        raise click.UsageError(
            f"{count} microbatches of {size} samples are {count * size}, not --batch-size {batch}"
        )
    if count is None:
        size = size or min(graph.batch_size, batch)
        count = batch // size
    size = size or batch // count
    if count * size != batch or size < 1:
        raise click.UsageError(
            f"--batch-size {batch} cannot be {count} microbatches of {size or 'equal'} samples"
        )
    return count, size


def read_solution(plan: str | OpenedFile, graph: str | None, options: ProblemOptions) -> Solution:
    """Return the solution in a file, with the options applied to its problem and its plan.

    The file may be opened already. A bare plan, ours or a foreign one, needs ``--graph`` and
    ``--cluster``. The value is computed again: a file may say anything.
    """
    problem = None if graph is None else read_problem(graph, options)
    file = open_file(plan) if isinstance(plan, str) else plan
    found, path = file.load(problem=problem), file.name
    if isinstance(found, Solution):
        return changed_solution(found, options, problem)
    if not isinstance(found, Plan):
        kind = type(found).__name__.lower()
        raise InvalidInputError(
            f"{path!r} holds a {kind}, not a plan; make one with 'partita plan'"
        )
    if problem is None:
        raise click.UsageError(f"{path} is a bare plan: name its --graph and --cluster")
    return evaluated(problem, _adapted(found, problem, options), None)


def changed_solution(
    found: Solution, options: ProblemOptions, problem: Problem | None = None
) -> Solution:
    """Return a solution with the options applied to its problem, its plan and its alternatives.

    Alternatives that are none for the changed problem are left out.
    """
    problem = problem or _changed(found.problem, options)
    plan, *others = (_adapted(plan, problem, options) for plan in (found.plan, *found.alternatives))
    broken = placement_errors(problem, plan) if read_rules(options) else []
    if broken:
        raise InfeasibleError(f"the plan breaks a rule: {broken[0]}; plan again with the rule")
    solution = evaluated(problem, plan, found)
    kept = tuple(other for other in others if _is_for(problem, other))
    return dataclasses.replace(solution, alternatives=kept)


def _adapted(plan: Plan, problem: Problem, options: ProblemOptions) -> Plan:
    """Return a plan with the schedule and the microbatches that were asked for."""
    changes: dict[str, Any] = {}
    if problem.objective.schedule is not None and options.schedule is not None:
        changes["schedule"] = problem.objective.schedule
    if (options.microbatches, options.microbatch_size, options.batch_size) != (None, None, None):
        sizes = equal_microbatches(problem.microbatches, problem.microbatch_size)
        changes["microbatch_sizes"] = sizes
    return dataclasses.replace(plan, **changes) if changes else plan


def _is_for(problem: Problem, plan: Plan) -> bool:
    """Return whether a plan is one for a problem, which may have other devices by now."""
    try:
        plan.check_fits(problem)
    except InvalidInputError:
        return False
    return True


def evaluated(problem: Problem, plan: Plan, found: Solution | None) -> Solution:
    """Return a plan as a solution of a problem, with its value there."""
    plan.check_fits(problem)
    value = measure(problem, plan)
    return Solution(
        problem=problem,
        plan=plan,
        metric=problem.objective.metric,
        value=value.value,
        unit=value.unit,
        lower_bound=min(lower_bound(problem), value.value),
        planner=found.planner if found else "",
        options=thawed(found.options) if found else {},
    )


def _changed(base: Problem, options: ProblemOptions) -> Problem:
    cluster = changed_cluster(base, read_cluster(options)[0], options)
    objective = read_objective(base.graph, base.objective, options)
    if options.recompute:
        raise click.UsageError(
            "--recompute shapes an estimate; a saved plan says what it recomputes"
        )
    rules = (*base.rules, *read_rules(options))
    return dataclasses.replace(base, cluster=cluster, objective=objective, rules=rules)


def read_planner(
    planner: str | None,
    partition: str | None,
    options: Sequence[str],
    seed: int | None,
    effort: Mapping[str, Any] | None = None,
) -> tuple[str, dict[str, Any]]:
    """Return the name and the options of the planner that was asked for.

    Args:
        planner: The planner, with its argument after a colon.
        partition: The same.
        options: Pairs ``name=value``.
        seed: Of a random planner; None = not given.
        effort: Options that only some planners take, by name; None or False = not given.

    Raises:
        UsageError: The planner does not take what was given.
    """
    if planner is not None and partition is not None and planner != partition:
        raise click.UsageError("--planner and --partition are the same; give one")
    spec = planner or partition or DEFAULT_PLANNER
    name, _, argument = spec.partition(":")
    values: dict[str, Any] = {}
    for option in options:
        key, sign, value = option.partition("=")
        if not sign:
            raise click.UsageError(f"--option {option!r} is not of the form name=value")
        values[key.replace("-", "_")] = _value(value)
    if argument:
        values |= _argument(name, argument)
    for key, value in {"seed": seed, **(effort or {})}.items():
        if value is None or value is False:
            continue
        if not takes(name, key):
            raise click.UsageError(f"planner {name!r} takes no --{key.replace('_', '-')}")
        values[key] = value
    return name, values


EFFORT_OPTIONS = ("time_limit", "iterations", "as_released")


def take_effort_options(values: dict[str, Any]) -> dict[str, Any]:
    """Take the options that say how long, or in which way, a planner searches."""
    return {name: values.pop(name) for name in EFFORT_OPTIONS if name in values}


def _value(text: str) -> Any:
    if re.fullmatch(r"-?\d+(,-?\d+)+", text):
        return [int(part) for part in text.split(",")]
    return guess_value(text)


def _argument(name: str, argument: str) -> Mapping[str, Any]:
    """Return what stands after the colon of ``name:argument`` as options."""
    if name == "custom":
        try:
            return {"boundaries": [int(part) for part in argument.split(",")]}
        except ValueError:
            raise InvalidInputError(
                f"custom:{argument} is not understood; write indices like custom:0,8,14,20,26"
            ) from None
    if name == "manual":
        return {"assignment": _read_assignment(argument)}
    if name == "random":
        return {"seed": _value(argument)}
    if name == "single":
        return {"device": argument}
    raise InvalidInputError(f"planner {name!r} takes no argument after a colon")


def _read_assignment(path: str) -> dict[str, str]:
    """Return a map from ops to devices, a YAML or JSON object."""
    try:
        root = parse_yaml(read_text(path), max_text=_MAX_ASSIGNMENT)
        entries = read_table(root, "the map from ops (or modules) to devices").entries
        return {op: read_yaml_text(device, f"device of {op}") for op, device in entries.items()}
    except FormatError as exc:
        raise (exc if exc.path else exc.at(path)) from exc
