"""The client: sets clocks, measures, reports, and is never held up by a server."""

import json
import math
import re
import threading
import time
from collections.abc import Callable

import httpx
import pytest

from partita.core.energy import EnergyOrigin
from partita.core.program import Kind
from partita.energy.client.client import ClientOptions, EnergyClient
from partita.energy.client.mailbox import read_plan
from partita.energy.client.registration import JobInfo, RankInfo, register_job
from partita.energy.devices.modelled import ModelledDevice, SlowSpell
from partita.energy.devices.table import NullDevice
from partita.energy.frontier.modelled import DvfsCurve
from partita.errors import InvalidInputError, UnsupportedError
from partita.http import ServerError, ServerLink, pause_s

URL = "http://server:7787"
CURVE = DvfsCurve(clocks_mhz=(1400, 1000, 700), idle_w=50.0, max_w=400.0)
NAMES = ("forward", "backward")
KINDS = {"forward": Kind.FORWARD, "backward": Kind.BACKWARD, "step": Kind.UPDATE}


class Time:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class FakeServer:
    """Answers as the energy server does, from what a test has prepared."""

    def __init__(self) -> None:
        self.plans: list[dict] = []
        self.posts: list[tuple[str, dict]] = []
        self.changed = threading.Condition()
        self.is_dead = False
        self.is_hung = threading.Event()
        self.refusals: dict[str, int] = {}
        self.tokens: list[str | None] = []

    @property
    def transport(self) -> httpx.MockTransport:
        return httpx.MockTransport(self.answer)

    def deploy(self, *clocks: int, state: str = "profiling", names=NAMES) -> None:
        with self.changed:
            version = len(self.plans) + 1
            frequencies = [list(entry) for entry in zip(names, clocks, strict=True)]
            self.plans.append(
                {"rank": 0, "frequencies": frequencies, "version": version, "state": state}
            )
            self.changed.notify_all()

    def answer(self, request: httpx.Request) -> httpx.Response:
        self.tokens.append(request.headers.get("Authorization"))
        if self.is_dead:
            raise httpx.ConnectError("refused", request=request)
        if request.method == "POST" and self.is_hung.is_set():
            until(lambda: not self.is_hung.is_set())
        path = request.url.path
        for part, status in self.refusals.items():
            if part in path:
                return httpx.Response(status, json={"detail": "because"})
        if request.method == "GET":
            return self.schedule(int(request.url.params.get("after", 0)))
        with self.changed:
            self.posts.append((path, json.loads(request.content)))
            self.changed.notify_all()
        return httpx.Response(200, json="job-1" if path == "/register_job" else None)

    def schedule(self, after: int) -> httpx.Response:
        with self.changed:
            self.changed.wait_for(lambda: len(self.plans) > after or self.is_dead, timeout=0.05)
            if len(self.plans) <= after:
                return httpx.Response(504, json={"detail": "nothing new"})
            return httpx.Response(200, json=self.plans[-1])

    def posted(self, path: str) -> list[dict]:
        return [body for where, body in list(self.posts) if path in where]


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline, "it did not come to pass"
        time.sleep(0.002)


class Loop:
    """A training loop on a modelled device whose time a test moves."""

    def __init__(self, server: FakeServer | None = None, *, slow=None, **options) -> None:
        self.time, self.said = Time(), []
        self.device = ModelledDevice(CURVE, clock=self.time, type_name="a100", slow=slow)
        self.client = EnergyClient(
            self.device,
            rank=RankInfo(rank=0, device="d0"),
            options=ClientOptions(
                clock=self.time, say=self.said.append, profile_steps=2, **options
            ),
        )
        if server is not None:
            self.client.connect(URL, "job-1", transport=server.transport)

    def step(self, names=(*NAMES, "step")) -> None:
        with self.client.step():
            for name in names:
                with self.client.instruction(name):
                    self.time.now += self.device.begin_work(1.0, KINDS[name])

    def await_version(self, version: int) -> None:
        until(lambda: (plan := self.client._mailbox.newest_plan()) is not None
              and plan.version == version)  # fmt: skip


@pytest.fixture
def server(monkeypatch) -> FakeServer:
    monkeypatch.setattr("partita.http.FIRST_PAUSE_S", 0.002)
    return FakeServer()


def test_it_registers_measures_and_reports(server: FakeServer) -> None:
    server.deploy(1400, 1000)
    loop = Loop(server)
    loop.await_version(1)
    for _ in range(5):
        loop.step()
    until(lambda: len(server.posted("/result/job-1")) == 2)
    use = loop.client.close()
    (rank,) = server.posted("/register_rank/job-1")
    assert rank["available_frequencies"] == [1400, 1000, 700]
    assert (rank["device_type"], rank["device"], rank["origin"]) == ("a100", "d0", "modelled")
    assert rank["blocking_w"] == pytest.approx(CURVE.blocking_w)
    first = server.posted("/result/job-1")[0]
    slower = CURVE.stretch(Kind.BACKWARD, 1000)
    assert first["version"] == 1
    assert first["time_breakdown"]["forward"] == [[pytest.approx(1.0)]] * 2
    assert first["time_breakdown"]["backward"] == [[pytest.approx(slower)]] * 2
    assert first["energy_breakdown"]["forward"] == [[pytest.approx(400.0)]] * 2
    assert first["iter_time"] == [pytest.approx(2 + slower)] * 2
    backward_j = first["energy_breakdown"]["backward"][0][0]
    assert first["iter_energy"] == [pytest.approx(400 + backward_j + CURVE.blocking_w)] * 2
    assert [step.version for step in use.steps] == [1] * 5
    assert use.origin is EnergyOrigin.MODELLED
    assert use.is_known
    assert loop.said == []
    assert loop.device.clock_mhz == 1400


def test_steps_back_to_back_hold_the_wait_for_the_others() -> None:
    loop = Loop(back_to_back=True)
    for _ in range(3):
        loop.step(("forward",))
        loop.time.now += 0.5
    use = loop.client.close()
    assert [step.seconds for step in use.steps] == [pytest.approx(1.5)] * 2 + [pytest.approx(1.0)]
    waiting_j = 0.5 * CURVE.blocking_w
    assert [step.joules for step in use.steps] == [
        *[pytest.approx(400 + waiting_j)] * 2, pytest.approx(400),
    ]  # fmt: skip


def test_a_new_plan_counts_from_the_next_step_on(server: FakeServer) -> None:
    loop = Loop(server, keep_log=True)
    loop.step()
    server.deploy(1000, 700)
    loop.await_version(1)
    with loop.client.step():
        with loop.client.instruction("forward"):
            server.deploy(1400, 1400, state="deployed")
            loop.await_version(2)
        with loop.client.instruction("backward"):
            assert loop.client.clock_mhz == 700
    loop.step()
    use = loop.client.close()
    assert [(step.version, step.state) for step in use.steps] == [
        (None, ""), (1, "profiling"), (2, "deployed"),
    ]  # fmt: skip
    clocks = [window.clock_mhz for window in use.windows if window.name != "step"]
    assert clocks == [1400, 1400, 1000, 700, 1400, 1400]
    assert use.readings[:2] == [(100.0, 0.0), (101.0, pytest.approx(400.0))]


def test_a_dead_server_stops_nothing_and_is_named_once(server: FakeServer) -> None:
    server.deploy(1000, 700)
    loop = Loop(server)
    loop.await_version(1)
    loop.step()
    server.is_dead = True
    for _ in range(6):
        loop.step()
    until(lambda: bool(loop.said))
    assert loop.client.plan.version == 1
    assert len(loop.said) == 1
    assert "does not answer: refused; training goes on with the last plan" in loop.said[0]
    server.is_dead = False
    server.deploy(700, 700)
    loop.await_version(2)
    until(lambda: len(server.posted("/result")) == 3)
    loop.client.close()
    assert len(loop.said) == 1


def test_a_server_that_dies_while_it_profiles_does_not_leave_low_clocks(
    server: FakeServer,
) -> None:
    server.deploy(700, 700)
    loop = Loop(server, silence_s=0.05)
    loop.await_version(1)
    loop.step()
    assert loop.device.clock_mhz == 700
    server.is_dead = True
    until(lambda: loop.client._mailbox.silence_s > 0.05)
    clocks = []
    for _ in range(5):
        loop.step()
        clocks.append(loop.device.clock_mhz)
    assert clocks == [700, 1400, 1400, 1400, 1400]  # it may have been silent for a moment only
    assert loop.client.plan.version is None
    assert [text for text in loop.said if "clocks are at their highest" in text] == loop.said[1:]
    reports = len(server.posted("/result"))
    server.is_dead = False
    until(lambda: loop.client._mailbox.silence_s == 0)
    for _ in range(2):
        loop.step()
    assert loop.device.clock_mhz == 700
    until(lambda: len(server.posted("/result")) == reports + 1)
    # Steps at the highest clock are not taken for some at the clocks of the plan.
    slow_s = CURVE.stretch(Kind.FORWARD, 700)
    assert (
        server.posted("/result")[-1]["time_breakdown"]["forward"] == [[pytest.approx(slow_s)]] * 2
    )
    loop.client.close()


def test_a_server_that_hangs_while_it_profiles_does_not_leave_low_clocks(
    server: FakeServer,
) -> None:
    server.deploy(700, 700)
    loop = Loop(server, silence_s=0.02)
    loop.await_version(1)
    server.is_hung.set()
    for _ in range(2):
        loop.step()  # the second makes a report that nobody takes
    until(lambda: loop.client._mailbox.silence_s > 0.02)
    for _ in range(2):
        loop.step()
    assert loop.device.clock_mhz == 1400
    assert ["clocks are at their highest" in text for text in loop.said] == [True]
    server.is_hung.clear()
    until(lambda: loop.client._mailbox.silence_s == 0)
    loop.step()
    assert loop.device.clock_mhz == 700
    loop.client.close()


def test_a_server_that_forgot_the_job_while_it_profiles_does_not_leave_low_clocks(
    server: FakeServer,
) -> None:
    server.deploy(700, 700)
    loop = Loop(server)
    loop.await_version(1)
    loop.step()
    server.refusals["/schedule"] = 404
    until(lambda: loop.client._mailbox.silence_s == math.inf)
    loop.step()
    loop.client.close()
    assert loop.device.clock_mhz == 1400
    assert "refuses /schedule" in loop.said[0]
    assert "clocks are at their highest" in loop.said[1]


def test_a_dead_server_leaves_deployed_clocks_alone(server: FakeServer) -> None:
    server.deploy(1000, 1000, state="deployed")
    loop = Loop(server, silence_s=0.0)
    loop.await_version(1)
    loop.step()
    server.is_dead = True
    until(lambda: loop.client._mailbox.silence_s > 0)
    loop.step()
    assert loop.device.clock_mhz == 1000
    loop.client.close()


def test_a_server_that_is_dead_from_the_start_stops_nothing(server: FakeServer) -> None:
    server.is_dead = True
    loop = Loop(server)
    for _ in range(3):
        loop.step()
    until(lambda: bool(loop.said))
    use = loop.client.close()
    assert [step.version for step in use.steps] == [None] * 3
    assert use.remarks == loop.said


def test_what_is_refused_is_said_once(server: FakeServer) -> None:
    server.refusals["/register_rank"] = 404
    loop = Loop(server)
    loop.step()
    until(lambda: bool(loop.said))
    loop.client.close()
    assert loop.said == [
        f"energy server {URL} refuses /register_rank/job-1: 404 because; training goes on with "
        "the last plan"
    ]


def test_a_late_result_that_is_refused_does_not_end_reporting(server: FakeServer) -> None:
    server.deploy(1400, 1400)
    server.refusals["/result"] = 409
    loop = Loop(server)
    loop.await_version(1)
    for _ in range(3):
        loop.step()
    until(lambda: bool(loop.said))
    server.refusals.clear()
    for _ in range(2):
        loop.step()
    until(lambda: len(server.posted("/result")) == 1)
    loop.client.close()
    assert len(loop.said) == 1


def test_a_straggler_is_announced_and_recovers(server: FakeServer) -> None:
    server.deploy(1400, 1400)
    loop = Loop(server, slow=SlowSpell(1.5, first=4, last=6))
    loop.await_version(1)
    for _ in range(8):
        loop.step(NAMES)
    until(lambda: len(server.posted("/straggler/job-1")) == 2)
    use = loop.client.close()
    assert server.posted("/straggler/job-1") == [
        {"rank": 0, "slowdown": pytest.approx(1.5)},
        {"rank": 0, "slowdown": 1.0},
    ]
    assert [round(step.slowdown, 3) for step in use.steps] == [1] * 4 + [1.5] * 3 + [1]


def test_a_slow_step_is_announced_before_it_is_over(server: FakeServer) -> None:
    names = ("forward", "backward") * 4
    server.deploy(*[1400] * 8, names=names)
    loop = Loop(server, slow=SlowSpell(1.5, first=4))
    loop.await_version(1)
    for _ in range(4):
        loop.step(names)
    with loop.client.step():
        for name in names[:3]:
            assert not server.posted("/straggler/job-1")
            with loop.client.instruction(name):
                loop.time.now += loop.device.begin_work(1.0, KINDS[name])
        until(lambda: bool(server.posted("/straggler/job-1")))
    assert server.posted("/straggler/job-1") == [{"rank": 0, "slowdown": pytest.approx(1.5)}]
    loop.client.close()


def test_a_job_whose_name_comes_later_is_joined_then(server: FakeServer) -> None:
    server.is_dead = True
    server.deploy(1000, 700)
    loop = Loop()
    info = JobInfo(pp=1, wish={"slowdown": 0.02})

    def find() -> str:
        return register_job(URL, info, limit_s=0.1, transport=server.transport)

    loop.client.connect(URL, find, transport=server.transport)
    loop.step()
    until(lambda: bool(loop.said))
    assert "does not answer" in loop.said[0]
    server.is_dead = False
    loop.await_version(1)
    loop.step()
    assert loop.client.plan.version == 1
    loop.client.close()
    (job,) = server.posted("/register_job")
    assert job["wish"] == {"slowdown": 0.02}
    assert len(server.posted("/register_rank/job-1")) == 1
    assert len(loop.said) == 1


def test_peers_that_are_as_slow_make_it_no_straggler(server: FakeServer) -> None:
    server.deploy(1400, 1400)
    asked = []

    def peers(slowdown: float) -> list[float]:
        asked.append(slowdown)
        return [1.5, 1.5]

    loop = Loop(server, slow=SlowSpell(1.5, first=4), peers=peers)
    loop.await_version(1)
    for _ in range(6):
        loop.step()
    loop.client.close()
    assert server.posted("/straggler") == []
    assert asked == [pytest.approx(1.5)] * 2


def test_a_plan_for_other_instructions_is_left_alone(server: FakeServer) -> None:
    server.deploy(1000, 700, 700, names=("forward", "forward", "backward"))
    loop = Loop(server, keep_log=True)
    loop.await_version(1)
    for _ in range(2):
        loop.step()
    use = loop.client.close()
    assert [window.clock_mhz for window in use.windows] == [1000] * 6
    assert loop.said == [
        "plan 1 has 'forward' where the step does 'backward'; the rest of each step keeps the "
        "clock that is set"
    ]


def test_without_clocks_to_set_no_server_is_asked(server: FakeServer) -> None:
    said: list[str] = []
    client = EnergyClient(NullDevice(), options=ClientOptions(say=said.append, keep_log=True))
    client.connect(URL, "job-1", transport=server.transport)
    with client.step(), client.instruction("forward"):
        pass
    use = client.close()
    assert "its clocks cannot be set" in said[0]
    assert server.posts == []
    assert use.steps[0].joules is None
    assert not use.is_known
    assert use.readings == []


class SlowToSet(NullDevice):
    """A device that sets clocks by a slow driver, which may refuse."""

    at_once = False
    clocks_mhz = (1400, 1000, 700)

    def __init__(self) -> None:
        super().__init__()
        self.set: list[int] = []
        self.may_go_on = threading.Event()
        self.refuses = False

    def set_clock(self, mhz: int) -> None:
        if self.refuses:
            raise UnsupportedError("no permission")
        self.set.append(mhz)
        if mhz == 1000:
            self.may_go_on.wait(10)

    def reset(self) -> None:
        self.set.append(0)


def test_clocks_are_set_beside_the_step_and_the_latest_wins(server: FakeServer) -> None:
    server.deploy(1000, 1400, 700, 700, names=("forward", "backward") * 2)
    device = SlowToSet()
    client = EnergyClient(device, options=ClientOptions(keep_log=True))
    client.connect(URL, "job-1", transport=server.transport)
    until(lambda: client._mailbox.newest_plan() is not None)
    with client.step():
        with client.instruction("forward"):
            until(lambda: 1000 in device.set)
        for name in ("backward", "forward"):
            with client.instruction(name):
                pass
        device.may_go_on.set()
        with client.instruction("backward"):
            until(lambda: client.clock_mhz == 700)
    use = client.close()
    assert device.set == [1400, 1000, 700, 0]
    assert (use.windows[0].clock_mhz, use.windows[-1].clock_mhz) == (1400, 700)


def test_a_device_that_refuses_is_left_alone() -> None:
    device, said = SlowToSet(), []
    device.refuses = True
    client = EnergyClient(device, options=ClientOptions(say=said.append))
    with client.step(), client.instruction("forward"):
        pass
    client.close()
    assert said == ["no permission; clocks are left alone from now on"]
    assert client.clock_mhz == 0


def test_jobs_are_registered_once(server: FakeServer) -> None:
    job = JobInfo(pp=2, dp=2, microbatches=8, wish={"slowdown": 0.0})
    assert register_job(URL, job, token="secret", transport=server.transport) == "job-1"
    assert server.posted("/register_job") == [
        {
            "job_id": "",
            "pp_degree": 2,
            "dp_degree": 2,
            "tp_degree": 1,
            "world_size": 4,
            "num_microbatches": 8,
            "wish": {"slowdown": 0.0},
        }
    ]
    assert server.tokens == ["Bearer secret"]


def test_registering_has_a_limit_and_says_why(server: FakeServer) -> None:
    server.is_dead = True
    with pytest.raises(ServerError, match="answer: refused"):
        register_job(URL, JobInfo(), limit_s=0.05, transport=server.transport)
    server.is_dead = False
    server.refusals["/register_job"] = 422
    with pytest.raises(ServerError, match="422 because"):
        register_job(URL, JobInfo(), transport=server.transport)


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("server:7787", "expected an address like"),
        ("ftp://server:7787", "expected an address like"),
        ("http://127.0.0.1:abc", "Invalid port: 'abc'; expected an address like"),
        ("http://server:99999", "port 99999; expected an address like"),
        ("http://server:0", "port 0; expected an address like"),
        ("http://", "names no host"),
        ("http://[bad", "names no host"),
        ("http://a b", "names no host"),
        ("http://999.1.1.1", "Invalid IPv4 address"),
    ],
)
def test_an_address_that_makes_no_sense_is_refused_before_anything_is_sent(
    url: str, why: str
) -> None:
    with pytest.raises(InvalidInputError, match=re.escape(f"energy server {url!r}")) as caught:
        ServerLink(url, noun="energy server")
    assert why in str(caught.value)
    with pytest.raises(InvalidInputError):
        EnergyClient(ModelledDevice(CURVE)).connect(url, "job-1")


@pytest.mark.parametrize("job", ["job\n1", "j" * 70000])
def test_a_request_that_cannot_be_made_is_an_error_of_the_server(
    server: FakeServer, job: str
) -> None:
    link = ServerLink(URL, noun="energy server", transport=server.transport)
    with pytest.raises(ServerError, match=r"cannot.*asked") as caught:
        link.post(f"/result/{job}", {})
    assert not caught.value.is_passing
    with pytest.raises(ServerError, match="/result"):
        link.post("/result/job-1", {"slowdown": float("nan")})
    link.close()


@pytest.mark.parametrize(
    "wrong",
    [
        {"version": float("inf")},
        {"version": None},
        {"frequencies": [["forward", float("inf")]]},
        {"frequencies": [["forward", float("nan")]]},
        {"frequencies": [["forward", -5]]},
        {"frequencies": [["forward", 10**400]]},
        {"frequencies": [["forward"]]},
        {"frequencies": 7},
    ],
)
def test_an_answer_that_is_no_plan_is_said(wrong: dict) -> None:
    plan = {"version": 1, "state": "deployed", "frequencies": [["forward", 1400]], **wrong}
    with pytest.raises(ServerError, match="clock plan") as caught:
        read_plan(plan)
    assert caught.value.is_passing


def test_a_plan_that_makes_no_sense_is_said_once_and_the_next_one_counts(
    server: FakeServer,
) -> None:
    server.deploy(10**400, 1000)
    loop = Loop(server)
    until(lambda: bool(loop.said))
    server.deploy(1400, 700)
    loop.await_version(2)
    loop.client.close()
    assert len(loop.said) == 1
    assert "is no clock plan" in loop.said[0]
    assert loop.said[0].endswith("; training goes on with the last plan")


def test_a_letter_that_cannot_be_written_is_said_and_left_out(server: FakeServer) -> None:
    loop = Loop(server)
    mailbox = loop.client._mailbox
    mailbox.report(lambda _: 1 / 0, None)
    mailbox.report(lambda told: {"rank": told}, 0)
    until(lambda: server.posted("/result/job-1") == [{"rank": 0}])
    loop.client.close()
    assert loop.said == [
        "energy server: ZeroDivisionError: division by zero; training goes on with the last plan"
    ]


def test_a_job_that_cannot_be_found_by_mistake_is_said(server: FakeServer) -> None:
    loop = Loop()
    loop.client.connect(URL, lambda: {}["job"], transport=server.transport)
    until(lambda: bool(loop.said))
    loop.step()
    loop.client.close()
    assert "KeyError: 'job'; training goes on" in loop.said[0]


def test_pauses_grow_to_a_limit() -> None:
    assert 0.1 <= pause_s(1) <= 0.2
    assert 15 <= pause_s(60) <= 30
