"""The Slurm engine: a job is a batch job on the nodes that the policy chose.

Slurm is asked to run it there with these GPUs, CPUs and memory, and never decides anything: it may
not queue a job again by itself (``--no-requeue``), because the fleet would start it as well. A job
whose hosts get the same is one batch job over them; where they differ it is a heterogeneous one, a
component per host. On several hosts the command runs once on each, with ``NODE_RANK``, ``NNODES``,
``MASTER_ADDR`` and ``MASTER_PORT``, as torchrun wants them.

All jobs are looked at with at most three calls: ``squeue`` (JSON where this version has it, else
``scontrol show job``), ``scontrol show node``, and ``sacct`` for those that Slurm has forgotten
since. While the controller is away nothing is known and nothing is started; it is asked again after
1, 2, 4, ... 60 s.
"""

import shlex
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from partita.errors import InvalidInputError, PartitaError, UnsupportedError
from partita.fleet.engines import shim
from partita.fleet.engines.environment import grant_variables, identity_variables
from partita.fleet.engines.protocol import (
    Attempt,
    Cause,
    Handle,
    Look,
    Order,
    Place,
    Status,
    Traits,
    attempt_of,
)
from partita.fleet.engines.remote import Controller, read_options
from partita.fleet.lease import SERVERS_VARIABLE
from partita.fleet.live.files import read_json
from partita.fleet.policies.resources import Servers
from partita.processes import job_environment
from partita.slurm.commands import SlurmCommands, SlurmError
from partita.slurm.jobs import SACCT_FORMAT, Phase, SlurmJob, read_jobs, read_sacct, read_squeue
from partita.slurm.nodes import SlurmNode, gres_type, read_nodes
from partita.units import format_bytes

_MIB = 2**20
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 60.0
_UNSEEN_S = 10.0
"""How long a job may be missing from Slurm's list after its start before it counts as gone."""
_PORT = 20000
_WHY = {
    "NODE_FAIL": "a node of it failed",
    "PREEMPTED": "Slurm preempted it",
    "TIMEOUT": "Slurm's time limit was over",
    "DEADLINE": "Slurm's deadline was over",
    "BOOT_FAIL": "a node of it did not boot",
    "REVOKED": "Slurm revoked it",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class SlurmOptions:
    """How jobs are submitted.

    Attributes:
        partition: Partition; empty = Slurm's default.
        account: Account that is charged; empty = the user's default.
        qos: Quality of service; empty = the default.
        time: Time limit of a start, as Slurm writes it; empty = the partition's. A job is asked to
            stop a minute before.
        shared: Whether the nodes see the fleet's folder. If not, lease and progress travel over the
            fleet's HTTP API alone and the log stays on the node.
        every: Seconds between two looks at Slurm.
    """

    partition: str = ""
    account: str = ""
    qos: str = ""
    time: str = ""
    shared: bool = True
    every: float = 2.0


def make_slurm_engine(
    servers: Servers, *, groups: bool = True, options: Mapping[str, str] | None = None
) -> "SlurmEngine":
    """Return the engine of the Slurm cluster that this machine's commands speak to.

    Args:
        servers: The servers; their names are Slurm's nodes.
        groups: Not used: Slurm keeps limits as its own configuration says.
        options: Of ``SlurmOptions``, as texts.

    Raises:
        InvalidInputError: There is no such option, or a server is no node of Slurm.
        UnsupportedError: Slurm's commands are not there.
    """
    del groups
    engine = SlurmEngine(servers, read_options("slurm", SlurmOptions, options or {}))
    engine.check_nodes()
    return engine


def servers_of_nodes(nodes: Sequence[SlurmNode]) -> Servers:
    """Return the nodes with GPUs as servers, those that are away too: they may come back.

    Raises:
        InvalidInputError: None has GPUs, or one has GPUs of several types.
    """
    there = [node for node in nodes if node.gpus]
    if not there:
        raise InvalidInputError("Slurm has no node with GPUs (Gres=gpu:...)")
    for node in there:
        if len(node.gpus) > 1:
            kinds = ", ".join(kind for kind, _ in node.gpus)
            raise InvalidInputError(
                f"node {node.name!r} has GPUs of several types ({kinds}); a fleet needs one type "
                "per server"
            )
    types = list(dict.fromkeys(node.gpus[0][0] for node in there))
    return Servers(
        names=tuple(node.name for node in there),
        gpu_types=tuple(types),
        gpu_type=np.array([types.index(node.gpus[0][0]) for node in there], dtype=np.int32),
        gpus=np.array([node.gpus[0][1] for node in there], dtype=np.int32),
        cpus=np.array([float(node.cpus) for node in there]),
        memory_bytes=np.array([node.memory_bytes for node in there], dtype=np.float64),
        storage_bytes_per_s=np.zeros(len(there)),
    )


@dataclass(slots=True, kw_only=True)
class _Seen:
    """What Slurm last said.

    Attributes:
        at_s: When; negative = never.
        jobs: Components of our jobs, by name.
        away: Nodes on which nothing can be started.
    """

    at_s: float = -1e9
    jobs: dict[str, list[SlurmJob]] = field(default_factory=dict)
    away: dict[str, str] = field(default_factory=dict)


class SlurmEngine:
    """Jobs as batch jobs of Slurm.

    Args:
        servers: The servers; their names are Slurm's nodes.
        options: How jobs are submitted.
        commands: Slurm's commands.
        clock: Seconds that only grow.
    """

    name = "slurm"
    traits = Traits(can_resize=False, can_split_cpus=False, chooses_gpus=True, is_remote=True)

    def __init__(
        self,
        servers: Servers,
        options: SlurmOptions | None = None,
        *,
        commands: SlurmCommands | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.servers, self.options = servers, options or SlurmOptions()
        self.commands = commands or SlurmCommands(job_environment())
        self._clock = clock
        self._controller = Controller(
            noun="Slurm", clock=clock, first_s=_FIRST_PAUSE_S, longest_s=_LONGEST_PAUSE_S
        )
        self._seen = _Seen()
        self._has_json = True
        self._accounting_s = -1e9
        self._nodes: dict[str, SlurmNode] = {}

    def check_nodes(self) -> None:
        """Refuse servers that are no nodes of Slurm.

        Raises:
            InvalidInputError: A server is none.
            UnsupportedError: Slurm's commands are not there.
        """
        try:
            nodes = read_nodes(self.commands.call("scontrol", "show", "node", "--oneliner"))
        except SlurmError as exc:
            if exc.is_away:
                return  # the fleet waits for it
            raise UnsupportedError(f"Slurm cannot be asked: {exc}") from exc
        self._nodes = {node.name: node for node in nodes}
        strange = [name for name in self.servers.names if name not in self._nodes]
        if strange:
            raise InvalidInputError(
                f"server {strange[0]!r} is no node of Slurm; give --cluster slurm, or a cluster "
                "whose hosts have the names of its nodes"
            )
        for name in self.servers.names:
            self._gres_type(name)

    def _gres_type(self, server: str) -> str:
        """Return the type by which Slurm knows the GPUs of a server.

        Raises:
            InvalidInputError: They are of another type there.
        """
        row = self.servers.names.index(server)
        kind = self.servers.gpu_types[int(self.servers.gpu_type[row])]
        node = self._nodes.get(server)  # unknown until the controller has answered
        return kind if node is None else gres_type(kind, [node])

    def notes(self) -> tuple[str, ...]:
        """Return lines for people on how jobs run here."""
        lines = ["jobs keep their CPUs while they run; grants are whole CPUs, enforced as Slurm is "
                 "configured to"]  # fmt: skip
        if not self.options.shared:
            lines.append("logs of jobs stay on their nodes, below /tmp")
        return tuple(lines)

    # Starting

    def start(self, order: Order) -> Handle:
        """Submit a batch job; where it is not known whether that happened, it is looked for."""
        if self._controller.pause_s > 0:
            raise self._controller.away_error()
        handle = {
            "name": order.name,
            "fleet": order.fleet,
            "job": order.attempt.job,
            "attempt": order.attempt.number,
            "directory": str(order.directory),
            "id": None,
            "at_s": time.time(),
        }
        script = "".join(f"{line}\n" for line in self._script(order))
        try:
            printed = self.commands.call("sbatch", "--parsable", text=script)
        except SlurmError as exc:
            if not exc.is_away:
                raise
            # It may have been submitted all the same: the next look tells, by its name.
            self._controller.failed(exc)
            return handle
        return {**handle, "id": int(printed.strip().partition(";")[0])}

    def _script(self, order: Order) -> list[str]:
        places = order.places
        parts = [self._resources(group) for group in self._groups(places)]
        lines = ["#!/bin/sh"]
        for row, part in enumerate(parts):
            lines += ["#SBATCH hetjob"] if row else []
            lines += [f"#SBATCH {option}" for option in [*self._common(order), *part]]
        lines += [f"cd {shlex.quote(str(order.folder))} || exit {shim.CANNOT_START}"]
        own = identity_variables(order, shared=self.options.shared)
        variables = {**own, **grant_variables(places), **order.environment}
        lines += [f"export {name}={shlex.quote(text)}" for name, text in variables.items()]
        command = " ".join(shlex.quote(word) for word in order.command)
        if len(places) > 1:
            lines += _ranked(order)
            command = _on_every_host(command, len(parts))
        return [*lines, *_kept(command, order, shared=self.options.shared)]

    def _common(self, order: Order) -> list[str]:
        given = {
            "job-name": order.name,
            "partition": self.options.partition,
            "account": self.options.account,
            "qos": self.options.qos,
            "time": self.options.time,
            "output": str(_log(order.directory, order.name, shared=self.options.shared)),
        }
        words = [f"--{name}={shlex.quote(value)}" for name, value in given.items() if value]
        words += ["--open-mode=append", "--no-requeue", "--export=ALL"]
        return [*words, *(["--signal=B:TERM@60"] if self.options.time else [])]

    def _groups(self, places: Sequence[Place]) -> list[list[Place]]:
        """Return the components of a job: all hosts together where each gets the same."""
        if len({self._ask(place) for place in places}) == 1:
            return [list(places)]
        return [[place] for place in places]

    def _ask(self, place: Place) -> tuple[str, int, int]:
        """Return what to ask for on a host: GPUs, CPUs and memory in MiB."""
        row = self.servers.names.index(place.server)
        kind = self._gres_type(place.server)
        gpus = f"gpu:{kind}:{len(place.gpus)}" if kind else f"gpu:{len(place.gpus)}"
        # Without a limit Slurm would give all memory of the host: the GPUs' share is taken.
        share = len(place.gpus) / int(self.servers.gpus[row])
        memory = place.memory_bytes or float(self.servers.memory_bytes[row]) * share
        return gpus, max(1, int(place.cpus)), max(1, int(memory / _MIB))

    def _resources(self, places: Sequence[Place]) -> list[str]:
        gpus, cpus, memory = self._ask(places[0])
        return [
            f"--nodelist={','.join(place.server for place in places)}",
            f"--nodes={len(places)}",
            f"--ntasks={len(places)}",
            "--ntasks-per-node=1",
            f"--gres={gpus}",
            f"--cpus-per-task={cpus}",
            f"--mem={memory}",
        ]

    # Stopping

    def stop(self, handle: Handle, *, grace_s: float) -> None:
        """Send SIGTERM to the command; cancel the job without grace, or if it has not started."""
        components = self._components(handle)
        number = components[0].leader if components else handle["id"]
        if number is None:
            return
        words = ["scancel"]
        if grace_s > 0 and components and components[0].phase is Phase.RUNNING:
            # A signal to the batch script of several hosts would end srun, and by it all at once.
            several = len(components) > 1 or len(components[0].held) > 1
            words += ["--signal=TERM", *([] if several else ["--batch"])]
        try:
            self.commands.call(*words, str(number))
        except SlurmError as exc:
            if exc.is_away:
                self._controller.failed(exc)  # the scheduler asks again, by force, after its grace

    def resize(self, handle: Handle, places: tuple[Place, ...]) -> None:
        """Refuse: Slurm cannot change a running job.

        Raises:
            UnsupportedError: Always; `traits` says so before.
        """
        raise UnsupportedError(f"Slurm cannot change what job {handle['name']} holds")

    # Looking

    def look(self, handles: Mapping[Attempt, Handle]) -> Look:
        """Return how jobs are, by at most three calls; none while the last look is recent."""
        if self._controller.pause_s > 0:
            return Look(statuses={}, away=self._seen.away, failure=self._controller.failure)
        if self._clock() - self._seen.at_s >= self.options.every or not self._has_all(handles):
            try:
                self._ask_slurm(handles)
            except (SlurmError, InvalidInputError) as exc:
                self._controller.failed(exc)
                return Look(statuses={}, away=self._seen.away, failure=self._controller.failure)
            self._controller.answered()
        statuses = {}
        for attempt, handle in handles.items():
            status = self._status(handle)
            if status is not None:
                statuses[attempt] = status
        return Look(statuses=statuses, away=self._seen.away)

    def _has_all(self, handles: Mapping[Attempt, Handle]) -> bool:
        return all(handle["name"] in self._seen.jobs for handle in handles.values())

    def _ask_slurm(self, handles: Mapping[Attempt, Handle]) -> None:
        nodes = read_nodes(self.commands.call("scontrol", "show", "node", "--oneliner"))
        self._nodes = {node.name: node for node in nodes}
        jobs = _by_name(self._list_jobs())
        missing = [handle for handle in handles.values() if handle["name"] not in jobs]
        forgotten = [one for one in missing if time.time() - one["at_s"] > _UNSEEN_S]
        jobs.update(self._remembered(forgotten))
        mine = set(self.servers.names)
        self._seen = _Seen(
            at_s=self._clock(),
            jobs=jobs,
            away={node.name: node.away for node in nodes if node.name in mine and node.away},
        )

    def _list_jobs(self) -> tuple[SlurmJob, ...]:
        """Return this user's jobs that Slurm still knows, ended ones included."""
        if self._has_json:
            try:
                return read_squeue(self.commands.call("squeue", "--me", "--states=all", "--json"))
            except SlurmError as exc:
                if exc.is_away:
                    raise
            except InvalidInputError:
                pass
            self._has_json = False  # this version has none, or one that is not known
        text = self.commands.call("scontrol", "show", "job", "--details", "--oneliner")
        return read_jobs(text)

    def _remembered(self, handles: Sequence[Handle]) -> dict[str, list[SlurmJob]]:
        """Return jobs that only the accounting still knows; none where there is no accounting."""
        numbers = [str(handle["id"]) for handle in handles if handle["id"] is not None]
        if not numbers or self._clock() - self._accounting_s < _LONGEST_PAUSE_S:
            return {}
        try:
            text = self.commands.call(
                "sacct", "--parsable2", "--noheader", "--allocations",
                f"--format={SACCT_FORMAT}", f"--jobs={','.join(numbers)}",
            )  # fmt: skip
        except PartitaError:
            self._accounting_s = self._clock()  # away, or there is none
            return {}
        return _by_name(read_sacct(text))

    def _components(self, handle: Handle) -> list[SlurmJob]:
        return self._seen.jobs.get(handle["name"], [])

    def _status(self, handle: Handle) -> Status | None:
        components = self._components(handle)
        if not components:
            if time.time() - handle["at_s"] <= _UNSEEN_S:
                return None  # just submitted
            return _by_note(handle, "Slurm does not know it any more", handle["id"] is None)
        phases = [one.phase for one in components]
        if components[0].restarts and phases[0] is not Phase.ENDED:
            # Two schedulers would start it: ours is the one that decides.
            self.stop(handle, grace_s=0)
            return Status(running=False, cause=Cause.ENGINE, why="Slurm queued it again")
        if any(phase is Phase.RUNNING for phase in phases):
            given = _given(components)
            return Status(running=True, given=given or None, grant=_grant(components[0], given))
        if any(phase is Phase.PENDING for phase in phases):
            waiting = next(one for one in components if one.phase is Phase.PENDING)
            return Status(running=True, waits=waiting.reason or "queued")
        return _end(handle, components)

    def running(self, fleet: str) -> Mapping[Attempt, Handle]:
        """Return this fleet's jobs that run or wait, by their names."""
        try:
            found = _by_name(self._list_jobs())
        except (SlurmError, InvalidInputError) as exc:
            self._controller.failed(exc)
            raise self._controller.away_error() from exc
        handles = {}
        for name, components in found.items():
            attempt = attempt_of(fleet, name)
            if attempt is not None and any(one.phase is not Phase.ENDED for one in components):
                handles[attempt] = {
                    "name": name,
                    "fleet": fleet,
                    "job": attempt.job,
                    "attempt": attempt.number,
                    "directory": "",
                    "id": components[0].leader,
                    "at_s": time.time(),
                }
        self._seen.jobs.update(found)
        return handles


def _by_name(jobs: Iterable[SlurmJob]) -> dict[str, list[SlurmJob]]:
    """Return the components of jobs, by name, the leader first."""
    found: dict[str, list[SlurmJob]] = {}
    for job in sorted(jobs, key=lambda one: (one.leader, one.offset)):
        found.setdefault(job.name, []).append(job)
    return found


def _given(components: Sequence[SlurmJob]) -> tuple[Place, ...]:
    return tuple(
        Place(
            server=held.node,
            gpus=held.gpus,
            cpu_ids=(),
            cpus=float(held.cpus),
            memory_bytes=float(held.memory_bytes),
        )
        for component in components
        for held in component.held
    )


def _grant(leader: SlurmJob, given: Sequence[Place]) -> str:
    parts = [
        f"{place.server}: GPUs {','.join(map(str, place.gpus))}, {place.cpus:g} CPUs, "
        f"{format_bytes(place.memory_bytes)}"
        for place in given
    ]
    return f"Slurm job {leader.id} on {'; '.join(parts)}" if parts else ""


def _end(handle: Handle, components: Sequence[SlurmJob]) -> Status:
    """Return how a job ended: as the worst of its components did."""
    ended = [one.ended_s for one in components if one.ended_s is not None]
    ended_s = max(ended) if ended else None
    for component in components:
        if component.state in _WHY:
            return Status(
                running=False,
                exit_code=component.exit_code,
                ended_s=ended_s,
                cause=Cause.ENGINE,
                why=f"{_WHY[component.state]} ({component.state})",
            )
    for component in components:
        if component.state == "CANCELLED":
            who = f" {component.reason}" if component.reason.startswith("by ") else ""
            return Status(
                running=False,
                exit_code=component.exit_code,
                ended_s=ended_s,
                cause=Cause.OTHERS,
                why=f"cancelled in Slurm, outside of the fleet (scancel{who})",
            )
    leader = components[0]
    if leader.state == "OUT_OF_MEMORY":
        return Status(
            running=False,
            exit_code=leader.exit_code,
            ended_s=ended_s,
            why="ran out of the memory that it was granted (OUT_OF_MEMORY)",
        )
    if leader.reason in ("JobLaunchFailure", "RaisedSignal:53(Real-time_signal_19)"):
        return Status(
            running=False, ended_s=ended_s, cause=Cause.ENGINE, why="Slurm could not launch it"
        )
    noted = read_json(_note(handle["directory"], int(handle["attempt"])))
    return Status(running=False, exit_code=leader.exit_code, ended_s=noted.get("at_s", ended_s))


def _by_note(handle: Handle, why: str, never_seen: bool) -> Status:
    """Return how a job ended that Slurm has forgotten, by what its script has written."""
    values = read_json(_note(handle["directory"], int(handle["attempt"])))
    if "exit_code" in values:
        return Status(running=False, exit_code=int(values["exit_code"]), ended_s=values.get("at_s"))
    if never_seen:
        return Status(running=False, cause=Cause.ENGINE, why="was not submitted: Slurm was away")
    return Status(running=False, cause=Cause.ENGINE, why=why)


def _note(directory: str, attempt: int) -> Path:
    return Path(directory) / f"attempt-{attempt}" / shim.ENDED


def _log(directory: Path, name: str, *, shared: bool) -> Path:
    return directory / shim.LOG if shared else Path("/tmp") / f"{name}.log"


def _ranked(order: Order) -> list[str]:
    """Return the lines that tell the hosts of a job where the first one is."""
    port = _PORT + (order.attempt.job * 7 + order.attempt.number) % 20000
    first = shlex.quote(order.places[0].server)
    return [
        f"export NNODES={len(order.places)} MASTER_PORT={port} MASTER_ADDR={first}",
        f"address=$(scontrol show node {first} 2>/dev/null "
        "| sed -n 's/.*NodeAddr=\\([^ ]*\\).*/\\1/p') && [ -n \"$address\" ] "
        '&& export MASTER_ADDR="$address"',
    ]


def _on_every_host(command: str, components: int) -> str:
    """Return the command that runs another once on every host of a job, ranked as planned."""
    groups = f" --het-group={','.join(map(str, range(components)))}" if components > 1 else ""
    # Slurm orders the hosts of a component by their names, and numbers its tasks so.
    ranked = (
        "NODE_RANK=0; "
        f'for host in $(echo "${SERVERS_VARIABLE}" | tr , " "); do '
        '[ "$host" = "$SLURMD_NODENAME" ] && break; NODE_RANK=$((NODE_RANK + 1)); done; '
        "export NODE_RANK; "
    )
    inner = shlex.quote(f"{ranked}exec {command}")
    return f"srun{groups} --kill-on-bad-exit=1 sh -c {inner}"


def _kept(command: str, order: Order, *, shared: bool) -> list[str]:
    """Return the lines that run a command, pass SIGTERM on to it, and note how it ended."""
    lines = [
        f"{command} &",
        "child=$!",
        "trap 'kill -TERM \"$child\"' TERM",
        'wait "$child"; code=$?',
        # A signal ends the first wait; the command may go on to write a checkpoint.
        'while kill -0 "$child" 2>/dev/null; do wait "$child"; code=$?; done',
    ]
    if shared:
        note = _note(str(order.directory), order.attempt.number)
        folder, path = shlex.quote(str(note.parent)), shlex.quote(str(note))
        words = 'printf \'{"exit_code": %d, "at_s": %s}\' "$code" "$(date +%s.%N)"'
        lines += [f"mkdir -p {folder} && {words} > {path}.new && mv {path}.new {path}"]
    return [*lines, 'exit "$code"']
