"""Questions about fleets that need several rooms: traces, simulations, curves, powers of jobs."""
