"""Layers of torch as constructors: read from a description, or made of a live module.

What ``repr`` says of a layer is nearly a call of its class. Old descriptions lack values that are
obligatory today (``ReLU(inplace)``); arguments that have their usual value are left out, so that
the source fits other versions of torch too.
"""

import ast
import inspect
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn
from torch.nn import functional

from partita.capture.op import CapturedOp, ModuleCall, refs_in
from partita.capture.tree import Param, Value
from partita.errors import InvalidInputError
from partita.exporters.python_source import expression

_KINDS: Mapping[type[nn.Module], str] = {
    nn.Linear: "linear",
    nn.Conv1d: "conv1d",
    nn.Conv2d: "conv2d",
    nn.Conv3d: "conv3d",
    nn.ConvTranspose2d: "conv_transpose2d",
    nn.BatchNorm1d: "batch_norm",
    nn.BatchNorm2d: "batch_norm",
    nn.BatchNorm3d: "batch_norm",
    nn.LayerNorm: "layer_norm",
    nn.RMSNorm: "rms_norm",
    nn.GroupNorm: "group_norm",
    nn.Embedding: "embedding",
}
"""Layers with parameters that make one torch call."""

_COUNT = "num_batches_tracked"
_BARE_INPLACE = re.compile(r"\binplace(?=[,)])")


@dataclass(frozen=True, slots=True)
class Layer:
    """An op that is the call of one layer.

    Attributes:
        path: Path of the layer.
        constructor: Source that makes it.
        args: Arguments of its call.
        kwargs: Arguments of its call by name.
    """

    path: str
    constructor: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]


def constructor_of(description: str, *, in_place: bool = True) -> str | None:
    """Return the source that makes a layer of torch, given its ``repr``; None if it is none.

    Args:
        description: The ``repr``, of today's torch or of an older one.
        in_place: Whether the layer may write its input, if it says so.

    >>> constructor_of("Conv2d(3, 64, kernel_size=(3, 3), stride=(1, 1), padding=(1, 1))")
    'nn.Conv2d(3, 64, kernel_size=(3, 3), padding=(1, 1))'
    >>> constructor_of("ReLU(inplace)"), constructor_of("Mul")
    ('nn.ReLU(inplace=True)', None)
    """
    found = _parsed(description)
    if found is None:
        return None
    made, args, kwargs = found
    if not in_place:
        kwargs.pop("inplace", None)
    return f"nn.{made.__name__}({', '.join(_arguments(made, args, kwargs))})"


def _parsed(description: str) -> tuple[type[nn.Module], list[Any], dict[str, Any]] | None:
    """Return class and arguments that make a layer of torch; None if they make none."""
    try:
        tree = ast.parse(_BARE_INPLACE.sub("inplace=True", description.strip()), mode="eval").body
    except (SyntaxError, ValueError):
        return None
    if not isinstance(tree, ast.Call) or not isinstance(tree.func, ast.Name):
        return None
    made: Any = getattr(nn, tree.func.id, None)
    if not (isinstance(made, type) and issubclass(made, nn.Module)):
        return None
    try:
        args = [_value(arg) for arg in tree.args]
        kwargs = {str(keyword.arg): _value(keyword.value) for keyword in tree.keywords}
        made(*args, **kwargs, **_on_meta(made))
    except (ValueError, TypeError, RuntimeError):
        return None
    return made, args, kwargs


def _value(node: ast.expr) -> Any:  # noqa: ANN401  # any literal
    """Return the value of an argument; some texts stand without quotes (``padding_mode=zeros``)."""
    return node.id if isinstance(node, ast.Name) else ast.literal_eval(node)


def _on_meta(made: type[nn.Module]) -> dict[str, str]:
    names = inspect.signature(made).parameters
    takes = "device" in names or issubclass(made, nn.RNNBase)
    return {"device": "meta"} if takes else {}


def _arguments(
    made: type[nn.Module], args: Sequence[object], kwargs: Mapping[str, object]
) -> list[str]:
    """Return arguments as source, without those that have their usual value."""
    usual = {name: known.default for name, known in inspect.signature(made).parameters.items()}
    ones = {"stride": (1,), "dilation": (1,), "padding": (0,), "output_padding": (0,)}
    written = [_source(value) for value in args]
    for name, value in kwargs.items():
        flat = tuple(dict.fromkeys(value)) if isinstance(value, tuple) else None
        plain = usual.get(name, inspect.Parameter.empty)
        same = plain is not inspect.Parameter.empty and type(plain) is type(value)
        if (same and plain == value) or (
            flat is not None and flat == ones.get(name) and plain in (0, 1)
        ):
            continue
        written.append(f"{name}={_source(value)}")
    return written


def _source(value: object) -> str:
    return expression(value, lambda _: "")


def layer_of(
    op: CapturedOp, module: nn.Module | None, parameters: Mapping[str, Tensor], *, training: bool
) -> Layer | None:
    """Return the layer whose call an op is; None if it is something else.

    Args:
        op: The op, the only one of its module's call.
        module: The module that it is in.
        parameters: Parameters and buffers by name.
        training: Whether it was captured in training mode.

    Raises:
        InvalidInputError: The op is an opaque module that is none of torch's.
    """
    if isinstance(op.func, ModuleCall) and not op.parts:
        return _opaque(op, op.func.module, parameters)
    calls = [leaf for leaf in op.leaves if leaf.makes or not _counts(leaf)]
    if module is None or len(calls) != 1 or "forward" in vars(module):
        return None
    call = calls[0]
    if _KINDS.get(type(module)) != call.kind or call.writes or len(call.outputs) != 1:
        return None
    if call.kind == "batch_norm" and call.kwargs.get("training") is not training:
        return None
    refs = refs_in((call.args, dict(call.kwargs)))
    held = {f"{op.module}.{name}" for name in module.state_dict()}
    rest = {ref.name for ref in refs[1:] if isinstance(ref, Param)}
    inputs = [ref for ref in refs if isinstance(ref, Value)]
    whole = rest == {name for name in held if not name.endswith(_COUNT)}
    if not inputs or len(rest) != len(refs) - 1 or len(inputs) != 1 or not whole:
        return None
    source = _constructor(module, op.module, parameters)
    return None if source is None else Layer(op.module, source, (inputs[0],), {})


def untied(op: CapturedOp) -> CapturedOp:
    """Return an opaque layer whose parameters are those of another module as a plain call."""
    if not isinstance(op.func, ModuleCall) or op.parts:
        return op
    held, args, _ = op.args
    module = op.func.module
    if all(isinstance(r, Param) and r.name == f"{op.module}.{n}" for n, r in held.items()):
        return op
    if type(module) is nn.Linear:
        given = (*args, held["weight"], held.get("bias"))
        return replace(op, func=functional.linear, kind="linear", args=given)
    if type(module) is nn.Embedding and module.max_norm is None:
        given = (*args, held["weight"])
        kwargs = {"padding_idx": module.padding_idx, "sparse": module.sparse}
        return replace(op, func=functional.embedding, kind="embedding", args=given, kwargs=kwargs)
    return op


def _counts(leaf: CapturedOp) -> bool:
    return bool(leaf.changes) and all(name.endswith(_COUNT) for name in leaf.changes)


def _opaque(op: CapturedOp, module: nn.Module, parameters: Mapping[str, Tensor]) -> Layer:
    held, args, kwargs = op.args
    names = {name: ref.name for name, ref in held.items() if isinstance(ref, Param)}
    own = all(full == f"{op.module}.{name}" for name, full in names.items())
    source = _constructor(module, op.module, parameters) if own else None
    if source is None:
        kind = f"{type(module).__module__}.{type(module).__qualname__}"
        raise InvalidInputError(
            f"op {op.name!r} is a whole module of class {kind}, which no constructor of torch "
            "makes; plan a graph of granularity op"
        )
    return Layer(op.module, source, tuple(args), dict(kwargs))


def _constructor(module: nn.Module, path: str, parameters: Mapping[str, Tensor]) -> str | None:
    """Return the source that makes a live module; None if no constructor is sure to."""
    if getattr(nn, type(module).__name__, None) is not type(module) or any(module.children()):
        return None
    source = constructor_of(repr(module))
    if source is None or not _is_remade(module):
        return None
    held = [parameters.get(f"{path}.{name}") for name, _ in module.named_parameters()]
    tensors = [tensor for tensor in held if tensor is not None]
    if len(tensors) != len(held):
        return None
    dtypes = {tensor.dtype for tensor in tensors}
    frozen = {not tensor.requires_grad for tensor in tensors}
    if len(dtypes) > 1 or len(frozen) > 1:
        return None
    if dtypes and str(next(iter(dtypes))) != "torch.float32":
        source = f"{source[:-1]}, dtype={next(iter(dtypes))})"
    return f"{source}.requires_grad_(False)" if True in frozen else source


def _is_remade(module: nn.Module) -> bool:
    """Return whether what ``repr`` says of a layer makes one like it in everything."""
    found = _parsed(repr(module))
    if found is None:
        return False
    made, args, kwargs = found
    return _traits(made(*args, **kwargs, **_on_meta(made))) == _traits(module)


def _traits(module: nn.Module) -> dict[str, Any]:
    own = {k: v for k, v in vars(module).items() if not k.startswith("_") and k != "training"}
    shapes = {name: tuple(tensor.shape) for name, tensor in module.state_dict().items()}
    return {**own, "state": shapes}
