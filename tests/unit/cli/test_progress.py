"""Lines that say how far a command is."""

import time

from partita.cli.console import paced


def test_how_far_it_is_is_told_now_and_then_and_each_new_thing_at_once(monkeypatch):
    now = [0.0]
    told: list[str] = []
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    tell = paced(told.append)
    for moment in range(6):
        now[0] = moment / 2 + 10
        tell(f"profiling: {moment} of 6 rounds")
    tell("planning")
    assert told == ["profiling: 0 of 6 rounds", "profiling: 4 of 6 rounds", "planning"]
