"""Python says what the command line says: a public function and ``--json`` give the same result."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import partita
from partita.errors import InvalidInputError
from partita.flows.results import Result
from partita.profiler.calibrate.records import (
    SIZES_BYTES,
    DeviceRecord,
    LinkRecord,
    Measurement,
    write_measurement,
)

Run = Callable[..., tuple[int, str, str]]


def said(run: Run, *arguments: str) -> dict[str, Any]:
    """Return what a command prints with --json."""
    code, out, err = run(*arguments, "--json")
    assert code in (0, 3), err
    return json.loads(out)


def plain(result: Result, most: int = 3) -> Any:
    """Return a result as it reads after a trip through JSON; it has so many lines at most."""
    assert 1 <= len(result.lines()) <= most
    assert repr(result) == "\n".join(result.lines())
    assert result._repr_html_().startswith("<div")
    return json.loads(json.dumps(result.to_json(), allow_nan=False))


@pytest.fixture
def saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the name of a saved plan of four stages, in the current folder."""
    monkeypatch.chdir(tmp_path)
    found = partita.plan("gpt-small", cluster="4xa100", planner="uniform", microbatches=8)
    partita.save(found.solution, "gpt.plan.json")
    return "gpt.plan.json"


def test_plan(run: Run) -> None:
    options = {"cluster": "2xa100+2xv100", "planner": "uniform", "microbatches": 8}
    found = said(run, "plan", "gpt-small", *words(options))
    assert plain(partita.plan("gpt-small", **options)) == {
        key: value for key, value in found.items() if key not in ("written", "traced")
    }


def test_compare(run: Run) -> None:
    options = {"cluster": "4xa100", "planner": ["single", "uniform"], "energy": True}
    found = said(run, "compare", "gpt-small", *words(options))
    assert plain(partita.compare("gpt-small", **options)) == found


def test_explain(run: Run, saved: str) -> None:
    options = {"what_if": ["bandwidth=2x", "+1xa100"], "microbatches": 4}
    found = said(run, "explain", saved, *words(options))
    assert plain(partita.explain(saved, **options), most=9) == found


def test_simulate(run: Run, saved: str) -> None:
    options = {"slow": ["host0/gpu1=1.5"], "perturb": 0.1, "seed": 3, "transfers": "blocking"}
    found = said(run, "simulate", saved, *words(options))
    assert {**plain(partita.simulate(Path(saved), **options)), "written": []} == found


def test_robustness(run: Run, saved: str) -> None:
    options = {"samples": 3, "replans": 1}
    found = said(run, "robustness", saved, saved, *words(options))
    assert plain(partita.robustness(saved, saved, **options)) == found


@pytest.mark.parametrize("memory_factor", [1.0, 0.005])
def test_estimate(run: Run, memory_factor: float) -> None:
    options = {"cluster": "2xv100", "memory_factor": memory_factor}
    found = said(run, "estimate", "gpt-small", *words(options))
    result = partita.estimate("gpt-small", **options)
    assert plain(result) == found
    assert result.fits == (memory_factor == 1)
    code, out, _ = run("estimate", "gpt-small", *words(options))
    assert code == (0 if result.fits else 3)
    assert all(command in " ".join(out.split()) for command in result.commands)
    assert ("partita plan gpt-small" in out) == result.fits


def test_convert(run: Run, saved: str) -> None:
    found = said(run, "convert", saved, "gpus=4.txt")
    result = partita.convert(saved, "again.txt")
    assert plain(result) == {**found, "written": "again.txt"}
    assert Path("again.txt").read_bytes() == Path("gpus=4.txt").read_bytes()
    assert partita.convert(partita.load(saved), to="pipedream-plan").content == result.content


def test_export(run: Run, saved: str) -> None:
    found = said(run, "export", saved, "--to", "pipedream-conf", "-o", "conf")
    result = partita.export(saved, to="pipedream-conf", output="conf")
    assert plain(result) == found


def test_energy_profile(run: Run, saved: str) -> None:
    options = {"modelled": True, "blocking_power": ["a100=83.6"], "name": "mine"}
    found = said(run, "energy", "profile", saved, *words(options))
    result = partita.profile_energy(saved, **options)
    assert {**plain(result), "written": None} == found
    assert len(result.rows()) == 8  # forward and backward of four stages
    again = partita.profile_energy(result, name="again").energy_profile
    assert again.name == "again"
    planned = partita.plan("gpt-small", cluster="4xa100", planner="uniform", microbatches=8)
    assert partita.profile_energy(planned, **options).rows() == result.rows()
    with pytest.raises(InvalidInputError, match="--modelled"):
        partita.profile_energy(planned)
    with pytest.raises(InvalidInputError, match="frontier; expected"):
        partita.profile_energy(partita.frontier(saved, points=2), modelled=True)


def test_frontier_choose_replay_and_compare(run: Run, saved: str) -> None:
    options = {"points": 5, "tries": 100}
    found = said(run, "energy", "frontier", saved, "-o", "frontier.json", *words(options))
    frontier = partita.frontier(saved, **options)
    assert {**plain(frontier), "written": ["frontier.json"]} == found

    limits = {"slowdown": 0.02, "straggler": 100.0, "tries": 100}
    found = said(run, "energy", "choose", "frontier.json", "-o", "clocks.py", *words(limits))
    chosen = partita.choose_clocks(frontier, **limits)
    assert {**plain(chosen), "written": ["clocks.py"]} == found
    assert chosen.waiting_j is not None
    assert len(chosen.lines()) == 2
    assert chosen.clock_plan() == Path("clocks.py").read_text(encoding="utf-8")
    with pytest.raises(InvalidInputError, match=r"solution,.*make"):
        partita.choose_clocks(saved)

    found = said(run, "energy", "replay", saved, "clocks.py")
    replayed = partita.replay_clocks(frontier, "clocks.py")
    assert {**plain(replayed), "written": []} == found
    assert replayed.energy_j == pytest.approx(replayed.known_j)
    assert [row["clocks"] for row in replayed.rows()] == ["simulated", "claimed", "all-max"]

    found = said(run, "energy", "compare", saved, "frontier.json", "clocks.py", *words(options))
    compared = partita.compare_energy(saved, "frontier.json", Path("clocks.py"), **options)
    assert plain(compared) == found
    assert [item.what for item in compared.items][1:] == [
        "solved, modelled",
        "clock plan, modelled",
    ]
    assert partita.compare_energy(frontier).items[0].savings == compared.items[1].savings
    with pytest.raises(InvalidInputError, match=r"nothing.*compare"):
        partita.compare_energy()


def test_a_profile_that_python_holds_is_that_of_a_plan(saved: str) -> None:
    profile = partita.profile_energy(saved, modelled=True)
    partita.save(profile.energy_profile, "profile.json")
    options = {"points": 3, "tries": 0}
    one = partita.frontier(saved, profile=profile, **options)
    assert one.to_json() == partita.frontier(saved, profile="profile.json", **options).to_json()
    assert one.to_json() == partita.frontier(
        partita.load(saved), profile=profile.energy_profile, **options
    ).to_json() | {"source": "gpt"}


def test_profiles_are_merged(run: Run, tmp_path: Path) -> None:
    options = {"scale": 0.05, "sequence_length": 16, "batch_size": 1, "granularity": "block"}
    options["dtype"] = "float32"  # what both types compute in
    graphs = [
        partita.profile("gpt3-small", estimate=kind, **options).graph for kind in ("a100", "v100")
    ]
    for graph in graphs:
        partita.save(graph, tmp_path / f"{graph.costs[0].device_type}.json")
    found = said(run, "profile", "merge", "a100.json", "v100.json")
    result = partita.merge_profiles(*graphs)
    assert {**plain(result), "written": None} == found
    assert [costs.device_type for costs in result.graph.costs] == ["a100", "v100"]
    assert result.rows() == partita.merge_profiles("a100.json", Path("v100.json")).rows()
    with pytest.raises(InvalidInputError, match=r"costs.*'a100'"):
        partita.merge_profiles("a100.json", graphs[0])
    partita.save(partita.plan(graphs[0], cluster="2xa100", planner="uniform").solution, "p.json")
    with pytest.raises(InvalidInputError, match=r"p.json holds a Solution; expected a graph"):
        partita.merge_profiles("a100.json", "p.json")


def test_models(run: Run) -> None:
    assert plain(partita.list_models("alexnet")) == said(run, "models", "alexnet")


def test_results(run: Run, tmp_path: Path) -> None:
    for name in ("one", "two"):
        folder = tmp_path / "runs" / name
        folder.mkdir(parents=True)
        (folder / "results.json").write_text(json.dumps({"model": name, "steps": 2}))
    found = said(run, "results", "--model", "two")
    assert plain(partita.results(model="two")) == found
    assert [run["directory"] for run in found] == ["runs/two"]
    assert len(partita.results("two", "one").runs) == 2


def test_doctor(run: Run) -> None:
    assert plain(partita.doctor()) == said(run, "doctor")


def test_calibrate(run: Run, tmp_path: Path) -> None:
    measurement = Measurement(
        backend="gloo",
        devices=tuple(
            DeviceRecord(
                rank=rank, host="here", kind="cpu", memory_bytes=8e9, flop_per_s={"float32": 1e10}
            )
            for rank in range(2)
        ),
        links=tuple(
            LinkRecord(
                source=rank,
                target=1 - rank,
                sizes_bytes=SIZES_BYTES,
                round_trips_s=tuple((1e-4 + size / 5e9,) for size in SIZES_BYTES),
            )
            for rank in range(2)
        ),
        reductions=(),
    )
    (tmp_path / "times.json").write_text(write_measurement(measurement))
    options = {"from_samples": "times.json", "name": "here", "matrix": True}
    found = said(run, "calibrate", *words(options))
    result = partita.calibrate(**options)
    assert result is not None
    assert {**plain(result), "written": {}} == found


def test_results_are_plans_for_the_next_question() -> None:
    found = partita.plan("gpt-small", cluster="2xa100", planner="uniform")
    assert partita.explain(found).summary.title == "2 stages, 1f1b"
    assert partita.simulate(found).timeline.makespan_s == pytest.approx(found.solution.value)
    assert partita.simulate(found.problem, found.plan).makespan_s > 0
    assert len(partita.robustness(found, found, samples=1, replans=0).contenders) >= 2


@pytest.mark.parametrize(
    "name",
    [
        *("compare", "compare_energy", "estimate", "explain", "export", "plan"),
        *("profile_energy", "simulate"),
    ],
)
def test_an_unknown_option_is_refused_with_the_near_one(name: str) -> None:
    with pytest.raises(InvalidInputError, match="'clustr'"):
        getattr(partita, name)("gpt-small", clustr="4xa100")


def words(options: dict[str, Any]) -> list[str]:
    """Return options as they are typed."""
    result = []
    for name, value in options.items():
        for each in value if isinstance(value, list) else [value]:
            flag = f"--{name.replace('_', '-')}"
            result += [flag] if each is True else [flag, str(each)]
    return result
