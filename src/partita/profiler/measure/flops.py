"""Floating-point operations of each op's forward, counted from the ATen calls that really run."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from partita.profiler.flops import aten_name, attention_kernels, kernels_of


class ForwardFlops(TorchDispatchMode):
    """Counts the products of matrices, by the op that runs; elementwise work is none, as is usual.

    Attributes:
        by_op: FLOPs of each op.
        current: The op that runs.
    """

    def __init__(self, num_ops: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch has no types for it
        self.by_op = np.zeros(num_ops)
        self.current = 0

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401  # whatever the op returns
        """Run a function and count what it computes."""
        result = func(*args, **(kwargs or {}))
        name = aten_name(func)
        counted = _FUSED.get(name)
        if counted is not None:
            self.by_op[self.current] += counted(args, result)
        else:
            kernels = kernels_of(name, args, kwargs or {}, result)
            self.by_op[self.current] += sum(kernel.flops for kernel in kernels)
        return result


def _attention(args: Sequence[Any], _: object) -> float:
    query, key, value = (tuple(tensor.shape) for tensor in args[:3])
    forward, _ = attention_kernels(query, key, value, causal=False, item=1)
    return sum(kernel.flops for kernel in forward)


def _recurrent(args: Sequence[Any], _: object) -> float:
    """Return the products of all steps with the weights of inputs and of the state."""
    rows = args[0].numel() // args[0].shape[-1]
    return float(2 * rows * (args[1].numel() + args[2].numel()))


def _grouped(args: Sequence[Any], result: object) -> float:
    """Return the products of rows with the matrix of their group."""
    assert isinstance(result, Tensor)
    return float(2 * result.numel() * args[0].shape[-1])


_FUSED: Mapping[str, Callable[[Sequence[Any], object], float]] = {
    "_scaled_dot_product_flash_attention_for_cpu": _attention,
    "_scaled_dot_product_flash_attention": _attention,
    "_scaled_dot_product_efficient_attention": _attention,
    "_scaled_dot_product_cudnn_attention": _attention,
    "mkldnn_rnn_layer": _recurrent,
    "_grouped_mm": _grouped,
}
