"""Does a model fit on a cluster, what would it need, and what is the least that makes it fit.

Plans are tried in the one cost model: equal pipelines and sharded data parallelism
(``fit_plans``), and what the search of ``partita plan`` finds. Where none fits, changes are
searched along each axis, the smallest first: a smaller microbatch, recomputation, sharding of
replicas, more devices; then pairs of these. Every change that is reported was tried with a graph
of its own microbatch size.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from partita.bounds import lower_bound
from partita.core.cluster import Cluster
from partita.core.graph import Graph
from partita.core.plan import Shard
from partita.core.problem import DEFAULT_MICROBATCHES, Objective, Problem
from partita.core.rules import Rule
from partita.core.solution import Solution
from partita.cost.predict import simulate
from partita.cost.tables import held_bytes
from partita.errors import InfeasibleError, InvalidInputError
from partita.flows.fit_plans import SHARDED, Trial, is_hopeless, searched_trial, try_shape
from partita.flows.least_change import Search, Setting
from partita.flows.summary import estimate_basis
from partita.planners.equal_shapes import shapes
from partita.planners.pipeline import main_devices_of
from partita.profiler.estimate.recompute import with_recomputation


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What is asked.

    Attributes:
        graph_at: Returns the model, without recomputation, as it is for a microbatch size.
        cluster_at: Returns the cluster enlarged so many times; None = no further.
        objective: Mode, schedule, memory factor, optimizer; microbatches are set by the setting.
        start: What is asked for.
        batch_size: Samples of a step; None = 8 microbatches as ``partita plan`` has them; on more
            devices than asked a microbatch each at the least.
        is_free: Whether the samples of a step may be cut otherwise.
        rules: Where ops must and must not run.
        search: Searches for the best plan of what is asked; None = equal shapes alone are tried.
    """

    graph_at: Callable[[int], Graph]
    cluster_at: Callable[[int], Cluster | None]
    objective: Objective
    start: Setting
    batch_size: int | None = None
    is_free: bool = False
    rules: tuple[Rule, ...] = ()
    search: Callable[[Problem], Solution] | None = None

    def samples(self, cluster: Cluster, growth: int) -> int:
        """Return the samples of a step on a cluster that was enlarged so many times."""
        if self.batch_size is not None:
            return self.batch_size
        devices = len(main_devices_of(cluster)) if growth else 1
        return self.start.microbatch_size * devices * -(-DEFAULT_MICROBATCHES // devices)


@dataclass(frozen=True, kw_only=True, eq=False)
class Change:
    """A change that makes the model fit.

    Attributes:
        setting: With what.
        words: What is changed, a phrase each.
        samples: Samples of a step with it.
        trial: The fastest plan that fits.
    """

    setting: Setting
    words: tuple[str, ...]
    samples: int
    trial: Trial

    def to_json(self) -> dict[str, Any]:
        """Return the change as JSON values."""
        return {
            "change": list(self.words),
            "microbatch_size": self.setting.microbatch_size,
            "recompute": self.setting.recompute,
            "shard": self.setting.shard.value,
            "num_devices": len(self.trial.problem.cluster),
            "batch_size": self.samples,
            "trial": self.trial.to_json(),
        }


@dataclass(frozen=True, kw_only=True, eq=False)
class FitReport:
    """Whether a model fits, what was tried, and what would make it fit.

    Attributes:
        problem: The problem as it was asked.
        trials: What was tried, best first: fitting ones by their time, then the leanest.
        refusals: Shapes that could not be tried, and why.
        changes: The smallest changes that make it fit; empty where it fits.
        searched: The best plan of a search; None where none was asked for, or it found none.
    """

    problem: Problem
    trials: tuple[Trial, ...]
    refusals: tuple[str, ...] = ()
    changes: tuple[Change, ...] = ()
    searched: Solution | None = None

    @property
    def best(self) -> Trial:
        """The fastest plan that fits, or the one that is nearest to fitting."""
        return self.trials[0]

    @property
    def fits(self) -> bool:
        """Whether any plan fits."""
        return self.best.fits

    def to_json(self) -> dict[str, Any]:
        """Return everything as JSON values under stable keys."""
        return {
            "model": self.problem.graph.name,
            "cluster": self.problem.cluster.name,
            "fits": self.fits,
            "estimated": estimate_basis(self.problem.graph),
            "memory_factor": self.problem.objective.memory_factor,
            "batch_size": self.problem.microbatches * self.problem.microbatch_size,
            "best": self.best.to_json(),
            "trials": [trial.to_json() for trial in self.trials],
            "refusals": list(self.refusals),
            "changes": [change.to_json() for change in self.changes],
        }


def fit(question: Question, *, progress: Callable[[str], None] = lambda _: None) -> FitReport:
    """Return whether a model fits, and if it does not, the smallest changes that make it fit.

    Args:
        question: What is asked.
        progress: Called with what is tried.

    Raises:
        InvalidInputError: The batch cannot be cut into microbatches, or no plan can be tried.
    """
    progress("plans as asked")
    problem = problem_of(question, question.start)
    trials, refusals = try_all(problem, question.start.shard)
    searched = _searched(question, problem, progress)
    if not trials and searched is None:
        error = InfeasibleError if problem.rules else InvalidInputError
        raise error(f"no plan can be tried: {refusals[0]}")
    ranked = [timed(trial) for trial in trials]
    if searched is not None:  # first among equals: its plan is what partita plan writes
        ranked.insert(0, searched_trial(searched))
    report = FitReport(
        problem=problem,
        trials=tuple(sorted(ranked, key=_rank)),
        refusals=tuple(refusals),
        searched=searched,
    )
    if report.fits:
        return report
    changes = _TrialChanges(question, problem, progress).changes()
    return replace(report, changes=tuple(changes))


def _searched(
    question: Question, problem: Problem, progress: Callable[[str], None]
) -> Solution | None:
    """Return the best plan of the search; None where there is none, or no room for any."""
    if question.search is None or not _has_room(problem.graph, problem.cluster, problem.objective):
        return None
    progress("searching")
    try:
        return question.search(problem)
    except InfeasibleError:
        return None


def _has_room(graph: Graph, cluster: Cluster, objective: Objective) -> bool:
    """Return whether a cluster could hold once what does not depend on the plan."""
    held = float(held_bytes(graph.parameters, objective).total.sum())
    memory = objective.usable_bytes(cluster)[main_devices_of(cluster)]
    return held <= float(memory.sum())


def solution_of(trial: Trial) -> Solution:
    """Return the plan of a trial as a document."""
    plain = trial.shape.shard is Shard.NONE
    return Solution(
        problem=trial.problem,
        plan=trial.plan,
        metric=trial.problem.objective.metric,
        value=trial.step_s,
        unit="s",
        lower_bound=min(lower_bound(trial.problem), trial.step_s),
        planner="uniform" if plain else "",
        options={"stages": trial.shape.stages, "replicas": trial.shape.replicas} if plain else {},
    )


def problem_of(question: Question, setting: Setting, *, graph_size: int | None = None) -> Problem:
    """Return the problem of a setting.

    Args:
        question: What is asked.
        setting: With what.
        graph_size: Microbatch size of the graph whose figures are scaled; the setting's own if
            not given, so that nothing is scaled.

    Raises:
        InvalidInputError: The batch cannot be cut into microbatches, or the cluster cannot grow.
    """
    cluster = question.cluster_at(setting.growth)
    if cluster is None:
        raise InvalidInputError(f"the cluster cannot grow {setting.growth} times")
    size, samples = setting.microbatch_size, question.samples(cluster, setting.growth)
    if samples % size:
        raise InvalidInputError(
            f"a batch of {samples} samples cannot be cut into microbatches of {size}; "
            "choose a divisor"
        )
    graph = question.graph_at(graph_size or size)
    if setting.recompute:
        graph = with_recomputation(graph)
    objective = question.objective
    as_asked = not setting.growth and size == question.start.microbatch_size
    if not (question.is_free and as_asked):
        objective = replace(objective, microbatches=samples // size, microbatch_size=size)
    return Problem(graph=graph, cluster=cluster, objective=objective, rules=question.rules)


def try_all(problem: Problem, shard: Shard) -> tuple[list[Trial], list[str]]:
    """Return what all shapes need, and why some cannot be tried."""
    trials, refusals = [], []
    for shape in shapes(problem, shard):
        try:
            trials.append(try_shape(problem, shape))
        except (InvalidInputError, InfeasibleError) as exc:
            refusals.append(f"{shape.title}: {exc}")
    return trials, refusals


def timed(trial: Trial) -> Trial:
    """Return a trial with the time of its step."""
    stashes = trial.plan.stashes_weights
    timeline = simulate(trial.problem, trial.plan, period=stashes)
    return replace(trial, step_s=timeline.period_s if stashes else timeline.makespan_s)


def _rank(trial: Trial) -> tuple[bool, float]:
    return (False, trial.step_s) if trial.fits else (True, trial.peaks.fullness)


class _TrialChanges:
    """Changes of a question that are tried with equal pipelines and sharded data parallelism."""

    def __init__(
        self, question: Question, problem: Problem, progress: Callable[[str], None]
    ) -> None:
        self.question, self.problem, self.progress = question, problem, progress
        self.seeming: dict[Setting, bool] = {}
        self.search: Search[Trial] = Search(
            problem=problem,
            problem_at=lambda setting: problem_of(question, setting),
            cluster_at=question.cluster_at,
            attempt=self.fitting,
            seems_fit=self.seems_fit,
            has_room=self.has_room,
        )

    def changes(self) -> list[Change]:
        """Return the smallest change along each axis; pairs of axes where one is not enough."""
        start, search = self.question.start, self.search
        alone = [search.smaller(start), search.recomputed(start), search.sharded(start)]
        found = [setting for setting in alone if setting is not None]
        more = search.enlarged(start)
        if not found:
            found += self.pairs(start)
        found += [] if more is None else [more]
        if not found or found == [more]:
            found += self.pairs_with_devices(start, more)
        return [change for setting in found if (change := self.change(setting)) is not None]

    def pairs(self, start: Setting) -> list[Setting]:
        """Return changes of two kinds on the same devices."""
        search, leaner = self.search, replace(start, recompute=True)
        levels = [replace(start, shard=level) for level in search.levels(start)]
        both = [search.smaller(leaner) if search.can_recompute else None]
        both += [next(filter(None, map(search.smaller, levels)), None)]
        both += [search.sharded(leaner) if search.can_recompute else None]
        return [setting for setting in both if setting is not None]

    def pairs_with_devices(self, start: Setting, alone: Setting | None) -> list[Setting]:
        """Return changes that need fewer devices more than adding devices alone does."""
        search = self.search
        others = [replace(start, recompute=True)] if search.can_recompute else []
        others += [replace(start, shard=level) for level in search.levels(start)[-1:]]
        limit = None if alone is None else alone.growth
        found = [search.enlarged(other, below=limit) for other in others]
        least = list(search.sizes(start))[-1:]
        smallest = [search.enlarged(replace(start, microbatch_size=n), below=limit) for n in least]
        grown = [replace(start, growth=each.growth) for each in smallest if each is not None]
        found += map(search.smaller, grown)
        return [setting for setting in found if setting is not None]

    def has_room(self, growth: int) -> bool:
        """Return whether an enlarged cluster could hold once what does not depend on the plan."""
        cluster = self.question.cluster_at(growth)
        assert cluster is not None  # it was asked for before
        return _has_room(self.problem.graph, cluster, self.question.objective)

    def seems_fit(self, setting: Setting) -> bool:
        """Return whether any shape fits by figures that are scaled from the start's microbatch."""
        if setting not in self.seeming:
            size = self.question.start.microbatch_size
            try:
                problem = problem_of(self.question, setting, graph_size=size)
            except InvalidInputError:
                return False
            self.seeming[setting] = self.fitting(setting, problem) is not None
        return self.seeming[setting]

    def fitting(self, setting: Setting, problem: Problem) -> Trial | None:
        """Return the first shape that fits with a setting."""
        self.progress(", ".join(self.words(setting)))
        return next((trial for trial in _trials(setting, problem) if trial.fits), None)

    def change(self, setting: Setting) -> Change | None:
        """Return a change with its fastest plan that fits."""
        trials = _trials(setting, problem_of(self.question, setting))
        fitting = [timed(trial) for trial in trials if trial.fits]
        if not fitting:
            return None
        best = min(fitting, key=lambda trial: trial.step_s)
        return Change(
            setting=setting,
            words=tuple(self.words(setting)),
            samples=best.plan.samples,
            trial=best,
        )

    def words(self, setting: Setting) -> list[str]:
        """Return what a setting changes, for people."""
        start, result = self.question.start, []
        if setting.microbatch_size != start.microbatch_size:
            old = start.microbatch_size
            result.append(f"microbatches of {setting.microbatch_size} instead of {old}")
        if setting.recompute and not start.recompute:
            result.append("recompute the activations of every block")
        if setting.shard is not start.shard:
            result.append(f"shard {SHARDED[setting.shard]} over the replicas of a stage")
        cluster = self.question.cluster_at(setting.growth)
        if setting.growth and cluster is not None:
            result.append(f"{len(cluster)} devices instead of {len(self.problem.cluster)}")
        return result


def _trials(setting: Setting, problem: Problem) -> Iterator[Trial]:
    """Try the shapes of a setting that may fit."""
    for shape in shapes(problem, setting.shard):
        try:
            if is_hopeless(problem, shape):
                continue
            trial = try_shape(problem, shape)
        except (InvalidInputError, InfeasibleError):  # cannot be dealt, or breaks a rule
            continue
        yield trial
