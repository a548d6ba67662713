"""Small networks with their graphs, to compare what runs a Program with plain autograd.

The code of an op calls methods of tensors only, so this module does not import torch: what it calls
a tensor is torch's. ``reference`` is one process that runs the same microbatches in the same order;
it knows nothing of graphs, stages or Programs.
"""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from partita.core.columns import Floats
from partita.core.graph import EdgeTable, Graph, OpCosts, OpTable, ParameterTable, TensorTable

Tensor: TypeAlias = Any
OpFunction: TypeAlias = Callable[..., Tensor]

WIDTH = 4
FEATURES = 3
_FLOAT64_BYTES = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkOp:
    """An op of a small network.

    Attributes:
        name: Its name.
        inputs: Names of the tensors it reads, in the order of its arguments.
        outputs: Names of the tensors it makes.
        parameters: Names of the parameters it uses, which it takes by keyword.
        function: What it computes.
    """

    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    parameters: tuple[str, ...]
    function: OpFunction


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """A small network.

    Attributes:
        graph: Its graph; the last op makes the loss.
        ops: The ops, in the order of the graph.
        shapes: Shape of each parameter.
        features: Width of the model's inputs, by name.
    """

    graph: Graph
    ops: tuple[NetworkOp, ...]
    shapes: Mapping[str, tuple[int, ...]]
    features: Mapping[str, int]

    def parameters(self, seed: int) -> dict[str, Floats]:
        """Return random values of the parameters."""
        rng = np.random.default_rng(seed)
        return {name: rng.normal(size=shape) * 0.5 for name, shape in self.shapes.items()}

    def microbatches(self, sizes: Sequence[int], seed: int) -> list[dict[str, Floats]]:
        """Return random inputs of the model, for microbatches of the given sizes."""
        rng = np.random.default_rng(seed)
        return [
            {name: rng.normal(size=(size, width)) for name, width in self.features.items()}
            for size in sizes
        ]

    def loss(self, inputs: Mapping[str, Tensor], parameters: Mapping[str, Tensor]) -> Tensor:
        """Return the loss of one microbatch, by running all ops in one go."""
        values = dict(inputs)
        for op in self.ops:
            arguments = [values[name] for name in op.inputs]
            made = op.function(*arguments, **{name: parameters[name] for name in op.parameters})
            parts = made if isinstance(made, tuple) else (made,)
            values.update(zip(op.outputs, parts, strict=True))
        return values[self.ops[-1].outputs[0]]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sizes:
    """What the tensors and parameters of a network look like.

    Attributes:
        shapes: Shape of each parameter.
        widths: Elements of a tensor for one sample, where it is not ``WIDTH``.
        fixed: Tensors that do not grow with the samples.
        constant: Tensors without gradient, with the bytes of an element.
        frozen: Parameters that are not trained.
    """

    shapes: Mapping[str, tuple[int, ...]]
    widths: Mapping[str, int]
    fixed: frozenset[str] = frozenset()
    constant: Mapping[str, int]
    frozen: frozenset[str] = frozenset()


def _graph(name: str, ops: Sequence[NetworkOp], outputs: Sequence[str], sizes: _Sizes) -> Graph:
    inputs = sorted({t for op in ops for t in op.inputs} - {t for op in ops for t in op.outputs})
    tensors = [*inputs, *(t for op in ops for t in op.outputs)]
    producer = [-1] * len(inputs) + [i for i, op in enumerate(ops) for _ in op.outputs]
    row = {tensor: index for index, tensor in enumerate(tensors)}
    parameters = list(sizes.shapes)
    per_sample = [
        sizes.widths.get(t, WIDTH) * sizes.constant.get(t, _FLOAT64_BYTES) for t in tensors
    ]
    return Graph(
        name=name,
        ops=OpTable(names=tuple(op.name for op in ops), saved_bytes=np.full(len(ops), 8.0)),
        costs=(OpCosts(forward_s=np.ones(len(ops)), backward_s=np.full(len(ops), 2.0)),),
        tensors=TensorTable(
            names=tuple(tensors),
            producer=np.array(producer),
            bytes=np.array(per_sample, dtype=np.float64),
            fixed_bytes=np.where([t in sizes.fixed for t in tensors], per_sample, 0.0),
            differentiable=np.array([t not in sizes.constant for t in tensors]),
        ),
        edges=EdgeTable(
            tensor=np.array([row[t] for op in ops for t in op.inputs]),
            reader=np.array([i for i, op in enumerate(ops) for _ in op.inputs]),
        ),
        parameters=ParameterTable(
            names=tuple(parameters),
            bytes=np.array([_FLOAT64_BYTES * float(np.prod(sizes.shapes[p])) for p in parameters]),
            dtypes=("float64",) * len(parameters),
            trainable=np.array([p not in sizes.frozen for p in parameters]),
            use_op=np.array([i for i, op in enumerate(ops) for _ in op.parameters]),
            use_parameter=np.array([parameters.index(p) for op in ops for p in op.parameters]),
        ),
        outputs=np.array([row[t] for t in outputs]),
        loss=row[ops[-1].outputs[0]],
        dtype="float64",
    )


def _split(a: Tensor, split: Tensor) -> tuple[Tensor, Tensor]:
    hidden = a @ split
    return hidden.sin(), hidden.cos()


def residual_network(*, tied: bool = True) -> Network:
    """Return a network of eleven ops that has one of everything.

    A skip connection from the first layer to the last; a weight that the first and the last layer
    share (``tied``); an op without inputs, whose tensor has a fixed size; a mask without gradient;
    an op with two outputs; a reader that leaves the gradient of its input undefined; a frozen
    parameter; a model input that is read twice.
    """
    head = "embedding" if tied else "head"
    ops = _residual_ops(head)
    square, embedding = (WIDTH, WIDTH), (FEATURES, WIDTH)
    shapes: dict[str, tuple[int, ...]] = {"offset": (WIDTH,), "embedding": embedding}
    shapes |= {"first": square, "bias": (WIDTH,), "split": square, "second": square}
    shapes |= {"third": square, "fourth": square, "frozen": (WIDTH,), "scale": (1,)}
    shapes |= {} if tied else {"head": embedding}
    sizes = _Sizes(
        shapes=shapes,
        widths={"x": FEATURES, "y": FEATURES, "logits": FEATURES, "mask": 1, "loss": 1},
        fixed=frozenset({"place", "loss"}),
        constant={"mask": 1},
        frozen=frozenset({"frozen"}),
    )
    return Network(
        graph=_graph("residual", ops, ("logits", "loss"), sizes),
        ops=ops,
        shapes=shapes,
        features={"x": FEATURES, "y": FEATURES},
    )


def _residual_ops(head: str) -> tuple[NetworkOp, ...]:
    return (
        _op("position", (), ("place",), ("offset",), lambda offset: offset * 2.0),
        _op("embed", ("x",), ("e",), ("embedding",), lambda x, embedding: x @ embedding),
        _op("gate", ("x",), ("mask",), (), lambda x: x.sum(1, keepdim=True) > 0),
        _op(
            "first",
            ("e",),
            ("a",),
            ("first", "bias"),
            lambda e, first, bias: (e @ first + bias).tanh(),
        ),
        _op("split", ("a",), ("c", "d"), ("split",), _split),
        _op(
            "second",
            ("c", "place"),
            ("f",),
            ("second",),
            lambda c, place, second: (c @ second + place).tanh(),
        ),
        _op(
            "third",
            ("f", "d"),
            ("g",),
            ("third",),
            lambda f, d, third: (f @ third + d.detach()).tanh(),
        ),
        _op(
            "fourth",
            ("g", "d", "x"),
            ("h",),
            ("fourth", "frozen"),
            lambda g, d, x, fourth, frozen: g @ fourth * d + x.sum(1, keepdim=True) * frozen,
        ),
        _op(
            "join",
            ("h", "e", "mask"),
            ("j",),
            ("scale",),
            lambda h, e, mask, scale: (h + e) * (mask + 1) * scale,
        ),
        _op("head", ("j",), ("logits",), (head,), lambda j, **weight: j @ weight[head].T),
        _op("loss", ("logits", "y"), ("loss",), (), lambda logits, y: ((logits - y) ** 2).mean()),
    )


def _op(
    name: str,
    inputs: tuple[str, ...],
    outputs: tuple[str, ...],
    parameters: tuple[str, ...],
    function: OpFunction,
) -> NetworkOp:
    return NetworkOp(
        name=name, inputs=inputs, outputs=outputs, parameters=parameters, function=function
    )


def random_network(rng: random.Random, *, num_ops: int, tied: bool = True) -> Network:
    """Return a random DAG of layers, each of which reads one to three earlier tensors.

    Some layers have no parameter, some share one (``tied``), and some results are never read.
    """
    made, ops, shapes = ["x"], [], {}
    for index in range(num_ops - 1):
        count = rng.randint(1, min(3, len(made)))
        inputs = tuple(rng.sample(made, count))
        if "x" in inputs:
            inputs = ("x", *(t for t in inputs if t != "x"))
            parameter = "embedding" if tied else f"e{index}"
            shapes[parameter] = (FEATURES, WIDTH)
        else:
            parameter = rng.choice([f"w{index}", f"w{index}", f"w{index // 3}" if tied else "", ""])
            if parameter:
                shapes[parameter] = (WIDTH, WIDTH)
        names = (parameter,) if parameter else ()
        ops.append(_op(f"op{index}", inputs, (f"t{index}",), names, _layer))
        made.append(f"t{index}")
    inner = [t for t in made if t != "x"]
    read = tuple(sorted({inner[-1], *rng.sample(inner, min(2, len(inner)))}))
    ops.append(_op("loss", (*read, "y"), ("loss",), (), _mean_error))
    sizes = _Sizes(
        shapes=shapes,
        widths={"x": FEATURES, "y": WIDTH, "loss": 1},
        fixed=frozenset({"loss"}),
        constant={},
    )
    return Network(
        graph=_graph("random", ops, ("loss",), sizes),
        ops=tuple(ops),
        shapes=shapes,
        features={"x": FEATURES, "y": WIDTH},
    )


def _layer(first: Tensor, *others: Tensor, **weights: Tensor) -> Tensor:
    total = first
    for weight in weights.values():
        total = total @ weight
    for index, other in enumerate(others):
        total = total + other * (1.0 + 0.5 * index)
    return total.tanh()


def _mean_error(*tensors: Tensor) -> Tensor:
    *read, wanted = tensors
    return ((sum(read) - wanted) ** 2).mean()


def reference(
    network: Network,
    parameters: Mapping[str, Tensor],
    microbatches: Sequence[Mapping[str, Tensor]],
    weights: Sequence[float],
) -> tuple[list[float], dict[str, Tensor]]:
    """Return the losses, and the gradients of their weighted sum, by plain autograd.

    Args:
        network: The network.
        parameters: Values of its parameters.
        microbatches: Inputs of the model, by name.
        weights: What the loss of each microbatch counts.
    """
    leaves = {name: value.detach().clone().requires_grad_() for name, value in parameters.items()}
    losses = []
    for inputs, weight in zip(microbatches, weights, strict=True):
        loss = network.loss(inputs, leaves)
        losses.append(float(loss.detach()))
        (loss * weight).backward()
    trained = network.graph.parameters.trainable.tolist()
    names = [n for n, t in zip(network.graph.parameters.names, trained, strict=True) if t]
    return losses, {
        name: leaves[name].detach() * 0 if leaves[name].grad is None else leaves[name].grad
        for name in names
    }


def gradient_error(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> float:
    """Return the largest difference between two sets of gradients.

    It is relative to the larger of that gradient's norm and 1e-6 times the largest norm of all.
    Infinite where a name is missing.
    """
    if set(found) != set(expected):
        return float("inf")
    largest = max(float(value.norm()) for value in expected.values())
    return max(
        float((found[name] - value).norm()) / max(float(value.norm()), 1e-6 * largest, 1e-300)
        for name, value in expected.items()
    )
