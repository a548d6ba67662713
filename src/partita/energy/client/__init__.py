"""The client of an energy server: sets clocks, measures, reports."""
