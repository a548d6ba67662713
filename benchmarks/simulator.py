"""The event simulator against simpy, and its growth.

One 1F1B pipeline, 64 devices and 512 microbatches, every transfer occupying its link, in our
simulator and written plainly with simpy (a Resource for each link direction): same makespan, ratio
of CPU seconds on a warm call. Then the growth from 250,000 to 2 million instructions.

A Program of 250,000 instructions has columns of 14 MB, which some processors hold in a cache;
larger ones are read from memory. So that a miss says whether the code or the cache is its reason,
the growth of calls is shown with emptied caches too; the limit holds for calls as users make them.
"""

import resource
from dataclasses import replace
from itertools import pairwise

import numpy as np
import simpy
from _harness import cpu_s, run_benchmark

from partita.core.cluster import Cluster, Device, LinkMatrix
from partita.core.graph import EdgeTable, Graph, OpCosts, OpTable, TensorTable
from partita.core.plan import Plan, Stage, equal_microbatches
from partita.core.problem import Problem, Schedule
from partita.core.program import Program
from partita.cost.durations import instruction_seconds
from partita.program.lower import lower
from partita.program.simulate import play

FORWARD_S, BACKWARD_S, TRANSFER_S = 1.0, 2.0, 0.01
WANTED_RATIO, WANTED_GROWTH, WANTED_MB = 100.0, 2.3, 2000.0
KINDS = ("lower", "first", "warm", "cold")
SWEPT_BYTES = 2**28
"""More than any cache of the processors at hand."""


def pipeline(stages: int, microbatches: int) -> tuple[Problem, Plan]:
    """Return a chain of equal stages, one per device, with one link for each ordered pair."""
    names = [f"op{s}" for s in range(stages)]
    graph = Graph(
        ops=OpTable(names=names),
        costs=(
            OpCosts(forward_s=np.full(stages, FORWARD_S), backward_s=np.full(stages, BACKWARD_S)),
        ),
        tensors=TensorTable(
            names=[f"t{s}" for s in range(stages)], producer=np.arange(stages), bytes=1e6
        ),
        edges=EdgeTable(tensor=np.arange(stages - 1), reader=np.arange(1, stages)),
        loss=stages - 1,
    )
    cluster = Cluster(
        devices=[Device(name=f"d{s}") for s in range(stages)],
        matrix=LinkMatrix(bandwidth_bytes_per_s=np.full(stages * stages, 1e6 / TRANSFER_S)),
    )
    plan = Plan(
        fingerprint=graph.fingerprint,
        devices=cluster.device_names,
        stage_of=np.arange(stages),
        stages=tuple(Stage(devices=((s,),)) for s in range(stages)),
        schedule=Schedule.ONE_F_ONE_B,
        microbatch_sizes=equal_microbatches(microbatches, 1),
    )
    return Problem(graph=graph, cluster=cluster), plan


def simpy_makespan(stages: int, microbatches: int) -> float:
    """Return the makespan of the same pipeline, written plainly with simpy."""
    env = simpy.Environment()
    down = [simpy.Resource(env, capacity=1) for _ in range(stages - 1)]
    up = [simpy.Resource(env, capacity=1) for _ in range(stages - 1)]
    activation = [[env.event() for _ in range(microbatches)] for _ in range(stages)]
    gradient = [[env.event() for _ in range(microbatches)] for _ in range(stages)]

    def transfer(link, arrived):
        with link.request() as turn:
            yield turn
            yield env.timeout(TRANSFER_S)
        arrived.succeed()

    def device(stage):
        in_flight = min(stages - stage, microbatches)
        order = [("F", m) for m in range(in_flight)]
        for m in range(microbatches):
            order.append(("B", m))
            if m + in_flight < microbatches:
                order.append(("F", m + in_flight))
        for kind, m in order:
            if kind == "F":
                if stage > 0:
                    yield activation[stage][m]
                yield env.timeout(FORWARD_S)
                if stage + 1 < stages:
                    env.process(transfer(down[stage], activation[stage + 1][m]))
            else:
                if stage + 1 < stages:
                    yield gradient[stage][m]
                yield env.timeout(BACKWARD_S)
                if stage > 0:
                    env.process(transfer(up[stage - 1], gradient[stage - 1][m]))

    for stage in range(stages):
        env.process(device(stage))
    env.run()
    return env.now


def against_simpy(missed: list[str]) -> dict:
    """Compare one warm call with simpy, in turns so that both see the same machine."""
    problem, plan = pipeline(64, 512)
    program = lower(problem, plan)
    seconds = instruction_seconds(problem, plan, program)
    ours = play(program, problem.cluster, seconds).makespan_s
    theirs = simpy_makespan(64, 512)
    ours_s, simpy_s = float("inf"), float("inf")
    for _ in range(4):
        simpy_s = min(simpy_s, cpu_s(lambda: simpy_makespan(64, 512)))
        ours_s = min(ours_s, cpu_s(lambda: play(program, problem.cluster, seconds), repeats=5))
    fresh_s = cpu_s(lambda: play(lower(problem, plan), problem.cluster, seconds), repeats=3)
    ratio = simpy_s / ours_s
    print(f"{len(program)} instructions, makespan {ours:.6f} s, simpy {theirs:.6f} s")
    print(
        f"warm call {1e3 * ours_s:.2f} ms of CPU, simpy {1e3 * simpy_s:.0f} ms: {ratio:.0f} times"
    )
    print(f"lowering and matching included: {simpy_s / fresh_s:.0f} times")
    if abs(ours / theirs - 1) > 1e-9:
        missed.append(f"makespan {ours} differs from simpy's {theirs}")
    if ratio < WANTED_RATIO:
        missed.append(f"{ratio:.0f} times faster than simpy, wanted {WANTED_RATIO:.0f}")
    return {"instructions": len(program), "ratio": ratio, "ratio_with_lowering": simpy_s / fresh_s}


def first_call_s(program: Program, problem: Problem, seconds: np.ndarray) -> float:
    """Return the CPU seconds of a call on a Program that nothing is kept with yet."""
    fresh = replace(program)
    return cpu_s(lambda: play(fresh, problem.cluster, seconds))


def cold_call_s(
    program: Program, problem: Problem, seconds: np.ndarray, swept: np.ndarray
) -> float:
    """Return the CPU seconds of a warm call whose columns are in no cache."""
    swept += 1
    return cpu_s(lambda: play(program, problem.cluster, seconds))


def growth(missed: list[str]) -> dict:
    """Measure lowering, a first call and a warm call from 250,000 to 2 million instructions.

    Both calls of the simulator are held to the limit at every doubling; lowering, and a call with
    emptied caches, are shown beside.
    """
    swept = np.zeros(SWEPT_BYTES, dtype=np.int8)
    sizes = (657, 1314, 2628, 5256)
    best: dict[tuple[str, int], float] = {}
    counts = {}
    for _ in range(3):  # in turns, so that all sizes see the same machine
        for size in sizes:
            problem, plan = pipeline(64, size)
            program = lower(problem, plan)
            seconds = instruction_seconds(problem, plan, program)
            counts[size] = len(program)
            for what, spent in (
                ("lower", cpu_s(lambda: lower(problem, plan), repeats=2)),  # noqa: B023
                ("first", min(first_call_s(program, problem, seconds) for _ in range(4))),
                ("warm", cpu_s(lambda: play(program, problem.cluster, seconds), repeats=5)),  # noqa: B023
                ("cold", min(cold_call_s(program, problem, seconds, swept) for _ in range(3))),
            ):
                best[what, size] = min(spent, best.get((what, size), spent))
    for size in sizes:
        shown = ", ".join(f"{what} {1e3 * best[what, size]:.1f} ms" for what in KINDS)
        print(f"{counts[size]:9,} instructions: {shown}")
    worst = {what: max(best[what, b] / best[what, a] for a, b in pairwise(sizes)) for what in KINDS}
    least, most = (1e9 * best["cold", size] / counts[size] for size in (sizes[0], sizes[-1]))
    cold = (
        f"with emptied caches it grows {worst['cold']:.2f} times at most, "
        f"from {least:.0f} to {most:.0f} ns per instruction"
    )
    print(f"a warm call grows {worst['warm']:.2f} times at a doubling at most; {cold}")
    missed += [
        f"a {what} call grows {worst[what]:.2f} times at a doubling, limit {WANTED_GROWTH}; {cold}"
        for what in ("first", "warm")
        if worst[what] > WANTED_GROWTH
    ]
    peak_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1000
    print(f"peak memory {peak_mb:.0f} MB")
    if peak_mb > WANTED_MB:
        missed.append(f"{peak_mb:.0f} MB, limit {WANTED_MB:.0f}")
    return {
        "most_instructions": counts[sizes[-1]],
        **{f"worst_doubling_{what}": worst[what] for what in KINDS},
        "peak_mb": peak_mb,
    }


def measure() -> tuple[dict, list[str]]:
    """Run both parts."""
    missed: list[str] = []
    return {**against_simpy(missed), **growth(missed)}, missed


if __name__ == "__main__":
    run_benchmark(__doc__ or "", measure)
