"""Checkpoints of a run: written, found, read by any plan, and converted."""
