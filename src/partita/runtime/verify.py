"""Is a run right: the same microbatches in one process, compared number by number.

One process runs the captured graph, which shows that the run carries out its Program, or the
untouched module (``verify_module``), which shows that the captured graph is the user's model.

A gradient's difference is relative to its own norm, or to a share of the largest norm where that
is more, which is the tolerance and at least a millionth: some gradients are zero but for rounding,
such as those of the biases of an attention's keys.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from partita.core.precision import Precision
from partita.errors import WorkerError
from partita.runtime.interpreter import RunOptions, interpret
from partita.runtime.numerics import numerics_of
from partita.runtime.rank import RankOptions
from partita.runtime.results import RunResult, StepResult
from partita.runtime.task import Task
from partita.runtime.workload import Workload

TOLERANCES: Mapping[torch.dtype, float] = {
    torch.float64: 1e-9,
    torch.float32: 1e-4,
    torch.bfloat16: 5e-2,
    torch.float16: 1e-2,
}
_FLOOR = 1e-6

CAPTURED_GRAPH = "the captured graph"
UNTOUCHED_MODULE = "the untouched module"


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
    """A run compared with the same microbatches in one process.

    Attributes:
        differences: All that was compared, the worst first.
        tolerance: What may be.
        steps: Steps that were compared.
        against: What the one process ran.
    """

    differences: tuple[Difference, ...]
    tolerance: float
    steps: int
    against: str = CAPTURED_GRAPH

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

    def to_json(self, shown: int = 10) -> dict[str, Any]:
        """Return it as JSON values, with the worst differences."""
        return {
            "against": self.against,
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
        verdict = "equal" if self.is_equal else "DIFFER from"
        limits = f"worst {self.worst:.0e}, limit {self.tolerance:.0e}"
        return f"{compared} {verdict} {self.against} ({limits})"


def verify(task: Task, workload: Workload, found: RunResult, options: RankOptions) -> Verdict:
    """Run the captured graph on the same microbatches in one process and compare.

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
        options=RunOptions(steps=len(found.steps), seed=options.seed, recipe=options.recipe),
    )
    tolerance = tolerance_of(workload.state.values(), options.recipe.precision)
    return compare_runs(found, wanted, tolerance)


def tolerance_of(tensors: Any, precision: Precision | None = None) -> float:  # noqa: ANN401
    """Return how far results may be apart, by the coarsest type that is computed with.

    Args:
        tensors: An iterable of tensors; those of integers do not count.
        precision: Types of numbers of the run; None = those of the tensors.
    """
    found = [TOLERANCES[t.dtype] for t in tensors if t.dtype in TOLERANCES]
    compute = numerics_of(precision).compute
    if compute is not None:
        found.append(TOLERANCES[compute])
    return max(found, default=TOLERANCES[torch.float32])


def compare_runs(
    found: RunResult, wanted: RunResult, tolerance: float, against: str = CAPTURED_GRAPH
) -> Verdict:
    """Compare two runs of the same steps; ``against`` says what the second one ran."""
    differences: list[Difference] = []
    for step, (one, other) in enumerate(zip(found.steps, wanted.steps, strict=True)):
        differences += _step_differences(step, one, other, max(_FLOOR, tolerance))
    differences.sort(key=lambda difference: -difference.value)
    return Verdict(
        differences=tuple(differences),
        tolerance=tolerance,
        steps=len(found.steps),
        against=against,
    )


def _step_differences(
    step: int, found: StepResult, wanted: StepResult, floor: float
) -> list[Difference]:
    if len(found.losses) != len(wanted.losses):
        raise WorkerError(
            f"step {step} gave {len(found.losses)} losses; one process gives {len(wanted.losses)}"
        )
    result = []
    for microbatch, (one, other) in enumerate(zip(found.losses, wanted.losses, strict=True)):
        apart = _numbers_apart(torch.tensor(one), torch.tensor(other))
        result.append(Difference(step, "loss", f"microbatch {microbatch}", apart))
    for name, tensors in wanted.outputs.items():
        given = found.outputs.get(name, ())
        if len(given) != len(tensors):
            raise WorkerError(f"the run gave {len(given)} microbatches of output {name!r}")
        pairs = zip(given, tensors, strict=True)
        worst = max((_apart(name, one, other) for one, other in pairs), default=0.0)
        result.append(Difference(step, "output", name, worst))
    norms = {name: float(gradient.norm()) for name, gradient in wanted.gradients.items()}
    largest = max((norm for norm in norms.values() if math.isfinite(norm)), default=0.0)
    for name, gradient in wanted.gradients.items():
        if name not in found.gradients:
            raise WorkerError(f"the run gave no gradient of {name!r}")
        apart = _gradients_apart(found.gradients[name], gradient, floor * largest)
        result.append(Difference(step, "gradient", name, apart))
    return result


def _gradients_apart(found: Tensor, wanted: Tensor, floor: float) -> float:
    """Return the norm of the difference relative to the norm; infinite where one is no number."""
    found, wanted = found.cpu(), wanted.cpu()
    if found.shape != wanted.shape or not _same_unknowns(found, wanted):
        return math.inf
    known = torch.isfinite(wanted)
    apart = float(torch.where(known, found - wanted, 0).norm())
    scale = max(float(torch.where(known, wanted, 0).norm()), floor)
    return apart / scale if scale else apart


def _apart(name: str, found: Tensor, wanted: Tensor) -> float:
    """Return the largest difference between two tensors, relative to the largest value."""
    if found.shape != wanted.shape:
        raise WorkerError(f"output {name!r} has shape {found.shape}; expected {wanted.shape}")
    return _numbers_apart(found.cpu(), wanted.cpu())


def _numbers_apart(found: Tensor, wanted: Tensor) -> float:
    """Return the largest difference, infinite where only one of two is a number."""
    if not wanted.numel():
        return 0.0
    if not _same_unknowns(found, wanted):
        return math.inf
    known = torch.isfinite(wanted)
    exact = torch.where(known, wanted, 0).to(torch.complex128)  # of any type: numbers, flags
    given = torch.where(known, found, 0).to(torch.complex128)
    scale = max(float(exact.abs().max()), _FLOOR)
    return float((given - exact).abs().max()) / scale


def _same_unknowns(found: Tensor, wanted: Tensor) -> bool:
    """Return whether two tensors are no number, or infinite, at the same places."""
    return torch.equal(torch.isnan(found), torch.isnan(wanted)) and torch.equal(
        torch.where(torch.isinf(found), found, 0), torch.where(torch.isinf(wanted), wanted, 0)
    )
