"""The commands of docs/large-models.md run in their order."""

from collections.abc import Callable
from pathlib import Path

PAGE = Path(__file__).resolve().parents[2] / "docs" / "large-models.md"


def test_the_commands_of_the_page_run(run_page: Callable[[Path], list[list[str]]]) -> None:
    assert len(run_page(PAGE)) >= 5
