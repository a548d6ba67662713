"""Runs that see to their energy: profiled through a server, deployed, slowed down, exported.

The GPUs are modelled and compute is slept through, so that joules and step times are those of the
model: each device has a clock of its own, by which an instruction takes just what the model says.
Only messages take real time, which is far below 1 % of these steps.
"""

import json
import runpy
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from partita.capture.origin import Captures, load_origin
from partita.catalogue.catalogue import load_catalogue
from partita.catalogue.shorthand import read_shorthand
from partita.core.energy import EnergyOrigin
from partita.core.problem import Metric, Objective, Problem
from partita.core.program import Kind
from partita.core.solution import Solution
from partita.cost.durations import instruction_seconds
from partita.documents import save
from partita.energy.frontier.modelled import modelled_profile
from partita.energy.policies.solving import warm_up
from partita.flows.runs.energy import energy_figures, energy_lines, export_timing
from partita.formats.perseus import (
    is_modelled_log,
    profile_from_logs,
    read_energy_log,
    read_instruction_log,
)
from partita.program.lower import lower
from partita.runtime.executor import Run, make_task, run_forked
from partita.runtime.job import JobDirectory
from partita.runtime.power import Power
from partita.runtime.workload import model_workload
from partita.testing.builders import Figures, chain, pipeline

pytestmark = pytest.mark.slow

EnergyService = runpy.run_path(str(Path(__file__).with_name("energy_service.py")))["EnergyService"]
MakeJob = Callable[..., JobDirectory]

SLOW_STEP = 30
SLOWDOWN = 1.5
TOP_MHZ = 1410


def small_plan(place: Path, forward_s: list[float], microbatches: int = 4) -> Solution:
    """Write a plan for a pipeline of two A100 whose second stage takes longer."""
    graph = chain(2, Figures(forward_s=forward_s, backward_s=[2 * s for s in forward_s]))
    cluster = read_shorthand("2xa100", load_catalogue())
    plan = pipeline(graph, cluster, [0, 1], microbatches=microbatches)
    problem = Problem(graph=graph, cluster=cluster, objective=Objective(microbatches=microbatches))
    solution = Solution(problem=problem, plan=plan, metric=Metric.THROUGHPUT, value=1.0, unit="s")
    save(solution, place / "plan.json")
    return solution


Emulate = Callable[..., Any]


@pytest.fixture
def emulate(tmp_path: Path, commands: Any) -> Emulate:
    """Return what runs the plan on modelled devices, as fast as they are, and what it printed."""

    def run(device: str, *options: str) -> Any:
        plan = ("run", "plan.json", "--emulate", "--emulate-scale", "1", "--json")
        device_options = ("--power-device", device, *options)
        done = commands.run(*plan, *device_options, folder=tmp_path)
        assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
        return json.loads(done.stdout)

    return run


def test_a_run_profiles_itself_saves_energy_and_answers_a_straggler(
    tmp_path: Path, emulate: Emulate
) -> None:
    for package in ("fastapi", "httpx", "uvicorn"):
        pytest.importorskip(package, reason=f"the server and its client need {package}")
    small_plan(tmp_path, [0.04, 0.06])
    # Its solver gets ready while the ranks profile, which takes longer where nothing is compiled.
    warm_up()
    server = ("--profile-steps", "2", "-O", "minimum_clock=800")
    with EnergyService(tmp_path, *server) as service:
        found = emulate(
            f"modelled:a100,step=300,slow={SLOWDOWN}@step{SLOW_STEP}:rank0",
            *("--steps", str(SLOW_STEP + 6), "--energy-server", service.url),
            *("--profile-steps", "2", "--energy-wish", "slowdown=0.005"),
        )
    energy = found["energy"]
    assert energy["origin"] == "modelled"
    assert [rank["remarks"] for rank in energy["ranks"]] == [[], []]
    # Where a plan reached one rank a step before the other, that step has a row of its own.
    found_of: dict[int, Any] = {}
    for plan in energy["plans"]:
        if plan["version"] is not None:
            first = found_of.get(plan["version"], plan)["first_step"]
            found_of[plan["version"]] = {**plan, "first_step": first}
    plans = list(found_of.values())
    assert [plan["state"] for plan in plans][:4] == ["profiling"] * 3 + ["deployed"]

    all_max, deployed, after = plans[0], plans[3], plans[-1]
    assert deployed["first_step"] + 3 <= SLOW_STEP
    well = slice(deployed["first_step"], SLOW_STEP)
    joules = np.sum([rank["step_j"] for rank in energy["ranks"]], axis=0)
    seconds = np.max([rank["step_s"] for rank in energy["ranks"]], axis=0)
    assert statistics.median(joules[well]) < 0.95 * all_max["step_j"]
    # Other work on the machine only adds to a step, and steps of one plan are alike: the least of
    # each plan are compared, so that a busy machine neither fails this nor hides slow clocks.
    at_max = slice(all_max["first_step"], plans[1]["first_step"])
    assert min(seconds[well]) < 1.01 * min(seconds[at_max])

    # The slow step is seen while it runs; the very next step has other clocks.
    slowdowns = [rank["slowdown"][SLOW_STEP] for rank in energy["ranks"]]
    assert slowdowns == [pytest.approx(SLOWDOWN, rel=0.01), pytest.approx(1.0, rel=0.01)]
    assert after["first_step"] == SLOW_STEP + 1
    assert after["version"] > deployed["version"]
    assert after["step_s"] < 0.95 * seconds[SLOW_STEP]


def test_a_run_without_its_server_goes_on(tmp_path: Path, emulate: Emulate) -> None:
    small_plan(tmp_path, [0.01, 0.01], microbatches=2)
    options = ("--energy-server", "http://127.0.0.1:9", "--steps", "2")
    found = emulate("modelled:a100", *options)
    assert [plan["version"] for plan in found["energy"]["plans"]] == [None]
    assert found["steps"] == 2
    log = next((tmp_path / "runs").glob("*/logs/rank0.log")).read_text()
    assert "does not answer" in log
    assert "training goes on and asks again" in log


def test_exported_logs_add_up_to_the_modelled_profile(tmp_path: Path, emulate: Emulate) -> None:
    solution = small_plan(tmp_path, [0.02, 0.03], microbatches=2)
    found = emulate("modelled:a100", "--export-timing-csv", "csv", "--steps", "2")
    problem, plan = solution.problem, solution.plan
    program = lower(problem, plan)
    expected = modelled_profile(
        program, problem.cluster, instruction_seconds(problem, plan, program)
    )
    ranks = []
    for rank in range(2):
        logged = read_instruction_log((tmp_path / f"csv/instructions-{rank}.csv").read_text())
        text = (tmp_path / f"csv/time-energy-{rank}.csv").read_text()
        assert is_modelled_log(text)
        readings = read_energy_log(text)
        clocked = [one for one in logged if one.kind in (Kind.FORWARD, Kind.BACKWARD)]
        assert len(clocked) == 2 * 2 * 2
        assert {one.clock_mhz for one in clocked} == {TOP_MHZ}
        ranks.append((rank, clocked, readings))
    profile = profile_from_logs(ranks)
    for row in range(len(profile)):
        stage, kind = int(profile.stage[row]), int(profile.kind[row])
        rows = expected.rows_of(stage, kind, "a100")
        (top,) = rows[expected.clock_mhz[rows] == TOP_MHZ]
        assert profile.seconds[row] == pytest.approx(float(expected.seconds[top]), rel=1e-4)
        assert profile.joules[row] == pytest.approx(float(expected.joules[top]), rel=1e-3)
    total_j = sum(rank["step_j"][0] for rank in found["energy"]["ranks"])
    assert total_j > profile.joules.sum()


def trained(make_job: MakeJob, place: Path, power: Power | None) -> Run:
    """Train a small model for real in forked ranks, as a job in a directory says."""
    files = make_job(place, [0, 1], steps=3, power=power)
    solution, job = files.read_solution(), files.read_job()
    problem, plan = solution.problem, solution.plan
    assert job.model is not None
    workload = model_workload(Captures(load_origin(job.model), job.model), problem, plan)
    task = make_task(problem, plan, workload)
    return run_forked(task, workload, options=job.rank_options())


def test_a_real_run_on_modelled_devices_learns_as_ever(make_job: MakeJob, tmp_path: Path) -> None:
    torch.set_num_threads(1)
    power = Power(device="modelled:a100", keep_log=True)
    plain = trained(make_job, tmp_path / "plain", None)
    metered = trained(make_job, tmp_path / "metered", power)
    assert [step.loss for step in metered.result.steps] == [s.loss for s in plain.result.steps]
    assert not plain.energy
    assert energy_figures(plain) is None
    for use in metered.energy.values():
        assert use.origin is EnergyOrigin.MODELLED
        assert use.is_known
        names = [window.name for window in use.windows if window.name != "load"]
        assert sorted(names) == ["backward"] * 12 + ["forward"] * 12 + ["step"] * 3
        assert {window.clock_mhz for window in use.windows} == {TOP_MHZ}


def test_energy_that_is_unknown_is_not_written(make_job: MakeJob, tmp_path: Path) -> None:
    torch.set_num_threads(1)
    run = trained(make_job, tmp_path / "job", Power(device="none", keep_log=True))
    names = export_timing(run, tmp_path / "csv")
    assert [Path(name).name for name in names] == ["instructions-0.csv", "instructions-1.csv"]
    figures = energy_figures(run)
    assert figures is not None
    assert [plan["step_j"] for plan in figures["plans"]] == [None]
    assert energy_lines(run)[0].startswith("energy    unknown, ")


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (("--profile-steps", "3"), "--profile-steps: it says when the energy server is told"),
        (("--energy-wish", "least-energy"), "--energy-wish: it says what the energy server"),
        (
            ("--energy-server", "http://127.0.0.1:9", "--energy-wish", "slow=1"),
            "limit 'slow=1'; expected slowdown=NUMBER",
        ),
        (("--power-device", "nvml"), "would measure a machine that sleeps"),
        (("--power-device", "modelled:a100,slow=2"), "like 1.5@step20"),
        (("--energy-server", "localhost:7787"), "expected an address like"),
        (("--energy-server", "http://127.0.0.1:abc"), "Invalid port: 'abc'"),
    ],
)
def test_options_that_make_no_sense_are_refused(
    run: Callable[..., tuple[int, str, str]], tmp_path: Path, options: tuple[str, ...], why: str
) -> None:
    small_plan(tmp_path, [0.01, 0.01])
    code, _, error = run("run", "plan.json", "--emulate", *options)
    assert code == 2
    assert why in " ".join(error.split())


def test_training_with_no_address_of_a_server_is_refused_before_it_is_planned(
    run: Callable[..., tuple[int, str, str]],
) -> None:
    code, out, error = run("train", "gpt3-small", "--energy-server", "http://127.0.0.1:abc")
    assert code == 2
    assert not out
    assert "energy server 'http://127.0.0.1:abc': Invalid port: 'abc'" in " ".join(error.split())
    assert "profiling" not in error
