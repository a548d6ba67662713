import pytest

from partita.names import did_you_mean, short, suggest


@pytest.mark.parametrize(
    ("name", "known", "words"),
    [
        ("unifrom", ["single", "uniform"], "; did you mean 'uniform'?"),
        ("xyz", ["single", "uniform"], "; there are single, uniform"),
        ("", [], "; there are none"),
        ("xyz", [f"name{i}" for i in range(50)], ", name39, ..."),
    ],
)
def test_a_near_name_is_suggested_else_what_there_is(name, known, words):
    assert did_you_mean(name, known).endswith(words)


def test_several_near_names_are_suggested_with_what_there_is():
    words = suggest("A10", ["a100", "a10g", "h200"])
    assert words == "; did you mean 'a10g' or 'a100'? known are a100, a10g, h200"
    assert suggest("zzz", []) == "; known are none"


def test_long_names_are_cut():
    assert len(short("x" * 1000)) == 60
    assert len(did_you_mean("y", ["x" * 1000])) < 100
