"""Chrome traces: structure, tracks, arrows, counters, and the check of all that."""

import dataclasses
import itertools
import json

import numpy as np
import pytest

from partita.core.problem import Schedule
from partita.core.program import Kind
from partita.core.timeline import TimelineOrigin
from partita.cost.predict import simulate
from partita.errors import FormatError, InvalidInputError
from partita.program.lower import lower
from partita.report.trace import check_trace, chrome_trace, trace_events, trace_pieces


def _parsed(timeline, **options):
    data = json.loads(chrome_trace(timeline, **options))
    check_trace(data)
    return data


def _slices(data):
    return [event for event in data["traceEvents"] if event["ph"] == "X"]


def _thread_names(data):
    named = (e for e in data["traceEvents"] if e["name"] == "thread_name")
    return {e["tid"]: e["args"]["name"] for e in named}


def test_the_document_says_where_it_comes_from_after_the_events(exchange):
    text = chrome_trace(dataclasses.replace(exchange, origin=TimelineOrigin.EMULATED))
    data = json.loads(text)
    assert list(data) == ["displayTimeUnit", "traceEvents", "otherData"]
    assert data["displayTimeUnit"] == "ms"
    assert data["otherData"]["origin"] == "emulated"
    assert data["otherData"]["label"].startswith("emulated: ")
    assert data["otherData"]["makespan_s"] == 6.5
    assert "period_s" not in data["otherData"]
    measured = json.loads(chrome_trace(dataclasses.replace(exchange, period_s=2.0)))
    assert measured["otherData"]["period_s"] == 2.0


def test_a_host_is_a_process_and_a_device_a_thread(exchange):
    data = _parsed(exchange)
    names = [e for e in data["traceEvents"] if e["name"] == "process_name"]
    assert [e["args"]["name"] for e in names] == ["host0 (simulated)", "host1 (simulated)"]
    assert sorted(_thread_names(data).values()) == ["gpu0", "gpu0", "gpu0 out", "gpu0 out"]
    assert {e["pid"] for e in _slices(data)} == {1, 2}


def test_devices_without_a_host_share_one_process(make):
    rows = [(0, Kind.FORWARD, 0, 0, -1, 0, 1), (1, Kind.FORWARD, 1, 0, -1, 1, 2)]
    data = _parsed(make(rows, devices=("d0", "d1")))
    assert {e["pid"] for e in data["traceEvents"]} == {1}
    assert sorted(_thread_names(data).values()) == ["d0", "d1"]


def test_slices_carry_names_times_in_microseconds_and_arguments(exchange):
    timeline = dataclasses.replace(exchange, bytes=np.full(9, 7), energy_j=np.full(9, 2.0))
    first = _slices(_parsed(timeline))[0]
    assert (first["name"], first["ts"], first["dur"]) == ("F s0 m0", 0, 1e6)
    args = {"kind": "forward", "stage": 0, "microbatch": 0, "bytes": 7, "energy_j": 2.0}
    assert first["args"] == args
    names = [e["name"] for e in _slices(_parsed(exchange))]
    assert "send m0 to host1/gpu0" in names
    assert "gradient m0 to host0/gpu0" in names
    assert "update s0" in names


def test_the_program_names_the_tensors(problem_of):
    problem, plan = problem_of(microbatches=1)
    program = lower(problem, plan)
    timeline = simulate(problem, plan, program=program)
    names = problem.graph.tensors.names
    data = _parsed(timeline, program=program, tensor_names=names)
    sends = [e["name"] for e in _slices(data) if e["cat"] == "send"]
    assert sends[0] == "t0 m0 to host0/gpu1"
    assert "gradient t0 m0 to host0/gpu0" in sends
    plain = _slices(_parsed(timeline, program=program))
    assert next(e for e in plain if e["cat"] == "send")["args"]["tensor"] == "tensor 0"
    with pytest.raises(InvalidInputError, match=r"give.*program"):
        chrome_trace(timeline, program=lower(*problem_of(stages=1, microbatches=1)))


def test_arrows_lead_from_the_send_to_the_compute_that_reads_it(exchange):
    events = _parsed(exchange)["traceEvents"]
    start, end = (next(e for e in events if e["ph"] == ph and e["id"] == 2) for ph in "sf")
    assert (start["pid"], start["ts"]) == (1, 1e6)
    assert (end["pid"], end["ts"], end["bp"]) == (2, 1.5e6, "e")
    assert events[events.index(end) - 1]["name"] == "F s1 m0"
    assert events[events.index(start) - 1]["cat"] == "send"


def test_no_arrow_leads_back_in_time_when_clocks_differ(make):
    rows = [
        (0, Kind.SEND, 0, 0, 1, 2.0, 3.0),
        (1, Kind.RECV, 1, 0, 0, 0.0, 0.5),
        (1, Kind.FORWARD, 1, 0, -1, 0.5, 1.0),
    ]
    data = _parsed(make(rows))
    assert not [e for e in data["traceEvents"] if e["ph"] in "sf"]
    assert next(e for e in _slices(data) if e["cat"] == "send")["args"]["arrived_s"] == 0.5


def test_transfers_that_overlap_get_lanes_of_their_own(make):
    rows = [
        (0, Kind.SEND, 0, 0, 1, 0.0, 2.0),
        (0, Kind.SEND, 0, 1, 2, 1.0, 3.0),
        (0, Kind.SEND, 0, 2, 1, 2.0, 4.0),
        (0, Kind.ALL_REDUCE, 0, -1, -1, 0.0, 4.0),
        (1, Kind.RECV, 1, 7, -1, 0.0, 4.0),
    ]
    data = _parsed(make(rows, devices=("d0", "d1", "d2")))
    threads = _thread_names(data)
    lanes = {e["name"]: threads[e["tid"]] for e in _slices(data)}
    assert lanes == {
        "send m0 to d1": "d0 out",
        "send m1 to d2": "d0 out 2",
        "send m2 to d1": "d0 out",
        "all-reduce s0": "d0 collectives",
        "recv m7 from ?": "d1 in",
    }


def test_times_lie_on_a_grid_of_nanoseconds_that_truncation_keeps(make):
    edges = np.cumsum(np.random.default_rng(5).uniform(1e-9, 3e-3, 400))
    rows = [
        (0, Kind.FORWARD, 0, i, -1, a, b)
        for i, (a, b) in enumerate(itertools.pairwise(edges.tolist()))
    ]
    data = _parsed(make(rows))
    begins = [int(e["ts"] * 1000) for e in _slices(data)]
    ends = [int(e["ts"] * 1000) + int(e["dur"] * 1000) for e in _slices(data)]
    assert begins == np.rint(edges[:-1] * 1e9).astype(int).tolist()
    assert ends == np.rint(edges[1:] * 1e9).astype(int).tolist()


def test_memory_is_a_counter_that_keeps_the_peak_of_a_moment(exchange):
    timeline = dataclasses.replace(
        exchange,
        memory_device=np.array([0, 0, 0, 0, 1]),
        memory_s=np.array([0.0, 1.0, 1.0, 1.0, 0.0]),
        memory_bytes=np.array([1.0, 5.0, 9.0, 2.0, 4.0]),
    )
    counters = [e for e in _parsed(timeline)["traceEvents"] if e["ph"] == "C"]
    shown = [(e["pid"], e["name"], e["ts"], e["args"]["bytes"]) for e in counters]
    assert shown == [
        (1, "gpu0 memory", 0, 1.0),
        (1, "gpu0 memory", 1e6, 9.0),
        (1, "gpu0 memory", 1e6, 2.0),
        (2, "gpu0 memory", 0, 4.0),
    ]


def test_clock_and_energy_are_counters_where_they_are_known(exchange):
    clock = np.array([1000, np.nan, np.nan, 1000, 1200, np.nan, 900, 900, np.nan])
    timeline = dataclasses.replace(exchange, clock_mhz=clock, energy_j=clock / 100)
    counters = [e for e in _parsed(timeline)["traceEvents"] if e["ph"] == "C"]
    clocks = [(e["pid"], e["ts"], e["args"]["MHz"]) for e in counters if "clock" in e["name"]]
    assert clocks == [(1, 0, 1000), (1, 6e6, 1200), (2, 1.5e6, 900)]
    energy = [(e["pid"], e["args"]["J"]) for e in counters if "energy" in e["name"]]
    assert energy == [(1, 0), (1, 10), (1, 20), (1, 32), (2, 0), (2, 9), (2, 18)]


@pytest.mark.parametrize("schedule", [s for s in Schedule if s is not Schedule.INFERENCE])
def test_every_schedule_gives_a_valid_trace_with_every_row(pipeline, schedule):
    timeline = pipeline(schedule, transfer_s=0.25)
    data = _parsed(timeline)
    assert len(_slices(data)) == np.count_nonzero(timeline.kind != Kind.RECV)
    arrows = sum(event["ph"] == "s" for event in data["traceEvents"])
    assert arrows == np.count_nonzero(timeline.kind == Kind.SEND)


def test_names_are_kept_whatever_they_hold(make):
    rows = [(0, Kind.FORWARD, 0, 0, -1, 0, 1)]
    name = 'rack/"böse"\\\n},{"ph"'
    text = chrome_trace(make(rows, devices=(name,)))
    assert "\\u" not in text
    assert _thread_names(json.loads(text)) == {2: name.partition("/")[2]}


def test_pieces_and_events_make_the_same_text_each_time(pipeline):
    timeline = pipeline(transfer_s=0.1)
    text = chrome_trace(timeline)
    assert "".join(trace_pieces(dataclasses.replace(timeline))) == text
    assert list(trace_events(timeline)) == json.loads(text)["traceEvents"]


def test_a_timeline_without_rows_and_one_too_long(make):
    assert _slices(_parsed(make([]))) == []
    with pytest.raises(InvalidInputError, match="at most 9e"):
        chrome_trace(make([(0, Kind.FORWARD, 0, 0, -1, 0, 1e10)]))


def _event(ph, **fields):
    return {"ph": ph, "name": "a", "pid": 1, "tid": 2, "ts": 0, "args": {}} | fields


NAMES = [
    _event("M", name="process_name", args={"name": "p"}),
    _event("M", name="thread_name", args={"name": "t"}),
]
SLICE = _event("X", dur=5)


def test_begin_and_end_pairs_and_nested_slices_are_fine():
    inner = _event("X", ts=1, dur=2)
    check_trace([*NAMES, SLICE, inner, _event("B", ts=5), _event("E", ts=6)])
    arrow = [_event("s", ts=1, id=1), _event("f", ts=4, id=1)]
    check_trace({"traceEvents": [*NAMES, SLICE, inner, *arrow]})


@pytest.mark.parametrize(
    ("events", "message"),
    [
        ([], "no list of traceEvents"),
        ([_event("Q")], "event 0 is not an event of phase X, B, E"),
        ([{"ph": "X", "name": "a", "pid": 1, "tid": 2, "ts": 0}], "of phase X has no dur"),
        ([_event("X", dur=-1)], "dur is -1; expected 0 or more"),
        ([_event("X", ts="1", dur=1)], "ts is '1'; expected 0 or more"),
        ([_event("C", args={"J": float("nan")})], "counter J is nan; expected a number"),
        ([SLICE], "thread 2 of process 1 has no name"),
        ([NAMES[1], SLICE], "process 1 has no name"),
        ([*NAMES, SLICE, _event("X", ts=4, dur=5)], "at 4.0 us overlaps one that ends at 5.0"),
        ([_event("E")], "event 0 ends a slice that did not begin"),
        ([_event("B")], "a slice that begins has no end"),
        ([*NAMES, SLICE, _event("s", id=1)], "arrow 1 has no end"),
        ([*NAMES, SLICE, _event("f", id=1)], "arrow 1 has no start"),
        ([*NAMES, SLICE, _event("s", id=1, ts=6)], "event 3: the end of an arrow lies in no slice"),
        ([*NAMES, SLICE, *[_event("s", id=1)] * 2], "arrow 1 has two ends of one kind"),
        (
            [*NAMES, SLICE, _event("s", id=1, ts=2), _event("f", id=1, ts=1)],
            "arrow 1 leads back in time",
        ),
    ],
)
def test_what_viewers_would_not_show_is_named(events, message):
    with pytest.raises(FormatError, match=message):
        check_trace({"traceEvents": events})
