"""Merak's autopipe: balanced cuts, and layers that leave the critical stage."""

from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from partita.core.graph import Labels
from partita.core.problem import Mode, Objective, Problem
from partita.cost.judge import measure
from partita.errors import InfeasibleError, InvalidInputError
from partita.planners.autopipe import plan_autopipe
from partita.planners.custom import plan_custom
from partita.planners.merak import lightest_cut
from partita.testing.builders import Figures, chain, flat_cluster


def problem_of(forward, *, devices=3, microbatches=6, **figures) -> Problem:
    backward = [2 * seconds for seconds in forward]
    made = Figures(forward_s=forward, backward_s=backward, **figures)
    return Problem(
        graph=chain(len(forward), made),
        cluster=flat_cluster(devices),
        objective=Objective(microbatches=microbatches),
    )


def boundaries(solution) -> list[int]:
    return list(solution.stats["boundaries"])


def test_like_layers_are_cut_evenly():
    assert boundaries(plan_autopipe(problem_of([1.0] * 9))) == [0, 3, 6, 9]


@settings(max_examples=30)
@given(forward=st.lists(st.integers(1, 9), min_size=3, max_size=9), devices=st.integers(2, 4))
def test_a_step_is_never_longer_than_that_of_the_balanced_cut(forward, devices):
    stages = min(devices, len(forward))
    problem = problem_of(
        [float(value) for value in forward], devices=devices, microbatches=2 * stages
    )
    found = plan_autopipe(problem)
    balanced = lightest_cut(np.array(forward, dtype=np.float64), stages)
    assert len(found.plan.stages) == stages
    assert found.value <= plan_custom(problem, boundaries=balanced).value * (1 + 1e-12)


def test_a_layer_leaves_the_critical_stage_where_that_helps():
    # Balanced cuts look at sums alone: [4 | 1 4] and [4 1 | 4] are alike, the pipeline is not.
    rng = np.random.default_rng(4)
    better = 0
    for _ in range(12):
        forward = rng.integers(1, 9, 8).astype(float)
        problem = problem_of(forward.tolist(), microbatches=6)
        found = plan_autopipe(problem)
        balanced = plan_custom(problem, boundaries=lightest_cut(forward, 3))
        best = min(
            measure(problem, plan_custom(problem, boundaries=[0, a, b, 8]).plan).value
            for a, b in combinations(range(1, 8), 2)
        )
        assert best * (1 - 1e-12) <= found.value <= balanced.value
        better += found.value < balanced.value
    assert better > 0


def test_stages_and_replicas_are_as_asked():
    problem = problem_of([1.0] * 8, devices=4, microbatches=4)
    solution = plan_autopipe(problem, stages=2, replicas=2)
    assert [stage.num_replicas for stage in solution.plan.stages] == [2, 2]
    assert solution.options == {"stages": 2, "replicas": 2}
    assert solution.planner == "autopipe"
    assert boundaries(plan_autopipe(problem, stages=1)) == [0, 8]
    with pytest.raises(InvalidInputError, match="need 6 devices"):
        plan_autopipe(problem, stages=3, replicas=2)


def test_layers_that_stay_together_are_one():
    problem = problem_of([1.0, 1.0, 5.0, 1.0], devices=2)
    graph = problem.graph
    tied = replace(graph, ops=replace(graph.ops, colocation=[-1, 0, 0, -1]))
    assert boundaries(plan_autopipe(replace(problem, graph=tied))) in ([0, 1, 4], [0, 3, 4])
    layers = Labels(names=("a", "b"), of=[0, 0, 0, 1])
    labelled = replace(graph, ops=replace(graph.ops, layers=layers))
    assert boundaries(plan_autopipe(replace(problem, graph=labelled))) == [0, 1, 2]


def test_inference_goes_by_forward_times():
    problem = problem_of([4.0, 1.0, 1.0, 1.0, 1.0], devices=2)
    objective = Objective(mode=Mode.INFERENCE, microbatches=4)
    assert boundaries(plan_autopipe(replace(problem, objective=objective))) == [0, 1, 5]


def test_too_little_memory_is_refused():
    problem = problem_of([1.0] * 4, devices=2, saved_bytes=100.0)
    with pytest.raises(InfeasibleError, match="device 'd0'"):
        plan_autopipe(replace(problem, cluster=flat_cluster(2, memory_bytes=50.0)))
