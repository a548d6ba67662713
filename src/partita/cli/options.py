"""Options of all commands, which are no fields of a request."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from partita.errors import InvalidInputError

if TYPE_CHECKING:
    from partita.report.page import Page

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


_TARGETS = (
    "output",
    "report_file",
    "picture",
    "memory_picture",
    "table_file",
    "results",
    "samples",
)
"""Options that name what is written, whatever the command calls them."""
_FILES = ("output", "report_file")
"""Those of them that are never a folder, unless the command makes one."""


def check_targets(values: Mapping[str, Any], *, makes_folders: bool = False) -> None:
    """Check that what a command writes can be where it is asked to be, before anything takes time.

    Args:
        values: The command's options by name.
        makes_folders: Whether what it writes is a folder, which it makes with those above it.

    Raises:
        InvalidInputError: There is no such folder, or a folder of that name.
    """
    for name in _TARGETS if not makes_folders else ():
        path = values.get(name)
        if not isinstance(path, str) or path in ("", "-"):
            continue
        if not Path(path).parent.is_dir():
            raise InvalidInputError(
                f"{path} cannot be written: there is no folder {str(Path(path).parent)!r}"
            )
        if name in _FILES and Path(path).is_dir():
            raise InvalidInputError(f"{path} cannot be written: is a directory")


def report_option(function: _F) -> _F:
    """Add the option that writes what a command found as a page."""
    return click.option(
        "--report",
        "report_file",
        metavar="FILE.html",
        help="Write what was found as one page for any browser.",
    )(function)


def write_page(page: "Page", file: str, *, quiet: bool) -> None:
    """Write a page to the file of ``--report``, and say so."""
    from partita.flows.report import save_page  # noqa: PLC0415 (only where one is asked for)

    save_page(page, file)
    if not quiet and file != "-":
        click.echo(f"report written to {file}", err=True)


def own_name(name: str) -> str:
    """Return the file to write to where none is named, and say so where that is a numbered one."""
    from partita.documents import unused_path  # noqa: PLC0415 (only where something is written)

    path = unused_path(Path(name))
    if path.name != name:
        click.echo(f"{name} exists and is kept: writing {path}; -o names the file", err=True)
    return str(path)
