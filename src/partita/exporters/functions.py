"""How a torch function is written in Python source: by a path that can be imported."""

import importlib
import operator
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from partita.capture.op import CapturedOp, FunctionCall
from partita.errors import InvalidInputError

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
    """How a function is applied to its arguments."""

    FUNCTION = auto()
    METHOD = auto()
    GETTER = auto()
    SETTER = auto()


@dataclass(frozen=True, slots=True)
class Spelling:
    """A function in source.

    Attributes:
        text: Its path, or the name of the method or attribute.
        form: How it is applied.
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
