"""The least changes with which something fits: one search, for ``plan`` and for ``estimate``.

A ``Setting`` says what is changed of a problem. The ``Search`` finds, along each axis, the smallest
change with which an attempt succeeds: for ``estimate`` an attempt is a set of equal pipelines
(``fit``), for ``plan`` the planner itself (``relaxations``, below). Every change that is reported
was made as its arguments say, and its problem solved.

The memory is scaled on all devices alike. A plan for plenty of memory says what it needs itself,
so that a planner whose plans do not depend on the memory is asked four times; otherwise the least
factor is found by halving. A planner that finds a plan with some memory and none
with more is taken at its word: the factor is one that works, and none is known below it.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import count
from typing import Generic, TypeVar

from partita.catalogue.catalogue import Catalogue, load_catalogue
from partita.catalogue.what_if import scale_memory, what_if
from partita.core.cluster import Cluster
from partita.core.graph import Graph, SampleUnit
from partita.core.metrics import MemoryRule
from partita.core.plan import Plan, Shard
from partita.core.problem import Metric, Mode, Problem
from partita.core.rules import Rule
from partita.core.solution import Solution
from partita.cost.judge import measure, peaks
from partita.errors import InfeasibleError, InvalidInputError
from partita.planners.pipeline import main_devices_of
from partita.profiler.estimate.recompute import is_recomputed, with_recomputation
from partita.units import format_bytes

ONE_BY_ONE = 12
"""Numbers that are tried one by one; more are halved first."""
PLENTY = 2.0**30
"""A factor on the memory at which memory is no limit any more."""
PRECISION = 1e-3
"""How far above the least factor on the memory the reported one may be, relative; see ``Ways``."""
EXACT = 1e-7
"""How exactly it is known what a plan needs, relative."""
DIGITS = 4
"""Digits of a factor in an argument; it is rounded up."""
RECOMPUTED = "recomputation of the activations of every block"
MOST_STEPS = 4
"""Factors on the memory that are tried once more as they are printed, a step larger each."""
MOST_GROWTH = 2
"""Times as many devices as there are, which are tried at most."""

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What a problem is solved with.

    Attributes:
        microbatch_size: Samples in a microbatch.
        recompute: Whether blocks keep their inputs alone.
        shard: What replicas divide at least.
        growth: How often the cluster was enlarged.
        memory: Factor on the memory of every device.
        memory_factor: Share of the memory that plans may use; None = as it was asked.
        without: Rules that are left out.
    """

    microbatch_size: int
    recompute: bool = False
    shard: Shard = Shard.NONE
    growth: int = 0
    memory: float = 1.0
    memory_factor: float | None = None
    without: tuple[Rule, ...] = ()


def _always(_: object) -> bool:
    return True


@dataclass(eq=False, kw_only=True)
class Search(Generic[_T]):
    """Finds the smallest change along each axis with which an attempt succeeds.

    Attributes:
        problem: The problem as it was asked.
        problem_at: Returns the problem of a setting; raises InvalidInputError where there is none.
        cluster_at: Returns the cluster enlarged so many times; None = no further.
        attempt: Returns what was found for a setting and its problem; None where nothing fits.
        seems_fit: Whether a setting is worth an attempt, by figures that are quick to get.
        has_room: Whether an enlarged cluster could hold once what does not depend on the plan.
        stop: Whether to begin nothing more.
        found: What the attempts gave, by setting.
    """

    problem: Problem
    problem_at: Callable[[Setting], Problem]
    cluster_at: Callable[[int], Cluster | None]
    attempt: Callable[[Setting, Problem], _T | None]
    seems_fit: Callable[[Setting], bool] = _always
    has_room: Callable[[int], bool] = _always
    stop: Callable[[], bool] = lambda: False
    found: dict[Setting, _T | None] = field(default_factory=dict)

    def tried(self, setting: Setting, *, last: bool = False) -> _T | None:
        """Return what an attempt gives; None = nothing, or it is too late.

        Args:
            setting: What is changed.
            last: Whether to try it all the same when it is too late.
        """
        if setting not in self.found:
            if not last and self.stop():
                return None
            try:
                self.found[setting] = self.attempt(setting, self.problem_at(setting))
            except (InfeasibleError, InvalidInputError):
                self.found[setting] = None
        return self.found[setting]

    def is_fit(self, setting: Setting) -> bool:
        """Return whether an attempt succeeds."""
        return self.tried(setting) is not None

    def sizes(self, setting: Setting) -> Iterator[int]:
        """Yield smaller microbatches that cut a step of as many samples evenly, largest first."""
        problem = self.problem_at(setting)
        counted = problem.graph.sample_unit is SampleUnit.SAMPLE
        if problem.objective.metric is not Metric.THROUGHPUT or not counted:
            return
        samples = problem.microbatches * problem.microbatch_size
        for size in range(setting.microbatch_size - 1, 0, -1):
            if samples % size == 0:
                yield size

    def smaller(self, setting: Setting) -> Setting | None:
        """Return the setting with the largest smaller microbatch that fits."""
        changed = (replace(setting, microbatch_size=size) for size in self.sizes(setting))
        return next((each for each in changed if self.seems_fit(each) and self.is_fit(each)), None)

    @cached_property
    def can_recompute(self) -> bool:
        """Whether recomputation changes what a plan needs."""
        graph, objective = self.problem.graph, self.problem.objective
        ours = objective.metric.row.memory is not MemoryRule.METRIC
        trains = objective.mode is Mode.TRAINING and ours
        return trains and not is_recomputed(graph) and with_recomputation(graph) is not graph

    def recomputed(self, setting: Setting) -> Setting | None:
        """Return the setting with recomputation, if that fits."""
        changed = replace(setting, recompute=True)
        return changed if self.can_recompute and self.is_fit(changed) else None

    def levels(self, setting: Setting) -> list[Shard]:
        """Return the levels of sharding above that of a setting."""
        if self.problem.objective.mode is not Mode.TRAINING:
            return []
        levels = list(Shard)
        return levels[levels.index(setting.shard) + 1 :]

    def sharded(self, setting: Setting) -> Setting | None:
        """Return the setting with the lowest level of sharding that fits."""
        changed = (replace(setting, shard=level) for level in self.levels(setting))
        return next((each for each in changed if self.is_fit(each)), None)

    def unruled(self, setting: Setting) -> Setting | None:
        """Return the setting with one rule left out, else all of them, if that fits."""
        rules = tuple(rule for rule in self.problem.rules if rule not in setting.without)
        choices: list[tuple[Rule, ...]] = [(rule,) for rule in rules]
        choices += [rules] if len(rules) > 1 else []
        changed = (replace(setting, without=(*setting.without, *each)) for each in choices)
        return next((each for each in changed if self.is_fit(each)), None)

    def enlarged(self, setting: Setting, below: int | None = None) -> Setting | None:
        """Return the setting with the fewest more devices that fits.

        Clusters without room are not looked at.

        Args:
            setting: What else is changed.
            below: Growth at which it is no longer of use; None = any is.
        """
        found = least_number(
            lambda growth: self.is_fit(replace(setting, growth=growth)),
            lambda growth: self.cluster_at(growth) is not None,
            first=next(
                growth
                for growth in count(1)
                if self.cluster_at(growth) is None or self.has_room(growth)
            ),
        )
        if found is None or (below is not None and found >= below):
            return None
        return replace(setting, growth=found)


def least_number(
    is_enough: Callable[[int], bool], exists: Callable[[int], bool], *, first: int = 1
) -> int | None:
    """Return the least number that is enough; None where none that exists is.

    The number doubles until it is enough; then those in between are tried, by halves while they
    are many, else one by one. More need not always be enough where less is: then the number that
    is returned is enough, but may not be the least.

    Args:
        is_enough: Whether a number is.
        exists: Whether there is such a number; not above one that does not exist.
        first: Where to begin, 1 or more.
    """
    low, high = first - 1, first
    while exists(high):
        if is_enough(high):
            break
        low, high = high, 2 * high
    else:
        return None
    while high - low > ONE_BY_ONE:
        middle = (low + high) // 2
        if is_enough(middle):
            high = middle
        else:
            low = middle
    return next((number for number in range(low + 1, high) if is_enough(number)), high)


@dataclass(frozen=True, kw_only=True, eq=False)
class Relaxation:
    """A change with which the planner finds a plan.

    Attributes:
        words: What is changed, for people.
        arguments: What to add to the command line.
        without: Rules to leave out.
        solution: The plan that was found, with the changed problem.
    """

    words: str
    arguments: tuple[str, ...] = ()
    without: tuple[Rule, ...] = ()
    solution: Solution

    def to_json(self) -> dict[str, object]:
        """Return the change as JSON values."""
        return {
            "change": self.words,
            "arguments": list(self.arguments),
            "without": [str(rule) for rule in self.without],
            "value": self.solution.value,
        }


@dataclass(frozen=True, kw_only=True, eq=False)
class Ways:
    """What may be changed, besides what the problem itself says.

    Attributes:
        graph_at: Returns the model as it is for a microbatch size; None = its figures are scaled.
        catalogue: What is known of types of devices; None = the package's.
        precision: How far above the least factor on the memory the reported one may be, relative.
        stop: Whether to begin nothing more: what was found by then is reported.
    """

    graph_at: Callable[[int], Graph] | None = None
    catalogue: Catalogue | None = None
    precision: float = PRECISION
    stop: Callable[[], bool] = lambda: False


def relaxations(
    problem: Problem, planner: Callable[[Problem], Solution], ways: Ways | None = None
) -> Iterator[Relaxation]:
    """Yield the smallest change of each kind with which a planner solves a problem.

    In this order: memory, as a larger share of what there is if that is enough; smaller
    microbatches; recomputation, or both of these; a rule left out, or all of them; more devices.
    Where none of these is enough, the same without any rule.

    Args:
        problem: A problem that the planner finds infeasible.
        planner: The planner with its options bound.
        ways: What else is known.
    """
    changes = _PlannerChanges(problem, planner, ways or Ways())
    start = Setting(microbatch_size=problem.microbatch_size)
    bases = [start, replace(start, without=problem.rules)] if problem.rules else [start]
    is_found = False
    for base in bases:
        for setting in changes.settings(base):
            is_found = True
            yield changes.relaxation(setting)
        if is_found:
            return


class _PlannerChanges:
    """Changes of one problem that are tried with one planner."""

    def __init__(
        self, problem: Problem, planner: Callable[[Problem], Solution], ways: Ways
    ) -> None:
        self.problem, self.ways = problem, ways
        self.type = _usual_type(problem.cluster)
        self.search: Search[Solution] = Search(
            problem=problem,
            problem_at=self.problem_at,
            cluster_at=self.cluster_at,
            attempt=lambda _, changed: planner(changed),
            stop=ways.stop,
        )

    def problem_at(self, setting: Setting) -> Problem:
        """Return the problem of a setting."""
        problem, graph, objective = self.problem, self.problem.graph, self.problem.objective
        size, cluster = setting.microbatch_size, self.cluster_at(setting.growth)
        if cluster is None:
            raise InvalidInputError(f"there cannot be {setting.growth} more {self.type}")
        if size != problem.microbatch_size:
            samples = problem.microbatches * problem.microbatch_size
            objective = replace(objective, microbatch_size=size, microbatches=samples // size)
            graph = graph if self.ways.graph_at is None else self.ways.graph_at(size)
        if setting.memory_factor is not None:
            objective = replace(objective, memory_factor=setting.memory_factor)
        changed = replace(
            problem,
            graph=with_recomputation(graph) if setting.recompute else graph,
            cluster=cluster,
            objective=objective,
            rules=tuple(rule for rule in problem.rules if rule not in setting.without),
        )
        return changed if setting.memory == 1 else scaled_memory(changed, setting.memory)

    def cluster_at(self, growth: int) -> Cluster | None:
        """Return the cluster with so many more devices; None where there cannot be so many."""
        cluster = self.problem.cluster
        if growth == 0:
            return cluster
        if growth > MOST_GROWTH * len(cluster):
            return None
        try:
            change = f"+{growth}x{self.type}"
            return what_if(cluster, change, self.ways.catalogue or load_catalogue())
        except InvalidInputError:
            return None

    def settings(self, base: Setting) -> Iterator[Setting]:
        """Yield the smallest change of each kind, in their order."""
        search = self.search
        yield from filter(None, [self.more_memory(base)])
        alone = [search.smaller(base), search.recomputed(base)]
        yield from filter(None, alone)
        if alone == [None, None] and search.can_recompute:
            yield from filter(None, [search.smaller(replace(base, recompute=True))])
        yield from filter(None, [search.unruled(base)])
        yield from filter(None, [search.enlarged(base)])

    def more_memory(self, base: Setting) -> Setting | None:
        """Return the least memory of every device, as a share of it where that is enough."""
        factor = self.enough_memory(base)
        if factor is None:
            return None
        share = self.problem.objective.memory_factor
        shares = [float(text) for text in self.texts(share * factor)]
        choices = [replace(base, memory_factor=each) for each in shares if each <= 1]
        choices += [replace(base, memory=float(text)) for text in self.texts(factor)]
        return next((each for each in choices if self.search.tried(each, last=True)), None)

    def texts(self, value: float) -> list[str]:
        """Return a number in few digits, and larger ones by a step of the precision each."""
        steps = (value * (1 + self.ways.precision) ** step for step in range(MOST_STEPS))
        return [next(rounded_up(number)) for number in steps]

    def enough_memory(self, base: Setting) -> float | None:
        """Return a factor on the memory with which a plan is found, the least to the precision."""
        problem, precision = self.problem_at(base), self.ways.precision
        unlimited = self.search.tried(replace(base, memory=PLENTY))
        if unlimited is None:
            return None
        low, high = 1.0, PLENTY
        middle = needed_memory(problem, unlimited.plan, PLENTY)
        is_first = True
        while True:
            found = self.search.tried(replace(base, memory=middle))
            if found is None:
                low = middle
            else:
                high = min(middle, needed_memory(problem, found.plan, middle))
            if high <= low * (1 + 2 * precision) or self.ways.stop():
                return high
            # The first plan may be all that the planner ever finds: look right below it first.
            below = high * (1 - precision)
            middle = below if is_first and found is not None else math.sqrt(low * high)
            is_first = False

    def relaxation(self, setting: Setting) -> Relaxation:
        """Return a change that was found, in words and as arguments."""
        problem, solution = self.problem, self.search.found[setting]
        assert solution is not None  # it was tried
        words: list[str] = []
        arguments: list[str] = []
        if setting.memory_factor is not None:
            text = f"{setting.memory_factor:.{DIGITS}g}"
            words.append(f"{text} of the memory instead of {problem.objective.memory_factor:g}")
            arguments += ["--memory-factor", text]
        if setting.memory != 1:
            text = f"{setting.memory:.{DIGITS}g}"
            words.append(f"{text} times the memory{_memory_words(problem, setting.memory)}")
            arguments += ["--what-if", f"memory={text}x"]
        if setting.microbatch_size != problem.microbatch_size:
            size, number = setting.microbatch_size, solution.problem.microbatches
            before = f"{problem.microbatches} of {problem.microbatch_size}"
            words.append(f"{number} microbatches of {size} instead of {before}")
            arguments += ["--microbatch-size", str(size), "--microbatches", str(number)]
        if setting.recompute:
            words.append(RECOMPUTED)
            arguments.append("--recompute")
        if setting.growth:
            words.append(f"{setting.growth} more {self.type}")
            arguments += ["--what-if", f"+{setting.growth}x{self.type}"]
        said = [", and ".join(words)] if words else []
        if setting.without:
            said.append(f"without {' and '.join(map(str, setting.without))}")
        return Relaxation(
            words=", ".join(said),
            arguments=tuple(arguments),
            without=setting.without,
            solution=solution,
        )


def scaled_memory(problem: Problem, factor: float) -> Problem:
    """Return a problem with the memory of every device times a factor."""
    return replace(problem, cluster=scale_memory(problem.cluster, factor))


def needed_memory(problem: Problem, plan: Plan, enough: float) -> float:
    """Return the least factor on the memory with which a plan fits, to ``EXACT``.

    Args:
        problem: The problem.
        plan: A plan that does not fit, or just so.
        enough: A factor with which it fits.
    """
    if problem.objective.metric.row.memory is not MemoryRule.METRIC:
        need = peaks(problem, plan).fullness
        return min(max(need, 1.0 + EXACT), enough)
    low, high = 1.0, enough
    while high > low * (1 + EXACT):
        middle = math.sqrt(low * high)
        if measure(scaled_memory(problem, middle), plan).errors:
            low = middle
        else:
            high = middle
    return high


def rounded_up(value: float) -> Iterator[str]:
    """Yield a number in a few digits, below it by rounding errors at most, and those that follow.

    >>> next(rounded_up(1.23401))
    '1.235'
    """
    step = 10.0 ** (math.floor(math.log10(value)) + 1 - DIGITS)
    number = math.ceil(value / step * (1 - EXACT))
    while True:
        yield f"{number * step:.{DIGITS}g}"
        number += 10 ** (len(str(number)) - DIGITS)


def _memory_words(problem: Problem, factor: float) -> str:
    """Return what a device has and would have, where all have the same."""
    memory = {device.memory_bytes for device in problem.cluster.devices}
    if len(memory) > 1:
        return " of every device"
    has = memory.pop()
    return f", {format_bytes(has * factor)} instead of {format_bytes(has)} on every device"


def _usual_type(cluster: Cluster) -> str:
    """Return the most frequent type of the devices that planners use; the first of several."""
    types = [cluster.devices[index].type for index in main_devices_of(cluster)]
    return max(dict.fromkeys(types), key=types.count)
