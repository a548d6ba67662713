"""Large transformers by name: listed, estimated as they are planned, and refused in one line."""

import json

import pytest

import partita
from partita.cli.large import show_large
from partita.cost.tables import GPU_RESERVE
from partita.errors import InfeasibleError, InvalidInputError
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
    with pytest.raises(InvalidInputError, match="--shard"):
        partita.estimate("llama3-8b", shard="optimizer", **options)
    with pytest.raises(InvalidInputError, match="--tp"):
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
    file = tmp_path / "mine.json"
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
    assert any("routing as learned" in remark for remark in found.remarks)


def test_a_wrong_name_is_answered_with_near_ones():
    with pytest.raises(InvalidInputError, match="did you mean 'llama3-8b'"):
        partita.plan("llama-3-8b", cluster="dgx-h100")


def test_memory_is_asked_for_once_and_never_more_than_there_is():
    options = {"cluster": "dgx-h100", "batch_size": 64}
    found = partita.plan("llama3-8b", memory_factor=5.0, **options)
    assert found.best.limit_bytes == 81559 * 2**20
    assert "memory factor above 1 is clipped to 1" in found.remarks
    with pytest.raises(InvalidInputError, match=r"give.*them"):
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
        assert choice.limit_bytes == pytest.approx((1 - GPU_RESERVE) * by_type[choice.device_type])
        assert choice.total_bytes <= choice.limit_bytes


def test_idle_devices_are_named_and_the_cheapest_plan_is_found():
    found = partita.plan("llama3-8b", cluster="5xdgx-h100", batch_size=128, pp="1")
    assert any("8 of 40 devices stay idle" in remark for remark in found.remarks)
    assert 0.5 < found.mfu < 0.7
    cheap = partita.plan("llama3-8b", cluster="5xdgx-h100", batch_size=128, objective="cost")
    price = cheap.price_per_hour * cheap.best.step_s
    assert price < found.price_per_hour * found.best.step_s
    with pytest.raises(InvalidInputError, match=r"--objective.*planned"):
        partita.plan("llama3-8b", cluster="dgx-h100", objective="latency")


def test_degrees_that_leave_devices_over_are_not_blamed_on_the_batch():
    with pytest.raises(InvalidInputError, match="covers 56 of 64 devices"):
        partita.plan("llama3-70b", cluster="8xdgx-h100", batch_size=128, pp="7", tp="8", dp="1")


def test_state_and_activations_go_to_host_memory_and_that_takes_time():
    options = {"cluster": "dgx-h100", "batch_size": 32}
    with pytest.raises(InfeasibleError, match="--offload-optimizer 1"):
        partita.plan("llama3-70b", **options)
    away = partita.plan("llama3-70b", offload_optimizer="1", **options)
    assert away.best.memory["state"] == away.best.memory["master"] == 0
    assert away.best.parts["optimizer_s"] > 0.1 * away.best.step_s
    assert away.plan.stages[0].offload_optimizer == 1
    assert away.accuracy is None
    # Searched, it is used only where it pays.
    small = partita.plan("llama3-8b", offload_optimizer="auto", **options)
    assert small.best.layout.offload_optimizer == 0
    here, gone = (
        partita.plan("llama3-8b", tp="1", cp="1", pp="1", offload_activations=share, **options)
        for share in ("0", "0.5")
    )
    assert gone.best.parts["offload_s"] > 0
    assert gone.best.step_s > here.best.step_s
    with pytest.raises(InvalidInputError, match=r"expected.*share.*0.*1"):
        partita.plan("llama3-8b", offload_optimizer="2", **options)


def test_sets_kinds_and_degrees_of_experts_are_kept():
    options = {"cluster": "dgx-h100", "batch_size": 32}
    both = partita.plan("llama3-8b", recompute="mlp+norm", **options)
    assert both.best.layout.recompute == ("mlp", "norm")
    assert both.plan.stages[0].recompute == "mlp+norm"
    for text, words in (
        ("mlp+full", "recompute"),
        ("mpl", "recompute"),
        ("experts", "has none to recompute"),
    ):
        with pytest.raises(InvalidInputError, match=words):
            partita.plan("llama3-8b", recompute=text, **options)
    swapped = partita.plan("llama3-8b", cp="2", cp_kind="all-to-all", **options)
    assert swapped.best.layout.cp_kind == "all-to-all"
    assert not partita.plan("llama3-8b", tp="2", sp="no", **options).best.layout.sp
    options["cluster"] = "2xdgx-h100"
    wide = partita.plan("mixtral-8x7b", ep="4", etp="2", **options)
    assert (wide.best.layout.ep, wide.best.layout.etp) == (4, 2)
    mixed = partita.plan("llama3-8b", cluster="dgx-h100+dgx-a100", cp="2", cp_kind="all-to-all")
    for choice in (mixed.best, *mixed.others):
        kinds = {place.layout.cp_kind for lane in choice.lanes for place in lane.places}
        assert kinds == {"all-to-all"}


def test_hosts_are_left_out_and_releases_found_by_their_name():
    found = partita.plan(
        "meta-llama/Llama-3.1-70B-Instruct",
        cluster="8xdgx-h100",
        batch_size=128,
        what_if=("-host3",),
    )
    assert found.task.shape.name == "llama3-70b"
    assert len(found.cluster) == 56


def test_simulate_counts_logits_by_themselves():
    found = partita.plan("llama3-8b", cluster="dgx-h100", batch_size=32, tp="1", pp="2", vp="1")
    memory = partita.simulate(found).memory
    # Those of the last stage, as the closed form has them; the first has none.
    assert (memory.logits > 0).tolist() == [False] * 4 + [True] * 4
    tokens = 8192 // found.best.layout.cp
    assert memory.logits[-1] == pytest.approx(tokens * 128256 * 8, rel=0.01)
    parts = memory.activations + memory.logits + memory.buffers + memory.workspace
    held = memory.weights + memory.gradients + memory.master + memory.state
    assert (held + parts).tolist() == pytest.approx(memory.peak.tolist())


def test_a_plan_for_a_framework_is_held_against_the_best_of_the_others(capsys):
    job = {"cluster": "4xh100", "batch_size": 16}
    plan = partita.plan("llama3-8b", framework="torchtitan", **job)
    other = partita.plan("llama3-8b", framework=plan.rival.layout.framework, **job)
    assert plan.rival == other.best
    assert plan.rival.step_s < plan.best.step_s
    assert other.rival.step_s <= plan.best.step_s
    paid = plan.best.step_s / other.best.step_s - 1
    for each in (plan, other):
        show_large(each)
    lines = capsys.readouterr().out
    assert f"a plan that torchtitan can run: {paid:.1%} slower than the best for" in lines
    assert f"a plan that {other.task.framework} can run: no other framework is faster" in lines
