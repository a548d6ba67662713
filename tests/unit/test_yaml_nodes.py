import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from partita import yaml_nodes
from partita.errors import FormatError, PartitaError
from partita.units import parse_bytes
from partita.yaml_nodes import (
    Items,
    Scalar,
    Table,
    parse_yaml,
    read_count,
    read_flag,
    read_items,
    read_number,
    read_quantity,
    read_table,
    read_text,
    read_value,
)


def scalar(text: str) -> Scalar:
    return Scalar(3, text, True)


def test_a_tree_keeps_lines_order_and_text():
    root = parse_yaml("# a comment\nb: 010\na:\n  - 'no'\n  - yes\n")
    assert root == Table(
        2,
        {
            "b": Scalar(2, "010", True),
            "a": Items(4, (Scalar(4, "no", False), Scalar(5, "yes", True))),
        },
        {"b": 2, "a": 3},
    )
    assert isinstance(root, Table)
    assert list(root.entries) == ["b", "a"]


def test_a_byte_order_mark_is_skipped():
    assert parse_yaml("\ufeffa: 1") == parse_yaml("a: 1")


@pytest.mark.parametrize(
    ("text", "line", "reason"),
    [
        ("", 0, "the text is empty; expected a mapping"),
        ("# nothing\n---\n", 0, "the text is empty; expected a mapping"),
        ("a: 1\nb: 2\na: 3\n", 3, "key 'a' stands twice, first on line 1"),
        ("a: 1\n? [x]\n: 2\n", 2, "a key is a list; expected a name"),
        ("a: 1\n---\nb: 1\n", 2, "a second document starts here; expected one"),
        ("a: &x 1\n", 1, "anchors and aliases (& and *) are not read; write the value out"),
        ("a: 1\nb: *x\n", 2, "anchors and aliases (& and *) are not read; write the value out"),
        ("a: !!str 1\n", 1, "tags are not read, got 'tag:yaml.org,2002:str'; leave them out"),
        ("a: !!python/object:os.system {}\n", 1, "tags are not read"),
        ("a: ! b\n", 1, "tags are not read, got '!'; leave them out"),
        ("%TAG !e! tag:e.com:\n---\na: 1\n", 1, "tags are not read"),
        ("a: 1\nb: {\n", 3, "not valid YAML: "),
        ("a: 1\n\tb: 2\n", 2, "not valid YAML: "),
        ("a: 1\nb: \x00\n", 2, "not valid YAML: character '\\x00' is not printable"),
        ("a: \ud800\n", 1, "not valid YAML: character '\\ud800' is not printable"),
        ("[" * 100_000, 1, "nested more than 16 levels deep"),
        ("a" * 1_000_001, 0, "the text has 1000001 characters; expected at most 1000000"),
    ],
)
def test_what_is_not_read_is_an_error_with_its_line(text: str, line: int, reason: str):
    with pytest.raises(FormatError) as caught:
        parse_yaml(text)
    assert caught.value.line == line
    assert caught.value.reason.startswith(reason)


def test_an_alias_bomb_is_refused_at_its_first_anchor():
    bomb = "\n".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 30))
    with pytest.raises(FormatError, match="1: anchors"):
        parse_yaml(bomb)


def test_the_slow_loader_reads_the_same(monkeypatch: pytest.MonkeyPatch):
    text = "a: {b: [1, 'two', \"3\\n\"]}\nc: >-\n  folded\n  text\n"
    quick = parse_yaml(text)
    monkeypatch.setattr(yaml_nodes, "_LOADER", yaml.SafeLoader)
    assert parse_yaml(text) == quick
    with pytest.raises(FormatError, match="1: tags"):
        parse_yaml("a: !!str 1")


@pytest.mark.parametrize("text", ["0", "17", "65536"])
def test_a_count_within_limits_is_read(text: str):
    assert read_count(scalar(text), "count", low=0, high=65536) == int(text)


@pytest.mark.parametrize(
    "text", ["-1", "65537", "1.5", "1e3", "0x10", "ten", "", "9223372036854775808", "9" * 5000, "٣"]
)
def test_a_wrong_count_names_field_value_and_limits(text: str):
    with pytest.raises(FormatError, match=r"3: count.*;.*0"):
        read_count(scalar(text), "count", low=0, high=65536)


@pytest.mark.parametrize("text", ["-1", "nan", ".nan", "inf", "1e999", "x", "", "1_000", "true"])
def test_a_wrong_number_names_field_and_value(text: str):
    with pytest.raises(FormatError, match=r"3: speed.*"):
        read_number(scalar(text), "speed")


def test_numbers_and_their_lower_end():
    assert read_number(scalar("1e3"), "speed") == 1000.0
    assert str(read_number(scalar("-0"), "speed")) == "0.0"
    with pytest.raises(FormatError, match=r"number more.*0"):
        read_number(scalar("0"), "speed", positive=True)


@pytest.mark.parametrize(
    "text", ["-1", "nan", "80XB", "", "~", "1e999", "9223372036854775808", "8EB", "infx"]
)
def test_a_wrong_quantity_is_an_error_with_its_line(text: str):
    with pytest.raises(FormatError, match=r"line 3: memory"):
        read_quantity(scalar(text), "memory", parse_bytes, limit=2.0**63, unlimited=True)


def test_inf_is_a_quantity_only_where_allowed():
    assert read_quantity(scalar("inf"), "memory", parse_bytes, unlimited=True) == float("inf")
    with pytest.raises(FormatError, match=r"memory.*'inf'"):
        read_quantity(scalar("inf"), "memory", parse_bytes)


def test_wrong_shapes_are_named():
    table, items = Table(4, {}, {}), Items(5, ())
    with pytest.raises(FormatError, match=r"3:.*'a'"):
        read_table(scalar("a"), "x")
    with pytest.raises(FormatError, match=r"4:.*mapping"):
        read_items(table, "x")
    with pytest.raises(FormatError, match=r"5:.*text"):
        read_text(items, "x")
    with pytest.raises(FormatError, match=r"3:.*text"):
        read_text(scalar("null"), "x")
    with pytest.raises(FormatError, match=r"3:.*'yes'"):
        read_flag(scalar("yes"), "x")
    with pytest.raises(FormatError, match=r"5:.*number"):
        read_quantity(items, "x", parse_bytes)


def test_an_unknown_key_names_the_near_one_and_all_known():
    with pytest.raises(
        FormatError,
        match=r"2:.*'memroy';.*'memory'\?",
    ):
        read_table(parse_yaml("speed: 1\nmemroy: 2\n"), "g", ("memory", "speed"))


@settings(derandomize=True, deadline=None, max_examples=300)
@given(st.text(alphabet="ab:{}[],-?&*!|>'\"#%\n \t\x00é0", max_size=60))
def test_any_text_gives_a_tree_or_one_of_our_errors(text: str):
    try:
        root = parse_yaml(text)
    except PartitaError:
        return
    assert isinstance(root, Scalar | Items | Table)


def test_values_of_unknown_type_are_read_as_yaml_reads_them():
    root = parse_yaml("a: 4\nb: true\nc: '4'\nd: [1, x]\ne:\nf: 1e-3\ng: {}\n")
    assert isinstance(root, Table)
    values = {key: read_value(node, key) for key, node in root.entries.items() if key != "g"}
    assert values == {"a": 4, "b": True, "c": "4", "d": [1, "x"], "e": None, "f": "1e-3"}
    with pytest.raises(FormatError, match=r"7:.*mapping"):
        read_value(root.entries["g"], "g")


def test_an_empty_text_may_be_allowed():
    nothing = Table(1, {}, {})
    assert parse_yaml("# only a comment\n", empty=nothing) is nothing
