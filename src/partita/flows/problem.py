"""From a model, a cluster and options to a Problem: the one recipe, for Python and commands."""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from partita.catalogue.catalogue import Catalogue
from partita.catalogue.examples import EXAMPLES
from partita.catalogue.overrides import apply_overrides
from partita.catalogue.parse import parse_cluster
from partita.catalogue.shorthand import local_cluster
from partita.core.cluster import Cluster
from partita.core.graph import DeviceKind, Graph
from partita.core.precision import parse_precision
from partita.core.problem import Metric, Mode, Objective, Problem, Schedule
from partita.core.rules import Rule, parse_rule
from partita.core.solution import Solution
from partita.cost.tables import GPU_RESERVE
from partita.documents import (
    CLUSTER_YAML,
    OpenedFile,
    open_catalogue,
    open_file,
    read_text,
)
from partita.errors import FormatError, InvalidInputError
from partita.flows.fields import (
    WHOLE_OR_NONE,
    ChangeFields,
    ClusterFields,
    DegreeFields,
    EstimateFields,
    Model,
    ObjectiveFields,
    PlannerFields,
    RuleFields,
    ShapeFields,
    SourceFields,
    StateFields,
    StepFields,
    is_python,
    is_slurm,
)
from partita.requests import Request, declare, fields_of, make

if TYPE_CHECKING:
    from partita.catalogue.inventory import Completion
    from partita.transformer.named import NamedShape

DEFAULT_CLUSTER = "4xa100"
LARGE_PARAMS = 2e9
"""Parameters from which a configuration is planned by its shape, unless a degree is given."""
LARGE_OBJECTIVES = (Metric.THROUGHPUT.value, Metric.COST.value)
"""What plans by shape can minimise: seconds of a step, or the money for it."""
_OP_BY_OP = (PlannerFields, RuleFields, EstimateFields, ShapeFields)


@dataclass(frozen=True, kw_only=True)
class ProblemRequest(ClusterFields, ChangeFields, ObjectiveFields, RuleFields, SourceFields):
    """A model, the devices it is for, and what is asked of a step."""

    model: Model | None = declare(None, is_argument=True, help="Name of a model, or a file.")


@dataclass(frozen=True, slots=True, kw_only=True)
class PosedProblem:
    """A problem as it was asked, and the same model for other microbatches.

    Attributes:
        problem: The problem.
        graph_at: Returns the model as it is for a microbatch size.
        remarks: What was done other than asked, a sentence each.
    """

    problem: Problem
    graph_at: Callable[[int], Graph]
    remarks: tuple[str, ...] = ()


def problem(model: Model | None = None, /, **options: Any) -> Problem:  # noqa: ANN401
    """Return the problem of planning a model over a cluster.

    Args:
        model: A built-in name, a model to be estimated, a file, or the graph itself; may be left
            out where the cluster file names its profiles.
        **options: The fields of :class:`ProblemRequest`, which are the options of ``partita plan``
            that describe the problem.

    >>> problem("gpt-small", cluster="2x4xa100", microbatches=32).microbatches
    32

    Raises:
        InvalidInputError: There is no such model, cluster or option.
    """
    return pose(make(ProblemRequest, model=model, **options)).problem


def pose(request: ProblemRequest, *, reserves: bool = True) -> PosedProblem:
    """Return the problem that a request describes.

    A file that holds a whole problem (or a cluster file that names its profiles) gives what the
    request leaves open. A model without costs is estimated for the devices of the cluster, on a
    microbatch as it is asked for.

    Args:
        request: The request.
        reserves: Whether plans leave some memory of GPUs free where nothing says how much; a plan
            that is there already was made by other rules.

    Raises:
        InvalidInputError: There is no such model or cluster, or options that exclude each other.
    """
    base = None if request.model is None else read_graph(request.model, may_estimate=True)
    cluster, named = read_cluster(request)
    if request.model is None:
        if named is None:
            raise InvalidInputError("name a MODEL, or a --cluster file that names its profiles")
        base = named
    cluster = changed_cluster(base, cluster, request)
    graph_at = _graphs(request, base, cluster)
    whole = base if isinstance(base, Problem) else None
    graph = graph_at(request.microbatch_size or 0)
    start = whole.objective if whole else Objective()
    objective = objective_of(graph, start, request)
    if reserves and named is None and not brings_limits(base, request):
        objective = with_usual_reserve(objective, cluster, request)
    if objective.microbatch_size is not None:
        graph = graph_at(objective.microbatch_size)
    posed = Problem(
        graph=graph,
        cluster=cluster,
        objective=objective,
        rules=(*(whole.rules if whole else ()), *rules_of(request)),
    )
    return PosedProblem(
        problem=posed,
        graph_at=graph_at,
        remarks=objective_remarks(request, graph),
    )


def _graphs(
    request: ProblemRequest, base: Graph | Problem | None, cluster: Cluster
) -> Callable[[int], Graph]:
    """Return a function that gives the graph for a microbatch size."""
    if base is None:
        assert isinstance(request.model, str)
        from partita.flows.estimated import estimated_graphs  # noqa: PLC0415 (where one estimates)

        found = estimated_graphs(
            request.model, request, request.mode, cluster, catalogue_of(request)
        )
    else:
        refuse_source_options(str(request.model), request)
        own = base if isinstance(base, Graph) else base.graph
        found = lambda _: own  # noqa: E731 (figures of a graph are scaled to any microbatch)
    if not request.recomputes_blocks:
        return found
    from partita.profiler.estimate.recompute import with_recomputation  # noqa: PLC0415 (rarely asked for)

    return lambda size: with_recomputation(found(size))


def refuse_source_options(model: str, request: SourceFields) -> None:
    """Refuse options of a model's source where MODEL is a graph that has its figures.

    Raises:
        InvalidInputError: One was given.
    """
    for field in fields_of(SourceFields):
        if field.name != "recompute" and getattr(request, field.name) != field.default:
            raise InvalidInputError(
                f"{model!r} is a graph with its own figures; --{field.name.replace('_', '-')} is "
                "for models that are estimated"
            )


def large_shape(request: Request, model: Model | None) -> "NamedShape | None":
    """Return the shape of the large transformer that a request is about; None = something else.

    Raises:
        InvalidInputError: An option that only the other kind of model has.
    """
    given = request.given()
    degrees = [field.name for field in fields_of(DegreeFields) if field.name in given]
    named = _shape_of(model) if isinstance(model, str) and model not in EXAMPLES else None
    if named is not None and not (degrees or named.is_listed or named.shape.params >= LARGE_PARAMS):
        named = None
    in_degrees = bool(degrees) or given.get("recompute") not in (None, *WHOLE_OR_NONE)
    if named is None:
        # Op by op a framework limits the search; it is no degree.
        degrees = [name for name in degrees if name != "framework"]
    if named is None and degrees:
        raise InvalidInputError(
            f"--{degrees[0].replace('_', '-')} is for large transformers that are named by their "
            f"shape (partita models large, or a config.json); {model!r} is planned op by op"
        )
    op_by_op = {field.name for group in _OP_BY_OP for field in fields_of(group)}
    op_by_op |= {"slowdown", "trace_search", "objective", "schedule", "mode", "shard"}
    op_by_op -= {"recompute", "sequence_length", *(["slowdown"] * ("minimise_moves" in given))}
    if given.get("objective") in LARGE_OBJECTIVES:
        op_by_op -= {"objective"}
    others = sorted(op_by_op & set(given))
    if named is not None and others:
        if not (named.is_listed or in_degrees):  # a configuration can be planned op by op, too
            return None
        raise InvalidInputError(
            f"--{others[0].replace('_', '-')} is for models that are planned op by op; "
            f"{model!r} is planned by its shape"
        )
    return named


def _shape_of(model: str) -> "NamedShape | None":
    """Return the shape that a name, a configuration's file or a class of transformers means."""
    from partita.transformer.named import (  # noqa: PLC0415 (YAML of all shapes)
        find_shape,
        shape_from_config,
    )

    try:
        named = find_shape(model)
    except InvalidInputError:  # a configuration that no shape holds: planned op by op
        return None
    if named is not None or not (model.startswith("hf:") or Path(model).is_dir()):
        return named
    from partita.flows.extras import torch_needed  # noqa: PLC0415 (only for configurations)

    with torch_needed(f"{model!r} is a Hugging Face configuration, which needs"):
        from partita.capture.sources import whole_configuration  # noqa: PLC0415 (imports torch)
    try:
        name, config = whole_configuration(model)
        named = shape_from_config(config, name=name)
    except InvalidInputError:  # not a decoder, or none at all: said where it is built
        return None
    return named


def is_path(model: str) -> bool:
    """Return whether a text means a file: stdin, one that is there, or a name that ends like one.

    A folder with a Hugging Face configuration is a model.
    """
    path = Path(model)
    if path.is_dir():
        return not (path / "config.json").exists()
    return model == "-" or path.exists() or (":" not in model and path.suffix[1:].isalpha())


def catalogue_of(request: ClusterFields) -> Catalogue:
    """Return the catalogue, with the user's own file if there is one."""
    return open_catalogue(request.catalogue)


def rules_of(request: RuleFields) -> tuple[Rule, ...]:
    """Return the pins and the bans that were given, in their order."""
    pins = (parse_rule(text, forbids=False) for text in request.pin)
    return (*pins, *(parse_rule(text, forbids=True) for text in request.forbid))


def read_graph(model: Model, *, may_estimate: bool = False) -> Graph | Problem | None:
    """Return the graph or problem that MODEL names; None where it is a model to be estimated."""
    if not isinstance(model, str):
        return model.problem if isinstance(model, Solution) else model
    if may_estimate and (is_python(model) or (model not in EXAMPLES and not is_path(model))):
        return None
    try:
        return _stored_graph(model)
    except FormatError:
        from partita.transformer.named import read_configuration  # noqa: PLC0415 (YAML of shapes)

        if may_estimate and read_configuration(model) is not None:
            return None
        raise


def _stored_graph(model: str) -> Graph | Problem:
    """Return the graph, or the whole problem, that a built-in example or a file holds."""
    if model not in EXAMPLES and model != "-" and not Path(model).exists():
        raise InvalidInputError(
            f"{model!r} is neither a file (no such file) nor a built-in example; built in are "
            f"{', '.join(EXAMPLES)}; a model of 'partita models' is planned by 'partita plan'"
        )
    holds = ("a graph", "a graph and a cluster")
    found = EXAMPLES[model]() if model in EXAMPLES else open_file(model).load(wanted=holds)
    if isinstance(found, Solution):
        return found.problem
    if isinstance(found, Graph | Problem):
        return found
    raise InvalidInputError(
        f"{model!r} holds a {type(found).__name__.lower()}, not a model; built in are "
        f"{', '.join(EXAMPLES)}"
    )


def read_cluster(request: ClusterFields) -> tuple[Cluster | None, Problem | None]:
    """Return the cluster that was named, and the whole problem where its file holds one."""
    overrides = {"bandwidth": request.bandwidth, "latency": request.latency}
    named, whole = request.cluster, None
    if request.devices is not None and named is not None:
        raise InvalidInputError("--devices and --cluster exclude each other")
    if isinstance(named, str) and is_slurm(named):
        from partita.flows.slurm_cluster import read_slurm_cluster  # noqa: PLC0415 (rarely used)

        found = read_slurm_cluster(named, completion_of(request))
    elif isinstance(named, str):
        found, whole = _read_named(named, request)
    else:
        refuse_type(request)
        if request.devices is not None:
            found = local_cluster(request.devices, catalogue_of(request))
        elif named is not None:
            found = named
        else:
            return None, None
    return apply_overrides(found, **overrides), whole


def _read_named(named: str, request: ClusterFields) -> tuple[Cluster, Problem | None]:
    """Return the cluster of a shorthand or a file, and the problem where the file holds one."""
    opened: list[OpenedFile] = []  # whatever was read, as standard input cannot be read again

    def open_text(name: str) -> str:
        opened.append(open_file(name))
        return opened[-1].text

    try:
        found = parse_cluster(named, open_text, catalogue_of(request))
    except FormatError as not_ours:
        file = opened[-1] if opened else open_file(named)
        whole = _read_foreign_cluster(file, request, not_ours)
        return (whole, None) if isinstance(whole, Cluster) else (whole.cluster, whole)
    refuse_type(request)
    return found, None


def _read_foreign_cluster(
    file: OpenedFile, request: ClusterFields, not_ours: FormatError
) -> Cluster | Problem:
    """Return what a file holds that is no cluster of ours; where that is nothing, ours is at fault.

    Raises:
        FormatError: It is broken, or holds no cluster.
    """
    is_listing = False
    try:
        is_listing = file.is_listing
        if file.format == CLUSTER_YAML:
            raise not_ours
        whole = file.load(completion=completion_of(request))
    except FormatError as exc:
        raise (exc if is_listing else not_ours) from None
    if not is_listing:
        refuse_type(request)
    if isinstance(whole, Solution):
        whole = whole.problem
    if not isinstance(whole, Cluster | Problem):
        raise not_ours
    return whole


def completion_of(request: ClusterFields) -> "Completion":
    """Return the catalogue, and the type of GPUs that a list of hosts does not name."""
    from partita.catalogue.inventory import Completion  # noqa: PLC0415 (files alone need it)

    return Completion(catalogue=catalogue_of(request), given=request.type or "")


def refuse_type(request: ClusterFields) -> None:
    """Refuse a type of GPUs where the cluster says all types itself.

    Raises:
        InvalidInputError: One was given.
    """
    if request.type is not None:
        raise InvalidInputError(
            "--type is for a --cluster that does not name its GPUs, such as a hostfile or what "
            "nvidia-smi prints"
        )


def changed_cluster(
    base: Graph | Problem | None, cluster: Cluster | None, request: ClusterFields
) -> Cluster:
    """Return the cluster that was named, else the problem's own, else the usual; with changes."""
    if cluster is None:
        known = base.cluster if isinstance(base, Problem) else None
        cluster = known or parse_cluster(DEFAULT_CLUSTER, read_text, catalogue_of(request))
        cluster = apply_overrides(cluster, bandwidth=request.bandwidth, latency=request.latency)
    if isinstance(request, ChangeFields) and request.what_if:
        from partita.catalogue.what_if import what_if  # noqa: PLC0415 (rarely asked for)

        for change in request.what_if:
            cluster = what_if(cluster, change, catalogue_of(request))
    return cluster


def objective_of(graph: Graph, start: Objective, request: StepFields) -> Objective:
    """Return an objective with all that a request says."""
    microbatches, size = _batch(graph, start, request)
    start = dataclasses.replace(start, microbatches=microbatches, microbatch_size=size)
    return changed_objective(start, request)


def changed_objective(start: Objective, request: StepFields) -> Objective:
    """Return an objective with all that a request says but microbatches."""
    changes: dict[str, Any] = {}
    if request.mode is not None:
        changes["mode"] = Mode(request.mode)
    if isinstance(request, ObjectiveFields) and request.objective is not None:
        changes["metric"] = Metric(request.objective)
    if request.schedule is not None:
        changes["schedule"] = Schedule(request.schedule)
        if changes["schedule"].row.infers:
            changes.setdefault("mode", Mode.INFERENCE)
    if (share := memory_share(request)) is not None:
        changes["memory_factor"] = share
    changed = dataclasses.replace(start, **changes)
    if request.precision is None and request.optimizer is None:
        return changed
    text = request.precision
    precision = start.precision if text is None else parse_precision(text)
    return changed.with_precision(precision, request.optimizer)


def memory_share(request: StateFields) -> float | None:
    """Return the share of each device's memory that a request lets a plan use; None = not said.

    Raises:
        InvalidInputError: It is said twice.
    """
    factor = request.memory_factor if isinstance(request, StepFields) else None
    if request.reserve is None:
        return None if factor is None else min(factor, 1.0)
    if factor is not None:
        raise InvalidInputError("--reserve R is --memory-factor 1 - R; give one of them")
    return 1.0 - request.reserve


def brings_limits(base: Graph | Problem | None, request: ClusterFields) -> bool:
    """Return whether the devices are those of a file, whose limits are taken at their word."""
    named = request.cluster is not None or request.devices is not None
    return (
        isinstance(base, Problem) and not named and not is_example(getattr(request, "model", None))
    )


def is_example(model: object) -> bool:
    """Return whether a model is named as one that is built in."""
    return isinstance(model, str) and model in EXAMPLES


def with_usual_reserve(objective: Objective, cluster: Cluster, request: StepFields) -> Objective:
    """Return an objective that leaves some memory of GPUs free, unless something says how much.

    Published metrics have memory rules of their own, and CPUs no context.
    """
    is_said = request.memory_factor is not None or request.reserve is not None
    is_said |= objective.memory_factor != 1
    if is_said or objective.metric.row.published:
        return objective
    if all(device.kind is DeviceKind.CPU for device in cluster.devices):
        return objective
    return dataclasses.replace(objective, memory_factor=1.0 - GPU_RESERVE)


def objective_remarks(request: StepFields, graph: Graph | None = None) -> tuple[str, ...]:
    """Return what of a request is taken other than it was given, a sentence each.

    Args:
        request: The request.
        graph: The model that it is about, where it is at hand.
    """
    clipped = request.memory_factor is not None and request.memory_factor > 1
    remarks = ["memory factor above 1 is clipped to 1"] * clipped
    if request.precision is not None and graph is not None:
        compute = parse_precision(request.precision).compute
        if compute != graph.dtype:
            remarks.append(
                f"op times and activations are those of the graph, in {graph.dtype}; --precision "
                f"{request.precision} changes weights, gradients, optimizer state and collectives"
            )
    return (*remarks, *(() if graph is None else specialised_remarks(graph)))


def specialised_remarks(graph: Graph) -> tuple[str, ...]:
    """Return where the model of a graph may take another way on other data, a sentence each.

    The capture notes it: ops of a branch that the example did not take are not in the graph.
    """
    notes = [
        str(note)
        for origin in ("profile", "estimate")
        for record in graph.annotations.get(origin, {}).values()
        for note in record.get("notes", ())
    ]
    found = [note for note in dict.fromkeys(notes) if note.startswith("specialised to")]
    return tuple(
        f"{note}; the plan computes what it did there, whatever the data" for note in found
    )


def _batch(graph: Graph, start: Objective, request: StepFields) -> tuple[int | None, int | None]:
    """Return microbatches and their size; any two of the three options give the third."""
    count, size, batch = request.microbatches, request.microbatch_size, request.batch_size
    if batch is None:
        return count or start.microbatches, size or start.microbatch_size
    if count is not None and size is not None and count * size != batch:
        raise InvalidInputError(
            f"{count} microbatches of {size} samples are {count * size}, not --batch-size {batch}"
        )
    if count is None:
        size = size or usual_size(graph.batch_size, batch)
        count = batch // size
    size = size or batch // count
    if count * size != batch or size < 1:
        raise InvalidInputError(
            f"--batch-size {batch} cannot be {count} microbatches of {size or 'equal'} samples"
        )
    return count, size


def usual_size(usual: int, batch: int) -> int:
    """Return the samples of a microbatch: the largest divisor of a batch up to the usual size."""
    return next(size for size in range(min(usual, batch), 0, -1) if batch % size == 0)
