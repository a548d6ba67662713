"""``partita energy`` from the command line, and energy in ``plan`` and ``compare``."""

import json
import math
import xml.etree.ElementTree as ET
from collections.abc import Callable
from pathlib import Path

import pytest

from partita.core.energy import EnergyOrigin, EnergyProfile, Frontier
from partita.core.program import Kind
from partita.core.solution import Solution
from partita.documents import load, save
from partita.formats.perseus import (
    Logged,
    read_clock_plan,
    read_energy_csv,
    write_energy_log,
    write_instruction_log,
)

Run = Callable[..., tuple[int, str, str]]
CLOCKS = (1400, 1200, 1000, 800)
PIPELINE = ("--microbatches", "4", "--blocking-power", "80")
COMMANDS = ("profile", "frontier", "choose", "replay", "compare", "serve")


def seconds(stage: int, backward: bool, clock: int) -> float:
    """Return the time of an instruction; the highest clock throttles."""
    work = (0.1 + 0.02 * stage) * (2 if backward else 1)
    return work * (0.3 + 0.7 * 1200 / min(clock, 1200)) * (1.01 if clock > 1200 else 1)


def joules(stage: int, backward: bool, clock: int) -> float:
    return seconds(stage, backward, clock) * (80 + 220 * (min(clock, 1200) / 1200) ** 2.7)


@pytest.fixture
def profile(run: Run) -> str:
    """Write a profile.csv of three stages into the working folder."""
    rows = [
        f"{stage},{'backward' if b else 'forward'},{c},{seconds(stage, b, c)},{joules(stage, b, c)}"
        for stage in range(3)
        for b in (False, True)
        for c in CLOCKS
    ]
    Path("profile.csv").write_text("\n".join(["stage,instruction,frequency,time,energy", *rows]))
    return "profile.csv"


def said(result: tuple[int, str, str]) -> dict:
    code, out, err = result
    assert code == 0, err
    return json.loads(out)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_an_example_and_json_in_its_help(run: Run, name: str) -> None:
    code, out, _ = run("energy", name, "--help")
    assert code == 0
    assert f"\n  partita energy {name} " in out
    assert "--json" in out


def test_the_group_lists_its_commands_and_suggests_near_names(run: Run) -> None:
    code, out, _ = run("energy", "--help")
    assert all(f"  {name}" in out for name in COMMANDS)
    code, _, err = run("energy", "frontire")
    assert code == 2
    assert "did you mean 'frontier'?" in err


def test_a_frontier_is_shown_drawn_and_written(run: Run, profile: str) -> None:
    files = ("--picture", "f.svg", "-o", "f.json", "--plans", "clocks")
    code, out, err = run("energy", "frontier", profile, *PIPELINE, "--points", "5", *files)
    assert code == 0, err
    for words in ("T_min", "T*", "no slowdown", "gap to bound", "energy from a profile file"):
        assert words in out
    assert "beats all-max" in out
    assert "saved with a straggler 1.2 times as slow, 16 pipelines" in out
    found = load("f.json")
    assert isinstance(found, Frontier)
    assert found.solution is not None
    texts = [element.text or "" for element in ET.parse("f.svg").getroot().iter()]
    assert any("from a profile file" in text for text in texts)
    plans = sorted(Path("clocks").iterdir())
    assert [path.name for path in plans][:1] == ["freqs_pipeline_00000.py"]
    assert len(plans) == len(found)
    # The last is the fastest, as Perseus numbers them; its comment says what it claims.
    assert f"# time_s {float(found.time_s[0])!r}" in plans[-1].read_text()
    assert len(read_clock_plan(plans[-1].read_text())) == 3


def test_the_figures_of_a_frontier_as_json_and_its_points_as_csv(run: Run, profile: str) -> None:
    figures = said(run("energy", "frontier", profile, *PIPELINE, "-o", "f.csv", "--json"))
    assert figures["written"] == ["f.csv"]
    assert Path("f.csv").read_text().startswith("time,energy\n")
    assert len(figures["points"]) > 20
    assert all(point["gap"] >= 0 for point in figures["points"])
    assert figures["better_than_all_max"][0] == 0
    assert figures["savings"][0]["saving"] > 0.05
    assert figures["savings"][1]["straggler"] == 1.2
    times = [point["time_s"] for point in figures["points"]]
    asked = said(run("energy", "frontier", profile, *PIPELINE, "--to-slowest", "--json"))
    assert asked["points"][0]["time_s"] == pytest.approx(times[0])


def test_a_missing_blocking_power_is_assumed_and_said(run: Run, profile: str) -> None:
    code, out, _ = run("energy", "frontier", profile, "--points", "3")
    assert code == 0
    assert "assumed: a device that waits draws 70 W" in out


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("frontier", "profile.csv", "--stages", "8"), 2, "has 3 stages"),
        (("frontier", "profile.csv", "--picture", "f.gif"), 2, "ends with .gif"),
        (("frontier", "profile.csv", "--at", "nan"), 2, "at is nan; expected a finite"),
        (
            ("frontier", "profile.csv", "--straggler", "inf"),
            2,
            "straggler is inf; expected a finite",
        ),
        (
            ("compare", "profile.csv", "--straggler", "nan"),
            2,
            "straggler is nan; expected a finite",
        ),
        (("frontier", "profile.csv", "--profile", "profile.csv"), 2, "is a profile itself"),
        (("frontier", "profile.csv", "-c", "4xa100"), 2, "--cluster does not apply"),
        (("profile", "profile.csv", "--clock", "900"), 2, "is for a folder of logs"),
        (("profile", ".", "-c", "4xa100"), 2, "is for a PLAN"),
        (("frontier", "profile.csv", "--blocking-power", "much"), 2, "WATTS or TYPE=WATTS"),
        (("frontier", "nothing.json"), 2, "no such file"),
        (("choose", "profile.csv"), 2, "not a frontier"),
        (("replay", "profile.csv", "bad.py"), 2, "code in a plan is not run"),
        (("compare", "bad.py"), 2, "name a plan, a profile or a frontier before it"),
        (("profile", "."), 2, "holds neither instructions-%d.csv nor %d.prof.json"),
        (("profile", "profile.csv", "--modelled"), 2, "needs a PLAN"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(
    run: Run, profile: str, arguments: tuple[str, ...], code: int, words: str
) -> None:
    Path("bad.py").write_text("[[__import__('os').getcwd()]]")
    found, out, err = run("energy", *arguments, "-q")
    assert found == code
    assert words in err
    assert len(err.strip().splitlines()) == 1
    assert not out


def test_a_point_is_chosen_its_clocks_written_drawn_and_replayed(run: Run, profile: str) -> None:
    run("energy", "frontier", profile, *PIPELINE, "-o", "f.json", "-q")
    fastest = said(run("energy", "choose", "f.json", "--json"))
    assert fastest["point"] == 0
    slow = said(run("energy", "choose", "f.json", "--slowdown", "0.05", "--json"))
    assert slow["time_s"] <= 1.05 * slow["all_max_s"]
    assert slow["energy_j"] < fastest["energy_j"]
    least = said(run("energy", "choose", "f.json", "--least-energy", "--json"))
    late = str(2 * least["time_s"])
    straggler = said(run("energy", "choose", "f.json", "--straggler", late, "--json"))
    assert straggler["point"] == least["point"]
    assert straggler["waiting_j"] == pytest.approx(3 * 80 * least["time_s"])
    assert run("energy", "choose", "f.json", "--deadline", "0.001")[0] == 3
    assert run("energy", "choose", "f.json", "--unnamed")[0] == 2

    files = ("-o", "clocks.py", "--picture", "clocks.svg")
    code, out, err = run("energy", "choose", "f.json", "--slowdown", "0.05", *files)
    assert code == 0, err
    assert f"point {slow['point']} of" in out
    assert "MHz" in Path("clocks.svg").read_text()
    for source in (("f.json",), (profile, *PIPELINE)):
        again = said(run("energy", "replay", source[0], "clocks.py", *source[1:], "--json"))
        assert again["time_s"] == pytest.approx(slow["time_s"], rel=1e-12)
        assert again["energy_j"] == pytest.approx(slow["energy_j"], rel=1e-12)
        assert again["claimed_s"] == pytest.approx(again["time_s"], rel=1e-12)
    code, out, _ = run("energy", "replay", "f.json", "clocks.py", "--claimed-time", "0.1")
    assert code == 0
    assert "claimed" in out
    run("energy", "choose", "f.json", "--unnamed", "-o", "ints.py", "-q")
    assert {name for row in read_clock_plan(Path("ints.py").read_text()) for name, _ in row} == {""}
    again = said(run("energy", "replay", "f.json", "ints.py", "--json"))
    assert again["time_s"] == pytest.approx(fastest["time_s"], rel=1e-12)


def test_profiles_plans_and_published_points_side_by_side(run: Run, profile: str) -> None:
    run("energy", "frontier", profile, *PIPELINE, "-o", "points.csv", "--plans", "clocks", "-q")
    plan = sorted(Path("clocks").iterdir())[-1]
    items = (profile, "points.csv", str(plan))
    code, out, err = run("energy", "compare", *items, *PIPELINE)
    assert code == 0, err
    for words in ("solved", "claimed", "clock plan", "straggler 1.2 times"):
        assert words in " ".join(out.split())
    ours, claimed, one = said(run("energy", "compare", *items, *PIPELINE, "--json"))["items"]
    assert claimed["fastest_j"] == pytest.approx(ours["fastest_j"])
    assert one["fastest_s"] == pytest.approx(ours["fastest_s"])
    assert ours["gap"] >= 0
    assert claimed["gap"] is None


def test_a_modelled_profile_is_labelled_wherever_it_goes(run: Run) -> None:
    assert run("plan", "gpt-small", "-c", "2xa100", "-p", "uniform", "-o", "p.json", "-q")[0] == 0
    assert run("energy", "profile", "p.json")[0] == 2
    code, out, err = run("energy", "profile", "p.json", "--modelled", "-o", "m.csv")
    assert code == 0, err
    assert "modelled energy, nothing was measured" in out
    again = load("m.csv")
    assert isinstance(again, EnergyProfile)
    assert again.origin is EnergyOrigin.MODELLED
    assert again.device_types == ("a100",)
    assert run("convert", "m.csv", "m.json", "-q")[0] == 0
    assert run("convert", "m.json", "again.csv", "-q")[0] == 0
    assert Path("again.csv").read_text() == Path("m.csv").read_text()

    code, out, _ = run("energy", "frontier", "p.json", "--points", "3", "--picture", "f.svg")
    assert "modelled energy, nothing was measured" in out
    assert "modelled, not measured" in Path("f.svg").read_text()
    code, out, err = run("energy", "frontier", "p.json", "--profile", "m.csv", "--points", "3")
    assert code == 0, err
    assert "modelled energy" in out
    assert run("energy", "frontier", "p.json", "--microbatches", "3")[0] == 2
    figures = said(run("energy", "profile", "m.csv", "--blocking-power", "a100=80", "--json"))
    assert figures["blocking_w"] == {"a100": 80.0}


def test_a_profile_of_more_stages_than_the_plan_is_refused(run: Run, profile: str) -> None:
    assert run("plan", "gpt-small", "-c", "2xa100", "-p", "uniform", "-o", "p.json", "-q")[0] == 0
    for command in (("frontier", "p.json"), ("compare", "p.json")):
        code, out, err = run("energy", *command, "--profile", profile, "-q")
        assert code == 2
        assert "profile 'profile.csv' has 3 stages, the plan 2" in err
        assert not out


def logs(folder: Path, *, clock: bool) -> None:
    """Write what two ranks of a pipeline record in two steps of one microbatch."""
    folder.mkdir()
    for rank in range(2):
        found, now = [], 10.0 + rank
        for step_clock in (1400.0, 800.0):
            for kind in (Kind.FORWARD, Kind.BACKWARD):
                took = seconds(rank, kind is Kind.BACKWARD, int(step_clock))
                found.append(Logged(kind, now, now + took, step_clock if clock else math.nan))
                now += took + 1.0
        (folder / f"instructions-{rank}.csv").write_text(write_instruction_log(found))
        (folder / f"time-energy-{rank}.csv").write_text(write_energy_log([0, 40], [0.0, 8000.0]))


def test_logs_become_a_profile_and_are_replayed(run: Run) -> None:
    logs(Path("logs"), clock=True)
    made = said(run("energy", "profile", "logs", "-o", "made.json", "--json"))
    assert (made["origin"], made["stages"], made["clocks_mhz"]) == ("measured", 2, [800.0, 1400.0])
    shared = said(run("energy", "profile", "logs", "--ranks-per-stage", "2", "--json"))
    assert shared["stages"] == 1
    source = ("made.json", "logs", "--microbatches", "1", "--blocking-power", "80")
    again = said(run("energy", "replay", *source, "--json"))
    assert len(again["steps"]) == 2
    assert again["steps"][1]["time_s"] > again["steps"][0]["time_s"]
    code, out, _ = run("energy", "replay", *source)
    assert "medians of 2 recorded steps" in out
    Path("logs/time-energy-0.csv").unlink()
    code, _, err = run("energy", "profile", "logs", "-q")
    assert code == 2
    assert "the energy of rank 0 is not known" in err
    assert "measured energy is unknown" in run("energy", "replay", *source)[1]


def test_clocks_that_a_log_lacks_come_from_a_log_of_clocks_or_an_option(run: Run) -> None:
    logs(Path("logs"), clock=False)
    code, _, err = run("energy", "profile", "logs", "-q")
    assert code == 2
    assert "the log needs a column 'clock'" in err
    assert said(run("energy", "profile", "logs", "--clock", "900", "--json"))["clocks_mhz"] == [900]
    for rank in range(2):
        events = "freq,start,end\n-1,0,5000000000\n1100,5000000000,40000000000\n"
        Path(f"logs/{rank}.freqevents.csv").write_text(events)
    assert said(run("energy", "profile", "logs", "--json"))["clocks_mhz"] == [1100.0]
    Path("logs/1.freqevents.csv").write_text("-1,0,40000000000\n")
    code, _, err = run("energy", "profile", "logs", "-q")
    assert code == 2
    words = "no instruction of logs/instructions-1.csv lies within one clock of logs/1.freqevents"
    assert words in err
    assert "--clock MHZ" in err
    assert len(err.strip().splitlines()) == 1


def test_schedules_and_reports_become_a_profile(run: Run) -> None:
    folder = Path("dump")
    folder.mkdir()
    for number, clock in enumerate((1400, 800)):
        told, found = [], []
        for rank in range(2):
            told.append({"rank": rank, "frequencies": [["forward", clock], ["backward", clock]]})
            parts = {
                key: {
                    "forward": [[rule(rank, False, clock)]] * 3,
                    "backward": [[rule(rank, True, clock)]] * 3,
                }
                for key, rule in (("time_breakdown", seconds), ("energy_breakdown", joules))
            }
            found.append({"rank": rank, "iter_time": [1.0], "iter_energy": [1.0], **parts})
        (folder / f"{number}.sched.json").write_text(json.dumps(told))
        (folder / f"{number}.prof.json").write_text(json.dumps(found))
    ranks = [{"rank": rank, "pp_rank": rank, "dp_rank": 0, "tp_rank": 0} for rank in range(2)]
    (folder / "ranks.json").write_text(json.dumps(ranks))
    code, out, err = run("energy", "profile", "dump", "-o", "made.csv")
    assert code == 0, err
    assert "measured energy" in out
    made = read_energy_csv(Path("made.csv").read_text())
    assert made.seconds[0] == pytest.approx(seconds(0, False, 1400))
    assert len(made) == 8
    (folder / "1.sched.json").unlink()
    code, _, err = run("energy", "profile", "dump", "-q")
    assert code == 2
    assert "1.sched.json" in err


def test_planning_with_energy_prints_a_cheaper_plan_than_the_fastest(run: Run) -> None:
    asked = ("plan", "resnet50", "--cluster", "6xa40+2xh100", "--microbatches", "16")
    asked += ("--objective", "energy", "--slowdown", "0.2", "--iterations", "10")
    code, out, err = run(*asked, "-o", "e.plan.json")
    assert code == 0, err
    assert "energy is modelled; within 20 % of the fastest plan" in out
    assert "the plan of least energy is not the fastest" in out
    assert "simulated again" in out
    found = load("e.plan.json")
    assert isinstance(found, Solution)
    energy = found.stats["energy"]
    # The frontier of the written plan reaches what was claimed, and every command reads the plan.
    limit = str(energy["time_s"])
    reached = said(run("energy", "frontier", "e.plan.json", "--at", limit, "--json"))
    point = min(reached["points"], key=lambda each: abs(each["time_s"] - energy["time_s"]))
    per_sample = point["energy_j"] / found.plan.samples
    assert per_sample == pytest.approx(energy["j_per_sample"], rel=5e-3)
    assert run("simulate", "e.plan.json", "-q")[0] == 0
    assert run("explain", "e.plan.json", "-q")[0] == 0


@pytest.mark.slow
def test_the_commands_of_the_page_about_energy_run(
    run_page: Callable[[Path], list[list[str]]],
) -> None:
    page = Path(__file__).resolve().parents[2] / "docs" / "energy.md"
    assert len(run_page(page)) >= 5


def test_the_search_behind_a_plan_by_energy_is_traced_by_time(run: Run) -> None:
    asked = ("plan", "gpt-small", "-c", "2xa100", "--objective", "energy", "--iterations", "5")
    figures = said(run(*asked, "--trace-search", "t", "--json"))
    assert figures["traced"] == ["t.csv", "t.svg"]
    assert "step time (s)" in Path("t.svg").read_text()
    assert figures["metric"] == "energy"


def test_energy_needs_devices_whose_power_is_known(run: Run) -> None:
    code, _, err = run("plan", "six-node-chain", "--objective", "energy", "-p", "uniform", "-q")
    assert code in (2, 4)
    assert "is not known" in err
    code, _, err = run("plan", "gpt-small", "--slowdown", "0.1", "-q")
    assert code == 2
    assert "--slowdown needs --objective energy" in err


def test_compare_has_columns_of_energy(run: Run) -> None:
    asked = ("compare", "gpt-small", "-c", "2xa100", "-p", "uniform", "-p", "single")
    code, out, err = run(*asked, "--energy")
    assert code == 0, err
    assert "energy is modelled:" in out
    assert "T_min" in out
    plans = said(run(*asked, "--objective", "energy", "--json"))["plans"]
    assert [plan["name"] for plan in plans] == ["single", "uniform"]
    for plan in plans:
        assert plan["energy"]["all_max_j_per_sample"] == pytest.approx(plan["value"])
        assert plan["energy"]["best_s"] >= plan["energy"]["fastest_s"]


def test_a_frontier_without_its_plan_can_be_chosen_from_but_not_written(
    run: Run, profile: str
) -> None:
    run("energy", "frontier", profile, *PIPELINE, "--points", "3", "-o", "f.json", "-q")
    found = load("f.json")
    bare = {
        name: getattr(found, name)
        for name in Frontier.__dataclass_fields__
        if name not in ("solution", "profile")
    }
    save(Frontier(**bare), "bare.json")
    assert run("energy", "choose", "bare.json")[0] == 0
    code, _, err = run("energy", "choose", "bare.json", "-o", "c.py")
    assert code == 2
    assert "does not carry its plan and profile" in err


def test_a_profile_from_modelled_counters_says_so(run: Run) -> None:
    logs(Path("logs"), clock=True)
    for rank in range(2):
        text = write_energy_log([0, 40], [0.0, 8000.0], modelled=True)
        Path(f"logs/time-energy-{rank}.csv").write_text(text)
    assert said(run("energy", "profile", "logs", "-o", "m.json", "--json"))["origin"] == "modelled"
    source = ("m.json", "logs", "--microbatches", "1", "--blocking-power", "80")
    assert "energy counters of modelled devices" in run("energy", "replay", *source)[1]


STAGES = ("--stages", "65.7,58.2,56.1,58.1ms", "--device", "a100")


def test_four_times_of_stages_are_enough_for_a_frontier(run: Run) -> None:
    asked = ("energy", "frontier", *STAGES, "--microbatches", "8", "--points", "3", "--json")
    figures = said(run(*asked, "--backward", "2x"))
    # At most as if all but one microbatch waited for the slowest stage; at least its own work and
    # the first backward pass that it waits for.
    assert 1.8969 <= figures["all_max_s"] <= 3 * (7 * 0.0657 + 0.2381)
    assert figures["origin"] == "modelled"
    assert figures["savings"][0]["saving"] > 0.05
    assert figures == said(run(*asked, "--backward", "131.4,116.4,112.2,116.2ms"))


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ((), "name a plan or an energy profile, or say --stages"),
        (("--stages", "4", "--device", "a100"), "the time of each stage is wanted"),
        ((*STAGES, "--backward", "2,3ms"), "--backward has 2 times and --stages 4"),
        ((*STAGES, "--backward", "-1x"), "expected a multiple such as 2x"),
        (("profile.csv", "--device", "a100"), "--device does not apply"),
        (("profile.csv", *STAGES[:2]), "expected a number of stages"),
    ],
)
def test_times_of_stages_that_say_too_little_or_too_much(
    run: Run, profile: str, words: tuple[str, ...], expected: str
) -> None:
    code, _, err = run("energy", "frontier", *words)
    assert code == 2
    assert expected in err
    assert profile


def test_a_profile_with_one_clock_leaves_nothing_to_choose(run: Run, profile: str) -> None:
    lines = Path(profile).read_text().splitlines()
    column = lines[0].split(",").index("frequency")
    top = max(int(line.split(",")[column]) for line in lines[1:])
    kept = [line for line in lines[1:] if int(line.split(",")[column]) == top]
    Path("one.csv").write_text("\n".join([lines[0], *kept, ""]))
    words = "one clock: nothing to choose"
    assert words in run("energy", "frontier", "one.csv", "--points", "3")[1]
    assert words not in run("energy", "frontier", profile, "--points", "3")[1]


@pytest.mark.parametrize("source", ["plan", "profile", "frontier"])
def test_every_source_may_be_standard_input(
    run: Run, profile: str, give_stdin: Callable[[str], None], source: str
) -> None:
    made = {
        "plan": ("plan", "gpt-small", "-p", "uniform", "-c", "2xa100", "-o", "plan.json"),
        "frontier": ("energy", "frontier", profile, *PIPELINE, "--points", "3", "-o", "front.json"),
    }
    if source in made:
        assert run(*made[source])[0] == 0
    file = {"plan": "plan.json", "profile": profile, "frontier": "front.json"}[source]
    more = (*PIPELINE,) if source == "profile" else ()
    for command in (("frontier", "--points", "3"), ("compare", "--points", "3")):
        give_stdin(file)
        code, out, err = run("energy", command[0], "-", *command[1:], *more, "--json")
        assert code == 0, (command, err)
        named = run("energy", command[0], file, *command[1:], *more, "--json")
        assert _unnamed(out) == _unnamed(named[1])
    if source != "frontier":
        give_stdin(file)
        modelled = ("--modelled",) if source == "plan" else ()
        code, out, err = run("energy", "profile", "-", *modelled, "--json")
        assert code == 0, err
        assert json.loads(out)["rows"] > 0


def _unnamed(out: str) -> object:
    """Return figures without the name of what they are of."""
    found = json.loads(out)
    rows = found.get("items", [found])
    for row in rows:
        for key in ("name", "source", "seconds", "solve_s"):
            row.pop(key, None)
    return rows


def test_claimed_points_and_a_cluster_may_be_standard_input(
    run: Run, profile: str, give_stdin: Callable[[str], None]
) -> None:
    Path("claims.csv").write_text("time,energy\n3.0,900\n3.5,800\n")
    give_stdin("claims.csv")
    code, out, err = run("energy", "compare", profile, "-", *PIPELINE, "--points", "3", "--json")
    assert code == 0, err
    assert len(json.loads(out)["items"]) == 2
    assert run("plan", "gpt-small", "-p", "uniform", "-c", "2xa100", "-o", "plan.json")[0] == 0
    give_stdin("plan.json")
    code, _, err = run("plan", "gpt-small", "-p", "uniform", "-c", "-", "--json")
    assert code == 0, err
