"""Does a model fit on a cluster: what ``partita.estimate`` and the command ``estimate`` do.

Nothing is launched. Equal pipelines and data parallelism are tried (``fit``), and the planner of
``partita plan`` searches the same problem, so that both give the same answer. Where nothing fits,
the least changes that make it fit are said as commands.
"""

import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Any, TypeAlias

from partita.catalogue.catalogue import Catalogue
from partita.catalogue.examples import EXAMPLES
from partita.catalogue.parse import parse_cluster
from partita.catalogue.shorthand import HostGroup, parse_shorthand, write_shorthand
from partita.catalogue.what_if import what_if
from partita.core.cluster import Cluster
from partita.core.graph import Graph
from partita.core.plan import Shard
from partita.core.problem import Objective, Problem
from partita.core.solution import Solution
from partita.documents import read_text
from partita.errors import InvalidInputError
from partita.flows.estimated import estimated_graphs
from partita.flows.fields import (
    ChangeFields,
    ClusterFields,
    DegreeFields,
    EffortFields,
    Model,
    RuleFields,
    SourceFields,
    StepFields,
)
from partita.flows.fit import Change, FitReport, Question, fit, solution_of
from partita.flows.fit_plans import Trial
from partita.flows.least_change import Setting
from partita.flows.planner_choice import planner_choice
from partita.flows.problem import (
    DEFAULT_CLUSTER,
    brings_limits,
    catalogue_of,
    changed_cluster,
    changed_objective,
    large_shape,
    objective_remarks,
    read_cluster,
    read_graph,
    refuse_source_options,
    rules_of,
    usual_size,
    with_usual_reserve,
)
from partita.flows.results import Result
from partita.planners.pipeline import main_devices_of
from partita.planners.table import DEFAULT_PLANNER
from partita.requests import OnProgress, arguments_of, declare, make, part, silent
from partita.units import format_bytes, format_rate, format_seconds

if TYPE_CHECKING:
    from partita.flows.large import LargePlanResult

MAX_DEVICES = 1024
"""Devices up to which more of them are suggested."""
USUAL_HOST = 8
"""Devices of a host that is filled up before another is added."""
_CHANGED = ("model", "microbatch_size", "microbatches", "batch_size", "recompute", "shard")

Growth: TypeAlias = Callable[[int], tuple[list[str], Cluster] | None]
"""By how often a cluster is enlarged: the arguments that say it, and the cluster; None = not."""


@dataclass(frozen=True, kw_only=True)
class EstimateRequest(
    ClusterFields, ChangeFields, StepFields, RuleFields, SourceFields, DegreeFields, EffortFields
):
    """A model, the devices it is for, and what is asked of a step."""

    model: Model = declare("", is_argument=True, help="Name of a model, or a file.")
    shard: str = declare(
        Shard.NONE.value,
        choices=[level.value for level in Shard],
        help="Let the replicas of every plan divide this.",
    )
    seed: int = declare(0, help="Seed of weights and data.")


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Estimate(Result):
    """Whether a model fits on a cluster, and what would make it fit.

    Attributes:
        report: What was tried, and the least changes that make it fit.
        commands: What to type for each of the changes.
        plan_command: Command that finds the same plan and writes it; empty where there is none.
        remarks: What was done other than asked, a sentence each.
    """

    report: FitReport
    commands: tuple[str, ...]
    plan_command: str
    remarks: tuple[str, ...] = ()

    @property
    def fits(self) -> bool:
        """Whether any plan that was tried fits."""
        return self.report.fits

    @property
    def problem(self) -> Problem:
        """The problem as it was asked."""
        return self.report.problem

    @property
    def solution(self) -> Solution:
        """The fastest plan that fits, else the one that is nearest to fitting."""
        searched, best = self.report.searched, self.report.best
        is_searched = searched is not None and searched.plan is best.plan
        return searched if searched is not None and is_searched else solution_of(best)

    @property
    def verdict(self) -> str:
        """The answer in one line."""
        best = self.report.best
        worst = best.peaks.fullest
        peak, limit = best.peaks.worst
        if not self.fits:
            return (
                f"does not fit: of the plans tried the nearest ({best.shape.title}) needs "
                f"{format_bytes(peak)} of {format_bytes(limit)} on {best.plan.devices[worst]}"
            )
        return (
            f"fits: {best.shape.title}, {format_bytes(peak)} of {format_bytes(limit)} on the "
            f"fullest device; {format_seconds(best.step_s)} per step, "
            f"{format_rate(best.samples_per_s)} samples/s"
        )

    def to_json(self) -> dict[str, Any]:
        """Return everything as JSON values under stable keys."""
        figures = self.report.to_json()
        for change, text in zip(figures["changes"], self.commands, strict=True):
            change["command"] = text
        return {"verdict": self.verdict, **figures, "plan_command": self.plan_command or None}

    def rows(self) -> list[Mapping[str, object]]:
        """Return a row for each plan that was tried."""
        return [_row(trial) for trial in self.report.trials]

    def lines(self) -> list[str]:
        """Return the answer, and the first change that helps."""
        problem = self.problem
        lines = [f"{problem.graph.name} on {problem.cluster.name}", self.verdict]
        if self.report.changes:
            lines.append(f"enough is: {' and '.join(self.report.changes[0].words)}")
        return lines


def _row(trial: Trial) -> Mapping[str, object]:
    return {
        "plan": trial.shape.title,
        "fits": trial.fits,
        "peak bytes": trial.peaks.worst[0],
        "limit bytes": trial.peaks.worst[1],
        "step s": trial.step_s,
        "samples/s": trial.samples_per_s,
    }


def estimate(
    model: Model,
    /,
    *,
    on_progress: OnProgress = silent,
    **options: Any,  # noqa: ANN401 (fields of EstimateRequest)
) -> "Estimate | LargePlanResult":
    """Say whether a model fits on a cluster, what it needs, and what would make it fit.

    A large transformer that is named by its shape is planned as by :func:`partita.plan`.

    Args:
        model: A built-in name, a model to be estimated, a file, or the graph itself.
        on_progress: Called with what is tried.
        **options: The fields of :class:`EstimateRequest`: the options of ``partita estimate``.

    Raises:
        InvalidInputError: There is no such model, cluster or option.
        InfeasibleError: The rules leave no plan that could be tried, or a large transformer does
            not fit.
    """
    return estimate_request(make(EstimateRequest, model=model, **options), on_progress)


def estimate_request(
    request: EstimateRequest, on_progress: OnProgress = silent
) -> "Estimate | LargePlanResult":
    """Answer what a request asks for; see :func:`estimate`."""
    if (large := large_shape(request, request.model)) is not None:
        from partita.flows.large import LargeFields, plan_large  # noqa: PLC0415 (where it is named)

        return plan_large(part(LargeFields, request), large, on_progress)
    on_progress(_name(request.model))
    catalogue = catalogue_of(request)
    base = None if is_of_zoo(request.model) else read_graph(request.model, may_estimate=True)
    cluster = changed_cluster(base, read_cluster(request)[0], request)
    larger = _larger(cluster, request, catalogue)
    question = _question(base, _graph_at(base, request, cluster, catalogue), request)
    question = replace(question, cluster_at=lambda n: found[1] if (found := larger(n)) else None)
    if not brings_limits(base, request):
        objective = with_usual_reserve(question.objective, cluster, request)
        question = replace(question, objective=objective)
    report = fit(question, progress=on_progress)
    return Estimate(
        report=report,
        commands=tuple(_command(request, question, change, larger) for change in report.changes),
        plan_command=_plan_command(request, report),
        remarks=objective_remarks(request, report.problem.graph),
    )


def _name(model: Model) -> str:
    if isinstance(model, str):
        return model
    whole = model.problem if isinstance(model, Solution) else model
    return whole.name if isinstance(whole, Graph) else whole.graph.name


def is_of_zoo(model: Model) -> bool:
    """Return whether an example is a model, too, which is then estimated; not without torch."""
    if not isinstance(model, str) or model not in EXAMPLES:
        return False
    try:
        from partita.models.zoo import MODELS  # noqa: PLC0415 (imports torch)
    except ModuleNotFoundError:
        return False
    return model in MODELS


def _graph_at(
    base: Graph | Problem | None, request: EstimateRequest, cluster: Cluster, catalogue: Catalogue
) -> Callable[[int], Graph]:
    """Return a function that gives the graph for a microbatch size; 0 = the usual one."""
    if base is None:
        assert isinstance(request.model, str)
        return estimated_graphs(
            request.model, request, request.mode, cluster, catalogue, seed=request.seed
        )
    refuse_source_options(_name(request.model), request)
    if request.seed:
        raise InvalidInputError(
            f"{_name(request.model)!r} is a graph with its own figures; --seed is for models that "
            "are estimated"
        )
    graph = base if isinstance(base, Graph) else base.graph
    return lambda _: graph


def _question(
    base: Graph | Problem | None, graph_at: Callable[[int], Graph], request: EstimateRequest
) -> Question:
    """Return what is asked, but for the cluster."""
    planner = planner_choice(
        DEFAULT_PLANNER,
        (),
        {"time_limit": request.time_limit, "iterations": request.iterations},
    ).function()
    start = base.objective if isinstance(base, Problem) else Objective()
    size, count, batch = request.microbatch_size, request.microbatches, request.batch_size
    if batch is not None and count is not None:
        size = size or max(1, batch // count)
        if size * count != batch:
            raise InvalidInputError(
                f"--batch-size {batch} cannot be {count} microbatches of {size} samples"
            )
    is_free = size is None and batch is None and count is None
    if size is None:
        usual = graph_at(0).batch_size
        size = usual if batch is None else usual_size(usual, batch)
    if batch is None and count is not None:
        batch = count * size
    if batch is not None and batch % size:
        raise InvalidInputError(f"--batch-size {batch} cannot be microbatches of {size} samples")
    own = base.rules if isinstance(base, Problem) else ()
    return Question(
        graph_at=graph_at,
        cluster_at=lambda _: None,
        objective=changed_objective(start, request),
        start=Setting(
            microbatch_size=size, recompute=request.recomputes_blocks, shard=Shard(request.shard)
        ),
        batch_size=batch,
        is_free=is_free,
        rules=(*own, *rules_of(request)),
        search=planner if Shard(request.shard) is Shard.NONE else None,
    )


def _larger(cluster: Cluster, request: EstimateRequest, catalogue: Catalogue) -> Growth:
    """Return how a cluster grows.

    A shorthand of one group fills its host up to eight devices, then gets more hosts; any other
    cluster gets hosts like those of its most frequent type.
    """
    main = [cluster.devices[index] for index in main_devices_of(cluster)]
    types = [device.type for device in main]
    usual = max(dict.fromkeys(types), key=types.count)
    hosts = [device.host for device in main if device.type == usual]
    each = max(hosts.count(host) for host in set(hosts))
    groups = _groups(cluster, request)

    @cache
    def grown(times: int) -> tuple[list[str], Cluster] | None:
        if times == 0:
            return [], cluster
        if request.devices is not None or not usual:
            return None
        if len(groups) == 1:
            room = catalogue.device_type(usual).host_max_devices or USUAL_HOST
            text = write_shorthand([_more(groups[0], times, min(room, USUAL_HOST))])
            found = parse_cluster(
                text, read_text, catalogue, bandwidth=request.bandwidth, latency=request.latency
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


def _groups(cluster: Cluster, request: EstimateRequest) -> tuple[HostGroup, ...]:
    """Return the groups of the shorthand that was given; none where a file says the cluster."""
    if isinstance(request.cluster, Cluster):
        return ()
    try:
        groups = parse_shorthand(request.cluster or DEFAULT_CLUSTER)
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


def _command(request: EstimateRequest, question: Question, change: Change, larger: Growth) -> str:
    """Return the command that tries a change: the options as given, with those that differ."""
    setting, start = change.setting, question.start
    grown = larger(setting.growth)
    added = [] if grown is None else grown[0]
    dropped = (*_CHANGED, "cluster") if "--cluster" in added else _CHANGED
    words = ["partita", "estimate", _name(request.model), *arguments_of(request, without=dropped)]
    words += added
    same_size = setting.microbatch_size == start.microbatch_size
    if not same_size or request.microbatch_size is not None:
        words += ["--microbatch-size", str(setting.microbatch_size)]
    if not same_size or setting.growth or question.batch_size is not None:
        words += ["--batch-size", str(change.samples)]
    if setting.recompute:
        words.append("--recompute")
    if setting.shard is not Shard.NONE:
        words += ["--shard", setting.shard.value]
    return shlex.join(words)


def _plan_command(request: EstimateRequest, report: FitReport) -> str:
    """Return the command that searches the same problem and writes the plan; empty = none does.

    A name that an example has, too, means the example there.
    """
    if report.searched is None or is_of_zoo(request.model):
        return ""
    words = ["partita", "plan", _name(request.model)]
    return shlex.join(words + arguments_of(request, without=("model", "shard", "seed")))
