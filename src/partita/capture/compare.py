"""Runs what was captured once more and compares it with the model, in training and in eval."""

from collections.abc import Callable, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from partita.capture.captured import CapturedModel
from partita.capture.modes import eval_form
from partita.capture.op import CapturedOp, Replay, storage_of
from partita.capture.record import Recording
from partita.capture.setting import Setting, unchanged_inputs
from partita.capture.tree import Ref, Value, leaves_of, tensors_of

_RELATIVE, _ABSOLUTE = 1e-4, 1e-5


class ReplayDiffersError(Exception):
    """What was recorded does not give what the model gives."""


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
