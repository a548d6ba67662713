"""The memory of a rank is the memory of its stage.

A GPT of 12 blocks as a pipeline of 12 fresh processes: what each process grew by, from before the
model was built until the last step has ended, against the forecast of its device, and against the
whole model's parameters, which a rank in the middle must stay below. Growth is what the system
sees, from after the imports: the allocator's slack is in it. The forecast is that of a profiled
graph, and is to hold in both directions: a rank that grows by far less was told to be too large.
"""

import tempfile
from pathlib import Path

import numpy as np
import torch
from _harness import run_benchmark

from partita.capture.origin import ModelOrigin
from partita.capture.sources import SourceOptions
from partita.core.cluster import Cluster, Device, Level
from partita.core.plan import Plan, pipeline_stages
from partita.core.problem import Metric, Objective, Problem
from partita.core.solution import Solution
from partita.cost.memory import peak_memory
from partita.flows.profile import profiled_model
from partita.planners.pipeline import cut_layers, legal_boundaries
from partita.profiler.measure.measure import ProfileOptions
from partita.program.lower import lower
from partita.runtime.job import Job, JobDirectory
from partita.runtime.launch import collect, launch
from partita.runtime.training.recipe import Recipe

STAGES, MICROBATCHES, LIMIT, LEAST = 12, 4, 1.15, 0.8
ORIGIN = ModelOrigin(
    text="gpt3-small", options=SourceOptions(sequence_length=128, batch_size=1, scale=1.0)
)


def solution_of(scale: float) -> tuple[Solution, ModelOrigin]:
    """Return a pipeline of twelve stages for a GPT."""
    origin = ModelOrigin(
        text=ORIGIN.text, options=SourceOptions(sequence_length=128, batch_size=1, scale=scale)
    )
    # Forecasts need what each op keeps for backward, and its scratch memory.
    graph = profiled_model(origin, ProfileOptions(rounds=1, warmup=0)).graph
    level = Level(name="host", group_of=np.zeros(STAGES), bandwidth_bytes_per_s=1e9)
    devices = [Device(name=f"d{number}", memory_bytes=1e11) for number in range(STAGES)]
    problem = Problem(
        graph=graph,
        cluster=Cluster(devices=devices, levels=(level,)),
        objective=Objective(microbatches=MICROBATCHES, microbatch_size=1),
    )
    # The layers are two embeddings, the blocks and the head: the ends join their nearest block.
    wanted = [0, *range(3, STAGES + 2), STAGES + 3]
    plan = Plan(
        fingerprint=graph.fingerprint,
        devices=problem.cluster.device_names,
        stage_of=cut_layers(graph, legal_boundaries(graph, wanted)),
        stages=pipeline_stages([[number] for number in range(STAGES)]),
        microbatch_sizes=np.ones(MICROBATCHES, dtype=np.int64),
    )
    return Solution(problem=problem, plan=plan, metric=Metric.THROUGHPUT, value=1, unit="s"), origin


def measure(scale: float = 1.0) -> tuple[dict, list[str]]:
    """Run the pipeline."""
    torch.set_num_threads(1)
    solution, origin = solution_of(scale)
    problem, plan = solution.problem, solution.plan
    forecast = peak_memory(problem, plan, lower(problem, plan))
    whole = float(problem.graph.parameters.bytes.sum())
    with tempfile.TemporaryDirectory() as folder:
        files = JobDirectory(Path(folder) / "job")
        recipe = Recipe(optimizer="adam")
        files.create(
            solution, Job(model=origin, steps=2, recipe=recipe, keep_results=False, compared=True)
        )
        launch(files.path)
        run = collect(files.path)
    missed, ratios = [], []
    print(f"the model has {whole / 1e6:.0f} MB of parameters")
    print(f"{'device':8} {'forecast MB':>12} {'grew by MB':>12} {'ratio':>6}")
    for name, expected in zip(plan.devices, forecast.tolist(), strict=True):
        grown = run.memory[name].peak_bytes
        ratios.append(grown / expected)
        print(f"{name:8} {expected / 1e6:12.1f} {grown / 1e6:12.1f} {ratios[-1]:6.2f}")
        if ratios[-1] > LIMIT:
            missed.append(f"{name} grew by {ratios[-1]:.2f} times its forecast")
        if ratios[-1] < LEAST:
            missed.append(f"{name} grew by only {ratios[-1]:.2f} times its forecast")
        if name not in (plan.devices[0], plan.devices[-1]) and grown >= whole:
            missed.append(f"{name} grew by as much as the whole model")
    figures = {"whole_bytes": whole, "worst_ratio": max(ratios), "least_ratio": min(ratios)}
    return figures, missed


if __name__ == "__main__":
    run_benchmark(__doc__ or "", measure)
