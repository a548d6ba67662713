"""Plans under costs that are not what was thought."""

from dataclasses import replace

import numpy as np
import pytest

from partita.core.problem import Metric, Objective, Problem
from partita.core.solution import Solution
from partita.cost.judge import measure
from partita.errors import InfeasibleError, InvalidInputError
from partita.flows.answer import alternatives_of
from partita.flows.robustness import Doubt, perturbed, quantiles, under_doubt
from partita.planners.single import plan_single
from partita.planners.uniform import plan_uniform
from partita.testing.builders import Figures, chain, flat_cluster, paired_cluster

FIGURES = Figures(tensor_bytes=50.0, parameter_bytes=8.0, saved_bytes=20.0, backward_input_s=1.0)


def problem_of(**changes: object) -> Problem:
    cluster = flat_cluster(3, bandwidth_bytes_per_s=100.0, latency_s=0.01)
    return replace(Problem(graph=chain(6, FIGURES), cluster=cluster), **changes)


def test_every_cost_has_its_own_draw_within_the_range() -> None:
    problem = problem_of()
    drawn = perturbed(problem, 0.2, np.random.default_rng(1))
    factor = drawn.graph.forward_s / problem.graph.forward_s
    assert len(set(factor.tolist())) == len(problem.graph)
    assert bool(((factor >= 0.8) & (factor <= 1.2)).all())
    assert np.allclose(drawn.graph.backward_s / problem.graph.backward_s, factor)
    level, was = drawn.cluster.levels[0], problem.cluster.levels[0]
    slower = was.bandwidth_bytes_per_s / level.bandwidth_bytes_per_s
    assert np.allclose(level.latency_s / was.latency_s, slower)
    assert 0.8 <= slower[0] <= 1.2


def test_memory_and_structure_stay() -> None:
    problem = problem_of()
    drawn = perturbed(problem, 0.5, np.random.default_rng(1))
    assert drawn.graph.fingerprint == problem.graph.fingerprint
    assert np.array_equal(drawn.graph.ops.saved_bytes, problem.graph.ops.saved_bytes)
    assert np.array_equal(drawn.graph.tensors.bytes, problem.graph.tensors.bytes)
    assert np.array_equal(drawn.cluster.memory_bytes, problem.cluster.memory_bytes)


def test_links_of_pairs_and_given_seconds_are_drawn_too() -> None:
    graph = chain(3, FIGURES)
    tensors = replace(graph.tensors, transfer_s=np.full(len(graph.tensors), 2.0))
    cluster = paired_cluster(3, bandwidth_bytes_per_s=100.0)
    problem = Problem(graph=replace(graph, tensors=tensors), cluster=cluster)
    drawn = perturbed(problem, 0.2, np.random.default_rng(1))
    assert len(set(drawn.graph.tensors.transfer_s.tolist())) == len(graph.tensors)
    assert drawn.cluster.matrix is not None
    assert len(set(drawn.cluster.matrix.bandwidth_bytes_per_s.tolist())) == 9


def test_without_doubt_nothing_changes() -> None:
    solution = plan_uniform(problem_of())
    found = under_doubt(solution, Doubt(perturb=0.0, samples=3), planner=plan_uniform)
    assert found.contenders[0].ratios.tolist() == [1.0, 1.0, 1.0]
    assert found.regret.tolist() == [0.0, 0.0, 0.0]


def test_the_same_seed_draws_the_same() -> None:
    solution = plan_uniform(problem_of())
    doubt = Doubt(samples=4, replans=2, seed=3)
    once, again = (under_doubt(solution, doubt, planner=plan_uniform) for _ in range(2))
    assert once.to_json() == again.to_json()
    other = under_doubt(solution, replace(doubt, seed=4), planner=plan_uniform)
    assert other.to_json() != once.to_json()


@pytest.mark.parametrize("metric", [Metric.THROUGHPUT, Metric.MAX_LOAD, Metric.LATENCY])
def test_values_are_those_of_the_cost_model(metric: Metric) -> None:
    problem = problem_of(objective=Objective(metric=metric))
    solution = plan_uniform(problem)
    found = under_doubt(solution, Doubt(samples=2, seed=5))
    rng = np.random.default_rng(5)
    values = [measure(perturbed(problem, 0.2, rng), solution.plan).value for _ in range(2)]
    assert found.contenders[0].values.tolist() == values
    assert found.contenders[0].nominal == solution.value
    assert len(found.regret) == 0
    assert found.to_json()["regret"] is None


def test_regret_is_what_knowing_the_costs_would_have_saved() -> None:
    problem = problem_of()
    slow = plan_single(problem)
    found = under_doubt(slow, Doubt(samples=3, replans=2), planner=plan_uniform)
    rng = np.random.default_rng(1)
    expected = []
    for _ in range(2):
        drawn = perturbed(problem, 0.2, rng)
        best = min(measure(drawn, slow.plan).value, plan_uniform(drawn).value)
        expected.append(measure(drawn, slow.plan).value / best - 1)
    assert found.regret.tolist() == pytest.approx(expected)
    assert min(expected) > 0


def test_a_planner_that_finds_nothing_leaves_the_plans_that_are_known() -> None:
    def refuses(problem: Problem) -> Solution:
        raise InfeasibleError(f"nothing for {problem.graph.name}")

    found = under_doubt(plan_single(problem_of()), Doubt(samples=2), planner=refuses)
    assert found.regret.tolist() == [0.0, 0.0]


def test_rivals_and_alternatives_are_measured_on_the_same_draws() -> None:
    problem = problem_of()
    slow, quick = plan_single(problem), plan_uniform(problem)
    with_alternative = replace(slow, alternatives=(quick.plan,))
    found = under_doubt(with_alternative, Doubt(samples=5), rivals=[("other", quick.plan)])
    names = [contender.name for contender in found.contenders]
    assert names == ["plan", "alternative 1", "other"]
    assert found.contenders[1].values.tolist() == found.contenders[2].values.tolist()
    assert [contender.wins for contender in found.contenders] == [0.0, 1.0, 0.0]
    assert min(found.rivals_regret.tolist()) > 0


def test_alternatives_that_break_a_limit_are_left_out_and_others_ranked() -> None:
    problem = problem_of()
    slow, quick = plan_single(problem), plan_uniform(problem)
    two = plan_uniform(problem, stages=2)
    found = alternatives_of(replace(quick, alternatives=(slow.plan, two.plan)))
    assert [each.value for each in found] == sorted([two.value, slow.value])
    assert found[0].ratio == pytest.approx(found[0].value / quick.value)
    assert all(each.to_json()["ratio"] == each.ratio for each in found)
    tight = replace(problem, cluster=flat_cluster(3, memory_bytes=250, bandwidth_bytes_per_s=100))
    fits = plan_uniform(tight)
    with pytest.raises(InfeasibleError):
        plan_single(tight)
    kept = alternatives_of(replace(fits, alternatives=(slow.plan, fits.plan)))
    assert [each.plan for each in kept] == [fits.plan]


def test_alternatives_are_told_apart() -> None:
    problem = problem_of()
    best = plan_uniform(problem, stages=2)
    moved = replace(best.plan, stage_of=np.array([0, 0, 1, 1, 1, 1]))
    again = replace(best.plan, recompute=np.ones(6, dtype=bool))
    sizes = replace(best.plan, microbatch_sizes=np.array([1, 1, 2, 4]))
    words = {
        each.words for each in alternatives_of(replace(best, alternatives=(moved, again, sizes)))
    }
    assert any("1 ops elsewhere" in text for text in words)
    assert any("recomputes 6 ops" in text for text in words)
    assert any("4 microbatches of 1 to 4" in text for text in words)


def test_quantiles_have_the_ends_and_the_middle() -> None:
    found = quantiles(np.arange(11.0))
    assert (found["min"], found["median"], found["max"], found["mean"]) == (0.0, 5.0, 10.0, 5.0)


@pytest.mark.parametrize(
    "wrong", [{"perturb": 1.0}, {"perturb": -0.1}, {"samples": 0}, {"replans": -1}, {"seed": -1}]
)
def test_impossible_doubts_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(InvalidInputError):
        Doubt(**wrong)
