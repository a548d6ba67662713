"""Synergy's profile.json, read and written."""

import json
import math

import numpy as np
import pytest

from partita.core.fleet import Sensitivity
from partita.errors import FormatError, InvalidInputError
from partita.formats.synergy import read_synergy_profile, write_synergy_profile

SMALL = [
    {"2": 0.5, "1.0": 1.0},
    {"2": {"100": 50.0, "0": 80.0}, "1.0": {"100": 100.0, "0": 100.0}},
    {"2": {"100": 0, "0": 100.0}, "1.0": {"100": 0, "0": 80.0}},
]


def flat(profile):
    """Return all figures by CPUs and percent as numbers."""
    iteration, epochs, storage = profile
    return (
        {float(cpus): value for cpus, value in iteration.items()},
        *(
            {(float(c), float(m)): value for c, row in part.items() for m, value in row.items()}
            for part in (epochs, storage)
        ),
    )


def test_a_profile_says_speed_by_cpus_and_memory_a_gpu():
    found = read_synergy_profile(json.dumps(SMALL), name="job", gpus=2, batch_size=16)
    assert found.cpus.tolist() == [0.5, 0.5, 1, 1]
    assert found.dataset_bytes == pytest.approx(8000 * 2**20)
    assert found.memory_bytes.tolist() == pytest.approx([0, found.dataset_bytes / 2] * 2)
    assert found.speed.tolist() == pytest.approx([0.5, 0.5, 0.625, 1])
    assert found.storage_bytes_per_s.tolist() == pytest.approx([80 * 2**20, 0, 100 * 2**20, 0])
    assert found.dataset_samples == 3200


@pytest.mark.parametrize("settings", [{}, {"gpus": 2, "batch_size": 16}])
def test_what_is_read_is_written_again(settings):
    found = read_synergy_profile(json.dumps(SMALL), name="job", **settings)
    again = json.loads(write_synergy_profile(found))
    for ours, theirs in zip(flat(again), flat(SMALL), strict=True):
        assert ours == pytest.approx(theirs, rel=1e-12)


def test_the_released_profilers_own_output_comes_back(shared_data):
    path = shared_data / "synergy" / "profiler_sample" / "profile_fake_res18_1gpu_24cpu.json"
    found = read_synergy_profile(path.read_text(), name="res18", batch_size=512)
    assert found.dataset_bytes == pytest.approx(555 * 2**30)
    assert found.iteration_s == 0.22
    again = json.loads(write_synergy_profile(found))
    for ours, theirs in zip(flat(again), flat(json.loads(path.read_text())), strict=True):
        assert ours == pytest.approx(theirs, rel=1e-12)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda p: p.pop(), "a list of three objects"),
        (lambda p: p[0].clear(), "seconds of an iteration, is empty"),
        (lambda p: p[0].update({"many": 1}), "key 'many'; expected a number"),
        (lambda p: p[0].update({"2.0": 1}), "2 stands twice"),
        (lambda p: p[0].update({"2": 0}), r"\[0\].2 is 0; expected a number"),
        (lambda p: p[1].pop("2"), "other CPU counts"),
        (lambda p: p[1].update({"2": 3}), r"\[1\].2 is 3; expected an object"),
        (lambda p: p[1]["2"].pop("0"), "the same percents twice"),
        (lambda p: p[2]["2"].update({"0": "x"}), r"\[2\].2.0 is 'x'"),
    ],
)
def test_what_is_no_profile_is_refused(change, message):
    profile = json.loads(json.dumps(SMALL))
    change(profile)
    with pytest.raises(FormatError, match=message):
        read_synergy_profile(json.dumps(profile), name="job")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({}, "does not know the size of its dataset"),
        ({"dataset_bytes": 1e9, "dataset_samples": 9, "gpus": np.array([1, 2])}, "several kinds"),
        ({"dataset_bytes": 1e9, "dataset_samples": 9}, "lacks points with all data cached"),
    ],
)
def test_a_sensitivity_that_has_no_percents_is_refused(changes, message):
    sensitivity = Sensitivity(
        **{
            "name": "job",
            "iteration_s": 1.0,
            "cpus": np.array([1.0, 2.0]),
            "memory_bytes": np.array([0.5e9, math.pi * 1e9]),
            "speed": np.array([1.0, 1.0]),
            **changes,
        }
    )
    with pytest.raises(InvalidInputError, match=message):
        write_synergy_profile(sensitivity)
