"""Hosts of a plan as a job of Slurm, and what is said of Slurm's answers; no Slurm is called."""

import os
import re
from dataclasses import replace
from pathlib import Path

import pytest

from partita.errors import InvalidInputError, UnsupportedError
from partita.hosts.places import PlanHost
from partita.hosts.slurm import SlurmPlace, components_of, slurm_place, step_environment
from partita.hosts.table import PlaceFields

PLAN = (
    PlanHost(name="a0", ranks=(0, 1), gpus=2, gpu_type="a100", cpus=16),
    PlanHost(name="a1", ranks=(2, 3), gpus=2, gpu_type="a100", cpus=16),
    PlanHost(name="v0", ranks=(4,), gpus=1, gpu_type="v100", cpus=8),
)


@pytest.fixture
def commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of commands that come before Slurm's on the path."""
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    for name in ("salloc", "sinfo", "squeue", "scancel", "srun"):
        answer(tmp_path, name, "exit 0")
    lines = [
        f"NodeName={name} CPUTot=64 RealMemory=500000 Gres=gpu:{gres}:4 State=IDLE"
        for name, gres in (("n1", "nvidia_a100_80gb"), ("n2", "tesla_v100"))
    ]
    (tmp_path / "nodes").write_text("\n".join(lines))
    answer(tmp_path, "scontrol", f"cat {tmp_path}/nodes")
    return tmp_path


def answer(folder: Path, name: str, script: str) -> None:
    (folder / name).write_text(f"#!/bin/sh\n{script}\n")
    (folder / name).chmod(0o755)


def test_equal_hosts_are_one_component_and_others_another() -> None:
    first, second = components_of(PLAN, [])
    assert first.options() == [
        "--nodes=2", "--ntasks-per-node=1", "--cpus-per-task=16", "--gpus-per-node=a100:2"
    ]  # fmt: skip
    assert second.options() == [
        "--nodes=1", "--ntasks-per-node=1", "--cpus-per-task=8", "--gpus-per-node=v100:1"
    ]  # fmt: skip


def test_nodes_are_asked_for_by_name_in_the_order_of_the_plan() -> None:
    first, second = components_of(PLAN, ["n10", "n2", "n1"])
    assert "--nodelist=n10,n2" in first.options()
    assert "--nodelist=n1" in second.options()


def test_gpus_are_asked_for_by_the_names_that_slurm_has(commands: Path) -> None:
    answer(commands, "salloc", f"echo $* > {commands}/asked; exit 1")
    with pytest.raises(UnsupportedError):
        SlurmPlace(PLAN).__enter__()
    asked = (commands / "asked").read_text()
    assert "--gpus-per-node=nvidia_a100_80gb:2" in asked
    assert "--gpus-per-node=tesla_v100:1" in asked


def test_gpus_without_types_are_asked_for_without(commands: Path) -> None:
    answer(commands, "salloc", f"echo $* > {commands}/asked; exit 1")
    text = (commands / "nodes").read_text()
    (commands / "nodes").write_text(re.sub(r"gpu:\w+:4", "gpu:4", text))
    with pytest.raises(UnsupportedError):
        SlurmPlace(PLAN).__enter__()
    assert "--gpus-per-node=2 " in (commands / "asked").read_text()


def test_gpus_that_slurm_does_not_have_are_refused(commands: Path) -> None:
    plan = (replace(PLAN[0], gpu_type="h100"),)
    with pytest.raises(InvalidInputError, match=r"'h100'.*nvidia_a100_80gb, tesla_v100"):
        SlurmPlace(plan).__enter__()


def test_what_slurm_says_against_a_job_is_told(commands: Path) -> None:
    answer(commands, "salloc", "echo 'salloc: error: invalid partition' >&2; exit 1")
    answer(commands, "squeue", "exit 0")
    with pytest.raises(UnsupportedError, match=r"Slurm.*invalid"):
        SlurmPlace(PLAN).__enter__()


def test_a_job_that_waits_too_long_is_cancelled(commands: Path) -> None:
    answer(commands, "salloc", "echo 'salloc: Pending job allocation 7' >&2; exec sleep 60")
    answer(commands, "squeue", "echo PENDING Resources")
    answer(commands, "scancel", f"echo $* > {commands}/cancelled")
    with pytest.raises(UnsupportedError, match=r"7 within 1 s;.*7.*PENDING Resources"):
        SlurmPlace(PLAN, queue_limit_s=1.0).__enter__()
    assert (commands / "cancelled").read_text() == "--quiet 7\n"


def test_one_node_for_two_hosts_is_refused(commands: Path) -> None:
    answer(commands, "salloc", "echo 'salloc: Granted job allocation 7' >&2")
    answer(commands, "squeue", "echo '7+1 n2'; echo '7+0 n[1-2]'")
    with pytest.raises(UnsupportedError, match=r"7.*n1, n2, n2.*3 hosts"):
        SlurmPlace(PLAN).__enter__()


def test_an_allocation_that_is_there_is_used_and_kept(
    commands: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "9")
    answer(commands, "squeue", "echo '9 v0,a0,a1'")
    answer(commands, "scancel", f"touch {commands}/cancelled")
    with SlurmPlace(PLAN) as place:
        assert place.names == ["a0", "a1", "v0"]
    assert not (commands / "cancelled").exists()


def test_a_step_is_not_misled_by_the_variables_of_a_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_NTASKS", "4")
    monkeypatch.setenv("PARTITA_TOKEN", "secret")
    assert not {"SLURM_NTASKS", "PARTITA_TOKEN"} & set(step_environment())


def test_nothing_follows_slurm() -> None:
    with pytest.raises(InvalidInputError, match="--on slurm:gpu"):
        slurm_place("gpu", PLAN, PlaceFields(on="slurm:gpu"))
