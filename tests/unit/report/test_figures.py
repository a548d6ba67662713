"""Figures say what the documents say."""

import json
import re
from collections.abc import Callable

import numpy as np
import pytest

import partita
from partita.catalogue.catalogue import load_catalogue
from partita.catalogue.shorthand import read_shorthand
from partita.core.program import LAST_COMPUTE, Kind
from partita.core.solution import Solution
from partita.core.timeline import Timeline
from partita.report.columns import unpack
from partita.report.figures import (
    MOST_LANES,
    MOST_OPS,
    Track,
    alike_devices,
    bars_figure,
    breakdown_figure,
    cluster_figure,
    graph_figure,
    memory_figure,
    timeline_figure,
)
from partita.report.page import MODULES, STYLES, Page, Section, render_page, static_text
from partita.testing.builders import chain

MOST_STATIC_BYTES = 200_000


@pytest.fixture(scope="module")
def solution() -> Solution:
    found = partita.plan("gpt-small", cluster="1x2xa100+1x2xv100", planner="uniform")
    return found.solution


@pytest.fixture(scope="module")
def timeline(solution: Solution) -> Timeline:
    return partita.simulate(solution).timeline


def test_every_row_of_a_timeline_is_in_its_figure(timeline: Timeline) -> None:
    figure = timeline_figure([Track(name="predicted", timeline=timeline)])
    track = figure["tracks"][0]
    columns = unpack(track["data"])
    rows = columns["row"]
    assert sorted(rows.tolist()) == list(range(len(timeline)))
    for name in ("device", "kind", "stage", "microbatch", "peer"):
        assert columns[name].tolist() == getattr(timeline, name)[rows].tolist()
    assert np.array(track["sizes"])[columns["size"]].tolist() == timeline.bytes[rows].tolist()
    start = columns["start"].astype(np.float64) * track["tick_s"]
    end = start + columns["length"].astype(np.float64) * track["tick_s"]
    assert np.abs(start - timeline.start_s[rows]).max() <= timeline.makespan_s / 2**31
    assert np.abs(end - timeline.end_s[rows]).max() <= timeline.makespan_s / 2**31
    assert track["idle"] == pytest.approx(timeline.bubble)


def test_compute_of_a_lane_stands_first_and_by_start(timeline: Timeline) -> None:
    columns = unpack(timeline_figure([Track(name="p", timeline=timeline)])["tracks"][0]["data"])
    for device in range(len(timeline.devices)):
        own = columns["device"] == device
        compute = columns["kind"][own] <= LAST_COMPUTE
        assert not np.diff(compute.astype(int)).max(initial=0) > 0
        starts = columns["start"][own][compute].astype(np.int64)
        assert (np.diff(starts) >= 0).all()


def test_parts_of_a_step_add_up_to_it(timeline: Timeline) -> None:
    figure = breakdown_figure(timeline)
    for row in figure["table"]["rows"]:
        assert sum(row[1:]) == pytest.approx(timeline.makespan_s)


def test_time_under_a_message_is_exposed_and_the_rest_bubble(
    make: Callable[..., Timeline],
) -> None:
    rows = [
        (0, Kind.FORWARD, 0, 0, -1, 0.0, 2.0),
        (0, Kind.SEND, 0, 0, 1, 2.0, 5.0),
        (1, Kind.RECV, 1, 0, 0, 0.0, 5.0),
        (1, Kind.FORWARD, 1, 1, -1, 3.0, 4.0),
        (1, Kind.FORWARD, 1, 0, -1, 5.0, 6.0),
    ]
    timeline = make(rows)
    assert timeline.exposed_s.tolist() == [0.0, 2.0]
    assert timeline.busy_s.tolist() == [2.0, 2.0]


def test_memory_of_a_figure_peaks_where_the_timeline_does(timeline: Timeline) -> None:
    figure = memory_figure(timeline)
    columns = unpack(figure["data"])
    peaks = np.zeros(len(timeline.devices))
    np.maximum.at(peaks, columns["device"], columns["bytes"])
    most = float(timeline.peak_bytes.max())
    assert peaks == pytest.approx(timeline.peak_bytes, abs=most / 0xFFFF)
    assert figure["peak_bytes"] == timeline.peak_bytes.tolist()


def test_a_device_without_stages_is_shown_as_such(solution: Solution) -> None:
    figure = cluster_figure(solution.problem.cluster, solution.plan)
    held = {device["name"]: figure["stages"][device["stages"]] for device in figure["devices"]}
    used = {name for name, stages in held.items() if stages}
    assert used == set(solution.plan.devices)
    assert {device["type"] for device in figure["devices"]} == {"a100", "v100"}


def test_long_graphs_are_drawn_in_groups_that_hold_every_op() -> None:
    graph = chain(5 * MOST_OPS)
    figure = graph_figure(graph)
    rows = figure["table"]["rows"]
    assert len(rows) <= MOST_OPS
    assert sum(row[2] for row in rows) == len(graph)
    assert sum(row[3] for row in rows) == pytest.approx(
        float((graph.forward_s + graph.backward_s).sum())
    )


def many(make: Callable[..., Timeline]) -> Timeline:
    """Return a timeline of more devices than have lanes: all alike but one."""
    count = MOST_LANES + 6
    rows = []
    for device in range(count):
        late = 1.0 if device == 3 else 0.0
        rows.append((device, Kind.FORWARD, 0, device, -1, late, late + 1.0))
    return make(rows, devices=[f"gpu{device}" for device in range(count)])


def test_devices_that_do_the_same_share_a_lane_where_there_are_many(
    make: Callable[..., Timeline],
) -> None:
    timeline = many(make)
    assert alike_devices(timeline) == [[0, 1, 2, *range(4, MOST_LANES + 6)], [3]]
    figure = timeline_figure([Track(name="predicted", timeline=timeline)])
    assert [device.get("count", 1) for device in figure["devices"]] == [MOST_LANES + 5, 1]
    columns = unpack(figure["tracks"][0]["data"])
    assert columns["row"].tolist() == [0, 3]
    assert columns["device"].tolist() == [0, 1]
    assert len(figure["peers"]) == len(figure["table"]["rows"]) == MOST_LANES + 6
    few = make([(0, Kind.FORWARD, 0, 0, -1, 0.0, 1.0), (1, Kind.FORWARD, 0, 1, -1, 0.0, 1.0)])
    assert alike_devices(few) == [[0], [1]]


def test_hosts_beside_one_another_that_do_the_same_are_drawn_once_where_there_are_many() -> None:
    few = cluster_figure(read_shorthand("40x2xa100", load_catalogue()))
    assert (len(few["hosts"]), len(few["devices"]), few["note"]) == (40, 80, "")
    figure = cluster_figure(read_shorthand("30x2xa100+1x2xv100+30x2xa100", load_catalogue()))
    assert figure["hosts"] == [
        "host0 to host29 (30 hosts)",
        "host30",
        "host31 to host60 (30 hosts)",
    ]
    assert [device["host"] for device in figure["devices"]] == [0, 0, 1, 1, 2, 2]
    assert len(figure["table"]["rows"]) == 122  # the table has all


def test_bars_that_look_the_same_are_one_where_there_are_many() -> None:
    values = np.array([1.0, 2.0] * MOST_LANES)
    figure = bars_figure("t", names=list(map(str, values)), parts={"a": values}, unit="s")
    assert figure["bars"] == [{"row": 0, "count": MOST_LANES}, {"row": 1, "count": MOST_LANES}]
    assert figure["whole"] == [2.0, 2.0]
    assert len(figure["table"]["rows"]) == 2 * MOST_LANES


def test_parts_that_are_nothing_anywhere_are_left_out() -> None:
    parts = {"a": np.array([1.0, 2.0]), "b": np.zeros(2)}
    figure = bars_figure("t", names=("x", "y"), parts=parts, unit="s")
    assert figure["parts"] == ["a"]
    assert figure["whole"] == [2.0, 2.0]


def hostile_page(text: str) -> str:
    figure = bars_figure(text, names=(text,), parts={text: np.array([1.0])}, unit="s")
    sections = [Section(title=text, figures=[figure], words=[text])]
    return render_page(Page(title=text, summary=text, sections=sections, command=text))


def test_no_text_becomes_markup() -> None:
    text = "</script><img src=x onerror=alert(1)><script>"
    page = hostile_page(text)
    assert text not in page
    assert page.count("<script") == 2
    data = re.search(r'id="data">(.*?)</script>', page, re.DOTALL)
    assert data is not None
    assert json.loads(data[1])["title"] == text


def test_the_policy_names_the_one_script_and_nothing_from_elsewhere() -> None:
    page = hostile_page("x")
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', page)
    assert policy is not None
    assert policy[1].startswith("default-src 'none'; script-src 'sha256-")
    assert "unsafe" not in policy[1]
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", page)


def test_modules_can_be_put_into_one_script() -> None:
    known: dict[str, str] = {}
    for name in MODULES:
        text = static_text(name)
        for line in text.splitlines():
            assert line.count("`") % 2 == 0, f"{name}: {line}"  # indents are left out
            if line.startswith("import"):
                found = re.fullmatch(r'import \{ ([\w, ]+) \} from "\./([\w.]+)";', line)
                assert found, f"{name}: {line}"
                for what in found[1].split(", "):
                    assert known.get(what) == found[2], f"{name} imports {what}"
            elif line.startswith("export"):
                assert re.match(r"export (async )?(function|class|const) \w+", line), line
        top = re.findall(r"^(?:export )?(?:async )?(?:function|class|const|let) (\w+)", text, re.M)
        for what in top:
            assert what not in known, f"{what} is in {known[what]} and in {name}"
            known[what] = name


def test_no_module_parses_markup_or_runs_text() -> None:
    for name in MODULES:
        text = static_text(name)
        found = re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(", text)
        assert not found, f"{name}: {found}"
        assert not re.search(r"\bfetch\(|XMLHttpRequest|WebSocket|localStorage", text), name


def test_all_scripts_and_styles_are_small() -> None:
    size = sum(len(static_text(name).encode()) for name in (*MODULES, *STYLES))
    assert size <= MOST_STATIC_BYTES
