"""Random numbers of kernels: NumPy's stream from a state of their own."""

from pathlib import Path

import numpy as np
from numba import njit

from partita.energy.frontier import improve
from partita.energy.frontier.draws import draw_below, draw_share, new_draws
from partita.kernels import compiled


@njit
def _numbas(count: int) -> list[float]:
    np.random.seed(0)
    return [np.random.random() if k % 3 else float(np.random.randint(1 + k)) for k in range(count)]


def test_the_stream_is_that_of_a_kernel_that_was_seeded() -> None:
    state = new_draws(0)
    mine = [draw_share(state) if k % 3 else float(draw_below(state, 1 + k)) for k in range(2000)]
    assert mine == _numbas(2000)


def test_compiled_kernels_draw_the_same() -> None:
    first, second = new_draws(7), new_draws(7)
    for _ in range(700):
        assert draw_share(first) == compiled(draw_share)(second)
        assert draw_below(first, 12) == compiled(draw_below)(second, 12)


def test_the_search_for_clocks_touches_no_generator_of_others() -> None:
    """The kernels of the search name no generator: there is nothing else that they could seed."""
    assert "np.random" not in Path(improve.__file__).read_text()
