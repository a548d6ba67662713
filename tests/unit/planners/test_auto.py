import doctest
import math
import random
import statistics
import subprocess
import sys
from dataclasses import replace
from itertools import accumulate, compress, islice, product

import numpy as np
import pytest

from partita.catalogue.examples import example
from partita.core.cluster import Cluster, Level
from partita.core.graph import DeviceKind
from partita.core.plan import Shard
from partita.core.problem import Metric, Mode, Objective, Problem, Schedule
from partita.core.program import Kind
from partita.core.rules import parse_rule
from partita.core.solution import Proof
from partita.cost.judge import check_memory, judge_candidate, measure
from partita.cost.links import collective_s
from partita.cost.memory import peak_memory
from partita.errors import InfeasibleError, InvalidInputError
from partita.objectives.placed import placement_errors
from partita.planners.auto import coarse, search, sketch, starts, units
from partita.planners.auto.chain_dp import SHORT_LINE, ChainProgram, TablePool, line_of
from partita.planners.auto.coarse import working_problem
from partita.planners.auto.estimate import Estimator
from partita.planners.auto.evaluator import Evaluator
from partita.planners.auto.frame import Batch, frame_of
from partita.planners.auto.moves import NEIGHBOURHOODS, Position
from partita.planners.auto.planner import FEWEST_STEPS, USUAL_STEPS, plan_auto, usual_steps
from partita.planners.auto.portfolio import PLAIN, Answers
from partita.planners.auto.recompute import beyond_estimate, fitted
from partita.planners.auto.recompute_kernel import least_seconds
from partita.planners.auto.search import Search
from partita.planners.auto.sketch import Sketch, fair_shares, replicated, sketch_of
from partita.planners.auto.starts import (
    Recuts,
    chain_starts,
    data_parallel_starts,
    device_lines,
    likely_starts,
    unit_orders,
)
from partita.planners.effort import Effort, SearchTrace
from partita.planners.table import PLANNERS, find_planner
from partita.planners.uniform import plan_uniform
from partita.program.lower import lower
from partita.testing.builders import (
    Figures,
    chain,
    diamond,
    flat_cluster,
    host_cluster,
    paired_cluster,
    random_dag,
)
from partita.testing.planner_suite import PICKY_PROBLEMS, PROBLEMS

QUICK = ("single", "uniform", "uniform_floor", "parameters", "autopipe", "m-topo", "m-etf", "m-sct")
SIZES = Figures(parameter_bytes=8.0, tensor_bytes=50.0, saved_bytes=20.0, batch_size=4)


def random_problem(seed: int, **objective: object) -> Problem:
    rng = random.Random(seed)
    graph = replace(random_dag(rng.randint(4, 16), rng), batch_size=rng.choice((1, 4)))
    speeds = [rng.choice((0.5, 1.0, 2.0)) for _ in range(4)]
    clusters = (
        flat_cluster(4, speeds=speeds, bandwidth_bytes_per_s=rng.choice((1e2, 1e4))),
        host_cluster(2, 2, inside_bytes_per_s=1e4, between_bytes_per_s=1e2),
        paired_cluster(3, bandwidth_bytes_per_s=500.0, latency_s=0.01),
    )
    return Problem(graph=graph, cluster=rng.choice(clusters), objective=Objective(**objective))


@pytest.mark.parametrize("make", [*PROBLEMS.values(), *PICKY_PROBLEMS.values()])
def test_no_planner_that_was_asked_is_better(make):
    solution = plan_auto(make(), iterations=12)
    values = [value for value in solution.stats["tried"].values() if not isinstance(value, str)]
    assert solution.value <= min(values, default=np.inf) * (1 + 1e-9)


@pytest.mark.parametrize("seed", range(6))
def test_no_quick_planner_of_the_table_is_better_on_random_problems(seed):
    problem = random_problem(seed)
    found = plan_auto(problem, iterations=12).value
    for name in QUICK:
        try:
            other = find_planner(name)(problem).value
        except InfeasibleError:
            continue
        assert found <= other * (1 + 1e-9), name


def test_every_planner_of_the_table_is_asked_or_a_reason_given():
    tried = plan_auto(PROBLEMS["long chain"](), iterations=2).stats["tried"]
    others = {"auto", "custom", "manual", "grid", "m-sct", "piper", "local-search", "hierarchical"}
    assert not set(PLANNERS) - set(tried) - others


@pytest.mark.parametrize("metric", [Metric.THROUGHPUT, Metric.LATENCY, Metric.MAX_LOAD])
def test_the_same_iterations_give_the_same_solution(metric):
    problem = random_problem(3, metric=metric)
    first = plan_auto(problem, iterations=10)
    assert plan_auto(problem, iterations=10) == first
    assert first.stats["effort"] == "iterations 10"


def counted(calls, function):
    """Return a function that notes its calls."""

    def noted(*args):
        calls.append(args)
        return function(*args)

    return noted


class _Clock:
    """A clock on which every look takes some seconds, as on a machine that is busy."""

    def __init__(self, look_s):
        self.now_s, self.look_s = 0.0, look_s

    def __call__(self):
        self.now_s += self.look_s
        return self.now_s


@pytest.mark.parametrize("metric", [Metric.THROUGHPUT, Metric.LATENCY, Metric.MAX_LOAD])
def test_without_limits_the_answer_does_not_depend_on_the_clock(metric, monkeypatch):
    problem = random_problem(3, metric=metric)
    found = []
    for look_s in (0.0, 0.01):
        monkeypatch.setattr("partita.planners.effort.search_clock", _Clock(look_s))
        found.append(plan_auto(problem))
    assert found[0] == found[1]
    assert found[0].options["iterations"] == usual_steps(problem)
    assert plan_auto(problem, iterations=usual_steps(problem)) == found[0]


def test_a_search_that_the_outer_limit_cuts_short_says_so(monkeypatch):
    monkeypatch.setattr("partita.planners.effort.search_clock", _Clock(20.0))
    solution = plan_auto(random_problem(3))
    assert solution.stats["cut_short"]
    assert solution.proof is Proof.TIME_LIMIT


def test_a_step_that_no_search_can_play_is_refused_with_its_size():
    problem = replace(random_problem(3), objective=Objective(microbatches=1_000_000))
    with pytest.raises(InvalidInputError, match=r"has 4,000,000 instructions .* at most 400,000"):
        plan_auto(problem, time_limit=1.0)


def test_pipelines_that_take_too_long_to_play_are_not_asked_for(monkeypatch):
    monkeypatch.setattr("partita.planners.effort.search_clock", _Clock(0.001))
    problem = Problem(
        graph=chain(4), cluster=flat_cluster(4), objective=Objective(microbatches=4_000)
    )
    answers = Answers()
    uniform = next(entry for entry in PLAIN if entry.name == "uniform")
    assert answers.ask(uniform, problem, Effort(time_limit=0.1)) is None
    assert answers.tried == {"uniform": "not asked: no time to play 88,000 instructions"}
    assert Answers().ask(uniform, problem, Effort(time_limit=10.0)) is not None


def test_steps_that_take_longer_than_the_time_left_are_not_measured_once_something_fits():
    problem = Problem(
        graph=chain(4), cluster=flat_cluster(4), objective=Objective(microbatches=16_000)
    )
    frame = frame_of(problem)
    evaluator = Evaluator(frame, Effort(time_limit=0.0))
    evaluator.note(1e9)
    start = next(iter(data_parallel_starts(frame)))
    assert not evaluator.evaluate(start).feasible
    assert evaluator.measured == 0


def test_starts_on_many_devices_end_when_their_share_of_the_time_is_used(monkeypatch):
    monkeypatch.setattr(starts, "SHORT_LINE", 3)
    frame = frame_of(Problem(graph=chain(6), cluster=flat_cluster(4)))
    asked = []
    monkeypatch.setattr(Estimator, "estimate", counted(asked, Estimator.estimate))
    assert len(likely_starts(frame, Estimator(frame), Effort(time_limit=0.0))) == 1
    assert len(asked) == 1


def test_a_search_by_the_clock_goes_on_where_one_by_steps_has_given_up(monkeypatch):
    monkeypatch.setattr(search, "MAX_CHEAP_SHAKES", 3)
    monkeypatch.setattr(search, "PATIENCE", 1)
    problem = random_problem(2)  # its gap stays open
    given_up = plan_auto(problem, iterations=10**6)
    monkeypatch.setattr("partita.planners.effort.search_clock", _Clock(0.02))
    timed = plan_auto(problem, time_limit=60.0)
    assert timed.stats["measured"] > given_up.stats["measured"]
    assert timed.value <= given_up.value


def test_a_plan_that_cuts_units_is_not_searched_on():
    problem = Problem(graph=chain(900, SIZES), cluster=flat_cluster(3), objective=Objective())
    working = working_problem(problem)
    assert working.unit_of is not None
    within = int(np.flatnonzero(np.diff(working.unit_of) == 0)[0])
    plan = plan_uniform(problem).plan
    ops = np.arange(len(problem.graph))
    halved = (ops > within).astype(np.int32)
    assert working.contracted(replace(plan, stage_of=halved + (ops > within + 2))) is None
    # The middle stage is one op, whose unit goes on: nothing of it would be left.
    alone = (ops >= within).astype(np.int32) + (ops > within)
    assert working.contracted(replace(plan, stage_of=alone)) is None


def test_steps_shrink_where_candidates_are_played_whole():
    assert usual_steps(random_problem(3, microbatches=100_000)) == USUAL_STEPS
    few, many = (random_problem(3, metric=Metric.ENERGY, microbatches=n) for n in (8, 100_000))
    assert usual_steps(few) == USUAL_STEPS
    assert usual_steps(many) == FEWEST_STEPS


def test_a_time_limit_is_said(problem_of):
    solution = plan_auto(problem_of(6), time_limit=0.05)
    assert solution.stats["effort"] == "time_limit 0.05 s"
    assert solution.value == pytest.approx(measure(solution.problem, solution.plan).value)


def test_no_time_at_all_still_gives_a_plan(problem_of):
    assert plan_auto(problem_of(6), time_limit=0.0).proof in (Proof.TIME_LIMIT, Proof.OPTIMAL)


@pytest.mark.parametrize("options", [{"time_limit": -1.0}, {"iterations": -1}])
def test_limits_below_zero_are_refused(options, problem_of):
    with pytest.raises(InvalidInputError, match="expected 0 or more"):
        plan_auto(problem_of(3), **options)


def test_alternatives_are_ranked_distinct_and_fit():
    solution = plan_auto(PROBLEMS["long chain"](), iterations=30)
    values = [measure(solution.problem, plan).value for plan in solution.alternatives]
    assert len(values) >= 2
    assert values == sorted(values)
    assert solution.value <= values[0]
    for plan in solution.alternatives:
        check_memory(solution.problem, plan)
    plans = [solution.plan, *solution.alternatives]
    assert all(a != b for i, a in enumerate(plans) for b in plans[i + 1 :])


def test_a_value_at_the_bound_is_proven():
    solution = plan_auto(PROBLEMS["one op"](), iterations=5)
    assert solution.proof is Proof.OPTIMAL
    assert solution.gap == pytest.approx(0.0, abs=1e-9)
    assert solution.stats["bound_term"]


def test_the_trace_sees_falling_values():
    trace = SearchTrace()
    solution = plan_auto(PROBLEMS["wide"](), iterations=20, trace=trace)
    values = [value for _, value in trace.points]
    assert values == sorted(values, reverse=True)
    assert values[-1] == pytest.approx(solution.value)


def test_what_the_user_gave_is_kept():
    objective = Objective(microbatches=6, microbatch_size=3, schedule=Schedule.GPIPE)
    cluster = flat_cluster(3, bandwidth_bytes_per_s=1e4)
    problem = Problem(graph=chain(7, SIZES), cluster=cluster, objective=objective)
    solution = plan_auto(problem, iterations=25)
    for plan in (solution.plan, *solution.alternatives):
        assert plan.schedule is Schedule.GPIPE
        assert plan.microbatch_sizes.tolist() == [3] * 6


def test_the_batch_stays_where_its_split_is_free():
    problem = Problem(graph=chain(7, SIZES), cluster=flat_cluster(3))
    solution = plan_auto(problem, iterations=25)
    assert {plan.samples for plan in (solution.plan, *solution.alternatives)} == {32}
    assert solution.plan.num_microbatches > 8


def test_weights_are_stashed_only_where_that_is_asked_for():
    problem = Problem(graph=chain(6, SIZES), cluster=flat_cluster(3))
    assert not plan_auto(problem, iterations=20).plan.stashes_weights
    asked = replace(problem, objective=Objective(schedule=Schedule.PIPEDREAM, microbatches=6))
    assert plan_auto(asked, iterations=5).plan.stashes_weights


def test_faster_devices_take_larger_shares():
    cluster = flat_cluster(2, speeds=(3.0, 1.0))
    objective = Objective(microbatches=8, microbatch_size=1)
    problem = Problem(graph=chain(1), cluster=cluster, objective=objective)
    solution = plan_auto(problem, iterations=10)
    assert dict(zip(solution.plan.devices, solution.plan.stages[0].shares, strict=True)) == {
        "d0": 3,
        "d1": 1,
    }
    assert solution.proof is Proof.OPTIMAL


def test_a_plan_recomputes_where_memory_binds():
    figures = replace(SIZES, saved_bytes=1000.0, tensor_bytes=1.0, batch_size=1)
    objective = Objective(microbatches=4, microbatch_size=1, schedule=Schedule.ONE_F_ONE_B)
    roomy = Problem(graph=chain(6, figures), cluster=flat_cluster(2), objective=objective)
    tight = replace(roomy, cluster=flat_cluster(2, memory_bytes=4200.0))
    assert not plan_auto(roomy, iterations=10).plan.recompute.any()
    solution = plan_auto(tight, iterations=20)
    assert solution.plan.recompute.any()
    check_memory(tight, solution.plan)


@pytest.mark.parametrize(
    ("texts", "forbids"),
    [(["op0=d2", "op5=d0"], False), (["op2=d1", "op3=d1"], False), (["*=d1", "op4=d2"], True)],
)
def test_rules_hold(texts, forbids):
    rules = tuple(parse_rule(text, forbids=forbids) for text in texts)
    cluster = flat_cluster(3, bandwidth_bytes_per_s=1e3)
    problem = Problem(graph=chain(6, SIZES), cluster=cluster, rules=rules)
    solution = plan_auto(problem, iterations=15)
    for plan in (solution.plan, *solution.alternatives):
        assert placement_errors(problem, plan) == []
    assert len(solution.plan.devices) > 1


def test_a_pinned_host_is_where_its_part_runs():
    rules = (parse_rule("op0=d2", forbids=False), parse_rule("op1=d2", forbids=False))
    cluster = host_cluster(2, 2, inside_bytes_per_s=1e4, between_bytes_per_s=1e3)
    problem = Problem(graph=chain(8, SIZES), cluster=cluster, rules=rules)
    plan = plan_auto(problem, iterations=20).plan
    stages = [plan.stages[plan.stage_of[op]] for op in (0, 1)]
    assert all(plan.devices[stage.devices[0][0]] == "d2" for stage in stages)
    assert all(stage.num_replicas == 1 for stage in stages)


def test_three_link_levels_and_mixed_devices_are_planned_at_once():
    inner = host_cluster(4, 2, inside_bytes_per_s=1e4, between_bytes_per_s=1e3)
    levels = (
        inner.levels[0],
        Level(name="rack", group_of=np.repeat([0, 1], 4), bandwidth_bytes_per_s=np.full(2, 1e3)),
        Level(name="site", group_of=np.zeros(8, int), bandwidth_bytes_per_s=np.full(1, 1e2)),
    )
    devices = tuple(
        replace(device, speed=2.0 if index < 4 else 1.0)
        for index, device in enumerate(inner.devices)
    )
    cluster = Cluster(hosts=inner.hosts, devices=devices, levels=levels)
    graph = random_dag(24, random.Random(2), figures=replace(SIZES, batch_size=8))
    problem = Problem(graph=graph, cluster=cluster)
    solution = plan_auto(problem, iterations=25)
    assert solution.value < plan_uniform(problem).value
    assert len(solution.plan.devices) == 8


def test_an_op_that_is_too_large_is_named_with_its_need():
    figures = replace(SIZES, parameter_bytes=[8.0, 8.0, 1e9, 8.0])
    problem = Problem(graph=chain(4, figures), cluster=flat_cluster(2, memory_bytes=1e6))
    with pytest.raises(InfeasibleError, match=r"'op2'.*4.*GB.*'d0'"):
        plan_auto(problem, iterations=2)


def test_weights_that_exceed_all_devices_are_named_with_their_sum():
    figures = replace(SIZES, parameter_bytes=300.0)
    problem = Problem(graph=chain(8, figures), cluster=flat_cluster(2, memory_bytes=2000.0))
    with pytest.raises(InfeasibleError, match=r"2 devices \('d0'.*'d1'\)"):
        plan_auto(problem, iterations=2)


def test_otherwise_the_nearest_plan_says_which_device_is_over():
    figures = replace(SIZES, parameter_bytes=300.0, saved_bytes=0.0, tensor_bytes=0.0)
    problem = Problem(graph=chain(3, figures), cluster=flat_cluster(2, memory_bytes=2000.0))
    with pytest.raises(InfeasibleError, match=r"nearest.*'.*'"):
        plan_auto(problem, iterations=2)


@pytest.mark.parametrize(
    ("name", "value"), [("chain201", 2.0), ("six-node-chain", 0.005371), ("baechi-fig1", 0.009)]
)
def test_published_metrics_go_to_those_who_minimise_them(name, value):
    assert plan_auto(example(name), iterations=5).value == pytest.approx(value)


def test_a_large_graph_is_searched_as_a_smaller_one_of_the_same_cost(monkeypatch):
    monkeypatch.setattr(units, "MAX_UNITS", 12)
    monkeypatch.setattr(units, "UNITS_PER_DEVICE", 1)
    graph = random_dag(80, random.Random(5), tied=3)
    cluster = flat_cluster(3, speeds=(1.0, 2.0, 1.0), bandwidth_bytes_per_s=1e3)
    problem = Problem(graph=graph, cluster=cluster)
    working = working_problem(problem)
    assert 3 < len(working.work.graph) <= 14
    small = plan_uniform(working.work)
    whole = working.expanded(small.plan)
    assert measure(problem, whole).value == pytest.approx(small.value)
    solution = plan_auto(problem, iterations=15)
    assert solution.value < plan_uniform(problem).value
    assert len(solution.plan.stage_of) == 80


def test_a_small_problem_keeps_rules_and_kinds(monkeypatch):
    monkeypatch.setattr(units, "MAX_UNITS", 8)
    monkeypatch.setattr(units, "UNITS_PER_DEVICE", 1)
    monkeypatch.setattr(coarse, "WORTH", 1.0)
    rules = (parse_rule("op3=d1", forbids=False),)
    problem = Problem(graph=chain(30, SIZES), cluster=flat_cluster(3), rules=rules)
    assert working_problem(problem).unit_of is not None
    assert placement_errors(problem, plan_auto(problem, iterations=5).plan) == []


@pytest.mark.parametrize("seed", range(4))
def test_moves_lead_to_valid_plans_and_estimates_stay_below(seed):
    """Walks at random: every neighbour is a plan, keeps the samples, and its floor is no lie."""
    rng = random.Random(seed)
    problem = random_problem(seed + 20)
    frame = frame_of(problem)
    estimator = Estimator(frame)
    sketch = sketch_of(frame, plan_uniform(problem).plan)
    assert sketch is not None
    for _ in range(12):
        position = Position(frame, estimator, sketch, estimator.estimate(sketch).load)
        near = [
            other
            for moves in NEIGHBOURHOODS
            for move in moves
            for other in islice(move(position), 12)
        ]
        for other in near:
            plan = other.plan(problem, frame.units)
            plan.check_fits(problem)
            assert plan.samples == problem.microbatches * problem.microbatch_size
        sketch = rng.choice(near)
        judged = judge_candidate(problem, sketch.plan(problem, frame.units))
        assert estimator.estimate(sketch).floor <= judged.score * (1 + 1e-9)


def test_the_estimate_of_a_balanced_pipeline_is_near():
    problem = Problem(graph=chain(8), cluster=flat_cluster(4), objective=Objective(microbatches=8))
    frame = frame_of(problem)
    solution = plan_uniform(problem)
    sketch = sketch_of(frame, solution.plan)
    assert sketch is not None
    assert Estimator(frame).estimate(sketch).guess == pytest.approx(solution.value)


def two_stages(memory_bytes, *, bulky=4):
    """Return a frame and a pipeline of four ops on two devices; even ops are cheap to run again."""
    figures = Figures(
        forward_s=[0.1, 1.0] * 2, saved_bytes=[40.0, 60.0] * 2, tensor_bytes=1.0, batch_size=1
    )
    objective = Objective(microbatches=bulky, microbatch_size=1)
    cluster = flat_cluster(2, memory_bytes=memory_bytes)
    problem = Problem(graph=chain(4, figures), cluster=cluster, objective=objective)
    frame = frame_of(problem)
    start = Sketch(
        stage_of=np.array([0, 0, 1, 1]),
        stages=(replicated([0]), replicated([1])),
        recompute=np.zeros(4, dtype=bool),
        schedule=Schedule.ONE_F_ONE_B,
        batch=Batch(count=bulky, size=1),
    )
    return frame, start


@pytest.mark.parametrize(
    ("memory_bytes", "again"), [(210.0, [False, False]), (170.0, [True, False])]
)
def test_stages_recompute_what_takes_least_time_for_its_memory_and_no_more(memory_bytes, again):
    """The first stage has two microbatches in flight, so 200 bytes and a buffer, or 164."""
    frame, start = two_stages(memory_bytes)
    estimator = Estimator(frame)
    found = fitted(estimator, start)
    assert found.recompute.tolist() == [*again, False, False]
    assert estimator.estimate(found).over_bytes <= 0


def test_neighbours_recompute_together_where_scattered_units_would_keep_what_they_read():
    """Two in flight: units 0, 2 and 4 free 30 bytes and keep 32 of units 1 and 3; a run keeps 0."""
    figures = Figures(
        forward_s=[0.1, 0.15] * 4, saved_bytes=10.0, tensor_bytes=8.0, parameter_bytes=0.0
    )
    objective = Objective(microbatches=4, microbatch_size=1)
    # 120 bytes are in flight on the first device, and 8 of gradients come from the second one.
    problem = Problem(
        graph=chain(8, figures), cluster=flat_cluster(2, memory_bytes=98.0), objective=objective
    )
    frame = frame_of(problem)
    sketch = Sketch(
        stage_of=np.array([0] * 6 + [1] * 2),
        stages=(replicated([0]), replicated([1])),
        recompute=np.zeros(8, dtype=bool),
        schedule=Schedule.ONE_F_ONE_B,
        batch=Batch(count=4, size=1),
    )
    found = fitted(Estimator(frame), sketch)
    assert np.flatnonzero(found.recompute).tolist() == [0, 1, 2]
    assert judge_candidate(problem, found.plan(problem, frame.units)).feasible


def test_what_recomputes_is_near_the_best_of_all_sets():
    """On random small stages the most gain is exact, and the seconds are those of the best set."""
    rng, ratios = random.Random(1), []
    for _ in range(12):
        count = rng.randint(3, 8)
        gain = [rng.choice((0, 1, 1, 2)) * rng.uniform(1.0, 6.0) for _ in range(count)]
        seconds = [rng.choice((0.05, 2.0)) * rng.uniform(0.5, 1.5) for _ in range(count)]
        readers = [
            sorted({u + 1, min(u + rng.choice((1, 3)), count - 1)}) for u in range(count - 1)
        ]
        ptr = [0, *accumulate(len(row) for row in readers)]
        size = [rng.uniform(2.0, 8.0) for _ in readers]

        def gained(chosen, gain=gain, readers=readers, size=size):
            kept = [any(chosen[r] for r in row) and not chosen[u] for u, row in enumerate(readers)]
            return sum(compress(gain, chosen)) - sum(compress(size, kept))

        sets = [(gained(s), sum(compress(seconds, s))) for s in product((0, 1), repeat=count)]
        most = max(total for total, _ in sets)
        nets = (list(range(count - 1)), ptr, [r for row in readers for r in row], size)
        chosen = [0] * count
        assert least_seconds(gain, seconds, *nets, math.inf, chosen) == pytest.approx(most)
        assert gained(chosen) == pytest.approx(most)
        if most <= 0:
            continue
        need = rng.uniform(0.1, 0.9) * most
        found = least_seconds(gain, seconds, *nets, need, chosen)
        assert found == pytest.approx(gained(chosen))
        assert found >= need
        least = min(spent for total, spent in sets if total >= need)
        ratios.append(sum(compress(seconds, chosen)) / least)
    assert min(ratios) >= 1 - 1e-9
    assert statistics.median(ratios) < 1.02


def test_a_fit_follows_what_was_measured():
    """Where a device needs more than the estimate says, its stage recomputes more, and no other."""
    frame, start = two_stages(210.0)
    estimator = Estimator(frame)
    limit = 210.0
    measured = {0: -3.0, 1: 101.0 - limit}
    beyond = beyond_estimate(estimator, start, measured)
    assert beyond == pytest.approx([limit - 3.0 - 201.0, 0.0])
    found = fitted(estimator, start, reserve_bytes=[beyond[0] + 5.0, beyond[1]])
    assert found.recompute.tolist() == [True, False, False, False]


def test_stages_that_share_a_device_recompute_until_they_fit_together():
    """Four stages of 100 bytes, of which four, three, two and one are in flight: 600 and 400."""
    frame, start = two_stages(500.0)
    both = Sketch(
        stage_of=np.arange(4),
        stages=(replicated([0]), replicated([1])) * 2,
        recompute=np.zeros(4, dtype=bool),
        schedule=start.schedule,
        batch=start.batch,
    )
    for memory_bytes, expected in ((500.0, False), (160.0, True)):
        frame, _ = two_stages(memory_bytes)
        estimator = Estimator(frame)
        found = fitted(estimator, both)
        assert bool(found.recompute.any()) is expected
        assert not expected or estimator.estimate(found).over_bytes < 0.5 * memory_bytes


@pytest.mark.parametrize("many_first", [True, False])
def test_the_memory_of_what_waits_between_many_replicas_and_one_is_estimated(many_first):
    """Four replicas send to one: what it has not taken yet waits there, and so do gradients."""
    figures = Figures(forward_s=1.0, saved_bytes=10.0, tensor_bytes=100.0, batch_size=1)
    problem = Problem(
        graph=chain(2, figures),
        cluster=flat_cluster(5, memory_bytes=10_000.0),
        objective=Objective(microbatches=8, microbatch_size=1),
    )
    frame = frame_of(problem)
    estimator = Estimator(frame)
    stages = (replicated(range(4)), replicated([4]))
    found = Sketch(
        stage_of=np.arange(2),
        stages=stages if many_first else stages[::-1],
        recompute=np.zeros(2, dtype=bool),
        schedule=Schedule.ONE_F_ONE_B,
        batch=Batch(count=8, size=1),
    )
    limit = 10_000.0
    plan = found.plan(problem, frame.units)
    peak = float(peak_memory(problem, plan, lower(problem, plan)).max())
    assert estimator.estimate(found).over_bytes + limit == pytest.approx(peak)


def test_hosts_that_look_alike_give_one_start():
    cluster = host_cluster(40, 2, inside_bytes_per_s=1e4, between_bytes_per_s=1e2)
    frame = frame_of(Problem(graph=chain(3), cluster=cluster))
    sets = {start.used for start in data_parallel_starts(frame)}
    assert [used for used in sets if len(used) == 2] == [(0, 1)]


def test_nothing_is_improved_by_estimate_once_the_time_is_up():
    frame = frame_of(Problem(graph=chain(6), cluster=flat_cluster(3)))
    estimator = Estimator(frame)
    start = max(data_parallel_starts(frame), key=lambda one: estimator.estimate(one).guess)
    for time_limit, stays in ((0.0, True), (None, False)):
        looking = Search(frame, Evaluator(frame, Effort(time_limit=time_limit)), estimator)
        assert (looking.settle(start) is start) is stays


def test_a_long_line_is_cut_as_far_as_there_was_time():
    frame = frame_of(Problem(graph=chain(6), cluster=flat_cluster(3 * SHORT_LINE)))
    starts = list(chain_starts(frame, Estimator(frame), Effort(time_limit=0.0)))
    assert starts
    used = {device for start in starts for device in start.used}
    assert max(used) < SHORT_LINE


def test_a_search_keeps_what_is_dear_to_run_again():
    frame, _ = two_stages(170.0)
    plan = plan_auto(frame.problem, iterations=10).plan
    check_memory(frame.problem, plan)
    assert not plan.recompute[[1, 3]].any()


def test_cutting_anew_is_repeatable_and_keeps_the_devices():
    problem = random_problem(7, microbatches=4)
    frame = frame_of(problem)
    estimator = Estimator(frame)
    start = likely_starts(frame, estimator, Effort(iterations=1))[0]
    twice = [Recuts(frame, estimator).near(start, random.Random(5)) for _ in range(2)]
    assert [one.key for one in twice[0]] == [one.key for one in twice[1]]
    assert twice[0]
    for one in twice[0]:
        assert set(one.used) <= set(frame.devices)
        one.plan(problem, frame.units).check_fits(problem)


def test_lines_that_are_drawn_name_devices_of_a_kind_in_their_order():
    cluster = host_cluster(2, 4, inside_bytes_per_s=1e4, between_bytes_per_s=1e2)
    frame = frame_of(Problem(graph=chain(8), cluster=cluster))
    estimator = Estimator(frame)
    recuts = Recuts(frame, estimator)
    start = likely_starts(frame, estimator, Effort(iterations=1))[0]
    for seed in range(20):
        line = recuts._drawn_line(start, random.Random(seed))
        assert sorted(line) == list(range(8))
        for host in ({0, 1, 2, 3}, {4, 5, 6, 7}):
            assert [device for device in line if device in host] == sorted(host)


def pooled(frame, estimator):
    """Return a pool, and a function that splits the units over a line of devices with its help."""
    order, batch = unit_orders(frame, 1)[0], frame.batches[0]
    line = line_of(frame, estimator, order, batch)
    pool = TablePool(len(line.points))

    def splits(devices):
        program = ChainProgram(
            frame=frame,
            estimator=estimator,
            line=line,
            devices=devices,
            batch=batch,
            replicas=(1, 2),
            schedule=Schedule.SPLIT,
            pool=pool,
        )
        return program.sketches()

    return pool, splits


def test_a_pool_that_was_cleared_gives_the_same_splits():
    frame = frame_of(random_problem(7, microbatches=4))
    pool, splits = pooled(frame, Estimator(frame))
    fresh = [one.key for one in splits(frame.devices)]
    assert fresh
    splits(frame.devices[::-1])
    pool.clear()
    assert [one.key for one in splits(frame.devices)] == fresh


def test_devices_that_nothing_tells_apart_share_tables():
    cluster = host_cluster(2, 2, inside_bytes_per_s=1e4, between_bytes_per_s=1e2)
    frame = frame_of(Problem(graph=chain(6), cluster=cluster))
    estimator = Estimator(frame)
    assert estimator.kind_of == [0, 0, 1, 1]
    pool, splits = pooled(frame, estimator)
    guesses = [estimator.estimate(one).guess for one in splits([0, 1, 2, 3])]
    tables, places = len(pool.shares), len(pool.place_of)
    swapped = [estimator.estimate(one).guess for one in splits([1, 0, 3, 2])]
    assert swapped == pytest.approx(guesses)
    assert (len(pool.shares), len(pool.place_of)) == (tables, places)


def test_a_line_that_comes_back_to_a_device_has_tables_of_its_own():
    cluster = host_cluster(2, 2, inside_bytes_per_s=1e4, between_bytes_per_s=1e2)
    frame = frame_of(Problem(graph=chain(6), cluster=cluster))
    for line in ([0, 1, 0, 2], [2, 0, 1, 0], [0, 2, 0, 3]):
        alone, after_others = (pooled(frame, Estimator(frame)) for _ in range(2))
        after_others[1]([0, 1, 2, 3])
        after_others[1]([0, 2, 1, 3])
        expected = [one.key for one in alone[1](line)]
        assert [one.key for one in after_others[1](line)] == expected


def three_levels():
    """Return four hosts of a fast and a slow device, in two racks, the second with slower hosts."""
    device = np.arange(8)
    levels = (
        Level(
            name="host",
            group_of=device // 2,
            bandwidth_bytes_per_s=[8e3, 8e3, 4e3, 2e3],
            latency_s=1e-3,
            port_per_device=True,
        ),
        Level(
            name="rack", group_of=device // 4, bandwidth_bytes_per_s=[2e3, 1e3], latency_s=[0.1, 0]
        ),
        Level(name="site", group_of=device * 0, bandwidth_bytes_per_s=5e2, latency_s=0.2),
    )
    return replace(flat_cluster(8, speeds=[1.0, 2.0] * 4), levels=levels)


def test_reductions_of_sets_that_lie_alike_are_known_and_of_others_are_not():
    cluster = three_levels()
    estimator = Estimator(frame_of(Problem(graph=chain(3), cluster=cluster)))
    for mask in range(3, 256):
        devices = tuple(device for device in range(8) if mask >> device & 1)
        fixed, slope = estimator.reduction(devices)
        for size in (0.0, 1e9):
            direct = collective_s(cluster, Kind.ALL_REDUCE, np.array(devices), size)
            assert fixed + slope * size == pytest.approx(direct)
    # Of the 247 sets, those that differ in speeds, or in which equal host they use, are one.
    assert len(estimator._reduction_alike) < 60


def test_the_chain_program_finds_the_balanced_split():
    objective = Objective(microbatches=4, microbatch_size=1)
    figures = Figures(forward_s=[1, 1, 1, 3], backward_s=[2, 2, 2, 6])
    problem = Problem(graph=chain(4, figures), cluster=flat_cluster(2), objective=objective)
    frame = frame_of(problem)
    found = list(chain_starts(frame, Estimator(frame), Effort(iterations=1)))
    cuts = {tuple(sketch.stage_of.tolist()) for sketch in found}
    assert (0, 0, 0, 1) in cuts
    assert (0, 0, 0, 0) in cuts


def test_device_lines_follow_the_units_where_rules_bind():
    rules = (parse_rule("op0=d2", forbids=False), parse_rule("op3=d0", forbids=False))
    problem = Problem(graph=chain(4), cluster=flat_cluster(3), rules=rules)
    frame = frame_of(problem)
    (line,) = device_lines(frame, unit_orders(frame, 1)[0])
    assert line[0] == 2
    assert line[-1] == 0


def test_inference_and_latency_have_no_backward():
    objective = Objective(mode=Mode.INFERENCE, metric=Metric.LATENCY)
    cluster = flat_cluster(3, bandwidth_bytes_per_s=1e3)
    problem = Problem(graph=diamond(3, SIZES), cluster=cluster, objective=objective)
    frame = frame_of(problem)
    assert frame.batches == (Batch(count=1, size=4),)
    assert frame.schedules == (Schedule.INFERENCE,)
    assert list(data_parallel_starts(frame)) == []
    assert all(
        stage.num_replicas == 1
        for sketch in likely_starts(frame, Estimator(frame), Effort(iterations=1))
        for stage in sketch.stages
    )


@pytest.mark.parametrize("count", [1, 4, 6, 12])
@pytest.mark.parametrize("speeds", [(1.0,), (1.0, 1.0, 1.0), (1.0, 2.0), (0.5, 4.0, 1.0)])
def test_shares_divide_the_microbatches(speeds, count):
    shares = fair_shares(speeds, count)
    if shares is None:
        assert count < len(speeds)
        return
    assert count % sum(shares) == 0
    assert min(shares) >= 1


def test_the_examples_of_sketches_are_right():
    assert doctest.testmod(sketch).failed == 0


def test_small_models_are_planned_without_compilers():
    code = (
        "import sys; from partita.catalogue.examples import example;"
        "from partita.planners.table import solve;"
        "solve(example('gpt-small'), 'auto', iterations=8);"
        "sys.exit(bool({'numba', 'scipy', 'torch'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_state_that_does_not_fit_is_sharded_while_cutting():
    """One op needs more than a device holds, and two replicas with a part of its state each fit."""
    figures = Figures(parameter_bytes=100.0, saved_bytes=1.0, tensor_bytes=1.0)
    objective = Objective(microbatches=4, microbatch_size=1)
    problem = Problem(
        graph=chain(1, figures), cluster=flat_cluster(2, memory_bytes=350.0), objective=objective
    )
    plan = plan_auto(problem, iterations=2).plan
    assert plan.stages[0].num_replicas == 2
    assert plan.stages[0].shard is not Shard.NONE


def test_candidates_are_measured_condensed_as_they_are_whole():
    rng = random.Random(3)
    graph = random_dag(12, rng)
    problem = Problem(graph=graph, cluster=flat_cluster(4), objective=Objective(microbatches=4))
    frame = frame_of(problem)
    evaluator = Evaluator(frame, Effort(iterations=1))
    assert evaluator.model is not None
    for start in likely_starts(frame, Estimator(frame), Effort(iterations=1)):
        whole = judge_candidate(problem, start.plan(problem, frame.units))
        assert evaluator.evaluate(start).score == pytest.approx(whole.score, rel=1e-9)


def test_replicas_may_divide_their_state_on_any_kind_of_device():
    graph = chain(4, Figures(parameter_bytes=1e9))
    for kind in DeviceKind:
        cluster = flat_cluster(4)
        devices = tuple(
            replace(device, kind=kind, memory_bytes=9.7e9, memory_bytes_per_s=1e9)
            for device in cluster.devices
        )
        frame = frame_of(Problem(graph=graph, cluster=replace(cluster, devices=devices)))
        found = {sketch.stages[0].shard for sketch in data_parallel_starts(frame)}
        assert {Shard.OPTIMIZER} <= found
