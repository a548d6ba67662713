"""Which options of a training go together, and under which name each arrives."""

import pytest

from partita.core.precision import OPTIMIZERS
from partita.errors import InvalidInputError
from partita.flows.runs.requests import RunRequest, TrainRequest, check_run, check_training


def test_a_schedule_of_the_learning_rate_is_told_from_that_of_the_pipeline() -> None:
    asked = TrainRequest(model="mlp", schedule="cosine")
    assert (asked.schedule, asked.lr_schedule) == ("cosine", "constant")
    found = check_training(asked)
    assert (found.schedule, found.lr_schedule) == (None, "cosine")
    piped = TrainRequest(model="mlp", schedule="gpipe", lr_schedule="linear")
    assert check_training(piped) is piped


def test_two_schedules_of_the_learning_rate_are_refused() -> None:
    with pytest.raises(InvalidInputError, match=r"give.*them"):
        check_training(TrainRequest(model="mlp", schedule="cosine", lr_schedule="linear"))
    same = TrainRequest(model="mlp", schedule="cosine", lr_schedule="cosine")
    assert check_training(same).lr_schedule == "cosine"


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_that_does_not_run_is_refused_before_anything_is_profiled(name: str) -> None:
    for request in (
        TrainRequest(model="mlp", optimizer=name),
        RunRequest(plan="plan.json", optimizer=name),
    ):
        check = check_training if isinstance(request, TrainRequest) else check_run
        if OPTIMIZERS[name].runs:
            check(request)
            continue
        with pytest.raises(InvalidInputError, match=f"--optimizer {name} .* steps with sgd"):
            check(request)
