"""Files of Perseus: what is read, what is written, and what is refused."""

import math
import re

import numpy as np
import pytest

from partita.core.problem import Problem
from partita.core.program import Kind
from partita.errors import FormatError, InvalidInputError
from partita.formats.perseus import (
    Logged,
    profile_from_logs,
    read_clock_plan,
    read_energy_csv,
    read_energy_log,
    read_instruction_log,
    read_results,
    write_clock_plan,
    write_energy_csv,
    write_energy_log,
    write_frontier_csv,
    write_instruction_log,
)
from partita.planners.table import solve
from partita.program.lower import lower
from partita.testing.builders import chain, flat_cluster, small_frontier

PROFILE = """stage,instruction,frequency,time,energy
0,forward,1410,0.05,20.5
0,backward,1410,0.1,40
0,forward,1395,0.051,20
1,load,1410,0.01,1
"""


def test_a_profile_is_read_and_written() -> None:
    profile = read_energy_csv(PROFILE, blocking_w={"": 80.0})
    assert len(profile) == 4
    assert profile.num_stages == 2
    rows = profile.rows_of(0, Kind.FORWARD, "a100")
    assert profile.clock_mhz[rows].tolist() == [1410.0, 1395.0]
    assert profile.rows_of(1, Kind.LOAD, "").tolist() == [3]
    again = read_energy_csv(write_energy_csv(profile), blocking_w={"": 80.0})
    assert again == profile


def test_the_stage_may_be_called_as_the_artifact_does() -> None:
    assert read_energy_csv(PROFILE.replace("stage", "pp_rank")) == read_energy_csv(PROFILE)


def test_ranks_of_a_stage_are_the_slowest_and_the_mean() -> None:
    text = (
        "rank,dp_rank,pp_rank,tp_rank,stage,instruction,frequency,time,energy\n"
        "0,0,0,0,0,forward,1410,0.05,20\n"
        "1,0,0,1,0,forward,1410,0.06,30\n"
    )
    profile = read_energy_csv(text)
    assert profile.seconds.tolist() == [0.06]
    assert profile.joules.tolist() == [25.0]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("stage,instruction,time,energy\n", "no column 'frequency'"),
        ("stage,instruction,frequency,time,energy\n", "no row"),
        (PROFILE + "0,sleep,1410,1,1\n", "instruction 'sleep' is not known"),
        (PROFILE + "0,forward,x,1,1\n", "frequency is 'x'"),
        (PROFILE + "0.5,forward,1000,1,1\n", "stage is 0.5"),
        (PROFILE + "0,forward,1000,nan,1\n", "line 6: time is nan"),
        (PROFILE + "0,forward,1000,0,1\n", "line 6: time is 0; expected 1e-09 to 1e.06"),
        (PROFILE + "0,forward,1000,-0.5,1\n", "line 6: time is -0.5; expected 1e-09 to 1e.06"),
        (PROFILE + "0,forward,1000,1,-3\n", "line 6: energy is -3; expected 0 to 1e.12"),
        (PROFILE + "0,forward,0,1,1\n", "line 6: frequency is 0; expected 1 or more"),
        (PROFILE + "0,forward,1000\n", "line 6: the row is short: it has no time"),
        (PROFILE + "0\n", "line 6: the row is short: it has no instruction"),
        (PROFILE + "0,forward,1000,,1\n", "line 6: time is ''; expected a number"),
        ("stage,instruction,power limit,time,energy\n", "line 1: there is no column 'frequency'"),
        ("instruction,frequency,time,energy\n", "line 1: there is no column 'stage'"),
        ("stage,instruction,frequency,time\r0,forward\r", "new-line character"),
    ],
)
def test_a_bad_profile_is_named(text: str, words: str) -> None:
    with pytest.raises(FormatError, match=words):
        read_energy_csv(text)


def test_logs_keep_their_clocks_and_add_up_to_a_profile() -> None:
    logged = [
        Logged(Kind.FORWARD, 1.0, 1.5, 1410.0),
        Logged(Kind.BACKWARD, 1.5, 2.5, 1410.0),
        Logged(Kind.FORWARD, 3.0, 3.6, 1200.0),
        Logged(Kind.FORWARD, 4.0, 4.8, 1200.0),
    ]
    assert read_instruction_log(write_instruction_log(logged)) == logged
    times, joules = np.array([0.0, 10.0]), np.array([100.0, 1100.0])
    readings = read_energy_log(write_energy_log(times.tolist(), joules.tolist()))
    profile = profile_from_logs([(0, logged, readings)], blocking_w={"": 50.0})
    rows = profile.rows_of(0, Kind.FORWARD, "")
    assert profile.clock_mhz[rows].tolist() == [1410.0, 1200.0]
    assert profile.seconds[rows] == pytest.approx([0.5, 0.7])
    assert profile.joules[rows] == pytest.approx([50.0, 70.0])


def test_a_log_without_clocks_cannot_become_a_profile() -> None:
    text = "instruction,start,end\nforward_microstep,1.0,2.0\n"
    (one,) = read_instruction_log(text)
    assert math.isnan(one.clock_mhz)
    assert write_instruction_log([one]) == text
    readings = (np.array([0.0, 3.0]), np.array([0.0, 3.0]))
    with pytest.raises(InvalidInputError, match="clock of forward"):
        profile_from_logs([(0, [one], readings)])
    late = one._replace(clock_mhz=1400.0, end_s=5.0)
    with pytest.raises(InvalidInputError, match="outside the readings"):
        profile_from_logs([(0, [late], readings)])


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("time,energy\n1,1\n", "two readings"),
        ("time,energy\n2,1\n1,2\n", "earlier or lower"),
        ("time,joules\n1,1\n", "no column 'energy'"),
    ],
)
def test_a_bad_energy_log_is_named(text: str, words: str) -> None:
    with pytest.raises(FormatError, match=words):
        read_energy_log(text)


def test_clock_plans_of_both_kinds_are_read() -> None:
    assert read_clock_plan("[[('forward', 1410), ('backward', 1300)]]  # cost 1\n") == [
        [("forward", 1410), ("backward", 1300)]
    ]
    assert read_clock_plan("[[1410, 1300], [900]]") == [[("", 1410), ("", 1300)], [("", 900)]]


@pytest.mark.parametrize(
    "text",
    [
        "__import__('os').system('true')",
        "[[1410, open('x')]]",
        "{'a': 1}",
        "[1410]",
        "[[True]]",
        "[[('forward', -1)]]",
        "[[('forward', 1.5)]]",
        "[" * 3000,
    ],
)
def test_a_plan_with_code_or_of_another_form_is_refused(text: str) -> None:
    with pytest.raises(FormatError):
        read_clock_plan(text)


@pytest.mark.parametrize(
    ("clock", "words"),
    [
        ("True", "is not a clock or a (name, clock)"),
        ("-1", "stage 1: the clock is -1; expected 0 to 1000000 MHz"),
        ("1000001", "stage 1: the clock is 1000001; expected 0 to 1000000 MHz"),
        ("9" * 4000, "stage 1: the clock is 999999"),
    ],
)
def test_a_clock_that_cannot_be_is_refused_in_one_line(clock: str, words: str) -> None:
    for entry in (clock, f"('forward', {clock})"):
        with pytest.raises(FormatError, match=re.escape(words)) as caught:
            read_clock_plan(f"[[0, 1000000], [{entry}]]")
        assert len(str(caught.value)) < 100


def test_reports_need_a_rank() -> None:
    assert read_results('[{"rank": 0, "iter_time": [1.0]}]')[0]["rank"] == 0
    for text in ("{", "{}", '[{"iter_time": 1}]'):
        with pytest.raises(FormatError):
            read_results(text)


def test_a_frontier_is_written_point_by_point() -> None:
    assert write_frontier_csv(small_frontier()).splitlines()[1] == "3.0,900.0"


def test_a_written_clock_plan_is_read_back() -> None:
    problem = Problem(graph=chain(2), cluster=flat_cluster(1))
    one_stage_program = lower(problem, solve(problem, "single").plan)
    clocks = np.where(one_stage_program.kind == Kind.FORWARD, 1200.0, 0.0)
    text = write_clock_plan(one_stage_program, clocks, comment="least energy\nmodelled")
    (stage,) = read_clock_plan(text)
    assert set(stage) == {("forward", 1200)}
    assert "# modelled" in text
    (plain,) = read_clock_plan(write_clock_plan(one_stage_program, clocks, named=False))
    assert set(plain) == {("", 1200)}
