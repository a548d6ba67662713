"""Measures a captured model: time and memory of each op, and of the whole step beside them."""

import gc
import os
import platform
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor

from partita.capture.captured import CapturedModel
from partita.capture.setting import Example, LossFunction, make_setting, undisturbed
from partita.catalogue.catalogue import load_catalogue
from partita.catalogue.gpu_names import gpu_type
from partita.core.graph import Graph
from partita.errors import InvalidInputError
from partita.processes import other_load
from partita.profiler.measure.clock import Stopwatch, stopwatch_for
from partita.profiler.measure.costs import (
    Average,
    OpSeconds,
    ProfileRecord,
    average_of,
    average_rounds,
    make_costs,
    read_record,
    used,
    with_costs,
)
from partita.profiler.measure.ops import OpRunner, RoundTimes, equal_ops
from partita.profiler.measure.step import MarkedStep, WholeStep, gradients_kept
from partita.profiler.memory import (
    OpMemory,
    measure_memory,
    measured_peak_bytes,
    predicted_peak_bytes,
)

_SPLIT_ROUNDS = 3

Progress = Callable[[int, int], None]
"""Called with how many rounds are done, of how many."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileOptions:
    """Options of a measurement.

    Attributes:
        rounds: Rounds; the first quarter does not count.
        warmup: Rounds before these.
        average: Rule by which rounds become one figure.
        equal_once: Time ops that call the same on the same shapes once, on inputs that were kept.
        match_whole: Scale the ops so that they sum to the whole step.
        device_type: Name of the costs; found out if empty.
        threads: Threads of torch; 0 = as many as it has now.
    """

    rounds: int = 8
    warmup: int = 1
    average: Average = Average.MEDIAN
    equal_once: bool = False
    match_whole: bool = False
    device_type: str = ""
    threads: int = 0

    def __post_init__(self) -> None:
        if self.rounds < 1:
            raise InvalidInputError(f"rounds must be at least 1, got {self.rounds}")
        if self.warmup < 0:
            raise InvalidInputError(f"warmup must be at least 0, got {self.warmup}")
        if self.threads < 0:
            raise InvalidInputError(f"threads must be at least 0, got {self.threads}")


@dataclass(frozen=True, kw_only=True, eq=False)
class Measured:
    """A graph with costs.

    Attributes:
        graph: The graph.
        device_type: The type of device that was measured.
        is_cached: Whether it was measured before.
    """

    graph: Graph
    device_type: str
    is_cached: bool = False

    @property
    def record(self) -> ProfileRecord:
        """Record of the measurement, and the whole step beside the ops."""
        return read_record(self.graph, self.device_type)


@dataclass(slots=True)
class _Times:
    """Results of the rounds: ops, and forward and backward of the whole.

    Rounds that split the backward are apart: what they compute twice disturbs the caches.
    """

    rounds: list[RoundTimes] = field(default_factory=list)
    split: list[RoundTimes] = field(default_factory=list)
    whole: list[tuple[float, float]] = field(default_factory=list)


def measure(
    captured: CapturedModel,
    example: Example,
    *,
    loss: LossFunction | None = None,
    options: ProfileOptions | None = None,
    clock: Stopwatch | None = None,
    progress: Progress = lambda _, __: None,
) -> Measured:
    """Return the graph of a captured model with measured costs and bytes.

    The model and its gradients are left as they were. A model captured in eval mode is measured
    forward only.

    Args:
        captured: The model.
        example: The microbatch it was captured with.
        loss: The loss function it was captured with.
        options: Options of the measurement.
        clock: Tells the time; that of the model's device if not given.
        progress: Called with each round.

    Raises:
        InvalidInputError: The example is another, or the loss function is missing.
        UnsupportedError: Memory ran out; the op is named.
    """
    options = ProfileOptions() if options is None else options
    busy = other_load()  # before this measurement makes a load of its own
    setting = make_setting(captured.model, example, loss, captured.mode)
    inputs = list(setting.inputs.values())
    _check_inputs(captured, inputs)
    _check_measurable(captured)
    device = device_of(captured, inputs)
    threads = options.threads or torch.get_num_threads()
    clock = stopwatch_for(device, threads) if clock is None else clock
    runner = OpRunner(captured, inputs, clock)
    with (
        undisturbed(setting),
        gradients_kept(captured.parameters),
        torch_threads(options.threads),
        runner.naming_ops(),
    ):
        whole = WholeStep(captured, setting, clock)
        memory = measure_memory(runner)
        runner.where = "the whole step"
        peak = measured_peak_bytes(whole, captured, inputs)
        leader = equal_ops(captured) if options.equal_once else list(range(len(captured.ops)))
        marked = MarkedStep(runner, clock)
        times = _run_rounds(runner, marked, whole, leader, options, progress)
        alone = runner.overheads(device)
        overheads = alone if len(set(leader)) < len(leader) else marked.overheads()
    seconds = average_rounds(
        times.rounds,
        options.average,
        overheads=overheads,
        split=times.split,
        split_overheads=alone,
        leader=leader,
    )
    record = _record(captured, options, times, seconds)
    record = replace(
        record,
        processor=processor_of(device),
        num_distinct=len(set(leader)),
        overhead_s=overheads.each_s,
        peak_bytes=float(peak),
        busy=busy,
    )
    kind = options.device_type or device_type_of(device)
    return Measured(graph=_costed(captured, memory, seconds, record, kind), device_type=kind)


def _record(
    captured: CapturedModel, options: ProfileOptions, times: _Times, seconds: OpSeconds
) -> ProfileRecord:
    """Return what is to be known of the times of a measurement."""
    forward, backward = average_of(used(times.whole), options.average)
    return ProfileRecord(
        mode=captured.mode.value,
        granularity=captured.granularity.value,
        rounds=options.rounds,
        used_rounds=len(used(times.rounds)),
        average=options.average.value,
        threads=options.threads or torch.get_num_threads(),
        versions=versions(),
        whole_forward_s=float(forward),
        whole_backward_s=float(backward),
        sum_forward_s=float(seconds.forward_s.sum()),
        sum_backward_s=float(seconds.backward_s.sum()),
        is_scaled=options.match_whole,
        forward_spread=seconds.forward_spread,
        backward_spread=seconds.backward_spread,
        notes=captured.notes,
    )


def _costed(
    captured: CapturedModel, memory: OpMemory, seconds: OpSeconds, record: ProfileRecord, kind: str
) -> Graph:
    """Return the graph with all figures."""
    ops = replace(
        captured.graph.ops,
        flops=memory.flops,
        saved_bytes=memory.saved_bytes,
        workspace_bytes=memory.workspace_bytes,
    )
    edges = replace(captured.graph.edges, keeper=memory.keepers)
    graph = replace(captured.graph, ops=ops, edges=edges)
    factors = scale_of(record)
    predicted = predicted_peak_bytes(graph, training=captured.is_training)
    return with_costs(
        graph, make_costs(seconds, kind, factors), replace(record, predicted_peak_bytes=predicted)
    )


def scale_of(record: ProfileRecord) -> tuple[float, float]:
    """Return the factors by which forward and backward of ops are scaled to the whole step."""
    if not record.is_scaled:
        return 1.0, 1.0
    return (
        _factor(record.whole_forward_s, record.sum_forward_s),
        _factor(record.whole_backward_s, record.sum_backward_s),
    )


def _factor(whole_s: float, sum_s: float) -> float:
    return whole_s / sum_s if sum_s > 0 else 1.0


def _run_rounds(
    runner: OpRunner,
    marked: MarkedStep,
    whole: WholeStep,
    leader: list[int],
    options: ProfileOptions,
    progress: Progress,
) -> _Times:
    """Run ops and the whole step by turns, so that both see the machine in the same state."""
    splits = min(options.rounds, _SPLIT_ROUNDS) if runner.captured.is_training else 1
    times, timed = _Times(), options.warmup + options.rounds
    total = timed + splits
    once = sorted(set(leader)) if len(set(leader)) < len(leader) else []
    kept = runner.step(keep=once)

    def timed_ops(*, split: bool) -> RoundTimes:
        if once:
            return runner.round_of(kept, split=split)
        return runner.round(split=True) if split else marked.round()

    with quiet_rounds():
        for turn in range(total):
            progress(turn, total)
            split = turn >= timed
            ops = timed_ops(split=split)
            if split:
                times.split.append(ops)
                continue
            runner.where = "the whole step"
            step = whole.seconds()
            if turn >= options.warmup:
                times.rounds.append(ops)
                times.whole.append(step)
    progress(total, total)
    return times


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """Compute with some threads of torch; 0 = as many as it has."""
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(count or before)
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def quiet_rounds() -> Iterator[None]:
    """Collect no garbage while rounds are timed."""
    was_on = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _check_inputs(captured: CapturedModel, inputs: list[Tensor]) -> None:
    names = captured.graph.tensors.names
    producers = captured.graph.tensors.producer.tolist()
    wanted = sum(producer < 0 for producer in producers)
    if len(inputs) != wanted:
        raise InvalidInputError(f"the example has {len(inputs)} tensors, the graph {wanted} inputs")
    for name, info, tensor in zip(names, captured.values, inputs, strict=False):
        if tuple(tensor.shape) != info.shape or tensor.dtype != info.dtype:
            raise InvalidInputError(
                f"input {name!r} has shape {tuple(tensor.shape)} and type {tensor.dtype}; the "
                f"model was captured with {info.shape} and {info.dtype}"
            )
        if tensor.is_meta or type(tensor).__name__ == "FakeTensor":
            raise InvalidInputError(
                f"input {name!r} has no values; a measurement needs real tensors"
            )


def device_of(captured: CapturedModel, inputs: list[Tensor]) -> torch.device:
    """Return the device that a captured model computes on."""
    held = [*captured.parameters.values(), *inputs]
    return held[0].device if held else torch.device("cpu")


def device_type_of(device: torch.device) -> str:
    """Return what costs of a device are called: a type of the catalogue, or the GPU's own name."""
    if device.type != "cuda":
        return device.type
    title = torch.cuda.get_device_name(device)
    return gpu_type(title, load_catalogue()) or title


def _check_measurable(captured: CapturedModel) -> None:
    """Check that there is something to run, and to differentiate where it is trained."""
    name, loss = captured.graph.name, captured.graph.loss
    if not captured.ops:
        raise InvalidInputError(f"{name!r} has no ops: it returns what it is given")
    if captured.is_training and loss >= 0 and not captured.values[loss].requires_grad:
        raise InvalidInputError(
            f"{name!r} has nothing to train: its loss depends on no trainable parameter; "
            "--mode inference measures its forward alone"
        )


def this_gpu_type() -> str:
    """Return the type of the first GPU."""
    return device_type_of(torch.device("cuda"))


def processor_of(device: torch.device) -> str:
    """Return the name of the processor or GPU."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return f"{line.partition(':')[2].strip()}, {os.cpu_count()} cores"
    except OSError:
        pass
    return platform.processor() or platform.machine()


def versions() -> dict[str, str]:
    """Return the versions that times depend on."""
    return {"python": platform.python_version(), "torch": torch.__version__}
