"""Pictures of characters: widths, glyphs, colours, what is left out."""

import dataclasses

import numpy as np
import pytest
from rich.text import Text

from partita.core.problem import Schedule
from partita.core.program import Kind
from partita.core.timeline import TimelineOrigin
from partita.report.picture import pipeline_picture


def _rows(picture):
    """Return the cells of each device."""
    lines = [line for line in picture.splitlines() if "│" in line or " |" in line]
    return [line.replace("|", "│").partition("│")[2].split()[0] for line in lines]


def test_a_pipeline_looks_like_a_pipeline(pipeline):
    picture = pipeline_picture(pipeline(microbatches=4, transfer_s=0.0), 90)
    lines = picture.splitlines()
    assert lines[0] == "simulated · 21.0 s · 4 devices · 4 stages · 4 microbatches"
    assert lines[1].split() == ["busy", "peak"]
    assert _rows(picture)[0].startswith("0──1──2──3──····")
    assert _rows(picture)[3].lstrip("·").startswith("0──0═════1──1═════2──")
    assert lines[-2].split() == ["╵0", "s", "╵5", "s", "╵10", "s", "╵15", "s"]
    assert lines[-2].index("╵") == lines[2].index("│") + 1
    assert lines[-1] == "3── forward of microbatch 3   3══ backward of microbatch 3   · idle"


@pytest.mark.parametrize("schedule", [Schedule.GPIPE, Schedule.INTERLEAVED, Schedule.ZERO_BUBBLE])
@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_no_line_is_longer_than_the_terminal(pipeline, schedule, encoding):
    timeline = pipeline(schedule, stages=8, microbatches=16, transfer_s=0.4, memory_bytes=9e9)
    for width in [*range(40, 130), 200, 399, 400]:
        picture = pipeline_picture(timeline, width, encoding=encoding)
        picture.encode(encoding)
        assert max(len(line) for line in picture.splitlines()) <= width
        assert len({len(row) for row in _rows(picture)}) == 1


def test_a_terminal_that_is_too_narrow_counts_as_40_columns(pipeline):
    timeline = pipeline()
    assert pipeline_picture(timeline, 3) == pipeline_picture(timeline, 40)


@pytest.mark.parametrize("encoding", ["latin-1", "cp437", "no-such-encoding"])
def test_a_terminal_without_the_characters_gets_ascii(pipeline, encoding):
    picture = pipeline_picture(pipeline(microbatches=4), 90, encoding=encoding)
    assert picture.isascii()
    assert _rows(picture)[0].startswith("0--1--2--3--....")
    assert "3== backward of microbatch 3   . idle" in picture


def test_cells_of_one_column_are_digits_and_letters(pipeline):
    picture = pipeline_picture(pipeline(Schedule.ZERO_BUBBLE), 40)
    assert _rows(picture)[0].startswith("0123··aA4b")
    assert "3 forward of microbatch 3\nd backward of microbatch 3\nD weight" in picture


def test_numbers_show_all_their_digits_or_only_the_last_everywhere(pipeline):
    timeline = pipeline(stages=2, devices=2, microbatches=12)
    wide, narrow = pipeline_picture(timeline, 200), pipeline_picture(timeline, 80)
    assert "11═" in _rows(wide)[0]
    assert "last digits" not in wide
    assert "11" not in _rows(narrow)[0]
    assert "numbers: last digits" in narrow


def test_cells_narrower_than_a_column_are_mixed(pipeline):
    picture = pipeline_picture(pipeline(microbatches=200), 80)
    assert _rows(picture)[0].count("▒") > 40
    assert "▒ forward and backward" in picture


def test_one_microbatch_is_numbered_by_stages(pipeline):
    picture = pipeline_picture(pipeline(stages=8, microbatches=1), 110)
    assert "1 microbatch\n" in picture
    assert "3── forward of stage 3" in picture
    assert _rows(picture)[0].startswith("0──···········4──···")


def test_updates_collectives_and_transfers_are_marked(make):
    rows = [
        (0, Kind.LOAD, 0, 0, -1, 0.0, 1.0),
        (0, Kind.FORWARD, 0, 0, -1, 1.0, 2.0),
        (0, Kind.FORWARD, 0, 1, -1, 2.0, 3.0),
        (0, Kind.RECOMPUTE, 0, 0, -1, 3.0, 4.0),
        (0, Kind.ALL_REDUCE, 0, -1, -1, 4.0, 6.0),
        (0, Kind.UPDATE, 0, -1, -1, 8.0 - 1e-6, 8.0),
        (1, Kind.SEND, 1, 0, 0, 6.0, 7.0),
    ]
    picture = pipeline_picture(make(rows), 60)
    assert set(_rows(picture)[0]) == set("▫01─┄◊<·▲")
    assert _rows(picture)[0].endswith("·▲")
    for meaning in ("▫ load", "┄ recompute", "▲ update", "◊ collective", "< idle, receiving"):
        assert meaning in picture


def test_many_devices_are_abridged_and_counted(pipeline):
    timeline = pipeline(stages=60, devices=60, microbatches=2)
    picture = pipeline_picture(timeline, 100)
    assert len(_rows(picture)) == 39
    assert "… 21 devices not shown, busy 3% (host10/gpu0 to host20/gpu0)" in picture
    assert len(_rows(pipeline_picture(timeline, 100, max_rows=5))) == 4
    assert "21 devices not shown" in pipeline_picture(timeline, 40)


def test_equal_rows_that_follow_one_another_are_shown_once(make):
    rows = [(device, Kind.FORWARD, 0, 0, -1, 0.0, 1.0) for device in range(5)]
    picture = pipeline_picture(make(rows, devices=tuple("abcde")), 80)
    assert "… 4 more like it, to e\n" in picture
    assert len(_rows(picture)) == 1


def test_memory_over_its_limit_is_marked(pipeline):
    picture = pipeline_picture(pipeline(memory_bytes=3.5e9), 100)
    assert picture.splitlines()[1].split() == ["busy", "peak", "limit"]
    peaks = [line.split("%")[1].split() for line in picture.splitlines() if "│" in line]
    assert peaks[0] == ["4.00", "GB!", "3.50", "GB"]
    assert peaks[3] == ["1.00", "GB", "3.50", "GB"]


def test_colour_changes_no_character(pipeline):
    timeline = pipeline(memory_bytes=3.5e9)
    plain = pipeline_picture(timeline, 100)
    colour = pipeline_picture(timeline, 100, colour=True)
    assert "\x1b[34m0─1─2─3─\x1b[0m\x1b[2m····" in colour
    assert "\x1b[1;31m" in colour
    assert [line.rstrip() for line in Text.from_ansi(colour).plain.splitlines()] == (
        plain.splitlines()
    )
    drawn = Text.from_ansi(colour).spans
    styles = {str(span.style) for span in drawn}
    assert styles >= {"color(4)", "color(3)", "dim", "bold color(1)"}


def test_names_cannot_spoil_the_picture(make):
    rows = [(0, Kind.FORWARD, 0, 0, -1, 0, 1)]
    name = "host/\x1b[31mgpu\n" + "x" * 50
    timeline = make(rows, devices=(name, "显卡", "host/gpu"))
    picture = pipeline_picture(timeline, 60, colour=False)
    assert "\x1b" not in picture
    lines = [line for line in picture.splitlines() if "│" in line]
    assert lines[0].startswith("…xxxxxxxxxxx │")
    # Each of the two characters takes two columns.
    assert lines[1].startswith("显卡         │")
    assert pipeline_picture(timeline, 60, encoding="ascii").isascii()


def test_origin_is_named_and_output_is_repeatable(exchange):
    timeline = dataclasses.replace(exchange, origin=TimelineOrigin.MEASURED)
    picture = pipeline_picture(timeline, 80)
    assert picture.startswith("measured · 6.50 s")
    assert pipeline_picture(dataclasses.replace(timeline), 80) == picture


def test_a_timeline_without_rows_is_idle(make):
    picture = pipeline_picture(make([]), 50)
    assert set("".join(_rows(picture))) == {"·"}
    assert pipeline_picture(make([], devices=()), 50).startswith("simulated · 0 s · 0 devices")


def test_an_update_that_takes_no_time_is_not_drawn(make):
    rows = [(0, Kind.FORWARD, 0, 0, -1, 0, 1), (0, Kind.UPDATE, 0, -1, -1, 1, 1)]
    assert "▲" not in pipeline_picture(make(rows, memory_bytes=np.array([])), 60)
