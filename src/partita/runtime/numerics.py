"""How a precision policy is carried out: autocast, 16-bit copies of weights, scaled losses.

The optimizer steps float32 weights, the master copy. Where a policy keeps 16-bit weights, forward
and backward see the master copy rounded to them, and the gradients have their type; ops run under
autocast, so that norms, softmax and losses are computed in float32. Gradients are added up in the
policy's type for them, and reduced in its type for that.
"""

import multiprocessing
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from partita.core.precision import Precision
from partita.errors import UnsupportedError
from partita.ranks.setup import why_not_fork

_PROBE_LIMIT_S = 60.0

_DTYPES: Mapping[str, torch.dtype] = {
    "float64": torch.float64,
    "float32": torch.float32,
    "tfloat32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


@dataclass(frozen=True, slots=True)
class Numerics:
    """Types of numbers that a run computes with; None = those of the model.

    Attributes:
        compute: What autocast computes in.
        weights: What forward and backward see of the weights.
        gradients: What gradients are added up in.
        reduction: What gradients are reduced in.
    """

    compute: torch.dtype | None = None
    weights: torch.dtype | None = None
    gradients: torch.dtype | None = None
    reduction: torch.dtype | None = None

    @property
    def scales(self) -> bool:
        """Whether the loss is scaled, as small gradients would vanish."""
        return self.compute is torch.float16

    def autocast(self, device: str) -> AbstractContextManager[Any]:
        """Return what ops run under."""
        if self.compute is None:
            return nullcontext()
        return torch.autocast(device, dtype=self.compute)

    def rounded(self, weight: Tensor) -> Tensor:
        """Return a weight as forward and backward see it, without a graph."""
        value = weight.detach()
        return value if self.weights is None or not _is_wide(value) else value.to(self.weights)

    def summed(self, gradient: Tensor) -> Tensor:
        """Return a gradient in the type that gradients are added up in."""
        return gradient if self.gradients is None else gradient.to(self.gradients)

    def reduced(self, gradient: Tensor) -> Tensor:
        """Return a gradient in the type that travels."""
        return gradient if self.reduction is None else gradient.to(self.reduction)


def _is_wide(value: Tensor) -> bool:
    return value.dtype in (torch.float32, torch.float64)


def numerics_of(policy: Precision | None) -> Numerics:
    """Return how a policy is carried out.

    Raises:
        UnsupportedError: It cannot be run yet.
    """
    if policy is None or policy.activations == "float32":
        return Numerics()
    if policy.compute == "float8" or (policy.weights != "float32" and policy.master is None):
        raise UnsupportedError(
            f"precision {policy.name!r} can be planned but not run yet; use bf16-mixed, bf16, "
            "bf16-master or fp16"
        )
    narrow = policy.weights != "float32"
    return Numerics(
        compute=_DTYPES[policy.activations],
        weights=_DTYPES[policy.weights] if narrow else None,
        gradients=_DTYPES[policy.gradients] if narrow else None,
        reduction=_DTYPES[policy.reduction] if narrow else None,
    )


@lru_cache
def check_computes(dtype: torch.dtype) -> None:
    """Check that this machine's CPU can compute with a type, in a process of its own.

    Where a virtual machine tells of instructions that it does not have, a product ends the process.

    Raises:
        UnsupportedError: It cannot.
    """
    # A child of a process with threads may hang; a fresh one takes seconds to import torch.
    start = "spawn" if why_not_fork() else "fork"
    context: Any = multiprocessing.get_context(start)
    child = context.Process(target=_multiply, args=(dtype,), daemon=True)
    child.start()
    child.join(_PROBE_LIMIT_S)
    code = child.exitcode
    if code == 0:
        return
    if code is None:
        child.kill()
        how = f"did not end within {_PROBE_LIMIT_S:g} s"
    else:
        how = f"ended by signal {-code}" if code < 0 else "failed"
    raise UnsupportedError(
        f"a product of {str(dtype).removeprefix('torch.')} matrices {how} on this machine; set "
        "ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16, or use fp32"
    )


def _multiply(dtype: torch.dtype) -> None:
    one = torch.ones(64, 64, dtype=dtype)
    if float((one @ one)[0, 0]) != 64:
        raise SystemExit(1)


def ready_numerics(policy: Precision | None, device: str = "cpu") -> Numerics:
    """Return how a policy is carried out here, after trying it.

    Raises:
        UnsupportedError: It cannot be run, or not on this machine.
    """
    found = numerics_of(policy)
    if found.compute is not None and device == "cpu":
        check_computes(found.compute)
    return found
