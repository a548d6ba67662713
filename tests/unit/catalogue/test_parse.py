import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from partita.catalogue.catalogue import Catalogue, load_catalogue
from partita.catalogue.cluster_yaml.writer import write_cluster_yaml
from partita.catalogue.parse import parse_cluster, read_cluster
from partita.catalogue.shorthand import read_shorthand
from partita.core.cluster import Cluster
from partita.core.codec import write_json
from partita.core.problem import Objective
from partita.errors import FormatError, InvalidInputError, PartitaError


def no_file(path: str) -> str:
    raise FileNotFoundError(2, "No such file or directory", path)


def test_a_shorthand_is_read_without_opening_a_file(catalogue: Catalogue):
    cluster = parse_cluster("2x4xa100", no_file, catalogue)
    assert cluster == read_shorthand("2x4xa100", catalogue)


def test_overrides_are_applied(catalogue: Catalogue):
    cluster = parse_cluster("2x4xa100", no_file, catalogue, bandwidth="rack=1e9", latency="1ms")
    assert cluster.levels[1].bandwidth_bytes_per_s.tolist() == [1e9]
    assert [level.latency_s[0] for level in cluster.levels] == [1e-3, 1e-3]


@pytest.mark.parametrize("path", ["lab.yaml", "lab.YML", "lab.json", "./lab", "a/b", "my lab"])
@pytest.mark.parametrize("write", [write_cluster_yaml, write_json])
def test_a_file_is_yaml_or_json_by_its_content(catalogue: Catalogue, path: str, write):
    cluster = read_shorthand("2xa100+1xv100", catalogue)
    files = {path: "\ufeff" + write(cluster)}
    assert parse_cluster(path, files.__getitem__, catalogue) == cluster


def test_a_yaml_mapping_in_braces_is_not_taken_for_json(catalogue: Catalogue):
    assert len(read_cluster("{groups: [{type: a100, count: 2}]}", catalogue)) == 2
    assert len(read_cluster('{"groups": [{"type": "a100", "count": 2}]}', catalogue)) == 2


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("groups:\n- {typ: a100}\n", "lab.yaml:2: group 0: unknown key 'typ'"),
        ('{"format": "partita.cluster",\n"version"}', "lab.yaml:2: not valid JSON"),
        ('{"format": "partita.cluster", "version": 9}', "lab.yaml: this partita.cluster is of ver"),
        (write_json(Objective()), "lab.yaml: expected a partita.cluster, got a partita.objective"),
        ("", "lab.yaml: the text is empty"),
    ],
)
def test_errors_of_a_file_name_path_and_line(catalogue: Catalogue, text: str, message: str):
    with pytest.raises(FormatError) as caught:
        parse_cluster("lab.yaml", lambda path: text, catalogue)
    assert str(caught.value).startswith(message)


def test_a_file_that_is_not_there_is_one_clear_line(catalogue: Catalogue):
    with pytest.raises(FormatError) as caught:
        parse_cluster("lab.yaml", no_file, catalogue)
    assert str(caught.value) == "lab.yaml: cannot read the cluster: no such file or directory"


def test_a_file_that_is_no_text_is_one_clear_line(catalogue: Catalogue):
    def open_text(path: str) -> str:
        return b"\xff".decode("utf-8")

    with pytest.raises(FormatError, match=r"lab.yaml:.*can't"):
        parse_cluster("lab.yaml", open_text, catalogue)


def test_neither_shorthand_nor_file_says_both(catalogue: Catalogue):
    with pytest.raises(
        InvalidInputError,
        match=r"'a1000'.*;.*read",
    ):
        parse_cluster("4xa1000", no_file, catalogue)
    with pytest.raises(InvalidInputError, match=r"8xa100.*;.*read"):
        parse_cluster("4 by 4", no_file, catalogue)


def test_errors_of_the_opener_pass_through(catalogue: Catalogue):
    def refuse(path: str) -> str:
        raise FormatError("not allowed here", path=path)

    with pytest.raises(FormatError, match=r"lab.yaml: not allowed here"):
        parse_cluster("lab.yaml", refuse, catalogue)


@settings(derandomize=True, deadline=None, max_examples=200)
@given(st.text(max_size=30), st.sampled_from(['{"format": "partita.cluster", "version": 1', ""]))
def test_any_file_gives_a_cluster_or_one_of_our_errors(text: str, head: str):
    try:
        cluster = parse_cluster("x.yaml", lambda path: head + text, load_catalogue())
    except PartitaError:
        return
    assert isinstance(cluster, Cluster)
