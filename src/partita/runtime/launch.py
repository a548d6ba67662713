"""Runs a job directory in fresh processes, on this host or together with launchers on others.

torch's elastic agent starts, watches and ends the ranks of a host. The hosts meet in a store that
the first one opens: on a port that the system chooses for one host, on MASTER_PORT for several.
Every limit is stated: hosts that do not come are named after ``Job.start_limit_s``, a rank that
stands still after ``Job.stall_limit_s`` and a second or two, and no process is left behind.
"""

import json
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch.distributed import (  # type: ignore[attr-defined]  # not in its stubs
    PrefixStore,
    Store,
    TCPStore,
)
from torch.distributed.elastic.agent.server.api import RunResult, WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing.api import LogsDest, LogsSpecs, SignalException
from torch.distributed.elastic.rendezvous.api import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousStoreInfo,
)

from partita.core.solution import Solution
from partita.errors import InvalidInputError, PartitaError, WorkerError
from partita.processes import ended_by_signals, is_noticed
from partita.ranks.failures import (
    BadDataError,
    Failure,
    NotFiniteError,
    error_of,
    first_cause,
    read_error,
    write_error,
)
from partita.ranks.status import STALE_S, StatusBoard, StatusView
from partita.runtime.emulation.rehearsal import NoCode, emulated_workload, put_emulated_together
from partita.runtime.executor import Run, check_runnable, put_together
from partita.runtime.job import Job, JobDirectory, place_ranks
from partita.runtime.rank import StepNews
from partita.runtime.rendezvous import GRACE_S, LOOK_S, Host, await_host, open_store
from partita.runtime.restarts import (
    Attempts,
    Incident,
    LossRecord,
    Stopper,
    Survival,
    never,
    newest_step,
)
from partita.runtime.task import Task

_GIVEN_UP = "given up"
_AGENT_SIGNALS = "TORCHELASTIC_SIGNALS_TO_HANDLE"
"""Variable that tells torch's agent by which signals it ends the ranks."""

OnStep = Callable[[int, StepNews], None]


def run_launched(
    directory: Path,
    *,
    on_step: OnStep = lambda _, __: None,
    survival: Survival | None = None,
) -> Run:
    """Run a job directory in fresh processes of this host.

    Args:
        directory: The job directory.
        on_step: Called with a rank and each step that it has done.
        survival: How it goes on when a rank fails; if not given, it does not.

    Raises:
        WorkerError: A rank failed, died or stood still; names it.
    """
    return collect(directory, launch(directory, on_step=on_step, survival=survival))


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """How a job has ended, which ended well.

    Attributes:
        incidents: Failures that it has survived.
        asked: Why its ranks were asked to stop; empty = they were not.
    """

    incidents: tuple[Incident, ...] = ()
    asked: str = ""


def launch(
    directory: Path,
    host: Host | None = None,
    *,
    on_step: OnStep = lambda _, __: None,
    survival: Survival | None = None,
) -> Ended:
    """Start the ranks of this host, and wait until all have ended; every host calls it.

    Afterwards the first host has the reports of all ranks (``collect``). Where ranks are started
    again, the first host decides about it, and the others follow.

    Raises:
        InvalidInputError: The job is wrong, or the plan uses another number of hosts.
        WorkerError: A rank or a host failed; names it.
        KeyboardInterrupt: SIGINT; all ranks have ended.
        SystemExit: SIGTERM, SIGHUP or SIGQUIT; all ranks have ended.
    """
    host = Host() if host is None else host
    survival = Survival() if survival is None else survival
    files = JobDirectory(directory)
    job, solution = files.read_job(), files.read_solution()
    if job.emulate is None:
        check_runnable(solution.plan)
    program = job.program(solution)
    placement = place_ranks(solution.problem, program, host.num_hosts)
    ranks = placement.hosts[host.index]
    follows = host.index > 0 and survival.limit.restarts > 0
    if not follows:
        _check_unused(files, ranks)
    board = files.open_board(host.index, placement.num_ranks)
    view = StatusView(board, program, ranks)
    board.clear()
    attempts = Attempts(survival, partial(newest_step, job.saving()))
    with ended_by_signals():
        hosts = _Hosts(host, job, solution)
        while True:
            attempts.number = hosts.meet(attempts.number, follows=follows)
            files = JobDirectory(directory, attempts.number)
            files.prepare()
            _check_unused(files, ranks)
            board.clear()
            stopper = hosts.stopper(board, ranks, survival.stop)
            watcher = _Watcher(
                view, job.stall_limit_s, files, _both(attempts.note, on_step), survival.say
            )
            watcher.stopper = stopper
            result = _run_agent(hosts, files, ranks, watcher)
            if result.is_failed():
                error = _error_of(result, files, view, watcher, hosts)
                if isinstance(error, NotFiniteError):
                    job = _past_bad_data(files, job, attempts, error, host)
            elif not follows or hosts.is_done():
                hosts.end(restarts=survival.limit.restarts)
                break
            else:
                error = WorkerError("the first host starts all ranks again")
            if follows:
                attempts.go_on(error, hosts.next_attempt(error))
            else:
                try:
                    attempts.fail(error)
                except WorkerError as exc:
                    hosts.give_up(exc)
                    raise
    return Ended(incidents=tuple(attempts.incidents), asked=stopper.why)


def _error_of(
    result: RunResult, files: JobDirectory, view: StatusView, watcher: "_Watcher", hosts: "_Hosts"
) -> WorkerError:
    """Return why an attempt failed, on whichever host.

    Raises:
        PartitaError: It would fail again.
    """
    failure = first_cause(_failures(result, files, view.ranks))
    explained = _explained(failure, view, watcher)
    shared = _shared(hosts, explained, is_own=failure.is_own or bool(watcher.frozen))
    if not isinstance(shared, WorkerError):
        raise shared
    if isinstance(explained, WorkerError):
        shared.rank = explained.rank
    return shared


def _past_bad_data(
    files: JobDirectory, job: Job, attempts: Attempts, error: NotFiniteError, host: Host
) -> Job:
    """Let the next attempt leave out the data since the newest checkpoint.

    Raises:
        NotFiniteError: The run is not to go on.
    """
    goes_back = isinstance(error, BadDataError) and host.num_hosts == 1
    if not goes_back or job.saving() is None:
        raise error
    job = replace(job, passed=(*job.passed, attempts.passed_data()))
    files.write_job(job)
    return job


def _both(note: OnStep, on_step: OnStep) -> OnStep:
    def call_both(rank: int, news: StepNews) -> None:
        note(rank, news)
        on_step(rank, news)

    return call_both


def collect(directory: Path, ended: Ended | None = None) -> Run:
    """Return what the ranks of a job saw, put together: in its last attempt, if there are several.

    Args:
        directory: The job directory.
        ended: How the job has ended, where it is known.

    Raises:
        FormatError: A report is missing.
    """
    ended = Ended() if ended is None else ended
    made = JobDirectory(directory).attempts()
    files = made[-1]
    job, solution = files.read_job(), files.read_solution()
    problem, plan = solution.problem, solution.plan
    program = job.program(solution)
    ranks = range(place_ranks(problem, program, 1).num_ranks)
    reports = files.read_reports(ranks)
    emulation = job.emulation()
    if emulation is not None:
        run = put_emulated_together(emulated_workload(problem, plan, emulation), reports)
    else:
        run = put_together(Task(problem, plan, program, NoCode()), reports)
    record, warnings = LossRecord(), list[str]()
    for attempt in made:
        for rank in ranks:
            for news in attempt.read_news(rank, 0)[0]:
                if isinstance(news, str):
                    warnings.append(news)
                else:
                    record.note(attempt.attempt, rank, news)
    stopped = ended.asked if reports[0].has_stopped else ""  # they may have ended before
    return replace(
        run,
        losses=record.losses(),
        incidents=ended.incidents,
        stopped=stopped,
        warnings=tuple(warnings),
    )


def _check_unused(files: JobDirectory, ranks: Sequence[int]) -> None:
    """Check that no rank of this host has run here before: old news would be taken for new."""
    old = [path for rank in ranks for path in files.left_by(rank)]
    if old:
        raise InvalidInputError(
            f"{files.path} holds what a run has left already ({old[0].name}); take a new directory"
        )


class _Hosts:
    """The hosts of a run, which meet for every attempt in the store of the first one.

    Attributes:
        host: This one.
        attempt: The attempt for which they have met.
        store: The store, for all attempts.
    """

    store: TCPStore

    def __init__(self, host: Host, job: Job, solution: Solution) -> None:
        self.host, self.attempt, self._limit_s = host, -1, job.start_limit_s
        self._facts = {"torch": torch.__version__, "plan": solution.plan.fingerprint}
        self._opened = False

    def meet(self, attempt: int, *, follows: bool) -> int:
        """Wait until all hosts have come for an attempt; returns which one it is.

        Args:
            attempt: The attempt, or the least one for a host that follows.
            follows: Whether this host takes the attempt that the first one says.

        Raises:
            UnsupportedError: The port is taken.
            WorkerError: A host did not come in time, or something else listens there; names it.
            InvalidInputError: Two hosts say that they are the same one, or their torch differs.
        """
        host, deadline = self.host, time.monotonic() + self._limit_s
        if not self._opened or host.index:  # what the others had may be lost with the network
            self.store = open_store(host, deadline, self._limit_s)
            self._opened = True
        try:
            while True:
                if follows:
                    attempt = self._await_attempt(attempt, deadline)
                elif host.index == 0:
                    self.store.set("attempt", str(attempt))
                if self.store.add(f"{attempt}/count/{host.index}", 1) == 1:
                    break
                if not follows:
                    raise InvalidInputError(
                        f"two hosts have NODE_RANK {host.index}; each needs its own"
                    )
                attempt += 1  # another process was this host: it has died, and this one follows it
            came = [f"{attempt}/host/{other}" for other in range(host.num_hosts)]
            self.store.set(came[host.index], json.dumps(self._facts))
            for other in range(host.num_hosts):
                await_host(host, self.store, came, other, deadline, self._limit_s)
                theirs = json.loads(self.store.get(came[other]))
                _check_same(self._facts, theirs, host, other)
        except RuntimeError as exc:
            raise WorkerError(f"{host}: host 0 at {host.address}:{host.port} went away") from exc
        self.attempt = attempt
        return attempt

    def _await_attempt(self, least: int, deadline: float) -> int:
        """Return the attempt that the first host is at, once it is at so many."""
        while not self.store.check(["attempt"]) or (at := int(self.store.get("attempt"))) < least:
            if self.store.check([_GIVEN_UP]):
                raise read_error(self.store.get(_GIVEN_UP).decode())
            if time.monotonic() > deadline:
                raise WorkerError(
                    f"{self.host}: host 0 did not start attempt {least + 1} within "
                    f"{self._limit_s:g} s"
                )
            time.sleep(LOOK_S / 2)
        return at

    def next_attempt(self, error: WorkerError) -> int:
        """Return the attempt after one that failed here, where the first host begins another.

        Raises:
            WorkerError: It does not; the error it gives up with, or this one.
        """
        deadline = time.monotonic() + self._limit_s
        while True:
            try:
                self.store = open_store(self.host, deadline, self._limit_s)
                return self._await_attempt(self.attempt + 1, deadline)
            except WorkerError as exc:
                raise error from exc
            except RuntimeError as exc:  # the network is gone again
                if time.monotonic() > deadline:
                    raise error from exc

    def is_done(self) -> bool:
        """Return whether the first host is satisfied too, rather than starting all ranks again."""
        deadline = time.monotonic() + self._limit_s
        with suppress(RuntimeError):  # it has ended
            while time.monotonic() < deadline:
                if self.store.check([f"{self.attempt}/done"]):
                    return True
                if int(self.store.get("attempt")) > self.attempt:
                    return False
                time.sleep(LOOK_S)
        return True

    def give_up(self, error: WorkerError) -> None:
        """Tell the hosts that follow why there is no other attempt."""
        if self.host.num_hosts > 1 and self.host.index == 0:
            # By a connection of its own: the other one may be waiting for a host that is gone.
            with suppress(RuntimeError):
                self.store.clone().set(_GIVEN_UP, write_error(error))  # type: ignore[attr-defined]  # not in its stubs
            time.sleep(GRACE_S / 3)  # they look a few times a second

    def end(self, *, restarts: int) -> None:
        """Tell the hosts that follow that all is done."""
        if restarts and self.host.num_hosts > 1 and self.host.index == 0:
            self.store.set(f"{self.attempt}/done", "1")
            time.sleep(GRACE_S / 3)

    def stopper(self, board: StatusBoard, ranks: Sequence[int], stop: Callable[[], str]) -> Stopper:
        """Return what lets the ranks of all hosts stop at one step."""
        if self.host.num_hosts == 1 or stop is never:
            return Stopper(board, ranks, stop)
        shared = PrefixStore(f"{self.attempt}/stop", self.store.clone())  # type: ignore[attr-defined]  # not in its stubs
        return _HostStopper(board, ranks, stop, shared, self.host)


class _HostStopper(Stopper):
    """Lets the ranks of several hosts stop at one step; the first host proposes.

    Each host answers a proposal with the last step that one of its ranks has begun. If that is the
    proposed one or later, the first host proposes a later step.
    """

    def __init__(
        self,
        board: StatusBoard,
        ranks: Sequence[int],
        stop: Callable[[], str],
        shared: Store,
        host: Host,
    ) -> None:
        super().__init__(board, ranks, stop)
        self._shared, self._host = shared, host
        self._round, self._proposed = -1, -1
        self._thread: threading.Thread | None = None
        self._is_over = threading.Event()

    def look(self) -> None:
        """Take part in agreements from now on, and begin one if there is a reason to.

        In a thread, as a store that cannot be reached any more lets its users wait.
        """
        if self._thread is None:
            self._thread = threading.Thread(target=self._keep_looking, daemon=True, name="stop")
            self._thread.start()

    def end(self) -> None:
        """Take part no more."""
        self._is_over.set()

    def _keep_looking(self) -> None:
        with suppress(RuntimeError):  # the network is gone: the ranks will fail
            while self.step < 0 and not self._is_over.wait(LOOK_S):
                self._take_part()

    def _take_part(self) -> None:
        if not self.why and (why := self._stop()):
            self._shared.set("why", why)
        if not self._shared.check(["why"]):
            return
        self.why = self._shared.get("why").decode()
        if self._host.index == 0 and self._round < 0:
            step = max(self._board.announced(rank) for rank in self._ranks) + 1
            if step <= 0:
                return  # its ranks have not begun
            self._shared.set("proposal", json.dumps([0, step]))
        if not self._shared.check(["proposal"]):
            return
        number, step = json.loads(self._shared.get("proposal"))
        if number != self._round:
            self._round, self._proposed = number, step
            begun = self._board.propose_stop(step, self._ranks)
            self._shared.set(f"{number}/{self._host.index}", str(begun))
        if self._host.index == 0:
            self._decide()
        if self._shared.check(["certain"]):
            self.step = int(self._shared.get("certain"))
            self._board.decide_stop(self.step)

    def _decide(self) -> None:
        answers = [f"{self._round}/{other}" for other in range(self._host.num_hosts)]
        if not self._shared.check(answers):
            return
        begun = max(int(self._shared.get(answer)) for answer in answers)
        if begun < self._proposed:
            self._shared.set("certain", str(self._proposed))
        else:
            self._shared.set("proposal", json.dumps([self._round + 1, begun + 1]))


def _check_same(
    mine: Mapping[str, str], theirs: Mapping[str, str], host: Host, other: int
) -> None:  # fmt: skip
    for what, value in mine.items():
        if theirs[what] != value:
            raise InvalidInputError(
                f"{host} has {what} {value}, {host.called(other)} has {theirs[what]}; all need the "
                "same"
            )


class _Met(RendezvousHandler):
    """The hosts of a run, as torch's agent wants to see them: they have met already."""

    def __init__(self, hosts: _Hosts) -> None:
        self._host, self._port = hosts.host, hosts.store.port
        # What agents leave there in one attempt must not be read in the next.
        self._store = PrefixStore(f"{hosts.attempt}/agents", hosts.store)

    @property
    def use_agent_store(self) -> bool:
        return True

    def get_backend(self) -> str:
        return "partita"

    def next_rendezvous(self) -> RendezvousInfo:
        address = RendezvousStoreInfo(self._host.address, self._port)
        return RendezvousInfo(self._store, self._host.index, self._host.num_hosts, address)

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        pass

    def num_nodes_waiting(self) -> int:
        return 0

    def get_run_id(self) -> str:
        return "partita"

    def shutdown(self) -> bool:
        return True


class _RankLogs(LogsSpecs):
    """Sends what each rank prints to its log, from its first moment."""

    def __init__(self, files: JobDirectory, ranks: Sequence[int]) -> None:
        super().__init__(log_dir=str(files.path))
        self._files, self._ranks = files, ranks

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        logs = {local: str(self._files.log(self._ranks[local])) for local in envs}
        return LogsDest(stdouts=logs, stderrs=dict(logs), error_files=dict.fromkeys(envs, ""))

    @property
    def root_log_dir(self) -> str:
        return str(self._files.path)


class _Watcher:
    """Looks after the ranks while the agent waits for them.

    It passes on what they say, and ends a rank that stands still, for which a signal to end would
    wait for ever.

    Attributes:
        frozen: Which rank stood still, and where; empty if none did.
        stopper: Lets the ranks stop when there is a reason to.
    """

    def __init__(
        self,
        view: StatusView,
        limit_s: float,
        files: JobDirectory,
        on_step: OnStep,
        say: Callable[[str], None],
    ) -> None:
        self._view, self._files, self._on_step, self._say = view, files, on_step, say
        self._silence_s = limit_s + STALE_S
        self._places = dict.fromkeys(view.ranks, 0)
        self.frozen = ""
        self.stopper: Stopper | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True, name="watcher")

    def __enter__(self) -> "_Watcher":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        if self.stopper is not None:
            self.stopper.end()
        self._pass_news_on()

    def _watch(self) -> None:
        while not self._stop.wait(LOOK_S):
            self._pass_news_on()
            if self.stopper is not None:
                self.stopper.look()
            for rank in self._view.board.frozen(self._view.ranks, self._silence_s):
                pid = self._view.board.read(rank).pid
                if _is_running_child(pid):
                    self.frozen = self.frozen or self._view.stands_still(rank)
                    os.kill(pid, signal.SIGKILL)

    def _pass_news_on(self) -> None:
        for rank, begin in self._places.items():
            news, self._places[rank] = self._files.read_news(rank, begin)
            for one in news:
                if isinstance(one, str):
                    self._say(one)
                else:
                    self._on_step(rank, one)


def _is_running_child(pid: int) -> bool:
    """Return whether a process is one that this one has started, and has not ended."""
    try:
        return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None
    except ChildProcessError:
        return False


def _run_agent(
    hosts: _Hosts, files: JobDirectory, ranks: Sequence[int], watcher: _Watcher
) -> RunResult:
    """Let torch's agent start the ranks and wait for them."""
    ended = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
    os.environ[_AGENT_SIGNALS] = ",".join(each.name for each in ended if not is_noticed(each))
    spec = WorkerSpec(
        role="partita",
        local_world_size=len(ranks),
        rdzv_handler=_Met(hosts),
        entrypoint=sys.executable,
        args=("-m", "partita.runtime", str(files.path), str(os.getpid()), str(files.attempt)),
        max_restarts=0,
        monitor_interval=LOOK_S,
    )
    agent = LocalElasticAgent(spec, _RankLogs(files, ranks), shutdown_timeout=int(GRACE_S))
    try:
        with watcher, _quiet_agent():
            result: RunResult = agent.run()
    except SignalException as exc:  # the agent has ended the ranks
        if exc.sigval == signal.SIGINT:
            raise KeyboardInterrupt from exc
        raise SystemExit(128 + exc.sigval) from exc
    finally:
        _close_logs(agent)
    return result


def _close_logs(agent: LocalElasticAgent) -> None:
    """Close the log files of ranks that ended by themselves: torch closes those it has killed."""
    handlers = getattr(getattr(agent, "_pcontext", None), "subprocess_handlers", {})
    for handler in handlers.values():
        for log in (handler._stdout, handler._stderr):  # noqa: SLF001 (they have no other name)
            if log is not None:
                log.close()


@contextmanager
def _quiet_agent() -> Iterator[None]:
    """Keep the agent from reporting what our errors say better."""
    names = ("agent.server.api", "agent.server.local_elastic_agent", "multiprocessing.api")
    loggers = [logging.getLogger(f"torch.distributed.elastic.{name}") for name in names]
    before = [logger.disabled for logger in loggers]
    for logger in loggers:
        logger.disabled = True
    try:
        yield
    finally:
        for logger, disabled in zip(loggers, before, strict=True):
            logger.disabled = disabled


def _failures(result: RunResult, files: JobDirectory, ranks: Sequence[int]) -> list[Failure]:
    """Return how the ranks of this host failed, in the order in which they were seen to."""
    failed = sorted(result.failures.values(), key=lambda f: (f.timestamp, f.local_rank))
    return [
        Failure(
            rank=ranks[failure.local_rank],
            exit_code=failure.exitcode,
            error=files.read_error(ranks[failure.local_rank]),
            log=files.log(ranks[failure.local_rank]),
        )
        for failure in failed
    ]


def _explained(failure: Failure, view: StatusView, watcher: _Watcher) -> PartitaError:
    if watcher.frozen:
        return WorkerError(f"{watcher.frozen}\n{view.all()}")
    return error_of(
        failure, culprit=view.culprit(), where=view.where(failure.rank), stands=view.all()
    )


def _shared(hosts: _Hosts, error: PartitaError, *, is_own: bool) -> PartitaError:
    """Tell the other hosts why this one failed, and return the error of the one that is to blame.

    In a thread, as a store that cannot be reached any more lets its users wait.
    """
    host = hosts.host
    if host.num_hosts == 1:
        return error
    store = PrefixStore(f"{hosts.attempt}/errors", hosts.store)
    found: dict[int, tuple[bool, PartitaError]] = {}
    thread = threading.Thread(target=_exchange, args=(store, host, error, is_own, found))
    thread.daemon = True
    thread.start()
    thread.join(GRACE_S)
    blamed = [
        type(theirs)(f"{host.called(other)}: {theirs}")
        for other, (own, theirs) in sorted(found.items())
        if own
    ]
    if is_own or not blamed:
        return type(error)(f"{host}: {error}")
    return blamed[0]


def _exchange(
    store: Store,
    host: Host,
    error: PartitaError,
    is_own: bool,
    found: dict[int, tuple[bool, PartitaError]],
) -> None:
    deadline = time.monotonic() + 0.8 * GRACE_S
    with suppress(RuntimeError):  # the store is gone, and with it what the others say
        store.set(f"failed/{host.index}", json.dumps([is_own, write_error(error)]))
        waiting = set(range(host.num_hosts)) - {host.index}
        while waiting and time.monotonic() < deadline:
            for other in sorted(waiting):
                if store.check([f"failed/{other}"]):
                    own, text = json.loads(store.get(f"failed/{other}"))
                    found[other] = (own, read_error(text))
                    waiting.discard(other)
            time.sleep(LOOK_S / 2)
