"""The whole way: profile, solve, deploy, and deploy anew on stragglers."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from partita.core.problem import Metric, Objective, Problem, Schedule
from partita.core.solution import Solution
from partita.energy.frontier.choose import PointLimits
from partita.energy.policies.job import Job, Straggler
from partita.testing.builders import chain, flat_cluster, pipeline

OPTIONS = {"points": 12}
JOB = Job(pp=3, microbatches=4)


def deployed(cluster: Any, job: Job = JOB, **rest: Any) -> Any:
    return cluster(job, options=OPTIONS, **rest).register().settle()


def test_less_energy_at_the_speed_of_all_max(cluster: Any) -> None:
    told = deployed(cluster)
    frontier = told.session.scheduler.chosen(0).frontier
    assert told.session.version == 6
    assert told.deployment.time_s[0] <= frontier.all_max_s * (1 + 1e-9)
    assert told.deployment.energy_j[0] < 0.95 * frontier.all_max_j
    lowest = min(clock for entries in told.deployment.entries for _, clock in entries)
    assert lowest < 1400
    assert len({told.deployment.time_s, told.deployment.energy_j}) == 2


def test_a_profile_that_is_brought_is_not_measured_again(cluster: Any) -> None:
    measured = deployed(cluster)
    brought = deployed(cluster, replace(JOB, profile=measured.session.scheduler.profile))
    assert brought.session.version == 1
    assert brought.deployment.entries == measured.deployment.entries


def test_the_wish_decides_the_point(cluster: Any) -> None:
    usual = deployed(cluster)
    frugal = deployed(cluster, replace(JOB, wish=PointLimits(least_energy=True)))
    assert frugal.deployment.energy_j[0] < usual.deployment.energy_j[0]
    frontier = frugal.session.scheduler.chosen(0).frontier
    assert frugal.deployment.energy_j[0] == frontier.energy_j.min()


@pytest.mark.parametrize("limits", [{"deadline_s": 1e-3}, {"energy_j": 1.0}, {"power_w": 1.0}])
def test_limits_that_nothing_keeps_get_the_nearest_and_a_note(cluster: Any, limits: Any) -> None:
    told = deployed(cluster, replace(JOB, wish=PointLimits(**limits)))
    assert "no point of the frontier keeps" in told.deployment.note
    frontier, point = told.session.scheduler.chosen(0).frontier, told.session.scheduler.chosen(0)
    assert point.point == (0 if "deadline_s" in limits else int(np.argmin(frontier.energy_j)))


def test_a_straggler_elsewhere_moves_the_point_to_the_least_of_both(cluster: Any) -> None:
    told = deployed(cluster)
    usual = told.deployment
    frontier = told.session.scheduler.chosen(0).frontier
    slower = usual.time_s[0] * 1.1
    told.straggle(slowdown=1.1)
    assert usual.time_s[0] < told.deployment.time_s[0] <= slower * (1 + 1e-9)
    assert told.deployment.energy_j[0] == frontier.energy_j[frontier.time_s <= slower].min()
    told.straggle(iteration_s=1e6)
    assert told.deployment.energy_j[0] == frontier.energy_j.min()
    version = told.session.version
    told.straggle(iteration_s=1e6)
    assert told.session.version == version
    told.straggle(slowdown=1.0)
    assert told.deployment == usual


def test_limits_of_energy_hold_with_a_straggler_and_those_of_time_do_not(cluster: Any) -> None:
    told = deployed(cluster, replace(JOB, wish=PointLimits(slowdown=0.0)))
    usual = told.deployment.time_s[0]
    told.straggle(slowdown=1.2)
    assert told.deployment.time_s[0] > usual


def test_a_slow_rank_is_solved_anew_and_others_wait_for_it(cluster: Any) -> None:
    told = deployed(cluster, Job(pp=3, dp=2, microbatches=4))
    usual = told.deployment
    slow = next(rank.rank for rank in told.ranks if (rank.dp_rank, rank.pp_rank) == (1, 0))
    told.straggle(rank=slow, slowdown=1.6)
    mine, theirs = told.session.scheduler.chosen(1), told.session.scheduler.chosen(0)
    assert mine.frontier.fastest_s > theirs.frontier.fastest_s
    assert told.deployment.time_s[slow] > usual.time_s[slow]
    other = told.deployment.time_s[0]
    assert usual.time_s[0] < other <= told.deployment.time_s[slow] * (1 + 1e-9)
    assert told.deployment.energy_j[0] < usual.energy_j[0]
    told.session.clear_stragglers(slow)
    told.advance()
    assert told.deployment == usual


def test_a_slow_pipeline_lets_the_others_slow_down(cluster: Any) -> None:
    told = deployed(cluster, Job(pp=2, dp=2, microbatches=3))
    usual = told.deployment
    told.straggle(dp_rank=1, slowdown=1.2)
    by_pipeline = {r.dp_rank: told.deployment.time_s[r.rank] for r in told.ranks}
    assert by_pipeline[1] == usual.time_s[0] < by_pipeline[0]


def test_a_straggler_during_profiling_counts_afterwards(cluster: Any) -> None:
    early = cluster(JOB, options=OPTIONS).register()
    early.straggle(slowdown=1.2)
    assert early.session.version == 1
    late = deployed(cluster)
    late.straggle(slowdown=1.2)
    assert early.settle().deployment == late.deployment


def test_a_job_is_a_function_of_what_it_was_told(cluster: Any) -> None:
    first = deployed(cluster)
    first.straggle(slowdown=1.2)
    first.step()
    second = deployed(cluster)
    second.session.resume(first.session.version, [Straggler(slowdown=1.2)])
    second.advance()
    assert second.session.version == first.session.version
    assert second.deployment == first.deployment


def test_tensor_parallel_ranks_share_clocks_and_add_energy(cluster: Any) -> None:
    narrow = deployed(cluster, Job(pp=2, microbatches=3))
    wide = deployed(cluster, Job(pp=2, tp=2, microbatches=3))
    assert wide.deployment.energy_j[0] == pytest.approx(2 * narrow.deployment.energy_j[0], rel=5e-3)
    assert wide.deployment.entries[0] == wide.deployment.entries[1]


def test_a_clock_that_a_device_lacks_becomes_the_next_above(cluster: Any) -> None:
    profile = deployed(cluster).session.scheduler.profile
    brought = replace(JOB, profile=profile)
    told = deployed(cluster, brought, rank={"clocks_mhz": (1400, 1100)})
    clocks = {clock for entries in told.deployment.entries for _, clock in entries}
    assert clocks <= {1400, 1100}


def test_names_that_do_not_fit_the_plan_are_refused(cluster: Any) -> None:
    names = ("forward", "backward")
    told = cluster(JOB, options=OPTIONS, rank={"instructions": names}).register()
    assert "names 1 x 'forward' in a step, its plan has 4" in told.session.failure


def test_training_goes_on_where_the_frontier_cannot_be_had(cluster: Any) -> None:
    told = cluster(JOB, options=OPTIONS).register()
    told.session.due = True
    told.session.install(told.session.instead("the solver died"))
    assert told.deployment.note == "the solver died"
    assert told.session.settled
    assert {clock for entries in told.deployment.entries for _, clock in entries} == {1400}
    assert told.session.instead("again") is None


@pytest.mark.parametrize("schedule", [Schedule.INTERLEAVED, Schedule.ZERO_BUBBLE])
def test_a_solution_brings_any_schedule(cluster: Any, schedule: Schedule) -> None:
    graph = chain(4)
    machines = flat_cluster(2)
    groups = [0, 1, 0, 1] if schedule is Schedule.INTERLEAVED else [0, 1]
    plan = replace(pipeline(graph, machines, groups, microbatches=4), schedule=schedule)
    problem = Problem(graph=graph, cluster=machines, objective=Objective())
    solution = Solution(problem=problem, plan=plan, metric=Metric.THROUGHPUT, value=1.0, unit="s")
    told = cluster(Job(pp=2, solution=solution), options=OPTIONS).register()
    workload = told.session.scheduler.workload
    while not told.session.settled:
        for rank in told.ranks:
            names = workload.names(rank.rank)
            turn = dict.fromkeys(names, 0)
            stages = []
            for name in names:
                stages.append(workload.stages(rank.rank, name)[turn[name]])
                turn[name] += 1
            told.session.add_result(told.result(rank, stages))
        told.advance()
    profile = told.session.scheduler.profile
    assert profile.num_stages == len(groups)
    frontier = told.session.scheduler.chosen(0).frontier
    assert told.deployment.energy_j[0] < frontier.all_max_j
    usual = told.deployment
    told.straggle(rank=1, slowdown=2.0)
    assert told.deployment.time_s[0] > usual.time_s[0]
