"""Turns any ``nn.Module`` into a graph that can be executed piece by piece.

The model is run once on an example, with a function-level trace (``trace``). The recording is made
a captured model: dead ops gone, what belongs together merged, all named. That is run again, in
training and in eval, and compared with the model. Where this does not succeed, modules become
opaque: leaf modules, then children of module lists, at last the whole model; the notes say so.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from partita.capture.blocks import find_blocks
from partita.capture.captured import CapturedModel, CaptureMode, Granularity, Specialization
from partita.capture.coarsen import (
    Stores,
    aliased_groups,
    contiguous_groups,
    convex_groups,
    live_ops,
    merge,
    silent_groups,
)
from partita.capture.graph import GraphSource, make_graph, named, renumbered
from partita.capture.op import CapturedOp, Replay, eval_form, storage_of
from partita.capture.setting import (
    CONTAINERS,
    Example,
    LossFunction,
    Setting,
    make_setting,
    unchanged_inputs,
    undisturbed,
    with_metrics,
)
from partita.capture.trace import ChangedConstantError, Trace
from partita.capture.tree import Ref, Value, leaves_of, map_leaves, tensors_of
from partita.capture.without_values import without_values
from partita.errors import InvalidInputError


@dataclass(slots=True)
class Recording:
    """The recording of one run of the model.

    Attributes:
        trace: The trace.
        output: Result of the model.
        loss: The loss.
        output_refs: The output with references in the place of tensors.
        loss_ref: Reference to the loss.
        metric_refs: References to what else the loss function returned, by name.
    """

    trace: Trace
    output: Any
    loss: Tensor | None
    output_refs: Any
    loss_ref: Ref | None
    metric_refs: Any = None


def record(setting: Setting, opaque: frozenset[str]) -> Recording:
    """Return what a run of the model gave, with some modules opaque."""
    try:
        return _record_once(setting, opaque, snapshots=False)
    except ChangedConstantError:
        return _record_once(setting, opaque, snapshots=True)


def _record_once(setting: Setting, opaque: frozenset[str], *, snapshots: bool) -> Recording:
    trace = Trace(setting.parameters, setting.modules, opaque=opaque, snapshots=snapshots)
    for tensor in setting.inputs.values():
        trace.add_input(tensor)
    objects = {n: b for n, b in setting.parameters.items() if not isinstance(b, nn.Parameter)}
    with unchanged_inputs(setting):
        with trace.active():
            output = setting.model(*setting.example.args, **setting.example.kwargs)
            loss = loss_of(output)
            metrics: Mapping[str, Tensor] = {}
            if loss is None and setting.loss is not None:
                with trace.scope("loss"):
                    loss, metrics = with_metrics(setting.loss(output, setting.example.labels))
        _record_assignments(setting, trace, objects)
        trace.finish()
        return Recording(
            trace=trace,
            output=output,
            loss=loss,
            output_refs=trace.refs(output),
            loss_ref=None if loss is None else trace.ref(loss),
            metric_refs=trace.refs(metrics),
        )


def _record_assignments(setting: Setting, trace: Trace, objects: Mapping[str, Tensor]) -> None:
    """Record that modules have put new tensors in the place of buffers."""
    now = dict(setting.model.named_buffers())
    for name, before in objects.items():
        after = now.get(name)
        if after is not None and after is not before and after.shape == before.shape:
            trace.assign_buffer(name, after)


def loss_of(output: object) -> Tensor | None:
    """Return the loss among what a model returns: called so, or its only tensor, one number."""
    loss: object = getattr(output, "loss", None)
    if isinstance(output, Mapping):
        loss = output.get("loss")
    if loss is None and isinstance(output, Tensor) and output.requires_grad:
        loss = output
    if isinstance(loss, Tensor) and loss.numel() == 1 and loss.is_floating_point():
        return loss
    return None


_RELATIVE, _ABSOLUTE = 1e-4, 1e-5


class ReplayDiffersError(Exception):
    """The recording does not give what the model gives."""


def compared(setting: Setting, recording: Recording, captured: CapturedModel) -> CapturedModel:
    """Return a captured model after comparing it with the model; says whether eval works too.

    Raises:
        ReplayDiffersError: Its ops do not give what the model gave.
    """
    buffers = {n: b.detach().clone() for n, b in _buffers(captured).items()}
    values = _replayed(setting, captured, buffers, lambda op: op)
    expected = tensors_of(recording.output)
    refs = [ref for _, ref in leaves_of(captured.output) if isinstance(ref, Ref)]
    if recording.loss is not None and captured.graph.loss >= 0:
        expected.append(recording.loss)
        refs.append(Value(captured.graph.loss))
    for ref, tensor in zip(refs, expected, strict=True):
        if isinstance(ref, Value) and not _agree(values[ref.index], tensor):
            name = captured.graph.tensors.names[ref.index]
            raise ReplayDiffersError(f"{name} is not what the model made when it is run again")
    if not captured.is_training:
        return captured
    if _same_in_eval(setting, captured):
        return captured
    note = "in eval mode the model computes something else; capture it in eval mode for that"
    return replace(captured, runs_eval=False, notes=(*captured.notes, note))


def _buffers(captured: CapturedModel) -> dict[str, Tensor]:
    table = captured.graph.parameters
    pairs = zip(table.names, table.buffer.tolist(), strict=True)
    return {name: captured.parameters[name] for name, is_buffer in pairs if is_buffer}


def _replayed(
    setting: Setting,
    captured: CapturedModel,
    buffers: Mapping[str, Tensor],
    form: Callable[[CapturedOp], CapturedOp | None],
) -> dict[int, Tensor]:
    """Return all tensors of the graph, by running the ops on the example."""
    inputs = dict(enumerate(setting.inputs.values()))
    held = {**captured.parameters, **buffers}
    guarded = [*inputs.values(), *captured.constants]
    replay = Replay(
        values=dict(inputs),
        parameters=held,
        constants=captured.constants,
        protected=frozenset(map(storage_of, guarded)),
        as_captured=True,
    )
    for op in captured.ops:
        run = form(op)
        if run is not None:
            replay.run(run)
    return replay.values


def _agree(found: Tensor, expected: Tensor) -> bool:
    if found.shape != expected.shape or found.dtype != expected.dtype:
        return False
    if found.requires_grad != expected.requires_grad:
        return False
    if not expected.is_floating_point() and not expected.is_complex():
        return torch.equal(found, expected)
    return torch.allclose(found, expected, _RELATIVE, _ABSOLUTE, equal_nan=True)


def _same_in_eval(setting: Setting, captured: CapturedModel) -> bool:
    """Return whether the ops with their flags off give what the model gives in eval mode."""
    setting.model.eval()
    buffers = {n: b.detach().clone() for n, b in _buffers(captured).items()}
    try:
        with torch.no_grad():
            with unchanged_inputs(setting):
                output = setting.model(*setting.example.args, **setting.example.kwargs)
            expected = tensors_of(output)
            values = _replayed(setting, captured, buffers, eval_form)
    except Exception:  # noqa: BLE001  # a model's own code may raise anything
        return False
    refs = [ref for _, ref in leaves_of(captured.output) if isinstance(ref, Ref)]
    return len(refs) == len(expected) and all(
        not isinstance(ref, Value) or _agree(values[ref.index], tensor)
        for ref, tensor in zip(refs, expected, strict=True)
    )


def assembled(
    setting: Setting,
    recording: Recording,
    granularity: Granularity,
    labels: tuple[str, Sequence[str]],
) -> CapturedModel:
    """Return the captured model: dead ops gone, what belongs together merged, all named."""
    trace, (name, prefixes) = recording.trace, labels
    results = (recording.output_refs, recording.metric_refs)
    output_refs = [ref for _, ref in leaves_of(results) if isinstance(ref, Value)]
    wanted = [ref.index for ref in output_refs]
    if isinstance(recording.loss_ref, Value):
        wanted.append(recording.loss_ref.index)
    stores = Stores(
        values=trace.values,
        parameters={n: storage_of(tensor) for n, tensor in setting.parameters.items()},
        constants=trace.constant_stores,
        aliased=frozenset(trace.aliased),
    )
    ops = live_ops(trace.ops, wanted, stores)
    if not ops:
        raise InvalidInputError(f"{type(setting.model).__name__} makes nothing of its inputs")
    ops = _grouped(ops, wanted, stores)
    containers = {p: _is_alike(m) for p, m in setting.modules.items() if isinstance(m, CONTAINERS)}
    if granularity is Granularity.BLOCK:
        blocks = find_blocks(ops, trace.values, setting.parameters, containers)
        keys = _block_keys(ops, {i: b.name for b in blocks for i in b.ops}, prefixes)
        ops = merge(ops, contiguous_groups(keys), trace.values, wanted)
    ops, values, row_of = renumbered(named(ops), trace.values, len(setting.inputs))
    blocks = find_blocks(ops, values, setting.parameters, containers)
    loss = recording.loss_ref
    outputs = dict.fromkeys(row_of[ref.index] for ref in output_refs)
    source = GraphSource(
        name=name or type(setting.model).__name__,
        ops=ops,
        values=values,
        inputs=tuple(setting.inputs),
        outputs=[row for row in outputs if values[row].op >= 0],
        loss=row_of[loss.index] if isinstance(loss, Value) else -1,
        parameters=setting.parameters,
        blocks=blocks,
        batch_size=_batch_size(setting),
    )
    return CapturedModel(
        graph=make_graph(source),
        ops=tuple(ops),
        values=tuple(values),
        constants=tuple(trace.constants),
        output=_moved(recording.output_refs, row_of),
        metrics=_moved(recording.metric_refs or {}, row_of),
        model=setting.model,
        parameters=setting.parameters,
        granularity=granularity,
        mode=setting.mode,
        specializations=tuple(
            Specialization(module=path, function=kind) for path, kind in trace.reads
        ),
        blocks=tuple(blocks),
        notes=tuple(_notes(setting, trace, ops)),
    )


def _grouped(ops: list[CapturedOp], wanted: Sequence[int], stores: Stores) -> list[CapturedOp]:
    """Return the ops with those merged that may not be cut apart."""
    groups = aliased_groups(ops, stores) + silent_groups(ops)
    if not groups:
        return ops
    return merge(ops, convex_groups(ops, groups), stores.values, wanted, stores.aliased)


def _is_alike(container: nn.Module) -> bool:
    """Return whether a list holds several modules of one class, which are more than a leaf."""
    children = list(container.children())
    classes = {type(child) for child in children}
    return len(children) > 1 and len(classes) == 1 and any(children[0].children())


def _block_keys(
    ops: Sequence[CapturedOp], blocks: Mapping[int, str], prefixes: Sequence[str]
) -> list[str]:
    """Return the group of each op: a prefix, its block, or the model's child that it is in."""
    keys = []
    for index, op in enumerate(ops):
        given = [p for p in prefixes if f"{op.module}.".startswith(f"{p}.")]
        child = op.scopes[1] if len(op.scopes) > 1 else ""
        keys.append(given[0] if given else blocks.get(index, child))
    return keys


def _batch_size(setting: Setting) -> int:
    if setting.example.batch_size:
        return setting.example.batch_size
    lengths = [tensor.shape[0] for tensor in setting.inputs.values() if tensor.dim()]
    return max(lengths[0], 1) if lengths else 1


def _moved(output: object, row_of: Mapping[int, int]) -> Any:  # noqa: ANN401  # the model's
    return map_leaves(
        lambda leaf: Value(row_of[leaf.index]) if isinstance(leaf, Value) else leaf, output
    )


def _notes(setting: Setting, trace: Trace, ops: Sequence[CapturedOp]) -> Iterator[str]:
    used = {name for op in ops for name in op.parameters}
    unused = [name for name in setting.parameters if name not in used]
    if unused:
        more = f" and {len(unused) - 3} more" if len(unused) > 3 else ""
        yield f"no op uses {', '.join(unused[:3])}{more}"
    for path, kind in dict.fromkeys(trace.reads):
        yield f"specialised to the example: {path or 'the model'} reads a tensor by {kind}"


def capture(
    model: nn.Module,
    example: Example,
    *,
    granularity: Granularity = Granularity.OP,
    loss: LossFunction | None = None,
    mode: CaptureMode = CaptureMode.TRAINING,
    name: str = "",
    prefixes: Sequence[str] = (),
) -> CapturedModel:
    """Return a model as a graph of ops that can be run again.

    The model is left as it was: flags, buffers and random numbers too.

    Args:
        model: The model.
        example: One microbatch. Its sizes are baked into the ops.
        granularity: Size of an op: a torch call, a leaf module, or a block.
        loss: Makes the loss of outputs and labels, where the model returns none.
        mode: The mode of the modules. A model that is in training mode already keeps its flags, so
            that frozen parts stay frozen.
        name: Name of the graph; the model's class by default.
        prefixes: Module paths to take as blocks, for the granularity ``block``.

    Raises:
        InvalidInputError: The model cannot be run on the example.
    """
    setting = make_setting(model, example, loss, mode)
    notes: list[str] = []
    for level, opaque in _levels(setting, granularity):
        try:
            with undisturbed(setting):
                recording = record(setting, opaque)
            captured = assembled(setting, recording, granularity, (name, prefixes))
            if not recording.trace.is_fake:
                with undisturbed(setting):
                    captured = compared(setting, recording, captured)
            return replace(captured, notes=(*notes, *captured.notes))
        except Exception as exc:  # noqa: BLE001  # a model's own code may raise anything
            notes.append(f"not captured by {level}: {type(exc).__name__}: {exc}")
            failure = exc
    why = "; ".join(notes)
    raise InvalidInputError(f"{type(model).__name__} cannot be captured: {why}") from failure


def capture_without_values(
    model: nn.Module,
    example: Example,
    *,
    granularity: Granularity = Granularity.OP,
    loss: LossFunction | None = None,
    mode: CaptureMode = CaptureMode.TRAINING,
    name: str = "",
) -> CapturedModel:
    """Return a model as ``capture`` does, without computing anything that depends on parameters.

    It takes next to no memory, and is not compared with the model: for models that were captured
    before, by whoever compares the two graphs.

    Raises:
        Exception: It needs values: it decides by them, or calls what does not know fake tensors.
    """
    setting = make_setting(model, example, loss, mode)
    _, opaque = next(_levels(setting, granularity))
    with without_values(setting) as fake, undisturbed(fake):
        recording = record(fake, opaque)
        captured = assembled(fake, recording, granularity, (name, ()))
    return replace(captured, parameters=setting.parameters)


def _levels(setting: Setting, granularity: Granularity) -> Iterator[tuple[str, frozenset[str]]]:
    """Yield what may be opaque, finest first, with its name."""
    leaves = frozenset(
        path for path, module in setting.modules.items() if not any(module.children())
    )
    containers = {p for p, m in setting.modules.items() if isinstance(m, CONTAINERS)}
    blocks = frozenset(
        path for path in setting.modules if path and path.rpartition(".")[0] in containers
    )
    if granularity is not Granularity.MODULE:
        yield "function", frozenset()
    yield "leaf module", leaves - {""}
    if blocks:
        yield "block", blocks
    yield "whole model", frozenset({""})
