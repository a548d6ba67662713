"""The whole flow in a minute: what ``partita.demo`` and the command ``demo`` do.

A small GPT is measured here, planned over processes of this machine and trained by the plan. A GPT
of 1.3 billion parameters, which no machine like this one trains, is planned over a cluster of A100s
and V100s by estimates, and its step simulated and drawn. Everything is asked of public functions.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from partita.documents import save, write_text
from partita.flows.compare import Comparison, compare
from partita.flows.extras import torch_needed
from partita.flows.profile import ProfileResult, profile
from partita.flows.report import write_report
from partita.flows.results import Result
from partita.flows.simulate import Simulation, simulate
from partita.flows.summary import Summary
from partita.flows.train import run_plan
from partita.planners.table import DEFAULT_PLANNER
from partita.program.lower import lower
from partita.report.svg import timeline_svg
from partita.report.trace import check_trace, chrome_trace
from partita.requests import OnProgress, Request, declare, make, silent

if TYPE_CHECKING:
    from partita.flows.runs.execute import Outcome

SMALL, SCALE, SEQUENCE_LENGTH, BATCH_SIZE = "gpt3-small", 0.25, 64, 4
ROUNDS, STEPS = 6, 6
LOCAL_DEVICES, LOCAL_MICROBATCHES = 2, 8
LOCAL_PLANNERS = (DEFAULT_PLANNER, "single", "uniform")
LARGE, CLUSTER, MICROBATCHES = "gpt3-xl", "1x4xa100+1x2xv100", 16
PLANNERS = (DEFAULT_PLANNER, "uniform", "single")
ITERATIONS = 60
"""Steps of the search for the large model: the same plan every time, however busy the machine."""


@dataclass(frozen=True, kw_only=True)
class DemoRequest(Request):
    """Where the demo writes, and how long it measures."""

    output: str = declare("demo", flags=("-o",), help="Folder for the files.")
    rounds: int = declare(ROUNDS, minimum=1, help="Rounds to measure.")


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Demo(Result):
    """All that the demo came to.

    Attributes:
        profile: The small model, measured here.
        here: What the planners came to on this machine.
        mixed: What they came to on the mixed cluster.
        simulation: The step of the best plan of the mixed cluster.
        trained: The training by the best plan of this machine.
        files: Paths of what was written, by what it is.
    """

    profile: ProfileResult
    here: Comparison
    mixed: Comparison
    simulation: Simulation
    trained: "Outcome"
    files: Mapping[str, str]

    def to_json(self) -> dict[str, Any]:
        """Return the figures of all steps as JSON values."""
        return {
            "profile": _measured(self.profile),
            "here": self.here.to_json()["plans"],
            "plans": self.mixed.to_json()["plans"],
            "simulated": self.simulation.to_json(),
            "trained": self.trained.to_json(),
            "files": dict(self.files),
        }

    def rows(self) -> list[Mapping[str, object]]:
        """Return what the planners came to on the mixed cluster."""
        return self.mixed.rows()

    def lines(self) -> list[str]:
        """Return what was trained here, what was planned, and where the report is."""
        return [
            f"trained here: {best_of(self.here).title}, {self.trained.step_s:.3g} s per step",
            f"planned: {self.mixed.lines()[0]}; {best_of(self.mixed).value_line}",
            f"report: {self.files['report']}",
        ]


def _measured(found: ProfileResult) -> dict[str, Any]:
    """Return what was measured: times of the whole, of its parts, and their ratio."""
    assert found.measured is not None
    record = found.measured.record
    return {
        "model": found.graph.name,
        "processor": record.processor,
        "threads": record.threads,
        "rounds": record.rounds,
        "sum_forward_s": record.sum_forward_s,
        "sum_backward_s": record.sum_backward_s,
        "whole_s": record.whole_s,
        "ratio": record.ratio,
    }


def best_of(found: Comparison) -> Summary:
    """Return the best plan; there is one, as the default planner finds one for these problems."""
    assert found.best is not None
    return found.best


def demo(
    *,
    on_progress: OnProgress = silent,
    **options: Any,  # noqa: ANN401 (fields of DemoRequest)
) -> Demo:
    """Measure a small GPT, train it by its plan, and plan a large one over a mixed cluster.

    Args:
        on_progress: Called with each step.
        **options: The fields of :class:`DemoRequest`: the options of ``partita demo``.

    Raises:
        UnsupportedError: torch is not there.
        WorkerError: The training failed, or differs from that of one process.
    """
    return demo_request(make(DemoRequest, **options), on_progress)


def demo_request(request: DemoRequest, on_progress: OnProgress = silent) -> Demo:
    """Run the demo that a request asks for; see :func:`demo`."""
    folder = Path(request.output)
    folder.mkdir(parents=True, exist_ok=True)  # first: what takes minutes must not be lost
    with torch_needed("the demo measures a model and needs"):
        from partita.ranks.setup import limit_threads  # noqa: PLC0415 (imports torch)
    on_progress(f"measuring {SMALL} at {SCALE:g} of its width, {request.rounds} rounds")
    profiled = profile(
        SMALL,
        scale=SCALE,
        sequence_length=SEQUENCE_LENGTH,
        batch_size=BATCH_SIZE,
        rounds=request.rounds,
        threads=limit_threads(LOCAL_DEVICES),  # as many as a process has that shares this machine
        no_cache=True,
    )
    here = compare(
        profiled.graph,
        devices=LOCAL_DEVICES,
        microbatches=LOCAL_MICROBATCHES,
        planner=LOCAL_PLANNERS,
        on_progress=lambda name: on_progress(f"planning here: {name}"),
    )
    on_progress(f"estimating {LARGE}")
    mixed = compare(
        LARGE,
        cluster=CLUSTER,
        microbatches=MICROBATCHES,
        planner=PLANNERS,
        iterations=ITERATIONS,
        on_progress=lambda name: on_progress(f"planning over {CLUSTER}: {name}"),
    )
    on_progress("checking and simulating the best")
    simulation = simulate(best_of(mixed).solution, period=True)
    files = _write(folder, profiled, here, simulation)
    on_progress(f"training {STEPS} steps over {LOCAL_DEVICES} processes")
    runs = folder / "runs"
    trained = run_plan(best_of(here).solution, steps=STEPS, check=True, runs=runs)
    on_progress("writing reports")
    write_report(str(trained.directory), output=files["run report"])
    write_report(files["plan"], output=files["report"])
    return Demo(
        profile=profiled,
        here=here,
        mixed=mixed,
        simulation=simulation,
        trained=trained,
        files=files,
    )


def _write(
    folder: Path, profiled: ProfileResult, here: Comparison, simulation: Simulation
) -> dict[str, str]:
    """Write all documents and pictures, and return where each of them is."""
    files = {
        "graph": str(folder / f"{SMALL}.graph.json"),
        "here": str(folder / "here.plan.json"),
        "plan": str(folder / f"{LARGE}.plan.json"),
        "timeline": str(folder / "timeline.json"),
        "trace": str(folder / "trace.json"),
        "picture": str(folder / "pipeline.svg"),
        "run report": str(folder / "run.html"),
        "report": str(folder / "report.html"),
    }
    save(profiled.graph, files["graph"])
    save(best_of(here).solution, files["here"])
    save(simulation.solution, files["plan"])
    save(simulation.timeline, files["timeline"])
    problem, plan = simulation.solution.problem, simulation.solution.plan
    trace = chrome_trace(
        simulation.timeline,
        program=lower(problem, plan),
        tensor_names=problem.graph.tensors.names,
    )
    check_trace(json.loads(trace))
    write_text(files["trace"], trace)
    title = f"{problem.graph.name} on {problem.cluster.name}"
    write_text(files["picture"], timeline_svg(simulation.timeline, title=title))
    return files
