"""What engines of clusters have in common: their options, and a controller that is away."""

import pytest

from partita.errors import InvalidInputError
from partita.fleet.engines.ray import RayOptions
from partita.fleet.engines.remote import Controller, read_options
from partita.fleet.engines.slurm import SlurmOptions


def test_options_are_read_by_the_types_of_their_fields() -> None:
    assert read_options("ray", RayOptions, {"shared": "no", "every": "3", "start": "yes"}) == (
        RayOptions(shared=False, every=3.0, start=True)
    )
    assert read_options("slurm", SlurmOptions, {"qos": "yes", "every": "0.5"}) == (
        SlurmOptions(qos="yes", every=0.5)
    )


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"start": "maybe"}, "start is 'maybe'"),
        ({"shared": ""}, "expected yes or no"),
        ({"every": "often"}, "expected seconds"),
        ({"every": "nan"}, "'nan'"),
        ({"every": "0"}, "'0'"),
        ({"every": "inf"}, "'inf'"),
        ({"partition": "x"}, "no option 'partition'"),
    ],
)
def test_options_that_are_wrong_are_refused(wrong: dict[str, str], words: str) -> None:
    with pytest.raises(InvalidInputError, match=words):
        read_options("ray", RayOptions, wrong)


def test_a_controller_that_is_away_is_asked_less_and_less_often() -> None:
    now_s = [100.0]
    controller = Controller(noun="Slurm", clock=lambda: now_s[0], first_s=1.0, longest_s=5.0)
    assert controller.pause_s == 0.0
    for pause_s in (1.0, 2.0, 4.0, 5.0, 5.0):
        controller.failed(OSError("refused"))
        assert controller.pause_s == pause_s
    assert controller.failure == "Slurm is away, asked again in 5 s: refused"
    error = controller.away_error()
    assert (str(error), error.retry_s) == ("Slurm is away: refused", 5.0)
    now_s[0] += 7.0
    assert controller.pause_s == 0.0
    controller.answered()
    controller.failed("again")
    assert controller.pause_s == 1.0
