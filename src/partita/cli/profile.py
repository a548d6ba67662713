"""``partita profile``: from a model to a graph with measured costs."""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import click

from partita.cli.options import (
    MODES,
    OPTIMIZER_BYTES,
    estimate_options,
    output_options,
    source_options,
)
from partita.core.graph import Graph
from partita.core.json_values import thawed
from partita.errors import InvalidInputError
from partita.flows.extras import torch_needed
from partita.flows.summary import estimate_basis
from partita.units import format_seconds

_SLOWEST = 5


@click.command(
    epilog="Example: partita profile gpt3-small --scale 0.1 --batch-size 2\n\n"
    "partita profile merge a100.json v100.json -o both.json"
)
@click.argument("model")
@click.argument("files", nargs=-1)
@click.option("--batch-size", type=click.IntRange(1), help="Samples of the microbatch to measure.")
@click.option(
    "--second-batch-size", type=click.IntRange(1), help="Measure this too: how costs grow."
)
@click.option("--rounds", type=click.IntRange(1), default=8, show_default=True, help="Rounds.")
@click.option(
    "--warmup", type=click.IntRange(0), default=1, show_default=True, help="Rounds before."
)
@click.option(
    "--average",
    type=click.Choice(("median", "minimum")),
    default="median",
    show_default=True,
    help="Of the rounds, without the first quarter.",
)
@click.option("--mode", type=click.Choice(MODES), default="training", show_default=True)
@source_options
@click.option("--profile-device", default="cpu", show_default=True, help="cpu or cuda:0.")
@click.option("--device-type", default="", help="What to call the costs. [cpu, or the GPU's type]")
@click.option("--threads", type=click.IntRange(1), help="Threads of torch.")
@click.option("--equal-once", is_flag=True, help="Time equal ops of repeated blocks once.")
@click.option("--match-whole", is_flag=True, help="Scale ops so that they sum to the whole step.")
@click.option(
    "--estimate", "types", help="Estimate for types of devices instead of measuring: a100,v100."
)
@estimate_options
@click.option("--cache", help="Directory of earlier profiles. [$PARTITA_CACHE, ~/.cache/partita]")
@click.option("--no-cache", is_flag=True, help="Measure anew and keep nothing.")
@click.option("-o", "--output", help="Where to write the graph; - is stdout. [NAME.graph.json]")
@output_options
def command(model: str, files: tuple[str, ...], **rest: Any) -> None:
    """Measure time and memory of every op of MODEL and write it as a graph.

    MODEL is a built-in name (see 'partita models'), a Hugging Face configuration, or
    package.module:callable, a callable that returns a model with example inputs, and a loss
    function if the model returns no loss. A Hugging Face configuration is the path of a config.json
    or of its directory, or hf:NAME such as hf:tiny-llama or hf:LlamaConfig?num_hidden_layers=2.

    'partita profile merge FILE FILE ...' makes one graph of several that were measured on other
    devices.
    """
    rest.pop("debug")
    if model == "merge":
        _merge(files, rest["output"], as_json=rest["as_json"])
        return
    if files:
        raise InvalidInputError(f"one model at a time; {files[0]!r} is too many")
    if rest["types"] is not None:
        if rest["profile_device"] != "cpu":
            raise InvalidInputError("--profile-device says where to measure; --estimate does not")
        _estimate(model, rest)
        return
    measured = _measure(model, rest)
    graph = origin_from(model, rest).recorded_in(measured.graph)
    record = measured.record.as_values()
    figures = {name: value for name, value in record.items() if not name.endswith("_spread")}
    _write(
        graph,
        rest["output"],
        show=lambda: show(measured),
        figures={**figures, "cached": measured.is_cached} if rest["as_json"] else None,
    )


def _write(
    graph: Graph,
    output: str | None,
    *,
    show: Callable[[], None],
    figures: dict[str, Any] | None = None,
) -> None:
    """Write a graph, and print what is to be said about it, as JSON if there are figures."""
    from partita.cli.console import print_json  # noqa: PLC0415 (rich only where it prints)
    from partita.core.codec import encode  # noqa: PLC0415 (likewise)
    from partita.documents import save, unused_path  # noqa: PLC0415 (likewise)

    target = output or (
        None if figures is not None else str(unused_path(Path(f"{graph.name}.graph.json")))
    )
    if target is not None:
        save(graph, target)
    if target == "-":
        return
    if figures is not None:
        print_json({**figures, "written": target, "graph": encode(graph)})
        return
    show()
    click.echo(f"written to {target}")
    cluster = (
        "--devices 2"
        if graph.costs[0].device_type == "cpu"
        else f"-c 4x{graph.costs[0].device_type}"
    )
    click.echo(f"next: partita plan {target} {cluster}")


def _merge(files: tuple[str, ...], output: str | None, *, as_json: bool) -> None:
    from partita.cli.console import model_line  # noqa: PLC0415 (rich only where it prints)
    from partita.documents import load  # noqa: PLC0415 (likewise)

    with torch_needed("profiles need"):
        from partita.profiler.merge import merge_costs  # noqa: PLC0415 (imports torch)
    graphs = []
    for file in files:
        found = load(file)
        if not isinstance(found, Graph):
            raise InvalidInputError(f"{file} holds a {type(found).__name__}; expected a graph")
        graphs.append(found)
    merged = merge_costs(graphs, files)

    _write(
        merged,
        output,
        show=lambda: click.echo(model_line(merged)),
        figures={} if as_json else None,
    )


def model_estimator(model: str, rest: dict[str, Any]) -> Callable[..., Graph]:
    """Return a function of types of devices that prices a model by shapes alone.

    Nothing is allocated, nothing runs. It also takes ``batch_size`` and ``catalogue``.
    """
    with torch_needed("estimates need"):
        from partita.capture.captured import CaptureMode, Granularity  # noqa: PLC0415 (torch)
        from partita.capture.sources import load_source  # noqa: PLC0415 (likewise)
        from partita.profiler.estimate.estimate import (  # noqa: PLC0415 (likewise)
            EstimateOptions,
            estimate_source,
        )
        from partita.profiler.estimate.trace import Kernels  # noqa: PLC0415 (likewise)
    find_modules_here()
    infers = rest["mode"] == "inference"
    options = EstimateOptions(
        kernels=Kernels(rest["kernels"]),
        arithmetic=rest["arithmetic"],
        recompute=rest["recompute"],
        granularity=Granularity(rest["granularity"]),
        mode=CaptureMode.EVAL if infers else CaptureMode.TRAINING,
    )
    source = load_source(model, read_source_options({**rest, "profile_device": "meta"}))
    return partial(estimate_source, source, options=options)


def _estimate(model: str, rest: dict[str, Any]) -> None:
    """Price the model by shapes alone."""
    from partita.cli.console import basis_line, model_line  # noqa: PLC0415 (rich only here)

    graph = model_estimator(model, rest)([name.strip() for name in rest["types"].split(",")])
    graph = estimate_origin(model, rest, graph).recorded_in(graph)
    said = graph.annotations["estimate"]

    def show() -> None:
        for line in (model_line(graph), basis_line(graph), *estimate_lines(graph)):
            click.echo(line)

    figures = {"estimate": thawed(said)} if rest["as_json"] else None
    _write(graph, rest["output"], show=show, figures=figures)


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


def read_source_options(rest: dict[str, Any]) -> Any:
    """Return what the options want of a model."""
    from partita.capture.sources import SourceOptions  # noqa: PLC0415 (imports torch)

    return SourceOptions(
        batch_size=rest["batch_size"] or 0,
        sequence_length=rest["sequence_length"] or 0,
        scale=rest["scale"],
        dtype=rest["dtype"] or "",
        device=rest["profile_device"],
        seed=rest["seed"],
    )


def origin_from(model: str, rest: dict[str, Any]) -> Any:
    """Return what a graph remembers of the model that it is made from."""
    from partita.capture.captured import CaptureMode, Granularity  # noqa: PLC0415 (torch)
    from partita.capture.origin import ModelOrigin  # noqa: PLC0415 (likewise)

    infers = rest["mode"] == "inference"
    return ModelOrigin(
        text=model,
        options=read_source_options({**rest, "profile_device": "cpu"}),
        granularity=Granularity(rest["granularity"]),
        mode=CaptureMode.EVAL if infers else CaptureMode.TRAINING,
    )


def estimate_origin(model: str, rest: dict[str, Any], graph: Graph) -> Any:
    """Return what an estimated graph remembers of its model: the sizes that it was estimated at.

    A configuration has its own dtype and length where it is estimated and others where it is
    measured; a run of the plan must have those that were planned for.
    """
    from partita.capture.sources import is_configuration  # noqa: PLC0415 (imports torch)

    known = {**rest, "batch_size": graph.batch_size}
    basis = estimate_basis(graph)
    if basis is not None and is_configuration(model):
        known |= {"dtype": basis["dtype"], "sequence_length": basis["tokens_per_sample"]}
    return origin_from(model, known)


def _measure(model: str, rest: dict[str, Any]) -> Any:
    if rest["profile_device"] == "meta":
        raise InvalidInputError("nothing can be measured on meta; --estimate prices it instead")
    with torch_needed("profiles need"):
        from partita.capture.captured import CaptureMode, Granularity  # noqa: PLC0415 (torch)
        from partita.capture.sources import load_source  # noqa: PLC0415 (likewise)
        from partita.profiler.measure.costs import Average  # noqa: PLC0415 (likewise)
        from partita.profiler.measure.measure import ProfileOptions  # noqa: PLC0415 (likewise)
        from partita.profiler.measure.model import (  # noqa: PLC0415 (likewise)
            CaptureOptions,
            profile_source,
        )
    find_modules_here()
    source = load_source(model, read_source_options(rest))
    training = rest["mode"] == "training"
    with _progress(source.name, quiet=rest["quiet"] or rest["as_json"]) as tell:
        return profile_source(
            source,
            options=ProfileOptions(
                rounds=rest["rounds"],
                warmup=rest["warmup"],
                average=Average(rest["average"]),
                equal_once=rest["equal_once"],
                match_whole=rest["match_whole"],
                device_type=rest["device_type"],
                threads=rest["threads"] or 0,
            ),
            capture_options=CaptureOptions(
                granularity=Granularity(rest["granularity"]),
                mode=CaptureMode.TRAINING if training else CaptureMode.EVAL,
                second_batch_size=rest["second_batch_size"] or 0,
            ),
            cache=None if rest["no_cache"] else profile_cache(rest["cache"]),
            progress=tell,
        )


def find_modules_here() -> None:
    """Let package.module:callable name modules of the current directory, as python -m would."""
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)


def profile_cache(directory: str | None = None) -> Any:
    """Return where measurements are kept: a directory, or the usual one."""
    from partita.profiler.cache import ProfileCache  # noqa: PLC0415 (imports torch)

    usual = os.environ.get("PARTITA_CACHE") or Path.home() / ".cache" / "partita" / "profiles"
    return ProfileCache(directory or usual)


@contextmanager
def _progress(name: str, *, quiet: bool) -> Iterator[Callable[[int, int], None]]:
    """Show a bar on a terminal, and nothing elsewhere."""
    if quiet or not sys.stderr.isatty():
        yield lambda _, __: None
        return
    from rich.console import Console  # noqa: PLC0415 (only on a terminal)
    from rich.progress import Progress  # noqa: PLC0415 (likewise)

    with Progress(console=Console(file=sys.stderr), transient=True) as bar:
        task = bar.add_task(f"profiling {name}", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def measured_lines(measured: Any) -> list[str]:
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
    ]


def show(measured: Any) -> None:
    """Print what was measured."""
    from partita.cli.console import (  # noqa: PLC0415 (rich only where it prints)
        model_line,
        stdout_console,
        table,
    )
    from partita.units import format_bytes  # noqa: PLC0415 (likewise)

    graph, record, console = measured.graph, measured.record, stdout_console()
    console.print(model_line(graph))
    for line in measured_lines(measured):
        console.print(line)
    parameters = graph.parameters
    trained = float(parameters.elements[parameters.trainable].sum())
    states = ", ".join(f"{n} {format_bytes(trained * b)}" for n, b in OPTIMIZER_BYTES.items() if b)
    console.print(
        f"memory: parameters {format_bytes(float(parameters.bytes.sum()))}, saved for backward "
        f"{format_bytes(float(graph.ops.saved_bytes.sum()))}, workspace "
        f"{format_bytes(float(graph.ops.workspace_bytes.max()))}; peak "
        f"{format_bytes(record.peak_bytes)} measured, "
        f"{format_bytes(record.predicted_peak_bytes)} from ops; optimizer state: {states}"
    )
    console.print(table(_COLUMNS, _slowest(graph, record)))
    for note in record.notes:
        console.print(f"note: {note}", style="dim")


_COLUMNS = (
    ("slowest ops", "left"),
    ("forward", "right"),
    ("backward", "right"),
    ("of inputs", "right"),
    ("saved", "right"),
    ("spread", "right"),
)


def _slowest(graph: Graph, record: Any) -> list[list[str]]:
    from partita.cli.console import percent  # noqa: PLC0415 (rich only where it prints)
    from partita.units import format_bytes, format_seconds  # noqa: PLC0415 (likewise)

    costs = graph.costs[0]
    order = (-(costs.forward_s + costs.backward_s)).argsort(kind="stable")[:_SLOWEST].tolist()
    return [
        [
            graph.ops.names[row],
            format_seconds(float(costs.forward_s[row])),
            format_seconds(float(costs.backward_s[row])),
            format_seconds(float(costs.backward_input_s[row])),
            format_bytes(float(graph.ops.saved_bytes[row])),
            percent(max(record.forward_spread[row], record.backward_spread[row])),
        ]
        for row in order
    ]
