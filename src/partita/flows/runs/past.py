"""What past runs came to, side by side: what ``partita.results`` and ``results`` say."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from partita.documents import write_bytes
from partita.errors import InvalidInputError
from partita.flows.results import Result
from partita.flows.runs.follow import Follower, end_run, follow, newest_run, require_success
from partita.flows.runs.requests import RUNS
from partita.requests import Request, declare, make
from partita.runtime.directory import PastRun, has_results, past_runs, read_run
from partita.runtime.metric_rows import read_metrics
from partita.runtime.run_state import STATE, read_state

OVER: Mapping[str, str] = {"steps": "step", "tokens": "tokens", "time": "time_s"}
"""Ways to compare learning curves, and the names of their values in ``metrics.jsonl``."""


@dataclass(frozen=True, kw_only=True)
class ResultsRequest(Request):
    """Which runs to list."""

    names: tuple[str, ...] = declare(
        (), is_argument=True, metavar="[RUNS]...", help="Run directories, or names under --runs."
    )
    runs: str = declare(RUNS, help="Folder in which run directories are.")
    model: str | None = declare(None, help="Model whose runs are listed.")
    curves: str | None = declare(
        None,
        choices=tuple(OVER),
        bare="steps",
        help="Compare the losses of the runs at equal steps, tokens or seconds.",
    )
    rows: int = declare(10, minimum=2, help="Points at which --curves compares the runs.")
    plot: str | None = declare(None, help="Picture of the learning curves to write: curves.svg.")
    follow: bool = declare(
        False, help="Show the steps of a run on other hosts until it ends; Ctrl-C leaves it alone."
    )
    cancel: bool = declare(False, help="End a run on other hosts; one that saves does so first.")


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenRun:
    """A run without results: it goes on, or it has failed.

    Attributes:
        path: Its directory.
        state: What it is at, in a few words.
        error: Why it failed; empty = it has not.
    """

    path: Path
    state: str
    error: str = ""

    @property
    def name(self) -> str:
        """The name of the directory."""
        return self.path.name


def open_runs(root: Path) -> list[OpenRun]:
    """Return the runs under a folder that have no results, oldest first."""
    found = []
    for path in sorted(root.glob(f"*/{STATE}"), key=lambda path: path.parent.stat().st_ctime_ns):
        state = read_state(path.parent)
        if state is None or has_results(path.parent):
            continue
        word = "vanished" if state.has_vanished else state.progress.value
        found.append(OpenRun(path=path.parent, state=word, error=state.error))
    return found


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class PastRuns(Result):
    """Runs that left their results, and those that have none.

    Attributes:
        runs: The runs, those that were named in that order.
        unfinished: Runs in progress and failed ones, where none were named.
        folder: Where they were looked for.
        curves: Their learning curves; None where they were not asked for.
        cancelled: The run that was ended before it had any; empty = none was.
    """

    runs: tuple[PastRun, ...]
    folder: str
    curves: "Curves | None" = None
    cancelled: str = ""
    unfinished: tuple[OpenRun, ...] = ()

    def to_json(self) -> Any:  # noqa: ANN401 (a list, as the command prints it)
        """Return what each run left, with its directory; or their curves, where asked for."""
        if self.curves is not None:
            return self.curves.to_json()
        return [
            *({"directory": str(run.path), **run.results} for run in self.runs),
            *(
                {
                    "directory": str(run.path),
                    "name": run.name,
                    "state": run.state,
                    "error": run.error or None,
                }
                for run in self.unfinished
            ),
        ]

    def rows(self) -> list[Mapping[str, object]]:
        """Return a row for each run."""
        keys = ("plan", "steps", "median_step_s", "samples_per_s", "predicted_step_s")
        return [
            {"run": run.name} | {key: run.results.get(key) for key in keys} for run in self.runs
        ]

    def lines(self) -> list[str]:
        """Return how many runs there are, in one line."""
        if self.cancelled:
            return [f"{self.cancelled} is cancelled"]
        if not self.runs and self.unfinished:
            return [f"no run under {self.folder} has results yet"]
        if not self.runs:
            return [f"no runs under {self.folder}"]
        return [f"{len(self.runs)} runs, the last {self.runs[-1].name}"]


def results(
    *names: str,
    follower: Follower | None = None,
    **options: Any,  # noqa: ANN401 (fields of ResultsRequest)
) -> PastRuns:
    """List past runs, or those that are named.

    Args:
        *names: Run directories, or their names under ``runs``.
        follower: Is told what happens in a run that is followed.
        **options: The fields of :class:`ResultsRequest`: the options of ``partita results``.

    Raises:
        InvalidInputError: There is no such run.
        WorkerError: A run that was followed has failed.
    """
    return results_request(make(ResultsRequest, names=names, **options), follower)


def results_request(request: ResultsRequest, follower: Follower | None = None) -> PastRuns:
    """List what a request asks for; see :func:`results`."""
    root = Path(request.runs)
    paths = [Path(name) if Path(name).is_dir() else root / name for name in request.names]
    if request.follow or request.cancel:
        paths = paths or [newest_run(root)]
        if len(paths) > 1:
            raise InvalidInputError("--follow and --cancel are for one run; name one")
        state = follow(paths[0], follower or Follower()) if request.follow else end_run(paths[0])
        if request.cancel and not has_results(paths[0]):
            return PastRuns(runs=(), folder=request.runs, cancelled=paths[0].name)
        require_success(paths[0], state)
    found = [read_run(path) for path in paths] if paths else list(past_runs(root))
    if request.model is not None:
        found = [run for run in found if run.results.get("model") == request.model]
    curves = None
    if request.curves is not None or request.plot is not None:
        curves = compare_curves(found, request.curves or "steps", request.rows)
    if request.plot is not None and curves is not None:
        from partita.report.charts import curves_chart, render  # noqa: PLC0415 (heavy)

        drawn = [(name, points) for name, points in curves.points.items() if points]
        picture = render(partial(curves_chart, drawn, over=curves.over), request.plot)
        write_bytes(request.plot, picture)
    unfinished = () if paths or request.model or curves else tuple(open_runs(root))
    return PastRuns(runs=tuple(found), folder=request.runs, curves=curves, unfinished=unfinished)


@dataclass(frozen=True, kw_only=True, eq=False)
class Curves:
    """Losses of runs at equal steps, tokens or seconds.

    Attributes:
        over: ``steps``, ``tokens`` or ``seconds``.
        points: All points of each run by its name, ascending.
        held_out: Those on held-out data.
        rows: The same places of all runs, and the loss of each run there: the mean of its last
            steps up to there, as single ones scatter; None where the run had ended.
    """

    over: str
    points: Mapping[str, Sequence[tuple[float, float]]]
    held_out: Mapping[str, Sequence[tuple[float, float]]]
    rows: tuple[tuple[float, tuple[float | None, ...]], ...]

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON values."""
        return {
            "over": self.over,
            "runs": list(self.points),
            "rows": [{"at": at, "losses": list(losses)} for at, losses in self.rows],
            "points": {name: list(map(list, points)) for name, points in self.points.items()},
            "held_out": {name: list(map(list, points)) for name, points in self.held_out.items()},
        }


def compare_curves(runs: Sequence[PastRun], over: str, rows: int) -> Curves:
    """Put the learning curves of runs side by side.

    Raises:
        InvalidInputError: None of them left metrics, or none has tokens.
    """
    key = OVER[over]
    points: dict[str, list[tuple[float, float]]] = {}
    held_out: dict[str, list[tuple[float, float]]] = {}
    for run in runs:
        found = [row for row in read_metrics(run.path) if key in row]
        points[run.name] = [(float(r[key]), float(r["loss"])) for r in found if "loss" in r]
        held_out[run.name] = [
            (float(r[key]), float(r["held_out_loss"])) for r in found if "held_out_loss" in r
        ]
    ends = [own[-1][0] for own in points.values() if own]
    if not ends:
        raise InvalidInputError(
            f"no run has a metrics.jsonl with {over}; runs of 'partita train' write one"
        )
    places = [max(ends) * (turn + 1) / rows for turn in range(rows)]
    if over != "time":
        places = sorted({float(round(place)) for place in places if round(place)})
    table = tuple((at, tuple(_loss_at(own, at) for own in points.values())) for at in places)
    return Curves(over=over, points=points, held_out=held_out, rows=table)


def _loss_at(points: Sequence[tuple[float, float]], at: float) -> float | None:
    if not points or at > points[-1][0] * (1 + 1e-9):
        return None
    before = [loss for place, loss in points if place <= at * (1 + 1e-9)]
    recent = before[-max(1, len(points) // 50) :]
    return sum(recent) / len(recent) if recent else None
