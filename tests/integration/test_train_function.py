"""``partita.profile``, ``partita.train`` and ``partita.run`` from Python, in this process."""

import json
from pathlib import Path
from typing import Any

import pytest

import partita
import partita.capture.origin
import partita.profiler.measure.model
from partita.errors import InvalidInputError

# Where a process has threads, ranks are started by torch's agent, which leaves their logs open.
AGENT = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
pytestmark = [pytest.mark.slow, AGENT]
SMALL = {"scale": 0.05, "sequence_length": 8}
STEP = {"microbatch_size": 2, "microbatches": 4, "steps": 2, "devices": 2, "planner": "uniform"}


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PARTITA_CACHE", str(tmp_path / "cache"))


def test_a_training_captures_its_model_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    captured: list[str] = []
    for module in (partita.capture.origin, partita.profiler.measure.model):
        original = module.capture

        def counted(*arguments: Any, _original: Any = original, **options: Any) -> Any:
            captured.append(options["name"])
            return _original(*arguments, **options)

        monkeypatch.setattr(module, "capture", counted)
    steps: list[int] = []
    found = partita.train(
        "gpt3-small",
        **SMALL,
        **STEP,
        rounds=1,
        check=True,
        report=True,
        runs=str(tmp_path / "runs"),
        on_step=lambda rank, news: steps.append(news.step),
    )
    assert captured == ["gpt3-small"]
    assert found is not None
    assert len(found.verdicts) == 2
    assert sorted(steps) == [0, 0, 1, 1]
    assert found.directory is not None
    assert json.loads((found.directory / "results.json").read_text())["check"]["equal"]
    assert repr(found).startswith("check     ")
    assert "<table>" in found._repr_html_()


def test_a_profile_is_planned_and_run_without_a_file(tmp_path: Path) -> None:
    profiled = partita.profile("gpt3-small", **SMALL, batch_size=2, rounds=1)
    assert len(profiled.rows()) == 5
    assert profiled.to_json()["cached"] is False
    assert profiled.to_json()["graph"]["format"] == "partita.graph"
    solution = partita.plan(profiled.graph, devices=2, planner="uniform").solution
    (tmp_path / "options.yaml").write_text("steps: 9\nlearning-rate: 0.01\n")
    found = partita.run(
        solution,
        config=str(tmp_path / "options.yaml"),
        steps=2,
        runs=str(tmp_path / "runs"),
    )
    assert found is not None
    assert len(found.losses) == 2
    again = partita.run_plan(solution, steps=1, runs=tmp_path / "runs")
    assert again.to_json()["steps"] == 1


def test_options_that_would_be_ignored_are_refused() -> None:
    with pytest.raises(InvalidInputError, match="there is no option 'stepps'; did you mean"):
        partita.train("gpt3-small", stepps=2)
    with pytest.raises(InvalidInputError, match="--cluster names machines that are not here"):
        partita.train("gpt3-small", cluster="4xa100")
    with pytest.raises(InvalidInputError, match="one in the --config file"):
        partita.train()
    with pytest.raises(InvalidInputError, match="the script says that itself"):
        partita.run("plan.json", "script.py", steps=3)
    with pytest.raises(InvalidInputError, match="nothing can be measured on meta"):
        partita.profile("gpt3-small", profile_device="meta")
