"""Options of all commands, which are no fields of a request, and types of their values."""

import math
from collections.abc import Callable
from typing import Any, TypeVar

import click

from partita.cli.from_request import OpenChoice
from partita.core.metrics import Metric, metric_names
from partita.core.schedules import Schedule, schedule_names

_F = TypeVar("_F", bound=Callable[..., Any])


class FiniteRange(click.FloatRange):
    """A range of numbers in which neither NaN nor an infinity is."""

    def convert(
        self,
        value: Any,
        param: click.Parameter | None,
        ctx: click.Context | None,
    ) -> Any:
        """Return the number, or fail."""
        found = super().convert(value, param, ctx)
        if not math.isfinite(found):
            self.fail(f"{value!r} is not a finite number.", param, ctx)
        return found


METRIC = OpenChoice(metric_names(), Metric.plugins().names)
SCHEDULE = OpenChoice(schedule_names(), Schedule.plugins().names)


def _all(*decorators: Callable[[_F], _F]) -> Callable[[_F], _F]:
    def decorate(function: _F) -> _F:
        for decorator in reversed(decorators):
            function = decorator(function)
        return function

    return decorate


output_options = _all(
    click.option("--json", "as_json", is_flag=True, help="Print JSON on stdout and nothing else."),
    click.option("--quiet", "-q", is_flag=True, help="No progress on stderr."),
    click.option("--debug", is_flag=True, help="Show a traceback when something fails."),
)
