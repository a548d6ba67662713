"""Traces of torch's profiler as costs of a captured graph: each op as long as it was traced.

The calls of the graph and those of a trace are aligned by name and shapes, in their order (longest
equal stretches first), as often as the trace has the model: a pass each. Of an op that is several
calls half or more have to be found; calls between its first and its last that belong to no other op
count as its own, so that another kernel for the same thing does not matter.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from difflib import SequenceMatcher
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from partita.catalogue.catalogue import Catalogue
from partita.catalogue.gpu_names import gpu_type
from partita.core.columns import Floats
from partita.core.graph import CostOrigin, DeviceKind, Graph, OpCosts
from partita.errors import InvalidInputError
from partita.flows.traces import read_ops_file, trace_paths
from partita.formats.traced_ops import TracedOp, TracedOps
from partita.units import format_seconds

if TYPE_CHECKING:
    from partita.profiler.estimate.calls import Call

ANNOTATION = "trace"
_NAMED = 3
"""Ops that are named where they were not found."""
_Run: TypeAlias = Sequence[TracedOp]


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedCosts:
    """A graph with the costs that traces have.

    Attributes:
        graph: The graph.
        passes: Passes over the model that were found.
        ops: Ops that make calls.
        estimated: Names of those of them that no trace has, which keep their estimate.
        has_backward: Whether backward was traced; else it is estimated.
    """

    graph: Graph
    passes: int
    ops: int
    estimated: tuple[str, ...]
    has_backward: bool

    def to_json(self) -> dict[str, Any]:
        """Return how many ops were found, and which were not."""
        return {
            "passes": self.passes,
            "ops": self.ops,
            "estimated": list(self.estimated),
            "has_backward": self.has_backward,
        }

    def lines(self) -> list[str]:
        """Return how many ops were found and the first that were not; then the sums."""
        costs = self.graph.costs[0]
        found = self.ops - len(self.estimated)
        more = len(self.estimated) - _NAMED
        missing = f"; still estimated: {', '.join(self.estimated[:_NAMED])}" * bool(self.estimated)
        is_estimated = not self.has_backward and bool(costs.backward_s.any())
        return [
            f"{found} of {self.ops} ops as they were traced on {costs.device_type}, in "
            f"{self.passes} pass{'es' * (self.passes != 1)}{missing}"
            f"{f' and {more} more' * (more > 0)}",
            f"forward {format_seconds(float(costs.forward_s.sum()))}, backward "
            f"{format_seconds(float(costs.backward_s.sum()))}"
            f"{' (estimated: the traces have none)' * is_estimated} for {self.graph.batch_size} "
            "samples",
        ]


def read_ops(names: Sequence[str]) -> tuple[TracedOps, ...]:
    """Return the ops of traces: files, or all files of directories.

    Raises:
        FormatError: A file is no trace; knows the path.
        InvalidInputError: There are none, or some are of a GPU and some are not.
    """
    found = tuple(map(read_ops_file, trace_paths(names)))
    timed = sorted({trace.gpu for trace in found})
    if len(timed) > 1:
        raise InvalidInputError(
            f"the traces are of {' and '.join(gpu or 'a host without GPU' for gpu in timed)}; "
            "expected one type of device, a graph for each (partita profile merge)"
        )
    return found


def traced_type(traces: Sequence[TracedOps], catalogue: Catalogue, given: str | None) -> str:
    """Return the type of the catalogue that traces were made on.

    Args:
        traces: The traces.
        catalogue: The catalogue.
        given: The type that a user says it is; None = as the traces have it.

    Raises:
        InvalidInputError: The catalogue has no such type, or traces of the host are said to be of a
            GPU.
    """
    gpu = traces[0].gpu
    found = given or (gpu_type(gpu, catalogue) if gpu else "cpu")
    if not found:
        raise InvalidInputError(
            f"GPU {gpu!r} of the traces is of no type of the catalogue; name one (--estimate TYPE)"
        )
    is_gpu = catalogue.device_type(found).kind is not DeviceKind.CPU
    if is_gpu != bool(gpu):
        raise InvalidInputError(
            f"the traces have {'kernels of a GPU' if gpu else 'no kernels of a GPU'}; they say "
            f"nothing of {found}"
        )
    return found


def with_traced_costs(
    graph: Graph, calls: "Sequence[Sequence[Call]]", traces: Sequence[TracedOps]
) -> TracedCosts:
    """Return a graph of estimates with the seconds of traces, where they have an op.

    The median of all passes counts, without the first of a trace where it has more. What part of
    backward is for the inputs stays as it was estimated; a graph without backward, of inference,
    keeps none.

    Args:
        graph: The graph, with costs for one type of device.
        calls: Calls of each of its ops.
        traces: The traces, of one type of device.

    Raises:
        InvalidInputError: The traces have less than half of the ops.
    """
    forward: list[list[float]] = [[] for _ in calls]
    backward: list[list[float]] = [[] for _ in calls]
    trains = bool(graph.costs[0].backward_s.any())
    passes = 0
    for trace in traces:
        found = list(_passes(calls, trace))
        used = found[1:] if len(found) > 1 else found
        passes += len(used)
        for one in used:
            has_backward = any(seconds[1] > 0 for seconds in one.values())
            for op, seconds in one.items():
                forward[op].append(seconds[0])
                if has_backward and trains:
                    backward[op].append(seconds[1])
    wanted = [op for op, own in enumerate(calls) if own]
    missing = [op for op in wanted if not forward[op]]
    if 2 * len(missing) > len(wanted) or not wanted:
        raise InvalidInputError(_refusal(graph, calls, traces, missing, len(wanted)))
    costs = graph.costs[0]
    forward_s, backward_s = costs.forward_s.copy(), costs.backward_s.copy()
    for op in wanted:
        if forward[op]:
            forward_s[op] = np.median(forward[op])
        if backward[op]:
            backward_s[op] = np.median(backward[op])
    result = TracedCosts(
        graph=replace(
            graph,
            costs=(
                replace(
                    costs,
                    origin=CostOrigin.MEASURED,
                    forward_s=forward_s,
                    backward_s=backward_s,
                    backward_input_s=backward_s * _input_share(costs),
                ),
            ),
        ),
        passes=passes,
        ops=len(wanted),
        estimated=tuple(graph.ops.names[op] for op in missing),
        has_backward=any(backward),
    )
    notes = {**graph.annotations, ANNOTATION: {costs.device_type: result.to_json()}}
    return replace(result, graph=replace(result.graph, annotations=notes))


def _input_share(costs: OpCosts) -> Floats:
    """Return the share of each op's backward that is for its inputs; all where there is none."""
    whole = costs.backward_s
    return np.where(whole > 0, costs.backward_input_s / np.where(whole > 0, whole, 1.0), 1.0)


def _passes(
    calls: "Sequence[Sequence[Call]]", trace: TracedOps
) -> Iterator[dict[int, tuple[float, float]]]:
    """Yield forward and backward seconds of the ops that each pass of a trace has."""
    flat = [(op, call) for op, own in enumerate(calls) for call in own]
    matcher = SequenceMatcher[object](None, (), (), autojunk=False)
    matcher.set_seq2([_key(call, trace) for _, call in flat])
    found: list[tuple[_Run, dict[int, int]]] = []
    parts: list[_Run] = list(reversed(trace.runs))
    most = 0
    while parts:
        run = parts.pop()
        if 2 * len(run) < most or not run:
            continue
        matcher.set_seq1([_key(op, trace) for op in run])
        op_of = {
            block.a + i: flat[block.b + i][0]
            for block in matcher.get_matching_blocks()
            for i in range(block.size)
        }
        if not op_of or 2 * len(op_of) < most:
            continue
        most = max(most, len(op_of))
        found.append((run, op_of))
        parts += [run[max(op_of) + 1 :], run[: min(op_of)]]  # other passes of the same run
    # An optimizer has a call or two that look like the model's: passes have as many as the longest.
    for run, op_of in found:
        if 2 * len(op_of) >= most:
            yield _seconds(calls, run, op_of)


def _key(call: "Call | TracedOp", trace: TracedOps) -> object:
    return (call.name, call.shapes) if trace.has_shapes else call.name


def _seconds(
    calls: "Sequence[Sequence[Call]]", run: _Run, op_of: dict[int, int]
) -> dict[int, tuple[float, float]]:
    places: dict[int, list[int]] = {}
    for place, op in op_of.items():
        places.setdefault(op, []).append(place)
    result = {}
    for op, own in places.items():
        if 2 * len(own) >= len(calls[op]):
            part = [
                run[place] for place in range(min(own), max(own) + 1) if op_of.get(place, op) == op
            ]
            result[op] = (sum(one.forward_s for one in part), sum(one.backward_s for one in part))
    return result


def _refusal(
    graph: Graph,
    calls: "Sequence[Sequence[Call]]",
    traces: Sequence[TracedOps],
    missing: Sequence[int],
    wanted: int,
) -> str:
    """Return why traces are not of a graph: the first op that they have with other shapes."""
    said = (
        f"the traces have {wanted - len(missing)} of the {wanted} ops of {graph.name}; expected "
        "half or more"
    )
    shapes: dict[str, Sequence[Sequence[int]]] = {}
    for one in (one for trace in traces for run in trace.runs for one in run):
        shapes.setdefault(one.name, one.shapes)
    for op in missing:
        for call in calls[op]:
            if any(shapes.get(call.name, ())) and any(call.shapes):
                return (
                    f"{said}: {graph.ops.names[op]} is {call.name} of "
                    f"{_words(call.shapes)}, a trace has {_words(shapes[call.name])}; say what "
                    "ran, by --batch-size, --sequence-length or --scale"
                )
    return f"{said}: they are of another model, or of one that was compiled"


def _words(shapes: Sequence[Sequence[int]]) -> str:
    return " and ".join("x".join(map(str, shape)) for shape in shapes if shape)
