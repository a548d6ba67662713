"""What every result of a public function can do: words, JSON, a table for notebooks."""

from collections.abc import Mapping
from typing import Any


class Result:
    """Base of results: a plain text of a few lines, JSON values, and a table for notebooks."""

    def lines(self) -> list[str]:
        """Return one to three lines that say what came out."""
        raise NotImplementedError

    def to_json(self) -> dict[str, Any]:
        """Return the result as JSON values under stable keys; what is not known is null."""
        raise NotImplementedError

    def rows(self) -> list[Mapping[str, object]]:
        """Return the table that a notebook shows below the lines; empty = none."""
        return []

    def picture(self) -> str:
        """Return a picture as SVG that a notebook shows below the table; empty = none."""
        return ""

    def __repr__(self) -> str:
        return "\n".join(self.lines())

    def _repr_html_(self) -> str:
        """Return the lines, the table and the picture as HTML, for notebooks."""
        from partita.report.notebook import shown  # noqa: PLC0415 (notebooks alone need it)

        return shown(self.lines(), self.rows(), self.picture())
