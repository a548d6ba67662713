"""Plans of large transformers: how long they take on thousands of devices, and mixed clusters.

``scale``: ``partita plan llama3-405b`` in a fresh process on 128 to 16,384 H100. Measured are CPU
seconds of the process with nothing kept from before: imports, kernels that are compiled and the
written plan are included.

``mixed``: six clusters of two or three types, with a transformer of 8 and one of 70 billion
parameters each. The plan of ``auto`` against three others, whose steps are played in the same way:

* *slowest*: the best regular layout that takes every device for one of the slowest type and the
  least memory. A stage of it runs as fast as the slowest type that is really in it.
* *one type*: the best regular layout on the devices of one type.
* *device map*: what ``device_map="auto"`` of Hugging Face's accelerate does (its page "Loading big
  models into memory", and ``infer_auto_device_map``): "balanced" memory per device is the model's
  size over their number, capped by what a device has; layers go in order to the first device with
  room; one microbatch is on the way at a time, so that one device computes while all others wait.

The Program of ``auto``'s plan is checked, with its memory; where that fails, it counts as none.
The first two are searched as wide as ``auto`` searches equal devices, and as many of their layouts
are played. "-" = nothing fits.
"""

import math
import os
import resource
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
from _harness import ROOT, Measured, run_groups

import partita
from partita.catalogue.catalogue import load_catalogue
from partita.catalogue.parse import parse_cluster
from partita.core.cluster import Cluster
from partita.cost.links import fabric_of
from partita.cost.tables import GPU_RESERVE
from partita.errors import InfeasibleError
from partita.transformer.layout import Layout
from partita.transformer.mixed import Group, groups_of
from partita.transformer.named import named_shapes
from partita.transformer.pipelines import (
    Pipeline,
    Place,
    as_number,
    place_passes,
    played_s,
    regular_pipeline,
)
from partita.transformer.search import Task, price_all, search

HOSTS = (16, 64, 256, 1024, 2048)
"""Hosts of eight devices; as many sequences as a run of that size has, 512 or more."""
LIMIT_S = {256: 15.0, 2048: 60.0}
MOST_GROWTH = 1.3
"""Growth of CPU seconds from a size to the next over that of the devices, at most."""

CLUSTERS = (
    ("2xdgx-h100+2xdgx-a100", None),
    ("dgx-h100+8xl40s", None),
    ("2xdgx-a100+2xdgx-a100-40gb", None),
    ("2xdgx-h100+2xdgx-a100", "rack=100Gbit/s"),
    ("dgx-h200+dgx-a100", None),
    ("2xdgx-h200+2xdgx-h100+4xdgx-a100", None),
)
MODELS = ("llama3-8b", "llama3-70b")
BATCH, LENGTH = 128, 4096
PLAYED = 24
MEDIAN_GAIN = 0.10
NOT_WORSE = 1e-9


def main() -> None:
    """Run the groups that are asked for."""
    run_groups(__doc__ or "", ("scale", "mixed"), measure)


def measure(groups: Sequence[str]) -> Measured:
    """Return the figures of groups, and what is missed."""
    figures: dict[str, object] = {}
    missed: list[str] = []
    for name, run in (("scale", scale), ("mixed", mixed)):
        if name in groups:
            found, lines = run()
            figures.update(found)
            missed += lines
    return figures, missed


def scale() -> Measured:
    """Plan on more and more devices, each in a process of its own."""
    spent = {hosts: _plan_cpu_s(hosts) for hosts in HOSTS}
    missed = [
        f"{8 * hosts} devices take {spent[hosts]:.1f} CPU s; expected at most {most:g}"
        for hosts, most in LIMIT_S.items()
        if spent[hosts] > most
    ]
    for few, many in pairwise(HOSTS):
        growth = spent[many] / spent[few] / (many / few)
        if growth > MOST_GROWTH:
            missed.append(f"from {8 * few} to {8 * many} devices CPU time grows {growth:.2f} times")
    for hosts, seconds in spent.items():
        print(f"{8 * hosts:6} devices: {seconds:5.1f} CPU s", flush=True)
    return {f"cpu_s_{8 * hosts}": seconds for hosts, seconds in spent.items()}, missed


def _plan_cpu_s(hosts: int) -> float:
    with tempfile.TemporaryDirectory() as folder:
        words = ["plan", "llama3-405b", "--cluster", f"{hosts}xdgx-h100"]
        words += ["--sequence-length", "8192", "--batch-size", str(max(512, hosts))]
        words += ["--output", str(Path(folder) / "large.plan.json")]
        environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "NUMBA_CACHE_DIR": folder}
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run(
            [sys.executable, "-m", "partita.cli.main", *words],
            check=True,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=environment,
        )
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def mixed() -> Measured:
    """Plan on mixed clusters, and compare."""
    gains: dict[str, list[float]] = {"slowest": [], "one_type": [], "both": [], "device_map": []}
    missed, alone, none = [], 0, 0
    for shorthand, bandwidth in CLUSTERS:
        cluster = parse_cluster(shorthand, _no_file, load_catalogue(), bandwidth=bandwidth)
        name = shorthand + (f" {bandwidth}" if bandwidth else "")
        for model in MODELS:
            steps = _steps(cluster, model)
            print(f"{name:44} {model:10} " + " ".join(map(_words, steps.items())), flush=True)
            best, rivals = steps["auto"], min(steps["slowest"], steps["one_type"])
            if best > rivals * (1 + NOT_WORSE):
                missed.append(f"{model} on {name}: {best:.3f} s; another plan has {rivals:.3f}")
            none += math.isinf(best) and math.isinf(rivals)
            alone += math.isfinite(best) and math.isinf(rivals)
            for rival in ("slowest", "one_type", "device_map"):
                if math.isfinite(best) and math.isfinite(steps[rival]):
                    gains[rival].append(steps[rival] / best - 1)
            if math.isfinite(best) and math.isfinite(rivals):
                gains["both"].append(rivals / best - 1)
    figures: dict[str, object] = {
        f"median_gain_{rival}": statistics.median(found) for rival, found in gains.items() if found
    }
    for rival in ("slowest", "one_type"):
        if statistics.median(gains[rival]) < MEDIAN_GAIN:
            gain = statistics.median(gains[rival])
            missed.append(f"median gain over {rival} is {gain:.1%}; expected {MEDIAN_GAIN:.0%}")
    return {**figures, "only_auto_fits": alone, "nothing_fits": none}, missed


def _no_file(path: str) -> str:
    raise FileNotFoundError(path)


def _words(entry: tuple[str, float]) -> str:
    name, seconds = entry
    return f"{name} {seconds:8.3f} s" if math.isfinite(seconds) else f"{name}        -  "


def _steps(cluster: Cluster, model: str) -> dict[str, float]:
    """Return seconds of a step by who planned it; infinite = does not fit."""
    try:
        found = partita.plan(model, cluster=cluster, batch_size=BATCH, sequence_length=LENGTH)
        # Refuses a plan whose Program is not complete, or needs more memory than there is.
        partita.check(found.solution.problem, found.solution.plan)
        best = float(found.best.step_s)
    except InfeasibleError:
        best = math.inf
    groups = groups_of(cluster, 1.0 - GPU_RESERVE)
    return {
        "auto": best,
        "slowest": _slowest_s(cluster, model, groups),
        "one_type": min(_alone_s(cluster, _task(model, group), group) for group in groups),
        "device_map": _device_map_s(cluster, model, groups),
    }


def _task(model: str, group: Group) -> Task:
    return Task(
        shape=named_shapes()[model].shape,
        devices=len(group),
        machine=group.machine,
        batch=BATCH,
        sequence_length=LENGTH,
        limit_bytes=group.limit_bytes,
    )


def _layouts(task: Task) -> list[Layout]:
    """Return the layouts that fit, the quickest by the closed form."""
    priced = search(task)
    return [priced.layouts[row] for row in np.flatnonzero(priced.fits)[:PLAYED].tolist()]


def _alone_s(cluster: Cluster, task: Task, group: Group) -> float:
    lanes = (regular_pipeline(task, layout, cluster, group.devices) for layout in _layouts(task))
    return min((played_s([lane]) for lane in lanes), default=math.inf)


def _slowest_s(cluster: Cluster, model: str, groups: Sequence[Group]) -> float:
    by_speed = sorted(groups, key=_speed)
    fabric = fabric_of(cluster)
    task = replace(
        _task(model, by_speed[0]),
        devices=len(cluster),
        machine=by_speed[0].machine._replace(fabric=fabric),
        limit_bytes=min(group.limit_bytes for group in groups),
    )
    best = math.inf
    for layout in _layouts(task):
        lane = regular_pipeline(task, layout, cluster)
        best = min(best, played_s([replace(lane, places=_real(lane, by_speed, fabric))]))
    return best


def _speed(group: Group) -> tuple[float, float]:
    return group.machine.peak_flop_per_s, group.machine.bytes_per_s


def _real(lane: Pipeline, by_speed: Sequence[Group], fabric: object) -> tuple[Place, ...]:
    """Return the places of a pipeline with the slowest type that is in each."""
    places = []
    for place in lane.places:
        used = {device for group in place.devices for device in group}
        slowest = next(group for group in by_speed if used & set(group.devices.tolist()))
        machine = slowest.machine._replace(fabric=fabric)  # type: ignore[arg-type]
        places.append(replace(place, machine=machine, device_type=slowest.device_type))
    return tuple(places)


def _device_map_s(cluster: Cluster, model: str, groups: Sequence[Group]) -> float:
    """Return a step of layers by memory in device order, one device computing at a time."""
    fabric = fabric_of(cluster)
    of_device = {device: group for group in groups for device in group.devices.tolist()}
    best = math.inf
    for again in ((), ("full",)):
        layout = Layout(pp=len(cluster), recompute=again)
        task = replace(_task(model, groups[0]), devices=len(cluster))
        layers, seconds = task.shape.layers, 0.0
        first = replace(task, shape=replace(task.shape, layers=1))
        # The whole model on one device, by layers: what it is made of, with one microbatch of
        # activations, and what is there beside them.
        one, two = (
            float(
                price_all(
                    replace(first, shape=replace(task.shape, layers=count)),
                    [Layout(recompute=again)],
                ).total_bytes[0]
            )
            for count in (1, 2)
        )
        each, ends = two - one, 2 * one - two
        even = (layers * each + ends) / len(cluster) + each
        left = layers
        for device in range(len(cluster)):
            group = of_device[device]
            room = min(group.limit_bytes, even + ends) - ends
            held = min(left, max(0, int(room / each)))
            left -= held
            place = Place(
                layout=layout,
                devices=((device,),),
                machine=group.machine._replace(fabric=fabric),
                device_type=group.device_type,
            )
            of = place_passes(task, place)
            turn_s = held * of.block_s + 2 * of.send_s
            if device in (0, len(cluster) - 1):
                turn_s += of.head_s if device else of.embedding_s
            seconds += as_number(BATCH * turn_s + of.update_s / len(cluster))
        if left == 0:
            best = min(best, float(seconds))
    return best


if __name__ == "__main__":
    main()
