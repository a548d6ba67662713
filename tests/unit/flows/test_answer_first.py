"""What bounds a plan and what to do, said before the tables."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from partita.core.metrics import Metric
from partita.core.problem import Objective, Problem
from partita.core.solution import Solution
from partita.cost.judge import measure
from partita.documents import save
from partita.errors import InvalidInputError
from partita.flows.explain import explain
from partita.planners.table import get_planner
from partita.testing.builders import Figures, chain, flat_cluster, pipeline


def uneven() -> Solution:
    """Return a plan whose last stage has most of the work, with a device that does nothing."""
    graph, cluster = chain(12), flat_cluster(3)
    problem = Problem(graph=graph, cluster=cluster, objective=Objective(microbatches=8))
    plan = pipeline(graph, cluster, [0, 1], microbatches=8)
    plan = replace(plan, stage_of=np.array([0, 0, *[1] * 10], dtype=np.int32))
    value = measure(problem, plan).value
    return Solution(problem=problem, plan=plan, metric=Metric.THROUGHPUT, value=value, unit="s")


def test_the_answer_names_the_stage_that_is_too_large_and_the_command_that_helps(
    tmp_path: Path,
) -> None:
    file = tmp_path / "uneven.json"
    save(uneven(), file)
    found = explain(str(file))
    assert found.answer[0].startswith("compute on d1 bounds the step: of ")
    assert "stage 1 is busy 5.0 times as long as the others" in found.answer
    assert "1 of 3 devices have nothing to do" in found.answer
    assert found.advice[0].startswith(f"partita plan {file} reaches ")
    gains = {answer.change: answer.relative for answer in found.what_if}
    assert gains["replan"] < -0.4


def test_more_microbatches_count_by_sample() -> None:
    solution = get_planner("uniform", stages=3)(uneven().problem)
    found = explain(solution, what_if=("microbatches=4x", "schedule=gpipe"))
    many, other = found.what_if
    assert many.value > solution.value
    assert many.relative == pytest.approx(many.value / 4 / solution.value - 1)
    assert many.relative < 0  # fewer bubbles
    assert many.more_samples
    assert found.advice[0].startswith("partita plan built --microbatches 32 reaches ")
    assert " per sample): " in found.advice[0]
    assert "gpipe" in other.note
    fixed = explain(uneven(), what_if=("microbatches=4x",)).what_if[0]
    assert fixed.note == "a fixed map cannot be planned again, so microbatches changes nothing"


def test_a_search_that_finds_no_plan_as_good_leaves_the_plan_as_it_is() -> None:
    good = get_planner("uniform", stages=3)(uneven().problem)
    solution = replace(good, options={"stages": 1})  # its planner finds a worse one now
    (answer,) = explain(solution, what_if=("bandwidth=2x",)).what_if
    assert answer.relative == pytest.approx(0, abs=1e-9)
    assert answer.note.startswith("3 stages")


def test_a_change_of_the_cluster_is_a_command_and_long_messages_name_their_tensor() -> None:
    sizes = Figures(tensor_bytes=1e9)
    graph, cluster = chain(12, sizes), flat_cluster(2, bandwidth_bytes_per_s=1e8)
    problem = Problem(graph=graph, cluster=cluster, objective=Objective(microbatches=4))
    solution = get_planner("uniform", stages=2)(problem)
    found = explain(solution, what_if=("speed=2x",))
    assert found.advice[0].startswith("partita plan built --what-if speed=2x reaches ")
    (told,) = [line for line in found.answer if line.startswith("messages of stage")]
    assert "; the largest tensor is what op" in told
    assert told.endswith("1.00 GB")


@pytest.mark.parametrize("change", ["microbatches=many", "schedule=1f2b", "banwidth=2x"])
def test_a_change_that_is_not_understood_is_refused(change: str) -> None:
    with pytest.raises(InvalidInputError):
        explain(uneven(), what_if=(change,))


def test_a_run_directory_is_explained_by_its_plan_and_its_timeline(tmp_path: Path) -> None:
    solution = uneven()
    save(solution, tmp_path / "plan.json")
    timeline = explain(solution, what_if=("speed=2x",)).summary.evaluation.timeline
    save(timeline, tmp_path / "timeline.json")
    found = explain(str(tmp_path), what_if=("speed=2x",))
    assert [row["stage"] for row in found.measured] == [0, 1]
    assert found.measured_s == pytest.approx(found.predicted_s)
