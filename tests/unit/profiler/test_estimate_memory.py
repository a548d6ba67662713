"""Memory of estimates: against closed forms, hand-made graphs, and what torch really holds."""

from functools import cache

import numpy as np
import pytest
import torch
from torch import nn

from partita.capture.capture import capture
from partita.capture.captured import CapturedModel
from partita.capture.setting import Example
from partita.capture.sources import SourceOptions, load_source
from partita.core.graph import Graph
from partita.profiler.estimate.estimate import (
    EstimateOptions,
    collect_kernels,
    estimate,
    estimate_source,
)
from partita.profiler.estimate.memory import CallMemory, TensorMemory, workspace_bytes
from partita.profiler.estimate.recompute import is_recomputed, recomputed_ops, with_recomputation
from partita.profiler.estimate.trace import Kernels

HIDDEN, HEADS, BATCH = 768, 12, 2


@cache
def gpt(
    sequence_length: int = 128,
    *,
    dtype: str = "",
    options: EstimateOptions | None = None,
    batch_size: int = BATCH,
) -> Graph:
    wanted = SourceOptions(
        batch_size=batch_size, sequence_length=sequence_length, dtype=dtype, device="meta"
    )
    return estimate_source(load_source("gpt3-small", wanted), ["a100"], options)


def saved_by_block(graph: Graph) -> float:
    (middle,) = np.flatnonzero(np.array(graph.ops.layers.names) == "blocks.5")
    return float(graph.ops.saved_bytes[graph.ops.layers.of == middle].sum())


def growth(kernels: Kernels) -> tuple[float, float]:
    """Return A and B of A s b h + B a s^2 b bytes, from two lengths in 16-bit numbers."""
    short, long = (
        saved_by_block(gpt(length, dtype="float16", options=EstimateOptions(kernels=kernels)))
        for length in (128, 256)
    )
    system = [[s * BATCH * HIDDEN, HEADS * s * s * BATCH] for s in (128, 256)]
    linear, square = np.linalg.solve(np.array(system, dtype=float), [short, long])
    return float(linear), float(square)


def test_a_block_with_fused_attention_saves_34_bytes_a_token_and_width() -> None:
    # Korthikanti et al. 2022, section 4.1: 34 s b h. Ours has the attention's output twice (+2)
    # and the means and deviations of layer norm.
    linear, square = growth(Kernels.FUSED)
    assert linear == pytest.approx(36, abs=0.1)
    assert square == pytest.approx(0, abs=0.01)


def test_unfused_attention_saves_5_bytes_a_score_and_little_more() -> None:
    # The same: 5 a s^2 b for softmax, mask and dropout; eager code also keeps the causal mask.
    _, square = growth(Kernels.EAGER)
    assert 5 <= square <= 6


@pytest.mark.parametrize(
    ("dtype", "arithmetic", "weight_bytes", "copy_bytes"),
    [("", "", 4, 0), ("", "bfloat16", 4, 2), ("bfloat16", "", 2, 0), ("", "tfloat32", 4, 0)],
)
def test_mixed_precision_keeps_a_narrow_copy_of_matrices(
    dtype: str, arithmetic: str, weight_bytes: int, copy_bytes: int
) -> None:
    graph = gpt(64, dtype=dtype, options=EstimateOptions(arithmetic=arithmetic))
    elements = graph.parameters.elements.sum()
    assert graph.parameters.bytes.sum() == weight_bytes * elements
    # All but positions, biases and norms is multiplied: with Adam 16 or 18 bytes a parameter.
    assert graph.parameters.copy_bytes.sum() == pytest.approx(copy_bytes * elements, rel=0.01)
    assert not graph.ops.saved_fixed_bytes.any()  # one copy for a step, not for each microbatch


def test_tensors_that_travel_have_the_type_of_the_arithmetic() -> None:
    single, half = gpt(64), gpt(64, options=EstimateOptions(arithmetic="bfloat16"))
    ratio = half.tensors.bytes / np.maximum(single.tensors.bytes, 1)
    assert set(np.round(ratio, 3)) == {0.5, 1.0}  # numbers of tokens stay as they are
    assert half.fingerprint == single.fingerprint


def test_recomputed_blocks_keep_their_input_and_bring_the_rest_back() -> None:
    plain = gpt(64)
    again = gpt(64, options=EstimateOptions(recompute=True))
    assert is_recomputed(again)
    assert not is_recomputed(plain)
    assert saved_by_block(again) == 64 * BATCH * HIDDEN * 4
    inner = recomputed_ops(plain)
    brought = again.ops.workspace_bytes - plain.ops.workspace_bytes
    blocks = np.isin(plain.ops.layers.of, np.arange(2, len(plain.ops.layers.names) - 1))
    assert inner[blocks].all()
    assert brought[blocks] == pytest.approx(saved_by_block(plain), rel=1e-6)
    assert not brought[~inner].any()
    added = again.backward_s.sum() - plain.backward_s.sum()
    assert added == pytest.approx(plain.forward_s[inner].sum())
    assert (again.costs[0].backward_input_s <= again.backward_s + 1e-12).all()
    assert with_recomputation(again) is again
    assert with_recomputation(plain).fingerprint == plain.fingerprint


def test_memory_follows_the_microbatch_that_is_asked_for() -> None:
    two, four = gpt(64), gpt(64, batch_size=4)
    assert four.batch_size == 4
    assert four.ops.saved_bytes.sum() == pytest.approx(2 * two.ops.saved_bytes.sum(), rel=1e-3)
    # The scratch memory of gradients of weights does not grow with the samples.
    assert four.ops.workspace_bytes.max() < 2 * two.ops.workspace_bytes.max()


def linear_chain() -> CapturedModel:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(64, 128, bias=False), nn.Linear(128, 32, bias=False))
        return capture(model, Example(args=(torch.zeros(16, 64),)))


def test_scratch_memory_of_linear_layers_is_that_of_the_formula() -> None:
    first, second = estimate(linear_chain(), "a100").ops.workspace_bytes.tolist()
    # Backward of the first: the gradient of its output, and that of its weight.
    assert first == 4 * (16 * 128 + 64 * 128)
    # Of the second: its output, which the model returns; the gradients of weight and input. What
    # arrives is the user's.
    assert second == 4 * (16 * 32 + 128 * 32 + 16 * 128)


@pytest.mark.parametrize("kernels", list(Kernels))
def test_inference_holds_what_still_has_a_reader(kernels: Kernels) -> None:
    captured = linear_chain()
    assert (collect_kernels(captured, kernels).workspace_bytes > 0).all()


def tensor(
    storage: int, size: float, *, is_kept: bool = False, has_gradient: bool = True
) -> TensorMemory:
    return TensorMemory(
        storage=storage,
        storage_bytes=size,
        gradient_bytes=size,
        is_kept=is_kept,
        has_gradient=has_gradient,
    )


def test_gradients_that_are_passed_on_count_once() -> None:
    # x -> a -> b -> x + b: the sum passes its gradient to both of what it adds.
    calls = [
        CallMemory(op=0, reads=(), makes=(0,)),
        CallMemory(op=1, reads=(0,), makes=(1,), backward_bytes=10),
        CallMemory(op=2, reads=(0, 1), makes=(2,), passed=((0, 2), (1, 2))),
        CallMemory(op=3, reads=(2,), makes=(3,), backward_bytes=10),
    ]
    tensors = {row: tensor(row, 10, is_kept=True) for row in range(4)}
    found = workspace_bytes(calls, tensors, 4).tolist()
    assert found == [10, 20, 10, 10]


def test_activations_live_until_their_last_reader_and_views_share_a_storage() -> None:
    calls = [
        CallMemory(op=0, reads=(), makes=(0,)),
        CallMemory(op=1, reads=(0,), makes=(1,)),
        CallMemory(op=2, reads=(1,), makes=(2,), forward_bytes=5),
        CallMemory(op=3, reads=(0, 2), makes=(3,)),
    ]
    tensors = {
        0: tensor(7, 100, has_gradient=False),
        1: tensor(7, 100, has_gradient=False),
        2: tensor(8, 10, has_gradient=False),
        3: tensor(9, 1, has_gradient=False),
    }
    assert workspace_bytes(calls, tensors, 4).tolist() == [100, 100, 115, 111]
    kept = {**tensors, 0: tensor(7, 100, is_kept=True), 1: tensor(7, 100, is_kept=True)}
    assert workspace_bytes(calls[:3], kept, 3, frozenset({2})).tolist()[2] == 15
