"""Reports of runs and of commands: what they show, and what they refuse."""

import dataclasses
import json
import shlex
from pathlib import Path

import pytest

import partita
from partita.cli.from_request import with_bare_values
from partita.cli.main import main
from partita.cli.run import command as run_command
from partita.core.solution import Solution
from partita.core.timeline import TimelineOrigin
from partita.documents import save
from partita.errors import InvalidInputError
from partita.flows.explain import path_words


@pytest.fixture(scope="module")
def solution() -> Solution:
    return partita.plan("gpt-small", cluster="2xa100", planner="uniform", microbatches=4).solution


@pytest.fixture
def run_folder(solution: Solution, tmp_path: Path) -> Path:
    """Return what a run leaves: its plan, a measured step, results and metrics."""
    folder = tmp_path / "run"
    folder.mkdir()
    step = partita.simulate(solution, perturb=0.2).timeline
    save(solution, folder / "plan.json")
    save(dataclasses.replace(step, origin=TimelineOrigin.MEASURED), folder / "timeline.json")
    devices = [
        {
            "device": name,
            "busy_s": {"predicted": 1.0, "measured": 1.1},
            "peak_bytes": {"predicted": 0.0, "measured": None},
        }
        for name in step.devices
    ]
    results = {"model": "gpt-small", "steps": 2, "median_step_s": 2.0, "losses": [3.0, 2.5]}
    (folder / "results.json").write_text(json.dumps({**results, "report": {"devices": devices}}))
    rows = [{"step": at, "loss": 3.0 - at, "step_s": 2.0} for at in (1, 2)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def test_a_run_is_shown_below_its_prediction(
    run_folder: Path, solution: Solution, tmp_path: Path
) -> None:
    found = partita.write_report(str(run_folder), output=str(tmp_path / "run.html"))
    figures = {each["title"]: each for part in found.page.sections for each in part.figures}
    timeline = figures["Timeline"]
    assert [track["name"] for track in timeline["tracks"]] == ["predicted", "measured"]
    spans = [track["makespan_s"] for track in timeline["tracks"]]
    assert timeline["length_s"] == max(spans)
    assert "2.00 s" in found.page.summary
    table = figures["Predicted and measured, by device"]["table"]
    titles = [column["title"] for column in table["columns"]]
    peaks = partita.simulate(solution).timeline.peak_bytes.tolist()
    assert [row[titles.index("peak, predicted")] for row in table["rows"]] == peaks
    assert {"Loss", "Seconds of each step"} <= set(figures)
    assert (tmp_path / "run.html").read_text() == found.html


def test_plans_whose_steps_hold_different_samples_are_ranked_by_the_sample(
    solution: Solution, tmp_path: Path
) -> None:
    less = partita.plan("gpt-small", cluster="2xa100", planner="single", microbatches=1).solution
    for name, document in (("more", solution), ("less", less)):
        save(document, tmp_path / f"{name}.json")
    found = partita.write_report(
        *(str(tmp_path / f"{name}.json") for name in ("less", "more")),
        output=str(tmp_path / "both.html"),
    )
    table = found.page.sections[0].figures[0]["table"]
    titles = [column["title"] for column in table["columns"]]
    steps = [row[titles.index("step")] for row in table["rows"]]
    rates = [row[titles.index("samples/s")] for row in table["rows"]]
    assert steps[0] > steps[1]  # four times the samples in less than four times the time
    assert rates[0] > rates[1]
    assert table["rows"][0][0] == "more.json"
    samples = solution.plan.samples
    assert table["rows"][0][titles.index("per sample")] == pytest.approx(steps[0] / samples)
    assert "more.json is the fastest per sample" in found.page.summary


def test_a_plan_is_told_in_the_words_of_explain(solution: Solution, tmp_path: Path) -> None:
    save(solution, tmp_path / "plan.json")
    found = partita.write_report(str(tmp_path / "plan.json"), output=str(tmp_path / "p.html"))
    explained = partita.explain(str(tmp_path / "plan.json"))
    said = found.page.summary.lower()
    for sentence in explained.answer:
        assert sentence.lower() in said
    assert path_words(explained.critical_path) in found.page.summary


def test_the_command_of_a_report_can_be_pasted(solution: Solution, tmp_path: Path) -> None:
    path = tmp_path / "a plan; of mine.json"
    save(solution, path)
    found = partita.write_report(str(path), output=str(tmp_path / "r.html"))
    words = ["partita", "report", str(path), "--output", str(tmp_path / "r.html")]
    assert shlex.split(found.page.command) == words


def test_things_that_do_not_belong_together_are_refused(
    run_folder: Path, solution: Solution, tmp_path: Path
) -> None:
    plan, graph = str(tmp_path / "plan.json"), str(tmp_path / "graph.json")
    save(solution, plan)
    save(solution.problem.graph, graph)
    with pytest.raises(InvalidInputError, match="run directory"):
        partita.write_report(plan, str(run_folder))
    with pytest.raises(InvalidInputError, match="holds a graph"):
        partita.write_report(graph)
    with pytest.raises(InvalidInputError, match=r"results\.json"):
        partita.write_report(str(tmp_path))


@pytest.mark.parametrize(
    ("arguments", "title"),
    [
        (("plan", "gpt-small", "-c", "2xa100", "-p", "uniform", "-o", "p.json"), "gpt-small on"),
        (("compare", "gpt-small", "-c", "2xa100", "-p", "single", "-p", "uniform"), "2 plans"),
        (("energy", "frontier", "saved.json", "--points", "3"), "time against energy"),
        (("fleet", "simulate", "generated:jobs=4,short", "-c", "1x8xv100"), "policies"),
    ],
)
def test_commands_write_what_they_found_as_a_page(
    arguments: tuple[str, ...],
    title: str,
    solution: Solution,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    save(solution, "saved.json")
    with pytest.raises(SystemExit) as stop:
        main([*arguments, "--report", "page.html", "-q"])
    assert not stop.value.code
    text = Path("page.html").read_text()
    assert title in text.split("<title>")[1].split("</title>")[0]
    assert f"partita {arguments[0]}" in text


def test_a_run_takes_a_file_for_its_report_or_shows_it() -> None:
    given = with_bare_values(run_command, ["--report", "plan.json"])
    assert given == ["--report=terminal", "plan.json"]
    named = ["--report", "page.html", "plan.json"]
    assert with_bare_values(run_command, named) == named
