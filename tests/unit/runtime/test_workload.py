"""Where the graph of a plan differs from that of a model."""

import pytest
import torch
from torch import Tensor, nn

from partita.capture.capture import capture
from partita.capture.origin import Captures, ModelOrigin
from partita.capture.setting import Example
from partita.capture.sources import ModelSource
from partita.core.graph import Graph
from partita.core.problem import Problem
from partita.errors import InvalidInputError
from partita.planners.table import solve
from partita.runtime.workload import first_difference, model_workload
from partita.testing.builders import flat_cluster


class Net(nn.Module):
    def __init__(self, width: int = 4, call: str = "relu", *, crossed: bool = False) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, width), nn.Linear(width, 4)
        self._call, self._crossed = call, crossed

    def forward(self, x: Tensor) -> Tensor:
        y = getattr(torch, self._call)(self.a(x))
        if bool(y.sum() > 1e9):
            y = y * 2
        z = self.b(y)
        return (z + y if self._crossed else z + x).sum()


def example(size: int, turn: int = 0) -> Example:
    return Example(args=(torch.ones(size, 4),), batch_size=size)


def graph_of(model: nn.Module) -> Graph:
    return capture(model, example(2), name="net").graph


def test_the_first_op_parameter_or_edge_that_differs_is_named() -> None:
    plain = graph_of(Net())
    assert "the first op that differs is number 1: the plan has 'relu', the model 'tanh'" in (
        first_difference(plain, graph_of(Net(call="tanh")))
    )
    text = first_difference(plain, graph_of(Net(width=8)))
    assert "parameter 'a.weight' is float32 of 64 bytes in the plan, float32 of 128 bytes" in text
    text = first_difference(plain, graph_of(Net(crossed=True)))
    assert "op 'add' reads or makes " in text
    assert first_difference(plain, plain) == "they have other outputs, or another loss"


def test_a_refusal_says_what_the_capture_is_specialised_to() -> None:
    problem = Problem(graph=graph_of(Net()), cluster=flat_cluster(1))
    plan = solve(problem, "single").plan
    source = ModelSource(name="net", model=Net(call="tanh"), example=example, loss=None)
    with pytest.raises(InvalidInputError, match=r"another model.*'tanh'"):
        model_workload(Captures(source, ModelOrigin(text="net")), problem, plan)
