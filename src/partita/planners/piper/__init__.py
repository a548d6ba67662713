"""Piper's planner: pipeline, data and tensor parallelism with recomputation under memory."""
