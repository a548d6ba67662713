"""Slurm as others see it: its texts about nodes, jobs and switches, and calls of its commands."""
