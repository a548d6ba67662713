"""Requests: what a caller asks of a public function, each option declared once.

A request is a frozen dataclass whose fields are made by :func:`declare`. One declaration (name,
type, default, help, choices, limits) serves keyword arguments in Python, options of a command and
keys of a YAML file, so that none can drift from the others, and a value is checked the same way
wherever it comes from.

>>> @dataclasses.dataclass(frozen=True, kw_only=True)
... class Sample(Request):
...     steps: int = declare(10, minimum=1, help="Number of steps.")
...     order: str = declare("device", choices=("device", "global"), help="Order of instructions.")
>>> make(Sample, steps=3)
Sample(steps=3, order='device')
>>> make(Sample, stp=3)  # doctest: +ELLIPSIS
Traceback (most recent call last):
    ...
partita.errors.InvalidInputError: there is no option 'stp'; did you mean 'steps'? known are ...
>>> make(Sample, steps=0)
Traceback (most recent call last):
    ...
partita.errors.InvalidInputError: steps is 0; expected 1 or more
"""

import dataclasses
import math
import os
import types
import typing
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar, TypeAlias, TypeVar

from partita.errors import InvalidInputError
from partita.names import suggest

Choices: TypeAlias = Sequence[str] | Callable[[], Sequence[str]]
OnProgress: TypeAlias = Callable[[str], None]
"""Called with each step of a longer piece of work, in a few words."""
_R = TypeVar("_R", bound="Request")
_PRIMITIVES = (bool, int, float, str)


def silent(_: str) -> None:
    """Show nothing of the progress."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """Declaration of one field of a request.

    Attributes:
        help: One sentence that stands alone.
        flags: Other spellings on the command line, such as ``-c``.
        choices: Values that are allowed, or a function that returns them.
        added: Function that returns what plug-ins add to the choices; asked for only where a value
            is none of those, since looking for plug-ins takes longer than most commands.
        minimum: Least value of a number.
        maximum: Largest value of a number.
        above: Value that a number must exceed.
        below: Value that a number must not reach.
        usual: The default in words, where it depends on something else.
        is_argument: Whether it is given by position on the command line.
        metavar: The name of its value in help texts; empty = the usual one.
        path: Kind of path that its value names: ``file``, ``existing file`` or ``folder``.
        environment: Variables that give its value where nothing else does; the first that is set.
        is_required: Whether an option, or one value of several, must be given.
        bare: Value of an option that is given without one; empty = it needs one.
        joined_by: Text that joins the values of an option that is given several times to one;
            empty = the last one counts.
        often: Whether most users need it: a short help shows it, whatever its group.
    """

    help: str
    flags: tuple[str, ...] = ()
    choices: Choices = ()
    added: Callable[[], Sequence[str]] | None = None
    minimum: float | None = None
    maximum: float | None = None
    above: float | None = None
    below: float | None = None
    usual: str = ""
    is_argument: bool = False
    metavar: str = ""
    path: str = ""
    environment: tuple[str, ...] = ()
    is_required: bool = False
    bare: str = ""
    joined_by: str = ""
    often: bool = False

    def is_added(self, value: str) -> bool:
        """Return whether a plug-in adds a value to the choices."""
        return self.added is not None and value in self.added()

    def allowed(self) -> tuple[str, ...]:
        """Return the values that are allowed; empty where any is."""
        return tuple(self.choices() if callable(self.choices) else self.choices)


def declare(
    default: Any,  # noqa: ANN401 (a value of the field's type)
    *,
    help: str,
    **declared: Any,  # noqa: ANN401 (fields of Option)
) -> Any:  # noqa: ANN401 (a dataclass field)
    """Return a field of a request; the keywords are the attributes of :class:`Option`."""
    return dataclasses.field(default=default, metadata={"option": Option(help=help, **declared)})


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Field:
    """A field of a request as its readers need it.

    Attributes:
        name: The keyword in Python; on the command line with dashes.
        kind: ``bool``, ``int``, ``float`` or ``str``: the type of a value that is written as text.
        is_multiple: Whether it is a tuple of values.
        default: The default.
        option: The declaration.
        group: Heading of the fields that it belongs to; empty = it is the request's own.
    """

    name: str
    kind: type
    is_multiple: bool
    default: Any
    option: Option
    group: str = ""

    @property
    def flag(self) -> str:
        """The option on the command line, such as ``--batch-size``."""
        return f"--{self.name.replace('_', '-')}"

    @property
    def off(self) -> str:
        """The option that ends what a flag begins, such as ``--no-groups``."""
        return f"--no-{self.name.replace('_', '-')}"

    def join(self, values: Sequence[str]) -> Any:  # noqa: ANN401 (a value of the field's type)
        """Return several values as one, each of them once; none are the default."""
        return self.option.joined_by.join(dict.fromkeys(values)) if values else self.default

    def check(self, value: Any) -> None:  # noqa: ANN401 (a value of the field's type)
        """Check a value against the declaration.

        Raises:
            InvalidInputError: It is none that is allowed.
        """
        for each in value if self.is_multiple else (value,):
            _check(self, each)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
    """Base of all requests: values are checked when one is made.

    Attributes:
        group: Heading of the fields that a class declares, in a help text; empty = none.
    """

    group: ClassVar[str] = ""
    _fields: ClassVar[dict[type, tuple[Field, ...]]] = {}

    def __post_init__(self) -> None:
        for field in fields_of(type(self)):
            field.check(getattr(self, field.name))

    def given(self) -> dict[str, Any]:
        """Return the fields whose value is not the default."""
        return {
            field.name: getattr(self, field.name)
            for field in fields_of(type(self))
            if getattr(self, field.name) != field.default
        }


def make(request: type[_R], /, **values: Any) -> _R:  # noqa: ANN401 (values of its fields)
    """Return a request of keyword arguments; variables give options as on the command line.

    Raises:
        InvalidInputError: There is no such option, or a value that it does not take.
    """
    known = [field.name for field in fields_of(request)]
    for name in values:
        if name not in known:
            raise InvalidInputError(f"there is no option {name!r}{suggest(name, known)}")
    asked = {**_from_environment(request), **values}
    for field in fields_of(request):
        if field.option.bare and isinstance(asked.get(field.name), bool):
            asked[field.name] = field.option.bare if asked[field.name] else field.default
        if field.option.joined_by and isinstance(asked.get(field.name), list | tuple):
            asked[field.name] = field.join(asked[field.name])
    return request(**{name: _plain(value) for name, value in asked.items()})


def _from_environment(request: type[Request]) -> dict[str, Any]:
    """Return the values of the fields that variables give; an empty one gives nothing."""
    found: dict[str, Any] = {}
    for field in fields_of(request):
        for variable in reversed(field.option.environment):
            if text := os.environ.get(variable):
                try:
                    found[field.name] = field.kind(text)
                except ValueError:
                    raise InvalidInputError(
                        f"{variable} is {text!r}; expected a value of type {field.kind.__name__}"
                    ) from None
    return found


def _plain(value: Any) -> Any:  # noqa: ANN401 (a value of a field)
    """Return lists as tuples and paths as text, as the command line gives them."""
    if type(value) in (list, tuple):  # a named tuple is a value of its own
        return tuple(map(_plain, value))
    return os.fspath(value) if isinstance(value, os.PathLike) else value


def arguments_of(request: Request, *, without: Sequence[str] = ()) -> list[str]:
    """Return the fields whose value is not the default as one would type them.

    Args:
        request: The request.
        without: Fields that are left out.
    """
    words: list[str] = []
    for field in fields_of(type(request)):
        value = getattr(request, field.name)
        if field.name in without or value == field.default:
            continue
        for each in value if field.is_multiple else (value,):
            words += (
                [] if field.option.is_argument else [field.off if each is False else field.flag]
            )
            words += [] if isinstance(each, bool) else [_text(each)]
    return words


def _text(value: object) -> str:
    """Return a value as it is typed; a thing that has a name by that."""
    return str(value if isinstance(value, _PRIMITIVES) else getattr(value, "name", value))


def part(request: type[_R], whole: Request) -> _R:
    """Return the fields of one request that another one shares, as a request of their own."""
    shared = {field.name for field in fields_of(type(whole))}
    names = [field.name for field in fields_of(request) if field.name in shared]
    return request(**{name: getattr(whole, name) for name in names})


def fields_of(request: type[Request]) -> tuple[Field, ...]:
    """Return the fields of a request: those of its bases in their order, then its own."""
    if request not in Request._fields:
        Request._fields[request] = tuple(_fields(request))
    return Request._fields[request]


def _fields(request: type[Request]) -> Iterator[Field]:
    hints = typing.get_type_hints(request)
    declared = {field.name: field for field in dataclasses.fields(request)}
    order = (*request.__mro__[1:], request)  # what a request adds comes after what it shares
    group_of: dict[str, str] = {}
    for base in order:
        for name in vars(base).get("__annotations__", {}):
            group_of.setdefault(name, vars(base).get("group", ""))
    for name, group in group_of.items():
        if name in declared and "option" in declared[name].metadata:
            kind, is_multiple = _kind(hints[name])
            yield Field(
                name=name,
                kind=kind,
                is_multiple=is_multiple,
                default=declared[name].default,
                option=declared[name].metadata["option"],
                group=group,
            )


def _kind(hint: Any) -> tuple[type, bool]:  # noqa: ANN401 (a type hint)
    """Return the type of a value as text, and whether there are several."""
    if typing.get_origin(hint) is tuple:
        return _kind(typing.get_args(hint)[0])[0], True
    if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union:
        kinds = [kind for kind in typing.get_args(hint) if kind in _PRIMITIVES]
        return (kinds or [str])[0], any(
            typing.get_origin(k) is tuple for k in typing.get_args(hint)
        )
    return (hint if hint in _PRIMITIVES else str), False


def _check(field: Field, value: object) -> None:
    """Check one value against the declaration of its field."""
    allowed = field.option.allowed()
    is_text = isinstance(value, str) and value != ""
    if allowed and is_text and value not in allowed and not field.option.is_added(str(value)):
        raise InvalidInputError(f"there is no {field.name} {value!r}{suggest(str(value), allowed)}")
    if field.kind in (int, float) and isinstance(value, int | float):
        _check_number(field, value)


def _check_number(field: Field, value: float) -> None:
    low, high, above = field.option.minimum, field.option.maximum, field.option.above
    if isinstance(value, float) and not math.isfinite(value):
        raise InvalidInputError(f"{field.name} is {value}; expected a finite number")
    limits = []
    if low is not None:
        limits.append((value >= low, f"{low:g} or more"))
    if above is not None:
        limits.append((value > above, f"more than {above:g}"))
    if high is not None:
        limits.append((value <= high, f"at most {high:g}"))
    if field.option.below is not None:
        limits.append((value < field.option.below, f"less than {field.option.below:g}"))
    if not all(kept for kept, _ in limits):
        words = ", ".join(text for _, text in limits)
        raise InvalidInputError(f"{field.name} is {value:g}; expected {words}")
