"""Several planners on one problem, ranked by the same cost model."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from partita.core.problem import Metric, Problem
from partita.documents import read_text
from partita.errors import InfeasibleError, InvalidInputError
from partita.flows.fields import EffortFields, Model
from partita.flows.planner_choice import PlannerChoice, chosen_planners
from partita.flows.problem import PosedProblem, ProblemRequest, pose
from partita.flows.results import Result
from partita.flows.summary import Summary, summarise
from partita.planners.table import DEFAULT_PLANNER
from partita.requests import OnProgress, declare, make, silent

if TYPE_CHECKING:
    from partita.flows.energy_plan import EnergyColumns

DEFAULTS = tuple(dict.fromkeys((DEFAULT_PLANNER, "single", "uniform", "random")))


@dataclass(frozen=True, kw_only=True)
class CompareRequest(ProblemRequest, EffortFields):
    """A problem, and the planners to compare."""

    planner: tuple[str, ...] = declare(
        (),
        flags=("-p",),
        usual=", ".join(DEFAULTS),
        help="Planner with its argument after a colon; several times.",
    )
    option: tuple[str, ...] = declare((), flags=("-O",), help="Option k=v of all planners.")
    energy: bool = declare(
        False, help="Also show T_min, T* and joules per sample, by a model of the devices."
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """What one planner came to.

    Attributes:
        name: The planner, as it was asked for.
        summary: Its solution; None where it found nothing that fits.
        refusal: Why there is none.
    """

    name: str
    summary: Summary | None = None
    refusal: str = ""

    def to_json(self) -> dict[str, Any]:
        """Return the planner and its figures as JSON values."""
        figures = self.summary.to_json() if self.summary else {}
        return {"name": self.name, "refusal": self.refusal or None, **figures}


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Comparison(Result):
    """What several planners came to.

    Attributes:
        posed: The problem as it was asked.
        candidates: Best value first, those without a plan last.
        energy: By planner, what a model of the devices says of energy, where that was asked for.
        changes: By configuration of a trainer (``grid:FILE``), the settings that lead to the best.
    """

    posed: PosedProblem
    candidates: tuple[Candidate, ...]
    energy: "Mapping[str, EnergyColumns]" = field(default_factory=dict)
    changes: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    @property
    def problem(self) -> Problem:
        """The problem that was planned."""
        return self.posed.problem

    @property
    def best(self) -> Summary | None:
        """The first of the plans; None where no planner found one that fits."""
        return self.candidates[0].summary

    def to_json(self) -> dict[str, Any]:
        """Return everything as JSON values."""
        return {
            "model": self.problem.graph.name,
            "cluster": self.problem.cluster.name,
            "plans": [
                each.to_json()
                | ({"energy": self.energy[each.name].to_json()} if each.name in self.energy else {})
                | ({"changes": list(self.changes[each.name])} if each.name in self.changes else {})
                for each in self.candidates
            ],
        }

    def rows(self) -> list[Mapping[str, object]]:
        """Return a row for each planner."""
        return [_row(each) for each in self.candidates]

    def lines(self) -> list[str]:
        """Return the best plan in two lines."""
        title = f"{self.problem.graph.name} on {self.problem.cluster.name}"
        if self.best is None:
            return [f"{title}: none of {len(self.candidates)} planners found a plan that fits"]
        return [
            f"{title}: {len(self.candidates)} planners, the best is {self.candidates[0].name}",
            f"{self.best.title}: {self.best.value_line}",
        ]


def _row(candidate: Candidate) -> Mapping[str, object]:
    summary = candidate.summary
    return {
        "planner": candidate.name,
        "plan": summary.title if summary else candidate.refusal,
        "value": summary.solution.value if summary else None,
        "step s": summary.evaluation.step_s if summary else None,
        "samples/s": summary.evaluation.samples_per_s if summary else None,
        "gap": summary.solution.gap if summary else None,
    }


def compare(
    model: Model | None = None,
    /,
    *,
    on_progress: OnProgress = silent,
    **options: Any,  # noqa: ANN401 (fields of CompareRequest)
) -> Comparison:
    """Run several planners on a model, and rank what they find.

    Args:
        model: A built-in name, a model to be estimated, a file, or the graph itself.
        on_progress: Called with each planner before it runs.
        **options: The fields of :class:`CompareRequest`: the options of ``partita compare``.

    >>> found = compare("gpt-small", cluster="4xa100", planner=["single", "uniform"])
    >>> [each.name for each in found.candidates]
    ['uniform', 'single']

    Raises:
        InvalidInputError: There is no such model, cluster, planner or option.
    """
    return compare_request(make(CompareRequest, model=model, **options), on_progress)


def compare_request(request: CompareRequest, on_progress: OnProgress = silent) -> Comparison:
    """Compare what a request asks for; see :func:`compare`."""
    choices = chosen_planners(request.planner or DEFAULTS, request.option, request)
    posed = pose(request)
    found = ranked(posed.problem, choices, on_progress)
    wanted = request.energy or posed.problem.objective.metric is Metric.ENERGY
    energy = _energy(found, on_progress) if wanted else {}
    changes = _changes(found)
    return Comparison(posed=posed, candidates=tuple(found), energy=energy, changes=changes)


def _changes(found: Sequence[Candidate]) -> dict[str, tuple[str, ...]]:
    """Return what would change in each configuration of a trainer to get the best plan."""
    best = found[0].summary
    result: dict[str, tuple[str, ...]] = {}
    for each in found[1:]:
        name, _, path = each.name.partition(":")
        if name != "grid" or each.summary is None or best is None:
            continue
        from partita.flows.settings import changes_to  # noqa: PLC0415 (where one is named)
        from partita.trainers.read import kind_of  # noqa: PLC0415 (likewise)
        from partita.trainers.rules import TRAINERS  # noqa: PLC0415 (likewise)

        trainer = kind_of(read_text(path))
        if trainer in TRAINERS:
            result[each.name] = changes_to(trainer, each.summary.solution, best.solution)
    return result


def ranked(
    problem: Problem, planners: Sequence[PlannerChoice], on_progress: OnProgress = silent
) -> list[Candidate]:
    """Return what every planner comes to, best value first, those without a plan last."""
    found: list[Candidate] = []
    for choice in planners:
        planner = choice.function()
        on_progress(choice.label)
        try:
            found.append(Candidate(name=choice.label, summary=summarise(planner(problem))))
        except (InfeasibleError, InvalidInputError) as exc:
            found.append(Candidate(name=choice.label, refusal=str(exc)))
    return sorted(found, key=_rank)


def _rank(candidate: Candidate) -> tuple[bool, float]:
    if candidate.summary is None:
        return True, 0.0
    solution = candidate.summary.solution
    measured = candidate.summary.evaluation.values.get(solution.metric)
    return False, solution.value if measured is None else measured.value


def _energy(found: Sequence[Candidate], on_progress: OnProgress) -> "dict[str, EnergyColumns]":
    """Return what the devices' model says of the energy of each plan."""
    from partita.flows.energy_plan import energy_columns  # noqa: PLC0415 (numba)

    result = {}
    for candidate in found:
        if candidate.summary is not None:
            on_progress(f"energy of {candidate.name}")
            result[candidate.name] = energy_columns(candidate.summary.solution)
    return result
