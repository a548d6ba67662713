"""Seconds of collectives."""

from dataclasses import replace

import numpy as np
import pytest

from partita.core.graph import DeviceKind
from partita.core.program import Kind
from partita.cost.links import collective_s
from partita.testing.builders import host_cluster


def test_collectives_of_cpus_are_flat_rings() -> None:
    gpus = host_cluster(2, 2, inside_bytes_per_s=1e9, between_bytes_per_s=1e6)
    cpus = replace(
        gpus, devices=tuple(replace(device, kind=DeviceKind.CPU) for device in gpus.devices)
    )
    everyone = np.arange(4)
    assert collective_s(cpus, Kind.ALL_REDUCE, everyone, 1e6) == pytest.approx(2 * 3 / 4)
    assert collective_s(gpus, Kind.ALL_REDUCE, everyone, 1e6) == pytest.approx(1 + 1e-3)
