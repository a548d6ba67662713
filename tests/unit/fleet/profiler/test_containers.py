"""The command line of a container engine, built and tried without one."""

import os
import shlex
from pathlib import Path

import pytest

from partita.errors import InvalidInputError, UnsupportedError
from partita.fleet.profiler.containers import (
    Container,
    container_command,
    find_engine,
    host_path,
    pull_if_absent,
)
from partita.fleet.profiler.isolation import IsolationRequest, Way, choose_isolation


def command(**changes):
    container = Container(
        **{"engine": "docker", "image": "img:1", "mount": "/datadrive", **changes}
    )
    return container_command(
        container,
        ["/datadrive/x/launch.py", "--", "a b"],
        name="partita-1-job",
        folder=Path("/home/me"),
        writable=(Path("/home/me/profiles/job"),),
        environment={"OUT_DIR": "/datadrive/home/me/profiles/job"},
        cpus=1.5,
        cpu_numbers=(0, 1),
        memory_bytes=2**30,
    )


def test_the_command_limits_mounts_and_names_the_container():
    words = command()
    assert words[:5] == ["docker", "run", "--rm", "--name", "partita-1-job"]
    text = shlex.join(words)
    assert "--cpus=1.5 --cpuset-cpus=0,1 --memory=1073741824b" in text
    assert "--mount type=bind,src=/,target=/datadrive,readonly" in text
    assert "--mount type=bind,src=/home/me,target=/datadrive/home/me " in text
    assert (
        "--mount type=bind,src=/home/me/profiles/job,target=/datadrive/home/me/profiles/job" in text
    )
    assert words[-5:] == ["python", "img:1", "/datadrive/x/launch.py", "--", "a b"]
    assert words[-6] == "--entrypoint"


def test_no_container_is_privileged_or_needs_a_terminal():
    words = command(gpus=True)
    assert not {"--privileged", "-it", "-i", "-t", "--tty"} & set(words)


def test_gpus_are_passed_on_as_each_engine_takes_them():
    assert "--gpus all" in shlex.join(command(gpus=True))
    assert "--device nvidia.com/gpu=all" in shlex.join(command(gpus=True, engine="podman"))
    assert "gpu" not in shlex.join(command())


@pytest.mark.parametrize(
    ("path", "host"),
    [
        ("/datadrive/mnt4/imagenet/", "/mnt4/imagenet/"),
        ("/datadrive", "/"),
        ("/datadrives/x", "/datadrives/x"),
        ("images", "images"),
    ],
)
def test_paths_below_the_mount_are_those_of_the_host(path, host):
    assert host_path(path, "/datadrive") == host


@pytest.fixture
def engine(tmp_path, monkeypatch):
    """An engine that keeps what it was asked; ``info`` answers, no image is there."""
    folder = tmp_path / "bin"
    folder.mkdir()
    script = folder / "docker"
    script.write_text(
        f'#!/bin/sh\necho "$@" >> {tmp_path}/asked\n'
        'case "$1 $2" in "image inspect") exit 1;;\n'
        '"pull bad") echo no such image >&2; exit 1;; esac\n'
    )
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}/bin{os.pathsep}/usr/bin")
    return tmp_path / "asked"


def test_an_absent_image_is_pulled(engine):
    assert find_engine() == "docker"
    assert pull_if_absent("docker", "img:1", limit_s=10)
    assert engine.read_text().splitlines() == ["info", "image inspect img:1", "pull img:1"]


def test_an_image_that_cannot_be_pulled_is_named(engine):
    with pytest.raises(UnsupportedError, match="docker cannot"):
        pull_if_absent("docker", "bad", limit_s=10)


def test_a_container_is_used_where_an_engine_answers(engine):
    chosen = choose_isolation(IsolationRequest(image="img:1"))
    assert chosen.way is Way.CONTAINER
    assert chosen.container.image == "img:1"
    assert chosen.notes == ("img:1 was pulled",)


@pytest.fixture
def no_engine(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))


@pytest.mark.usefixtures("no_engine")
def test_without_an_engine_the_image_is_noted_and_not_used():
    chosen = choose_isolation(IsolationRequest(image="img:1"))
    assert chosen.way is not Way.CONTAINER
    assert "img:1 is not used" in chosen.notes[0]


@pytest.mark.usefixtures("no_engine")
def test_a_container_that_is_demanded_needs_an_engine():
    with pytest.raises(UnsupportedError, match=r"container.*answers"):
        choose_isolation(IsolationRequest(image="img:1", wanted=Way.CONTAINER))
    with pytest.raises(InvalidInputError, match="needs an image"):
        choose_isolation(IsolationRequest(wanted=Way.CONTAINER))


def test_plain_limits_need_nothing():
    chosen = choose_isolation(IsolationRequest(wanted=Way.PLAIN))
    assert (chosen.way, chosen.notes, chosen.has_fractions) == (Way.PLAIN, (), False)


def test_a_group_that_is_not_delegated_is_refused(tmp_path):
    with pytest.raises(UnsupportedError, match="control group"):
        choose_isolation(IsolationRequest(group=str(tmp_path), wanted=Way.CGROUP))
