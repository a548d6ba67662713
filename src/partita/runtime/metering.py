"""Observers of every instruction that computes, such as a client of an energy server.

The seam between the loop of a device and energy: the loop says when an instruction has all that it
needs and begins, and when it has ended.
"""

import time
from collections.abc import Callable
from typing import Protocol

from partita.core.program import Kind
from partita.energy.client.client import EnergyClient
from partita.energy.client.counter import EnergyUse
from partita.energy.devices.protocol import WorkingDevice
from partita.energy.frontier.clock_plan import NAMES


class Meter(Protocol):
    """Is called with what a device does."""

    def begin_step(self) -> None:
        """A step begins."""
        ...

    def begin(self, kind: Kind) -> None:
        """An instruction that computes has all that it needs, and begins."""
        ...

    def end(self, kind: Kind) -> None:
        """It has ended."""
        ...

    def end_step(self) -> None:
        """The step has ended."""
        ...

    def close(self) -> EnergyUse | None:
        """Return what was used; None = nobody wanted to know."""
        ...


class NoMeter:
    """Notes nothing."""

    def begin_step(self) -> None:
        """Do nothing."""

    def begin(self, kind: Kind) -> None:
        """Do nothing."""

    def end(self, kind: Kind) -> None:
        """Do nothing."""

    def end_step(self) -> None:
        """Do nothing."""

    def close(self) -> EnergyUse | None:
        """Return None."""
        return None


class EnergyMeter:
    """Passes on to a client what a device does.

    With a modelled device, what is really computed here stands for its work at the highest clock:
    the instruction is drawn out until it has lasted as long as it does at the clock that is set.
    """

    def __init__(
        self,
        client: EnergyClient,
        drawn_out: WorkingDevice | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Meter a device.

        Args:
            client: Called with each instruction.
            drawn_out: The modelled device that real compute stands for; None = it is what it is.
            clock: Tells the time of that device, in seconds.
        """
        self._client, self._drawn_out, self._clock = client, drawn_out, clock
        self._began_s = 0.0

    def begin_step(self) -> None:
        """Begin a step: a new plan counts from here on."""
        self._client.on_step_begin()

    def begin(self, kind: Kind) -> None:
        """Begin an instruction at its clock."""
        self._client.on_instruction_begin(NAMES[kind])
        self._began_s = self._clock()

    def end(self, kind: Kind) -> None:
        """End an instruction, when it has lasted long enough."""
        if self._drawn_out is not None:
            took_s = self._clock() - self._began_s
            end_s = self._began_s + self._drawn_out.begin_work(took_s, kind, self._began_s)
            while (left_s := end_s - self._clock()) > 0:
                time.sleep(left_s)
        self._client.on_instruction_end(NAMES[kind])

    def end_step(self) -> None:
        """End a step."""
        self._client.on_step_end()

    def close(self) -> EnergyUse | None:
        """Stop measuring, and return what was used."""
        return self._client.close()
