"""The DVFS model against the published profiles that its constants were fitted to."""

from dataclasses import replace

import numpy as np
import pytest

from partita.catalogue.catalogue import load_catalogue
from partita.core.program import Kind
from partita.energy.frontier.modelled import curve_of
from partita.formats.perseus import read_energy_csv

CASES = [
    ("gpt3-175b+a100_sxm", "a100", 469.0, 0.021, 0.057),
    ("bloom+a100_sxm", "a100", 458.0, 0.021, 0.057),
    ("gpt3-175b+a40", "a40", 300.0, 0.046, 0.049),
]


@pytest.mark.parametrize(("name", "type_name", "limit_w", "time_error", "power_error"), CASES)
def test_errors_are_those_that_the_docs_state(
    shared_data, name, type_name, limit_w, time_error, power_error
) -> None:
    text = (shared_data / "perseus" / "stage_profile" / f"{name}_bf16.csv").read_text()
    profile = read_energy_csv(text, blocking_w={"": 70.0})
    curve = curve_of(replace(load_catalogue().device_type(type_name), max_w=limit_w), what=name)
    for kind in (Kind.FORWARD, Kind.BACKWARD):
        stages = [profile.rows_of(stage, int(kind), "") for stage in range(profile.num_stages)]
        clocks = profile.clock_mhz[stages[0]]
        seconds = np.array([profile.seconds[rows] for rows in stages])
        stretch = np.median(seconds / seconds[:, [int(np.argmax(clocks))]], axis=0)
        watts = np.median([profile.joules[rows] / profile.seconds[rows] for rows in stages], axis=0)
        modelled_stretch = np.array([curve.stretch(kind, float(clock)) for clock in clocks])
        modelled_w = np.array([curve.power_w(kind, float(clock)) for clock in clocks])
        assert np.abs(modelled_stretch / stretch - 1).max() < time_error
        assert np.abs(modelled_w / watts - 1).max() < power_error
