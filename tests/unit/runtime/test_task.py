"""What ranks do of a plan, and what is predicted of that."""

import dataclasses

import numpy as np

from partita.core.problem import Problem
from partita.cost.predict import simulate
from partita.planners.table import solve
from partita.runtime.task import carried_out, stages_again
from partita.testing.builders import Figures, chain, flat_cluster

PROBLEM = Problem(
    graph=chain(4, Figures(parameter_bytes=8.0, tensor_bytes=2.0)),
    cluster=flat_cluster(2, memory_bytes=1e9),
)
PLAN = solve(PROBLEM, "uniform").plan


def test_a_stage_that_recomputes_in_part_runs_again_whole() -> None:
    first = np.flatnonzero(PLAN.stage_of == 0)[0]
    recompute = np.zeros(len(PLAN.stage_of), dtype=bool)
    recompute[first] = True
    plan = dataclasses.replace(PLAN, recompute=recompute)
    done = carried_out(plan)
    assert stages_again(plan).tolist() == [True, *[False] * (len(plan.stages) - 1)]
    assert done.recompute.tolist() == (plan.stage_of == 0).tolist()
    step_s = [simulate(PROBLEM, each).makespan_s for each in (PLAN, plan, done)]
    assert step_s[0] < step_s[1] < step_s[2]


def test_other_plans_are_carried_out_as_they_are() -> None:
    whole = dataclasses.replace(PLAN, recompute=PLAN.stage_of == 1)
    assert carried_out(PLAN) is PLAN
    assert carried_out(whole) is whole
