"""Capturing without values: parameters and buffers are fake, and so is all that depends on them.

A fake tensor (``torch._subclasses``) has shape, type and device, and no memory. Inputs and what a
model makes of numbers alone stay real, so that constants are captured with their values, and a
model may look at its inputs. Where it looks at what depends on parameters, or calls what does not
know fake tensors, it cannot be captured so.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from partita.capture.partial import is_stand_in
from partita.capture.setting import Setting


@contextmanager
def without_values(setting: Setting) -> Iterator[Setting]:
    """Put fake tensors in the place of a model's parameters and buffers, and bring them back.

    Yields:
        The setting with the fake tensors.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    fake_of: dict[int, Tensor] = {}

    def fake(tensor: Tensor) -> Tensor:
        if id(tensor) not in fake_of:
            fake_of[id(tensor)] = _fake(tensor, mode)
        return fake_of[id(tensor)]

    held = [
        (table, key, tensor)
        for module in dict.fromkeys(setting.modules.values())
        for table in (module._parameters, module._buffers)  # noqa: SLF001  # objects, not copies
        for key, tensor in table.items()
        if tensor is not None
    ]
    try:
        for table, key, tensor in held:
            table[key] = fake(tensor)  # type: ignore[assignment]  # a fake parameter is one
        yield replace(
            setting, parameters={name: fake(tensor) for name, tensor in setting.parameters.items()}
        )
    finally:
        for table, key, tensor in held:
            table[key] = tensor  # type: ignore[assignment]  # what it was


def _fake(tensor: Tensor, mode: FakeTensorMode) -> Tensor:
    if not is_stand_in(tensor):
        return mode.from_tensor(tensor)
    with mode:
        made = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
        if isinstance(tensor, nn.Parameter):
            return nn.Parameter(made, requires_grad=tensor.requires_grad)
        return made


def load_what_torch_loads_late() -> None:
    """Import what torch imports when a fake or meta tensor is first used."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    weight = _fake(nn.Parameter(torch.zeros(4, 4)), mode)
    made = nn.functional.linear(torch.zeros(2, 4), weight)
    nn.functional.cross_entropy(nn.functional.layer_norm(made, (4,)), torch.zeros(2).long())
    torch.empty(4, device="meta").normal_()
