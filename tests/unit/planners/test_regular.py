"""Plans that a trainer can run."""

import pytest

from partita.core.grid import grid_of
from partita.errors import InvalidInputError
from partita.flows.plan import PRICE, plan
from partita.flows.problem import problem as pose_problem
from partita.planners.regular import plan_regular
from partita.planners.table import solve
from partita.testing.grids import untied
from partita.trainers.rules import TRAINERS


@pytest.mark.parametrize("name", TRAINERS)
def test_a_plan_for_a_trainer_can_be_written_for_it(name: str) -> None:
    problem = untied(pose_problem("gpt-small", cluster="1x2xa100+1x2xv100", microbatches=8))
    found = plan_regular(problem, trainer=name)
    TRAINERS[name].check(grid_of(problem, found.plan))
    assert found.value <= solve(problem, "single").value


def test_the_price_of_the_restriction_is_told() -> None:
    found = plan("gpt-small", cluster="1x2xa100+1x2xv100", framework="accelerate", iterations=5)
    paid = found.solution.stats[PRICE]
    assert paid >= 0
    assert f"{paid:.1%} slower" in found.posed.remarks[-1]
    TRAINERS["accelerate"].check(grid_of(found.problem, found.plan))


def test_another_planner_beside_a_trainer_is_refused() -> None:
    with pytest.raises(InvalidInputError, match="--planner"):
        plan("gpt-small", cluster="2xa100", framework="megatron", planner="uniform")
    with pytest.raises(InvalidInputError, match="'megatrn'"):
        plan("gpt-small", cluster="2xa100", framework="megatrn")
