"""A private Ray on this machine: a few raylets whose GPUs are not real.

    with private_ray(tmp_path) as ray:
        httpx.get(f"{ray.dashboard}/api/jobs/")
        ray.kill_node("r2")

Every process of a node, its workers and their jobs included, carries the node's name in its
environment and is found and killed by it; other Rays of this machine are left alone. It needs the
extra ``ray``; ``why_no_ray`` says what is missing.
"""

import importlib.util
import json
import os
import secrets
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from partita.errors import UnsupportedError
from partita.http import ServerError, ServerLink
from partita.testing.daemons import free_ports, wait_until

_NODE_VARIABLE = "PARTITA_TEST_RAY_NODE"
_STORE_BYTES = 100_000_000
_START_S = 120.0
_SETTINGS = {
    # A raylet that is gone is known to be dead after two seconds, not after twenty.
    "RAY_health_check_initial_delay_ms": "0",
    "RAY_health_check_period_ms": "500",
    "RAY_health_check_timeout_ms": "3000",
    "RAY_health_check_failure_threshold": "3",
    # A busy machine takes longer than Ray waits for itself.
    "RAY_DASHBOARD_SUBPROCESS_MODULE_WAIT_READY_TIMEOUT": "120",
}
_TRIES = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class FakeRayNode:
    """A Ray node that this machine pretends to have.

    Attributes:
        name: Its name in Ray.
        gpus: GPUs it claims.
        cpus: CPUs it claims.
        memory_bytes: Memory it claims.
        resources: Custom resources, such as ``{"v100": 4}``.
        labels: Labels of the node.
    """

    name: str
    gpus: int = 4
    cpus: int = 24
    memory_bytes: int = 500 * 10**9
    resources: Mapping[str, float] = field(default_factory=dict)
    labels: Mapping[str, str] = field(default_factory=dict)


TWO_NODES = (FakeRayNode(name="r1"), FakeRayNode(name="r2"))


def why_no_ray() -> str:
    """Return why a private Ray cannot be started here, in one line; empty = it can."""
    if any(importlib.util.find_spec(name) is None for name in ("ray", "aiohttp")):
        return "ray is not installed (pip install partita[ray])"
    return ""


@contextmanager
def private_ray(nodes: Sequence[FakeRayNode] = TWO_NODES) -> Iterator["PrivateRay"]:
    """Run a private Ray as long as the block lasts; its first node has the head.

    Raises:
        UnsupportedError: It cannot be started here, or did not come up.
    """
    reason = why_no_ray()
    if reason:
        raise UnsupportedError(reason)
    # Ray puts sockets there, whose paths must be short.
    with tempfile.TemporaryDirectory(prefix="ray", ignore_cleanup_errors=True) as directory:
        ports = free_ports(3)
        ray = PrivateRay(
            directory=Path(directory),
            nodes=tuple(nodes),
            port=ports[0],
            dashboard_port=ports[1],
            client_port=ports[2],
        )
        try:
            for node in nodes:
                ray.start_node(node.name)
            ray.wait_for_nodes()
            ray.wait_for_jobs()
            yield ray
        finally:
            ray.kill()


@contextmanager
def marked_ray() -> Iterator[dict[str, str]]:
    """Yield variables that mark what is started with them, and kill every Ray that has them.

    A Ray started by ``ray start`` outlives whoever started it; ``ray stop`` would stop others too.
    """
    mark = secrets.token_hex(8)
    with tempfile.TemporaryDirectory(prefix="ray", ignore_cleanup_errors=True) as directory:
        try:
            yield {**_SETTINGS, _NODE_VARIABLE: mark, "RAY_TMPDIR": directory}
        finally:
            _kill_marked(f"{_NODE_VARIABLE}={mark}\0".encode())


@dataclass(slots=True, kw_only=True)
class PrivateRay:
    """A Ray whose processes this machine runs.

    Attributes:
        directory: Its files.
        nodes: Its nodes; the first one has the head.
        port: Port of the head.
        dashboard_port: Port of the head's HTTP API.
        client_port: Port of the head for ``ray://``.
    """

    directory: Path
    nodes: tuple[FakeRayNode, ...]
    port: int
    dashboard_port: int
    client_port: int
    _mark: str = field(default_factory=lambda: secrets.token_hex(8))

    @property
    def address(self) -> str:
        """The address that ``ray.init`` takes."""
        return f"127.0.0.1:{self.port}"

    @property
    def dashboard(self) -> str:
        """The address of the Jobs API."""
        return f"http://127.0.0.1:{self.dashboard_port}"

    def start_node(self, name: str) -> None:
        """Start a node's processes and wait for them.

        Raises:
            UnsupportedError: They did not start.
        """
        node = next(node for node in self.nodes if node.name == name)
        if node is self.nodes[0]:
            head = ["--head", f"--port={self.port}", "--include-dashboard=true"]
            head += ["--dashboard-host=127.0.0.1", f"--dashboard-port={self.dashboard_port}"]
            head += [f"--temp-dir={self.directory}", f"--ray-client-server-port={self.client_port}"]
            head += ["--no-monitor"]  # nobody asks for more nodes
        else:
            # All nodes are on one machine, whose logs the head's monitor reads.
            head = [f"--address={self.address}", "--include-log-monitor=false"]
        command = [sys.executable, "-m", "ray.scripts.scripts", "start", *head]
        command += [f"--node-name={name}", "--node-ip-address=127.0.0.1", "--disable-usage-stats"]
        command += [f"--num-cpus={node.cpus}", f"--num-gpus={node.gpus}"]
        command += [f"--memory={node.memory_bytes}", f"--object-store-memory={_STORE_BYTES}"]
        # Every node has an agent with fixed ports otherwise, and there is one machine for all.
        listen, grpc, metrics = free_ports(3)
        command += [f"--dashboard-agent-listen-port={listen}"]
        command += [f"--dashboard-agent-grpc-port={grpc}", f"--metrics-export-port={metrics}"]
        command += [f"--resources={json.dumps(dict(node.resources))}"]
        if node.labels:
            pairs = (f"{key}={value}" for key, value in node.labels.items())
            command += [f"--labels={','.join(pairs)}"]
        for _ in range(_TRIES):
            started = subprocess.run(
                command,
                env={**os.environ, **_SETTINGS, _NODE_VARIABLE: self._name_of(name)},
                capture_output=True,
                text=True,
                timeout=_TRIES * _START_S,
                check=False,
            )
            if started.returncode == 0:
                return
            self.kill_node(name)  # the parts that did start
        raise UnsupportedError(f"ray start failed: {(started.stderr or started.stdout)[-400:]}")

    def kill_node(self, name: str) -> None:
        """Kill a node with all that runs on it, as a loss of power does."""
        _kill_marked(f"{_NODE_VARIABLE}={self._name_of(name)}\0".encode())

    def living_nodes(self) -> int:
        """Return how many nodes Ray holds for alive."""
        link = ServerLink(self.dashboard, noun="ray", token="", keeps_open=False)
        try:
            found = link.get("/nodes", {"view": "summary"})["data"]["summary"]
        finally:
            link.close()
        return sum(node.get("raylet", {}).get("state") == "ALIVE" for node in found)

    def wait_for_nodes(self, limit_s: float = _START_S) -> None:
        """Wait until every node is known to be alive."""

        def ready() -> bool:
            with suppress(ServerError):
                return self.living_nodes() == len(self.nodes)
            return False

        wait_until(ready, "ray", limit_s)

    def wait_for_jobs(self) -> None:
        """Wait until a job can be submitted: the head takes some seconds longer for that."""
        link = ServerLink(self.dashboard, noun="ray", token="", keeps_open=False)

        def ready() -> bool:
            try:
                link.post("/api/jobs/", {"entrypoint": "true"})
            except ServerError:
                return False
            return True

        try:
            wait_until(ready, "ray's jobs", _START_S)
        finally:
            link.close()

    def kill(self) -> None:
        """Kill all nodes."""
        _kill_marked(f"{_NODE_VARIABLE}={self._mark}/".encode())

    def _name_of(self, node: str) -> str:
        return f"{self._mark}/{node}"


def _kill_marked(text: bytes) -> None:
    """Kill all processes that have a text in their environment, until there are none."""

    def gone() -> bool:
        found = _processes_with(text)
        for process in found:
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        return not found

    wait_until(gone, "the end of ray", _START_S)


def _processes_with(text: bytes) -> list[int]:
    """Return the processes with a text in their environment, and those below them.

    Agents of a node put their title where their environment was: they are known by their parents.
    """
    found: list[int] = []
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            with suppress(OSError, IndexError):
                after_name = (entry / "stat").read_text(errors="replace").rpartition(")")[2].split()
                if after_name[0] == "Z":
                    continue
                children.setdefault(int(after_name[1]), []).append(int(entry.name))
                if text in (entry / "environ").read_bytes() + b"\0":
                    found.append(int(entry.name))
    for process in found:  # grows while it is walked
        found += [child for child in children.get(process, ()) if child not in found]
    return found
