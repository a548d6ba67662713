"""Levels from matrices of links."""

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from partita.catalogue.hierarchy import describe_levels, infer_levels
from partita.core.cluster import LinkMatrix
from partita.errors import InvalidInputError

# Bandwidth and latency inside a host, a rack, a room, a site.
SPEEDS = ((100e9, 5e-6), (10e9, 2e-5), (1e9, 1e-4), (1e8, 5e-3))


def tree(fanout, *, order=None, noise=0.0, seed=0):
    """Return matrices of a tree of levels with so many children each, innermost first."""
    rng = random.Random(seed)
    size = int(np.prod(fanout))
    order = list(range(size)) if order is None else order
    rates, delays = np.zeros((size, size)), np.zeros((size, size))
    for a in range(size):
        for b in range(size):
            if a == b:
                continue
            level, width = 0, fanout[0]
            while order[a] // width != order[b] // width:
                level += 1
                width *= fanout[level]
            rates[a, b] = SPEEDS[level][0] * rng.uniform(1 - noise, 1)
            delays[a, b] = SPEEDS[level][1] * rng.uniform(1, 1 + noise)
    return rates, delays


def groups(level):
    return [
        frozenset(np.flatnonzero(level.group_of == g).tolist())
        for g in range(int(level.group_of.max()) + 1)
    ]


@given(
    fanout=st.lists(st.integers(2, 4), min_size=1, max_size=3),
    seed=st.integers(0, 1000),
)
def test_a_noisy_tree_in_any_order_of_devices_is_found(fanout, seed):
    size = int(np.prod(fanout))
    order = list(range(size))
    random.Random(seed).shuffle(order)
    levels = infer_levels(*tree(fanout, order=order, noise=0.2, seed=seed))
    assert [level.name for level in levels] == ["host", "rack", "room"][: len(fanout)]
    width = 1
    for index, (level, count) in enumerate(zip(levels, fanout, strict=True)):
        width *= count
        expected = {
            frozenset(d for d in range(size) if order[d] // width == g)
            for g in range(size // width)
        }
        assert set(groups(level)) == expected
        assert level.bandwidth_bytes_per_s == pytest.approx(SPEEDS[index][0] * 0.9, rel=0.15)
        assert level.latency_s == pytest.approx(SPEEDS[index][1] * 1.1, rel=0.15)


def test_equal_links_are_one_level():
    (level,) = infer_levels(*tree([5], noise=0.3))
    assert level.name == "host"
    assert groups(level) == [frozenset(range(5))]


def test_one_device_has_no_level():
    assert infer_levels(np.zeros((1, 1)), np.zeros((1, 1))) == ()


def test_levels_that_differ_in_latency_only_are_told_apart():
    rates, delays = tree([2, 2])
    rates[:] = 1e9
    names = [level.name for level in infer_levels(rates, delays)]
    assert names == ["host"]
    delays[delays > 1e-5] = 5e-3
    names = [level.name for level in infer_levels(rates, delays)]
    assert names == ["host", "rack"]


def test_hosts_of_unlike_links_inside_are_one_level_with_a_bandwidth_each():
    rates, delays = tree([2, 2])
    rates[2, 3] = rates[3, 2] = 30e9
    host, rack = infer_levels(rates, delays)
    assert host.bandwidth_bytes_per_s.tolist() == [100e9, 30e9]
    assert groups(host) == [frozenset({0, 1}), frozenset({2, 3})]
    assert rack.bandwidth_bytes_per_s.tolist() == [10e9]


def test_a_host_of_one_device_is_a_group_of_its_own():
    rates, delays = tree([2, 2])
    host, rack = infer_levels(rates[:3, :3], delays[:3, :3])
    assert groups(host) == [frozenset({0, 1}), frozenset({2})]
    assert groups(rack) == [frozenset({0, 1, 2})]


def test_a_slow_direction_is_a_matrix():
    rates, delays = tree([4])
    rates[np.triu_indices(4)] = 1e8
    np.fill_diagonal(rates, 0)
    assert isinstance(infer_levels(rates, delays), LinkMatrix)


def test_a_ring_is_a_matrix():
    size = 8
    rates = np.full((size, size), 1e8)
    for device in range(size):
        rates[device, (device + 1) % size] = rates[(device + 1) % size, device] = 1e11
    assert isinstance(infer_levels(rates, np.full((size, size), 1e-5)), LinkMatrix)


def test_one_spoiled_link_does_not_break_the_tree():
    rates, delays = tree([4, 2])
    rates[0, 1] /= 3
    assert [level.name for level in infer_levels(rates, delays)] == ["host", "rack"]


@pytest.mark.parametrize(
    ("host_of", "names"),
    [
        ([0, 0, 1, 1], ["host", "rack"]),
        ([0, 0, 0, 0], ["island", "host"]),
        ([0, 1, 2, 3], ["rack", "room"]),
    ],
)
def test_levels_are_named_by_the_hosts(host_of, names):
    levels = infer_levels(*tree([2, 2]), host_of=host_of)
    assert [level.name for level in levels] == names


def test_hosts_make_a_level_even_if_links_are_alike():
    host, rack = infer_levels(*tree([4]), host_of=[0, 0, 1, 1])
    assert (host.name, rack.name) == ("host", "rack")
    assert groups(host) == [frozenset({0, 1}), frozenset({2, 3})]
    assert rack.bandwidth_bytes_per_s.tolist() == [100e9]


def test_hosts_across_the_groups_of_the_links_are_not_forced_in():
    levels = infer_levels(*tree([2, 2]), host_of=[0, 1, 0, 1])
    assert groups(levels[0]) == [frozenset({0, 1}), frozenset({2, 3})]


@pytest.mark.parametrize(
    ("rates", "delays", "message"),
    [
        (np.ones((2, 3)), np.ones((2, 3)), "square"),
        (np.ones((2, 2)), np.ones((3, 3)), "latencies have shape"),
        (np.zeros((2, 2)), np.ones((2, 2)), "bandwidth from 0 to 1"),
        (np.ones((2, 2)), np.full((2, 2), np.nan), "latency from 0 to 1"),
    ],
)
def test_impossible_matrices_are_refused(rates, delays, message):
    with pytest.raises(InvalidInputError, match=message):
        infer_levels(rates, delays)


def test_hosts_must_be_given_for_all_devices():
    with pytest.raises(InvalidInputError, match=r"3 hosts.*4"):
        infer_levels(*tree([4]), host_of=[0, 0, 0])


def test_the_drawing_has_a_line_for_each_group():
    levels = infer_levels(*tree([2, 2]))
    assert describe_levels(levels, list("abcd")) == [
        "rack 0: 1e+04 MB/s, 0.02 ms",
        "  host 0: 1e+05 MB/s, 0.005 ms",
        "    a, b",
        "  host 1: 1e+05 MB/s, 0.005 ms",
        "    c, d",
    ]
