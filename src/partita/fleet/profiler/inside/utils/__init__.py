"""Stands for Synergy's package ``utils``, so that scripts written for it run unchanged."""
