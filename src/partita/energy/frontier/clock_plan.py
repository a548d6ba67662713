"""Which clock each device sets before each instruction of a step."""

from collections.abc import Sequence
from dataclasses import dataclass

from partita.core.columns import Array
from partita.core.program import Kind, Program
from partita.errors import InvalidInputError

NAMES = {
    Kind.LOAD: "load",
    Kind.FORWARD: "forward",
    Kind.RECOMPUTE: "recompute",
    Kind.BACKWARD: "backward",
    Kind.BACKWARD_INPUT: "backward_input",
    Kind.BACKWARD_WEIGHT: "backward_weight",
    Kind.UPDATE: "step",
}
"""What the instructions are called where frameworks and servers talk about them."""

Entry = tuple[str, int]
"""The name of an instruction and its clock in MHz; 0 = leave the clock alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClockPlan:
    """The clocks of one step, device by device, in the order of the instructions.

    Attributes:
        devices: Names of the devices.
        entries: For each device its instructions with their clocks.
    """

    devices: tuple[str, ...]
    entries: tuple[tuple[Entry, ...], ...]

    def __post_init__(self) -> None:
        if len(self.devices) != len(self.entries):
            raise InvalidInputError(
                f"a clock plan has {len(self.entries)} lists for {len(self.devices)} devices"
            )

    def of(self, device: str) -> tuple[Entry, ...]:
        """Return the entries of a device.

        Raises:
            InvalidInputError: It is not in the plan.
        """
        if device not in self.devices:
            raise InvalidInputError(
                f"device {device!r} is not in the clock plan; it has {', '.join(self.devices[:8])}"
            )
        return self.entries[self.devices.index(device)]


def clock_plan(program: Program, clocks: Array, kinds: Sequence[Kind] = tuple(NAMES)) -> ClockPlan:
    """Return the clocks of a Program's compute instructions.

    Args:
        program: The Program.
        clocks: The clock of each row; 0 = none is set.
        kinds: Kinds of instructions that the plan lists.
    """
    wanted = {int(kind) for kind in kinds}
    entries = []
    for device in range(len(program.devices)):
        rows = range(int(program.ptr[device]), int(program.ptr[device + 1]))
        entries.append(
            tuple(
                (NAMES[Kind(int(program.kind[row]))], round(float(clocks[row])))
                for row in rows
                if int(program.kind[row]) in wanted
            )
        )
    return ClockPlan(devices=program.devices, entries=tuple(entries))
