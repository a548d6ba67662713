"""``partita profile`` end to end: a built-in model, one of the user's, and merging."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from partita.cli.profile import command
from partita.core.graph import CostOrigin, Graph
from partita.documents import load
from partita.errors import InvalidInputError

GPT = ("gpt3-small", "--scale", "0.05", "--sequence-length", "8", "--rounds", "2")


def run(*arguments: str, cache: Path) -> Result:
    options = [] if arguments[0] == "merge" else ["--cache", str(cache)]
    result = CliRunner().invoke(command, [*arguments, *options], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result


def test_a_small_gpt_is_profiled_and_written(tmp_path: Path) -> None:
    target = tmp_path / "gpt.json"
    result = run(*GPT, "--batch-size", "2", "-o", str(target), cache=tmp_path / "cache")
    assert "x the whole step" in result.output
    graph = load(target)
    assert isinstance(graph, Graph)
    assert graph.batch_size == 2
    assert graph.costs[0].origin is CostOrigin.MEASURED
    assert len(graph.ops.layers.names) == 15
    users = set(graph.parameters.use_op.tolist())
    assert all(graph.backward_s[op] > 0 for op in users)
    again = run(*GPT, "--batch-size", "2", "-o", str(target), cache=tmp_path / "cache")
    assert "from the cache" in " ".join(again.output.split())
    assert load(target) == graph


def test_json_is_all_that_is_printed(tmp_path: Path) -> None:
    result = run(*GPT, "--mode", "inference", "--json", cache=tmp_path)
    values = json.loads(result.stdout)
    assert values["mode"] == "eval"
    assert values["graph"]["format"] == "partita.graph"
    assert values["written"] is None


def test_profiles_of_two_devices_are_merged(tmp_path: Path) -> None:
    files = [str(tmp_path / f"{kind}.json") for kind in ("a100", "v100")]
    for kind, file in zip(("a100", "v100"), files, strict=True):
        run(*GPT, "--device-type", kind, "-o", file, cache=tmp_path / "cache")
    run("merge", *files, "-o", str(tmp_path / "both.json"), cache=tmp_path)
    merged = load(tmp_path / "both.json")
    assert [costs.device_type for costs in merged.costs] == ["a100", "v100"]


def test_a_model_of_the_users_own_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_model_code.py").write_text(
        "import torch\nfrom torch import nn\n"
        "def make(batch_size=2):\n"
        "    return nn.Sequential(nn.Linear(4, 4), nn.ReLU()), torch.ones(batch_size, 4)\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    run("own_model_code:make", "--rounds", "1", "--batch-size", "6", cache=tmp_path / "cache")
    graph = load(tmp_path / "make.graph.json")
    assert (graph.name, graph.batch_size, len(graph)) == ("make", 6, 2)


def test_more_than_one_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match="one model"):
        run("gpt3-small", "bert", cache=tmp_path)


@pytest.mark.parametrize("granularity", ["module", "block"])
def test_coarser_ops_are_profiled_too(granularity: str, tmp_path: Path) -> None:
    target = str(tmp_path / "coarse.json")
    run(*GPT, "--granularity", granularity, "--equal-once", "-o", target, cache=tmp_path / "cache")
    graph = load(target)
    assert graph.annotations["profile"]["cpu"]["num_distinct"] < len(graph)


def test_a_model_too_big_for_this_machine_is_estimated_for_two_types(tmp_path: Path) -> None:
    target = tmp_path / "xl.json"
    result = run(
        *("gpt3-xl", "--estimate", "a100,v100", "--batch-size", "1", "-o", str(target)),
        cache=tmp_path / "cache",
    )
    assert "accuracy" in result.output
    graph = load(target)
    assert [costs.device_type for costs in graph.costs] == ["a100", "v100"]
    assert {costs.origin for costs in graph.costs} == {CostOrigin.ESTIMATED}
    assert graph.costs[1].forward_s.sum() > graph.costs[0].forward_s.sum() > 0
    assert len(graph.ops.layers.names) == 27


def test_nothing_is_measured_on_meta(tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match="--estimate"):
        run(*GPT, "--profile-device", "meta", cache=tmp_path / "cache")
