"""``partita calibrate``: measure this machine, or a cluster under torchrun."""

from typing import Any

import click

from partita.catalogue.cluster_yaml.writer import write_cluster_yaml
from partita.catalogue.hierarchy import describe_levels
from partita.cli.from_request import takes
from partita.cli.help import Documented
from partita.cli.options import output_options, own_name
from partita.documents import write_bytes, write_text
from partita.flows.calibrate import CalibrateRequest, CalibrationResult, calibrate_request
from partita.formats.dynamicml import write_speed_matrix
from partita.profiler.calibrate.calibrate import ReduceFit, speed_cluster
from partita.profiler.calibrate.records import write_measurement
from partita.units import format_bytes, format_seconds

_MAX_ROWS = 64


@click.command(
    cls=Documented,
    epilog="Example: partita calibrate --devices 2 -o here.yaml\n\n"
    "partita calibrate --nccl-tests all_reduce.txt --cluster 4xdgx-h100 -o mine.yaml\n\n"
    "torchrun --nnodes 2 --nproc-per-node 4 ... -m partita calibrate -o cluster.yaml",
)
@takes(CalibrateRequest)
@click.option("-o", "--output", help="Cluster YAML to write. [cluster.yaml]")
@click.option("--npy", help="Write DynamicMLTrainer's gpu_speed.npy too.")
@click.option("--samples", help="Write all times that were measured to a JSON file.")
@output_options
def command(
    request: CalibrateRequest,
    *,
    output: str | None,
    npy: str | None,
    samples: str | None,
    as_json: bool,
    quiet: bool,
    debug: bool,
) -> None:
    """Measure devices and links, and write them as a cluster.

    Measured are matrix products and copies on each device while all compute, messages of several
    sizes for each ordered pair, and all-reduces; on GPUs other collectives too. Under torchrun the
    ranks of the job are measured, and rank 0 writes. With --nccl-tests nothing is measured: rates
    of collectives are read from what all_reduce_perf and its kin printed.
    """
    from partita.cli.console import print_json, progress  # noqa: PLC0415 (rich only here)

    del debug  # read by main
    with progress("calibrating", quiet=quiet or as_json) as on_progress:
        found = calibrate_request(request, on_progress)
    if found is None:
        return
    written: dict[str, str] = {}
    if output is not None or not as_json:
        written["cluster"] = output or own_name("cluster.yaml")
        write_text(written["cluster"], write_cluster_yaml(found.cluster))
    if npy is not None:
        write_bytes(npy, write_speed_matrix(speed_cluster(found.calibration)))
        written["npy"] = npy
    if samples is not None:
        write_text(samples, write_measurement(found.measurement))
        written["samples"] = samples
    if as_json:
        print_json({**found.to_json(), "written": written})
    elif output != "-":
        _show(found)
        for what, path in written.items():
            click.echo(f"{what} written to {path}")


def _show(result: CalibrationResult) -> None:
    """Print a calibration for people."""
    from partita.cli.console import stdout_console, table  # noqa: PLC0415 (only where it prints)

    console, found = stdout_console(), result.calibration
    names = found.cluster.device_names
    columns = [("device", "left"), ("type", "left"), ("FLOP/s", "right"), ("copies", "right")]
    rows = [
        [f"{value:.3g}" if isinstance(value, float) else str(value) for value in row.values()]
        for row in result.rows()
    ]
    if rows:
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
                [("collective", "left"), *_FIT_COLUMNS, ("bus", "right")],
                [
                    [
                        _collective_name(row),
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


def _collective_name(row: ReduceFit) -> str:
    name = f"{row.kind.replace('_', '-')} of {row.num_devices} devices"
    if row.num_devices == row.ranks_per_host:
        return name
    return f"{name}, {row.ranks_per_host} in a host"


def _fit_cells(fit: Any) -> list[str]:
    pairs = zip(fit.sizes_bytes, fit.use, strict=True)
    odd = [f"{format_bytes(size)} {use.value}" for size, use in pairs if size in fit.off_line]
    return [
        format_seconds(fit.latency_s),
        f"{format_bytes(fit.bandwidth_bytes_per_s)}/s",
        f"{100 * fit.worst_residual:+.1f} %",
        ", ".join(odd) or "-",
    ]
