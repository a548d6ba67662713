"""Runs: from a plan to steps that are carried out, watched, written down and read again."""
