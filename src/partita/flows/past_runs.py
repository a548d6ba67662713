"""What past runs came to, side by side: what ``partita.results`` and ``results`` say."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from partita.flows.results import Result
from partita.flows.run_requests import RUNS
from partita.requests import Request, declare, make
from partita.runtime.directory import PastRun, past_runs, read_run


@dataclass(frozen=True, kw_only=True)
class ResultsRequest(Request):
    """Which runs to list."""

    names: tuple[str, ...] = declare(
        (), is_argument=True, metavar="[RUNS]...", help="Run directories, or names under --runs."
    )
    runs: str = declare(RUNS, help="Folder in which run directories are.")
    model: str | None = declare(None, help="Model whose runs are listed.")


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class PastRuns(Result):
    """Runs that left their results.

    Attributes:
        runs: The runs, those that were named in that order.
        folder: Where they were looked for.
    """

    runs: tuple[PastRun, ...]
    folder: str

    def to_json(self) -> Any:  # noqa: ANN401 (a list, as the command prints it)
        """Return what each run left, with its directory."""
        return [{"directory": str(run.path), **run.results} for run in self.runs]

    def rows(self) -> list[Mapping[str, object]]:
        """Return a row for each run."""
        keys = ("plan", "steps", "median_step_s", "samples_per_s", "predicted_step_s")
        return [
            {"run": run.name} | {key: run.results.get(key) for key in keys} for run in self.runs
        ]

    def lines(self) -> list[str]:
        """Return how many runs there are, in one line."""
        if not self.runs:
            return [f"no runs under {self.folder}"]
        return [f"{len(self.runs)} runs, the last {self.runs[-1].name}"]


def results(*names: str, **options: Any) -> PastRuns:  # noqa: ANN401 (fields of ResultsRequest)
    """List past runs, or those that are named.

    Args:
        *names: Run directories, or their names under ``runs``.
        **options: The fields of :class:`ResultsRequest`: the options of ``partita results``.

    Raises:
        InvalidInputError: There is no such run.
    """
    return results_request(make(ResultsRequest, names=names, **options))


def results_request(request: ResultsRequest) -> PastRuns:
    """List what a request asks for; see :func:`results`."""
    root = Path(request.runs)
    if request.names:
        paths = [Path(name) if Path(name).is_dir() else root / name for name in request.names]
        found = [read_run(path) for path in paths]
    else:
        found = list(past_runs(root))
    if request.model is not None:
        found = [run for run in found if run.results.get("model") == request.model]
    return PastRuns(runs=tuple(found), folder=request.runs)
