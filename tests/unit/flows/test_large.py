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


def test_memory_is_asked_for_once_and_never_more_than_there_is():
    options = {"cluster": "dgx-h100", "batch_size": 64}
    found = partita.plan("llama3-8b", memory_factor=5.0, **options)
    assert found.best.limit_bytes == 80e9
    assert "memory factor above 1 is clipped to 1" in found.remarks
    with pytest.raises(InvalidInputError, match="give one of them"):
        partita.plan("llama3-8b", memory_factor=0.5, reserve=0.3, **options)


def test_microbatches_are_kept():
    options = {"cluster": "dgx-h100"}
    found = partita.plan("llama3-8b", batch_size=64, microbatches=16, **options)
    assert (found.best.layout.microbatch, found.plan.num_microbatches) == (4, 16)
    alone = partita.plan("llama3-8b", microbatches=64, **options)
    assert (alone.task.batch, alone.plan.num_microbatches) == (64, 64)
    with pytest.raises(InvalidInputError, match="17 microbatches"):
        partita.plan("llama3-8b", batch_size=64, microbatches=17, **options)


def test_free_memory_is_that_of_the_type_that_is_fullest():
    found = partita.plan("llama3-8b", cluster="dgx-h100+8xl40s", batch_size=128)
    by_type = {device.type: device.memory_bytes for device in found.cluster.devices}
    for choice in (found.best, *found.others):
        assert choice.limit_bytes == pytest.approx(0.92 * by_type[choice.device_type])
        assert choice.total_bytes <= choice.limit_bytes


def test_idle_devices_are_named_and_the_cheapest_plan_is_found():
    found = partita.plan("llama3-8b", cluster="5xdgx-h100", batch_size=128)
    assert any("8 of 40 devices stay idle" in remark for remark in found.remarks)
    assert 0.5 < found.mfu < 0.7
    cheap = partita.plan("llama3-8b", cluster="5xdgx-h100", batch_size=128, objective="cost")
    price = cheap.price_per_hour * cheap.best.step_s
    assert price < found.price_per_hour * found.best.step_s
    with pytest.raises(InvalidInputError, match="--objective is for models that are planned op"):
        partita.plan("llama3-8b", cluster="dgx-h100", objective="latency")


def test_degrees_that_leave_devices_over_are_not_blamed_on_the_batch():
    with pytest.raises(InvalidInputError, match="covers 56 of 64 devices"):
        partita.plan("llama3-70b", cluster="8xdgx-h100", batch_size=128, pp="7", tp="8", dp="1")
