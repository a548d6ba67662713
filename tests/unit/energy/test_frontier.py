"""The frontier against a linear program, against all assignments, and against the simulator."""

import itertools

import numpy as np
import pytest
from scipy.optimize import linprog

from partita.core.energy import EnergyProfile
from partita.core.problem import Objective, Problem, Schedule
from partita.core.program import Kind
from partita.cost.durations import instruction_seconds
from partita.cost.lower import lower
from partita.cost.simulate import play
from partita.energy.frontier import EnergyModel, energy_model, solve_frontier
from partita.errors import InvalidInputError
from partita.plan.table import solve
from partita.testing.builders import Figures, chain, flat_cluster

BLOCKING_W = 80.0


def profile(stages: int, clocks: list[float], seed: int = 0) -> EnergyProfile:
    """Return slower and cheaper instructions at lower clocks, with some noise."""
    rng = np.random.default_rng(seed)
    rows = []
    for stage, kind in itertools.product(range(stages), (Kind.FORWARD, Kind.BACKWARD)):
        base = (1.0 if kind is Kind.FORWARD else 2.0) * rng.uniform(0.8, 1.2)
        for clock in clocks:
            seconds = base * (0.8 * clocks[0] / clock + 0.2) * rng.uniform(0.99, 1.01)
            watts = BLOCKING_W + 220 * (clock / clocks[0]) ** 2.7 * rng.uniform(0.98, 1.02)
            rows.append((stage, int(kind), clock, seconds, seconds * watts))
    stage_, kind_, clock_, seconds_, joules_ = map(list, zip(*rows, strict=True))
    return EnergyProfile(
        stage=stage_,
        kind=kind_,
        clock_mhz=clock_,
        seconds=seconds_,
        joules=joules_,
        blocking_w={"": BLOCKING_W},
    )


def model(
    stages: int,
    microbatches: int,
    clocks: list[float],
    schedule: Schedule = Schedule.ONE_F_ONE_B,
    tensor_bytes: float = 0.0,
    seed: int = 0,
) -> EnergyModel:
    objective = Objective(microbatches=microbatches, schedule=schedule)
    graph = chain(stages, Figures(tensor_bytes=tensor_bytes))
    cluster = flat_cluster(stages, bandwidth_bytes_per_s=100.0)
    problem = Problem(graph=graph, cluster=cluster, objective=objective)
    plan = solve(problem, "uniform").plan
    program = lower(problem, plan)
    seconds = instruction_seconds(problem, plan, program)
    return energy_model(program, cluster, profile(stages, clocks, seed), seconds)


def relaxed_optimum(asked: EnergyModel, limit_s: float) -> float:
    """Return the least effective energy on the hulls by a linear program."""
    options, found = asked.options, asked.found
    count = len(found)
    points = [
        options.hull[options.hull_ptr[i] : options.hull_ptr[i + 1]].tolist() for i in range(count)
    ]
    first = count + np.concatenate([[0], np.cumsum([len(p) for p in points])])
    width = int(first[-1])
    cost = np.zeros(width)
    equal = np.zeros((count, width))
    rows, limits = [], []
    for i, own in enumerate(points):
        columns = slice(int(first[i]), int(first[i + 1]))
        cost[columns] = options.joules[own]
        equal[i, columns] = 1.0
        end = np.zeros(width)
        end[i] = 1.0
        end[columns] = options.seconds[own]
        rows.append(end)
        limits.append(limit_s)
        for target in found.target[found.source == i].tolist():
            wait = end.copy()
            wait[target] -= 1.0
            rows.append(wait)
            limits.append(0.0)
    solved = linprog(
        cost, A_ub=np.array(rows), b_ub=limits, A_eq=equal, b_eq=np.ones(count), method="highs"
    )
    assert solved.status == 0
    return float(solved.fun)


CLOCKS = [1400.0, 1300.0, 1150.0, 1000.0, 850.0, 700.0]


@pytest.mark.parametrize("schedule", [s for s in Schedule if s is not Schedule.INFERENCE])
def test_the_bound_is_the_linear_programs_optimum(schedule: Schedule) -> None:
    asked = model(3, 6, CLOCKS, schedule, tensor_bytes=30.0, seed=3)
    frontier = solve_frontier(asked, points=6, to_slowest=True)
    assert len(frontier) > 2
    for time_s, bound_j in zip(frontier.time_s, frontier.bound_j, strict=True):
        least = relaxed_optimum(asked, time_s * (1 + 1e-9)) + asked.options.blocking_w * time_s
        # The bound is that of the limit that the point was made for, at or above its own time.
        assert bound_j <= least * (1 + 1e-7)
        assert bound_j == pytest.approx(least, rel=0.02)


def test_the_fastest_point_has_the_linear_programs_bound() -> None:
    asked = model(4, 8, CLOCKS)
    frontier = solve_frontier(asked, points=1)
    least = relaxed_optimum(asked, frontier.fastest_s * (1 + 1e-9))
    bound = least + asked.options.blocking_w * frontier.fastest_s
    assert frontier.bound_j[0] == pytest.approx(bound, rel=1e-6)
    assert frontier.time_s[0] == pytest.approx(frontier.fastest_s, rel=1e-9)


@pytest.mark.parametrize("schedule", [Schedule.ONE_F_ONE_B, Schedule.GPIPE])
def test_every_point_is_what_the_simulator_measures(schedule: Schedule) -> None:
    asked = model(3, 5, CLOCKS, schedule, tensor_bytes=20.0)
    frontier = solve_frontier(asked, points=8)
    program, known = asked.program, asked.profile
    for point in range(len(frontier)):
        seconds, joules = asked.seconds.copy(), 0.0
        busy = 0.0
        for row, clock in enumerate(frontier.clocks(point).tolist()):
            if clock > 0:
                rows = known.rows_of(int(program.stage[row]), int(program.kind[row]), "")
                mine = rows[known.clock_mhz[rows] == clock]
                seconds[row] = known.seconds[mine][0]
                joules += known.joules[mine][0]
                busy += seconds[row]
        length = play(program, asked.cluster, seconds).makespan_s
        energy = joules + BLOCKING_W * (len(program.devices) * length - busy)
        assert frontier.time_s[point] == pytest.approx(length, rel=1e-12)
        assert frontier.energy_j[point] == pytest.approx(energy, rel=1e-9)


def test_points_fall_in_energy_and_rise_in_time() -> None:
    frontier = solve_frontier(model(4, 8, CLOCKS), points=20)
    assert bool((np.diff(frontier.time_s) > 0).all())
    assert bool((np.diff(frontier.energy_j) < 0).all())
    assert bool((frontier.gap >= 0).all())
    assert frontier.time_s[-1] <= frontier.best_s * (1 + 1e-9)


@pytest.mark.parametrize("seed", range(4))
def test_no_assignment_of_clocks_beats_the_bound(seed: int) -> None:
    asked = model(2, 2, [1400.0, 1000.0, 700.0], seed=seed)
    frontier = solve_frontier(asked, points=5)
    choices = [range(a, b) for a, b in itertools.pairwise(asked.options.ptr.tolist())]
    every = [asked.realised(np.array(choice)) for choice in itertools.product(*choices)]
    for time_s, energy_j, bound_j in zip(
        frontier.time_s, frontier.energy_j, frontier.bound_j, strict=True
    ):
        best = min(energy for length, energy in every if length <= time_s * (1 + 1e-12))
        assert bound_j <= best * (1 + 1e-9)
        assert best <= energy_j * (1 + 1e-9) <= best * 1.03


def test_a_clock_that_is_slower_at_the_top_gives_a_point_that_beats_all_max() -> None:
    asked = model(2, 4, CLOCKS)
    known = asked.profile
    throttled = known.seconds * np.where(known.clock_mhz == CLOCKS[0], 1.2, 1.0)
    slower = EnergyProfile(
        stage=known.stage,
        kind=known.kind,
        clock_mhz=known.clock_mhz,
        seconds=throttled,
        joules=known.joules * np.where(known.clock_mhz == CLOCKS[0], 1.2, 1.0),
        blocking_w=known.blocking_w,
    )
    hot = energy_model(asked.program, asked.cluster, slower, asked.seconds)
    frontier = solve_frontier(hot, points=3)
    assert frontier.time_s[0] < frontier.all_max_s
    assert frontier.energy_j[0] < frontier.all_max_j


def test_a_profile_of_another_pipeline_is_refused() -> None:
    asked = model(2, 2, CLOCKS)
    known = asked.profile
    other = EnergyProfile(
        stage=known.stage + 7,
        kind=known.kind,
        clock_mhz=known.clock_mhz,
        seconds=known.seconds,
        joules=known.joules,
        blocking_w=known.blocking_w,
    )
    with pytest.raises(InvalidInputError, match="knows no instruction"):
        energy_model(asked.program, asked.cluster, other, asked.seconds)


def test_an_unknown_blocking_power_is_refused() -> None:
    asked = model(2, 2, CLOCKS)
    known = asked.profile
    silent = EnergyProfile(
        stage=known.stage,
        kind=known.kind,
        clock_mhz=known.clock_mhz,
        seconds=known.seconds,
        joules=known.joules,
    )
    with pytest.raises(InvalidInputError, match="blocking power"):
        energy_model(asked.program, asked.cluster, silent, asked.seconds)
