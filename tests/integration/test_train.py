"""``partita train`` and ``partita run`` as a user types them, each in a process of its own."""

import json
import re
import subprocess
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from partita import load

pytestmark = pytest.mark.slow
SMALL = (
    *("--scale", "0.05", "--sequence-length", "8", "--microbatch-size", "2"),
    *("--microbatches", "4", "--steps", "3"),
)
SCRIPT = """
import sys

import torch
from torch import nn

import partita
from partita.capture.setting import Example


def loss(output, labels):
    return nn.functional.cross_entropy(output, labels)


def build(batch_size=2):
    torch.manual_seed(0)
    layers = (nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4))
    return nn.Sequential(*layers), Example(args=(torch.ones(batch_size, 8),),
        labels=torch.zeros(batch_size, dtype=torch.int64)), loss


def batches():
    generator = torch.Generator().manual_seed(1)
    for _ in range(3):
        yield (torch.randn(8, 8, generator=generator),
               torch.randint(0, 4, (8,), generator=generator))


def by_hand():
    model = build()[0]
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    for inputs, labels in batches():
        optimizer.zero_grad()
        value = loss(model(inputs), labels)
        value.backward()
        optimizer.step()
        print(f"{value.item():.5f}")
    return model


def by_plan():
    model = build()[0]
    step = partita.parallelize(model, loss, lambda p: torch.optim.Adam(p, 0.01))
    for batch in batches():
        print(f"{step(batch):.5f}")
    step.gather_into(model)
    return model


if __name__ == "__main__":
    model = by_hand() if sys.argv[1] == "hand" else by_plan()
    print(f"{sum(float(p.sum()) for p in model.parameters()):.4f}")
"""

SHUFFLED = """
import os
import sys

import own
import partita
import torch
from torch.utils.data import DataLoader, TensorDataset

print("what a rank prints first stays at the beginning of its log, whatever comes after it")
generator = torch.Generator().manual_seed(1)
data = TensorDataset(
    torch.randn(24, 8, generator=generator), torch.randint(0, 4, (24,), generator=generator)
)
with torch.random.fork_rng():  # build seeds
    model = own.build()[0]
step = partita.parallelize(model, own.loss, lambda p: torch.optim.Adam(p, 0.01))
if sys.argv[1] == "differ":
    torch.manual_seed(int.from_bytes(os.urandom(4), "little"))
for epoch in range(2):
    for inputs, labels in DataLoader(data, batch_size=8, shuffle=True):
        print("batch", f"{float(inputs[0].sum()):.5f}", f"{step((inputs, labels)):.5f}")
"""


POISONED = """
import own
import partita
import torch
from torch.utils.data import TensorDataset

inputs = torch.randn(48, 8, generator=torch.Generator().manual_seed(1))
inputs[20, 0] = float("nan")
trainer = partita.parallelize(own.build()[0], own.loss, optimizer="adam")
for batch in trainer.loader(TensorDataset(inputs, torch.zeros(48).long()), shuffle=False):
    trainer.step(batch)
"""


class Place(NamedTuple):
    """A folder, and what runs commands in it."""

    folder: Path
    commands: Any


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, commands: Any) -> Place:
    return Place(tmp_path_factory.mktemp("train"), commands)


def partita(
    place: Place, *arguments: str, code: int = 0, **more: str
) -> subprocess.CompletedProcess[str]:
    """Run a command; the profile of the small model is measured once for all tests."""
    done = place.commands.run(*arguments, folder=place.folder, **more)
    assert done.returncode == code, f"{arguments}: {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done


def train(place: Place, *arguments: str, code: int = 0, **more: str) -> Any:
    """Train the small model; returns what it printed as JSON, or its error."""
    rounds = () if "--cluster" in arguments else ("--rounds", "2")
    options = (*SMALL, *rounds, *arguments, "--json")
    done = partita(place, "train", "gpt3-small", *options, code=code, **more)
    return json.loads(done.stdout) if not code else done.stderr


def test_a_run_is_checked_reported_and_kept(place: Place) -> None:
    two = ("--devices", "2", "--planner", "uniform")
    found = train(place, *two, "--check", "--recalibrate", "again.json")
    assert found["check"]["equal"]
    assert found["check"]["gradients"] > 100
    assert found["check"]["against"] == "the captured graph"
    module = found["check"]["module"]
    assert module["against"] == "the untouched module"
    assert module["equal"], module
    assert module["gradients"] == found["check"]["gradients"]
    assert found["origin"] == "measured"
    assert len(found["losses"]) == found["steps"] == 3
    assert [row["stage"] for row in found["report"]["stages"]] == [0, 1]
    assert all(row["peak_bytes"]["predicted"] > 0 for row in found["report"]["devices"])
    directory = place.folder / found["directory"]
    for name in ("plan.json", "results.json", "timeline.json", "trace.json"):
        assert json.loads((directory / name).read_text())
    assert (directory / "logs" / "rank1.log").exists()
    assert json.loads((place.folder / "again.json").read_text())["costs"]
    again = train(place, "--devices", "2", "--repeatable")
    assert again["directory"] != found["directory"]


def test_replicas_and_a_file_of_options(place: Place) -> None:
    (place.folder / "options.yaml").write_text(
        "devices: 4\npp: 2\ndp: 2\ncheck: true\noptimizer: sgd\n"
    )
    found = train(place, "--config", "options.yaml")
    assert found["check"]["equal"]
    assert len(found["devices"]) == 4
    (place.folder / "wrong.yaml").write_text("device_count: 4\n")
    assert "there is no option 'device_count'" in train(place, "--config", "wrong.yaml", code=2)


@pytest.mark.parametrize("baseline", ["single", "random", "ddp", "torch-1f1b"])
def test_baselines_under_the_same_command(place: Place, baseline: str) -> None:
    found = train(place, "--devices", "2", "--baseline", baseline, "--check")
    assert found["check"]["equal"]
    assert found["baseline"] == baseline
    assert found["median_step_s"] > 0


def test_every_order_and_kind_of_transfer_gives_the_same_losses(place: Place) -> None:
    losses = {
        tuple(train(place, "--devices", "2", "--order", order, "--transfers", how)["losses"])
        for order, how in (("device", "overlapped"), ("program", "blocking"))
    }
    assert len(losses) == 1


def test_fresh_processes_give_what_forked_ones_give(place: Place) -> None:
    forked = train(place, "--devices", "2", "--launcher", "fork")
    fresh = train(place, "--devices", "2", "--launcher", "torchrun", "--check", FRESH="1")
    assert fresh["check"]["equal"]
    assert fresh["losses"] == forked["losses"]


@pytest.mark.parametrize("kind", ["profile", "memory"])
def test_what_else_is_noted_of_a_run(place: Place, kind: str) -> None:
    found = train(place, "--devices", "2", "--capture", kind)
    if kind == "memory":
        uses = found["memory"].values()
        assert len(uses) == 2
        assert all(use["exact"] and use["peak_bytes"] >= use["end_bytes"] > 0 for use in uses)
        return
    events = json.loads((place.folder / found["directory"] / "profiler.json").read_text())[
        "traceEvents"
    ]
    assert {event["pid"] for event in events} == {0, 1}
    assert any(event.get("name", "").startswith("aten::") for event in events)


def test_a_plan_for_machines_that_are_not_here_is_emulated(place: Place) -> None:
    found = train(place, "--cluster", "4xa100", "--emulate", "--emulate-scale", "1")
    assert found["origin"] == "emulated"
    assert any("emulated" in remark for remark in found["remarks"])
    assert len(found["devices"]) == 4


def test_tensor_parallel_ranks_equal_one_process_and_say_what_they_divide(place: Place) -> None:
    found = train(place, "--devices", "2", "--tp", "2", "--check")
    assert found["check"]["equal"]
    assert found["check"]["module"]["equal"]
    assert any("24 by rows" in remark for remark in found["remarks"])


def test_tensor_parallel_ranks_that_divide_the_sequence_equal_one_process(place: Place) -> None:
    found = train(place, "--devices", "2", "--tp", "2", "--sp", "yes", "--check")
    assert found["check"]["equal"]
    assert found["check"]["module"]["equal"]
    plan = load(place.folder / found["directory"] / "plan.json").plan
    assert all(stage.sequence_parallel for stage in plan.stages)


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["--devices", "4", "--pp", "3"], 2, "pp x dp could be 1 x 4, 2 x 2, 4 x 1"),
        (["--tp", "3"], 2, "--tp 3 does not divide 2 devices"),
        (["--sp", "yes"], 2, "add --tp"),
        (["--tp", "2", "--planner", "autopipe"], 2, "--tp says nothing to planner 'autopipe'"),
        (["--cluster", "4xa100"], 2, "add --emulate"),
        (["--emulate", "--check"], 2, "computes nothing"),
        (["--recompute"], 2, "add --cluster"),
        (["--baseline", "ddp", "--pp", "2"], 2, "brings its own plan"),
        (["--baseline", "ddp", "--report"], 2, "torch's own way"),
        (["--learning-rate", "-1"], 2, "expected more than 0"),
        (["--device", "1"], 2, "--baseline single"),
        (["--loss", "hinge"], 2, "not one of cross_entropy, mse"),
        (["--perturb", "2"], 2, "expected 0 to below 1"),
        (["--device-ids", "9999"], 2, "there is no 9999"),
    ],
)
def test_bad_options_are_met_with_one_line(
    place: Place, arguments: list[str], code: int, words: str
) -> None:
    error = train(place, *arguments, code=code)
    assert words in error
    assert "Traceback" not in error


def test_more_gpus_than_there_are_are_refused(place: Place) -> None:
    error = train(place, code=4, NUM_GPUS="64")
    assert "64 GPUs are wanted" in error
    assert "--emulate" in error


def test_a_plan_for_another_model_is_refused_with_the_difference(place: Place) -> None:
    found = train(place, "--devices", "2")
    error = partita(
        place, "run", f"{found['directory']}/plan.json", "--model", "gpt3-medium", code=2
    ).stderr
    assert "another model" in error


@pytest.fixture(scope="module")
def own_plan(place: Place) -> str:
    """Return the plan of a model of a user's own, for two ranks."""
    (place.folder / "own.py").write_text(SCRIPT)
    (place.folder / "shuffled.py").write_text(SHUFFLED)
    partita(place, "profile", "own:build", "--rounds", "2", "-o", "own.json")
    two = ("--devices", "2", "--microbatches", "4", "--planner", "uniform")
    partita(place, "plan", "own.json", *two, "-o", "own.plan.json")
    return "own.plan.json"


def batches_of(place: Place, *options: str) -> list[list[str]]:
    """Return what the ranks of the shuffling script say of their batches, by rank."""
    found = partita(place, "run", *options, "--json", "--", "shuffled.py", "alike").stdout
    logs = place.folder / json.loads(found)["directory"] / "logs"
    texts = [(logs / f"rank{rank}.log").read_text() for rank in range(2)]
    return [[line for line in text.splitlines() if line.startswith("batch")] for text in texts]


def test_a_loader_that_shuffles_unseeded_gives_all_ranks_the_same_batches(
    place: Place, own_plan: str
) -> None:
    first, second = batches_of(place, own_plan)
    assert len(first) == 6
    assert first == second
    assert batches_of(place, own_plan, "--seed", "5")[0] != first


def test_ranks_with_different_batches_are_refused_by_name(place: Place, own_plan: str) -> None:
    options = ("--runs", "differing", "--", "shuffled.py", "differ")
    error = partita(place, "run", own_plan, *options, code=5).stderr
    assert "step 0: rank 1 has another batch than rank 0; every rank must" in error
    assert "seed the loader alike" in error
    assert "Traceback" not in error
    logs = sorted((place.folder / "differing").glob("*/logs/rank*.log"))
    assert len(logs) == 2
    for log in logs:
        assert log.read_text().startswith("what a rank prints first stays at the beginning of its")
    assert any("another batch than rank 0" in log.read_text() for log in logs)


def test_a_script_of_the_users_own_trains_by_a_plan(place: Place, own_plan: str) -> None:
    by_plan = partita(place, "run", own_plan, "--", "own.py", "plan").stdout
    alone = "import runpy; runpy.run_path('own.py', run_name='__main__')"
    by_hand = place.commands.run("hand", python=alone, folder=place.folder).stdout
    assert by_hand.splitlines() == re.findall(r"^-?\d+\.\d+$", by_plan, re.MULTILINE)
    missing = partita(place, "run", own_plan, "--", "missing.py", code=2).stderr
    assert "no script 'missing.py'" in missing


def test_a_script_goes_back_and_leaves_out_data_without_numbers(
    place: Place, own_plan: str
) -> None:
    (place.folder / "poisoned.py").write_text(POISONED)
    options = ("--save-every", "2", "--max-restarts", "1", "--on-nan", "rollback", "--json")
    done = partita(place, "run", own_plan, *options, "--", "poisoned.py")
    found = json.loads(done.stdout)
    assert "gradients of step 3 are no numbers" in found["incidents"][0]["cause"]
    assert found["incidents"][0]["resumed"] == 2
    assert len(found["losses"]) == 5  # of six batches one is left out
    stopped = partita(place, "run", own_plan, "--on-nan", "stop", "--", "poisoned.py", code=5)
    assert "step 3 are no numbers: rank 0, forward of stage 0, microbatch 2" in stopped.stderr
    assert ", in the input 'input'" in stopped.stderr


EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "training"


@pytest.mark.parametrize("name", ["gpt", "images", "graphnet"])
def test_the_examples_train_by_the_documented_commands(place: Place, name: str) -> None:
    for kind in ("plain", "ported"):
        (place.folder / f"{name}_{kind}.py").write_text(
            (EXAMPLES / f"{name}_{kind}.py").read_text()
        )
    plan = f"{name}.plan.json"
    partita(place, "profile", f"{name}_ported:build", "--rounds", "2", "-o", f"{name}.json")
    two = ("--devices", "2", "--microbatches", "4", "--planner", "uniform", "-O", "stages=2")
    partita(place, "plan", f"{name}.json", *two, "-o", plan)
    ported = partita(place, "run", plan, "--", f"{name}_ported.py", "3").stdout
    alone = f"import runpy; runpy.run_path('{name}_plain.py', run_name='__main__')"
    plain = place.commands.run("3", python=alone, folder=place.folder).stdout.splitlines()
    assert len(plain) == 3 + (name != "graphnet")  # which has no validation
    found = [line for line in ported.splitlines() if line.startswith(("loss ", "validation "))]
    for one, other in zip(found, plain, strict=True):
        assert float(one.split()[1]) == pytest.approx(float(other.split()[1]), rel=1e-9)


def test_past_runs_are_listed_and_compared(place: Place) -> None:
    first = train(place, "--devices", "2")
    second = train(place, "--devices", "2", "--schedule", "gpipe")
    names = [Path(run["directory"]).name for run in (first, second)]
    listed = json.loads(partita(place, "results", "--json").stdout)
    assert set(names) <= {run["name"] for run in listed}
    shown = partita(place, "results", *names).stdout
    assert "vs first" in shown
    assert "not found" not in shown
    assert "no results" in partita(place, "results", "nothing", code=2).stderr


def test_a_run_on_tokens_is_evaluated_scheduled_and_compared(place: Place) -> None:
    tokens = np.random.default_rng(0).integers(0, 40, 4000).astype(np.uint16)
    (place.folder / "text").mkdir()
    tokens.tofile(place.folder / "text" / "train.bin")
    tokens[:500].tofile(place.folder / "text" / "val.bin")
    (place.folder / "recipe.yaml").write_text(
        "data: text\nsteps: 20\nlr: 0.01\noptimizer: adamw\nweight-decay: 0.1\n"
        "lr-schedule: cosine\nwarmup: 4\nlr-floor: 0.1\nclip: 1.0\neval-every: 8\n"
        "eval-batches: 2\n"
    )
    small = (*SMALL[:-2], "--rounds", "2", "--devices", "2", "--pp", "2")
    command = ("train", "gpt3-small", *small, "--config", "recipe.yaml")
    found = json.loads(partita(place, *command, "--json").stdout)
    assert found["steps"] == 20
    assert list(found["held_out_losses"]) == ["8", "16", "20"]
    assert found["losses"][-1] < found["losses"][0] - 1
    assert found["held_out_losses"]["20"] < found["held_out_losses"]["8"]
    lines = (place.folder / found["directory"] / "metrics.jsonl").read_text().splitlines()
    rates = [json.loads(line)["learning_rate"] for line in lines]
    assert rates[:4] == pytest.approx([0.0025, 0.005, 0.0075, 0.01])
    assert rates[-1] < 0.0012
    assert json.loads(lines[-1])["tokens"] == 20 * 8 * 8
    again = partita(place, *command, "--eval-every", "20")
    assert "held out" in again.stderr
    assert "• loss" in again.stdout or "* loss" in again.stdout
    newest = max((place.folder / "runs").iterdir(), key=lambda path: path.stat().st_ctime_ns)
    names = (Path(found["directory"]), newest)
    compared = json.loads(partita(place, "results", *map(str, names), "--curves", "--json").stdout)
    # The same seed and data: the same losses, however often they are evaluated.
    assert compared["points"][names[0].name] == compared["points"][names[1].name]


def test_a_run_is_as_long_as_its_epochs_or_tokens(place: Place) -> None:
    (place.folder / "short").mkdir()
    np.arange(33 * 8 + 1, dtype=np.uint16).clip(0, 30).tofile(place.folder / "short" / "train.bin")
    small = (*SMALL[:-2], "--data", "short", "--devices", "2", "--pp", "2")
    assert len(train_with(place, *small, "--epochs", "0.5", "--sampling", "shuffled")) == 2
    assert len(train_with(place, *small, "--tokens", "150")) == 3
    refused = partita(place, "train", "gpt3-small", *small, "--eval-every", "1", code=2)
    assert "no data to evaluate on" in refused.stderr
    both = partita(place, "train", "gpt3-small", *small, "--epochs", "1", "--tokens", "9", code=2)
    assert "--epochs and --tokens" in both.stderr


def train_with(place: Place, *options: str) -> Any:
    """Return the losses of a run."""
    done = partita(place, "train", "gpt3-small", *options, "--rounds", "2", "--json")
    return json.loads(done.stdout)["losses"]


def test_a_run_on_tokens_goes_on_where_it_was_saved(place: Place) -> None:
    folder = place.folder / "resumed"
    folder.mkdir()
    drawn = np.random.default_rng(1).integers(0, 40, 2000).astype(np.uint16)
    drawn.tofile(folder / "train.bin")
    small = (*SMALL[:-2], "--data", "resumed", "--devices", "2", "--pp", "2", "--sampling")
    recipe = ("shuffled", "--schedule", "linear", "--warmup", "2", "--checkpoints", "saved")
    whole = train_with(place, *small, *recipe[:-2], "--steps", "6")
    first = train_with(place, *small, *recipe, "--steps", "6", "--save-every", "3")
    earliest = str(min(path for path in (place.folder / "saved").iterdir() if path.is_dir()))
    again = train_with(place, *small, *recipe[:-2], "--steps", "6", "--resume", earliest)
    assert first == whole
    assert again[-3:] == whole[-3:]
