"""The command tree before the house was rebuilt: every difference since has its reason on a page.

The file is what ``benchmarks/command_tree.py --json`` printed of commit 25f7424, without texts.
"""

import gzip
import json
from functools import cache
from pathlib import Path

from command_tree import differences, explained, is_explained, tree_of

from partita.cli.main import partita

BEFORE = Path(__file__).with_name("command_tree_before.json.gz")
PAGE = Path(__file__).resolve().parents[2] / "docs" / "changes-of-commands.md"


@cache
def found() -> tuple[str, ...]:
    before = json.loads(gzip.decompress(BEFORE.read_bytes()))
    return tuple(differences(before, tree_of(partita, "partita"), "partita", texts=False))


def without_reason(page: str) -> list[str]:
    named = explained(page)
    return [one for one in found() if not is_explained(one, named)]


def test_every_difference_of_the_command_line_has_its_reason() -> None:
    assert without_reason(PAGE.read_text(encoding="utf-8")) == []


def test_a_difference_without_a_row_is_found() -> None:
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    page = "\n".join(line for line in lines if not line.startswith("| `--reserve` |"))
    assert "partita plan: --reserve is new" in without_reason(page)
    assert all(": --reserve is new" in one for one in without_reason(page))
