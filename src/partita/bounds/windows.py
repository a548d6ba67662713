"""Work that can neither start at once nor end last.

If every piece of a set starts no earlier than a and is followed by at least b seconds, then

    T >= a + b + work of the set / speed of all devices

which lies between a critical path (a and b are long, little work is left) and work over speed.
"""

from typing import NamedTuple

import numpy as np

from partita.core.columns import Array

BINS = 48


class Pieces(NamedTuple):
    """Pieces of work.

    Attributes:
        head_s: When each can start at the earliest.
        tail_s: Seconds that follow its end at least.
        work: Its least weighted device-seconds.
    """

    head_s: Array
    tail_s: Array
    work: Array


def window_bound(pieces: Pieces, speed: float) -> float:
    """Return the best bound over pairs of thresholds a and b.

    Args:
        pieces: The pieces of work.
        speed: Weight of all devices together.
    """
    busy = pieces.work > 0
    if not busy.any():
        return 0.0
    head, tail = _thresholds(pieces.head_s[busy]), _thresholds(pieces.tail_s[busy])
    row = np.searchsorted(head, pieces.head_s[busy], side="right") - 1
    column = np.searchsorted(tail, pieces.tail_s[busy], side="right") - 1
    shape = (len(head), len(tail))
    cells = np.bincount(
        row * len(tail) + column, weights=pieces.work[busy], minlength=shape[0] * shape[1]
    )
    beyond = cells.reshape(shape)[::-1, ::-1].cumsum(axis=0).cumsum(axis=1)[::-1, ::-1]
    value = head[:, None] + tail[None, :] + beyond / speed
    return float(value[beyond > 0].max())


def _thresholds(values: Array) -> Array:
    """Return some of the values in ascending order, the smallest among them."""
    distinct = np.unique(values)
    if len(distinct) <= BINS:
        return distinct
    return distinct[np.linspace(0, len(distinct) - 1, BINS).astype(np.int64)]
