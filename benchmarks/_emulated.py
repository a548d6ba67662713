"""Emulated runs for the benchmarks: devices that sleep, over the loopback or an emulated link."""

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import PrefixStore
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from partita.core.cluster import Cluster, Device, Host, Level
from partita.core.graph import DeviceKind
from partita.core.plan import Plan
from partita.core.problem import Problem, Schedule
from partita.processes import run_soon
from partita.profiler.calibrate.calibrate import calibrate
from partita.profiler.calibrate.ranks import Rank, measure
from partita.profiler.calibrate.records import (
    MeasureOptions,
    read_measurement,
    write_measurement,
)
from partita.ranks.member import Member
from partita.ranks.pool import RankPool
from partita.runtime.emulation.link import Namespace, emulated_link, enter_namespace
from partita.runtime.emulation.rehearsal import (
    Emulation,
    emulate_forked,
    emulated_workload,
    predicted,
)
from partita.testing.builders import Figures, Values, chain, host_cluster, pipeline

Ends = tuple[Namespace, Namespace]
Move = Callable[[Member], Member]
WARM_UP = 2
_PRIORITY = -20


@contextmanager
def undisturbed() -> Iterator[None]:
    """Put this process and its children before others, as far as it is allowed.

    Linux may share processors among sessions first, and looks at nice values inside each only.
    """
    session = Path("/proc/self/autogroup")
    before = os.getpriority(os.PRIO_PROCESS, 0)
    try:
        with suppress(OSError):
            session.write_text(str(_PRIORITY), encoding="ascii")
            os.setpriority(os.PRIO_PROCESS, 0, _PRIORITY)
        yield
    finally:
        with suppress(OSError):
            session.write_text(str(before), encoding="ascii")
            os.setpriority(os.PRIO_PROCESS, 0, before)


def mover(ends: Ends | None) -> Move:
    """Return what takes a rank to its end of a link: the first half of the ranks to the first end.

    The store stays where it is; what ranks send one another goes over the link.
    """

    def move(member: Member) -> Member:
        dist.destroy_process_group()
        if ends is not None:
            end = ends[2 * member.rank // member.world]
            enter_namespace(end.name)
            os.environ["GLOO_SOCKET_IFNAME"] = end.interface
        member = replace(member, store=PrefixStore("moved", member.store), groups={})
        member.join()
        return member

    return move


def calibrated(ranks: int, ends: Ends | None, *, budget_s: float = 8.0) -> Cluster:
    """Return the cluster that ranks measure, over a link or over the loopback."""
    options = MeasureOptions(budget_s=budget_s, compute_s=0.05)

    def main(member: Member, _: object) -> object:
        run_soon()
        moved = mover(ends)(member)
        dist.destroy_process_group()
        rank = Rank(
            rank=member.rank,
            num_ranks=member.world,
            store=PrefixStore("calibrate", moved.store),
            device=torch.device("cpu"),
        )
        measured = measure(rank, options)
        return None if measured is None else write_measurement(measured)

    with RankPool(ranks, main, limit_s=60.0) as pool:
        return calibrate(read_measurement(pool.call(None)[0])).cluster


def widened(cluster: Cluster, num_devices: int) -> Cluster:
    """Return a cluster like a measured one with more devices on each of its hosts."""
    hosts = len(cluster.hosts)
    host_of = np.repeat(np.arange(hosts, dtype=np.int32), num_devices // hosts)
    group_of = [host_of, np.zeros(num_devices, dtype=np.int32)][-len(cluster.levels) :]
    return Cluster(
        name=cluster.name,
        hosts=tuple(Host(name=host.name) for host in cluster.hosts),
        devices=tuple(
            Device(name=f"d{d}", host=int(host_of[d]), kind=DeviceKind.CPU)
            for d in range(num_devices)
        ),
        levels=tuple(
            Level(
                name=level.name,
                group_of=groups,
                bandwidth_bytes_per_s=level.bandwidth_bytes_per_s,
                latency_s=level.latency_s,
                port_per_device=level.port_per_device,
            )
            for level, groups in zip(cluster.levels, group_of, strict=True)
        ),
    )


def figures_of(
    tensor_bytes: Values, *, forward_s: Values = 0.02, parameter_bytes: Values = 100_000
) -> Figures:
    """Return costs whose backward takes twice as long as forward, half of it for the inputs."""
    forward = np.asarray(forward_s)
    return Figures(
        forward_s=forward,
        backward_s=2 * forward,
        backward_input_s=forward,
        tensor_bytes=tensor_bytes,
        parameter_bytes=parameter_bytes,
    )


def step_times(
    problem: Problem, plan: Plan, *, steps: int = 5, ends: Ends | None = None
) -> tuple[Sequence[float], float]:
    """Return the steps of an emulated run, without the first ones, and the predicted one."""
    emulation = Emulation(steps=steps + WARM_UP, cap_bytes=2**30)
    workload = emulated_workload(problem, plan, emulation)
    run = emulate_forked(workload, limit_s=60.0, move=mover(ends))
    return run.step_s[WARM_UP:], predicted(workload).makespan_s


def zero_bubble_ratio(repeats: int = 3) -> tuple[float, float]:
    """Return how much faster zero-bubble is than 1F1B on 4 emulated ranks: measured, predicted.

    Eight microbatches; the three parts of a stage take 20 ms each. The two run by turns.
    """
    graph = chain(4, figures_of(100_000))
    cluster = widened(calibrated(2, None, budget_s=2.0), 4)
    problem = Problem(graph=graph, cluster=cluster)
    plans = [
        pipeline(graph, cluster, range(4), schedule=schedule, microbatches=8)
        for schedule in (Schedule.ONE_F_ONE_B, Schedule.ZERO_BUBBLE)
    ]
    ratios, foretold = [], 0.0
    for _ in range(repeats):
        (plain, plain_s), (better, better_s) = (step_times(problem, plan) for plan in plans)
        ratios.append(median(plain) / median(better))
        foretold = plain_s / better_s
    return median(ratios), foretold


@dataclass(frozen=True)
class Sleeping:
    """What each of two stages takes for a microbatch, and the bytes between them."""

    forward_s: float = 0.02
    backward_s: float = 0.04
    tensor_bytes: int = 2_000_000
    microbatches: int = 8


class _Sleep(torch.autograd.Function):
    """Takes its time, forwards and backwards, and computes nothing."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, work: Sleeping, outputs: int) -> Tensor:
        ctx.work, ctx.like = work, (x, weight)
        time.sleep(work.forward_s)
        return torch.zeros(1, outputs)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Tensor | None, ...]:
        time.sleep(ctx.work.backward_s)
        return (*map(torch.zeros_like, ctx.like), None, None)


class _SleepingStage(nn.Module):
    def __init__(self, work: Sleeping, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self.work, self.outputs = work, outputs

    def forward(self, x: Tensor) -> Tensor:
        return _Sleep.apply(x, self.weight, self.work, self.outputs)


def torch_sleeping_s(work: Sleeping, steps: int, ends: Ends | None) -> list[float]:
    """Return the steps of torch's 1F1B over two ranks that sleep, without the first ones."""

    def main(member: Member, _: object) -> list[tuple[float, float]]:
        moved = mover(ends)(member)
        width = work.tensor_bytes // 4
        rank = moved.rank
        stage = PipelineStage(
            _SleepingStage(work, 1 if rank else width), rank, 2, torch.device("cpu")
        )
        schedule = Schedule1F1B(stage, work.microbatches, loss_fn=lambda output, _: output.sum())
        inputs, target = torch.zeros(work.microbatches, 1), torch.zeros(work.microbatches, 1)
        times = []
        for _ in range(WARM_UP + steps):
            dist.barrier()
            begin = time.perf_counter()
            if rank:
                schedule.step(target=target)
            else:
                schedule.step(inputs)
            times.append((begin, time.perf_counter()))
        return times[WARM_UP:]

    with RankPool(2, main, limit_s=60.0) as pool:
        spans = zip(*pool.call(None), strict=True)
        return [max(e for _, e in span) - min(b for b, _ in span) for span in spans]


def overlap_ratio(rate_bytes_per_s: float, repeats: int = 3) -> tuple[float, float, float]:
    """Return torch's step over ours on two sleeping ranks over a slow link, and both in seconds.

    The two run by turns; what counts are medians.
    """
    work = Sleeping()
    cluster = host_cluster(2, 1, inside_bytes_per_s=1e10, between_bytes_per_s=rate_bytes_per_s)
    graph = chain(2, figures_of([work.tensor_bytes, 0], forward_s=work.forward_s))
    plan = pipeline(graph, cluster, range(2), microbatches=work.microbatches)
    problem = Problem(graph=graph, cluster=cluster)
    ours: list[float] = []
    theirs: list[float] = []
    with emulated_link(rate_bytes_per_s) as ends:
        for _ in range(repeats):
            theirs += torch_sleeping_s(work, 5, ends)
            ours += step_times(problem, plan, ends=ends)[0]
    return median(theirs) / median(ours), median(ours), median(theirs)
