"""Growth of ``auto``: CPU seconds and gap from 100 to 20,000 ops and from 4 to 256 devices."""

import random
from dataclasses import replace
from pathlib import Path

from _planners_common import Group, timed

from partita.core.problem import Problem
from partita.planners.auto.planner import plan_auto
from partita.testing.builders import host_cluster, random_dag

SIZES = ((100, 8), (1000, 8), (5000, 8), (20_000, 8), (1000, 4), (1000, 64), (1000, 256))
LARGEST = (20_000, 64)
MOST_CPU_S = 60.0
SAMPLES = 32


def problem_of(num_ops: int, num_devices: int) -> Problem:
    """Return a random DAG on hosts of up to eight devices, with a batch that can be split."""
    graph = replace(random_dag(num_ops, random.Random(num_ops)), batch_size=SAMPLES)
    per_host = min(8, num_devices)
    cluster = host_cluster(
        num_devices // per_host, per_host, inside_bytes_per_s=1e4, between_bytes_per_s=1e3
    )
    return Problem(graph=graph, cluster=cluster)


def measure_group(data: Path, scale: float) -> Group:
    """Return the table of growth; a miss where the largest problem takes too long."""
    del data, scale
    plan_auto(problem_of(60, 4), iterations=5)
    rows, misses, figures = [], [], {}
    for num_ops, num_devices in (*SIZES, LARGEST):
        problem = problem_of(num_ops, num_devices)
        solution, spent = timed(lambda problem=problem: plan_auto(problem))
        stages = [stage.num_replicas for stage in solution.plan.stages]
        rows.append(
            [
                f"{num_ops}",
                f"{num_devices}",
                f"{spent:.2f}",
                f"{solution.gap * 100:.1f} %",
                f"{len(stages)} stages, {max(stages)} replicas at most",
                solution.stats["bound_term"],
            ]
        )
        if (num_ops, num_devices) == LARGEST:
            figures["cpu_s_20000_ops_64_devices"] = round(spent, 2)
            if spent > MOST_CPU_S:
                misses.append(f"auto: 20,000 ops on 64 devices took {spent:.1f} CPU seconds")
    headers = ["ops", "devices", "CPU s", "gap", "plan", "bound"]
    return Group(
        title="Growth of auto (default settings: time_limit 2 s)",
        headers=headers,
        rows=rows,
        misses=misses,
        figures=figures,
    )
