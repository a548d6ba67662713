"""Capture and profile of the zoo at small scale, and of tiny configurations of transformers.

For each model, at op granularity (a fall-back counts as a failure):

- ops, edges, CPU seconds of the capture;
- the difference between the gradients of three random convex stages, run by the interpreter, and
  of the untouched model, without dropout: the worst parameter, relative to its own norm, in float32
  and float64. A cut whose readers of a tensor interleave changes the order in which their gradients
  are summed, and nets with batch norm enlarge that rounding;
- at the first batch of 2, 4, 8, ... samples whose step takes 40 ms: the sum of the measured ops
  over the timed whole step; and the peak that the cost model predicts for that graph on one device
  with one microbatch, over the most bytes of live tensors in a step of the untouched model.

A chain of Linear layers and a small GPT, each measured three times, have the backward of every op
measured and their sums near the whole step, each of them.
"""

import importlib.util
import random
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 (torch's own name for it)
from _harness import run_benchmark
from torch import nn

from partita.capture.capture import capture
from partita.capture.captured import CapturedModel
from partita.capture.setting import Example, LossFunction
from partita.capture.setting import example_inputs as named_inputs
from partita.capture.tree import map_leaves
from partita.core.cluster import Cluster, Device, Level
from partita.core.graph import Graph
from partita.core.plan import Plan, Stage, equal_microbatches
from partita.core.problem import Problem
from partita.models.huggingface import (
    TINY_CONFIGURATIONS,
    build_hugging_face,
    hugging_face_inputs,
    hugging_face_loss,
)
from partita.models.spec import Batch
from partita.models.zoo import MODELS, build_model, example_inputs, loss_of
from partita.profiler.measure.costs import ProfileRecord
from partita.profiler.measure.measure import ProfileOptions
from partita.profiler.measure.measure import measure as measure_captured
from partita.runtime.interpreter import interpret
from partita.testing.networks import gradient_error

SCALE, TOKENS, SAMPLES = 0.03, 16, 2
STAGES = 3
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-9}
STEP_S, MOST_SAMPLES = 0.04, 4096
SUM_WITHIN, PEAK_AT_LEAST, PEAK_AT_MOST = 0.10, 0.95, 1.20
REPEATS = 3


@dataclass(frozen=True)
class Subject:
    """A model to look at: built in a type, with a batch of so many samples, and its loss."""

    name: str
    build: Callable[[torch.dtype], nn.Module]
    batch: Callable[[nn.Module, int], Batch]
    loss: LossFunction
    least_samples: int = SAMPLES


@dataclass(frozen=True)
class Row:
    """What was found of a model."""

    ops: int
    edges: int
    capture_s: float
    errors: dict[torch.dtype, float]
    samples: int
    record: ProfileRecord

    @property
    def peak(self) -> float:
        """Predicted over measured peak."""
        return self.record.predicted_peak_bytes / self.record.peak_bytes


def zoo_subject(name: str, scale: float = SCALE, tokens: int = TOKENS) -> Subject:
    """Return a model of the zoo."""
    spec = MODELS[name]
    length = {"sequence_length": min(tokens, spec.sequence_length)} if spec.sequence_length else {}
    return Subject(
        name=name,
        build=lambda dtype: build_model(name, scale=scale, dtype=dtype),
        batch=lambda _, samples: example_inputs(name, samples, scale=scale, **length),
        loss=loss_of(name),
        least_samples=max(SAMPLES, spec.smallest_batch),
    )


def transformers_subject(name: str) -> Subject:
    """Return a tiny configuration of transformers.

    In float64 experts are computed one by one: torch's grouped product does not know that type.
    """

    def build(dtype: torch.dtype) -> nn.Module:
        experts = {"experts_implementation": "eager"} if dtype is torch.float64 else {}
        return build_hugging_face({**TINY_CONFIGURATIONS[name], **experts}, dtype=dtype)

    return Subject(
        name=name,
        build=build,
        batch=lambda model, samples: hugging_face_inputs(model, samples, sequence_length=TOKENS),
        loss=hugging_face_loss,
    )


def linear_chain() -> Subject:
    """Return 16 Linear layers."""

    def batch(_: nn.Module, samples: int) -> Batch:
        return Batch((torch.randn(samples, 512),), {}, torch.randn(samples, 512))

    def build(dtype: torch.dtype) -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(*(nn.Linear(512, 512) for _ in range(16))).to(dtype)

    return Subject(name="16 Linear(512)", build=build, batch=batch, loss=F.mse_loss)


def small_gpt() -> Subject:
    """Return a GPT of 12 blocks, 256 wide."""
    return zoo_subject("gpt3-small", scale=1 / 3, tokens=64)


def without_dropout(model: nn.Module) -> nn.Module:
    """Return a model whose dropout keeps everything, so that two runs can be compared."""
    holders = [*model.modules(), *(m.config for m in model.modules() if hasattr(m, "config"))]
    for holder in holders:
        if isinstance(holder, nn.Dropout):
            holder.p = 0.0
        for name, value in list(vars(holder).items()):
            if "drop" in name and isinstance(value, float):
                setattr(holder, name, 0.0)
    return model


def example_of(batch: Batch, dtype: torch.dtype) -> Example:
    """Return a batch as an example, with floating-point tensors in a type."""

    def typed(value: object) -> object:
        is_real = isinstance(value, torch.Tensor) and value.is_floating_point()
        return value.to(dtype) if is_real else value

    args, kwargs, labels = (
        map_leaves(typed, part) for part in (batch.args, batch.kwargs, batch.labels)
    )
    return Example(args=args, kwargs=kwargs, labels=labels)


def captured_as(
    subject: Subject, dtype: torch.dtype, samples: int
) -> tuple[CapturedModel, Example, float]:
    """Return a captured model, its example and the CPU seconds of the capture."""
    model = without_dropout(subject.build(dtype))
    example = example_of(subject.batch(model, samples), dtype)
    begin = time.process_time()
    captured = capture(model, example, loss=subject.loss, name=subject.name)
    seconds = time.process_time() - begin
    fallen = [note for note in captured.notes if note.startswith("not captured")]
    if fallen:
        raise RuntimeError(fallen[0])
    return captured, example, seconds


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


def gradient_difference(captured: CapturedModel, example: Example, loss: LossFunction) -> float:
    """Return how far gradients of stages are from the untouched model's, the worst parameter."""
    model = captured.model
    found = staged_gradients(captured, example)
    loss(model(*example.args, **example.kwargs), example.labels).backward()
    wanted = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return gradient_error({name: found[name] for name in wanted}, wanted)


def step_s(captured: CapturedModel, example: Example, loss: LossFunction) -> float:
    """Return the CPU seconds of a step of the untouched model; the shorter of two."""
    seconds = []
    for _ in range(2):
        begin = time.process_time()
        loss(captured.model(*example.args, **example.kwargs), example.labels).backward()
        seconds.append(time.process_time() - begin)
    captured.model.zero_grad()
    return min(seconds)


def measurable(subject: Subject) -> tuple[CapturedModel, Example, int]:
    """Return a model captured at the first batch size whose step is long enough."""
    samples = subject.least_samples
    while True:
        captured, example, _ = captured_as(subject, torch.float32, samples)
        long_enough = step_s(captured, example, subject.loss) >= STEP_S
        if long_enough or 2 * samples > MOST_SAMPLES:
            return captured, example, samples
        samples *= 2


def profiled(subject: Subject) -> tuple[ProfileRecord, int]:
    """Return what the measurement of a model at that size says, and the size."""
    captured, example, samples = measurable(subject)
    found = measure_captured(captured, example, loss=subject.loss, options=ProfileOptions())
    for index, op in enumerate(captured.ops):
        flows = any(captured.values[v].requires_grad for v in op.makes)
        if flows and not found.graph.backward_s[index] > 0:
            raise RuntimeError(f"the backward of op {op.name!r} was not measured")
    return found.record, samples


def one_model(subject: Subject) -> Row:
    """Return what is found of a model."""
    captured, example, _ = captured_as(subject, torch.float64, subject.least_samples)
    double = gradient_difference(captured, example, subject.loss)
    captured, example, seconds = captured_as(subject, torch.float32, subject.least_samples)
    single = gradient_difference(captured, example, subject.loss)
    record, samples = profiled(subject)
    return Row(
        ops=len(captured.graph),
        edges=len(captured.graph.edges),
        capture_s=seconds,
        errors={torch.float32: single, torch.float64: double},
        samples=samples,
        record=record,
    )


def misses(name: str, row: Row) -> Iterator[str]:
    """Yield what a model misses."""
    for dtype, limit in TOLERANCE.items():
        if not row.errors[dtype] <= limit:
            yield f"{name}: gradients in {dtype} differ by {row.errors[dtype]:.1e}"
    if not PEAK_AT_LEAST <= row.peak <= PEAK_AT_MOST:
        yield f"{name}: predicted peak is {row.peak:.3f} of the measured one"


def show(name: str, row: Row) -> None:
    """Print a row."""
    errors, record = row.errors, row.record
    print(
        f"{name:22} {row.ops:5} {row.edges:5} {row.capture_s:9.2f} "
        f"{errors[torch.float32]:8.1e} {errors[torch.float64]:8.1e} {row.samples:7} "
        f"{record.whole_s * 1e3:8.1f} {record.ratio:9.3f} "
        f"{record.predicted_peak_bytes / 1e6:8.1f} {record.peak_bytes / 1e6:8.1f} {row.peak:6.3f}",
        flush=True,
    )


def subjects(missed: list[str]) -> Iterator[Subject]:
    """Yield the models; say if those of transformers cannot be had."""
    yield from (zoo_subject(name) for name in MODELS)
    if importlib.util.find_spec("transformers") is None:
        names = ", ".join(TINY_CONFIGURATIONS)
        missed.append(
            f"transformers is not installed, so {names} were not run; pip install 'partita[models]'"
        )
    else:
        yield from (transformers_subject(name) for name in TINY_CONFIGURATIONS)


def measure() -> tuple[dict, list[str]]:
    """Look at every model."""
    torch.set_num_threads(1)
    missed: list[str] = []
    rows: dict[str, Row] = {}
    print(
        f"{'model':22} {'ops':>5} {'edges':>5} {'capture s':>9} {'float32':>8} {'float64':>8} "
        f"{'samples':>7} {'step ms':>8} {'ops/whole':>9} "
        f"{'peak MB':>8} {'measured':>8} {'ratio':>6}"
    )
    for subject in subjects(missed):
        try:
            rows[subject.name] = row = one_model(subject)
        except Exception as exc:  # noqa: BLE001 (a model that fails is what is looked for)
            missed.append(f"{subject.name}: {type(exc).__name__}: {str(exc)[:160]}")
            continue
        show(subject.name, row)
        missed += misses(subject.name, row)
    figures = summary(rows, missed)
    for key, subject in (("chain_ratio", linear_chain()), ("gpt_ratio", small_gpt())):
        ratios = [profiled(subject)[0].ratio for _ in range(REPEATS)]
        figures[key] = statistics.median(ratios)
        print(f"{subject.name}: ops/whole {' '.join(f'{ratio:.3f}' for ratio in ratios)}")
        if not abs(figures[key] - 1) <= SUM_WITHIN:
            missed.append(f"{subject.name}: the ops sum to {figures[key]:.3f} of the whole step")
    return figures, missed


def summary(rows: dict[str, Row], missed: list[str]) -> dict:
    """Return the figures over all models; note what is missed."""
    if not rows:
        return {"models": 0}
    ratios = [row.record.ratio for row in rows.values()]
    off = statistics.median(abs(ratio - 1) for ratio in ratios)
    if not off <= SUM_WITHIN:
        missed.append(f"sum of ops: half of the models are more than {off:.1%} from the whole step")
    return {
        "models": len(rows),
        "of": len(MODELS) + len(TINY_CONFIGURATIONS),
        "worst_float32": max(row.errors[torch.float32] for row in rows.values()),
        "worst_float64": max(row.errors[torch.float64] for row in rows.values()),
        "median_ratio": statistics.median(ratios),
        "median_off": off,
        "least_ratio": min(ratios),
        "most_ratio": max(ratios),
        "least_peak": min(row.peak for row in rows.values()),
        "most_peak": max(row.peak for row in rows.values()),
        "capture_s": sum(row.capture_s for row in rows.values()),
    }


if __name__ == "__main__":
    run_benchmark(__doc__ or "", measure)
