"""The DVFS model as a profile of any Program."""

from dataclasses import replace

import numpy as np
import pytest

from partita.catalogue.catalogue import load_catalogue
from partita.catalogue.shorthand import read_shorthand
from partita.core.energy import EnergyOrigin
from partita.core.problem import Objective, Problem, Schedule
from partita.core.program import Kind
from partita.cost.durations import instruction_seconds
from partita.energy.devices.table import open_device
from partita.energy.frontier.frontier import energy_model, solve_frontier
from partita.energy.frontier.modelled import modelled_profile, whole_clocks
from partita.errors import InvalidInputError
from partita.program.lower import lower
from partita.testing.builders import Figures, chain, pipeline


def problem_of(schedule: Schedule, cluster_text: str = "2xa100"):
    graph = chain(4, Figures(forward_s=0.05, backward_s=0.1))
    cluster = read_shorthand(cluster_text, load_catalogue())
    plan = pipeline(graph, cluster, [0, 1], schedule=schedule, microbatches=4)
    problem = Problem(
        graph=graph, cluster=cluster, objective=Objective(schedule=schedule, microbatches=4)
    )
    return problem, plan


@pytest.mark.parametrize("schedule", [Schedule.ONE_F_ONE_B, Schedule.ZERO_BUBBLE])
def test_a_modelled_profile_is_what_the_modelled_gpu_does(schedule: Schedule) -> None:
    problem, plan = problem_of(schedule)
    program = lower(problem, plan)
    seconds = instruction_seconds(problem, plan, program)
    profile = modelled_profile(program, problem.cluster, seconds, step_mhz=300)
    assert profile.origin is EnergyOrigin.MODELLED
    assert profile.device_types == ("a100",)
    device = open_device("modelled:a100,step=300")
    assert profile.blocking_w["a100"] == device.blocking_w
    now = 0.0
    device.clock = lambda: now
    device.energy_j()
    for row in range(len(profile)):
        kind, stage = Kind(int(profile.kind[row])), int(profile.stage[row])
        here = (program.kind == int(kind)) & (program.stage == stage)
        device.set_clock(int(profile.clock_mhz[row]))
        before = device.energy_j()
        took = device.begin_work(float(seconds[here].max()), kind)
        now += took
        assert took == pytest.approx(float(profile.seconds[row]))
        assert device.energy_j() - before == pytest.approx(float(profile.joules[row]))


def test_a_frontier_of_a_modelled_profile_saves_energy() -> None:
    problem, plan = problem_of(Schedule.ONE_F_ONE_B)
    program = lower(problem, plan)
    seconds = instruction_seconds(problem, plan, program)
    profile = modelled_profile(program, problem.cluster, seconds)
    assert len(profile) == 2 * 2 * 81
    frontier = solve_frontier(energy_model(program, problem.cluster, profile, seconds), points=3)
    assert frontier.energy_j[0] < frontier.all_max_j
    assert frontier.time_s[0] <= frontier.all_max_s * (1 + 1e-9)


def test_mixed_devices_have_their_own_rows() -> None:
    problem, plan = problem_of(Schedule.ONE_F_ONE_B, "1xa100+1xv100")
    program = lower(problem, plan)
    seconds = np.ones(len(program))
    profile = modelled_profile(program, problem.cluster, seconds)
    assert profile.device_types == ("a100", "v100")
    assert len(profile.rows_of(0, int(Kind.FORWARD), "v100")) == 0
    v100 = profile.rows_of(1, int(Kind.FORWARD), "v100")
    assert profile.clock_mhz[v100].max() == 1530
    assert profile.clock_mhz[v100].tolist() == [
        float(int(clock)) for clock in profile.clock_mhz[v100]
    ]


def test_a_device_without_figures_is_named() -> None:
    problem, plan = problem_of(Schedule.ONE_F_ONE_B)
    bare = replace(
        problem.cluster,
        devices=tuple(replace(device, clocks_mhz=()) for device in problem.cluster.devices),
    )
    program = lower(problem, plan)
    with pytest.raises(InvalidInputError, match=r"'a100': clocks_mhz is not known"):
        modelled_profile(program, bare, np.ones(len(program)))


def test_clocks_are_whole_and_thinned_out_from_the_highest() -> None:
    assert whole_clocks((135.0, 142.5, 150.0)) == (150, 142, 135)
    assert whole_clocks((100.0, 110.0, 120.0, 130.0, 140.0), 15) == (140, 120, 100)
