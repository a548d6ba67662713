"""Ops of a trace of torch's profiler, with the seconds of their forward and of their backward.

An op is a call of ATen that no other call contains, on the thread that runs forward. The engine of
autograd marks each node of backward with the sequence number of the call that made it; of several
calls with one number the last to begin made the node. ``AccumulateGrad`` has no number: the engine
runs it behind the node whose gradient it adds. Where the trace has kernels of a GPU, their seconds
count, found by the external id of the call that launched them; else those of the host.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from partita.formats.torch_trace import complete_events, event_times, whole_number

Shapes = tuple[tuple[int, ...], ...]
_BACKWARD = "autograd::engine::evaluate_function: "
_STEP = "ProfilerStep#"
_ON_GPU = frozenset({"kernel", "gpu_memcpy", "gpu_memset"})


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedOp:
    """A call of ATen.

    Attributes:
        name: Such as ``aten::linear``.
        shapes: Shape of each argument; empty for one that is no tensor, or where none was recorded.
        forward_s: Seconds of the call.
        backward_s: Seconds of the nodes of backward that it made, and of summing gradients.
    """

    name: str
    shapes: Shapes
    forward_s: float
    backward_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedOps:
    """The ops of a trace.

    Attributes:
        runs: Ops in their order, cut where backward or a step of the profiler comes between.
        has_shapes: Whether shapes were recorded.
        gpu: Name of the GPU whose kernels were timed; empty = the host was timed.
    """

    runs: tuple[tuple[TracedOp, ...], ...]
    has_shapes: bool
    gpu: str = ""


@dataclass(slots=True)
class _Call:
    """A call in the making.

    Attributes:
        event: Its event.
        start_s: When it began.
        end_s: When it ended.
        seconds: Seconds that count.
        backward_s: Seconds of its backward.
    """

    event: Mapping[str, Any]
    start_s: float
    end_s: float
    seconds: float = 0.0
    backward_s: float = 0.0

    @property
    def name(self) -> str:
        return str(self.event.get("name", ""))


def read_traced_ops(value: Any) -> TracedOps:  # noqa: ANN401 (JSON is any value)
    """Return the ops of a trace.

    Raises:
        FormatError: It is no trace, or an event of it is broken.
    """
    events = complete_events(value)
    threads: dict[tuple[str, str], list[_Call]] = {}
    for event in events:
        if event.get("cat") == "cpu_op":
            start_s, end_s = event_times(event)
            place = (str(event.get("pid")), str(event.get("tid")))
            threads.setdefault(place, []).append(_Call(event, start_s, end_s))
    tops = {place: list(_with_tops(calls)) for place, calls in threads.items()}
    gpu = _time(value, events, [pair for pairs in tops.values() for pair in pairs])
    made = Counter(
        place
        for place, pairs in tops.items()
        for call, top in pairs
        if _sequence(call) >= 0 and not top.name.startswith(_BACKWARD)
    )
    if not made:  # without autograd: the thread with the most calls
        made = Counter({place: len(pairs) for place, pairs in tops.items()})
    forward = tops[max(made, key=lambda place: made[place])] if made else []
    _add_backward(forward, tops.values())
    cuts = [call.start_s for pairs in tops.values() for call, _ in pairs if _is_backward(call)]
    cuts += [event_times(e)[0] for e in events if str(e.get("name")).startswith(_STEP)]
    runs = tuple(_runs([call for call, top in forward if call is top], sorted(cuts)))
    return TracedOps(
        runs=runs, has_shapes=any(any(op.shapes) for run in runs for op in run), gpu=gpu
    )


def shapes_of(dims: object) -> Shapes:
    """Return the shapes of a call's arguments; empty for lists of tensors and what is no tensor."""
    if not isinstance(dims, list | tuple):
        return ()
    return tuple(
        tuple(dim) if isinstance(dim, list | tuple) and all(map(_is_length, dim)) else ()
        for dim in dims
    )


def _is_length(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _args(event: Mapping[str, Any]) -> Mapping[str, Any]:
    found = event.get("args")
    return found if isinstance(found, dict) else {}


def _is_backward(call: _Call) -> bool:
    return call.name.startswith(_BACKWARD)


def _sequence(call: _Call) -> int:
    return whole_number(_args(call.event).get("Sequence number"), -1)


def _external(event: Mapping[str, Any]) -> int:
    args = _args(event)
    return whole_number(args.get("External id", args.get("external id")), -1)


def _with_tops(calls: list[_Call]) -> Iterator[tuple[_Call, _Call]]:
    """Yield the calls of a thread, each with the outermost one that contains it."""
    calls.sort(key=lambda call: (call.start_s, -call.end_s))
    top: _Call | None = None
    for call in calls:
        if top is None or call.start_s >= top.end_s:
            top = call
        yield call, top


def _time(
    value: Mapping[str, Any], events: list[dict[str, Any]], pairs: list[tuple[_Call, _Call]]
) -> str:
    """Set the seconds of outermost calls, and return the name of the GPU that was timed."""
    top_of = {_external(call.event): top for call, top in pairs}
    top_of.pop(-1, None)
    kernels = [
        (event, top_of[_external(event)])
        for event in events
        if event.get("cat") in _ON_GPU
        and "Collective name" not in _args(event)
        and _external(event) in top_of
    ]
    for event, top in kernels:
        start_s, end_s = event_times(event)
        top.seconds += end_s - start_s
    if not kernels:
        for call, top in pairs:
            if call is top:
                call.seconds = call.end_s - call.start_s
        return ""
    known = value.get("deviceProperties")
    names = {
        whole_number(one.get("id")): str(one.get("name", ""))
        for one in (known if isinstance(known, list) else ())
        if isinstance(one, dict)
    }
    return names.get(whole_number(_args(kernels[0][0]).get("device"))) or "unnamed"


def _add_backward(
    forward: list[tuple[_Call, _Call]], threads: Iterable[list[tuple[_Call, _Call]]]
) -> None:
    """Add the seconds of the nodes of backward to the calls that made them."""
    owner = {_sequence(call): top for call, top in forward if not _is_backward(top)}
    owner.pop(-1, None)
    for pairs in threads:
        last: _Call | None = None
        for call, top in pairs:
            if call is not top or not _is_backward(call):
                continue
            if _sequence(call) >= 0:
                last = owner.get(_sequence(call))
            if last is not None:
                last.backward_s += call.seconds


def _runs(calls: list[_Call], cuts: list[float]) -> Iterator[tuple[TracedOp, ...]]:
    """Yield the calls of forward as ops, cut where something comes between."""
    run: list[TracedOp] = []
    at = 0
    for call in calls:
        is_cut = at < len(cuts) and cuts[at] <= call.start_s
        while at < len(cuts) and cuts[at] <= call.start_s:
            at += 1
        if is_cut and run:
            yield tuple(run)
            run = []
        if not _is_backward(call):
            run.append(
                TracedOp(
                    name=call.name,
                    shapes=shapes_of(_args(call.event).get("Input Dims")),
                    forward_s=call.seconds,
                    backward_s=call.backward_s,
                )
            )
    if run:
        yield tuple(run)
