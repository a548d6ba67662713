"""Costs of several device types in one graph, and models named by the user's code."""

from dataclasses import replace
from functools import cache

import pytest
import torch
import torch.nn.functional as F  # noqa: N812  # as everyone calls it
from torch import nn

from partita.capture.setting import Example
from partita.capture.sources import SourceOptions, check_device, load_source
from partita.core.graph import Graph
from partita.errors import InvalidInputError, UnsupportedError
from partita.profiler.measure.measure import ProfileOptions
from partita.profiler.measure.model import profile_model
from partita.profiler.merge import merge_costs


@cache
def profiled(kind: str, *, batch: int = 2, width: int = 4) -> Graph:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, width), nn.ReLU(), nn.Linear(width, 2))
    return profile_model(
        model,
        Example(args=(torch.ones(batch, 4),), labels=torch.zeros(batch, 2)),
        loss=F.mse_loss,
        options=ProfileOptions(rounds=1, warmup=0, device_type=kind),
    ).graph


def test_costs_of_two_types_stand_in_one_graph() -> None:
    one, two = profiled("a100"), profiled("v100")
    merged = merge_costs([one, two])
    assert [costs.device_type for costs in merged.costs] == ["a100", "v100"]
    assert merged.costs[1] == two.costs[0]
    assert merged.fingerprint == one.fingerprint
    assert set(merged.annotations["profile"]) == {"a100", "v100"}


def test_bytes_of_an_op_are_the_largest() -> None:
    one, two = profiled("a100"), profiled("v100")
    more = replace(two, ops=replace(two.ops, workspace_bytes=two.ops.workspace_bytes + 64))
    merged = merge_costs([one, more])
    assert merged.ops.workspace_bytes.tolist() == more.ops.workspace_bytes.tolist()


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"kind": "a100"}, "x.json and y.json both have costs for 'a100'"),
        ({"kind": "v100", "batch": 3}, "x.json has batch size 2, y.json 3"),
        ({"kind": "v100", "width": 5}, "fingerprint"),
    ],
)
def test_graphs_that_do_not_go_together_are_refused(other: dict, message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        merge_costs([profiled("a100"), profiled(**other)], ["x.json", "y.json"])


def test_one_graph_is_not_enough() -> None:
    with pytest.raises(InvalidInputError, match="two or more"):
        merge_costs([profiled("a100")])


def with_batch(batch_size: int = 3):
    return nn.Linear(4, 1), torch.ones(batch_size, 4)


def with_mapping():
    return nn.Linear(4, 1), {"input": torch.ones(2, 4)}


def with_generator():
    return nn.Linear(4, 1), iter([(torch.ones(2, 4),)]), lambda output, _: output.sum()


def with_factory():
    return nn.Linear(4, 1), lambda size: torch.ones(size, 4)


def without_example():
    return nn.Linear(4, 1)


HERE = __name__


@pytest.mark.parametrize(
    ("name", "size", "samples"),
    [
        ("with_batch", 0, 3),
        ("with_batch", 5, 5),
        ("with_mapping", 0, 2),
        ("with_generator", 2, 2),
        ("with_factory", 7, 7),
    ],
)
def test_a_callable_may_give_its_example_in_many_ways(name: str, size: int, samples: int) -> None:
    source = load_source(f"{HERE}:{name}", SourceOptions(batch_size=size, dtype="float64"))
    example = source.example(0)
    (tensor,) = [*example.args, *example.kwargs.values()]
    assert tensor.shape[0] == samples
    assert tensor.dtype == source.model.weight.dtype == torch.float64
    assert source.name == name


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (f"{HERE}:without_example", "expected a model with example inputs"),
        (f"{HERE}:nothing", "has no 'nothing'"),
        (f"{HERE}:HERE", "expected a callable"),
        ("no_such_module:f", "cannot be imported"),
        ("gpt3-smal", "did you mean"),
    ],
)
def test_what_is_no_model_is_refused(text: str, message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        load_source(text)


def test_an_example_of_another_size_is_refused() -> None:
    source = load_source(f"{HERE}:with_mapping", SourceOptions(batch_size=9))
    with pytest.raises(InvalidInputError, match="2 samples, 9"):
        source.example(0)


def test_a_built_in_model_comes_with_loss_and_layers() -> None:
    source = load_source("gpt3-small", SourceOptions(scale=0.05, sequence_length=8, batch_size=2))
    assert source.example(0).args[0].shape == (2, 8)
    assert source.example(3).batch_size == 3
    assert len(source.layers) == 15
    assert source.loss is not None


def test_devices_that_are_not_there_are_refused() -> None:
    with pytest.raises(InvalidInputError, match="not known"):
        check_device("nonsense")
    with pytest.raises(UnsupportedError):
        check_device("cuda:99")
    with pytest.raises(UnsupportedError, match="cannot be measured"):
        check_device("meta")
    with pytest.raises(InvalidInputError, match="dtype"):
        SourceOptions(dtype="float7")
