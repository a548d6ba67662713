"""``partita completion``: what a shell needs to complete commands, options and their values."""

import click
from click.shell_completion import CompletionItem, get_completion_class

from partita.cli.help import Documented
from partita.cli.options import output_options

SHELLS = ("bash", "zsh", "fish")
VARIABLE = "_PARTITA_COMPLETE"
_HOW = {
    "bash": "partita completion bash > ~/.local/share/bash-completion/completions/partita",
    "zsh": 'partita completion zsh > "${fpath[1]}/_partita"',
    "fish": "partita completion fish > ~/.config/fish/completions/partita.fish",
}


@click.command(cls=Documented, epilog="Example: partita completion bash > partita.bash")
@click.argument("shell", type=click.Choice(SHELLS))
@output_options
def command(shell: str, as_json: bool, quiet: bool, debug: bool) -> None:
    """Print the completion of SHELL, and say on stderr where it belongs."""
    del debug  # read by main
    found = get_completion_class(shell)
    assert found is not None  # click has all three
    # The script is the text of the class: its source() would look for the shell itself.
    text = found.source_template % {
        "complete_func": "_partita_completion",
        "complete_var": VARIABLE,
        "prog_name": "partita",
    }
    if as_json:
        from partita.cli.console import print_json  # noqa: PLC0415 (imports rich)

        print_json({"shell": shell, "script": text, "install": _HOW[shell]})
        return
    click.echo(text)
    if not quiet:
        click.echo(f"install with: {_HOW[shell]}", err=True)


def complete(name: str, incomplete: str) -> list[CompletionItem]:
    """Return the values of a field of a request that begin as what was typed, and files."""
    known = _VALUES[name]() if name in _VALUES else []
    found = [CompletionItem(value) for value in known if value.startswith(incomplete)]
    return [*found, CompletionItem(incomplete, type="file")] if name in _FILES else found


def _models() -> list[str]:
    from partita.catalogue.examples import EXAMPLES  # noqa: PLC0415 (when a shell asks)
    from partita.transformer.named import named_shapes  # noqa: PLC0415 (likewise)

    return sorted({*EXAMPLES, *named_shapes()})


def _planners() -> list[str]:
    from partita.planners.table import PLANNERS  # noqa: PLC0415 (when a shell asks)

    return list(PLANNERS)


def _types() -> list[str]:
    from partita.catalogue.catalogue import load_catalogue  # noqa: PLC0415 (when a shell asks)

    return list(load_catalogue().devices)


def _clusters() -> list[str]:
    from partita.catalogue.catalogue import load_catalogue  # noqa: PLC0415 (when a shell asks)

    return ["slurm", *load_catalogue().hosts, *_types()]


def _plans() -> list[str]:
    from pathlib import Path  # noqa: PLC0415 (when a shell asks)

    return sorted(path.name for path in Path().glob("*.plan.json"))


_VALUES = {
    "model": _models,
    "planner": _planners,
    "cluster": _clusters,
    "type": _types,
    "plan": _plans,
}
_FILES = ("model", "cluster", "plan")
