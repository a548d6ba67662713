"""Hosts that Slurm allocates: an agent on each is a step of one job.

The hosts of a plan become an allocation by ``salloc --no-shell``: runs of equal hosts are one
component, different ones a heterogeneous job. Nodes are asked for by name where Slurm knows the
names of the plan's hosts, and GPUs by the names that Slurm has for them. Each agent is started by
``srun``, whose standard input and output are the way to it. Inside an allocation
(``SLURM_JOB_ID``) that one is used, and not given back.
"""

import os
import re
import shlex
import shutil
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import groupby, zip_longest

from partita.errors import InvalidInputError, UnsupportedError
from partita.hosts.places import (
    PlanHost,
    ProcessChannel,
    RealHost,
    agent_command,
    match_hosts,
)
from partita.hosts.table import PlaceFields
from partita.processes import job_environment
from partita.slurm.commands import SlurmCommands, SlurmError
from partita.slurm.hostlist import expand_hosts
from partita.slurm.nodes import SlurmNode, gres_type, read_nodes

_JOB = re.compile(r"(?:Granted|Pending) job allocation (\d+)")
_LIMIT_S = 60.0
"""How long Slurm's commands may take to answer."""
_LOOK_S = 0.1


def slurm_place(rest: str, hosts: Sequence[PlanHost], request: PlaceFields) -> "SlurmPlace":
    """Return nodes of Slurm for the hosts of a plan.

    Raises:
        InvalidInputError: Something follows ``slurm``.
    """
    if rest:
        raise InvalidInputError(f"--on slurm:{rest}: nothing follows; see --slurm-options")
    return SlurmPlace(
        hosts,
        options=shlex.split(request.slurm_options or ""),
        python=request.host_python or "",
        queue_limit_s=request.queue_limit,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Component:
    """Equal hosts of a plan that follow one another: a component of a job.

    Attributes:
        hosts: The hosts.
        nodes: Nodes that are asked for by name; empty = any that have room.
    """

    hosts: tuple[PlanHost, ...]
    nodes: tuple[str, ...] = ()

    def options(self) -> list[str]:
        """Return the options of salloc for it."""
        host = self.hosts[0]
        named = [f"--nodelist={','.join(self.nodes)}"] if self.nodes else []
        return [f"--nodes={len(self.hosts)}", *named, "--ntasks-per-node=1", *resources(host)]


def resources(host: PlanHost) -> list[str]:
    """Return what the ranks of a host need, as options of salloc and srun."""
    kind = f"{host.gpu_type}:" if host.gpu_type else ""
    gpus = [f"--gpus-per-node={kind}{host.gpus}"] if host.gpus else []
    return [f"--cpus-per-task={host.cpus}", *gpus]


def typed_hosts(
    hosts: Sequence[PlanHost], nodes: Sequence[SlurmNode], names: Sequence[str]
) -> tuple[PlanHost, ...]:
    """Return the hosts of a plan with their GPUs as Slurm's administrator has named them.

    Args:
        hosts: The hosts.
        nodes: Slurm's nodes.
        names: The node of each host; empty = any.

    Raises:
        InvalidInputError: Slurm has several types that may be meant, or none.
    """
    by_name = {node.name: node for node in nodes}
    return tuple(
        replace(
            host, gpu_type=gres_type(host.gpu_type, [by_name[name]] if name in by_name else nodes)
        )
        for host, name in zip_longest(hosts, names)
    )


def components_of(hosts: Sequence[PlanHost], names: Sequence[str]) -> list[_Component]:
    """Return the components of a job for the hosts of a plan.

    Args:
        hosts: The hosts.
        names: The node of each; empty = any.
    """
    found: list[_Component] = []
    begin = 0
    for _, group in groupby(hosts, key=lambda host: (host.gpus, host.gpu_type, host.cpus)):
        members = tuple(group)
        nodes = tuple(names[begin : begin + len(members)])
        found.append(_Component(hosts=members, nodes=nodes))
        begin += len(members)
    return found


class SlurmPlace:
    """Nodes of Slurm, on each of which a step is an agent.

    Attributes:
        names: The nodes, in the order of the plan's hosts.
        addresses: The same: nodes reach one another by their names.
    """

    def __init__(
        self,
        hosts: Sequence[PlanHost],
        *,
        options: Sequence[str] = (),
        python: str = "",
        queue_limit_s: float = 86400.0,
    ) -> None:
        """Check that Slurm is there.

        Args:
            hosts: The hosts of the plan.
            options: Options of salloc for every component.
            python: The interpreter on the hosts; empty = the path of this one.
            queue_limit_s: How long the job may wait in the queue.

        Raises:
            UnsupportedError: Slurm's commands are not installed.
        """
        missing = [name for name in ("salloc", "srun") if shutil.which(name) is None]
        if missing:
            raise UnsupportedError(f"--on slurm needs {', '.join(missing)}, not found on the path")
        self._hosts, self._options, self._python = tuple(hosts), list(options), python
        self._queue_limit_s = queue_limit_s
        self.names: Sequence[str] = ()
        self.addresses: Sequence[str] = ()
        self._components: list[_Component] = []
        self._job, self._is_ours = "", False
        self._slurm = SlurmCommands(job_environment())

    def __enter__(self) -> "SlurmPlace":
        """Get the nodes.

        Raises:
            UnsupportedError: Slurm does not give them.
        """
        try:
            self._get()
        except SlurmError as exc:
            raise UnsupportedError(str(exc)) from exc
        return self

    def _get(self) -> None:
        nodes = read_nodes(self._slurm.call("scontrol", "show", "node", "--oneliner"))
        inside = os.environ.get("SLURM_JOB_ID", "")
        if inside:
            self._job = inside
            there = [RealHost(name=name) for name in self._granted()]
            found = match_hosts(self._hosts, there, f"job {inside}")
            self.names = [host.name for host in found]
            self._hosts = typed_hosts(self._hosts, nodes, self.names)
            self._components = [_Component(hosts=self._hosts)]
        else:
            self._allocate(nodes)
        self.addresses = self.names

    def _allocate(self, nodes: Sequence[SlurmNode]) -> None:
        """Get the nodes, waiting in Slurm's queue."""
        known = [RealHost(name=node.name) for node in nodes]
        wanted = {host.name for host in self._hosts}
        named = bool(wanted & {host.name for host in known})
        found = match_hosts(self._hosts, known, "Slurm") if named else []
        names = [host.name for host in found]
        self._hosts = typed_hosts(self._hosts, nodes, names)
        self._components = components_of(self._hosts, names)
        command = ["salloc", "--no-shell", "--job-name=partita"]
        for turn, component in enumerate(self._components):
            command += [":"] * bool(turn) + component.options() + self._options
        self._is_ours = True
        try:
            self._job = self._await_grant(command)
            granted = self._granted()
        except BaseException:
            self.__exit__()
            raise
        self.names = names if named else granted
        if len(set(self.names)) < len(self._hosts):
            self.__exit__()
            raise UnsupportedError(
                f"job {self._job} has nodes {', '.join(granted)} for the {len(self._hosts)} hosts "
                "of the plan; name the plan's hosts as Slurm's nodes, or add --exclusive to "
                "--slurm-options"
            )

    def _await_grant(self, command: Sequence[str]) -> str:
        """Return the number of the job once it has its nodes."""
        waiting = subprocess.Popen(
            command,
            env=job_environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        lines: list[str] = []

        def listen() -> None:
            assert waiting.stderr is not None
            for line in waiting.stderr:
                lines.append(line.strip())
                if number := _JOB.search(line):
                    self._job = number.group(1)

        listener = threading.Thread(target=listen, daemon=True, name="salloc")
        listener.start()
        deadline = time.monotonic() + self._queue_limit_s
        try:
            while waiting.poll() is None:
                if time.monotonic() > deadline:
                    raise UnsupportedError(
                        f"Slurm gave no nodes to job {self._job} within {self._queue_limit_s:g} s"
                        f"{self._state()}"
                    )
                time.sleep(_LOOK_S)
        finally:
            if waiting.poll() is None:
                waiting.terminate()
            waiting.wait(_LIMIT_S)
            listener.join(_LIMIT_S)
            assert waiting.stderr is not None
            waiting.stderr.close()
        if waiting.returncode or not self._job:
            raise UnsupportedError(f"Slurm gives no nodes: {lines[-1] if lines else 'no word'}")
        return self._job

    def _granted(self) -> list[str]:
        """Return the nodes of the job, component by component."""
        lines = self._slurm.call("squeue", "-h", "-j", self._job, "-o", "%i %N").split("\n")
        rows = sorted(line.split() for line in lines if len(line.split()) == 2)
        rows.sort(key=lambda row: int(row[0].partition("+")[2] or 0))
        return [name for _, nodes in rows for name in expand_hosts(nodes)]

    def start(self, index: int) -> ProcessChannel:
        """Start the agent of a host, as a step of the job."""
        sizes = [len(component.hosts) for component in self._components]
        group = next(at for at in range(len(sizes)) if index < sum(sizes[: at + 1]))
        het = [f"--het-group={group}"] if len(sizes) > 1 else []
        command = ["srun", f"--jobid={self._job}", *het, f"--nodelist={self.names[index]}"]
        command += ["--nodes=1", "--ntasks=1", *resources(self._hosts[index]), "--unbuffered"]
        return ProcessChannel(
            [*command, *agent_command(self._python)], environment=step_environment()
        )

    def explain(self) -> str:
        """Return what Slurm says of the job and of nodes that do not answer."""
        try:
            nodes = ",".join(self.names)
            rows = self._slurm.call("sinfo", "-h", "-N", "-n", nodes, "-o", "%N %T").split("\n")
            states = dict(row.split() for row in rows if len(row.split()) == 2)
        except SlurmError as exc:
            return str(exc)
        bad = [f"node {name} is {state}" for name, state in states.items() if _is_bad(state)]
        return f"Slurm: {', '.join(bad) or 'all nodes answer'}{self._state()}"

    def _state(self) -> str:
        try:
            text = self._slurm.call("squeue", "-h", "-j", self._job, "-o", "%T %r").split("\n")[0]
        except SlurmError:
            return f"; job {self._job} has ended"
        return f"; job {self._job} is {text}" if text else f"; job {self._job} has ended"

    def __exit__(self, *_: object) -> None:
        if self._is_ours and self._job:
            with suppress(SlurmError):  # it has ended, or Slurm ends it when its steps have
                self._slurm.call("scancel", "--quiet", self._job)


def step_environment() -> Mapping[str, str]:
    """Return the environment of srun: ours, but for what would choose other nodes or tasks."""
    chosen = ("SLURM_CPUS_PER_TASK", "SLURM_NTASKS", "SLURM_NTASKS_PER_NODE", "SLURM_NNODES")
    return {name: text for name, text in job_environment().items() if name not in chosen}


def _is_bad(state: str) -> bool:
    """Return whether a node cannot be used, by Slurm's word for it; a star = it does not answer."""
    return state.endswith("*") or state.startswith(("down", "drain", "fail"))
