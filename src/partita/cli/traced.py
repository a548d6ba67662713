"""``--trace-search``: what a planner finds over time, as a table and a picture."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from partita.cli.inputs import takes
from partita.core.problem import Problem
from partita.core.solution import Solution
from partita.documents import write_text
from partita.errors import InvalidInputError
from partita.planners.search_trace import SearchTrace
from partita.planners.table import PLANNERS
from partita.report.search_trace import search_csv, search_svg


@dataclass(slots=True)
class TracedSearch:
    """A search that is recorded if a file is named.

    Attributes:
        stem: Path of the files without their endings; ``None`` = nothing is recorded.
        trace: The record; its clock starts with the search.
    """

    stem: Path | None
    trace: SearchTrace = field(default_factory=SearchTrace)

    def run(self, planner: Callable[..., Solution], problem: Problem) -> Solution:
        """Return what a planner finds."""
        if self.stem is None:
            return planner(problem)
        self.trace = SearchTrace()
        return planner(problem, trace=self.trace)

    def write(self, solution: Solution) -> list[str]:
        """Write the record, if there is one; returns the names of the files."""
        if self.stem is None:
            return []
        points = self.trace.points
        title = f"{solution.problem.graph.name} by {solution.planner}"
        contents = {
            ".csv": search_csv(points),
            ".svg": search_svg(
                points, title=title, unit=f"{solution.metric.value}, {solution.unit}"
            ),
        }
        names = [f"{self.stem}{ending}" for ending in contents]
        for name, text in zip(names, contents.values(), strict=True):
            write_text(name, text)
        return names


def traced_search(planner: str, file: str | None) -> TracedSearch:
    """Return a search that is recorded in the files that an option names.

    Raises:
        InvalidInputError: The planner does not search, or the name is empty.
    """
    if file is None:
        return TracedSearch(None)
    path = Path(file)
    if not path.name or path.is_dir():
        raise InvalidInputError(f"--trace-search is {file!r}; expected the name of a file")
    if not takes(planner, "trace"):
        searching = ", ".join(name for name in PLANNERS if takes(name, "trace"))
        raise InvalidInputError(
            f"planner {planner!r} does not search, so there is nothing to trace; "
            f"these do: {searching}"
        )
    return TracedSearch(path.with_suffix("") if path.suffix in (".csv", ".svg") else path)
