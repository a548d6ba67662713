"""Charts: what their axes hold, and the files they become."""

import dataclasses
from xml.etree import ElementTree

import numpy as np
import pytest

from partita.catalogue.examples import example
from partita.core.energy import EnergyOrigin
from partita.core.fleet import Sensitivity
from partita.core.program import Kind
from partita.cost.predict import simulate
from partita.errors import InvalidInputError
from partita.fleet.study.panels import Line, Panel
from partita.planners.table import solve
from partita.report.charts import (
    ENDINGS,
    TradeOff,
    frontier_chart,
    memory_chart,
    panels_chart,
    render,
    search_chart,
    search_csv,
    sensitivity_chart,
    trade_off_chart,
)
from partita.testing.builders import small_frontier

WIDE = [(0.001, 1e6), (0.01, 2e3), (0.5, 90.5), (7.25, 2.0)]
NARROW = [(0.5, 12.0), (0.75, 11.5), (1.0, 11.25)]


def lines_of(figure, panel=0):
    return {line.get_label(): line for line in figure.axes[panel].get_lines()}


def texts(draw):
    root = ElementTree.fromstring(render(draw, "chart.svg"))
    return " ".join(element.text or "" for element in root.iter("{http://www.w3.org/2000/svg}text"))


def test_a_frontier_shows_its_points_all_max_the_bound_and_both_ends():
    frontier = small_frontier()
    figure = frontier_chart(frontier, title="gpt <small>", chosen=1)
    found = lines_of(figure)
    points = found[f"{len(frontier)} realised points"]
    assert points.get_xdata().tolist() == frontier.time_s.tolist()
    assert points.get_ydata().tolist() == frontier.energy_j.tolist()
    assert found["no clocks need less"].get_ydata().tolist() == frontier.bound_j.tolist()
    assert list(found["all clocks at their highest"].get_ydata()) == [frontier.all_max_j]
    assert list(found["chosen"].get_xdata()) == [frontier.time_s[1]]
    shown = texts(lambda: frontier_chart(frontier, title="gpt <small>"))
    assert "gpt <small> (measured)" in shown
    assert "T_min" in shown
    assert "T*" in shown
    assert "gap at most 1.12%" in shown


def test_a_modelled_frontier_says_so():
    modelled = dataclasses.replace(small_frontier(), origin=EnergyOrigin.MODELLED)
    assert "(modelled, not measured)" in texts(lambda: frontier_chart(modelled))


@pytest.mark.parametrize("ending", ENDINGS)
def test_every_ending_gives_its_format_and_the_same_bytes_each_time(ending):
    first, second = (
        render(lambda: frontier_chart(small_frontier()), f"file{ending}") for _ in range(2)
    )
    assert first == second
    starts = {".svg": b"<?xml", ".png": b"\x89PNG", ".pdf": b"%PDF"}
    assert first.startswith(starts[ending])


def test_another_ending_is_refused_before_anything_is_drawn():
    with pytest.raises(InvalidInputError, match=r"ends with \.gif; expected \.svg, \.png, \.pdf"):
        render(lambda: pytest.fail("drawn"), "a.gif")


def test_csv_has_a_line_for_each_value_that_reads_back_exactly():
    lines = search_csv(WIDE).splitlines()
    assert lines[0] == "seconds,value"
    assert [tuple(map(float, line.split(","))) for line in lines[1:]] == WIDE


def test_a_search_is_drawn_in_steps_and_by_ratios_where_it_spans_much():
    wide, narrow = search_chart(WIDE).axes[0], search_chart(NARROW, unit="cost").axes[0]
    assert (wide.get_xscale(), wide.get_yscale()) == ("log", "log")
    assert (narrow.get_xscale(), narrow.get_yscale()) == ("linear", "linear")
    assert narrow.get_lines()[0].get_drawstyle() == "steps-post"
    shown = texts(lambda: search_chart(NARROW, title="chain <201>", unit="cost"))
    assert "chain <201>: best value over time" in shown
    assert "3 values, from 12 to 11.25 cost, the last after 1 s" in shown


def test_a_search_that_found_nothing_has_no_picture():
    with pytest.raises(InvalidInputError, match="recorded no value"):
        search_chart([])


def sensitivity(**changes):
    settings = {
        "name": "a<b",
        "machine": "here & now",
        "iteration_s": 0.5,
        "batch_size": 8,
        "cpus": np.array([1.0, 1.0, 2.0, 2.0, 4.0, 4.0]),
        "memory_bytes": np.array([1e9, 5e9] * 3),
        "speed": np.array([0.2, 0.3, 0.4, 0.6, 0.5, 1.0]),
        "measured": np.array([False, False, False, True, False, True]),
        **changes,
    }
    return Sensitivity(**settings)


def test_measured_points_are_full_and_filled_in_ones_hollow():
    drawn = sensitivity_chart(sensitivity()).axes[0].get_lines()
    dots = [line for line in drawn if line.get_linestyle() == "None"]
    assert [(dot.get_fillstyle(), len(dot.get_xdata())) for dot in dots] == [
        ("full", 2),
        ("none", 1),
    ]
    full = next(line for line in drawn if line.get_label() == "5.00 GB per GPU")
    assert full.get_ydata().tolist() == [4.8, 9.6, 16.0]


def test_curves_that_nobody_measured_say_that_they_are_modelled():
    shown = texts(lambda: sensitivity_chart(sensitivity()))
    assert "1.00 GB per GPU (modelled)" in shown
    assert "a<b: speed over CPUs" in shown
    assert "samples/s" in shown
    assert "iterations/s" in texts(lambda: sensitivity_chart(sensitivity(batch_size=0)))


def test_panels_share_the_colour_of_a_name():
    x = np.array([1.0, 2.0])
    first = Line(name="fifo:fair", x=x, y=x / 2)
    second = Line(name="fifo:tune", x=x, y=x / 4, stepped=True)
    both, axes = [first, second], {"x_label": "s", "y_label": "jobs"}
    panels = [
        Panel(key="a", title="CDF", lines=both, percent=True, **axes),
        Panel(key="b", title="queue", lines=[second], **axes),
    ]
    figure = panels_chart(panels, title="a < b")
    above, below = lines_of(figure, 0)["fifo:tune"], lines_of(figure, 1)["fifo:tune"]
    assert above.get_color() == below.get_color() != lines_of(figure)["fifo:fair"].get_color()
    assert above.get_drawstyle() == "steps-post"
    shown = texts(lambda: panels_chart(panels, title="a < b"))
    assert "a < b" in shown
    assert "100 %" in shown


def test_memory_is_drawn_per_device():
    problem = example("gpt-small")
    timeline = simulate(problem, solve(problem, "uniform").plan)
    found = lines_of(memory_chart(timeline, title="chain"))
    for name in timeline.devices:
        index = timeline.devices.index(name)
        assert max(found[name].get_ydata()) == pytest.approx(timeline.peak_bytes[index] / 1e9)


def test_trade_offs_show_groups_and_their_front():
    points = [
        TradeOff(x=1.0, y=3.0, group="a", on_front=True, words="cheapest"),
        TradeOff(x=50.0, y=9.0, group="b", on_front=True),
        TradeOff(x=2.0, y=9.0, group="a"),
    ]
    figure = trade_off_chart(points, title="offers", x="tokens/s", y="money")
    lines = lines_of(figure)
    assert lines["best of all"].get_xydata().tolist() == [[1.0, 3.0], [50.0, 9.0]]
    assert lines["a"].get_xdata().tolist() == [1.0, 2.0]
    assert figure.axes[0].get_xscale() == "log"
    assert figure.axes[0].get_yscale() == "linear"
    shown = texts(lambda: trade_off_chart(points, title="offers", x="tokens/s", y="money"))
    assert "cheapest" in shown
    with pytest.raises(InvalidInputError, match="no point"):
        trade_off_chart([], title="", x="", y="")


def test_devices_that_hold_the_same_are_one_line_of_a_memory_chart(make) -> None:
    timeline = make(
        [(device, Kind.FORWARD, 0, 0, -1, 0.0, 1.0) for device in range(3)],
        devices=("a", "b", "c"),
        memory_device=np.repeat([0, 1, 2], 2),
        memory_s=np.tile([0.0, 1.0], 3),
        memory_bytes=np.array([1e9, 2e9, 1e9, 2e9, 1e9, 4e9]),
        limit_bytes=np.array([16e9, 16e9, 5e9]),
    )
    assert set(lines_of(memory_chart(timeline))) == {
        *("c", "a +1", "limit 5.00 GB", "limit 16.0 GB, above"),
    }
