"""One traced run of a model."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from partita.capture.setting import Setting, unchanged_inputs
from partita.capture.trace import ChangedConstantError, Trace
from partita.capture.tree import Ref


@dataclass(slots=True)
class Recording:
    """What a run of the model gave.

    Attributes:
        trace: The trace.
        output: What the model returned.
        loss: The loss.
        output_refs: The output with references in the place of tensors.
        loss_ref: What stands for the loss.
    """

    trace: Trace
    output: Any
    loss: Tensor | None
    output_refs: Any
    loss_ref: Ref | None


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
            loss = _loss_of(output)
            if loss is None and setting.loss is not None:
                with trace.scope("loss"):
                    loss = setting.loss(output, setting.example.labels)
        _record_assignments(setting, trace, objects)
        trace.finish()
        return Recording(
            trace=trace,
            output=output,
            loss=loss,
            output_refs=trace.refs(output),
            loss_ref=None if loss is None else trace.ref(loss),
        )


def _record_assignments(setting: Setting, trace: Trace, objects: Mapping[str, Tensor]) -> None:
    """Record that modules have put new tensors in the place of buffers."""
    now = dict(setting.model.named_buffers())
    for name, before in objects.items():
        after = now.get(name)
        if after is not None and after is not before and after.shape == before.shape:
            trace.assign_buffer(name, after)


def _loss_of(output: object) -> Tensor | None:
    """Return the loss among what a model returns: called so, or its only tensor, one number."""
    loss: object = getattr(output, "loss", None)
    if isinstance(output, Mapping):
        loss = output.get("loss")
    if loss is None and isinstance(output, Tensor) and output.requires_grad:
        loss = output
    if isinstance(loss, Tensor) and loss.numel() == 1 and loss.is_floating_point():
        return loss
    return None
