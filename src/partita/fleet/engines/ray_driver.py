"""The driver of a job on Ray: a placement group with a bundle per host, a command in each.

    python -m partita.fleet.engines.ray_driver        (started by Ray's Jobs API on the head)

The order is in ``PARTITA_RAY_ORDER``. Bundles are in the order of the hosts, which is that of the
ranks; each names its node, so that Ray only keeps the accounts. A host whose worker died is told
from one whose node died. The last line says how the job ended, for the engine to read.
"""

import importlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from partita.fleet.engines.shim import CANNOT_START
from partita.processes import die_with_parent
from partita.ray_link import connected_ray

ORDER_VARIABLE = "PARTITA_RAY_ORDER"
GIVEN = "partita-given: "
ENDED = "partita-ended: "
"""Beginnings of lines that the engine reads from the log of the driver."""
_LOOK_S = 0.2
_NODE_S = 15.0
"""How long a node whose worker is gone may take to be known for dead."""


class HostCommand:
    """The command of one host, inside a Ray worker that holds its bundle."""

    def __init__(self, order: dict[str, Any], rank: int) -> None:
        self._order, self._rank = order, rank
        self._child: subprocess.Popen[bytes] | None = None
        self._asked = threading.Event()

    def given(self) -> dict[str, Any]:
        """Return the numbers of the GPUs that Ray has given, and the address of the host."""
        ray = _ray()
        return {
            "gpus": [int(gpu) for gpu in ray.get_gpu_ids()],
            "address": ray.util.get_node_ip_address(),
        }

    def run(self, master: str) -> int:
        """Run the command to its end, and return its exit code."""
        parent = os.getpid()
        places = self._order["places"]
        environment = {**os.environ, **self._order["environment"]}
        if len(places) > 1:
            environment |= {
                "NODE_RANK": str(self._rank),
                "NNODES": str(len(places)),
                "MASTER_ADDR": master,
                "MASTER_PORT": str(self._order["master_port"]),
            }
        log = self._order["log"]
        try:
            with open(log or os.devnull, "ab", buffering=0) as output:  # noqa: PTH123 (or devnull)
                self._child = subprocess.Popen(
                    self._order["command"],
                    cwd=self._order["folder"],
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=output if log else None,
                    stderr=subprocess.STDOUT if log else None,
                    start_new_session=True,
                    preexec_fn=lambda: die_with_parent(parent),  # noqa: PLW1509 (it dies with us)
                )
        except (OSError, subprocess.SubprocessError) as exc:
            if log:
                with Path(log).open("a", encoding="utf-8") as output_text:
                    output_text.write(f"partita: cannot start: {exc}\n")
            return CANNOT_START
        if self._asked.is_set():
            self.stop(force=False)
        return self._child.wait()

    def stop(self, *, force: bool) -> None:
        """Send SIGTERM or SIGKILL to the command, or to it as soon as it has started."""
        self._asked.set()
        if self._child is not None and self._child.poll() is None:
            number = signal.SIGKILL if force else signal.SIGTERM
            # A signal to the whole session, as a terminal would send it, reaches what it started.
            os.killpg(self._child.pid, number) if force else self._child.send_signal(number)


class _Driver:
    """Starts the commands of all hosts and waits for their ends."""

    def __init__(self, order: dict[str, Any]) -> None:
        self._order = order
        self._asked_s: float | None = None

    def take(self, number: int, frame: FrameType | None) -> None:
        """Take note that the job is to end."""
        del number, frame
        self._asked_s = self._asked_s or time.monotonic()

    def run(self) -> dict[str, Any]:
        """Run the job and return how it ended."""
        with connected_ray("", noun="--engine ray") as ray:
            return self._run_on(ray)

    def _run_on(self, ray: Any) -> dict[str, Any]:  # noqa: ANN401 (a module)
        groups = _ray(".util.placement_group")
        strategies = _ray(".util.scheduling_strategies")
        places = self._order["places"]
        group = groups.placement_group(
            [_bundle(place) for place in places],
            strategy="PACK",
            name=self._order["name"],
            bundle_label_selector=[{"ray.io/node-id": place["node"]} for place in places],
        )
        while not group.wait(timeout_seconds=1):
            if self._asked_s is not None:
                return {"cause": "itself", "exit_code": 128 + signal.SIGTERM}
        host = ray.remote(max_concurrency=4, max_restarts=0)(HostCommand)
        hosts = [
            host.options(
                num_gpus=place["gpus"],
                num_cpus=place["cpus"],
                memory=place["memory_bytes"],
                scheduling_strategy=strategies.PlacementGroupSchedulingStrategy(
                    placement_group=group, placement_group_bundle_index=rank
                ),
            ).remote(self._order, rank)
            for rank, place in enumerate(places)
        ]
        given = [ray.get(one.given.remote()) for one in hosts]
        _print(GIVEN, [{"server": p["server"], **g} for p, g in zip(places, given, strict=True)])
        ends = [one.run.remote(given[0]["address"]) for one in hosts]
        return self._wait(ray, hosts, ends)

    def _wait(self, ray: Any, hosts: Sequence[Any], ends: list[Any]) -> dict[str, Any]:  # noqa: ANN401
        """Wait for all hosts; one that fails ends the others."""
        left, worst, force_s = list(ends), 0, float("inf")
        told = False
        while left:
            done, left = ray.wait(left, timeout=_LOOK_S)
            for end in done:
                rank = ends.index(end)
                try:
                    code = int(ray.get(end))
                except ray.exceptions.RayError as exc:
                    for one in hosts:
                        ray.kill(one)
                    return self._death(ray, rank, exc)
                worst = worst or code
            if (self._asked_s is not None or worst) and not told:
                told, force_s = True, time.monotonic() + float(self._order["grace_s"])
                for one in hosts:
                    one.stop.remote(force=False)
            if time.monotonic() > force_s:
                force_s = float("inf")
                for one in hosts:
                    one.stop.remote(force=True)
        return {"cause": "itself", "exit_code": worst}

    def _death(self, ray: Any, rank: int, exc: Exception) -> dict[str, Any]:  # noqa: ANN401
        """Return whether the worker of a host or its node died."""
        place = self._order["places"][rank]
        last_s = time.monotonic() + _NODE_S
        while time.monotonic() < last_s:
            alive = {node["NodeID"]: node["Alive"] for node in ray.nodes()}
            if not alive.get(place["node"], False):
                return {"cause": "node", "why": f"node {place['server']} died", "rank": rank}
            time.sleep(_LOOK_S)
        why = f"the worker on {place['server']} died: {str(exc).splitlines()[0][:200]}"
        return {"cause": "worker", "why": why, "rank": rank}


def _ray(part: str = "") -> Any:  # noqa: ANN401 (a module)
    """Return Ray, or a part of it, which only a cluster has."""
    return importlib.import_module(f"ray{part}")


def _bundle(place: dict[str, Any]) -> dict[str, float]:
    wanted = {"GPU": place["gpus"], "CPU": place["cpus"], "memory": place["memory_bytes"]}
    return {name: amount for name, amount in wanted.items() if amount}


def _print(beginning: str, value: object) -> None:
    sys.stdout.write(f"\n{beginning}{json.dumps(value)}\n")
    sys.stdout.flush()


def main() -> int:
    """Run the job of the environment; returns its exit code."""
    driver = _Driver(json.loads(os.environ.pop(ORDER_VARIABLE)))
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, driver.take)
    ended = driver.run()
    _print(ENDED, ended)
    return int(ended.get("exit_code") or 0) if ended["cause"] == "itself" else 1


if __name__ == "__main__":
    sys.exit(main())
