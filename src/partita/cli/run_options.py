"""What ``run`` and ``train`` share: a file of options, the steps as they are done, the outcome."""

import math
import sys
from collections import deque
from collections.abc import Callable
from statistics import median
from typing import TYPE_CHECKING, Any, TypeVar

import click

from partita.cli.console import percent, picture_signs, print_json, stdout_console, table
from partita.flows.options_file import read_options_file
from partita.flows.runs.requests import RunRequest, TrainRequest
from partita.requests import Request
from partita.units import (
    format_bytes,
    format_count,
    format_duration,
    format_seconds,
    format_share,
)

if TYPE_CHECKING:
    from partita.flows.runs.execute import Outcome
    from partita.flows.runs.steps import PreparedRun
    from partita.runtime.metric_rows import StepRow
    from partita.runtime.report import RunReport

_F = TypeVar("_F", bound=Callable[..., Any])
_FLAGS = {"json": "as_json", "quiet": "quiet", "debug": "debug"}
_WORST = 5
_RECENT = 20
"""Steps over which the time of a step is shown."""
_SHOWN_EVERY_S = 10.0
"""Seconds from one line of a script's steps to the next, where lines stay."""
_DRAWN = 20
"""Steps from which the losses of a run are drawn."""


def config_option(request: type[Request]) -> Callable[[_F], _F]:
    """Return the option ``--config`` of a command that takes a request."""

    def read(context: click.Context, _: click.Parameter, path: str | None) -> None:
        if path is not None:
            found = read_options_file(path, request, _FLAGS)
            context.default_map = {**(context.default_map or {}), **found}

    return click.option(
        "--config",
        callback=read,
        is_eager=True,
        expose_value=False,
        help="YAML file of options, by their long names; the command line wins.",
    )


class StepLine:
    """Shows the steps of a run as they are done: one line on a terminal, a few elsewhere."""

    def __init__(self, prepared: "PreparedRun", *, quiet: bool) -> None:
        summary, plan = prepared.summary, prepared.solution.plan
        has_script = isinstance(prepared.request, RunRequest) and prepared.request.script
        # A script has as many steps as it makes; 0 = nobody knows how many.
        self._steps, self._samples = 0 if has_script else prepared.steps, plan.samples
        self._shown_s = -math.inf
        self._quiet, self._live = quiet, sys.stderr.isatty()
        emulated = prepared.request.emulate
        self._has_loss = not emulated
        self._predicted_s = math.nan if emulated else summary.evaluation.step_s
        # The same arithmetic in another time.
        self._flop_s = summary.evaluation.flop_utilisation * self._predicted_s
        self._first: StepRow | None = None
        self._recent: deque[float] = deque(maxlen=_RECENT)

    def __call__(self, row: "StepRow") -> None:
        """Show a step that all ranks have done."""
        if self._quiet:
            return
        if not math.isnan(row.step_s):
            self._recent.append(row.step_s)
        number, live = row.step, self._live
        if live:
            click.echo(f"\r{self._text(row)}\x1b[K", err=True, nl=number == self._steps)
        elif row.held_out_loss is not None or self._is_shown(row):
            click.echo(self._text(row), err=True)
        self._first = self._first or row

    def end(self) -> None:
        """End a line of which nobody knew that it was the last."""
        if self._live and self._first is not None and not self._steps:
            click.echo(err=True)

    def _is_shown(self, row: "StepRow") -> bool:
        """Return whether a step is shown where lines stay: a few of all, or one now and then."""
        if self._steps:
            return row.step in (1, self._steps) or row.step % max(1, self._steps // 5) == 0
        if row.time_s - self._shown_s < _SHOWN_EVERY_S:
            return False
        self._shown_s = row.time_s
        return True

    def _text(self, row: "StepRow") -> str:
        words = [f"run: step {row.step}" + (f"/{self._steps}" if self._steps else "")]
        if self._has_loss:
            words.append(f"loss {row.loss:.4f}")
        if row.held_out_loss is not None:
            words.append(f"held out {row.held_out_loss:.4f}")
        first = self._first
        if first is None or row.time_s <= first.time_s:
            return "  ".join(words)
        past = (row.step - first.step) / (row.time_s - first.time_s)
        words.append(f"{past * self._samples:.3g} samples/s")
        if self._live and not math.isnan(self._predicted_s):
            words.append(f"(predicted {self._samples / self._predicted_s:.3g})")
        if row.tokens:
            words.append(f"{format_count(past * row.tokens / row.step)} tokens/s")
        step_s = median(self._recent) if self._recent else math.nan
        if not math.isnan(step_s) and self._live:
            words.append(f"{format_seconds(step_s)} per step")
            if not math.isnan(self._predicted_s):
                words[-1] += f" ({format_share(step_s / self._predicted_s - 1, sign=True)})"
        if not math.isnan(self._flop_s):
            words.append(f"MFU {percent(self._flop_s * past)}")
        if row.memory_bytes and self._live:
            words.append(format_bytes(row.memory_bytes))
        if row.step < self._steps and self._live:
            words.append(f"ETA {format_duration((self._steps - row.step) / past)}")
        return "  ".join(words)


def show_detached(prepared: "PreparedRun", *, as_json: bool) -> None:
    """Leave a run to itself, and print how it is seen again."""
    from partita.flows.runs.detached import detach  # noqa: PLC0415 (torch)

    found = detach(prepared)
    if as_json:
        print_json(found.to_json())
    else:
        for line in found.lines():
            click.echo(line)


def show_outcome(outcome: "Outcome", request: TrainRequest | RunRequest, *, as_json: bool) -> None:
    """Print what a run came to, and end with an error if it is not right.

    Raises:
        WorkerError: It does not equal the captured graph, or the untouched module.
    """
    if as_json:
        print_json({"directory": str(outcome.directory), **outcome.to_json()})
    else:
        _print(outcome, report=request.report is not None)
    outcome.require_equal()


def _print(outcome: "Outcome", *, report: bool) -> None:
    from partita.flows.runs.energy import energy_lines  # noqa: PLC0415 (only here)

    console, figures = stdout_console(), outcome.report
    differing = [verdict for verdict in outcome.verdicts if not verdict.is_equal]
    if differing:
        worst = differing[0].differences[:_WORST]
        rows = [[str(d.step), d.what, d.name, f"{d.value:.1e}"] for d in worst]
        titles = (("step", "right"), ("what", "left"), ("name", "left"), ("difference", "right"))
        console.print(table(titles, rows))
    for line in (*outcome.lines(), *energy_lines(outcome.run)):
        console.print(line)
    if figures is not None:
        if report:
            _print_report(figures)
        name, factor = figures.slowest
        console.print(f"slowest   {name}: compute {factor:.2f} x its prediction")
    for remark in outcome.remarks:
        console.print(f"          {remark}")
    _draw_losses(outcome)
    console.print(f"{outcome.directory}: {', '.join(outcome.written)}")


def _draw_losses(outcome: "Outcome") -> None:
    """Draw the losses of a run that is long enough to have a curve."""
    losses = [(step, loss) for step, loss in enumerate(outcome.losses, 1) if loss is not None]
    if len(losses) < _DRAWN:
        return
    from partita.report.curves import curve_picture  # noqa: PLC0415 (only here)

    console = stdout_console()
    held_out = [(step + 1, loss) for step, loss in sorted(outcome.run.held_out.items())]
    text = curve_picture(
        [("loss", losses), ("held out", held_out)],
        width=min(console.width, 100),
        encoding=picture_signs(console)[1],
    )
    console.print(text, markup=False, highlight=False)


def _pair(values: tuple[float, float], text: Callable[[float], str]) -> str:
    return " / ".join("-" if math.isnan(value) else text(value) for value in values)


def _print_report(report: "RunReport") -> None:
    console = stdout_console()
    console.print("predicted / measured, by stage:")
    stages = [
        [
            str(row.stage),
            ", ".join(row.devices),
            _pair(row.forward_s, format_seconds),
            _pair(row.backward_s, format_seconds),
            _pair(row.compute_s, format_seconds),
        ]
        for row in report.stages
    ]
    titles = ["forward", "backward", "compute per step"]
    columns = [("stage", "right"), ("devices", "left"), *((title, "right") for title in titles)]
    console.print(table(columns, stages))
    console.print("by device:")
    devices = [
        [
            row.device,
            _pair(row.busy_s, format_seconds),
            _pair(row.bubble, percent),
            _pair(row.transfer_s, format_seconds),
            _pair(row.peak_bytes, format_bytes),
        ]
        for row in report.devices
    ]
    titles = ["busy", "bubble", "per message", "peak memory"]
    by_device = [("device", "left"), *((title, "right") for title in titles)]
    console.print(table(by_device, devices))
