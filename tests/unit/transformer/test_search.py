"""Enumeration of layouts: rules kept, the best found, what does not fit told by how much."""

import numpy as np
import pytest

from partita.errors import InvalidInputError
from partita.transformer.kernels import Machine
from partita.transformer.price import price_layouts
from partita.transformer.search import Task, regular_layouts, search
from partita.transformer.shape import Shape

LLAMA3_70B = Shape(hidden=8192, layers=80, heads=64, kv_heads=8, ffn=28672, vocab=128256)
MOE = Shape(
    hidden=2048,
    layers=24,
    heads=16,
    kv_heads=4,
    vocab=32000,
    experts=16,
    top_k=2,
    expert_ffn=1024,
)


def task(machine: Machine, shape: Shape, **more: object) -> Task:
    usual = {"devices": 8, "batch": 128, "sequence_length": 8192, "limit_bytes": 73.6e9}
    return Task(shape=shape, machine=machine, **{**usual, **more})  # type: ignore[arg-type]


@pytest.mark.parametrize("framework", ["megatron", "torchtitan", "deepspeed", "partita"])
@pytest.mark.parametrize("experts", [False, True])
def test_every_regular_layout_keeps_the_rules(
    h100: Machine, llama3_8b: Shape, framework: str, experts: bool
) -> None:
    shape = MOE if experts else llama3_8b
    found = list(regular_layouts(task(h100, shape, batch=32, framework=framework)))
    assert len(set(found)) == len(found) > 10
    for layout in found:
        assert layout.devices == 8
        layout.check(shape, batch=32, sequence_length=8192)


def test_the_best_has_the_price_of_its_layout(h100: Machine, llama3_8b: Shape) -> None:
    priced = search(task(h100, llama3_8b))
    steps = price_layouts(
        llama3_8b, priced.layouts[:1], h100, batch=128, sequence_length=8192
    ).step_s
    assert priced.step_s[0] == pytest.approx(float(np.ravel(steps)[0]))
    assert priced.fits[0]


def test_an_8b_model_on_one_host_needs_no_tensor_parallelism(
    h100: Machine, llama3_8b: Shape
) -> None:
    priced = search(task(h100, llama3_8b))
    assert priced.layouts[0].tp == 1
    assert priced.step_s[0] == pytest.approx(12.27, rel=0.10)
    assert priced.mfu(0) == pytest.approx(0.62, abs=0.06)
    fixed = search(task(h100, llama3_8b, fixed={"tp": 4}))
    assert {layout.tp for layout in fixed.layouts} == {4}
    assert fixed.step_s[0] > 1.1 * priced.step_s[0]


def test_a_70b_model_on_64_devices_uses_less_than_a_host_per_tensor_group(h100: Machine) -> None:
    assert search(task(h100, LLAMA3_70B, devices=64)).layouts[0].tp < 8


def test_a_70b_model_does_not_fit_on_one_host(h100: Machine) -> None:
    priced = search(task(h100, LLAMA3_70B))
    assert not priced.fits.any()
    assert priced.total_bytes[0] == priced.total_bytes.min() > 140e9


def test_degrees_that_no_layout_has_are_refused_by_a_rule(h100: Machine, llama3_8b: Shape) -> None:
    with pytest.raises(InvalidInputError, match=r"heads.*multiple"):
        search(task(h100, llama3_8b, fixed={"tp": 3}))
