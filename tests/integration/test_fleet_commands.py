"""The commands fleet trace, fleet curve and fleet simulate, as a user types them."""

import json
from pathlib import Path

import pytest

from partita.core.fleet import FleetHistory, Sensitivity, Trace
from partita.documents import load
from partita.formats.synergy import read_results

SMALL = ("generated:jobs=30,load=6,short", "--cluster", "1x8xv100", "-q")
PHILLY = [
    {
        "status": "Pass",
        "vc": "a",
        "jobid": f"job{index}",
        "submitted_time": f"2017-10-0{index + 1} 08:00:00",
        "user": "u",
        "attempts": [
            {
                "start_time": f"2017-10-0{index + 1} 09:00:00",
                "end_time": f"2017-10-0{index + 1} 1{index}:00:00",
                "detail": [{"ip": "m1", "gpus": ["gpu0"] * (index + 1)}],
            }
        ],
    }
    for index in range(4)
]


def test_a_drawn_trace_is_written_read_and_shown(run):
    code, out, _ = run("fleet", "trace", "--jobs", "40", "--multi-gpu", "-o", "t.json")
    assert code == 0
    assert "language-large" in out
    assert "modelled" in out
    assert len(load("t.json")) == 40
    code, out, _ = run("fleet", "trace", "t.json", "--jobs", "10", "--load", "3", "--json")
    figures = json.loads(out)
    assert (code, figures["jobs"], figures["written"]) == (0, 10, None)
    code, _, _ = run("fleet", "trace", "t.json", "-o", "t.csv")
    assert code == 0
    assert len(Path("t.csv").read_text().splitlines()) == 40
    code, out, _ = run("fleet", "trace", "t.csv", "--json")
    assert json.loads(out)["jobs"] == 40


@pytest.mark.parametrize("name", ["log.json", "log.csv"])
def test_logs_of_submissions_are_read(run, tmp_path, name):
    table = "timestamp,duration,num_gpus\n" + "".join(
        f"2017-10-0{i + 1} 08:00:00,{3600 * (i + 1)},{i + 1}\n" for i in range(4)
    )
    (tmp_path / name).write_text(json.dumps(PHILLY) if name == "log.json" else table)
    code, out, err = run("fleet", "trace", name, "--json")
    assert code == 0, err
    figures = json.loads(out)
    assert figures["gpu_demands"] == {"1": 1, "2": 1, "3": 1, "4": 1}
    assert "left out" not in err
    code, _, err = run("fleet", "simulate", name, "-c", "1x8xv100", "-p", "fifo:tune")
    assert code == 0, err
    # A job of 3 GPUs counts as one of 1, as the published reader has it; and that is said.
    code, out, err = run("fleet", "trace", name, "--published-filter", "--json")
    assert json.loads(out)["gpu_demands"] == {"1": 2, "2": 1, "4": 1}
    assert f"{name}: 4 jobs; by --published-filter 1 whose GPUs are no power of two" in err


def test_a_job_of_a_log_lasts_as_long_as_it_did_and_belongs_to_its_user(run, tmp_path):
    rows = ["submitted,duration,gpus,user", "0,7200,1,ana", "0,3600,3,bob", "0,600,2,ana"]
    (tmp_path / "lab.csv").write_text("\n".join([*rows, ""]))
    code, out, err = run(
        *("fleet", "simulate", "lab.csv", "-c", "1x8xa100", "-p", "fifo:fair,fifo:tune"),
        *("--results", "ends.csv", "--json"),
    )
    assert code == 0, err
    assert "they count as insensitive to CPUs and memory; --profiles says what they need" in err
    figures = json.loads(out)
    assert figures["trace"]["tenants"] == {"ana": 2, "bob": 1}
    assert [run_["makespan_s"] for run_ in figures["runs"]] == [7200.0, 7200.0]
    assert figures["runs"][0]["mean_s"] == (7200 + 3600 + 600) / 3
    _, out, _ = run("fleet", "simulate", "lab.csv", "-c", "1x8xa100", "-p", "fifo:fair,fifo:tune")
    assert [line.split()[0] for line in out.splitlines() if " fifo:" in line] == ["1", "1"]
    (tmp_path / "lab.csv").write_text("submitted,duration\n0,5\n")
    code, _, err = run("fleet", "simulate", "lab.csv", "-c", "1x8xa100")
    assert code == 2
    assert "lab.csv:1: no column has the number of GPUs, such as num_gpus, gpus, gpu_num" in err


def test_jobs_of_a_log_that_cannot_run_are_counted_and_the_others_kept(run, tmp_path):
    rows = ["0,5,1", "10,3600,3", "20,900000,1", "30,0,1", "40,60,0"]
    (tmp_path / "my.csv").write_text("\n".join(["timestamp,duration,gpus", *rows, ""]))
    words = ("fleet", "simulate", "my.csv", "-c", "1x8xv100", "-p", "fifo:fair", "--json")
    code, out, err = run(*words)
    assert code == 0, err
    assert json.loads(out)["runs"][0]["jobs"] == 4
    assert err.splitlines()[0] == (
        "my.csv: 4 jobs; 1 without a duration taken as one iteration; 1 without a GPU left out"
    )
    code, out, err = run(*words, "--published-filter")
    assert json.loads(out)["runs"][0]["jobs"] == 1
    assert "by --published-filter 3 shorter than 32 or longer than 10,000 minutes left out" in err
    code, _, err = run("fleet", "simulate", *SMALL, "--published-filter")
    assert code == 2
    assert "is for a log of submissions" in err


def test_policies_are_ranked_by_class_with_files(run, tmp_path):
    code, out, err = run(
        *("fleet", "simulate", *SMALL, "-p", "fifo:fair,fifo:tune", "-p", "srtf:opt"),
        *("--picture", "study.svg", "--csv", "study.csv", "--results", "ends.csv"),
        *("-o", "history.json"),
    )
    assert code == 0, err
    assert "by class of jobs" in out
    assert "modelled" in out
    assert "gap" in out
    assert "<svg" in Path("study.svg").read_text()
    rows = Path("study.csv").read_text().splitlines()
    assert rows[0].startswith("policy,rules,load_per_hour,class")
    assert len(rows) == 1 + 3 * 4
    assert len(read_results(Path("ends.fifo-fair.csv").read_text())) == 30
    history = load("history.srtf-opt.json")
    assert isinstance(history, FleetHistory)
    assert len(history.leases) >= 30


def test_a_sweep_of_loads_as_json_and_a_folder_of_pictures(run):
    code, out, err = run(
        *("fleet", "simulate", *SMALL, "-p", "fifo:tune", "--loads", "2:6:2", "--window", "5:24"),
        *("--picture", "pictures", "--json"),
    )
    assert code == 0, err
    figures = json.loads(out)
    assert [each["load_per_hour"] for each in figures["runs"]] == [2, 4, 6]
    assert {each["jobs"] for each in figures["runs"]} == {20}
    assert Path("pictures/loads.svg").exists()
    assert Path("pictures/queue.svg").exists()


def test_both_rules_are_compared_and_explained(run):
    code, out, err = run("fleet", "simulate", *SMALL, "-p", "ftf:tune", "--both")
    assert code == 0, err
    assert "ftf:tune as released" in out
    assert "FTF serves the largest ratio" in out
    code, _, err = run("fleet", "simulate", *SMALL, "--as-released", "--round", "60")
    assert code == 2
    assert "rules of rounds cannot be given" in err


def test_a_power_cap_says_what_it_costs(run):
    code, out, err = run(
        "fleet", "simulate", *SMALL, "-p", "fifo:tune", "--power-cap", "1.6", "--json"
    )
    assert code == 0, err
    (cap,) = json.loads(out)["power_cap"]
    assert cap["peak_w"] <= 1600
    assert cap["lost"] < cap["equal_lost"]
    code, out, _ = run("fleet", "simulate", *SMALL, "-p", "fifo:tune", "--power-cap", "1.6")
    assert "one limit for all" in out
    code, _, err = run("fleet", "simulate", *SMALL, "--power-cap", "0.05")
    assert code == 3
    assert "at their slowest" in err


def test_tenants_quotas_and_outages(run):
    run("fleet", "trace", "--jobs", "30", "--short", "--tenants", "a=2,b=1", "-o", "t.json")
    base = ("fleet", "simulate", "t.json", "-c", "2x4xv100", "-q", "--json", "-p", "drf:tune")
    code, out, err = run(*base)
    free = json.loads(out)["runs"][0]["mean_s"]
    code, out, err = run(*base, "--quota", "a=2")
    assert code == 0, err
    assert json.loads(out)["runs"][0]["mean_s"] > free
    code, out, err = run(*base, "--outage", "host0=3600:36000")
    assert code == 0, err
    assert json.loads(out)["runs"][0]["preemptions"] > 0
    code, _, err = run(*base, "--outage", "host9=1")
    assert code == 2
    assert "there is no server 'host9'" in err


def test_a_curve_by_the_planner_makes_elastic_jobs(run):
    code, out, err = run(
        *("fleet", "curve", "gpt-small", "--devices", "a100:1,2,4", "-p", "uniform"),
        *("--kind", "language", "-o", "gpt.json", "-q"),
    )
    assert code == 0, err
    assert "planned, not measured" in out
    assert isinstance(load("gpt.json"), Sensitivity)
    code, _, err = run(
        *("fleet", "trace", "--profiles", "gpt.json", "--jobs", "12", "--short"),
        *("--gpus", "2=1", "--elastic", "1:4", "-o", "elastic.json"),
    )
    assert code == 0, err
    assert isinstance(load("elastic.json"), Trace)
    code, out, err = run(
        "fleet", "simulate", "elastic.json", "-c", "1x8xa100", "-p", "fifo:tune,fifo:joint", "-q"
    )
    assert code == 0, err
    assert "fifo:joint" in out


def test_clusters_profiles_and_traces_are_converted(run, tmp_path):
    ini = "[CLUSTER]\nracks = 1\nservers_per_rack = 2\ngpus_per_server = 4\ncpus_per_server = 12\n"
    (tmp_path / "lab.ini").write_text(ini)
    assert run("convert", "lab.ini", "lab.json")[0] == 0
    assert run("convert", "lab.json", "again.ini")[0] == 0
    text = Path("again.ini").read_text()
    assert "servers_per_rack = 2" in text
    assert "dram_per_server = 500" in text
    code, out, _ = run("fleet", "simulate", SMALL[0], "-c", "lab.ini", "-p", "fifo:tune", "-q")
    assert "8 GPUs in 2 servers, each 4 GPUs, 12 CPUs" in out
    profile = [{"2": 0.5}, {"2": {"0": 40.0, "100": 20.0}}, {"2": {"0": 100.0, "100": 0.0}}]
    (tmp_path / "job.json").write_text(json.dumps(profile))
    assert run("convert", "job.json", "sensitivity.json")[0] == 0
    code, _, err = run("convert", "sensitivity.json", "profile.json", "--to", "synergy-profile")
    assert code == 0, err
    run("fleet", "trace", "--profiles", "job.json", "--jobs", "3", "-o", "t.csv")
    code, _, err = run("convert", "t.csv", "t.json")
    assert code == 2
    assert "partita fleet trace" in err
    code, out, _ = run("fleet", "trace", "t.csv", "--profiles", "job.json", "--json")
    assert json.loads(out)["models"][0]["model"] == "job"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("simulate", "generated:foo=1"), "'foo=1' is not understood"),
        (("simulate", "generated", "-p", "fifo:best"), "is not ORDERING:ALLOCATOR"),
        (("simulate", "generated", "--loads", "4:1"), "is not FIRST:LAST"),
        (("simulate", "generated", "--loads", "x"), "expected a number above 0"),
        (("simulate", "generated", "--window", "5"), "is not of the form FIRST:LAST"),
        (("simulate", "missing.json"), "cannot be read"),
        (("simulate", "generated", "--power-model", "tpu9"), "tpu9"),
        (("trace", "--split", "image=x"), "write NAME=SHARE"),
        (("trace", "--single-gpu"), "is for a log"),
        (("trace", "--elastic", "1:4"), "partita fleet curve"),
        (("curve", "gpt-small", "--devices", "a100"), "is not of the form TYPE:1,2,4"),
        (("curve", "gpt-small", "--devices", "a100:9"), "do not fill hosts of 8"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(run, arguments, message):
    code, _, err = run("fleet", *arguments, "-q")
    assert code == 2
    assert message in err
    assert len(err.strip().splitlines()) == 1


def test_a_trace_of_synergy_needs_its_profiles(run, tmp_path):
    (tmp_path / "t.csv").write_text("0,alexnet,8,23349,1\n")
    code, _, err = run("fleet", "simulate", "t.csv")
    assert code == 2
    assert "t.csv:1: unknown model 'alexnet'" in err
    assert "--profiles" in err


def test_published_traces_end_as_recorded(run, shared_data):
    folder = shared_data / "synergy"
    code, _, err = run(
        *("fleet", "simulate", str(folder / "traces" / "deploy_dynamic_100.csv")),
        *("--profiles", str(folder / "model_profiles.json")),
        *("--cluster", str(folder / "configs" / "c32.ini")),
        *("-p", "srtf:tune", "--as-released", "--results", "ends.csv", "-q"),
    )
    assert code == 0, err
    recorded = (folder / "results" / "dyn100_32gpu-SRTF-tune.csv").read_text()
    assert read_results(Path("ends.csv").read_text()) == read_results(recorded)


@pytest.mark.slow
def test_the_commands_of_the_page_run_in_their_order(run_page):
    page = Path(__file__).resolve().parents[2] / "docs" / "fleet.md"
    assert len(run_page(page)) >= 6


@pytest.mark.parametrize("name", ["t.json", "t.csv", "log.csv"])
def test_a_trace_may_be_standard_input(run, tmp_path, give_stdin, name):
    for file in ("t.json", "t.csv"):
        assert run("fleet", "trace", "--jobs", "5", "--short", "-o", file)[0] == 0
    (tmp_path / "log.csv").write_text("timestamp,duration,gpus\n0,3600,1\n60,7200,3\n")
    figures = []
    for source in (name, "-"):
        give_stdin(name)
        code, out, err = run(
            "fleet", "simulate", source, "-c", "1x8xv100", "-p", "fifo:fair", "--json"
        )
        assert code == 0, err
        figures.append(json.loads(out)["runs"])
    assert figures[0] == figures[1]


def test_profiles_may_be_standard_input(run, give_stdin):
    assert run("fleet", "trace", "--jobs", "5", "-o", "t.json")[0] == 0
    give_stdin("t.json")
    code, out, err = run("fleet", "trace", "--jobs", "3", "--profiles", "-", "--json")
    assert code == 0, err
    assert json.loads(out)["jobs"] == 3
