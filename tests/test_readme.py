"""What README and docstrings show really runs."""

import doctest
import importlib
import re
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
SOURCE = ROOT / "src"
MODULES = [
    ".".join(path.relative_to(SOURCE).with_suffix("").parts).removesuffix(".__init__")
    for path in sorted(SOURCE.rglob("*.py"))
    if re.search(r"^\s*>>> ", path.read_text(encoding="utf-8"), flags=re.MULTILINE)
]
"""Every module with an example in a docstring."""


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, flags=re.DOTALL)


def test_the_python_of_the_readme_runs(capsys: pytest.CaptureFixture[str]) -> None:
    assert blocks("python")
    for block in blocks("python"):
        exec(compile(block, "README.md", "exec"), {})
    printed = capsys.readouterr().out
    assert printed.startswith("gpt-small on 2x4xa100+2xv100: ")
    assert "above the best possible" in printed


@pytest.mark.slow
def test_the_commands_of_the_readme_run_in_their_order(
    run_page: Callable[[Path], list[list[str]]],
) -> None:
    assert len(run_page(ROOT / "README.md")) >= 6


def test_every_link_of_the_readme_and_the_docs_leads_somewhere() -> None:
    for page in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")):
        for target in re.findall(r"\]\(([^)#]+)\)", page.read_text(encoding="utf-8")):
            if "://" not in target:
                assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_there_are_examples_in_docstrings() -> None:
    assert {"partita.units", "partita.core.plan", "partita.planners.table"} <= set(MODULES)


@pytest.mark.parametrize("name", MODULES)
def test_examples_in_docstrings_run(name: str) -> None:
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as exc:
        if str(exc.name).startswith("partita"):
            raise
        pytest.skip(f"{exc.name} is not installed")
    result = doctest.testmod(module)
    assert result.attempted > 0
    assert result.failed == 0
