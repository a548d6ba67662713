"""The ops of a stage as one Python function: a line for each call, tensors in local variables.

Calling captured ops one by one costs several microseconds each for looking up what every argument
stands for. Here that is done once, when the function is written; what it does is what ``Replay``
does, call by call: the same copies before a write, the same circumstances, the same seeds.

A tensor of the graph is the local variable ``t<row>``, a parameter ``p<number>``; everything that
is known beforehand (functions, literals, constants) is bound as a name of the function's module.
A variable is deleted after the last op that reads it.
"""

import keyword
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeAlias

from torch import Tensor

from partita.capture.op import CapturedOp, Replay, circumstances, storage_of
from partita.capture.tree import (
    MAX_DEPTH,
    Const,
    Param,
    Ref,
    Value,
    children_of,
    leaves_of,
    tensors_of,
)

EnterSpan: TypeAlias = Callable[[int, Sequence[Tensor]], AbstractContextManager[object]]
"""Returns the context of a span, given its number and what enters it."""
StageFunction: TypeAlias = Callable[
    [Sequence[Tensor], Mapping[str, Tensor], Set[int], Callable[[int], None], EnterSpan],
    tuple[Tensor, ...],
]
"""Returns what leaves a stage, given what enters it, the parameters, the storages that may not be
written, what seeds the random numbers of an op, and what enters a span.
"""


def plain_span(number: int, entering: Sequence[Tensor]) -> AbstractContextManager[object]:
    """Return a context in which a span runs as other ops do."""
    del number, entering
    return nullcontext()


def compile_stage(  # noqa: PLR0913 (each is a part of a stage)
    ops: Sequence[tuple[int, CapturedOp | None]],
    *,
    in_place: Set[int],
    inputs: Sequence[int],
    leaving: Sequence[int],
    branches: Mapping[int, Sequence[int]],
    drops: Sequence[Sequence[int]],
    constants: Sequence[Tensor],
    spans: Sequence[tuple[range, Sequence[int]]] = (),
) -> StageFunction:
    """Return the ops of a stage as one function.

    Args:
        ops: Index and op in order; None stands for an op that does nothing.
        in_place: Places of the ops that may write in place.
        inputs: Rows of the tensors that enter, in the order of the function's argument.
        leaving: Rows of the tensors that leave, in the order of the function's result.
        branches: Rows of those that branch off before a place: their gradient from outside is added
            to those of the readers in here when backward comes by that place.
        drops: Rows that no op needs after each place.
        constants: Constants of the captured model.
        spans: Places of ops that run in a context of their own, in order, each with the rows of
            the tensors that enter it.
    """
    writer = _Writer(constants)
    scope = {row: f"t{row}" for row in inputs}
    writer.unpack([scope[row] for row in inputs], "entering")
    outside: dict[int, str] = {}
    begins = {places.start: number for number, (places, _) in enumerate(spans)}
    ends = {places.stop for places, _ in spans}
    for place, (index, op) in enumerate(ops):
        if place in ends:
            writer.indent = ""
        if place in begins:
            number = begins[place]
            rows = "".join(f"{scope[row]}, " for row in spans[number][1])
            writer.line(f"with span({number}, ({rows})):")
            writer.indent = "    "
            writer.line("pass")
        for row in branches.get(place, ()):
            outside[row] = f"out{row}"
            writer.line(f"{outside[row]} = {scope[row]}.view_as({scope[row]})")
        if op is not None:
            if op.draws:
                writer.line(f"seed({index})")
            writer.op(op, scope, {}, in_place=place in in_place)
        writer.delete(scope.pop(row) for row in drops[place] if row in scope)
    writer.indent = ""
    result = ((outside if row in outside else scope)[row] for row in leaving)
    writer.line(f"return ({''.join(f'{name}, ' for name in result)})")
    return writer.function()


class _Writer:
    """Writes the source of a stage, line by line."""

    def __init__(self, constants: Sequence[Tensor]) -> None:
        self._constants = constants
        self._lines: list[str] = []
        self._bound: dict[str, Any] = {
            "isinstance": isinstance,
            "Tensor": Tensor,
            "results": _results,
            "storage_of": storage_of,
            "copy": Replay.copy,
        }
        self._names: dict[int, str] = {}
        self._parameters: dict[str, str] = {}
        self._inner = 0
        self.indent = ""

    def line(self, text: str) -> None:
        """Add a line to the body, or to the block that is open in it."""
        self._lines.append(self.indent + text)

    def unpack(self, names: Sequence[str], source: str) -> None:
        """Give names to the elements of a sequence."""
        if names:
            self.line(f"({''.join(f'{name}, ' for name in names)}) = {source}")

    def delete(self, names: Iterable[str]) -> None:
        """Let go of variables."""
        gone = list(names)
        if gone:
            self.line(f"del {', '.join(gone)}")

    def function(self) -> StageFunction:
        """Return what was written, compiled."""
        head = [f"{name} = parameters[{key!r}]" for key, name in self._parameters.items()]
        body = "\n    ".join(("", *head, *self._lines))
        source = f"def stage(entering, parameters, protected, seed, span):{body}\n"
        names: dict[str, Any] = dict(self._bound)
        exec(compile(source, "<captured stage>", "exec"), names)
        made: StageFunction = names["stage"]
        return made

    def op(
        self,
        op: CapturedOp,
        scope: dict[int, str],
        constants: Mapping[int, str],
        *,
        in_place: bool,
    ) -> None:
        """Write an op, and add what it makes to the scope.

        Args:
            op: The op.
            scope: Variables of the tensors that are there.
            constants: Variables of the constants that have been copied.
            in_place: Whether it may write in place.
        """
        if op.parts:
            self._several(op, scope, constants)
        else:
            self._call(op, scope, constants, in_place=in_place)

    def _several(self, op: CapturedOp, scope: dict[int, str], constants: Mapping[int, str]) -> None:
        """Write an op that is several calls: what they make stays inside unless it is read."""
        self._inner += 1
        mark = f"_{self._inner}"
        inner = {row: scope[row] for row in op.reads}
        copied = dict(constants)
        if op.owned:
            self.line(f"copies{mark} = {{}}")
        for ref in op.owned:
            if isinstance(ref, Value | Const):
                name = f"{'t' if isinstance(ref, Value) else 'c'}{ref.index}{mark}"
                self.line(f"{name} = copy({self._ref(ref, scope, constants)}, copies{mark})")
                (inner if isinstance(ref, Value) else copied)[ref.index] = name
        own = _Scope(inner, mark)
        for part in op.parts:
            self.op(part, own, copied, in_place=part.in_place)
        for row in op.makes:
            scope[row] = f"t{row}{_suffix(scope)}"
            if own[row] != scope[row]:
                self.line(f"{scope[row]} = {own[row]}")
        outer = {*scope.values(), *constants.values()}
        inside = dict.fromkeys((*own.values(), *copied.values()))
        self.delete(name for name in inside if name not in outer)
        if op.owned:
            self.delete([f"copies{mark}"])

    def _call(
        self,
        op: CapturedOp,
        scope: dict[int, str],
        constants: Mapping[int, str],
        *,
        in_place: bool,
    ) -> None:
        suffix = _suffix(scope)
        written: dict[Ref, str] = {}
        for ref, row in op.writes:
            if ref not in written:
                tensor = self._ref(ref, scope, constants)
                written[ref] = target = f"w{row}{suffix}"
                kept = (
                    f"{tensor} if storage_of({tensor}) not in protected else " if in_place else ""
                )
                self.line(f"{target} = {kept}{tensor}.clone()")

        def name(ref: Ref) -> str:
            return written[ref] if ref in written else self._ref(ref, scope, constants)

        arguments = [self._expression(value, name) for value in op.args]
        arguments += [
            _keyword(key, self._expression(value, name)) for key, value in op.kwargs.items()
        ]
        call = f"{self._bind(op.func)}({', '.join(arguments)})"
        plain = op.grad and not op.autocast
        indent = "" if plain else "    "
        if not plain:
            self.line(f"with {self._bind(circumstances)}({self._bind(op)}):")
        self._assign(op, call, indent, scope)
        for ref, row in op.writes:
            scope[row] = f"t{row}{suffix}"
            self.line(f"{scope[row]} = {written[ref]}")
        self.delete(written.values())

    def _assign(self, op: CapturedOp, call: str, indent: str, scope: dict[int, str]) -> None:
        """Write a call, with names for what is read of its result."""
        suffix = _suffix(scope)
        if not op.outputs:
            self.line(f"{indent}{call}")
            return
        places = dict(op.outputs)
        if set(places) == {0} and len(op.outputs) == 1:
            name = scope[places[0]] = f"t{places[0]}{suffix}"
            self.line(f"{indent}{name} = {call}")
            self.line(f"if not isinstance({name}, Tensor): {name} = results({name})[0]")
            return
        made = f"made{suffix}"
        self.line(f"{indent}{made} = {call}")
        self.line(f"{made} = results({made})")
        for place, row in op.outputs:
            scope[row] = f"t{row}{suffix}"
            self.line(f"{scope[row]} = {made}[{place}]")
        self.delete([made])

    def _expression(self, node: object, name: Callable[[Ref], str], depth: int = 0) -> str:
        """Return the source of an argument."""
        if isinstance(node, Ref):
            return name(node)
        found = children_of(node) if depth < MAX_DEPTH else None
        if found is None or not any(isinstance(leaf, Ref) for _, leaf in leaves_of(node)):
            return self._bind(node)
        parts = [self._expression(value, name, depth + 1) for value in found.values]
        if isinstance(node, list):
            return f"[{', '.join(parts)}]"
        inside = f"({''.join(f'{part}, ' for part in parts)})"
        return inside if type(node) is tuple else f"{self._bind(found.rebuild)}({inside})"

    def _ref(self, ref: Ref, scope: Mapping[int, str], constants: Mapping[int, str]) -> str:
        """Return the name of the tensor that a reference stands for."""
        if isinstance(ref, Value):
            return scope[ref.index]
        if isinstance(ref, Param):
            return self._parameters.setdefault(ref.name, f"p{len(self._parameters)}")
        assert isinstance(ref, Const)
        return constants.get(ref.index) or self._bind(self._constants[ref.index])

    def _bind(self, value: object) -> str:
        """Return a name for an object that is known beforehand."""
        name = self._names.get(id(value))
        if name is None:
            name = self._names[id(value)] = f"k{len(self._names)}"
            self._bound[name] = value
        return name


class _Scope(dict[int, str]):
    """Variables inside of an op that is several calls; they have names of their own."""

    def __init__(self, names: Mapping[int, str], mark: str) -> None:
        super().__init__(names)
        self.mark = mark


def _keyword(name: str, value: str) -> str:
    """Return the source of an argument that is given by name."""
    plain = name.isidentifier() and not keyword.iskeyword(name)
    return f"{name}={value}" if plain else f"**{{{name!r}: {value}}}"


def _suffix(scope: dict[int, str]) -> str:
    return scope.mark if isinstance(scope, _Scope) else ""


def _results(made: object) -> Sequence[Tensor]:
    """Return the tensors in what a function returned, in order."""
    if type(made) in (tuple, list) and all(isinstance(part, Tensor) for part in made):  # type: ignore[attr-defined]  # a sequence
        return made  # type: ignore[return-value]  # of tensors
    return tensors_of(made)
