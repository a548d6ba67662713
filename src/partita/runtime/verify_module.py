"""A run compared with the user's untouched module: same weights, microbatches and optimizer.

``verify`` compares with the captured graph, and says nothing about what was captured. Here the
module itself runs, without a graph, stages or a Program. A run seeds random numbers op by op; so
that dropout drops the same elements, the module's k-th draw is seeded as the captured graph's.

Of a training only the first step is compared: sums in another order differ by rounding, which a
step with batch norms or Adam multiplies by a hundred. The steps after it are the captured graph's.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call
from torch.overrides import TorchFunctionMode

from partita.capture.captured import CapturedModel
from partita.capture.setting import Example
from partita.runtime.baselines.replica import (
    WholeModel,
    Wrapping,
    prepared_model,
    verify_whole,
)
from partita.runtime.baselines.torch_ways import Subject
from partita.runtime.numerics import Numerics, numerics_of
from partita.runtime.rank import RankOptions
from partita.runtime.results import RunResult
from partita.runtime.stage_code import Call, op_seed
from partita.runtime.verify import Verdict


class OtherDrawsError(Exception):
    """The module draws random numbers another number of times than its graph."""


def verify_module(subject: Subject, found: RunResult, options: RankOptions) -> Verdict | str:
    """Run the untouched module on the same microbatches and compare.

    Args:
        subject: The plan's task, the module, the first weights and the data.
        found: What the run gave.
        options: How it was run.

    Returns:
        The verdict, or why there cannot be one.
    """
    if subject.task.plan.stashes_weights:
        return "by weight stashing, weights change within a step, in one process after it"
    whole = prepared_model(subject, own=True)
    ops = drawing_ops(whole.captured)
    if ops is None:
        return "ops of its graph draw random numbers in another order than the module"
    training = subject.task.is_training
    if training:
        found = replace(found, steps=found.steps[:1])

    def drawing(call: Call) -> "DrawsByOp":
        return DrawsByOp(ops if training else (), lambda op: op_seed(call, op))

    try:
        call = under_policy(whole, numerics_of(options.recipe.precision))
        return verify_whole(subject, whole, Wrapping(call=call, drawing=drawing), found, options)
    except OtherDrawsError as exc:
        return str(exc)


def under_policy(
    whole: WholeModel, numerics: Numerics
) -> Callable[[Example], Tensor | None]:  # fmt: skip
    """Return what calls a module as a precision policy says: autocast, and rounded weights."""
    if numerics.compute is None:
        return whole
    device = next((value.device.type for value in whole.parameters()), "cpu")

    def call(example: Example) -> Tensor | None:
        with numerics.autocast(device):
            if numerics.weights is None:
                found = whole(example)
            else:
                # Rounded and widened again; gradients are rounded on their way back, too.
                rounded = {
                    name: value.to(numerics.weights).to(value.dtype)
                    for name, value in whole.named_parameters()
                    if value.is_floating_point()
                }
                found = functional_call(whole, rounded, (example,))
        return found if found is None else found.float()

    return call


def drawing_ops(captured: CapturedModel) -> tuple[int, ...] | None:
    """Return the op of each draw, in the order of the model's calls.

    An op of several calls is seeded once, before the first of them: None where calls of other ops
    come in between.
    """
    draws = sorted(
        (leaf.seed, index)  # the seed of capturing counts the calls
        for index, op in enumerate(captured.ops)
        for leaf in op.leaves
        if leaf.draws
    )
    ops = tuple(index for _, index in draws)
    begins = [op for place, op in enumerate(ops) if place == 0 or ops[place - 1] != op]
    return ops if len(begins) == len(set(begins)) else None


class DrawsByOp(TorchFunctionMode):
    """Seeds the calls that draw random numbers as the ops of the captured graph are.

    The generator is set for the next draw ahead of it, as it is not known before a call whether it
    will draw; nothing else draws in between.
    """

    def __init__(self, ops: Sequence[int], seed_of: Callable[[int], int]) -> None:
        super().__init__()
        self._ops, self._seed_of = ops, seed_of
        self._drawn = 0

    def __enter__(self) -> "DrawsByOp":
        self._prepare_next()
        super().__enter__()  # type: ignore[no-untyped-call]  # torch has no types for it
        return self

    def __exit__(self, kind: Any, *rest: Any) -> None:  # noqa: ANN401  # as torch has it
        super().__exit__(kind, *rest)  # type: ignore[no-untyped-call]  # likewise
        if kind is None and self._ops and self._drawn != len(self._ops):
            raise OtherDrawsError(
                f"the module draws random numbers {self._drawn} times in a microbatch, its graph "
                f"{len(self._ops)} times"
            )

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,  # noqa: ANN401  # as torch has it
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401  # whatever the function returns
        """Call a function, and prepare the next draw if it has drawn."""
        del types
        generator = torch.default_generator
        before = generator.get_state()
        result = func(*args, **(kwargs or {}))
        if self._ops and not torch.equal(before, generator.get_state()):
            self._drawn += 1
            self._prepare_next()
        return result

    def _prepare_next(self) -> None:
        place = self._drawn
        if place < len(self._ops) and (place == 0 or self._ops[place] != self._ops[place - 1]):
            torch.default_generator.manual_seed(self._seed_of(self._ops[place]))
