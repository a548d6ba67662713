"""``partita estimate`` end to end: verdict, exit codes, and suggestions that hold when typed."""

import json
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest

from partita.core.solution import Solution
from partita.documents import load

Run = Callable[..., tuple[int, str, str]]
MODEL = ("gpt3-small", "--scale", "0.25", "--sequence-length", "64")


def test_a_model_that_fits_says_so_first_and_writes_its_plan(run: Run, tmp_path: Path) -> None:
    code, out, err = run("estimate", *MODEL, "-c", "2xa100", "-q", "-o", "best.json")
    assert code == 0, err
    assert out.startswith("fits: ")
    assert "activations" in out
    solution = load(tmp_path / "best.json")
    assert isinstance(solution, Solution)
    assert run("simulate", "best.json", "-q")[0] == 0


def test_suggested_commands_fit_when_typed(run: Run) -> None:
    asked = ["estimate", *MODEL, "--cluster", "2xt4", "--memory-factor", "0.004", "--json"]
    code, out, err = run(*asked)
    assert code == 3
    assert "does not fit on 2xt4" in err
    found = json.loads(out)
    assert found["verdict"].startswith("does not fit")
    assert not found["fits"]
    assert found["changes"]
    for change in found["changes"]:
        program, *words = shlex.split(change["command"])
        assert program == "partita"
        code, out, err = run(*words, "--json")
        assert code == 0, f"{change['command']}: {err}"
        typed = json.loads(out)
        assert typed["fits"]
        assert typed["batch_size"] == change["batch_size"]
        tried = {trial["plan"]: trial for trial in typed["trials"]}
        assert tried[change["trial"]["plan"]] == change["trial"]
        assert typed["best"]["step_s"] <= change["trial"]["step_s"] * (1 + 1e-9)


def test_what_only_the_search_finds_fits_too(run: Run) -> None:
    asked = ("estimate", *MODEL, "--cluster", "2xt4", "--memory-factor", "0.006", "--json")
    code, out, err = run(*asked)
    assert code == 0, err
    found = json.loads(out)
    assert [trial["fits"] for trial in found["trials"]] == [True] + [False] * 5
    assert found["verdict"].startswith("fits: ")
    assert "(searched)" in found["best"]["plan"]


def test_without_json_the_suggestions_are_printed_and_it_exits_with_3(run: Run) -> None:
    code, out, _ = run("estimate", *MODEL, "-c", "1xt4", "--memory-factor", "0.004", "-q")
    assert code == 3
    assert out.startswith("does not fit: ")
    assert "partita estimate gpt3-small" in out
    assert "what makes it fit (each was tried)" in out


def test_several_types_and_mixed_precision(run: Run) -> None:
    code, out, err = run(
        "estimate", *MODEL, "-c", "1xa100+1xv100", "--arithmetic", "float16", "--json"
    )
    assert code == 0, err
    assert {device["device"] for device in json.loads(out)["best"]["devices"]} <= {
        "host0/gpu0",
        "host1/gpu0",
    }


def test_a_saved_graph_and_a_built_in_example_are_models_too(run: Run) -> None:
    code, _, err = run("profile", *MODEL, "--estimate", "a100", "--batch-size", "2", "-o", "g.json")
    assert code == 0, err
    code, out, err = run("estimate", "g.json", "-c", "2xa100", "--batch-size", "8", "--json")
    assert code == 0, err
    assert json.loads(out)["best"]["microbatch_size"] == 2
    assert run("estimate", "gpt-small", "-c", "2xa100", "-q")[0] == 0
    code, _, err = run("estimate", "g.json", "-c", "2xa100", "--dtype", "float16")
    assert code == 2
    assert "--dtype is for models that are estimated" in err


def test_sharding_of_all_plans_and_inference(run: Run) -> None:
    code, out, err = run("estimate", *MODEL, "-c", "4xa100", "--shard", "gradients", "--json")
    assert code == 0, err
    shards = {t["shard"] for t in json.loads(out)["trials"] if t["replicas"] > 1}
    assert shards == {"gradients", "parameters"}
    code, out, err = run("estimate", *MODEL, "-c", "4xa100", "--mode", "inference", "--json")
    assert code == 0, err
    assert all(d["gradients_bytes"] == 0 for d in json.loads(out)["best"]["devices"])


def test_a_policy_of_dtypes_says_what_memory_holds(run: Run) -> None:
    policy = ("--precision", "bf16-fp32-grads", "--shard", "optimizer")
    code, out, err = run("estimate", *MODEL, "-c", "4xa100", *policy, "--json")
    assert code == 0, err
    found = json.loads(out)
    trial = next(t for t in found["trials"] if t["shard"] == "optimizer" and t["stages"] == 1)
    held = trial["devices"][0]
    weights = held["weights_bytes"]
    assert held["gradients_bytes"] == 2 * weights
    assert held["master_bytes"] == pytest.approx(2 * weights / 4)
    assert held["state_bytes"] == pytest.approx(4 * weights / 4)
    parts = ("weights", "gradients", "master", "state", "activations", "logits", "buffers")
    parts = (*parts, "workspace")
    whole = sum(held[f"{part}_bytes"] for part in (*parts, "fixed", "free"))
    assert whole == pytest.approx(80 * 2**30)
    code, out, err = run("estimate", *MODEL, "-c", "4xa100", *policy)
    assert "bfloat16 weights, float32 gradients, float32 master copy; reduced in float32" in (
        " ".join(out.split())
    )
    assert "buffers" in out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("no-such-model", "-c", "2xa100"), "there is no model"),
        ((*MODEL, "-c", "2xa100", "--batch-size", "7", "--microbatch-size", "2"), "cannot be"),
        ((*MODEL, "-c", "2xa100", "--batch-size", "9", "--microbatches", "2"), "cannot be"),
        ((*MODEL, "-c", "2xv100", "--arithmetic", "bfloat16"), "no peak rate for bfloat16"),
        ((*MODEL, "-c", "2xa100+2xv100", "--precision", "bf16"), "--precision fp32 or fp16"),
        ((*MODEL, "-c", "2xa100", "--precision", "bf61"), "did you mean 'bf16'"),
        ((*MODEL, "-c", "2xa100", "--precision", "bf16", "--dtype", "float32"), "contradicts"),
        ((*MODEL, "-c", "2xa100", "--precision", "tf32", "--arithmetic", "float32"), "contradicts"),
    ],
)
def test_bad_input_is_one_line(run: Run, arguments: tuple[str, ...], said: str) -> None:
    code, _, err = run("estimate", *arguments, "-q")
    assert code == 2
    assert said in err
    assert err.count("\n") == 1
