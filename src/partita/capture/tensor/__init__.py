"""A captured model as the ranks of a tensor-parallel group run it."""
