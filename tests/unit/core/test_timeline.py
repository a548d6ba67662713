import dataclasses

import numpy as np
import pytest

from partita.core.program import Kind
from partita.core.timeline import Timeline, TimelineOrigin
from partita.errors import InvalidInputError

NAN, INF = float("nan"), float("inf")


def timeline(**changes: object) -> Timeline:
    """Return a forward on d0, its message, a forward on d1, and memory, some of it changed."""
    parts: dict[str, object] = {
        "devices": ("d0", "d1"),
        "device": [0, 0, 1, 1],
        "instruction": [0, 1, 2, 3],
        "kind": [Kind.FORWARD, Kind.SEND, Kind.RECV, Kind.FORWARD],
        "stage": [0, 0, 1, 1],
        "microbatch": [0, 0, 0, 0],
        "peer": [-1, 1, 0, -1],
        "start_s": [0.0, 2.0, 0.0, 3.0],
        "end_s": [2.0, 3.0, 3.0, 8.0],
        "bytes": [0, 10, 10, 0],
        "cause": [-1, 0, -1, 1],
        "memory_device": [0, 0, 1],
        "memory_s": [0.0, 2.0, 0.0],
        "memory_bytes": [5.0, 3.0, 7.0],
    }
    return Timeline(**(parts | changes))


def empty() -> Timeline:
    columns = ("device", "instruction", "kind", "stage", "microbatch", "peer", "bytes")
    return Timeline(devices=("d0",), start_s=[], end_s=[], **{name: [] for name in columns})


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"devices": ("d0", "d0")}, "devices of the timeline: 'd0' stands twice"),
        ({"device": [0, 0, 1, 2]}, "device of row 3 is 2; expected 0 to 1"),
        ({"device": [0]}, "device has 1 values for 4 rows"),
        ({"kind": [0, 1, 2, 14]}, "kind of row 3 is 14; expected 0 to 13"),
        ({"peer": [-1, 2, 0, -1]}, "peer of row 1 is 2; expected -1 to 1"),
        ({"start_s": [NAN, 0, 0, 0]}, "start_s of row 0 is nan; expected 0 or more, finite"),
        ({"end_s": [INF, 3, 3, 8]}, "end_s of row 0 is inf; expected 0 or more, finite"),
        ({"end_s": [2.0, 1.0, 3.0, 8.0]}, "row 1 of the timeline ends before it starts"),
        ({"clock_mhz": [-1.0] * 4}, "clock_mhz of row 0 is -1.0; expected 0 or more, finite"),
        ({"energy_j": INF}, "energy_j of row 0 is inf; expected 0 or more, finite"),
        ({"cause": [-1, 0, 1, 4]}, "cause of row 3 is 4; expected -1 to 3"),
        ({"memory_device": [0, 0, 2]}, "memory_device of row 2 is 2; expected 0 to 1"),
        ({"memory_s": [0.0]}, "memory_s has 1 values for 3 rows"),
        ({"memory_bytes": [0, 0, -1.0]}, "memory_bytes of row 2 is -1.0; expected 0 or more"),
        ({"limit_bytes": [1.0]}, "limit_bytes has 1 values for 2 devices"),
        ({"limit_bytes": [[1.0, 2.0]]}, "limit_bytes has 2 values for 2 devices"),
        ({"limit_bytes": [1.0, NAN]}, "limit_bytes is nan; expected 0 or more"),
        ({"limit_bytes": -1.0}, "limit_bytes is -1.0; expected 0 or more"),
        ({"period_s": -1.0}, "period_s is -1.0; expected 0 or more"),
    ],
)
def test_timelines_that_cannot_be_are_refused(changes, words):
    with pytest.raises(InvalidInputError) as caught:
        timeline(**changes)
    assert str(caught.value).startswith(words)


def test_a_timeline_is_frozen_and_its_columns_are_read_only():
    made = timeline(limit_bytes=9.0)
    with pytest.raises(dataclasses.FrozenInstanceError):
        made.period_s = 1.0
    for field in dataclasses.fields(made):
        values = getattr(made, field.name)
        if isinstance(values, np.ndarray):
            assert not values.flags.writeable, field.name
    for values in (made.busy_s, made.utilisation, made.bubble, made.peak_bytes):
        assert not values.flags.writeable


def test_a_limit_stands_for_all_devices_and_may_be_unlimited():
    assert timeline().limit_bytes.tolist() == [INF, INF]
    assert timeline(limit_bytes=9).limit_bytes.tolist() == [9.0, 9.0]
    assert timeline(limit_bytes=[1.0, INF]).limit_bytes.tolist() == [1.0, INF]


def test_figures_follow_from_the_rows():
    made = timeline(origin=TimelineOrigin.MEASURED)
    assert (len(made), made.makespan_s) == (4, 8.0)
    assert made.busy_s.tolist() == [2.0, 5.0]
    assert made.utilisation.tolist() == [0.25, 0.625]
    assert made.bubble.tolist() == [0.75, 0.375]
    assert made.peak_bytes.tolist() == [5.0, 7.0]
    assert made.critical_path.tolist() == [0, 1, 3]


def test_a_timeline_without_rows_has_figures_too():
    made = empty()
    assert (len(made), made.makespan_s) == (0, 0.0)
    assert made.critical_path.tolist() == []
    assert made.busy_s.tolist() == [0.0]
    assert made.bubble.tolist() == [1.0]


@pytest.mark.parametrize("cause", [[-1, -1, -1, 3], [3, 0, -1, 1]])
def test_causes_that_go_in_a_circle_are_refused_instead_of_followed(cause):
    made = timeline(cause=cause)
    with pytest.raises(InvalidInputError, match=r"timeline.*cause"):
        _ = made.critical_path


def test_timelines_are_equal_by_value_and_unknowns_are_equal():
    assert timeline() == timeline()
    assert timeline() != timeline(period_s=2.0)
