"""Bytes of activations of a transformer block, by what of them is kept.

Per token and layer they are those of Korthikanti et al. 2022 (arXiv 2205.05198), with the widths of
any block::

    (8 h + dropout 2 h) [/ t with sequence parallelism]
    + 2 (2 q + 2 kv + g f) / t  +  scores 5 a s / t, or log-sum-exp of flash attention 4 a / t

``h`` hidden, ``q`` and ``kv`` widths of queries and keys, ``g f`` the widened feed-forward part
(2 or 3 times ``f``), ``a`` heads. For GPT blocks that is ``s b h (10 + 24/t + 5 a s / (h t))``. A
stack keeps more than that: a factor. Experts add what is sent to them and their own. Numbers that
are not of 16 bits change what is counted with 2 bytes.
"""

import numpy as np

from partita.transformer.kernels import Case
from partita.transformer.shape import Numbers


def edge_bytes(case: Case) -> Numbers:
    """Return what a stage keeps of a microbatch beside its blocks: its input and output."""
    return np.where(np.asarray(case.layouts.pp) > 1, 2.0, 0.0) * _split(
        case, case.job.element_bytes * case.sizes.hidden
    )


def logit_bytes(case: Case) -> Numbers:
    """Return logits of a microbatch, loss and their gradient."""
    return case.tokens * case.sizes.vocab / case.layouts.tp * case.software.logit_bytes


def layer_bytes(case: Case) -> Numbers:
    """Return the activation bytes of one layer and microbatch, nothing recomputed."""
    return case.software.kept * (_around(case) + _inside(case) + _feed(case) + _routed(case))


def _split(case: Case, width: Numbers) -> Numbers:
    """Return bytes of what only sequence parallelism splits."""
    return case.split_tokens * width


def _halved(case: Case) -> Numbers:
    """1 where inputs of linear layers are kept in float8, at one byte instead of two."""
    return np.asarray(case.job.arithmetic.float8) * case.software.kept8


def _around(case: Case) -> Numbers:
    """Inputs of norms and linear layers, and masks of dropout."""
    masks = 2.0 * np.asarray(case.software.unfused)
    width = 4.0 * case.job.element_bytes + masks - 2.0 * _halved(case)
    return _split(case, width * case.sizes.hidden)


def _inside(case: Case) -> Numbers:
    """Queries, keys, values, attention's output, and scores or their log-sum-exp."""
    sizes, t = case.sizes, case.layouts.tp
    widths = case.job.element_bytes * (sizes.queries + sizes.values + 2.0 * sizes.kv_width)
    widths = widths - _halved(case) * sizes.values
    scores = np.where(np.asarray(case.software.unfused) > 0, _score_bytes(case), 4.0)
    return case.tokens / t * (widths + sizes.heads * scores)


def _score_bytes(case: Case) -> Numbers:
    """Scores of a query that unfused attention keeps: before and after dropout, and its mask."""
    return (2.0 * case.job.element_bytes + 1.0) * case.job.sequence_length


def _feed(case: Case) -> Numbers:
    """Widened activations of dense layers and shared experts."""
    sizes, share = case.sizes, case.sizes.expert_share
    width = (1.0 - share) * sizes.ffn + share * sizes.shared_ffn
    each = case.job.element_bytes * sizes.matrices - _halved(case)
    return case.tokens / case.layouts.tp * each * width


def _routed(case: Case) -> Numbers:
    """What is sent to experts, what they widen it to, and the buffer it comes back in."""
    sizes, etp = case.sizes, case.layouts.etp
    sent = case.split_tokens * sizes.top_k
    width = 2.0 * sizes.hidden + sizes.matrices * sizes.expert_ffn / etp
    return sizes.expert_share * sent * case.job.element_bytes * width


def kept_bytes(case: Case) -> Numbers:
    """Return what one layer and microbatch keeps until its backward, by what is recomputed."""
    again, sizes, element = case.layouts.again, case.sizes, case.job.element_bytes
    unfused = np.asarray(case.software.unfused) > 0
    scores = np.where(unfused, _score_bytes(case), 0.0)
    core = case.tokens / case.layouts.tp * sizes.heads * scores
    up = case.tokens / case.layouts.tp * element * (sizes.queries + 2.0 * sizes.kv_width)
    up = np.where(np.asarray(sizes.kv_rank) > 0, up, 0.0)
    kept = (
        _around(case)
        + _inside(case)
        + _feed(case) * (1.0 - again["mlp"])
        + _routed(case) * (1.0 - again["experts"])
        - again["attention"] * core
        - again["projections"] * up
        - again["norm"] * _split(case, 2.0 * element * sizes.hidden)
    )
    kept = case.software.kept * kept * (1.0 - 0.6 * again["products"])
    inputs = _split(case, element * sizes.hidden)
    return np.where(np.asarray(again["full"]) > 0, inputs, kept)
