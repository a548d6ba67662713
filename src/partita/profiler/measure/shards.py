"""Measures what one rank of a tensor-parallel group computes: every op on its part of the tensors.

The other ranks are not there: sums are the rank's own parts and gathered tensors repeat them, which
costs the rank's own copies alone. What moves between ranks is priced on the links of the group.
"""

from dataclasses import replace

import numpy as np
import torch

from partita.capture.captured import CapturedModel
from partita.capture.setting import Example, LossFunction, make_setting, undisturbed
from partita.core.columns import Array, Floats
from partita.core.graph import DegreeTable
from partita.profiler.measure.clock import stopwatch_for
from partita.profiler.measure.costs import OpSeconds, average_rounds, read_record, with_costs
from partita.profiler.measure.measure import (
    Measured,
    ProfileOptions,
    Progress,
    device_of,
    quiet_rounds,
    scale_of,
    torch_threads,
)
from partita.profiler.measure.ops import OpRunner
from partita.profiler.memory import measure_memory


def with_shard(
    measured: Measured,
    captured: CapturedModel,
    example: Example,
    degree: int,
    *,
    loss: LossFunction | None = None,
    options: ProfileOptions | None = None,
    progress: Progress = lambda _, __: None,
) -> Measured:
    """Return a measurement with the costs of a rank of a tensor-parallel group beside its own.

    Args:
        measured: The model on one device.
        captured: The model.
        example: The microbatch it was captured with.
        degree: Ranks of the group.
        loss: The loss function it was captured with.
        options: Options of the measurement.
        progress: Called with each round.
    """
    options = ProfileOptions() if options is None else options
    setting = make_setting(captured.model, example, loss, captured.mode)
    inputs = list(setting.inputs.values())
    device = device_of(captured, inputs)
    clock = stopwatch_for(device, options.threads or torch.get_num_threads())
    runner = OpRunner(captured.shard(degree), inputs, clock)
    with undisturbed(setting), torch_threads(options.threads), runner.naming_ops():
        saved = measure_memory(runner).saved_bytes
        seconds = _seconds(runner, options, device, progress)
    kind, graph = measured.device_type, measured.graph
    table = captured.degrees_at(degree, graph, [kind])
    factors = scale_of(measured.record)
    table = _measured(table, degree, seconds, saved, factors)
    record = read_record(graph, kind)
    record = replace(record, notes=(*record.notes, *captured.splits(degree).notes()))
    graph = with_costs(replace(graph, degrees=table), graph.costs[0], record)
    return replace(measured, graph=graph)


def _seconds(
    runner: OpRunner, options: ProfileOptions, device: torch.device, progress: Progress
) -> OpSeconds:
    """Return the averages of the ops of a rank."""
    total = options.warmup + options.rounds
    rounds = []
    with quiet_rounds():
        for turn in range(total):
            progress(turn, total)
            times = runner.round()
            if turn >= options.warmup:
                rounds.append(times)
    progress(total, total)
    alone = runner.overheads(device)
    everyone = range(len(runner.captured.ops))
    return average_rounds(
        rounds,
        options.average,
        overheads=alone,
        split=rounds,
        split_overheads=alone,
        leader=list(everyone),
    )


def _measured(
    table: DegreeTable,
    degree: int,
    seconds: OpSeconds,
    saved_bytes: Floats,
    factors: tuple[float, float],
) -> DegreeTable:
    """Return a table whose rows of a rank have what was measured."""
    rows = table.tp == degree
    ops = table.kind[rows]

    def column(name: str, found: Floats) -> Array:
        values = np.array(getattr(table, name))
        values[rows] = found[ops]
        return values

    return replace(
        table,
        forward_s=column("forward_s", seconds.forward_s * factors[0]),
        backward_s=column("backward_s", seconds.backward_s * factors[1]),
        saved_bytes=column("saved_bytes", saved_bytes),
    )
