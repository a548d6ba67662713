"""The ten published training commands, each planned on estimated costs by the command line."""

import json
from functools import cache
from pathlib import Path

import pytest

from partita.capture.sources import SourceOptions, load_source
from partita.cli.main import main
from partita.core.codec import decode, write_json
from partita.core.graph import Graph
from partita.core.solution import Solution
from partita.profiler.estimate.estimate import estimate_source

pytestmark = pytest.mark.slow

A100, A40 = "4xa100-pcie", "2x4xa40"
COMMANDS = [
    (A100, "bert-huge-uncased", 26, 8, 32, "custom:0,8,14,20,26"),
    (A100, "bloom-3b", 32, 4, 128, "custom:0,10,18,26,32"),
    (A100, "gpt3-xl", 27, 8, 128, "custom:0,8,14,21,27"),
    (A100, "t5-3b", 74, 4, 32, "custom:0,16,33,53,74"),
    (A100, "wide-resnet101_8", 34, 64, 24, "custom:0,7,16,25,34"),
    (A40, "bert-huge-uncased", 26, 8, 32, "uniform_transformer"),
    (A40, "bloom-3b", 32, 4, 128, "custom:0,6,10,14,18,22,26,30,32"),
    (A40, "gpt3-2.7b", 35, 4, 256, "uniform_transformer"),
    (A40, "t5-3b", 74, 4, 32, "custom:0,9,16,24,33,43,53,63,74"),
    (A40, "wide-resnet101_8", 34, 32, 48, "custom:0,4,9,13,17,21,25,30,34"),
]
UNIFORM_STARTS = {
    "bert-huge-uncased": [0, 4, 7, 10, 13, 16, 19, 22],
    "gpt3-2.7b": [0, 6, 10, 14, 18, 22, 26, 30],
}


@cache
def estimated(name: str, batch_size: int) -> str:
    """Return the document of a full-size model, priced for both types of devices."""
    source = load_source(name, SourceOptions(batch_size=batch_size, device="meta"))
    return write_json(estimate_source(source, ["a100-pcie", "a40"]))


def first_layers(graph: Graph, solution: Solution) -> list[int]:
    layer, stages = graph.ops.layers.of, solution.plan.stage_of
    return [int(layer[stages == stage].min()) for stage in range(int(stages.max()) + 1)]


@pytest.mark.parametrize(
    "command",
    COMMANDS,
    ids=[f"{command[0]}-{command[1]}" for command in COMMANDS],
)
def test_a_published_command_gives_its_stages(
    command: tuple[str, str, int, int, int, str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    cluster, name, layers, size, count, partition = command
    file = tmp_path / "graph.json"
    file.write_text(estimated(name, size))
    words = f"--microbatches {count} --memory-factor 1 --optimizer sgd --json"
    with pytest.raises(SystemExit) as stop:
        main(["plan", str(file), "-c", cluster, "--partition", partition, *words.split()])
    captured = capsys.readouterr()
    assert not stop.value.code, captured.err
    found = json.loads(captured.out)
    solution = decode(found["solution"])
    assert isinstance(solution, Solution)
    graph = solution.problem.graph
    assert len(graph.ops.layers.names) == layers
    starts = UNIFORM_STARTS.get(name, [])
    if partition.startswith("custom:"):
        starts = [int(part) for part in partition.removeprefix("custom:").split(",")][:-1]
    assert first_layers(graph, solution) == starts
    assert len(starts) == len(solution.problem.cluster)
    assert solution.plan.microbatch_sizes.tolist() == [size] * count
    assert found["step_s"] > 0
