"""The module of one stage as Python source."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from partita.exporters.blueprint import Blueprint, StageBlueprint
from partita.exporters.layers import Layer
from partita.exporters.python_source import (
    Form,
    Variables,
    distinct,
    identifier,
    module_word,
    quoted,
    spelled,
)
from partita.exporters.statements import Statement, Writer, wrapped

_INDENT = "    "


@dataclass(frozen=True, slots=True, kw_only=True)
class StageSource:
    """A stage as source.

    Attributes:
        text: The file.
        constants: The constants that it uses.
        memories: Constants whose whole memory it uses.
        parameters: Parameters and buffers that it holds.
        needs: Packages beside torch that it imports.
    """

    text: str
    constants: frozenset[int]
    memories: frozenset[int]
    parameters: tuple[str, ...]
    needs: frozenset[str]


def crossing_names(blueprint: Blueprint) -> dict[int, str]:
    """Return a variable for each tensor that enters or leaves a stage, the same in all of them."""
    rows = dict.fromkeys(blueprint.inputs)
    for stage in blueprint.stages:
        rows.update(dict.fromkeys((*stage.inputs, *stage.leaving)))
    makers = {value: row for row, op in enumerate(blueprint.ops) for value in op.makes}

    def word(row: int) -> str:
        if row == blueprint.loss:
            return "loss"
        if row not in makers:
            return identifier(blueprint.names[row])
        op = blueprint.ops[makers[row]]
        layer = blueprint.layers.get(makers[row])
        if layer is not None:
            return module_word(layer.path)
        return module_word(op.module) if op.module else identifier(op.kind)

    taken = imported_names(blueprint)
    return dict(zip(rows, distinct([*taken, *map(word, rows)])[len(taken) :], strict=True))


def imported_names(blueprint: Blueprint) -> list[str]:
    """Return the names that imports of functions take, in all stages."""
    calls = [
        leaf
        for row, op in enumerate(blueprint.ops)
        if row not in blueprint.layers
        for leaf in op.leaves
    ]
    spellings = map(spelled, calls)
    found = [s.text.partition(".")[0] for s in spellings if s.form is Form.FUNCTION]
    return list(dict.fromkeys(found))


def stage_source(blueprint: Blueprint, number: int, crossing: Mapping[int, str]) -> StageSource:
    """Return the source of a stage.

    Raises:
        InvalidInputError: An op of it cannot be written.
    """
    stage = blueprint.stages[number]
    writer = _written(blueprint, stage, crossing)
    setup, held = _setup(blueprint, stage, writer)
    lines = [
        f'"""Stage {number} of {blueprint.name}."""',
        "",
        *_imports(writer, setup),
        "",
        "",
        f"class Stage{number}(Part):",
        f'    """{_summary(blueprint, stage)}"""',
        "",
        "    def __init__(self) -> None:",
        "        super().__init__()",
        *(f"        {line}" for line in setup),
        "",
        *_forward(blueprint, stage, crossing, writer.statements),
        "",
    ]
    return StageSource(
        text="\n".join(lines),
        constants=frozenset(writer.constants),
        memories=frozenset(writer.memories),
        parameters=tuple(held),
        needs=frozenset(line.split()[1].partition(".")[0] for line in writer.imports)
        - {"", "torch", "operator"},
    )


def _forward(
    blueprint: Blueprint,
    stage: StageBlueprint,
    crossing: Mapping[int, str],
    statements: Sequence[Statement],
) -> list[str]:
    """Return the lines of the method that runs a stage."""
    arguments = [f"{crossing[row]}: Tensor" for row in stage.inputs if row not in blueprint.labels]
    arguments += [
        f"{crossing[row]}: Tensor | None = None" for row in stage.inputs if row in blueprint.labels
    ]
    results = [crossing[row] for row in stage.leaving]
    optional = [crossing[row] for row in stage.leaving if row in blueprint.from_label_values]
    shed = [crossing[row] for row in stage.leaving if _sheds_gradient(blueprint, row)]
    kind = "tuple[Tensor, ...]" if results else "None"
    if len(results) == 1:
        kind = "Tensor | None" if optional else "Tensor"
    head = wrapped("def ", "forward", ["self", *arguments], indent=4)
    head[-1] += f" -> {kind}:"
    body = [
        '"""Return the tensors that leave the stage."""',
        *(f"{name} = None" for name in optional),
        *_rendered(statements),
        *(f"{name} = {name}.detach()" for name in shed),
        f"return {', '.join(results)}".rstrip(),
    ]
    return [*(f"    {line}" for line in head), *(f"        {line}" for line in body)]


def _written(blueprint: Blueprint, stage: StageBlueprint, crossing: Mapping[int, str]) -> Writer:
    """Return the writer of a stage, done."""
    last: dict[int, int] = {}
    place = 0
    for op in (blueprint.ops[row] for row in stage.ops):
        for leaf in op.leaves:
            last.update((value, place) for value in leaf.reads)
            place += 1
    own = {row: crossing[row] for row in (*stage.inputs, *stage.leaving)}
    writer = Writer(
        blueprint=blueprint,
        variable_of={row: crossing[row] for row in stage.inputs},
        crossing=own,
        last_read=last,
        variables=Variables([*own.values(), *imported_names(blueprint)]),
    )
    asked = [crossing[row] for row in stage.inputs if row in blueprint.labels]
    for row in stage.ops:
        guard: tuple[str, ...] = ()
        if row in blueprint.from_labels:
            needed = asked or [
                crossing[value] for value in stage.inputs if value in blueprint.from_label_values
            ]
            guard = tuple(f"if {name} is not None:" for name in needed[:1])
        writer.write(
            blueprint.ops[row],
            blueprint.layers.get(row),
            guard,
            in_place=row in stage.in_place,
        )
    return writer


def _sheds_gradient(blueprint: Blueprint, row: int) -> bool:
    """Return whether a tensor that leaves has no gradient though what it is a view of has one."""
    info = blueprint.values[row]
    if info.requires_grad or info.op < 0 or not info.dtype.is_floating_point:
        return False
    op = blueprint.ops[info.op]
    return not op.grad and any(blueprint.values[value].requires_grad for value in op.reads)


def _rendered(statements: Sequence[Statement]) -> Iterator[str]:
    """Yield lines: contexts around those that share them, the module's path before its first."""
    context: tuple[str, ...] = ()
    place = ""
    for statement in statements:
        shared = 0
        for old, new in zip(context, statement.context, strict=False):
            if old != new:
                break
            shared += 1
        comment = statement.place and statement.place != place
        if comment:
            shared = 0 if shared < len(statement.context) else shared
            yield f"{_INDENT * shared}# {statement.place}"
        for depth in range(shared, len(statement.context)):
            yield f"{_INDENT * depth}{statement.context[depth]}"
        context, place = statement.context, statement.place
        yield from (f"{_INDENT * len(context)}{line}" for line in statement.lines)


def _setup(
    blueprint: Blueprint, stage: StageBlueprint, writer: Writer
) -> tuple[list[str], list[str]]:
    """Return the lines that make what a stage holds, and the names of its parameters."""
    layers: dict[str, Layer] = {}
    for row in stage.ops:
        layer = blueprint.layers.get(row)
        if layer is not None:
            layers[layer.path] = layer
    names = dict.fromkeys(name for row in stage.ops for name in blueprint.ops[row].parameters)
    lines, done = [], set()
    for name in names:
        path = name.rpartition(".")[0]
        if path in layers:
            if path not in done:
                lines += wrapped("self.", "add", [quoted(path), layers[path].constructor])
            done.add(path)
        else:
            lines += _held(name, blueprint.parameters[name], saved=name not in blueprint.unsaved)
    for path, layer in layers.items():
        if path not in done:
            lines += wrapped("self.", "add", [quoted(path), layer.constructor])
    constants = [f"constant_{index}" for index in sorted(writer.constants)]
    for name in (*constants, *(f"memory_{index}" for index in sorted(writer.memories))):
        lines.append(f"self.add_buffer({quoted(name)}, constant({quoted(name)}), persistent=False)")
    return lines, list(names)


def _held(name: str, tensor: Tensor, *, saved: bool) -> list[str]:
    """Return the lines that make a parameter or buffer."""
    if not isinstance(tensor, nn.Parameter):
        end = "" if saved else ", persistent=False"
        return [f"self.add_buffer({quoted(name)}, constant({quoted(name)}){end})"]
    args = [*map(str, tensor.shape), *_distribution(tensor)]
    if tensor.dtype is not torch.float32:
        args.append(f"dtype={tensor.dtype}")
    if not tensor.requires_grad:
        args.append("trainable=False")
    return wrapped("self.", "add", [quoted(name), f"drawn({', '.join(args)})"])


def _distribution(tensor: Tensor) -> list[str]:
    """Return mean and deviation of the values that a parameter has now, where they are not zero."""
    if tensor.is_meta or not tensor.numel():
        return ["deviation=0.02"]
    values = tensor.detach().double()
    mean, deviation = values.mean().item(), values.std(correction=0).item()
    if deviation <= 1e-6 * abs(mean):
        return [f"mean={mean:.6g}"] if mean else []
    near = [] if abs(mean) < 0.1 * deviation else [f"mean={mean:.3g}"]
    return [*near, f"deviation={deviation:.3g}"]


def _imports(writer: Writer, setup: Iterable[str]) -> list[str]:
    """Return the import statements of a stage."""
    text = "\n".join(setup)
    used = {"Part"}
    used.update(name for name in ("constant", "drawn") if f"{name}(" in text)
    if "from .support import copied" in writer.imports:
        used.add("copied")
    foreign = set(writer.imports) - {"from .support import copied"}
    foreign.add("from torch import Tensor" + (", nn" if "nn." in text else ""))
    if "torch." in text.replace("nn.", ""):
        foreign.add("import torch")
    plain = sorted(line for line in foreign if line.startswith("import"))
    rest = sorted(line for line in foreign if line.startswith("from"))
    return [*plain, *rest, "", f"from .support import {', '.join(sorted(used))}"]


def _summary(blueprint: Blueprint, stage: StageBlueprint) -> str:
    """Return one line on what a stage holds."""
    places = [blueprint.ops[row].module for row in stage.ops if blueprint.ops[row].module]
    calls = f"{len(stage.ops)} calls"
    if not places:
        return f"{calls}."
    return f"{calls}, from {places[0]} to {places[-1]}."
