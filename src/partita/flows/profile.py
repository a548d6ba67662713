"""A model in, a graph with costs out: what ``partita.profile`` and the command ``profile`` do."""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from partita.catalogue.catalogue import load_catalogue
from partita.core.codec import encode
from partita.core.columns import thawed
from partita.core.graph import Graph
from partita.core.problem import Mode
from partita.documents import load
from partita.errors import InvalidInputError
from partita.flows.estimated import (
    check_model,
    estimate_origin,
    estimator_of,
    find_modules_here,
    origin_of,
)
from partita.flows.extras import torch_needed
from partita.flows.fields import EstimateFields, SourceFields
from partita.flows.results import Result
from partita.requests import declare, fields_of, make
from partita.units import format_seconds

if TYPE_CHECKING:
    from partita.capture.origin import Captures, ModelOrigin
    from partita.flows.trace_costs import TracedCosts
    from partita.profiler.cache import ProfileCache
    from partita.profiler.measure.measure import Measured, ProfileOptions

_OF_MEASURING = frozenset(
    {
        "second_batch_size",
        "tp",
        "rounds",
        "warmup",
        "average",
        "profile_device",
        "device_type",
        "threads",
        "equal_once",
        "match_whole",
        "cache",
        "no_cache",
    }
)
"""Fields of a request that say how to measure."""
SLOWEST = 5
"""Ops in the table of the slowest ones."""


@dataclass(frozen=True, kw_only=True)
class ProfileRequest(SourceFields):
    """A model, and how it is measured or estimated."""

    model: str = declare("", is_argument=True, help="Name of a model.")
    batch_size: int | None = declare(
        None, minimum=1, help="Samples in the microbatch that is measured."
    )
    second_batch_size: int | None = declare(
        None, minimum=1, help="Another batch size to measure, which says how costs grow."
    )
    tp: int | None = declare(
        None,
        minimum=2,
        help="Ranks of a tensor-parallel group: the ops of one of them are measured, too.",
    )
    rounds: int = declare(8, minimum=1, help="Rounds to measure.")
    warmup: int = declare(1, minimum=0, help="Rounds before those that are measured.")
    average: str = declare(
        "median",
        choices=("median", "minimum"),
        help="Average of the rounds, without the first quarter.",
    )
    mode: str = declare(
        Mode.TRAINING.value,
        choices=[mode.value for mode in Mode],
        help="Mode of the model: training or inference.",
    )
    seed: int = declare(0, help="Seed of weights and data.")
    profile_device: str = declare("cpu", help="Device to measure on, cpu or cuda:0.")
    device_type: str = declare(
        "", usual="cpu, or the GPU's type", help="Name of the type of device in the graph."
    )
    threads: int | None = declare(None, minimum=1, help="Number of torch's threads.")
    equal_once: bool = declare(False, help="Time equal ops of repeated blocks once.")
    match_whole: bool = declare(False, help="Scale ops so that they sum to the whole step.")
    estimate: str | None = declare(
        None, help="Types of devices to estimate for instead of measuring, such as a100,v100."
    )
    from_trace: tuple[str, ...] = declare(
        (),
        metavar="FILE",
        help="Trace of torch's profiler to take the costs of ops from, of any rank, or a directory "
        "of them; then nothing is measured, and ops that it does not have are estimated.",
    )
    cache: str | None = declare(
        None,
        usual="$PARTITA_CACHE, ~/.cache/partita",
        help="Directory of earlier profiles.",
    )
    no_cache: bool = declare(False, help="Measure anew and keep nothing.")


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class ProfileResult(Result):
    """A model as a graph with costs.

    Attributes:
        graph: The graph, which remembers its model: what is saved to a file.
        measured: The measurement; None where costs were estimated or traced.
        traced: What traces say of it; None where there were none.
    """

    graph: Graph
    measured: "Measured | None" = None
    traced: "TracedCosts | None" = None

    def lines(self) -> list[str]:
        """Return how the costs were found, and their sums."""
        if self.measured is not None:
            how = measured_lines(self.measured)
        elif self.traced is not None:
            how = self.traced.lines()
        else:
            how = estimate_lines(self.graph)
        return [f"{self.graph.name}: {len(self.graph)} ops", *how]

    def rows(self) -> list[Mapping[str, object]]:
        """Return the slowest ops, the slowest first."""
        costs = self.graph.costs[0]
        return [
            {
                "op": self.graph.ops.names[row],
                "forward_s": float(costs.forward_s[row]),
                "backward_s": float(costs.backward_s[row]),
                "saved_bytes": float(self.graph.ops.saved_bytes[row]),
            }
            for row in slowest_ops(self.graph)
        ]

    def to_json(self) -> dict[str, Any]:
        """Return how it was measured or estimated, and the graph as its document."""
        graph = encode(self.graph)
        if self.traced is not None:
            return {"trace": self.traced.to_json(), "graph": graph}
        if self.measured is None:
            return {"estimate": thawed(self.graph.annotations["estimate"]), "graph": graph}
        record = self.measured.record.to_json()
        whole = {name: value for name, value in record.items() if not name.endswith("_spread")}
        return {**whole, "cached": self.measured.is_cached, "graph": graph}


@dataclass(frozen=True, kw_only=True, eq=False)
class ProfiledModel:
    """A model with its costs on this machine.

    Attributes:
        captures: The model as it was captured, for whoever runs it next.
        measured: The measurement.
        graph: The measured graph, which remembers its origin.
    """

    captures: "Captures"
    measured: "Measured"
    graph: Graph


def profile(
    model: str,
    /,
    *,
    on_round: Callable[[int, int], None] = lambda _, __: None,
    **options: Any,  # noqa: ANN401 (fields of ProfileRequest)
) -> ProfileResult:
    """Measure time and memory of every op of a model, or estimate them by shapes.

    Args:
        model: A built-in name, a Hugging Face configuration, or ``package.module:callable``.
        on_round: Called with the rounds that are done, and how many there are.
        **options: The fields of :class:`ProfileRequest`: the options of ``partita profile``.

    Raises:
        InvalidInputError: There is no such model or option.
        UnsupportedError: torch is not there, or the device.
    """
    return profile_request(make(ProfileRequest, model=model, **options), on_round)


def profile_request(
    request: ProfileRequest, on_round: Callable[[int, int], None] = lambda _, __: None
) -> ProfileResult:
    """Profile what a request asks for; see :func:`profile`."""
    request = replace(request, model=check_model(request.model))
    if request.from_trace:
        return _traced(request)
    if request.estimate is not None:
        if request.tp is not None:
            raise InvalidInputError(
                "--tp measures a rank of a group; --estimate prices one device, and train and run "
                "divide its costs by shapes"
            )
        return ProfileResult(graph=_estimated(request, request.estimate.split(",")))
    if request.profile_device == "meta":
        raise InvalidInputError("nothing can be measured on meta; --estimate prices it instead")
    for field in fields_of(EstimateFields):
        if field.name in request.given():
            raise InvalidInputError(
                f"{field.flag} is for --estimate; what runs is measured as it is"
            )
    with torch_needed("profiles need"):
        from partita.profiler.measure.costs import Average  # noqa: PLC0415 (likewise)
        from partita.profiler.measure.measure import ProfileOptions  # noqa: PLC0415 (likewise)
    origin = origin_of(
        request.model, request, request.mode, batch_size=request.batch_size, seed=request.seed
    )
    here = replace(origin, options=replace(origin.options, device=request.profile_device))
    options = ProfileOptions(
        rounds=request.rounds,
        warmup=request.warmup,
        average=Average(request.average),
        equal_once=request.equal_once,
        match_whole=request.match_whole,
        device_type=request.device_type,
        threads=request.threads or 0,
    )
    profiled = profiled_model(
        here,
        options,
        cache=None if request.no_cache else profile_cache(request.cache),
        second_batch_size=request.second_batch_size or 0,
        tensor_degree=request.tp or 1,
        on_round=on_round,
    )
    measured = profiled.measured  # a graph remembers its model, not where it was measured
    return ProfileResult(graph=origin.recorded_in(measured.graph), measured=measured)


def _traced(request: ProfileRequest) -> ProfileResult:
    """Return the model with the costs of traces, estimated where these have none."""
    for field in fields_of(ProfileRequest):
        if field.name in request.given() and field.name in _OF_MEASURING:
            raise InvalidInputError(
                f"{field.flag} is for what is measured here; --from-trace is not"
            )
    if request.recomputes_blocks:
        raise InvalidInputError("--recompute is for estimates; a trace has what ran")
    from partita.flows.trace_costs import (  # noqa: PLC0415 (only where there are traces)
        read_ops,
        traced_type,
        with_traced_costs,
    )

    traces = read_ops(request.from_trace)
    graph = _estimated(request, [traced_type(traces, load_catalogue(), request.estimate)])
    with torch_needed("profiles need"):
        from partita.capture.origin import Captures, load_origin, origin_of  # noqa: PLC0415
        from partita.profiler.estimate.calls import calls_of  # noqa: PLC0415 (imports torch)
    origin = origin_of(graph)
    bare = replace(origin, options=replace(origin.options, device="meta"))
    captured = Captures(load_origin(bare), bare).at(graph.batch_size)
    traced = with_traced_costs(graph, calls_of(captured), traces)
    return ProfileResult(graph=traced.graph, traced=traced)


def _estimated(request: ProfileRequest, types: list[str]) -> Graph:
    """Return the model priced by shapes alone."""
    if request.profile_device != "cpu":
        raise InvalidInputError("--profile-device says where to measure; --estimate does not")
    estimated = estimator_of(
        request.model, request, request.mode, batch_size=request.batch_size, seed=request.seed
    )
    graph = estimated([name.strip() for name in types])
    origin = estimate_origin(request.model, request, request.mode, graph, seed=request.seed)
    return origin.recorded_in(graph)


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class MergedProfile(Result):
    """One graph with the costs of several.

    Attributes:
        graph: The graph: what is saved to a file.
    """

    graph: Graph

    def lines(self) -> list[str]:
        """Return the types of devices that the graph has costs for, in one line."""
        types = ", ".join(costs.device_type or "any device" for costs in self.graph.costs)
        return [f"{self.graph.name}: {len(self.graph)} ops with costs for {types}"]

    def rows(self) -> list[Mapping[str, object]]:
        """Return the sums of each type of device."""
        return [
            {
                "device_type": costs.device_type,
                "forward_s": float(costs.forward_s.sum()),
                "backward_s": float(costs.backward_s.sum()),
            }
            for costs in self.graph.costs
        ]

    def to_json(self) -> dict[str, Any]:
        """Return the graph as its document."""
        return {"graph": encode(self.graph)}


def merge_profiles(*graphs: str | Path | Graph | ProfileResult) -> MergedProfile:
    """Make one graph of several profiles of one model, each measured on other types of devices.

    Args:
        *graphs: The graphs, their files, or results of :func:`profile`; the first one's first type
            of device stays the reference.

    Raises:
        InvalidInputError: They are of several models, sizes or types, or two have costs for one
            type of device.
    """
    with torch_needed("profiles need"):
        from partita.profiler.merge import merge_costs  # noqa: PLC0415 (imports torch)
    found = [_graph(each) for each in graphs]
    files = [str(each) if isinstance(each, str | Path) else _graph(each).name for each in graphs]
    return MergedProfile(graph=merge_costs(found, files))


def _graph(source: str | Path | Graph | ProfileResult) -> Graph:
    if isinstance(source, ProfileResult):
        return source.graph
    if isinstance(source, Graph):
        return source
    found = load(str(source))
    if not isinstance(found, Graph):
        raise InvalidInputError(f"{source} holds a {type(found).__name__}; expected a graph")
    return found


def profiled_model(
    origin: "ModelOrigin",
    options: "ProfileOptions",
    *,
    cache: "ProfileCache | None" = None,
    second_batch_size: int = 0,
    tensor_degree: int = 1,
    on_round: Callable[[int, int], None] = lambda _, __: None,
) -> ProfiledModel:
    """Return a model with its costs, from the cache if it is there.

    Args:
        origin: The model, and how it is captured.
        options: How it is measured.
        cache: Where measurements are kept; nowhere if not given.
        second_batch_size: Another batch size to measure; 0 = none.
        tensor_degree: Ranks of a tensor-parallel group of which one is measured too; 1 = none.
        on_round: Called with the rounds that are done, and how many there are.
    """
    from partita.capture.origin import Captures, load_origin  # noqa: PLC0415 (torch)
    from partita.profiler.measure.model import (  # noqa: PLC0415 (likewise)
        CaptureOptions,
        profile_source,
    )

    find_modules_here()
    captures = Captures(load_origin(origin), origin)
    measured = profile_source(
        captures.source,
        options=options,
        capture_options=CaptureOptions(
            granularity=origin.granularity,
            mode=origin.mode,
            second_batch_size=second_batch_size,
            tensor_degree=tensor_degree,
        ),
        cache=cache,
        captured=captures.at(),
        progress=on_round,
    )
    return ProfiledModel(
        captures=captures, measured=measured, graph=origin.recorded_in(measured.graph)
    )


def profile_cache(directory: str | None = None) -> "ProfileCache":
    """Return where measurements are kept: a directory, or the usual one."""
    from partita.profiler.cache import ProfileCache  # noqa: PLC0415 (imports torch)

    usual = os.environ.get("PARTITA_CACHE") or Path.home() / ".cache" / "partita" / "profiles"
    return ProfileCache(directory or usual)


def slowest_ops(graph: Graph) -> list[int]:
    """Return the ops whose forward and backward take longest, the slowest first."""
    costs = graph.costs[0]
    seconds = costs.forward_s + costs.backward_s
    slowest: list[int] = (-seconds).argsort(kind="stable")[:SLOWEST].tolist()
    return slowest


def measured_lines(measured: "Measured") -> list[str]:
    """Return how a model was measured, and the sum of its ops against the whole step."""
    graph, record = measured.graph, measured.record
    again = " · from the cache" if measured.is_cached else ""
    length = graph.tokens_per_sample
    tokens = f" of {length:,} tokens" if length else ""
    threads = f"{record.threads} thread{'s' * (record.threads > 1)}"
    return [
        f"{record.mode} at batch size {graph.batch_size}{tokens} in {graph.dtype} on "
        f"{record.processor}, {threads} · {record.average} of {record.used_rounds} rounds{again}",
        f"forward {format_seconds(record.sum_forward_s)}, backward "
        f"{format_seconds(record.sum_backward_s)}: sum of ops {record.ratio:.2f} x the whole step "
        f"({format_seconds(record.whole_s)})" + (", scaled to it" if record.is_scaled else ""),
        *(_rank_line(graph, degree) for degree in sorted(set(graph.degrees.tp.tolist()) - {1})),
        *([record.busy] if record.busy else []),
    ]


def _rank_line(graph: Graph, degree: int) -> str:
    """Return what a rank of a tensor-parallel group computes against one device."""
    table = graph.degrees
    seconds = table.forward_s + table.backward_s
    rank, whole = float(seconds[table.tp == degree].sum()), float(seconds[table.tp == 1].sum())
    return (
        f"a rank of {degree} tensor-parallel ones: {format_seconds(rank)}, "
        f"{rank / max(whole, 1e-30):.2f} x one device"
    )


def estimate_lines(graph: Graph) -> list[str]:
    """Return what a graph's estimates say of each type of device, and how accurate they are."""
    said = graph.annotations["estimate"]
    return [
        f"{costs.device_type}: forward {format_seconds(float(costs.forward_s.sum()))}, backward "
        f"{format_seconds(float(costs.backward_s.sum()))} for {graph.batch_size} samples; "
        f"{said[costs.device_type]['accuracy']}"
        for costs in graph.costs
        if costs.device_type in said
    ]
