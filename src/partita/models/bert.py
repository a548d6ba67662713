"""BERT with the masked-language head, post-norm, exact GELU, decoder tied to the embedding.

Layers as Merak counts them: the embeddings, the blocks, the head.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from partita.models.attention import SplitAttention, added_mask, initialise_normal
from partita.models.layers import Layer, named_blocks
from partita.models.scaling import scaled, scaled_heads, scaled_vocabulary

DROPOUT = 0.1
EPSILON = 1e-12


@dataclass(frozen=True, slots=True)
class BERTSize:
    """Widths and depth of a BERT."""

    hidden: int
    num_blocks: int
    num_heads: int
    feed_forward: int
    vocabulary: int = 30522
    positions: int = 512
    types: int = 2


class Embeddings(nn.Module):
    """Sums what is known of words, positions and segments; makes the mask that blocks add."""

    def __init__(self, size: BERTSize, hidden: int, vocabulary: int) -> None:
        super().__init__()
        self.words = nn.Embedding(vocabulary, hidden)
        self.positions = nn.Embedding(size.positions, hidden)
        self.types = nn.Embedding(size.types, hidden)
        self.norm = nn.LayerNorm(hidden, eps=EPSILON)
        self.dropout = nn.Dropout(DROPOUT)

    def forward(self, tokens: Tensor, seen: Tensor, types: Tensor) -> tuple[Tensor, Tensor]:
        """Return the hidden state and the mask of shape (batch, 1, 1, length)."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.words(tokens) + self.types(types) + self.positions(positions)
        x = self.dropout(self.norm(x))
        return x, added_mask(seen[:, None, None, :], x.dtype)


class BERTBlock(nn.Module):
    """Attention and feed-forward, each followed by a norm over its skip connection."""

    def __init__(self, hidden: int, num_heads: int, feed_forward: int) -> None:
        super().__init__()
        self.attention = SplitAttention(
            hidden, num_heads, hidden // num_heads, bias=True, dropout=DROPOUT
        )
        self.norm_1 = nn.LayerNorm(hidden, eps=EPSILON)
        self.up = nn.Linear(hidden, feed_forward)
        self.activation = nn.GELU()
        self.down = nn.Linear(feed_forward, hidden)
        self.norm_2 = nn.LayerNorm(hidden, eps=EPSILON)
        self.dropout_1 = nn.Dropout(DROPOUT)
        self.dropout_2 = nn.Dropout(DROPOUT)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        """Return the next hidden state."""
        x = self.norm_1(x + self.dropout_1(self.attention(x, x, mask)))
        inner = self.down(self.activation(self.up(x)))
        result: Tensor = self.norm_2(x + self.dropout_2(inner))
        return result


class MaskedLanguageHead(nn.Module):
    """Transforms, then scores every word; the bias of the words is a parameter of its own."""

    def __init__(self, hidden: int, vocabulary: int) -> None:
        super().__init__()
        self.transform = nn.Linear(hidden, hidden)
        self.activation = nn.GELU()
        self.norm = nn.LayerNorm(hidden, eps=EPSILON)
        self.decoder = nn.Linear(hidden, vocabulary, bias=False)
        self.bias = nn.Parameter(torch.zeros(vocabulary))

    def forward(self, x: Tensor) -> Tensor:
        """Return logits."""
        logits: Tensor = self.decoder(self.norm(self.activation(self.transform(x)))) + self.bias
        return logits


class BERT(nn.Module):
    """A masked language model: tokens, what is seen, and segments to logits."""

    def __init__(self, size: BERTSize, scale: float = 1.0) -> None:
        super().__init__()
        heads, head_width = scaled_heads(size.num_heads, size.hidden // size.num_heads, scale)
        hidden, vocabulary = heads * head_width, scaled_vocabulary(size.vocabulary, scale)
        inner = scaled(size.feed_forward, scale)
        self.embeddings = Embeddings(size, hidden, vocabulary)
        self.blocks = nn.ModuleList(BERTBlock(hidden, heads, inner) for _ in range(size.num_blocks))
        self.head = MaskedLanguageHead(hidden, vocabulary)
        self.head.decoder.weight = self.embeddings.words.weight
        initialise_normal(self)

    def forward(self, tokens: Tensor, seen: Tensor, types: Tensor) -> Tensor:
        """Return the logits of the word at every position."""
        x, mask = self.embeddings(tokens, seen, types)
        for block in self.blocks:
            x = block(x, mask)
        logits: Tensor = self.head(x)
        return logits


def bert_layers(model: nn.Module) -> tuple[Layer, ...]:
    """Return the embeddings, the blocks and the head."""
    return (
        Layer("embeddings", ("embeddings",)),
        *named_blocks(model, "blocks"),
        Layer("head", ("head",)),
    )
