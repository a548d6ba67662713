"""Checkpoints written under one plan and gone on from under another, and runs killed while saving.

A small GPT in float64 with dropout, AdamW, warm-up and cosine, clipped gradients. It trains four
steps and saves; each plan then goes on from the checkpoint of each plan for five steps, and all
losses must equal those of one process that never stopped: to six digits, and here to 1e-9.

Then a run of four ranks that saves after every step is killed at a random instant, again and again:
after each kill the newest checkpoint is whole, and none that was there before is lost.
"""

import os
import random
import signal
import tempfile
import time
from dataclasses import replace
from pathlib import Path

from _harness import run_benchmark

from partita.capture.origin import Captures, ModelOrigin, load_origin
from partita.capture.sources import SourceOptions
from partita.core.plan import Shard, Stage
from partita.core.problem import Objective, Problem
from partita.planners.table import get_planner
from partita.runtime.checkpoint.files import damage_of, list_checkpoints, read_manifest
from partita.runtime.executor import make_task, run_forked
from partita.runtime.rank import RankOptions
from partita.runtime.task import Task
from partita.runtime.training.recipe import Recipe
from partita.runtime.training.recipe import Schedule as RateSchedule
from partita.runtime.training.saving import Saving, import_writer
from partita.runtime.workload import Workload, model_workload
from partita.testing.builders import flat_cluster

BEFORE, AFTER = 4, 5
LIMIT = 1e-9
KILLS = 20
OPTIONS = RankOptions(
    steps=BEFORE,
    recipe=Recipe(
        optimizer="adamw",
        clip_norm=1.0,
        schedule=RateSchedule(name="cosine", warmup=2, steps=BEFORE + AFTER),
    ),
    keep_results=False,
    stall_limit_s=120.0,
)
PLANS: dict[str, tuple[tuple[tuple[tuple[int, ...], ...], ...], Shard]] = {
    "one process": ((((0,),),), Shard.NONE),
    "pp4": ((((0,),), ((1,),), ((2,),), ((3,),)), Shard.NONE),
    "dp2 x pp2": ((((0,), (1,)), ((2,), (3,))), Shard.NONE),
    "tp2 x pp2": ((((0, 1),), ((2, 3),)), Shard.NONE),
    "dp2 x pp2, optimizer sharded": ((((0,), (1,)), ((2,), (3,))), Shard.OPTIMIZER),
    "dp2 x pp2, gradients sharded": ((((0,), (1,)), ((2,), (3,))), Shard.GRADIENTS),
    "dp2 x pp2, parameters sharded": ((((0,), (1,)), ((2,), (3,))), Shard.PARAMETERS),
}
"""Devices of each stage, replica and rank, and what replicas divide."""


def prepare() -> dict[str, tuple[Task, Workload]]:
    """Return the same model and data under each plan."""
    options = SourceOptions(scale=0.02, dtype="float64", batch_size=1, sequence_length=6)
    origin = ModelOrigin(text="gpt3-small", options=options)
    captures = Captures(load_origin(origin), origin)
    graph = captures.at(1).graph
    found = {}
    for name, (groups, shard) in PLANS.items():
        devices = 1 + max(d for stage in groups for replica in stage for d in replica)
        problem = Problem(
            graph=graph,
            cluster=flat_cluster(devices),
            objective=Objective(microbatches=4, microbatch_size=1),
        )
        if len(groups) == devices:
            plan = get_planner("uniform", stages=len(groups), replicas=1)(problem).plan
        else:
            halves = replace(problem, cluster=flat_cluster(len(groups)))
            cut = get_planner("uniform", stages=len(groups), replicas=1)(halves).plan
            plan = replace(
                cut,
                devices=problem.cluster.device_names,
                stages=tuple(Stage(devices=stage, shard=shard) for stage in groups),
            )
        workload = model_workload(captures, problem, plan)
        found[name] = (make_task(problem, plan, workload), workload)
    return found


def losses_of(prepared: tuple[Task, Workload], steps: int, saving: Saving | None) -> list[float]:
    """Run, and return the losses of the steps that were done."""
    task, workload = prepared
    run = run_forked(task, workload, options=replace(OPTIONS, steps=steps, saving=saving))
    return [float(step.loss or "nan") for step in run.result.steps]


def difference(found: list[float], wanted: list[float]) -> float:
    """Return the largest relative difference of losses; NaN is infinite."""
    if len(found) != len(wanted):
        return float("inf")
    worst = max(abs(a - b) / abs(b) for a, b in zip(found, wanted, strict=True))
    return worst if worst == worst else float("inf")  # noqa: PLR0124 (is it NaN)


def measure_plans(folder: Path) -> tuple[dict[str, float], list[str]]:
    """Return the difference of every pair of plans, and what is missed."""
    prepared, figures, missed = prepare(), dict[str, float](), list[str]()
    wanted = losses_of(prepared["one process"], BEFORE + AFTER, None)
    print(f"{'losses of the next five steps: relative difference':32}")
    for number, (before, subject) in enumerate(prepared.items()):
        place = folder / str(number)
        losses_of(subject, BEFORE, Saving(folder=str(place), every=BEFORE))
        size = read_manifest(list_checkpoints(place)[-1]).num_bytes
        for after, other in prepared.items():
            saving = Saving(folder=str(folder / "unused"), resume=str(place))
            found = difference(losses_of(other, BEFORE + AFTER, saving), wanted[BEFORE:])
            figures[f"{before} -> {after}"] = found
            print(f"{before:>30} -> {after:30} {found:8.1e}  {size / 1e3:8.0f} kB")
            if not found <= LIMIT:
                missed.append(f"{before} -> {after}: {found:.1e}")
    return figures, missed


def measure_kills(folder: Path) -> tuple[dict[str, float], list[str]]:
    """Return how many kills left every checkpoint whole, and what is missed."""
    prepared, rng, missed = prepare()["pp4"], random.Random(0), list[str]()
    import_writer()
    newest, inside = 0, 0
    for _ in range(KILLS):
        child = os.fork()
        if child == 0:
            saving = Saving(folder=str(folder), every=1, keep=3, resume="auto")
            os.setpgrp()
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, 1)
            os.dup2(nowhere, 2)
            try:
                losses_of(prepared, 100_000, saving)
            finally:
                os._exit(1)
        time.sleep(rng.uniform(1.0, 3.0))
        os.killpg(child, signal.SIGKILL)
        os.waitpid(child, 0)
        inside += any(path.suffix == ".tmp" for path in folder.iterdir())
        paths = list_checkpoints(folder)
        steps = [read_manifest(path).step for path in paths]
        if not steps or steps[-1] < newest:
            missed.append(f"after step {newest} there are {steps}")
        newest = max([newest, *steps])
        missed += [
            f"{path.name}: {damage}"
            for path in paths
            if (damage := damage_of(path, read_manifest(path)))
        ]
    print(f"{KILLS} kills, {inside} within a save: {newest} steps done, {len(missed)} lost")
    return {"kills": KILLS, "within a save": inside, "steps": newest}, missed


def measure() -> tuple[dict[str, float], list[str]]:
    """Measure both."""
    with tempfile.TemporaryDirectory() as one, tempfile.TemporaryDirectory() as two:
        figures, missed = measure_plans(Path(one))
        kills, lost = measure_kills(Path(two))
    return {**figures, **kills}, [*missed, *lost]


if __name__ == "__main__":
    run_benchmark(__doc__ or "", measure)
