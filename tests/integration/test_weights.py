"""``partita train`` on a directory of Hugging Face that has weights, as a user types it."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.slow
SMALL = (
    *("--sequence-length", "8", "--microbatch-size", "2", "--microbatches", "4"),
    *("--steps", "3", "--rounds", "1", "--optimizer", "sgd"),
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a directory of Hugging Face, of three files, and the same weights."""
    transformers = pytest.importorskip("transformers")
    path = tmp_path_factory.mktemp("weights")
    torch.manual_seed(77)
    config = transformers.LlamaConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=3,
        num_attention_heads=4,
        vocab_size=500,
        max_position_embeddings=64,
    )
    model = transformers.LlamaForCausalLM(config)
    model.save_pretrained(path / "llama", max_shard_size="300KB")
    torch.save({"model": model.state_dict()}, path / "llama.pt")
    return path


def train(commands: Any, folder: Path, *arguments: str, code: int = 0) -> Any:
    done = commands.run("train", "llama", *SMALL, *arguments, "--json", folder=folder)
    assert done.returncode == code, done.stderr
    return json.loads(done.stdout) if not code else done.stderr


def test_ranks_read_their_own_weights_of_a_directory_and_train_as_one_process(
    commands: Any, folder: Path
) -> None:
    three = ("--devices", "3", "--pp", "3", "--launcher", "torchrun")
    found = train(commands, folder, *three)
    files = sorted((folder / "llama").glob("*.safetensors*"))
    assert len(files) == 4  # three, and the index
    assert found["weights"]["path"] == str(folder / "llama" / "model.safetensors.index.json")
    size = sum(file.stat().st_size for file in files)
    assert 0.98 * size < found["weights"]["bytes_read"] <= 1.1 * size
    single = ("--devices", "1", "--weights", "llama.pt", "--check")
    one = train(commands, folder, *single)
    assert one["check"]["equal"]
    assert found["losses"] == pytest.approx(one["losses"], rel=1e-5)
    drawn = train(commands, folder, "--devices", "1", "--weights", "none")
    assert drawn["weights"] is None
    assert abs(drawn["losses"][0] - one["losses"][0]) > 1e-3


def test_weights_that_are_not_there_or_would_be_ignored_are_an_error_in_a_line(
    commands: Any, folder: Path
) -> None:
    said = train(commands, folder, "--weights", "nowhere", code=2)
    assert "--weights nowhere: there is no such file or directory" in said
    torch.save({"lm_head.weight": torch.ones(500, 64)}, folder / "head.pt")
    said = train(commands, folder, "--weights", "head.pt", "--devices", "1", code=2)
    assert "head.pt lacks 29 tensors of the model: model.embed_tokens.weight" in said
    assert said.rstrip().endswith("; --weights none draws them")
    said = train(commands, folder, "--weights", "llama.pt", "--emulate", code=2)
    assert "--weights: an emulated run computes nothing" in said
