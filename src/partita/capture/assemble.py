"""From a trace to a captured model: dead ops gone, what belongs together merged, all named."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import nn

from partita.capture.blocks import find_blocks
from partita.capture.captured import CapturedModel, Granularity, Specialization
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
from partita.capture.op import CapturedOp, storage_of
from partita.capture.record import Recording
from partita.capture.setting import CONTAINERS, Setting
from partita.capture.trace import Trace
from partita.capture.tree import Value, leaves_of, map_leaves
from partita.errors import InvalidInputError


def assembled(
    setting: Setting,
    recording: Recording,
    granularity: Granularity,
    labels: tuple[str, Sequence[str]],
) -> CapturedModel:
    """Return the captured model: dead ops gone, what belongs together merged, all named."""
    trace, (name, prefixes) = recording.trace, labels
    output_refs = [ref for _, ref in leaves_of(recording.output_refs) if isinstance(ref, Value)]
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
