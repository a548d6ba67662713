"""Files that are whole or not there at all."""

import os
import stat

import pytest

from partita.atomic_files import replacing, write_atomically


def names_in(folder):
    return sorted(path.name for path in folder.iterdir())


def test_a_file_takes_the_place_of_the_one_before(tmp_path):
    target = tmp_path / "a.json"
    target.write_text("old")
    write_atomically(target, "new, with é")
    assert target.read_text(encoding="utf-8") == "new, with é"
    assert names_in(tmp_path) == ["a.json"]


def test_the_old_file_stays_where_writing_fails_and_nothing_is_left_beside_it(tmp_path):
    target = tmp_path / "a.json"
    target.write_text("old")
    with pytest.raises(UnicodeEncodeError), replacing(target) as part:
        part.write_text("half, then a character that has no UTF-8: \ud800", encoding="utf-8")
    assert target.read_text() == "old"
    assert names_in(tmp_path) == ["a.json"]


def test_readers_see_the_old_file_until_the_new_one_is_whole(tmp_path):
    target = tmp_path / "a.json"
    target.write_text("old")
    with replacing(target, to_disk=True) as part:
        part.write_text("new")
        assert target.read_text() == "old"
    assert target.read_text() == "new"


@pytest.mark.parametrize(("mode", "expected"), [(0o666, 0o640), (0o600, 0o600)])
def test_permissions_are_those_asked_for_less_the_mask(tmp_path, mode, expected):
    before = os.umask(0o027)
    try:
        write_atomically(tmp_path / "a", b"secret", mode=mode)
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "a").stat().st_mode) == expected


def test_two_writers_of_one_file_do_not_meet(tmp_path):
    target = tmp_path / "a"
    with replacing(target) as first, replacing(target) as second:
        first.write_text("first")
        second.write_text("second")
    assert target.read_text() == "first"  # the one that ended last
    assert names_in(tmp_path) == ["a"]


def test_a_name_as_long_as_the_system_allows_can_be_written(tmp_path):
    write_atomically(tmp_path / ("n" * 255), "x")
    assert [len(name) for name in names_in(tmp_path)] == [255]


def test_a_folder_that_is_not_there_is_an_error_and_not_made(tmp_path):
    with pytest.raises(FileNotFoundError):
        write_atomically(tmp_path / "no" / "a", "x")
    assert names_in(tmp_path) == []
