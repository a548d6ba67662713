"""The commands of ``partita energy``."""
