"""How a training script reports its speed to Partita.

A script that runs under ``partita fleet profile`` finds the file to write in ``PARTITA_SPEED``; in
any other run nothing is written. Imports the standard library alone.

    meter = SpeedMeter()
    for batch in loader:
        train(batch)
        meter.step()
"""

import json
import os
import time
from pathlib import Path

from partita.atomic_files import write_atomically

SPEED_VARIABLE = "PARTITA_SPEED"


def report_speed(iteration_s: float, *, iterations: int) -> None:
    """Report the mean seconds of an iteration; rank 0 alone writes.

    Args:
        iteration_s: Wall seconds of an iteration, data and computation together.
        iterations: How many were timed.
    """
    name = os.environ.get(SPEED_VARIABLE)
    if not name or os.environ.get("RANK", "0") != "0":
        return
    text = json.dumps({"iteration_s": iteration_s, "iterations": iterations})
    write_atomically(Path(name), text)


class SpeedMeter:
    """Times iterations from the end of one to the end of the next, and reports their mean.

    Attributes:
        warmup: Iterations that are not timed: workers start, buffers fill.
        every: Iterations from a report to the next.
    """

    def __init__(self, *, warmup: int = 5, every: int = 5) -> None:
        self.warmup = warmup
        self.every = every
        self._seen = 0
        self._begin_s = time.perf_counter()
        self._mean_s = 0.0

    @property
    def iterations(self) -> int:
        """Iterations that were timed."""
        return max(self._seen - self.warmup, 0)

    @property
    def iteration_s(self) -> float:
        """Mean seconds of the iterations that were timed; 0 before there are any."""
        return self._mean_s

    def step(self) -> None:
        """Take note of the end of an iteration."""
        now_s = time.perf_counter()
        self._seen += 1
        if self._seen <= self.warmup:
            self._begin_s = now_s
            return
        self._mean_s = (now_s - self._begin_s) / self.iterations
        if self.iterations % self.every == 0 or self.iterations == 1:
            report_speed(self._mean_s, iterations=self.iterations)
