"""Seven measured training runs, played through the simulator with their transfers.

Each model is captured on the meta device at its microbatch and cut as the run was cut, which gives
the bytes that cross each cut, the parameters that are updated and the embedding that is tied. The
runs' pipelines send to the next stage only, and a transfer holds both devices; data loading is as
measured. Stage times are first as measured (medians at the top clock), then as estimated with
constants fitted on all other runs of the device.

``--runs FILE`` takes other runs of the same format.
"""

import argparse
import json
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from _harness import run_benchmark, shared_data
from estimate_accuracy import DEVICE_TYPE, captured_run, columns_of, left_out_seconds, stages_of

from partita.catalogue.catalogue import load_catalogue
from partita.catalogue.overrides import apply_overrides
from partita.catalogue.shorthand import read_shorthand
from partita.core.cluster import Cluster
from partita.core.graph import Graph, OpCosts
from partita.core.plan import Plan, equal_microbatches, pipeline_stages
from partita.core.problem import Problem, Schedule
from partita.core.program import TransferMode
from partita.cost.predict import simulate
from partita.program.layout import crossings, input_readers
from partita.program.relay import relayed

DEVICES_PER_NODE = 4
"""Four PCIe A100 in one node, eight A40 in two (README of the runs)."""
INSIDE_BYTES_PER_S = 20e9
BETWEEN_BYTES_PER_S = 0.70e9
"""Between two devices of a node, and between the two nodes, each way; as a study found."""
MEASURED_LIMIT = 0.04
ESTIMATED_LIMIT = 0.10
CONVOLUTION_LIMIT = 0.20
"""From estimated stages, for wide-resnet: no other run has convolutions to fit them on."""
LISTED_CUTS_MB = {
    ("A100", "bert-huge-uncased", 8, "custom:0,8,14,20,26"): (33.6,) * 3,
    ("A100", "bloom-3b", 4, "custom:0,10,18,26,32"): (59.2,) * 3,
    ("A100", "gpt3-xl", 8, "custom:0,8,14,21,27"): (67.1,) * 3,
    ("A100", "wide-resnet101_8", 64, "custom:0,7,16,25,34"): (102.8, 51.4, 51.4),
    ("A40", "bert-huge-uncased", 8, "uniform_transformer"): (33.6,) * 7,
    ("A40", "bloom-3b", 4, "custom:0,6,10,14,18,22,26,30,32"): (59.2,) * 7,
    ("A40", "t5-3b", 4, "custom:0,9,16,24,33,43,53,63,74"): (142.6,) * 3 + (285.2,) * 4,
}
"""MB of a microbatch that cross each cut, forward, as the study of these runs lists them."""


def cluster_of(row: dict[str, Any]) -> Cluster:
    """Return the nodes of a run, with the two bandwidths."""
    nodes = -(-row["pp"] // DEVICES_PER_NODE)
    shorthand = f"{nodes}x{DEVICES_PER_NODE}x{DEVICE_TYPE[row['device']]}"
    bandwidth = f"host={INSIDE_BYTES_PER_S}" + (f",rack={BETWEEN_BYTES_PER_S}" * (nodes > 1))
    return apply_overrides(read_shorthand(shorthand, load_catalogue()), bandwidth=bandwidth)


def timed(graph: Graph, plan: Plan, row: dict[str, Any], seconds: np.ndarray) -> Graph:
    """Return the graph with stage times and loading of a run.

    Args:
        graph: The captured graph.
        plan: How the run was cut.
        row: The run.
        seconds: Forward and backward of each stage in turn; spread over its ops.
    """
    tensor, stage = input_readers(graph, plan)
    alone = np.bincount(tensor, minlength=len(graph.tensors))[tensor] == 1
    share = np.bincount(stage[alone], minlength=row["pp"])
    load = np.array(row["stage_load_s"])
    load_s = np.zeros(len(graph.tensors))
    load_s[tensor[alone]] = (load / np.maximum(share, 1))[stage[alone]]
    # A stage without an input of its own looks for one before its forward.
    forward = seconds[::2] + np.where(share > 0, 0.0, load)
    ops = np.bincount(plan.stage_of)
    costs = OpCosts(
        forward_s=(forward / ops)[plan.stage_of], backward_s=(seconds[1::2] / ops)[plan.stage_of]
    )
    return replace(graph, costs=(costs,), tensors=replace(graph.tensors, load_s=load_s))


@dataclass(frozen=True)
class Run:
    """A measured run, captured and cut.

    Attributes:
        row: The measurements.
        problem: The captured graph and the nodes; its costs are not the run's.
        plan: How the run was cut.
    """

    row: dict[str, Any]
    problem: Problem
    plan: Plan

    @property
    def key(self) -> tuple[str, str]:
        """Device and model."""
        return self.row["device"], self.row["model"]

    @property
    def measured_stages_s(self) -> np.ndarray:
        """Forward and backward seconds of each stage in turn."""
        return np.ravel([self.row["stage_forward_s"], self.row["stage_backward_s"]], order="F")

    @property
    def cuts_mb(self) -> np.ndarray:
        """MB of a microbatch that cross each cut, forward."""
        problem, plan = relayed(self.problem, self.plan)
        crossing = crossings(problem.graph, plan)
        size = problem.graph.tensors.bytes[crossing.tensor]
        return np.bincount(crossing.producer, weights=size, minlength=self.row["pp"] - 1) / 1e6

    def simulated_s(self, seconds: np.ndarray) -> float:
        """Return the seconds of an iteration, from those of its stages forward and backward."""
        graph = timed(self.problem.graph, self.plan, self.row, seconds)
        problem, plan = relayed(replace(self.problem, graph=graph), self.plan)
        return simulate(problem, plan, transfers=TransferMode.BLOCKING).makespan_s


def cut_run(row: dict[str, Any]) -> Run:
    """Return a run as it was cut."""
    graph, cluster, count = captured_run(row)[1], cluster_of(row), row["pp"]
    plan = Plan(
        fingerprint=graph.fingerprint,
        devices=cluster.device_names[:count],
        stage_of=stages_of(graph, row),
        stages=pipeline_stages([[device] for device in range(count)]),
        schedule=Schedule.ONE_F_ONE_B,
        microbatch_sizes=equal_microbatches(row["num_microbatches"], row["microbatch_size"]),
    )
    return Run(row, Problem(graph=graph, cluster=cluster), plan)


def check_cuts(run: Run) -> list[str]:
    """Show the bytes across the cuts of a run; return what differs from the published ones."""
    found = run.cuts_mb
    print(f"{run.key[0]:6} {run.key[1]:22} MB a cut: {' '.join(f'{mb:.1f}' for mb in found)}")
    how = (run.row["microbatch_size"], run.row["partition_method"])
    listed = LISTED_CUTS_MB.get((*run.key, *how))
    if listed is None or np.abs(found - listed).max() <= 0.05:
        return []
    return [f"{run.key}: {found.round(1).tolist()} MB cross its cuts, not {list(listed)}"]


def compare(
    what: str, runs: list[Run], seconds: list[np.ndarray], limits: list[float]
) -> tuple[dict[str, float], list[str]]:
    """Play all runs with given stage times; return errors in per cent, and what is missed."""
    print(f"from {what} stages")
    print(f"{'device':6} {'model':22} {'measured':>9} {'simulated':>9} {'error':>8}  limit")
    errors, missed = {}, []
    for run, stages, limit in zip(runs, seconds, limits, strict=True):
        measured, simulated = run.row["iteration_s"], run.simulated_s(stages)
        error = 100 * (simulated / measured - 1)
        errors["_".join(run.key)] = round(error, 2)
        print(
            f"{run.key[0]:6} {run.key[1]:22} {measured:9.3f} {simulated:9.3f} {error:+7.2f}%  "
            f"{100 * limit:.0f} %"
        )
        if abs(error) > 100 * limit:
            missed.append(f"{run.key} from {what} stages: {error:+.2f} %, limit {100 * limit:.0f}")
    return errors, missed


def estimated_stages(rows: list[dict[str, Any]]) -> list[np.ndarray]:
    """Return the stage seconds of each run as estimated without it."""
    found: list[np.ndarray] = [np.zeros(0)] * len(rows)
    for device in {row["device"] for row in rows}:
        indices = [index for index, row in enumerate(rows) if row["device"] == device]
        columns = [columns_of(rows[index]) for index in indices]
        for index, seconds in zip(indices, left_out_seconds(device, columns), strict=True):
            found[index] = seconds
    return found


def measure(path: Path | None) -> tuple[dict[str, Any], list[str]]:
    """Play every run and compare."""
    path = shared_data() / "perseus" / "measured_stages.json" if path is None else path
    rows = json.loads(path.read_text())
    runs = [cut_run(row) for row in rows]
    missed = [line for run in runs for line in check_cuts(run)]
    figures: dict[str, Any] = {"rows": len(rows)}
    is_convolution = [row["model"].startswith("wide-resnet") for row in rows]
    for what, seconds, limits in (
        ("measured", [run.measured_stages_s for run in runs], [MEASURED_LIMIT] * len(runs)),
        (
            "estimated",
            estimated_stages(rows),
            [CONVOLUTION_LIMIT if conv else ESTIMATED_LIMIT for conv in is_convolution],
        ),
    ):
        errors, more = compare(what, runs, seconds, limits)
        figures[f"{what}_error_percent"] = errors
        missed += more
    return figures, missed


if __name__ == "__main__":
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--runs", type=Path)
    own, rest = parser.parse_known_args()
    sys.argv[1:] = rest
    run_benchmark(__doc__ or "", lambda: measure(own.runs))
