"""The commands of ``partita checkpoint``."""
