"""Python source of what a model calls: names of variables, recorded arguments, torch functions.

A torch function is written by a path that can be imported; an argument that has no literal, such as
a tensor, is refused by name.
"""

import builtins
import enum
import importlib
import keyword
import math
import operator
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum, auto
from types import EllipsisType, ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from partita.capture.op import CapturedOp, FunctionCall
from partita.capture.tree import Ref
from partita.errors import InvalidInputError

RESULT = "result"
"""The variable of a result that several tensors are taken out of."""

_TAKEN = frozenset(
    {RESULT, "self", "torch", "nn", "functional", "operator", "constant", "copied", "drawn"}
)
_NO_LETTER = re.compile(r"\W+", re.ASCII)


def identifier(text: str) -> str:
    """Return a text as the name of a variable.

    >>> identifier("encoder.layers.0/add"), identifier("3d"), identifier("in")
    ('encoder_layers_0_add', 'x3d', 'in_')
    """
    name = _NO_LETTER.sub("_", text).strip("_") or "x"
    if name[0].isdigit():
        name = f"x{name}"
    is_taken = keyword.iskeyword(name) or name in _TAKEN or hasattr(builtins, name)
    return f"{name}_" if is_taken else name


def module_word(path: str) -> str:
    """Return what to call the result of a module: the last part of its path that is no number.

    >>> module_word("blocks.0.attention.query"), module_word("features.3"), module_word("0")
    ('query', 'features_3', 'x0')
    """
    steps = path.split(".")
    begin = len(steps) - 1
    while begin > 0 and steps[begin].isdigit():
        begin -= 1
    return identifier("_".join(steps[begin:]))


def attribute(path: str) -> str:
    """Return the source of what stands at a path of a stage.

    >>> attribute("blocks.0.query.weight"), attribute("0.in.bias")
    ('self.blocks[0].query.weight', "self[0]['in'].bias")
    """
    steps = []
    for step in path.split("."):
        if step.isdigit() and str(int(step)) == step:
            steps.append(f"[{step}]")
        elif step.isidentifier() and not keyword.iskeyword(step):
            steps.append(f".{step}")
        else:
            steps.append(f"[{step!r}]")
    return f"self{''.join(steps)}"


def distinct(names: Iterable[str]) -> list[str]:
    """Return names with numbers after those that stand again.

    >>> distinct(["a", "b", "a"])
    ['a', 'b', 'a_2']
    """
    taken: set[str] = set()
    found = []
    for name in names:
        free, turn = name, 1
        while free in taken:
            turn += 1
            free = f"{name}_{turn}"
        taken.add(free)
        found.append(free)
    return found


class Variables:
    """Gives names to the values of one function; a name is free again when its value is dead.

    Args:
        fixed: Names that are never given.
    """

    def __init__(self, fixed: Iterable[str]) -> None:
        self._fixed = frozenset(fixed)
        self._until: dict[str, float] = {}

    def name(self, wanted: str, now: float, until: float) -> str:
        """Return a name for a value that is made at a place and last read at another."""
        free, turn = wanted, 1
        while free in self._fixed or self._until.get(free, -1) > now:
            turn += 1
            free = f"{wanted}_{turn}"
        self._until[free] = until
        return free


Namer = Callable[[Ref], str]
"""Returns the source of a tensor."""

_TORCH = (torch.dtype, torch.memory_format, torch.layout)


def expression(node: object, name_of: Namer, device: str = "") -> str:
    """Return the source of an argument.

    Args:
        node: The argument; a ``Ref`` stands for every tensor.
        name_of: Names tensors.
        device: Source of the device to compute on, for arguments that are devices.

    Raises:
        InvalidInputError: It is of a class that source cannot say.
    """
    if isinstance(node, Ref):
        return name_of(node)
    if isinstance(node, torch.device):
        return device or repr(node).replace("device(", "torch.device(", 1)
    if isinstance(node, tuple | list | dict | slice):
        return _container(node, lambda part: expression(part, name_of, device))
    return literal(node)


def _container(
    node: tuple[object, ...] | list[object] | dict[object, object] | slice,
    inner: Callable[[object], str],
) -> str:
    if isinstance(node, slice):
        return f"slice({', '.join(map(inner, (node.start, node.stop, node.step)))})"
    if isinstance(node, dict):
        return "{" + ", ".join(f"{literal(k)}: {inner(v)}" for k, v in node.items()) + "}"
    parts = ", ".join(map(inner, node))
    if isinstance(node, list):
        return f"[{parts}]"
    kind = type(node)
    if hasattr(node, "_fields") and kind.__module__ != "torch.return_types":
        if kind.__module__.partition(".")[0] != "torch":
            raise _unsayable(node)
        return f"{kind.__module__}.{kind.__qualname__}({parts})"
    return f"({parts},)" if len(node) == 1 else f"({parts})"


def literal(node: object) -> str:
    """Return the source of a value that is no container.

    Raises:
        InvalidInputError: It is of a class that source cannot say.
    """
    if isinstance(node, enum.Enum):
        return literal(node.value)
    if isinstance(node, float):
        return repr(node) if math.isfinite(node) else f'float("{node}")'
    if isinstance(node, EllipsisType):
        return "..."
    if isinstance(node, _TORCH):
        return str(node)
    if isinstance(node, str):
        return quoted(node)
    if node is None or isinstance(node, bool | int | bytes | complex):
        return repr(node)
    raise _unsayable(node)


def _unsayable(node: object) -> InvalidInputError:
    kind = f"{type(node).__module__}.{type(node).__qualname__}"
    return InvalidInputError(
        f"an argument is a {kind}, which source cannot say; expected numbers, texts, tensors and "
        "containers of them"
    )


def quoted(text: str) -> str:
    """Return a text in double quotes, where that needs no other marks."""
    return f'"{text}"' if text.isprintable() and not set(text) & set('"\\') else repr(text)


def subscript(node: object, name_of: Namer) -> str:
    """Return the source between the brackets of an index.

    >>> subscript((slice(None), slice(1, None), None), lambda ref: "")
    ':, 1:, None'
    """
    parts = node if isinstance(node, tuple) and node else (node,)
    text = ", ".join(_index(part, name_of) for part in parts)
    return f"{text}," if isinstance(node, tuple) and len(node) == 1 else text


def _index(node: object, name_of: Namer) -> str:
    if not isinstance(node, slice):
        return expression(node, name_of)
    ends = ["" if end is None else expression(end, name_of) for end in (node.start, node.stop)]
    step = "" if node.step is None else f":{expression(node.step, name_of)}"
    return f"{ends[0]}:{ends[1]}{step}"


OWN = "partita"
_HOME = {"functional": "from torch.nn import functional", "torch": "import torch"}
_SPACES: tuple[tuple[str, Any], ...] = (
    ("functional", functional),
    ("torch", torch),
    ("torch.linalg", torch.linalg),
    ("torch.special", torch.special),
    ("torch.fft", torch.fft),
    ("torch._C._nn", torch._C._nn),  # noqa: SLF001  # some functions have no other home
)


class Form(Enum):
    """Way in which a function is applied to its arguments."""

    FUNCTION = auto()
    METHOD = auto()
    GETTER = auto()
    SETTER = auto()


@dataclass(frozen=True, slots=True)
class Spelling:
    """A function in source.

    Attributes:
        text: Its path, or the name of the method or attribute.
        form: Way in which it is applied.
        imports: The statement that makes the path known.
    """

    text: str
    form: Form = Form.FUNCTION
    imports: str = ""


def spelled(op: CapturedOp) -> Spelling:
    """Return how the function of an op is written.

    Raises:
        InvalidInputError: It cannot be imported where Partita is not; names the op.
    """
    func = op.func
    if isinstance(func, FunctionCall):
        found = _imported(func.function)
        if found is not None:
            return Spelling(f"{found.text}.apply", imports=found.imports)
        raise _refusal(op, func.function)
    found = _attribute(func) or _method(func, op.kind) or _in_torch(func, op.kind)
    found = found or _overload(func) or _imported(func)
    if found is None:
        raise _refusal(op, func)
    return found


def _attribute(func: Callable[..., Any]) -> Spelling | None:
    """Return how a getter or setter of a tensor's attribute is written."""
    forms = {"__get__": Form.GETTER, "__set__": Form.SETTER}
    form = forms.get(getattr(func, "__name__", ""))
    owner = getattr(func, "__self__", None)
    name = getattr(owner, "__name__", None) or getattr(getattr(owner, "fget", None), "__name__", "")
    return Spelling(name, form) if form is not None and name else None


def _method(func: Callable[..., Any], kind: str) -> Spelling | None:
    return Spelling(kind, Form.METHOD) if getattr(Tensor, kind, None) == func else None


def _in_torch(func: Callable[..., Any], kind: str) -> Spelling | None:
    for path, space in _SPACES:
        if getattr(space, kind, None) == func:
            return Spelling(f"{path}.{kind}", imports=_HOME[path.partition(".")[0]])
    if getattr(operator, kind, None) == func:
        return Spelling(f"operator.{kind}", imports="import operator")
    return None


def _overload(func: Callable[..., Any]) -> Spelling | None:
    if isinstance(func, torch._ops.OpOverload | torch._ops.OpOverloadPacket):  # noqa: SLF001
        return Spelling(f"torch.ops.{func}", imports=_HOME["torch"])
    return None


def _imported(target: Any) -> Spelling | None:  # noqa: ANN401  # a function or a class
    """Return how something of another package is written; None if it cannot be imported."""
    home, path = getattr(target, "__module__", None), getattr(target, "__qualname__", "")
    if not home or home == "__main__" or "<" in path or home.partition(".")[0] == OWN:
        return None
    try:
        found: Any = importlib.import_module(home)
        for step in path.split("."):
            found = getattr(found, step)
    except (ImportError, AttributeError):
        return None
    if found != target or isinstance(found, ModuleType):
        return None
    return Spelling(path, imports=f"from {home} import {path.partition('.')[0]}")


def _refusal(op: CapturedOp, target: Any) -> InvalidInputError:  # noqa: ANN401  # anything
    home = getattr(target, "__module__", None) or "?"
    name = getattr(target, "__qualname__", None) or type(target).__name__
    return InvalidInputError(
        f"op {op.name or op.kind!r} calls {home}.{name}, which an exported package cannot import; "
        "define it at the top of a module of your own package"
    )
