"""Runs on other hosts: an agent on each, started by ssh, Slurm or Ray, and the driver of them."""
