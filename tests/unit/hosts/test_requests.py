"""Requests for runs on other hosts: which options go together, and the devices of a host file."""

from pathlib import Path

import pytest

from partita.catalogue.shorthand import cpu_hosts
from partita.errors import InvalidInputError
from partita.flows.runs.requests import RunRequest, TrainRequest, check_run, check_training
from partita.flows.runs.steps import _cluster_on, _is_measured

ON = {"on": "ssh:hosts"}


def test_hosts_of_cpu_processes_may_be_uneven_and_keep_their_order() -> None:
    cluster = cpu_hosts({"gpu10": 3, "gpu2": 1})
    assert [host.name for host in cluster.hosts] == ["gpu10", "gpu2"]
    assert cluster.device_names == ("gpu10/cpu0", "gpu10/cpu1", "gpu10/cpu2", "gpu2/cpu0")
    assert [level.name for level in cluster.levels] == ["host", "rack"]


def test_training_plans_for_the_slots_of_a_host_file(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("me@gpu10 slots=3\ngpu2\n")
    cluster = _cluster_on(f"ssh:{tmp_path / 'hosts'}")
    assert cluster.device_names[-2:] == ("gpu10/cpu2", "gpu2/cpu0")
    request = TrainRequest(model="m", cluster="2x2xcpu", **ON)
    assert _is_measured(request, cluster, 0)
    with pytest.raises(InvalidInputError, match="--on slurm: add --cluster"):
        _cluster_on("slurm")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"launcher": "fork"}, "--launcher: is for the devices of this machine"),
        ({"device_ids": "0"}, "--device-ids: is for the devices of this machine"),
        ({"elastic": "1:2", "save_every": 1}, "--elastic: is for the devices of this machine"),
        ({"slurm_options": "x"}, "--slurm-options is for --on slurm, not for ssh"),
    ],
)
def test_options_of_one_machine_are_refused_on_others(
    options: dict[str, object], words: str
) -> None:
    with pytest.raises(InvalidInputError, match=words):
        check_run(RunRequest(plan="p", **ON, **options))  # type: ignore[arg-type]


def test_training_on_other_hosts_takes_a_cluster_but_no_number_of_devices() -> None:
    check_training(TrainRequest(model="m", cluster="2x4xa100", **ON))
    with pytest.raises(InvalidInputError, match=r"--devices:.*--cluster"):
        check_training(TrainRequest(model="m", devices=2, **ON))
    with pytest.raises(InvalidInputError, match=r"--baseline.*devices"):
        check_training(TrainRequest(model="m", baseline="ddp", **ON))
