"""Parts of the stages of an exported package; every such package has a copy of this file.

It imports nothing but torch, so that the package runs wherever torch does.
"""

from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn


class Part(nn.Module):
    """A module that holds parameters and modules under dotted names, as another model has them."""

    def add(self, path: str, value: nn.Module | nn.Parameter) -> None:
        """Put a module or a parameter at a path; the modules around it are made."""
        holder, name = self._holder(path)
        setattr(holder, name, value)

    def add_buffer(self, path: str, value: Tensor, *, persistent: bool = True) -> None:
        """Put a buffer at a path."""
        holder, name = self._holder(path)
        holder.register_buffer(name, value, persistent=persistent)

    def _holder(self, path: str) -> tuple[nn.Module, str]:
        *above, name = path.split(".")
        holder: nn.Module = self
        for step in above:
            if step not in holder._modules:  # noqa: SLF001  # a name such as "0" is no attribute
                holder.add_module(step, Part())
            holder = holder.get_submodule(step)
        return holder, name

    def __getitem__(self, name: int | str) -> Any:  # noqa: ANN401  # a module or a tensor
        """Return what stands under a name that is no identifier, such as the number of a block."""
        return getattr(self, str(name))


class Whole(nn.Module):
    """The stages as one model, whose parameters have the names of the original model.

    Attributes:
        stages: The stages, in the order of the data.
        aliases: Other names of tied parameters, with the names that they have here.
        unused: Names of parameters that no stage computes with.
    """

    stages: tuple[nn.Module, ...]
    aliases: Mapping[str, str]
    unused: frozenset[str]

    def join(
        self, stages: Iterable[nn.Module], aliases: Mapping[str, str], unused: Iterable[str]
    ) -> None:
        """Take the stages in; parameters of the same name become one."""
        self.stages = tuple(stages)
        self.aliases, self.unused = dict(aliases), frozenset(unused)
        first: dict[str, nn.Parameter] = {}
        for stage in self.stages:
            for name, parameter in list(stage.named_parameters()):
                if name in first:
                    holder = stage.get_submodule(name.rpartition(".")[0])
                    setattr(holder, name.rpartition(".")[2], first[name])
                first.setdefault(name, parameter)

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the parameters by their names in the original model."""
        found: dict[str, nn.Parameter] = {}
        for stage in self.stages if recurse else ():
            for name, parameter in stage.named_parameters(remove_duplicate=remove_duplicate):
                found.setdefault(name, parameter)
        yield from ((f"{prefix}.{n}" if prefix else n, p) for n, p in found.items())

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]  # noqa: ANN401
        """Return parameters and buffers by their names in the original model."""
        found: dict[str, Any] = {}
        for stage in self.stages:
            for name, tensor in stage.state_dict(*args, **kwargs).items():
                found.setdefault(name, tensor)
        found.update((alias, found[name]) for alias, name in self.aliases.items() if name in found)
        return found

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:  # noqa: ANN401  # torch's pair of names
        """Load the state of the original model, by name."""
        given = dict(state_dict)
        for alias, name in self.aliases.items():
            if alias in given:
                given.setdefault(name, given[alias])
        known = {*self.aliases, *self.unused}
        missing: dict[str, None] = {}
        for stage in self.stages:
            wanted = stage.state_dict()
            known.update(wanted)
            own = {name: given[name] for name in wanted if name in given}
            missing.update(dict.fromkeys(name for name in wanted if name not in own))
            stage.load_state_dict(own, strict=False, assign=assign)
        odd = [name for name in given if name not in known]
        if strict and (missing or odd):
            raise RuntimeError(f"missing: {list(missing)}; not of this model: {odd}")
        return nn.modules.module._IncompatibleKeys(list(missing), odd)  # noqa: SLF001  # torch's


def drawn(
    *shape: int,
    mean: float = 0.0,
    deviation: float = 0.0,
    dtype: torch.dtype = torch.float32,
    trainable: bool = True,
) -> nn.Parameter:
    """Return a parameter with normally distributed values."""
    values = torch.full(shape, mean, dtype=dtype)
    if deviation:
        values += deviation * torch.randn(shape, dtype=dtype)
    return nn.Parameter(values, requires_grad=trainable)


@cache
def _constants() -> dict[str, Tensor]:
    found: dict[str, Tensor] = torch.load(
        Path(__file__).with_name("constants.pt"), map_location="cpu", weights_only=True
    )
    return found


def constant(name: str) -> Tensor:
    """Return a tensor of the file beside: one that depends on neither inputs nor parameters."""
    return _constants()[name].clone()


def copied(*tensors: Tensor) -> list[Tensor]:
    """Return copies; those that share memory share the memory of their copies."""
    copies: dict[int, Tensor] = {}
    made = []
    for tensor in tensors:
        if tensor.requires_grad or tensor.layout is not torch.strided:
            made.append(tensor.clone())
            continue
        key = tensor.untyped_storage().data_ptr()
        if key not in copies:
            whole = torch.empty(0, dtype=torch.uint8, device=tensor.device)
            copies[key] = whole.set_(tensor.untyped_storage()).clone()
        view = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        place = (tensor.storage_offset(), tensor.shape, tensor.stride())
        made.append(view.set_(copies[key].untyped_storage(), *place))
    return made
