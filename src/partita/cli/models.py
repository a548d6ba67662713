"""``partita models``: the models that can be built by name."""

from typing import Any

import click

from partita.cli.console import print_json, stdout_console, table
from partita.cli.options import output_options
from partita.flows.extras import torch_needed

COLUMNS = (
    ("model", "left"),
    ("parameters", "right"),
    ("layers", "right"),
    ("batch", "right"),
    ("inputs of a sample", "left"),
    ("source", "left"),
)


@click.command(epilog="Example: partita models bert")
@click.argument("part", required=False, default="")
@output_options
def command(part: str, as_json: bool, **rest: Any) -> None:
    """List the models that can be built by name, or those whose name contains PART.

    Parameters are distinct ones, tied weights counted once. Where the published table counts
    otherwise, its figure and its rule are listed below.
    """
    del rest
    rows = describe_models(part)
    if as_json:
        print_json(rows)
        return
    cells = [
        [
            row["name"],
            f"{row['parameters']:,}",
            str(row["layers"] or "-"),
            str(row["batch_size"]),
            row["inputs"],
            row["source"],
        ]
        for row in rows
    ]
    console = stdout_console()
    console.print(table(COLUMNS, cells))
    if not part:
        console.print("Hugging Face: a config.json or its directory, hf:tiny-llama, hf:LlamaConfig")
    for row in rows:
        published = row["published"]
        if published is not None and published["parameters"] != row["parameters"]:
            console.print(
                f"{row['name']}: the published table says {published['figure']}"
                f" ({published['parameters']:,}): {published['rule']}"
            )


def describe_models(part: str = "") -> list[dict[str, Any]]:
    """Return what is known of the models whose name contains a text, as JSON values."""
    from partita.errors import InvalidInputError  # noqa: PLC0415 (likewise)
    from partita.names import suggest  # noqa: PLC0415 (help must come at once)

    with torch_needed("the models need"):
        from partita.models.zoo import MODELS  # noqa: PLC0415 (imports torch)
    names = [name for name in MODELS if part.lower() in name.lower()]
    if not names:
        raise InvalidInputError(f"no model's name contains {part!r}{suggest(part, MODELS)}")
    return [_describe(name) for name in names]


def _describe(name: str) -> dict[str, Any]:
    from partita.models.zoo import (  # noqa: PLC0415 (imports torch)
        build_model,
        find_model,
        layers_of,
        parameter_count,
    )

    spec, count = find_model(name), parameter_count(name)
    return {
        "name": name,
        "source": spec.source,
        "inputs": spec.inputs,
        "batch_size": spec.batch_size,
        "sequence_length": spec.sequence_length or None,
        "layers": len(layers_of(name, build_model(name, device="meta"))),
        "parameters": count.count,
        "published": {
            "figure": count.table_figure,
            "parameters": count.table_count,
            "rule": str(count.rule),
        }
        if count.table_figure
        else None,
    }
