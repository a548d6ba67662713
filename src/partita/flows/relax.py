"""The least changes that make an infeasible problem feasible.

Along each axis the smallest change is searched: a larger share of the memory or more of it, smaller
microbatches, recomputation, a rule left out, more devices. Every change that is reported was made
as its arguments say, and the changed problem solved by the same planner.

The memory is scaled on all devices alike. A plan for plenty of memory says what it needs itself,
so that a planner whose plans do not depend on the memory is asked four times; otherwise the least
factor is found by halving. A planner that finds a plan with some memory and none
with more is taken at its word: the factor is one that works, and none is known below it.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from partita.catalogue.catalogue import Catalogue, load_catalogue
from partita.catalogue.what_if import scale_memory, what_if
from partita.core.cluster import Cluster
from partita.core.graph import Graph, SampleUnit
from partita.core.metrics import MemoryRule
from partita.core.plan import Plan
from partita.core.problem import Metric, Mode, Problem
from partita.core.rules import Rule
from partita.core.solution import Solution
from partita.cost.durations import cluster_devices
from partita.cost.judge import measure
from partita.cost.memory import peak_memory
from partita.errors import InfeasibleError, InvalidInputError
from partita.flows.least import least_number
from partita.planners.pipeline import main_devices_of
from partita.profiler.estimate.recompute import is_recomputed, with_recomputation
from partita.program.lower import lower
from partita.units import format_bytes

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


def least_change(
    problem: Problem, planner: Callable[[Problem], Solution], ways: Ways | None = None
) -> Relaxation | None:
    """Return the first of ``relaxations``; None where nothing that is tried helps."""
    return next(relaxations(problem, planner, ways), None)


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
    search = _Search(problem, planner, ways or Ways())
    is_found = False
    for tries in (search.memory, search.leaner, search.unruled, search.enlarged):
        for change in tries():
            is_found = True
            yield change
    if not is_found and problem.rules:
        for change in relaxations(replace(problem, rules=()), planner, ways):
            words = f"{change.words}, {_without(problem.rules)}"
            yield replace(change, words=words, without=problem.rules)


@dataclass(frozen=True, eq=False)
class _Search:
    """Tries changes of one problem with one planner."""

    problem: Problem
    planner: Callable[[Problem], Solution]
    ways: Ways

    def solved(self, problem: Problem, *, last: bool = False) -> Solution | None:
        """Return what the planner finds for a changed problem; None = nothing, or it is too late.

        Args:
            problem: The changed problem.
            last: Whether to try it all the same when it is too late.
        """
        if not last and self.ways.stop():
            return None
        try:
            return self.planner(problem)
        except (InfeasibleError, InvalidInputError):
            return None

    def memory(self) -> Iterator[Relaxation]:
        """Yield the least memory of every device, as a share of it where that is enough."""
        factor = self.enough_memory()
        if factor is not None:
            yield from filter(None, [self.more_memory(factor)])

    def more_memory(self, factor: float) -> Relaxation | None:
        """Return a change to a factor on the memory, in few digits."""
        share = self.problem.objective.memory_factor
        for text in self.texts(share * factor):
            if float(text) > 1:
                break
            objective = replace(self.problem.objective, memory_factor=float(text))
            solution = self.solved(replace(self.problem, objective=objective), last=True)
            if solution is not None:
                return Relaxation(
                    words=f"{text} of the memory instead of {share:g}",
                    arguments=("--memory-factor", text),
                    solution=solution,
                )
        for text in self.texts(factor):
            solution = self.solved(scaled_memory(self.problem, float(text)), last=True)
            if solution is not None:
                return Relaxation(
                    words=f"{text} times the memory{_memory_words(self.problem, float(text))}",
                    arguments=("--what-if", f"memory={text}x"),
                    solution=solution,
                )
        return None

    def texts(self, value: float) -> list[str]:
        """Return a number in few digits, and larger ones by a step of the precision each."""
        steps = (value * (1 + self.ways.precision) ** step for step in range(MOST_STEPS))
        return [next(rounded_up(number)) for number in steps]

    def enough_memory(self) -> float | None:
        """Return a factor on the memory with which a plan is found, the least to the precision."""
        unlimited = self.solved(scaled_memory(self.problem, PLENTY))
        if unlimited is None:
            return None
        low, high = 1.0, PLENTY
        middle = needed_memory(self.problem, unlimited.plan, PLENTY)
        is_first = True
        while True:
            found = self.solved(scaled_memory(self.problem, middle))
            if found is None:
                low = middle
            else:
                high = min(middle, needed_memory(self.problem, found.plan, middle))
            if high <= low * (1 + 2 * self.ways.precision) or self.ways.stop():
                return high
            # The first plan may be all that the planner ever finds: look right below it first.
            below = high * (1 - self.ways.precision)
            middle = below if is_first and found is not None else math.sqrt(low * high)
            is_first = False

    def leaner(self) -> Iterator[Relaxation]:
        """Yield smaller microbatches, and recomputation; both together where neither is enough."""
        alone = [change for change in (self.smaller(), self.recomputed()) if change is not None]
        yield from alone
        if not alone and self.can_recompute:
            yield from filter(None, [self.smaller(again=True)])

    @cached_property
    def can_recompute(self) -> bool:
        """Whether recomputation changes what a plan needs."""
        graph, objective = self.problem.graph, self.problem.objective
        ours = objective.metric.row.memory is not MemoryRule.METRIC
        trains = objective.mode is Mode.TRAINING and ours
        return trains and not is_recomputed(graph) and with_recomputation(graph) is not graph

    def smaller(self, *, again: bool = False) -> Relaxation | None:
        """Return the largest smaller microbatch that cuts a step of as many samples evenly.

        Args:
            again: Whether blocks are computed again, too.
        """
        problem, size = self.problem, self.problem.microbatch_size
        counted = problem.graph.sample_unit is SampleUnit.SAMPLE
        if problem.objective.metric is not Metric.THROUGHPUT or not counted:
            return None
        samples = problem.microbatches * size
        for less in (number for number in range(size - 1, 0, -1) if samples % number == 0):
            count = samples // less
            objective = replace(problem.objective, microbatch_size=less, microbatches=count)
            graph = problem.graph if self.ways.graph_at is None else self.ways.graph_at(less)
            graph = with_recomputation(graph) if again else graph
            solution = self.solved(replace(problem, graph=graph, objective=objective))
            if solution is None:
                continue
            words = f"{count} microbatches of {less} instead of {problem.microbatches} of {size}"
            arguments: tuple[str, ...]
            arguments = ("--microbatch-size", str(less), "--microbatches", str(count))
            if again:
                words, arguments = f"{words}, and {RECOMPUTED}", (*arguments, "--recompute")
            return Relaxation(words=words, arguments=arguments, solution=solution)
        return None

    def recomputed(self) -> Relaxation | None:
        """Return recomputation of every block, if that is enough."""
        if not self.can_recompute:
            return None
        solution = self.solved(replace(self.problem, graph=with_recomputation(self.problem.graph)))
        if solution is None:
            return None
        return Relaxation(words=RECOMPUTED, arguments=("--recompute",), solution=solution)

    def unruled(self) -> Iterator[Relaxation]:
        """Yield one rule to leave out, else all of them, if that is enough."""
        rules = self.problem.rules
        choices: list[tuple[Rule, ...]] = [(rule,) for rule in rules]
        choices += [rules] if len(rules) > 1 else []
        for dropped in choices:
            words = _without(dropped)
            kept = tuple(rule for rule in rules if rule not in dropped)
            solution = self.solved(replace(self.problem, rules=kept))
            if solution is not None:
                yield Relaxation(words=words, without=dropped, solution=solution)
                return

    def enlarged(self) -> Iterator[Relaxation]:
        """Yield the fewest more devices of the most frequent type, if that is enough."""
        cluster = self.problem.cluster
        found: dict[int, Solution | None] = {}
        name = _usual_type(cluster)

        def is_enough(number: int) -> bool:
            larger = self._larger(number, name)
            assert larger is not None
            found[number] = self.solved(replace(self.problem, cluster=larger))
            return found[number] is not None

        def exists(number: int) -> bool:
            return self._larger(number, name) is not None

        number = least_number(is_enough, exists)
        solution = found.get(number or 0)
        if solution is not None:
            yield Relaxation(
                words=f"{number} more {name}",
                arguments=("--what-if", f"+{number}x{name}"),
                solution=solution,
            )

    def _larger(self, number: int, name: str) -> Cluster | None:
        """Return the cluster with more devices of a type; None where there cannot be so many."""
        cluster = self.problem.cluster
        if number > MOST_GROWTH * len(cluster):
            return None
        try:
            return what_if(cluster, f"+{number}x{name}", self.ways.catalogue or load_catalogue())
        except InvalidInputError:
            return None


def _without(rules: Sequence[Rule]) -> str:
    return f"without {' and '.join(map(str, rules))}"


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
        peak = peak_memory(problem, plan, lower(problem, plan))
        limit = problem.cluster.memory_bytes[cluster_devices(problem, plan.devices)]
        need = float(np.max(peak / (limit * problem.objective.memory_factor)))
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
