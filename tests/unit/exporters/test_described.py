"""Packages from descriptions of layers alone."""

import importlib
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from partita.errors import InvalidInputError
from partita.exporters.described import described_blueprint
from partita.exporters.layers import constructor_of
from partita.exporters.package import package_files
from partita.formats.pipedream import read_pipedream, read_pipedream_plan

COSTS = "forward_compute_time=1.000, backward_compute_time=2.000, activation_size=4.0, "


def text_of(nodes: list[tuple[str, str, int]], edges: list[tuple[str, str]]) -> str:
    """Return a gpus=N.txt of (id, description, stage) and edges."""
    lines = [
        f"{name} -- {what} -- {COSTS}parameter_size=0.000 -- stage_id={stage}"
        for name, what, stage in nodes
    ]
    return "\n".join([*lines, *(f"\t{a} -- {b}" for a, b in edges)])


BRANCHED = text_of(
    [
        ("node9", "Linear(in_features=36, out_features=3, bias=True)", 1),
        ("node2", "Conv2d(2, 2, kernel_size=(3, 3), stride=(1, 1), padding=(1, 1))", 0),
        ("node3", "ReLU(inplace)", 0),
        ("node4", "Add", 0),
        ("node5", "Concat(1)", 1),
        ("node6", "Size(0)", 1),
        ("node7", "View(-1)", 1),
        ("node8", "Dropout(p=0.5)", 1),
        ("node1", "Input0", 0),
    ],
    [
        ("node1", "node2"),
        ("node2", "node3"),
        ("node2", "node4"),
        ("node3", "node4"),
        ("node2", "node5"),
        ("node4", "node5"),
        ("node5", "node6"),
        ("node6", "node7"),
        ("node5", "node7"),
        ("node7", "node8"),
        ("node8", "node9"),
    ],
)


def write(text: str, folder: Path) -> None:
    graph = read_pipedream(text, name="described")
    blueprint = described_blueprint(graph, read_pipedream_plan(text, graph))
    for name, data in package_files(blueprint, folder.name, None).items():
        (folder / name).write_bytes(data)


def test_layers_and_words_become_a_model_that_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "described_branches"
    folder.mkdir()
    write(BRANCHED, folder)
    monkeypatch.syspath_prepend(str(tmp_path))
    package = importlib.import_module(folder.name)
    try:
        model = package.full_model().eval()
        x = torch.randn(5, 2, 3, 3)
        state = model.state_dict()
        conv = torch.conv2d(x, state["node2.weight"], state["node2.bias"], padding=1)
        joined = torch.cat([conv, conv + conv.relu()], 1)
        wanted = nn.functional.linear(
            joined.reshape(5, -1), state["node9.weight"], state["node9.bias"]
        )
        torch.testing.assert_close(model(x), wanted)
        assert package.arch() == "described"
        criterion = nn.MSELoss()
        modules = package.model(criterion)
        assert [row[1:] for row in modules] == [
            (["node1"], ["node2", "node4"]),
            (["node2", "node4"], ["node9"]),
            (["node9"], ["loss"]),
        ]
        assert modules[-1][0] is criterion
        first = modules[0][0](x)
        assert torch.equal(modules[1][0].eval()(*first), modules[1][0](*first))
    finally:
        for name in [n for n in sys.modules if n.partition(".")[0] == folder.name]:
            del sys.modules[name]


@pytest.mark.parametrize(
    "what",
    [
        "EmuBidirLSTM(  (bidir): LSTM(4, 4))",
        "hidden",
        "__getitem__",
        "Concat",
        "Linear(in_features=4)",
        "Sequential(  (0): ReLU())",
        "View(x)",
        "__import__('os').system('true')",
        "Linear(4, __import__('os'))",
    ],
)
def test_the_first_node_that_is_no_constructor_is_named(what: str) -> None:
    text = text_of(
        [("node1", "Input0", 0), ("node2", "ReLU()", 0), ("node3", what, 0), ("node4", "odd", 0)],
        [("node1", "node2"), ("node2", "node3"), ("node3", "node4")],
    )
    graph = read_pipedream(text)
    with pytest.raises(InvalidInputError, match="'node3'"):
        described_blueprint(graph, read_pipedream_plan(text, graph))


@pytest.mark.parametrize(
    "layer",
    [
        nn.Linear(2, 3, bias=False),
        nn.Conv2d(4, 6, (3, 1), stride=2, padding=(1, 0), groups=2, padding_mode="circular"),
        nn.Conv1d(2, 3, 2, dilation=2),
        nn.BatchNorm2d(4, eps=1e-3, momentum=None),
        nn.LayerNorm((4, 2), bias=False),
        nn.Embedding(5, 3, padding_idx=1, scale_grad_by_freq=True),
        nn.LSTM(2, 3, num_layers=2, batch_first=True, dropout=0.1, bidirectional=True),
        nn.MaxPool2d(3, 2, ceil_mode=True),
        nn.AdaptiveAvgPool2d((None, 2)),
        nn.GELU(approximate="tanh"),
        nn.Flatten(),
        nn.Softmax(dim=-1),
    ],
    ids=lambda layer: type(layer).__name__,
)
def test_the_constructor_of_a_layer_makes_the_same_layer(layer: nn.Module) -> None:
    source = constructor_of(repr(layer))
    made = eval(source, {"nn": nn})  # the source under test
    assert repr(made) == repr(layer)
    shapes = {name: tensor.shape for name, tensor in layer.state_dict().items()}
    assert {name: tensor.shape for name, tensor in made.state_dict().items()} == shapes
