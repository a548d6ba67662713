"""Counts of parameters and FLOPs against published figures."""

import pytest

from partita.errors import InvalidInputError
from partita.transformer.shape import Shape

LLAMA3_8B = Shape(hidden=4096, layers=32, heads=32, kv_heads=8, ffn=14336, vocab=128256)
GPT_175B = Shape(hidden=12288, layers=96, heads=96, ffn=49152, gated=False, vocab=51200, tied=True)
DEEPSEEK_V3 = Shape(
    hidden=7168,
    layers=61,
    heads=128,
    head_dim=128,
    ffn=18432,
    vocab=129280,
    experts=256,
    top_k=8,
    expert_ffn=2048,
    shared_ffn=2048,
    dense_layers=3,
    query_rank=1536,
    kv_rank=512,
    rope_dim=64,
)


@pytest.mark.parametrize(
    ("shape", "billions", "active"),
    [(LLAMA3_8B, 8.03, 8.03), (GPT_175B, 174.6, 174.6), (DEEPSEEK_V3, 671.0, 37.5)],
)
def test_parameters_are_the_published_ones(shape: Shape, billions: float, active: float) -> None:
    assert shape.params / 1e9 == pytest.approx(billions, rel=2e-3)
    assert shape.active_params / 1e9 == pytest.approx(active, rel=5e-3)


def test_model_flops_are_three_forwards_with_whole_attention() -> None:
    layer = 2 * (4096 * (4096 + 2 * 1024) + 4096 * 4096 + 3 * 4096 * 14336) + 4 * 8192 * 4096
    expected = 3 * 8192 * (32 * layer + 2 * 4096 * 128256)
    assert LLAMA3_8B.model_flops(8192, 8192) == pytest.approx(expected, rel=1e-12)


def test_a_causal_kernel_sees_half_and_a_window_its_width() -> None:
    assert LLAMA3_8B.attention_pairs(8192, halved=True) == 4096
    windowed = Shape(hidden=64, layers=4, heads=4, ffn=64, vocab=10, window=128, window_layers=2)
    assert windowed.attention_pairs(1024) == (128 + 1024) / 2


def test_shapes_that_cannot_be_are_refused() -> None:
    with pytest.raises(InvalidInputError, match="5 heads"):
        Shape(hidden=64, layers=1, heads=5, ffn=64, vocab=10)
    with pytest.raises(InvalidInputError, match="top_k"):
        Shape(hidden=64, layers=1, heads=4, vocab=10, experts=4)


def test_flops_of_causal_attention_lack_half_of_its_scores() -> None:
    shape = LLAMA3_8B
    whole, half = (shape.model_flops(1.0, 131_072, halved=halved) for halved in (False, True))
    scores = 4.0 * 131_072 * shape.hidden * shape.layers  # queries with keys, and with values
    assert whole - half == pytest.approx(3 * scores / 2, rel=1e-3)
    frozen = shape.model_flops(1.0, 131_072, trained=0.0, halved=True)
    assert frozen < half
