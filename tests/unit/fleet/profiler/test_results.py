"""Records that survive, datasets, machine speeds, and the sensitivity that comes out."""

import json
import math
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from partita.core.codec import read_json, write_json
from partita.errors import FormatError, UnsupportedError
from partita.fleet.profiler import machine_speeds
from partita.fleet.profiler.dataset import Dataset, measure_dataset, read_into_memory
from partita.fleet.profiler.machine_speeds import (
    measure_memory,
    measure_storage,
    memory_speeds,
    storage_speed,
)
from partita.fleet.profiler.record import Record, Run, fingerprint, open_record, read_record
from partita.fleet.profiler.results import (
    SHARES,
    Fetching,
    Measured,
    epoch_s,
    make_sensitivity,
    memory_at,
    storage_needed,
)
from partita.fleet.profiler.runner import Ranks
from partita.fleet.profiler.sweep import CurvePoint, PointOrigin
from partita.fleet.report import SpeedMeter, report_speed

RUN = Run(
    cpus=2.0,
    workers=2,
    iterations=20,
    iteration_s=0.5,
    source="told",
    wall_s=11.0,
    peak_bytes=4 * 10**9,
)
CURVE = (
    CurvePoint(1.0, 32.0, PointOrigin.LINEAR),
    CurvePoint(2.0, 64.0, PointOrigin.MEASURED),
)
RECORD = Record(
    fingerprint="x",
    runs=(RUN,),
    storage_bytes_per_s=1e8,
    memory_cpus=(1.0, 2.0),
    memory_bytes_per_s=(2.0**33, 2.0**34),
)


def test_a_record_is_found_again_and_another_request_is_numbered(tmp_path):
    first, file = open_record(tmp_path, "job", "mark", again=False)
    file.update(runs=(RUN,), spellings={"batch": "-b"})
    again, same = open_record(tmp_path, "job", "mark", again=False)
    assert again == first == tmp_path / "job"
    assert same.record == read_record(first)
    assert same.record.runs == (RUN,)
    other, fresh = open_record(tmp_path, "job", "other", again=False)
    assert other == tmp_path / "job-2"
    assert not fresh.record.runs


def test_measuring_again_begins_anew_in_the_same_place(tmp_path):
    _, file = open_record(tmp_path, "job", "mark", again=False)
    file.update(runs=(RUN,))
    directory, fresh = open_record(tmp_path, "job", "mark", again=True)
    assert directory == tmp_path / "job"
    assert not fresh.record.runs


def test_a_record_that_is_broken_names_its_file(tmp_path):
    (tmp_path / "runs.json").write_text("{")
    with pytest.raises(FormatError, match=r"runs\.json:1:.*JSON"):
        read_record(tmp_path)


def test_the_fingerprint_knows_the_text_of_the_script(tmp_path):
    script = tmp_path / "a.py"
    script.write_text("1")
    first = fingerprint(script, ["a"])
    assert fingerprint(script, ["b"]) != first
    script.write_text("2")
    assert fingerprint(script, ["a"]) != first


def test_a_dataset_is_its_training_part(tmp_path):
    for folder, size in (("train/a", 10), ("train/b", 20), ("val", 40)):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "x").write_bytes(b"0" * size)
    assert measure_dataset(tmp_path) == Dataset(30, 2)
    assert measure_dataset(tmp_path / "val") == Dataset(40, 1)
    assert measure_dataset(tmp_path / "val" / "x") == Dataset(40, 1)
    assert measure_dataset(tmp_path / "none") is None
    assert read_into_memory(tmp_path, limit_s=60) == 30


def test_storage_is_measured_without_leaving_a_file(tmp_path):
    speed = measure_storage(tmp_path, file_bytes=2**22)
    assert speed.bytes_per_s > 0
    assert speed.way in ("O_DIRECT", "cache dropped")
    assert not list(tmp_path.iterdir())


def test_storage_that_cannot_be_written_says_what_to_do(tmp_path):
    with pytest.raises(UnsupportedError, match="--str-bw 500MB/s gives a figure"):
        measure_storage(tmp_path / "none")


def test_memory_is_measured_with_several_threads():
    assert measure_memory(2, array_bytes=2**20) > 0


def test_a_bandwidth_is_told_read_or_measured_and_kept(tmp_path, monkeypatch):
    assert storage_speed(tmp_path, "500MB/s").bytes_per_s == 5e8
    kept = tmp_path / "STR_BW"
    kept.write_text("250\n")
    assert storage_speed(tmp_path, str(kept)).bytes_per_s == 250 * 2**20
    monkeypatch.setattr(
        machine_speeds, "measure_storage", lambda folder: measure_storage(folder, file_bytes=2**20)
    )
    new = tmp_path / "NEW"
    measured = storage_speed(tmp_path, str(new)).bytes_per_s
    assert float(new.read_text()) == pytest.approx(measured / 2**20, rel=0.01, abs=0.1)


@pytest.mark.parametrize("text", ["fast", "0", ""])
def test_a_kept_bandwidth_that_is_no_number_is_refused(tmp_path, text):
    kept = tmp_path / "STR_BW"
    kept.write_text(text)
    with pytest.raises(FormatError, match="STR_BW"):
        storage_speed(tmp_path, str(kept))


def test_memory_is_measured_where_no_file_keeps_it(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(
        machine_speeds, "measure_memory", lambda threads: asked.append(threads) or 2.0**34
    )
    (tmp_path / "MEM_1").write_text("10")
    assert memory_speeds(2.0, str(tmp_path / "MEM")) == {1.0: 10 * 2.0**30, 2.0: 2.0**34}
    assert asked == [2]
    assert float((tmp_path / "MEM_2").read_text()) == 16


def test_a_sensitivity_has_a_row_for_each_cpu_count_and_share():
    measured = Measured(
        name="job",
        ranks=Ranks(per_node=2),
        batch_size=16,
        curve=CURVE,
        dataset=Dataset(8 * 10**9, 3200),
        record=RECORD,
    )
    sensitivity = make_sensitivity(measured)
    assert len(sensitivity.cpus) == 22
    assert sensitivity.iteration_s == pytest.approx(0.5)
    assert sensitivity.working_bytes == 2e9
    assert set(sensitivity.cpus.tolist()) == {0.5, 1.0}
    assert sensitivity.memory_bytes.min() == 2e9
    assert sensitivity.memory_bytes.max() == 6e9
    assert np.flatnonzero(sensitivity.measured).tolist() == [21]
    # Nothing cached: 8 GB at 0.1 GB/s take 80 s, an epoch from memory 50 s or 100 s.
    assert sensitivity.speed[11] == pytest.approx(50 / 80)
    assert sensitivity.speed[0] == pytest.approx(0.5)
    assert sensitivity.storage_bytes_per_s[[0, 11, 21]].tolist() == pytest.approx([80e6, 100e6, 0])
    assert read_json(write_json(sensitivity)) == sensitivity


def test_without_a_dataset_there_is_one_amount_of_memory():
    measured = Measured(
        name="job", ranks=Ranks(), batch_size=16, curve=CURVE, dataset=None, record=RECORD
    )
    sensitivity = make_sensitivity(measured)
    assert sensitivity.memory_bytes.tolist() == [4e9, 4e9]
    assert np.isnan(sensitivity.storage_bytes_per_s).all()
    assert math.isnan(sensitivity.dataset_bytes)


def test_a_speed_is_reported_by_rank_0_under_the_profiler_alone(tmp_path, monkeypatch):
    target = tmp_path / "speed.json"
    report_speed(1.0, iterations=1)
    monkeypatch.setenv("PARTITA_SPEED", str(target))
    monkeypatch.setenv("RANK", "1")
    report_speed(1.0, iterations=1)
    assert not target.exists()
    monkeypatch.setenv("RANK", "0")
    report_speed(1.5, iterations=3)
    assert target.read_text() == '{"iteration_s": 1.5, "iterations": 3}'


def test_a_meter_leaves_the_warmup_out(monkeypatch, tmp_path):
    monkeypatch.setenv("PARTITA_SPEED", str(tmp_path / "speed.json"))
    times = iter([0.0, 10.0, 11.0, 13.0, 15.0])
    monkeypatch.setattr("time.perf_counter", lambda: next(times))
    meter = SpeedMeter(warmup=2, every=1)
    for _ in range(4):
        meter.step()
    assert meter.iterations == 2
    assert meter.iteration_s == 2.0


GIB, MIB = 2.0**30, 2.0**20
PUBLISHED = Fetching(
    dataset_bytes=555 * GIB, storage_bytes_per_s=500 * MIB, memory_bytes_per_s=10 * GIB
)


def test_the_profile_of_the_released_profiler_is_reproduced(shared_data):
    """555 GB, storage of 500 MB/s and memory of 10 GiB/s at any CPU count."""
    path = shared_data / "synergy" / "profiler_sample" / "profile_fake_res18_1gpu_24cpu.json"
    iteration, epochs, storage = json.loads(path.read_text())
    for cpus, seconds in iteration.items():
        cached = seconds * 3690
        for percent, expected in epochs[cpus].items():
            share = int(percent) / 100
            assert epoch_s(PUBLISHED, share, cached) == pytest.approx(expected, rel=1e-12)
            needed = storage_needed(PUBLISHED, share, cached) / MIB
            assert needed == pytest.approx(storage[cpus][percent], rel=1e-12)


def test_an_epoch_that_waits_for_storage_needs_all_of_it():
    assert epoch_s(PUBLISHED, 0.0, 811.8) == pytest.approx(1136.64)
    assert storage_needed(PUBLISHED, 0.0, 811.8) == PUBLISHED.storage_bytes_per_s


def test_cached_data_need_no_storage_and_cost_no_more_than_was_measured():
    slow = Fetching(dataset_bytes=1e9, storage_bytes_per_s=1e6, memory_bytes_per_s=1.0)
    assert epoch_s(slow, 1.0, 5.0) == 5.0
    assert storage_needed(slow, 1.0, 5.0) == 0.0


@given(
    size=st.floats(1e3, 1e13),
    storage=st.floats(1e5, 1e10),
    factor=st.floats(1, 1e3),
    cached=st.floats(0.1, 1e6),
)
def test_storage_as_needed_keeps_the_epoch_at_its_length(size, storage, factor, cached):
    """The oracle is the model itself with the storage that it asks for."""
    fetching = Fetching(
        dataset_bytes=size, storage_bytes_per_s=storage, memory_bytes_per_s=storage * factor
    )
    lengths = [epoch_s(fetching, share, cached) for share in SHARES]
    for longer, shorter in pairwise(lengths):
        assert shorter <= longer * (1 + 1e-9)
    for share, length in zip(SHARES[:-1], lengths[:-1], strict=True):
        needed = storage_needed(fetching, share, cached)
        assert needed <= storage * (1 + 1e-9)
        again = Fetching(
            dataset_bytes=size, storage_bytes_per_s=needed, memory_bytes_per_s=storage * factor
        )
        assert epoch_s(again, share, cached) == pytest.approx(length, rel=1e-6)


def test_memory_follows_lines_between_measured_counts():
    assert [memory_at(n, [1, 2, 4], [10, 16, 20]) for n in (0.5, 1, 1.5, 3, 8)] == [
        5, 10, 13, 18, 20
    ]  # fmt: skip
    assert memory_at(1, [], []) == float("inf")
