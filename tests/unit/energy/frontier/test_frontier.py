"""The frontier against a linear program, against all assignments, and against the simulator."""

import dataclasses
import itertools

import numpy as np
import pytest
from scipy.optimize import linprog

from partita.core.energy import EnergyProfile
from partita.core.problem import Objective, Problem, Schedule
from partita.core.program import Kind
from partita.cost.durations import instruction_seconds
from partita.energy.frontier.frontier import (
    EnergyModel,
    clock_changes,
    energy_model,
    solve_frontier,
)
from partita.energy.frontier.improve import improve
from partita.energy.frontier.precedence import precedence_of
from partita.energy.frontier.relaxed import Relaxed
from partita.energy.frontier.rounding import (
    Draft,
    Web,
    choose,
    choose_all,
    fastest_draft,
    longest_s,
    set_times,
    web_of,
)
from partita.energy.frontier.savings import played
from partita.errors import InvalidInputError
from partita.planners.table import solve
from partita.program.lower import lower
from partita.program.simulate import play
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


def columns(asked: EnergyModel) -> Web:
    precedence = precedence_of(asked.program, asked.found, asked.options)
    return web_of(asked.program, asked.found, precedence, asked.options)


def longest_path_s(asked: EnergyModel, choice: np.ndarray) -> float:
    """Return the longest path through all activities, one after the other."""
    end = np.zeros(len(asked.found))
    seconds = asked.options.seconds[choice]
    for i in range(len(end)):
        before = asked.found.source[asked.found.target == i]
        end[i] = seconds[i] + max(end[before], default=0.0)
    return float(end.max())


CLOCKS = [1400.0, 1300.0, 1150.0, 1000.0, 850.0, 700.0]


@pytest.mark.parametrize("schedule", [s for s in Schedule if s is not Schedule.INFERENCE])
def test_the_relaxed_problem_is_the_linear_programs_optimum(schedule: Schedule) -> None:
    asked = model(3, 6, CLOCKS, schedule, tensor_bytes=30.0, seed=3)
    precedence = precedence_of(asked.program, asked.found, asked.options)
    relaxed = Relaxed(precedence, asked.options)
    limits = np.linspace(relaxed.fastest_s, relaxed.length_s, 6)
    found = relaxed.shorten(np.inf, limits)
    assert len(found) == 6
    for limit_s, seconds in found.items():
        least = relaxed_optimum(asked, limit_s * (1 + 1e-9))
        assert relaxed.joules(seconds) == pytest.approx(least, rel=1e-6)


@pytest.mark.parametrize("tensor_bytes", [0.0, 5.0, 150.0])
@pytest.mark.parametrize("schedule", [s for s in Schedule if s is not Schedule.INFERENCE])
def test_lags_say_what_the_simulator_does(schedule: Schedule, tensor_bytes: float) -> None:
    asked = model(3, 5, CLOCKS, schedule, tensor_bytes=tensor_bytes, seed=1)
    web = columns(asked)
    precedence = precedence_of(asked.program, asked.found, asked.options)
    assert len(precedence) < len(asked.found)
    rng = np.random.default_rng(5)
    for slowest in (0, 1, 2):
        draft = fastest_draft(web)
        draft.choice[:] = np.minimum(
            web.first + rng.integers(0, slowest + 1, len(web.first)), web.last
        )
        choice = asked.options.ptr[:-1].copy()
        choice[precedence.activity] = draft.choice
        # With transfers that take time, shared ports keep the order of the reference here.
        wanted = (
            longest_path_s(asked, choice) if tensor_bytes else asked.realised(choice[None])[0][0]
        )
        assert longest_s(web, draft) == pytest.approx(wanted, rel=1e-12)


def test_a_tightened_bound_is_at_least_the_linear_programs() -> None:
    asked = model(4, 8, CLOCKS)
    frontier = solve_frontier(asked, points=1, tries=500)
    least = relaxed_optimum(asked, frontier.fastest_s * (1 + 1e-9))
    bound = least + asked.options.blocking_w * frontier.fastest_s
    assert frontier.bound_j[0] >= bound * (1 - 1e-6)
    assert frontier.time_s[0] == pytest.approx(frontier.fastest_s, rel=1e-9)


@pytest.mark.parametrize("schedule", [Schedule.ONE_F_ONE_B, Schedule.GPIPE])
def test_every_point_is_what_the_simulator_measures(schedule: Schedule) -> None:
    asked = model(3, 5, CLOCKS, schedule, tensor_bytes=20.0)
    frontier = solve_frontier(asked, points=8, tries=500)
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


def random_draft(web: Web, seed: int) -> Draft:
    rng = np.random.default_rng(seed)
    draft = fastest_draft(web)
    draft.choice[:] = web.first + rng.integers(0, web.last - web.first + 1)
    return draft


def test_times_are_kept_up_to_date_while_choices_change() -> None:
    asked = model(4, 6, CLOCKS, tensor_bytes=20.0)
    web = columns(asked)
    draft, rng = random_draft(web, 1), np.random.default_rng(2)
    set_times(web, draft, 40.0)
    for step in range(60):
        nodes = rng.choice(len(web.first), 1 + step % 5, replace=False)
        options = web.first[nodes] + rng.integers(0, (web.last - web.first + 1)[nodes])
        if step % 2:
            choose(web, draft, 40.0, nodes[0], options[0])
        else:
            choose_all(web, draft, 40.0, nodes, options)
        fresh = fastest_draft(web)
        fresh.choice[:] = draft.choice
        set_times(web, fresh, 40.0)
        np.testing.assert_allclose(draft.start, fresh.start, rtol=1e-12)
        np.testing.assert_allclose(draft.latest, fresh.latest, rtol=1e-12)
        assert not draft.dirty.any()


def test_the_search_saves_what_it_says_and_stays_in_time() -> None:
    asked = model(4, 10, CLOCKS)
    web = columns(asked)
    draft = fastest_draft(web)
    limit_s = longest_s(web, draft)
    before = float(web.joules[draft.choice].sum())
    saved = improve(web, draft, limit_s, tries=500, enough_j=np.inf)
    assert saved > 0
    assert float(web.joules[draft.choice].sum()) == pytest.approx(before - saved, rel=1e-9)
    assert longest_s(web, draft) <= limit_s * (1 + 1e-9)
    again = fastest_draft(web)
    improve(web, again, limit_s, tries=500, enough_j=np.inf)
    assert again.choice.tolist() == draft.choice.tolist()
    assert improve(web, draft, limit_s, tries=0, enough_j=np.inf) == 0


def test_more_tries_are_not_worse() -> None:
    asked = model(4, 10, CLOCKS, seed=4)
    few, many = (solve_frontier(asked, points=1, tries=tries) for tries in (0, 20_000))
    assert many.energy_j[0] <= few.energy_j[0]


def test_points_fall_in_energy_and_rise_in_time() -> None:
    frontier = solve_frontier(model(4, 8, CLOCKS), points=20, tries=500)
    assert bool((np.diff(frontier.time_s) > 0).all())
    assert bool((np.diff(frontier.energy_j) < 0).all())
    assert bool((frontier.gap >= 0).all())
    assert frontier.time_s[-1] <= frontier.best_s * (1 + 1e-9)


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
    frontier = solve_frontier(hot, points=3, tries=500)
    assert frontier.time_s[0] < frontier.all_max_s
    assert frontier.energy_j[0] < frontier.all_max_j
    assert 0 in frontier.better_than_all_max
    assert not solve_frontier(asked, points=3, tries=500).better_than_all_max


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


def test_changes_of_clocks_are_waited_for() -> None:
    free = model(3, 4, [1400.0, 1200.0, 1000.0, 800.0])
    slow = dataclasses.replace(free, profile=dataclasses.replace(free.profile, switch_s=0.5))
    found, ideal = (solve_frontier(asked, points=8) for asked in (slow, free))
    for point in range(len(found)):
        step = played(slow, found.clocks(point))
        assert found.time_s[point] == pytest.approx(step.time_s)
        assert found.energy_j[point] == pytest.approx(step.energy_j)
    changes = [
        int(clock_changes(slow.program, one.clocks(point)[None]).sum())
        for one in (found, ideal)
        for point in (0,)
    ]
    assert changes[0] < changes[1]  # quiet clocks are better than those that pay without waiting
    assert found.energy_j.min() >= ideal.energy_j.min()
    honest = played(slow, ideal.clocks(0))
    assert found.time_s[0] < honest.time_s
