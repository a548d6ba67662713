"""The blueprint of a package: ops cut into stages, with everything that source must name.

A run of the model is observed once, to see what its calls return: a tensor, or tensors in a
container.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from partita.capture.captured import CapturedModel
from partita.capture.coarsen import in_place_ops
from partita.capture.op import CapturedOp, ModuleCall, Replay, ValueInfo, storage_of
from partita.capture.tree import Const, Ref, children_of
from partita.core.plan import Plan
from partita.errors import InvalidInputError
from partita.exporters.layers import Layer, layer_of, untied


@dataclass(frozen=True, slots=True)
class Result:
    """Results of a call.

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


_HAS_FLAG = (nn.modules.batchnorm._NormBase, nn.modules.dropout._DropoutNd)  # noqa: SLF001


@dataclass(frozen=True, slots=True, kw_only=True)
class StageBlueprint:
    """One stage.

    Attributes:
        ops: Rows of its ops, in order.
        inputs: Tensors that it gets, inputs of the model too.
        leaving: Tensors that other stages or the model's user get.
        in_place: Rows of the ops that may write in place.
    """

    ops: tuple[int, ...]
    inputs: tuple[int, ...]
    leaving: tuple[int, ...]
    in_place: frozenset[int]


@dataclass(frozen=True, kw_only=True)
class Blueprint:
    """A model cut into stages.

    Attributes:
        name: Name of the model.
        ops: The ops.
        plan: The plan.
        names: Names of the tensors that may cross stages, the first of ``values``.
        values: All tensors.
        inputs: Rows of the model's inputs.
        outputs: Rows of what the model returns.
        loss: Row of the loss, -1 = none.
        output: Result of the model, with a ``Ref`` for each tensor.
        layers: The ops that are calls of a layer, by row.
        results: Results of calls, by ``id``; a tensor where nothing is said.
        constants: Tensors that depend on nothing.
        parameters: Parameters and buffers that are used, by name.
        unsaved: Names of the buffers that the model's state does not have.
        aliases: Other names of tied parameters.
        unused: Names in the model's state that no op uses.
        modes: The modes that it can run in: ``training``, ``eval``.
        captured_training: Whether the flags in the arguments are those of training.
        has_shapes: Whether the shapes in ``values`` are known.
    """

    name: str
    ops: tuple[CapturedOp, ...]
    plan: Plan
    names: tuple[str, ...]
    values: tuple[ValueInfo, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    loss: int = -1
    output: Any = None
    layers: Mapping[int, Layer] = field(default_factory=dict)
    results: Mapping[int, Result] = field(default_factory=dict)
    constants: tuple[Tensor, ...] = ()
    parameters: Mapping[str, Tensor] = field(default_factory=dict)
    unsaved: frozenset[str] = frozenset()
    aliases: Mapping[str, str] = field(default_factory=dict)
    unused: tuple[str, ...] = ()
    modes: tuple[str, ...] = ("training", "eval")
    captured_training: bool = True
    has_shapes: bool = True

    @cached_property
    def stages(self) -> tuple[StageBlueprint, ...]:
        """The stages of the plan."""
        stage_of = self.plan.stage_of.tolist()
        readers: dict[int, set[int]] = {}
        for op, stage in zip(self.ops, stage_of, strict=True):
            for value in op.reads:
                readers.setdefault(value, set()).add(stage)
        wanted = {*self.outputs, self.loss}
        return tuple(
            self._stage(
                row, [op for op, stage in enumerate(stage_of) if stage == row], readers, wanted
            )
            for row in range(len(self.plan.stages))
        )

    def _stage(
        self, row: int, members: list[int], readers: Mapping[int, set[int]], wanted: set[int]
    ) -> StageBlueprint:
        ops = [self.ops[op] for op in members]
        made = {value for op in ops for value in op.makes}
        leaving = {v for v in made if v in wanted or readers.get(v, set()) - {row}}
        places = in_place_ops(ops, leaving, self.values)
        return StageBlueprint(
            ops=tuple(members),
            inputs=tuple(sorted({v for op in ops for v in op.reads} - made)),
            leaving=tuple(sorted(leaving)),
            in_place=frozenset(members[place] for place in places),
        )

    @cached_property
    def weight_stores(self) -> frozenset[int]:
        """Storages of parameters and constants, which no op may write."""
        weights = [t for t in self.parameters.values() if isinstance(t, nn.Parameter)]
        return frozenset(map(storage_of, [*weights, *self.constants]))

    def shared_memory(self, refs: Sequence[Ref]) -> list[list[Const]]:
        """Return those constants among some references that are views of one memory, together."""
        groups: dict[tuple[int, torch.dtype], list[Const]] = {}
        for ref in refs:
            if isinstance(ref, Const) and self.constants[ref.index].layout is torch.strided:
                tensor = self.constants[ref.index]
                groups.setdefault((storage_of(tensor), tensor.dtype), []).append(ref)
        return [members for members in groups.values() if len(members) > 1]

    @cached_property
    def labels(self) -> frozenset[int]:
        """Inputs that only the loss is made from, not what the model returns."""
        makers = {value: op for op in self.ops for value in op.makes}
        waiting, seen = list(self.outputs), set(self.outputs)
        while waiting:
            op = makers.get(waiting.pop())
            fresh = [v for v in (op.reads if op is not None else ()) if v not in seen]
            seen.update(fresh)
            waiting += fresh
        read = {value for op in self.ops for value in op.reads}
        return frozenset(v for v in self.inputs if v not in seen and v in read)

    @cached_property
    def from_label_values(self) -> frozenset[int]:
        """The tensors that are there only if labels are."""
        found = set(self.labels)
        for op in self.ops:
            if found.intersection(op.reads):
                found.update(op.makes)
        return frozenset(found)

    @cached_property
    def from_labels(self) -> frozenset[int]:
        """Rows of the ops that need labels, directly or not."""
        needed = self.from_label_values
        return frozenset(row for row, op in enumerate(self.ops) if needed.intersection(op.reads))


def blueprint_of(captured: CapturedModel, plan: Plan, inputs: Mapping[str, Tensor]) -> Blueprint:
    """Return what a package for a plan is written from.

    Args:
        captured: The model.
        plan: A plan for its graph.
        inputs: One microbatch by the names of the graph's inputs.

    Raises:
        InvalidInputError: The plan is for another graph, or an op cannot be written.
    """
    graph = captured.graph
    if plan.fingerprint != graph.fingerprint:
        raise InvalidInputError(
            f"the plan is for a graph with fingerprint {plan.fingerprint}, {graph.name!r} has "
            f"{graph.fingerprint}; name the model and the options that the graph was made with"
        )
    results = observed_results(captured, inputs)
    captured = replace(captured, ops=tuple(map(untied, captured.ops)))
    used = set(graph.parameters.names)
    state = dict(captured.model.state_dict(keep_vars=True))
    name_of = {id(tensor): name for name, tensor in captured.parameters.items()}
    aliases = {
        name: name_of[id(tensor)]
        for name, tensor in state.items()
        if name_of.get(id(tensor), name) != name
    }
    return Blueprint(
        name=graph.name,
        ops=captured.ops,
        plan=plan,
        names=graph.tensors.names,
        values=captured.values,
        inputs=tuple(range(sum(1 for row in graph.tensors.producer.tolist() if row < 0))),
        outputs=tuple(graph.outputs.tolist()),
        loss=graph.loss,
        output=captured.output,
        layers=_layers(captured),
        results=results,
        constants=captured.constants,
        parameters={name: captured.parameters[name] for name in graph.parameters.names},
        unsaved=frozenset(name for name in used if name not in state),
        aliases=aliases,
        unused=tuple(name for name in state if name not in used and name not in aliases),
        modes=_modes(captured),
        captured_training=captured.is_training,
    )


def _modes(captured: CapturedModel) -> tuple[str, ...]:
    if not captured.is_training:
        return ("eval",)
    return ("training", "eval") if captured.runs_eval else ("training",)


def _layers(captured: CapturedModel) -> dict[int, Layer]:
    modules = dict(captured.model.named_modules())
    scopes = Counter(op.scopes[-1] if op.scopes else "" for op in captured.ops)
    found = {}
    for row, op in enumerate(captured.ops):
        module = modules.get(op.module)
        is_opaque = isinstance(op.func, ModuleCall)
        if is_opaque and module is not None:
            _check_flag(captured, op, module)
        if not is_opaque and scopes[op.scopes[-1] if op.scopes else ""] != 1:
            continue
        layer = layer_of(op, module, captured.parameters, training=captured.is_training)
        if layer is not None:
            found[row] = layer
    return found


def _check_flag(captured: CapturedModel, op: CapturedOp, module: nn.Module) -> None:
    """Refuse an opaque layer that stays in eval mode while its model trains."""
    frozen = captured.is_training and captured.model.training and not module.training
    if frozen and isinstance(module, _HAS_FLAG):
        raise InvalidInputError(
            f"op {op.name!r} is a layer in eval mode inside of a model that trains; plan a graph "
            "of granularity op"
        )
