"""Does a model fit on a cluster, what would it need, and what is the least that makes it fit.

Plans are tried in the one cost model: equal pipelines and sharded data parallelism
(``fit_plans``). Where none fits, changes are searched along each axis, the smallest first: a
smaller microbatch, recomputation, sharding of replicas, more devices; then pairs of these. Every
change that is reported was tried with a graph of its own microbatch size.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import count
from typing import Any

from partita.bounds import lower_bound
from partita.core.cluster import Cluster
from partita.core.graph import Graph
from partita.core.plan import Shard
from partita.core.problem import DEFAULT_MICROBATCHES, Mode, Objective, Problem
from partita.core.rules import Rule
from partita.core.solution import Solution
from partita.cost.predict import simulate
from partita.cost.tables import held_bytes
from partita.errors import InfeasibleError, InvalidInputError
from partita.flows.fit_plans import SHARDED, Trial, is_hopeless, shapes, try_shape
from partita.flows.least import least_number
from partita.flows.summary import estimate_basis
from partita.planners.pipeline import main_devices_of
from partita.profiler.estimate.recompute import is_recomputed, with_recomputation


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What a set of plans is tried with.

    Attributes:
        microbatch_size: Samples in a microbatch.
        recompute: Whether blocks keep their inputs alone.
        shard: What replicas divide at least.
        growth: How often the cluster was enlarged.
    """

    microbatch_size: int
    recompute: bool = False
    shard: Shard = Shard.NONE
    growth: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What is asked.

    Attributes:
        graph_at: Returns the model, without recomputation, as it is for a microbatch size.
        cluster_at: Returns the cluster enlarged so many times; None = no further.
        objective: Mode, schedule, memory factor, optimizer; microbatches are set by the setting.
        start: What is asked for.
        batch_size: Samples of a step; None = as many microbatches as devices, 8 at the least.
        rules: Where ops must and must not run.
    """

    graph_at: Callable[[int], Graph]
    cluster_at: Callable[[int], Cluster | None]
    objective: Objective
    start: Setting
    batch_size: int | None = None
    rules: tuple[Rule, ...] = ()

    def samples(self, cluster: Cluster) -> int:
        """Return the samples of a step on a cluster."""
        if self.batch_size is not None:
            return self.batch_size
        devices = len(main_devices_of(cluster))
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
    """

    problem: Problem
    trials: tuple[Trial, ...]
    refusals: tuple[str, ...] = ()
    changes: tuple[Change, ...] = ()

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
        progress: Told what is tried.

    Raises:
        InvalidInputError: The batch cannot be cut into microbatches, or no plan can be tried.
    """
    progress("plans as asked")
    problem = problem_of(question, question.start)
    trials, refusals = try_all(problem, question.start.shard)
    if not trials:
        error = InfeasibleError if problem.rules else InvalidInputError
        raise error(f"no plan can be tried: {refusals[0]}")
    ranked = sorted((timed(trial) for trial in trials), key=_rank)
    report = FitReport(problem=problem, trials=tuple(ranked), refusals=tuple(refusals))
    if report.fits:
        return report
    changes = _Search(question, problem, progress).changes()
    return replace(report, changes=tuple(changes))


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
    size, samples = setting.microbatch_size, question.samples(cluster)
    if samples % size:
        raise InvalidInputError(
            f"a batch of {samples} samples cannot be cut into microbatches of {size}; "
            "choose a divisor"
        )
    graph = question.graph_at(graph_size or size)
    if setting.recompute:
        graph = with_recomputation(graph)
    objective = replace(question.objective, microbatches=samples // size, microbatch_size=size)
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
    return (False, trial.step_s) if trial.fits else (True, trial.fullness)


@dataclass(eq=False)
class _Search:
    """Looks for the smallest changes along each axis."""

    question: Question
    problem: Problem
    progress: Callable[[str], None]
    fitting: dict[tuple[Setting, bool], bool] = field(default_factory=dict)

    def changes(self) -> list[Change]:
        """Return the smallest change along each axis; pairs of axes where one is not enough."""
        start = self.question.start
        alone = [self.smaller(start), self.recomputed(start), self.sharded(start)]
        found = [setting for setting in alone if setting is not None]
        more = self.enlarged(start)
        if not found:
            found += self.pairs(start)
        found += [] if more is None else [more]
        if not found or found == [more]:
            found += self.pairs_with_devices(start, more)
        return [change for setting in found if (change := self.change(setting)) is not None]

    def pairs(self, start: Setting) -> list[Setting]:
        """Return changes of two kinds on the same devices."""
        both = [self.smaller(replace(start, recompute=True)) if self.can_recompute else None]
        levels = self.levels(start)
        both += [next(filter(None, (self.smaller(replace(start, shard=s)) for s in levels)), None)]
        both += [self.sharded(replace(start, recompute=True)) if self.can_recompute else None]
        return [setting for setting in both if setting is not None]

    def pairs_with_devices(self, start: Setting, alone: Setting | None) -> list[Setting]:
        """Return changes that need fewer devices more than adding devices alone does."""
        others = [replace(start, recompute=True)] if self.can_recompute else []
        others += [replace(start, shard=level) for level in self.levels(start)[-1:]]
        limit = None if alone is None else alone.growth
        found = [self.enlarged(other, below=limit) for other in others]
        least = list(self.sizes(start))[-1:]
        smallest = [self.enlarged(replace(start, microbatch_size=n), below=limit) for n in least]
        found += [self.smaller(replace(start, growth=s.growth)) for s in smallest if s is not None]
        return [setting for setting in found if setting is not None]

    @cached_property
    def can_recompute(self) -> bool:
        """Whether recomputation would change anything."""
        graph = self.problem.graph
        trains = self.question.objective.mode is Mode.TRAINING
        return trains and not is_recomputed(graph) and with_recomputation(graph) is not graph

    def levels(self, setting: Setting) -> list[Shard]:
        """Return the levels of sharding above that of a setting."""
        if self.question.objective.mode is not Mode.TRAINING:
            return []
        levels = list(Shard)
        return levels[levels.index(setting.shard) + 1 :]

    def sizes(self, setting: Setting) -> Iterator[int]:
        """Return smaller microbatches that cut the batch evenly, the largest first."""
        cluster = self.question.cluster_at(setting.growth) or self.problem.cluster
        samples = self.question.samples(cluster)
        smaller = range(setting.microbatch_size - 1, 0, -1)
        return (size for size in smaller if samples % size == 0)

    def smaller(self, setting: Setting) -> Setting | None:
        """Return the setting with the largest smaller microbatch that fits.

        Sizes are looked through with scaled figures; one that seems to fit is tried exactly.
        """
        for size in self.sizes(setting):
            changed = replace(setting, microbatch_size=size)
            if self.is_fit(changed, exact=False) and self.is_fit(changed):
                return changed
        return None

    def recomputed(self, setting: Setting) -> Setting | None:
        """Return the setting with recomputation, if that fits."""
        changed = replace(setting, recompute=True)
        return changed if self.can_recompute and self.is_fit(changed) else None

    def sharded(self, setting: Setting) -> Setting | None:
        """Return the setting with the lowest level of sharding that fits."""
        changed = (replace(setting, shard=level) for level in self.levels(setting))
        return next((option for option in changed if self.is_fit(option)), None)

    def enlarged(self, setting: Setting, below: int | None = None) -> Setting | None:
        """Return the setting with the fewest more devices that fits.

        Clusters whose memory together is less than weights, gradients and optimizer state are not
        looked at.
        """
        found = least_number(
            lambda growth: self.is_fit(replace(setting, growth=growth)),
            lambda growth: self.question.cluster_at(growth) is not None,
            first=next(growth for growth in count(1) if self.has_room(growth)),
        )
        if found is None or (below is not None and found >= below):
            return None
        return replace(setting, growth=found)

    def has_room(self, growth: int) -> bool:
        """Return whether an enlarged cluster could hold once what does not depend on the plan.

        Where the cluster cannot grow any further it is said to.
        """
        cluster = self.question.cluster_at(growth)
        if cluster is None:
            return True
        table, objective = self.problem.graph.parameters, self.question.objective
        held = float(held_bytes(table, objective).total.sum())
        memory = cluster.memory_bytes[main_devices_of(cluster)] * objective.memory_factor
        return held <= float(memory.sum())

    def is_fit(self, setting: Setting, *, exact: bool = True) -> bool:
        """Return whether any shape fits with a setting."""
        key = (setting, exact)
        if key not in self.fitting:
            self.progress(", ".join(self.words(setting)))
            self.fitting[key] = any(trial.fits for trial in self.trials(setting, exact=exact))
        return self.fitting[key]

    def trials(self, setting: Setting, *, exact: bool) -> Iterator[Trial]:
        """Try the shapes of a setting that may fit; none where its batch cannot be cut."""
        size = None if exact else self.question.start.microbatch_size
        try:
            problem = problem_of(self.question, setting, graph_size=size)
        except InvalidInputError:
            return
        for shape in shapes(problem, setting.shard):
            if problem.microbatches % shape.replicas or is_hopeless(problem, shape):
                continue
            try:
                trial = try_shape(problem, shape)
            except InfeasibleError:
                continue
            yield trial

    def change(self, setting: Setting) -> Change | None:
        """Return a change with its fastest plan that fits."""
        fitting = [timed(trial) for trial in self.trials(setting, exact=True) if trial.fits]
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
