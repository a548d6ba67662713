"""Hot loops of the fleet: plain functions over columns, interpreted or compiled.

A kernel only indexes and calls other kernels, so that the same source runs on lists and, compiled
by Numba with an on-disk cache, on arrays. The live scheduler and small simulations interpret them;
`compiled` pays from some ten thousand job-rounds on.
"""
