"""Hot loops of the fleet: plain functions over columns, interpreted or compiled.

A kernel only indexes and calls other kernels, so that the same source runs on lists and, compiled
by Numba with an on-disk cache (`partita.kernels`), on arrays. The live scheduler and small
simulations interpret them; compiled code pays from some ten thousand job-rounds on.
"""

from partita.kernels import Threshold

JOB_ROUNDS = Threshold(size=20_000, loaded=True)
"""Job-rounds from which loading compiled kernels pays; once loaded they serve every round."""
