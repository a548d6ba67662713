"""Estimates without hardware: kernels, FLOPs, rooflines, recomputation."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812 (torch's own name for it)
from torch import nn
from torch._subclasses import FakeTensorMode

from partita.capture.capture import capture
from partita.capture.captured import CapturedModel, CaptureMode, Granularity
from partita.capture.setting import Example
from partita.catalogue.catalogue import load_catalogue
from partita.catalogue.kernel_rates import CLASSES, kernels_on, load_kernels, read_kernels
from partita.core.graph import CostOrigin
from partita.errors import FormatError, InvalidInputError
from partita.models.zoo import build_model, example_inputs, layers_of, loss_of
from partita.profiler.estimate.eager import eager_attention, eager_gelu, eager_rms_norm
from partita.profiler.estimate.estimate import (
    accuracy_of,
    collect_kernels,
    estimate,
    roofline_of,
    wave_factor,
)
from partita.profiler.estimate.trace import Kernels
from partita.profiler.flops import Kernel, KernelClass, Tiles


def captured_zoo(
    name: str, batch_size: int, scale: float = 1.0, **options: object
) -> CapturedModel:
    model = build_model(name, device="meta", scale=scale)
    batch = example_inputs(name, batch_size, device="meta", scale=scale)
    example = Example(
        args=batch.args, kwargs=batch.kwargs, labels=batch.labels, batch_size=batch_size
    )
    return capture(model, example, loss=loss_of(name), name=name, **options)


def linear_chain(device: str = "meta") -> tuple[nn.Module, Example]:
    with torch.device(device):
        model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 32, bias=False))
        return model, Example(args=(torch.zeros(16, 64),))


@pytest.fixture(scope="module")
def small_gpt() -> CapturedModel:
    return captured_zoo("gpt3-small", 2, 0.1)


def test_flops_of_gpt3_175b_are_those_of_the_formula() -> None:
    found = collect_kernels(captured_zoo("gpt3-175b", 1))
    tokens, layers, hidden, vocabulary = 1024, 96, 12288, 50257
    products = 2 * tokens * (12 * layers * hidden**2 + vocabulary * hidden)
    expected = products + 4 * layers * tokens**2 * hidden
    assert found.forward_flops == pytest.approx(expected, rel=0.01)
    assert found.backward_flops == pytest.approx(2 * found.forward_flops, rel=0.01)


@pytest.mark.parametrize("kernels", list(Kernels))
def test_fused_and_eager_kernels_have_the_same_flops(
    small_gpt: CapturedModel, kernels: Kernels
) -> None:
    found = collect_kernels(small_gpt, kernels)
    assert found.forward_flops == collect_kernels(small_gpt).forward_flops
    assert not found.notes


def test_backward_of_linear_layers_is_split_by_real_shapes() -> None:
    model, example = linear_chain()
    first, _, last = collect_kernels(capture(model, example)).ops
    assert first.flops == 2 * 16 * 64 * 128
    assert sum(kernel.flops for kernel in first.backward_input) == 0  # nothing before it
    assert sum(kernel.flops for kernel in first.backward_weight) == first.flops
    assert sum(kernel.flops for kernel in last.backward_input) == last.flops
    assert KernelClass.WEIGHT_GRADIENT in [kernel.kind for kernel in last.backward_weight]


def test_convolution_flops_and_both_gradients() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 16, 3, stride=2))
        captured = capture(model, Example(args=(torch.zeros(2, 3, 16, 16),)))
    first, last = collect_kernels(captured).ops
    assert first.flops == 2 * 2 * 16 * 16 * 8 * 3 * 9
    assert last.flops == 2 * 2 * 7 * 7 * 16 * 8 * 9
    assert first.backward_flops == first.flops
    assert last.backward_flops == 2 * last.flops


def test_costs_are_estimated_and_say_how_good_they_are(small_gpt: CapturedModel) -> None:
    graph = estimate(small_gpt, "a40", dtype="tfloat32")
    (costs,) = graph.costs
    assert costs.origin is CostOrigin.ESTIMATED
    assert costs.device_type == "a40"
    assert (costs.forward_s >= 0).all()
    assert costs.forward_s.sum() > 0
    assert (costs.backward_input_s <= costs.backward_s).all()
    assert graph.ops.saved_bytes.sum() > 0
    said = graph.annotations["estimate"]["a40"]["accuracy"]
    assert "median error" in said
    assert "fused tfloat32 not measured" in said
    assert accuracy_of("a40") in said
    assert "not measured" in accuracy_of("h100")


def test_eager_kernels_take_longer_than_fused_ones(small_gpt: CapturedModel) -> None:
    fused, eager = (estimate(small_gpt, "a100", kernels=kind) for kind in Kernels)
    assert eager.forward_s.sum() > 1.5 * fused.forward_s.sum()
    assert eager.ops.saved_bytes.sum() > fused.ops.saved_bytes.sum()


def test_half_precision_is_faster_and_saves_half(small_gpt: CapturedModel) -> None:
    single = estimate(small_gpt, "a100", dtype="tfloat32")
    half = estimate(small_gpt, "a100", dtype="bfloat16")
    assert half.forward_s.sum() < single.forward_s.sum()
    masks = [t.endswith("dropout") for t in np.array(half.ops.types.names)[half.ops.types.of]]
    plain = ~np.array(masks)
    plain &= np.array(
        [t != "cross_entropy" for t in np.array(half.ops.types.names)[half.ops.types.of]]
    )
    assert plain.sum() > 50
    ratio = half.ops.saved_bytes[plain].sum() / single.ops.saved_bytes[plain].sum()
    assert ratio == pytest.approx(0.5, abs=0.01)
    assert half.ops.saved_bytes[masks].sum() == single.ops.saved_bytes[masks].sum()


def test_float8_is_for_products_with_parameters_alone(small_gpt: CapturedModel) -> None:
    half = estimate(small_gpt, "h100", dtype="bfloat16")
    eighth = estimate(small_gpt, "h100", dtype="float8")
    assert (eighth.ops.saved_bytes == half.ops.saved_bytes).all()
    assert (eighth.tensors.bytes == half.tensors.bytes).all()
    faster = half.forward_s.sum() / eighth.forward_s.sum()
    assert 1 <= faster < 2
    attention = [t.endswith("attention") for t in np.array(half.ops.types.names)[half.ops.types.of]]
    assert (eighth.forward_s[attention] == half.forward_s[attention]).all()
    assert eighth.costs[0].peak_flop_per_s > 1.9 * half.costs[0].peak_flop_per_s


def test_recomputation_leaves_out_the_embedding_and_the_last_layer(
    small_gpt: CapturedModel,
) -> None:
    layers = layers_of("gpt3-small", small_gpt.model)
    plain = estimate(small_gpt, "a100", layers=layers)
    again = estimate(small_gpt, "a100", layers=layers, recompute=True)
    added = again.backward_s - plain.backward_s
    layer = plain.ops.layers.of
    inner = (layer > 0) & (layer < len(layers) - 1)
    assert np.allclose(added[inner], plain.forward_s[inner])
    assert not added[~inner].any()


def test_blocks_cost_what_their_ops_cost(small_gpt: CapturedModel) -> None:
    blocks = captured_zoo("gpt3-small", 2, 0.1, granularity=Granularity.BLOCK)
    by_op, by_block = estimate(small_gpt, "a100"), estimate(blocks, "a100")
    assert len(by_block) < len(by_op)
    assert by_block.forward_s.sum() == pytest.approx(by_op.forward_s.sum())
    assert by_block.backward_s.sum() == pytest.approx(by_op.backward_s.sum())


def test_real_fake_and_meta_captures_cost_the_same() -> None:
    totals = [
        estimate(capture(*linear_chain(device)), "a100").forward_s for device in ("cpu", "meta")
    ]
    with FakeTensorMode():
        totals.append(estimate(capture(*linear_chain("cpu")), "a100").forward_s)
    assert np.allclose(totals[0], totals[1])
    assert np.allclose(totals[0], totals[2])


def test_inference_has_no_backward() -> None:
    model, example = linear_chain()
    graph = estimate(capture(model, example, mode=CaptureMode.EVAL), "a100")
    assert not graph.backward_s.any()


def test_several_readers_of_a_tensor_sum_its_gradients() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.linear(x)
            return y.exp() + y.tanh()

    with torch.device("meta"):
        captured = capture(Twice(), Example(args=(torch.zeros(4, 8),)))
    made = collect_kernels(captured).ops[0].backward_input
    assert [kernel.read_write_bytes for kernel in made] == [3 * 4 * 8 * 4]


def test_an_op_that_shapes_cannot_run_is_priced_by_its_bytes_and_noted() -> None:
    class Chosen(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x[x > 0].sum()

    graph = estimate(capture(Chosen(), Example(args=(torch.ones(8),), batch_size=1)), "a100")
    notes = graph.annotations["estimate"]["a100"]["notes"]
    assert any("priced by its bytes" in note for note in notes)
    assert (graph.forward_s >= 0).all()


def test_unknown_dtypes_and_devices_are_refused(small_gpt: CapturedModel) -> None:
    with pytest.raises(InvalidInputError, match="is not known"):
        estimate(small_gpt, "a100", dtype="float12")
    with pytest.raises(InvalidInputError, match=r"tfloat32.*--precision fp32"):
        estimate(small_gpt, "v100", dtype="tfloat32")
    with pytest.raises(InvalidInputError, match=r"not in.*catalogue"):
        estimate(small_gpt, "a101")


@pytest.mark.parametrize("causal", [True, False])
def test_unfused_attention_computes_attention(causal: bool) -> None:
    torch.manual_seed(0)
    query, key, value = torch.randn(3, 2, 4, 8, 16)
    mask = None if causal else torch.randn(2, 1, 8, 8)
    expected = F.scaled_dot_product_attention(query, key, value, mask, is_causal=causal)
    found = eager_attention(query, key, value, mask, is_causal=causal)
    assert torch.allclose(found, expected, atol=1e-5)


def test_unfused_gelu_and_norm_compute_the_same() -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(4, 16), torch.randn(16)
    assert torch.allclose(
        eager_gelu(x, approximate="tanh"), F.gelu(x, approximate="tanh"), atol=1e-6
    )
    expected = F.rms_norm(x, (16,), weight, 1e-6)
    assert torch.allclose(eager_rms_norm(x, (16,), weight=weight, eps=1e-6), expected, atol=1e-5)


def test_a_tile_too_many_costs_another_wave() -> None:
    full, over = Tiles(108, 128, 128, 4096), Tiles(109, 128, 128, 4096)
    assert wave_factor(over, 108) > wave_factor(full, 108)
    assert wave_factor(Tiles(1, 4096, 4096, 64), 0) == 1.0


def test_a_kernel_takes_the_longer_of_computing_and_moving() -> None:
    roofline = roofline_of(load_catalogue().device_type("a100-pcie"), "tfloat32")
    held = roofline.kernels
    moving = Kernel(kind=KernelClass.ELEMENTWISE, read_write_bytes=1e9, floating_bytes=1e9)
    expected = 1e9 / (held.shares["elementwise"] * 1.935e12) + held.launch_s
    assert roofline.seconds(moving) == pytest.approx(expected)
    computing = Kernel(kind=KernelClass.BATCHED_MATMUL, flops=1e12, read_write_bytes=1.0)
    expected = 1e12 / (held.shares["batched_matmul"] * 1.56e14) + held.launch_s
    assert roofline.seconds(computing) == pytest.approx(expected)
    half = replace(roofline, float_factor=0.5)
    assert half.moved_bytes(moving) == 5e8


def test_the_catalogue_has_eight_constants_a_device_each_with_a_source() -> None:
    for name, entry in load_kernels().items():
        assert set(entry.shares) == set(CLASSES), name
        assert entry.launch_s > 0
        assert entry.source
    assert len(CLASSES) + 1 == 8
    assert kernels_on("rtx3090") is load_kernels()["default"]
    assert math.isnan(kernels_on("rtx3090").median_error)


def test_unknown_keys_of_the_table_are_refused_with_their_line() -> None:
    with pytest.raises(FormatError, match="unknown key"):
        read_kernels("devices:\n  x:\n    share: {}\n")
