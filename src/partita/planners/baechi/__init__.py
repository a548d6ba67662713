"""Baechi's planners, and the search for placements with a short makespan."""
