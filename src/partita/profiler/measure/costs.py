"""From times and bytes of ops to a graph with costs, and how these grow with the batch."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from enum import StrEnum
from typing import Any

import numpy as np

from partita.core.columns import Floats
from partita.core.graph import CostOrigin, Graph, OpCosts
from partita.errors import InvalidInputError
from partita.profiler.measure.ops import Overheads, RoundTimes

ANNOTATION = "profile"
_LEAST_S = 1e-8


class Average(StrEnum):
    """Rule by which the rounds of an op become one figure."""

    MEDIAN = "median"
    MINIMUM = "minimum"


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileRecord:
    """Record of a measurement on one type of device.

    Attributes:
        mode: ``training`` or ``eval``.
        granularity: Size of an op: a torch call, a leaf module, or a block.
        rounds: Rounds that were run.
        used_rounds: Rounds that count: all but the first quarter.
        average: Rule by which they became one figure.
        processor: The processor or GPU.
        threads: Threads of torch.
        versions: Python, torch and Partita.
        num_distinct: Ops that were timed, where equal ones are timed once; else all.
        overhead_s: Seconds that were taken off a backward: a mark, or a start of autograd's engine.
        whole_forward_s: Forward of the untouched model.
        whole_backward_s: Backward of the untouched model.
        sum_forward_s: Sum of the ops, before any scaling.
        sum_backward_s: Likewise.
        is_scaled: Whether ops are scaled so that their sums agree with the whole.
        second_batch_size: The other batch size that was measured; 0 = none.
        peak_bytes: Most bytes live in a step of the untouched model.
        predicted_peak_bytes: The same by the figures of the ops.
        forward_spread: Of each op: distance of the quartiles of its rounds over their median.
        backward_spread: Likewise.
        notes: Remarks for the user.
        busy: That other programs kept the machine busy when it began; empty = none did.
    """

    mode: str
    granularity: str
    rounds: int
    used_rounds: int
    average: str
    threads: int
    versions: Mapping[str, str]
    whole_forward_s: float
    whole_backward_s: float
    sum_forward_s: float
    sum_backward_s: float
    processor: str = ""
    num_distinct: int = 0
    overhead_s: float = 0.0
    is_scaled: bool = False
    second_batch_size: int = 0
    peak_bytes: float = 0.0
    predicted_peak_bytes: float = 0.0
    forward_spread: tuple[float, ...] = ()
    backward_spread: tuple[float, ...] = ()
    notes: tuple[str, ...] = ()
    busy: str = ""

    @property
    def whole_s(self) -> float:
        """Time of the whole step."""
        return self.whole_forward_s + self.whole_backward_s

    @property
    def sum_s(self) -> float:
        """Sum of the ops."""
        return self.sum_forward_s + self.sum_backward_s

    @property
    def ratio(self) -> float:
        """Sum of the ops over the whole step."""
        return self.sum_s / self.whole_s if self.whole_s > 0 else 1.0

    def to_json(self) -> dict[str, Any]:
        """Return the record as JSON values."""
        values = {item.name: getattr(self, item.name) for item in fields(self)}
        return {**values, "versions": dict(self.versions), "ratio": self.ratio}


def read_record(graph: Graph, device_type: str) -> ProfileRecord:
    """Return how a graph was measured.

    Raises:
        InvalidInputError: It says nothing of a measurement on that type of device.
    """
    found = graph.annotations.get(ANNOTATION, {}).get(device_type)
    if not isinstance(found, Mapping):
        raise InvalidInputError(f"graph {graph.name!r} has no measurement on {device_type!r}")
    known = {field.name for field in fields(ProfileRecord)}
    try:
        return ProfileRecord(**{name: value for name, value in found.items() if name in known})
    except TypeError as exc:
        raise InvalidInputError(
            f"graph {graph.name!r}: measurement of {device_type!r}: {exc}"
        ) from exc


@dataclass(frozen=True, slots=True, kw_only=True)
class OpSeconds:
    """Averages over rounds.

    Attributes:
        forward_s: Forward time of each op.
        backward_s: Backward time of each op.
        backward_input_s: The part for the inputs.
        forward_spread: Distance of the quartiles over the median.
        backward_spread: Likewise.
    """

    forward_s: Floats
    backward_s: Floats
    backward_input_s: Floats
    forward_spread: tuple[float, ...]
    backward_spread: tuple[float, ...]


def used(rounds: Sequence[Any]) -> Sequence[Any]:
    """Return the rounds that count: all but the first quarter, which may be none.

    >>> used([9, 1, 1, 2]), used([5, 5])
    ([1, 1, 2], [5, 5])
    """
    return rounds[len(rounds) // 4 :]


def average_of(values: Any, average: Average) -> Any:  # noqa: ANN401  # an array or a list
    """Return the average over the first axis."""
    table = np.asarray(values, dtype=np.float64)
    return np.median(table, axis=0) if average is Average.MEDIAN else table.min(axis=0)


def average_rounds(
    rounds: Sequence[RoundTimes],
    average: Average,
    *,
    overheads: Overheads,
    split: Sequence[RoundTimes],
    split_overheads: Overheads,
    leader: Sequence[int],
) -> OpSeconds:
    """Return the averages of ops over the rounds that count.

    Args:
        rounds: The rounds, in order.
        average: Kind of average.
        overheads: Seconds that are taken off each forward, and each backward that there was.
        split: Rounds that tell what share of a backward is for the inputs.
        split_overheads: Seconds that are taken off each backward in these.
        leader: For each op the one whose time it has.
    """
    kept, order = used(rounds), np.asarray(leader)

    def column(name: str, among: Sequence[RoundTimes]) -> Floats:
        return np.array([getattr(times, name) for times in among])[:, order]

    forward, backward = column("forward_s", kept), column("backward_s", kept)
    started = split_overheads.backward_s
    part = _less(average_of(column("backward_input_s", split), average), started)
    total = _less(average_of(column("backward_s", split), average), started)
    share = np.divide(part, total, out=np.zeros_like(part), where=total > 0)
    whole = _less(average_of(backward, average), overheads.backward_s)
    return OpSeconds(
        forward_s=_less(average_of(forward, average), overheads.forward_s),
        backward_s=whole,
        backward_input_s=whole * np.clip(share, 0.0, 1.0),
        forward_spread=_spread(forward),
        backward_spread=_spread(backward),
    )


def _less(seconds: Floats, overhead_s: Floats) -> Floats:
    """Return times less what starting an op costs, still above 0 where there was anything."""
    return np.where(seconds > 0, np.maximum(seconds - overhead_s, _LEAST_S), 0.0)


def _spread(table: Floats) -> tuple[float, ...]:
    low, middle, high = np.percentile(table, (25, 50, 75), axis=0)
    share = np.divide(high - low, middle, out=np.zeros_like(middle), where=middle > 0)
    return tuple(np.round(share, 4).tolist())


def with_costs(graph: Graph, costs: OpCosts, record: ProfileRecord) -> Graph:
    """Return a graph with measured costs as its only ones, and how they were measured."""
    return replace(
        graph, costs=(costs,), annotations={ANNOTATION: {costs.device_type: record.to_json()}}
    )


def make_costs(seconds: OpSeconds, device_type: str, factors: tuple[float, float]) -> OpCosts:
    """Return costs of averages, forward and backward each times a factor."""
    forward, backward = factors
    return OpCosts(
        device_type=device_type,
        origin=CostOrigin.MEASURED,
        forward_s=seconds.forward_s * forward,
        backward_s=seconds.backward_s * backward,
        backward_input_s=seconds.backward_input_s * backward,
    )


def with_growth(graph: Graph, other: Graph) -> Graph:
    """Return a graph with what the same model costs at another batch size.

    Time and bytes are taken to be a fixed part plus one that grows with the samples.

    Raises:
        InvalidInputError: The graphs are not of one model, or have the same batch size.
    """
    if graph.fingerprint != other.fingerprint:
        raise InvalidInputError(
            f"{graph.name!r} is another graph at batch size {other.batch_size} than at "
            f"{graph.batch_size}; how it grows cannot be told"
        )
    if graph.batch_size == other.batch_size:
        raise InvalidInputError(f"both graphs have batch size {graph.batch_size}")
    here, there = graph.batch_size, other.batch_size

    def fixed(ours: Floats, theirs: Floats) -> Floats:
        return np.clip((ours * there - theirs * here) / (there - here), 0.0, ours)

    ours = graph.forward_s + graph.backward_s
    share = np.divide(
        fixed(ours, other.forward_s + other.backward_s),
        ours,
        out=np.zeros_like(ours),
        where=ours > 0,
    )
    ops = replace(
        graph.ops,
        fixed_share=np.clip(share, 0.0, 1.0),
        saved_fixed_bytes=fixed(graph.ops.saved_bytes, other.ops.saved_bytes),
    )
    tensors = replace(graph.tensors, fixed_bytes=fixed(graph.tensors.bytes, other.tensors.bytes))
    return replace(graph, ops=ops, tensors=tensors)
