"""The planner ``auto``: a portfolio of starts, and local search on the simulator."""
