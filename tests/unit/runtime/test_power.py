"""How a run sees to its energy: settings, modelled work, slowdowns that ranks tell one another."""

import time
from dataclasses import replace

import pytest
from torch.distributed import HashStore

from partita.core.energy import EnergyOrigin
from partita.core.program import Kind
from partita.energy.client.client import ClientOptions, EnergyClient
from partita.energy.client.counter import EnergyUse, Stamp, StepUse, Window
from partita.energy.devices.modelled import ModelledDevice
from partita.energy.frontier.modelled import DvfsCurve
from partita.errors import InvalidInputError
from partita.flows.runs.energy import energy_figures, energy_lines, plan_uses
from partita.runtime.emulation.device import EmulatedWork, Pacer
from partita.runtime.emulation.rehearsal import Emulation
from partita.runtime.executor import Run
from partita.runtime.job import Job, read_job, write_job
from partita.runtime.metering import EnergyMeter, NoMeter
from partita.runtime.power import Power, _Peers
from partita.runtime.results import RunResult

CURVE = DvfsCurve(clocks_mhz=(1400, 700), idle_w=50.0, max_w=400.0)


def test_power_is_part_of_a_job() -> None:
    power = Power(device="modelled:a100,noise=0.01", server="http://127.0.0.1:7787", keep_log=True)
    job = Job(emulate=Emulation(scale=1.0), steps=7, power=power)
    assert read_job(write_job(job)) == job
    emulation = job.emulation()
    assert emulation is not None
    assert (emulation.power, emulation.steps) == (power, 7)
    assert job.rank_options().power == power


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"device": "gpu"}, "power device 'gpu' is not known; there are nvml"),
        ({"device": "modelled:a100,speed=2"}, "option 'speed'"),
        ({"server": "localhost:7787"}, "expected an address like"),
        ({"server": "http://127.0.0.1:abc"}, "Invalid port: 'abc'"),
        ({"profile_steps": 0}, "profile_steps is 0"),
    ],
)
def test_settings_that_make_no_sense_are_refused(settings: dict, why: str) -> None:
    with pytest.raises(InvalidInputError, match=why):
        Power(**settings)


def test_a_real_device_would_measure_a_machine_that_sleeps() -> None:
    Emulation(power=Power())
    Emulation(power=Power(device="none"))
    with pytest.raises(InvalidInputError, match="'nvml'"):
        Emulation(power=Power(device="nvml"))


def test_emulated_work_follows_the_clock_of_the_device(monkeypatch) -> None:
    monkeypatch.setattr(time, "sleep", lambda _: None)
    pacer = Pacer()
    monkeypatch.setattr(time, "perf_counter_ns", lambda: 10**18)
    device = ModelledDevice(CURVE, clock=lambda: pacer.now_s)
    begin = pacer.now_s
    EmulatedWork(pacer).compute(Kind.FORWARD, 0.5)
    assert pacer.now_s - begin == pytest.approx(0.5)
    device.set_clock(700)
    begin = pacer.now_s
    EmulatedWork(pacer, device).compute(Kind.FORWARD, 0.5)
    assert pacer.now_s - begin == pytest.approx(0.5 * CURVE.stretch(Kind.FORWARD, 700))


def test_real_compute_is_drawn_out_to_the_clock_of_a_modelled_device(monkeypatch) -> None:
    now = [100.0]
    monkeypatch.setattr(time, "sleep", lambda seconds: now.__setitem__(0, now[0] + seconds))

    def clock() -> float:
        return now[0]

    device = ModelledDevice(CURVE, clock=clock)
    client = EnergyClient(device, options=ClientOptions(clock=clock, keep_log=True))
    meter = EnergyMeter(client, device, clock)
    for mhz in (1400, 700):
        device.set_clock(mhz)
        meter.begin_step()
        meter.begin(Kind.BACKWARD)
        now[0] += 1.0
        meter.end(Kind.BACKWARD)
        meter.end_step()
    use = meter.close()
    slower = CURVE.stretch(Kind.BACKWARD, 700)
    assert [window.seconds for window in use.windows] == [1.0, pytest.approx(slower)]
    assert [step.joules for step in use.steps] == [
        pytest.approx(400.0), pytest.approx(slower * CURVE.power_w(Kind.BACKWARD, 700)),
    ]  # fmt: skip


def test_nobody_is_told_where_nobody_asked() -> None:
    meter = NoMeter()
    meter.begin_step()
    meter.begin(Kind.FORWARD)
    meter.end(Kind.FORWARD)
    meter.end_step()
    assert meter.close() is None


def test_ranks_tell_one_another_their_slowdowns() -> None:
    store = HashStore()
    first, second = _Peers(store, 0, 3), _Peers(store, 1, 3)
    assert first(1.5) == [1.0, 1.0]
    assert second(1.2) == [1.5, 1.0]
    assert first(1.0) == [1.2, 1.0]


def run_of(*ranks: list[StepUse]) -> Run:
    uses = {
        f"d{rank}": EnergyUse(device=f"gpu{rank}", origin=EnergyOrigin.MODELLED, steps=steps)
        for rank, steps in enumerate(ranks)
    }
    result = RunResult(steps=(), state={}, statistics={})
    return Run(result=result, timelines=(), step_s=(), energy=uses)


def steps(*figures: tuple[float, float | None, int | None, str]) -> list[StepUse]:
    return [StepUse(place, *figure, 1.0) for place, figure in enumerate(figures)]


def test_steps_are_told_apart_by_their_clock_plan() -> None:
    run = run_of(
        steps((1.0, 9.0, None, ""), (1.0, 10.0, 1, "profiling"), (1.2, 12.0, 1, "profiling"),
              (1.0, 8.0, 5, "deployed"), (1.1, 8.0, 5, "deployed")),
        steps((0.9, 9.0, None, ""), (1.1, 10.0, 1, "profiling"), (1.1, 12.0, 1, "profiling"),
              (1.0, 9.0, 1, "profiling"), (1.0, 7.0, 5, "deployed")),
    )  # fmt: skip
    found = [
        (u.version, u.state, u.first_step, u.steps, u.step_s, u.step_j) for u in plan_uses(run)
    ]
    assert found == [
        (None, "", 0, 1, 1.0, 18.0),
        (1, "profiling", 1, 2, pytest.approx(1.15), 22.0),
        (5, "deployed", 3, 1, 1.0, 17.0),
        (5, "deployed", 4, 1, 1.1, 15.0),
    ]
    lines = energy_lines(run)
    assert lines[0] == "energy    15 J per step modelled, 1.10 s (plan 5, deployed, 1 step)"
    assert "-16.7% energy, +10.0% time" in lines[1]


def test_unknown_energy_is_called_so() -> None:
    known = steps((1.0, 9.0, None, ""))
    unknown = [step._replace(joules=None) for step in known]
    run = run_of(known, unknown)
    figures = energy_figures(run)
    assert figures is not None
    assert figures["plans"][0]["step_j"] is None
    assert energy_lines(run) == ["energy    unknown, 1.00 s (no plan, 1 step)"]
    assert energy_lines(replace(run, energy={})) == []


def test_windows_last_from_begin_to_end() -> None:
    assert Window("forward", Stamp(1.0), Stamp(1.5), 700).seconds == 0.5
