"""Attention shared by the transformers of the zoo.

The product of queries, keys and values is one call of ``scaled_dot_product_attention``, so that a
captured graph holds it as one op; whether a device runs it fused is a matter of its cost.
"""

import torch
import torch.nn.functional as F  # noqa: N812 (torch's own name for it)
from torch import Tensor, nn

INITIAL_DEVIATION = 0.02


class FusedAttention(nn.Module):
    """Self attention whose queries, keys and values come from one projection (GPT, Bloom)."""

    def __init__(self, num_heads: int, head_width: int, dropout: float) -> None:
        super().__init__()
        hidden = num_heads * head_width
        self.num_heads = num_heads
        self.dropout = dropout
        self.qkv = nn.Linear(hidden, 3 * hidden)
        self.output = nn.Linear(hidden, hidden)

    def forward(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Attend; causally where no bias (mask) is given."""
        batch, length, hidden = x.shape
        qkv = self.qkv(x).view(batch, length, 3, self.num_heads, hidden // self.num_heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        mixed = F.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=bias,
            dropout_p=self.dropout if self.training else 0.0,
            is_causal=bias is None,
        )
        result: Tensor = self.output(mixed.transpose(1, 2).reshape(batch, length, hidden))
        return result


class SplitAttention(nn.Module):
    """Attention with a projection each for queries, keys and values (BERT, T5, Transformer)."""

    def __init__(
        self,
        hidden: int,
        num_heads: int,
        head_width: int,
        *,
        bias: bool,
        dropout: float,
        factor: float | None = None,
    ) -> None:
        super().__init__()
        inner = num_heads * head_width
        self.num_heads = num_heads
        self.dropout = dropout
        self.factor = factor
        self.query = nn.Linear(hidden, inner, bias=bias)
        self.key = nn.Linear(hidden, inner, bias=bias)
        self.value = nn.Linear(hidden, inner, bias=bias)
        self.output = nn.Linear(inner, hidden, bias=bias)

    def forward(self, x: Tensor, memory: Tensor, mask: Tensor | None = None) -> Tensor:
        """Attend from ``x`` to ``memory``; a float mask is added, a bool one says what is seen."""
        mixed = F.scaled_dot_product_attention(
            self._split(self.query(x)),
            self._split(self.key(memory)),
            self._split(self.value(memory)),
            attn_mask=mask,
            dropout_p=self.dropout if self.training else 0.0,
            scale=self.factor,
        )
        result: Tensor = self.output(mixed.transpose(1, 2).flatten(2))
        return result

    def _split(self, x: Tensor) -> Tensor:
        return x.view(x.shape[0], x.shape[1], self.num_heads, -1).transpose(1, 2)


def initialise_normal(model: nn.Module, deviation: float = INITIAL_DEVIATION) -> None:
    """Draw linear and embedding weights from a normal distribution and zero the biases.

    Models on the meta device are left alone.
    """
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.Embedding) and not module.weight.is_meta:
            nn.init.normal_(module.weight, std=deviation)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)


def added_mask(seen: Tensor, dtype: torch.dtype) -> Tensor:
    """Return 0 where a position is seen (1 in ``seen``) and the lowest number elsewhere."""
    return (1.0 - seen.to(dtype)) * torch.finfo(dtype).min
