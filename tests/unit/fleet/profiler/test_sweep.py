"""Which points a sweep measures, and what it fills in."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from partita.errors import InvalidInputError
from partita.fleet.profiler.sweep import (
    PointOrigin,
    cpu_grid,
    fill,
    halvings,
    sweep,
    usual_step,
)


class Meter:
    """Measures a law, and keeps what it was asked."""

    def __init__(self, law):
        self.law = law
        self.asked = []

    def __call__(self, cpus):
        assert cpus not in self.asked
        self.asked.append(cpus)
        return self.law(cpus)


def published(cpus):
    """The curve with which the released profiler measured eight points of 24."""
    return 1 / max(0.64 * 3 / cpus, 0.22)


def test_the_published_curve_needs_five_of_24_points():
    meter = Meter(published)
    points = sweep(cpu_grid(24, 1), meter)
    assert meter.asked == [24, 12, 6, 3, 9]
    assert [point.cpus for point in points] == list(range(1, 25))
    for point in points:
        assert point.rate == pytest.approx(published(point.cpus), rel=0.05)


def test_a_linear_curve_is_known_from_two_points():
    meter = Meter(lambda cpus: 3 * cpus)
    points = sweep(cpu_grid(64, 1), meter)
    assert meter.asked == [64, 32]
    assert [point.rate for point in points] == pytest.approx([3 * n for n in range(1, 65)])
    assert {point.origin for point in points} == {PointOrigin.MEASURED, PointOrigin.LINEAR}


def test_a_flat_curve_is_halved_down_to_one_cpu():
    meter = Meter(lambda _: 7.0)
    points = sweep(cpu_grid(32, 1), meter)
    assert meter.asked == [32, 16, 8, 4, 2, 1]
    assert {point.rate for point in points} == {7.0}
    assert sum(point.origin is PointOrigin.FLAT for point in points) == 26


def test_the_top_of_a_curve_that_falls_is_found():
    meter = Meter(lambda cpus: cpus if cpus < 6 else 10 - cpus)
    points = sweep(cpu_grid(8, 1), meter)
    assert [point.rate for point in points] == pytest.approx([1, 2, 3, 4, 5, 4, 3, 2])
    assert len(meter.asked) < 8


def test_a_curve_that_bends_up_is_measured_where_it_bends():
    meter = Meter(lambda cpus: cpus**2)
    points = sweep(cpu_grid(9, 1), meter)
    assert [point.rate for point in points] == pytest.approx([n * n for n in range(1, 10)], rel=0.1)
    assert {1, 2} <= set(meter.asked)


def test_one_point_is_a_sweep():
    assert [point.rate for point in sweep((1.0,), lambda _: 2.0)] == [2.0]


@given(
    slopes=st.lists(st.floats(0, 50), min_size=1, max_size=4),
    rises=st.lists(st.floats(0.01, 100), min_size=4, max_size=4),
    count=st.integers(1, 40),
)
def test_concave_curves_are_filled_in_within_the_tolerance(slopes, rises, count):
    """The oracle is the curve itself: the least of a line through the origin and others."""

    def law(cpus):
        lines = [high + slope * cpus for slope, high in zip(slopes, rises, strict=False)]
        return min([60.0 * cpus, *lines])

    meter = Meter(law)
    points = sweep(cpu_grid(count, 1), meter)
    assert meter.asked[0] == count
    for point in points:
        assert point.rate == pytest.approx(law(point.cpus), rel=0.1)
        assert (point.origin is PointOrigin.MEASURED) == (point.cpus in meter.asked)


def test_the_grid_ends_at_the_top():
    assert cpu_grid(2, 0.5) == (0.5, 1.0, 1.5, 2.0)
    assert cpu_grid(3.5, 1) == (1, 2, 3, 3.5)
    assert cpu_grid(0.5, 1) == (0.5,)


@pytest.mark.parametrize(("top", "step"), [(2, 0), (0, 1), (100_000, 1)])
def test_a_grid_without_points_or_end_is_refused(top, step):
    with pytest.raises(InvalidInputError, match="is no sweep"):
        cpu_grid(top, step)


def test_few_cpus_are_split_where_parts_are_possible():
    assert [usual_step(n, fractions=True) for n in (1, 2, 4, 7, 8, 64)] == [
        0.25, 0.25, 0.5, 0.5, 1, 1
    ]  # fmt: skip
    assert usual_step(2, fractions=False) == 1


def test_halvings_go_from_the_top_to_the_least():
    assert halvings(cpu_grid(24, 1)) == (24, 12, 6, 3, 2, 1)
    assert halvings((1.0,)) == (1.0,)


def test_between_measured_points_lines_are_filled_in():
    points = fill((1, 2, 3, 4, 5, 6), {2: 10.0, 4: 12.0, 6: 12.5})
    assert [point.rate for point in points] == pytest.approx([5, 10, 11, 12, 12.25, 12.5])
    assert [point.origin.value for point in points] == [
        "linear", "measured", "linear", "measured", "flat", "measured"
    ]  # fmt: skip
