"""``partita checkpoint``: what runs have saved."""

from collections.abc import Mapping

import click

from partita.cli.lazy import LazyGroup

COMMANDS: Mapping[str, str] = {
    "ls": "List the checkpoints of a folder.",
    "verify": "Read checkpoints and compare all digests.",
    "convert": "Write a checkpoint as safetensors, for Hugging Face, or for another plan.",
}


@click.command(
    cls=LazyGroup,
    table=COMMANDS,
    module_of="partita.cli.checkpoint.{}".format,
    epilog="Example: partita checkpoint ls runs/2026-11-18_gpt3-small_2xcpu_1f1b_001/checkpoints"
    "\n\nEvery command has --help with an example, and --json.",
)
def command() -> None:
    """Look after checkpoints: list and verify them, write them in other forms."""
