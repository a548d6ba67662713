"""Hugging Face models from tiny configurations."""

import pytest
import torch

from partita.errors import InvalidInputError
from partita.models.huggingface import (
    TINY_CONFIGURATIONS,
    build_hugging_face,
    hugging_face_inputs,
    hugging_face_loss,
)

pytest.importorskip("transformers")


@pytest.mark.parametrize("name", TINY_CONFIGURATIONS)
def test_a_tiny_model_trains(name: str) -> None:
    model = build_hugging_face(TINY_CONFIGURATIONS[name])
    assert model.training
    batch = hugging_face_inputs(model, 2)
    loss = hugging_face_loss(model(*batch.args, **batch.kwargs), batch.labels)
    loss.backward()
    assert torch.isfinite(loss)
    grads = [parameter.grad for parameter in model.parameters() if parameter.requires_grad]
    assert all(grad is None or torch.isfinite(grad).all() for grad in grads)


@pytest.mark.parametrize("name", ["tiny-llama", "tiny-whisper"])
def test_the_same_seed_gives_the_same_weights(name: str) -> None:
    first, second, other = (
        build_hugging_face(TINY_CONFIGURATIONS[name], seed=seed).state_dict() for seed in (1, 1, 2)
    )
    assert all(torch.equal(first[key], second[key]) for key in first)
    assert not all(torch.equal(first[key], other[key]) for key in first)


def test_on_meta_nothing_is_allocated() -> None:
    model = build_hugging_face(TINY_CONFIGURATIONS["tiny-qwen2"], device="meta")
    assert all(parameter.is_meta for parameter in model.parameters())


def test_a_configuration_without_a_class_is_refused() -> None:
    with pytest.raises(InvalidInputError, match="architectures"):
        build_hugging_face({"model_type": "llama"})
