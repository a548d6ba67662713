"""The time-energy frontier of a Program, and the clocks that reach it."""
