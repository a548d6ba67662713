"""What every result of a public function can do: words, JSON, a table for notebooks."""

import html
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

    def __repr__(self) -> str:
        return "\n".join(self.lines())

    def _repr_html_(self) -> str:
        """Return the lines and the table as HTML, for notebooks."""
        text = "".join(f"<div>{html.escape(line)}</div>" for line in self.lines())
        return text + html_table(self.rows())


def html_table(rows: list[Mapping[str, object]]) -> str:
    """Return rows as an HTML table; empty where there are none.

    >>> html_table([{"device": "a<b", "busy": 0.5}])
    '<table><tr><th>device</th><th>busy</th></tr><tr><td>a&lt;b</td><td>0.5</td></tr></table>'
    """
    if not rows:
        return ""
    columns = list(rows[0])
    head = "".join(f"<th>{html.escape(name)}</th>" for name in columns)
    body = "".join(
        "<tr>"
        + "".join(f"<td>{html.escape(_cell(row.get(name)))}</td>" for name in columns)
        + "</tr>"
        for row in rows
    )
    return f"<table><tr>{head}</tr>{body}</table>"


def _cell(value: object) -> str:
    if value is None:
        return ""
    return f"{value:.5g}" if isinstance(value, float) else str(value)
