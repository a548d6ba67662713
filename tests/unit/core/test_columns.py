import numpy as np
import pytest

from partita.core.columns import (
    MAX_NESTING,
    column,
    derived,
    frozen_array,
    frozen_json,
    group_rows,
    names,
    ragged,
    same_value,
)
from partita.core.graph import EdgeTable, OpTable
from partita.errors import InvalidInputError

NAN, INF = float("nan"), float("inf")


def test_a_column_is_read_only_and_of_its_type():
    values = column([1, 2, 3], np.int32, 3, "tp")
    assert values.dtype == np.int32
    assert not values.flags.writeable
    with pytest.raises(ValueError, match="read-only"):
        values[0] = 5


def test_one_number_stands_for_all_rows():
    assert column(0.5, np.float64, 3, "share").tolist() == [0.5, 0.5, 0.5]
    assert column(True, np.bool_, 2, "flag").tolist() == [True, True]


def test_changing_the_source_does_not_change_a_column():
    source = np.ones(3)
    hidden = source[:]
    hidden.flags.writeable = False
    columns = [column(part, np.float64, 3, "x") for part in (source, source[:], hidden)]
    source[0] = 7
    assert [values[0] for values in columns] == [1, 1, 1]
    assert source.flags.writeable


def test_frozen_arrays_are_shared_not_copied():
    first = frozen_array([1.0, 2.0], np.float64)
    assert frozen_array(first, np.float64) is first
    part = frozen_array(first[:1], np.float64)
    assert np.shares_memory(part, first)
    assert frozen_array(np.frombuffer(b"abc", np.int8), np.int8).tolist() == [97, 98, 99]


def test_memory_that_others_may_write_is_copied():
    memory = bytearray(8)
    values = frozen_array(np.frombuffer(memory, np.float64), np.float64)
    memory[:] = b"\xff" * 8
    assert values.tolist() == [0.0]


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ([1.0, NAN, 2.0], "cost of row 1 ('b') is nan; expected 0 to 1e+15"),
        ([1.0, 2.0, -3.0], "cost of row 2 ('c') is -3.0; expected 0 to 1e+15"),
        ([INF, 2.0, 3.0], "cost of row 0 ('a') is inf; expected 0 to 1e+15"),
        ([0.0, 1e308, 3.0], "cost of row 1 ('b') is 1e+308; expected 0 to 1e+15"),
        ([0.0, 2**63, 3.0], "cost of row 1 ('b') is 9.223372036854776e+18; expected 0 to 1e+15"),
        ([1.0, 2.0], "cost has 2 values for 3 rows"),
        ([[1.0], [2.0], [3.0]], "cost has 2 dimensions; expected a flat list"),
        ([[1.0], [2.0, 3.0]], "cost is not a flat list of numbers"),
        (["1", "2", "3"], "cost must hold numbers within the range of float64"),
        ([1.0, None, 2.0], "cost must hold numbers within the range of float64"),
        ([True, False, True], "cost must hold numbers within the range of float64"),
        (NAN, "cost of row 0 ('a') is nan; expected 0 to 1e+15"),
    ],
)
def test_a_bad_value_is_named_with_its_row(values, words):
    with pytest.raises(InvalidInputError) as caught:
        column(values, np.float64, ("a", "b", "c"), "cost", high=1e15)
    assert str(caught.value) == words


def test_without_an_upper_limit_a_number_must_still_be_finite():
    with pytest.raises(InvalidInputError, match=r"1.*expected 0.*finite"):
        column([0.0, INF], np.float64, 2, "x")
    with pytest.raises(InvalidInputError, match=r"row 0.*-1; expected 0"):
        column([-1, 2], np.int32, 2, "x")


def test_unknown_numbers_are_allowed_only_where_the_column_says_so():
    values = column([NAN, 1.0], np.float64, 2, "x", unknown=True, high=5)
    assert np.isnan(values[0])
    with pytest.raises(InvalidInputError, match=r"1.*9\.0;.*0.*5"):
        column([NAN, 9.0], np.float64, 2, "x", unknown=True, high=5)
    with pytest.raises(InvalidInputError, match=r"row 1.*inf"):
        column([NAN, INF], np.float64, 2, "x", unknown=True)


@pytest.mark.parametrize(
    "values", [[0.5], [NAN], [INF], [2**31], [-(2**31) - 1], [2**63], [2**64], ["1"], [None]]
)
def test_whole_numbers_are_not_rounded_wrapped_or_parsed(values):
    with pytest.raises(InvalidInputError, match=r"numbers.*int32"):
        column(values, np.int32, 1, "n", low=-(2**40))


def test_a_single_number_must_fit_the_type_too():
    for value in (0.5, 2**31, 10**30):
        with pytest.raises(InvalidInputError, match=rf"^n is {value}, which is not a int32$"):
            column(value, np.int32, 2, "n")
    with pytest.raises(InvalidInputError, match=r"flag.*2"):
        column(2, np.bool_, 2, "flag")


def test_flags_are_true_false_zero_or_one():
    assert column([0, 1], np.bool_, 2, "flag").tolist() == [False, True]
    for values in ([2, 0], [0.0, 1.0]):
        with pytest.raises(InvalidInputError, match=r"flag.*false"):
            column(values, np.bool_, 2, "flag")


def test_no_rows_take_any_empty_list():
    assert column([], np.int32, 0, "x").dtype == np.int32
    assert column(np.empty((0, 3)), np.float64, 0, "x").shape == (0,)


def test_names_are_unique_and_not_empty():
    assert names(["a", "b"], "ops") == ("a", "b")
    with pytest.raises(InvalidInputError, match=r"'b'.*unique"):
        names(["a", "b", "c", "b", "c"], "ops")
    for bad in ("", 3, None):
        with pytest.raises(
            InvalidInputError, match=rf"^ops: {bad!r} is not a name; expected a non-empty string$"
        ):
            names(["a", bad], "ops")
    for bad in ("abc", 5, {"a"}):
        with pytest.raises(InvalidInputError, match=r"must.*names"):
            names(bad, "ops")


def test_json_values_are_frozen_all_the_way_down():
    source = {"a": [1, {"b": [2.5, None, "x"]}], "c": {}, "d": True}
    frozen = frozen_json(source, "annotations")
    source["a"][1]["b"].append(9)
    assert frozen == {"a": (1, {"b": (2.5, None, "x")}), "c": {}, "d": True}
    assert list(frozen) == ["a", "c", "d"]
    with pytest.raises(TypeError, match=r"support.*assignment"):
        frozen["a"][1]["b"] = ()


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ({"a": NAN}, "stats: nan is not a JSON number"),
        ({"a": [INF]}, "stats: inf is not a JSON number"),
        ({"a": {1: 2}}, "stats: keys must be strings"),
        ({"a": {1, 2}}, "stats: set is not a JSON value"),
        ({"a": np.int64(3)}, "stats: int64 is not a JSON value"),
        ({"a": b"x"}, "stats: bytes is not a JSON value"),
    ],
)
def test_what_json_cannot_hold_is_refused(value, words):
    with pytest.raises(InvalidInputError) as caught:
        frozen_json(value, "stats")
    assert str(caught.value) == words


def test_nesting_without_end_is_refused():
    deep: object = 1
    for _ in range(MAX_NESTING):
        deep = [deep]
    frozen_json(deep, "stats")
    circle: dict[str, object] = {}
    circle["self"] = circle
    for value in ([deep], circle):
        with pytest.raises(InvalidInputError, match="100 deep"):
            frozen_json(value, "stats")


def test_equality_is_by_value_with_nan_equal_to_nan():
    assert same_value(np.array([1.0, NAN]), np.array([1.0, NAN]))
    assert not same_value(np.array([1.0, NAN]), np.array([1.0, 2.0]))
    assert not same_value(np.array([1, 2]), np.array([1, 2, 3]))
    assert same_value((1.0, NAN, (NAN,)), (1.0, NAN, (NAN,)))
    assert not same_value((1.0,), (1.0, 2.0))
    assert EdgeTable() == EdgeTable()
    assert EdgeTable() != OpTable(names=("a",))
    assert EdgeTable() != 5


def test_objects_with_columns_have_no_hash():
    with pytest.raises(TypeError, match="unhashable"):
        hash(EdgeTable())


def test_what_follows_from_an_object_is_made_once():
    owner, made = EdgeTable(), []
    assert [derived(owner, "x", lambda: made.append(1) or 7) for _ in range(3)] == [7, 7, 7]
    assert made == [1]
    assert owner == EdgeTable()


def test_ragged_lists_become_pointers_and_values():
    pointers, values = ragged([[1, 2], [], [3]])
    assert (pointers.tolist(), values.tolist()) == ([0, 2, 2, 3], [1, 2, 3])
    assert [part.tolist() for part in ragged([])] == [[0], []]


def test_rows_are_grouped_by_key_in_their_old_order():
    pointers, rows = group_rows(np.array([2, 0, 2, 0]), 4)
    assert (pointers.tolist(), rows.tolist()) == ([0, 2, 2, 4, 4], [1, 3, 0, 2])
