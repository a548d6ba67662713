"""One torchrun per node with the plan's ranks, also where nodes have different numbers of devices.

Rendezvous is static: c10d would sort nodes by name as text, so that ranks were not the plan's
devices. Rank r is the r-th device of the plan, host by host.
"""

import shlex
from collections.abc import Sequence

from partita.core.codec import write_json
from partita.trainers.starts.ordered import by_host
from partita.trainers.target import Node, PlanToWrite, Written, check_options

FILE, PLAN = "start_node.sh", "plan.json"
OPTIONS = ("port",)


def write_torchrun(plan: PlanToWrite) -> Written:
    """Return the script that every node runs.

    Raises:
        InvalidInputError: There is no such option.
    """
    check_options(plan, OPTIONS, "torchrun")
    plan = by_host(plan)
    nodes = plan.nodes
    words = "bash start_node.sh" if len(nodes) == 1 else "bash start_node.sh   # on every node"
    return Written(
        files=start_files(plan),
        command=words,
        left_to_you=() if plan.command else ("data and options of partita run",),
        remarks=node_remarks(nodes),
    )


def node_remarks(nodes: Sequence[Node]) -> tuple[str, ...]:
    """Return which ranks each node has."""
    remarks, first = [], 0
    for node in nodes:
        last = first + len(node.local) - 1
        ranks = f"rank {first}" if first == last else f"ranks {first} to {last}"
        remarks.append(f"{node.name}: {ranks}")
        first = last + 1
    return tuple(remarks[:8] + [f"and {len(remarks) - 8} nodes more"] * (len(remarks) > 8))


def start_files(plan: PlanToWrite) -> dict[str, str]:
    """Return the script of a node, and the plan where no command of the user's is run."""
    files = {FILE: start_script(plan)}
    if not plan.command:
        files[PLAN] = write_json(plan.solution)
    return files


def start_script(plan: PlanToWrite) -> str:
    """Return the script that a node runs: it finds itself in a table and starts its ranks."""
    nodes = plan.nodes
    table = "\n".join(
        f"{node.name} {len(node.local)} {','.join(map(str, node.local))}" for node in nodes
    )
    some = any(len(node.local) < node.has for node in nodes if node.is_gpu)
    visible = (
        "# The plan uses some of the devices; a scheduler has chosen them already.\n"
        'if [ -z "${SLURM_JOB_ID:-}" ]; then export CUDA_VISIBLE_DEVICES=$devices; fi\n'
        if some
        else ""
    )
    port = plan.option("port", "29500")
    return f"""#!/bin/bash
{plan.comment()}# Run it on every node; PLAN_NODE names the node where its host name does not.
set -euo pipefail
# node, processes, devices
table={shlex.quote(table)}
node=${{PLAN_NODE:-${{SLURMD_NODENAME:-$(hostname -s)}}}}
hosts=${{PLAN_HOSTS:-$(awk '{{print $1}}' <<< "$table")}}
line=$(grep -nxF -- "$node" <<< "$hosts" | cut -d: -f1 | head -n 1) || true
if [ -z "$line" ]; then
  echo "start_node.sh: this node is $node, none of:" $hosts >&2
  exit 1
fi
read -r _ processes devices <<< "$(sed -n "${{line}}p" <<< "$table")"
if [ "${{SLURM_GPUS_ON_NODE:-$processes}}" -lt "$processes" ]; then
  echo "start_node.sh: $node has $SLURM_GPUS_ON_NODE devices, the plan needs $processes" >&2
  exit 1
fi
{visible}export MASTER_ADDR=${{MASTER_ADDR:-$(head -n 1 <<< "$hosts")}}
export MASTER_PORT=${{MASTER_PORT:-{port}}}
{launch_line(plan)}
"""


def launch_line(
    plan: PlanToWrite, *, rank: str = "$((line - 1))", each: str = '"$processes"'
) -> str:
    """Return the command that starts the ranks of a node, in terms of its shell."""
    count = len(plan.nodes)
    if not plan.command:
        return f"NNODES={count} NODE_RANK={rank} exec partita run {PLAN}"
    words = list(plan.command)
    is_python = words[0].endswith(".py") or words[0] == "-m"
    command = shlex.join([*([] if is_python else ["--no-python"]), *words])
    return (
        f"exec torchrun --nnodes {count} --node-rank {rank} --nproc-per-node {each} "
        f'--master-addr "$MASTER_ADDR" --master-port "$MASTER_PORT" --max-restarts 0 {command}'
    )
