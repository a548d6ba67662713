"""Control groups: where they can be made, what is written, and that nothing is left."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from partita.errors import UnsupportedError
from partita.fleet.profiler.cgroups import (
    Hierarchy,
    delegated,
    find_hierarchies,
    limit_lines,
    limited_groups,
    remove_left_groups,
    why_no_groups,
)

V1 = """\
32 31 0:29 / /sys/fs/cgroup/cpu,cpuacct rw,relatime shared:9 - cgroup cgroup rw,cpu,cpuacct
35 31 0:32 / /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory
41 31 0:38 / /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw
22 1 0:20 / /proc rw,nosuid - proc proc rw
"""
V1_INSIDE = "4:memory:/jobs/a\n1:cpu,cpuacct:/\n0::/\n"


def test_version_1_has_a_folder_for_each_controller():
    cpu, memory, *_ = find_hierarchies(V1, V1_INSIDE)
    assert cpu == Hierarchy(1, Path("/sys/fs/cgroup/cpu,cpuacct"), ("cpu",))
    assert memory == Hierarchy(1, Path("/sys/fs/cgroup/memory/jobs/a"), ("memory",))


def test_version_2_has_one_folder_and_its_controllers(tmp_path):
    folder = tmp_path / "user.slice" / "me"
    folder.mkdir(parents=True)
    (folder / "cgroup.controllers").write_text("cpuset cpu io memory pids\n")
    mounts = f"30 23 0:26 / {tmp_path} rw - cgroup2 cgroup2 rw,nsdelegate"
    found = find_hierarchies(mounts, "0::/user.slice/me\n")
    assert found == (Hierarchy(2, folder, ("cpu", "memory")),)


def test_a_mounted_part_of_the_tree_is_looked_through():
    mounts = "32 31 0:29 /docker/abc /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu"
    (found,) = find_hierarchies(mounts, "1:cpu:/docker/abc/x\n")
    assert found.folder == Path("/sys/fs/cgroup/cpu/x")


def test_limits_are_written_as_each_version_takes_them():
    assert limit_lines(1, 1.5, None) == {
        "cpu.cfs_period_us": "100000",
        "cpu.cfs_quota_us": "150000",
        "cpu.shares": "10240",
    }
    assert limit_lines(1, None, 2**30) == {"memory.limit_in_bytes": "1073741824"}
    assert limit_lines(2, 0.25, 10**9) == {
        "cpu.max": "25000 100000",
        "cpu.weight": "1000",
        "memory.max": "1000000000",
    }


@pytest.fixture
def fake(tmp_path, monkeypatch):
    """A folder that stands for a group of version 2; files of a group go with it."""
    (tmp_path / "cgroup.controllers").write_text("cpu memory")
    (tmp_path / "cgroup.subtree_control").write_text("")
    monkeypatch.setattr(Path, "rmdir", shutil.rmtree)
    return tmp_path


def test_one_group_of_version_2_holds_all_limits_and_goes(fake):
    with limited_groups([delegated(fake)], "job", cpus=0.5, memory_bytes=10**9) as joined:
        assert joined == (fake / "job" / "cgroup.procs",)
        assert (fake / "job" / "cpu.max").read_text() == "50000 100000"
        assert (fake / "job" / "memory.max").read_text() == "1000000000"
        assert (fake / "cgroup.subtree_control").read_text() == "+cpu +memory"
    assert not (fake / "job").exists()


def test_what_is_left_in_a_group_is_killed(fake):
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    with limited_groups([delegated(fake)], "job", cpus=1.0, memory_bytes=None) as (joined,):
        joined.write_text(str(process.pid))
    assert process.wait(10) == -9


def test_a_limit_without_a_controller_is_refused(tmp_path):
    (tmp_path / "cgroup.controllers").write_text("cpu")
    with (
        pytest.raises(UnsupportedError, match="controller memory"),
        limited_groups([delegated(tmp_path)], "job", cpus=None, memory_bytes=1),
    ):
        pass


def test_a_folder_that_is_no_group_is_refused(tmp_path):
    with pytest.raises(UnsupportedError, match=r"control.*2"):
        delegated(tmp_path)


def test_why_groups_cannot_be_made_is_said(tmp_path):
    missing = Hierarchy(1, tmp_path / "nowhere", ("cpu",))
    assert "no such file" in why_no_groups([missing], "probe")
    assert "controller cpu" in why_no_groups([], "probe")


def test_groups_of_profilers_that_are_gone_are_removed_if_empty(tmp_path):
    gone, mine = tmp_path / "partita-4194999-a", tmp_path / f"partita-{os.getpid()}-a"
    full = tmp_path / "partita-4194999-b"
    for folder in (gone, mine, full / "x"):
        folder.mkdir(parents=True)
    remove_left_groups([Hierarchy(1, tmp_path, ("cpu",))])
    assert [path.exists() for path in (gone, mine, full)] == [False, True, True]


@pytest.mark.root
def test_a_real_group_limits_and_is_gone_afterwards():
    mounts, inside = (Path(f"/proc/self/{name}").read_text() for name in ("mountinfo", "cgroup"))
    hierarchies = find_hierarchies(mounts, inside)
    name = f"partita-test-{os.getpid()}"
    reason = why_no_groups(hierarchies, name)
    if reason:
        pytest.skip(reason)
    with limited_groups(hierarchies, name, cpus=0.5, memory_bytes=None) as (joined,):
        group = joined.parent
        process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
        joined.write_text(str(process.pid))
        assert str(process.pid) in joined.read_text().split()
        files = {"cpu.max": "50000 100000", "cpu.cfs_quota_us": "50000"}
        read = {
            file: (group / file).read_text().strip() for file in files if (group / file).exists()
        }
        assert read
        assert read.items() <= files.items()
    assert process.wait(10) == -9
    assert not group.exists()
