"""The page of the ten published training commands: complete, and every command of it runs."""

import re
import shlex
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from partita.core.solution import Solution
from partita.documents import load

pytestmark = pytest.mark.slow

PAGE = Path(__file__).parents[2] / "docs" / "published-commands.md"
PUBLISHED = [
    ("bert-huge-uncased", 8, 32, "custom:0,8,14,20,26"),
    ("bloom-3b", 4, 128, "custom:0,10,18,26,32"),
    ("gpt3-xl", 8, 128, "custom:0,8,14,21,27"),
    ("t5-3b", 4, 32, "custom:0,16,33,53,74"),
    ("wide-resnet101_8", 64, 24, "custom:0,7,16,25,34"),
    ("bert-huge-uncased", 8, 32, "uniform_transformer"),
    ("bloom-3b", 4, 128, "custom:0,6,10,14,18,22,26,30,32"),
    ("gpt3-2.7b", 4, 256, "uniform_transformer"),
    ("t5-3b", 4, 32, "custom:0,9,16,24,33,43,53,63,74"),
    ("wide-resnet101_8", 32, 48, "custom:0,4,9,13,17,21,25,30,34"),
]


def shown() -> list[list[str]]:
    """Return the arguments of every command that the page shows, in their order."""
    text = PAGE.read_text(encoding="utf-8")
    blocks = re.findall(r"```console\n(.*?)```", text, flags=re.DOTALL)
    lines = [line for block in blocks for line in block.splitlines()]
    return [shlex.split(line)[2:] for line in lines if line.startswith("$ partita ")]


def value_of(arguments: list[str], option: str) -> str:
    return arguments[arguments.index(option) + 1]


def test_the_page_has_a_plan_a_simulation_and_a_rehearsal_of_each() -> None:
    by_command: dict[str, list[list[str]]] = {}
    for command, *arguments in shown():
        by_command.setdefault(command, []).append(arguments)
    plans, trained = by_command["plan"], by_command["train"]
    profiles = {arguments[0]: arguments for arguments in by_command["profile"]}
    found = []
    for arguments in plans:
        model = arguments[0].removesuffix(".json")
        sized = arguments if "--microbatch-size" in arguments else profiles[model]
        size = value_of(
            sized, "--microbatch-size" if "--microbatch-size" in sized else "--batch-size"
        )
        count, partition = value_of(arguments, "--microbatches"), value_of(arguments, "--partition")
        found.append((model, int(size), int(count), partition))
    assert found == PUBLISHED
    assert [one[0] for one in by_command["simulate"]] == [value_of(one, "-o") for one in plans]
    for plan, run in zip(plans, trained, strict=True):
        assert run[0] == plan[0].removesuffix(".json")
        for option in ("-c", "--partition", "--microbatches"):
            assert value_of(run, option) == value_of(plan, option)
    text = PAGE.read_text(encoding="utf-8")
    for model, size, count, partition in PUBLISHED:
        assert f"`bash run.sh {model} {size} {count} --partition_method {partition} " in text


def test_every_command_of_the_page_runs(commands: Any, tmp_path: Path) -> None:
    for arguments in shown():
        done = commands.run(*arguments, "-q", folder=tmp_path)
        assert done.returncode == 0, f"{arguments}: {done.stderr}"
        if arguments[0] == "plan":
            check_stages(tmp_path / value_of(arguments, "-o"), arguments)
    rehearsals = sorted((tmp_path / "runs").glob("*_emulated_*/results.json"))
    assert len(rehearsals) == len(PUBLISHED)


def check_stages(file: Path, arguments: list[str]) -> None:
    """Check that a plan has the published stages, microbatches and one device a stage."""
    solution = load(file)
    assert isinstance(solution, Solution)
    plan, layer = solution.plan, solution.problem.graph.ops.layers.of
    partition = value_of(arguments, "--partition")
    if partition.startswith("custom:"):
        starts = [int(part) for part in partition.removeprefix("custom:").split(",")][:-1]
        first = [int(layer[plan.stage_of == stage].min()) for stage in range(len(plan.stages))]
        assert first == starts
    assert plan.num_microbatches == int(value_of(arguments, "--microbatches"))
    assert len(plan.stages) == len(plan.devices) == len(solution.problem.cluster)
    assert not np.isinf(solution.value)
