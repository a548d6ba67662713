"""``partita export`` end to end: packages that run where Partita is not, and PipeDream's files."""

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from partita.capture.origin import Captures, ModelOrigin
from partita.capture.setting import example_inputs
from partita.capture.sources import SourceOptions, load_source
from partita.cli.main import main
from partita.documents import load, save
from partita.models.zoo import find_model

Run = Callable[..., tuple[int, str, str]]
MODELS = ("gpt3-small", "resnet18", "minkvgg", "gnmt")
SAMPLES = 2

# Runs with torch's folder and the packages' on its path and nothing else.
CHECK = """
import sys
torch_folder, folder = sys.argv[1:3]
sys.path[:0] = [torch_folder, folder]
sys.modules["partita"] = None
import importlib, json
import torch
torch.set_num_threads(1)
worst = {}
for name in sys.argv[3:]:
    model = importlib.import_module(name).build()
    told = torch.load(f"{folder}/{name}.pt", weights_only=True)
    model.load_state_dict(told["state"])
    differences = []
    for mode in ("training", "eval"):
        model.train(mode == "training")
        torch.manual_seed(3)
        output, loss = model.output_and_loss(**told["inputs"])
        differences += [(output - told[mode]["output"]).abs().max().item()]
        differences += [(loss - told[mode]["loss"]).abs().item()]
        if mode == "training":
            loss.backward()
            gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
            assert set(gradients) == set(told["gradients"])
            differences += [
                (gradients[n] - g).norm().item() / max(g.norm().item(), 1e-6)
                for n, g in told["gradients"].items()
            ]
        state = model.state_dict()
        differences += [(state[n] - t).abs().max().item() for n, t in told[mode]["state"].items()]
    worst[name] = max(differences)
print(json.dumps(worst))
"""


def call(*arguments: str) -> int:
    with pytest.raises(SystemExit) as stop:
        main(list(arguments))
    return int(stop.value.code or 0)


def origin_for(name: str) -> ModelOrigin:
    spec = find_model(name)
    options = SourceOptions(
        scale=0.05,
        batch_size=SAMPLES,
        sequence_length=8 if spec.sequence_length else 0,
        dtype="float64",
    )
    return ModelOrigin(text=name, options=options)


def write_plan(name: str, folder: Path) -> Path:
    """Capture a model and write a plan of three stages for it."""
    origin = origin_for(name)
    captured = Captures(load_source(name, origin.options), origin).at(SAMPLES)
    graph, plan = folder / f"{name}.graph.json", folder / f"{name}.plan.json"
    save(origin.recorded_in(captured.graph), graph)
    assert call("plan", str(graph), "--devices", "3", "-p", "uniform", "-o", str(plan), "-q") == 0
    return plan


def expectation(name: str, package: Path) -> dict[str, object]:
    """Return what the original makes of one microbatch, in training and in eval mode."""
    source = load_source(name, origin_for(name).options)
    model, example = source.model, source.example(SAMPLES)
    inputs = example_inputs(model, example)
    entries = json.loads((package / "wiring.json").read_text())["inputs"]
    told: dict[str, object] = {
        "state": {n: t.clone() for n, t in model.state_dict().items()},
        "inputs": {entry["variable"]: inputs[entry["tensor"]] for entry in entries},
    }
    for mode in ("training", "eval"):
        model.train(mode == "training")
        torch.manual_seed(3)
        output = model(*example.args, **example.kwargs)
        loss = source.loss(output, example.labels)
        if mode == "training":
            loss.backward()
            told["gradients"] = {
                n: p.grad for n, p in model.named_parameters() if p.grad is not None
            }
        told[mode] = {
            "output": output.detach(),
            "loss": loss.detach(),
            "state": {n: t.clone() for n, t in model.state_dict().items()},
        }
    return told


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a package for each model and what its original computes."""
    folder = tmp_path_factory.mktemp("packages")
    for name in MODELS:
        plan = write_plan(name, folder)
        package = folder / name.replace("-", "_")
        assert call("export", str(plan), "-o", str(package), "-q") == 0
        torch.save(expectation(name, package), folder / f"{package.name}.pt")
    return folder


@pytest.fixture(scope="module")
def differences(packages: Path) -> dict[str, float]:
    """Return the largest difference of each package from its original, where Partita is not."""
    names = [name.replace("-", "_") for name in MODELS]
    site = str(Path(torch.__file__).parents[1])
    result = subprocess.run(
        [sys.executable, "-I", "-S", "-W", "error", "-c", CHECK, site, str(packages), *names],
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_a_package_runs_without_partita_and_equals_the_model(
    name: str, differences: dict[str, float]
) -> None:
    assert differences[name.replace("-", "_")] < 1e-9


@pytest.mark.slow
def test_the_self_test_of_a_package_takes_a_step(packages: Path) -> None:
    script = (
        "import runpy, sys; sys.path[:0] = sys.argv[1:3]; sys.modules['partita'] = None; "
        "runpy.run_module('minkvgg', run_name='__main__', alter_sys=True)"
    )
    site = str(Path(torch.__file__).parents[1])
    result = subprocess.run(
        [sys.executable, "-I", "-S", "-c", script, site, str(packages)],
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert result.returncode == 0, result.stderr
    assert "gradients of" in result.stdout


@pytest.mark.slow
def test_wiring_says_who_sends_what_to_whom(packages: Path) -> None:
    wiring = json.loads((packages / "gpt3_small" / "wiring.json").read_text())
    assert [stage["name"] for stage in wiring["stages"]] == ["stage0", "stage1", "stage2"]
    for number, stage in enumerate(wiring["stages"]):
        for entry in stage["inputs"]:
            if entry["from"] != "input":
                giver = wiring["stages"][int(entry["from"].removeprefix("stage"))]
                given = {output["tensor"]: output for output in giver["outputs"]}
                assert f"stage{number}" in given[entry["tensor"]]["to"]
    assert wiring["shared_parameters"] == {"token_embedding.weight": ["stage0", "stage2"]}
    assert wiring["loss"]["variable"] == "loss"


NODE = (
    "{} -- {} -- forward_compute_time=1.000, backward_compute_time=2.000, activation_size=4.0, "
    "parameter_size=0.000 -- stage_id={}"
)


@pytest.fixture
def stage_file(tmp_path: Path) -> Path:
    """Return a gpus=N.txt of two layers and an activation."""
    rows = (
        ("node1", "Input0", 0),
        ("node2", "Linear(in_features=3072, out_features=8, bias=True)", 0),
        ("node3", "ReLU(inplace)", 0),
        ("node4", "Linear(in_features=8, out_features=2, bias=True)", 1),
    )
    edges = "\n".join(f"\tnode{row} -- node{row + 1}" for row in range(1, 4))
    path = tmp_path / "gpus=4.txt"
    path.write_text("\n".join([*(NODE.format(*row) for row in rows), edges]))
    return path


def test_a_stage_file_becomes_a_package_by_its_descriptions(
    run: Run, stage_file: Path, tmp_path: Path
) -> None:
    code, out, err = run("export", str(stage_file), "--to", "python", "-o", "layers", "--json")
    assert code == 0, err
    assert json.loads(out)["stages"] == 2
    assert 'self.add("node2", nn.Linear(' in (tmp_path / "layers" / "stage0.py").read_text()
    assert not (tmp_path / "layers" / "__main__.py").exists()
    code, _, err = run("export", str(stage_file), "-o", "layers", "-q")
    assert code == 0, err


def test_a_stage_file_whose_layers_are_no_constructors_is_refused_by_the_first(
    run: Run, stage_file: Path
) -> None:
    stage_file.write_text(stage_file.read_text().replace("ReLU(inplace)", "Own(layer)"))
    code, _, err = run("export", str(stage_file), "-o", "layers")
    assert code == 2
    assert "node 'node3' is described as 'Own(layer)'" in err
    assert "--model" in err
    assert len(err.splitlines()) == 1


def test_a_stage_file_of_another_model_is_refused(run: Run, stage_file: Path) -> None:
    code, _, err = run("export", str(stage_file), "--model", "OneLayer", "-o", "layers", "-q")
    assert code == 2
    assert "another model" in err


def test_configurations_of_pipedreams_runtime(run: Run, stage_file: Path, tmp_path: Path) -> None:
    options = ("--to", "pipedream-conf", "--stage-to-num-ranks", "0:3,1:1", "-o", "conf")
    code, out, err = run("export", str(stage_file), *options)
    assert code == 0, err
    assert len(out.splitlines()) == 3
    hybrid = json.loads((tmp_path / "conf" / "hybrid_conf.json").read_text())
    assert hybrid["module_to_stage_map"] == [0, 1, 1]
    assert hybrid["stage_to_rank_map"] == {"0": [0, 1, 2], "1": [3]}
    data = json.loads((tmp_path / "conf" / "dp_conf.json").read_text())
    assert data["stage_to_rank_map"] == {"0": [0, 1, 2, 3]}


def test_replicas_of_the_command_line_are_in_the_wiring(
    run: Run, stage_file: Path, tmp_path: Path
) -> None:
    code, _, err = run("export", str(stage_file), "--stage-to-num-ranks", "0:3,1:1", "-o", "pack")
    assert code == 0, err
    wiring = json.loads((tmp_path / "pack" / "wiring.json").read_text())
    assert [stage["replicas"] for stage in wiring["stages"]] == [3, 1]


def test_pipedreams_plan_is_what_convert_writes(run: Run, tmp_path: Path) -> None:
    assert run("plan", "gpt-small", "-c", "4xa100", "-o", "p.json", "-q")[0] == 0
    code, _, err = run("export", "p.json", "--to", "pipedream", "-q")
    assert code == 0, err
    assert run("convert", "p.json", "again.txt", "-q")[0] == 0
    assert (tmp_path / "gpus=4.txt").read_text() == (tmp_path / "again.txt").read_text()


def test_a_plan_of_an_unknown_model_asks_for_its_name(run: Run) -> None:
    assert run("plan", "gpt-small", "-c", "4xa100", "-o", "p.json", "-q")[0] == 0
    code, _, err = run("export", "p.json")
    assert code == 2
    assert "name the model" in err


def test_a_folder_with_other_files_is_not_written_to(
    run: Run, stage_file: Path, tmp_path: Path
) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("mine")
    code, _, err = run("export", str(stage_file), "-o", "mine")
    assert code == 2
    assert "not empty" in err
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["notes.txt"]


def test_published_stage_files_become_models_of_the_published_size(
    run: Run, shared_data: Path, tmp_path: Path
) -> None:
    sizes = {"squeezenet1_0": 1_248_424, "resnet18": 11_689_512}
    for name, size in sizes.items():
        plan = shared_data / "pipedream" / "plans" / f"{name}__n4_b10" / "gpus=4.txt"
        code, _, err = run("export", str(plan), "-o", f"described_{name}", "-q")
        assert code == 0, err
        sys.path.insert(0, str(tmp_path))
        try:
            model = __import__(f"described_{name}").full_model()
        finally:
            sys.path.remove(str(tmp_path))
            for loaded in [n for n in sys.modules if n.startswith(f"described_{name}")]:
                del sys.modules[loaded]
        assert sum(parameter.numel() for parameter in model.parameters()) == size
        assert model(torch.zeros(1, 3, 224, 224)).shape == (1, 1000)


def test_options_of_a_model_need_a_model(run: Run, stage_file: Path) -> None:
    for option in (("--weights",), ("--scale", "0.5"), ("--batch-size", "2")):
        code, _, err = run("export", str(stage_file), *option, "-o", "layers")
        assert code == 2
        assert f"{option[0]} is for a model" in err


def test_a_bare_plan_needs_its_graph(run: Run, tmp_path: Path) -> None:
    plan = write_plan("OneLayer", tmp_path)
    save(load(plan).plan, tmp_path / "bare.json")
    code, _, err = run("export", "bare.json", "-o", "one")
    assert code == 2
    assert "--graph" in err
    code, _, err = run("export", "bare.json", "--graph", str(plan), "-o", "one", "-q")
    assert code == 0, err
    assert (tmp_path / "one" / "whole.py").exists()


def test_weights_come_with_the_package_when_asked_for(run: Run, tmp_path: Path) -> None:
    plan = write_plan("OneLayer", tmp_path)
    code, _, err = run("export", str(plan), "-o", "one", "--weights", "--seed", "5", "-q")
    assert code == 0, err
    options = replace(origin_for("OneLayer").options, seed=5)
    wanted = load_source("OneLayer", options).model.state_dict()
    found = torch.load(tmp_path / "one" / "weights.pt", weights_only=True)
    assert found.keys() == wanted.keys()
    for name, tensor in found.items():
        torch.testing.assert_close(tensor, wanted[name])
