"""Where things stand in a picture with a lane per device: the frame, its axis and its names.

The pieces of SVG that the pictures share are here: text, shapes and how numbers are written.
"""

import dataclasses
import html
from collections.abc import Iterator

import numpy as np

from partita.core.columns import Array
from partita.core.timeline import Timeline
from partita.report.lanes import axis_ticks, shown_devices


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


_GAP = 20

STYLE = """
text { font: 12px system-ui, "Segoe UI", "DejaVu Sans", sans-serif; fill: #747a83; }
.title { font-size: 15px; font-weight: 600; }
.number { font-size: 11px; fill: #fff; text-anchor: middle; }
.dark { fill: #000; }
.right { text-anchor: end; }
.middle { text-anchor: middle; }
.over { fill: #d64545; font-weight: 600; }
.lane { fill: #8b9099; fill-opacity: .13; }
.grid { stroke: #8b9099; stroke-opacity: .3; }
.transfer { stroke: #8b9099; stroke-width: 1; stroke-opacity: .75; }
.memory { fill: #3273c4; fill-opacity: .3; stroke: #3273c4; stroke-width: 1; }
.limit { stroke: #d64545; stroke-dasharray: 5 3; }
"""


@dataclasses.dataclass(frozen=True, slots=True)
class Frame:
    """Where things stand, in pixels.

    Attributes:
        width: Of the picture.
        left: Where time 0 is.
        span: Length of the time axis.
        top: Where the first lane begins.
        lane: Height of a lane.
        step: From a lane to the next.
        devices: Devices shown, one lane each.
        head: Lanes before the devices that are left out.
        hidden: The devices that are left out.
        makespan_s: Length of the time axis in seconds.
    """

    width: int
    left: float
    span: float
    top: float
    lane: float
    step: float
    devices: tuple[int, ...]
    head: int
    hidden: range
    makespan_s: float

    def x(self, time_s: Array) -> Array:
        """Return where times lie."""
        return self.left + time_s * (self.span / self.makespan_s)

    def y(self, index: int) -> float:
        """Return the top of a lane; a line of text stands for the devices that are left out."""
        gap = _GAP if self.hidden and index >= self.head else 0
        return self.top + index * self.step + gap

    @property
    def bottom(self) -> float:
        """Where the last lane ends."""
        return self.y(len(self.devices) - 1) + self.lane

    @property
    def right(self) -> float:
        """Where the time axis ends."""
        return self.left + self.span


def frame_of(timeline: Timeline, width: int, max_lanes: int) -> Frame:
    """Return the frame of a timeline's picture."""
    shown = shown_devices(len(timeline.devices), max_lanes)
    devices = (*shown.head, *shown.tail)
    longest = max((len(timeline.devices[device]) for device in devices), default=0)
    left = 16 + min(7.2 * longest, width * 0.2)
    lane = 24.0 if len(devices) <= 16 else 14.0
    limited = len(timeline.memory_device) and bool(np.isfinite(timeline.limit_bytes).any())
    return Frame(
        width=width,
        left=left,
        span=width - left - (140 if limited else 70),
        top=78,
        lane=lane,
        step=lane + (8 if len(devices) <= 16 else 4),
        devices=devices,
        head=len(shown.head),
        hidden=shown.hidden,
        makespan_s=max(timeline.makespan_s, 1e-300),
    )


def axis(frame: Frame) -> Iterator[str]:
    """Yield the axis of time with its grid."""
    ticks, scale, unit = axis_ticks(frame.makespan_s, max(3, int(frame.span // 110)))
    for tick in ticks:
        x = float(frame.x(np.array(tick)))
        if x <= frame.right + 0.5:
            yield line(x, frame.top - 6, x, frame.bottom + 4, "grid")
            yield text_at(x, frame.bottom + 18, f"{tick / scale:g} {unit}", "middle")


def backgrounds(timeline: Timeline, frame: Frame) -> Iterator[str]:
    """Yield the empty lanes with their names, and a line for the devices that are left out."""
    for index, device in enumerate(frame.devices):
        y = frame.y(index)
        yield rect(frame.left, y, frame.span, frame.lane, 'class="lane"/>')
        name = _shortened(timeline.devices[device], frame)
        yield text_at(frame.left - 8, y + frame.lane / 2 + 4, name, "right")
    if frame.hidden:
        first, last = (timeline.devices[frame.hidden[end]] for end in (0, -1))
        text = f"{len(frame.hidden):,} devices not shown, {first} to {last}"
        yield text_at(frame.left, frame.y(frame.head) - frame.step + frame.lane - 2, text)


def _shortened(name: str, frame: Frame) -> str:
    """Return a name that fits left of the lanes; one that is too long loses its beginning."""
    room = max(4, int((frame.left - 8) / 7.2))
    return name if len(name) <= room else "…" + name[1 - room :]
