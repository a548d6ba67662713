"""Backward in two halves gives what backward in one go gives, to the bit."""

import pytest
import torch
from torch import Tensor, nn

from partita.runtime import split_backward
from partita.runtime.split_backward import SplitBackward


@pytest.fixture(autouse=True)
def split_small_ones_too(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    monkeypatch.setattr(split_backward, "_WORTH_SPLITTING", 0)


def halves(model: nn.Module, x: Tensor, *more: Tensor) -> tuple[SplitBackward, list[Tensor]]:
    """Check both halves against one go; return the split and the outputs."""
    made = model(x, *more)
    outputs = list(made) if isinstance(made, tuple) else [made]
    cotangents = [torch.randn_like(output) for output in outputs]
    weights = dict(model.named_parameters())
    split = SplitBackward(outputs, cotangents, [x], weights)
    of_inputs, of_weights = split.input_gradients(), split.weight_gradients()
    expected = torch.autograd.grad(
        outputs, [x, *weights.values()], cotangents, allow_unused=True, retain_graph=True
    )
    assert torch.equal(of_inputs[0], expected[0])
    wanted = {n: g for n, g in zip(weights, expected[1:], strict=True) if g is not None}
    assert list(of_weights) == list(wanted)
    assert all(torch.equal(of_weights[name], wanted[name]) for name in wanted)
    return split, outputs


def entering(*shape: int) -> Tensor:
    return torch.randn(shape, requires_grad=True)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.once, self.twice = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.twice(torch.tanh(self.once(self.twice(x))))


class Beside(nn.Module):
    """One output does not depend on the input, one parameter is made of another, one is unused."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.offset = nn.Parameter(torch.randn(4)), nn.Parameter(torch.randn(4))
        self.unused = nn.Parameter(torch.randn(4))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x * torch.exp(self.scale) + self.offset, self.offset * 2


@pytest.mark.parametrize(
    ("model", "shape", "nodes"),
    [
        (nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4)), (3, 4), 2),
        (nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.ReLU(True)), (2, 2, 6, 6), 2),
        (nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True), (2, 5, 8), None),
        (nn.LSTM(4, 4, batch_first=True), (2, 3, 4), None),
        (Tied(), (3, 4), 1),
        (Beside(), (3, 4), 1),
    ],
    ids=["linear", "convolution", "attention", "lstm", "tied", "beside"],
)
def test_both_halves_are_one_backward(
    model: nn.Module, shape: tuple[int, ...], nodes: int | None
) -> None:
    split, _ = halves(Flat(model), entering(*shape))
    if nodes is not None:
        assert len(split._weights_of) == nodes


class Flat(nn.Module):
    """Returns the tensors that a model returns as one tuple."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        made = self.model(x)
        if isinstance(made, Tensor):
            return (made,)
        return tuple(t for part in made for t in (part if isinstance(part, tuple) else (part,)))


def test_the_second_half_does_not_walk_the_way_again() -> None:
    walked = []

    class Watched(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: Tensor) -> Tensor:
            return x * 1

        @staticmethod
        def backward(ctx: object, gradient: Tensor) -> Tensor:
            walked.append(1)
            return gradient * 1

    first, last = nn.Linear(4, 4), nn.Linear(4, 4)
    x = entering(2, 4)
    output = last(Watched.apply(first(x)))
    weights = {"first": first.weight, "last": last.weight}
    split = SplitBackward([output], [torch.ones_like(output)], [x], weights)
    split.input_gradients()
    split.weight_gradients()
    assert walked == [1]


def test_small_tensors_are_differentiated_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(split_backward, "_WORTH_SPLITTING", 1000)
    split, _ = halves(Flat(nn.Linear(4, 4)), entering(2, 4))
    assert not split._weights_of
