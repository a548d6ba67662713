"""Random numbers for kernels, from a state that is passed in: no generator is shared or seeded.

The Mersenne Twister with the stream of ``numpy.random.RandomState(seed)``, which a compiled kernel
cannot take as an argument. The state is 624 words and the place of the next one; words are below
2^32 in 64-bit columns, so that nothing overflows and uncompiled kernels draw the same numbers.
"""

import numpy as np

from partita.core.columns import Array
from partita.kernels import kernel

_WORDS, _MIDDLE = 624, 397
_MASK = 0xFFFFFFFF


def new_draws(seed: int) -> Array:
    """Return the state from which a kernel draws."""
    words = np.random.RandomState(seed).get_state(legacy=False)["state"]["key"]
    return np.append(words.astype(np.int64), _WORDS)


@kernel
def draw_share(state: Array) -> float:
    """Return a number of at least 0 and below 1."""
    high, low = _next_word(state) >> 5, _next_word(state) >> 6
    return float((high * 67108864.0 + low) / 9007199254740992.0)


@kernel
def draw_below(state: Array, end: int) -> int:
    """Return a whole number from 0 to ``end - 1``, of at most 2^32."""
    if end <= 1:
        return 0
    mask = 1
    while mask < end - 1:
        mask = 2 * mask + 1
    # Numbers that are too large are drawn again, so that all are equally likely.
    drawn = _next_word(state) & mask
    while drawn >= end:
        drawn = _next_word(state) & mask
    return drawn


@kernel
def _next_word(state: Array) -> int:
    if state[_WORDS] == _WORDS:
        _refill(state)
    word = state[state[_WORDS]]
    state[_WORDS] += 1
    word ^= word >> 11
    word ^= (word << 7) & 0x9D2C5680
    word ^= (word << 15) & 0xEFC60000
    return int(word ^ (word >> 18))


@kernel
def _refill(state: Array) -> None:
    """Compute the next 624 words of the recurrence."""
    for k in range(_WORDS):
        both = (state[k] & 0x80000000) | (state[(k + 1) % _WORDS] & 0x7FFFFFFF)
        odd = 0x9908B0DF if both & 1 else 0
        state[k] = (state[(k + _MIDDLE) % _WORDS] ^ (both >> 1) ^ odd) & _MASK
    state[_WORDS] = 0
