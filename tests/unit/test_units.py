import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from partita.errors import InvalidInputError
from partita.units import (
    format_bytes,
    format_count,
    format_seconds,
    parse_bandwidth,
    parse_bytes,
    parse_duration,
    parse_money,
    parse_seconds,
    parse_tokens,
)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("16GB", 16e9),
        ("16GiB", 16 * 2**30),
        (" 1.5 gib ", 1.5 * 2**30),
        ("80e9", 80e9),
        ("1e3kB", 1e6),
        (".5MB", 5e5),
        ("5.", 5.0),
        ("+7B", 7.0),
        (16, 16.0),
        (1.5, 1.5),
        ("inf", math.inf),
        (math.inf, math.inf),
        ("0", 0.0),
        ("2PiB", 2 * 2.0**50),
        ("1e-999999", 0.0),
    ],
)
def test_sizes_are_read(text, value):
    assert parse_bytes(text) == value


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("25GB/s", 25e9),
        ("25 GiB/s", 25 * 2**30),
        ("100Gbit/s", 12.5e9),
        ("100gbit/S", 12.5e9),
        ("100Gbps", 12.5e9),
        ("8Mibit/s", 2.0**20),
        ("1e10", 1e10),
        ("7B/s", 7.0),
    ],
)
def test_bandwidths_are_read(text, value):
    assert parse_bandwidth(text) == value


@pytest.mark.parametrize("text", ["100Gb/s", "100gb/s", "8kb/s", "25GBps", "25GBPS", "5b/s"])
def test_a_bandwidth_in_bits_or_bytes_nobody_knows_is_refused(text):
    with pytest.raises(
        InvalidInputError,
        match=rf"^bandwidth '{text}' may mean bits or bytes; write it like 1e9, 25GB/s or 100Gb",
    ):
        parse_bandwidth(text)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("5us", 5e-6),
        ("20 us", 2e-5),
        ("5\N{MICRO SIGN}s", 5e-6),
        ("5\N{GREEK SMALL LETTER MU}s", 5e-6),
        ("3ms", 3e-3),
        ("7ns", 7e-9),
        ("2min", 120.0),
        ("0.5", 0.5),
        ("1s", 1.0),
    ],
)
def test_times_are_read_to_the_last_digit(text, value):
    assert parse_seconds(text) == value


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "size '' is not understood; write it like 16e9, 16GB or 16GiB"),
        ("GB", "size 'GB' is not understood"),
        ("16XB", "size '16XB' is not understood"),
        ("16 G B", "size '16 G B' is not understood"),
        ("1_000", "size '1_000' is not understood"),
        ("0x10", "size '0x10' is not understood"),
        ("16GB/s", "size '16GB/s' is not understood"),
        ("nan", "size 'nan' is not understood"),
        (math.nan, "size nan is not understood"),
        ("-inf", "size '-inf' is not understood"),
        ("-1GB", "size '-1GB' is negative; expected 0 or more"),
        (-1, "size -1 is negative; expected 0 or more"),
        ("1e400", "size '1e400' is beyond the range of numbers"),
        ("1e300PB", "size '1e300PB' is beyond the range of numbers"),
        ("1e9999999", "size '1e9999999' is beyond the range of numbers"),
        ("1e99999999999999999999", "size '1e99999999999999999999' is beyond the range of numb"),
        (10**309, "size of 309 digits or more is beyond the range of numbers"),
        (True, "size True is not a number; write it like 16e9, 16GB or 16GiB"),
        (None, "size None is not a number"),
        ([1], "size [1] is not a number"),
        (b"1", "size b'1' is not a number"),
    ],
)
def test_what_is_not_a_size_is_refused(text, words):
    with pytest.raises(InvalidInputError) as caught:
        parse_bytes(text)
    assert str(caught.value).startswith(words)


def test_long_numbers_and_texts_are_refused_in_a_short_line():
    for value in (-(10**5000), "9" * 5000, "x" * 5000):
        with pytest.raises(InvalidInputError, match=r"understood|is beyond") as hit:
            parse_bytes(value)
        assert len(str(hit.value)) < 130


def test_a_message_says_what_was_read():
    with pytest.raises(InvalidInputError, match="'host' '3 m'"):
        parse_seconds("3 m", "latency of 'host'")


def test_zero_has_no_sign():
    assert math.copysign(1, parse_bytes("-0")) == 1


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (0.5, "0.50 B"),
        (1000, "1.00 kB"),
        (61.2e9, "61.2 GB"),
        (123.4e6, "123 MB"),
        (-61.2e9, "-61.2 GB"),
        (5e15, "5.00 PB"),
        (math.inf, "-"),
        (math.nan, "-"),
    ],
)
def test_bytes_are_shown_for_people(value, text):
    assert format_bytes(value) == text


@pytest.mark.parametrize(
    ("value", "text"), [(7, "7"), (42800, "42.8 k"), (1.5e9, "1.50 G"), (math.nan, "-")]
)
def test_counts_are_shown_for_people(value, text):
    assert format_count(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0 s"),
        (0.00412, "4.12 ms"),
        (12.345, "12.3 s"),
        (1234.5, "1234 s"),
        (5e-6, "5.00 us"),
        (2.5e-10, "0.25 ns"),
        (-0.5, "-500 ms"),
        (math.inf, "-"),
        (math.nan, "-"),
    ],
)
def test_times_are_shown_for_people(value, text):
    assert format_seconds(value) == text


@settings(derandomize=True, deadline=None, max_examples=300)
@given(st.text(max_size=12) | st.floats() | st.integers() | st.none() | st.booleans())
def test_anything_is_read_or_refused(value):
    for parse in (parse_bytes, parse_bandwidth, parse_seconds):
        try:
            assert parse(value) >= 0
        except InvalidInputError:
            continue


@settings(derandomize=True, deadline=None, max_examples=300)
@given(st.floats(min_value=0, allow_infinity=False))
def test_every_finite_number_is_read_back(value):
    assert parse_bytes(value) == parse_bytes(repr(value)) == value
    assert parse_seconds(f"{value!r} s") == value


@settings(derandomize=True, deadline=None, max_examples=300)
@given(st.floats())
def test_any_number_is_shown(value):
    for show in (format_bytes, format_count, format_seconds):
        assert show(value)


@pytest.mark.parametrize(
    ("parse", "text", "value"),
    [
        (parse_tokens, "500k tokens/s", 5e5),
        (parse_tokens, "2T", 2e12),
        (parse_tokens, "300B tokens", 3e11),
        (parse_tokens, "1.5M tok/s", 1.5e6),
        (parse_tokens, "12 tokens per second", 12.0),
        (parse_money, "$50k", 5e4),
        (parse_money, "$50,000", 5e4),
        (parse_money, "1.5M USD", 1.5e6),
        (parse_money, 24, 24.0),
        (parse_duration, "30 days", 30 * 86400.0),
        (parse_duration, "12 h", 43200.0),
        (parse_duration, "2weeks", 1209600.0),
    ],
)
def test_targets_are_read(parse, text, value):
    assert parse(text) == value


@pytest.mark.parametrize(
    ("parse", "text"),
    [
        (parse_tokens, "fast"),
        (parse_tokens, "5 tokens/h"),
        (parse_tokens, ""),
        (parse_money, "$"),
        (parse_money, "$5,00"),
        (parse_money, "50 EUR"),
        (parse_duration, "30"),
        (parse_duration, "1 month"),
        (parse_duration, "soon"),
    ],
)
def test_targets_that_are_none_are_refused_as_they_were_written(parse, text):
    with pytest.raises(InvalidInputError, match="understood; write") as caught:
        parse(text)
    assert repr(text) in str(caught.value)
