"""The command line end to end: every command, its JSON, its files, its errors and exit codes."""

import io
import json
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from partita.catalogue.examples import EXAMPLES, example
from partita.cli.main import COMMANDS, main
from partita.core.codec import encode
from partita.core.solution import Solution
from partita.core.timeline import Timeline, TimelineOrigin
from partita.cost.predict import simulate
from partita.documents import load, save

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def plan_file(run: Run, tmp_path: Path) -> Path:
    code, _, err = run(
        "plan", "gpt-small", "-p", "uniform", "-c", "4xa100", "-o", "gpt.plan.json", "-q"
    )
    assert code == 0, err
    return tmp_path / "gpt.plan.json"


def test_help_lists_every_command(run: Run) -> None:
    code, out, _ = run("--help")
    assert code == 0
    assert all(command in out for command in COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help_with_an_example_and_json(run: Run, command: str) -> None:
    code, out, _ = run(command, "--help")
    assert code == 0
    assert re.search(rf"Examples?: partita {command}", " ".join(out.split()))
    assert "--json" in out


DEMO = """
import sys
import partita.cli.demo as demo
import partita.flows.demo as flow
from partita.cli.main import main
flow.SCALE, flow.SEQUENCE_LENGTH, flow.BATCH_SIZE, flow.STEPS = 0.1, 16, 2, 3
found = []
ask = demo.demo_request
demo.demo_request = lambda *request: found[0] if found else found.append(ask(*request)) or found[0]
for options in ([], ["--json"]):
    try:
        main(["demo", "--rounds", "1", "-o", "out", *options])
    except SystemExit as stop:
        if stop.code:
            raise
    print("end of it")
"""
"""Measures, plans and trains a narrower GPT once, and prints that twice: as text, and as JSON."""


@pytest.fixture(scope="module")
def demo(commands: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str, str]:
    """Return what the demo wrote and printed, in a process of its own: ranks are forked from it."""
    place = tmp_path_factory.mktemp("demo")
    done = commands.run(python=DEMO, folder=place, timeout_s=600.0)
    assert done.returncode == 0, done.stderr
    text, values, _ = done.stdout.split("end of it\n")
    return place / "out", text, values


@pytest.mark.slow
def test_demo_measures_plans_trains_simulates_draws_and_writes_a_valid_trace(
    demo: tuple[Path, str, str],
) -> None:
    folder, out, _ = demo
    assert "gradients equal the captured graph" in " ".join(out.split())
    assert "gradients equal the untouched module" in " ".join(out.split())
    assert "x the whole step" in out
    assert "accuracy on v100" in out
    assert "auto" in out
    assert "uniform" in out
    assert "no plan can beat" in out
    trace = json.loads((folder / "trace.json").read_text())
    assert trace["traceEvents"]
    mixed, here = (load(folder / name) for name in ("gpt3-xl.plan.json", "here.plan.json"))
    assert isinstance(mixed, Solution)
    assert isinstance(here, Solution)
    origins = {costs.device_type: costs.origin.value for costs in mixed.problem.graph.costs}
    assert origins == {"a100": "estimated", "v100": "estimated"}
    assert mixed.planner == "auto"
    assert mixed.gap < 0.3
    assert {device.type for device in here.problem.cluster.devices} == {"cpu"}
    assert (folder / "pipeline.svg").read_text().startswith("<svg")


@pytest.mark.slow
def test_demo_json_ranks_the_plans(demo: tuple[Path, str, str]) -> None:
    found = json.loads(demo[2])
    assert found["trained"]["check"]["equal"]
    for plans in (found["plans"], found["here"]):
        values = [row["value"] for row in plans if "value" in row]
        assert values == sorted(values)
    parts = found["profile"]["sum_forward_s"] + found["profile"]["sum_backward_s"]
    assert found["profile"]["ratio"] == pytest.approx(parts / found["profile"]["whole_s"])


def test_plan_writes_a_numbered_file_and_says_so(run: Run, tmp_path: Path) -> None:
    for name in ("gpt-small.plan.json", "gpt-small-2.plan.json"):
        code, out, err = run("plan", "gpt-small", "-q")
        assert code == 0
        assert f"written to {name}" in " ".join(out.split())
        assert ("gpt-small.plan.json exists and is kept" in err) == (name != "gpt-small.plan.json")
        assert (tmp_path / name).exists()


def test_plan_json_writes_no_file_and_has_documented_keys(run: Run, tmp_path: Path) -> None:
    code, out, _ = run("plan", "resnet50", "-c", "2x2xv100", "--json")
    found = json.loads(out)
    documented = (Path(__file__).parents[2] / "docs" / "command-line.md").read_text()
    assert code == 0
    assert not list(tmp_path.iterdir())
    assert found["step_s"] > 0
    assert found["solution"]["format"] == "partita.solution"
    assert all(
        f"`{key}" in documented or f"{key}`" in documented or key in documented for key in found
    )


@pytest.mark.parametrize("name", EXAMPLES)
def test_every_built_in_example_can_be_planned(run: Run, name: str) -> None:
    code, out, err = run("plan", name, "--json")
    if code == 3:  # Baechi's first toy is too tight for equal parts
        assert "limit" in err
        return
    assert code == 0, err
    assert json.loads(out)["value"] >= 0


def test_plan_reads_a_document_from_stdin(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    text = json.dumps(encode(example("resnet50").graph))
    stdin = io.TextIOWrapper(io.BytesIO(text.encode()), encoding="utf-8")
    monkeypatch.setattr(sys, "stdin", stdin)
    code, out, err = run("plan", "-", "-p", "uniform", "-c", "4xa100", "--json")
    assert code == 0, err
    assert json.loads(out)["plan"] == "4 stages, 1f1b"


def test_partition_is_planner_and_options_reach_it(run: Run) -> None:
    _, first, _ = run("plan", "gpt-small", "--partition", "custom:0,5,15", "--json")
    _, second, _ = run("plan", "gpt-small", "-p", "uniform", "-O", "stages=2", "--json")
    assert json.loads(first)["options"]["boundaries"] == [0, 5, 15]
    assert json.loads(second)["plan"] == "2 stages, 1f1b"


def test_any_two_batch_options_give_the_third(run: Run) -> None:
    arguments = (
        ("--microbatches", "4", "--microbatch-size", "2"),
        ("--batch-size", "8", "--microbatches", "4"),
    )
    steps = []
    for options in arguments:
        _, out, _ = run("plan", "gpt-small", "-p", "uniform", "--json", *options)
        steps.append(json.loads(out)["step_s"])
    assert steps[0] == steps[1]


def test_compare_ranks_and_reports_what_does_not_fit(run: Run) -> None:
    code, out, _ = run(
        "compare", "gpt-small", "-c", "4xa100", "-p", "single", "-p", "uniform", "-p", "custom:0,3"
    )
    assert code == 0
    assert out.index("uniform") < out.index("single")
    assert "must be 15" in " ".join(out.split())


def test_compare_with_no_plan_that_fits_exits_3(run: Run) -> None:
    code, _, err = run("compare", "gpt-small", "-c", "2xa100", "--memory-factor", "0.001")
    assert code == 3
    assert err.strip().splitlines()[-1].startswith("partita: ")


def test_simulate_draws_and_writes_trace_picture_and_timeline(run: Run, plan_file: Path) -> None:
    code, out, err = run(
        *("simulate", str(plan_file), "--trace", "t.json", "--picture", "p.svg", "-o", "time.json"),
        *("--period", "--width", "80"),
    )
    assert code == 0, err
    assert "steady state" in out
    assert isinstance(load("time.json"), Timeline)
    assert json.loads(Path("t.json").read_text())["traceEvents"]
    assert max(map(len, out.splitlines())) <= 120


def test_simulate_shows_the_measured_step_of_a_run(run: Run, plan_file: Path) -> None:
    folder = Path("runs/one")
    folder.mkdir(parents=True)
    (folder / "plan.json").write_bytes(plan_file.read_bytes())
    assert "· simulated" in run("simulate", str(folder), "-q")[1]  # no step was measured
    step = simulate(load(plan_file).problem, load(plan_file).plan)
    nothing: dict[str, Any] = {name: [] for name in ("memory_device", "memory_s", "memory_bytes")}
    slow = {"start_s": 2 * step.start_s, "end_s": 2 * step.end_s}
    measured = replace(step, origin=TimelineOrigin.MEASURED, **slow, **nothing)
    save(measured, folder / "timeline.json")
    for name in (folder, folder / "timeline.json"):
        code, out, err = run("simulate", str(name), "--picture", "p.svg", "--json")
        assert code == 0, err
        found = json.loads(out)
        assert found["origin"] == "measured"
        assert found["makespan_s"] == pytest.approx(2 * step.makespan_s)
        assert found["devices"][0]["peak_bytes"] is None
        assert found["devices"][0]["memory"]
        assert Path("p.svg").read_text().startswith("<svg")
    assert "· measured" in run("simulate", str(folder), "-q")[1]
    again = run("simulate", str(folder), "--slow", f"{step.devices[0]}=2", "--json")
    assert json.loads(again[1])["origin"] == "simulated"


def test_pictures_keep_to_the_signs_of_the_locale(
    run: Run, plan_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("LC_ALL", "LC_CTYPE"):
        monkeypatch.delenv(name, raising=False)
    seen = {}
    for locale in ("C", "C.UTF-8"):
        monkeypatch.setenv("LANG", locale)
        seen[locale] = "|" in run("simulate", str(plan_file), "-q")[1]
    assert seen == {"C": True, "C.UTF-8": False}


@pytest.mark.parametrize(
    ("command", "taken", "not_taken"),
    [
        (("plan",), "a cost graph of Baechi", "a placement of Baechi"),
        (("simulate",), "PipeDream's plan gpus=N.txt", "Perseus's profile.csv"),
        (("energy", "frontier"), "Perseus's profile.csv", "a job log of Philly"),
    ],
)
def test_a_file_of_no_format_is_told_the_formats_of_that_command(
    run: Run, command: tuple[str, ...], taken: str, not_taken: str
) -> None:
    Path("text.txt").write_text("hello\n")
    code, _, err = run(*command, "text.txt", "-q")
    assert code == 2
    assert "the file is in no known format; known are: a document of Partita (JSON); " in err
    assert taken in err
    assert not_taken not in err


def test_robustness_says_step_time(run: Run, plan_file: Path) -> None:
    out = run("robustness", str(plan_file), "--samples", "2", "--replans", "0", "-q")[1]
    assert "step time relative to the nominal one" in out


def test_an_interrupt_ends_as_shells_expect_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("partita.cli.devices.devices_request", interrupted)
    with pytest.raises(SystemExit) as stopped:
        main(["devices"])
    assert stopped.value.code == 130


def test_simulate_straggler_and_noise(run: Run, plan_file: Path) -> None:
    def makespan(*options: str) -> float:
        code, out, err = run("simulate", str(plan_file), "--json", *options)
        assert code == 0, err
        return float(json.loads(out)["makespan_s"])

    plain = makespan()
    assert makespan("--slow", "host0/gpu1=2") > plain
    assert makespan("--perturb", "0.2", "--seed", "1") == makespan(
        "--perturb", "0.2", "--seed", "1"
    )
    assert makespan("--perturb", "0.2", "--seed", "1") != makespan(
        "--perturb", "0.2", "--seed", "2"
    )


def test_simulate_blocking_transfers_takes_longer_and_says_so(run: Run, plan_file: Path) -> None:
    found = {}
    for mode in ("overlapped", "blocking"):
        code, out, err = run("simulate", str(plan_file), "--json", "--transfers", mode)
        assert code == 0, err
        found[mode] = json.loads(out)
        assert found[mode]["transfers"] == mode
    assert found["blocking"]["makespan_s"] > found["overlapped"]["makespan_s"]
    code, out, err = run("simulate", str(plan_file), "--transfers", "blocking")
    assert code == 0, err
    assert "blocking transfers" in out


def test_a_bare_plan_needs_its_graph(run: Run, plan_file: Path) -> None:
    save(load(plan_file).plan, "bare.json")
    code, _, err = run("simulate", "bare.json")
    assert code == 2
    assert "--graph" in err
    code, out, err = run("simulate", "bare.json", "--graph", "gpt-small", "-c", "4xa100", "--json")
    assert code == 0, err
    assert json.loads(out)["makespan_s"] > 0


def test_explain_answers_what_if(run: Run, plan_file: Path) -> None:
    code, out, err = run(
        "explain", str(plan_file), "--what-if", "bandwidth=2x", "--what-if", "+1xa100", "--json"
    )
    assert code == 0, err
    found = json.loads(out)
    assert [answer["change"] for answer in found["what_if"]] == ["bandwidth=2x", "+1xa100"]
    assert found["what_if"][0]["relative"] <= 0
    assert {"weights_bytes", "gradients_bytes", "optimizer_bytes"} <= set(found["devices"][0])


def test_explain_says_that_a_fixed_map_cannot_be_planned_again(run: Run) -> None:
    Path("map.yaml").write_text("'*': host0/gpu0\n")
    run("plan", "gpt-small", "-c", "2xa100", "-p", "manual:map.yaml", "-o", "m.json", "-q")
    code, out, _ = run("explain", "m.json", "--what-if", "+1xa100", "-q")
    assert code == 0
    assert "cannot be planned again" in " ".join(out.split())


def test_convert_to_pipedream_and_back(run: Run) -> None:
    run("plan", "six-node-chain", "-o", "six.json", "-q")
    code, out, err = run("convert", "six.json", "gpus=4.txt")
    assert code == 0, err
    assert "pipedream-plan" in out
    assert "stage_id=" in Path("gpus=4.txt").read_text()
    assert run("convert", "gpus=4.txt", "back.json")[0] == 0


def test_convert_a_cluster_to_yaml(run: Run) -> None:
    run("plan", "gpt-small", "-c", "2x2xa100", "-o", "plan.json", "-q")
    assert run("convert", "plan.json", "cluster.yaml")[0] == 0
    code, out, err = run("plan", "gpt-small", "-c", "cluster.yaml", "--json")
    assert code == 0, err
    assert len(json.loads(out)["devices"]) == 4


def test_doctor_reports_this_machine(run: Run) -> None:
    code, out, _ = run("doctor", "--json")
    assert code == 0
    assert json.loads(out)["ready"]["plan"] is True
    assert run("doctor", "--why")[0] == 0


BAD = [
    (("plan", "no-such-file.json"), 2, "no such file"),
    (("plan", "."), 2, "directory"),
    (("plan", "gpt-small", "-c", "4xa1000"), 2, "a100"),
    (("plan", "gpt-small", "-c", "0xa100"), 2, "0xa100"),
    (("plan", "gpt-small", "-p", "unifrom"), 2, "uniform"),
    (("plan", "gpt-small", "-p", "uniform", "-O", "stagez=2"), 2, "stages"),
    (("plan", "gpt-small", "-O", "stages"), 2, "name=value"),
    (("plan", "gpt-small", "-p", "custom:0,8,14"), 2, "15"),
    (("plan", "gpt-small", "-p", "custom:a,b"), 2, "custom:0,8"),
    (("plan", "gpt-small", "-p", "manual:none.yaml"), 2, "none.yaml"),
    (
        ("plan", "gpt-small", "--microbatches", "3", "--microbatch-size", "2", "--batch-size", "7"),
        2,
        "not",
    ),
    (("plan", "gpt-small", "-p", "uniform", "--memory-factor", "0.0001"), 3, "its limit"),
    (("plan", "gpt-small", "--memory-factor", "-1"), 2, "memory_factor"),
    (("plan", "gpt-small", "-p", "uniform", "--schedule", "pipedream"), 2, "tied"),
    (("plan", "gpt-small", "-c", "4xa100", "--devices", "2"), 2, "exclude"),
    (("plan", "gpt-small", "--bandwidth", "attic=1"), 2, "host"),
    (("plan",), 2, "MODEL"),
    (("simulate", "gpt-small"), 2, "gpt-small"),
    (("plna",), 2, "plan"),
    (("plan", "gpt-small", "--nonsense"), 2, "--nonsense"),
]


@pytest.mark.parametrize(("arguments", "code", "word"), BAD, ids=[" ".join(row[0]) for row in BAD])
def test_bad_input_is_one_clear_line(
    run: Run, arguments: tuple[str, ...], code: int, word: str
) -> None:
    found, out, err = run(*arguments)
    lines = [line for line in err.strip().splitlines() if not line.startswith("planning")]
    assert found == code, err
    assert len(lines) == 1, err
    assert lines[0].startswith("partita: ")
    assert word in lines[0]
    assert not out


BROKEN = {
    "empty": b"",
    "garbage": bytes(range(256)),
    "truncated": json.dumps(encode(example("gpt-small").graph)).encode()[:5000],
    "newer": b'{"format": "partita.graph", "version": 99}',
    "list": b"[1, 2, 3]",
    "nan": b'{"format": "partita.graph", "version": NaN}',
    "deep": b"[" * 100_000,
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_files_are_refused_in_one_line(run: Run, tmp_path: Path, name: str) -> None:
    (tmp_path / "broken.json").write_bytes(BROKEN[name])
    for command in (
        ("plan", "broken.json"),
        ("simulate", "broken.json"),
        ("convert", "broken.json", "x.json"),
    ):
        code, _, err = run(*command)
        assert code == 2, err
        assert len(err.strip().splitlines()) == 1
        assert "broken.json" in err
    assert [path.name for path in tmp_path.iterdir()] == ["broken.json"]


def test_crlf_and_byte_order_mark_are_read(run: Run, tmp_path: Path) -> None:
    text = json.dumps(encode(example("resnet50").graph), indent=1)
    (tmp_path / "dos.json").write_bytes(b"\xef\xbb\xbf" + text.replace("\n", "\r\n").encode())
    code, _, err = run("plan", "dos.json", "--json")
    assert code == 0, err


def test_debug_shows_the_traceback(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="unifrom"):
        main(["plan", "gpt-small", "-p", "unifrom", "--debug"])


LARGE = ("plan", "gpt-small", "-p", "single", "--json")
"""Prints more than a buffer holds."""


@pytest.mark.parametrize("buffered", ["", "1"])
@pytest.mark.parametrize("arguments", [("models", "inception"), LARGE, ("plan", "--help")])
def test_a_full_disk_is_one_line(
    commands: Any, tmp_path: Path, arguments: tuple[str, ...], buffered: str
) -> None:
    done = commands.run(*arguments, folder=tmp_path, out="/dev/full", PYTHONUNBUFFERED=buffered)
    assert done.returncode == 4
    (line,) = done.stderr.splitlines()
    assert line.startswith("partita: standard output")
    assert line.endswith("cannot be written: no space left on device")


def test_a_demo_that_has_no_folder_fails_in_one_line_before_it_measures(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def measure(*_: object, **__: object) -> None:
        raise AssertionError("measured first")

    monkeypatch.setattr("partita.flows.demo.profile", measure)
    code, _, err = run("demo", "-o", "/proc/partita")
    assert code == 4
    assert err == "partita: /proc/partita: no such file or directory\n"


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (PermissionError(13, "Permission denied", "there"), "partita: there: permission denied"),
        (OSError(30, "Read-only file system"), "partita: read-only file system"),
        (OSError("odd"), "partita: odd"),
    ],
)
def test_what_the_system_refuses_is_one_line(
    run: Run, monkeypatch: pytest.MonkeyPatch, error: OSError, line: str
) -> None:
    def refuse() -> None:
        raise error

    monkeypatch.setattr("partita.cli.doctor.doctor", refuse)
    assert run("doctor") == (4, "", f"{line}\n")


def test_doctor_offers_nothing_that_is_not_used(run: Run) -> None:
    found = json.loads(run("doctor", "--json")[1])["packages"]
    assert not {"ortools", "ray"} & set(found)


def test_train_names_its_default_planner(run: Run) -> None:
    out = " ".join(run("train", "--help")[1].split())
    assert "[auto; uniform with --pp or --dp]" in out


@pytest.mark.slow
def test_the_installed_command_survives_a_closed_pipe(tmp_path: Path) -> None:
    command = f"{sys.executable} -m partita explain p.json | head -1"
    setup = [
        sys.executable,
        "-m",
        "partita",
        "plan",
        "gpt-small",
        "-p",
        "uniform",
        "-o",
        "p.json",
        "-q",
    ]
    subprocess.run(setup, cwd=tmp_path, check=True, capture_output=True, timeout=120)
    result = subprocess.run(
        command, shell=True, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=120
    )
    assert "Traceback" not in result.stderr


def test_options_on_a_saved_plan_change_the_plan(run: Run, plan_file: Path) -> None:
    def figures(*options: str) -> dict:
        code, out, err = run("simulate", str(plan_file), "--json", *options)
        assert code == 0, err
        return json.loads(out)

    plain = figures()
    assert figures("--microbatches", "4")["makespan_s"] < plain["makespan_s"]
    assert figures("--schedule", "gpipe")["plan"].endswith("gpipe")


def test_a_foreign_plan_is_simulated_with_its_problem(run: Run) -> None:
    run("plan", "chain201", "-o", "c.json", "-q")
    assert run("convert", "c.json", "parts.json", "--to", "dynamicml-plan")[0] == 0
    code, out, err = run("simulate", "parts.json", "--graph", "chain201", "--json")
    assert code == 0, err
    assert json.loads(out)["makespan_s"] > 0


def test_a_plan_whose_value_was_edited_is_evaluated_again(run: Run, plan_file: Path) -> None:
    document = json.loads(plan_file.read_text())
    honest = document["value"]
    document["value"] = honest / 2
    document["lower_bound"] = 0
    plan_file.write_text(json.dumps(document))
    _, out, _ = run("explain", str(plan_file), "--json", "--what-if", "bandwidth=1x")
    assert json.loads(out)["value"] == pytest.approx(honest)


def test_the_command_alone_prints_help(run: Run) -> None:
    code, out, _ = run()
    assert code == 0
    assert "Commands:" in out


def test_a_narrow_terminal_keeps_planner_and_plan(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "70")
    code, out, _ = run(
        "compare", "gpt-small", "-c", "2xa100", "-p", "single", "-p", "uniform", "-q"
    )
    assert code == 0
    assert "single" in out
    assert "stages" in out
    assert "MFU" not in out
