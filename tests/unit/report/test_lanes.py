"""Which devices are shown, what fills a column, and where an axis has its ticks."""

import numpy as np
import pytest

from partita.core.program import Kind
from partita.report.lanes import (
    Cell,
    axis_ticks,
    cell_numbers,
    column_shares,
    compute_rows,
    dominant_cells,
    shown_devices,
)


@pytest.mark.parametrize(("devices", "rows"), [(40, 40), (41, 40), (64, 40), (1000, 7), (9, 1)])
def test_all_devices_are_shown_or_counted(devices, rows):
    shown = shown_devices(devices, rows)
    assert [*shown.head, *shown.hidden, *shown.tail] == list(range(devices))
    lines = len(shown.head) + len(shown.tail) + bool(shown.hidden)
    assert lines == min(devices, max(rows, 2))


def test_shares_of_columns_add_up_and_overlaps_count_once(make):
    rows = [
        (0, Kind.FORWARD, 0, 0, -1, 0.0, 1.5),
        (0, Kind.BACKWARD, 0, 0, -1, 1.0, 3.0),
        (0, Kind.ALL_REDUCE, 0, -1, -1, 3.0, 3.5),
        (0, Kind.ALL_REDUCE, 0, -1, -1, 3.0, 4.0),
        (1, Kind.SEND, 0, 0, 0, 2.0, 2.5),
    ]
    shares = column_shares(make(rows), 0, np.linspace(0, 4, 5))
    assert shares[Cell.FORWARD].tolist() == [1, 0.5, 0, 0]
    assert shares[Cell.BACKWARD].tolist() == [0, 0.5, 1, 0]
    assert shares[Cell.IDLE].tolist() == [0, 0, 0, 1]
    assert shares[Cell.COLLECTIVE].tolist() == [0, 0, 0, 1]
    assert shares[Cell.TRANSFER].tolist() == [0, 0, 0.5, 0]


def test_a_column_shows_what_fills_it_best(make):
    many = [
        (0, Kind.BACKWARD if i % 2 else Kind.FORWARD, 0, i, -1, i * 0.1, (i + 1) * 0.1)
        for i in range(10)
    ]
    rows = [
        *many,
        (0, Kind.FORWARD, 0, 10, -1, 1.0, 1.4),
        (0, Kind.UPDATE, 0, -1, -1, 2.0, 3.0),
        (0, Kind.BROADCAST, 0, -1, -1, 3.0, 4.0),
        (1, Kind.SEND, 0, 0, 0, 4.0, 5.0),
    ]
    cells = dominant_cells(make(rows), 0, np.linspace(0, 5, 6))
    expected = [Cell.MIXED, Cell.IDLE, Cell.UPDATE, Cell.COLLECTIVE, Cell.TRANSFER]
    assert cells.tolist() == expected


def test_a_gap_between_two_rows_is_idle_and_not_mixed(make):
    rows = [(0, Kind.BACKWARD, 0, 0, -1, 0.0, 1.4), (0, Kind.FORWARD, 0, 1, -1, 1.7, 3.0)]
    cells = dominant_cells(make(rows), 0, np.linspace(0, 3, 4))
    assert cells.tolist() == [Cell.BACKWARD, Cell.IDLE, Cell.FORWARD]


def test_rows_that_take_no_time_are_not_cells(make):
    rows = [(0, Kind.LOAD, 0, 0, -1, 0.0, 0.0), (0, Kind.FORWARD, 0, 0, -1, 0.0, 1.0)]
    assert compute_rows(make(rows), 0).tolist() == [1]
    assert cell_numbers(make(rows))[0] == "stage"


@pytest.mark.parametrize("exponent", range(-11, 9))
@pytest.mark.parametrize("factor", [1.0, 1.7, 9.99])
def test_ticks_are_few_round_and_within_the_axis(exponent, factor):
    makespan_s = factor * 10.0**exponent
    ticks, scale, unit = axis_ticks(makespan_s, 6)
    assert 2 <= len(ticks) <= 7
    assert ticks[0] == 0
    assert ticks[-1] <= makespan_s * (1 + 1e-9)
    assert {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}[unit] == scale
    assert all(len(f"{tick / scale:g}") <= 7 for tick in ticks[1:])
