"""``partita advise``: one page for a shape by name, a config.json, and a graph of ops."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import partita
from partita.errors import InvalidInputError
from partita.units import format_bytes

LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 32000,
    "max_position_embeddings": 2048,
}


def test_a_large_transformer_by_name_gets_plan_money_changes_and_files(
    tmp_path: Path, commands: Any
) -> None:
    done = commands.run(
        *("advise", "llama3-8b", "--cluster", "1xdgx-h100", "--tokens", "1T", "--json"),
        *("-o", "start", "--report", "advice.html"),
        folder=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    planned = partita.plan("llama3-8b", cluster="1xdgx-h100", tokens="1T")
    assert found["step_s"] == planned.to_json()["step_s"]  # the plan of plan, not another one
    assert found["training_s"] == pytest.approx(planned.to_json()["training_s"])
    assert found["training_price"] == pytest.approx(planned.to_json()["training_price"])
    assert found["training_j"] == pytest.approx(planned.to_json()["training_joules"])
    assert found["fits"].startswith("yes: ")
    assert "published runs" in found["error"]
    assert found["assumed"]["precision"].startswith("bf16")
    assert 1 <= len(found["changes"]) <= 3
    gains = [change["relative"] for change in found["changes"]]
    assert gains == sorted(gains)
    assert gains[-1] < 0
    assert len(found["alternatives"]) == 3
    starts = {start["what"]: start for start in found["starts"]}
    assert set(starts) == {"the plan", "megatron", "megatron by Slurm"}
    node = (tmp_path / "start" / "sbatch" / "start_node.sh").read_text()
    assert "bash -c 'cd ../megatron && source megatron_args.sh && exec python pretrain_gpt" in node
    assert isinstance(partita.load(tmp_path / "start" / "plan.json"), partita.Solution)
    told = partita.explain(
        str(tmp_path / "start" / "plan.json"), what_if=("bandwidth=2x", "microbatches=2x")
    )
    faster, other_batch = told.what_if  # by the search of large transformers, as the plan was
    assert -0.5 < faster.relative <= 0
    assert "--batch-size" in other_batch.note
    for start in starts.values():
        assert all((tmp_path / name).is_file() for name in start["written"])
    assert "What pays most" in (tmp_path / "advice.html").read_text(encoding="utf-8")


def test_the_page_of_a_configuration_answers_in_the_order_of_the_questions(
    tmp_path: Path, commands: Any
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA), encoding="utf-8")
    done = commands.run(
        *("advise", "config.json", "--cluster", "4xa100", "--batch-size", "64", "-q"),
        folder=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    heads = [line for line in done.stdout.splitlines() if line.endswith(":") and line[0] != " "]
    assert heads == [
        *("assumed:", "does it fit:", "the plan:", "how fast:", "what it costs:"),
        *("what bounds it:", "what pays most:", "what else there is:", "how to start it:"),
    ]
    assert list(tmp_path.iterdir()) == [tmp_path / "config.json"]  # nothing without -o


def test_a_graph_of_ops_is_advised_on_with_tokens_and_what_ifs() -> None:
    found = partita.advise(
        "gpt-small", cluster="2xa100+2xv100", planner="uniform", microbatches=8, tokens="1G"
    )
    assert found.training_s == pytest.approx(1e9 / found.tokens_per_s)
    assert found.training_price == pytest.approx(found.price_per_hour * found.training_s / 3600)
    assert {"replan", "microbatches=2x", "bandwidth=2x"} <= set(found.tried)
    assert any("--microbatches 16" in change.command for change in found.changes)
    assert "holds no code" in found.refusals["torchrun"]
    assert found.page().sections[0].title == "What was assumed"


def test_what_does_not_fit_exits_with_3_and_a_model_without_tokens_refuses_them(
    tmp_path: Path, commands: Any
) -> None:
    done = commands.run("advise", "llama3-70b", "--cluster", "1xv100", "-q", folder=tmp_path)
    assert done.returncode == 3
    assert "does not fit" in done.stderr
    with pytest.raises(InvalidInputError, match="--tokens"):
        partita.advise("resnet50", cluster="2xa100", planner="uniform", tokens="1G")


@pytest.mark.parametrize("model", ["llama3-8b", "gpt-small"])
def test_the_memory_that_is_said_is_the_one_of_the_picture(model: str) -> None:
    cluster = "2x8xh100" if model == "llama3-8b" else "2xa100"
    found = partita.advise(
        model, cluster=cluster, **({"iterations": 3} if model == "gpt-small" else {})
    )
    timeline = found.answer.summary.evaluation.timeline
    fullest = int(np.argmax(timeline.peak_bytes / timeline.limit_bytes))
    assert f"needs {format_bytes(float(timeline.peak_bytes[fullest]))}" in found.fit_line
    assert f"of the {format_bytes(float(timeline.limit_bytes[fullest]))} that" in found.fit_line
    assert ("for context and communicators" in found.fit_line) == (model == "llama3-8b")
