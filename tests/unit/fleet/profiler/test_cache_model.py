"""What memory does to an epoch."""

import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from partita.fleet.profiler.cache_model import (
    SHARES,
    Fetching,
    epoch_s,
    memory_at,
    storage_needed,
)

GIB, MIB = 2.0**30, 2.0**20
PUBLISHED = Fetching(
    dataset_bytes=555 * GIB, storage_bytes_per_s=500 * MIB, memory_bytes_per_s=10 * GIB
)


def test_the_profile_of_the_released_profiler_is_reproduced(shared_data):
    """555 GB, storage of 500 MB/s and memory of 10 GiB/s at any CPU count."""
    path = shared_data / "synergy" / "profiler_sample" / "profile_fake_res18_1gpu_24cpu.json"
    iteration, epochs, storage = json.loads(path.read_text())
    for cpus, seconds in iteration.items():
        cached = seconds * 3690
        for percent, expected in epochs[cpus].items():
            share = int(percent) / 100
            assert epoch_s(PUBLISHED, share, cached) == pytest.approx(expected, rel=1e-12)
            needed = storage_needed(PUBLISHED, share, cached) / MIB
            assert needed == pytest.approx(storage[cpus][percent], rel=1e-12)


def test_an_epoch_that_waits_for_storage_needs_all_of_it():
    assert epoch_s(PUBLISHED, 0.0, 811.8) == pytest.approx(1136.64)
    assert storage_needed(PUBLISHED, 0.0, 811.8) == PUBLISHED.storage_bytes_per_s


def test_cached_data_need_no_storage_and_cost_no_more_than_was_measured():
    slow = Fetching(dataset_bytes=1e9, storage_bytes_per_s=1e6, memory_bytes_per_s=1.0)
    assert epoch_s(slow, 1.0, 5.0) == 5.0
    assert storage_needed(slow, 1.0, 5.0) == 0.0


@given(
    size=st.floats(1e3, 1e13),
    storage=st.floats(1e5, 1e10),
    factor=st.floats(1, 1e3),
    cached=st.floats(0.1, 1e6),
)
def test_storage_as_needed_keeps_the_epoch_at_its_length(size, storage, factor, cached):
    """The oracle is the model itself with the storage that it asks for."""
    fetching = Fetching(
        dataset_bytes=size, storage_bytes_per_s=storage, memory_bytes_per_s=storage * factor
    )
    lengths = [epoch_s(fetching, share, cached) for share in SHARES]
    for longer, shorter in pairwise(lengths):
        assert shorter <= longer * (1 + 1e-9)
    for share, length in zip(SHARES[:-1], lengths[:-1], strict=True):
        needed = storage_needed(fetching, share, cached)
        assert needed <= storage * (1 + 1e-9)
        again = Fetching(
            dataset_bytes=size, storage_bytes_per_s=needed, memory_bytes_per_s=storage * factor
        )
        assert epoch_s(again, share, cached) == pytest.approx(length, rel=1e-6)


def test_memory_follows_lines_between_measured_counts():
    assert [memory_at(n, [1, 2, 4], [10, 16, 20]) for n in (0.5, 1, 1.5, 3, 8)] == [
        5, 10, 13, 18, 20
    ]  # fmt: skip
    assert memory_at(1, [], []) == float("inf")
