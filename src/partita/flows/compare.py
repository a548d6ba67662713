"""Several planners on one problem, ranked by the same cost model."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from partita.core.problem import Problem
from partita.errors import InfeasibleError, InvalidInputError
from partita.flows.summary import Summary, summarise
from partita.planners.table import get_planner


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


def compare(
    problem: Problem,
    planners: Sequence[tuple[str, str, Mapping[str, Any]]],
    *,
    progress: Callable[[str], None] = lambda _: None,
) -> list[Candidate]:
    """Return what every planner comes to, best value first, those without a plan last.

    Args:
        problem: The problem.
        planners: For each: what to call it, its name in the table, its options.
        progress: Told the name of each planner before it runs.
    """
    found: list[Candidate] = []
    for label, name, options in planners:
        planner = get_planner(name, **options)
        progress(label)
        try:
            found.append(Candidate(name=label, summary=summarise(planner(problem))))
        except (InfeasibleError, InvalidInputError) as exc:
            found.append(Candidate(name=label, refusal=str(exc)))
    return sorted(found, key=_rank)


def _rank(candidate: Candidate) -> tuple[bool, float]:
    if candidate.summary is None:
        return True, 0.0
    solution = candidate.summary.solution
    measured = candidate.summary.evaluation.values.get(solution.metric)
    return False, solution.value if measured is None else measured.value
