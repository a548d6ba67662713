"""Tables on narrow and wide terminals."""

import io

import pytest
from rich.console import Console

from partita.cli.console import alike, print_command, print_point, table

COLUMNS = (
    ("device", "left"),
    *((f"figure{number}", "right") for number in range(8)),
    ("words", "left"),
)
ROWS = [
    [f"host{n}/gpu0", *(f"{n}{m}.25 GB" for m in range(8)), "some words of some length"]
    for n in range(3)
]


def shown(monkeypatch: pytest.MonkeyPatch, width: int) -> str:
    monkeypatch.setenv("COLUMNS", str(width))
    out = io.StringIO()
    Console(file=out, width=width, markup=False).print(table(COLUMNS, ROWS))
    return out.getvalue()


@pytest.mark.parametrize("width", [60, 100, 160])
def test_no_name_title_or_figure_is_cut_at_any_width(
    monkeypatch: pytest.MonkeyPatch, width: int
) -> None:
    text = shown(monkeypatch, width)
    words = text.split()
    assert max(map(len, text.splitlines())) <= width
    titles = [title for title, _ in COLUMNS]
    assert all(title in words for title in titles)
    assert all(cell.split()[0] in words for row in ROWS for cell in row)
    tables = words.count("device")
    assert tables == (1 if width == 160 else tables)
    for row in ROWS:  # every part has the names of the rows again
        assert words.count(row[0]) == tables


def test_rows_that_are_equal_beside_their_name_are_one() -> None:
    rows = [["a", "1"], ["b", "1"], ["c", "2"], ["d", "1"]]
    assert alike(rows) == [["a +2", "1"], ["c", "2"]]


def test_sentences_hang_below_their_mark_and_commands_stay_whole() -> None:
    out = io.StringIO()
    console = Console(file=out, width=30, markup=False)
    print_point(console, "why:  ", "compute on host0/gpu0 bounds the step of all")
    print_command(console, "partita plan gpt-small.plan.json --microbatches 64", mark="  ")
    print_point(console, "", "no plan of all can beat it, 22 % less")
    first, second, command, *numbers = out.getvalue().splitlines()
    assert first.startswith("why:  compute")
    assert second.startswith("      ")
    assert command == "  partita plan gpt-small.plan.json --microbatches 64"
    assert numbers == ["no plan of all can beat it,", "22 % less"]
