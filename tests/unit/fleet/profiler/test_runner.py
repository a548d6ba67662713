"""One run of a script: within limits, watched, ended, its report read."""

import json
import os
import sys
import time
from pathlib import Path

import pytest

from partita.errors import UnsupportedError, WorkerError
from partita.fleet.profiler.containers import Container
from partita.fleet.profiler.isolation import Isolation, Limits, Way
from partita.fleet.profiler.runner import (
    Ranks,
    Workplace,
    contained_command,
    read_speed,
    run_script,
    session_bytes,
    speed_of_two,
)

LIMITS = Limits(cpus=1)


@pytest.fixture
def place(tmp_path):
    """Return what makes a place for a script: plain limits, one rank."""
    directory = tmp_path / "run"
    directory.mkdir()

    def make(text, **changes):
        script = tmp_path / "job.py"
        script.write_text(text)
        settings = {
            "script": script,
            "folder": tmp_path,
            "directory": directory,
            "isolation": Isolation(way=Way.PLAIN),
            "ranks": Ranks(),
            "limit_s": 60.0,
            **changes,
        }
        return Workplace(**settings)

    return make


def test_a_run_reports_through_our_helper_and_keeps_to_its_cpus(place, tmp_path):
    text = """
import os, pathlib
from partita.fleet.report import report_speed
report_speed(0.125, iterations=4)
pathlib.Path("cpus").write_text(repr(sorted(os.sched_getaffinity(0))))
print("done", __import__("sys").argv[1:])
"""
    outcome = run_script(place(text), ["--x", "1"], LIMITS, name="a")
    assert outcome.failure == ""
    assert outcome.speed.iteration_s == 0.125
    assert outcome.log == "done ['--x', '1']"
    assert (tmp_path / "cpus").read_text() == repr(sorted(os.sched_getaffinity(0))[:1])


def test_a_run_does_not_see_the_token(place, tmp_path, monkeypatch):
    monkeypatch.setenv("PARTITA_TOKEN", "secret")
    text = "import os\nprint(os.environ.get('PARTITA_TOKEN'))"
    assert run_script(place(text), [], LIMITS, name="a").log == "None"


def test_a_run_reports_through_synergys_register(place):
    text = "from utils.utilities import Register\nRegister(name='a').log_update(0.5, 49, 0)\n"
    outcome = run_script(place(text), [], LIMITS, name="a")
    assert outcome.speed.iteration_s == 0.5
    assert "Register" in outcome.speed.source


def test_a_script_with_its_own_register_writes_where_it_runs(place, tmp_path):
    text = "open('PERF_a.txt', 'w').write('0.25\\n49\\n0\\n')"
    assert run_script(place(text), [], LIMITS, name="a").speed.iteration_s == 0.25
    assert not (tmp_path / "PERF_a.txt").exists()


def test_a_report_of_an_earlier_run_is_not_taken_for_this_ones(place, tmp_path):
    (tmp_path / "PERF_a.txt").write_text("9\n1\n0\n")
    (tmp_path / "run" / "speed.json").write_text('{"iteration_s": 9}')
    assert run_script(place("pass"), [], LIMITS, name="a").speed is None


def test_a_report_that_is_no_time_is_an_error(place):
    text = "open('PERF_a.txt', 'w').write('-1')"
    with pytest.raises(WorkerError, match="-1 seconds per iteration"):
        run_script(place(text), [], LIMITS, name="a")


def test_a_report_without_a_number_is_an_error(tmp_path):
    (tmp_path / "speed.json").write_text("{}")
    with pytest.raises(WorkerError, match="holds no seconds"):
        read_speed(tmp_path, tmp_path, "a")


def test_a_failure_says_how_it_ended_and_the_last_line(place):
    outcome = run_script(place("raise SystemExit('no such model')"), [], LIMITS, name="a")
    assert outcome.failure == "ended with exit code 1; its last line: no such model"
    killed = run_script(place("import os; os.kill(os.getpid(), 9)"), [], LIMITS, name="b")
    assert killed.failure == "was killed by SIGKILL; it printed nothing"


def is_running(pid):
    try:
        return "zombie" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


def test_a_hung_run_is_ended_with_all_it_started(place, tmp_path):
    text = """
import pathlib, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
pathlib.Path("child").write_text(str(child.pid))
print("epoch 1", flush=True)
time.sleep(600)
"""
    outcome = run_script(place(text, limit_s=1.5), [], LIMITS, name="a")
    assert outcome.failure == "did not end within 1.5 s (--limit); its last line: epoch 1"
    child = int((tmp_path / "child").read_text())
    last_s = time.monotonic() + 10
    while is_running(child) and time.monotonic() < last_s:
        time.sleep(0.02)
    assert not is_running(child)


def test_ranks_know_their_place_and_one_that_fails_ends_the_others(place, tmp_path):
    text = """
import json, os, pathlib, sys, time
names = "RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE NNODES NODE_RANK MASTER_ADDR MASTER_PORT"
seen = {name: os.environ[name] for name in names.split()}
pathlib.Path("seen" + seen["RANK"]).write_text(json.dumps([seen, sys.argv[1:]]))
if seen["LOCAL_RANK"] == "1":
    while not os.path.exists("seen2"):
        time.sleep(0.01)
    sys.exit(7)
time.sleep(600)
"""
    ranks = Ranks(per_node=2, nodes=2, node_rank=1, master_addr="10.0.0.1", master_port=1234)
    outcome = run_script(
        place(text, ranks=ranks), ["-x"], LIMITS, name="a", rank_option="--local_rank"
    )
    assert outcome.failure.startswith("ended with exit code 7")
    seen, arguments = json.loads((tmp_path / "seen3").read_text())
    assert arguments == ["-x", "--local_rank=1"]
    assert seen == {
        "RANK": "3",
        "WORLD_SIZE": "4",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "2",
        "NNODES": "2",
        "NODE_RANK": "1",
        "MASTER_ADDR": "10.0.0.1",
        "MASTER_PORT": "1234",
    }


def test_plain_limits_bound_the_data_of_a_process(place):
    text = "import resource; print(resource.getrlimit(resource.RLIMIT_DATA))"
    limits = Limits(cpus=1, memory_bytes=2**30)
    outcome = run_script(place(text), [], limits, name="a")
    assert outcome.log == f"({2**30}, {2**30})"


def test_an_interpreter_that_is_not_there_is_named(place):
    with pytest.raises(UnsupportedError, match="/no/python cannot be started"):
        run_script(place("pass", python="/no/python"), [], LIMITS, name="a")


def test_the_memory_of_a_session_is_seen():
    assert session_bytes(os.getsid(0)) > 0
    assert session_bytes(2**30) == 0


def test_the_memory_of_a_run_between_two_samples_is_counted(place):
    text = "import os\nheld = b'x' * 50_000_000\n"
    outcome = run_script(place(text), [], LIMITS, name="a")
    assert 50_000_000 <= outcome.peak_bytes < 200_000_000


def test_what_an_earlier_run_held_is_not_taken_for_this_ones(place, tmp_path):
    (tmp_path / "run" / "peak_bytes").write_text(str(10**12))
    assert run_script(place("raise SystemExit(1)"), [], LIMITS, name="a").peak_bytes < 10**9


def test_in_a_container_all_paths_are_those_inside(place, tmp_path):
    container = Container(engine="docker", image="img")
    words = contained_command(
        place("pass", isolation=Isolation(way=Way.CONTAINER, container=container)),
        container,
        ["--data", "/datadrive/x"],
        Limits(cpus=2),
        "job_cpu_2",
        "--local_rank",
    )
    inside = words[words.index("img") + 1 :]
    assert inside[0].startswith("/datadrive/")
    assert inside[0].endswith("/launch.py")
    assert inside[-3:] == [f"/datadrive{tmp_path}/job.py", "--data", "/datadrive/x"]
    assert "--rank-option=--local_rank" in inside
    assert f"OUT_DIR=/datadrive{tmp_path}/run" in words
    assert inside[1:3] == ["--peak-file", f"/datadrive{tmp_path}/run/peak_bytes"]


def test_the_speed_of_two_runs_leaves_the_start_out():
    assert speed_of_two((40, 12.0), (20, 8.0), "x").iteration_s == pytest.approx(0.2)
    with pytest.raises(WorkerError, match=r"start.*iterations"):
        speed_of_two((40, 8.0), (20, 8.1), "x")


def test_this_interpreter_is_the_usual_one(place):
    assert place("pass").python == sys.executable
