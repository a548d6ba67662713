"""What counts as equal to one process, and what does not."""

from dataclasses import replace

import pytest
import torch

from partita.errors import WorkerError
from partita.runtime.results import RunResult, StepResult
from partita.runtime.verify import compare_runs, tolerance_of

NAN = float("nan")
STEP = StepResult(
    outputs={"logits": (torch.tensor([1.0, -2.0]), torch.tensor([3.0, 4.0]))},
    losses=(0.5, 0.25),
    loss=0.375,
    gradients={"weight": torch.tensor([3.0, 4.0]), "bias": torch.tensor([1e-9])},
)


def run(step: StepResult) -> RunResult:
    return RunResult(steps=(step,), state={}, statistics={})


def test_equal_runs_are_equal_and_everything_is_counted() -> None:
    verdict = compare_runs(run(STEP), run(STEP), 1e-9)
    assert verdict.is_equal
    assert verdict.worst == 0
    assert verdict.line() == (
        "loss, 1 output, 2 gradients equal the captured graph (worst 0e+00, limit 1e-09)"
    )


def test_a_difference_is_relative_to_the_gradients_norm_with_a_floor() -> None:
    moved = {"weight": torch.tensor([3.0, 4.005]), "bias": torch.tensor([2e-9])}
    verdict = compare_runs(run(replace(STEP, gradients=moved)), run(STEP), 1e-9)
    assert not verdict.is_equal
    values = {d.name: d.value for d in verdict.differences if d.what == "gradient"}
    assert values["weight"] == pytest.approx(1e-3, rel=1e-3)
    assert values["bias"] == pytest.approx(1e-9 / 5e-6, rel=1e-3)  # a millionth of the largest
    assert verdict.differences[0].name == "weight"
    assert "DIFFER" in verdict.line()


def test_a_gradient_that_is_zero_but_for_rounding_is_no_difference_in_the_runs_own_numbers() -> (
    None
):
    # The biases of an attention's keys: what two orders of summing leave of zero, in float32.
    moved = {"weight": torch.tensor([3.0, 4.0]), "bias": torch.tensor([-8e-9])}
    verdict = compare_runs(run(replace(STEP, gradients=moved)), run(STEP), 1e-4)
    assert verdict.is_equal
    moved["bias"] = torch.tensor([1e-7])  # more than rounding
    assert not compare_runs(run(replace(STEP, gradients=moved)), run(STEP), 1e-4).is_equal


@pytest.mark.parametrize(
    "wrong",
    [
        replace(STEP, losses=(NAN, 0.25)),
        replace(STEP, outputs={"logits": (torch.tensor([1.0, NAN]), torch.tensor([3.0, 4.0]))}),
        replace(STEP, gradients={**STEP.gradients, "bias": torch.tensor([NAN])}),
        replace(STEP, gradients={**STEP.gradients, "bias": torch.tensor([float("inf")])}),
    ],
    ids=["loss", "output", "gradient", "infinite"],
)
def test_what_is_no_number_on_one_side_only_is_a_difference(wrong: StepResult) -> None:
    for found, wanted in ((wrong, STEP), (STEP, wrong)):
        verdict = compare_runs(run(found), run(wanted), 1.0)
        assert not verdict.is_equal
        assert verdict.worst == float("inf")


def test_the_same_overflow_on_both_sides_is_equal() -> None:
    wrong = replace(STEP, gradients={"weight": torch.tensor([NAN, 4.0])}, losses=(NAN, 0.25))
    assert compare_runs(run(wrong), run(wrong), 1e-9).is_equal


@pytest.mark.parametrize(
    ("step", "words"),
    [
        (replace(STEP, gradients={"weight": STEP.gradients["weight"]}), "no gradient of 'bias'"),
        (replace(STEP, outputs={}), "0 microbatches of output 'logits'"),
        (replace(STEP, losses=(0.5,)), "1 losses"),
    ],
)
def test_what_is_missing_is_an_error(step: StepResult, words: str) -> None:
    with pytest.raises(WorkerError, match=words):
        compare_runs(run(step), run(STEP), 1e-9)


def test_the_tolerance_follows_the_coarsest_type() -> None:
    exact, coarse = torch.zeros(1, dtype=torch.float64), torch.zeros(1, dtype=torch.bfloat16)
    assert tolerance_of([exact]) < tolerance_of([exact, torch.zeros(1)]) < tolerance_of([coarse])
