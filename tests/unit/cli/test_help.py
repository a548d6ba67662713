"""Help texts: short and long, examples that can be pasted, and what words mean."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from partita.cli.help import Documented
from partita.cli.main import partita
from partita.cli.plan import command as plan_command
from partita.cli.terms import TERMS, footnotes, terms_of

GLOSSARY = Path(__file__).parents[3] / "docs" / "glossary.md"


def commands(group: click.Group = partita) -> Iterator[tuple[str, click.Command]]:
    """Yield every command with its name."""
    context = click.Context(group)
    for name in group.list_commands(context):
        found = group.get_command(context, name)
        assert found is not None
        if isinstance(found, click.Group):
            yield from ((f"{name} {below}", each) for below, each in commands(found))
        else:
            yield name, found


def help_of(command: click.Command, option: str, width: int) -> str:
    result = CliRunner().invoke(
        command, [option], prog_name="partita x", terminal_width=width, max_content_width=width
    )
    assert result.exit_code == 0
    return result.output


ALL = dict(commands())


@pytest.mark.parametrize("name", ALL)
def test_examples_stand_in_one_line_and_are_understood(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(click.Path, "convert", lambda _, value, *__: value)  # none is there
    command = ALL[name]
    assert isinstance(command, Documented)
    lines = help_of(command, "--help", 60).splitlines()
    examples = [line.strip() for line in lines if line.startswith("  partita ")]
    assert examples
    for example in examples:
        words = shlex.split(example.partition(" > ")[0])[1:]
        place = len(name.split())
        if words[:place] != name.split():
            continue  # of another command, which goes on
        context = command.make_context(name, words[place:])
        assert context.params is not None


@pytest.mark.parametrize("name", ALL)
def test_the_long_help_has_every_option_and_the_short_one_says_how_many_are_left(name: str) -> None:
    command = ALL[name]
    short, long = (help_of(command, option, 100) for option in ("--help", "--help-all"))
    flags = [max(p.opts, key=len) for p in command.params if isinstance(p, click.Option)]
    listed = [
        {
            flag
            for line in re.findall(r"^  (-.*?)(?:  |$)", text, flags=re.MULTILINE)
            for flag in re.findall(r"--?[a-z][\w-]*", line)
        }
        for text in (short, long)
    ]
    assert set(flags) <= listed[1]
    hidden = set(flags) - listed[0]
    assert (f"{len(hidden)} more options" in short) == bool(hidden)


def test_the_help_of_plan_is_a_page_and_the_long_one_has_groups() -> None:
    short, long = (help_of(plan_command, option, 100) for option in ("--help", "--help-all"))
    assert len(short.splitlines()) <= 60
    for title in ("Cluster:", "Search:", "Large transformers:", "Step and memory:"):
        assert title in long
        assert title not in short
    assert "--microbatches" in short
    assert "Name of a model, or a file." in short  # arguments are told about as options are
    assert "--shard-group" not in short


def test_words_of_a_result_are_explained_below_it() -> None:
    @click.command(cls=Documented)
    @click.option("--json", "as_json", is_flag=True)
    def shown(*, as_json: bool) -> None:
        click.echo("{}" if as_json else "MFU 38 %")

    result = CliRunner().invoke(shown, ["--explain-terms"])
    assert result.stdout.splitlines()[:2] == ["MFU 38 %", "words:"]
    assert "model FLOP utilisation" in result.stdout
    assert "utilisation" not in CliRunner().invoke(shown, []).stdout
    assert CliRunner().invoke(shown, ["--explain-terms", "--json"]).stdout == "{}\n"


def test_footnotes_fit_the_terminal_and_link_to_nothing() -> None:
    lines = footnotes("1f1b with 2 stages (8-4) at T*", 50)
    assert max(map(len, lines)) <= 50
    assert not any("](" in line for line in lines)
    assert terms_of("a busybody bubbled") == []


def test_the_glossary_has_the_same_words() -> None:
    rows = [line for line in GLOSSARY.read_text(encoding="utf-8").splitlines() if line[:1] == "|"]
    for term in TERMS:
        assert f"| {term.word} | {term.meaning} |" in rows


def test_a_command_that_stands_alone_has_both_spellings_of_help() -> None:
    for _, command in commands():
        option = command.get_help_option(click.Context(command))
        assert option is not None
        assert option.opts == ["-h", "--help"]
