"""Scaling of a model: widths follow the scale factor, depth never does."""

import math

from partita.errors import InvalidInputError

MINIMUM_WIDTH = 4
MINIMUM_HEAD = 8
MINIMUM_CLASSES = 10
MINIMUM_VOCABULARY = 32


def check_scale(scale: float) -> None:
    """Raise unless a scale factor is a positive, finite number."""
    if not (math.isfinite(scale) and scale > 0):
        raise InvalidInputError(f"scale must be a positive number, got {scale}")


def scaled(width: int, scale: float, *, minimum: int = MINIMUM_WIDTH) -> int:
    """Return a width times the scale, rounded, never below a minimum (nor above the width's own).

    >>> scaled(768, 0.1), scaled(768, 1.0), scaled(16, 0.01)
    (77, 768, 4)
    """
    return max(min(minimum, width), round(width * scale))


def scaled_heads(num_heads: int, head_width: int, scale: float) -> tuple[int, int]:
    """Return the number of attention heads and their width at a scale.

    Their product is the scaled width, up to rounding. There are as many heads as in the model of
    full size while each stays at least ``MINIMUM_HEAD`` wide, then fewer.

    >>> scaled_heads(16, 128, 1.0), scaled_heads(16, 128, 0.1), scaled_heads(12, 64, 0.05)
    ((16, 128), (16, 13), (4, 10))
    """
    width = max(MINIMUM_HEAD, num_heads * head_width * scale)
    heads = max(1, min(num_heads, int(width / min(MINIMUM_HEAD, head_width))))
    return heads, max(1, round(width / heads))


def scaled_vocabulary(words: int, scale: float) -> int:
    """Return the number of words at a scale."""
    return scaled(words, scale, minimum=MINIMUM_VOCABULARY)


def scaled_classes(classes: int, scale: float) -> int:
    """Return the number of classes at a scale."""
    return scaled(classes, scale, minimum=MINIMUM_CLASSES)
