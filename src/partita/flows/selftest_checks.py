"""The checks of ``partita selftest``: each returns what it saw, or raises what went wrong."""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from partita.capture.origin import Captures, ModelOrigin, load_origin
from partita.capture.sources import SourceOptions
from partita.catalogue.shorthand import local_cluster
from partita.core.problem import Objective, Problem
from partita.cost.judge import evaluate
from partita.energy.devices.table import open_device
from partita.errors import UnsupportedError, WorkerError
from partita.flows.calibrate import CalibrationResult, calibrate
from partita.planners.table import get_planner
from partita.ranks.device import check_streams
from partita.ranks.setup import visible_gpus
from partita.runtime.dry_run import dry_run
from partita.runtime.executor import make_task
from partita.runtime.workload import model_workload
from partita.units import format_bytes, format_seconds, format_share

if TYPE_CHECKING:
    from partita.flows.runs.execute import Outcome

Train: TypeAlias = "Callable[..., Outcome]"
MOST_MEMORY = 1.15
"""Factor of its forecast up to which the memory of a rank is right."""
POLICIES = ("fp32", "bf16-mixed", "bf16", "fp16")
_MOST_DIFFERENCE = 0.05
"""Share by which the loss under a policy of 16 bits may differ from that in float32."""
_TINY: dict[str, Any] = {"microbatches": 4, "microbatch_size": 4, "steps": 3}
_MODELS: dict[str, dict[str, Any]] = {
    "graph-mlp": {"scale": 0.1},
    "gpt3-small": {"scale": 0.05, "sequence_length": 16, "microbatch_size": 2},
    "bert-base-uncased": {"scale": 0.05, "sequence_length": 16, "microbatch_size": 2},
    "resnet50": {"scale": 0.1, "microbatch_size": 2, "microbatches": 2},
}
_KINDS: dict[str, dict[str, Any]] = {
    "pipeline": {"pp": 2, "dp": 1},
    "replicas": {"pp": 1, "dp": 2},
    "tensor parallel": {"pp": 1, "dp": 1, "tp": 2},
    "sequence parallel": {"pp": 1, "dp": 1, "tp": 2, "option": ("sequence_parallel=true",)},
    "zero-bubble": {"pp": 2, "dp": 1, "schedule": "zero-bubble"},
    "divided parameters": {"pp": 1, "dp": 2, "zero": 3},
}


class Machine:
    """This machine, and what is tested of it."""

    def __init__(self, folder: Path, train: Train, *, devices: int, quick: bool) -> None:
        self._gpus = visible_gpus()
        self._devices, self._quick = devices, quick
        self._folder, self._given_train = folder, train
        self._links: CalibrationResult | None = None

    def facts(self) -> dict[str, Any]:
        """Return what was tested, for the report."""
        kind = f"{self._devices} GPUs with NCCL" if self._gpus else "CPU processes with gloo"
        return {"devices": kind, "quick": self._quick}

    def checks(self) -> Iterator[tuple[str, Callable[[], str]]]:
        """Yield the checks by name, in their order."""
        yield "transfers", self._transfers
        yield "collectives", self._collectives
        yield "streams and pinned copies", check_streams
        yield "overlapped and blocking transfers", self._overlap
        yield "every rank of a larger plan", self._every_rank
        names = ["graph-mlp"] if self._quick else list(_MODELS)
        for name in names:
            for kind in ("pipeline", "replicas", "tensor parallel") if self._quick else _KINDS:
                if kind == "sequence parallel" and "sequence_length" not in _MODELS[name]:
                    continue
                yield f"{name}, {kind}: equals one process", partial(self._equal, name, kind)
        yield "memory against forecast", self._memory
        for policy in POLICIES[1:] if not self._quick else POLICIES[2:3]:
            yield f"precision {policy}", partial(self._precision, policy)
        yield "energy counters and clocks", self._counters

    def _train(self, name: str = "graph-mlp", **options: Any) -> "Outcome":  # noqa: ANN401
        given = {**_TINY, **_MODELS[name], "devices": 2, **options}
        return self._given_train(self._folder, model=name, **given)

    def _measured(self) -> CalibrationResult:
        if self._links is None:
            sizes = "64,64KiB,1MiB"
            budget = 1.0 if self._quick else 10.0
            found = calibrate(devices=self._devices, sizes=sizes, budget=budget)
            assert found is not None  # this is rank 0
            self._links = found
        return self._links

    def _transfers(self) -> str:
        links = self._measured().calibration.pairs
        slowest = min((pair.fit for pair in links), key=lambda fit: fit.bandwidth_bytes_per_s)
        if not slowest.bandwidth_bytes_per_s > 0:
            raise WorkerError(f"a link has bandwidth {slowest.bandwidth_bytes_per_s}")
        rate = format_bytes(slowest.bandwidth_bytes_per_s)
        return f"{len(links)} links, the slowest {rate}/s after {format_seconds(slowest.latency_s)}"

    def _collectives(self) -> str:
        found = self._measured()
        if not found.calibration.reductions:
            raise WorkerError("no collective was measured")
        return f"{len(found.calibration.reductions)} measured by {found.measurement.backend}"

    def _overlap(self) -> str:
        """Compare runs whose messages travel beside compute and in its place."""
        runs = {way: self._train(pp=2, dp=1, transfers=way) for way in ("overlapped", "blocking")}
        losses = [run.losses for run in runs.values()]
        if losses[0] != losses[1]:
            raise WorkerError(
                f"overlapped losses {losses[0]} differ from blocking ones {losses[1]}"
            )
        times = ", ".join(f"{way} {format_seconds(run.step_s)}" for way, run in runs.items())
        return f"the same losses; a step {times}"

    def _equal(self, name: str, kind: str) -> str:
        options = {**_KINDS[kind], "dtype": "float64", "check": True}
        found = self._train(name, **options)
        if found.verdict is None:
            raise WorkerError("nothing was compared")
        return found.verdict.line()

    def _every_rank(self) -> str:
        """Walk through a plan for four devices on a process group that sends nothing."""
        origin = ModelOrigin(text="graph-mlp", options=SourceOptions(batch_size=2, scale=0.05))
        captures = Captures(load_origin(origin), origin)
        problem = Problem(
            graph=captures.at(2).graph,
            cluster=local_cluster(4),
            objective=Objective(microbatches=4, microbatch_size=2),
        )
        plan = get_planner("uniform", stages=2, replicas=2)(problem).plan
        workload = model_workload(captures, problem, plan)
        walked = dry_run(make_task(problem, plan, workload), workload)
        count = sum(sum(rank.instructions.values()) for rank in walked)
        handed = sum(rank.handed for rank in walked)
        return (
            f"{len(walked)} ranks, {count} instructions, {handed} tensors handed over: on their "
            "device, unchanged and kept until done"
        )

    def _memory(self) -> str:
        name = "graph-mlp" if self._quick else "gpt3-small"
        outcome = self._train(name, pp=2, dp=1, capture="memory")
        plan, used = outcome.solution.plan, outcome.run.memory
        forecast = evaluate(outcome.solution.problem, plan).timeline.peak_bytes.tolist()
        shares = {
            device: used[device].peak_bytes / most
            for device, most in zip(plan.devices, forecast, strict=True)
            if device in used and most
        }
        if not shares:
            raise UnsupportedError("no rank knows how much memory it used")
        worst = max(shares, key=lambda device: shares[device])
        text = f"{worst} used {format_share(shares[worst])} of its forecast"
        if not shares[worst] <= MOST_MEMORY:
            raise WorkerError(f"{text}; expected at most {format_share(MOST_MEMORY)}")
        return text

    def _precision(self, policy: str) -> str:
        plain = self._train(pp=2, dp=1)
        found = self._train(pp=2, dp=1, precision=policy)
        theirs, ours = plain.losses[-1], found.losses[-1]
        if (
            theirs is None
            or ours is None
            or not abs(ours - theirs) <= _MOST_DIFFERENCE * abs(theirs)
        ):
            raise WorkerError(f"loss {ours} after {len(found.losses)} steps; in float32 {theirs}")
        return f"loss {ours:.4g}, in float32 {theirs:.4g}"

    def _counters(self) -> str:
        device = open_device("nvml" if self._gpus else "rapl")
        try:
            joules = device.energy_j()
            if joules is None:
                raise UnsupportedError(f"{device.name} has no counter of energy")
            clocks = device.clocks_mhz
            if clocks:
                device.set_clock(clocks[0])
            return f"{device.name}: {joules:.1f} J so far, {len(clocks)} clocks that can be set"
        finally:
            device.reset()
