"""The parts of the optimal split: its objective by nodes, the DP over ideals, refinement."""
