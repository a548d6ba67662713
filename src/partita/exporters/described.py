"""A model from PipeDream's descriptions of its layers alone.

A description is a constructor of a layer of torch (``Conv2d(3, 64, kernel_size=(3, 3))``), or one
of PipeDream's own words: ``Add``, ``Mul``, ``Concat(dim)``, ``Size(dim)``, ``View(...)``,
``Transpose(a, b)``, ``__getitem__(k)``. The order of the edges into a node is that of its
arguments. Nothing is written in place: the file does not say who reads a tensor before that.
"""

import ast
import operator
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from partita.capture.op import CapturedOp, ValueInfo
from partita.capture.tree import Value
from partita.core.graph import Graph
from partita.core.plan import Plan
from partita.errors import InvalidInputError
from partita.exporters.blueprint import Blueprint
from partita.exporters.layers import Layer, constructor_of
from partita.exporters.python_source import distinct, identifier

_WORD = re.compile(r"(Add|Mul|Concat|Size|View|Transpose|__getitem__)(?:\((.*)\))?")


def described_blueprint(graph: Graph, plan: Plan) -> Blueprint:
    """Return what a package is written from, out of the descriptions of a graph's nodes.

    Raises:
        InvalidInputError: A description is neither a constructor nor a known word; names the first.
    """
    notes = graph.annotations.get("pipedream", {}).get("descriptions", {})
    if not notes:
        raise InvalidInputError(
            f"graph {graph.name!r} has no descriptions of layers; name the model with --model"
        )
    described = {name: str(notes.get(name, "")) for name in graph.ops.names}
    producer = graph.tensors.producer.tolist()
    made = {op: row for row, op in enumerate(producer) if op >= 0}
    paths = distinct(map(identifier, graph.ops.names))
    pointers, edges = graph.in_edges
    order = graph.topological_order.tolist()
    ops, layers = [], {}
    for place, row in enumerate(order):
        name = graph.ops.names[row]
        tensors = graph.edges.tensor[edges[pointers[row] : pointers[row + 1]]].tolist()
        source = constructor_of(described[name], in_place=False)
        if source is not None:
            layers[place] = Layer(paths[row], source, tuple(map(Value, tensors)), {})
        is_size = [_kind(described.get(graph.tensors.names[t], "")) == "Size" for t in tensors]
        func, args = (
            (operator.call, ())
            if source is not None
            else _word(name, described[name], list(map(Value, tensors)), is_size)
        )
        ops.append(
            CapturedOp(
                name=name,
                kind=func.__name__,
                module=paths[row],
                scopes=(paths[row],),
                func=func,
                args=args,
                kwargs={},
                outputs=((0, made[row]),),
                reads=tuple(dict.fromkeys(tensors)),
                makes=(made[row],),
            )
        )
    outputs = tuple(graph.outputs.tolist())
    return Blueprint(
        name=graph.name,
        ops=tuple(ops),
        plan=replace(plan, stage_of=plan.stage_of[order], recompute=plan.recompute[order]),
        names=graph.tensors.names,
        values=tuple(_unknown(row, op) for row, op in enumerate(producer)),
        inputs=tuple(row for row, op in enumerate(producer) if op < 0),
        outputs=outputs,
        output=Value(outputs[0]) if len(outputs) == 1 else tuple(map(Value, outputs)),
        layers=layers,
        has_shapes=False,
    )


def _unknown(row: int, op: int) -> ValueInfo:
    return ValueInfo(
        shape=(),
        dtype=torch.float32,
        device=torch.device("cpu"),
        requires_grad=op >= 0,
        storage=row,
        op=op,
    )


def _kind(description: str) -> str:
    match = _WORD.fullmatch(description)
    return match[1] if match else ""


def _word(
    name: str, description: str, given: Sequence[Value], is_size: Sequence[bool]
) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Return the function that one of PipeDream's words means, with its arguments.

    Of what a view reads, numbers that are sizes are arguments.
    """
    rows = list(zip(given, is_size, strict=True))
    is_view = _kind(description) == "View"
    sizes = [value for value, is_number in rows if is_view and is_number]
    tensors = [value for value, is_number in rows if not (is_view and is_number)]
    match = _WORD.fullmatch(description)
    numbers = _numbers(match[2] or "") if match else None
    if match is None or numbers is None:
        raise _refusal(name, description)
    first = tensors[0] if tensors else None
    known: dict[str, tuple[bool, Callable[..., Any], tuple[Any, ...]]] = {
        "Add": (len(tensors) == 2, operator.add, tuple(tensors)),
        "Mul": (len(tensors) == 2, operator.mul, tuple(tensors)),
        "Concat": (len(tensors) > 0 and len(numbers) == 1, torch.cat, (list(tensors), *numbers)),
        "Size": (len(tensors) == 1 and len(numbers) == 1, Tensor.size, (first, *numbers)),
        "View": (len(tensors) == 1, Tensor.view, (first, *sizes, *numbers)),
        "Transpose": (len(tensors) == 1 and len(numbers) == 2, Tensor.transpose, (first, *numbers)),
        "__getitem__": (
            len(tensors) == 1 and len(numbers) == 1,
            Tensor.__getitem__,
            (first, *numbers),
        ),
    }
    fits, func, args = known[match[1]]
    if not fits:
        raise _refusal(name, description)
    return func, args


def _numbers(text: str) -> tuple[int, ...] | None:
    """Return the numbers between the parentheses of a word; None if there is anything else."""
    if text in ("", "inplace"):
        return ()
    try:
        found = ast.literal_eval(f"({text},)")
    except (SyntaxError, ValueError):
        return None
    return found if all(isinstance(part, int) for part in found) else None


def _refusal(name: str, description: str) -> InvalidInputError:
    short = description if len(description) <= 80 else f"{description[:77]}..."
    return InvalidInputError(
        f"node {name!r} is described as {short!r}, which is no constructor of torch with the "
        "arguments that its edges give; name the model with --model"
    )
