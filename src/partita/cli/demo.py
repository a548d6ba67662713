"""``partita demo``: the whole flow on a small GPT that is measured here, and on a mixed cluster."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from partita.catalogue.catalogue import load_catalogue
from partita.catalogue.shorthand import local_cluster, read_shorthand
from partita.cli.console import (
    bound_line,
    check_line,
    model_line,
    print_json,
    progress,
    stdout_console,
    step_line,
    summary_row,
    summary_table,
    terminal_width,
)
from partita.cli.options import output_options
from partita.core.graph import Graph
from partita.core.problem import Objective, Problem
from partita.core.timeline import Timeline
from partita.cost.judge import CheckReport, check
from partita.cost.predict import simulate
from partita.documents import save, write_text
from partita.errors import WorkerError
from partita.flows.compare import Candidate, compare
from partita.flows.extras import torch_needed
from partita.flows.profile import estimate_lines, measured_lines, profiled_model
from partita.flows.summary import Summary
from partita.program.lower import lower
from partita.report.picture import pipeline_picture
from partita.report.svg import timeline_svg
from partita.report.trace import check_trace, chrome_trace

if TYPE_CHECKING:
    from partita.flows.execute import Outcome
    from partita.flows.profile import ProfiledModel

MODEL, SCALE, SEQUENCE_LENGTH, BATCH_SIZE = "gpt3-small", 0.25, 64, 4
ROUNDS = 6
STEPS = 8
LOCAL_DEVICES, LOCAL_MICROBATCHES = 2, 8
CLUSTER, MICROBATCHES = "1x4xa100+1x2xv100", 16
PLANNERS: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("single", "single", {}),
    ("uniform", "uniform", {}),
    ("uniform x 2", "uniform", {"replicas": 2}),
    ("custom", "custom", {"boundaries": [0, 4, 7, 10, 13, 15]}),
    ("random", "random", {"seed": 1}),
)
LOCAL_PLANNERS = PLANNERS[:2]


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """A problem, what the planners came to, and the best of it.

    Attributes:
        problem: The problem.
        found: What every planner came to, best first.
        best: The first of them.
    """

    problem: Problem
    found: Sequence[Candidate]
    best: Summary


@click.command(epilog="Example: partita demo -o demo")
@click.option("-o", "--output", default="demo", show_default=True, help="Folder for the files.")
@click.option(
    "--rounds", type=click.IntRange(1), default=ROUNDS, show_default=True, help="To measure."
)
@output_options
def command(output: str, rounds: int, as_json: bool, quiet: bool, **rest: Any) -> None:
    """Measure a small GPT, plan it here and over a mixed cluster, and train it here by the plan.

    Op times of this machine are measured, those of the cluster's A100 and V100 estimated. The
    training is compared with one process, and with what was predicted.
    """
    del rest
    Path(output).mkdir(parents=True, exist_ok=True)  # first: what takes minutes must not be lost
    with progress("demo", quiet=quiet or as_json) as tell:
        tell(f"measuring {MODEL} at {SCALE:g} of its width, {rounds} rounds")
        profiled, graph = profile(rounds)
        measured = profiled.measured
        here = plan_here(graph, tell)
        mixed = plan_mixed(graph, tell)
        tell("checking and simulating the best")
        report = check(mixed.problem, mixed.best.solution.plan)
        timeline = simulate(mixed.problem, mixed.best.solution.plan, period=True)
    files = write_files(Path(output), graph, here, mixed, timeline)
    if not (quiet or as_json):
        click.echo(f"demo: training {STEPS} steps over {LOCAL_DEVICES} processes", err=True)
    trained = train_here(here, profiled, Path(output))
    if as_json:
        print_json(
            {
                "profile": figures_of(measured),
                "here": plans_of(here),
                "plans": plans_of(mixed),
                "trained": trained.to_json(),
                "files": {name: str(path) for name, path in files.items()},
            }
        )
    else:
        show_profile(measured, graph)
        show_here(here)
        show_mixed(mixed, timeline, report)
        show_trained(trained)
        show_files(files)
    assert trained.verdict is not None  # it was asked for
    for verdict in trained.verdicts:
        if not verdict.is_equal:
            raise WorkerError(f"the training differs from {verdict.against}")


def profile(rounds: int) -> "tuple[ProfiledModel, Graph]":
    """Return what was measured here, and the graph with estimates for the mixed cluster besides.

    As many threads compute as a process will have that shares this machine with the others.
    """
    with torch_needed("the demo measures a model and needs"):
        from partita.capture.origin import ModelOrigin  # noqa: PLC0415 (likewise)
        from partita.capture.sources import SourceOptions  # noqa: PLC0415 (likewise)
        from partita.profiler.estimate.estimate import estimate  # noqa: PLC0415 (likewise)
        from partita.profiler.measure.measure import ProfileOptions  # noqa: PLC0415 (likewise)
        from partita.profiler.merge import merge_costs  # noqa: PLC0415 (likewise)
        from partita.ranks.setup import limit_threads  # noqa: PLC0415 (likewise)
    options = SourceOptions(scale=SCALE, sequence_length=SEQUENCE_LENGTH, batch_size=BATCH_SIZE)
    threads = limit_threads(LOCAL_DEVICES)
    profiled = profiled_model(
        ModelOrigin(text=MODEL, options=options), ProfileOptions(rounds=rounds, threads=threads)
    )
    captures = profiled.captures
    cluster = read_shorthand(CLUSTER, load_catalogue())
    kinds = sorted({device.type for device in cluster.devices})
    estimated = [estimate(captures.at(), kind, layers=captures.source.layers) for kind in kinds]
    return profiled, merge_costs([profiled.graph, *estimated])


def train_here(here: Planned, profiled: "ProfiledModel", folder: Path) -> "Outcome":
    """Train by the best plan for this machine, checked against one process."""
    from partita.flows.execute import Execution, execute, write_run  # noqa: PLC0415 (torch)
    from partita.runtime.directory import make_run_directory  # noqa: PLC0415 (likewise)
    from partita.runtime.job import Job  # noqa: PLC0415 (likewise)

    solution = here.best.solution
    directory = make_run_directory(
        folder / "runs", MODEL, f"{LOCAL_DEVICES}xcpu", solution.plan.schedule.value
    )
    job = Job(model=profiled.captures.origin, steps=STEPS, optimizer="adam", keep_results=False)
    execution = Execution(job=job, directory=directory, check=True)
    outcome = execute(solution, execution, profiled.captures)
    assert outcome is not None  # there is one host
    return write_run(outcome, directory)


def plan_here(graph: Graph, tell: Callable[[str], None]) -> Planned:
    """Plan over processes of this machine, by measured costs."""
    problem = Problem(
        graph=graph,
        cluster=local_cluster(LOCAL_DEVICES),
        objective=Objective(microbatches=LOCAL_MICROBATCHES),
    )
    return _planned(problem, LOCAL_PLANNERS, lambda name: tell(f"planning here: {name}"))


def plan_mixed(graph: Graph, tell: Callable[[str], None]) -> Planned:
    """Plan over a mixed cluster that is not here, by estimated costs."""
    problem = Problem(
        graph=graph,
        cluster=read_shorthand(CLUSTER, load_catalogue()),
        objective=Objective(microbatches=MICROBATCHES),
    )
    return _planned(problem, PLANNERS, lambda name: tell(f"planning over {CLUSTER}: {name}"))


def _planned(
    problem: Problem,
    planners: Sequence[tuple[str, str, dict[str, Any]]],
    tell: Callable[[str], None],
) -> Planned:
    found = compare(problem, planners, progress=tell)
    best = next(candidate.summary for candidate in found if candidate.summary is not None)
    return Planned(problem=problem, found=found, best=best)


def write_files(
    folder: Path, graph: Graph, here: Planned, mixed: Planned, timeline: Timeline
) -> dict[str, Path]:
    """Write all documents and pictures, and return where each of them is."""
    files = {
        "graph": folder / f"{MODEL}.graph.json",
        "here": folder / "here.plan.json",
        "plan": folder / f"{MODEL}.plan.json",
        "timeline": folder / "timeline.json",
        "trace": folder / "trace.json",
        "picture": folder / "pipeline.svg",
    }
    save(graph, files["graph"])
    save(here.best.solution, files["here"])
    save(mixed.best.solution, files["plan"])
    save(timeline, files["timeline"])
    program = lower(mixed.problem, mixed.best.solution.plan)
    trace = chrome_trace(timeline, program=program, tensor_names=graph.tensors.names)
    check_trace(json.loads(trace))
    write_text(files["trace"], trace)
    write_text(files["picture"], timeline_svg(timeline))
    return files


def figures_of(measured: Any) -> dict[str, Any]:
    """Return what was measured as JSON values: times of the whole, its parts and their ratio."""
    record = measured.record
    return {
        "model": measured.graph.name,
        "processor": record.processor,
        "threads": record.threads,
        "rounds": record.rounds,
        "sum_forward_s": record.sum_forward_s,
        "sum_backward_s": record.sum_backward_s,
        "whole_s": record.whole_s,
        "ratio": record.ratio,
    }


def plans_of(planned: Planned) -> list[dict[str, Any]]:
    """Return what the planners came to as JSON values."""
    return [
        {"name": c.name, **(c.summary.to_json() if c.summary else {"refusal": c.refusal})}
        for c in planned.found
    ]


def show_profile(measured: Any, graph: Graph) -> None:
    """Print what was measured and what was estimated."""
    console = stdout_console()
    console.print("1. measured on this machine", style="bold")
    console.print(model_line(measured.graph))
    for line in measured_lines(measured):
        console.print(line)
    console.print("\n2. estimated by shapes for devices that are not here", style="bold")
    for line in estimate_lines(graph):
        console.print(line)


def show_here(here: Planned) -> None:
    """Print the plans for this machine."""
    title = f"3. planned over {LOCAL_DEVICES} processes of this machine (op times measured, links"
    stdout_console().print(f"\n{title} modelled)", style="bold")
    _show_ranked(here)


def show_mixed(mixed: Planned, timeline: Timeline, report: CheckReport) -> None:
    """Print the plans for the mixed cluster and the best of them as a picture."""
    console, best = stdout_console(), mixed.best
    console.print(f"\n4. planned over {CLUSTER} (op times estimated, links modelled)", style="bold")
    _show_ranked(mixed)
    console.print(f"\nthe best, simulated ({best.title}):")
    picture = pipeline_picture(timeline, terminal_width(), colour=console.is_terminal)
    click.echo(picture, nl=False)
    console.print(f"\nbound by: {best.evaluation.bottleneck}")
    console.print(check_line(report))
    for line in best.evaluation.assumptions:
        console.print(f"assumed: {line}", style="dim")


def show_trained(trained: "Outcome") -> None:
    """Print how the training went, beside what one process gives and what was predicted."""
    console = stdout_console()
    console.print(
        f"\n5. trained over {LOCAL_DEVICES} processes of this machine, by its best plan",
        style="bold",
    )
    for line in trained.lines():
        console.print(line)


def _show_ranked(planned: Planned) -> None:
    console = stdout_console()
    console.print(step_line(planned.problem))
    ranked = [c for c in planned.found if c.summary is not None]
    rows = [summary_row(rank + 1, c.summary, c.name) for rank, c in enumerate(ranked) if c.summary]
    console.print(summary_table(rows))
    for candidate in planned.found:
        if candidate.summary is None:
            console.print(f"{candidate.name}: {candidate.refusal}", style="yellow")
    console.print(bound_line(planned.best))


def show_files(files: dict[str, Path]) -> None:
    """Print what was written, and what to do with it."""
    console = stdout_console()
    console.print("written: " + ", ".join(str(path) for path in files.values()))
    console.print(
        f"open {files['trace']} in Perfetto (ui.perfetto.dev) or chrome://tracing", style="dim"
    )
    console.print(f"next: partita explain {files['plan']}", style="dim")
