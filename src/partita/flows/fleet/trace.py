"""A trace, drawn or read and changed: what ``partita.fleet_trace`` and ``fleet trace`` do."""

from dataclasses import dataclass
from typing import Any

from partita.core.fleet import Trace
from partita.errors import InvalidInputError
from partita.fleet.study.generated import CLASS_SPLIT, GPU_SHARES
from partita.fleet.study.traces import TraceOptions, TraceSummary, summary_of
from partita.flows.fleet.inputs import (
    GENERATED,
    JobFields,
    parse_count,
    parse_shares,
    parse_span,
    read_fleet_trace,
    read_profiles,
)
from partita.flows.results import Result
from partita.requests import declare, make


@dataclass(frozen=True, kw_only=True)
class FleetTraceRequest(JobFields):
    """A trace to draw, or one to read and change."""

    source: str | Trace | None = declare(None, is_argument=True, help="Trace to read.")
    jobs: int | None = declare(
        None, minimum=1, usual="100; of a source all", help="Number of jobs."
    )
    load: float | None = declare(
        None,
        above=0,
        maximum=1e6,
        usual="9; of a source its own arrivals",
        help="Jobs per hour, as Poisson arrivals.",
    )
    static: bool = declare(False, help="Let all jobs be there from the start.")
    split: str | None = declare(
        None, help="Shares of classes: image=20,language=70,speech=10, or 20,70,10 for these."
    )
    gpus: str | None = declare(
        None, help="Shares of GPU demands of a drawn trace: 1=70,2=10,4=15,8=5."
    )
    multi_gpu: bool = declare(
        False, help="Use the published shares of GPU demands of a drawn trace: 1=70,2=10,4=15,8=5."
    )
    short: bool = declare(False, help="Draw short durations: 0.5 to 8 hours.")
    drawn_durations: bool = declare(False, help="Draw the durations of a log's jobs, too.")
    single_gpu: bool = declare(False, help="Let every job of a log ask for one GPU.")
    elastic: str | None = declare(
        None, help="GPUs FIRST:LAST that jobs run on; needs points by number of GPUs."
    )
    tenants: str | None = declare(None, help="Shares by which tenants are drawn: a=2,b=1.")


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class FleetTraceResult(Result):
    """A trace and what it holds.

    Attributes:
        trace: The trace: what is saved to a file.
        summary: What it holds, in figures.
        remarks: What of a log does not count as it stands, a sentence each.
    """

    trace: Trace
    summary: TraceSummary
    remarks: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Return the figures as JSON values."""
        return self.summary.to_json()

    def lines(self) -> list[str]:
        """Return what the trace holds, in a line."""
        return [self.summary.line()]


def fleet_trace(source: str | Trace | None = None, /, **options: Any) -> FleetTraceResult:  # noqa: ANN401
    """Draw a trace of jobs, or read and change one.

    Args:
        source: A trace or its file; ``None`` = it is drawn.
        **options: The fields of :class:`FleetTraceRequest`: the options of ``partita fleet trace``.

    >>> len(fleet_trace(jobs=7).trace)
    7

    Raises:
        InvalidInputError: There is no such source or option, or they do not go together.
    """
    return fleet_trace_request(make(FleetTraceRequest, source=source, **options))


def fleet_trace_request(request: FleetTraceRequest) -> FleetTraceResult:
    """Return the trace that a request asks for; see :func:`fleet_trace`."""
    options = _trace_options(request)
    source = GENERATED if request.source is None else request.source
    trace, remarks = read_fleet_trace(
        source, read_profiles(request), options, power_model=request.power_model
    )
    return FleetTraceResult(trace=trace, summary=summary_of(trace), remarks=remarks)


def _trace_options(request: FleetTraceRequest) -> TraceOptions:
    is_drawn = request.source is None
    for name in ("drawn_durations", "single_gpu", "published_filter"):
        if is_drawn and getattr(request, name):
            raise InvalidInputError(f"--{name.replace('_', '-')} is for a log of submissions")
    for name in ("gpus", "multi_gpu"):
        if not is_drawn and getattr(request, name):
            raise InvalidInputError(f"--{name.replace('_', '-')} is for traces that are drawn")
    if request.gpus and request.multi_gpu:
        raise InvalidInputError("--gpus and --multi-gpu exclude each other")
    shares = parse_shares(request.gpus, "--gpus")
    demands = {parse_count(key, "--gpus"): share for key, share in shares.items()}
    return TraceOptions(
        jobs=request.jobs,
        load=request.load,
        static=request.static,
        split=parse_shares(request.split, "--split", tuple(CLASS_SPLIT)),
        gpu_shares=GPU_SHARES if request.multi_gpu else demands or {1: 1.0},
        short=request.short,
        real_durations=not request.drawn_durations,
        multi_gpu=not request.single_gpu,
        published_filter=request.published_filter,
        elastic=parse_span(request.elastic, "--elastic"),
        tenants=parse_shares(request.tenants, "--tenants"),
        seed=request.seed,
    )
