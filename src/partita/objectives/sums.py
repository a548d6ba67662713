"""Sums of columns by key."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from partita.core.columns import Floats


def sum_by(keys: NDArray[Any], values: NDArray[Any], num_keys: int) -> Floats:
    """Return the sum of the values of each key, 0 to ``num_keys - 1``."""
    return np.asarray(np.bincount(keys, weights=values, minlength=num_keys), dtype=np.float64)
