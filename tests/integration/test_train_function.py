"""``partita.profile``, ``partita.train`` and ``partita.run`` from Python.

Ranks are forked from a process without threads; what trains is a script of its own, therefore.
"""

import inspect
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import partita
import partita.capture.origin
import partita.profiler.measure.model
from partita.errors import InvalidInputError

pytestmark = pytest.mark.slow
IMPORTS = """
import json
from pathlib import Path
import partita
import partita.capture.origin
import partita.profiler.measure.model
"""


@pytest.fixture
def run_script(commands: Any, tmp_path: Path) -> Callable[[Callable[[], None]], None]:
    """Return what runs a function in a process and a folder of its own."""

    def run(function: Callable[[], None]) -> None:
        text = f"{IMPORTS}{inspect.getsource(function)}\n{function.__name__}()\n"
        done = commands.run(python=text, folder=tmp_path, PARTITA_CACHE=str(tmp_path / "cache"))
        assert done.returncode == 0, done.stderr

    return run


def train_and_count_captures() -> None:
    captured = []
    for module in (partita.capture.origin, partita.profiler.measure.model):
        original = module.capture

        def counted(*arguments, _original=original, **options):
            captured.append(options["name"])
            return _original(*arguments, **options)

        module.capture = counted
    steps = []
    small = {"scale": 0.05, "sequence_length": 8}
    step = {"microbatch_size": 2, "microbatches": 4, "steps": 2, "devices": 2, "planner": "uniform"}
    found = partita.train(
        "gpt3-small",
        **small,
        **step,
        rounds=1,
        check=True,
        report=True,
        runs="runs",
        on_step=lambda rank, news: steps.append(news.step),
    )
    assert captured == ["gpt3-small"], captured
    assert len(found.verdicts) == 2, found.verdicts
    assert sorted(steps) == [0, 0, 1, 1], steps
    assert json.loads((found.directory / "results.json").read_text())["check"]["equal"]
    assert repr(found).startswith("check     "), repr(found)
    assert "<table>" in found._repr_html_()


def test_a_training_captures_its_model_once(run_script: Any) -> None:
    run_script(train_and_count_captures)


def profile_plan_and_run() -> None:
    profiled = partita.profile("gpt3-small", scale=0.05, sequence_length=8, batch_size=2, rounds=1)
    assert len(profiled.rows()) == 5, profiled.rows()
    assert profiled.to_json()["cached"] is False
    assert profiled.to_json()["graph"]["format"] == "partita.graph"
    solution = partita.plan(profiled.graph, devices=2, planner="uniform").solution
    Path("options.yaml").write_text("steps: 9\nlearning-rate: 0.01\n")
    found = partita.run(solution, config="options.yaml", steps=2, runs="runs")
    assert len(found.losses) == 2, found.losses
    again = partita.run_plan(solution, steps=1, runs="runs")
    assert again.to_json()["steps"] == 1, again


def test_a_profile_is_planned_and_run_without_a_file(run_script: Any) -> None:
    run_script(profile_plan_and_run)


def test_options_that_would_be_ignored_are_refused() -> None:
    with pytest.raises(InvalidInputError, match=r"'stepps'.*did you mean"):
        partita.train("gpt3-small", stepps=2)
    with pytest.raises(InvalidInputError, match="--cluster names machines"):
        partita.train("gpt3-small", cluster="4xa100")
    with pytest.raises(InvalidInputError, match="--config file"):
        partita.train()
    with pytest.raises(InvalidInputError, match="the script says"):
        partita.run("plan.json", "script.py", steps=3)
    with pytest.raises(InvalidInputError, match="measured on meta"):
        partita.profile("gpt3-small", profile_device="meta")
