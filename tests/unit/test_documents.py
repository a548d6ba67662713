import dataclasses
import errno
import gzip
import io
import os
import stat
import tempfile
from pathlib import Path

import pytest

from partita import documents
from partita.core.cluster import Cluster
from partita.core.codec import write_json
from partita.core.graph import Graph
from partita.core.problem import Problem
from partita.documents import (
    load,
    read_bytes,
    read_text,
    save,
    unused_path,
    write_bytes,
    write_text,
)
from partita.errors import FormatError, InvalidInputError
from partita.testing.builders import chain, flat_cluster

EMPTY_PROFILE = (
    "node1 -- Linear(a) -- forward_compute_time=1.000, backward_compute_time=2.000, "
    "activation_size=8.0, parameter_size=4.000\n"
)


class Input:
    """Standard input with some bytes in it."""

    def __init__(self, data: bytes) -> None:
        self.buffer = io.BytesIO(data)


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_an_object_is_saved_and_loaded(tmp_path):
    problem = Problem(graph=chain(3), cluster=flat_cluster(2))
    for value in (problem.graph, problem.cluster, problem.objective, problem):
        path = tmp_path / f"{type(value).__name__}.json"
        save(value, path)
        assert load(path) == value
        assert load(str(path)) == value
        assert path.read_text(encoding="utf-8") == write_json(value)


def test_saving_leaves_no_other_file(tmp_path):
    for _ in range(3):
        save(chain(2), tmp_path / "graph.json")
    assert files(tmp_path) == ["graph.json"]


def test_a_file_is_written_with_the_usual_permissions(tmp_path):
    mask = os.umask(0o027)
    try:
        save(chain(2), tmp_path / "graph.json")
    finally:
        os.umask(mask)
    assert stat.S_IMODE((tmp_path / "graph.json").stat().st_mode) == 0o640


def test_the_old_content_stays_when_writing_fails(tmp_path, monkeypatch):
    path = tmp_path / "graph.json"
    save(chain(2), path)
    before = path.read_bytes()

    def fail(self: Path, target: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "replace", fail)
    with pytest.raises(InvalidInputError) as caught:
        save(chain(5), path)
    assert str(caught.value) == f"{path} cannot be written: no space left on device"
    assert path.read_bytes() == before
    assert files(tmp_path) == ["graph.json"]


def test_an_interrupt_leaves_no_temporary_file(tmp_path, monkeypatch):
    def interrupt(self: Path, target: Path) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "replace", interrupt)
    with pytest.raises(KeyboardInterrupt):
        save(chain(2), tmp_path / "graph.json")
    assert files(tmp_path) == []


def test_an_object_that_cannot_be_encoded_touches_no_file(tmp_path):
    with pytest.raises(InvalidInputError, match=r"int.*document"):
        save(5, tmp_path / "x.json")
    assert files(tmp_path) == []


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("no/such/folder/x.json", "cannot be written: no such file or directory"),
        ("", "cannot be written: is a directory"),
        ("x\0y", "cannot be written: embedded null byte"),
        ("n" * 300, "cannot be written: file name too long"),
    ],
    ids=range(4),
)
def test_a_path_that_cannot_be_written_is_an_error_of_the_input(tmp_path, name, words):
    with pytest.raises(InvalidInputError) as caught:
        write_text(f"{tmp_path}/{name}", "x")
    assert str(caught.value).endswith(words)
    assert files(tmp_path) == []


def test_a_file_in_the_place_of_a_folder_is_refused(tmp_path):
    (tmp_path / "file").write_text("x", encoding="utf-8")
    with pytest.raises(InvalidInputError, match=r"written:.*directory"):
        write_text(tmp_path / "file" / "x.json", "x")


def test_long_file_names_can_be_written(tmp_path):
    name = "n" * 250
    write_text(tmp_path / name, "x")
    assert files(tmp_path) == [name]


def test_a_device_is_written_to_and_not_replaced(tmp_path):
    null = Path("/dev/null")
    write_text(null, "gone")
    assert stat.S_ISCHR(null.stat().st_mode)
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        write_bytes(pipe, b"through")
        assert os.read(reader, 100) == b"through"
    finally:
        os.close(reader)
    assert stat.S_ISFIFO(pipe.stat().st_mode)
    assert files(tmp_path) == ["pipe"]


def test_a_link_is_followed(tmp_path):
    (tmp_path / "real.txt").write_text("old", encoding="utf-8")
    (tmp_path / "link.txt").symlink_to("real.txt")
    write_text(tmp_path / "link.txt", "new")
    assert (tmp_path / "link.txt").is_symlink()
    assert (tmp_path / "real.txt").read_text(encoding="utf-8") == "new"


def test_text_that_has_no_encoding_is_refused(tmp_path):
    with pytest.raises(InvalidInputError, match=r"'\\ud800'.*UTF-8"):
        write_text(tmp_path / "x.txt", "ab\ud800")
    assert files(tmp_path) == []


def test_a_dash_is_standard_output(capsys):
    write_text("-", "some text\n")
    save(chain(2), "-")
    assert capsys.readouterr().out == "some text\n" + write_json(chain(2))


def test_a_dash_is_standard_input(monkeypatch):
    monkeypatch.setattr("sys.stdin", Input(write_json(chain(3)).encode()))
    assert load("-") == chain(3)
    monkeypatch.setattr("sys.stdin", Input(b"{"))
    with pytest.raises(FormatError, match=r"input:1:.*JSON"):
        load("-")


def test_a_directory_and_a_missing_file_are_named(tmp_path):
    with pytest.raises(FormatError) as caught:
        load(tmp_path)
    assert str(caught.value) == f"{tmp_path}: is a directory; expected a file"
    missing = tmp_path / "none.json"
    with pytest.raises(FormatError) as caught:
        load(missing)
    assert str(caught.value) == f"{missing}: cannot be read: no such file or directory"
    assert caught.value.path == str(missing)


def test_a_name_that_no_file_can_have_is_refused():
    with pytest.raises(FormatError, match=r"cannot.*embedded"):
        read_bytes("a\0b")
    with pytest.raises(FormatError, match=r"cannot.*name"):
        read_bytes("n" * 5000)


def test_a_file_that_is_too_large_is_not_read(tmp_path, monkeypatch):
    monkeypatch.setattr(documents, "MAX_FILE_BYTES", 10)
    (tmp_path / "x").write_bytes(b"1" * 11)
    with pytest.raises(FormatError, match=r"x:.*10 bytes"):
        load(tmp_path / "x")
    (tmp_path / "x").write_bytes(b"1" * 10)
    assert read_bytes(str(tmp_path / "x")) == b"1" * 10
    monkeypatch.setattr("sys.stdin", Input(b"1" * 11))
    with pytest.raises(FormatError, match=r"standard.*10 bytes"):
        read_bytes("-")


def test_a_device_without_end_is_not_read_without_end(monkeypatch):
    monkeypatch.setattr(documents, "MAX_FILE_BYTES", 1000)
    with pytest.raises(FormatError, match=r"/dev/zero:.*1000 bytes"):
        read_bytes("/dev/zero")


def test_a_broken_document_is_named_with_its_line(tmp_path):
    path = tmp_path / "graph.json"
    path.write_text('{"format": "partita.graph",\n"version": }', encoding="utf-8")
    with pytest.raises(FormatError) as caught:
        load(path)
    assert str(caught.value).startswith(f"{path}:2: not valid JSON: ")
    path.write_text('{"format": "partita.graph", "version": 2}', encoding="utf-8")
    with pytest.raises(FormatError) as caught:
        load(path)
    assert str(caught.value).startswith(f"{path}: this partita.graph is of version 2, newer than")


@pytest.mark.parametrize(
    "change",
    [
        lambda data: b"\xef\xbb\xbf" + data,
        lambda data: data.replace(b"\n", b"\r\n"),
        lambda data: b"\xef\xbb\xbf" + data.replace(b"\n", b"\r\n"),
        lambda data: b"\n\n " + data,
        gzip.compress,
    ],
    ids=["mark", "crlf", "both", "space", "gzip"],
)
def test_marks_line_ends_and_packing_do_no_harm(tmp_path, change):
    path = tmp_path / "graph.json"
    path.write_bytes(change(write_json(chain(3)).encode()))
    assert load(path) == chain(3)


def test_text_has_no_byte_order_mark_and_must_be_utf8(tmp_path):
    path = tmp_path / "x.txt"
    path.write_bytes("\ufeffgrün".encode())
    assert read_text(str(path)) == "grün"
    path.write_bytes(b"ab\xff")
    with pytest.raises(FormatError, match=r"x\.txt:.*UTF-8.*2\)"):
        read_text(str(path))
    path.write_bytes("grün".encode("utf-16"))
    with pytest.raises(FormatError, match=r"x\.txt:1:.*0xff.*UTF-8"):
        load(path)


def test_a_foreign_file_is_known_by_what_it_holds(tmp_path):
    path = tmp_path / "vgg.whatever"
    path.write_text(EMPTY_PROFILE, encoding="utf-8")
    found = load(path)
    assert isinstance(found, Graph | Problem)
    nonsense = tmp_path / "nonsense"
    nonsense.write_text("nothing that is known", encoding="utf-8")
    with pytest.raises(FormatError, match=r"nonsense:.*format"):
        load(nonsense)
    nonsense.write_bytes(b"")
    with pytest.raises(FormatError, match=r"nonsense:.*empty"):
        load(nonsense)


def test_a_file_that_names_others_finds_them_beside_itself(tmp_path, monkeypatch):
    (tmp_path / "a.txt").write_text(EMPTY_PROFILE, encoding="utf-8")
    (tmp_path / "servers").write_text("Server0\n  TitanV 2 a.txt\n", encoding="utf-8")
    monkeypatch.chdir(tempfile.gettempdir())
    assert len(load(tmp_path / "servers").cluster) == 2
    (tmp_path / "servers").write_text("Server0\n  TitanV 2 b.txt\n", encoding="utf-8")
    with pytest.raises(FormatError, match=r"b\.txt"):
        load(tmp_path / "servers")


def test_a_graph_without_a_name_is_called_like_its_file(tmp_path):
    folder = tmp_path / "vgg16"
    folder.mkdir()
    for name in ("resnet.gpu.txt", "graph.txt"):
        (folder / name).write_text(EMPTY_PROFILE, encoding="utf-8")
    assert [load(folder / n).name for n in ("resnet.gpu.txt", "graph.txt")] == ["resnet", "vgg16"]


def test_an_unused_path_is_numbered(tmp_path):
    path = tmp_path / "gpt.plan.json"
    assert unused_path(path) == path
    path.touch()
    assert unused_path(path).name == "gpt-2.plan.json"
    (tmp_path / "gpt-2.plan.json").touch()
    assert unused_path(path).name == "gpt-3.plan.json"


@pytest.mark.parametrize(
    ("name", "second"), [("plain", "plain-2"), (".hidden", ".hidden-2"), (".a.json", ".a-2.json")]
)
def test_names_without_an_ending_or_with_a_dot_in_front_are_numbered(tmp_path, name, second):
    (tmp_path / name).touch()
    assert unused_path(tmp_path / name).name == second


def test_unused_paths_run_out(tmp_path, monkeypatch):
    monkeypatch.setattr(Path, "exists", lambda self: True)
    with pytest.raises(InvalidInputError, match="9998 numbered"):
        unused_path(tmp_path / "x.json")


def test_a_cluster_in_yaml_is_loaded(tmp_path):
    path = tmp_path / "cluster.yaml"
    path.write_text("groups:\n  - {type: a100, count: 2}\n", encoding="utf-8")
    found = load(path)
    assert isinstance(found, Cluster)
    assert len(found) == 2


def test_loading_changes_nothing(tmp_path):
    graph = dataclasses.replace(chain(2), annotations={"a": [1]})
    save(graph, tmp_path / "a.json")
    save(load(tmp_path / "a.json"), tmp_path / "b.json")
    assert (tmp_path / "a.json").read_bytes() == (tmp_path / "b.json").read_bytes()
