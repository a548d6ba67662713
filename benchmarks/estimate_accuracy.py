"""Estimated against measured stage times of published training runs.

Each run is captured on the meta device, cut as it was cut, and priced with the eager kernels, TF32
and recomputation of these runs. What kernels reach is fitted for each device on all of its runs but
one, and compared with the one left out. Eight constants a device, none for a model; each is drawn
towards the share that the runs' own study found, which alone decides where no
other run has kernels of a class (convolutions).

``--write`` puts the constants of all runs into the catalogue; ``--runs FILE`` takes other runs of
the same format.
"""

import argparse
import json
import sys
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch.nn.functional as F  # noqa: N812 (torch's own name for it)
from _harness import ROOT, run_benchmark, shared_data
from scipy.optimize import least_squares
from torch import Tensor

from partita.capture.capture import capture
from partita.capture.setting import Example
from partita.catalogue.catalogue import load_catalogue
from partita.catalogue.kernel_rates import CLASSES, DeviceKernels, load_kernels
from partita.core.cluster import Cluster, Device, Level
from partita.core.problem import Problem
from partita.models.zoo import build_model, example_inputs, layers_of, loss_of
from partita.planners.custom import plan_custom
from partita.planners.merak import plan_uniform_transformer
from partita.profiler.estimate.estimate import HOST_S_PER_ELEMENT, collect_kernels, computed_flops
from partita.profiler.estimate.recompute import recomputed_ops
from partita.profiler.estimate.trace import Kernels
from partita.profiler.flops import Kernel, KernelClass
from partita.profiler.layers import label_layers

DTYPE = "tfloat32"
DEVICE_TYPE = {"A100": "a100-pcie", "A40": "a40"}
PRIOR = {
    "A100": (0.75, 0.59, 0.42, 0.91, 0.77, 0.77, 0.73, 10e-6),
    "A40": (0.89, 0.68, 0.40, 0.80, 0.70, 0.80, 0.68, 10e-6),
}
"""Shares of ``CLASSES`` and seconds of a launch, as that study has them."""
FLAT_PRIOR = (0.75,) * len(CLASSES) + (10e-6,)
"""The same for every class: shows how much of the accuracy comes from the prior."""
PRIOR_WEIGHT = 0.3
MOST_SHARE, MOST_LAUNCH_S = 1.0, 20e-6
MEDIAN_LIMIT, WORST_LIMIT = 0.08, 0.25
CAUSAL = ("gpt", "bloom")
OUTPUT = ROOT / "src" / "partita" / "catalogue" / "kernels.yaml"


@dataclass(frozen=True)
class Column:
    """Kernels of one stage in one direction, equal ones counted."""

    measured_s: float
    kind: np.ndarray
    flops: np.ndarray
    moved: np.ndarray
    host_s: np.ndarray
    launches: np.ndarray
    count: np.ndarray


def shifted_cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the loss of the published causal models, which copy the logits but for the last."""
    return F.cross_entropy(logits[:, :-1].contiguous().flatten(0, 1), labels[:, 1:].flatten())


def captured_run(row: dict[str, Any]) -> tuple[Any, Any]:
    """Return the captured model of a run, and its graph with layers."""
    name, size = row["model"], row["microbatch_size"]
    model = build_model(name, device="meta")
    batch = example_inputs(name, size, device="meta")
    example = Example(args=batch.args, kwargs=batch.kwargs, labels=batch.labels, batch_size=size)
    loss = shifted_cross_entropy if name.startswith(CAUSAL) else loss_of(name)
    captured = capture(model, example, loss=loss, name=name)
    return captured, label_layers(captured.graph, layers_of(name, model))


def stages_of(graph: Any, row: dict[str, Any]) -> np.ndarray:
    """Return the stage of each op, as the run was cut."""
    count = row["pp"]
    cluster = Cluster(
        devices=[Device(name=f"host0/gpu{s}") for s in range(count)],
        levels=(Level(name="host", group_of=np.zeros(count), bandwidth_bytes_per_s=1e11),),
    )
    problem = Problem(graph=graph, cluster=cluster)
    name, _, argument = row["partition_method"].partition(":")
    if name == "custom":
        boundaries = [int(part) for part in argument.split(",")]
        return np.asarray(plan_custom(problem, boundaries=boundaries).plan.stage_of)
    assert name == "uniform_transformer", name
    return np.asarray(plan_uniform_transformer(problem, stages=count).plan.stage_of)


def columns_of(row: dict[str, Any]) -> list[Column]:
    """Return the kernels of every stage of a run, forward and backward."""
    captured, graph = captured_run(row)
    stage_of, again = stages_of(graph, row), recomputed_ops(graph)
    found = collect_kernels(captured, Kernels.EAGER)
    result = []
    for stage in range(row["pp"]):
        ops = np.flatnonzero(stage_of == stage).tolist()
        forward = [kernel for op in ops for kernel in found.ops[op].forward]
        backward = [
            kernel
            for op in ops
            for kernel in (
                *found.ops[op].backward_input,
                *found.ops[op].backward_weight,
                *(found.ops[op].forward if again[op] else ()),
            )
        ]
        result.append(make_column(forward, row["stage_forward_s"][stage], row["device"]))
        result.append(make_column(backward, row["stage_backward_s"][stage], row["device"]))
    return result


def make_column(kernels: Iterable[Kernel], measured_s: float, device: str) -> Column:
    """Return kernels as arrays."""
    processors = load_kernels()[DEVICE_TYPE[device]].processors
    moving = (KernelClass.ELEMENTWISE, KernelClass.REDUCTION, KernelClass.HOST)
    counts = Counter(
        (
            CLASSES.index(kernel.kind) if kernel.kind in CLASSES else -1,
            0.0 if kernel.kind in moving else computed_flops(kernel, processors),
            kernel.read_write_bytes,
            HOST_S_PER_ELEMENT * kernel.work if kernel.kind is KernelClass.HOST else 0.0,
            kernel.launches,
        )
        for kernel in kernels
    )
    kind, *rest = (np.array(part) for part in zip(*counts, strict=True))
    return Column(measured_s, kind, *rest, np.array(list(counts.values())))


def predicted_s(constants: np.ndarray, column: Column, device: str) -> float:
    """Return the seconds of a stage; the arithmetic of ``Roofline.seconds`` over arrays."""
    known = load_catalogue().device_type(DEVICE_TYPE[device])
    shares = np.append(constants[:-1], 1.0)
    elementwise, reduction = CLASSES.index("elementwise"), CLASSES.index("reduction")
    memory = np.where(column.kind == reduction, shares[reduction], shares[elementwise])
    seconds = np.maximum(
        column.flops / (shares[column.kind] * known.peak_flop_per_s[DTYPE]),
        column.moved / (memory * known.memory_bytes_per_s),
    )
    seconds += column.host_s + column.launches * constants[-1]
    return float((seconds * column.count).sum())


def fitted(
    columns: list[Column], device: str, start: tuple[float, ...] | None = None
) -> np.ndarray:
    """Return the constants with the least error of logarithms, drawn towards a prior."""
    prior = np.array(PRIOR[device] if start is None else start)

    def residuals(steps: np.ndarray) -> np.ndarray:
        constants = prior * np.exp(steps)
        errors = [np.log(predicted_s(constants, c, device) / c.measured_s) for c in columns]
        return np.concatenate([errors, PRIOR_WEIGHT * steps])

    most = np.array([MOST_SHARE] * len(CLASSES) + [MOST_LAUNCH_S])
    bounds = (np.full(len(prior), -1.5), np.log(most / prior))
    zero = np.zeros(len(prior))
    found = least_squares(residuals, zero, bounds=bounds, loss="soft_l1", f_scale=0.05)
    return prior * np.exp(found.x)


def stage_seconds(constants: np.ndarray, columns: list[Column], device: str) -> np.ndarray:
    """Return the estimated seconds of every stage: forward, backward, forward, ..."""
    return np.array([predicted_s(constants, c, device) for c in columns])


def relative_errors(seconds: np.ndarray, columns: list[Column]) -> np.ndarray:
    """Return the relative error of every stage, in the order of ``stage_seconds``."""
    return seconds / np.array([c.measured_s for c in columns]) - 1


def left_out_seconds(
    device: str, runs: list[list[Column]], start: tuple[float, ...] | None = None
) -> list[np.ndarray]:
    """Return the stage seconds of each run of a device, with the constants of the others."""
    found = []
    for index, columns in enumerate(runs):
        others = [c for i, run in enumerate(runs) if i != index for c in run]
        found.append(stage_seconds(fitted(others, device, start), columns, device))
    return found


def left_out(
    device: str, runs: list[tuple[str, list[Column]]], start: tuple[float, ...] | None = None
) -> list[np.ndarray]:
    """Return the errors of each run of a device, with the constants of the others."""
    columns = [run for _, run in runs]
    found = left_out_seconds(device, columns, start)
    return [relative_errors(s, c) for s, c in zip(found, columns, strict=True)]


def compare(device: str, runs: list[tuple[str, list[Column]]]) -> tuple[np.ndarray, np.ndarray]:
    """Leave each run of a device out in turn; return all errors, and the constants of all runs."""
    found = left_out(device, runs)
    for (model, _), errors in zip(runs, found, strict=True):
        for what, part in (("forward", errors[::2]), ("backward", errors[1::2])):
            text = " ".join(f"{100 * error:+6.1f}" for error in part)
            print(f"{device:5} {model:18} {what:8} {text}")
    return np.concatenate(found), fitted([c for _, run in runs for c in run], device)


def write_constants(constants: dict[str, np.ndarray], errors: dict[str, np.ndarray]) -> None:
    """Put fitted constants into the catalogue; other entries stay, those taken from them follow."""
    table = dict(load_kernels())
    for device, values in constants.items():
        size = np.abs(errors[device])
        name = DEVICE_TYPE[device]
        table[name] = replace(
            table[name],
            shares=dict(zip(CLASSES, (round(v, 3) for v in values[:-1].tolist()), strict=True)),
            launch_s=round(float(values[-1]), 8),
            median_error=round(float(np.median(size)), 4),
            worst_error=round(float(size.max()), 4),
        )
    for name, entry in table.items():
        if entry.source.startswith("as a100-pcie"):
            fit = table["a100-pcie"]
            table[name] = replace(entry, shares=fit.shares, launch_s=fit.launch_s)
    head = OUTPUT.read_text().split("devices:")[0]
    OUTPUT.write_text(head + "devices:\n" + "\n".join(entry_text(*item) for item in table.items()))


def entry_text(name: str, entry: DeviceKernels) -> str:
    """Return an entry of the catalogue."""
    lines = [f"  {name}:"]
    if entry.processors:
        lines.append(f"    processors: {entry.processors}")
    lines += ["    shares:", *(f"      {kind}: {entry.shares[kind]}" for kind in CLASSES)]
    lines.append(f"    launch_s: {entry.launch_s:.3e}")
    if entry.median_error == entry.median_error:  # not NaN
        lines.append(f"    median_error: {entry.median_error}")
        lines.append(f"    worst_error: {entry.worst_error}")
    lines += ["    source: >-", f"      {entry.source}", ""]
    return "\n".join(lines)


def measure(path: Path | None, *, write: bool) -> tuple[dict[str, Any], list[str]]:
    """Price every run and compare."""
    path = shared_data() / "perseus" / "measured_stages.json" if path is None else path
    rows = json.loads(path.read_text())
    missed: list[str] = []
    figures: dict[str, Any] = {"rows": len(rows)}
    constants, errors = {}, {}
    print("error of each stage in per cent, the run left out of the fit")
    for device in dict.fromkeys(row["device"] for row in rows):
        runs = [(row["model"], columns_of(row)) for row in rows if row["device"] == device]
        errors[device], constants[device] = compare(device, runs)
        size = np.abs(errors[device])
        own = np.concatenate(
            [relative_errors(stage_seconds(constants[device], c, device), c) for _, c in runs]
        )
        shown = " ".join(
            f"{kind}={v:.3g}"
            for kind, v in zip((*CLASSES, "launch_s"), constants[device], strict=True)
        )
        print(f"{device:5} fitted on all runs: {shown}")
        flat = np.abs(np.concatenate(left_out(device, runs, FLAT_PRIOR)))
        figures[f"{device}_stages"] = len(size)
        figures[f"{device}_median_percent"] = round(100 * float(np.median(size)), 2)
        figures[f"{device}_worst_percent"] = round(100 * float(size.max()), 2)
        figures[f"{device}_median_of_fit_percent"] = round(100 * float(np.median(abs(own))), 2)
        figures[f"{device}_flat_prior_median_percent"] = round(100 * float(np.median(flat)), 2)
        figures[f"{device}_flat_prior_worst_percent"] = round(100 * float(flat.max()), 2)
        if np.median(size) > MEDIAN_LIMIT:
            missed.append(f"{device}: median error {100 * np.median(size):.1f} %, limit 8 %")
        if size.max() > WORST_LIMIT:
            missed.append(f"{device}: worst error {100 * size.max():.1f} %, limit 25 %")
    if write:
        write_constants(constants, errors)
    return figures, missed


if __name__ == "__main__":
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--runs", type=Path)
    own, rest = parser.parse_known_args()
    sys.argv[1:] = rest
    run_benchmark(__doc__ or "", lambda: measure(own.runs, write=own.write))
