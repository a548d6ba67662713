"""Options of a command, generated from the fields of its request."""

from collections.abc import Callable, Sequence
from functools import wraps
from pathlib import Path
from typing import Any, TypeVar

import click

from partita.cli.help import GroupedOption
from partita.requests import Field, Option, Request, fields_of

COMPLETED = frozenset({"model", "planner", "cluster", "type", "plan"})
"""Fields whose values ``cli.completion`` knows; choices are completed by click."""
_F = TypeVar("_F", bound=Callable[..., Any])


class OpenChoice(click.Choice[str]):
    """A choice of names to which others are added, looked for where none of ours is given."""

    def __init__(self, choices: Sequence[str], added: Callable[[], Sequence[str]]) -> None:
        super().__init__(choices)
        self._added = added

    def has(self, word: str) -> bool:
        """Return whether a word is one of the names."""
        return word in self.choices or word in self._added()

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Return the name, or fail."""
        if value not in self.choices and value in self._added():
            return str(value)
        return super().convert(value, param, ctx)


class ToldArgument(click.Argument):
    """An argument that the help tells about, as it does of options."""

    def __init__(self, *args: Any, told: str, **rest: Any) -> None:
        super().__init__(*args, **rest)
        self._told = told

    def get_help_record(self, ctx: click.Context) -> tuple[str, str]:
        """Return its name as in the line of usage, and what it is."""
        return self.make_metavar(ctx), self._told


class BareOption(GroupedOption):
    """An option whose value may be left out.

    Click would take the MODEL that follows for the value, unless it looks like another option.
    """

    def bare(self) -> str:
        """Return the option with the value that it has where none is given."""
        return f"{self.opts[0]}={self.flag_value}"

    def takes(self, word: str) -> bool:
        """Return whether a word that follows is its value."""
        if isinstance(self.type, OpenChoice):
            return self.type.has(word)
        # A file is told from the MODEL that follows by its ending: [FILE.html].
        ending = Path((self.metavar or "").strip("[]")).suffix
        if ending and not word.startswith("-"):
            return word.endswith(ending)
        return isinstance(self.type, click.Choice) and word in self.type.choices


def with_bare_values(command: click.Command, arguments: Sequence[str]) -> list[str]:
    """Return the arguments of a command, with the values of options that were given without one."""
    options = [option for option in command.params if isinstance(option, BareOption)]
    bare = {flag: option for option in options for flag in option.opts}
    end = arguments.index("--") if "--" in arguments else len(arguments)
    result = list(arguments)
    for place, word in enumerate(arguments[:end]):
        option, after = bare.get(word), "".join(arguments[place + 1 : place + 2])
        if option is not None and not option.takes(after):
            result[place] = option.bare()
    return result


def takes(request: type[Request], *, without: tuple[str, ...] = ()) -> Callable[[_F], _F]:
    """Return a decorator that gives a command the options of a request, and the request itself.

    Args:
        request: The request; it arrives as the first argument of the command.
        without: Fields that are no options of this command; they keep their defaults.
    """
    fields = [field for field in fields_of(request) if field.name not in without]

    def decorate(function: _F) -> _F:
        @wraps(function)
        def command(**values: Any) -> Any:
            asked = {field.name: _asked(field, values.pop(field.name)) for field in fields}
            return function(request(**asked), **values)

        decorated: Any = command
        for field in reversed(fields):
            decorated = _parameter(field)(decorated)
        return decorated  # type: ignore[no-any-return]

    return decorate


def _asked(field: Field, value: Any) -> Any:
    return field.join(value) if field.option.joined_by else value


def _parameter(field: Field) -> Callable[[Any], Any]:
    if field.option.is_argument:
        return click.argument(
            field.name,
            cls=ToldArgument,
            told=field.option.help,
            nargs=-1 if field.is_multiple else 1,
            required=_is_required(field),
            type=_type(field),
            metavar=field.option.metavar or None,
            shell_complete=_completed(field),
        )
    return click.option(*_spellings(field), **_settings(field))


def _completed(field: Field) -> Callable[..., Any] | None:
    """Return what completes the values of a field in a shell; None = click does, or nobody."""
    if field.name not in COMPLETED or field.option.allowed():
        return None

    def values(ctx: click.Context, param: click.Parameter, incomplete: str) -> Any:
        del ctx, param
        from partita.cli.completion import complete  # noqa: PLC0415 (when a shell asks)

        return complete(field.name, incomplete)

    return values


def _is_required(field: Field) -> bool:
    return field.option.is_required or (field.default is not None and not field.is_multiple)


def _spellings(field: Field) -> list[str]:
    flag = f"{field.flag}/{field.off}" if field.default is True else field.flag
    return [flag, *field.option.flags, field.name]


def _settings(field: Field) -> dict[str, Any]:
    usual = f" [{field.option.usual}]" if field.option.usual else ""
    settings: dict[str, Any] = {
        "help": f"{field.option.help}{usual}",
        "cls": GroupedOption,
        "group": field.group,
        "often": field.option.often,
    }
    if (completed := _completed(field)) is not None:
        settings["shell_complete"] = completed
    if field.option.metavar:
        settings["metavar"] = field.option.metavar
    if field.option.is_required:
        settings["required"] = True
    if field.option.bare:
        settings |= {"cls": BareOption, "is_flag": False, "flag_value": field.option.bare}
    if names := field.option.environment:
        settings["envvar"] = names[0] if len(names) == 1 else list(names)
    if field.default is True:
        return {**settings, "default": True}
    if field.kind is bool:
        return {**settings, "is_flag": True}  # its default is False, as click's
    if field.is_multiple or field.option.joined_by:
        settings["multiple"] = True  # likewise none
    else:
        settings["default"] = field.default
    shown = field.default not in (None, (), "", 0.0) and not usual
    return {**settings, "type": _type(field), "show_default": shown}


def _type(field: Field) -> Any:
    option = field.option
    if allowed := option.allowed():
        if option.added is not None:
            return OpenChoice(list(allowed), option.added)
        return click.Choice(list(allowed))
    if option.path:
        return click.Path(
            exists="existing" in option.path,
            file_okay=option.path != "folder",
            dir_okay=option.path == "folder",
        )
    if field.kind is int:
        limited = option.minimum is not None or option.maximum is not None
        return click.IntRange(option.minimum, option.maximum) if limited else click.INT  # type: ignore[arg-type]
    return _float_type(option) if field.kind is float else click.STRING


def _float_type(option: Option) -> click.ParamType[float]:
    low = option.above if option.minimum is None else option.minimum
    high = option.below if option.maximum is None else option.maximum
    if low is None and high is None:
        return click.FLOAT
    return click.FloatRange(
        low, high, min_open=option.above is not None, max_open=option.below is not None
    )
