"""Optimizers that step one tensor at a time, so that every device steps what it owns."""

from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor

from partita.runtime.parameters import Optimizer, sgd


def momentum(learning_rate: float = 0.1, decay: float = 0.9) -> Optimizer:
    """Return gradient descent with momentum, as ``torch.optim.SGD`` has it."""
    velocity: dict[str, Tensor] = {}

    def step(name: str, parameter: Tensor, gradient: Tensor) -> None:
        if name in velocity:
            velocity[name].mul_(decay).add_(gradient)
        else:
            velocity[name] = gradient.clone()
        parameter.sub_(velocity[name], alpha=learning_rate)

    return step


def adam(
    learning_rate: float = 1e-3, betas: tuple[float, float] = (0.9, 0.999), epsilon: float = 1e-8
) -> Optimizer:
    """Return Adam, as ``torch.optim.Adam`` has it."""
    moments: dict[str, tuple[Tensor, Tensor]] = {}
    turns: dict[str, int] = {}

    def step(name: str, parameter: Tensor, gradient: Tensor) -> None:
        if name not in moments:
            moments[name] = (torch.zeros_like(parameter), torch.zeros_like(parameter))
        mean, square = moments[name]
        turns[name] = turn = turns.get(name, 0) + 1
        mean.lerp_(gradient, 1 - betas[0])
        square.mul_(betas[1]).addcmul_(gradient, gradient, value=1 - betas[1])
        spread = (square.sqrt() / (1 - betas[1] ** turn) ** 0.5).add_(epsilon)
        parameter.addcdiv_(mean, spread, value=-learning_rate / (1 - betas[0] ** turn))

    return step


OPTIMIZERS: Mapping[str, Callable[[float], Optimizer]] = {
    "sgd": sgd,
    "momentum": momentum,
    "adam": adam,
}
LEARNING_RATES: Mapping[str, float] = {"sgd": 0.1, "momentum": 0.1, "adam": 1e-3}


def from_torch(make: Callable[[Iterable[Tensor]], torch.optim.Optimizer]) -> Optimizer:
    """Return an optimizer of torch, made for each parameter by itself.

    Args:
        make: Makes it for some parameters. What it does may not depend on other parameters.
    """
    made: dict[str, tuple[Tensor, torch.optim.Optimizer]] = {}

    def step(name: str, parameter: Tensor, gradient: Tensor) -> None:
        held, optimizer = made.get(name, (None, None))
        if held is not parameter or optimizer is None:
            # A parameter that has become another tensor, as with weight stashing, keeps its state.
            before = optimizer
            optimizer = make([parameter])
            if before is not None:
                optimizer.load_state_dict(before.state_dict())
            made[name] = (parameter, optimizer)
        parameter.grad = gradient
        optimizer.step()
        parameter.grad = None

    return step
