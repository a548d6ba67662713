"""The eval form of an op that was captured in training.

Functions carry their training flag as an argument. In eval it is switched off, dropout inside of
attention is set to nothing, and batch norm's count stands still. Branches that a model takes in
Python are not switched; ``capture`` compares with the model itself and says so.
"""

import inspect
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from partita.capture.op import CapturedOp, ModuleCall
from partita.capture.tree import Ref

_RECURRENT = frozenset({"lstm", "gru", "rnn_tanh", "rnn_relu"})
_TRAIN_IS_THIRD = frozenset(
    f"{name}{end}"
    for name in ("dropout", "alpha_dropout", "feature_dropout", "feature_alpha_dropout")
    for end in ("", "_")
)


def eval_form(op: CapturedOp) -> CapturedOp | None:
    """Return what an op is in eval mode; None where it does nothing."""
    if op.parts:
        parts = tuple(part for part in map(eval_form, op.parts) if part is not None)
        return replace(op, parts=parts) if parts else None
    if not op.makes and all(name.endswith("num_batches_tracked") for name in op.changes):
        return None
    if isinstance(op.func, ModuleCall):
        return replace(op, func=op.func.in_mode(training=False))
    return _without_training(op)


def _without_training(op: CapturedOp) -> CapturedOp:
    names = _parameter_names(op.func)
    changed = op
    if op.kind in _RECURRENT:
        changed = _with(op, 6 if isinstance(op.args[3], bool) else 7, "train", value=False)
    elif op.kind == "scaled_dot_product_attention":
        changed = _with(op, 4, "dropout_p", value=0.0)
    elif op.kind == "batch_norm" and not any(isinstance(a, Ref) for a in _statistics(op)):
        pass
    elif "training" in names:
        changed = _with(op, names.index("training"), "training", value=False)
    elif op.kind in _TRAIN_IS_THIRD:
        changed = _with(op, 2, "train", value=False)
    return changed


def _statistics(op: CapturedOp) -> tuple[Any, ...]:
    return (*op.args[1:3], op.kwargs.get("running_mean"))


def _parameter_names(func: Callable[..., Any]) -> list[str]:
    try:
        return list(inspect.signature(func).parameters)
    except (TypeError, ValueError):
        return []


def _with(op: CapturedOp, place: int, name: str, *, value: object) -> CapturedOp:
    """Return an op with another value of an argument that it has; unchanged where it has not."""
    if name in op.kwargs:
        return replace(op, kwargs={**op.kwargs, name: value})
    if place < len(op.args):
        return replace(op, args=(*op.args[:place], value, *op.args[place + 1 :]))
    if name == "training":
        return replace(op, kwargs={**op.kwargs, name: value})
    return op
