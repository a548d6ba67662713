"""The emulated job of ``examples``: what it does in a round depends on its grant alone."""

import importlib.util
import time
from pathlib import Path
from types import ModuleType

import pytest

EXAMPLE = Path(__file__).parents[4] / "examples" / "metered_job.py"


@pytest.fixture
def metered() -> ModuleType:
    spec = importlib.util.spec_from_file_location("metered_job", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Words:
    """A lease whose scheduler says one thing after another; each only when it is waited for."""

    steps, step, is_over = 1000, 0, False

    def __init__(self, *said: tuple[float, float, float]) -> None:
        self._said = list(said)
        self.waited = 0

    @property
    def term(self) -> tuple[float, float]:
        return self._said[0][:2]

    @property
    def grant(self) -> dict[str, float]:
        return {"gpus": 1, "cpus": self._said[0][2]}

    def wait_beyond(self, end_s: float, limit_s: float) -> bool:
        del limit_s
        self.waited += 1
        assert self.waited < 50, "the meter waits for ever"
        if len(self._said) > 1:
            self._said.pop(0)
        elif self.term[1] <= end_s:
            self.is_over = True
        return True


def steps_done(module: ModuleType, words: Words) -> int:
    meter = module.Meter(0.1, [(1.0, 1.0), (4.0, 4.0)], by_affinity=False, part=0.0)
    return sum(1 for _ in meter.steps(words, 0.0))


@pytest.fixture(autouse=True)
def long_ago(monkeypatch: pytest.MonkeyPatch) -> None:
    """The real clock stands at 0, and nobody sleeps."""
    monkeypatch.setattr(time, "time", lambda: 0.0)
    monkeypatch.setattr(time, "sleep", lambda seconds: None)


def test_a_round_does_what_its_grant_allows(metered: ModuleType) -> None:
    assert steps_done(metered, Words((0.0, 1.05, 1), (1.05, 2.05, 4))) == 10 + 40


def test_rounds_that_nobody_spoke_of_run_on_with_the_old_grant(metered: ModuleType) -> None:
    """A scheduler that was away comes back two rounds later; this once looped for ever."""
    assert steps_done(metered, Words((0.0, 1.05, 1), (3.05, 4.05, 4))) == 30 + 40
