"""Two models as graphs with estimated costs, so that there is something to plan without torch.

The times of an op are a roofline at fixed shares of a device's peak rates, from the catalogue:

    forward_s = flops / (FLOP_SHARE * peak) + touched bytes / (MEMORY_SHARE * bandwidth) + LAUNCH_S

with the bytes of its inputs, outputs and parameters as touched. Backward takes twice the forward
time where there are parameters (gradients of inputs and of weights), as long as forward elsewhere.
All tensors are float32. The shapes are those of the published models; the times are estimates.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from partita.catalogue.catalogue import DeviceType, load_catalogue
from partita.core.columns import Floats, frozen_array
from partita.core.graph import (
    CostOrigin,
    EdgeTable,
    Graph,
    Labels,
    OpCosts,
    OpTable,
    ParameterTable,
    TensorTable,
)

DEVICE_TYPES = ("a100", "v100", "cpu")
FLOP_SHARE = 0.5
MEMORY_SHARE = 0.8
LAUNCH_S = 5e-6
BYTES = 4.0

GPT_LAYERS, GPT_HIDDEN, GPT_HEADS = 12, 768, 12
GPT_VOCABULARY, GPT_TOKENS = 50257, 1024
RESNET_STAGES = ((3, 64, 56), (4, 128, 28), (6, 256, 14), (3, 512, 7))
RESNET_CLASSES = 1000


class _Parameter(NamedTuple):
    """A parameter or buffer by number of elements."""

    name: str
    elements: float
    buffer: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class _Op:
    """A row of the graph while it is being written down."""

    name: str
    type: str
    reads: tuple[str, ...]
    elements: float
    flops: float = 0.0
    saved: float = 0.0
    parameters: tuple[_Parameter, ...] = ()
    layer: str


@dataclass(frozen=True, slots=True)
class _Model:
    """Ops and inputs in the order in which they were added; elements count floats of one batch."""

    ops: list[_Op] = field(default_factory=list)
    inputs: dict[str, float] = field(default_factory=dict)

    def add(self, op: _Op) -> str:
        self.ops.append(op)
        return op.name


def gpt_small(batch_size: int = 8) -> Graph:
    """Return GPT-2 small (124 M parameters, 1024 tokens) with its loss.

    Layers are counted as published partitions count them: word and position embedding, 12
    transformer layers, head. The head uses the weight of the word embedding.
    """
    tokens = float(batch_size * GPT_TOKENS)
    hidden = tokens * GPT_HIDDEN
    model = _Model()
    model.inputs.update({"tokens": 2 * tokens, "targets": 2 * tokens})
    vocabulary = _Parameter("embedding.word.weight", GPT_VOCABULARY * GPT_HIDDEN)
    positions = _Parameter("embedding.position.weight", GPT_TOKENS * GPT_HIDDEN)
    for name, weight in (("word", vocabulary), ("position", positions)):
        model.add(
            _Op(
                name=f"embedding.{name}",
                type="Embedding",
                reads=("tokens",),
                elements=hidden,
                parameters=(weight,),
                layer=f"embedding.{name}",
            )
        )
    parts = ("embedding.word", "embedding.position")
    stream = model.add(_add("embedding.add", parts, hidden, "embedding.position"))
    for number in range(GPT_LAYERS):
        stream = _transformer_layer(model, f"layer{number}", stream, tokens)
    norm = model.add(_norm("head.norm", stream, hidden, "head"))
    logits = tokens * GPT_VOCABULARY
    model.add(
        _Op(
            name="head.linear",
            type="Linear",
            reads=(norm,),
            elements=logits,
            flops=2 * hidden * GPT_VOCABULARY,
            saved=hidden,
            parameters=(vocabulary,),
            layer="head",
        )
    )
    model.add(_loss("head.loss", "head.linear", logits))
    return _graph("gpt-small", model, batch_size, tokens_per_sample=GPT_TOKENS)


def _transformer_layer(model: _Model, name: str, stream: str, tokens: float) -> str:
    """Add pre-norm attention and feed-forward with their skip edges; return the last op."""
    hidden = tokens * GPT_HIDDEN
    scores = tokens * GPT_TOKENS * GPT_HEADS
    norm = model.add(_norm(f"{name}.attention.norm", stream, hidden, name))
    qkv = _linear(model, f"{name}.attention.qkv", norm, tokens, (GPT_HIDDEN, 3 * GPT_HIDDEN), name)
    core = model.add(
        _Op(
            name=f"{name}.attention.core",
            type="ScaledDotProductAttention",
            reads=(qkv,),
            elements=hidden,
            flops=4 * hidden * GPT_TOKENS + 5 * scores,
            saved=3 * hidden + scores,
            layer=name,
        )
    )
    out = _linear(model, f"{name}.attention.out", core, tokens, (GPT_HIDDEN, GPT_HIDDEN), name)
    stream = model.add(_add(f"{name}.attention.add", (stream, out), hidden, name))
    norm = model.add(_norm(f"{name}.mlp.norm", stream, hidden, name))
    up = _linear(model, f"{name}.mlp.up", norm, tokens, (GPT_HIDDEN, 4 * GPT_HIDDEN), name)
    gelu = model.add(
        _Op(
            name=f"{name}.mlp.gelu",
            type="GELU",
            reads=(up,),
            elements=4 * hidden,
            flops=40 * hidden,
            saved=4 * hidden,
            layer=name,
        )
    )
    down = _linear(model, f"{name}.mlp.down", gelu, tokens, (4 * GPT_HIDDEN, GPT_HIDDEN), name)
    return model.add(_add(f"{name}.mlp.add", (stream, down), hidden, name))


def _linear(
    model: _Model, name: str, read: str, rows: float, shape: tuple[int, int], layer: str
) -> str:
    inner, outer = shape
    return model.add(
        _Op(
            name=name,
            type="Linear",
            reads=(read,),
            elements=rows * outer,
            flops=2 * rows * inner * outer,
            saved=rows * inner,
            parameters=(
                _Parameter(f"{name}.weight", inner * outer),
                _Parameter(f"{name}.bias", outer),
            ),
            layer=layer,
        )
    )


def _norm(name: str, read: str, elements: float, layer: str) -> _Op:
    return _Op(
        name=name,
        type="LayerNorm",
        reads=(read,),
        elements=elements,
        flops=8 * elements,
        saved=elements,
        parameters=(
            _Parameter(f"{name}.weight", GPT_HIDDEN),
            _Parameter(f"{name}.bias", GPT_HIDDEN),
        ),
        layer=layer,
    )


def _add(name: str, reads: tuple[str, ...], elements: float, layer: str) -> _Op:
    return _Op(
        name=name,
        type="Add",
        reads=reads,
        elements=elements,
        flops=elements,
        layer=layer,
    )


def _loss(name: str, logits: str, elements: float) -> _Op:
    return _Op(
        name=name,
        type="CrossEntropyLoss",
        reads=(logits, "targets"),
        elements=1.0,
        flops=5 * elements,
        saved=elements,
        layer="head",
    )


def resnet50(batch_size: int = 64) -> Graph:
    """Return ResNet-50 on 224 x 224 images (25.6 M parameters) with its loss.

    Layers are the stem, 16 bottleneck blocks and the head.
    """
    batch = float(batch_size)
    model = _Model()
    model.inputs.update({"images": batch * 3 * 224 * 224, "targets": 2 * batch})
    stream = _convolution(model, "stem.conv", "images", _Shape(batch, 3, 64, 7, 112), "stem")
    stream = _batch_norm(model, "stem.norm", stream, _Shape(batch, 64, 64, 1, 112), "stem")
    elements = batch * 64 * 112 * 112
    stream = model.add(_relu("stem.relu", stream, elements, "stem"))
    stream = model.add(
        _Op(
            name="stem.pool",
            type="MaxPool2d",
            reads=(stream,),
            elements=elements / 4,
            flops=9 * elements / 4,
            saved=elements,
            layer="stem",
        )
    )
    channels, number = 64, 0
    for blocks, width, side in RESNET_STAGES:
        for index in range(blocks):
            reduces = index == 0 and width > 64
            shape = _Shape(batch, channels, width, 3, side)
            stream = _bottleneck(model, f"block{number}", stream, shape, reduces=reduces)
            channels, number = 4 * width, number + 1
    pooled = batch * channels
    stream = model.add(
        _Op(
            name="head.pool",
            type="AdaptiveAvgPool2d",
            reads=(stream,),
            elements=pooled,
            flops=pooled * 49,
            layer="head",
        )
    )
    _linear(model, "head.linear", stream, batch, (channels, RESNET_CLASSES), "head")
    model.add(_loss("head.loss", "head.linear", batch * RESNET_CLASSES))
    return _graph("resnet50", model, batch_size)


class _Shape(NamedTuple):
    """Of a convolution: images, channels in and out, kernel and side of the output."""

    batch: float
    inner: int
    outer: int
    kernel: int
    side: int

    @property
    def elements(self) -> float:
        return self.batch * self.outer * self.side**2


def _bottleneck(model: _Model, name: str, stream: str, shape: _Shape, *, reduces: bool) -> str:
    """Add three convolutions and the skip edge around them; return the last op."""
    wide = 4 * shape.outer
    first_side = shape.side * 2 if reduces else shape.side
    path = stream
    parts = (
        ("1", _Shape(shape.batch, shape.inner, shape.outer, 1, first_side)),
        ("2", _Shape(shape.batch, shape.outer, shape.outer, 3, shape.side)),
        ("3", _Shape(shape.batch, shape.outer, wide, 1, shape.side)),
    )
    for suffix, part in parts:
        path = _convolution(model, f"{name}.conv{suffix}", path, part, name)
        path = _batch_norm(model, f"{name}.norm{suffix}", path, part, name)
        if suffix != "3":
            path = model.add(_relu(f"{name}.relu{suffix}", path, part.elements, name))
    if shape.inner != wide:
        part = _Shape(shape.batch, shape.inner, wide, 1, shape.side)
        stream = _convolution(model, f"{name}.skip.conv", stream, part, name)
        stream = _batch_norm(model, f"{name}.skip.norm", stream, part, name)
    elements = parts[2][1].elements
    path = model.add(_add(f"{name}.add", (path, stream), elements, name))
    return model.add(_relu(f"{name}.relu3", path, elements, name))


def _convolution(model: _Model, name: str, read: str, shape: _Shape, layer: str) -> str:
    weight = shape.inner * shape.outer * shape.kernel**2
    made = next((op.elements for op in model.ops if op.name == read), None)
    return model.add(
        _Op(
            name=name,
            type="Conv2d",
            reads=(read,),
            elements=shape.elements,
            flops=2.0 * shape.batch * shape.side**2 * weight,
            saved=model.inputs[read] if made is None else made,
            parameters=(_Parameter(f"{name}.weight", weight),),
            layer=layer,
        )
    )


def _batch_norm(model: _Model, name: str, read: str, shape: _Shape, layer: str) -> str:
    return model.add(
        _Op(
            name=name,
            type="BatchNorm2d",
            reads=(read,),
            elements=shape.elements,
            flops=8 * shape.elements,
            saved=shape.elements,
            parameters=(
                _Parameter(f"{name}.weight", shape.outer),
                _Parameter(f"{name}.bias", shape.outer),
                _Parameter(f"{name}.running_mean", shape.outer, buffer=True),
                _Parameter(f"{name}.running_var", shape.outer, buffer=True),
            ),
            layer=layer,
        )
    )


def _relu(name: str, read: str, elements: float, layer: str) -> _Op:
    """Return a ReLU in place, which stores nothing of its own."""
    return _Op(
        name=name,
        type="ReLU",
        reads=(read,),
        elements=elements,
        flops=elements,
        layer=layer,
    )


def _graph(name: str, model: _Model, batch_size: int, tokens_per_sample: int = 0) -> Graph:
    ops, inputs = model.ops, list(model.inputs)
    names = [*inputs, *(op.name for op in ops)]
    tensor_of = {one: index for index, one in enumerate(names)}
    elements = np.array([*model.inputs.values(), *(op.elements for op in ops)])
    fixed = np.zeros(len(names))
    fixed[-1] = BYTES  # the loss is one number, whatever the batch
    producer = np.arange(len(names)) - len(inputs)
    reads = [(tensor_of[read], row) for row, op in enumerate(ops) for read in op.reads]
    table = _parameters(ops)
    touched = BYTES * elements[len(inputs) :]
    for tensor, row in reads:
        touched[row] += BYTES * elements[tensor]
    np.add.at(touched, table.use_op, table.bytes[table.use_parameter])
    catalogue = load_catalogue()
    return Graph(
        name=name,
        ops=OpTable(
            names=tuple(op.name for op in ops),
            flops=frozen_array([op.flops for op in ops], np.float64),
            saved_bytes=frozen_array([BYTES * op.saved for op in ops], np.float64),
            types=labels([op.type for op in ops]),
            layers=labels([op.layer for op in ops]),
            blocks=labels([op.layer if op.layer[-1].isdigit() else "" for op in ops]),
            modules=labels([op.name.rpartition(".")[0] for op in ops]),
        ),
        costs=tuple(_costs(catalogue.device_type(one), ops, touched) for one in DEVICE_TYPES),
        tensors=TensorTable(
            names=tuple(names),
            producer=frozen_array(np.maximum(producer, -1), np.int32),
            bytes=frozen_array(BYTES * elements, np.float64),
            fixed_bytes=frozen_array(fixed, np.float64),
            differentiable=frozen_array(producer >= 0, np.bool_),
        ),
        edges=EdgeTable(
            tensor=frozen_array([tensor for tensor, _ in reads], np.int32),
            reader=frozen_array([row for _, row in reads], np.int32),
        ),
        parameters=table,
        outputs=frozen_array([len(names) - 1], np.int32),
        loss=len(names) - 1,
        batch_size=batch_size,
        tokens_per_sample=tokens_per_sample,
    )


def _parameters(ops: Sequence[_Op]) -> ParameterTable:
    rows: dict[str, _Parameter] = {}
    uses = []
    for row, op in enumerate(ops):
        for parameter in op.parameters:
            rows.setdefault(parameter.name, parameter)
            uses.append((row, list(rows).index(parameter.name)))
    found = list(rows.values())
    return ParameterTable(
        names=tuple(rows),
        bytes=frozen_array([BYTES * one.elements for one in found], np.float64),
        trainable=frozen_array([not one.buffer for one in found], np.bool_),
        buffer=frozen_array([one.buffer for one in found], np.bool_),
        use_op=frozen_array([row for row, _ in uses], np.int32),
        use_parameter=frozen_array([parameter for _, parameter in uses], np.int32),
    )


def _costs(device: DeviceType, ops: Sequence[_Op], touched: Floats) -> OpCosts:
    rates: Mapping[str, float] = device.peak_flop_per_s
    peak, memory = rates["float32"], device.memory_bytes_per_s
    flops = np.array([op.flops for op in ops])
    forward = flops / (FLOP_SHARE * peak) + touched / (MEMORY_SHARE * memory) + LAUNCH_S
    trained = np.array([any(not one.buffer for one in op.parameters) for op in ops])
    backward = np.where(trained, 2 * forward, forward)
    return OpCosts(
        device_type=device.name,
        origin=CostOrigin.ESTIMATED,
        forward_s=frozen_array(forward, np.float64),
        backward_s=frozen_array(backward, np.float64),
        backward_input_s=frozen_array(forward, np.float64),
        peak_flop_per_s=peak,
        memory_bytes_per_s=memory,
    )


def labels(values: Sequence[str]) -> Labels:
    """Return labels that give each op its value; empty = none."""
    index: dict[str, int] = {}
    of = [index.setdefault(value, len(index)) if value else -1 for value in values]
    return Labels(names=tuple(index), of=frozen_array(of, np.int32))
