"""Charts: frontiers, sensitivities, searches, studies of fleets and memory, drawn by matplotlib.

A chart is a function of a document that returns a figure; :func:`render` turns it into the bytes of
an SVG, PNG or PDF file by the file's ending. All of them share ``charts.mplstyle``. The same figure
gives the same bytes on every run.
"""

import io
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import resources
from pathlib import PurePath
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np

from partita.core.columns import Array
from partita.core.energy import EnergyOrigin, Frontier
from partita.core.fleet import Sensitivity
from partita.core.timeline import Timeline
from partita.errors import InvalidInputError, UnsupportedError
from partita.fleet.study.panels import Panel
from partita.report.curves import Curve, finite
from partita.units import format_bytes, format_joules, joule_unit

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Points: TypeAlias = Sequence[tuple[float, float]]
"""Seconds and value of each new best of a search, in their order."""

ENDINGS = (".svg", ".png", ".pdf")
ORIGINS = {
    EnergyOrigin.MEASURED: "measured",
    EnergyOrigin.PUBLISHED: "from a profile file",
    EnergyOrigin.MODELLED: "modelled, not measured",
}
"""Where the joules come from, for people."""
SEARCH_HEADER = "seconds,value"
_WIDE = 20.0
"""Ratio of the largest to the least value from which an axis is logarithmic."""
_MAX_CURVES = 3
"""Amounts of memory for which a sensitivity has a curve."""
_MAX_DEVICES = 12
"""Lines of memory that are drawn."""
_FAR = 1.3
"""How far above the highest peak a limit is still drawn."""


def check_ending(path: str) -> str:
    """Return the ending of a picture's file.

    Raises:
        InvalidInputError: It is none that can be drawn.
    """
    ending = PurePath(path).suffix.lower()
    if ending not in ENDINGS:
        raise InvalidInputError(
            f"picture {path!r} ends with {ending or 'nothing'}; expected {', '.join(ENDINGS)}"
        )
    return ending


def render(draw: Callable[[], "Figure"], path: str) -> bytes:
    """Return a chart as the bytes of a file, in the format of its ending.

    Args:
        draw: Makes the figure, in the shared style.
        path: Name of the file: ``.svg``, ``.png`` or ``.pdf``.

    Raises:
        InvalidInputError: Another ending.
        UnsupportedError: matplotlib is not installed.
    """
    ending = check_ending(path)
    with _style():
        figure, target = draw(), io.BytesIO()
        undated: dict[str, Any] = {".svg": {"Date": None}, ".pdf": {"CreationDate": None}}
        figure.savefig(target, format=ending[1:], metadata=undated.get(ending))
    return target.getvalue()


@contextmanager
def _style() -> Iterator[None]:
    try:
        import matplotlib  # noqa: PLC0415 (an extra)
    except ModuleNotFoundError as exc:
        raise UnsupportedError("pictures need matplotlib; pip install 'partita[plot]'") from exc
    style = resources.files("partita.report") / "charts.mplstyle"
    with resources.as_file(style) as file, matplotlib.rc_context(fname=file):
        yield


def _figure(panels: int = 1) -> "tuple[Figure, list[Axes]]":
    from matplotlib.figure import Figure  # noqa: PLC0415 (an extra)

    figure = Figure(figsize=(9.0, 4.8 if panels == 1 else 3.3 * panels))
    found = figure.subplots(panels, 1, squeeze=False)
    return figure, [row[0] for row in found]


def curves_chart(curves: Sequence[Curve], *, over: str) -> "Figure":
    """Return the losses of several runs over steps, tokens or seconds."""
    figure, (axes,) = _figure()
    for name, points in curves:
        found = finite(points)
        axes.plot([x for x, _ in found], [y for _, y in found], linewidth=1.2, label=name)
    axes.set_title("Loss" if len(curves) == 1 else f"Losses of {len(curves)} runs")
    axes.set_xlabel(over)
    axes.set_ylabel("loss")
    axes.legend()
    return figure


def frontier_chart(frontier: Frontier, *, title: str = "", chosen: int | None = None) -> "Figure":
    """Return the energy of a step against its time.

    Shown are the realised points, the bound below which no clocks get, every clock at its highest,
    T_min and T*, and the chosen point where there is one.
    """
    figure, (axes,) = _figure()
    scale, unit = joule_unit(float(max(*frontier.energy_j, frontier.all_max_j)))
    axes.plot(
        frontier.time_s,
        frontier.energy_j / scale,
        "-o",
        markersize=4,
        label=f"{len(frontier)} realised points",
    )
    axes.plot(frontier.time_s, frontier.bound_j / scale, "--", label="no clocks need less")
    axes.plot(
        [frontier.all_max_s],
        [frontier.all_max_j / scale],
        "s",
        markersize=7,
        label="all clocks at their highest",
    )
    if chosen is not None:
        axes.plot(
            [frontier.time_s[chosen]],
            [frontier.energy_j[chosen] / scale],
            "o",
            markersize=12,
            fillstyle="none",
            markeredgewidth=2,
            label="chosen",
        )
    for name, value in (("T_min", frontier.fastest_s), ("T*", frontier.best_s)):
        axes.axvline(value, color="#777777", linestyle=":", linewidth=1)
        axes.annotate(
            name,
            (value, 0.02),
            xycoords=("data", "axes fraction"),
            textcoords="offset points",
            xytext=(4, 0),
        )
    axes.set_xlabel("time of a step (s)")
    axes.set_ylabel(f"energy of a step ({unit})")
    origin = ORIGINS[frontier.origin]
    axes.set_title(
        f"{title or 'Time and energy of a step'} ({origin})\n{_frontier_words(frontier)}"
    )
    axes.legend()
    return figure


def _frontier_words(frontier: Frontier) -> str:
    first, last = float(frontier.energy_j[0]), float(frontier.energy_j.min())
    top = frontier.all_max_j
    return (
        f"all-max {format_joules(top)} · fastest {format_joules(first)} ({first / top - 1:+.1%}) · "
        f"least {format_joules(last)} ({last / top - 1:+.1%}) · "
        f"gap at most {float(np.max(frontier.gap)):.2%}"
    )


def sensitivity_chart(sensitivity: Sensitivity) -> "Figure":
    """Return samples per second over CPUs, a curve for each of a few amounts of memory.

    Points that were measured are full, those that were filled in are hollow; curves of which none
    was measured are modelled and say so.
    """
    figure, (axes,) = _figure()
    samples = max(1, sensitivity.batch_size) * max(1, int(sensitivity.gpus[0]))
    rate = sensitivity.speed * (samples / sensitivity.iteration_s)
    for index, memory_bytes in enumerate(_amounts(sensitivity)):
        here = np.flatnonzero(sensitivity.memory_bytes == memory_bytes)
        here = here[np.argsort(sensitivity.cpus[here], kind="stable")]
        measured = sensitivity.measured[here]
        words = f"{format_bytes(memory_bytes)} per GPU"
        words += "" if measured.any() else " (modelled)"
        colour = f"C{index}"
        axes.plot(sensitivity.cpus[here], rate[here], color=colour, label=words)
        if measured.any():
            for full, rows in ((True, here[measured]), (False, here[~measured])):
                axes.plot(
                    sensitivity.cpus[rows],
                    rate[rows],
                    "o",
                    color=colour,
                    fillstyle="full" if full else "none",
                )
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("CPUs per GPU")
    axes.set_ylabel("samples/s" if sensitivity.batch_size else "iterations/s")
    axes.set_title(
        f"{sensitivity.name}: speed over CPUs\n{sensitivity.machine} · full: measured, "
        "hollow: filled in"
    )
    axes.legend()
    return figure


def _amounts(sensitivity: Sensitivity) -> list[float]:
    """Return a few amounts of memory, the most first."""
    amounts = np.unique(sensitivity.memory_bytes)[::-1]
    chosen = np.linspace(0, len(amounts) - 1, min(_MAX_CURVES, len(amounts))).round()
    return [float(amounts[int(index)]) for index in chosen]


class TradeOff(NamedTuple):
    """A point of a chart of two figures of which one is traded for the other.

    Attributes:
        x: Figure of the horizontal axis.
        y: Figure of the vertical axis.
        group: Points of one group have a colour.
        on_front: Whether no other point is better in both.
        words: Text beside the point; empty = none.
    """

    x: float
    y: float
    group: str
    on_front: bool = False
    words: str = ""


def trade_off_chart(points: Sequence[TradeOff], *, title: str, x: str, y: str) -> "Figure":
    """Return points of two figures with their front; axes are logarithmic where they span much.

    Raises:
        InvalidInputError: There is no point.
    """
    if not points:
        raise InvalidInputError("there is no point to draw")
    figure, (axes,) = _figure()
    groups = list(dict.fromkeys(point.group for point in points))
    for index, group in enumerate(groups):
        own = [point for point in points if point.group == group]
        axes.plot(
            [point.x for point in own],
            [point.y for point in own],
            "os^Dv"[index // 10 % 5],
            color=f"C{index % 10}",
            markersize=5,
            label=group,
        )
    front = sorted((point.x, point.y) for point in points if point.on_front)
    axes.plot(
        [at for at, _ in front], [at for _, at in front], "--", color="#777777", label="best of all"
    )
    middle = (min(point.x for point in points) + max(point.x for point in points)) / 2
    for point in points:
        left = point.x > middle  # where there is room
        axes.annotate(
            point.words,
            (point.x, point.y),
            textcoords="offset points",
            xytext=(-6 if left else 6, 6),
            horizontalalignment="right" if left else "left",
        )
    for values, scale in (
        ([point.x for point in points], axes.set_xscale),
        ([point.y for point in points], axes.set_yscale),
    ):
        if min(values) > 0 and max(values) > _WIDE * min(values):
            scale("log")
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.set_title(title)
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))
    return figure


def search_csv(points: Points) -> str:
    """Return the points of a search as CSV, digits enough to read them back exactly."""
    return "\n".join([SEARCH_HEADER, *(f"{seconds!r},{value!r}" for seconds, value in points), ""])


def search_chart(points: Points, *, title: str = "", what: str = "", unit: str = "") -> "Figure":
    """Return the best value of a search over time, as steps: a value holds until a better one.

    An axis is logarithmic where what it shows spans more than a factor of 20.

    Raises:
        InvalidInputError: There is no point.
    """
    if not points:
        raise InvalidInputError("the search recorded no value, so there is nothing to draw")
    figure, (axes,) = _figure()
    seconds, values = (np.array(column) for column in zip(*points, strict=True))
    axes.step(seconds, values, where="post")
    axes.plot(seconds, values, "o", markersize=4, color="C0")
    if seconds[0] > 0 and seconds[-1] > _WIDE * seconds[0]:
        axes.set_xscale("log")
    if values[-1] > 0 and values[0] > _WIDE * values[-1]:
        axes.set_yscale("log")
    shown = f" {unit}" if unit else ""
    words = (
        f"{len(points)} values, from {values[0]:.6g} to {values[-1]:.6g}{shown}, "
        f"the last after {seconds[-1]:.3g} s"
    )
    axes.set_xlabel("seconds of search")
    axes.set_ylabel(f"{what} ({unit})" if what and unit else what or unit)
    heading = f"{title}: best value over time" if title else "Best value over time"
    axes.set_title(f"{heading}\n{words}")
    return figure


def panels_chart(panels: Sequence[Panel], *, title: str) -> "Figure":
    """Return the panels of a study of a fleet, one below the other: CDFs, queue, utilisation."""
    figure, rows = _figure(len(panels))
    figure.suptitle(title, x=0.01, ha="left")
    names = list(dict.fromkeys(line.name for panel in panels for line in panel.lines))
    for panel, axes in zip(panels, rows, strict=True):
        for line in panel.lines:
            where = names.index(line.name) % 8
            axes.plot(
                line.x,
                line.y,
                color=f"C{where}",
                linestyle=("-", "--", "-.", ":")[where % 4],
                drawstyle="steps-post" if line.stepped else "default",
                label=line.name,
            )
        if panel.logarithmic:
            axes.set_xscale("log")
            axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axes.set_ylim(bottom=0)
        if panel.percent:
            axes.set_ylim(0, 1)
            axes.yaxis.set_major_formatter(lambda value, _: f"{100 * value:g} %")
        axes.set_xlabel(panel.x_label)
        axes.set_ylabel(panel.y_label)
        axes.set_title(panel.title)
        if panel.lines:
            axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))
    return figure


def _limit_words(limit: float) -> str:
    return f"limit {format_bytes(limit)}"


def _memory_lines(timeline: Timeline) -> list[tuple[list[int], Array]]:
    """Return the lines of a memory chart: devices that share one, and its rows; fullest first."""
    found: dict[bytes, tuple[list[int], Array]] = {}
    for device in np.argsort(-timeline.peak_bytes, kind="stable").tolist():
        rows = np.flatnonzero(timeline.memory_device == device)
        key = np.rint(timeline.memory_bytes[rows] / 1e6).tobytes()
        key += np.rint(timeline.memory_s[rows] * (1e5 / timeline.makespan_s)).tobytes()
        found.setdefault(key, ([], rows))[0].append(device)
    return [(sorted(devices), rows) for devices, rows in found.values()]


def memory_chart(timeline: Timeline, *, title: str = "") -> "Figure":
    """Return the memory of each device over a step, and the limits, where there are some.

    Devices that hold the same at the same time are one line; a limit far above all is told.
    """
    figure, (axes,) = _figure()
    lines = _memory_lines(timeline)
    for at, (devices, rows) in enumerate(lines[:_MAX_DEVICES]):
        more = f" +{len(devices) - 1}" if len(devices) > 1 else ""
        axes.step(
            timeline.memory_s[rows],
            timeline.memory_bytes[rows] / 1e9,
            where="post",
            color=f"C{at % 8}",
            linestyle=("-", "--")[at // 8],
            label=f"{timeline.devices[devices[0]]}{more}",
        )
    highest = float(timeline.peak_bytes.max(initial=0.0))
    limits = np.unique(timeline.limit_bytes[np.isfinite(timeline.limit_bytes)])
    for at, limit in enumerate(limits.tolist()):
        style = ("--", ":", "-.")[at % 3]
        if limit <= _FAR * highest:
            axes.axhline(limit / 1e9, color="#777777", linestyle=style, label=_limit_words(limit))
        else:
            axes.plot([], [], " ", label=f"{_limit_words(limit)}, above")
    axes.set_ylim(bottom=0)
    axes.set_xlabel("seconds")
    axes.set_ylabel("memory (GB)")
    shown = f", the fullest {_MAX_DEVICES} of {len(lines)}" if len(lines) > _MAX_DEVICES else ""
    axes.set_title(f"{title or 'Memory of a step'}{shown}")
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))
    return figure
