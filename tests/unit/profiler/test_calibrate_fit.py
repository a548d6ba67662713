"""The line through times of messages, on made-up times."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from partita.errors import InvalidInputError
from partita.profiler.calibrate.fit import SizeUse, fit_link, one_way_s
from partita.profiler.calibrate.records import SIZES_BYTES

RATES = st.floats(1e6, 1e11)
LATENCIES = st.floats(1e-6, 0.1)
LARGE = tuple(2**k for k in range(12, 28, 2))


def exact(sizes, latency_s, rate):
    return [[latency_s + size / rate] for size in sizes]


@given(latency_s=LATENCIES, rate=RATES)
def test_a_line_is_found_exactly(latency_s, rate):
    sizes = (1, *LARGE)
    fit = fit_link(sizes, exact(sizes, latency_s, rate))
    assert fit.latency_s == pytest.approx(latency_s, rel=0.01, abs=2 / rate)
    assert fit.bandwidth_bytes_per_s == pytest.approx(rate, rel=0.01)
    assert fit.off_line == ()


@given(
    latency_s=st.floats(1e-5, 0.001),
    rate=st.floats(1e7, 2e9),
    seed=st.integers(0, 10_000),
)
def test_a_busy_machine_that_only_adds_time_hardly_moves_the_line(latency_s, rate, seed):
    rng = random.Random(seed)
    sizes = (64, *LARGE)
    times = [
        [(latency_s + size / rate) * (1 + rng.expovariate(2.0)) for _ in range(12)]
        for size in sizes
    ]
    fit = fit_link(sizes, times)
    assert fit.latency_s == pytest.approx(latency_s, rel=0.4)
    assert fit.bandwidth_bytes_per_s == pytest.approx(rate, rel=0.25)


@given(
    latency_s=st.floats(1e-3, 0.02),
    rate=st.floats(5e7, 2e9),
    rounds=st.floats(0.5, 4.0),
    seed=st.integers(0, 1000),
)
@settings(max_examples=200)
def test_sizes_delayed_by_slow_start_do_not_count(latency_s, rate, rounds, seed):
    rng = random.Random(seed)
    sizes = (64, 1024, 65_536, 262_144, 2**20, 2**23, 2**25, 2**27)
    times = exact(sizes, latency_s, rate)
    for index in (2, 3):
        times[index][0] += rounds * 2 * latency_s
    times = [[time * rng.uniform(1, 1.02) for _ in range(3)] for (time,) in times]
    fit = fit_link(sizes, times)
    assert fit.latency_s == pytest.approx(latency_s, rel=0.05)
    assert fit.bandwidth_bytes_per_s == pytest.approx(rate, rel=0.1)


@given(rate=st.floats(5e7, 2e9))
def test_a_burst_that_a_token_bucket_lets_through_does_not_count(rate):
    sizes = (64, 65_536, 262_144, 2**20, 2**22, 2**24, 2**26)
    times = [[60e-6 + max(size / 1e10, (size - 262_144) / rate)] for size in sizes]
    fit = fit_link(sizes, times)
    assert fit.bandwidth_bytes_per_s == pytest.approx(rate, rel=0.1)
    assert fit.use[1:3] == (SizeUse.FAST, SizeUse.FAST)


def test_slow_start_of_every_long_message_moves_neither_latency_nor_rate():
    sizes = SIZES_BYTES
    times = exact(sizes, 0.005, 100e6)
    for index in range(2, len(sizes)):
        times[index][0] += 0.02
    fit = fit_link(sizes, times)
    assert fit.latency_s == pytest.approx(0.005, rel=0.01)
    assert fit.bandwidth_bytes_per_s == pytest.approx(100e6, rel=0.05)
    assert max(fit.residuals) > 0.1


@given(
    times=st.lists(st.lists(st.floats(1e-9, 1e3), min_size=1, max_size=3), min_size=7, max_size=7)
)
def test_any_times_give_a_usable_line(times):
    fit = fit_link(SIZES_BYTES, times)
    assert 0 <= fit.latency_s < float("inf")
    assert 0 < fit.bandwidth_bytes_per_s < float("inf")
    assert len(fit.residuals) == len(fit.use) == 7


def test_residuals_are_relative_to_the_line():
    sizes = (64, 2**20, 2**22, 2**24, 2**26)
    times = exact(sizes, 1e-4, 1e9)
    times[1][0] *= 1.5
    fit = fit_link(sizes, times)
    assert fit.residuals[1] == pytest.approx(0.5, abs=0.01)
    assert fit.use[1] is SizeUse.SLOW
    assert fit.off_line == (2**20,)
    assert abs(fit.worst_residual) < 0.01


def test_without_short_messages_the_latency_is_where_the_line_begins():
    fit = fit_link(LARGE, exact(LARGE, 0.003, 1e9))
    assert fit.latency_s == pytest.approx(0.003, rel=0.01)


def test_a_round_trip_less_its_answer_is_one_way():
    assert one_way_s([[0.3, 0.1]], 0.1) == [[pytest.approx(0.2), 1e-9]]


@pytest.mark.parametrize(
    ("sizes", "times", "message"),
    [
        ((64, 4096), [[1.0]], "2 sizes and 1 lists"),
        ((64, 128), [[1.0], [1.0]], "no message is larger"),
        ((4096, 64), [[1.0], [1.0]], "ascending"),
        ((64, 4096), [[1.0], []], "times of 4096 bytes"),
        ((64, 4096), [[1.0], [0.0]], "above 0"),
        ((64, 4096), [[1.0], [float("nan")]], "finite"),
    ],
)
def test_impossible_times_are_refused(sizes, times, message):
    with pytest.raises(InvalidInputError, match=message):
        fit_link(sizes, times)
