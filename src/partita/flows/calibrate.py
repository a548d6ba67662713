"""Devices and links of a machine or a job, measured: what ``partita.calibrate`` does."""

import importlib.util
import os
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from partita.catalogue.shorthand import MAX_LOCAL_DEVICES
from partita.core.cluster import Cluster
from partita.documents import read_text
from partita.errors import FormatError, InvalidInputError, UnsupportedError
from partita.flows.fields import ClusterFields
from partita.flows.problem import read_cluster
from partita.flows.results import Result
from partita.flows.traces import read_trace_file, reduce_records, trace_paths
from partita.profiler.calibrate import calibrate as fitting
from partita.profiler.calibrate.calibrate import Calibration
from partita.profiler.calibrate.nccl_tests import KINDS, NcclTest, read_nccl_tests
from partita.profiler.calibrate.records import Measurement, MeasureOptions, read_measurement
from partita.requests import OnProgress, Request, declare, make, silent
from partita.units import format_bytes, format_count, parse_bytes


@dataclass(frozen=True, kw_only=True)
class CalibrateRequest(Request):
    """What to measure, and what to make of it."""

    devices: int | None = declare(
        None,
        minimum=1,
        maximum=MAX_LOCAL_DEVICES,
        usual="all GPUs, or a CPU process per core",
        help="Number of processes of this machine.",
    )
    from_samples: str | None = declare(None, help="File of times to fit; then nothing is measured.")
    nccl_tests: tuple[str, ...] = declare(
        (),
        metavar="FILE",
        help="Output of nccl-tests to read collectives from, or KIND=FILE; then nothing is "
        "measured.",
    )
    trace: tuple[str, ...] = declare(
        (),
        metavar="FILE",
        help="Trace of torch's profiler to read collectives and messages from, of any rank, or a "
        "directory of them; then nothing is measured.",
    )
    cluster: str | None = declare(
        None,
        flags=("-c",),
        usual="as the outputs say",
        help="Cluster that nccl-tests or the traced run ran on, such as 4xdgx-h100.",
    )
    name: str = declare("calibrated", help="Name of the cluster.")
    sizes: str | None = declare(None, help="Sizes of messages, such as 64,64KiB,1MiB,16MiB.")
    budget: float | None = declare(None, usual="60", help="Seconds for all links together.")
    limit: float | None = declare(
        None, usual="60", help="Seconds to wait for a rank before giving up."
    )
    interface: str | None = declare(None, help="Network interface that gloo uses, such as eth0.")
    matrix: bool = declare(False, help="Describe a link for each pair instead of levels.")


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class CalibrationResult(Result):
    """A measured cluster, and how well its figures stand.

    Attributes:
        calibration: The cluster with the fits of its links.
        measurement: The times that were measured.
        has_devices: Whether the devices were measured, and not only collectives.
    """

    calibration: Calibration
    measurement: Measurement
    has_devices: bool = True

    @property
    def cluster(self) -> Cluster:
        """The cluster that was measured: what is saved to a file."""
        return self.calibration.cluster

    def to_json(self) -> dict[str, Any]:
        """Return devices, fits and levels as JSON values."""
        return {**self.calibration.to_json(), "backend": self.measurement.backend}

    def rows(self) -> list[Mapping[str, object]]:
        """Return a row for each device."""
        pairs = zip(self.cluster.devices, self.calibration.devices, strict=True)
        if not self.has_devices:
            return []
        return [
            {
                "device": device.name,
                "type": device.type or record.title,
                "FLOP/s": ", ".join(
                    f"{dtype} {format_count(value)}" for dtype, value in record.flop_per_s.items()
                ),
                "copies": f"{format_bytes(record.memory_bytes_per_s)}/s",
                "speed": device.speed,
            }
            for device, record in pairs
        ]

    def lines(self) -> list[str]:
        """Return what was measured, in one line."""
        found = self.calibration
        return [
            f"{self.cluster.name}: {len(self.cluster)} devices on {len(found.hosts)} hosts, "
            f"{len(found.pairs)} links, {len(found.reductions)} collectives"
        ]


def calibrate(
    *,
    on_progress: OnProgress = silent,
    **options: Any,  # noqa: ANN401 (fields of CalibrateRequest)
) -> CalibrationResult | None:
    """Measure devices and links, and describe them as a cluster.

    Measured are matrix products and copies on each device while all compute, messages of several
    sizes for each ordered pair, and all-reduces. Under torchrun the ranks of the job are measured,
    and None is returned on ranks other than 0.

    Args:
        on_progress: Called with each step.
        **options: The fields of :class:`CalibrateRequest`: the options of ``partita calibrate``.

    Raises:
        InvalidInputError: A value that cannot be, or a file that holds no times.
        UnsupportedError: torch is not there.
        WorkerError: A rank died, or did not answer in time.
    """
    return calibrate_request(make(CalibrateRequest, **options), on_progress)


def calibrate_request(
    request: CalibrateRequest, on_progress: OnProgress = silent
) -> CalibrationResult | None:
    """Measure what a request asks for; see :func:`calibrate`."""
    if request.nccl_tests or request.trace:
        return _from_collectives(request)
    if request.cluster is not None:
        raise InvalidInputError(
            "--cluster is for --nccl-tests and --trace: what is measured here says itself"
        )
    measurement = _measurement(request, on_progress)
    if measurement is None:
        return None
    return CalibrationResult(
        calibration=fitting.calibrate(measurement, name=request.name, keep_matrix=request.matrix),
        measurement=measurement,
    )


def _from_collectives(request: CalibrateRequest) -> CalibrationResult:
    """Return a cluster with the collectives that outputs of ``nccl-tests`` or traces have."""
    if request.from_samples is not None or request.devices is not None:
        raise InvalidInputError(
            "--nccl-tests and --trace measure nothing; expected no --devices, no samples"
        )
    tests = []
    for given in request.nccl_tests:
        kind, _, path = given.rpartition("=")
        if kind not in KINDS and kind:
            kind, path = "", given
        tests.append(read_nccl_tests(read_text(path), kind=kind, path=path))
    known = None
    if request.cluster is not None:
        known, _ = read_cluster(ClusterFields(cluster=request.cluster))
    if request.trace:
        if known is None:
            raise InvalidInputError("a trace does not say where ranks are; give its --cluster")
        records = reduce_records(map(read_trace_file, trace_paths(request.trace)), known)
        tests += [NcclTest(record=record, hosts=(), titles=()) for record in records]
    found = fitting.calibration_of_tests(tests, name=request.name, cluster=known)
    return CalibrationResult(
        calibration=found,
        measurement=Measurement(
            backend="nccl",
            devices=found.devices,
            reductions=tuple(test.record for test in tests),
        ),
        has_devices=False,
    )


def _measurement(request: CalibrateRequest, on_progress: OnProgress) -> Measurement | None:
    """Return what was measured, now or before; None on ranks other than 0."""
    if request.from_samples is not None:
        try:
            return read_measurement(read_text(request.from_samples))
        except FormatError as exc:
            raise (exc if exc.path else exc.at(request.from_samples)) from exc
    options = _options(request)
    if request.interface is not None:
        os.environ["GLOO_SOCKET_IFNAME"] = request.interface
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        if request.devices is not None:
            raise InvalidInputError("--devices is for one machine; torchrun says the ranks here")
        return _measure_job(options, on_progress if os.environ["RANK"] == "0" else silent)
    return _measure_here(request.devices, options, on_progress)


def _options(request: CalibrateRequest) -> MeasureOptions:
    values: dict[str, Any] = {}
    if request.sizes is not None:
        parts = [part.strip() for part in request.sizes.split(",")]
        values["sizes_bytes"] = tuple(sorted({int(parse_bytes(part)) for part in parts} | {64}))
    for key in ("budget", "limit"):
        if getattr(request, key) is not None:
            values[f"{key}_s"] = getattr(request, key)
    return MeasureOptions(**values)


def _check_torch() -> None:
    if importlib.util.find_spec("torch") is None:
        raise UnsupportedError("calibrating needs torch; pip install 'partita[torch]'")


def _measure_here(
    devices: int | None, options: MeasureOptions, on_progress: OnProgress
) -> Measurement:
    # Forking is safe only where nothing can have started threads or computed.
    is_fresh = "torch" not in sys.modules and threading.active_count() == 1
    _check_torch()
    from partita.profiler.calibrate.local import measure_local  # noqa: PLC0415 (torch is an extra)

    return measure_local(devices, options, fork=is_fresh, report=on_progress)


def _measure_job(options: MeasureOptions, on_progress: OnProgress) -> Measurement | None:
    _check_torch()
    from partita.profiler.calibrate.local import measure_job  # noqa: PLC0415 (torch is an extra)
    from partita.ranks.environment import RankEnvironment  # noqa: PLC0415 (torch is an extra)

    return measure_job(RankEnvironment.of(os.environ), options, report=on_progress)
