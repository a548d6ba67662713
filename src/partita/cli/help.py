"""Help texts: short ones with an example and what most users need, long ones in groups."""

import textwrap
from typing import Any

import click

from partita.cli.options import check_targets

HELP = ("-h", "--help")
"""Spellings of the option for help, of every command."""
_MOST_SHOWN = 16
"""Options that a command may have before ``--help`` leaves some to ``--help-all``."""
_MAKE_FOLDERS = ("demo", "advise", "checkpoint convert", "export", "fleet profile", "selftest")
"""Commands whose ``--output`` is a folder."""
_LONGEST_CHOICE = 36
"""Characters of a list of choices; a longer one stands in the text."""


class GroupedOption(click.Option):
    """An option that belongs to a group.

    Attributes:
        group: Heading of its group; empty = it is the command's own.
        often: Whether most users need it.
    """

    def __init__(self, *args: Any, group: str = "", often: bool = False, **rest: Any) -> None:
        super().__init__(*args, **rest)
        self.group, self.often = group, often

    def get_help_record(self, ctx: click.Context) -> tuple[str, str] | None:
        """Return the spellings and the text; many choices are listed in the text."""
        record = super().get_help_record(ctx)
        if record is None or not isinstance(self.type, click.Choice):
            return record
        listed = self.make_metavar(ctx)
        if len(listed) <= _LONGEST_CHOICE or listed not in record[0]:
            return record
        names = ", ".join(map(str, self.type.choices))
        return record[0].replace(listed, "NAME"), f"{record[1]}  One of {names}."


class Documented(click.Command):
    """A command whose help is short: what it does, examples to paste, the usual options.

    ``--help-all`` has the whole text and all options in their groups.
    """

    def __init__(self, *args: Any, **rest: Any) -> None:
        super().__init__(*args, **rest)
        if any(parameter.name == "as_json" for parameter in self.params):
            self.params.append(
                click.Option(
                    ["--explain-terms"],
                    is_flag=True,
                    expose_value=False,
                    callback=_explain_terms,
                    help="Say below the result what its words mean.",
                )
            )
        self.params.append(
            click.Option(
                ["--help-all"],
                is_flag=True,
                is_eager=True,
                expose_value=False,
                callback=_show_all,
                help="Show all options, in groups, and exit.",
            )
        )

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command, if what it writes can be written."""
        command = ctx.command_path.partition(" ")[2]
        check_targets(ctx.params, makes_folders=command in _MAKE_FOLDERS)
        return super().invoke(ctx)

    def get_help_option_names(self, ctx: click.Context) -> list[str]:
        """Return the spellings, whoever made the context: the option is made once and kept."""
        return list(HELP)

    def format_help(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the help: the long one where ``--help-all`` asked, or where there is little."""
        everything = bool(ctx.meta.get(_ALL)) or not self._left_out(ctx)
        self.format_usage(ctx, formatter)
        text = (self.help or "").partition("\f")[0].strip()
        first, _, rest = text.partition("\n\n")
        _write_text(formatter, first)
        self.format_epilog(ctx, formatter)
        if everything and rest:
            _write_text(formatter, rest)
        self._write_options(ctx, formatter, everything=everything)

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the examples as they can be pasted, each in one line however narrow it is."""
        examples: list[str] = []
        others: list[str] = []
        for line in filter(None, (self.epilog or "").split("\n\n")):
            word = line.removeprefix("Example: ")
            (examples if word.startswith(("partita ", "torchrun ")) else others).append(word)
        if examples:
            formatter.write_paragraph()
            formatter.write(f"Example{'s' * (len(examples) > 1)}:\n")
            for each in examples:
                formatter.write(f"  {' '.join(each.split())}\n")
        for each in others:
            _write_text(formatter, each)

    def _write_options(
        self, ctx: click.Context, formatter: click.HelpFormatter, *, everything: bool
    ) -> None:
        groups: dict[str, list[tuple[str, str]]] = {}
        left_out = [] if everything else self._left_out(ctx)
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is not None and parameter not in left_out:
                group = getattr(parameter, "group", "") if everything else ""
                groups.setdefault(group, []).append(record)
        for group, records in sorted(groups.items(), key=lambda each: each[0] != ""):
            with formatter.section(group.capitalize() if group else "Options"):
                formatter.write_dl(records)
        if left_out:
            formatter.write_paragraph()
            formatter.write_text(
                f"{len(left_out)} more options, in groups, and the whole text: "
                f"{ctx.command_path} --help-all"
            )

    def _left_out(self, ctx: click.Context) -> list[click.Parameter]:
        """Return the options that a short help leaves out."""
        options = [each for each in self.get_params(ctx) if isinstance(each, click.Option)]
        if len(options) <= _MOST_SHOWN:
            return []
        return [
            option
            for option in options
            if getattr(option, "group", "") and not getattr(option, "often", False)
        ]


_ALL = "partita.help.all"


def _show_all(ctx: click.Context, _: click.Parameter, value: bool) -> None:
    """Show the long help and exit."""
    if value and not ctx.resilient_parsing:
        ctx.meta[_ALL] = True
        click.echo(ctx.get_help(), color=ctx.color)
        ctx.exit()


def _write_text(formatter: click.HelpFormatter, text: str) -> None:
    """Write paragraphs; lines of a block that begins with click's mark for it stay as they are."""
    for paragraph in text.split("\n\n"):
        formatter.write_paragraph()
        if paragraph.startswith("\b"):
            lines = paragraph.split("\n")[1:]
            formatter.write(textwrap.indent("\n".join(lines), "  ") + "\n")
            continue
        with formatter.indentation():
            formatter.write_text(" ".join(paragraph.split()))


def _explain_terms(ctx: click.Context, parameter: click.Parameter, value: bool) -> None:
    """Explain the words of a result, if that is asked for."""
    if value:
        from partita.cli.terms import explain_terms  # noqa: PLC0415 (only where it is asked for)

        explain_terms(ctx, parameter, value)
