import math
import random

import pytest

from partita.formats.milliseconds import milliseconds, seconds


@pytest.mark.parametrize("ms", [0.0, 0.679, 1.1, 636.0, 3.9400000000000004, 1e-300, 1e18, 12.36])
def test_what_a_person_wrote_comes_back(ms):
    assert seconds(milliseconds(seconds(ms))) == seconds(ms)
    assert math.isclose(milliseconds(seconds(ms)), ms, rel_tol=2.3e-16)


@pytest.mark.parametrize("ms", [0.001, 0.679, 0.302, 5.348, 132.125, 89.4])
def test_short_decimals_come_back_exactly(ms):
    assert milliseconds(seconds(ms)) == ms


def test_any_seconds_are_written_the_same_after_one_round():
    rng = random.Random(1)
    for _ in range(3000):
        value_s = rng.random() * 10.0 ** rng.randint(-9, 6)
        once = milliseconds(value_s)
        assert milliseconds(seconds(once)) == once
        assert math.isclose(once, value_s * 1000, rel_tol=4e-16)
