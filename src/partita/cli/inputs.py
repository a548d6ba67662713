"""From what the user typed to core objects."""

import dataclasses
import inspect
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click
import yaml

from partita.catalogue.catalogue import Catalogue, load_catalogue
from partita.catalogue.examples import EXAMPLES
from partita.catalogue.overrides import apply_overrides
from partita.catalogue.parse import parse_cluster
from partita.catalogue.shorthand import local_cluster
from partita.cli.options import OPTIMIZER_BYTES
from partita.core.cluster import Cluster
from partita.core.graph import Graph
from partita.core.plan import Plan, equal_microbatches
from partita.core.problem import Metric, Mode, Objective, Problem, Schedule
from partita.core.solution import Solution
from partita.cost.bounds import lower_bound
from partita.cost.evaluate import measure
from partita.documents import load, read_text
from partita.errors import FormatError, InvalidInputError
from partita.flows.summary import thawed
from partita.plan.table import DEFAULT_PLANNER, planners

DEFAULT_CLUSTER = "4xa100"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ProblemOptions:
    """What the options say of a problem; None = not given."""

    cluster: str | None
    devices: int | None
    bandwidth: str | None
    latency: str | None
    catalogue_file: str | None
    mode: str | None
    metric: str | None
    schedule: str | None
    microbatches: int | None
    microbatch_size: int | None
    batch_size: int | None
    memory_factor: float | None
    optimizer: str | None


def take_problem_options(values: dict[str, Any]) -> ProblemOptions:
    """Take the options of a problem out of a command's arguments."""
    names = [field.name for field in dataclasses.fields(ProblemOptions)]
    return ProblemOptions(**{name: values.pop(name) for name in names})


def read_catalogue(options: ProblemOptions) -> Catalogue:
    """Return the catalogue, with the user's own file if there is one."""
    if options.catalogue_file is None:
        return load_catalogue()
    try:
        return load_catalogue(read_text(options.catalogue_file))
    except FormatError as exc:
        raise (exc if exc.path else exc.at(options.catalogue_file)) from exc


def read_problem(model: str | None, options: ProblemOptions) -> Problem:
    """Return the problem that a model, a cluster and options describe.

    A file that holds a whole problem (or a cluster file that names its profiles) gives what the
    options leave open.
    """
    base = None if model is None else read_model(model)
    cluster, named = read_cluster(options)
    if base is None:
        if named is None:
            raise click.UsageError("name a MODEL, or a --cluster file that names its profiles")
        base = named
    graph = base if isinstance(base, Graph) else base.graph
    if cluster is None:
        cluster = base.cluster if isinstance(base, Problem) else None
        if cluster is None:
            cluster = parse_cluster(DEFAULT_CLUSTER, read_text, read_catalogue(options))
        cluster = apply_overrides(cluster, bandwidth=options.bandwidth, latency=options.latency)
    start = base.objective if isinstance(base, Problem) else Objective()
    return Problem(graph=graph, cluster=cluster, objective=read_objective(graph, start, options))


def read_model(model: str) -> Graph | Problem:
    """Return the graph, or the whole problem, that a built-in example or a file holds."""
    if model not in EXAMPLES and model != "-" and not Path(model).exists():
        raise InvalidInputError(
            f"{model!r} is neither a file (no such file) nor a built-in example; built in are "
            f"{', '.join(EXAMPLES)}; a model of 'partita models' is profiled first: partita profile"
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
        return local_cluster(options.devices), None
    if options.cluster is None:
        return None, None
    spec, catalogue = options.cluster, read_catalogue(options)
    try:
        found = parse_cluster(
            spec, read_text, catalogue, bandwidth=options.bandwidth, latency=options.latency
        )
    except FormatError as not_ours:
        try:
            whole = load(spec)
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
        if changes["schedule"] is Schedule.INFERENCE:
            changes.setdefault("mode", Mode.INFERENCE)
    if options.memory_factor is not None:
        if options.memory_factor > 1:
            click.echo("memory factor above 1 is clipped to 1", err=True)
        clipped = options.memory_factor > 1
        changes["memory_factor"] = 1.0 if clipped else options.memory_factor
    if options.optimizer is not None:
        changes["optimizer_bytes_per_element"] = OPTIMIZER_BYTES[options.optimizer]
    return dataclasses.replace(start, **changes)


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


def read_solution(path: str, graph: str | None, options: ProblemOptions) -> Solution:
    """Return the solution in a file, with the options applied to its problem and its plan.

    A bare plan, ours or a foreign one, needs ``--graph`` and ``--cluster``. The value is computed
    again: a file may say anything.
    """
    problem = None if graph is None else read_problem(graph, options)
    found = load(path, problem=problem)
    if isinstance(found, Solution):
        problem = problem or _changed(found.problem, options)
        return evaluated(problem, _adapted(found.plan, problem, options), found)
    if not isinstance(found, Plan):
        kind = type(found).__name__.lower()
        raise InvalidInputError(
            f"{path!r} holds a {kind}, not a plan; make one with 'partita plan'"
        )
    if problem is None:
        raise click.UsageError(f"{path} is a bare plan: name its --graph and --cluster")
    return evaluated(problem, _adapted(found, problem, options), None)


def _adapted(plan: Plan, problem: Problem, options: ProblemOptions) -> Plan:
    """Return a plan with the schedule and the microbatches that were asked for."""
    changes: dict[str, Any] = {}
    if problem.objective.schedule is not None and options.schedule is not None:
        changes["schedule"] = problem.objective.schedule
    if (options.microbatches, options.microbatch_size, options.batch_size) != (None, None, None):
        sizes = equal_microbatches(problem.microbatches, problem.microbatch_size)
        changes["microbatch_sizes"] = sizes
    return dataclasses.replace(plan, **changes) if changes else plan


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
    cluster, _ = read_cluster(options)
    cluster = cluster or apply_overrides(
        base.cluster, bandwidth=options.bandwidth, latency=options.latency
    )
    objective = read_objective(base.graph, base.objective, options)
    return dataclasses.replace(base, cluster=cluster, objective=objective)


def read_planner(
    planner: str | None, partition: str | None, options: Sequence[str], seed: int | None
) -> tuple[str, dict[str, Any]]:
    """Return the name and the options of the planner that was asked for."""
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
    if seed is not None:
        known = planners()
        takes = name in known and "seed" in inspect.signature(known[name]).parameters
        if not takes:
            raise click.UsageError(f"planner {name!r} takes no --seed")
        values["seed"] = seed
    return name, values


def _value(text: str) -> Any:
    if re.fullmatch(r"-?\d+(,-?\d+)+", text):
        return [int(part) for part in text.split(",")]
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        return text
    return value if isinstance(value, bool | int | float | str | list) else text


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
    text = read_text(path)
    try:
        found = yaml.safe_load(text)
    except (yaml.YAMLError, RecursionError) as exc:
        line = getattr(getattr(exc, "problem_mark", None), "line", -1) + 1
        raise FormatError("not valid YAML", path=path, line=line) from exc
    if not isinstance(found, dict) or not all(
        isinstance(key, str) and isinstance(value, str) for key, value in found.items()
    ):
        raise FormatError("expected a map from ops (or modules) to devices", path=path)
    return found
