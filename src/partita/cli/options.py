"""Options of all commands, which are no fields of a request."""

from collections.abc import Callable
from typing import Any, TypeVar

import click

_F = TypeVar("_F", bound=Callable[..., Any])


def output_options(function: _F) -> _F:
    """Add the options of a command that shows a result."""
    for option in (
        click.option("--debug", is_flag=True, help="Show a traceback when something fails."),
        click.option("--quiet", "-q", is_flag=True, help="No progress on stderr."),
        click.option(
            "--json", "as_json", is_flag=True, help="Print JSON on stdout and nothing else."
        ),
    ):
        function = option(function)
    return function
