"""A Timeline and a frontier as pictures of characters that fit the terminal.

Of a Timeline one row is one device, time goes to the right. A cell begins with the number of its
microbatch (of its stage where the step has one microbatch) and goes on with a line: single for
forward, double for backward. A cell of one column is a digit for forward, a small letter for
backward and a capital for weight gradients (0, a and A are microbatch 0). Unless all numbers fit,
all show their last digit. Where cells are narrower than a column, the column shows what fills it
best.

A frontier is a curve over time and energy.
"""

import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TypeAlias

import numpy as np

from partita.core.columns import Array
from partita.core.energy import Frontier
from partita.core.program import Kind
from partita.core.timeline import Timeline
from partita.report.lanes import (
    MEANING,
    Cell,
    Shown,
    axis_ticks,
    cell_numbers,
    cell_of,
    compute_rows,
    dominant_cells,
    shown_devices,
)
from partita.units import format_bytes, format_joules, format_seconds

MIN_WIDTH = 40
MAX_ROWS = 40
_FEW = 3
"""Equal rows of which each is shown no longer."""

_Span: TypeAlias = tuple[str, str]
_Line: TypeAlias = list[_Span]

_UNICODE: Mapping[Cell, str] = {
    Cell.FORWARD: "─",
    Cell.BACKWARD: "═",
    Cell.WEIGHT: "≈",
    Cell.RECOMPUTE: "┄",
    Cell.LOAD: "▫",
    Cell.UPDATE: "▲",
    Cell.MIXED: "▒",
    Cell.COLLECTIVE: "◊",
    Cell.TRANSFER: "<",
    Cell.IDLE: "·",
}
_ASCII: Mapping[Cell, str] = {
    Cell.FORWARD: "-",
    Cell.BACKWARD: "=",
    Cell.WEIGHT: "~",
    Cell.RECOMPUTE: ":",
    Cell.LOAD: "o",
    Cell.UPDATE: "^",
    Cell.MIXED: "#",
    Cell.COLLECTIVE: "*",
    Cell.TRANSFER: "<",
    Cell.IDLE: ".",
}
_LETTERS: Mapping[Cell, str] = {
    Cell.FORWARD: "0123456789",
    Cell.BACKWARD: "abcdefghij",
    Cell.WEIGHT: "ABCDEFGHIJ",
}
_RICH_STYLES: Mapping[str, str] = {
    "forward": "blue",
    "backward": "yellow",
    "weight": "cyan",
    "recompute": "bold yellow",
    "load": "magenta",
    "update": "bold magenta",
    "mixed": "green",
    "collective": "red",
    "transfer": "magenta",
    "idle": "dim",
    "axis": "dim",
    "title": "bold",
    "alarm": "bold red",
    "": "",
}
_ANSI = dict(
    zip(
        ("bold", "dim", "red", "green", "yellow", "blue", "magenta", "cyan"),
        (1, 2, 31, 32, 33, 34, 35, 36),
        strict=True,
    )
)


@dataclass(frozen=True, slots=True)
class _Glyphs:
    """The characters of a picture."""

    cells: Mapping[Cell, str]
    border: str
    tick: str
    more: str
    dot: str
    ascii_only: bool

    def safe(self, text: str) -> str:
        """Return a name without characters that would spoil the picture."""
        text = "".join(c if c.isprintable() else "?" for c in text)
        return text.encode("ascii", "replace").decode("ascii") if self.ascii_only else text


def _glyphs(encoding: str) -> _Glyphs:
    unicode = _Glyphs(_UNICODE, "│", "╵", "…", "·", ascii_only=False)
    try:
        ("".join(_UNICODE.values()) + "│╵…·").encode(encoding)
    except (LookupError, UnicodeEncodeError):
        return _Glyphs(_ASCII, "|", "'", "...", "-", ascii_only=True)
    return unicode


def pipeline_picture(
    timeline: Timeline,
    width: int,
    *,
    colour: bool = False,
    encoding: str = "utf-8",
    max_rows: int = MAX_ROWS,
) -> str:
    """Return a timeline as lines of text.

    Args:
        timeline: What to draw.
        width: Columns of the terminal; less than 40 counts as 40. No line is longer.
        colour: Whether to colour the cells by ANSI codes.
        encoding: Of the terminal; one that lacks the characters of the picture gets plain ASCII.
        max_rows: Devices beyond so many rows are left out, and a line says how many.
    """
    lines = _lines(timeline, width, encoding, max_rows)
    return "".join(_plain(line, colour=colour) + "\n" for line in lines)


def _plain(line: _Line, *, colour: bool) -> str:
    if not colour:
        return "".join(part for part, _ in line).rstrip()
    parts = []
    for part, style in line:
        codes = ";".join(str(_ANSI[word]) for word in _RICH_STYLES[style].split())
        parts.append(f"\x1b[{codes}m{part}\x1b[0m" if codes and part.strip() else part)
    return "".join(parts)


def _lines(timeline: Timeline, width: int, encoding: str, max_rows: int) -> list[_Line]:
    width = max(width, MIN_WIDTH)
    glyphs = _glyphs(encoding)
    shown = shown_devices(len(timeline.devices), max_rows)
    table = _Table(timeline, width, glyphs, shown)
    lines = [*_title(timeline, width, glyphs), table.header()]
    lines += _told_apart([table.row(device) for device in shown.head], glyphs)
    if len(shown.hidden):
        lines.append(_hidden_line(timeline, shown, width, glyphs))
    lines += _told_apart([table.row(device) for device in shown.tail], glyphs)
    return [*lines, table.axis(), *table.legend(width)]


def _told_apart(rows: Sequence[_Line], glyphs: _Glyphs) -> Iterator[_Line]:
    """Yield rows; of three or more that follow one another and are equal, the first and a line."""
    for _, run in groupby(rows, key=lambda row: row[1:]):
        alike = list(run)
        shown = alike if len(alike) < _FEW else alike[:1]
        yield from shown
        if len(alike) > len(shown):
            last = alike[-1][0][0].strip()
            left = f"{glyphs.more} {len(alike) - 1} more like it, to {last}"
            yield [(left, "axis")]


def _columns(text: str) -> int:
    """Return how many columns of a terminal a text takes."""
    return sum(
        0 if unicodedata.combining(c) else 2 if unicodedata.east_asian_width(c) in "WF" else 1
        for c in text
    )


def _fitted(text: str, width: int, more: str) -> str:
    """Return a name in exactly so many columns; one that is too long loses its beginning."""
    if _columns(text) > width:
        while text and _columns(text) > width - len(more):
            text = text[1:]
        text = (more + text)[:width]
    return text + " " * (width - _columns(text))


def _wrapped(items: Sequence[_Line], width: int, gap: _Span) -> list[_Line]:
    """Return items one after the other, on as many lines as they need."""
    lines: list[_Line] = []
    room = 0
    for item in items:
        size = sum(_columns(part) for part, _ in item)
        if lines and size + len(gap[0]) <= room:
            lines[-1] += [gap, *item]
            room -= size + len(gap[0])
        else:
            lines.append(list(item))
            room = width - size
    return lines


def _title(timeline: Timeline, width: int, glyphs: _Glyphs) -> list[_Line]:
    stages = len(np.unique(timeline.stage[timeline.stage >= 0]))
    microbatches = len(np.unique(timeline.microbatch[timeline.microbatch >= 0]))
    facts = [
        timeline.origin.value,
        format_seconds(timeline.makespan_s),
        _counted(len(timeline.devices), "device", "devices"),
        _counted(stages, "stage", "stages"),
        _counted(microbatches, "microbatch", "microbatches"),
    ]
    return _wrapped([[(fact, "title")] for fact in facts], width, (f" {glyphs.dot} ", "title"))


def _counted(count: int, one: str, many: str) -> str:
    return f"{count:,} {one if count == 1 else many}"


class _Table:
    """The rows of a picture and where their columns begin."""

    def __init__(self, timeline: Timeline, width: int, glyphs: _Glyphs, shown: Shown) -> None:
        self.timeline, self.glyphs = timeline, glyphs
        devices = [*shown.head, *shown.tail]
        names = [glyphs.safe(timeline.devices[device]) for device in devices]
        longest = max((_columns(name) for name in names), default=0)
        self.label = min(max(longest, 3), max(8, width // 5))
        notes = _notes(timeline, devices)
        room = width - self.label - 2
        while len(notes) > 1 and room - _notes_width(notes) < max(20, room // 2):
            notes.pop()
        self.notes = notes
        self.cells = room - _notes_width(notes)
        self.edges = np.linspace(0.0, max(timeline.makespan_s, 1e-300), self.cells + 1)
        self.used: set[Cell] = set()
        self.labelled: set[Cell] = set()
        self.narrow: set[Cell] = set()
        self.counted, self.numbers = cell_numbers(timeline)
        self.digits = self._room_for_digits(devices)

    def header(self) -> _Line:
        """Return the line above the figures."""
        left = " " * (self.label + 2 + self.cells)
        return [(left, ""), *(("  " + note.head.rjust(note.width), "axis") for note in self.notes)]

    def row(self, device: int) -> _Line:
        """Return the line of a device and note the sorts of cells on it."""
        name = _fitted(
            self.glyphs.safe(self.timeline.devices[device]), self.label, self.glyphs.more
        )
        line: _Line = [(name + " ", ""), (self.glyphs.border, "axis")]
        line += self._cells(device)
        for note in self.notes:
            text, style = note.of[device]
            line.append(("  " + text.rjust(note.width), style))
        return line

    def _cells(self, device: int) -> Iterator[_Span]:
        """Yield the cells of a device, in runs of one style."""
        sorts = dominant_cells(self.timeline, device, self.edges).tolist()
        text = [self.glyphs.cells[Cell(sort)] for sort in sorts]
        for first, last, sort, label in self._wide(device):
            sorts[first:last] = [sort] * (last - first)
            text[first:last] = self.glyphs.cells[sort] * (last - first)
            text[first : first + len(label)] = label
        self.used.update(Cell(sort) for sort in sorts)
        begin = 0
        for column in range(1, self.cells + 1):
            if column == self.cells or sorts[column] != sorts[begin]:
                yield "".join(text[begin:column]), Cell(sorts[begin]).name.lower()
                begin = column

    def _wide(self, device: int) -> Iterator[tuple[int, int, Cell, str]]:
        """Yield the cells that fill columns of their own: from, to, sort and label."""
        rows, first, last = self._places(device)
        columns = (first, last, cell_of(self.timeline, rows), self.numbers[rows])
        for a, b, sort, number in zip(*(part.tolist() for part in columns), strict=True):
            cell, label = Cell(sort), ""
            if number >= 0 and cell in _LETTERS and b - a > 1:
                label = str(number) if self.digits > 1 else str(number % 10)
                self.labelled.add(cell)
            elif number >= 0 and cell in _LETTERS:
                label = _LETTERS[cell][number % 10]
                self.narrow.add(cell)
            yield a, b, cell, label

    def _places(self, device: int) -> tuple[Array, Array, Array]:
        """Return the compute rows of a device that fill columns, and their columns from and to."""
        timeline = self.timeline
        rows = compute_rows(timeline, device)
        scale = self.cells / self.edges[-1]
        first = np.rint(timeline.start_s[rows] * scale).astype(np.int64)
        last = np.rint(timeline.end_s[rows] * scale).astype(np.int64)
        length = (timeline.end_s[rows] - timeline.start_s[rows]) * scale
        update = timeline.kind[rows] == Kind.UPDATE
        first = np.where(update, np.minimum(first, self.cells - 1), first)
        last = np.where(update, np.maximum(last, first + 1), last)
        wide = (last > first) & ((length >= 0.75) | (last - first > 1) | update)
        return rows[wide], first[wide], last[wide]

    def _room_for_digits(self, devices: Sequence[int]) -> int:
        """Return the digits of the largest number if all cells have room for it, else 1."""
        digits = len(str(max(0, int(self.numbers.max(initial=0)))))
        for device in devices:
            rows, first, last = self._places(device)
            labelled = np.isin(cell_of(self.timeline, rows), list(_LETTERS))
            if bool((last - first <= digits)[labelled].any()):
                return 1
        return digits

    def axis(self) -> _Line:
        """Return the line with the times."""
        ticks, scale, unit = axis_ticks(self.timeline.makespan_s, max(3, self.cells // 12))
        text = ""
        for tick in ticks:
            at = round(tick / self.edges[-1] * self.cells)
            label = f"{self.glyphs.tick}{tick / scale:g} {unit}"
            if at >= len(text) + (1 if text else 0) and at + len(label) <= self.cells:
                text = text.ljust(at) + label
        return [(" " * (self.label + 2) + text, "axis")]

    def legend(self, width: int) -> list[_Line]:
        """Return the lines that say what the characters on the rows so far mean."""
        items: list[_Line] = []
        for cell in sorted(self.used):
            glyph, meaning = self.glyphs.cells[cell], MEANING[cell]
            if cell in self.labelled | self.narrow:
                meaning += f" of {self.counted} 3"
                forms = [f"3{glyph * 2}"] * (cell in self.labelled)
                forms += [_LETTERS[cell][3]] * (cell in self.narrow)
                glyph = " or ".join(forms)
            items.append([(glyph, cell.name.lower()), (f" {meaning}", "axis")])
        if self.digits == 1 and self.numbers.max(initial=0) > 9 and self.labelled | self.narrow:
            items.append([("numbers: last digits", "axis")])
        return _wrapped(items, width, ("   ", ""))


@dataclass(frozen=True, slots=True)
class _Note:
    """A figure beside each row.

    Attributes:
        head: What it is.
        width: Columns that it needs.
        of: Text and style by device.
    """

    head: str
    width: int
    of: Mapping[int, _Span]


def _notes_width(notes: Sequence[_Note]) -> int:
    return sum(note.width + 2 for note in notes)


def _notes(timeline: Timeline, devices: Sequence[int]) -> list[_Note]:
    """Return the figures beside the rows, the most important first."""
    busy = {d: (f"{timeline.utilisation[d]:.0%}", "") for d in devices}
    notes = [_note("busy", busy)]
    if len(timeline.memory_device):
        peak, limit = timeline.peak_bytes, timeline.limit_bytes
        style = {d: "alarm" if peak[d] > limit[d] else "" for d in devices}
        mark = {d: "!" if style[d] else "" for d in devices}
        texts = {d: (format_bytes(peak[d]) + mark[d], style[d]) for d in devices}
        notes.append(_note("peak", texts))
        if bool(np.isfinite(limit[list(devices)]).all()):
            notes.append(_note("limit", {d: (format_bytes(limit[d]), style[d]) for d in devices}))
    return notes


def _note(head: str, of: Mapping[int, _Span]) -> _Note:
    return _Note(head, max([len(head), *(len(text) for text, _ in of.values())]), of)


def _hidden_line(timeline: Timeline, shown: Shown, width: int, glyphs: _Glyphs) -> _Line:
    hidden = shown.hidden
    low, high = (f"{side(timeline.utilisation[list(hidden)]):.0%}" for side in (np.min, np.max))
    first, last = (glyphs.safe(timeline.devices[device]) for device in (hidden[0], hidden[-1]))
    facts = [
        f"{glyphs.more} {_counted(len(hidden), 'device', 'devices')} not shown",
        f", busy {low}" if low == high else f", busy {low} to {high}",
        f" ({first} to {last})" if len(hidden) > 1 else f" ({first})",
    ]
    text = facts[0]
    for fact in facts[1:]:
        text += fact if _columns(text + fact) <= width else ""
    return [(text, "axis")]


_POINT, _ALL_MAX, _CHOSEN, _BOUND = "●", "▲", "◆", "·"
_PLAIN = {_POINT: "o", _ALL_MAX: "^", _CHOSEN: "#", _BOUND: ".", "│": "|", "└": "+", "─": "-"}


def frontier_picture(
    frontier: Frontier,
    width: int,
    *,
    height: int = 12,
    chosen: int | None = None,
    encoding: str = "utf-8",
) -> str:
    """Return energy against time as lines of text, with the bound and all-max.

    Args:
        frontier: What to draw.
        width: Columns.
        height: Lines of the curve.
        chosen: A point to be marked.
        encoding: Of the terminal; other signs are used where it lacks ours.
    """
    energies = (*frontier.energy_j, *frontier.bound_j, frontier.all_max_j)
    times = (*frontier.time_s, frontier.all_max_s)
    top, bottom = float(max(energies)), float(min(energies))
    first, last = float(min(times)), float(max(times))
    labels = [format_joules(top), format_joules(bottom)]
    left = max(map(len, labels)) + 1
    columns = max(MIN_WIDTH, width) - left - 2
    grid = np.full((height, columns), " ", dtype="<U1")

    def put(time_s: float, energy_j: float, sign: str) -> None:
        x = round((time_s - first) / max(last - first, 1e-300) * (columns - 1))
        y = round((top - energy_j) / max(top - bottom, 1e-300) * (height - 1))
        grid[min(max(y, 0), height - 1), min(max(x, 0), columns - 1)] = sign

    for column, sign in ((frontier.bound_j, _BOUND), (frontier.energy_j, _POINT)):
        for time_s, energy_j in zip(frontier.time_s.tolist(), column.tolist(), strict=True):
            put(time_s, energy_j, sign)
    put(frontier.all_max_s, frontier.all_max_j, _ALL_MAX)
    if chosen is not None:
        put(float(frontier.time_s[chosen]), float(frontier.energy_j[chosen]), _CHOSEN)
    lines = []
    for row in range(height):
        label = labels[0] if row == 0 else labels[1] if row == height - 1 else ""
        lines.append(f"{label:>{left - 1}} │{''.join(grid[row])}".rstrip())
    lines.append(f"{'':>{left - 1}} └{'─' * columns}")
    ends = format_seconds(first), format_seconds(last)
    between = columns - len(ends[0]) - len(ends[1])
    lines.append(f"{'':>{left + 1}}{ends[0]}{' ' * max(1, between)}{ends[1]}")
    keys = f"{_POINT} point  {_BOUND} bound  {_ALL_MAX} all-max"
    keys += f"  {_CHOSEN} chosen" if chosen is not None else ""
    lines.append(f"{'':>{left + 1}}{keys}")
    return _written("\n".join(lines) + "\n", encoding)


def _written(text: str, encoding: str) -> str:
    """Return the picture in signs that an encoding has."""
    try:
        text.encode(encoding)
    except (LookupError, UnicodeEncodeError):
        for sign, other in _PLAIN.items():
            text = text.replace(sign, other)
    return text
