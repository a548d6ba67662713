"""``partita profile``: from a model to a graph with measured costs."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import click

from partita.cli.from_request import takes
from partita.cli.help import Documented
from partita.cli.options import output_options, own_name
from partita.core.graph import Graph
from partita.core.precision import OPTIMIZERS
from partita.errors import InvalidInputError
from partita.flows.profile import (
    ProfileRequest,
    estimate_lines,
    measured_lines,
    merge_profiles,
    profile_request,
    slowest_ops,
)

if TYPE_CHECKING:
    from partita.profiler.measure.measure import Measured


@click.command(
    cls=Documented,
    epilog="Example: partita profile gpt3-small --scale 0.1 --batch-size 2\n\n"
    "partita profile merge a100.json v100.json -o both.json",
)
@takes(ProfileRequest)
@click.argument("files", nargs=-1)
@click.option("-o", "--output", help="Write the graph to this file; - is stdout. [NAME.graph.json]")
@output_options
def command(
    request: ProfileRequest,
    *,
    files: tuple[str, ...],
    output: str | None,
    as_json: bool,
    quiet: bool,
    debug: bool,
) -> None:
    """Measure time and memory of every op of MODEL and write it as a graph.

    MODEL is a built-in name (see 'partita models'), a Hugging Face configuration, or
    package.module:callable, a callable that returns a model with example inputs, and a loss
    function if the model returns no loss. A Hugging Face configuration is the path of a config.json
    or of its directory, or hf:NAME such as hf:tiny-llama or hf:LlamaConfig?num_hidden_layers=2.

    --from-trace takes the seconds of ops from traces of a run of it elsewhere.

    'partita profile merge FILE FILE ...' makes one graph of several that were measured on other
    devices.
    """
    del debug  # read by main
    if request.model == "merge":
        merged = merge_profiles(*files)
        _write(
            merged.graph,
            output,
            show=lambda: _show_merged(merged.graph),
            figures=merged.to_json() if as_json else None,
        )
        return
    if files:
        raise InvalidInputError(f"one model at a time; {files[0]!r} is too many")
    with _progress(request.model, quiet=quiet or as_json) as on_round:
        result = profile_request(request, on_round)
    graph, measured = result.graph, result.measured

    def show() -> None:
        if result.traced is not None:
            for line in result.lines():
                click.echo(line)
        elif measured is None:
            _show_estimate(graph)
        else:
            _show_measured(measured)

    _write(graph, output, show=show, figures=result.to_json() if as_json else None)


def _show_merged(graph: Graph) -> None:
    from partita.cli.console import model_line  # noqa: PLC0415 (rich only where it prints)

    click.echo(model_line(graph))


def _show_estimate(graph: Graph) -> None:
    from partita.cli.console import basis_line, model_line  # noqa: PLC0415 (rich only here)

    for line in (model_line(graph), basis_line(graph), *estimate_lines(graph)):
        click.echo(line)


def _write(
    graph: Graph,
    output: str | None,
    *,
    show: Callable[[], None],
    figures: dict[str, Any] | None = None,
) -> None:
    """Write a graph, and print what is to be said about it, as JSON if there are figures."""
    from partita.cli.console import print_json  # noqa: PLC0415 (rich only where it prints)
    from partita.documents import save  # noqa: PLC0415 (likewise)

    target = output or (None if figures is not None else own_name(f"{graph.name}.graph.json"))
    if target is not None:
        save(graph, target)
    if target == "-":
        return
    if figures is not None:
        print_json({**figures, "written": target})
        return
    show()
    click.echo(f"written to {target}")
    cluster = (
        "--devices 2"
        if graph.costs[0].device_type == "cpu"
        else f"-c 4x{graph.costs[0].device_type}"
    )
    click.echo(f"next: partita plan {target} {cluster}")


@contextmanager
def _progress(name: str, *, quiet: bool) -> Iterator[Callable[[int, int], None]]:
    """Show a bar on a terminal, and a line now and then elsewhere."""
    if quiet:
        yield lambda _, __: None
        return
    if not sys.stderr.isatty():
        from partita.cli.console import paced  # noqa: PLC0415 (rich only where it prints)

        click.echo(f"profiling {name}", err=True)
        tell = paced(lambda words: click.echo(words, err=True))
        yield lambda done, total: tell(f"profiling {name}: {done} of {total} rounds")
        return
    from rich.console import Console  # noqa: PLC0415 (only on a terminal)
    from rich.progress import Progress  # noqa: PLC0415 (likewise)

    with Progress(console=Console(file=sys.stderr), transient=True) as bar:
        task = bar.add_task(f"profiling {name}", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def _show_measured(measured: "Measured") -> None:
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
    sizes: dict[str, float] = {}
    for name, row in OPTIMIZERS.items():
        if row.runs and row.state_bytes() not in sizes.values():  # AdamW's state is Adam's
            sizes[name] = row.state_bytes()
    states = ", ".join(f"{n} {format_bytes(trained * b)}" for n, b in sizes.items() if b)
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
    return [
        [
            graph.ops.names[row],
            format_seconds(float(costs.forward_s[row])),
            format_seconds(float(costs.backward_s[row])),
            format_seconds(float(costs.backward_input_s[row])),
            format_bytes(float(graph.ops.saved_bytes[row])),
            percent(max(record.forward_spread[row], record.backward_spread[row])),
        ]
        for row in slowest_ops(graph)
    ]
