"""Engines that start and stop the jobs of a live fleet."""
