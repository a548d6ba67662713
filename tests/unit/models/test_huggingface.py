"""Hugging Face models from tiny configurations."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from partita.capture.sources import SourceOptions, load_source
from partita.errors import FormatError, InvalidInputError, UnsupportedError
from partita.models.huggingface import (
    TINY_CONFIGURATIONS,
    build_hugging_face,
    hugging_face_inputs,
    hugging_face_loss,
    usual_length,
)
from partita.models.huggingface_config import (
    changed_configuration,
    named_configuration,
    read_configuration,
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


@pytest.mark.parametrize("name", TINY_CONFIGURATIONS)
def test_without_a_class_the_usual_training_task_is_built(name: str) -> None:
    tiny = dict(TINY_CONFIGURATIONS[name])
    architectures = tiny.pop("architectures")
    assert [type(build_hugging_face(tiny, device="meta")).__name__] == architectures


def test_a_configuration_without_a_type_is_refused() -> None:
    with pytest.raises(InvalidInputError, match="model_type"):
        build_hugging_face({"hidden_size": 32})


def test_an_unknown_type_or_class_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="'nope'"):
        build_hugging_face({"model_type": "nope"})
    with pytest.raises(UnsupportedError, match="'Nope'"):
        build_hugging_face({"model_type": "llama", "architectures": ["Nope"]})


def test_what_transformers_refuses_is_one_of_our_errors() -> None:
    with pytest.raises(InvalidInputError, match=r"refuses.*configuration"):
        build_hugging_face({**TINY_CONFIGURATIONS["tiny-llama"], "hidden_size": 30})


def test_samples_longer_than_the_model_reads_are_refused() -> None:
    model = build_hugging_face(TINY_CONFIGURATIONS["tiny-gpt2"], device="meta")
    assert usual_length(model) == 64
    with pytest.raises(InvalidInputError, match="more than the 64"):
        hugging_face_inputs(model, 1, sequence_length=65, device="meta")


@pytest.mark.parametrize("name", ["tiny-llama", "tiny-gpt2", "tiny-bert", "tiny-whisper"])
def test_a_model_on_meta_runs_on_generated_samples(name: str) -> None:
    model = build_hugging_face(TINY_CONFIGURATIONS[name], device="meta")
    batch = hugging_face_inputs(model, 2, device="meta")
    assert model(**batch.kwargs).logits.shape == (2, 16, 100)


def test_named_configurations_are_tiny_ones_and_classes() -> None:
    assert named_configuration("llama") == named_configuration("tiny-llama")
    assert named_configuration("LlamaConfig") == {"model_type": "llama"}
    with pytest.raises(InvalidInputError, match="nothing is downloaded"):
        named_configuration("some/model")
    with pytest.raises(UnsupportedError, match="NopeConfig"):
        named_configuration("NopeConfig")


def test_options_change_a_configuration_and_must_exist() -> None:
    base = TINY_CONFIGURATIONS["tiny-llama"]
    found = changed_configuration(base, "hidden_size=64,hidden_act=relu,tie_word_embeddings=true")
    assert found == {
        **base,
        "hidden_size": 64,
        "hidden_act": "relu",
        "tie_word_embeddings": True,
    }
    with pytest.raises(InvalidInputError, match="did you mean 'hidden_size'"):
        changed_configuration(base, "hidden_sise=64")
    with pytest.raises(InvalidInputError, match="name=value"):
        changed_configuration(base, "hidden_size")


def test_commas_inside_of_a_value_do_not_end_it() -> None:
    base = {"model_type": "swin"}
    text = 'depths=[2,2], num_heads=[2,4],id2label={"0":"a, [b","1":"c"},embed_dim=16'
    assert changed_configuration(base, text) == {
        **base,
        "depths": [2, 2],
        "num_heads": [2, 4],
        "id2label": {"0": "a, [b", "1": "c"},
        "embed_dim": 16,
    }


def test_a_model_of_images_and_texts_gets_images_of_its_inner_configuration() -> None:
    inner = '{"num_hidden_layers":1,"hidden_size":16,"intermediate_size":16,"image_size":32'
    text = f'hf:CLIPConfig?vision_config={inner},"patch_size":16,"num_attention_heads":2}}'
    source = load_source(text, SourceOptions(batch_size=2))
    example = source.example(0)
    assert example.kwargs["pixel_values"].shape == (2, 3, 32, 32)
    assert source.loss is not None
    loss = source.loss(source.model(**example.kwargs), example.labels)
    assert torch.isfinite(loss)


def test_a_configuration_that_does_not_say_its_sizes_is_refused_in_one_line() -> None:
    config = SimpleNamespace(model_type="odd")
    model = SimpleNamespace(config=config, main_input_name="pixel_values")
    with pytest.raises(UnsupportedError, match="num_channels"):
        hugging_face_inputs(model, 2)


def test_a_type_without_a_usual_task_is_told_which_have_one() -> None:
    with pytest.raises(UnsupportedError, match=r"classification.*others"):
        build_hugging_face({"model_type": "blip"}, device="meta")


@pytest.mark.parametrize(
    ("text", "reason"),
    [("{", "not valid JSON"), ("[]", "model_type"), ('{"format": "partita.graph"}', "document")],
)
def test_other_files_are_no_configurations(text: str, reason: str) -> None:
    with pytest.raises(FormatError, match=reason):
        read_configuration(text)


@pytest.mark.parametrize("place", ["here", "here/config.json", "hf:here?n_layer=1"])
def test_a_source_is_read_from_a_directory_or_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    (tmp_path / "here").mkdir()
    text = json.dumps(dict(TINY_CONFIGURATIONS["tiny-gpt2"]))
    (tmp_path / "here" / "config.json").write_text(text)
    monkeypatch.chdir(tmp_path)
    source = load_source(place, SourceOptions(batch_size=3, sequence_length=8))
    assert source.name == "gpt2"
    assert source.example(0).kwargs["input_ids"].shape == (3, 8)
    assert len(source.model.transformer.h) == (1 if "?" in place else 2)
