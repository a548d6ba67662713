"""A plan against a measured step of it."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import partita
from partita.core.problem import Objective, Problem
from partita.core.timeline import TimelineOrigin
from partita.cost.predict import Disturbance, simulate
from partita.documents import save
from partita.errors import InvalidInputError
from partita.flows.replan import replan
from partita.flows.solutions import evaluated
from partita.runtime.directory import write_results
from partita.testing.builders import Figures, chain, flat_cluster, pipeline

GRAPH = chain(12, Figures(forward_s=0.1, backward_s=0.2, tensor_bytes=1e3, parameter_bytes=4e6))
PROBLEM = Problem(
    graph=GRAPH,
    cluster=flat_cluster(2, bandwidth_bytes_per_s=1e9),
    objective=Objective(microbatches=6, schedule="1f1b", microbatch_size=1),
)
PLAN = pipeline(GRAPH, PROBLEM.cluster, [0, 1], microbatches=6)
SOLUTION = evaluated(PROBLEM, PLAN, None)


def measured(**slow):
    played = simulate(PROBLEM, PLAN, disturbance=Disturbance(slow=slow))
    return replace(played, origin=TimelineOrigin.MEASURED)


def test_a_slow_device_gets_less_to_do():
    found = replan(SOLUTION, measured=measured(d1=3.0), iterations=40)
    assert found.is_worth
    assert found.gain > 0.2
    assert "another plan is" in found.verdict
    assert found.recalibrated_s == pytest.approx(found.measured_s)
    assert found.solution.problem.cluster.devices[1].speed == pytest.approx(1 / 3)
    work = np.zeros(2)
    for stage, part in enumerate(found.solution.plan.stages):
        share = np.array(part.shares) / part.round
        for replica, (device,) in enumerate(part.devices):
            name = found.solution.plan.devices[device]
            ops = float((found.solution.plan.stage_of == stage).sum())
            work[PROBLEM.cluster.index_of[name]] += ops * share[replica]
    assert work[0] > work[1]
    assert found.to_json()["worth"] is True


def test_as_predicted_no_other_plan_is_worth_it():
    best = partita.solve(PROBLEM, "auto", iterations=40)
    played = replace(simulate(PROBLEM, best.plan), origin=TimelineOrigin.MEASURED)
    found = replan(best, measured=played, iterations=10)
    assert not found.is_worth
    assert "no other plan is" in found.verdict
    assert found.least_gain == 0.05


def test_what_is_worth_it_can_be_said():
    assert not replan(SOLUTION, measured=measured(d1=3.0), iterations=5, least_gain=50).is_worth


def test_a_run_directory_is_read_by_path_or_name(tmp_path: Path):
    run = tmp_path / "runs" / "a_001"
    run.mkdir(parents=True)
    save(SOLUTION, run / "plan.json")
    save(measured(d1=3.0), run / "timeline.json")
    write_results(run, {"median_step_s": 7.5})
    for name in (str(run), "a_001"):
        found = replan(SOLUTION, measured=name, runs=str(tmp_path / "runs"), iterations=1)
        assert found.measured_s == 7.5
        assert found.calibration.slowest == pytest.approx(("d1", 3.0))
    alone = replan(SOLUTION, measured=str(run / "timeline.json"), iterations=1)
    assert alone.calibration.slowest == pytest.approx(("d1", 3.0))


def test_the_run_may_be_of_another_plan_of_the_problem(tmp_path: Path):
    run = tmp_path / "a_001"
    run.mkdir()
    save(SOLUTION, run / "plan.json")
    save(measured(d1=3.0), run / "timeline.json")
    other = evaluated(PROBLEM, pipeline(GRAPH, PROBLEM.cluster, [(0, 1)], microbatches=6), None)
    found = replan(other, measured=str(run), iterations=1)
    assert found.before.plan is not PLAN
    assert found.thought_s == pytest.approx(SOLUTION.value)
    assert found.calibration.slowest == pytest.approx(("d1", 3.0))


def test_what_was_not_measured_is_refused(tmp_path: Path):
    emulated = replace(measured(), origin=TimelineOrigin.EMULATED)
    with pytest.raises(InvalidInputError, match="was emulated"):
        replan(SOLUTION, measured=emulated)
    with pytest.raises(InvalidInputError, match="run 'nowhere'"):
        replan(SOLUTION, measured="nowhere")
    with pytest.raises(InvalidInputError, match=r"timeline\.json"):
        replan(SOLUTION, measured=str(tmp_path))
    save(SOLUTION, tmp_path / "plan.json")
    with pytest.raises(InvalidInputError, match="expected a run directory"):
        replan(SOLUTION, measured=str(tmp_path / "plan.json"))


def test_a_slow_device_of_a_large_plan_is_worked_around():
    planned = partita.plan("llama3-8b", cluster="4xdgx-h100", batch_size=128)
    problem, plan = planned.solution.problem, planned.solution.plan
    slow = simulate(problem, plan, disturbance=Disturbance(slow={"host3/gpu1": 1.5}))
    step = replace(slow, origin=TimelineOrigin.MEASURED)
    found = replan(planned.solution, measured=step)
    assert found.is_worth
    assert found.before.value == pytest.approx(slow.makespan_s, rel=0.05)
    # Without that host a step takes this long; the best plan is not slower.
    without = partita.plan("llama3-8b", cluster="4xdgx-h100", batch_size=128, what_if=("-host3/*",))
    assert found.solution.value <= 1.02 * without.best.step_s
    as_thought = replace(simulate(problem, plan), origin=TimelineOrigin.MEASURED)
    assert not replan(planned.solution, measured=as_thought).is_worth


def test_robustness_of_a_large_plan_plans_nothing_again():
    planned = partita.plan("llama3-8b", cluster="dgx-h100", batch_size=64)
    found = partita.robustness(planned.solution, samples=8)
    assert found.solution.plan == planned.plan
