"""What the calls of a captured model return: a tensor, or tensors in a container."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from partita.capture.captured import CapturedModel
from partita.capture.op import CapturedOp, Replay, storage_of
from partita.capture.tree import children_of


@dataclass(frozen=True, slots=True)
class Result:
    """What a call returns.

    Attributes:
        paths: Source that leads from the result to each tensor in it; empty = it is the tensor.
        is_flat: Whether it is a tuple or list of tensors alone.
    """

    paths: tuple[str, ...] = ("",)
    is_flat: bool = False


SINGLE = Result()


def observed_results(captured: CapturedModel, inputs: Mapping[str, Tensor]) -> dict[int, Result]:
    """Return what each call of a model returns, by ``id`` of its op, by running all of them once.

    The model is left as it was.

    Args:
        captured: The model.
        inputs: One microbatch by the names of the graph's inputs.
    """
    found: dict[int, Result] = {}
    row_of = {name: row for row, name in enumerate(captured.graph.tensors.names)}
    held = {
        name: tensor if isinstance(tensor, nn.Parameter) else tensor.detach().clone()
        for name, tensor in captured.parameters.items()
    }
    weights = [tensor for tensor in held.values() if isinstance(tensor, nn.Parameter)]
    replay = Replay(
        values={row_of[name]: tensor for name, tensor in inputs.items()},
        parameters=held,
        constants=captured.constants,
        protected=frozenset(map(storage_of, [*inputs.values(), *weights, *captured.constants])),
        as_captured=True,
    )
    last = {value: place for place, op in enumerate(captured.ops) for value in op.reads}
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        for place, op in enumerate(captured.ops):
            replay.run(_watched(op, found))
            for value in (*op.reads, *op.makes):
                if last.get(value, -1) <= place:
                    replay.values.pop(value, None)
    return found


def _watched(op: CapturedOp, found: dict[int, Result]) -> CapturedOp:
    """Return an op that notes what its calls return."""
    if op.parts:
        return replace(op, parts=tuple(_watched(part, found) for part in op.parts))
    return replace(op, func=_watching(op.func, id(op), found))


def _watching(func: Callable[..., Any], key: int, found: dict[int, Result]) -> Callable[..., Any]:
    def watched(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401  # any function
        result = func(*args, **kwargs)
        found[key] = result_of(result)
        return result

    return watched


def result_of(value: object) -> Result:
    """Return where the tensors in a value are.

    >>> result_of([torch.zeros(1), {"a": torch.zeros(1)}]).paths
    ('[0]', "[1]['a']")
    """
    if isinstance(value, Tensor):
        return SINGLE
    flat = isinstance(value, tuple | list) and all(isinstance(part, Tensor) for part in value)
    return Result(tuple(_paths(value, "")), flat)


def _paths(node: object, path: str) -> list[str]:
    if isinstance(node, Tensor):
        return [path]
    children = children_of(node)
    if children is None:
        return []
    if isinstance(node, dict):
        steps = [f"[{key!r}]" for key in node]
    elif isinstance(node, tuple | list):
        steps = [f"[{index}]" for index in range(len(node))]
    else:
        steps = [f".{name}" for name in children.names]
    return [
        found
        for step, child in zip(steps, children.values, strict=True)
        for found in _paths(child, f"{path}{step}")
    ]
