"""Bloom language models: ALiBi instead of positions, a norm behind the embedding, tied head.

The first layer makes the mask (batch, 1, length, length) and the ALiBi slopes (batch × heads, 1,
length) that every block reads, so both travel over every later cut, as in the published runs.
Layers as Merak counts them: the embeddings, the blocks, the head.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from partita.models.attention import FusedAttention, added_mask, initialise_normal
from partita.models.gpt import FeedForward, LanguageHead
from partita.models.scaling import scaled_heads, scaled_vocabulary


@dataclass(frozen=True, slots=True)
class BloomSize:
    """Widths and depth of a Bloom."""

    hidden: int
    num_blocks: int
    num_heads: int
    vocabulary: int = 250880


def alibi_slopes(num_heads: int) -> list[float]:
    """Return the slope of each head (Press et al. 2022, also for other than powers of two).

    >>> alibi_slopes(2), len(alibi_slopes(3))
    ([0.0625, 0.00390625], 3)
    """
    closest = 2 ** int(math.log2(num_heads))
    slopes = [2.0 ** (-8.0 * (head + 1) / closest) for head in range(closest)]
    extra = [2.0 ** (-4.0 * (head + 1) / closest) for head in range(0, 2 * closest, 2)]
    return slopes + extra[: num_heads - closest]


class BloomEmbeddings(nn.Module):
    """Embeds the tokens; makes the mask and the slopes of ALiBi."""

    def __init__(self, vocabulary: int, hidden: int, num_heads: int) -> None:
        super().__init__()
        self.slopes = alibi_slopes(num_heads)
        self.words = nn.Embedding(vocabulary, hidden)
        self.norm = nn.LayerNorm(hidden)

    def forward(self, tokens: Tensor, seen: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the hidden state, the mask and ALiBi."""
        x = self.norm(self.words(tokens))
        batch, length = tokens.shape
        causal = torch.ones(length, length, dtype=x.dtype, device=x.device).tril()
        mask = added_mask(seen[:, None, None, :] * causal, x.dtype)
        slopes = torch.tensor(self.slopes, dtype=x.dtype, device=x.device)
        positions = ((seen.cumsum(-1) - 1) * seen).to(x.dtype)
        alibi = slopes[:, None] * positions[:, None, :]
        return x, mask, alibi.reshape(batch * len(self.slopes), 1, length)


class BloomBlock(nn.Module):
    """Attention with ALiBi and feed-forward, each behind a norm and beside a skip connection."""

    def __init__(self, num_heads: int, head_width: int) -> None:
        super().__init__()
        hidden = num_heads * head_width
        self.num_heads = num_heads
        self.norm_1 = nn.LayerNorm(hidden)
        self.attention = FusedAttention(num_heads, head_width, 0.0)
        self.norm_2 = nn.LayerNorm(hidden)
        self.feed_forward = FeedForward(hidden, 0.0)

    def forward(self, x: Tensor, mask: Tensor, alibi: Tensor) -> Tensor:
        """Return the next hidden state."""
        bias = alibi.view(x.shape[0], self.num_heads, 1, x.shape[1]) + mask
        x = x + self.attention(self.norm_1(x), bias)
        result: Tensor = x + self.feed_forward(self.norm_2(x))
        return result


class Bloom(nn.Module):
    """A causal language model: tokens and what is seen of them to logits."""

    def __init__(self, size: BloomSize, scale: float = 1.0) -> None:
        super().__init__()
        heads, head_width = scaled_heads(size.num_heads, size.hidden // size.num_heads, scale)
        hidden, vocabulary = heads * head_width, scaled_vocabulary(size.vocabulary, scale)
        self.embeddings = BloomEmbeddings(vocabulary, hidden, heads)
        self.blocks = nn.ModuleList(BloomBlock(heads, head_width) for _ in range(size.num_blocks))
        self.head = LanguageHead(hidden, vocabulary)
        self.head.decoder.weight = self.embeddings.words.weight
        initialise_normal(self)

    def forward(self, tokens: Tensor, seen: Tensor) -> Tensor:
        """Return the logits of the next token at every position."""
        x, mask, alibi = self.embeddings(tokens, seen)
        for block in self.blocks:
            x = block(x, mask, alibi)
        logits: Tensor = self.head(x)
        return logits
