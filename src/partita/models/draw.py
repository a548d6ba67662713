"""Random numbers for generated data: the same for the same seed, shapes alone on meta."""

import torch
from torch import Tensor


class Draw:
    """Draws tensors from a seeded generator.

    Numbers are drawn on the CPU and then moved, so that every device gets the same. On the meta
    device nothing is drawn and nothing allocated.
    """

    def __init__(self, seed: int, device: torch.device | str = "cpu") -> None:
        self.device = torch.device(device)
        self._generator = torch.Generator().manual_seed(seed)

    @property
    def is_meta(self) -> bool:
        """Whether tensors have shapes and no values."""
        return self.device.type == "meta"

    def integers(self, low: int, high: int, *shape: int) -> Tensor:
        """Return integers from ``low`` up to, but not including, ``high``."""
        if self.is_meta:
            return torch.empty(shape, dtype=torch.long, device=self.device)
        drawn = torch.randint(low, high, shape, generator=self._generator, dtype=torch.long)
        return drawn.to(self.device)

    def uniform(self, *shape: int) -> Tensor:
        """Return numbers between 0 and 1."""
        if self.is_meta:
            return torch.empty(shape, dtype=torch.float32, device=self.device)
        drawn = torch.rand(shape, generator=self._generator, dtype=torch.float32)
        return drawn.to(self.device)

    def normal(self, *shape: int) -> Tensor:
        """Return numbers of a standard normal distribution."""
        if self.is_meta:
            return torch.empty(shape, dtype=torch.float32, device=self.device)
        drawn = torch.randn(shape, generator=self._generator, dtype=torch.float32)
        return drawn.to(self.device)

    def ones(self, *shape: int) -> Tensor:
        """Return integer ones."""
        return torch.ones(shape, dtype=torch.long, device=self.device)

    def choices(self, options: int, chosen: int, *shape: int) -> Tensor:
        """Return, for every cell of a shape, some distinct numbers below ``options``, ascending."""
        order = self.uniform(*shape, options).argsort(-1)
        return order[..., :chosen].sort(-1).values
