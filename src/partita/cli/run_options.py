"""What ``run`` and ``train`` share: a file of options, the steps as they are done, the outcome."""

import math
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import click

from partita.cli.console import percent, print_json, stdout_console, table
from partita.flows.options_file import read_options_file
from partita.flows.run_requests import RunRequest, TrainRequest
from partita.flows.summary import Summary
from partita.requests import Request
from partita.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from partita.flows.execute import Outcome
    from partita.runtime.report import RunReport

_F = TypeVar("_F", bound=Callable[..., Any])
_FLAGS = {"json": "as_json", "quiet": "quiet", "debug": "debug"}
_WORST = 5


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

    def __init__(self, steps: int, summary: Summary, *, emulated: bool, quiet: bool) -> None:
        plan = summary.solution.plan
        used = {d for stage in plan.stages for group in stage.devices for d in group}
        self._steps, self._samples, self._ranks = steps, plan.samples, len(used)
        self._emulated, self._quiet, self._live = emulated, quiet, sys.stderr.isatty()
        self._predicted_s = math.nan if emulated else summary.evaluation.step_s
        self._losses: dict[int, list[float]] = {}
        self._first_s = math.nan

    def __call__(self, _: int, news: Any) -> None:
        """Take note of a step that a rank has done."""
        losses = self._losses.setdefault(news.step, [])
        losses.append(news.loss)
        if self._quiet or len(losses) < self._ranks:
            return
        del self._losses[news.step]
        number, now_s = news.step + 1, time.monotonic()
        words = [f"run: step {number}/{self._steps}"]
        if not self._emulated:
            words.append(f"loss {sum(losses):.4f}")
        if news.step == 0:
            self._first_s = now_s
        elif now_s > self._first_s:
            words.append(f"{news.step * self._samples / (now_s - self._first_s):.3g} samples/s")
        if self._live:
            if not math.isnan(self._predicted_s):
                words.append(f"(predicted {self._samples / self._predicted_s:.3g})")
            click.echo(f"\r{'  '.join(words)}\x1b[K", err=True, nl=number == self._steps)
        elif number in (1, self._steps) or number % max(1, self._steps // 5) == 0:
            click.echo("  ".join(words), err=True)


def show_outcome(outcome: "Outcome", request: TrainRequest | RunRequest, *, as_json: bool) -> None:
    """Print what a run came to, and end with an error if it is not right.

    Raises:
        WorkerError: It does not equal the captured graph, or the untouched module.
    """
    if as_json:
        print_json({"directory": str(outcome.directory), **outcome.to_json()})
    else:
        _print(outcome, report=request.report)
    outcome.require_equal()


def _print(outcome: "Outcome", *, report: bool) -> None:
    from partita.flows.run_energy import energy_lines  # noqa: PLC0415 (only here)

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
    console.print(f"{outcome.directory}: {', '.join(outcome.written)}")


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
    titles = ["forward", "backward", "compute a step"]
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
    titles = ["busy", "bubble", "a message", "peak memory"]
    by_device = [("device", "left"), *((title, "right") for title in titles)]
    console.print(table(by_device, devices))
