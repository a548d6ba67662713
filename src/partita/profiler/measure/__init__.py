"""Costs of ops, measured on this machine."""
