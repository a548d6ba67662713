"""Every command of the pages for users of other systems runs."""

from collections.abc import Callable
from pathlib import Path

import pytest

PAGES = sorted((Path(__file__).resolve().parents[2] / "docs" / "coming-from").glob("*.md"))


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_commands_of_a_page_run_in_their_order(
    page: Path, run_page: Callable[[Path], list[list[str]]]
) -> None:
    assert len(run_page(page)) >= 3
