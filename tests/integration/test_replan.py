"""Planning again: the page's commands, and a run with a slow device that gets less to do."""

import json
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from partita.core.solution import Solution
from partita.documents import load

Run = Callable[..., tuple[int, str, str]]
PAGE = Path(__file__).parents[2] / "docs" / "replan.md"


def test_the_commands_of_the_page_run_and_say_what_the_page_says(run: Run, tmp_path: Path) -> None:
    blocks = re.findall(r"```console\n(.*?)```", PAGE.read_text(encoding="utf-8"), flags=re.DOTALL)
    lines = [line for block in blocks for line in block.splitlines()]
    said = []
    for line in lines:
        program, *words = shlex.split(line.removeprefix("$ "))
        assert program == "partita"
        code, out, err = run(*words, "-q")
        assert code == 0, err
        said.append(" ".join(out.split()))
    assert "are read from a checkpoint" in said[1]
    assert "plan by moves" in said[2]
    assert "(chosen)" in said[2]
    assert "compute on host0/gpu1 2 x" in said[4]
    assert "another plan is" in said[4]
    assert isinstance(load(tmp_path / "faster.plan.json"), Solution)


def test_json_of_moves_and_of_a_new_plan(run: Run) -> None:
    given = ("gpt-small", "-c", "2xa100", "--microbatches", "4", "-p", "uniform")
    assert run("plan", *given, "-o", "old.json", "-q")[0] == 0
    code, out, err = run("plan", *given, "--from", "old.json", "--minimise-moves", "--json")
    assert code == 0, err
    moves = json.loads(out)["moves"]
    assert (moves["from"], moves["moved_bytes"]) == ("old.json", 0)
    assert moves["candidates"][0]["chosen"]
    assert run("simulate", "old.json", "-o", "step.json", "-q")[0] == 0
    code, out, err = run("replan", "old.json", "--measured", "step.json", "--json", "-p", "single")
    assert code == 0, err
    found = json.loads(out)
    assert not found["worth"]
    assert found["recalibrated_step_s"] == pytest.approx(found["measured_step_s"])


def test_a_run_that_is_missing_is_bad_usage(run: Run) -> None:
    assert run("plan", "gpt-small", "-c", "2xa100", "-p", "uniform", "-o", "a.json", "-q")[0] == 0
    assert run("replan", "a.json")[0] == 2
    code, _, err = run("replan", "a.json", "--measured", "nowhere")
    assert code == 2
    assert "there is no run 'nowhere'" in err


SLOW_RUN = """
import json, time
import partita
from partita.runtime.stage_pass import StageRunner

forward = StageRunner.forward

def slowly(self, step, visit, inputs):
    begun = time.perf_counter()
    done = forward(self, step, visit, inputs)
    if visit.stage == 1:  # the second device
        time.sleep(0.03 + 3 * (time.perf_counter() - begun))
    return done

StageRunner.forward = slowly
graph = partita.profile(
    "gpt3-small", scale=0.05, sequence_length=8, batch_size=2, rounds=1, no_cache=True
).graph
old = partita.plan(graph, devices=2, microbatches=4, schedule="1f1b", planner="uniform")
outcome = partita.run(old.solution, steps=3, runs="runs")
found = partita.replan(old, measured=outcome, iterations=20)
again = partita.replan(old, measured=outcome.directory.name, runs="runs", iterations=1)
assert again.calibration.seen == found.calibration.seen

def work(solution):
    plan, graph = solution.plan, old.problem.graph
    seconds = graph.forward_s + graph.backward_s
    on = {}
    for number, stage in enumerate(plan.stages):
        whole = float(seconds[plan.stage_of == number].sum())
        for share, group in zip(stage.shares, stage.devices):
            name = plan.devices[group[0]]
            on[name] = on.get(name, 0.0) + whole * share / stage.round
    return on

print(json.dumps({
    "worth": found.is_worth,
    "slowest": found.calibration.slowest,
    "on": old.plan.devices[old.plan.stages[1].devices[0][0]],
    "before": work(old.solution),
    "after": work(found.solution),
}))
"""


@pytest.mark.slow
def test_a_device_that_was_slow_in_a_run_gets_less_to_do(commands: Any, tmp_path: Path) -> None:
    done = commands.run(python=SLOW_RUN, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    name, factor = found["slowest"]
    assert name == found["on"]
    assert factor > 2
    assert found["worth"]
    assert found["after"].get(name, 0.0) < 0.8 * found["before"][name]
