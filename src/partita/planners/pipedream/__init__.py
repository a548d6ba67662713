"""Pipelines of replicated stages: PipeDream's search over ideals, as it is and mended."""
