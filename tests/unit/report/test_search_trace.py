"""The best value over time, as CSV and SVG."""

import re
from xml.etree import ElementTree

import pytest

from partita.errors import InvalidInputError
from partita.planners.search_trace import SearchTrace
from partita.report.search_trace import search_csv, search_svg

WIDE = [(0.001, 1e6), (0.01, 2e3), (0.5, 90.5), (7.25, 2.0)]
NARROW = [(0.5, 12.0), (0.75, 11.5), (1.0, 11.25)]


def texts(svg):
    root = ElementTree.fromstring(svg)
    return [element.text for element in root.iter("{http://www.w3.org/2000/svg}text")]


def circles(svg):
    found = re.findall(r'<circle class="best" cx="([\d.]+)" cy="([\d.]+)"', svg)
    return [(float(x), float(y)) for x, y in found]


def test_csv_has_a_line_for_each_value_that_reads_back_exactly():
    lines = search_csv(WIDE).splitlines()
    assert lines[0] == "seconds,value"
    assert [tuple(map(float, line.split(","))) for line in lines[1:]] == WIDE


@pytest.mark.parametrize("points", [WIDE, NARROW, [(0.0, 5.0)], [(0.0, 3.0), (2.0, 0.0)]])
def test_the_curve_goes_right_and_down_within_its_frame(points):
    places = circles(search_svg(points, title="chain <201>", unit="cost"))
    assert len(places) == len(points)
    assert places == sorted(places, key=lambda place: (place[0], place[1]))
    assert all(90 <= x <= 870 and 56 <= y <= 372 for x, y in places)


def test_steps_are_level_until_the_next_value():
    path = re.search(r'class="curve" d="([^"]+)"', search_svg(NARROW)).group(1)
    assert re.fullmatch(r"M[\d. ]+(H[\d.]+V[\d.]+){2}H870", path)


def test_what_spans_much_is_shown_by_ratios():
    x = [place[0] for place in circles(search_svg(WIDE))]
    assert x[1] - x[0] > 100
    assert {"0.001 s", "1 s", "10000"} <= set(texts(search_svg(WIDE)))
    assert {"11.4", "12"} <= set(texts(search_svg(NARROW)))


def test_the_heading_says_what_was_found():
    shown = texts(search_svg(NARROW, title="chain <201>", unit="cost"))
    assert shown[0] == "chain <201>: best value over time"
    assert shown[1] == "3 values, from 12 to 11.25 cost, the last after 1 s"


def test_a_search_that_found_nothing_has_no_picture():
    with pytest.raises(InvalidInputError, match="recorded no value"):
        search_svg([])


def test_a_trace_keeps_new_bests_alone_and_tells_of_them():
    told = []
    trace = SearchTrace(on_record=lambda seconds, value: told.append((seconds, value)))
    for value in (5.0, 7.0, 5.0, 4.0):
        trace.record(value)
    assert [value for _, value in trace.points] == [5.0, 4.0]
    assert told == trace.points
    seconds = [time for time, _ in trace.points]
    assert seconds == sorted(seconds)
