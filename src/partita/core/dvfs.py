"""Constants of the DVFS model: how time and power of a type of device depend on its clock.

``energy/frontier/modelled.py`` has the model. The defaults are those of the A100, whose published
profiles they were fitted to; the catalogue's source of ``dvfs`` says which types have constants of
their own.
"""

from dataclasses import dataclass

from partita.errors import InvalidInputError


@dataclass(frozen=True, slots=True, kw_only=True)
class Dvfs:
    """Constants of the DVFS model; clocks and voltages relative to those at the highest clock.

    Attributes:
        full_w: Power at the highest clock if nothing limited it; 0 = the power limit, so that the
            device never throttles.
        static_share: Share of the full power that does not depend on the clock.
        knee: The clock below which the voltage does not fall any more.
        floor_voltage: The voltage there.
        fixed_forward: Share of a forward pass that no clock makes faster.
        fixed_backward: Share of a backward pass that no clock makes faster.
    """

    full_w: float = 0.0
    static_share: float = 0.152
    knee: float = 0.772
    floor_voltage: float = 0.788
    fixed_forward: float = 0.131
    fixed_backward: float = 0.212

    def __post_init__(self) -> None:
        if not 0 <= self.full_w < float("inf"):
            raise InvalidInputError(f"dvfs: full_w is {self.full_w}; expected 0 or more, finite")
        for what in ("static_share", "fixed_forward", "fixed_backward"):
            if not 0 <= getattr(self, what) <= 1:
                raise InvalidInputError(f"dvfs: {what} is {getattr(self, what)}; expected 0 to 1")
        if not 0 <= self.knee < 1 or not 0 < self.floor_voltage <= 1:
            raise InvalidInputError(
                f"dvfs: knee is {self.knee} and floor_voltage {self.floor_voltage}; expected a "
                "clock below the highest, which is 1, and a voltage above 0, at most 1"
            )
