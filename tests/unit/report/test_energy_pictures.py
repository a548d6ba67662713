"""Pictures of energy: frontiers and steps coloured by clock."""

import dataclasses
import xml.etree.ElementTree as ET

import numpy as np
import pytest

from partita.core.program import Kind
from partita.report.clock_svg import clock_svg, colour_of
from partita.report.picture import frontier_picture
from partita.testing.builders import small_frontier

NS = "{http://www.w3.org/2000/svg}"


def texts(svg):
    return [element.text for element in ET.fromstring(svg).iter(f"{NS}text")]


def test_a_frontier_of_one_point_is_drawn():
    one = dataclasses.replace(
        small_frontier(),
        time_s=np.array([3.0]),
        energy_j=np.array([900.0]),
        bound_j=np.array([900.0]),
        clock_mhz=np.array([1400.0, 1400.0]),
        best_s=3.0,
    )
    assert "●" in frontier_picture(one, 60)


def test_the_curve_in_the_terminal_fits_and_has_other_signs_where_needed():
    drawn = frontier_picture(small_frontier(), 60, chosen=1)
    lines = drawn.splitlines()
    assert max(map(len, lines)) <= 60
    assert lines[0].startswith("900.0 J │")
    assert {"▲", "·", "◆"} <= set(drawn)
    plain = frontier_picture(small_frontier(), 60, chosen=1, encoding="ascii")
    assert plain.isascii()
    assert "^" in plain


@pytest.fixture
def clocked(make):
    rows = [
        (0, Kind.FORWARD, 0, 0, -1, 0.0, 1.0),
        (0, Kind.BACKWARD, 0, 0, -1, 4.0, 6.0),
        (1, Kind.FORWARD, 1, 0, -1, 1.5, 2.5),
        (1, Kind.UPDATE, 1, -1, -1, 2.5, 3.5),
    ]
    clocks, joules = np.array([1400.0, 700.0, 1000.0, np.nan]), np.array([9.0, 8.0, 7.0, np.nan])
    return dataclasses.replace(make(rows), clock_mhz=clocks, energy_j=joules)


def test_cells_have_the_colour_of_their_clock_and_say_it(clocked):
    svg = clock_svg(clocked, title="plan & more", facts=["10 J"])
    root = ET.fromstring(svg)
    cells = {
        rect.findtext(f"{NS}title"): rect.get("fill")
        for rect in root.iter(f"{NS}rect")
        if rect.findtext(f"{NS}title")
    }
    ends = (700.0, 1400.0)
    assert cells["F stage 0 microbatch 0: 0 s to 1.00 s, 1400 MHz, 9.000 J"] == colour_of(
        1400, ends
    )
    assert cells["update stage 1: 2.50 s to 3.50 s"] == "#8b9099"
    shown = texts(svg)
    assert shown[:2] == ["plan & more", "6.00 s · 10 J"]
    assert {"700 MHz", "1400 MHz", "no clock of its own", "mean MHz"} <= set(shown)
    assert "933" in shown


def test_colours_go_from_blue_to_red_and_unknown_is_grey():
    assert colour_of(700, (700, 1400)) == "#2b5fb4"
    assert colour_of(1400, (700, 1400)) == "#c8443f"
    assert colour_of(1400, (1400, 1400)) == "#c8443f"
    assert colour_of(float("nan"), (700, 1400)) == "#8b9099"


def test_very_many_cells_become_columns_of_mean_clocks(make):
    count = 3000
    rows = [(0, Kind.FORWARD, 0, i, -1, float(i), i + 1.0) for i in range(count)]
    timeline = make(rows, devices=("gpu0",))
    clocks = np.where(np.arange(count) < count // 2, 700.0, 1400.0)
    svg = clock_svg(dataclasses.replace(timeline, clock_mhz=clocks))
    fills = [path.get("fill") for path in ET.fromstring(svg).iter(f"{NS}path")]
    assert fills[0] == "#2b5fb4"
    assert fills[-1] == "#c8443f"
    assert len(fills) <= 3
