"""Profiles from schedules with reports, and from logs with changes of the clock."""

import math

import pytest

from partita.core.program import Kind
from partita.errors import FormatError, InvalidInputError
from partita.formats.detect import detect_format, format_for, read_any, write_as
from partita.formats.perseus import Logged, read_frontier_csv
from partita.formats.perseus_runs import (
    Rank,
    profile_from_reports,
    ranks_of,
    read_clock_events,
    with_clocks,
)
from partita.testing.builders import small_energy_profile, small_frontier


def report(rank, seconds, joules, steps=3):
    return {
        "rank": rank,
        "time_breakdown": {"forward": [[9.0, 9.0]] + [seconds] * (steps - 1)},
        "energy_breakdown": {"forward": [[0.0, 0.0]] + [joules] * (steps - 1)},
    }


def schedule(rank, *clocks):
    return {"rank": rank, "frequencies": [["forward", clock] for clock in clocks]}


def test_the_nth_instruction_of_a_name_ran_at_its_nth_clock():
    pairs = [([schedule(0, 1400, 700)], [report(0, [1.0, 2.0], [300.0, 200.0])])]
    profile = profile_from_reports(pairs, {}, blocking_w={"": 70.0})
    assert profile.clock_mhz.tolist() == [1400.0, 700.0]
    assert profile.seconds.tolist() == [1.0, 2.0]
    assert profile.joules.tolist() == [300.0, 200.0]
    assert profile.origin.value == "measured"


def test_ranks_of_one_stage_give_the_slowest_time_and_the_mean_energy():
    ranks = ranks_of([{"rank": 0, "pp_rank": 0}, {"rank": 1, "pp_rank": 0}])
    schedules = [schedule(0, 1400, 1400), schedule(1, 1400, 1400)]
    results = [report(0, [1.0, 1.0], [300.0, 300.0]), report(1, [3.0, 3.0], [100.0, 100.0])]
    profile = profile_from_reports([(schedules, results)], ranks)
    assert (profile.seconds.tolist(), profile.joules.tolist()) == ([3.0], [200.0])


def test_the_artifacts_schedules_have_their_names_in_ranks_json():
    ranks = ranks_of([{"rank": 0, "pp_rank": 2, "pipe_schedule": ["Forward", "p2p", "forward"]}])
    told = [{"rank": 0, "power_states": [1400, 1400, 700]}]
    profile = profile_from_reports([(told, [report(0, [1.0, 2.0], [3.0, 4.0])])], ranks)
    assert profile.stage.tolist() == [2, 2]
    assert profile.clock_mhz.tolist() == [1400.0, 700.0]
    with pytest.raises(FormatError, match=r"3 clocks.*ranks\.json 0"):
        profile_from_reports([(told, [])], {0: Rank(0, ())})


def test_energy_that_was_not_recorded_is_unknown_and_never_zero():
    result = {**report(0, [1.0, 1.0], []), "energy_breakdown": {}}
    with pytest.raises(InvalidInputError, match=r"recorded.*unknown"):
        profile_from_reports([([schedule(0, 1400, 1400)], [result])], {})


@pytest.mark.parametrize(
    ("told", "results", "words"),
    [
        ([], [report(0, [1.0], [1.0])], "rank 0 reported, but was told no schedule"),
        ([{"rank": 0}], [], "neither frequencies nor power_states"),
        ([schedule(0, 1400)], [report(0, [1.0, 1.0], [1.0, 1.0])], "2 times and 2 energies"),
    ],
)
def test_reports_that_do_not_match_are_refused(told, results, words):
    with pytest.raises(InvalidInputError, match=words):
        profile_from_reports([(told, results)], {})


def test_a_rank_without_a_stage_is_refused():
    with pytest.raises(FormatError, match="pp_rank of rank 3 is None"):
        ranks_of([{"rank": 3}])


def test_a_log_of_clocks_tells_the_clock_and_leaves_changes_out():
    # As Perseus's power controller writes it: a row is the time in which a clock was in force.
    text = (
        "freq,start,end\n-1,0,1000000000\n1400,1100000000,4000000000\n"
        "1400,4000000001,5000000000\n700,5200000000,9000000000\n"
    )
    events = read_clock_events(text)
    assert events == [(-1.0, 0.0, 1.0), (1400.0, 1.1, 5.0), (700.0, 5.2, 9.0)]
    windows = ((0.2, 0.8), (0.9, 1.5), (1.1, 2), (3, 4.5), (4.5, 5.5), (5.1, 6), (6, 9), (8, 9.5))
    logged = [Logged(Kind.FORWARD, *window) for window in windows]
    found = with_clocks([*logged, Logged(Kind.BACKWARD, 0, 1, 900.0)], events)
    assert [(one.start_s, one.clock_mhz) for one in found] == [
        (1.1, 1400.0),
        (3, 1400.0),
        (6, 700.0),
        (0, 900.0),
    ]
    assert math.isnan(logged[0].clock_mhz)


def test_a_log_of_clocks_needs_no_head_and_may_begin_unlocked():
    assert read_clock_events("-1,0,1000000000\n") == [(-1.0, 0.0, 1.0)]


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ("x,y,z", "line 2: expected clock, start and end"),
        ("1400,5,1", "line 2: clock 1400 from 5 to 1; expected numbers, the end last"),
        ("nan,0,1", "line 2: clock nan"),
    ],
)
def test_a_broken_log_of_clocks_names_its_line(row, words):
    with pytest.raises(FormatError, match=words):
        read_clock_events(f"1400,0,1\n{row}\n")


def test_profiles_and_frontiers_are_found_by_content_and_written_by_ending():
    profile = small_energy_profile()
    text = write_as(profile, format_for("profile.csv", profile))
    assert detect_format(text.encode()) == "perseus-profile"
    again = read_any(text.encode(), name="again")
    assert again.seconds.tolist() == profile.seconds.tolist()
    points = write_as(small_frontier(), format_for("f.csv", small_frontier()))
    assert detect_format(points.encode()) == "perseus-frontier"
    with pytest.raises(FormatError, match="without clocks"):
        read_any(points.encode())
    times, joules = read_frontier_csv(points)
    assert (times.tolist(), joules.tolist()) == ([3.0, 5.4], [900.0, 810.0])
    with pytest.raises(InvalidInputError, match="profile, got"):
        write_as(small_frontier(), "perseus-profile")
    with pytest.raises(InvalidInputError, match="frontier, got"):
        write_as(profile, "perseus-frontier")


@pytest.mark.parametrize(
    "breakdown", [5, {"forward": 5}, {"forward": [5]}, {"forward": [["x"]]}, {"forward": "no"}]
)
def test_a_report_of_another_shape_is_refused(breakdown):
    schedules = [{"rank": 0, "frequencies": [["forward", 1410]]}]
    results = [{"rank": 0, "time_breakdown": breakdown}]
    with pytest.raises(FormatError, match=r"time_breakdown.*0"):
        profile_from_reports([(schedules, results)], {})


def test_a_list_of_names_that_is_none_is_refused():
    with pytest.raises(FormatError, match=r"pipe_schedule.*0.*7; expected"):
        ranks_of([{"rank": 0, "pp_rank": 0, "pipe_schedule": 7}])
