"""Completion in shells: scripts, and values of models, planners, types and plans."""

import json

import pytest
from click.shell_completion import ShellComplete

from partita.cli.main import main, partita


def values(*words: str) -> set[str]:
    """Return what a shell would offer for the last word."""
    complete = ShellComplete(partita, {}, "partita", "_PARTITA_COMPLETE")
    return {item.value for item in complete.get_completions(list(words[:-1]), words[-1])}


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        (("pl",), {"plan"}),
        (("plan", "gpt-s"), {"gpt-small"}),
        (("plan", "llama3-7"), {"llama3-70b"}),
        (("plan", "gpt-small", "--planner", "uniform_f"), {"uniform_floor"}),
        (("plan", "gpt-small", "--cluster", "dgx-h1"), {"dgx-h100"}),
        (("plan", "gpt-small", "--type", "rtx30"), {"rtx3080", "rtx3090"}),
        (("export", "--to", "mega"), {"megatron"}),
        (("convert", "--bandw"), {"--bandwidth"}),
    ],
)
def test_values_are_offered(words: tuple[str, ...], offered: set[str]) -> None:
    assert offered <= values(*words)


def test_plans_of_the_folder_are_offered(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "gpt.plan.json").touch()
    monkeypatch.chdir(tmp_path)
    assert "gpt.plan.json" in values("simulate", "g")


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_scripts_are_printed(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["completion", shell])
    printed = capsys.readouterr()
    assert "_PARTITA_COMPLETE" in printed.out
    assert "install with" in printed.err
    with pytest.raises(SystemExit, match="0"):
        main(["completion", shell, "--json"])
    assert json.loads(capsys.readouterr().out)["shell"] == shell


def test_the_version_has_a_short_option(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["-V"])
    assert capsys.readouterr().out.startswith("partita, version ")
