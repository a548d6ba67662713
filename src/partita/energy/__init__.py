"""Less energy at the same speed: the time-energy frontier of a Program, and what acts on it."""
