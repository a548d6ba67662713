"""Pieces of SVG that the pictures share: text, shapes and how numbers are written."""

import html


def plain(text: str) -> str:
    """Return text for XML: escaped, without characters that XML does not know."""
    known = (c if c.isprintable() else "?" for c in text)
    return html.escape("".join(known))


def number(value: float) -> str:
    """Return a coordinate, to a hundredth of a pixel."""
    return f"{value:.2f}".rstrip("0").rstrip(".")


def text_at(x: float, y: float, text: str, style: str = "") -> str:
    """Return a line of text that begins, or by its style ends, at a place."""
    shown = f' class="{style}"' if style else ""
    return f'<text x="{number(x)}" y="{number(y)}"{shown}>{plain(text)}</text>'


def rect(x: float, y: float, width: float, height: float, rest: str) -> str:
    """Return a rectangle; ``rest`` holds its other attributes and ends it."""
    place = f'x="{number(x)}" y="{number(y)}"'
    return f'<rect {place} width="{number(width)}" height="{number(height)}" {rest}'


def line(x1: float, y1: float, x2: float, y2: float, style: str) -> str:
    """Return a line between two places."""
    ends = f'x1="{number(x1)}" y1="{number(y1)}" x2="{number(x2)}" y2="{number(y2)}"'
    return f'<line {ends} class="{style}"/>'


def opening(width: float, height: float, title: str, style: str) -> list[str]:
    """Return how a standalone file begins."""
    size = f'width="{number(width)}" height="{number(height)}"'
    view = f'viewBox="0 0 {number(width)} {number(height)}"'
    return [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} {view} role="img">',
        f"<title>{plain(title)}</title>",
        f"<style>{style}</style>",
    ]
