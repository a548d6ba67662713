"""The command on times that were measured before, and what it refuses."""

import json

import pytest
from click.testing import CliRunner

from partita.cli.calibrate import command
from partita.errors import FormatError, InvalidInputError
from partita.profiler.calibrate.local import measure_local
from partita.profiler.calibrate.records import (
    SIZES_BYTES,
    DeviceRecord,
    LinkRecord,
    Measurement,
    ReduceRecord,
    write_measurement,
)
from partita.ranks.environment import RankEnvironment

TORCHRUN = {"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "here", "MASTER_PORT": "29500"}


def measured(num_hosts, per_host):
    size = num_hosts * per_host
    return Measurement(
        backend="gloo",
        devices=tuple(
            DeviceRecord(
                rank=rank,
                host=f"h{rank // per_host}",
                kind="cpu",
                memory_bytes=8e9,
                flop_per_s={"float32": 1e10},
            )
            for rank in range(size)
        ),
        links=tuple(
            LinkRecord(
                source=a,
                target=b,
                sizes_bytes=SIZES_BYTES,
                round_trips_s=tuple(
                    (1e-4 + n / 5e9,) if a // per_host == b // per_host else (1e-2 + n / 1e8,)
                    for n in SIZES_BYTES
                ),
            )
            for a in range(size)
            for b in range(size)
            if a != b
        ),
        reductions=(
            ReduceRecord(
                num_ranks=size, sizes_bytes=(64, 2**20), seconds=((0.01,), (0.01 + 2**20 / 1e8,))
            ),
        ),
    )


def run(tmp_path, monkeypatch, *arguments, num_hosts=2, per_host=2):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "s.json").write_text(write_measurement(measured(num_hosts, per_host)))
    return CliRunner().invoke(
        command, ["--from-samples", "s.json", *arguments], catch_exceptions=False
    )


def test_without_a_name_the_file_is_cluster_yaml(tmp_path, monkeypatch):
    result = run(tmp_path, monkeypatch)
    assert result.exit_code == 0
    assert "cluster written to cluster.yaml" in result.output
    assert "rack 0: 100 MB/s, 5 ms\n  host 0: 5000 MB/s, 0.05 ms\n" in result.output
    assert (tmp_path / "cluster.yaml").exists()


def test_many_pairs_are_not_all_shown(tmp_path, monkeypatch):
    result = run(tmp_path, monkeypatch, num_hosts=3, per_host=3)
    assert "8 more pairs" in result.output


def test_a_matrix_is_written_if_asked_for(tmp_path, monkeypatch):
    result = run(tmp_path, monkeypatch, "--matrix", "-o", "-")
    assert result.output.count("matrix:") == 1
    assert "levels" not in result.output


def test_json_has_residuals_and_levels_and_writes_no_file(tmp_path, monkeypatch):
    values = json.loads(run(tmp_path, monkeypatch, "--json").output)
    assert [level["name"] for level in values["levels"]] == ["host", "rack"]
    assert len(values["pairs"]) == 12
    assert max(map(abs, values["pairs"][0]["residuals"])) < 0.05
    assert not (tmp_path / "cluster.yaml").exists()


def test_a_file_without_times_is_refused(tmp_path):
    (tmp_path / "s.json").write_text("{}")
    with pytest.raises(FormatError, match=r"measurement.*understood"):
        CliRunner().invoke(
            command, ["--from-samples", str(tmp_path / "s.json")], catch_exceptions=False
        )


def test_the_number_of_devices_is_torchruns_business_under_torchrun():
    with pytest.raises(InvalidInputError, match="torchrun says"):
        CliRunner().invoke(command, ["--devices", "2"], env=TORCHRUN, catch_exceptions=False)


def test_a_rank_reads_its_place_from_the_environment():
    job = RankEnvironment.of(TORCHRUN | {"TORCHELASTIC_RESTART_COUNT": "2"})
    assert (job.rank, job.num_ranks, job.port, job.attempt) == (1, 4, 29500, 2)
    assert job.opens_store
    assert not RankEnvironment.of(TORCHRUN | {"TORCHELASTIC_USE_AGENT_STORE": "True"}).opens_store


def test_an_incomplete_environment_is_refused():
    with pytest.raises(InvalidInputError, match="MASTER_PORT"):
        RankEnvironment.of({key: value for key, value in TORCHRUN.items() if key != "MASTER_PORT"})
    with pytest.raises(InvalidInputError, match="environment of a rank"):
        RankEnvironment.of(TORCHRUN | {"RANK": "one"})


def test_too_many_processes_are_refused():
    with pytest.raises(InvalidInputError, match="1 to 16"):
        measure_local(17)
