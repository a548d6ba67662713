"""Where every rank of a host stands, in memory that all of them and the launcher share.

A rank writes its line a few times a second; whoever looks can say what a rank was doing when it
stopped answering, even if that rank is frozen or dead.
"""

import mmap
import struct
import time
from pathlib import Path
from typing import NamedTuple

from partita.core.program import Program
from partita.run.device_loop import Place

_LINE = struct.Struct("<5q")


class Line(NamedTuple):
    """Where a rank stands.

    Attributes:
        row: The instruction; -1 = between steps, or it has not begun.
        awaited: The instruction whose end it waits for; -1 = it computes.
        since_ns: Since when it stands there.
        step: The step; -1 = it has not begun.
        beat_ns: When it last wrote this.
    """

    row: int
    awaited: int
    since_ns: int
    step: int
    beat_ns: int


class Board:
    """A line for each rank."""

    def __init__(self, ranks: int, path: Path | None = None) -> None:
        """Open a board in a file, or in memory that forked processes share.

        Args:
            ranks: Number of lines.
            path: The file; made if it is not there.
        """
        size = max(1, ranks) * _LINE.size
        if path is None:
            self._memory = mmap.mmap(-1, size)
        else:
            with path.open("a+b") as file:
                file.truncate(size)
                self._memory = mmap.mmap(file.fileno(), size)

    def write(self, rank: int, place: Place, step: int) -> None:
        """Say where a rank stands."""
        line = (place.row, place.awaited, place.since_ns, step, time.perf_counter_ns())
        _LINE.pack_into(self._memory, rank * _LINE.size, *line)

    def read(self, rank: int) -> Line:
        """Return where a rank stands; of one that never wrote, that it has not begun."""
        line = Line(*_LINE.unpack_from(self._memory, rank * _LINE.size))
        return line if line.beat_ns else Line(-1, -1, 0, -1, 0)


def describe(line: Line, rank: int, program: Program) -> str:
    """Return where a rank stands, for people."""
    if line.step < 0:
        return f"rank {rank} has not begun its first step"
    if line.row < 0:
        return f"rank {rank} is between steps, after step {line.step}"
    seconds = (time.perf_counter_ns() - line.since_ns) / 1e9
    what = f"step {line.step}, {program.describe(line.row)}"
    if line.awaited < 0:
        return f"rank {rank} has been at {what} for {seconds:.1f} s"
    return f"rank {rank} at {what} has waited {seconds:.1f} s for {program.describe(line.awaited)}"
