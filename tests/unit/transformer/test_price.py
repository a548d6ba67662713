"""Step times in closed form: parts that add up, published runs, and what must grow."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from partita.errors import InvalidInputError
from partita.transformer.kernels import Case, Machine, block_s, longer_s
from partita.transformer.layout import Layout
from partita.transformer.price import Steps, price, price_layouts
from partita.transformer.shape import Shape

Make = Callable[..., Case]
LLAMA3_70B = Shape(hidden=8192, layers=80, heads=64, kv_heads=8, ffn=28672, vocab=128256)
NEMO = "megatron-25.04"


def step_s(steps: Steps) -> list[float]:
    return np.ravel(steps.step_s).tolist()


@pytest.mark.parametrize(
    ("layout", "batch", "seconds"),
    [
        (Layout(cp=2, dp=4, zero=1, framework=NEMO), 128, 12.27),
        (Layout(cp=2, dp=64, zero=1, framework=NEMO), 2048, 12.33),
    ],
)
def test_llama3_8b_takes_what_nvidia_measured(
    make_case: Make, llama3_8b: Shape, layout: Layout, batch: int, seconds: float
) -> None:
    (found,) = step_s(price(make_case(llama3_8b, layout, batch=batch)))
    assert found == pytest.approx(seconds, rel=0.06)


def test_llama3_70b_takes_what_nvidia_measured(make_case: Make) -> None:
    layout = Layout(tp=4, sp=True, pp=4, vp=5, cp=2, dp=2, zero=1, framework=NEMO)
    (found,) = step_s(price(make_case(LLAMA3_70B, layout)))
    assert found == pytest.approx(14.66, rel=0.06)


def test_parts_are_not_negative_and_sum_to_the_step(make_case: Make) -> None:
    moe = Shape(
        hidden=2048,
        layers=48,
        heads=32,
        kv_heads=4,
        head_dim=128,
        vocab=151936,
        experts=128,
        top_k=8,
        expert_ffn=768,
    )
    layouts = [
        Layout(tp=tp, sp=tp > 1, pp=pp, ep=ep, dp=16 // tp, zero=zero, recompute=again)
        for tp in (1, 4)
        for pp in (1, 2)
        for ep in (1, 16)
        for zero in (0, 1, 3)
        for again in ((), ("experts",), ("full",))
        if pp == 1 or zero < 3
    ]
    steps = price(make_case(moe, *layouts, sequence_length=4096))
    parts = [np.asarray(part) for part in steps]
    assert all((part >= 0).all() for part in parts)
    total = sum(parts) - np.asarray(steps.recompute_s)
    assert np.allclose(total, steps.step_s)


def test_many_layouts_cost_the_same_as_one_by_one(make_case: Make, llama3_8b: Shape) -> None:
    layouts = [Layout(tp=t, sp=t > 1, dp=16 // t, zero=z) for t in (1, 2, 8) for z in (0, 1, 2, 3)]
    together = step_s(price(make_case(llama3_8b, *layouts)))
    alone = [step_s(price(make_case(llama3_8b, layout)))[0] for layout in layouts]
    assert together == pytest.approx(alone, rel=1e-12)


def test_more_work_takes_longer(make_case: Make, llama3_8b: Shape) -> None:
    layout = Layout(dp=8, zero=1)
    base = step_s(price(make_case(llama3_8b, layout)))[0]
    longer = replace(llama3_8b, layers=40)
    assert step_s(price(make_case(longer, layout)))[0] > base
    assert step_s(price(make_case(llama3_8b, layout, batch=256)))[0] > base
    again = replace(layout, recompute=("full",))
    assert step_s(price(make_case(llama3_8b, again)))[0] == pytest.approx(base * 1.3, rel=0.08)


def test_tensor_parallelism_over_two_hosts_is_clearly_worse(
    make_case: Make, llama3_8b: Shape
) -> None:
    layouts = [Layout(tp=t, sp=t > 1, dp=16 // t, zero=1) for t in (1, 4, 8, 16)]
    found = step_s(price(make_case(llama3_8b, *layouts)))
    assert found == sorted(found)
    assert found[-1] > 2 * found[0]


def test_virtual_stages_shrink_the_bubble(make_case: Make) -> None:
    layouts = [Layout(tp=4, sp=True, pp=4, vp=v, dp=4, zero=1) for v in (1, 5)]
    bubble = np.asarray(price(make_case(LLAMA3_70B, *layouts)).bubble_s)
    assert bubble[1] == pytest.approx(bubble[0] / 5, rel=0.05)


def test_what_is_not_overlapped_shows(make_case: Make, llama3_8b: Shape) -> None:
    hidden, shown = (
        price(make_case(llama3_8b, Layout(dp=16, framework=name), batch=16)).data_s
        for name in ("torchtitan", "partita")
    )
    assert np.ravel(shown)[0] > 2 * np.ravel(hidden)[0]


def test_offloaded_updates_are_slower(make_case: Make, llama3_8b: Shape) -> None:
    layouts = [Layout(dp=8, zero=1, offload_optimizer=share) for share in (0.0, 0.25, 1.0)]
    update = np.asarray(price(make_case(llama3_8b, *layouts)).optimizer_s)
    assert (np.diff(update) > 0).all()


def test_layouts_of_two_frameworks_are_refused(h100: Machine, llama3_8b: Shape) -> None:
    layouts = [Layout(dp=8), Layout(dp=8, framework="torchtitan")]
    with pytest.raises(InvalidInputError, match="2 combinations of framework"):
        price_layouts(llama3_8b, layouts, h100, batch=8, sequence_length=8192)
    (found,) = step_s(price_layouts(llama3_8b, layouts[:1], h100, batch=128, sequence_length=8192))
    assert found > 0


def test_the_longer_of_device_and_host_counts() -> None:
    assert longer_s(1.0, 0.1) == pytest.approx(1.0, rel=1e-5)
    assert longer_s(0.1, 1.0) == pytest.approx(1.0, rel=1e-5)


def test_attention_of_narrow_heads_takes_longer_for_the_same_products(make_case: Make) -> None:
    wide = Shape(hidden=4096, layers=32, heads=32, ffn=14336, vocab=32000)
    narrow, layout = replace(wide, heads=64, head_dim=64, kv_heads=64, value_dim=64), Layout(dp=8)
    wider = replace(wide, heads=16, head_dim=256, kv_heads=16, value_dim=256)
    core = [float(block_s(make_case(s, layout)).core.item()) for s in (wider, wide, narrow)]
    assert core[0] == pytest.approx(core[1])
    # On H100 an exponential takes as long as the products of 64 elements of a head.
    assert core[2] == pytest.approx(core[1] * (64 + 64) / 64 * 128 / (128 + 64))


def test_stacks_that_fuse_less_move_more(make_case: Make, llama3_8b: Shape) -> None:
    (compiled, eager) = (
        step_s(price(make_case(llama3_8b, Layout(dp=8, framework="torchtitan", stack=stack))))[0]
        for stack in ("compile", "eager")
    )
    assert compiled * 1.03 < eager
