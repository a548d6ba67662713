"""The driver of a run on other hosts, with agents that are none."""

import json
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from queue import SimpleQueue

import pytest

from partita.core.codec import encode_part
from partita.core.problem import Metric, Objective, Problem
from partita.core.solution import Solution
from partita.errors import FormatError, UnsupportedError, WorkerError
from partita.hosts.driver import Watch, hosts_of, run_on
from partita.hosts.messages import (
    Beat,
    Chunk,
    Done,
    End,
    Failed,
    Hello,
    Message,
    Remark,
    Start,
    Stop,
    read_message,
    write_message,
)
from partita.ranks.failures import PeerError, write_error
from partita.runtime import restarts
from partita.runtime.emulation.rehearsal import Emulation
from partita.runtime.job import Job, JobDirectory
from partita.runtime.launch import Ended
from partita.runtime.restarts import Survival
from partita.testing.builders import chain, host_cluster, pipeline

HELLO = Hello(pid=1, hostname="here", loopback="one", port=1234)
DONE = Done(ended=json.dumps(encode_part(Ended())))

Play = Callable[["Agent"], None]


class Agent:
    """An agent that a test plays."""

    def __init__(self, play: Play) -> None:
        self.told: SimpleQueue[Message] = SimpleQueue()
        self._said: SimpleQueue[bytes] = SimpleQueue()
        threading.Thread(target=self._run, args=(play,), daemon=True).start()

    def _run(self, play: Play) -> None:
        play(self)
        self._said.put(b"")

    def say(self, *messages: Message) -> None:
        for message in messages:
            self._said.put(write_message(message))

    def await_told(self, kind: type[Message]) -> Message:
        while not isinstance(message := self.told.get(timeout=20), kind):
            pass
        return message

    def send(self, data: bytes) -> None:
        message = read_message(data)
        assert message is not None
        self.told.put(message)

    def lines(self) -> Iterator[bytes]:
        yield b"a greeting\n"
        while line := self._said.get():
            yield line

    def ended(self) -> str:
        return "it ended"


class Hosts:
    """Hosts on which agents are played."""

    def __init__(self, *plays: Play) -> None:
        self.names: Sequence[str] = ["gpu10", "gpu2"]
        self.addresses: Sequence[str] = ["10.0.0.10", "10.0.0.2"]
        self._plays = plays

    def start(self, index: int) -> Agent:
        return Agent(self._plays[index])

    def explain(self) -> str:
        return "the power is out"

    def __enter__(self) -> "Hosts":
        return self

    def __exit__(self, *_: object) -> None:
        pass


@pytest.fixture(autouse=True)
def short_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("partita.hosts.driver._GRACE_S", 1.0)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    cluster, graph = host_cluster(2, 2, inside_bytes_per_s=1e9, between_bytes_per_s=1e8), chain(3)
    problem = Problem(graph=graph, cluster=cluster, objective=Objective())
    plan = pipeline(graph, cluster, [0, 1, 2], microbatches=2)
    solution = Solution(problem=problem, plan=plan, metric=Metric.THROUGHPUT, value=1.0, unit="s")
    job = Job(emulate=Emulation(), steps=2, stall_limit_s=1.0, start_limit_s=5.0)
    JobDirectory(tmp_path).create(solution, job)
    return tmp_path


def wait_to_end(agent: Agent) -> None:
    agent.await_told(End)


def leaves(agent: Agent) -> None:
    agent.say(HELLO)
    agent.await_told(Start)


def well(agent: Agent) -> None:
    agent.say(HELLO)
    agent.await_told(Start)
    agent.say(DONE)


def test_hosts_have_their_ranks_in_the_order_of_the_cluster(directory: Path) -> None:
    files = JobDirectory(directory)
    hosts = hosts_of(files.read_solution(), files.read_job())
    assert [(host.name, host.ranks, host.gpus) for host in hosts] == [
        ("h0", (0, 1), 0),
        ("h1", (2,), 0),
    ]


def test_what_agents_send_is_in_the_directory_and_told(directory: Path) -> None:
    starts: list[Message] = []

    def first(agent: Agent) -> None:
        agent.say(HELLO)
        starts.append(agent.await_told(Start))
        agent.say(Chunk.of("ranks/rank1.news", b"[0, 0.5, null, 0"), Remark(text="halfway"))
        agent.say(Chunk.of("ranks/rank1.news", b".0]\n"), Beat())
        agent.say(Chunk.of("logs/rank1.log", b"one\ntw"), Chunk.of("logs/rank1.log", b"o\n"))
        agent.say(DONE)

    told: list[str] = []
    watch = Watch(
        on_step=lambda rank, news: told.append(f"{rank}: {news.step} {news.loss}"),
        on_line=lambda rank, line: told.append(f"{rank}: {line}"),
        say=told.append,
    )
    assert run_on(directory, Hosts(first, well), watch=watch) == Ended()
    assert told[2:] == ["halfway", "1: 0 0.5", "1: one", "1: two"]
    assert (directory / "logs" / "rank1.log").read_text() == "one\ntwo\n"
    (start,) = starts
    assert isinstance(start, Start)
    assert start.names == ("gpu10", "gpu2")
    assert (start.address, start.port) == ("127.0.0.1", 1234)
    rows = json.loads((directory / "hosts.json").read_text())
    assert [(row["name"], row["ranks"], row["outcome"]) for row in rows] == [
        ("gpu10", [0, 1], "ended"),
        ("gpu2", [2], "ended"),
    ]


def test_hosts_on_several_machines_meet_at_the_address_of_the_first(directory: Path) -> None:
    def other(agent: Agent) -> None:
        agent.say(Hello(pid=2, hostname="there", loopback="two", port=99))
        start = agent.await_told(Start)
        assert isinstance(start, Start)
        assert (start.index, start.address, start.port) == (1, "10.0.0.10", 1234)
        agent.say(DONE)

    run_on(directory, Hosts(well, other))


def test_a_lost_host_is_named_with_its_rank_and_the_others_are_ended(directory: Path) -> None:
    ended = threading.Event()

    def first(agent: Agent) -> None:
        agent.say(HELLO)
        agent.await_told(End)
        ended.set()

    with pytest.raises(WorkerError, match=r"gpu2.*2\).*ended") as found:
        run_on(directory, Hosts(first, leaves))
    assert found.value.rank == 2
    assert ended.is_set()


def test_a_silent_host_counts_as_lost(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("partita.hosts.driver._SILENT_S", (0.3, 0.3))

    def first(agent: Agent) -> None:
        agent.say(HELLO)
        while agent.told.empty() or not isinstance(agent.told.get(), End):
            agent.say(Beat())
            threading.Event().wait(0.05)

    def second(agent: Agent) -> None:
        agent.say(HELLO)
        agent.await_told(End)

    with pytest.raises(WorkerError, match=r"gpu2.*2\).*silent"):
        run_on(directory, Hosts(first, second))


def test_the_error_is_that_of_the_host_to_blame(directory: Path) -> None:
    def failing(error: WorkerError, rank: int) -> Play:
        def play(agent: Agent) -> None:
            agent.say(HELLO)
            agent.await_told(Start)
            agent.say(Failed(error=write_error(error), rank=rank))

        return play

    lost, own = PeerError("rank 0 lost rank 2"), WorkerError("host 1 (gpu2): rank 2 was killed")
    with pytest.raises(WorkerError, match="rank 2 was killed") as found:
        run_on(directory, Hosts(failing(lost, -1), failing(own, 2)))
    assert found.value.rank == 2


def test_an_agent_that_does_not_come_is_named_with_what_was_said(directory: Path) -> None:
    with pytest.raises(UnsupportedError, match="gpu2"):
        run_on(directory, Hosts(wait_to_end, lambda _: None))


def test_agents_are_asked_to_stop_once_there_is_a_reason(directory: Path) -> None:
    def stopping(agent: Agent) -> None:
        agent.say(HELLO)
        assert agent.await_told(Stop) == Stop(why="SIGTERM")
        agent.say(Done(ended=json.dumps(encode_part(Ended(asked="SIGTERM")))))

    ended = run_on(directory, Hosts(stopping, stopping), survival=Survival(stop=lambda: "SIGTERM"))
    assert ended.asked == "SIGTERM"


def test_an_agent_cannot_write_outside_the_directory(directory: Path) -> None:
    def evil(agent: Agent) -> None:
        agent.say(HELLO, Chunk.of("../evil", b"x"))
        agent.await_told(End)

    with pytest.raises(WorkerError, match=r"outside.*directory"):
        run_on(directory, Hosts(evil, wait_to_end))
    assert not (directory.parent / "evil").exists()


def test_incidents_survive_the_way_to_the_driver() -> None:
    incident = restarts.Incident(attempt=0, cause="rank 1 died", rank=1, step=3, resumed=2)
    first = write_message(Done(ended=json.dumps(encode_part(Ended(incidents=(incident,))))))
    message = read_message(first)
    assert isinstance(message, Done)
    assert json.loads(message.ended)["incidents"][0]["cause"] == "rank 1 died"


@pytest.mark.parametrize("line", [b'partita> ["Hello"]\n', b'partita> ["Nobody", {}]\n'])
def test_a_message_of_another_version_is_refused(line: bytes) -> None:
    with pytest.raises(FormatError, match="another version"):
        read_message(line)


def test_lines_that_are_no_messages_are_passed_over() -> None:
    assert read_message(b"Last login: today\n") is None


def test_an_agent_of_another_version_ends_the_run(directory: Path) -> None:
    def old(agent: Agent) -> None:
        agent.say(HELLO)
        agent._said.put(b'partita> ["Nobody", {}]\n')  # nobody listens after that

    def second(agent: Agent) -> None:
        agent.say(HELLO)
        agent.await_told(End)

    with pytest.raises(WorkerError, match="another version"):
        run_on(directory, Hosts(old, second))
