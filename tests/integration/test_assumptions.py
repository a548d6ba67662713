"""What an estimate assumed is printed, and plans leave some memory of GPUs free."""

import json
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest

from partita.core.graph import Graph
from partita.core.solution import Solution
from partita.documents import load

Run = Callable[..., tuple[int, str, str]]
SMALL = ("gpt3-small", "--scale", "0.1", "--sequence-length", "64")
BASIS = "float32 weights, bfloat16 arithmetic, 64 tokens per sample"
LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 100,
    "max_position_embeddings": 131072,
    "torch_dtype": "bfloat16",
}


@pytest.mark.parametrize(
    "command",
    [
        ("plan", *SMALL, "-c", "2xa100", "-p", "uniform"),
        ("compare", *SMALL, "-c", "2xa100", "-p", "uniform"),
        ("estimate", *SMALL, "-c", "2xa100"),
        ("profile", *SMALL, "--estimate", "a100"),
    ],
)
def test_commands_that_estimate_say_what_for(run: Run, command: tuple[str, ...]) -> None:
    code, out, err = run(*command, "--arithmetic", "bfloat16", "-q")
    assert code == 0, err
    assert f"estimated profile for a100: {BASIS}" in " ".join(out.split())


def test_json_says_what_an_estimate_assumed(run: Run) -> None:
    for command in (("plan", "-p", "uniform"), ("estimate",)):
        options = (*SMALL, "-c", "2xa100", "--microbatch-size", "3", "--json")
        code, out, err = run(command[0], *options, *command[1:])
        assert code == 0, err
        assert json.loads(out)["estimated"] == {
            "dtype": "float32",
            "arithmetic": "bfloat16",
            "tokens_per_sample": 64,
            "microbatch_size": 3,
        }
    code, out, _ = run("plan", "six-node-chain", "-p", "uniform", "--json")
    assert json.loads(out)["estimated"] is None


def test_a_configuration_is_estimated_at_its_own_dtype_and_length(run: Run, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    code, out, err = run("profile", "config.json", "--estimate", "a100", "-o", "g.json")
    assert code == 0, err
    assert "bfloat16 weights, bfloat16 arithmetic, 4,096 tokens per sample, 4 samples" in out
    graph = load(tmp_path / "g.json")
    assert isinstance(graph, Graph)
    options = graph.annotations["model"]["options"]
    assert (options["dtype"], options["sequence_length"]) == ("bfloat16", 4096)
    code, out, err = run("plan", "config.json", "-c", "2xa100", "-p", "uniform", "-q")
    assert code == 0, err
    assert "4,096 tokens per sample" in out
    given = ("--sequence-length", "256", "--dtype", "float32")
    code, out, err = run("profile", "config.json", "--estimate", "a100", *given, "-o", "h.json")
    assert code == 0, err
    assert "float32 weights, float32 arithmetic, 256 tokens per sample" in out


def test_what_is_measured_stays_short_and_says_so(run: Run, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    code, out, err = run("profile", "config.json", "--rounds", "1", "--no-cache", "-q")
    assert code == 0, err
    assert "batch size 4 of 128 tokens in float32" in out


def test_plans_for_gpus_leave_a_reserve_and_say_so(run: Run, tmp_path: Path) -> None:
    code, out, err = run("plan", "gpt-small", "-c", "2xa100", "-p", "uniform", "-q")
    assert code == 0, err
    assert "memory limit 77.3 GB of 85.9 GB: 10 % reserved" in out
    found = load(tmp_path / "gpt-small.plan.json")
    assert isinstance(found, Solution)
    assert found.problem.objective.memory_factor == 0.9


@pytest.mark.parametrize(
    ("options", "factor"),
    [
        (("-c", "2xa100"), 0.9),
        (("-c", "2xa100", "--reserve", "0.2"), 0.8),
        (("-c", "2xa100", "--reserve", "0"), 1.0),
        (("-c", "2xa100", "--memory-factor", "1"), 1.0),
        (("-c", "2xa100", "--memory-factor", "0.5"), 0.5),
        (("--devices", "2"), 1.0),
        (("-c", "2xa100", "--objective", "pipedream"), 1.0),
    ],
)
def test_the_reserve_is_a_default_of_gpus_alone(
    run: Run, options: tuple[str, ...], factor: float
) -> None:
    code, out, err = run("plan", "gpt-small", *options, "-p", "uniform", "--json")
    assert code == 0, err
    assert json.loads(out)["memory_factor"] == factor


def test_problems_that_come_with_their_limits_are_taken_at_their_word(run: Run) -> None:
    for name, planner in (("six-node-chain", "uniform"), ("baechi-fig1", "m-etf")):
        code, out, err = run("plan", name, "-p", planner, "--json")
        assert code == 0, err
        assert json.loads(out)["memory_factor"] == 1.0


def test_a_plan_that_fills_a_gpu_is_refused_with_the_reserve(run: Run) -> None:
    asked = ("plan", "gpt-small", "-c", "1xa100", "-p", "single", "--json")
    code, out, err = run(*asked)
    assert code == 0, err
    need = json.loads(out)["devices"][0]["peak_bytes"]
    tight = f"memory={need / (80 * 2**30) / 0.95:.4f}x"  # 95 % full
    code, _, err = run(*asked, "--what-if", tight)
    assert code == 3
    assert "--memory-factor" in err
    assert run(*asked, "--what-if", tight, "--reserve", "0.04")[0] == 0


def test_reserve_and_memory_factor_exclude_each_other(run: Run) -> None:
    code, _, err = run("plan", "gpt-small", "--reserve", "0.1", "--memory-factor", "0.9")
    assert code == 2
    assert "give one of them" in err
    assert run("plan", "gpt-small", "--reserve", "1")[0] == 2


@pytest.mark.parametrize(
    ("devices", "given", "arithmetic"),
    [
        (("-c", "2xa100"), (), "bfloat16"),
        (("-c", "2xh100"), (), "bfloat16"),
        (("-c", "2xv100"), (), "float32"),
        (("-c", "a100+v100"), (), "float32"),
        (("--devices", "2"), (), "float32"),
        (("-c", "2xa100"), ("--precision", "fp32"), "float32"),
        (("-c", "2xa100"), ("--precision", "tf32"), "tfloat32"),
        (("-c", "2xa100"), ("--dtype", "float32"), "float32"),
        (("-c", "2xa100"), ("--arithmetic", "tfloat32"), "tfloat32"),
    ],
)
def test_arithmetic_is_what_the_devices_are_used_with_unless_it_is_named(
    run: Run, devices: tuple[str, ...], given: tuple[str, ...], arithmetic: str
) -> None:
    code, out, err = run("plan", *SMALL, *devices, *given, "-p", "uniform", "-q")
    assert code == 0, err
    said = " ".join(out.split())
    assert f"float32 weights, {arithmetic} arithmetic, 64 tokens" in said
    is_usual = arithmetic == "bfloat16" and not given
    assert ("what such devices are used with" in said) == is_usual


@pytest.mark.parametrize("cluster", ["3xa100", "2x8xa100"])
def test_estimate_and_plan_give_the_same_answer(run: Run, cluster: str) -> None:
    asked = (*SMALL, "-c", cluster)
    code, out, err = run("estimate", *asked, "--json")
    assert code == 0, err
    found = json.loads(out)
    program, *words = shlex.split(found["plan_command"])
    assert program == "partita"
    code, out, err = run(*words, "--json")
    assert code == 0, err
    planned = json.loads(out)
    assert found["best"]["step_s"] == planned["step_s"]
    samples = planned["step_s"] * planned["samples_per_s"]
    assert found["batch_size"] == pytest.approx(samples)
    assert planned["step_s"] <= min(t["step_s"] for t in found["trials"] if t["fits"])
    code, out, err = run("estimate", *asked, "-q")
    assert code == 0, err
    assert f"  {found['plan_command']}" in out


def test_estimate_names_no_such_command_where_there_is_nothing_to_search(run: Run) -> None:
    sharded = (*SMALL, "--shard", "optimizer")  # plan has no such option
    for model, cluster in ((sharded, "2xa100"), (("resnet50",), "2xa100")):
        code, out, err = run("estimate", *model, "-c", cluster, "--json")
        assert code == 0, err
        assert json.loads(out)["plan_command"] is None
