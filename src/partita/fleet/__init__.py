"""Sharing a cluster among many jobs: orderings, allocators, the simulator and the profiler."""
