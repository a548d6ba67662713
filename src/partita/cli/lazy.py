"""A group whose commands are imported when they are used, so that help comes at once."""

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

import click

from partita.cli.help import HELP


class LazyGroup(click.Group):
    """A group whose commands live in one module each, as ``command``.

    Attributes:
        table: What each command does, in the order of the listing.
        module_of: Returns the module of a command.
        prepare: Called with the name of a command before it is imported.
    """

    def __init__(
        self,
        *args: Any,
        table: Mapping[str, str],
        module_of: Callable[[str], str],
        prepare: Callable[[str], None] = lambda _: None,
        **rest: Any,
    ) -> None:
        super().__init__(*args, **rest)
        self.table, self.module_of, self.prepare = table, module_of, prepare

    def get_help_option_names(self, ctx: click.Context) -> list[str]:
        """Return the spellings, whoever made the context: the option is made once and kept."""
        return list(HELP)

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the commands in the order of the flow."""
        return list(self.table)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import the module of a command."""
        if cmd_name not in self.table:
            return None
        self.prepare(cmd_name)
        command: click.Command = import_module(self.module_of(cmd_name)).command
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Suggest a near name for a command that does not exist."""
        if args and args[0] not in self.table and not args[0].startswith("-"):
            from partita.names import did_you_mean  # noqa: PLC0415 (only for a mistyped command)

            hint = did_you_mean(args[0], self.table)
            raise click.UsageError(f"there is no command {args[0]!r}{hint}", ctx)
        name, command, rest = super().resolve_command(ctx, args)
        if command is None:
            return name, None, rest
        from partita.cli.from_request import with_bare_values  # noqa: PLC0415 (a command has it)

        return name, command, with_bare_values(command, rest)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List the commands without importing them."""
        with formatter.section("Commands"):
            formatter.write_dl(list(self.table.items()))
