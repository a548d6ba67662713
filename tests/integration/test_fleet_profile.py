"""``partita fleet profile``: Synergy's own command line, resumed lists, failures, a real script."""

import json
import os
import shlex
import shutil
import sys
from pathlib import Path

import pytest

from partita.documents import load
from partita.formats.synergy import read_synergy_profile

HERE = Path(__file__).parent
EXAMPLE = HERE.parents[1] / "examples" / "fleet_train.py"
SYNERGY = (
    "--job-name job-res18 --cpu 24 --num-gpus 4 -b 512 --docker-img=nvidia/dali:py36_cu10.run "
    "../models/image_classification/pytorch-imagenet.py --dali --amp --dali_cpu "
    "--max-iterations 50 --workers 3 -b 512 --data '/datadrive/mnt4/imagenet/'"
)
"""The example of Synergy's README, with a shorter path."""

PLAIN = ("--isolation", "plain", "--cpu", "1")
REPORTING = """
import argparse, pathlib
parser = argparse.ArgumentParser()
for words in (["-b", "--batch"], ["-j", "--workers"], ["--max_iterations"]):
    parser.add_argument(*words, type=int)
parser.add_argument("--data")
args = parser.parse_args()
from partita.fleet.report import report_speed
with open("count", "a") as file:
    file.write(f"{args.max_iterations} ")
report_speed(0.5, iterations=args.max_iterations)
"""


@pytest.fixture
def synergy(run, tmp_path, monkeypatch):
    """Return the folders as in Synergy's repository, the stub in place of its script."""
    script = tmp_path / "models" / "image_classification" / "pytorch-imagenet.py"
    script.parent.mkdir(parents=True)
    shutil.copy(HERE / "fleet_stub.py", script)
    source = tmp_path / "src"
    source.mkdir()
    monkeypatch.chdir(source)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    return source


def told(folder, name):
    return json.loads((folder / f"seen-{name}.json").read_text())


def test_the_line_of_synergys_readme_runs_as_it_is(synergy, run):
    code, out, err = run("fleet", "profile", *shlex.split(SYNERGY))
    assert code == 0, err
    assert "nvidia/dali:py36_cu10.run is not used" in err
    cpus = sorted(os.sched_getaffinity(0))[:24]
    directory = synergy / "profiles" / "job-res18"
    seen = told(directory, f"job-res18_cpu_{len(cpus)}-3")
    assert seen["cpus"] == cpus
    assert seen["place"] == {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29500",
        "WORLD_SIZE": "4",
        "RANK": "3",
        "LOCAL_RANK": "3",
        "NNODES": "1",
    }
    loaders = max(1, len(cpus) // 4)
    assert seen["arguments"] == shlex.split(
        f"--dali --amp --dali_cpu -b 512 --workers {loaders} --max-iterations 50 "
        f"--data /mnt4/imagenet/ --job-name job-res18_cpu_{len(cpus)} "
        "--nnodes 1 --node_rank 0 --local_rank=3"
    )
    sensitivity = load(directory / "sensitivity.json")
    assert sensitivity.batch_size == 512
    assert sensitivity.iteration_s == pytest.approx(max(1.92 / len(cpus), 0.22))
    assert "points measured" in out


def test_every_option_of_synergy_is_known_in_both_spellings(synergy, run):
    (synergy / "data").mkdir()
    (synergy / "data" / "x").write_bytes(b"0" * 1000)
    script = "../models/image_classification/pytorch-imagenet.py"
    line = (
        "--docker_img= --num_gpus 1 --job_name a --nnodes 1 --node-rank 0 --master-addr 127.0.0.2 "
        "--master_port 1234 --cpu 1 --memory 4096 -j 5 --batch_size 8 --max_iterations 20 "
        f"--data data --str_bw STR --mem_thr MEM --profiler_src . --container_mnt /datadrive/ "
        f"--local_disk . --isolation plain {script} --max-iterations 50 -b 512 --data other"
    )
    code, out, err = run("fleet", "profile", "--json", *shlex.split(line))
    assert code == 0, err
    values = json.loads(out)
    directory = Path(values["directory"])
    seen = told(directory, "a_cpu_1-0")
    assert seen["place"]["MASTER_ADDR"] == "127.0.0.2"
    assert seen["place"]["MASTER_PORT"] == "1234"
    assert " ".join(seen["arguments"]).startswith(
        "-b 8 --workers 5 --max-iterations 20 --data data --job-name a_cpu_1"
    )
    assert float(Path("STR").read_text()) > 0
    assert float(Path("MEM_1").read_text()) > 0
    assert values["runs"][0]["iteration_s"] == 1.92
    assert values["measured"] == values["points"] == 1
    assert values["sensitivity"]["format"] == "partita.sensitivity"
    profile = read_synergy_profile((directory / "profile.json").read_text(), name="a")
    assert profile.iteration_s == pytest.approx(1.92)


def test_a_container_engine_is_used_where_it_answers(synergy, run, tmp_path, monkeypatch):
    engine = tmp_path / "bin" / "docker"
    engine.parent.mkdir()
    engine.write_text(f'#!/bin/sh\nexec {sys.executable} {HERE / "fleet_engine.py"} "$@"\n')
    engine.chmod(0o755)
    monkeypatch.setenv("FLEET_ENGINE_LOG", str(tmp_path / "asked"))
    code, out, err = run("fleet", "profile", "--cpu_step", "1", *shlex.split(SYNERGY))
    assert code == 0, err
    assert "limits by container" in out
    first, second, third, *runs = (tmp_path / "asked").read_text().splitlines()
    assert (first, second, third) == (
        "info",
        "image inspect",
        "pull nvidia/dali:py36_cu10.run",
    )
    assert all("--cpuset-cpus=0" in line and "--privileged" not in line for line in runs)
    sensitivity = load(synergy / "profiles" / "job-res18" / "sensitivity.json")
    assert len(sensitivity.cpus) == len(os.sched_getaffinity(0))


def write_script(text, name="train.py"):
    Path(name).write_text(text)
    return name


def test_a_script_that_lacks_options_is_refused_with_their_names(run):
    text = (
        "import argparse\np = argparse.ArgumentParser()\np.add_argument('--data')\np.parse_args()"
    )
    code, _, err = run("fleet", "profile", "-q", *PLAIN, write_script(text))
    assert code == 2
    assert "train.py does not take --batch/-b, --workers/-j, --max_iterations" in err
    assert len(err.splitlines()) == 1


def test_a_script_that_fails_ends_with_its_last_line(run):
    text = REPORTING + "\nif args.max_iterations > 1: raise SystemExit('out of memory')"
    code, _, err = run("fleet", "profile", "-q", *PLAIN, write_script(text))
    assert code == 5
    assert "train.py with --cpu 1 ended with exit code 1; its last line: out of memory" in err
    assert "job-0_cpu_1.log" in err


def test_a_script_that_hangs_is_named_and_ended(run):
    text = REPORTING + "\nimport time\nif args.max_iterations > 1: time.sleep(600)"
    code, _, err = run("fleet", "profile", "-q", "--limit", "2", *PLAIN, write_script(text))
    assert code == 5
    assert "train.py with --cpu 1 did not end within 2 s (--limit)" in err


def test_a_script_that_reports_nothing_is_timed_by_two_runs(run):
    text = "import time\ntime.sleep(0.03 * int(args.max_iterations))\n"
    silent = REPORTING.partition("from partita")[0] + text
    code, out, err = run(
        "fleet", "profile", "--json", *PLAIN, "--max-iterations", "40", write_script(silent)
    )
    assert code == 0, err
    (only,) = json.loads(out)["runs"]
    assert only["source"] == "wall time of 40 less that of 20 iterations"
    assert only["iteration_s"] > 0


def test_an_equal_command_measures_nothing_again(run):
    line = ["fleet", "profile", "-q", *PLAIN, "--max-iterations", "7", write_script(REPORTING)]
    assert run(*line)[0] == 0
    assert Path("count").read_text() == "1 7 "
    code, out, _ = run(*line)
    assert (code, Path("count").read_text()) == (0, "1 7 ")
    assert "1 of 1 points measured" in out
    assert run(*line[:3], "--again", *line[3:])[0] == 0
    assert Path("count").read_text() == "1 7 1 7 "
    assert run(*line[:3], "--repeats", "2", *line[3:])[0] == 0
    assert Path("count").read_text() == "1 7 1 7 7 "
    assert sorted(path.name for path in Path("profiles").iterdir()) == ["job-0"]


def test_a_list_goes_on_after_a_failure_and_resumes_where_it_stopped(run):
    write_script(REPORTING, "good.py")
    broken = REPORTING + "\nimport os\nif not os.path.exists('mended'): raise SystemExit('broken')"
    write_script(broken, "bad.py")
    Path("jobs.yaml").write_text(
        "defaults: {cpu: 1, isolation: plain, max_iterations: 9}\n"
        "jobs:\n"
        "  - {script: bad.py, args: --data x}\n"
        "  - {script: good.py, args: [--data, 'a b'], job-name: fine}\n"
    )
    code, out, err = run("fleet", "profile", "-q", "--list", "jobs.yaml")
    assert code == 5
    assert "bad: bad.py with one iteration ended with exit code 1" in err
    assert "fine · " in out
    Path("mended").touch()
    counted = Path("count").read_text()
    code, out, err = run("fleet", "profile", "--list", "jobs.yaml", "--json")
    assert code == 0, err
    assert Path("count").read_text() == counted + "1 9 "  # those of bad.py alone
    values = json.loads(out)
    assert [job["job"] for job in values["jobs"]] == ["bad", "fine"]
    assert values["failed"] == []
    assert "good.py --data 'a b'" in values["jobs"][1]["command"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("jobs: [{args: x}]", "jobs.yaml:1: a job has no script"),
        (
            "jobs:\n - script: x\n   cpus: 3",
            "jobs.yaml:3: there is no option 'cpus'; did you mean 'cpu'",
        ),
        (
            "jobs:\n - script: x\n   cpu: many",
            "jobs.yaml:3: option 'cpu' is 'many'; expected a number",
        ),
        ("jobs:\n - script: x\n - script: d/x.py", "jobs.yaml:3: job 'x' stands twice"),
        ('jobs:\n - {script: x, args: "\'"}', "jobs.yaml:2: args: no closing quotation"),
        ("defaults: {}", "jobs.yaml:1: the key jobs is missing"),
        ("jobs:\n - script: none.py", "none.py is no file"),
    ],
)
def test_a_list_that_is_wrong_is_refused_with_its_line(run, text, message):
    Path("jobs.yaml").write_text(text)
    code, _, err = run("fleet", "profile", "--list", "jobs.yaml")
    assert code == 2
    assert message in err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "name a SCRIPT, or a file by --list"),
        (["none.py"], "none.py is no file"),
        (["--num-gpu", "2", "x.py"], "No such option"),
        (["--local-disk", "nowhere", "x.py"], "--local-disk nowhere is no folder"),
        (["--isolation", "container", "train.py"], "a container needs an image"),
        (["--isolation", "plain", "--cpu-step", "0.5", "train.py"], "parts of CPUs need control"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(run, words, message):
    write_script(REPORTING)
    code, _, err = run("fleet", "profile", *words)
    assert code == 2
    assert message in err
    assert len(err.splitlines()) == 1


def test_nodes_run_the_same_points_and_node_0_has_the_result(run):
    script = write_script(REPORTING)
    line = ["fleet", "profile", "-q", "--nnodes", "2", "--isolation", "plain", "--cpu", "1"]
    code, out, err = run(*line, "--node_rank", "1", script)
    assert code == 0, err
    assert "node 0 has the result" in out
    assert Path("count").read_text() == "1 50 "
    assert run(*line, "--node_rank", "0", script)[0] == 0
    assert Path("count").read_text() == "1 50 1 50 "
    assert Path("profiles/job-0-2/sensitivity.json").exists()


@pytest.mark.slow
def test_the_sample_script_shows_its_sensitivity(commands, tmp_path):
    line = "-b 8 --max-iterations 8 --cpu-step 1 --str-bw 1MB/s --json"
    done = commands.run(
        *("fleet", "profile", *line.split()),
        *(str(EXAMPLE), "--data", "images", "--images", "64", "--size", "128"),
        folder=tmp_path,
    )
    assert not done.returncode, done.stderr
    values = json.loads(done.stdout)
    assert len(list((tmp_path / "images" / "train").glob("*.png"))) == 64
    assert {run["source"] for run in values["runs"]} == {"reported by the script"}
    assert 1 <= values["measured"] <= values["points"]
    assert len(values["curve"]) == len(os.sched_getaffinity(0))
    sensitivity = load(tmp_path / "profiles" / "job-0" / "sensitivity.json")
    assert sensitivity.dataset_samples == 64
    assert sensitivity.storage_bandwidth_bytes_per_s == 1e6
    assert sensitivity.working_bytes > 0
    assert sensitivity.speed.min() < 1  # of storage that slow every epoch waits
