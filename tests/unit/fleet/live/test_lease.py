"""The loop's end of a lease."""

import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from partita.errors import InvalidInputError
from partita.fleet.lease import Lease, LoopState
from partita.fleet.live.files import read_json, write_json


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PARTITA_LEASE", str(tmp_path))
    monkeypatch.setenv("PARTITA_STEPS", "6")
    monkeypatch.setenv("PARTITA_ATTEMPT", "2")
    before = signal.getsignal(signal.SIGTERM)
    write_lease(tmp_path)
    yield tmp_path
    signal.signal(signal.SIGTERM, before)


def write_lease(home: Path, **rest) -> None:
    end_s = time.time() + 1000
    grant = {"gpus": 1, "cpus": 3.0}
    write_json(home / "lease.json", {"attempt": 2, "end_s": end_s, "grant": grant, **rest})


def make(saved: list[int], **rest) -> Lease:
    return Lease(saved.append, poll_s=0.0, report_s=0.0, **rest)


def test_steps_are_counted_over_epochs_and_the_last_is_saved(home: Path) -> None:
    saved: list[int] = []
    lease = make(saved, checkpoint_every=4)
    assert list(lease.over("abcd")) == list("abcdab")
    assert (lease.step, lease.done, saved) == (6, True, [4, 6])
    said = read_json(home / "progress.json")
    assert {key: said[key] for key in ("state", "step", "saved_step", "attempt", "pid")} == {
        "state": "done",
        "step": 6,
        "saved_step": 6,
        "attempt": 2,
        "pid": os.getpid(),
    }


def test_a_loop_goes_on_from_its_checkpoint(home: Path) -> None:
    saved: list[int] = []
    assert len(list(make(saved, step=4).over(range(100)))) == 2
    assert saved == [6]


def test_nothing_is_done_twice_when_all_steps_are_done_already(home: Path) -> None:
    saved: list[int] = []
    assert list(make(saved, step=6).over(range(3))) == []
    assert read_json(home / "progress.json")["state"] == "done"


@pytest.mark.parametrize(
    "words",
    [
        {"stop": True},
        {"attempt": 3},
        {"end_s": 1.0, "hold_s": 5.0},
    ],
    ids=["told to stop", "for another attempt", "not renewed"],
)
def test_the_loop_saves_and_stops_at_the_end_of_its_lease(home: Path, words: dict) -> None:
    saved: list[int] = []
    lease = make(saved)
    for number in lease.over(range(100)):
        if number == 2:
            write_lease(home, **words)
    assert (lease.step, lease.state, saved) == (3, LoopState.STOPPED, [3])
    assert read_json(home / "progress.json")["state"] == "stopped"


def test_a_signal_says_the_same(home: Path) -> None:
    saved: list[int] = []
    lease = make(saved)
    for _ in lease.over(range(100)):
        os.kill(os.getpid(), signal.SIGTERM)
    assert saved == [1]
    assert not lease.done


def test_a_lease_past_its_end_is_held_for_a_while(home: Path) -> None:
    write_lease(home, end_s=time.time() - 1, hold_s=1000.0)
    assert len(list(make([]).over(range(100)))) == 6


def test_the_grant_can_change(home: Path) -> None:
    lease = make([])
    assert lease.grant["cpus"] == 3.0
    for _ in lease.over(range(6)):
        write_lease(home, grant={"gpus": 1, "cpus": 5.0})
    assert lease.grant["cpus"] == 5.0


@pytest.mark.parametrize(
    "told", [{"memory_gb": 0.5}, {"memory_bytes": 5e8}, {"memory_bytes": 5e8, "memory_gb": 0.5}]
)
def test_memory_is_told_in_bytes_and_in_gb_by_schedulers_of_all_versions(
    home: Path, told: dict
) -> None:
    write_lease(home, grant={"gpus": 1, **told})
    assert make([]).grant == {"gpus": 1, "memory_bytes": 5e8, "memory_gb": 0.5}


def test_all_ranks_stop_at_the_step_at_which_they_agree(home: Path) -> None:
    saved: list[int] = []
    lease = make(saved, agree=lambda stop: lease.step == 2)
    assert len(list(lease.over(range(100)))) == 2
    assert saved == [2]


def test_the_last_step_is_said_before_it_is_saved(home: Path) -> None:
    said = []

    def save(step: int) -> None:
        said.append(read_json(home / "progress.json"))

    lease = Lease(save, report_s=0.0)
    now_s = 100.0
    lease.clock = lambda: now_s
    for _ in lease.over(range(6)):
        now_s += 2.0
    (words,) = said
    assert (words["state"], words["step"], words["saved_step"]) == ("running", 6, 0)
    assert words["done_s"] == 112.0
    assert read_json(home / "progress.json")["done_s"] == 112.0


def test_a_loop_says_when_it_expects_to_end(home: Path) -> None:
    lease = make([])
    now_s, expected = 100.0, []
    lease.clock = lambda: now_s
    for _ in lease.over(range(6)):
        expected.append(read_json(home / "progress.json")["ends_s"])
        now_s += 2.0
    assert expected == [None, *[112.0] * 5]


def test_a_loop_can_wait_for_what_comes_after_its_round(home: Path) -> None:
    write_lease(home, begin_s=90.0, end_s=time.time() + 1000)
    lease = make([])
    begin_s, end_s = lease.term
    assert begin_s == 90.0
    assert not lease.wait_beyond(end_s, 0.0)
    write_lease(home, end_s=end_s + 10)
    assert lease.wait_beyond(end_s, 10.0)
    assert lease.term[1] == end_s + 10
    write_lease(home, end_s=end_s + 10, stop=True)
    assert lease.wait_beyond(end_s + 10, 10.0)
    assert lease.is_over


def test_a_loader_that_ends_with_the_lease_is_no_empty_one(home: Path) -> None:
    write_lease(home)
    lease = make([])

    def batches() -> Iterator[int]:
        write_lease(home, stop=True)
        yield from ()

    assert list(lease.over(batches())) == []
    assert lease.state is LoopState.STOPPED


def test_other_ranks_say_nothing(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    list(make([]).over(range(6)))
    assert not (home / "progress.json").exists()


def test_without_a_scheduler_the_loop_runs_to_its_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("PARTITA_LEASE", raising=False)
    monkeypatch.delenv("PARTITA_STEPS", raising=False)
    saved: list[int] = []
    assert len(list(make(saved, steps=3).over(range(9)))) == 3
    with pytest.raises(InvalidInputError, match="number of steps"):
        make(saved)


def test_a_loader_without_batches_is_refused(home: Path) -> None:
    with pytest.raises(InvalidInputError, match="no batches"):
        list(make([]).over([]))


def test_a_broken_lease_file_changes_nothing(home: Path) -> None:
    lease = make([])
    for _ in lease.over(range(6)):
        (home / "lease.json").write_text("{")
    assert lease.done


class FarScheduler(HTTPServer):
    """Answers news with a lease; ``lease`` = None: it is out of order."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), FarHandler)
        self.lease: dict | None = {"attempt": 2, "end_s": time.time() + 1000, "grant": {"gpus": 3}}
        self.heard: list[dict] = []
        self.tokens: set[str] = set()


class FarHandler(BaseHTTPRequestHandler):
    server: FarScheduler

    def do_POST(self) -> None:
        text = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.tokens.add(self.headers["Authorization"])
        if self.server.lease is None:
            self.send_error(503)
            return
        self.server.heard.append(json.loads(text))
        answer = json.dumps(self.server.lease).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *words: object) -> None:
        """Keep quiet."""


@pytest.fixture
def far(monkeypatch: pytest.MonkeyPatch) -> Iterator[FarScheduler]:
    with FarScheduler() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        port = server.server_address[1]
        monkeypatch.setenv("PARTITA_NEWS", f"http://127.0.0.1:{port}/fleet/news/7")
        monkeypatch.setenv("PARTITA_NEWS_TOKEN", "mine")
        monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
        yield server
        server.shutdown()
        thread.join()


def test_a_loop_elsewhere_holds_its_lease_over_http(
    home: Path, far: FarScheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PARTITA_LEASE")
    lease = make([])
    assert lease.grant == {"gpus": 3}
    assert len(list(lease.over("abcdef"))) == 6
    assert far.heard[-1]["progress"]["state"] == "done"
    assert far.heard[-1]["attempt"] == 2
    assert far.tokens == {"Bearer mine"}
    assert not (home / "progress.json").exists()


def test_a_stop_over_http_ends_the_loop(home: Path, far: FarScheduler) -> None:
    assert far.lease is not None
    far.lease["stop"] = True
    lease = make([])
    assert list(lease.over("abcdef")) == []
    assert lease.state is LoopState.STOPPED


def test_files_serve_where_the_fleet_does_not_answer(home: Path, far: FarScheduler) -> None:
    far.lease = None
    lease = make([])
    assert lease.grant == {"gpus": 1, "cpus": 3.0}
    assert len(list(lease.over("abcdef"))) == 6
    assert read_json(home / "progress.json")["state"] == "done"
