"""Checkpoints listed, verified, and written in other forms."""

import json
from pathlib import Path

import pytest
import torch

import partita
from partita.cli.main import main
from partita.core.problem import Objective, Problem
from partita.core.solution import Solution
from partita.documents import save
from partita.errors import FormatError, InvalidInputError
from partita.planners.table import get_planner
from partita.runtime.checkpoint.checkpoint import Checkpoints, load_tensors, tensors_in
from partita.runtime.checkpoint.files import read_manifest
from partita.testing.builders import chain, flat_cluster


def values() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        "model.a.weight": torch.randn(40, 10, generator=generator),
        "model.a.bias": torch.randn(10, generator=generator).bfloat16(),
        "model.steps": torch.tensor(3),
        "optim.a.weight.exp_avg": torch.randn(40, 10, generator=generator),
    }


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    checkpoints = Checkpoints(tmp_path / "saved", model="toy")
    for step in (5, 10):
        checkpoints.save(step, values(), {"step": step})
    checkpoints.wait()
    return tmp_path / "saved"


def damage(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def test_checkpoints_are_listed_with_step_size_and_state(folder: Path) -> None:
    found = partita.list_checkpoints(str(folder))
    assert [row["step"] for row in found.to_json()] == [5, 10]
    assert [row["verified"] for row in found.to_json()] == [False, False]
    damage(folder / "step-000010" / "__0_0.distcp")
    found = partita.list_checkpoints(str(folder), verify=True)
    assert [row["verified"] for row in found.to_json()] == [True, False]
    assert next(row["state"] for row in found.rows()) == "verified"
    assert found.lines() == [f"2 checkpoints in {folder}, 1 damaged"]
    with pytest.raises(FormatError, match="step-000010"):
        found.require_whole()


def test_the_command_verifies_and_exits_2_where_one_is_damaged(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for code in (0, 2):
        with pytest.raises(SystemExit) as exit_info:
            main(["checkpoint", "verify", str(folder), "--json"])
        assert exit_info.value.code == code
        output = capsys.readouterr()
        assert [row["verified"] for row in json.loads(output.out)] == [True, code == 0]
        damage(folder / "step-000010" / ".metadata")
    assert "step-000010: .metadata is damaged" in output.err


@pytest.mark.parametrize("shard_size", [5.0, 1e-6])
def test_weights_become_safetensors(folder: Path, tmp_path: Path, shard_size: float) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    told: list[str] = []
    found = partita.convert_checkpoint(
        str(folder),
        to="safetensors",
        output=str(tmp_path / "out"),
        shard_size=shard_size,
        on_progress=told.append,
    )
    loaded = {
        name: value
        for file in found.files
        if file.endswith(".safetensors")
        for name, value in safetensors.load_file(tmp_path / "out" / file).items()
    }
    wanted = {k.removeprefix("model."): v for k, v in values().items() if k.startswith("model.")}
    assert loaded.keys() == wanted.keys()
    assert all(torch.equal(loaded[name], value) for name, value in wanted.items())
    assert len(told) == 4
    if shard_size < 1:
        index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
        assert index["weight_map"].keys() == wanted.keys()
        assert set(index["weight_map"].values()) < set(found.files)


def test_a_directory_for_hugging_face_has_its_configuration(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "toy"}')
    named = partita.convert_checkpoint(
        str(folder),
        to="hf",
        output=str(tmp_path / "named"),
        model_config=str(tmp_path / "config.json"),
    )
    assert named.files == ("model.safetensors", "config.json")
    assert not named.remarks
    bare = partita.convert_checkpoint(str(folder), to="hf", output=str(tmp_path / "bare"))
    assert "--model-config" in bare.remarks[0]


def test_what_cannot_be_converted_is_refused_and_leaves_nothing(
    folder: Path, tmp_path: Path
) -> None:
    out = str(tmp_path / "out")
    with pytest.raises(InvalidInputError, match="no form"):
        partita.convert_checkpoint(str(folder), to="onnx", output=out)
    with pytest.raises(InvalidInputError, match="is no checkpoint"):
        partita.convert_checkpoint(str(tmp_path), to="hf", output=out)
    with pytest.raises(InvalidInputError, match="is there already"):
        partita.convert_checkpoint(str(folder), to="hf", output=str(tmp_path))
    damage(folder / "step-000010" / "__0_0.distcp")
    with pytest.raises(FormatError, match="is damaged"):
        partita.convert_checkpoint(str(folder), to="safetensors", output=out)
    assert not Path(out).exists()


def test_a_checkpoint_is_laid_out_for_another_plan(tmp_path: Path) -> None:
    graph = chain(2)
    problem = Problem(graph=graph, cluster=flat_cluster(2), objective=Objective(microbatches=2))
    names = graph.parameters.names
    held = {
        key: torch.full((3, 2), float(number))
        for number, name in enumerate(names)
        for key in (f"model.{name}", f"optim.{name}.exp_avg")
    }
    checkpoints = Checkpoints(tmp_path / "saved")
    checkpoints.save(4, held, {"step": 4, "seed": 7})
    checkpoints.wait()
    solution: Solution = get_planner("uniform", stages=2, replicas=1)(problem)
    save(solution, tmp_path / "plan.json")
    found = partita.convert_checkpoint(
        str(tmp_path / "saved"), to=f"plan:{tmp_path / 'plan.json'}", output=str(tmp_path / "out")
    )
    path = tmp_path / "out" / "step-000004"
    assert found.written == str(path)
    assert {"__0_0.distcp", "__1_0.distcp", "plan.json"} <= set(found.files)
    assert read_manifest(path).extra == {"step": 4, "seed": 7}
    loaded = {name: torch.zeros(shape) for name, (shape, _) in tensors_in(path).items()}
    load_tensors(path, loaded)
    assert loaded.keys() == held.keys()
    assert all(torch.equal(loaded[name], value) for name, value in held.items())
    (row,) = partita.list_checkpoints(str(tmp_path / "out"), verify=True).to_json()
    assert row["verified"]
    assert row["plan"] == "2 stages, 1f1b"
