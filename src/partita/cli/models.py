"""``partita models``: the models that can be built by name."""

from collections.abc import Mapping
from typing import Any

import click

from partita.cli.console import print_json, stdout_console, table
from partita.cli.from_request import takes
from partita.cli.help import Documented
from partita.cli.options import output_options
from partita.flows.models import ModelList, ModelsRequest, models_request

COLUMNS = (
    ("model", "left"),
    ("parameters", "right"),
    ("layers", "right"),
    ("batch", "right"),
    ("inputs of a sample", "left"),
    ("source", "left"),
)
LARGE = (
    ("large model", "left"),
    ("parameters", "right"),
    ("active", "right"),
    ("layers", "right"),
    ("width", "right"),
    ("heads", "right"),
    ("experts", "right"),
    ("tokens", "right"),
)


@click.command(cls=Documented, epilog="Example: partita models bert\n\npartita models large")
@takes(ModelsRequest)
@output_options
def command(request: ModelsRequest, *, as_json: bool, quiet: bool, debug: bool) -> None:
    """List the models that are known by name, or those whose name contains PART.

    Large transformers ('partita models large') are planned by their shape; none is ever built.

    Parameters are distinct ones, tied weights counted once. Where the published table counts
    otherwise, its figure and its rule are listed below.
    """
    del quiet, debug  # there is no progress; main reads debug
    found = models_request(request)
    if as_json:
        print_json(found.to_json())
    else:
        _show(found, is_whole=not request.part)


def _show(found: ModelList, *, is_whole: bool) -> None:
    cells = [
        [
            row["name"],
            f"{row['parameters']:,}",
            str(row["layers"] or "-"),
            str(row["batch_size"]),
            row["inputs"],
            row["source"],
        ]
        for row in found.models
    ]
    console = stdout_console()
    if cells:
        console.print(table(COLUMNS, cells))
    if found.large:
        console.print(table(LARGE, list(map(_large_row, found.large))))
    if is_whole:
        console.print("Hugging Face: a config.json or its directory, hf:tiny-llama, hf:LlamaConfig")
    for row in found.models:
        published = row["published"]
        if published is not None and published["parameters"] != row["parameters"]:
            console.print(
                f"{row['name']}: the published table says {published['figure']}"
                f" ({published['parameters']:,}): {published['rule']}"
            )


def _large_row(row: Mapping[str, Any]) -> list[str]:
    shared = row["kv_heads"] not in (0, row["heads"])
    experts = f"{row['experts_per_token']} of {row['experts']}" if row["experts"] else "-"
    active = row["active_parameters"] / 1e9
    return [
        row["name"],
        f"{row['parameters'] / 1e9:.1f} G",
        f"{active:.1f} G" if row["experts"] else "all",
        str(row["layers"]),
        f"{row['hidden']:,}",
        f"{row['heads']}/{row['kv_heads']}" if shared else str(row["heads"]),
        experts,
        f"{row['sequence_length']:,}",
    ]
