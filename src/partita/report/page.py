"""Pages: figures with a few words, as one HTML file that needs nothing else and asks for nothing.

The modules under ``static`` are put into the file as one script; the figures stand beside it as
JSON, which is data and never code. The policy of the file names the hashes of its one script and
one style, so that nothing else could run even if a text came through as markup.
"""

import base64
import hashlib
import html
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from partita.report.figures import Figure

VERSION = 1
MODULES = (
    *("format.js", "store.js", "dom.js", "colours.js", "axis.js", "tip.js", "table.js"),
    *("chart.js", "bars.js", "cluster.js", "graph.js", "lanes.js", "gantt.js", "memory.js"),
    *("clocks.js", "page.js", "report.js"),
)
"""Modules of a report; each imports only from those before it."""
STYLES = ("style.css",)
_IMPORT = re.compile(r"^import \{[^{}\n]*\} from \"\./[\w.]+\";\n", re.MULTILINE)
_PADDING = re.compile(r"^(?:\s+|//.*\n)+", re.MULTILINE)
_EXPORT = re.compile(r"^export (?=(async )?(function|class|const) )", re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """Figures that belong together.

    Attributes:
        title: The heading; empty = none.
        figures: The figures, from top to bottom.
        words: Sentences below the heading.
        wide: Whether figures stand below one another even where two would fit side by side.
    """

    title: str = ""
    figures: Sequence[Figure] = ()
    words: Sequence[str] = ()
    wide: bool = True

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON values."""
        return {
            "title": self.title,
            "figures": list(self.figures),
            "words": list(self.words),
            "wide": self.wide,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """What a report shows.

    Attributes:
        title: The heading.
        subtitle: A line below it.
        summary: A paragraph of plain words.
        facts: The figures that matter most: value and what it is.
        sections: The sections.
        command: The command that makes the same; empty = none.
        notes: What was assumed or left out, a sentence each.
    """

    title: str
    subtitle: str = ""
    summary: str = ""
    facts: Sequence[tuple[str, str]] = ()
    sections: Sequence[Section] = ()
    command: str = ""
    notes: Sequence[str] = ()

    def to_json(self) -> dict[str, Any]:
        """Return it as the JSON values that the modules draw."""
        return {
            "version": VERSION,
            "title": self.title,
            "subtitle": self.subtitle,
            "summary": self.summary,
            "facts": [list(fact) for fact in self.facts],
            "sections": [section.to_json() for section in self.sections],
            "command": self.command,
            "notes": list(self.notes),
        }


def render_page(page: Page) -> str:
    """Return a page as one HTML file."""
    shown = (
        f"<noscript><h1>{html.escape(page.title)}</h1><p>{html.escape(page.summary)}</p></noscript>"
    )
    return _document(page, title=page.title, shown=shown)


def render_frame(figures: Sequence[Figure], *, title: str) -> str:
    """Return figures as the HTML of a frame in somebody else's page.

    It stays transparent until it has drawn: where no script may run, what is below it is seen.
    """
    page = Page(title="", sections=[Section(figures=figures)])
    return _document(page, title=title, kind=' class="frame"')


def _document(page: Page, *, title: str, kind: str = "", shown: str = "") -> str:
    script, style = _script(), _style()
    policy = "; ".join(
        (
            "default-src 'none'",
            f"script-src '{_digest(script)}'",
            f"style-src '{_digest(style)}'",
            "img-src data:",
            "base-uri 'none'",
            "form-action 'none'",
            "require-trusted-types-for 'script'",
            "trusted-types 'none'",
        )
    )
    return (
        "<!doctype html>\n"
        f'<html lang="en"{kind}>\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="referrer" content="no-referrer">\n'
        f"<title>{html.escape(title)}</title>\n"
        f"<style>{style}</style>\n</head>\n<body>\n"
        f'<main id="page">{shown}</main>\n'
        f'<script type="application/json" id="data">{json_in_html(page.to_json())}</script>\n'
        f'<script type="module">{script}</script>\n</body>\n</html>\n'
    )


def json_in_html(values: Mapping[str, Any]) -> str:
    r"""Return JSON that no HTML parser can take for anything else.

    >>> json_in_html({"name": "</script>"})
    '{"name":"\\u003c/script>"}'
    """
    text = json.dumps(values, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c")


def _digest(text: str) -> str:
    digest = hashlib.sha256(text.encode("utf-8")).digest()
    return f"sha256-{base64.b64encode(digest).decode('ascii')}"


def static_text(name: str) -> str:
    """Return one of the files that draw figures."""
    return files("partita.report").joinpath("static", name).read_text(encoding="utf-8")


@cache
def _script() -> str:
    """Return all modules as one script: imports are left out, since all names are in one scope.

    So are indents and lines of comments, which are a sixth of the text.
    """
    parts = [_EXPORT.sub("", _IMPORT.sub("", static_text(name))) for name in MODULES]
    return _PADDING.sub("", "\n".join(parts))


@cache
def _style() -> str:
    return "\n".join(static_text(name) for name in STYLES)
