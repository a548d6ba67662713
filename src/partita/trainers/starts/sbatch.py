"""A batch script of Slurm: a component for each run of equal nodes, and the script of a node."""

from partita.errors import InvalidInputError
from partita.trainers.starts.ordered import by_host, equal_runs
from partita.trainers.starts.torchrun import node_remarks, start_files
from partita.trainers.target import Node, PlanToWrite, Written, check_options

FILE = "job.sbatch"
OPTIONS = ("time", "partition", "account", "qos", "port", "cpus")


def write_sbatch(plan: PlanToWrite) -> Written:
    """Return a batch script and what it starts.

    Raises:
        InvalidInputError: An option is not known or would end its line.
    """
    check_options(plan, OPTIONS, "sbatch")
    for name, value in plan.options.items():
        if not value or any(c.isspace() for c in value):
            raise InvalidInputError(f"-O {name}={value!r}: expected a value without blanks")
    plan = by_host(plan)
    runs = equal_runs(plan.nodes)
    lines = ["#!/bin/bash"]
    for number, run in enumerate(runs):
        if number:
            lines.append("#SBATCH hetjob")
        lines.append(f"#SBATCH {' '.join(_asked(plan, run, first=not number))}")
    groups = range(len(runs)) if len(runs) > 1 else []
    lists = [f'"$SLURM_JOB_NODELIST_HET_GROUP_{group}"' for group in groups]
    names = " ".join(lists) or '"$SLURM_JOB_NODELIST"'
    het = f"--het-group={','.join(map(str, groups))} " if groups else ""
    lines += [
        plan.comment().rstrip("\n"),
        "set -euo pipefail",
        f'PLAN_HOSTS=$(for list in {names}; do scontrol show hostnames "$list"; done)',
        "export PLAN_HOSTS",
        "export MASTER_PORT=$((20000 + SLURM_JOB_ID % 20000))",
        f"srun {het}--kill-on-bad-exit=1 bash start_node.sh",
    ]
    files = {FILE: "\n".join(lines) + "\n", **start_files(plan)}
    return Written(
        files=files,
        command=f"sbatch {FILE}",
        left_to_you=tuple(
            f"{name}: -O {name}=..." for name in ("time", "partition") if name not in plan.options
        ),
        remarks=node_remarks(plan.nodes),
    )


def _asked(plan: PlanToWrite, run: list[Node], *, first: bool) -> list[str]:
    node = run[0]
    words = [f"--job-name={plan.name}"] if first else []
    asked = ("time", "account", "qos", "partition") if first else ("partition",)
    words += [f"--{name}={plan.options[name]}" for name in asked if name in plan.options]
    words += [f"--nodes={len(run)}", "--ntasks-per-node=1"]
    if node.is_gpu:
        kind = f"{node.type}:" if node.type not in ("", "gpu") else ""
        words.append(f"--gpus-per-node={kind}{len(node.local)}")
    cpus = plan.option("cpus") or (str(node.cpus) if node.cpus else "")
    return [*words, *([f"--cpus-per-task={cpus}"] if cpus else [])]
