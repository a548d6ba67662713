"""Which devices there are, and how a text names one."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from partita.core.energy import EnergyOrigin
from partita.energy.devices.gpus import NvmlDevice, ZeusDevice
from partita.energy.devices.modelled import ModelledDevice, SlowSpell
from partita.energy.devices.protocol import PowerDevice
from partita.energy.devices.rapl import RaplDevice
from partita.energy.devices.replay import ReplayDevice
from partita.energy.frontier.modelled import curve_of
from partita.errors import InvalidInputError, UnsupportedError


class NullDevice:
    """A device that can neither be set nor read: its energy is unknown. See ``PowerDevice``."""

    type = ""
    origin = EnergyOrigin.MEASURED
    resolution_s = 0.0
    at_once = True
    blocking_w: float | None = None
    clocks_mhz: tuple[int, ...] = ()

    def __init__(self, index: int = 0) -> None:
        self.name = f"device{index}"

    def set_clock(self, mhz: int) -> None:
        """Do nothing."""

    def reset(self) -> None:
        """Do nothing."""

    def energy_j(self) -> float | None:
        """Return None: it is not known."""
        return None


_AUTO = ("nvml", "zeus", "rapl")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelledOptions:
    """What may follow the type of a modelled device: ``modelled:a100,noise=0.01,seed=1``.

    Attributes:
        noise: Relative standard deviation of times and powers.
        seed: Of the noise.
        throttle: The highest clock in MHz that it keeps under load; 0 = as its power limit allows.
        step: The least distance in MHz between two clocks that it offers; 0 = all.
        slow: When it is slower, such as ``1.5@step20:rank1``: a way to rehearse stragglers.
    """

    noise: float = 0.0
    seed: int = 0
    throttle: float = 0.0
    step: float = 0.0
    slow: str = ""


_READ: Mapping[str, Callable[[str], float | int | str]] = {
    "noise": float,
    "seed": int,
    "throttle": float,
    "step": float,
    "slow": str,
}


def _open_modelled(text: str, index: int, rank: int) -> PowerDevice:
    from partita.catalogue.catalogue import load_catalogue  # noqa: PLC0415 (only where modelled)

    del index
    name, *parts = text.split(",")
    if not name:
        raise InvalidInputError("a modelled device needs a type of the catalogue: modelled:a100")
    found, options = load_catalogue().device_type(name), _options(parts)
    curve = curve_of(
        found,
        what=f"power device 'modelled:{name}'",
        throttle_mhz=options.throttle,
        step_mhz=options.step,
    )
    return ModelledDevice(
        curve,
        type_name=found.name,
        rank=rank,
        noise=options.noise,
        seed=options.seed,
        slow=SlowSpell.parse(options.slow) if options.slow else None,
    )


def _options(parts: list[str]) -> ModelledOptions:
    values: dict[str, Any] = {}
    for part in parts:
        key, _, text = part.partition("=")
        if key not in _READ or key in values:
            why = "stands twice" if key in values else "is not known"
            raise InvalidInputError(
                f"option {key!r} of a modelled device {why}; there are {', '.join(_READ)}"
            )
        try:
            values[key] = _READ[key](text)
        except ValueError:
            raise InvalidInputError(
                f"option {key} of a modelled device is {text!r}; expected a number"
            ) from None
    return ModelledOptions(**values)


def _without_text(
    name: str, make: Callable[[int], PowerDevice]
) -> Callable[[str, int, int], PowerDevice]:
    def opened(text: str, index: int, rank: int) -> PowerDevice:
        del rank
        if text:
            raise InvalidInputError(f"power device {name!r} takes nothing after it; got {text!r}")
        return make(index)

    return opened


def _open_replay(text: str, index: int, rank: int) -> PowerDevice:
    del index
    if not text:
        raise InvalidInputError("a replayed device needs its log: replay:FILE or replay:DIRECTORY")
    return ReplayDevice(Path(text), rank)


def _open_auto(index: int) -> PowerDevice:
    """Return the first real device that there is; one that cannot be read if there is none."""
    for name in _AUTO:
        try:
            return DEVICES[name]("", index, index)
        except UnsupportedError:
            continue
    return NullDevice(index)


DEVICES: Mapping[str, Callable[[str, int, int], PowerDevice]] = {
    "nvml": _without_text("nvml", NvmlDevice),
    "zeus": _without_text("zeus", ZeusDevice),
    "rapl": _without_text("rapl", RaplDevice),
    "modelled": _open_modelled,
    "replay": _open_replay,
    "none": _without_text("none", NullDevice),
    "auto": _without_text("auto", _open_auto),
}
"""Devices by name; each takes the text after the colon, the index on this host, and the rank."""


def open_device(spec: str, index: int = 0, *, rank: int | None = None) -> PowerDevice:
    """Return the device that a text names.

    Args:
        spec: Such as ``nvml``, ``zeus``, ``rapl``, ``modelled:a100``,
            ``modelled:a100,noise=0.01,seed=1,throttle=1350``, ``replay:FILE``, ``none``, ``auto``.
        index: Which device of this host.
        rank: The rank that it belongs to; the index if not given.

    Raises:
        InvalidInputError: The text names no device.
        UnsupportedError: It is not here, or may not be read.
    """
    name, _, text = spec.partition(":")
    if name not in DEVICES:
        raise InvalidInputError(
            f"power device {spec!r} is not known; there are {', '.join(DEVICES)}"
        )
    return DEVICES[name](text, index, index if rank is None else rank)
