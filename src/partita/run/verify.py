"""Is a run right: the same microbatches in one process, compared number by number.

A gradient's difference is relative to its own norm, or to a millionth of the largest norm where
that is more: some gradients are zero but for rounding.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from partita.errors import WorkerError
from partita.run.interpreter import RunOptions, interpret
from partita.run.rank import RankOptions
from partita.run.results import RunResult, StepResult
from partita.run.task import Task
from partita.run.workload import Workload

TOLERANCES: Mapping[torch.dtype, float] = {
    torch.float64: 1e-9,
    torch.float32: 1e-4,
    torch.bfloat16: 5e-2,
    torch.float16: 1e-2,
}
_FLOOR = 1e-6


class Difference(NamedTuple):
    """How far a tensor is from that of one process.

    Attributes:
        step: The step.
        what: ``loss``, ``output`` or ``gradient``.
        name: Its name.
        value: Largest difference, relative.
    """

    step: int
    what: str
    name: str
    value: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """A run compared with one process.

    Attributes:
        differences: All that was compared, the worst first.
        tolerance: What may be.
        steps: Steps that were compared.
    """

    differences: tuple[Difference, ...]
    tolerance: float
    steps: int

    @property
    def worst(self) -> float:
        """The largest difference; 0 if nothing was compared."""
        return self.differences[0].value if self.differences else 0.0

    @property
    def is_equal(self) -> bool:
        """Whether everything is within the tolerance, and something was compared."""
        return bool(self.differences) and self.worst <= self.tolerance

    def count(self, what: str) -> int:
        """Return how many tensors of a kind were compared in the first step."""
        return sum(d.what == what and d.step == 0 for d in self.differences)

    def figures(self, shown: int = 10) -> dict[str, Any]:
        """Return it as JSON values, with the worst differences."""
        return {
            "equal": self.is_equal,
            "worst": self.worst,
            "tolerance": self.tolerance,
            "steps": self.steps,
            "gradients": self.count("gradient"),
            "outputs": self.count("output"),
            "differences": [difference._asdict() for difference in self.differences[:shown]],
        }

    def line(self) -> str:
        """Return the verdict in one line."""
        parts = ["loss"] if self.count("loss") else []
        counts = [(what, self.count(what)) for what in ("output", "gradient")]
        parts += [f"{count} {what}{'s' * (count > 1)}" for what, count in counts if count]
        compared = ", ".join(parts) or "nothing"
        verdict = "equal one process" if self.is_equal else "DIFFER from one process"
        return f"{compared} {verdict} (worst {self.worst:.0e}, limit {self.tolerance:.0e})"


def verify(task: Task, workload: Workload, found: RunResult, options: RankOptions) -> Verdict:
    """Run the same microbatches in one process and compare.

    Raises:
        WorkerError: The run lacks what it should have kept.
    """
    wanted = interpret(
        task.problem,
        task.plan,
        task.code,
        state=workload.state,
        load=workload.load,
        program=task.program,
        options=RunOptions(
            steps=len(found.steps), seed=options.seed, make_optimizer=options.make_optimizer
        ),
    )
    return compare_runs(found, wanted, tolerance_of(workload.state.values()))


def tolerance_of(tensors: Any) -> float:  # noqa: ANN401  # any iterable of tensors
    """Return how far results may be apart, by the coarsest type among floating-point tensors."""
    found = [TOLERANCES[t.dtype] for t in tensors if t.dtype in TOLERANCES]
    return max(found, default=TOLERANCES[torch.float32])


def compare_runs(found: RunResult, wanted: RunResult, tolerance: float) -> Verdict:
    """Compare two runs of the same steps."""
    differences: list[Difference] = []
    for step, (one, other) in enumerate(zip(found.steps, wanted.steps, strict=True)):
        differences += _step_differences(step, one, other)
    differences.sort(key=lambda difference: -difference.value)
    return Verdict(differences=tuple(differences), tolerance=tolerance, steps=len(found.steps))


def _step_differences(step: int, found: StepResult, wanted: StepResult) -> list[Difference]:
    result = []
    for microbatch, (one, other) in enumerate(zip(found.losses, wanted.losses, strict=True)):
        value = abs(one - other) / max(abs(other), _FLOOR)
        result.append(Difference(step, "loss", f"microbatch {microbatch}", value))
    for name, tensors in wanted.outputs.items():
        result.append(Difference(step, "output", name, _apart(name, found.outputs[name], tensors)))
    largest = max((float(g.norm()) for g in wanted.gradients.values()), default=0.0)
    for name, gradient in wanted.gradients.items():
        if name not in found.gradients:
            raise WorkerError(f"the run gave no gradient of {name!r}")
        apart = float((found.gradients[name] - gradient).norm())
        scale = max(float(gradient.norm()), _FLOOR * largest)
        result.append(Difference(step, "gradient", name, apart / scale if scale else apart))
    return result


def _apart(name: str, found: Sequence[Tensor], wanted: Sequence[Tensor]) -> float:
    """Return the largest difference between two lists of tensors, relative to the largest value."""
    worst = 0.0
    for one, other in zip(found, wanted, strict=True):
        if one.shape != other.shape:
            raise WorkerError(f"output {name!r} has shape {one.shape}; expected {other.shape}")
        if not other.numel():
            continue
        exact = other.to(torch.complex128)  # of any type: numbers, flags, complex
        scale = max(float(exact.abs().max()), _FLOOR)
        worst = max(worst, float((one.to(torch.complex128) - exact).abs().max()) / scale)
    return worst
