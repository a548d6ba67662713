import numpy as np
import pytest

from partita.core.energy import Frontier
from partita.energy.frontier.choose import PointLimits, choose_point, parse_limits
from partita.errors import InfeasibleError, InvalidInputError


def frontier() -> Frontier:
    return Frontier(
        devices=("gpu0",),
        num_instructions=1,
        time_s=np.array([10.0, 10.5, 12.0, 14.0]),
        energy_j=np.array([1000.0, 950.0, 900.0, 880.0]),
        bound_j=np.array([990.0, 940.0, 890.0, 870.0]),
        clock_mhz=np.array([1400.0, 1300.0, 1200.0, 1100.0]),
        all_max_s=10.0,
        all_max_j=1200.0,
        fastest_s=10.0,
        best_s=14.0,
    )


@pytest.mark.parametrize(
    ("wish", "point"),
    [
        (PointLimits(), 0),
        (PointLimits(least_energy=True), 3),
        (PointLimits(slowdown=0.0), 0),
        (PointLimits(slowdown=0.06), 1),
        (PointLimits(deadline_s=13.0), 2),
        (PointLimits(energy_j=940.0), 2),
        (PointLimits(power_w=91.0), 1),
        (PointLimits(straggler_s=12.5), 2),
        (PointLimits(straggler_s=100.0), 3),
        (PointLimits(straggler_s=5.0), 0),
        (PointLimits(straggler_s=5.0, slowdown=0.06), 1),
        (PointLimits(deadline_s=13.0, energy_j=960.0), 2),
        (PointLimits(deadline_s=10.6, straggler_s=13.0), 1),
    ],
)
def test_each_wish_has_its_point(wish: PointLimits, point: int) -> None:
    assert choose_point(frontier(), wish) == point


@pytest.mark.parametrize(
    ("wish", "words"),
    [
        (PointLimits(deadline_s=9.0), "no point .* 9 s; it reaches 10 s"),
        (PointLimits(energy_j=100.0), "100 J; it reaches 880 J"),
        (PointLimits(power_w=1.0), "1 W; it reaches 62"),
        (PointLimits(energy_j=890.0, deadline_s=11.0), "these limits together"),
    ],
)
def test_a_wish_that_nothing_keeps_is_infeasible(wish: PointLimits, words: str) -> None:
    with pytest.raises(InfeasibleError, match=words):
        choose_point(frontier(), wish)


@pytest.mark.parametrize("value", [-1.0, float("nan"), float("inf")])
def test_a_wish_is_a_number(value: float) -> None:
    with pytest.raises(InvalidInputError, match="deadline_s"):
        PointLimits(deadline_s=value)


def test_a_wish_is_read_from_a_text() -> None:
    assert parse_limits("slowdown=0.02") == PointLimits(slowdown=0.02)
    assert parse_limits("deadline=1.5, power=900") == PointLimits(deadline_s=1.5, power_w=900.0)
    assert parse_limits("least-energy") == PointLimits(least_energy=True)
    for text, why in (
        ("fast", "limit 'fast'; expected slowdown=NUMBER"),
        ("slowdown=1,slowdown=2", "each once"),
        ("slowdown=x", "'x' is no number"),
        ("slowdown=-1", "expected a number >= 0"),
        ("least-energy=1", "limit 'least-energy=1'"),
    ):
        with pytest.raises(InvalidInputError, match=why):
            parse_limits(text)
