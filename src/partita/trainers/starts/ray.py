"""Ray: a driver with one placement-group bundle per rank, as Ray itself promises no order."""

from partita.core.codec import write_json
from partita.trainers.starts.ordered import by_host
from partita.trainers.starts.torchrun import PLAN, node_remarks
from partita.trainers.target import PlanToWrite, Written, check_options

FILE = "run_on_ray.py"


def write_ray(plan: PlanToWrite) -> Written:
    """Return a driver.

    Raises:
        InvalidInputError: There is no such option.
    """
    check_options(plan, ("port",), "ray")
    plan = by_host(plan)
    nodes = [
        {"node": node.name, "processes": len(node.local), "gpus": len(node.local) * node.is_gpu}
        for node in plan.nodes
    ]
    command = list(plan.command)
    files = {FILE: _driver(plan, nodes, command)}
    if not command:
        files[PLAN] = write_json(plan.solution)
    return Written(
        files=files,
        command=f"ray job submit --working-dir . -- python {FILE}",
        left_to_you=() if command else ("data and options of partita run",),
        remarks=node_remarks(plan.nodes),
    )


def _driver(plan: PlanToWrite, nodes: list[dict[str, object]], command: list[str]) -> str:
    rows = "".join(f"    {row!r},\n".replace("'", '"') for row in nodes)
    return f'''{plan.comment()}"""Starts the plan on Ray: a bundle per node, in order."""

import os
import subprocess
import sys

import ray
from ray.util.placement_group import placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

NODES = [
{rows}]
COMMAND = {command!r}  # empty: partita run {PLAN}
PORT = {plan.option("port", "29500")}


@ray.remote(max_restarts=0)
class Node:
    """A node of the plan."""

    def address(self):
        """Return where this node is reached."""
        return ray.util.get_node_ip_address()

    def run(self, rank, processes, address):
        """Run the processes of this node to their end."""
        environment = {{**os.environ, "MASTER_ADDR": address, "MASTER_PORT": str(PORT)}}
        environment |= {{"NNODES": str(len(NODES)), "NODE_RANK": str(rank)}}
        words = ["partita", "run", "{PLAN}"]
        if COMMAND:
            is_python = COMMAND[0].endswith(".py") or COMMAND[0] == "-m"
            words = ["torchrun", "--nnodes", str(len(NODES)), "--node-rank", str(rank)]
            words += ["--nproc-per-node", str(processes), "--master-addr", address]
            words += ["--master-port", str(PORT), "--max-restarts", "0"]
            words += [*([] if is_python else ["--no-python"]), *COMMAND]
        return subprocess.run(words, env=environment, check=False).returncode


def main():
    """Start all nodes, and end with the first code that is not 0."""
    ray.init(address="auto")
    bundles = [{{"CPU": n["processes"], "GPU": n["gpus"]}} for n in NODES]
    bundles = [{{name: count for name, count in b.items() if count}} for b in bundles]
    group = placement_group(bundles, strategy="STRICT_SPREAD" if len(bundles) > 1 else "PACK")
    ray.get(group.ready(), timeout=600)
    actors = []
    for rank, node in enumerate(NODES):
        strategy = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=rank)
        options = {{"num_cpus": node["processes"], "num_gpus": node["gpus"]}}
        actors.append(Node.options(scheduling_strategy=strategy, **options).remote())
    address = ray.get(actors[0].address.remote())
    runs = [a.run.remote(r, NODES[r]["processes"], address) for r, a in enumerate(actors)]
    codes = ray.get(runs)
    sys.exit(next((code for code in codes if code), 0))


if __name__ == "__main__":
    main()
'''
