from typing import Any

import pytest

from partita.core.problem import Schedule
from partita.energy.policies.base import State
from partita.energy.policies.job import Job
from partita.energy.policies.table import SCHEDULERS, check_scheduler
from partita.errors import InvalidInputError


def test_all_max_has_the_instructions_of_the_schedule(cluster: Any) -> None:
    entries = cluster(Job(pp=2, microbatches=2), "all-max").register().deployment.entries
    f, b = ("forward", 1400), ("backward", 1400)
    assert entries == ((f, f, b, b), (f, b, f, b))


def test_ranks_of_a_stage_get_the_same(cluster: Any) -> None:
    wide = cluster(Job(pp=2, dp=2, tp=2, microbatches=3), "all-max").register()
    by_stage = {rank.pp_rank: wide.deployment.entries[rank.rank] for rank in wide.ranks}
    assert all(wide.deployment.entries[r.rank] == by_stage[r.pp_rank] for r in wide.ranks)


def test_devices_without_clocks_are_left_alone(cluster: Any) -> None:
    job = Job(pp=1, microbatches=1, schedule=Schedule.GPIPE)
    plain = cluster(job, "all-max", rank={"clocks_mhz": ()}).register()
    assert plain.deployment.entries == ((("forward", 0), ("backward", 0)),)


def test_without_microbatches_the_job_says_what_is_missing(cluster: Any) -> None:
    told = cluster(Job(pp=2), "all-max").register()
    assert told.session.deployment is None
    assert "num_microbatches" in told.session.failure


def test_ranks_that_name_their_instructions_need_no_microbatches(cluster: Any) -> None:
    names = ("load", "forward", "p2p", "backward", "step")
    told = cluster(Job(pp=1), "all-max", rank={"instructions": names}).register()
    assert [name for name, _ in told.deployment.entries[0]] == list(names)


def test_too_many_instructions_are_refused(cluster: Any) -> None:
    told = cluster(Job(pp=64, microbatches=65536), "all-max").register()
    assert "instructions" in told.session.failure


def test_reports_count_rounds_once_clocks_are_deployed(cluster: Any) -> None:
    told = cluster(Job(pp=2, microbatches=1), "all-max").register()
    before = told.deployment
    told.step()
    assert told.session.version == 2
    assert told.deployment is before
    stale = told.result(told.ranks[0])
    told.step()
    told.session.add_result(stale)
    assert told.session.silent == [0, 1]


def test_two_frequencies(cluster: Any) -> None:
    options = {"forward_freq": 1200, "backward_freq": 800}
    told = cluster(Job(pp=1, microbatches=1), "two-frequencies", options).register()
    assert told.deployment.entries == ((("forward", 1200), ("backward", 800)),)
    options["forward_freq"] = 1399
    refused = cluster(Job(pp=1, microbatches=1), "two-frequencies", options).register()
    assert "cannot be set to 1399 MHz" in refused.session.failure


NAMED = (("forward", 1000), ("backward", 900))


@pytest.mark.parametrize("lists", [1, 2])
def test_a_plan_is_by_rank_or_by_stage(cluster: Any, lists: int) -> None:
    options = {"plans": [("a.py", (NAMED,) * lists)]}
    told = cluster(Job(pp=1, dp=2, microbatches=1), "point-solution", options).register()
    assert told.deployment.entries == (NAMED, NAMED)
    assert told.deployment.state is State.DEPLOYED


def test_plans_follow_one_another_and_the_last_stays(cluster: Any) -> None:
    plans = [(f"{clock}.py", ((("", clock), ("", clock)),)) for clock in (1400, 1200)]
    told = cluster(Job(pp=1, microbatches=1), "point-solution", {"plans": plans}).register()
    assert told.deployment.entries[0][0] == ("forward", 1400)
    assert told.deployment.state is State.PROFILING
    told.step()
    assert told.deployment.entries[0][0] == ("forward", 1200)
    told.step()
    assert told.deployment.entries[0][0] == ("forward", 1200)


def test_transfers_keep_the_clock_of_what_came_before(cluster: Any) -> None:
    names = ("load", "forward", "p2p", "backward")
    plans = [("a.py", ((("", 1200), ("", 800)),))]
    told = cluster(Job(), "point-solution", {"plans": plans}, {"instructions": names}).register()
    assert [clock for _, clock in told.deployment.entries[0]] == [0, 1200, 1200, 800]


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        ((NAMED, NAMED, NAMED), "has 3 lists of clocks; the job has 1 ranks"),
        (((("", 1000),),), "has 1 clocks for rank 0, which runs 2"),
        (((("backward", 1000), ("", 900)),), "'backward' for instruction 0"),
    ],
)
def test_a_plan_that_does_not_fit_says_why(cluster: Any, plan: Any, words: str) -> None:
    told = cluster(Job(microbatches=1), "point-solution", {"plans": [("a.py", plan)]}).register()
    assert words in told.session.failure


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("persus", {}, "did you mean 'perseus'"),
        ("perseus", {"point": 3}, "did you mean 'points'"),
        ("perseus", {"points": "many"}, "expected a value of type int"),
        ("perseus", {"blocking_w": True}, "expected a value of type float"),
        ("all-max", {"points": 3}, "there are none"),
        ("two-frequencies", {"forward_freq": 3}, "needs the option 'backward_freq'"),
        ("two-frequencies", {"forward_freq": 3, "backward_freq": 0}, "backward_freq is 0"),
        ("perseus", {"points": -3}, "points is -3; expected a number above 0"),
        ("perseus", {"blocking_w": -1.0}, "blocking_w is -1.0; expected a number above 0"),
        ("perseus", {"blocking_w": float("nan")}, "blocking_w is nan"),
        ("perseus", {"warmup_step_ratio": 5}, "warmup_step_ratio is 5; expected 0 up to below 1"),
        ("instruction-profiler", {"patience": 0}, "patience 0; expected"),
        ("global-power-limit", {"warmup_step_ratio": float("nan")}, "warmup_step_ratio is nan"),
        ("global-power-limit", {"eta_knob": 1.5}, "eta_knob is 1.5; expected 0 to 1"),
        ("global-power-limit", {"max_power_w": float("inf")}, "max_power_w is inf"),
    ],
)
def test_schedulers_and_options_are_checked(name: str, options: Any, words: str) -> None:
    with pytest.raises(InvalidInputError, match=words):
        check_scheduler(name, options)


def test_every_scheduler_has_a_docstring_of_its_own() -> None:
    assert all(kind.__doc__ for kind in SCHEDULERS.values())
