"""The encoder-decoder of "Attention is all you need", as Baechi configures it.

Vocabulary 30000, width 512, feed-forward 2048, 6 + 6 layers, 8 heads, sinusoidal positions, no
shared weights; norms come after the skip connections. The leaves (attention, feed-forward and
positions counting as one each) are the 35 ops of Baechi's graph.
"""

import torch
from torch import Tensor, nn

from partita.models.attention import SplitAttention
from partita.models.scaling import scaled, scaled_heads, scaled_vocabulary

VOCABULARY = 30000
FEED_FORWARD = 2048
NUM_LAYERS = 6
NUM_HEADS = 8
HEAD_WIDTH = 64
POSITIONS = 200
DROPOUT = 0.1
EPSILON = 1e-6
PADDING = 0


class PositionalEncoding(nn.Module):
    """Adds sines and cosines of the position."""

    table: Tensor

    def __init__(self, width: int) -> None:
        super().__init__()
        positions = torch.arange(POSITIONS, dtype=torch.float32)[:, None]
        index = torch.arange(width)
        rates = 10000.0 ** (-2.0 * torch.div(index, 2, rounding_mode="floor") / width)
        angles = positions * rates
        table = torch.where(index % 2 == 0, angles.sin(), angles.cos())
        self.register_buffer("table", table[None])

    def forward(self, x: Tensor) -> Tensor:
        """Return the embedded tokens at their positions."""
        return x + self.table[:, : x.shape[1]]


class MultiHeadAttention(nn.Module):
    """Attention, then a norm over its skip connection."""

    def __init__(self, width: int, num_heads: int, head_width: int) -> None:
        super().__init__()
        self.attention = SplitAttention(width, num_heads, head_width, bias=False, dropout=DROPOUT)
        self.dropout = nn.Dropout(DROPOUT)
        self.norm = nn.LayerNorm(width, eps=EPSILON)

    def forward(self, x: Tensor, memory: Tensor, mask: Tensor) -> Tensor:
        """Return the next hidden state."""
        result: Tensor = self.norm(x + self.dropout(self.attention(x, memory, mask)))
        return result


class PositionwiseFeedForward(nn.Module):
    """Two linear layers with a ReLU between them, then a norm over the skip connection."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, inner)
        self.activation = nn.ReLU()
        self.down = nn.Linear(inner, width)
        self.dropout = nn.Dropout(DROPOUT)
        self.norm = nn.LayerNorm(width, eps=EPSILON)

    def forward(self, x: Tensor) -> Tensor:
        """Return the next hidden state."""
        inner = self.dropout(self.down(self.activation(self.up(x))))
        result: Tensor = self.norm(x + inner)
        return result


class EncoderLayer(nn.Module):
    """Self attention and feed-forward."""

    def __init__(self, width: int, num_heads: int, head_width: int, inner: int) -> None:
        super().__init__()
        self.attention = MultiHeadAttention(width, num_heads, head_width)
        self.feed_forward = PositionwiseFeedForward(width, inner)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        """Return the next hidden state."""
        result: Tensor = self.feed_forward(self.attention(x, x, mask))
        return result


class DecoderLayer(nn.Module):
    """Self attention, attention to the encoder, and feed-forward."""

    def __init__(self, width: int, num_heads: int, head_width: int, inner: int) -> None:
        super().__init__()
        self.attention = MultiHeadAttention(width, num_heads, head_width)
        self.cross_attention = MultiHeadAttention(width, num_heads, head_width)
        self.feed_forward = PositionwiseFeedForward(width, inner)

    def forward(self, x: Tensor, mask: Tensor, memory: Tensor, memory_mask: Tensor) -> Tensor:
        """Return the next hidden state."""
        x = self.cross_attention(self.attention(x, x, mask), memory, memory_mask)
        result: Tensor = self.feed_forward(x)
        return result


class Stack(nn.Module):
    """An embedding, positions and layers of one kind."""

    def __init__(self, vocabulary: int, width: int, layers: list[nn.Module]) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width, padding_idx=PADDING)
        self.position = PositionalEncoding(width)
        self.layers = nn.ModuleList(layers)

    def forward(self, tokens: Tensor, *reads: Tensor) -> Tensor:
        """Return the hidden state of every position; every layer also reads the other tensors."""
        x = self.position(self.embedding(tokens))
        for layer in self.layers:
            x = layer(x, *reads)
        result: Tensor = x
        return result


class Transformer(nn.Module):
    """A translator: source and target tokens to the logits of the target vocabulary."""

    def __init__(self, scale: float = 1.0) -> None:
        super().__init__()
        heads, head_width = scaled_heads(NUM_HEADS, HEAD_WIDTH, scale)
        width, inner = heads * head_width, scaled(FEED_FORWARD, scale)
        vocabulary = scaled_vocabulary(VOCABULARY, scale)
        shape = (width, heads, head_width, inner)
        encoders: list[nn.Module] = [EncoderLayer(*shape) for _ in range(NUM_LAYERS)]
        decoders: list[nn.Module] = [DecoderLayer(*shape) for _ in range(NUM_LAYERS)]
        self.encoder = Stack(vocabulary, width, encoders)
        self.decoder = Stack(vocabulary, width, decoders)
        self.projection = nn.Linear(width, vocabulary, bias=False)
        for parameter in self.parameters():
            if parameter.dim() > 1 and not parameter.is_meta:
                nn.init.xavier_uniform_(parameter)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        """Return the logits of every target position."""
        source_mask = (source != PADDING)[:, None, None, :]
        length = target.shape[1]
        causal = torch.ones(length, length, dtype=torch.bool, device=target.device).tril()
        target_mask = (target != PADDING)[:, None, None, :] & causal
        memory = self.encoder(source, source_mask)
        logits: Tensor = self.projection(self.decoder(target, target_mask, memory, source_mask))
        return logits
