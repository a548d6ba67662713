"""The driver of a run on other hosts: starts an agent on each, and has what all of them leave.

The agents meet by static ranks: host k of the plan is node k, whatever its name, so rank r is the
plan's r-th device. What ranks leave on their hosts comes into the job directory of the driver while
the run goes on, so that it looks like that of a run on this machine.
"""

import json
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from queue import Empty, SimpleQueue

from partita.atomic_files import write_atomically
from partita.core.codec import decode_part
from partita.core.graph import DeviceKind
from partita.core.solution import Solution
from partita.errors import PartitaError, UnsupportedError, WorkerError
from partita.hosts.agent import BEAT_S
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
from partita.hosts.places import Channel, Place, PlanHost, forwarded_environment
from partita.processes import ended_by_signals
from partita.ranks.failures import first_line, read_error, write_error
from partita.runtime.job import Job, JobDirectory, place_ranks
from partita.runtime.launch import Ended, OnStep
from partita.runtime.process_transport import used_devices
from partita.runtime.restarts import Survival

_LOOK_S = 0.2
_GRACE_S = 15.0
"""How long agents may take to end their ranks, or to say why they failed."""
_SILENT_S = (10.0, 60.0)
"""Least and most seconds without a word of an agent after which its host counts as lost."""
HOSTS = "hosts.json"
"""File of a run directory that says which ranks ran where, and how each host ended."""


class LostHostError(WorkerError):
    """A host went away: its machine, its agent, or the way to it."""


OnLine = Callable[[int, str], None]
"""Called with a rank and each line that it prints."""


def hosts_of(solution: Solution, job: Job) -> list[PlanHost]:
    """Return the hosts that a plan uses, in the order of its cluster."""
    problem, program = solution.problem, job.program(solution)
    cluster = problem.cluster
    devices = [cluster.index_of[program.devices[each]] for each in used_devices(program)]
    used = sorted({cluster.devices[device].host for device in devices})
    placement = place_ranks(problem, program, len(used))
    found = []
    for host, ranks in zip(used, placement.hosts, strict=True):
        mine = [device for device in cluster.devices if device.host == host]
        gpus = len(ranks) if job.device is DeviceKind.GPU else 0
        share = int(cluster.hosts[host].cpus * len(ranks) / len(mine)) if gpus else len(ranks)
        found.append(
            PlanHost(
                name=cluster.hosts[host].name,
                ranks=ranks,
                gpus=gpus,
                gpu_type=mine[0].type if gpus else "",
                cpus=max(len(ranks), share),
            )
        )
    return found


@dataclass(frozen=True, kw_only=True, eq=False)
class Watch:
    """What a driver tells of a run.

    Attributes:
        on_step: Called with a rank and each step that it has done.
        on_line: Called with a rank and each line that it prints.
        say: Called with each thing that people should know.
    """

    on_step: OnStep = lambda _, __: None
    on_line: OnLine = lambda _, __: None
    say: Callable[[str], None] = lambda _: None


def run_on(
    directory: Path,
    place: Place,
    *,
    survival: Survival | None = None,
    watch: Watch | None = None,
) -> Ended:
    """Run a job directory on other hosts, and bring here what its ranks leave.

    Args:
        directory: The job directory.
        place: The hosts, which have been got.
        survival: How it goes on when something goes wrong.
        watch: Is told what happens.

    Raises:
        UnsupportedError: An agent cannot be started; names the host.
        LostHostError: A host went away; names it and its ranks.
        WorkerError: A rank failed; names it.
        KeyboardInterrupt: SIGINT; all agents have ended.
    """
    survival = Survival() if survival is None else survival
    with ended_by_signals():
        driver = _Driver(directory, place, survival, Watch() if watch is None else watch)
        try:
            return driver.run()
        finally:
            driver.close()


@dataclass(slots=True)
class _Agent:
    """An agent of a run, as the driver knows it.

    Attributes:
        host: Its host of the plan.
        name: The name of the real host.
        channel: The way to it.
        hello: What it said when it came; None = it has not.
        heard_s: When it was last heard.
        answer: How its ranks ended; None = they have not.
        lost: How it went away without an answer; empty = it has not.
    """

    host: PlanHost
    name: str
    channel: Channel
    heard_s: float
    hello: Hello | None = None
    answer: Done | Failed | None = None
    lost: str = ""
    is_closed: bool = False

    @property
    def is_over(self) -> bool:
        """Whether nothing more comes of it."""
        return self.answer is not None or bool(self.lost)

    @property
    def title(self) -> str:
        """The host and its ranks, for people."""
        ranks = ", ".join(map(str, self.host.ranks))
        return f"host {self.name} ({'ranks' if len(self.host.ranks) > 1 else 'rank'} {ranks})"

    @property
    def outcome(self) -> str:
        """How it ended, in one line."""
        if isinstance(self.answer, Failed):
            return first_line(read_error(self.answer.error))
        return self.lost or ("ended" if self.answer else "runs")


class _Driver:
    """The agents of a run, from the first to the last word."""

    def __init__(self, directory: Path, place: Place, survival: Survival, watch: Watch) -> None:
        self._files, self._place = JobDirectory(directory), place
        self._survival, self._watch = survival, watch
        self._job, self._solution = self._files.read_job(), self._files.read_solution()
        self._silence_s = min(max(_SILENT_S[0], self._job.stall_limit_s), _SILENT_S[1])
        self._heard: SimpleQueue[tuple[int, Message | None]] = SimpleQueue()
        self._agents: list[_Agent] = []
        self._places: dict[tuple[int, int], int] = {}
        self._lines: dict[int, bytes] = {}
        self._asked_to_stop = False

    def run(self) -> Ended:
        """Start the agents, let them run, and return how they ended."""
        self._files.prepare()
        for index, host in enumerate(hosts_of(self._solution, self._job)):
            self._agents.append(self._start(index, host))
        self._await_hellos()
        self._write_hosts()
        for agent in self._agents:
            self._watch.say(f"{agent.title.removeprefix('host ')} runs")
        start = self._start_message()
        for index, agent in enumerate(self._agents):
            agent.channel.send(write_message(replace(start, index=index)))
        while not all(agent.is_over for agent in self._agents):
            if self._has_failed:
                self._hear_out()
                raise self._error()
            self._hear(_LOOK_S)
            self._pass_stop_on()
        if self._has_failed:
            raise self._error()
        first = self._agents[0].answer
        assert isinstance(first, Done)  # none has failed
        return decode_part(json.loads(first.ended), Ended, "ended")

    def _start(self, index: int, host: PlanHost) -> _Agent:
        name = self._place.names[index]
        try:
            channel = self._place.start(index)
        except OSError as exc:
            raise UnsupportedError(f"no agent can be started on host {name}: {exc}") from exc
        agent = _Agent(host, name, channel, time.monotonic())
        threading.Thread(
            target=self._listen, args=(index, channel), daemon=True, name=f"host {name}"
        ).start()
        return agent

    def _listen(self, index: int, channel: Channel) -> None:
        try:
            for line in channel.lines():
                message = read_message(line)
                if message is not None:
                    self._heard.put((index, message))
        except PartitaError as exc:  # it speaks another version
            self._heard.put((index, Failed(error=write_error(exc))))
        except (OSError, ValueError):
            pass  # the driver has closed it
        self._heard.put((index, None))

    def _await_hellos(self) -> None:
        deadline = time.monotonic() + self._job.start_limit_s
        while any(agent.hello is None for agent in self._agents):
            self._hear(_LOOK_S)
            for agent in self._agents:
                if agent.lost:
                    raise UnsupportedError(
                        f"no agent can be started on host {agent.name}: {agent.lost}"
                    )
                if agent.hello is None and time.monotonic() > deadline:
                    raise UnsupportedError(
                        f"host {agent.name}: no word of its agent within "
                        f"{self._job.start_limit_s:g} s"
                    )

    def _start_message(self) -> Start:
        hellos = [agent.hello for agent in self._agents]
        loopbacks = {hello.loopback for hello in hellos if hello is not None}
        address = self._place.addresses[0]
        if len(loopbacks) == 1 and "" not in loopbacks:
            address = "127.0.0.1"  # all agents are on one machine, whatever its names are
        assert hellos[0] is not None
        names = ("plan.json", "job.json")
        script = self._job.script
        return Start(
            index=0,
            names=tuple(agent.name for agent in self._agents),
            address=address,
            port=hellos[0].port,
            files={name: (self._files.path / name).read_text(encoding="utf-8") for name in names},
            folder=str(Path.cwd()),
            script=Path(script[0]).read_text(encoding="utf-8") if script else "",
            environment=dict(forwarded_environment()),
            restarts=self._survival.limit.restarts,
        )

    def _hear(self, limit_s: float) -> None:
        """Take what the agents have said, and note which have gone silent."""
        try:
            index, message = self._heard.get(timeout=limit_s)
        except Empty:
            index, message = -1, None
        while index >= 0:
            self._take(self._agents[index], message)
            if self._heard.empty():
                break
            index, message = self._heard.get()
        now = time.monotonic()
        for agent in self._agents:
            if agent.hello and not agent.is_over and now - agent.heard_s > self._silence_s:
                agent.lost = f"silent for {now - agent.heard_s:.0f} s"

    def _take(self, agent: _Agent, message: Message | None) -> None:
        if message is not None:
            agent.heard_s = time.monotonic()
        if message is None:
            agent.is_closed = True
            if agent.answer is None and not agent.lost:
                agent.lost = agent.channel.ended()
        elif isinstance(message, Hello):
            agent.hello = message
        elif isinstance(message, Chunk):
            self._keep(message)
        elif isinstance(message, Remark):
            self._watch.say(message.text)
        elif isinstance(message, Done | Failed):
            # What comes behind an answer is about its own end.
            agent.answer = agent.answer or message
        else:
            assert isinstance(message, Beat), message

    def _keep(self, chunk: Chunk) -> None:
        """Write what a rank has left to the same place of our directory, and tell of it."""
        path = (self._files.path / chunk.path).resolve()
        if not path.is_relative_to(self._files.path.resolve()):
            raise WorkerError(f"an agent sends {chunk.path}, which is outside the run directory")
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab") as file:
            file.write(chunk.content())
        rank = int(path.stem.removeprefix("rank")) if path.stem[4:].isdecimal() else -1
        if path.suffix == ".news":
            folder = path.parent.name
            attempt = int(folder.removeprefix("attempt")) if folder != "ranks" else 0
            begin = self._places.get((attempt, rank), 0)
            files = JobDirectory(self._files.path, attempt)
            news, self._places[attempt, rank] = files.read_news(rank, begin)
            for one in news:
                if not isinstance(one, str):  # what people should read comes by itself
                    self._watch.on_step(rank, one)
        elif path.suffix == ".log":
            *lines, self._lines[rank] = (self._lines.get(rank, b"") + chunk.content()).split(b"\n")
            for line in lines:
                self._watch.on_line(rank, line.decode(errors="replace"))

    def _pass_stop_on(self) -> None:
        if not self._asked_to_stop and (why := self._survival.stop()):
            self._asked_to_stop = True
            self._send_all(Stop(why=why))

    def _send_all(self, message: Message) -> None:
        for agent in self._agents:
            if not agent.is_closed:
                agent.channel.send(write_message(message))

    @property
    def _has_failed(self) -> bool:
        return any(agent.lost or isinstance(agent.answer, Failed) for agent in self._agents)

    def _hear_out(self) -> None:
        """Let all agents say why they failed; one that says nothing at all is lost."""
        deadline = time.monotonic() + _GRACE_S / 3
        while time.monotonic() < deadline and not all(agent.is_over for agent in self._agents):
            self._hear(_LOOK_S)
        if any(agent.lost for agent in self._agents):
            return
        for agent in self._agents:
            silent_s = time.monotonic() - agent.heard_s
            if not agent.is_over and silent_s > 3 * BEAT_S:
                agent.lost = f"silent for {silent_s:.0f} s"

    def _error(self) -> PartitaError:
        """Return why the run failed: a host that is lost, else what the first agent says."""
        lost = [agent for agent in self._agents if agent.lost]
        if lost:
            first, why = min(lost, key=lambda agent: agent.heard_s), self._place.explain()
            because = f"; {why}" if why else ""
            error = LostHostError(f"{first.title} went away: {first.lost}{because}")
            error.rank = first.host.ranks[0]
            return error
        answers = [each.answer for each in self._agents if isinstance(each.answer, Failed)]
        # All that could still speak to one another say the same; the others only lost somebody.
        best = min(answers, key=lambda answer: answer.rank < 0)
        found = read_error(best.error)
        if len(self._agents) == 1:
            found = type(found)(f"host {self._agents[0].name}: {found}")
        if isinstance(found, WorkerError):
            found.rank = best.rank
        return found

    def close(self) -> None:
        """End all agents, and wait until their ranks have ended."""
        self._send_all(End())
        deadline = time.monotonic() + _GRACE_S
        while time.monotonic() < deadline and not all(agent.is_closed for agent in self._agents):
            self._hear(_LOOK_S)
        for agent in self._agents:
            agent.channel.ended()
        if self._agents:
            self._write_hosts()

    def _write_hosts(self) -> None:
        rows = [
            {
                "host": agent.host.name,
                "name": agent.name,
                "hostname": agent.hello.hostname if agent.hello else None,
                "ranks": list(agent.host.ranks),
                "outcome": agent.outcome,
            }
            for agent in self._agents
        ]
        text = json.dumps(rows, indent=2) + "\n"
        write_atomically(self._files.path / HOSTS, text)
