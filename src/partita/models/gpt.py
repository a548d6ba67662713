"""GPT-2 and GPT-3 language models as the published Perseus table configures them.

Pre-norm blocks, learned positions, GELU by tanh, head tied to the token embedding. Layers as Merak
counts them: two embeddings, the blocks, the head with the last norm.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from partita.models.attention import FusedAttention, initialise_normal
from partita.models.layers import Layer, named_blocks
from partita.models.scaling import scaled_heads, scaled_vocabulary

DROPOUT = 0.1


@dataclass(frozen=True, slots=True)
class GPTSize:
    """Widths and depth of a GPT."""

    hidden: int
    num_blocks: int
    num_heads: int
    vocabulary: int = 50257
    positions: int = 1024


class PositionEmbedding(nn.Module):
    """Adds what is learned about each position, then drops out."""

    def __init__(self, positions: int, hidden: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(positions, hidden)
        self.dropout = nn.Dropout(DROPOUT)

    def forward(self, x: Tensor) -> Tensor:
        """Return the embedded tokens at their positions."""
        positions = torch.arange(x.shape[1], device=x.device)
        result: Tensor = self.dropout(x + self.embedding(positions))
        return result


class FeedForward(nn.Module):
    """Two linear layers with a GELU between them, four times as wide inside."""

    def __init__(self, hidden: int, dropout: float) -> None:
        super().__init__()
        self.up = nn.Linear(hidden, 4 * hidden)
        self.activation = nn.GELU(approximate="tanh")
        self.down = nn.Linear(4 * hidden, hidden)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Return the transformed positions."""
        result: Tensor = self.dropout(self.down(self.activation(self.up(x))))
        return result


class GPTBlock(nn.Module):
    """Attention and feed-forward, each behind a norm and beside a skip connection."""

    def __init__(self, num_heads: int, head_width: int) -> None:
        super().__init__()
        hidden = num_heads * head_width
        self.norm_1 = nn.LayerNorm(hidden)
        self.attention = FusedAttention(num_heads, head_width, DROPOUT)
        self.dropout = nn.Dropout(DROPOUT)
        self.norm_2 = nn.LayerNorm(hidden)
        self.feed_forward = FeedForward(hidden, DROPOUT)

    def forward(self, x: Tensor) -> Tensor:
        """Return the next hidden state."""
        x = x + self.dropout(self.attention(self.norm_1(x)))
        result: Tensor = x + self.feed_forward(self.norm_2(x))
        return result


class LanguageHead(nn.Module):
    """The last norm and the projection to the vocabulary, whose weight may be tied."""

    def __init__(self, hidden: int, vocabulary: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(hidden)
        self.decoder = nn.Linear(hidden, vocabulary, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits."""
        logits: Tensor = self.decoder(self.norm(x))
        return logits


class GPT(nn.Module):
    """A causal language model: tokens of shape (batch, length) to logits."""

    def __init__(self, size: GPTSize, scale: float = 1.0) -> None:
        super().__init__()
        heads, head_width = scaled_heads(size.num_heads, size.hidden // size.num_heads, scale)
        hidden, vocabulary = heads * head_width, scaled_vocabulary(size.vocabulary, scale)
        self.token_embedding = nn.Embedding(vocabulary, hidden)
        self.position_embedding = PositionEmbedding(size.positions, hidden)
        self.blocks = nn.ModuleList(GPTBlock(heads, head_width) for _ in range(size.num_blocks))
        self.head = LanguageHead(hidden, vocabulary)
        self.head.decoder.weight = self.token_embedding.weight
        initialise_normal(self)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits of the next token at every position."""
        x = self.position_embedding(self.token_embedding(tokens))
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(x)
        return logits


def gpt_layers(model: nn.Module) -> tuple[Layer, ...]:
    """Return the two embeddings, the blocks and the head."""
    return (
        Layer("token_embedding", ("token_embedding",)),
        Layer("position_embedding", ("position_embedding",)),
        *named_blocks(model, "blocks"),
        Layer("head", ("head",)),
    )
