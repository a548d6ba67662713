"""``partita calibrate``: measure this machine, or a cluster under torchrun."""

import importlib.util
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from partita.catalogue.cluster_yaml.writer import write_cluster_yaml
from partita.catalogue.shorthand import MAX_LOCAL_DEVICES
from partita.cli.options import output_options
from partita.documents import unused_path, write_bytes, write_text
from partita.errors import FormatError, InvalidInputError, UnsupportedError
from partita.formats.dynamicml import write_speed_matrix
from partita.profiler.calibrate.calibrate import Calibration, calibrate, speed_cluster
from partita.profiler.calibrate.hierarchy import describe_levels
from partita.profiler.calibrate.records import (
    Measurement,
    MeasureOptions,
    read_measurement,
    write_measurement,
)
from partita.units import format_bytes, format_count, format_seconds, parse_bytes

_MAX_ROWS = 64


@click.command(
    epilog="Example: partita calibrate --devices 2 -o here.yaml\n\n"
    "torchrun --nnodes 2 --nproc-per-node 4 ... -m partita calibrate -o cluster.yaml"
)
@click.option(
    "--devices",
    type=click.IntRange(1, MAX_LOCAL_DEVICES),
    help="Processes of this machine. [all GPUs, or a CPU process a core]",
)
@click.option("-o", "--output", help="Cluster YAML to write. [cluster.yaml]")
@click.option("--npy", help="Write DynamicMLTrainer's gpu_speed.npy too.")
@click.option("--samples", help="Write all times that were measured to a JSON file.")
@click.option("--from-samples", help="Measure nothing: fit the times of such a file.")
@click.option("--name", default="calibrated", show_default=True, help="Name of the cluster.")
@click.option("--sizes", help="Sizes of messages, such as 64,64KiB,1MiB,16MiB.")
@click.option("--budget", type=float, help="Seconds for all links together. [60]")
@click.option("--limit", type=float, help="Seconds to wait for a rank before giving up. [60]")
@click.option("--interface", help="Network interface that gloo uses, such as eth0.")
@click.option("--matrix", is_flag=True, help="Write a link for each pair instead of levels.")
@output_options
def command(
    output: str | None, npy: str | None, samples: str | None, as_json: bool, **rest: Any
) -> None:
    """Measure devices and links, and write them as a cluster.

    Measured are matrix products and copies on each device while all compute, messages of several
    sizes for each ordered pair, and all-reduces. Under torchrun the ranks of the job are measured,
    and rank 0 writes.
    """
    measurement = _measurement(rest, quiet=rest["quiet"] or as_json)
    if measurement is None:
        return
    found = calibrate(measurement, name=rest["name"], keep_matrix=rest["matrix"])
    written: dict[str, str] = {}
    if output is not None or not as_json:
        path = output or str(unused_path(Path("cluster.yaml")))
        write_text(path, write_cluster_yaml(found.cluster))
        written["cluster"] = path
    if npy is not None:
        write_bytes(npy, write_speed_matrix(speed_cluster(found)))
        written["npy"] = npy
    if samples is not None:
        write_text(samples, write_measurement(measurement))
        written["samples"] = samples
    if as_json:
        from partita.cli.console import print_json  # noqa: PLC0415 (rich only where it prints)

        print_json(found.to_json() | {"backend": measurement.backend, "written": written})
    elif output != "-":
        show(found)
        for what, path in written.items():
            click.echo(f"{what} written to {path}")


def _measurement(rest: dict[str, Any], *, quiet: bool) -> Measurement | None:
    """Return what was measured, now or before; None on ranks other than 0."""
    if rest["from_samples"] is not None:
        from partita.documents import read_text  # noqa: PLC0415 (only for a file)

        try:
            return read_measurement(read_text(rest["from_samples"]))
        except FormatError as exc:
            raise (exc if exc.path else exc.at(rest["from_samples"])) from exc
    options = _options(rest)
    from partita.cli.console import progress  # noqa: PLC0415 (rich only where it prints)

    if rest["interface"] is not None:
        os.environ["GLOO_SOCKET_IFNAME"] = rest["interface"]
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        if rest["devices"] is not None:
            raise InvalidInputError("--devices is for one machine; torchrun says the ranks here")
        with progress("calibrating", quiet=quiet or os.environ["RANK"] != "0") as say:
            return _measure_job(options, say)
    with progress("calibrating", quiet=quiet) as say:
        return _measure_here(rest["devices"], options, say)


def _options(rest: dict[str, Any]) -> MeasureOptions:
    values: dict[str, Any] = {}
    if rest["sizes"] is not None:
        parts = [part.strip() for part in rest["sizes"].split(",")]
        values["sizes_bytes"] = tuple(sorted({int(parse_bytes(part)) for part in parts} | {64}))
    for key in ("budget", "limit"):
        if rest[key] is not None:
            values[f"{key}_s"] = rest[key]
    return MeasureOptions(**values)


def _check_torch() -> None:
    if importlib.util.find_spec("torch") is None:
        raise UnsupportedError("calibrating needs torch; pip install 'partita[torch]'")


def _measure_here(
    devices: int | None, options: MeasureOptions, say: Callable[[str], None]
) -> Measurement:
    # Forking is safe only where nothing can have started threads or computed.
    is_fresh = "torch" not in sys.modules and threading.active_count() == 1
    _check_torch()
    from partita.profiler.calibrate.local import measure_local  # noqa: PLC0415 (torch is an extra)

    return measure_local(devices, options, fork=is_fresh, report=say)


def _measure_job(options: MeasureOptions, say: Callable[[str], None]) -> Measurement | None:
    _check_torch()
    from partita.profiler.calibrate.job import measure_job  # noqa: PLC0415 (torch is an extra)
    from partita.ranks.environment import RankEnvironment  # noqa: PLC0415 (torch is an extra)

    return measure_job(RankEnvironment.of(os.environ), options, report=say)


def show(found: Calibration) -> None:
    """Print a calibration for people."""
    from partita.cli.console import stdout_console, table  # noqa: PLC0415 (only where it prints)

    console = stdout_console()
    names = found.cluster.device_names
    columns = [("device", "left"), ("type", "left"), ("FLOP/s", "right"), ("copies", "right")]
    rows: list[list[str]] = [
        [
            name,
            device.type or record.title,
            ", ".join(f"{dtype} {format_count(v)}" for dtype, v in record.flop_per_s.items()),
            f"{format_bytes(record.memory_bytes_per_s)}/s",
            f"{device.speed:.3g}",
        ]
        for name, device, record in zip(names, found.cluster.devices, found.devices, strict=True)
    ]
    console.print(table([*columns, ("speed", "right")], rows))
    if found.pairs:
        shown = found.pairs[:_MAX_ROWS]
        console.print(
            table(
                [("from", "left"), ("to", "left"), *_FIT_COLUMNS],
                [[names[p.source], names[p.target], *_fit_cells(p.fit)] for p in shown],
            )
        )
        if len(found.pairs) > len(shown):
            click.echo(f"... {len(found.pairs) - len(shown)} more pairs: --json has them")
    if found.reductions:
        console.print(
            table(
                [("all-reduce over", "left"), *_FIT_COLUMNS, ("bus", "right")],
                [
                    [
                        f"{row.num_devices} devices",
                        *_fit_cells(row.fit),
                        f"{format_bytes(row.bus_bytes_per_s)}/s",
                    ]
                    for row in found.reductions
                ],
            )
        )
    if found.cluster.matrix is not None:
        click.echo("links: a matrix, one for each ordered pair")
    for line in describe_levels(found.cluster.levels, names) if found.cluster.levels else ():
        click.echo(line)


_FIT_COLUMNS = (
    ("latency", "right"),
    ("bandwidth", "right"),
    ("worst residual", "right"),
    ("off the line", "left"),
)


def _fit_cells(fit: Any) -> list[str]:
    pairs = zip(fit.sizes_bytes, fit.use, strict=True)
    odd = [f"{format_bytes(size)} {use.value}" for size, use in pairs if size in fit.off_line]
    return [
        format_seconds(fit.latency_s),
        f"{format_bytes(fit.bandwidth_bytes_per_s)}/s",
        f"{100 * fit.worst_residual:+.1f} %",
        ", ".join(odd) or "-",
    ]
