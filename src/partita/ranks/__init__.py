"""Ranks: who one is, the pool that starts and watches them, where they stand, why they fail."""
