"""Planners: pure functions from a problem to a solution, one file each, in one visible table."""
