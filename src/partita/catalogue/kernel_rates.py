"""Shares of a device's peaks that kernels reach, by type of device: the reader of ``kernels.yaml``.

The figures are fitted on measured runs (``benchmarks/estimate_accuracy.py --write``); a type
without an entry of its own has the entry ``default``.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from types import MappingProxyType

from partita.errors import InvalidInputError
from partita.yaml_nodes import (
    Table,
    parse_yaml,
    read_count,
    read_number,
    read_table,
    read_text,
)

DEFAULT = "default"
CLASSES = (
    "matmul",
    "weight_gradient",
    "batched_matmul",
    "convolution",
    "convolution_weight_gradient",
    "elementwise",
    "reduction",
)
"""The classes with a share of their own; with the launch these are eight fitted constants."""

_KEYS = ("shares", "launch_s", "processors", "median_error", "worst_error", "source")


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceKernels:
    """Rates that kernels reach on a type of device.

    Attributes:
        shares: Achievable share of the peak rate by class; of element-wise kernels and reductions
            that of the memory bandwidth.
        launch_s: Seconds of a launch.
        processors: Multiprocessors; 0 = not known, then waves of tiles do not count.
        median_error: Median error against measured stages of runs that were left out of the fit;
            NaN = never compared.
        worst_error: Largest such error.
        source: Origin of the figures.
    """

    shares: Mapping[str, float]
    launch_s: float
    processors: int = 0
    median_error: float = math.nan
    worst_error: float = math.nan
    source: str = ""

    def __post_init__(self) -> None:
        for kind in CLASSES:
            share = self.shares.get(kind, 0.0)
            if not 0 < share <= 1:
                raise InvalidInputError(f"share of {kind} is {share}; expected more than 0, to 1")


def read_kernels(text: str) -> Mapping[str, DeviceKernels]:
    """Return the entries of a text by type of device.

    Raises:
        FormatError: It is wrong; knows the line.
    """
    root = read_table(parse_yaml(text), "the table of kernels", ("devices",))
    devices = read_table(root.entries["devices"], "devices")
    return MappingProxyType(
        {
            name: _read_entry(read_table(node, f"kernels of {name}", _KEYS), f"kernels of {name}")
            for name, node in devices.entries.items()
        }
    )


def _read_entry(table: Table, what: str) -> DeviceKernels:
    found = table.entries
    shares = read_table(found["shares"], f"{what}: shares", CLASSES).entries
    errors = {
        key: read_number(found[key], f"{what}: {key}")
        for key in ("median_error", "worst_error")
        if key in found
    }
    processors = found.get("processors")
    return DeviceKernels(
        shares=MappingProxyType(
            {kind: read_number(node, f"{what}: {kind}") for kind, node in shares.items()}
        ),
        launch_s=read_number(found["launch_s"], f"{what}: launch_s"),
        processors=read_count(processors, f"{what}: processors", low=1, high=10_000)
        if processors
        else 0,
        source=read_text(found["source"], f"{what}: source"),
        **errors,
    )


@cache
def load_kernels() -> Mapping[str, DeviceKernels]:
    """Return the package's entries by type of device."""
    folder = resources.files("partita.catalogue")
    return read_kernels(folder.joinpath("kernels.yaml").read_text(encoding="utf-8"))


def kernels_on(device_type: str) -> DeviceKernels:
    """Return what kernels reach on a type of device, by its own entry or the default one."""
    table = load_kernels()
    return table.get(device_type, table[DEFAULT])
