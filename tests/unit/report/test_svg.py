"""SVG pictures: well-formed, escaped, complete, small."""

import dataclasses
import xml.etree.ElementTree as ET

import pytest

from partita.core.problem import Schedule
from partita.core.program import Kind
from partita.core.timeline import TimelineOrigin
from partita.report.svg import timeline_svg

NS = "{http://www.w3.org/2000/svg}"


def _texts(svg):
    return [element.text for element in ET.fromstring(svg).iter(f"{NS}text")]


def test_the_title_says_where_the_timeline_comes_from(exchange):
    measured = dataclasses.replace(exchange, origin=TimelineOrigin.MEASURED, period_s=2.0)
    assert _texts(timeline_svg(measured))[:2] == [
        "Measured: a real run",
        "6.50 s, 2.00 s from step to step, 2 devices",
    ]
    named = timeline_svg(exchange, title="gpt <4 stages> & more")
    assert _texts(named)[0].startswith("gpt <4 stages> & more (simulated: predicted")
    assert "gpt &lt;4 stages&gt; &amp; more" in named


def test_every_compute_row_is_a_cell_with_its_number_and_a_tip(exchange):
    root = ET.fromstring(timeline_svg(exchange))
    tips = [rect.findtext(f"{NS}title") for rect in root.iter(f"{NS}rect")]
    assert [tip for tip in tips if tip] == [
        "F stage 0 microbatch 0: 0 s to 1.00 s",
        "B stage 0 microbatch 0: 4.00 s to 6.00 s",
        "update stage 0: 6.00 s to 6.50 s",
        "F stage 1 microbatch 0: 1.50 s to 2.50 s",
        "B stage 1 microbatch 0: 2.50 s to 3.50 s",
    ]
    texts = [t for t in root.iter(f"{NS}text") if t.get("class") in ("number", "dark number")]
    assert [t.text for t in texts] == ["0", "0", "1", "1"]
    assert [t.get("class") for t in texts[:2]] == ["number", "dark number"]


def test_a_transfer_is_a_line_from_lane_to_lane(exchange):
    root = ET.fromstring(timeline_svg(exchange))
    lines = [line for line in root.iter(f"{NS}line") if line.get("class") == "transfer"]
    there, back, in_legend = sorted(lines, key=lambda line: -float(line.get("y2")))
    assert float(there.get("y1")) < float(there.get("y2"))
    assert float(back.get("y1")) > float(back.get("y2"))
    assert float(there.get("x1")) < float(there.get("x2")) < float(back.get("x1"))
    assert float(in_legend.get("y1")) < 60


def test_memory_stands_against_its_limit(pipeline):
    svg = timeline_svg(pipeline(memory_bytes=3.5e9))
    root = ET.fromstring(svg)
    assert len([p for p in root.iter(f"{NS}path") if p.get("class") == "memory"]) == 4
    assert len([p for p in root.iter(f"{NS}line") if p.get("class") == "limit"]) == 4
    over = [t.text for t in root.iter(f"{NS}text") if t.get("class") == "over"]
    assert over == ["4.00 GB of 3.50 GB"]
    assert "memory and its limit" in _texts(svg)
    unlimited = _texts(timeline_svg(pipeline()))
    assert "memory" in unlimited
    assert "4.00 GB" in unlimited
    assert "memory" not in _texts(timeline_svg(pipeline(), memory=False))


@pytest.mark.parametrize("width", [100, 400, 1200, 3000])
def test_everything_lies_within_the_picture(pipeline, width):
    timeline = pipeline(Schedule.INTERLEAVED, stages=8, transfer_s=0.3, memory_bytes=80e9)
    root = ET.fromstring(timeline_svg(timeline, width=width))
    right, bottom = (float(root.get(what)) for what in ("width", "height"))
    assert right == max(width, 400)
    for rect in root.iter(f"{NS}rect"):
        x, y, w, h = (float(rect.get(what)) for what in ("x", "y", "width", "height"))
        assert 0 <= x <= x + w <= right
        assert 0 <= y <= y + h <= bottom
    for text in root.iter(f"{NS}text"):
        assert 0 <= float(text.get("x")) <= right
        assert 0 <= float(text.get("y")) <= bottom


def test_a_long_timeline_stays_small_and_says_what_it_leaves_out(pipeline):
    timeline = pipeline(stages=60, devices=60, microbatches=40)
    svg = timeline_svg(timeline, width=800)
    assert len(timeline) > 10_000
    assert len(svg) < 700_000
    assert "13 devices not shown, host12/gpu0 to host18/gpu0" in svg
    assert "4,720 transfers, not drawn" in svg
    assert "transfer" not in _texts(svg)


def test_narrow_cells_become_columns_below_the_wide_ones(make):
    rows = [(0, Kind.FORWARD, 0, i, -1, i * 1e-4, (i + 1) * 1e-4) for i in range(1000)]
    rows += [(0, Kind.BACKWARD, 0, 5, -1, 0.5, 1.0)]
    root = ET.fromstring(timeline_svg(make(rows), width=500))
    paths = list(root.iter(f"{NS}path"))
    cells = [rect for rect in root.iter(f"{NS}rect") if rect.find(f"{NS}title") is not None]
    assert len(paths) == 2
    assert len(cells) == 1


def test_collectives_are_bars_below_their_lane(make):
    rows = [(0, Kind.BACKWARD, 0, 0, -1, 0, 1), (0, Kind.ALL_REDUCE, 0, -1, -1, 1, 2)]
    svg = timeline_svg(make(rows))
    assert "collective" in _texts(svg)
    assert 'height="4"' in svg


def test_names_are_escaped_and_cut(make):
    rows = [(0, Kind.FORWARD, 0, 0, -1, 0, 1)]
    names = ('<script>"&\x00\ud800', "h" * 300)
    texts = _texts(timeline_svg(make(rows, devices=names)))
    assert '<script>"&??' in texts
    assert any(text.startswith("…hhh") and len(text) < 60 for text in texts)


def test_a_timeline_without_rows_is_empty_lanes(make):
    svg = timeline_svg(make([]))
    assert len(list(ET.fromstring(svg).iter(f"{NS}rect"))) == 2
    ET.fromstring(timeline_svg(make([], devices=())))


def test_output_is_repeatable(pipeline):
    timeline = pipeline()
    assert timeline_svg(timeline) == timeline_svg(dataclasses.replace(timeline))


def test_instructions_that_take_no_time_do_not_hide_idle_time(exchange):
    load = dataclasses.replace(
        exchange,
        kind=[Kind.LOAD if index == 0 else kind for index, kind in enumerate(exchange.kind)],
        end_s=[0.0 if index == 0 else end for index, end in enumerate(exchange.end_s)],
    )
    root = ET.fromstring(timeline_svg(load, memory=False))
    tips = [tip for rect in root.iter(f"{NS}rect") if (tip := rect.findtext(f"{NS}title"))]
    assert len(tips) == 4
    assert not list(root.iter(f"{NS}path"))
