"""A straggler in a run: said, and planned around where that pays."""

import json
from pathlib import Path
from typing import Any

import pytest

import partita
from partita.core.metrics import Metric
from partita.core.problem import Objective, Problem
from partita.core.solution import Solution
from partita.cost.judge import evaluate
from partita.errors import InvalidInputError
from partita.flows.runs.stragglers import Replanning, StragglerFollower
from partita.planners.table import solve
from partita.program.lower import lower
from partita.runtime.rank import StepNews
from partita.runtime.stragglers import StragglerWatch
from partita.testing.builders import Figures, chain, flat_cluster, pipeline


def planned() -> Solution:
    graph = chain(12, Figures(forward_s=0.002, backward_s=0.004, tensor_bytes=8))
    cluster = flat_cluster(3)
    plan = pipeline(graph, cluster, [0, 1, 2], microbatches=4)
    problem = Problem(graph=graph, cluster=cluster, objective=Objective(microbatches=4))
    return Solution(problem=problem, plan=plan, metric=Metric.THROUGHPUT, value=1.0, unit="s")


def follower_of(solution: Solution, steps: int, said: list[str]) -> StragglerFollower:
    """Return who follows a plan by a clock of which a second passes with each look."""
    ticks = iter(range(10_000))
    return StragglerFollower(
        StragglerWatch(solution, lower(solution.problem, solution.plan)),
        said.append,
        Replanning(solution=solution, plan_for=lambda problem: solve(problem, "auto"), steps=steps),
        clock=lambda: float(next(ticks)),
    )


@pytest.mark.parametrize(("steps", "changes"), [(1000, True), (11, False)])
def test_the_plan_is_changed_when_that_saves_more_than_it_costs(steps: int, changes: bool) -> None:
    said: list[str] = []
    follower = follower_of(planned(), steps, said)
    on_step = follower.around(lambda _, __: None)
    for step in range(12):
        for rank, compute_s in enumerate((0.096, 0.24, 0.096)):
            on_step(rank, StepNews(step, 0.0, compute_s=compute_s))
    assert "rank 1 (d1 of host0, stage 1) is a straggler" in said[0]
    assert ("more than the" in said[1]) == changes
    assert ("the plan stays" in said[1]) != changes
    assert bool(follower.why) == (follower.other is not None) == changes
    if follower.other is not None:
        slow = follower.other.problem.cluster.devices[1]
        assert slow.speed == pytest.approx(1 / 2.5)
        problem = follower.other.problem
        old, new = (evaluate(problem, each.plan).step_s for each in (planned(), follower.other))
        assert new < 0.95 * old


EMULATED = """
import gc, json, runpy, sys, warnings
import partita

warnings.simplefilter("error")
lost, said = [], []
sys.unraisablehook = lambda one: lost.append(str(one.exc_value))
first = runpy.run_path(sys.argv[1])["planned"]()
found = partita.run(
    first,
    emulate=True,
    emulate_slow=("d1=3",),
    replan=True,
    steps=60,
    on_progress=said.append,
)
changed = found.solution.plan != first.plan
remarks = list(found.remarks)
del found
gc.collect()  # files that are still open are told now
print(json.dumps({"said": said, "remarks": remarks, "changed": changed, "lost": lost}))
"""


def test_an_emulated_run_goes_on_with_a_plan_around_its_straggler(
    tmp_path: Path, commands: Any
) -> None:
    # In a process without threads, from which ranks are forked.
    done = commands.run(__file__, python=EMULATED, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert sum("is a straggler after step" in line for line in found["said"]) == 1
    assert any(line.startswith("straggler: d1") for line in found["said"])
    assert any(line.startswith("planned around it") for line in found["remarks"])
    assert found["changed"]
    assert found["lost"] == []


def test_options_that_would_be_ignored_are_refused(tmp_path: Path) -> None:
    for given, why in (
        ({"replan": True}, "--replan: there is nothing to go on from: add --save-every"),
        ({"emulate_slow": ("d1=2",)}, "--emulate-slow: slows emulated devices: add --emulate"),
        ({"emulate": True, "emulate_slow": ("d1",)}, "expected DEVICE=FACTOR"),
        ({"emulate": True, "emulate_slow": ("d9=2",)}, "there is no device 'd9' to slow down"),
    ):
        with pytest.raises(InvalidInputError, match=why):
            partita.run(planned(), runs=str(tmp_path), steps=1, **given)
