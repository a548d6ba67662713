"""A private Slurm on this machine: one controller and a few nodes whose GPUs are not real.

    with private_slurm(tmp_path) as slurm:
        subprocess.run(["sbatch", ...], env=slurm.environment, check=True)
        slurm.kill_node("n2")

Nothing of a Slurm that the machine may have is touched: key, sockets, ports and state are those of
one directory. Every node runs in a process namespace of its own, so that what its jobs have started
dies with it, as on a machine that loses power. It needs root and Debian's packages ``slurm-wlm``
and ``munge``; ``why_no_slurm`` says what is missing.
"""

import os
import secrets
import shutil
import signal
import socket
import stat
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from partita.errors import UnsupportedError
from partita.testing.daemons import free_ports, wait_until

_PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "squeue", "scontrol", "unshare", "setpriv")
_SYSTEM_PATH = "/usr/sbin:/sbin"
_START_S = 60.0
_NULL_DEVICE = os.makedev(1, 3)


@dataclass(frozen=True, slots=True, kw_only=True)
class FakeNode:
    """A node that this machine pretends to have.

    Attributes:
        name: Its name in Slurm.
        gpus: GPUs it claims.
        gpu_type: Their type; empty = Slurm knows of none.
        cpus: CPUs it claims.
        memory_mb: Memory it claims, in MiB as Slurm counts.
    """

    name: str
    gpus: int = 4
    gpu_type: str = "v100"
    cpus: int = 24
    memory_mb: int = 500_000


FOUR_NODES = tuple(FakeNode(name=f"n{number}") for number in range(1, 5))


def why_no_slurm() -> str:
    """Return why a private Slurm cannot be started here, in one line; empty = it can."""
    missing = [name for name in _PROGRAMS if _program(name) is None]
    if missing:
        return f"{', '.join(missing)} not installed (packages slurm-wlm, munge)"
    if os.geteuid() != 0:
        return "a private Slurm needs root"
    tried = subprocess.run(
        ["unshare", "--pid", "--fork", "--mount-proc", "true"],
        capture_output=True,
        text=True,
        timeout=20,
        check=False,
    )
    return f"process namespaces are not permitted: {tried.stderr.strip()}" * (tried.returncode != 0)


@contextmanager
def private_slurm(
    directory: Path,
    nodes: Sequence[FakeNode] = FOUR_NODES,
    *,
    racks: Mapping[str, Sequence[str]] | None = None,
    settings: Sequence[str] = (),
) -> Iterator["PrivateSlurm"]:
    """Run a private Slurm, whose nodes are all idle, as long as the block lasts.

    Args:
        directory: Where its files go; jobs write their output wherever they are told.
        nodes: The nodes; partition ``main`` has them all, ``urgent`` too and preempts ``main``.
        racks: Names of nodes by leaf switch; None = Slurm knows of no topology.
        settings: More lines of slurm.conf, such as ``"MinJobAge=2"``; they replace ours.

    Raises:
        UnsupportedError: It cannot be started here, or did not come up.
    """
    reason = why_no_slurm()
    if reason:
        raise UnsupportedError(reason)
    slurm = PrivateSlurm(directory=directory.resolve(), nodes=tuple(nodes))
    slurm.write_files(racks or {}, settings)
    try:
        slurm.start_munge()
        slurm.start_controller()
        for node in nodes:
            slurm.start_node(node.name)
        slurm.wait_for_nodes()
        yield slurm
    finally:
        slurm.kill()


@dataclass(slots=True, kw_only=True)
class PrivateSlurm:
    """A Slurm whose daemons are children of this process.

    Attributes:
        directory: Its files.
        nodes: Its nodes.
    """

    directory: Path
    nodes: tuple[FakeNode, ...]
    _daemons: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    @property
    def configuration(self) -> Path:
        """The file that ``SLURM_CONF`` names."""
        return self.directory / "slurm.conf"

    @property
    def environment(self) -> dict[str, str]:
        """The environment in which Slurm's commands, and what calls them, speak to this Slurm."""
        kept = {name: text for name, text in os.environ.items() if not name.startswith("SLURM_")}
        path = f"{kept.get('PATH', os.defpath)}:{_SYSTEM_PATH}"
        return {**kept, "PATH": path, "SLURM_CONF": str(self.configuration)}

    def call(self, *command: str, check: bool = True) -> str:
        """Return what one of Slurm's commands prints.

        Raises:
            UnsupportedError: It failed, and ``check`` asks for success.
        """
        result = subprocess.run(
            command,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=_START_S,
            check=False,
        )
        if check and result.returncode != 0:
            raise UnsupportedError(f"{' '.join(command)}: {result.stderr.strip()}")
        return result.stdout

    def write_files(self, racks: Mapping[str, Sequence[str]], settings: Sequence[str]) -> None:
        """Write key, configuration and fake devices."""
        for name in ("state", "spool", "log", "dev"):
            (self.directory / name).mkdir(parents=True, exist_ok=True)
        key = self.directory / "munge.key"
        key.write_bytes(secrets.token_bytes(128))
        key.chmod(0o600)
        # Slurm counts a GPU only where there is a device file for it.
        for number in range(max((node.gpus for node in self.nodes), default=0)):
            os.mknod(self._device(number), 0o666 | stat.S_IFCHR, _NULL_DEVICE)
        ports = free_ports(1 + len(self.nodes))
        pairs = (line.partition("=") for line in [*self._settings(ports[0]), *settings])
        ours = {name: value for name, _, value in pairs}
        if racks:
            ours["TopologyPlugin"] = "topology/tree"
        lines = [
            *(f"{name}={value}" for name, value in ours.items()),
            *(_node_line(node, port) for node, port in zip(self.nodes, ports[1:], strict=True)),
            "PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP PriorityTier=1",
            "PartitionName=urgent Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=10",
        ]
        _write(self.configuration, lines)
        _write(self.directory / "gres.conf", [self._gres(node) for node in self.nodes if node.gpus])
        leaves = [f"SwitchName={name} Nodes={','.join(racks[name])}" for name in racks]
        top = [f"SwitchName=spine Switches={','.join(racks)}"] if racks else []
        _write(self.directory / "topology.conf", [*leaves, *top])

    def _device(self, number: int) -> Path:
        return self.directory / "dev" / f"nvidia{number}"

    def _gres(self, node: FakeNode) -> str:
        kind = f" Type={node.gpu_type}" if node.gpu_type else ""
        files = ",".join(str(self._device(number)) for number in range(node.gpus))
        return f"NodeName={node.name} Name=gpu{kind} File={files}"

    def _settings(self, port: int) -> list[str]:
        folder = self.directory
        return [
            "ClusterName=partita",
            f"SlurmctldHost={_host()}(127.0.0.1)",
            f"SlurmctldPort={port}",
            "SlurmUser=root",
            "AuthType=auth/munge",
            f"AuthInfo=socket={folder}/munge.socket",
            "CredType=cred/munge",
            f"StateSaveLocation={folder}/state",
            f"SlurmdSpoolDir={folder}/spool/%n",
            f"SlurmctldPidFile={folder}/slurmctld.pid",
            f"SlurmdPidFile={folder}/spool/%n.pid",
            f"SlurmctldLogFile={folder}/log/slurmctld.log",
            f"SlurmdLogFile={folder}/log/%n.log",
            "SlurmdParameters=config_overrides",
            "ProctrackType=proctrack/linuxproc",
            "TaskPlugin=task/none",
            "JobAcctGatherType=jobacct_gather/none",
            "SelectType=select/cons_tres",
            "SelectTypeParameters=CR_Core_Memory",
            "SchedulerType=sched/backfill",
            "SchedulerParameters=batch_sched_delay=0,bf_interval=1,bf_max_job_test=1000",
            "PreemptType=preempt/partition_prio",
            "PreemptMode=REQUEUE",
            "GresTypes=gpu",
            "MpiDefault=none",
            "ReturnToService=2",
            "SlurmdTimeout=6",
            "SlurmctldTimeout=3",
            "KillWait=5",
            "MessageTimeout=10",
            "MaxArraySize=1001",
            "MaxJobCount=2000",
        ]

    def start_munge(self) -> None:
        """Start the daemon that signs messages, with a key of its own."""
        folder = self.directory
        self._start(
            "munge",
            ["munged", "--foreground", "--force", "--num-threads=4"]
            + [f"--{part}={folder}/munge.{part.split('-')[0]}" for part in ("key-file", "socket")]
            + [f"--{part}-file={folder}/munge.{part}" for part in ("pid", "log", "seed")],
        )
        wait_until((folder / "munge.socket").exists, "munged", _START_S)

    def start_controller(self) -> None:
        """Start the controller and wait until it answers; it finds the jobs of the one before."""
        self._start("controller", ["slurmctld", "-D", "-f", str(self.configuration)])
        wait_until(
            lambda: "UP" in self.call("scontrol", "ping", check=False), "slurmctld", _START_S
        )

    def stop_controller(self) -> None:
        """Stop the controller, which saves its state; nodes and jobs go on."""
        self._daemons["controller"].terminate()
        self._daemons["controller"].wait(_START_S)

    def start_node(self, name: str) -> None:
        """Start a node."""
        daemon = f"slurmd -D -N {name} -f {self.configuration} & wait $!"
        self._start(
            name,
            ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child", "sh", "-c", daemon],
        )

    def kill_node(self, name: str) -> None:
        """Kill a node with all that runs on it, as a loss of power does."""
        self._kill(name)

    def node_states(self) -> dict[str, str]:
        """Return the state of each node, in Slurm's words."""
        lines = self.call("sinfo", "-h", "-N", "-p", "main", "-o", "%N %T").split("\n")
        return dict(line.split() for line in lines if line)

    def wait_for_nodes(self, limit_s: float = _START_S) -> None:
        """Wait until every node is idle."""
        wait_until(lambda: set(self.node_states().values()) == {"idle"}, "slurmd", limit_s)

    def kill(self) -> None:
        """End all jobs and daemons."""
        for name in reversed(list(self._daemons)):
            self._kill(name)

    def _start(self, name: str, command: list[str]) -> None:
        with (self.directory / "log" / f"{name}.out").open("ab") as log:
            self._daemons[name] = subprocess.Popen(
                # The system ends it with this process, however that ends.
                ["setpriv", "--pdeathsig", "KILL", *command],
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def _kill(self, name: str) -> None:
        daemon = self._daemons.pop(name, None)
        if daemon is None:
            return
        with suppress(ProcessLookupError):
            daemon.send_signal(signal.SIGKILL)
        daemon.wait(_START_S)


def _node_line(node: FakeNode, port: int) -> str:
    kind = f"{node.gpu_type}:" if node.gpu_type else ""
    gres = f" Gres=gpu:{kind}{node.gpus}" if node.gpus else ""
    return (
        f"NodeName={node.name} NodeHostname={_host()} NodeAddr=127.0.0.1 Port={port}"
        f" CPUs={node.cpus} RealMemory={node.memory_mb}{gres} State=UNKNOWN"
    )


def _host() -> str:
    return socket.gethostname().split(".")[0]


def _program(name: str) -> str | None:
    return shutil.which(name, path=f"{os.environ.get('PATH', os.defpath)}:{_SYSTEM_PATH}")


def _write(path: Path, lines: Sequence[str]) -> None:
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
