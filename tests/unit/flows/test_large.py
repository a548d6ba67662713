"""Large transformers by name: listed, estimated as they are planned, and refused in one line."""

import json

import pytest

import partita
from partita.errors import InvalidInputError
from partita.flows.large import LargePlanResult


def test_large_models_are_listed_with_the_others():
    found = partita.list_models("large")
    assert not found.models
    names = [model["name"] for model in found.to_json()]
    assert "llama3-405b" in names
    (mixtral,) = partita.list_models("mixtral-8x7b").large
    assert mixtral["active_parameters"] < mixtral["parameters"]
    assert (mixtral["experts_per_token"], mixtral["experts"]) == (2, 8)
    with pytest.raises(InvalidInputError, match="llama3-8b"):
        partita.list_models("llama3-9b")


def test_estimate_calls_the_search_of_plan():
    options = {"cluster": "dgx-h100", "batch_size": 64}
    estimated = partita.estimate("llama3-8b", **options)
    planned = partita.plan("llama3-8b", **options)
    assert isinstance(estimated, LargePlanResult)
    assert estimated.best.title == planned.best.title
    assert estimated.best.step_s == planned.best.step_s
    # Eight boards that compute nearly all the time: a little less than their 700 W limit each.
    watts = planned.joules_per_token * planned.tokens_per_s
    assert 0.9 * 8 * 700 < watts <= 8 * 700
    assert planned.to_json()["joules_per_token"] == planned.joules_per_token
    fixed = partita.estimate("LLAMA3-8B", tp="2", **options)
    assert fixed.best.layout.tp == 2
    with pytest.raises(InvalidInputError, match="--shard is for models that are planned op by op"):
        partita.estimate("llama3-8b", shard="optimizer", **options)
    with pytest.raises(InvalidInputError, match="--tp is for large transformers"):
        partita.estimate("gpt3-xl", tp="2")


def test_small_configurations_are_estimated_op_by_op(tmp_path):
    config = {
        "model_type": "llama",
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 128,
        "vocab_size": 256,
    }
    file = tmp_path / "config.json"
    file.write_text(json.dumps(config))
    assert not isinstance(partita.estimate(str(file), cluster="2xa100"), LargePlanResult)
    large = {**config, "hidden_size": 4096, "intermediate_size": 16384, "num_hidden_layers": 16}
    file.write_text(json.dumps({**large, "num_attention_heads": 32, "num_key_value_heads": 8}))
    assert isinstance(partita.estimate(str(file), cluster="8xa100"), LargePlanResult)


def test_classes_of_transformers_are_planned_by_shape():
    pytest.importorskip("transformers")
    found = partita.estimate("hf:MixtralConfig", cluster="2xdgx-h100", batch_size=128)
    assert isinstance(found, LargePlanResult)
    assert found.task.shape.experts == 8


def test_a_wrong_name_is_answered_with_near_ones():
    with pytest.raises(InvalidInputError, match="did you mean 'llama3-8b'"):
        partita.plan("llama-3-8b", cluster="dgx-h100")
