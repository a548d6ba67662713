"""YAML texts as trees that know their lines, read strictly; and plain values as YAML.

The one reader and writer of YAML: clusters, the catalogue, jobs of a fleet, lists of scripts to
profile, files of options (``--config``), assignments of ops to devices, configurations of others. A
scalar stays text: who reads a field decides whether ``1e9``, ``no`` or ``12`` is a number, a flag
or a name, so that YAML's own guesses play no part. Refused are tags, anchors and aliases (a short
text can stand for a huge one), repeated keys, several documents, deep nesting, and texts over 1 MB.
"""

import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NoReturn, TypeAlias

import yaml

from partita.errors import FormatError, InvalidInputError
from partita.names import short, suggest

MAX_TEXT = 1_000_000
"""Characters of a text; what lists the ops of a graph may have more."""
MAX_DEPTH = 16
_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_UNPRINTABLE = re.compile("[^\t\n\r\x20-\x7e\x85\xa0-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
_NUMBER = re.compile(r"[-+]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][-+]?[0-9]+)?")
_NOTHING = frozenset({"", "~", "null", "Null", "NULL"})


@dataclass(frozen=True, slots=True)
class Scalar:
    """A single value.

    Attributes:
        line: Line it starts on, from 1.
        text: What stands there.
        plain: Whether it stands without quotes.
    """

    line: int
    text: str
    plain: bool


@dataclass(frozen=True, slots=True)
class Items:
    """A list.

    Attributes:
        line: Line it starts on, from 1.
        nodes: Its values.
    """

    line: int
    nodes: "tuple[Node, ...]"


@dataclass(frozen=True, slots=True)
class Table:
    """A mapping.

    Attributes:
        line: Line it starts on, from 1.
        entries: Values by key, in the order of the text.
        line_of: Line of each key.
    """

    line: int
    entries: "Mapping[str, Node]"
    line_of: Mapping[str, int]


Node: TypeAlias = Scalar | Items | Table
Value: TypeAlias = bool | int | float | str | list[Any] | None


@dataclass(slots=True)
class _Open:
    """A list or mapping whose end has not come yet."""

    line: int
    is_table: bool
    nodes: list[Node] = field(default_factory=list)
    keys: dict[str, int] = field(default_factory=dict)

    def add(self, node: Node) -> None:
        """Take the next key or value."""
        if not self.is_table or len(self.keys) > len(self.nodes):
            self.nodes.append(node)
            return
        if not isinstance(node, Scalar):
            raise FormatError(f"a key is {describe(node)}; expected a name", line=node.line)
        if node.text in self.keys:
            raise FormatError(
                f"key {short(node.text)} stands twice, first on line {self.keys[node.text]}",
                line=node.line,
            )
        self.keys[node.text] = node.line

    def close(self) -> Node:
        """Return the finished list or mapping."""
        if self.is_table:
            return Table(self.line, dict(zip(self.keys, self.nodes, strict=True)), self.keys)
        return Items(self.line, tuple(self.nodes))


def parse_yaml(text: str, *, max_text: int = MAX_TEXT, empty: Node | None = None) -> Node:
    """Return the tree of a YAML text.

    Args:
        text: The text, with or without a byte order mark.
        max_text: Characters that it may have.
        empty: The tree of a text without content; ``None`` = such a text is refused.

    Raises:
        FormatError: It is not YAML, or uses what is refused; knows the line.
    """
    text = text.removeprefix("\ufeff")
    if len(text) > max_text:
        raise FormatError(f"the text has {len(text)} characters; expected at most {max_text}")
    bad = _UNPRINTABLE.search(text)
    if bad:
        line = text.count("\n", 0, bad.start()) + 1
        raise FormatError(f"not valid YAML: character {bad.group()!r} is not printable", line=line)
    try:
        root = _build(yaml.parse(text, Loader=_LOADER))
    except yaml.MarkedYAMLError as exc:
        mark = exc.problem_mark
        line = 0 if mark is None else mark.line + 1
        raise FormatError(f"not valid YAML: {exc.problem}", line=line) from exc
    except yaml.YAMLError as exc:
        raise FormatError(f"not valid YAML: {exc}") from exc
    if root is not None and not (isinstance(root, Scalar) and not root.text):
        return root
    if empty is None:
        raise FormatError("the text is empty; expected a mapping")
    return empty


def _build(events: Iterator[yaml.Event]) -> Node | None:
    """Return the tree of a stream of events, walked without recursion."""
    root: Node | None = None
    stack: list[_Open] = []
    for event in events:
        line = 0 if event.start_mark is None else event.start_mark.line + 1
        _check_event(event, line, has_root=root is not None)
        done: Node
        if isinstance(event, yaml.CollectionStartEvent):
            if len(stack) == MAX_DEPTH:
                raise FormatError(f"nested more than {MAX_DEPTH} levels deep", line=line)
            stack.append(_Open(line, isinstance(event, yaml.MappingStartEvent)))
            continue
        if isinstance(event, yaml.CollectionEndEvent):
            done = stack.pop().close()
        elif isinstance(event, yaml.ScalarEvent):
            done = Scalar(line, event.value, not event.style)
        else:
            continue
        if stack:
            stack[-1].add(done)
        else:
            root = done
    return root


def _check_event(event: yaml.Event, line: int, *, has_root: bool) -> None:
    if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None) is not None:
        raise FormatError(
            "anchors and aliases (& and *) are not read; write the value out", line=line
        )
    tags = getattr(event, "tags" if isinstance(event, yaml.DocumentStartEvent) else "tag", None)
    if tags:
        raise FormatError(f"tags are not read, got {short(tags)}; leave them out", line=line)
    if isinstance(event, yaml.DocumentStartEvent) and has_root:
        raise FormatError("a second document starts here; expected one", line=line)


def write_yaml(value: Mapping[str, Any]) -> str:
    """Return plain values (mappings, lists, texts, numbers) as YAML, keys in their order."""
    text: str = yaml.safe_dump(
        value, sort_keys=False, default_flow_style=False, allow_unicode=True, width=100
    )
    return text


def describe(node: Node) -> str:
    """Return what a value is, for messages."""
    if isinstance(node, Scalar):
        return "nothing" if node.plain and node.text in _NOTHING else short(node.text)
    return "a list" if isinstance(node, Items) else "a mapping"


def refuse(node: Node, what: str, expected: str) -> NoReturn:
    """Raise the error of a value that is not what a field expects."""
    raise FormatError(f"{what} is {describe(node)}; expected {expected}", line=node.line)


@contextmanager
def at_line(line: int) -> Iterator[None]:
    """Give the errors of what is built inside the line of the text that it is built from."""
    try:
        yield
    except FormatError:
        raise
    except InvalidInputError as exc:
        raise FormatError(str(exc), line=line) from exc


def read_table(node: Node, what: str, known: Collection[str] | None = None) -> Table:
    """Return a mapping, its keys checked against the known ones if those are given."""
    if not isinstance(node, Table):
        refuse(node, what, "a mapping")
    if known is not None:
        for key, line in node.line_of.items():
            if key not in known:
                hint = suggest(key, known)
                raise FormatError(f"{what}: unknown key {short(key)}{hint}", line=line)
    return node


def check_present(table: Table, what: str, keys: Collection[str]) -> None:
    """Check that a mapping has keys.

    Raises:
        FormatError: It lacks one; knows the line.
    """
    for key in keys:
        if key not in table.entries:
            raise FormatError(f"{what}: key {key!r} is missing", line=table.line)


def read_items(node: Node, what: str) -> tuple[Node, ...]:
    """Return the values of a list."""
    if not isinstance(node, Items):
        refuse(node, what, "a list")
    return node.nodes


def read_text(node: Node, what: str) -> str:
    """Return a name or another text; empty only where it is quoted."""
    if not isinstance(node, Scalar) or (node.plain and node.text in _NOTHING):
        refuse(node, what, "a text")
    return node.text


def read_value(node: Node, what: str) -> Value:
    """Return a value whose reader does not say its type: as YAML 1.1 reads plain scalars.

    Quoted scalars are texts, ``null`` and nothing are ``None``, a date stays text.
    """
    if isinstance(node, Items):
        return [read_value(one, what) for one in node.nodes]
    if isinstance(node, Table):
        refuse(node, what, "a value or a list")
    if not node.plain:
        return node.text
    return None if node.text in _NOTHING else guess_value(node.text)


def guess_value(text: str) -> Value:
    """Return what a text means as YAML, such as the value of an option on the command line.

    >>> guess_value("8"), guess_value("1.5"), guess_value("true"), guess_value("a100")
    (8, 1.5, True, 'a100')
    >>> guess_value("[1, 2]"), guess_value("{a: 1}"), guess_value("2024-01-01")
    ([1, 2], '{a: 1}', '2024-01-01')
    """
    try:
        value = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError):
        return text
    return value if isinstance(value, bool | int | float | str | list) else text


def read_flag(node: Node, what: str) -> bool:
    """Return true or false."""
    if not isinstance(node, Scalar) or node.text not in ("true", "false"):
        refuse(node, what, "true or false")
    return node.text == "true"


def read_count(node: Node, what: str, *, low: int, high: int) -> int:
    """Return a whole number within limits."""
    expected = f"a whole number from {low} to {high}"
    if not isinstance(node, Scalar) or not re.fullmatch("[0-9]{1,19}", node.text):
        refuse(node, what, expected)
    value = int(node.text)
    if not low <= value <= high:
        refuse(node, what, expected)
    return value


def read_number(node: Node, what: str, *, positive: bool = False) -> float:
    """Return a finite number, 0 or more (or more than 0)."""
    expected = "a number more than 0" if positive else "a number 0 or more"
    if not isinstance(node, Scalar) or not _NUMBER.fullmatch(node.text):
        refuse(node, what, expected)
    value = float(node.text) + 0.0
    if not 0 <= value < math.inf or (positive and value == 0):
        refuse(node, what, f"{expected}, finite")
    return value


def read_quantity(
    node: Node,
    what: str,
    parse: Callable[[object, str], float],
    *,
    limit: float = math.inf,
    unlimited: bool = False,
) -> float:
    """Return a quantity with or without a unit, 0 or more.

    Args:
        node: The value.
        what: Its name in messages.
        parse: One of the parsers of ``partita.units``.
        limit: Numbers from here on are refused.
        unlimited: Whether ``inf`` is allowed.
    """
    if not isinstance(node, Scalar) or (node.plain and node.text in _NOTHING):
        refuse(node, what, "a number with or without a unit")
    with at_line(node.line):
        value = parse(node.text, what) + 0.0
    if unlimited and node.text.strip() == "inf":
        return math.inf
    if not value < limit:
        refuse(node, what, f"a number below {limit:.3g}" + (", or inf" if unlimited else ""))
    return value
