"""The recipes of docs/python.md run, in their order, and there is one for each public command."""

import re
from pathlib import Path
from typing import Any

import pytest

import partita

ROOT = Path(__file__).resolve().parent.parent
PAGE = (ROOT / "docs" / "python.md").read_text(encoding="utf-8")
LONG = ("Profile", "Run and train", "This machine")
"""Recipes that build, measure and run models."""


def recipes() -> list[tuple[str, str]]:
    """Return the title of each recipe, and its code."""
    found = []
    for section in PAGE.split("\n## ")[1:]:
        title = section.splitlines()[0]
        blocks = re.findall(r"```python\n(.*?)```", section, flags=re.DOTALL)
        found += [(title, block) for block in blocks]
    return found


def run_recipes(names: list[str], monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    monkeypatch.chdir(folder)
    for title, block in recipes():
        if title in names:
            exec(compile(block, f"docs/python.md, {title}", "exec"), {})


def test_recipes_are_short() -> None:
    for title, block in recipes():
        assert len(block.splitlines()) <= 12, title


def test_recipes_of_plans_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = [title for title, _ in recipes() if title not in LONG]
    run_recipes(names, monkeypatch, tmp_path)
    out = capsys.readouterr().out
    assert "above the best possible" in out
    assert "does not fit" in out


@pytest.mark.slow
def test_recipes_that_measure_and_run_run(tmp_path: Path, commands: Any) -> None:
    # In a process without threads, from which ranks are forked, as in a script of a user's own.
    text = "".join(f"exec({block!r}, {{}})\n" for title, block in recipes() if title in LONG)
    done = commands.run(python=text, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "gpt3-small" in done.stdout


def test_every_public_function_of_a_command_is_on_the_page() -> None:
    commands = {name for name in partita.__all__ if name[0].islower()}
    library = {
        "check",
        "evaluate",
        "parallelize",
        "profile_model",
        "problem",
        "run_plan",
        "solve",
        "split",
    }
    for name in commands - library - {"load"}:
        assert f"partita.{name}(" in PAGE, name
