"""Packed columns: what goes in comes out, small."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from partita.errors import FormatError, InvalidInputError
from partita.report.columns import pack, ticks, unpack


@given(st.lists(st.integers(0, 2**32 - 1)), st.lists(st.integers(-(2**31), 2**31 - 1), max_size=50))
def test_columns_come_back_whatever_their_numbers(plain: list[int], signed: list[int]) -> None:
    found = unpack(json.loads(json.dumps(pack({"a": np.array(plain), "b": np.array(signed)}))))
    assert found["a"].tolist() == plain
    assert found["b"].tolist() == signed


def test_times_come_back_to_a_2_32nd_of_the_step() -> None:
    times = np.sort(np.random.default_rng(1).random(1000)) * 7.5
    found = unpack(pack({"t": ticks(times, 7.5)}))["t"]
    assert np.abs(found - times).max() <= 7.5 / 2**32


def test_regular_columns_need_next_to_nothing() -> None:
    packed = pack({"start": np.arange(200_000) * 1717, "kind": np.tile([0, 1, 7], 66_667)})
    assert len(json.dumps(packed)) < 3000


def test_equal_columns_are_packed_alike() -> None:
    columns = {"a": np.arange(100)}
    assert pack(columns) == pack(columns)


def test_numbers_beyond_32_bits_are_refused() -> None:
    for bad in ([2**32], [-1, 2**31], [-(2**31) - 1]):
        with pytest.raises(InvalidInputError, match="'a' has numbers beyond"):
            pack({"a": np.array(bad)})


def test_another_version_is_refused() -> None:
    with pytest.raises(FormatError, match="version 2; expected 1"):
        unpack({**pack({"a": np.arange(3)}), "version": 2})
