"""The public profiles and frontiers of ``data/perseus`` that the groups of ``energy.py`` use."""

import csv
import gzip
from pathlib import Path
from typing import NamedTuple

from partita.core.energy import EnergyProfile
from partita.formats.perseus import read_energy_csv

A100_W, A40_W = 83.64, 70.38
"""Power of a waiting device, as measured by Perseus's authors."""


class Published(NamedTuple):
    """One of the twelve emulated cases.

    Attributes:
        name: Model, device and microbatches.
        profile: The stages.
        microbatches: Microbatches of a step.
        energy_j: Energy of the published frontier's fastest point, as claimed.
        saved: What that saves against all clocks at their highest, as stated in percent.
    """

    name: str
    profile: EnergyProfile
    microbatches: int
    energy_j: float
    saved: float


STATED = {
    ("gpt3-175b", "a100_sxm"): {12: 15.34, 24: 14.31, 48: 13.72, 96: 13.42},
    ("gpt3-175b", "a40"): {12: 11.82, 24: 10.23, 48: 9.35, 96: 8.89},
    ("bloom", "a100_sxm"): {12: 10.69, 24: 7.25, 48: 5.40, 96: 4.45},
}


def synthetic(data: Path, stages: int) -> EnergyProfile:
    """Return the synthetic profile of 4 or 8 stages."""
    return _profile(data / "perseus" / f"synthetic_a100_{stages}stage.csv", A100_W)


def stage_profile(data: Path, model: str, device: str) -> EnergyProfile:
    """Return a published profile of eight stages."""
    power = A40_W if device == "a40" else A100_W
    return _profile(data / "perseus" / "stage_profile" / f"{model}+{device}_bf16.csv", power)


def published(data: Path) -> list[Published]:
    """Return the twelve cases."""
    cases = []
    for (model, device), stated in STATED.items():
        profile = stage_profile(data, model, device)
        for microbatches, saved in stated.items():
            name = f"{device}_{model}_bf16_mb{microbatches}.csv.gz"
            with gzip.open(data / "perseus" / "published_frontier" / name, "rt") as file:
                rows = [(float(row["time"]), float(row["energy"])) for row in csv.DictReader(file)]
            label = f"{model} {device} {microbatches}"
            cases.append(Published(label, profile, microbatches, min(rows)[1], saved))
    return cases


def _profile(path: Path, blocking_w: float) -> EnergyProfile:
    return read_energy_csv(path.read_text(), name=path.stem, blocking_w={"": blocking_w})
