"""Optimizers of a name."""

import pytest
import torch
from torch import nn

from partita.runtime.training import optimizers
from partita.runtime.training.optimizers import make_optimizer
from partita.runtime.training.recipe import Recipe, ScriptRecipe


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


@pytest.mark.parametrize("kind", ["SGD", "Adam", "AdamW"])
def test_small_groups_of_a_scripts_optimizer_are_stepped_at_once_and_alike(kind: str) -> None:
    shapes = [(40, 3), (5,), (2, 2)]
    torch.manual_seed(3)
    ours = {str(place): torch.randn(shape) for place, shape in enumerate(shapes)}
    theirs = [nn.Parameter(tensor.clone()) for tensor in ours.values()]
    settings = {"lr": 0.01, "weight_decay": 0.1, **({"momentum": 0.9} if kind == "SGD" else {})}

    def make(groups: object, **more: object) -> torch.optim.Optimizer:
        return getattr(torch.optim, kind)(groups, **settings, **more)

    stepping = make_optimizer(ScriptRecipe(make_optimizer=make), ours)
    plain = make(theirs, foreach=False)
    for _ in range(3):
        gradients = [torch.randn(shape) for shape in shapes]
        for parameter, gradient in zip(theirs, gradients, strict=True):
            parameter.grad = gradient.clone()
        named = zip(ours.items(), gradients, strict=True)
        stepping.step({name: (tensor, gradient) for (name, tensor), gradient in named})
        plain.step()
    assert all(map(torch.equal, ours.values(), theirs))
    assert stepping.optimizer.param_groups[0]["foreach"] is True


def test_large_groups_and_those_that_a_script_chose_for_are_left_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ours = {"weight": torch.randn(8)}

    def way(**more: object) -> object:
        recipe = ScriptRecipe(make_optimizer=lambda groups: torch.optim.Adam(groups, **more))
        return make_optimizer(recipe, ours).optimizer.param_groups[0]["foreach"]

    assert way(foreach=False) is False
    assert not way(fused=True)
    assert way(lr=torch.tensor(0.1)) is None
    monkeypatch.setattr(optimizers, "_SCRATCH_BYTES", 16)
    assert way() is None
