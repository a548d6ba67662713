"""The pipeline schedules: one row each, with everything that the package knows of one.

A new schedule is a function in ``program/schedules.py`` and a row here; of another package, a
``ScheduleRow`` that an entry point of the group ``partita.schedules`` names. Whoever has to know
what a schedule does (lowering, checker, simulator, memory, energy, bounds) asks its row.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from partita.errors import UnsupportedError
from partita.plugins import OpenNames, PluginGroup, guarded, load_target

PLUGINS = PluginGroup(group="partita.schedules", noun="schedule")


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleRow:
    """What is known of a schedule.

    Attributes:
        order: Function from a ``program.schedules.Pipeline`` to keys for each kind of compute
            instruction, or where it is: ``"package.module:function"``.
        infers: Whether it is one of inference, without a backward pass; else one of training.
        stashes_weights: Whether backward uses the weights that forward saw while updates go on, so
            that steps overlap instead of flushing.
        splits_backward: Whether backward has an input part and a later weight part.
        delays_weights: Whether the weight part waits, which keeps more microbatches in flight.
        recomputes_early: Whether recomputing is an instruction of its own, before the gradient is
            there; elsewhere it is part of backward.
        interleaves: Whether it gains from several stages on each device.
        fills_first: Whether all forwards come before any backward, so that every microbatch is in
            flight at once.
    """

    order: str | Callable[..., Any]
    infers: bool = False
    stashes_weights: bool = False
    splits_backward: bool = False
    delays_weights: bool = False
    recomputes_early: bool = False
    interleaves: bool = False
    fills_first: bool = False

    @property
    def flushes(self) -> bool:
        """Whether a step begins and ends idle."""
        return not self.stashes_weights

    def order_function(self) -> Callable[..., Any]:
        """Return the function that gives the keys."""
        if isinstance(self.order, str):
            found: Callable[..., Any] = load_target(self.order)
            return found
        return self.order


class Schedule(OpenNames):
    """The order in which a pipeline runs its microbatches."""

    GPIPE = "gpipe"
    ONE_F_ONE_B = "1f1b"
    INTERLEAVED = "interleaved-1f1b"
    ZERO_BUBBLE = "zero-bubble"
    SPLIT = "split-1f1b"
    EARLY_RECOMPUTE = "early-recompute-1f1b"
    PIPEDREAM = "pipedream"
    INFERENCE = "inference"

    @classmethod
    def plugins(cls) -> PluginGroup:
        """Return the group of entry points that adds schedules."""
        return PLUGINS

    @property
    def row(self) -> ScheduleRow:
        """What is known of it.

        Raises:
            UnsupportedError: It is a plug-in that cannot be loaded, or whose entry is no row.
        """
        known = SCHEDULES.get(self)
        return _plugged(self.value) if known is None else known


SCHEDULES: Mapping[Schedule, ScheduleRow] = {
    Schedule.GPIPE: ScheduleRow(order="partita.program.schedules:order_gpipe", fills_first=True),
    Schedule.ONE_F_ONE_B: ScheduleRow(order="partita.program.schedules:order_1f1b"),
    Schedule.INTERLEAVED: ScheduleRow(
        order="partita.program.schedules:order_interleaved", interleaves=True
    ),
    Schedule.ZERO_BUBBLE: ScheduleRow(
        order="partita.program.schedules:order_zero_bubble",
        splits_backward=True,
        delays_weights=True,
    ),
    Schedule.SPLIT: ScheduleRow(
        order="partita.program.schedules:order_split", splits_backward=True
    ),
    Schedule.EARLY_RECOMPUTE: ScheduleRow(
        order="partita.program.schedules:order_early_recompute", recomputes_early=True
    ),
    Schedule.PIPEDREAM: ScheduleRow(
        order="partita.program.schedules:order_1f1b", stashes_weights=True
    ),
    Schedule.INFERENCE: ScheduleRow(order="partita.program.schedules:order_inference", infers=True),
}


DEFAULT_SCHEDULE = Schedule.ONE_F_ONE_B
"""The schedule of a pipeline in training where nobody says one."""


def schedule_names() -> list[str]:
    """Return the names of the schedules of this package."""
    return [schedule.value for schedule in SCHEDULES]


@cache
def _plugged(name: str) -> ScheduleRow:
    row = PLUGINS.find(name)
    if not isinstance(row, ScheduleRow):
        raise UnsupportedError(
            f"schedule {name!r} is a plug-in whose entry point names no ScheduleRow; got {row!r}"
        )
    return replace(row, order=guarded("schedule", name, row.order_function()))
