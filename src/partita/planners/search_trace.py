"""The best value over time, as a search finds it."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass(slots=True)
class SearchTrace:
    """Records each new best value of a search, and when it was found.

    Planners take one as the keyword ``trace``; it is no option of theirs, and never changes what
    they find.

    Attributes:
        on_record: Called with the seconds and the value of each new best.
        points: ``(seconds, value)`` since the trace was made, values falling.
    """

    on_record: Callable[[float, float], None] | None = None
    points: list[tuple[float, float]] = field(default_factory=list)
    _begin: float = field(default_factory=time.monotonic)

    def record(self, value: float) -> None:
        """Note a value; one that is no better than the last is left out."""
        if self.points and not value < self.points[-1][1]:
            return
        point = (time.monotonic() - self._begin, float(value))
        self.points.append(point)
        if self.on_record is not None:
            self.on_record(*point)
