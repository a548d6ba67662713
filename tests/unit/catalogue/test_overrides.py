import numpy as np
import pytest

from partita.catalogue.catalogue import Catalogue
from partita.catalogue.overrides import apply_overrides, parse_overrides
from partita.catalogue.shorthand import read_shorthand
from partita.core.cluster import Cluster, Device, LinkMatrix
from partita.errors import InvalidInputError
from partita.units import parse_bandwidth, parse_seconds


@pytest.fixture
def cluster(catalogue: Catalogue) -> Cluster:
    return read_shorthand("2x2xa100", catalogue)


@pytest.fixture
def pair() -> Cluster:
    devices = (Device(name="a"), Device(name="b"))
    matrix = LinkMatrix(bandwidth_bytes_per_s=np.array([0.0, 1e9, 2e9, 0.0]))
    return Cluster(devices=devices, matrix=matrix)


def test_levels_and_a_bare_number_are_parsed():
    assert parse_overrides("host=1e10, rack=100Gbit/s", parse_bandwidth) == {
        "host": 1e10,
        "rack": 1.25e10,
    }
    assert parse_overrides("2s", parse_seconds) == {"*": 2.0}


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "'' is not understood; write LEVEL=VALUE"),
        ("host=", "'host=' is not understood"),
        ("=1e9", "'=1e9' is not understood"),
        ("host=1e9,", "'' is not understood"),
        ("host=1e9,host=2e9", "level 'host' stands twice"),
        ("1e9,2e9", "the value for all levels stands twice"),
        ("host=fast", "value of level host 'fast' is not understood"),
        ("-1", "value '-1' is negative"),
        ("nan", "value 'nan' is not understood"),
    ],
)
def test_a_bad_text_says_what_is_wrong(text: str, reason: str):
    with pytest.raises(InvalidInputError) as caught:
        parse_overrides(text, parse_bandwidth)
    assert reason in str(caught.value)


def test_named_levels_change_and_others_stay(cluster: Cluster):
    changed = apply_overrides(cluster, bandwidth="host=1e10", latency="rack=1ms")
    assert changed.levels[0].bandwidth_bytes_per_s.tolist() == [1e10, 1e10]
    assert changed.levels[1].bandwidth_bytes_per_s.tolist() == [2.5e10]
    assert changed.levels[0].latency_s.tolist() == cluster.levels[0].latency_s.tolist()
    assert changed.levels[1].latency_s.tolist() == [1e-3]
    assert changed.devices == cluster.devices


def test_a_bare_number_is_for_all_levels_that_are_not_named(cluster: Cluster):
    changed = apply_overrides(cluster, bandwidth="rack=1e9,5e9")
    assert [level.bandwidth_bytes_per_s[0] for level in changed.levels] == [5e9, 1e9]


def test_no_overrides_change_nothing(cluster: Cluster, pair: Cluster):
    assert apply_overrides(cluster) == cluster
    assert apply_overrides(pair) == pair


def test_an_unknown_level_names_those_there_are(cluster: Cluster):
    with pytest.raises(
        InvalidInputError,
        match=r"'racks';.*'rack'\?",
    ):
        apply_overrides(cluster, latency="racks=1us")


def test_a_matrix_takes_a_bare_number_only(pair: Cluster):
    changed = apply_overrides(pair, bandwidth="5e9", latency="1us")
    assert changed.matrix is not None
    assert changed.matrix.bandwidth_bytes_per_s.tolist() == [5e9] * 4
    assert changed.matrix.latency_s.tolist() == [1e-6] * 4
    with pytest.raises(InvalidInputError, match=r"matrix.*'host'"):
        apply_overrides(pair, bandwidth="host=1")


@pytest.mark.parametrize(("bandwidth", "latency"), [("0", None), (None, "1e20")])
def test_impossible_values_name_the_level(
    cluster: Cluster, bandwidth: str | None, latency: str | None
):
    with pytest.raises(InvalidInputError, match="level 'host'"):
        apply_overrides(cluster, bandwidth=bandwidth, latency=latency)
