"""What a layout may combine, and the rule that a refusal names."""

from dataclasses import replace

import pytest

from partita.errors import InvalidInputError
from partita.transformer.layout import Layout
from partita.transformer.shape import Shape

SHAPE = Shape(hidden=4096, layers=32, heads=32, kv_heads=8, ffn=14336, vocab=128256)


def test_a_layout_covers_the_product_of_its_degrees() -> None:
    layout = Layout(tp=4, sp=True, pp=4, vp=2, cp=2, dp=2, zero=1)
    assert layout.devices == 64
    assert layout.sharding == 4
    layout.check(SHAPE, batch=128, sequence_length=8192)


@pytest.mark.parametrize(
    ("layout", "rule"),
    [
        (Layout(tp=3), "heads are no multiple of tp"),
        (Layout(dp=3), "no multiple of dp x microbatch"),
        (Layout(sp=True), "sequence parallelism needs tp > 1"),
        (Layout(vp=2), "virtual stages need pp > 1"),
        (Layout(pp=64), "fewer than pp x vp"),
        (Layout(ep=2), "without experts"),
        (Layout(cp=3), "no multiple of 2 cp"),
        (Layout(cp=16, cp_kind="all-to-all"), "kv heads"),
        (Layout(pp=2, zero=3), "megatron shards at most zero 1 beside pp"),
        (Layout(zero=4), "expected 0 to 3"),
        (Layout(zero=2, framework="megatron-2021"), "shards at most zero 1"),
        (Layout(cp=2, framework="megatron-2021"), "no context parallelism"),
        (Layout(pp=2, zero=2, framework="deepspeed"), "deepspeed shards at most zero 1"),
        (Layout(zero=1, framework="torchtitan"), "torchtitan shards no optimizer's state alone"),
        (Layout(pp=2, offload_activations=0.5), "cannot offload activations"),
        (Layout(recompute=("all",)), "not one of attention"),
        (Layout(cp=2, framework="partita"), "partita has no context parallelism"),
        (Layout(tp=2, sp=True, framework="partita"), "partita has no sequence parallelism"),
        (Layout(recompute=("mlp",), framework="partita"), "partita cannot recompute mlp"),
        (Layout(pp=2, framework="accelerate"), "accelerate has no pipelines: pp is 2"),
        (Layout(pp=2, framework="fsdp"), "fsdp has no pipelines: pp is 2"),
        (Layout(zero=1, framework="fsdp"), "fsdp shards no optimizer's state alone"),
        (Layout(framework="other"), "framework 'other' is not known"),
        (Layout(tp=0), "tp is 0"),
    ],
)
def test_a_refusal_names_the_rule(layout: Layout, rule: str) -> None:
    with pytest.raises(InvalidInputError, match=rule):
        layout.check(SHAPE, batch=128, sequence_length=8192)


def test_frameworks_divide_experts_as_they_can() -> None:
    shape = replace(SHAPE, ffn=0, experts=8, top_k=2, expert_ffn=4096)
    wide = Layout(tp=4, sp=True, dp=2, ep=8, framework="torchtitan")
    wide.check(shape, batch=8, sequence_length=8192)
    replace(wide, ep=2, framework="megatron").check(shape, batch=8, sequence_length=8192)
    with pytest.raises(InvalidInputError, match="torchtitan divides"):
        replace(wide, ep=2).check(shape, batch=8, sequence_length=8192)
    with pytest.raises(InvalidInputError, match="expert parallelism"):
        Layout(dp=8, ep=2, framework="partita").check(shape, batch=8, sequence_length=8192)
