"""The commands of ``partita fleet``."""
