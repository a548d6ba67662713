"""T5 (version 1.0) encoder-decoder: relative position bias, RMS norm, ReLU, three tied embeddings.

The bias of positions is computed once a stack, added to the mask and read by every block of it,
so it travels over every later cut as (batch, heads, length, length), as in the published runs.
The embeddings of encoder and decoder are two modules that share one weight with the head. Layers
as Merak counts them: the embedding, the encoders, two a decoder (attention, feed-forward), the
head; the first of the decoder also holds the encoder's last norm and the decoder's embedding.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from partita.models.attention import SplitAttention, added_mask, initialise_normal
from partita.models.layers import Layer, named_blocks
from partita.models.scaling import scaled, scaled_heads, scaled_vocabulary

DROPOUT = 0.1
EPSILON = 1e-6
BUCKETS = 32
FARTHEST = 128


@dataclass(frozen=True, slots=True)
class T5Size:
    """Widths and depth of a T5; the decoder has as many blocks as the encoder."""

    hidden: int
    head_width: int
    feed_forward: int
    num_blocks: int
    num_heads: int
    vocabulary: int = 32128

    def scaled(self, scale: float) -> "T5Size":
        """Return the same depth at another width."""
        heads, head_width = scaled_heads(self.num_heads, self.head_width, scale)
        return T5Size(
            hidden=scaled(self.hidden, scale, minimum=8),
            head_width=head_width,
            feed_forward=scaled(self.feed_forward, scale),
            num_blocks=self.num_blocks,
            num_heads=heads,
            vocabulary=scaled_vocabulary(self.vocabulary, scale),
        )

    def attention(self) -> SplitAttention:
        """Return an attention of these widths, without biases and without scaling of scores."""
        return SplitAttention(
            self.hidden,
            self.num_heads,
            self.head_width,
            bias=False,
            dropout=DROPOUT,
            factor=1.0,
        )


class TokenEmbedding(nn.Module):
    """Embeds tokens, then drops out."""

    def __init__(self, size: T5Size) -> None:
        super().__init__()
        self.embedding = nn.Embedding(size.vocabulary, size.hidden)
        self.dropout = nn.Dropout(DROPOUT)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the hidden state."""
        x: Tensor = self.dropout(self.embedding(tokens))
        return x


def relative_buckets(length: int, device: torch.device, *, bidirectional: bool) -> Tensor:
    """Return the bucket of every (query, key) distance: exact when near, logarithmic when far."""
    positions = torch.arange(length, device=device)
    distance = positions[None, :] - positions[:, None]
    buckets = BUCKETS // 2 if bidirectional else BUCKETS
    if bidirectional:
        side = (distance > 0).long() * buckets
        distance = distance.abs()
    else:
        side = torch.zeros_like(distance)
        distance = -distance.clamp(max=0)
    exact = buckets // 2
    ratio = torch.log(distance.clamp(min=1).float() / exact) / math.log(FARTHEST / exact)
    far = (exact + (ratio * (buckets - exact)).long()).clamp(max=buckets - 1)
    return side + torch.where(distance < exact, distance, far)


class PositionBias(nn.Module):
    """Bias that attention adds to its scores: a learned bias by distance, and the mask."""

    def __init__(self, num_heads: int, *, causal: bool) -> None:
        super().__init__()
        self.causal = causal
        self.table = nn.Embedding(BUCKETS, num_heads)

    def forward(self, x: Tensor, seen: Tensor | None = None) -> Tensor:
        """Return the bias of shape (batch, heads, length, length)."""
        batch, length = x.shape[:2]
        buckets = relative_buckets(length, x.device, bidirectional=not self.causal)
        bias = self.table(buckets).permute(2, 0, 1)[None]
        if self.causal:
            ones = torch.ones(batch, 1, length, length, dtype=x.dtype, device=x.device)
            allowed = ones.tril()
        else:
            assert seen is not None
            allowed = seen[:, None, None, :]
        result: Tensor = bias + added_mask(allowed, x.dtype)
        return result


class CrossBias(nn.Module):
    """Bias that attention to the encoder adds to its scores: the encoder's mask for every head."""

    def __init__(self, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads

    def forward(self, x: Tensor, memory: Tensor, seen: Tensor) -> Tensor:
        """Return the bias of shape (batch, heads, length, encoder's length)."""
        shape = (1, self.num_heads, x.shape[1], memory.shape[1])
        none = torch.zeros(shape, dtype=x.dtype, device=x.device)
        return none + added_mask(seen[:, None, None, :], x.dtype)


class FeedForward(nn.Module):
    """Two linear layers with a ReLU between them, behind a norm and beside a skip connection."""

    def __init__(self, size: T5Size) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(size.hidden, eps=EPSILON)
        self.up = nn.Linear(size.hidden, size.feed_forward, bias=False)
        self.activation = nn.ReLU()
        self.dropout_1 = nn.Dropout(DROPOUT)
        self.down = nn.Linear(size.feed_forward, size.hidden, bias=False)
        self.dropout_2 = nn.Dropout(DROPOUT)

    def forward(self, x: Tensor) -> Tensor:
        """Return the next hidden state."""
        inner = self.dropout_1(self.activation(self.up(self.norm(x))))
        result: Tensor = x + self.dropout_2(self.down(inner))
        return result


class SelfAttention(nn.Module):
    """Attention to the own sequence, behind a norm and beside a skip connection."""

    def __init__(self, size: T5Size) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(size.hidden, eps=EPSILON)
        self.attention = size.attention()
        self.dropout = nn.Dropout(DROPOUT)

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        """Return the next hidden state."""
        normed = self.norm(x)
        result: Tensor = x + self.dropout(self.attention(normed, normed, bias))
        return result


class EncoderBlock(nn.Module):
    """Self attention and feed-forward."""

    def __init__(self, size: T5Size) -> None:
        super().__init__()
        self.attention = SelfAttention(size)
        self.feed_forward = FeedForward(size)

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        """Return the next hidden state."""
        result: Tensor = self.feed_forward(self.attention(x, bias))
        return result


class DecoderAttention(nn.Module):
    """Attention to the own sequence, then to the encoder's."""

    def __init__(self, size: T5Size) -> None:
        super().__init__()
        self.own = SelfAttention(size)
        self.norm = nn.RMSNorm(size.hidden, eps=EPSILON)
        self.cross = size.attention()
        self.dropout = nn.Dropout(DROPOUT)

    def forward(self, x: Tensor, bias: Tensor, memory: Tensor, cross_bias: Tensor) -> Tensor:
        """Return the next hidden state."""
        x = self.own(x, bias)
        result: Tensor = x + self.dropout(self.cross(self.norm(x), memory, cross_bias))
        return result


class DecoderBlock(nn.Module):
    """Attention and feed-forward: two layers of a published partition."""

    def __init__(self, size: T5Size) -> None:
        super().__init__()
        self.attention = DecoderAttention(size)
        self.feed_forward = FeedForward(size)

    def forward(self, x: Tensor, bias: Tensor, memory: Tensor, cross_bias: Tensor) -> Tensor:
        """Return the next hidden state."""
        result: Tensor = self.feed_forward(self.attention(x, bias, memory, cross_bias))
        return result


class FinalNorm(nn.Module):
    """The norm at the end of a stack, then dropout."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(hidden, eps=EPSILON)
        self.dropout = nn.Dropout(DROPOUT)

    def forward(self, x: Tensor) -> Tensor:
        """Return the normed hidden state."""
        result: Tensor = self.dropout(self.norm(x))
        return result


class Encoder(nn.Module):
    """The stack that reads the input."""

    def __init__(self, size: T5Size) -> None:
        super().__init__()
        self.embedding = TokenEmbedding(size)
        self.position_bias = PositionBias(size.num_heads, causal=False)
        self.blocks = nn.ModuleList(EncoderBlock(size) for _ in range(size.num_blocks))
        self.norm = FinalNorm(size.hidden)

    def forward(self, tokens: Tensor, seen: Tensor) -> Tensor:
        """Return what the decoder attends to."""
        x = self.embedding(tokens)
        bias = self.position_bias(x, seen)
        for block in self.blocks:
            x = block(x, bias)
        result: Tensor = self.norm(x)
        return result


class Decoder(nn.Module):
    """The stack that writes the output."""

    def __init__(self, size: T5Size) -> None:
        super().__init__()
        self.embedding = TokenEmbedding(size)
        self.position_bias = PositionBias(size.num_heads, causal=True)
        self.cross_bias = CrossBias(size.num_heads)
        self.blocks = nn.ModuleList(DecoderBlock(size) for _ in range(size.num_blocks))

    def forward(self, tokens: Tensor, memory: Tensor, seen: Tensor) -> Tensor:
        """Return the hidden state of every output position."""
        x = self.embedding(tokens)
        bias = self.position_bias(x)
        cross_bias = self.cross_bias(x, memory, seen)
        for block in self.blocks:
            x = block(x, bias, memory, cross_bias)
        result: Tensor = x
        return result


class Head(nn.Module):
    """The decoder's last norm and the tied projection, scaled by the root of the width."""

    def __init__(self, size: T5Size) -> None:
        super().__init__()
        self.norm = FinalNorm(size.hidden)
        self.factor = size.hidden**-0.5
        self.decoder = nn.Linear(size.hidden, size.vocabulary, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits."""
        logits: Tensor = self.decoder(self.norm(x) * self.factor)
        return logits


class T5(nn.Module):
    """An encoder-decoder: input tokens, output tokens so far, and what is seen, to logits."""

    def __init__(self, size: T5Size, scale: float = 1.0) -> None:
        super().__init__()
        size = size.scaled(scale)
        self.encoder = Encoder(size)
        self.decoder = Decoder(size)
        self.head = Head(size)
        initialise_normal(self)
        shared = self.encoder.embedding.embedding.weight
        self.decoder.embedding.embedding.weight = shared
        self.head.decoder.weight = shared
        if not shared.is_meta:
            nn.init.normal_(shared)

    def forward(self, tokens: Tensor, output_tokens: Tensor, seen: Tensor) -> Tensor:
        """Return the logits of the next output token at every position."""
        memory = self.encoder(tokens, seen)
        logits: Tensor = self.head(self.decoder(output_tokens, memory, seen))
        return logits


def t5_layers(model: nn.Module) -> tuple[Layer, ...]:
    """Return the embedding, the encoders, two layers a decoder, and the head."""
    encoders = list(named_blocks(model, "encoder.blocks"))
    encoders[0] = Layer(encoders[0].name, ("encoder.position_bias", *encoders[0].prefixes))
    halves = [
        Layer(f"{block.name}.{half}", (f"{block.name}.{half}",))
        for block in named_blocks(model, "decoder.blocks")
        for half in ("attention", "feed_forward")
    ]
    before = (
        "encoder.norm",
        "decoder.embedding",
        "decoder.position_bias",
        "decoder.cross_bias",
    )
    halves[0] = Layer(halves[0].name, (*before, *halves[0].prefixes))
    return (
        Layer("encoder.embedding", ("encoder.embedding",)),
        *encoders,
        *halves,
        Layer("head", ("head",)),
    )
