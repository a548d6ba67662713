"""Local search: kernels interpreted and compiled, and plans measured under other metrics."""

from dataclasses import replace

import numpy as np
import pytest

from partita.catalogue.examples import example
from partita.core.problem import Metric, Objective, Problem
from partita.core.rules import Rule
from partita.core.solution import Proof
from partita.errors import InvalidInputError
from partita.kernels import run
from partita.planners.assignment import anneal, tree
from partita.planners.assignment.descent import improved, temperatures
from partita.planners.assignment.instance import Instance
from partita.planners.assignment.portfolio import best_assignment
from partita.planners.assignment.starts import cut_into_runs, near_sequence, node_orders, starts
from partita.planners.effort import Effort
from partita.planners.hierarchical import plan_hierarchical
from partita.planners.local_search import plan_local_search
from partita.planners.uniform import plan_uniform
from partita.testing.builders import chain, flat_cluster
from partita.testing.planner_suite import PROBLEMS


def random_instance(nodes, devices, seed=0, **fields):
    rng = np.random.default_rng(seed)
    matrix = rng.integers(1, 5, (devices, devices)) / 2.0
    np.fill_diagonal(matrix, 0.0)
    weight = rng.integers(1, 9, nodes).astype(float)
    ends = rng.integers(0, nodes, (3 * nodes, 2))
    ends = ends[ends[:, 0] != ends[:, 1]]
    defaults = {
        "share": np.full(devices, weight.sum() / devices),
        "factor": np.ones(devices),
        "least": np.ones(devices, dtype=np.int64),
    }
    return Instance(
        node_of=np.arange(nodes),
        weight=weight,
        source=ends[:, 0],
        target=ends[:, 1],
        matrix=matrix,
        **{**defaults, **fields},
    )


def uneven_instance():
    """An instance with all that a part of a whole has: shares, factors, a field and rules."""
    rng = np.random.default_rng(5)
    plain = random_instance(24, 4, 5)
    allowed = rng.random((24, 4)) < 0.8
    allowed[np.arange(24), np.arange(24) % 4] = True
    return replace(
        plain,
        share=np.array([0.1, 0.2, 0.3, 0.4]) * plain.weight.sum(),
        factor=np.array([1.0, 0.5, 2.0, 0.25]),
        least=np.array([1, 2, 3, 4]),
        allowed=allowed,
        field=rng.random((24, 4)),
    )


@pytest.mark.parametrize(
    "instance", [random_instance(20, 3), uneven_instance()], ids=["plain", "all"]
)
def test_the_cost_that_is_kept_is_the_cost_computed_anew(instance):
    annealer = anneal.Annealer(instance)
    start = starts(instance)[0]
    for temperature in (5.0, 0.5, 1e-9):
        state = annealer._state(start, 3)
        annealer._given.heat[0] = temperature
        run(anneal._walk, 0, (annealer._given,), (state,))
        place = state.device[state.part]
        assert state.cost[0] == pytest.approx(instance.cost(place))
        assert np.isfinite(instance.cost(place))
        assert state.held[state.device].tolist() == list(range(instance.num_devices))
        assert np.array_equal(state.part[state.member], np.sort(state.part))
        assert state.load == pytest.approx(
            np.bincount(state.part, instance.weight, instance.num_devices)
        )
        if instance.allowed is not None:
            assert instance.allowed[np.arange(instance.num_nodes), place].all()


def test_a_kernel_does_the_same_interpreted_and_compiled():
    instance = uneven_instance()
    annealer = anneal.Annealer(instance)
    annealer._given.heat[0] = 0.5
    states = [annealer._state(starts(instance)[0], 9) for _ in range(2)]
    for state, work in zip(states, (0, 10**6), strict=True):
        run(anneal._walk, work, (annealer._given,), (state,))
    for one, other in zip(*states, strict=True):
        assert one == pytest.approx(other)


def test_the_search_tree_does_the_same_interpreted_and_compiled(monkeypatch):
    instance = random_instance(9, 3, 2)
    start = starts(instance)[-1]
    whole = tree.search_all(instance, start, Effort())
    monkeypatch.setattr(tree, "_FIRST_STEPS", 10)
    monkeypatch.setattr(tree, "_STEPS", 50_000)
    assert whole.complete
    again = tree.search_all(instance, start, Effort())
    assert (again.cost, again.steps) == (whole.cost, whole.steps)


def test_a_narrower_band_still_cuts(monkeypatch):
    monkeypatch.setattr("partita.planners.assignment.starts._MAX_WORK", 200)
    instance = random_instance(40, 4)
    order, sequence = node_orders(instance)[0], near_sequence(instance.matrix)
    place = cut_into_runs(instance, order, sequence)
    assert place is None or set(place.tolist()) == {0, 1, 2, 3}


def test_weights_of_nothing_are_cut_by_number():
    instance = replace(random_instance(12, 3), weight=np.zeros(12), share=np.zeros(3))
    assert np.isfinite(instance.cost(starts(instance)[0]))


def test_joined_nodes_may_form_cycles():
    instance = replace(
        random_instance(4, 2), source=np.array([0, 1, 2, 3]), target=np.array([1, 0, 3, 2])
    )
    for order in node_orders(instance):
        assert sorted(order.tolist()) == [0, 1, 2, 3]


def test_temperatures_fall_to_almost_nothing():
    annealer = anneal.Annealer(random_instance(30, 3))
    for heat in (0.15, 2.0):
        falling = temperatures(annealer, heat, 10)
        assert len(falling) == 10
        assert falling == sorted(falling, reverse=True)
    assert len(temperatures(annealer, 0.6, 1)) == 1


def test_free_links_leave_the_balance():
    instance = replace(random_instance(14, 3), matrix=np.zeros((3, 3)))
    place, cost = improved(instance, Effort(), restarts=4, iterations=20)
    assert cost < 1.0
    assert np.isfinite(instance.cost(place))


def sharded(problem: Problem) -> Problem:
    """Return a problem by the sharding cost."""
    return replace(problem, objective=Objective(metric=Metric.SHARDING_COST))


def test_the_same_seed_gives_the_same_plan_and_a_time_limit_stops():
    problem = example("chain201")
    assert plan_local_search(problem, seed=4) == plan_local_search(problem, seed=4)
    short = plan_local_search(sharded(PROBLEMS["hosts"]()), time_limit=1e-9)
    assert short.proof is Proof.TIME_LIMIT


@pytest.mark.parametrize("planner", [plan_local_search, plan_hierarchical, best_assignment])
def test_the_published_chain_is_solved_and_proven(planner):
    solution = planner(example("chain201"))
    assert (solution.value, solution.lower_bound) == (2.0, 2.0)
    assert solution.proof is Proof.OPTIMAL


@pytest.mark.parametrize("planner", [plan_local_search, plan_hierarchical])
@pytest.mark.parametrize("name", ["long chain", "hosts", "uneven devices"])
def test_it_is_no_worse_than_a_simple_plan(planner, name):
    problem = sharded(PROBLEMS[name]())
    value = planner(problem, iterations=4, restarts=2).value
    assert value <= plan_uniform(problem).value * (1 + 1e-9)


@pytest.mark.parametrize("planner", [plan_local_search, plan_hierarchical])
def test_pins_hold(planner):
    rules = (
        *(Rule(ops=f"op{op}", devices="d2") for op in range(4)),
        Rule(ops="op7", devices="d0"),
    )
    problem = sharded(Problem(graph=chain(8), cluster=flat_cluster(3), rules=rules))
    plan = planner(problem, iterations=10, restarts=2).plan
    names = [plan.devices[device] for device in plan.device_of.tolist()]
    assert names[:4] == ["d2"] * 4
    assert names[7] == "d0"


@pytest.mark.parametrize("planner", [plan_local_search, plan_hierarchical])
def test_other_metrics_are_refused(planner):
    with pytest.raises(InvalidInputError, match=r"sharding.*throughput"):
        planner(PROBLEMS["long chain"]())
