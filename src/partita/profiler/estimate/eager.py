"""Unfused forms of ops: the arithmetic of PyTorch 1.10 with models written in Python.

Each function computes what the captured op computes, kernel by kernel, so that tracing it shows the
kernels, copies and gradients of an eager run: scores, mask, softmax and dropout of attention go
through memory, the tanh form of GELU is eight kernels, RMS norm is five.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 (torch's own name for it)
from torch import Tensor


def eager_attention(  # noqa: PLR0913  # torch's signature
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Return attention with every step through memory; operands of products are made contiguous."""
    if enable_gqa:
        times = query.shape[-3] // key.shape[-3]
        key, value = key.repeat_interleave(times, -3), value.repeat_interleave(times, -3)
    factor = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    scores = torch.matmul(query.contiguous(), key.contiguous().transpose(-1, -2))
    if factor != 1.0:
        scores = scores * factor
    if is_causal:
        rows, columns = scores.shape[-2:]
        seen = torch.ones(rows, columns, dtype=torch.bool, device=scores.device).tril()
        lowest = torch.full((), -1e4, dtype=scores.dtype, device=scores.device)
        scores = torch.where(seen, scores, lowest)
    elif attn_mask is not None and attn_mask.dtype == torch.bool:
        scores = scores.masked_fill(attn_mask.logical_not(), -1e4)
    elif attn_mask is not None:
        scores = scores + attn_mask
    shares = F.softmax(scores, -1)
    if dropout_p > 0:
        shares = kept_dropout(shares, dropout_p)
    return torch.matmul(shares, value.contiguous())


def eager_gelu(x: Tensor, approximate: str = "none") -> Tensor:
    """Return GELU; its tanh form as eight kernels."""
    if approximate == "none":
        return F.gelu(x)
    inner = math.sqrt(2 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))
    return 0.5 * x * (1.0 + torch.tanh(inner))


def eager_rms_norm(
    x: Tensor,
    normalized_shape: Any = None,  # noqa: ANN401  # as torch has it; the last one here
    weight: Tensor | None = None,
    eps: float | None = None,
) -> Tensor:
    """Return the RMS norm over the last dimension, kernel by kernel."""
    square = x.pow(2).mean(-1, keepdim=True)
    y = x * torch.rsqrt(square + (eps or 1e-6))
    return y if weight is None else weight * y


def eager_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return a linear layer whose bias is a pass of its own, there and back."""
    y = F.linear(x, weight)
    return y if bias is None else y.add_(bias)


def kept_dropout(
    x: Tensor,
    p: float = 0.5,
    training: bool = True,  # as torch has it
    inplace: bool = False,  # as torch has it
) -> Tensor:
    """Return dropout as a device runs it: one kernel, which keeps the mask."""
    if not training or p == 0:
        return x.view_as(x)
    return torch.native_dropout(x, p, True)[0]  # as torch has it


DEVICE_FORMS: Mapping[str, Callable[..., Tensor]] = {"dropout": kept_dropout}
"""Ops that are one kernel on a device and several without one."""

EAGER_FORMS: Mapping[str, Callable[..., Tensor]] = {
    "scaled_dot_product_attention": eager_attention,
    "gelu": eager_gelu,
    "rms_norm": eager_rms_norm,
    "linear": eager_linear,
    **DEVICE_FORMS,
}
