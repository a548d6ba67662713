"""Shapes by name and from configurations have the published numbers of parameters."""

import json

import pytest

from partita.errors import InvalidInputError
from partita.transformer.named import (
    find_shape,
    named_shapes,
    near_shape,
    shape_from_config,
)

# Billions of parameters as the models' cards give them, total and active.
PUBLISHED = {
    "llama2-7b": (6.74, 6.74),
    "llama2-70b": (69.0, 69.0),
    "llama3-8b": (8.03, 8.03),
    "llama3-70b": (70.6, 70.6),
    "llama3-405b": (405.9, 405.9),
    "qwen3-8b": (8.19, 8.19),
    "qwen3-32b": (32.8, 32.8),
    "qwen3-30b-a3b": (30.5, 3.3),
    "qwen3-235b-a22b": (235.1, 22.2),
    "mixtral-8x7b": (46.7, 12.9),
    "mixtral-8x22b": (140.6, 39.1),
    "deepseek-v3": (671.0, 37.6),
    "gpt-oss-120b": (116.8, 5.7),
    "gemma2-9b": (9.24, 9.24),
    "gpt-175b": (174.6, 174.6),
    "gpt-1t": (1008.0, 1008.0),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_are_the_published_ones(name):
    total, active = PUBLISHED[name]
    shape = named_shapes()[name].shape
    assert shape.params / 1e9 == pytest.approx(total, rel=0.015)
    assert shape.active_params / 1e9 == pytest.approx(active, rel=0.1)


LLAMA = {
    "model_type": "llama",
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "vocab_size": 128256,
}
DEEPSEEK = {
    "model_type": "deepseek_v3",
    "hidden_size": 7168,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "first_k_dense_replace": 3,
    "vocab_size": 129280,
}


MIXTRAL = {
    "model_type": "mixtral",
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "sliding_window": None,
    "vocab_size": 32000,
}
GPT_OSS = {
    "model_type": "gpt_oss",
    "hidden_size": 2880,
    "num_hidden_layers": 36,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "intermediate_size": 2880,
    "num_local_experts": 128,
    "experts_per_token": 4,
    "num_experts_per_tok": 4,
    "sliding_window": 128,
    "layer_types": ["sliding_attention", "full_attention"] * 18,
    "vocab_size": 201088,
}
GEMMA3 = {
    "model_type": "gemma3",
    "vision_config": {"hidden_size": 1152},
    "text_config": {
        "model_type": "gemma3_text",
        "hidden_size": 5376,
        "num_hidden_layers": 62,
        "num_attention_heads": 32,
        "num_key_value_heads": 16,
        "head_dim": 128,
        "intermediate_size": 21504,
        "sliding_window": 1024,
        "sliding_window_pattern": 6,
        "vocab_size": 262208,
    },
}
CONFIGURATIONS = [
    (LLAMA, "llama3-8b"),
    (DEEPSEEK, "deepseek-v3"),
    (MIXTRAL, "mixtral-8x7b"),
    (GPT_OSS, "gpt-oss-120b"),
    (GEMMA3, "gemma3-27b"),
]


@pytest.mark.parametrize(("config", "name"), CONFIGURATIONS)
def test_a_configuration_gives_the_shape_of_its_model(config, name, tmp_path):
    known = named_shapes()[name].shape
    assert shape_from_config(config).shape.params == known.params
    file = tmp_path / "config.json"
    file.write_text(json.dumps(config))
    found = find_shape(str(file))
    assert found.shape.active_params == known.active_params
    assert found.shape.window_layers == known.window_layers
    assert not found.is_listed


def test_another_kind_of_the_same_shape_does_not_give_its_name(tmp_path):
    file = tmp_path / "config.json"
    found = {}
    for kind in ("llama", "mistral"):
        file.write_text(json.dumps({**LLAMA, "model_type": kind, "vocab_size": 32000}))
        found[kind] = find_shape(str(file)).shape.name
    assert found == {"llama": "llama-7.2b", "mistral": "mistral-7b"}


# Billions of parameters of the cards, and what their configurations say; many leave the usual out.
FAMILIES = {
    "falcon-7b": (
        6.92,
        '{"model_type": "falcon", "hidden_size": 4544, "num_hidden_layers": 32, '
        '"num_attention_heads": 71, "num_kv_heads": 71, "vocab_size": 65024}',
    ),
    "falcon-40b": (
        41.3,
        '{"model_type": "falcon", "hidden_size": 8192, "num_hidden_layers": 60, '
        '"num_attention_heads": 128, "num_kv_heads": 8, "vocab_size": 65024, '
        '"new_decoder_architecture": true}',
    ),
    "starcoder": (
        15.5,
        '{"model_type": "gpt_bigcode", "n_embd": 6144, "n_layer": 40, "n_head": 48, '
        '"n_inner": 24576, "vocab_size": 49152, "multi_query": true}',
    ),
    "mpt-7b": (
        6.65,
        '{"model_type": "mpt", "d_model": 4096, "n_layers": 32, "n_heads": 32, '
        '"expansion_ratio": 4, "vocab_size": 50432}',
    ),
    "dbrx": (
        131.6,
        '{"model_type": "dbrx", "d_model": 6144, "n_layers": 40, "n_heads": 48, '
        '"vocab_size": 100352, "attn_config": {"kv_n_heads": 8}, "ffn_config": '
        '{"ffn_hidden_size": 10752, "moe_num_experts": 16, "moe_top_k": 4}}',
    ),
    "ernie-4.5-21b": (
        21.8,
        '{"model_type": "ernie4_5_moe", "hidden_size": 2560, "num_hidden_layers": 28, '
        '"num_attention_heads": 20, "num_key_value_heads": 4, "intermediate_size": 12288, '
        '"moe_intermediate_size": 1536, "moe_num_experts": 64, "moe_k": 6, '
        '"moe_num_shared_experts": 2, "moe_layer_start_index": 1, "vocab_size": 103424, '
        '"tie_word_embeddings": true}',
    ),
    "llama4-scout": (
        107.8,
        '{"model_type": "llama4", "text_config": {"model_type": "llama4_text", "head_dim": 128, '
        '"hidden_size": 5120, "num_hidden_layers": 48, "num_attention_heads": 40, '
        '"num_key_value_heads": 8, "intermediate_size": 8192, "intermediate_size_mlp": 16384, '
        '"num_local_experts": 16, "num_experts_per_tok": 1, "interleave_moe_layer_step": 1, '
        '"vocab_size": 202048}}',
    ),
    "bert-large": (
        0.335,
        '{"model_type": "bert", "hidden_size": 1024, "num_hidden_layers": 24, '
        '"num_attention_heads": 16, "intermediate_size": 4096, "vocab_size": 30522}',
    ),
    "qwen-7b": (
        7.72,
        '{"model_type": "qwen", "hidden_size": 4096, "num_hidden_layers": 32, '
        '"num_attention_heads": 32, "intermediate_size": 22016, "vocab_size": 151936}',
    ),
}


@pytest.mark.parametrize("name", FAMILIES)
def test_families_that_name_their_sizes_otherwise_have_their_published_parameters(name):
    published, text = FAMILIES[name]
    named = shape_from_config(json.loads(text), name=name)
    assert named.shape.params / 1e9 == pytest.approx(published, rel=0.01)
    assert named.shape.causal == (name != "bert-large")
    assert bool(named.remarks) == (name == "llama4-scout")  # what reads images is not counted


NO_SHAPE = [
    ({"is_encoder_decoder": True}, "an encoder with a decoder"),
    ({"mamba_d_state": 16}, "mamba_"),
    ({"layer_types": ["conv", "full_attention"]}, "conv"),
    ({"block_types": ["recurrent", "attention"]}, "recurrent"),
    ({"hidden_size_per_layer_input": 256}, "embeddings in each layer"),
    ({"embedding_size": 128}, "embedding_size 128 beside 4096"),
    ({"num_hidden_layers": "many"}, "num_hidden_layers = 'many'; expected one whole number"),
    ({"num_hidden_layers": True}, "num_hidden_layers = True"),
    ({"intermediate_size": [8192, 16384]}, "intermediate_size = "),
    ({"intermediate_size": None}, "no intermediate_size"),
    ({"num_experts": 8}, "no num_experts_per_tok"),
]


@pytest.mark.parametrize(("change", "reason"), NO_SHAPE)
def test_a_configuration_that_no_shape_holds_is_refused_with_its_reason(change, reason):
    with pytest.raises(InvalidInputError, match=reason):
        shape_from_config({**LLAMA, **change})


def test_linear_attention_is_counted_as_full_and_said_to_be():
    kinds = ["linear_attention", "full_attention"] * 16
    (remark,) = shape_from_config({**LLAMA, "layer_types": kinds}).remarks
    assert "linear attention" in remark


def test_windows_are_counted_by_layer():
    gemma = {**LLAMA, "model_type": "gemma2", "sliding_window": 4096}
    assert shape_from_config(gemma).shape.window_layers == 16  # each second one, unless said
    exaone = {**gemma, "model_type": "exaone4", "sliding_window_pattern": "LLLG"}
    assert shape_from_config(exaone).shape.window_layers == 24
    config = {**LLAMA, "sliding_window": 128, "layer_types": ["sliding_attention", "full"] * 16}
    assert shape_from_config(config).shape.window_layers == 16
    assert shape_from_config({**LLAMA, "sliding_window": 128}).shape.window_layers == 32
    off = {**LLAMA, "sliding_window": 128, "use_sliding_window": False}
    assert shape_from_config(off).shape.window == 0


def test_what_is_no_decoder_is_refused_or_not_found(tmp_path):
    assert find_shape("gpt-small") is None
    with pytest.raises(InvalidInputError, match="num_hidden_layers"):
        shape_from_config({"hidden_size": 8, "num_attention_heads": 2, "vocab_size": 4})
    file = tmp_path / "x.json"
    for text in ("{", "[" * 100_000, "[1]"):  # whoever reads other documents says what is wrong
        file.write_text(text)
        assert find_shape(str(file)) is None


def test_a_configuration_may_have_a_byte_order_mark(tmp_path):
    file = tmp_path / "config.json"
    file.write_text(json.dumps(LLAMA), encoding="utf-8-sig")
    assert find_shape(str(file)) is not None


@pytest.mark.parametrize("name", ["llama-3-8b", "Llama3.8B", "llama3_8b"])
def test_near_names_are_found_whatever_their_signs(name):
    assert near_shape(name) == "llama3-8b"
    assert near_shape("resnet50") is None
