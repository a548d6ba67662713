"""Costs of a captured graph from traces of torch's profiler."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.profiler import ProfilerActivity
from torch.profiler import profile as torch_profile

from partita.catalogue.catalogue import load_catalogue
from partita.core.graph import CostOrigin, Graph, OpCosts
from partita.errors import InvalidInputError
from partita.flows.profile import ProfileResult, profile
from partita.flows.trace_costs import read_ops, traced_type, with_traced_costs
from partita.formats.traced_ops import TracedOp, TracedOps
from partita.profiler.estimate.calls import Call
from partita.testing.builders import chain

GPU = Path(__file__).parents[2] / "golden" / "readers" / "torch-trace" / "ops-gpu-rank0.json"
LINEAR = Call("aten::linear", ((4, 8), (16, 8), (16,)))
RELU = Call("aten::relu", ((4, 16),))
SUM = Call("aten::sum", ((4, 16),))
SOURCE = """
import torch
from torch import nn

def make(batch_size=4):
    model = nn.Sequential(
        nn.Linear(8, 16), nn.LayerNorm(16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 5)
    )
    labels = torch.zeros(batch_size, dtype=torch.long)
    return model, (torch.randn(batch_size, 8), labels), nn.functional.cross_entropy
"""


def estimated(ops: int) -> Graph:
    """Return a chain with estimates of a second, three quarters of backward for the inputs."""
    costs = OpCosts(
        device_type="a100",
        origin=CostOrigin.ESTIMATED,
        forward_s=np.ones(ops),
        backward_s=np.ones(ops),
        backward_input_s=np.full(ops, 0.75),
    )
    return replace(chain(ops), costs=(costs,))


def traced(*calls: Call, seconds: float = 2.0) -> tuple[TracedOp, ...]:
    return tuple(
        TracedOp(name=call.name, shapes=call.shapes, forward_s=seconds, backward_s=2 * seconds)
        for call in calls
    )


def test_kernels_of_a_gpu_go_to_the_calls_that_launched_them_and_backward_to_its_maker() -> None:
    (trace,) = read_ops([str(GPU)])
    first = trace.runs[0]
    assert [op.name for op in first] == ["aten::linear", "aten::relu", "aten::sum"]
    assert [op.forward_s for op in first] == pytest.approx([20e-6, 3e-6, 2e-6])
    # both sums of gradients follow nodes of the linear layer; NCCL's kernel is no op
    assert [op.backward_s for op in first] == pytest.approx([33e-6, 4e-6, 0])
    assert traced_type([trace], load_catalogue(), None) == "a100"
    found = with_traced_costs(estimated(3), [[LINEAR], [RELU], [SUM]], [trace])
    assert (found.passes, found.estimated) == (1, ())  # the first of two does not count
    costs = found.graph.costs[0]
    assert costs.origin is CostOrigin.MEASURED
    assert costs.forward_s.tolist() == pytest.approx([21e-6, 3e-6, 2e-6])
    assert costs.backward_input_s.tolist() == pytest.approx([0.75 * 33e-6, 3e-6, 0])


def test_passes_that_follow_one_another_are_told_apart_and_what_is_missing_stays_estimated() -> (
    None
):
    run = traced(LINEAR, SUM) + traced(LINEAR, SUM, seconds=3) + traced(LINEAR, SUM, seconds=5)
    trace = TracedOps(runs=(run,), has_shapes=True)
    found = with_traced_costs(estimated(3), [[LINEAR], [RELU], [SUM]], [trace])
    assert found.passes == 2
    assert found.estimated == (found.graph.ops.names[1],)
    assert f"still estimated: {found.estimated[0]}" in found.lines()[0]
    assert sorted(found.graph.costs[0].forward_s.tolist()) == [1, 4, 4]


def test_calls_between_those_of_an_op_are_its_own_and_without_shapes_names_count() -> None:
    other = Call("aten::mul", ())
    trace = TracedOps(runs=(traced(LINEAR, other, SUM),), has_shapes=False)
    found = with_traced_costs(estimated(1), [[Call("aten::linear", ()), RELU, SUM]], [trace])
    assert found.graph.costs[0].forward_s.tolist() == [6]


def test_less_than_half_is_refused_with_the_shapes_that_differ() -> None:
    trace = TracedOps(
        runs=(traced(Call("aten::linear", ((2, 8), (16, 8), (16,)))),), has_shapes=True
    )
    with pytest.raises(InvalidInputError, match=r"0 of the 2 ops.* 4x8 and .* 2x8 .*batch-size"):
        with_traced_costs(estimated(2), [[LINEAR], [RELU]], [trace])
    with pytest.raises(InvalidInputError, match=r"another model, or .* compiled"):
        with_traced_costs(estimated(1), [[RELU]], [trace])


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory with a model and a trace of three steps of it, made by torch."""
    place = tmp_path_factory.mktemp("traced")
    (place / "traced_model.py").write_text(SOURCE)
    scope: dict = {}
    exec(SOURCE, scope)
    model, (inputs, labels), loss = scope["make"]()
    optimizer = torch.optim.AdamW(model.parameters())
    with torch_profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler:
        for _ in range(3):
            optimizer.zero_grad()
            loss(model(inputs), labels).backward()
            optimizer.step()
    profiler.export_chrome_trace(str(place / "trace.json"))
    return place


def profiled(place: Path, monkeypatch: pytest.MonkeyPatch, **options: object) -> ProfileResult:
    monkeypatch.chdir(place)
    monkeypatch.syspath_prepend(str(place))
    return profile("traced_model:make", from_trace=("trace.json",), **options)


def test_every_op_of_a_traced_model_is_found(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = profiled(place, monkeypatch, batch_size=4)
    costs = result.graph.costs[0]
    assert result.traced is not None
    assert (result.traced.estimated, result.traced.passes) == ((), 2)
    assert costs.device_type == "cpu"
    assert (costs.forward_s > 0).all()
    assert (costs.backward_s > 0).all()
    assert costs.backward_s.sum() < 10
    assert "6 of 6 ops as they were traced" in "\n".join(result.lines())
    assert result.to_json()["trace"]["ops"] == 6
    inference = profiled(place, monkeypatch, batch_size=4, mode="inference", granularity="module")
    assert not inference.graph.costs[0].backward_s.any()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"batch_size": 2}, "half or more: .* 2x8 and .* 4x8"),
        ({"estimate": "a100"}, "no kernels of a GPU; they say nothing of a100"),
        ({"rounds": 3}, "--rounds is for what is measured here"),
        ({"recompute": "full"}, "--recompute is for estimates"),
    ],
)
def test_traces_of_something_else_are_refused(
    place: Path, monkeypatch: pytest.MonkeyPatch, options: dict, words: str
) -> None:
    with pytest.raises(InvalidInputError, match=words) as caught:
        profiled(place, monkeypatch, **options)
    assert "\n" not in str(caught.value)


def test_traces_of_two_types_of_devices_are_refused(place: Path) -> None:
    with pytest.raises(InvalidInputError, match="a host without GPU and NVIDIA A100"):
        read_ops([str(GPU), str(place / "trace.json")])
