"""Whatever goes wrong in a run ends it in time, names who and where, and leaves no process."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow

SCENARIOS = Path(__file__).with_name("fault_scenarios.py").read_text(encoding="utf-8")
STALL_LIMIT_S = 4.0  # a first step on a busy machine takes two
LIMIT_S = 300.0


@pytest.fixture(scope="module")
def outcomes(
    tmp_path_factory: pytest.TempPathFactory, make_job: Callable[..., Any], commands: Any
) -> Any:
    """Return what came of each fault, in a run of three stages on three ranks."""
    files = make_job(
        tmp_path_factory.mktemp("faults") / "job",
        [0, 1, 2],
        steps=10_000,
        stall_limit_s=STALL_LIMIT_S,
        keep_results=False,
    )
    result = commands.run(
        str(files.path), python=SCENARIOS, folder=files.path.parent, timeout_s=LIMIT_S
    )
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


WHERE = "step 1, d1: FORWARD(stage 1, microbatch 2)"


@pytest.mark.parametrize(
    ("fault", "kind", "code", "words"),
    [
        ("killed", "WorkerError", 5, [f"rank 1 was killed by SIGKILL at {WHERE}"]),
        ("frozen", "WorkerError", 5, ["rank 1 stands still, without a sign of life for", WHERE]),
        ("all frozen", "WorkerError", 5, ["stands still, without a sign of life for"]),
        ("raises", "WorkerError", 5, [f"rank 1 at {WHERE}", "KeyError: 'no such thing'"]),
        ("sleeps", "WorkerError", 5, [f"the others wait for rank 1: rank 1 has been at {WHERE}"]),
        ("aborts", "WorkerError", 5, [f"rank 1 was killed by SIGABRT at {WHERE}"]),
        (
            "wrong shape",
            "InvalidInputError",
            2,
            ["of microbatch", "on rank 1", "both ends must agree"],
        ),
        ("other torch", "InvalidInputError", 2, ["torch version", "1.0.0", "rank 1"]),
        ("stuck at start", "WorkerError", 5, ["the others wait for rank 1"]),
        (
            "reused",
            "WorkerError",
            5,
            ["the ranks have ended: rank 2: ArithmeticError: on request; start new ones"],
        ),
        ("interrupted", "KeyboardInterrupt", 0, []),
        ("terminated", "SystemExit", 143, []),
    ],
)
def test_a_fault_ends_the_run_and_is_named(
    outcomes: Any, fault: str, kind: str, code: int, words: list[str]
) -> None:
    outcome = outcomes[fault]
    first = outcome["text"].partition("\n")[0]
    assert (outcome["kind"], outcome["code"]) == (kind, code), outcome["text"]
    for word in words:
        assert word in first, first
    assert not outcome["left"]


@pytest.mark.parametrize("fault", ["killed", "frozen", "all frozen", "sleeps"])
def test_the_error_says_what_every_rank_was_doing(outcomes: Any, fault: str) -> None:
    lines = outcomes[fault]["text"].splitlines()
    for rank in range(3):
        assert any(line.startswith(f"  rank {rank} ") for line in lines), lines


def test_a_clock_that_is_ahead_is_read_to_within_the_way_there_and_back(outcomes: Any) -> None:
    none, skewed, same = outcomes["clocks"]
    assert all(ahead == 0 for _, ahead, _ in none[0])
    for _, ahead, within in same[0]:
        assert abs(ahead) <= within
    (_, before, within), (_, after, within_after) = skewed[0]
    assert abs(before - 5_000_000_000) <= within + 0.001 * 60e9
    assert after - before >= 0.001 * 0.2e9 - within - within_after


def test_times_of_a_clock_that_is_ahead_are_moved_to_rank_0(outcomes: Any) -> None:
    _, skewed, _ = outcomes["clocks"]
    assert abs(skewed[1]) < 1e9
