"""``partita recommend`` as a command: the page about it, its table, files and exit codes."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

PAGE = Path(__file__).resolve().parents[2] / "docs" / "recommend.md"


@pytest.fixture
def offer(tmp_path: Path) -> Path:
    text = re.search(r"```yaml\n(.*?)```", PAGE.read_text(encoding="utf-8"), flags=re.DOTALL)
    assert text is not None
    path = tmp_path / "offer.yaml"
    path.write_text(text.group(1), encoding="utf-8")
    return path


@pytest.mark.slow
def test_the_commands_of_the_page_run(
    offer: Path, run_page: Callable[[Path], list[list[str]]]
) -> None:
    assert len(run_page(PAGE)) >= 4
    assert (offer.parent / "offers.svg").read_text(encoding="utf-8").startswith("<?xml")


def test_json_holds_the_three_answers_and_the_front(tmp_path: Path, commands: Any) -> None:
    done = commands.run(
        *("recommend", "llama3-8b", "--within", "60 days --tokens 1T", "--json"),
        *("--machines", "dgx-h100", "--most-devices", "64"),
        folder=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert {"cheapest", "fastest", "most_economical", "front", "options"} <= set(found)
    assert found["target"]["tokens"] == 1e12
    assert found["command"].startswith("partita plan llama3-8b")


def test_the_table_names_the_best(tmp_path: Path, commands: Any) -> None:
    done = commands.run(
        *("recommend", "llama3-8b", "--machines", "dgx-h100", "--most-devices", "16"),
        folder=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert "cheapest" in done.stdout
    assert "2 x dgx-h100" in done.stdout
    assert "off by 3% in the mean" in " ".join(done.stdout.split())


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("--target", "9G tokens/s"), 3, "the nearest is 2 x dgx-h100"),
        (("--target", "fast"), 2, "target 'fast' is not understood"),
        (("--within", "30 days"), 2, "--tokens"),
        (("--picture", "x.gif"), 2, "expected .svg"),
    ],
)
def test_what_cannot_be_is_one_line(
    arguments: tuple[str, ...], code: int, words: str, tmp_path: Path, commands: Any
) -> None:
    usual = ("recommend", "llama3-8b", "--machines", "dgx-h100", "--most-devices", "16", "-q")
    done = commands.run(*usual, *arguments, folder=tmp_path)
    assert done.returncode == code
    assert words in done.stderr
    assert len(done.stderr.splitlines()) == 1
