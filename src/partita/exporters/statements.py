"""One captured op as lines of Python."""

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from partita.capture.op import CapturedOp, eval_form
from partita.capture.tree import Const, Param, Ref, Value
from partita.exporters.blueprint import SINGLE, Blueprint
from partita.exporters.layers import Layer
from partita.exporters.python_source import (
    RESULT,
    Form,
    Namer,
    Spelling,
    Variables,
    attribute,
    expression,
    identifier,
    module_word,
    spelled,
    subscript,
)

WIDTH = 100
_INFIX = {
    "add": "+",
    "sub": "-",
    "mul": "*",
    "div": "/",
    "matmul": "@",
    "__and__": "&",
    "__or__": "|",
    "__eq__": "==",
    "eq": "==",
    "ne": "!=",
    "ge": ">=",
    "gt": ">",
    "le": "<=",
    "lt": "<",
}
_REVERSED = {"__rsub__": "-", "__radd__": "+", "__rmul__": "*", "__rtruediv__": "/"}
_OPERATORS = {"operator.add": "+", "operator.mul": "*"}

NO_CALL: tuple[str, ...] = ("",)
"""Arguments of an expression that is no call."""


@dataclass(frozen=True, slots=True)
class Statement:
    """Lines of source that belong together.

    Attributes:
        lines: The lines.
        context: Statements around them, outermost first, such as ``with torch.no_grad():``.
        place: Path of the module that they come from.
    """

    lines: tuple[str, ...]
    context: tuple[str, ...] = ()
    place: str = ""


@dataclass(slots=True)
class Writer:
    """Writes the ops of one stage.

    Attributes:
        blueprint: The model.
        variable_of: The variables of tensors that are there, by row.
        crossing: Names of the tensors that enter and leave, by row.
        last_read: Place of the last call that reads a tensor, by row.
        variables: Names of the other tensors.
        imports: Import statements that the source needs.
        constants: Constants that the source uses.
        memories: Constants whose whole memory it uses, for others that are views of it.
        statements: Statements so far.
        now: Place of the call that is being written.
    """

    blueprint: Blueprint
    variable_of: dict[int, str]
    crossing: Mapping[int, str]
    last_read: Mapping[int, int]
    variables: Variables
    imports: set[str] = field(default_factory=set)
    constants: set[int] = field(default_factory=set)
    memories: set[int] = field(default_factory=set)
    statements: list[Statement] = field(default_factory=list)
    now: int = 0

    def write(
        self, op: CapturedOp, layer: Layer | None, guard: tuple[str, ...], *, in_place: bool
    ) -> None:
        """Write an op; what stands around it is given."""
        if layer is not None:
            self._write_layer(op, layer, guard, in_place=in_place)
            self.now += len(op.leaves)
        elif op.parts:
            self._write_parts(op, guard, self.name_of)
        else:
            self._write_call(op, guard, self.name_of, in_place=in_place)
            self.now += 1

    def name_of(self, ref: Ref) -> str:
        """Return the source of a tensor."""
        if isinstance(ref, Value):
            return self.variable_of[ref.index]
        if isinstance(ref, Param):
            return attribute(ref.name)
        assert isinstance(ref, Const)
        self.constants.add(ref.index)
        return f"self.constant_{ref.index}"

    def _new(self, row: int, word: str, *, before_call: bool = False) -> str:
        """Return a name for a tensor; ``before_call`` if it is given before the call has read."""
        if row in self.crossing:
            return self.crossing[row]
        until = max(self.last_read.get(row, -1), self.now + 0.5)
        return self.variables.name(word, self.now - 0.5 * before_call, until)

    def _write_parts(self, op: CapturedOp, guard: tuple[str, ...], name_of: Namer) -> None:
        """Write the calls of an op that may not be cut apart, on copies of what they write."""
        outside = dict(self.variable_of)
        owned = [ref for ref in op.owned if isinstance(ref, Value | Const)]
        local = self._copies(op, owned, guard, name_of)

        def inner(ref: Ref) -> str:
            return local[ref] if ref in local else name_of(ref)

        stores = frozenset(
            self.blueprint.values[ref.index].storage for ref in owned if isinstance(ref, Value)
        )
        for part in op.parts:
            if part.parts:
                self._write_parts(part, guard, inner)
            else:
                self._write_call(part, guard, inner, in_place=part.in_place, copies=stores)
                self.now += 1
        made = {value: self.variable_of[value] for value in op.makes}
        self.variable_of.clear()
        self.variable_of.update(outside | made)

    def _copies(
        self, op: CapturedOp, owned: Sequence[Ref], guard: tuple[str, ...], name_of: Namer
    ) -> dict[Ref, str]:
        """Write copies of what an op of several calls writes, and return their names."""
        end = self.now + len(op.leaves)

        def new(word: str) -> str:
            return self.variables.name(word, self.now - 0.5, end)

        local: dict[Ref, str] = {}
        for members in self.blueprint.shared_memory(owned):
            memory = f"memory_{members[0].index}"
            self.memories.add(members[0].index)
            base = new("memory")
            lines = [f"{base} = self.{memory}.clone()"]
            for ref in members:
                local[ref] = new("copy")
                tensor = self.blueprint.constants[ref.index]
                place = f"{tuple(tensor.shape)}, {tensor.stride()}, {tensor.storage_offset()}"
                lines.append(f"{local[ref]} = {base}.as_strided({place})")
            self._add(op, lines, guard)
        rest = [ref for ref in owned if ref not in local]
        originals = [name_of(ref) for ref in rest]
        local.update((ref, new("copy")) for ref in rest)
        targets = ", ".join(local[ref] for ref in rest)
        if len(rest) == 1:
            self._add(op, [f"{targets} = {originals[0]}.clone()"], guard)
        elif rest:
            self.imports.add("from .support import copied")
            self._add(op, wrapped(f"{targets} = ", "copied", originals), guard)
        return local

    def _write_layer(
        self, op: CapturedOp, layer: Layer, guard: tuple[str, ...], *, in_place: bool
    ) -> None:
        """Write the call of a layer."""
        name_of = self._targets(op, self.name_of, in_place=in_place)
        device = self._device(op, name_of)
        args = [self._source_of(arg, name_of, device) for arg in layer.args]
        args += [
            f"{key}={self._source_of(arg, name_of, device)}" for key, arg in layer.kwargs.items()
        ]
        main = next((leaf for leaf in op.leaves if leaf.outputs), op)
        call = (attribute(layer.path), args)
        self._assign(main, call, guard, module_word(layer.path), layer.path.rpartition(".")[0])

    def _write_call(
        self,
        op: CapturedOp,
        guard: tuple[str, ...],
        name_of: Namer,
        *,
        in_place: bool,
        copies: frozenset[int] = frozenset(),
    ) -> None:
        """Write a call of a function."""
        spelling = spelled(op)
        if spelling.imports:
            self.imports.add(spelling.imports)
        targets = self._targets(op, name_of, in_place=in_place, copies=copies)
        if _returns_written(op):
            plain = _out_of_place(op)
            if plain is not None and targets(op.writes[0][0]) != name_of(op.writes[0][0]):
                op, targets = plain, name_of
        else:
            targets = self._name_written(op, guard, targets)
        evaluated = eval_form(op) if self.blueprint.captured_training else op
        around = guard if evaluated is not None else (*guard, "if self.training:")
        call = self._call(op, evaluated or op, spelling, targets)
        if op.outputs or _returns_written(op):
            self._assign(op, call, around, identifier(op.kind))
        else:
            self._add(op, wrapped("", *call), around)

    def _targets(
        self,
        op: CapturedOp,
        name_of: Namer,
        *,
        in_place: bool,
        copies: frozenset[int] = frozenset(),
    ) -> Namer:
        """Return a namer that gives what an op writes: the tensor itself, or a copy of it."""
        targets = {
            ref: name_of(ref)
            if in_place and self._may_write(ref, copies)
            else f"{name_of(ref)}.clone()"
            for ref, _ in op.writes
        }
        return lambda ref: targets[ref] if ref in targets else name_of(ref)

    def _may_write(self, ref: Ref, copies: frozenset[int]) -> bool:
        """Return whether a tensor is no view of a parameter; a constant is a copy here."""
        if not isinstance(ref, Value):
            return True
        store = self.blueprint.values[ref.index].storage
        return store in copies or store not in self.blueprint.weight_stores

    def _name_written(self, op: CapturedOp, guard: tuple[str, ...], targets: Namer) -> Namer:
        """Write names for what a call changes, before the call."""
        renamed: dict[Ref, str] = {}
        lines = []
        for ref, value in op.writes:
            renamed[ref] = self._new(value, identifier(op.kind), before_call=True)
            lines.append(f"{renamed[ref]} = {targets(ref)}")
            self.variable_of[value] = renamed[ref]
        self._add(op, lines, guard)
        return lambda ref: renamed[ref] if ref in renamed else targets(ref)

    def _call(
        self, op: CapturedOp, evaluated: CapturedOp, spelling: Spelling, name_of: Namer
    ) -> tuple[str, Sequence[str]]:
        """Return a call: what stands before the parenthesis, and the arguments."""
        device = self._device(op, name_of)

        def say(node: object) -> str:
            return self._source_of(node, name_of, device)

        args = [
            say(arg) if _is_same(arg, plain) else _switched(say(arg), say(plain))
            for arg, plain in zip(op.args, evaluated.args, strict=True)
        ]
        named = []
        usual = _defaults(op)
        for key, plain in evaluated.kwargs.items():
            given = op.kwargs.get(key, True)
            if key in usual and _is_same(given, usual[key]) and _is_same(given, plain):
                continue
            text = say(plain) if _is_same(given, plain) else _switched(say(given), say(plain))
            named.append(f"{key}={text}")
        if not op.args or not isinstance(op.args[0], Ref) or spelling.form is Form.FUNCTION:
            return self._function(spelling, [*args, *named])
        return _method(op, spelling, (args, named), name_of)

    def _source_of(self, node: object, name_of: Namer, device: str) -> str:
        """Return the source of an argument."""
        text = expression(node, name_of, device)
        if "torch." in text:
            self.imports.add("import torch")
        return text

    def _function(self, spelling: Spelling, args: Sequence[str]) -> tuple[str, Sequence[str]]:
        if spelling.form is Form.METHOD:
            self.imports.add("import torch")
            return f"torch.Tensor.{spelling.text}", args
        sign = _OPERATORS.get(spelling.text)
        if sign is not None and len(args) == 2:
            return f"{args[0]} {sign} {args[1]}", NO_CALL
        return spelling.text, args

    def _device(self, op: CapturedOp, name_of: Namer) -> str:
        """Return the source of the device that an op computes on; empty where nothing tells."""
        if op.reads:
            return f"{name_of(Value(op.reads[0]))}.device".replace(".clone()", "")
        if op.parameters:
            return f"{attribute(op.parameters[0])}.device"
        return next((f"{name}.device" for name in self.variable_of.values()), "")

    def _assign(
        self,
        op: CapturedOp,
        call: tuple[str, Sequence[str]],
        guard: tuple[str, ...],
        word: str,
        place: str | None = None,
    ) -> None:
        """Write a call whose result gets names."""
        result = self.blueprint.results.get(id(op), SINGLE)
        if not op.outputs or result == SINGLE:
            row = op.outputs[0][1] if op.outputs else op.writes[0][1]
            self.variable_of[row] = self._new(row, word)
            self._add(op, wrapped(f"{self.variable_of[row]} = ", *call), guard, place)
            return
        names = {index: self._new(row, f"{word}_{index}") for index, row in op.outputs}
        self.variable_of.update((row, names[index]) for index, row in op.outputs)
        if result.is_flat and len(result.paths) > 1:
            targets = ", ".join(names.get(index, "_") for index in range(len(result.paths)))
            self._add(op, wrapped(f"{targets} = ", *call), guard, place)
            return
        lines = wrapped(f"{RESULT} = ", *call)
        lines += [f"{name} = {RESULT}{result.paths[index]}" for index, name in names.items()]
        self._add(op, lines, guard, place)

    def _add(
        self,
        op: CapturedOp,
        lines: Sequence[str],
        guard: tuple[str, ...],
        place: str | None = None,
    ) -> None:
        if not lines:
            return
        around = list(guard)
        if not op.grad:
            self.imports.add("import torch")
            around.append("with torch.no_grad():")
        for device, dtype in op.autocast:
            self.imports.add("import torch")
            around.append(f"with torch.autocast({device!r}, dtype={dtype}, cache_enabled=False):")
        self.statements.append(
            Statement(tuple(lines), tuple(around), op.module if place is None else place)
        )


def _returns_written(op: CapturedOp) -> bool:
    """Return whether a call returns the one tensor that it writes, and nothing else."""
    named = op.kind.endswith("_") and not op.kind.startswith("_")
    return len(op.writes) == 1 and not op.outputs and (named or op.kwargs.get("inplace") is True)


def _out_of_place(op: CapturedOp) -> CapturedOp | None:
    """Return the same call with a result of its own, where the function can."""
    if op.kwargs.get("inplace") is not True:
        return None
    kwargs = {key: value for key, value in op.kwargs.items() if key != "inplace"}
    return replace(op, kwargs=kwargs, outputs=((0, op.writes[0][1]),), writes=())


def _method(
    op: CapturedOp,
    spelling: Spelling,
    said: tuple[Sequence[str], Sequence[str]],
    name_of: Namer,
) -> tuple[str, Sequence[str]]:
    """Return a call of a method or attribute of the first argument, given all as source."""
    (first, *rest), named = said
    special = {
        Form.GETTER: f"{first}.{spelling.text}",
        Form.SETTER: f"{first}.{spelling.text} = {rest[0] if rest else None}",
    }.get(spelling.form)
    if spelling.text in ("__getitem__", "__setitem__"):
        special = f"{first}[{subscript(op.args[1], name_of)}]"
        special += f" = {rest[1]}" if spelling.text == "__setitem__" else ""
    elif len(rest) == 1 and not named and spelling.text in _INFIX:
        special = f"{first} {_INFIX[spelling.text]} {rest[0]}"
    elif len(rest) == 1 and not named and spelling.text in _REVERSED:
        special = f"{rest[0]} {_REVERSED[spelling.text]} {first}"
    if special is not None:
        return special, NO_CALL
    return f"{first}.{spelling.text}", [*rest, *named]


def _defaults(op: CapturedOp) -> dict[str, object]:
    """Return the usual values of a function's arguments, where Python knows them."""
    if not inspect.isfunction(op.func):
        return {}
    known = inspect.signature(op.func).parameters.values()
    return {parameter.name: parameter.default for parameter in known}


def _is_same(one: object, other: object) -> bool:
    """Return whether an argument is the same in training and in eval."""
    plain = isinstance(one, bool | int | float) and type(one) is type(other)
    return one is other or (plain and one == other)


def _switched(training: str, evaluated: str) -> str:
    """Return the source of an argument that depends on the mode."""
    if (training, evaluated) == ("True", "False"):
        return "self.training"
    return f"{training} if self.training else {evaluated}"


def wrapped(target: str, head: str, args: Sequence[str], indent: int = 8) -> list[str]:
    """Return the lines of an assignment, broken where it would be too long."""
    if args is NO_CALL:
        return [f"{target}{head}"]
    line = f"{target}{head}({', '.join(args)})"
    if len(line) + indent <= WIDTH:
        return [line]
    lines, current = [f"{target}{head}("], ""
    for arg in args:
        if current and len(current) + len(arg) + indent + 6 > WIDTH:
            lines.append(f"    {current.rstrip()}")
            current = ""
        current += f"{arg}, "
    return [*lines, f"    {current.rstrip()}", ")"]
