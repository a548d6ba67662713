"""Capture of every model of the zoo at small scale, executed as three random stages.

For each model: ops and edges at op granularity (a fall-back counts as a failure), CPU seconds of
the capture, and the largest difference between the gradients of three random convex stages, run by
the interpreter, and of the untouched model, both in float64 without dropout.
"""

import random
import time

import numpy as np
import torch
from _harness import run_benchmark
from torch import nn

from partita.core.cluster import Cluster, Device, Level
from partita.core.graph import Graph
from partita.core.plan import Plan, Stage, equal_microbatches
from partita.core.problem import Problem
from partita.models.zoo import MODELS, build_model, example_inputs, loss_of
from partita.profile.capture import capture
from partita.profile.capture_setting import Example
from partita.profile.capture_setting import example_inputs as named_inputs
from partita.profile.capture_tree import map_leaves
from partita.profile.captured import CapturedModel
from partita.run.interpreter import interpret
from partita.testing.networks import gradient_error

SCALE, TOKENS, TOLERANCE = 0.03, 8, 1e-9
STAGES = 3


def without_dropout(model: nn.Module) -> nn.Module:
    """Return a model whose dropout keeps everything, so that two runs can be compared."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name in ("dropout", "dropout_p"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)
    return model


def random_cut(graph: Graph, rng: random.Random) -> np.ndarray:
    """Return the stage of each op: a random topological order, cut at random places."""
    after = [[] for _ in range(len(graph))]
    waiting = [0] * len(graph)
    for source, reader in zip(graph.edge_source.tolist(), graph.edges.reader.tolist(), strict=True):
        if source >= 0:
            after[source].append(reader)
            waiting[reader] += 1
    ready = [op for op, count in enumerate(waiting) if count == 0]
    order = []
    while ready:
        op = ready.pop(rng.randrange(len(ready)))
        order.append(op)
        for reader in after[op]:
            waiting[reader] -= 1
            if waiting[reader] == 0:
                ready.append(reader)
    stages = min(STAGES, len(graph))
    cuts = sorted(rng.sample(range(1, len(graph)), stages - 1))
    stage_of = np.zeros(len(graph), dtype=np.int32)
    stage_of[order] = np.searchsorted(cuts, np.arange(len(graph)), side="right")
    return stage_of


def staged_gradients(captured: CapturedModel, example: Example) -> dict[str, torch.Tensor]:
    """Return the gradients of three random stages on three devices."""
    graph = captured.graph
    stage_of = random_cut(graph, random.Random(1))
    stages = int(stage_of.max()) + 1
    level = Level(name="host", group_of=np.zeros(stages), bandwidth_bytes_per_s=1e9)
    cluster = Cluster(devices=[Device(name=f"d{d}") for d in range(stages)], levels=(level,))
    plan = Plan(
        fingerprint=graph.fingerprint,
        devices=cluster.device_names,
        stage_of=stage_of,
        stages=tuple(Stage(devices=((d,),)) for d in range(stages)),
        microbatch_sizes=equal_microbatches(1, graph.batch_size),
    )
    inputs = named_inputs(captured.model, example)
    result = interpret(
        Problem(graph=graph, cluster=cluster),
        plan,
        captured.stages(plan),
        state=captured.state(),
        load=lambda _, __, name: inputs[name],
    )
    return dict(result.steps[0].gradients)


def doubled(value: object) -> object:
    """Return a floating-point tensor in float64, anything else as it is."""
    is_real = isinstance(value, torch.Tensor) and value.is_floating_point()
    return value.double() if is_real else value


def one_model(name: str) -> tuple[int, int, float, float]:
    """Return ops, edges, capture seconds and the worst gradient difference of a model."""
    spec = MODELS[name]
    length = {"sequence_length": TOKENS} if spec.sequence_length else {}
    model = without_dropout(build_model(name, scale=SCALE, dtype=torch.float64))
    batch = example_inputs(name, max(2, spec.smallest_batch), scale=SCALE, **length)
    args, kwargs, labels = (
        map_leaves(doubled, part) for part in (batch.args, batch.kwargs, batch.labels)
    )
    example = Example(args=args, kwargs=kwargs, labels=labels)
    begin = time.process_time()
    captured = capture(model, example, loss=loss_of(name), name=name)
    seconds = time.process_time() - begin
    fallen = [note for note in captured.notes if note.startswith("not captured")]
    if fallen:
        raise RuntimeError(fallen[0])
    found = staged_gradients(captured, example)
    loss_of(name)(model(*args, **kwargs), labels).backward()
    wanted = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    error = gradient_error({n: found[n] for n in wanted}, wanted)
    return len(captured.graph), len(captured.graph.edges), seconds, float(error)


def measure() -> tuple[dict, list[str]]:
    """Capture and run every model."""
    torch.set_num_threads(1)
    missed, worst, done = [], 0.0, 0
    print(f"{'model':24} {'ops':>6} {'edges':>6} {'seconds':>8} {'gradients':>10}")
    for name in MODELS:
        try:
            ops, edges, seconds, error = one_model(name)
        except Exception as exc:  # noqa: BLE001 (a model that fails is what is looked for)
            missed.append(f"{name}: {type(exc).__name__}: {str(exc)[:120]}")
            continue
        done, worst = done + 1, max(worst, error)
        print(f"{name:24} {ops:6} {edges:6} {seconds:8.2f} {error:10.1e}", flush=True)
        if not error <= TOLERANCE:
            missed.append(f"{name}: gradients differ by {error:.1e}")
    return {"models": done, "of": len(MODELS), "worst_gradient_error": worst}, missed


if __name__ == "__main__":
    run_benchmark(__doc__ or "", measure)
