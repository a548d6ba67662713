"""The fleet simulator against Synergy's recorded runs, and joint against tune.

    python benchmarks/fleet.py [--check] [--json]

Every recorded row of FIFO, SRTF, LAS, FTF, DRF and Tetris with fair, greedy and tune: each job's
finish, mean, p99, makespan, rounds and events must be equal; CPU seconds in a warm process against
the recorded ones, scaled by the loop of ``calibrate.py`` in the data folder (best of before and
after). Then our own rules: what they change, joint against tune, opt's gap, a power cap, elastic
jobs, growth. ``--check`` exits with 1 when a number is missed, with 4 when the data is absent.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
from _fleet_joint import (
    elastic_group,
    explained,
    fresh_group,
    growth_group,
    joint_group,
    opt_group,
    power_group,
    rules_group,
)
from _harness import Measured, cpu_s, load_script, run_benchmark, shared_data
from _planners_common import Group

from partita.core.fleet import FleetHistory, Trace
from partita.fleet.policies.resources import Servers, servers_of
from partita.fleet.simulate.table import simulate_trace
from partita.formats.synergy import read_cluster, read_models, read_results, read_trace

RECORDED_LOOP_S = 0.096
CLUSTER_OF = {
    "deploy_static_100": 32,
    "deploy_dynamic_100": 32,
    "single_load9_1000": 128,
    "synth_multi_load4_1000": 128,
    "static_single_4096": 512,
}
HOUR_S = 3600.0


def measure() -> Measured:
    """Return the figures and what is missed."""
    folder = shared_data() / "synergy"
    models = read_models((folder / "model_profiles.json").read_text())
    traces = {
        name: read_trace((folder / "traces" / f"{name}.csv").read_text(), models, name=name)
        for name in CLUSTER_OF
    }
    clusters = {
        gpus: servers_of(read_cluster((folder / "configs" / f"c{gpus}.ini").read_text()))
        for gpus in {*CLUSTER_OF.values(), 2048}
    }
    cases = [(traces[name], clusters[gpus]) for name, gpus in CLUSTER_OF.items()]
    dealt = [part for part in models.values() if part.kind]
    groups = [
        released_group(folder, traces, clusters),
        rules_group(cases[:2]),
        explained(),
        joint_group([*cases, (traces["static_single_4096"], clusters[2048])]),
        fresh_group(dealt, clusters[32]),
        opt_group(*cases[0]),
        power_group(*cases[1]),
        elastic_group(clusters[32]),
        growth_group(dealt),
    ]
    figures: dict[str, Any] = {}
    missed: list[str] = []
    for group in groups:
        group.show()
        figures |= group.figures
        missed += group.misses
    return figures, missed


def released_group(folder: Path, traces: dict[str, Trace], clusters: dict[int, Servers]) -> Group:
    """Replay every recorded row by the released rules; the first call loads compiled kernels."""
    rows = [
        row
        for row in json.loads((folder / "answers.json").read_text())
        if row["mode"] != "opt" and "reversed" not in row["tag"]
    ]
    group = Group(
        title=f"released rules: {len(rows)} recorded rows",
        headers=["row", "jobs", "rounds", "computed", "recorded s", "ours s", "times", "needed"],
    )
    simulate_trace(traces["single_load9_1000"], clusters[128], "fifo:fair", simulator="released")
    loop = load_script(folder.parent, "calibrate").calibrate
    before, measured = float(loop()), []
    for row in rows:
        trace, servers = traces[row["trace"].removesuffix(".csv")], clusters[row["gpus"]]
        policy = f"{row['policy'].lower()}:{row['mode']}"

        def call(
            trace: Trace = trace, servers: Servers = servers, policy: str = policy
        ) -> FleetHistory:
            return simulate_trace(trace, servers, policy, simulator="released")

        history = call()
        group.misses += differences(folder, row, history)
        measured.append((row, history, cpu_s(call, repeats=3)))
    scale = min(before, float(loop())) / RECORDED_LOOP_S
    ratios = []
    for row, history, seconds in measured:
        full = row["gpus"] == 128 and row["policy"] == "FIFO"
        needed, ratio = (200 if full else 60), row["user"] * scale / seconds
        name = f"{row['tag']} {row['policy']} {row['mode']}"
        shown = [
            name,
            len(history),
            history.rounds,
            len(history.usage),
            f"{row['user'] * scale:.2f}",
        ]
        group.rows.append([*shown, f"{seconds:.4f}", f"{ratio:.0f}", needed])
        ratios.append(ratio)
        if ratio < needed:
            group.misses.append(f"{name}: {ratio:.0f} times faster, {needed} are needed")
    group.figures = {"rows": len(rows), "least_times_faster": round(min(ratios))}
    return group


def differences(folder: Path, row: dict[str, Any], history: FleetHistory) -> list[str]:
    """Return what differs between a recorded row and ours."""
    name = f"{row['tag']}-{row['policy']}-{row['mode']}"
    recorded = read_results((folder / "results" / f"{name}.csv").read_text())
    ours = dict(zip(history.job_id.tolist(), history.finish_s.tolist(), strict=True))
    hours = history.completion_s / HOUR_S
    pairs = {
        "finishes that differ": (sum(ours[job] != end for job, end in recorded.items()), 0),
        "jobs": (len(ours), len(recorded)),
        "mean": (round(float(hours.mean()), 4), row["jct_all"]["mean"]),
        "p99": (round(float(np.percentile(hours, 99)), 4), row["jct_all"]["p99"]),
        "makespan": (round(float(history.finish_s.max()) / HOUR_S, 3), row["makespan_h"]),
        "rounds": (history.rounds, row["rounds"]),
        "events": (history.events, row["events"]),
    }
    return [f"{name}: {what} {a}, recorded {b}" for what, (a, b) in pairs.items() if a != b]


if __name__ == "__main__":
    run_benchmark(__doc__.splitlines()[0], measure)
