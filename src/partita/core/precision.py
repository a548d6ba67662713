"""Types of numbers in training: what is computed, kept, reduced and gathered in which dtype.

A ``Precision`` is a policy of dtypes. Its presets are what frameworks run::

    preset            weights + gradients + master + state of Adam, bytes per parameter
    fp32, tf32        4 + 4 + 0 + 8    products in float32, or on tensor cores in tfloat32
    bf16-mixed        4 + 4 + 0 + 8    float32 weights with a bfloat16 copy (autocast, FSDP2)
    bf16              2 + 2 + 4 + 8    gradients and their reduction in bfloat16 (NeMo's recipes)
    bf16-fp32-grads   2 + 4 + 4 + 8    gradients and their reduction in float32 (Megatron's default)
    fp16              2 + 2 + 8 + 8    with loss scale: float32 gradients beside the float32 weights
    pure-bf16         2 + 2 + 0 + 4    no master copy, the optimizer's state in bfloat16
    fp8               2 + 2 + 4 + 8    products in float8; weights are gathered in float8

A text may change single dtypes: ``bf16-fp32-grads,state=bfloat16`` is Megatron's precision-aware
optimizer. Bytes per parameter under an optimizer and sharding are ``cost/tables.py``'s business.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import NamedTuple

import numpy as np

from partita.core.columns import Floats, frozen_array
from partita.core.graph import DTYPE_BYTES, ParameterTable
from partita.errors import InvalidInputError
from partita.names import suggest

FLOATS = ("float64", "float32", "tfloat32", "bfloat16", "float16", "float8")
"""Dtypes that a policy may name, the widest first."""
SHORT_DTYPES = {
    "fp64": "float64",
    "fp32": "float32",
    "tf32": "tfloat32",
    "bf16": "bfloat16",
    "fp16": "float16",
    "fp8": "float8",
}
_MAY_BE_NONE = ("master", "master_gradients")


@dataclass(frozen=True, slots=True, kw_only=True)
class Precision:
    """Policy of dtypes for a training step.

    Attributes:
        name: Preset, with the changes that were asked for.
        compute: Products of matrices and convolutions; the peak rate that counts.
        weights: Weights that a device keeps, and forward and backward read.
        gradients: Gradients that are summed over microbatches.
        reduction: Gradients on the wire.
        gather: Weights on the wire, where replicas divide them or their update.
        master: Copy of the weights that the optimizer steps; ``None`` = it steps the weights.
        master_gradients: Copy of the gradients beside the master copy (loss scaling); ``None`` =
            the optimizer reads the gradients themselves.
        state: Optimizer state, unless the optimizer has a width of its own.
    """

    name: str
    compute: str
    weights: str
    gradients: str
    reduction: str
    gather: str
    master: str | None = None
    master_gradients: str | None = None
    state: str = "float32"

    def __post_init__(self) -> None:
        for field in fields(self)[1:]:
            dtype = getattr(self, field.name)
            if dtype is None and field.name in _MAY_BE_NONE:
                continue
            if dtype not in FLOATS:
                raise InvalidInputError(
                    f"precision {self.name!r}: {field.name} is {dtype!r}; expected one of "
                    f"{', '.join(FLOATS)}"
                )

    @property
    def activations(self) -> str:
        """Dtype of activations."""
        return activations_of(self.compute)

    @property
    def copy(self) -> str | None:
        """Dtype of a second, narrower copy of the weights that products read; ``None`` = none.

        Float8 copies and their transposes take the place of 16-bit weights.
        """
        narrower = DTYPE_BYTES[self.activations] < DTYPE_BYTES[self.weights]
        return self.activations if narrower else None


def activations_of(compute: str) -> str:
    """Return the dtype of activations: float8 is for products, what they make has 16 bits."""
    return {"float8": "bfloat16", "tfloat32": "float32"}.get(compute, compute)


def _policy(name: str, compute: str, weights: str, gradients: str, **more: str) -> Precision:
    wire = {"reduction": gradients, "gather": weights, **more}
    return Precision(name=name, compute=compute, weights=weights, gradients=gradients, **wire)


PRECISIONS: Mapping[str, Precision] = {
    policy.name: policy
    for policy in (
        _policy("fp32", "float32", "float32", "float32"),
        _policy("tf32", "tfloat32", "float32", "float32"),
        _policy("bf16-mixed", "bfloat16", "float32", "float32", gather="bfloat16"),
        _policy("bf16", "bfloat16", "bfloat16", "bfloat16", master="float32"),
        _policy("bf16-fp32-grads", "bfloat16", "bfloat16", "float32", master="float32"),
        _policy(
            "fp16", "float16", "float16", "float16", master="float32", master_gradients="float32"
        ),
        _policy("pure-bf16", "bfloat16", "bfloat16", "bfloat16", state="bfloat16"),
        _policy("fp8", "float8", "bfloat16", "bfloat16", master="float32", gather="float8"),
    )
}


ALIASES: Mapping[str, str] = {"bf16-master": "bf16-fp32-grads"}
"""Other names of presets."""


def parse_precision(text: str) -> Precision:
    """Return the policy of a text: a preset, and dtypes that differ, such as ``bf16,state=bf16``.

    Raises:
        InvalidInputError: There is no such preset, part or dtype.
    """
    name, *changes = (part.strip() for part in text.split(","))
    name = ALIASES.get(name, name)
    if name not in PRECISIONS:
        known = suggest(name, [*PRECISIONS, *ALIASES])
        raise InvalidInputError(
            f"precision {name!r} is not known{known}, and such with other parts: "
            "bf16,state=bfloat16"
        )
    parts = [field.name for field in fields(Precision)[1:]]
    found: dict[str, str | None] = {}
    for change in changes:
        part, _, dtype = change.partition("=")
        if part not in parts or not dtype:
            raise InvalidInputError(
                f"precision {text!r}: {change!r} is no part; expected PART=DTYPE with a part of "
                f"{', '.join(parts)}"
            )
        none = dtype == "none" and part in _MAY_BE_NONE
        found[part] = None if none else SHORT_DTYPES.get(dtype, dtype)
    return replace(PRECISIONS[name], name=",".join([name, *changes]), **found)  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True, kw_only=True)
class Optimizer:
    """State of an optimizer.

    Attributes:
        name: Name.
        numbers: Numbers that it keeps per element of a trained parameter.
        number_bytes: Bytes of a number; ``None`` = those of the policy's state.
        runs: Whether our own executor steps with it.
    """

    name: str
    numbers: float
    number_bytes: float | None = None
    runs: bool = True

    def state_bytes(self, precision: Precision | None = None) -> float:
        """Return the bytes of state per element; of float32 numbers where no policy is given."""
        dtype = "float32" if precision is None else precision.state
        number = DTYPE_BYTES[dtype] if self.number_bytes is None else self.number_bytes
        return self.numbers * number


OPTIMIZERS: Mapping[str, Optimizer] = {
    row.name: row
    for row in (
        Optimizer(name="sgd", numbers=0),
        Optimizer(name="momentum", numbers=1),
        Optimizer(name="adam", numbers=2),
        Optimizer(name="adamw", numbers=2),
        # Sums of rows and columns alone: below a thousandth of the weights.
        Optimizer(name="adafactor", numbers=0, runs=False),
        # Two numbers of eight bits; a scale for each block of 256 or 2048 is left out.
        Optimizer(name="adam8bit", numbers=2, number_bytes=1, runs=False),
    )
}
DEFAULT_OPTIMIZER = "adam"


class WireBytes(NamedTuple):
    """Bytes of parameters on the wire, a row each.

    Attributes:
        reduced: Gradients in a reduction.
        gathered: Weights in a gather, and while the gathered copy lives.
    """

    reduced: Floats
    gathered: Floats


def wire_bytes(parameters: ParameterTable, precision: Precision | None) -> WireBytes:
    """Return what reductions and gathers move; without a policy as much as the parameters hold."""
    if precision is None:
        return WireBytes(parameters.bytes, parameters.bytes)
    return WireBytes(
        bytes_at(parameters, precision.reduction), bytes_at(parameters, precision.gather)
    )


def bytes_at(parameters: ParameterTable, dtype: str) -> Floats:
    """Return the bytes of parameters at a dtype; buffers and what is no float have their own."""
    floating = np.array([name in FLOATS for name in parameters.dtypes], dtype=bool)
    sizes = parameters.elements * DTYPE_BYTES[dtype]
    cast = floating & ~parameters.buffer
    return frozen_array(np.where(cast, sizes, parameters.bytes), np.float64)
