"""DynamicMLTrainer's published examples and the generated instances beside them.

Recorded plans and optima: ``dynamicml/answers.json`` of the shared data folder (its README says
where they come from). ``benchmarks/planners.py --group dynamicml`` measures all of them.
"""

import json

import pytest

from partita.bounds import lower_bound
from partita.core.solution import Proof
from partita.formats.dynamicml import read_assignment, read_dynamicml, write_assignment
from partita.objectives.sharding import sharding_cost
from partita.planners.assignment.portfolio import best_assignment
from partita.planners.brute_force import plan_brute_force
from partita.planners.hierarchical import plan_hierarchical
from partita.planners.local_search import plan_local_search

SMALL = [f"small{number:02}" for number in range(12)]
OTHERS = [*(f"medium{number}" for number in range(5)), *(f"large{number}" for number in range(3))]


@pytest.fixture(scope="module")
def folder(shared_data):
    return shared_data / "dynamicml"


def problem_of(folder, name):
    return read_dynamicml((folder / f"{name}.json").read_text())


def recorded_best(folder, name):
    answers = json.loads((folder / "answers.json").read_text())
    return min(answer["metric"] for answer in answers if answer["instance"] == name)


@pytest.mark.parametrize(("name", "optimum"), [("chain201_k3", 2.0), ("chain201_k96", 56.125)])
@pytest.mark.parametrize(
    "planner", [plan_brute_force, plan_local_search, plan_hierarchical, best_assignment]
)
def test_the_published_examples_are_solved_and_proven(folder, planner, name, optimum):
    solution = planner(problem_of(folder, name))
    assert solution.value == pytest.approx(optimum, rel=1e-12)
    assert solution.lower_bound == pytest.approx(optimum, rel=1e-12)
    assert solution.proof is Proof.OPTIMAL


@pytest.mark.parametrize("name", SMALL)
def test_small_instances_are_exact_and_proven(folder, name):
    problem = problem_of(folder, name)
    solution = plan_brute_force(problem, time_limit=600.0)
    assert solution.value == pytest.approx(recorded_best(folder, name), rel=1e-9)
    assert solution.proof is Proof.OPTIMAL
    again = read_assignment(write_assignment(problem, solution.plan), problem)
    assert sharding_cost(problem, again).value == pytest.approx(solution.value)


@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.parametrize("planner", [plan_local_search, plan_hierarchical])
def test_no_recorded_plan_is_better(folder, planner, name):
    solution = planner(problem_of(folder, name), restarts=4)
    assert solution.value <= recorded_best(folder, name) * (1 + 1e-9)


@pytest.mark.parametrize("name", [*SMALL, *OTHERS])
def test_the_bound_is_below_every_recorded_plan(folder, name):
    assert lower_bound(problem_of(folder, name)) <= recorded_best(folder, name)
