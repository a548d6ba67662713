"""Bytes per device against published formulas and figures."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from partita.core.precision import parse_precision
from partita.transformer.activations import layer_bytes
from partita.transformer.kernels import Case
from partita.transformer.layout import Layout
from partita.transformer.memory import Memory, memory_of
from partita.transformer.shape import Shape

Make = Callable[..., Case]
GIB = 2**30
GPT_22B = Shape(hidden=6144, layers=48, heads=64, ffn=24576, gated=False, vocab=51200, tied=True)
GPT_175B = Shape(hidden=12288, layers=96, heads=96, ffn=49152, gated=False, vocab=51200, tied=True)
OLD = {"framework": "megatron-2021", "precision": "fp16"}


def of(case: Case, precision: str) -> Memory:
    return memory_of(case, parse_precision(precision))


def first(value: object) -> float:
    return float(np.ravel(np.asarray(value))[0])


@pytest.mark.parametrize("tp", [1, 2, 8])
def test_a_layer_keeps_what_korthikanti_counts(make_case: Make, tp: int) -> None:
    s, b, h, a = 2048, 4, 6144, 64
    case = make_case(GPT_22B, Layout(tp=tp, microbatch=b, **OLD), batch=b, sequence_length=s)
    expected = s * b * h * (10 + 24 / tp + 5 * a * s / (h * tp))
    assert first(layer_bytes(case)) == pytest.approx(expected, rel=1e-12)
    if tp > 1:
        case = make_case(
            GPT_22B, Layout(tp=tp, sp=True, microbatch=b, **OLD), batch=b, sequence_length=s
        )
        expected = s * b * h / tp * (34 + 5 * a * s / h)
        assert first(layer_bytes(case)) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(
    ("shape", "layout", "batch", "gib"),
    [
        (GPT_22B, Layout(tp=8, microbatch=4, **OLD), 4, 59.25),
        (GPT_22B, Layout(tp=8, sp=True, microbatch=4, recompute=("attention",), **OLD), 4, 9.5625),
        (
            GPT_175B,
            Layout(tp=8, sp=True, pp=8, vp=3, recompute=("attention",), **OLD),
            64,
            12.3516,
        ),
    ],
)
def test_activations_are_those_of_the_published_figure(
    make_case: Make, shape: Shape, layout: Layout, batch: int, gib: float
) -> None:
    case = make_case(shape, layout, batch=batch, sequence_length=2048)
    found = first(of(case, "fp16").activations) / GIB
    assert found == pytest.approx(gib, rel=0.03)


def test_state_is_that_of_the_published_log(make_case: Make, llama3_8b: Shape) -> None:
    case = make_case(llama3_8b, Layout(cp=2, dp=4, zero=1))
    memory = of(case, "bf16")
    state = first(memory.weights + memory.gradients + memory.master + memory.state)
    assert state == pytest.approx(44.27e9, rel=0.01)
    assert first(memory.allocated) == pytest.approx(70.83e9, rel=0.06)


def test_gpt_22b_holds_18_bytes_per_parameter(make_case: Make) -> None:
    case = make_case(GPT_22B, Layout(tp=8, precision="bf16-fp32-grads"), batch=1)
    memory = of(case, "bf16-fp32-grads")
    state = first(memory.weights + memory.gradients + memory.master + memory.state)
    assert state == pytest.approx(18 * GPT_22B.params / 8, rel=1e-3)
    assert state / GIB == pytest.approx(45.6, rel=0.02)


def test_sharding_divides_and_recomputation_frees(make_case: Make, llama3_8b: Shape) -> None:
    layouts = [Layout(dp=8, zero=zero) for zero in range(4)]
    memory = of(make_case(llama3_8b, *layouts), "bf16")
    held = np.asarray(memory.weights + memory.gradients + memory.master + memory.state)
    assert (np.diff(held) < 0).all()
    assert held[3] == pytest.approx(held[0] / 8)
    again = [Layout(dp=8, recompute=names) for names in ((), ("norm",), ("products",), ("full",))]
    kept = np.asarray(of(make_case(llama3_8b, *again), "bf16").activations)
    assert (np.diff(kept) < 0).all()
    away = replace(again[0], offload_activations=0.5)
    assert first(of(make_case(llama3_8b, away), "bf16").activations) == pytest.approx(kept[0] / 2)


def test_the_published_fsdp_run_fits_as_measured(make_case: Make, llama3_8b: Shape) -> None:
    layout = Layout(
        dp=8,
        zero=3,
        microbatch=2,
        recompute=("products",),
        framework="torchtitan-2024",
        precision="bf16-mixed",
    )
    case = make_case(llama3_8b, layout, batch=16)
    reserved = first(of(case, "bf16-mixed").allocated) / 0.9
    assert reserved / GIB == pytest.approx(77.0, rel=0.03)
