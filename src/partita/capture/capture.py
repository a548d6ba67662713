"""Turns any ``nn.Module`` into a graph that can be executed piece by piece.

The model is run once on an example, with a function-level trace (``trace``). What was recorded is
run again and compared with the model. Where that does not succeed, modules become opaque: leaf
modules, then children of module lists, at last the whole model; the notes say so.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from torch import nn

from partita.capture.assemble import assembled
from partita.capture.captured import CapturedModel, CaptureMode, Granularity
from partita.capture.compare import compared
from partita.capture.record import record
from partita.capture.setting import (
    CONTAINERS,
    Example,
    LossFunction,
    Setting,
    make_setting,
    undisturbed,
)
from partita.errors import InvalidInputError


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
        granularity: What an op is: a torch call, a leaf module, or a block.
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
