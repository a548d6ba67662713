"""Hosts that Ray gives: a placement group with a bundle per host, and an actor in each.

The actor starts the agent as a process of its own and passes standard input and output on. Bundles
stand in the order of the plan's hosts and lie on different nodes; where nodes of Ray have the names
of the plan's hosts (``ray start --node-name``, or their host names), each is bound to its node.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from typing import Any

from partita.errors import InvalidInputError, UnsupportedError
from partita.hosts.places import (
    PlanHost,
    RealHost,
    agent_command,
    match_hosts,
)
from partita.hosts.table import PlaceFields
from partita.ray_link import connected_ray

_ANSWER_S = 30.0
"""How long an actor that lives may take to answer."""
_START_S = 120.0
"""How long an actor in its place may take to start."""
_NODE_LABEL = "ray.io/node-id"


def ray_place(address: str, hosts: Sequence[PlanHost], request: PlaceFields) -> "RayPlace":
    """Return nodes of Ray for the hosts of a plan."""
    return RayPlace(
        hosts,
        address=address,
        python=request.host_python or "",
        queue_limit_s=request.queue_limit,
    )


def bundles_of(hosts: Sequence[PlanHost], resources: Sequence[str]) -> list[dict[str, float]]:
    """Return what each host of a plan needs of its node.

    Args:
        hosts: The hosts.
        resources: Names of what nodes have, in which Ray writes types of GPUs.
    """
    types = {name.lower(): name for name in resources if name.startswith("accelerator_type:")}
    found = []
    for host in hosts:
        bundle = {"CPU": float(host.cpus)}
        if host.gpus:
            bundle["GPU"] = float(host.gpus)
            if kind := types.get(f"accelerator_type:{host.gpu_type}".lower()):
                bundle[kind] = 0.001  # a share is enough to say which nodes will do
        found.append(bundle)
    return found


class RayPlace:
    """Nodes of Ray, on each of which an actor holds an agent.

    Attributes:
        names: The nodes, in the order of the plan's hosts.
        addresses: Their addresses.
    """

    def __init__(
        self,
        hosts: Sequence[PlanHost],
        *,
        address: str = "",
        python: str = "",
        queue_limit_s: float = 86400.0,
    ) -> None:
        """Take note of what is wanted.

        Args:
            hosts: The hosts of the plan.
            address: Where Ray is, as ``ray.init`` takes it.
            python: The interpreter on the hosts; empty = the path of this one.
            queue_limit_s: How long to wait for nodes with room.
        """
        self._ray: Any = None
        self._hosts, self._address, self._python = tuple(hosts), address, python
        self._queue_limit_s = queue_limit_s
        self.names: Sequence[str] = ()
        self.addresses: Sequence[str] = ()
        self._nodes: list[str] = []
        self._group: Any = None
        self._stack = ExitStack()

    def __enter__(self) -> "RayPlace":
        """Get the nodes.

        Raises:
            InvalidInputError: Ray has not the hosts of the plan.
            UnsupportedError: There is no Ray at the address, or it gives no nodes in time.
        """
        with ExitStack() as stack:
            self._ray = stack.enter_context(connected_ray(self._address, noun="--on ray"))
            stack.callback(self._give_back)
            self._get()
            self._stack = stack.pop_all()
        return self

    def _get(self) -> None:
        nodes = {node["NodeID"]: node for node in self._ray.nodes() if node["Alive"]}
        names = {_name(node, self._hosts): key for key, node in nodes.items()}
        resources = sorted({name for node in nodes.values() for name in node["Resources"]})
        asked: dict[str, Any] = {"strategy": "STRICT_SPREAD"}
        if {host.name for host in self._hosts} & set(names):
            there = [RealHost(name=name) for name in names]
            found = match_hosts(self._hosts, there, "Ray")
            ids = [names[host.name] for host in found]
            asked["bundle_label_selector"] = [{_NODE_LABEL: key} for key in ids]
        elif len(nodes) < len(self._hosts):
            raise InvalidInputError(
                f"the plan uses {len(self._hosts)} hosts, Ray has {len(nodes)} nodes"
            )
        from ray.util import placement_group, placement_group_table  # noqa: PLC0415 (an extra)

        bundles = bundles_of(self._hosts, resources)
        self._group = placement_group(bundles, **asked)
        if not self._group.wait(self._queue_limit_s):
            raise UnsupportedError(
                f"Ray gave no {len(bundles)} nodes with {_words(bundles)} within "
                f"{self._queue_limit_s:g} s"
            )
        placed = placement_group_table(self._group)["bundles_to_node_id"]
        self._nodes = [placed[index] for index in range(len(bundles))]
        self.names = [_name(nodes[key], self._hosts) for key in self._nodes]
        self.addresses = [nodes[key]["NodeManagerAddress"] for key in self._nodes]

    def start(self, index: int) -> "RayChannel":
        """Start the agent of a host, in the actor of its bundle."""
        from ray.util.scheduling_strategies import (  # noqa: PLC0415 (an extra)
            PlacementGroupSchedulingStrategy,
        )

        host = self._hosts[index]
        strategy = PlacementGroupSchedulingStrategy(self._group, index)
        relay = self._ray.remote(_relay()).options(
            num_cpus=host.cpus,
            num_gpus=host.gpus,
            scheduling_strategy=strategy,
            max_concurrency=4,
        )
        return RayChannel(self._ray, relay.remote(agent_command(self._python)))

    def explain(self) -> str:
        """Return which nodes Ray holds for dead."""
        alive = {node["NodeID"] for node in self._ray.nodes() if node["Alive"]}
        dead = [name for name, key in zip(self.names, self._nodes, strict=True) if key not in alive]
        return f"Ray: node {', '.join(dead)} is dead" if dead else "Ray: all nodes are alive"

    def _give_back(self) -> None:
        if self._group is not None:
            from ray.util import remove_placement_group  # noqa: PLC0415 (an extra)

            remove_placement_group(self._group)

    def __exit__(self, *_: object) -> None:
        self._stack.close()


class RayChannel:
    """An agent behind an actor."""

    def __init__(self, ray: Any, relay: Any) -> None:  # noqa: ANN401 (an optional package)
        self._ray, self._relay = ray, relay
        self._why = ""
        self._buffer = b""

    def send(self, data: bytes) -> None:
        """Send bytes, and wait until they are through: an actor may do two things at a time."""
        with suppress(self._ray.exceptions.RayError):  # that it is gone is seen where lines end
            self._ray.get(self._relay.write.remote(data), timeout=_ANSWER_S)

    def lines(self) -> Iterator[bytes]:
        """Yield the agent's lines until it, or its actor, ends."""
        limit_s = _START_S
        while True:
            try:
                data = self._ray.get(self._relay.read.remote(), timeout=limit_s)
            except self._ray.exceptions.RayError as exc:
                self._why = f"its actor {_last_line(exc)}"
                return
            if data is None:
                return
            limit_s = _ANSWER_S
            *whole, self._buffer = (self._buffer + data).split(b"\n")
            yield from (line + b"\n" for line in whole)

    def ended(self) -> str:
        """Return how the agent ended."""
        if not self._why:
            try:
                self._why = self._ray.get(self._relay.end.remote(), timeout=_ANSWER_S)
            except self._ray.exceptions.RayError as exc:
                self._why = f"its actor {_last_line(exc)}"
            self._ray.kill(self._relay)
        return self._why


def _relay() -> type:
    """Return the class of actors; made here, it travels to nodes by value and needs no import."""

    class Relay:
        """Starts a process, and passes its standard input and output on."""

        def __init__(self, command: list[str]) -> None:
            import queue  # noqa: PLC0415 (of the node)
            import subprocess  # noqa: PLC0415 (of the node)
            import tempfile  # noqa: PLC0415 (of the node)
            import threading  # noqa: PLC0415 (of the node)

            self._words = tempfile.TemporaryFile()  # noqa: SIM115 (ends with the actor)
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._words,
                start_new_session=True,
            )
            self._heard: queue.Queue[bytes | None] = queue.Queue()
            threading.Thread(target=self._listen, daemon=True).start()

        def _listen(self) -> None:
            import os  # noqa: PLC0415 (of the node)

            assert self._process.stdout is not None
            while data := os.read(self._process.stdout.fileno(), 2**20):
                self._heard.put(data)
            self._heard.put(None)

        def read(self) -> bytes | None:
            """Return what was said, or nothing after a second; None = nothing more will be."""
            import queue  # noqa: PLC0415 (of the node)

            try:
                return self._heard.get(timeout=1.0)
            except queue.Empty:
                return b""

        def write(self, data: bytes) -> None:
            assert self._process.stdin is not None
            try:
                self._process.stdin.write(data)
                self._process.stdin.flush()
            except (BrokenPipeError, ValueError):
                pass

        def end(self) -> str:
            import subprocess  # noqa: PLC0415 (of the node)

            try:
                self._process.wait(0.5)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
            self._words.seek(0)
            lines = self._words.read()[-4000:].decode(errors="replace").strip().splitlines()
            last = f": {lines[-1]}" if lines else ""
            return f"its process ended with exit code {self._process.returncode}{last}"

    return Relay


def _name(node: Mapping[str, Any], hosts: Sequence[PlanHost]) -> str:
    """Return how a node is called: by the one of its names that the plan knows, if it does."""
    wanted = {host.name for host in hosts}
    hostname = str(node["NodeManagerHostname"])
    return hostname if hostname in wanted else str(node.get("NodeName") or hostname)


def _words(bundles: Sequence[Mapping[str, float]]) -> str:
    return " | ".join(
        ", ".join(f"{amount:g} {name}" for name, amount in bundle.items()) for bundle in bundles
    )


def _last_line(exc: BaseException) -> str:
    lines = str(exc).strip().splitlines()
    return f"is gone: {lines[-1].strip()}" if lines else f"is gone: {type(exc).__name__}"
