"""Optimizers of a name."""

import pytest
import torch
from torch import nn

from partita.runtime import optimizers
from partita.runtime.optimizers import make_optimizer
from partita.runtime.recipe import Recipe


@pytest.mark.parametrize("scratch_bytes", [2**24, 200])
def test_adam_in_pieces_is_torchs_adam(scratch_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optimizers, "_SCRATCH_BYTES", scratch_bytes)
    torch.manual_seed(2)
    shapes = [(40, 3), (5,), (), (2, 2), (33,)]
    ours = {str(place): torch.randn(shape) for place, shape in enumerate(shapes)}
    theirs = [nn.Parameter(tensor.clone()) for tensor in ours.values()]
    recipe = Recipe(optimizer="adam", learning_rate=0.01)
    stepping = make_optimizer(recipe, ours)
    plain = torch.optim.Adam(theirs, lr=0.01, foreach=True)
    for _ in range(3):
        # As products of matrices give them: not contiguous.
        gradients = [
            torch.randn(shape[::-1]).mT if len(shape) == 2 else torch.randn(shape)
            for shape in shapes
        ]
        for parameter, gradient in zip(theirs, gradients, strict=True):
            parameter.grad = gradient
        named = zip(ours.items(), gradients, strict=True)
        stepping.step({name: (tensor, gradient) for (name, tensor), gradient in named})
        stepping.end_step()
        plain.step()
    assert all(map(torch.equal, ours.values(), theirs))
    assert all(float(state["step"]) == 3 for state in stepping.state().values())
