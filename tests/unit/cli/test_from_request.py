"""Options that are made of the fields of a request."""

from dataclasses import dataclass
from typing import Any

import click
import pytest
from click.testing import CliRunner

from partita.cli.from_request import takes
from partita.cli.lazy import LazyGroup
from partita.errors import InvalidInputError
from partita.flows.options_file import read_options
from partita.requests import Request, arguments_of, declare, make
from partita.yaml_nodes import parse_yaml, read_table


@dataclass(frozen=True, kw_only=True)
class Sample(Request):
    """A request with a field of each kind."""

    numbers: tuple[int, ...] = declare((), is_argument=True, minimum=1, help="Numbers.")
    groups: bool = declare(True, help="Use groups.")
    quick: bool = declare(False, help="Hurry.")
    state: str = declare("here", path="file", help="File of the state.")
    token: str | None = declare(None, path="existing file", help="File of the token.")
    server: str = declare("near", environment=("FIRST_NAME", "SECOND_NAME"), help="Server.")
    idle: float = declare(1.0, environment=("IDLE_TIME",), help="Seconds.")


def asked(*words: str, **environment: str) -> Any:
    """Return the request that a command makes of words, or its error."""
    found = []

    @click.command()
    @takes(Sample)
    def command(request: Sample) -> None:
        found.append(request)

    result = CliRunner().invoke(command, list(words), env=environment)
    return found[0] if found else result.output


def test_defaults_are_those_of_the_request() -> None:
    assert asked() == Sample()


def test_a_flag_that_is_on_is_turned_off_by_no() -> None:
    assert asked("--no-groups") == Sample(groups=False)
    assert arguments_of(Sample(groups=False, quick=True)) == ["--no-groups", "--quick"]


@pytest.mark.parametrize("words", [("0",), ("--token", "nowhere"), ("--state", "/")])
def test_arguments_and_paths_are_checked(words: tuple[str, ...]) -> None:
    assert "Invalid value" in asked(*words)


def test_arguments_have_the_type_of_their_field() -> None:
    assert asked("3", "4") == Sample(numbers=(3, 4))


def test_variables_give_an_option_and_the_command_line_wins() -> None:
    assert asked(SECOND_NAME="far") == Sample(server="far")
    assert asked(SECOND_NAME="far", FIRST_NAME="wide") == Sample(server="wide")
    assert asked("--server", "here", FIRST_NAME="wide") == Sample(server="here")


def test_variables_give_an_option_in_python_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECOND_NAME", "far")
    monkeypatch.setenv("IDLE_TIME", "2.5")
    assert make(Sample) == Sample(server="far", idle=2.5)
    monkeypatch.setenv("FIRST_NAME", "wide")
    assert make(Sample, idle=3.0) == Sample(server="wide", idle=3.0)
    monkeypatch.setenv("IDLE_TIME", "long")
    with pytest.raises(InvalidInputError, match=r"IDLE_TIME is 'long'; expected .* float"):
        make(Sample)


@pytest.mark.parametrize(
    ("words", "depth", "model"),
    [
        (("--depth", "bert"), "whole", "bert"),
        (("bert", "--depth"), "whole", "bert"),
        (("--depth", "half", "bert"), "half", "bert"),
        (("--depth=half", "bert"), "half", "bert"),
        (("--depth", "half+more", "bert"), "half+more", "bert"),
        (("--depth", "--", "half"), "whole", "half"),
        (("--", "--depth"), None, "--depth"),
    ],
)
def test_an_option_without_its_value_leaves_the_word_after_it(
    words: tuple[str, ...], depth: str | None, model: str
) -> None:
    @dataclass(frozen=True, kw_only=True)
    class Deep(Request):
        """A request with an option whose value may be left out."""

        model: str = declare("", is_argument=True, help="Model.")
        depth: str | None = declare(
            None,
            choices=("half", "whole"),
            added=lambda: ["half+more"],
            bare="whole",
            help="Depth.",
        )

    found = []

    @click.command()
    @takes(Deep)
    def command(request: Deep) -> None:
        found.append(request)

    group = LazyGroup(table={"deep": "Go deep."}, module_of=str)
    group.get_command = lambda *_: command  # type: ignore[method-assign] (nothing to import)
    result = CliRunner().invoke(group, ["deep", *words])
    assert result.exit_code == 0, result.output
    assert found == [Deep(model=model, depth=depth)]


def test_an_option_that_joins_takes_several_values_as_one() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Sets(Request):
        """A request with an option that may be given several times."""

        again: str | None = declare(
            None,
            choices=("norm", "mlp"),
            added=lambda: ["mlp+norm", "norm+mlp"],
            bare="norm",
            joined_by="+",
            help="Sets.",
        )

    found = []

    @click.command()
    @takes(Sets)
    def command(request: Sets) -> None:
        found.append(request)

    for words in (["--again", "mlp", "--again", "norm"], ["--again", "mlp+norm"], []):
        CliRunner().invoke(command, words, catch_exceptions=False)
    assert found == [Sets(again="mlp+norm"), Sets(again="mlp+norm"), Sets()]
    assert make(Sets, again=["mlp", "norm", "mlp"]) == make(Sets, again="mlp+norm")
    assert make(Sets, again=()) == Sets()
    table = read_table(parse_yaml("again: [mlp, norm]"), "options")
    assert read_options(table, Sets) == {"again": "mlp+norm"}
