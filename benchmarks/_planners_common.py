"""What the groups of ``planners.py`` share: a table with what was missed, and CPU time."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

_T = TypeVar("_T")


@dataclass(slots=True, kw_only=True)
class Group:
    """One table of the benchmark.

    Attributes:
        title: What is compared.
        headers: Heads of the columns.
        rows: Cells, a list a row.
        misses: A line for each number of the issue that is missed.
        figures: The few figures that stand for the group.
    """

    title: str
    headers: Sequence[str]
    rows: list[list[Any]] = field(default_factory=list)
    misses: list[str] = field(default_factory=list)
    figures: dict[str, Any] = field(default_factory=dict)

    def show(self) -> None:
        """Print the table, columns aligned."""
        cells = [list(self.headers), *([_text(cell) for cell in row] for row in self.rows)]
        widths = [max(len(row[i]) for row in cells) for i in range(len(self.headers))]
        print(f"\n## {self.title}")
        for row in cells:
            padded = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
            print("  ".join(padded).rstrip())


def _text(cell: Any) -> str:
    return f"{cell:.6g}" if isinstance(cell, float) else str(cell)


def timed(call: Callable[[], _T]) -> tuple[_T, float]:
    """Return what a call returns, and its CPU seconds in this process."""
    begin = time.process_time()
    result = call()
    return result, time.process_time() - begin
