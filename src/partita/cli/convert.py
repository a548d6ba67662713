"""``partita convert``: between Partita's documents and foreign formats."""

from pathlib import Path
from typing import Any

import click

from partita.catalogue.examples import EXAMPLES
from partita.cli.inputs import read_problem, take_problem_options
from partita.cli.options import cluster_options, output_options, problem_options
from partita.core.codec import format_of
from partita.core.plan import Plan
from partita.documents import FORMATS, load, write_bytes, write_text
from partita.errors import InvalidInputError
from partita.formats.detect import format_for, write_as
from partita.formats.server_file import server_profiles
from partita.formats.table import problem_of
from partita.planners.pipeline import solution_of


@click.command(
    epilog="Example: partita convert gpt-small.plan.json gpus=4.txt\n\n"
    f"Formats: {', '.join(FORMATS)}"
)
@click.argument("source", metavar="IN")
@click.argument("target", metavar="OUT")
@click.option(
    "--to",
    help="Format to write; default by OUT's ending: .txt, .npy, .csv, .ini, .yaml, else ours.",
)
@click.option("--graph", help="The graph (or problem) that IN is a plan for.")
@cluster_options
@problem_options
@output_options
def command(source: str, target: str, to: str | None, graph: str | None, **rest: Any) -> None:
    """Translate IN to OUT; either may be - for stdin or stdout.

    The format of IN is found by its content, not by its name. A foreign plan needs the --graph it
    is for, and a --cluster unless that file holds one.
    """
    rest.pop("debug")
    problem = None if graph is None else read_problem(graph, take_problem_options(rest))
    found = EXAMPLES[source]() if source in EXAMPLES else load(source, problem=problem)
    if isinstance(found, Plan) and problem is not None:
        found = solution_of(problem, found, "", {})
    name = to or format_for(target, found, FORMATS)
    text = write_as(found, name, FORMATS)
    if isinstance(text, bytes):
        if target == "-":
            raise InvalidInputError("a binary file cannot go to stdout; name a file")
        write_bytes(target, text)
    else:
        if name == "server-file" and target != "-":
            _write_profiles(found, target)
        write_text(target, text)
    kind = format_of(type(found)).removeprefix("partita.")
    if rest["as_json"] and target != "-":
        from partita.cli.console import print_json  # noqa: PLC0415 (rich only where it prints)

        print_json({"read": kind, "format": name, "written": target, "bytes": len(text)})
    elif not rest["quiet"] and target != "-":
        click.echo(f"{kind} written as {name} to {target}")


def _write_profiles(found: Any, target: str) -> None:
    """Write the profiles that a server file names beside it."""
    for path, text in server_profiles(problem_of(found)).items():
        place = Path(target).parent / path
        place.parent.mkdir(parents=True, exist_ok=True)
        write_text(place, text)
