"""Plans of PipeDream's files for models."""

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from partita.capture.capture import capture
from partita.capture.captured import CapturedModel
from partita.capture.setting import Example
from partita.core.plan import Plan
from partita.errors import InvalidInputError
from partita.exporters.matched import matched_plan
from partita.formats.pipedream import read_pipedream, read_pipedream_plan, write_pipedream_plan

COSTS = "forward_compute_time=1.000, backward_compute_time=2.000, activation_size=4.0, "


class Branch(nn.Module):
    """Computes the right branch first, then the left one."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.stem = nn.Linear(4, width)
        self.left = nn.Sequential(nn.Linear(width, 6), nn.ReLU(), nn.Linear(6, width))
        self.right = nn.Linear(width, width, bias=False)
        self.head = nn.Linear(width, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        right = self.right(x)
        return self.head(self.left(x) + right)


NODES = (
    ("node1", "Input0", 0),
    ("node2", "Linear(in_features=4, out_features=4, bias=True)", 0),
    ("node3", "Linear(in_features=4, out_features=6, bias=True)", 0),
    ("node4", "ReLU()", 1),
    ("node5", "Linear(in_features=6, out_features=4, bias=True)", 1),
    ("node6", "Linear(in_features=4, out_features=4, bias=False)", 1),
    ("node7", "Add", 1),
    ("node8", "Linear(in_features=4, out_features=2, bias=True)", 2),
)
EDGES = ("1 2", "2 3", "3 4", "4 5", "2 6", "5 7", "6 7", "7 8")


def text_of(nodes: tuple[tuple[str, str, int], ...] = NODES) -> str:
    lines = [f"{n} -- {what} -- {COSTS}parameter_size=0 -- stage_id={s}" for n, what, s in nodes]
    pairs = [edge.split() for edge in EDGES]
    return "\n".join([*lines, *(f"\tnode{a} -- node{b}" for a, b in pairs)])


def captured(width: int = 4) -> CapturedModel:
    loss = lambda output, labels: output.square().mean()  # noqa: E731
    return capture(Branch(width), Example(args=(torch.randn(3, 4),)), loss=loss)


def matched(text: str, model: CapturedModel) -> Plan:
    graph = read_pipedream(text)
    return matched_plan(graph, read_pipedream_plan(text, graph), model)


def test_layers_are_found_by_what_is_before_and_after_them() -> None:
    model = captured()
    plan = matched(text_of(), model)
    stages = dict(zip(model.graph.ops.names, plan.stage_of.tolist(), strict=True))
    assert stages["stem/linear"] == stages["left.0/linear"] == 0
    assert stages["left.1/relu"] == stages["left.2/linear"] == stages["right/linear"] == 1
    assert stages["add"] == 1
    assert stages["head/linear"] == stages["loss/mean"] == 2


def test_activations_may_differ_where_the_weights_do_not() -> None:
    nodes = tuple((n, "Tanh()" if what == "ReLU()" else what, s) for n, what, s in NODES)
    plan = matched(text_of(nodes), captured())
    assert len(plan.stages) == 3


def test_a_model_of_another_width_is_refused_and_the_node_named() -> None:
    with pytest.raises(InvalidInputError, match=r"node 'node2' \(nn.Linear.* another scale"):
        matched(text_of(), captured(width=8))


def test_a_file_that_names_the_ops_of_the_model_is_taken_as_it_is() -> None:
    model = captured()
    plan = matched(text_of(), model)
    again = matched(write_pipedream_plan(model.graph, plan), model)
    np.testing.assert_array_equal(again.stage_of, plan.stage_of)
