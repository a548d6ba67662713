"""``partita plan --trace-search``: the best value over time as CSV and picture."""

import csv
import json
from pathlib import Path
from xml.etree import ElementTree

import pytest


def values_of(path):
    rows = list(csv.DictReader(Path(path).read_text().splitlines()))
    return [(float(row["seconds"]), float(row["value"])) for row in rows]


@pytest.mark.parametrize(
    "arguments",
    [
        ("--planner", "brute-force", "--time-limit", "120"),
        ("--planner", "local-search", "--option", "iterations=10", "--option", "restarts=20"),
        ("--planner", "hierarchical"),
    ],
    ids=["brute-force", "local-search", "hierarchical"],
)
def test_the_published_runs_are_traced(run, arguments):
    code, out, _ = run("plan", "chain201", *arguments, "--trace-search", "best", "--json")
    assert code == 0
    answer = json.loads(out)
    assert answer["traced"] == ["best.csv", "best.svg"]
    points = values_of("best.csv")
    assert points[-1][1] == answer["solution"]["value"] == 2.0
    assert [value for _, value in points] == sorted((v for _, v in points), reverse=True)
    assert [time for time, _ in points] == sorted(time for time, _ in points)
    shown = [element.text for element in ElementTree.parse("best.svg").getroot().iter()]
    assert f"chain201 by {arguments[1]}: best value over time" in shown


def test_other_metrics_are_traced_and_an_ending_is_not_doubled(run):
    command = ("plan", "gpt-small", "--planner", "auto", "--iterations", "3")
    code, out, _ = run(*command, "--trace-search", "out.csv", "-q")
    assert code == 0
    assert "search traced in out.csv and out.svg" in out.replace("\n", " ")
    assert values_of("out.csv")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--planner", "uniform", "--trace-search", "x"), "'uniform' does not search"),
        (("--planner", "brute-force", "--trace-search", "."), "expected the name of a file"),
    ],
)
def test_what_cannot_be_traced_is_refused(run, arguments, message):
    code, _, error = run("plan", "chain201", *arguments)
    assert code == 2
    assert message in error
    assert not Path("x.csv").exists()
