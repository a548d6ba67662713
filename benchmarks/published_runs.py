"""Seven measured training runs, played through the simulator.

Stage times and data loading as measured (medians at the top clock) against the measured iteration.
Activations are not sent anywhere here: their bytes are not recorded, so a run that is bound by
transfers is predicted too fast.
"""

import json

import numpy as np
from _harness import run_benchmark, shared_data

from partita.core.cluster import Cluster, Device, Level
from partita.core.graph import EdgeTable, Graph, OpCosts, OpTable, TensorTable
from partita.core.plan import Plan, Stage, equal_microbatches
from partita.core.problem import Problem, Schedule
from partita.cost.simulate import simulate

LIMITS = {("A40", "bert-huge-uncased"): 0.07, ("A40", "t5-3b"): None}
USUAL = 0.035


def predict(row: dict) -> float:
    """Return the simulated seconds of an iteration of a measured run."""
    stages = row["pp"]
    names = [f"stage{s}" for s in range(stages)]
    # Tensors 0 .. S-1 are what each stage loads, S .. 2S-1 what it passes on.
    graph = Graph(
        name=row["model"],
        ops=OpTable(names=names),
        costs=(OpCosts(forward_s=row["stage_forward_s"], backward_s=row["stage_backward_s"]),),
        tensors=TensorTable(
            names=[f"input{s}" for s in range(stages)] + [f"out{s}" for s in range(stages)],
            producer=[-1] * stages + list(range(stages)),
            load_s=row["stage_load_s"] + [0.0] * stages,
        ),
        edges=EdgeTable(
            tensor=list(range(stages)) + [stages + s for s in range(stages - 1)],
            reader=list(range(stages)) + list(range(1, stages)),
        ),
        loss=2 * stages - 1,
    )
    cluster = Cluster(
        devices=[Device(name=f"host0/gpu{s}") for s in range(stages)],
        levels=(Level(name="host", group_of=np.zeros(stages), bandwidth_bytes_per_s=1e11),),
    )
    plan = Plan(
        fingerprint=graph.fingerprint,
        devices=cluster.device_names,
        stage_of=np.arange(stages),
        stages=tuple(Stage(devices=((s,),)) for s in range(stages)),
        schedule=Schedule.ONE_F_ONE_B,
        microbatch_sizes=equal_microbatches(row["num_microbatches"], 1),
    )
    return simulate(Problem(graph=graph, cluster=cluster), plan).makespan_s


def measure() -> tuple[dict, list[str]]:
    """Play every run and compare."""
    rows = json.loads((shared_data() / "perseus" / "measured_stages.json").read_text())
    missed, errors = [], {}
    print(f"{'device':6} {'model':22} {'measured':>9} {'simulated':>9} {'error':>8}  limit")
    for row in rows:
        simulated = predict(row)
        error = simulated / row["iteration_s"] - 1
        key = (row["device"], row["model"])
        limit = LIMITS.get(key, USUAL)
        errors[f"{key[0]}_{key[1]}"] = round(100 * error, 2)
        shown = "not checked (bound by transfers)" if limit is None else f"{100 * limit:.1f} %"
        print(
            f"{key[0]:6} {key[1]:22} {row['iteration_s']:9.3f} {simulated:9.3f} "
            f"{100 * error:+7.2f}%  {shown}"
        )
        if limit is not None and abs(error) > limit:
            missed.append(f"{key}: {100 * error:+.2f} %, limit {100 * limit:.1f} %")
    return {"rows": len(rows), "error_percent": errors}, missed


if __name__ == "__main__":
    run_benchmark(__doc__ or "", measure)
