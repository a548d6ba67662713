"""Training scripts of plain torch against the same scripts ported to ``partita.parallelize``.

A GPT on characters and a network on images, in float64: the differences of the scripts are printed
and have at most ten new lines; all losses and the validation of the port equal those of plain
torch, in one process and in two ranks of a plan, to 1e-9. The port of the image script on two
replicas is timed against torch's DistributedDataParallel, that of the GPT on a pipeline of two
against torch's Schedule1F1B over the same blocks, on the same two cores, in turns.
"""

import contextlib
import difflib
import importlib.util
import io
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from _harness import ROOT, run_benchmark
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn.parallel import DistributedDataParallel

import partita
from partita.capture.origin import Captures, ModelOrigin
from partita.capture.setting import Example
from partita.capture.sources import ModelSource
from partita.core.graph import Graph
from partita.core.plan import Plan, Stage
from partita.core.problem import Metric, Objective, Problem, Schedule
from partita.core.solution import Solution
from partita.ranks.pool import RankPool
from partita.ranks.status import StatusBoard
from partita.runtime.job import Job, JobDirectory
from partita.runtime.training.parallelize import ScriptRank, being_rank, seed_alike
from partita.testing.builders import flat_cluster

SCRIPTS = ROOT / "examples" / "training"
STEPS, MOST_LINES, LIMIT = 100, 10, 1e-9
TIMED_STEPS, ROUNDS = 30, 5
PLANS = {
    "gpt": {"pipeline of 2": [[0], [1]]},
    "images": {"2 replicas": [[0, 1]], "pipeline of 2": [[0], [1]]},
}
MICROBATCHES = {"gpt": (2, 2, 2, 2), "images": (16, 16)}


def load(name: str) -> ModuleType:
    """Return a script as a module."""
    path = SCRIPTS / f"{name}.py"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.argv = [str(path), str(STEPS)]
    spec.loader.exec_module(module)
    return module


def numbers(script: ModuleType) -> list[float]:
    """Return what a script prints: losses, and the validation."""
    text = io.StringIO()
    with contextlib.redirect_stdout(text):
        script.main()
    return [float(line.split()[1]) for line in text.getvalue().splitlines()]


def solution(name: str, groups: list[list[int]]) -> Solution:
    """Return a plan for the model of a script: its ops in equal shares, stage by stage."""
    model, (inputs, labels), loss = load(f"{name}_ported").build()
    sizes = MICROBATCHES[name]
    example = Example(args=(inputs[: sizes[0]],), labels=labels[: sizes[0]])
    source = ModelSource(name=name, model=model, example=lambda *_: example, loss=loss)
    origin = ModelOrigin(text=name)
    graph = origin.recorded_in(Captures(source, origin).at(sizes[0]).graph)
    cluster = flat_cluster(1 + max(max(group) for group in groups))
    plan = Plan(
        fingerprint=graph.fingerprint,
        devices=tuple(device.name for device in cluster.devices),
        stage_of=_cut(graph, len(groups)),
        stages=tuple(Stage(devices=tuple((d,) for d in group)) for group in groups),
        schedule=Schedule.ONE_F_ONE_B,
        microbatch_sizes=np.array(sizes),
    )
    problem = Problem(graph=graph, cluster=cluster, objective=Objective())
    return Solution(problem=problem, plan=plan, metric=Metric.THROUGHPUT, value=1.0, unit="s")


def _cut(graph: Graph, parts: int) -> np.ndarray:
    """Return equal shares of the ops; of blocks in a list where there are some, as people cut."""
    blocks = [re.match(r"blocks\.(\d+)", name) for name in graph.ops.names]
    last = max((int(found[1]) for found in blocks if found), default=-1)
    if last < 0:
        return np.arange(len(graph)) * parts // len(graph)
    first = [next(i for i, b in enumerate(blocks) if b and int(b[1]) == k) for k in range(last + 1)]
    begins = [first[part * (last + 1) // parts] for part in range(1, parts)]
    return np.searchsorted(begins, np.arange(len(graph)), side="right")


def in_ranks(planned: Solution, work: Callable[[], Any]) -> list[Any]:
    """Do something in forked ranks of a plan."""
    world = len(planned.plan.devices)
    board, job = StatusBoard(world), Job(script=("script.py",), stall_limit_s=120)

    with tempfile.TemporaryDirectory() as folder:
        files = JobDirectory(Path(folder))
        files.prepare()

        def main(member: Any, _: object) -> Any:
            torch.set_num_threads(1)
            seed_alike(member, 0)
            # News of steps go where they go in ``partita run``: into a file of the rank.
            member = replace(member, notify=files.news_writer(member.rank))
            with being_rank(ScriptRank(member=member, board=board, solution=planned, job=job)):
                return work()

        with RankPool(world, main, limit_s=120, board=board) as pool:
            return pool.call(None)


def difference(name: str) -> tuple[list[str], int]:
    """Return how a port differs from its script, and its new lines."""
    texts = [
        (SCRIPTS / f"{name}_{kind}.py").read_text().splitlines() for kind in ("plain", "ported")
    ]
    lines = list(difflib.unified_diff(*texts, "plain", "ported", n=0, lineterm=""))
    new = [line for line in lines if line.startswith("+") and not line.startswith(("+++", '+"""'))]
    return lines, len([line for line in new if line[1:].strip()])


def timed(step: Callable[[Any], object], batch: Any) -> float:
    """Return the seconds of some steps."""
    dist.barrier()
    begin = time.perf_counter()
    for _ in range(TIMED_STEPS):
        step(batch)
    return time.perf_counter() - begin


def against_ddp() -> list[float]:
    """Return DDP's time relative to the port's, in turns in the same ranks."""
    script = load("images_ported")

    def optimizer(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)

    def work() -> list[float]:
        images, labels = script.dataset(1, script.BATCH).tensors
        trainer = partita.parallelize(script.build()[0], script.loss_fn, optimizer=optimizer)
        model = DistributedDataParallel(script.build()[0])
        stepped = optimizer(model.parameters())
        half, rank = script.BATCH // 2, dist.get_rank()
        mine = slice(rank * half, (rank + 1) * half)

        def ddp(batch: Any) -> float:
            stepped.zero_grad()
            loss = script.loss_fn(model(batch[0][mine]), batch[1][mine])
            loss.backward()
            stepped.step()
            return loss.item()

        batch = (images, labels)
        trainer.step(batch)
        ddp(batch)
        return [timed(ddp, batch) / timed(trainer.step, batch) for _ in range(ROUNDS)]

    return in_ranks(solution("images", [[0, 1]]), work)[0]


class Half(nn.Module):
    """One of two stages of the GPT; the head has a copy of the embedding that it is tied to."""

    def __init__(self, model: Any, rank: int) -> None:
        super().__init__()
        middle = len(model.blocks) // 2
        self.blocks = model.blocks[middle:] if rank else model.blocks[:middle]
        self.tokens = None if rank else model.tokens
        self.places = None if rank else model.places
        self.norm = model.norm if rank else None
        self.head = model.head if rank else None
        self.tied = model.head.weight

    def forward(self, x: Tensor) -> Tensor:
        """Run the stage."""
        if self.tokens is not None:
            x = self.tokens(x) + self.places
        for block in self.blocks:
            x = block(x)
        return x if self.head is None else self.head(self.norm(x))


def against_1f1b() -> list[float]:
    """Return the time of torch's 1F1B relative to the port's, in turns in the same ranks."""
    script = load("gpt_ported")

    def optimizer(groups: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(groups, lr=3e-3, weight_decay=0.1)

    def work() -> list[float]:
        tokens, labels = next(script.batches(1, 1))
        trainer = partita.parallelize(
            script.build()[0], script.loss_fn, optimizer=optimizer, clip_norm=1.0
        )
        rank = dist.get_rank()
        half = Half(script.build()[0], rank)
        stage = PipelineStage(half, rank, 2, torch.device("cpu"))
        schedule = Schedule1F1B(stage, len(MICROBATCHES["gpt"]), loss_fn=script.loss_fn)
        stepped = optimizer(half.parameters())

        def torchs(_: Any) -> None:
            stepped.zero_grad()
            if rank:
                schedule.step(target=labels)
            else:
                schedule.step(tokens)
            # What the script says, by hand: tied weights, and the norm over both stages.
            dist.all_reduce(half.tied.grad)
            gradients = [p.grad for p in half.parameters()]
            norms = torch.stack(
                [g.square().sum() for g in gradients if rank or g is not half.tied.grad]
            )
            square = norms.sum()
            dist.all_reduce(square)
            nn.utils.clip_grads_with_norm_(half.parameters(), 1.0, square.sqrt())
            stepped.step()

        batch = (tokens, labels)
        trainer.step(batch)
        torchs(batch)
        return [timed(torchs, batch) / timed(trainer.step, batch) for _ in range(ROUNDS)]

    return in_ranks(solution("gpt", [[0], [1]]), work)[0]


def measure() -> tuple[dict, list[str]]:
    """Compare the scripts."""
    torch.set_num_threads(1)
    figures: dict[str, Any] = {}
    missed: list[str] = []
    for name, plans in PLANS.items():
        lines, new = difference(name)
        print(*lines, sep="\n")
        if new > MOST_LINES:
            missed.append(f"{name}: {new} new lines")
        wanted = numbers(load(f"{name}_plain"))
        ported = load(f"{name}_ported")
        found = {"one process": numbers(ported)}
        for kind, groups in plans.items():
            found[kind] = in_ranks(solution(name, groups), partial(numbers, ported))[0]
        for kind, values in found.items():
            apart = max(abs(a - b) / abs(b) for a, b in zip(values, wanted, strict=True))
            print(f"{name}, {kind}: {len(values)} numbers, largest relative difference {apart:.1e}")
            figures[f"{name} {kind}"] = apart
            if len(values) != STEPS + 1 or apart > LIMIT:
                missed.append(f"{name}, {kind}: {apart:.1e}")
        figures[f"{name} lines"] = new
        print(f"{name}: {new} new lines, loss {wanted[0]:.4f} to {wanted[-2]:.4f}")
    for what, other, ratios in (
        ("images", "DDP", against_ddp()),
        ("gpt", "torch's 1F1B", against_1f1b()),
    ):
        ratio = figures[f"{other} / port"] = statistics.median(ratios)
        print(f"{what} on 2 ranks: {other} takes {ratio:.3f} times the port's time")
        if ratio < 1:
            missed.append(f"{what}: {ratio:.3f} of the speed of {other}")
    return figures, missed


if __name__ == "__main__":
    run_benchmark(__doc__ or "", measure)
