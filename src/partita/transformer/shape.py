"""The shape of a transformer: widths and counts, and what follows from them.

A block is attention and a feed-forward part (dense, or routed experts beside shared ones), each
after a norm. Counts are of parameters and of forward FLOPs; a matrix product of ``m x k`` and
``k x n`` is ``2 m n k`` FLOPs. Latent attention (DeepSeek) has five matrices: down and up for the
queries, down for keys and values with the rotary part, up for both, and the output.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from partita.core.columns import Array
from partita.errors import InvalidInputError

Numbers: TypeAlias = float | Array
"""A number for all rows, or a column."""


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Widths and counts of a transformer.

    Attributes:
        name: Name of the model; empty = own shape.
        kv_heads: Heads of keys and values; 0 = as many as ``heads``.
        head_dim: Width of a head; 0 = ``hidden / heads``.
        ffn: Width of the dense feed-forward part; 0 = no dense layer.
        gated: Whether the feed-forward part has a gate (SwiGLU, GeGLU): three matrices, not two.
        tied: Whether the head is the embedding.
        top_k: Experts per token.
        expert_ffn: Width of an expert.
        shared_ffn: Width of the shared experts together; 0 = none.
        dense_layers: Layers at the front that have no experts.
        expert_interval: One layer in so many has experts, after the dense ones.
        query_rank: Rank of the queries of latent attention; 0 = full.
        kv_rank: Rank of keys and values of latent attention; 0 = ordinary attention.
        rope_dim: Rotary width of a head of latent attention, beside ``head_dim``.
        value_dim: Width of a value head; 0 = ``head_dim``.
        causal: Whether a token sees only those before it.
        window: Tokens that a token sees in windowed layers; 0 = no window.
        window_layers: Layers with a window; 0 with ``window`` = all.
        predicted_tokens: Further tokens predicted by extra blocks at the end (MTP).
    """

    name: str = ""
    hidden: int
    layers: int
    heads: int
    kv_heads: int = 0
    head_dim: int = 0
    ffn: int = 0
    gated: bool = True
    vocab: int
    tied: bool = False
    experts: int = 0
    top_k: int = 0
    expert_ffn: int = 0
    shared_ffn: int = 0
    dense_layers: int = 0
    expert_interval: int = 1
    query_rank: int = 0
    kv_rank: int = 0
    rope_dim: int = 0
    value_dim: int = 0
    causal: bool = True
    window: int = 0
    window_layers: int = 0
    predicted_tokens: int = 0

    def __post_init__(self) -> None:
        if not self.kv_heads:
            object.__setattr__(self, "kv_heads", self.heads)
        for what in ("hidden", "layers", "heads", "vocab", "expert_interval"):
            if getattr(self, what) < 1:
                raise InvalidInputError(
                    f"shape {self.name!r}: {what} is {getattr(self, what)}; expected 1 or more"
                )
        if not self.head_dim:
            if self.hidden % self.heads:
                raise InvalidInputError(
                    f"shape {self.name!r}: hidden {self.hidden} is no multiple of {self.heads} "
                    "heads; give head_dim"
                )
            object.__setattr__(self, "head_dim", self.hidden // self.heads)
        if not self.value_dim:
            object.__setattr__(self, "value_dim", self.head_dim)
        if self.heads % self.kv_heads:
            raise InvalidInputError(
                f"shape {self.name!r}: {self.heads} heads are no multiple of "
                f"{self.kv_heads} kv_heads"
            )
        if self.experts and not (self.expert_ffn > 0 and 0 < self.top_k <= self.experts):
            raise InvalidInputError(
                f"shape {self.name!r}: {self.experts} experts need an expert_ffn and a top_k of "
                f"1 to {self.experts}; got {self.expert_ffn} and {self.top_k}"
            )
        if not self.experts and self.ffn < 1:
            raise InvalidInputError(f"shape {self.name!r}: ffn is {self.ffn}; expected 1 or more")

    # Widths.

    @property
    def matrices(self) -> int:
        """Matrices of a feed-forward part: 3 with a gate, else 2."""
        return 3 if self.gated else 2

    @property
    def query_width(self) -> int:
        """Width of all queries, with the rotary part of latent attention."""
        return self.heads * (self.head_dim + self.rope_dim)

    @property
    def value_width(self) -> int:
        """Width of the attention's output before its last matrix."""
        return self.heads * self.value_dim

    @property
    def kv_width(self) -> int:
        """Width of the keys (and of the values) that attention reads."""
        heads = self.heads if self.kv_rank else self.kv_heads
        return heads * (self.head_dim + self.rope_dim)

    # Parameters.

    @cached_property
    def attention_params(self) -> int:
        """Parameters of one block's attention matrices."""
        h = self.hidden
        if not self.kv_rank:
            kv = self.kv_heads * self.head_dim
            return h * (self.query_width + 2 * kv) + self.value_width * h
        queries = (
            self.query_rank * (h + self.query_width) if self.query_rank else h * self.query_width
        )
        keys_and_values = h * (self.kv_rank + self.rope_dim) + self.kv_rank * self.heads * (
            self.head_dim + self.value_dim
        )
        return queries + keys_and_values + self.value_width * h

    @property
    def dense_ffn_params(self) -> int:
        """Parameters of one dense feed-forward part."""
        return self.matrices * self.hidden * self.ffn

    @property
    def expert_params(self) -> int:
        """Parameters of one expert."""
        return self.matrices * self.hidden * self.expert_ffn

    @property
    def shared_params(self) -> int:
        """Parameters of one layer's shared experts and router."""
        return self.matrices * self.hidden * self.shared_ffn + self.hidden * self.experts

    @cached_property
    def expert_layers(self) -> int:
        """Number of layers that have experts."""
        if not self.experts:
            return 0
        return (self.layers - self.dense_layers) // self.expert_interval

    @property
    def embedding_params(self) -> int:
        """Parameters of the embedding; the head has as many, unless it is tied."""
        return self.vocab * self.hidden

    @cached_property
    def dense_params(self) -> int:
        """Parameters of all blocks that no expert degree divides, without embedding and head."""
        dense = self.layers - self.expert_layers
        each = self.attention_params + 2 * self.hidden
        return (
            self.layers * each
            + dense * self.dense_ffn_params
            + self.expert_layers * self.shared_params
        )

    @cached_property
    def routed_params(self) -> int:
        """Parameters of all routed experts."""
        return self.expert_layers * self.experts * self.expert_params

    @cached_property
    def params(self) -> int:
        """All parameters."""
        ends = self.embedding_params * (1 if self.tied else 2)
        return self.dense_params + self.routed_params + ends + self.hidden

    @cached_property
    def active_params(self) -> int:
        """Parameters that one token passes, embedding and head included."""
        inactive = self.expert_layers * (self.experts - self.top_k) * self.expert_params
        return self.params - inactive

    # Arithmetic.

    def attention_pairs(self, sequence_length: int, *, halved: bool = False) -> float:
        """Return how many keys a query sees, as a mean over tokens and layers.

        Args:
            sequence_length: Tokens of a sequence.
            halved: Whether a causal kernel skips what no token may see.
        """
        full = sequence_length * (0.5 if halved and self.causal else 1.0)
        if not self.window or self.window >= sequence_length:
            return full
        windowed = (self.window_layers or self.layers) / self.layers
        return windowed * self.window + (1.0 - windowed) * full

    def forward_flops(self, tokens: float, sequence_length: int, *, halved: bool = False) -> float:
        """Return the FLOPs of one forward pass over tokens, experts and head included."""
        scores = self._score_flops(tokens, sequence_length, halved=halved)
        active = self.dense_params - 2 * self.hidden * self.layers
        active += self.expert_layers * self.top_k * self.expert_params
        head = self.embedding_params
        return scores + 2.0 * tokens * (active + head)

    def model_flops(
        self,
        tokens: float,
        sequence_length: int,
        *,
        trained: float = 1.0,
        halved: bool = False,
    ) -> float:
        """Return the FLOPs of a training step that MFU counts.

        Forward and twice that backward, the whole attention matrix, nothing for recomputation.

        Args:
            tokens: Tokens of the step.
            sequence_length: Tokens of a sequence.
            trained: Share of the weights that is trained: the others have no gradient.
            halved: Whether only what a causal mask leaves of attention counts.
        """
        forward = self.forward_flops(tokens, sequence_length, halved=halved)
        weights = forward - self._score_flops(tokens, sequence_length, halved=halved)
        return 3.0 * forward - (1.0 - trained) * weights

    def _score_flops(self, tokens: float, sequence_length: int, *, halved: bool = False) -> float:
        """Return the FLOPs of all layers' attention without its matrices, forward."""
        pairs = self.attention_pairs(sequence_length, halved=halved)
        return self.layers * 2.0 * tokens * pairs * (self.query_width + self.value_width)


class Sizes(NamedTuple):
    """What prices need of a shape: numbers, or columns over several shapes.

    Widths are those of ``Shape``; ``pairs`` of a sequence are ``full`` times its length and
    ``windowed`` tokens.
    """

    hidden: Numbers
    layers: Numbers
    heads: Numbers
    kv_heads: Numbers
    key_dim: Numbers
    queries: Numbers
    values: Numbers
    kv_width: Numbers
    query_rank: Numbers
    kv_rank: Numbers
    rope_dim: Numbers
    ffn: Numbers
    matrices: Numbers
    vocab: Numbers
    ends: Numbers
    attention_params: Numbers
    experts: Numbers
    top_k: Numbers
    expert_ffn: Numbers
    shared_ffn: Numbers
    expert_share: Numbers
    causal: Numbers
    window: Numbers
    window_share: Numbers


def sizes_of(shapes: Shape | Sequence[Shape]) -> Sizes:
    """Return the sizes of a shape as numbers, or of several as columns."""
    if isinstance(shapes, Shape):
        return _sizes(shapes)
    rows = [_sizes(shape) for shape in shapes]
    columns: list[Any] = [np.array(column, dtype=np.float64) for column in zip(*rows, strict=True)]
    return Sizes(*columns)


def _sizes(shape: Shape) -> Sizes:
    windowed = (shape.window_layers or shape.layers) / shape.layers if shape.window else 0.0
    return Sizes(
        hidden=shape.hidden,
        layers=shape.layers,
        heads=shape.heads,
        kv_heads=shape.heads if shape.kv_rank else shape.kv_heads,
        key_dim=shape.head_dim + shape.rope_dim,
        queries=shape.query_width,
        values=shape.value_width,
        kv_width=shape.kv_width,
        query_rank=shape.query_rank,
        kv_rank=shape.kv_rank,
        rope_dim=shape.rope_dim,
        ffn=shape.ffn,
        matrices=shape.matrices,
        vocab=shape.vocab,
        ends=1 if shape.tied else 2,
        attention_params=shape.attention_params,
        experts=shape.experts,
        top_k=shape.top_k,
        expert_ffn=shape.expert_ffn,
        shared_ffn=shape.shared_ffn,
        expert_share=shape.expert_layers / shape.layers,
        causal=float(shape.causal),
        window=shape.window or np.inf,
        window_share=windowed,
    )
