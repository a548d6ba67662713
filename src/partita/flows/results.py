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

    def document(self) -> object | None:
        """Return the document that a notebook draws below the table; None = none."""
        return None

    def __repr__(self) -> str:
        return "\n".join(self.lines())

    def _repr_html_(self) -> str:
        """Return the lines, the table and the figures as HTML, for notebooks."""
        from partita.report.notebook import shown  # noqa: PLC0415 (notebooks alone need it)

        return shown(self.lines(), self.rows(), self.document())

    def _repr_mimebundle_(
        self, include: object = None, exclude: object = None
    ) -> Mapping[str, str]:
        """Return what front ends of notebooks choose from: HTML, a picture, a text."""
        from partita.report.notebook import bundle  # noqa: PLC0415 (notebooks alone need it)

        del include, exclude  # what is left out is the front end's business
        return bundle(self.lines(), self.rows(), self.document())
