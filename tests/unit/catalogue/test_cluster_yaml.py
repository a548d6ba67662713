import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from partita.catalogue.catalogue import Catalogue, load_catalogue
from partita.catalogue.cluster_yaml.reader import read_cluster_yaml
from partita.catalogue.shorthand import read_shorthand
from partita.core.cluster import Cluster, Collectives
from partita.core.graph import DeviceKind
from partita.errors import FormatError, PartitaError

DOCUMENTS = Path(__file__).parents[3] / "docs" / "clusters.md"
LAB = """name: lab
levels:
  host: {bandwidth: 25GB/s, latency: 5ms}
  rack: {bandwidth: 100Gbit/s, latency: 20ms}
groups:
  - {type: a100, hosts: 2, count: 4, memory: 40GB, speed: 1.5, price_per_hour: 2.5,
     cpus: 64, host_memory: 512GB}
  - {type: v100, count: 2, storage: 2GB/s}
"""
RACKS = """
levels:
  host: {bandwidth: 4e9}
  rack: {bandwidth: 2e9, latency: 1, groups: {r1: {bandwidth: 3e9}}}
  room: {bandwidth: 1e9, port_per_device: true}
groups:
  - {type: a100, hosts: 2, rack: r1}
  - {type: a100, count: 2, rack: r0}
"""
MEMBERS = """
groups:
  - {type: a100, hosts: 3}
levels:
  host: {}
  rack:
    groups:
      left: {members: [host1/gpu0, host0], bandwidth: 1e9}
      right: {members: [host2], link: ethernet-10g}
  room: {link: infiniband-hdr, latency: 2}
"""
SINGLE = """
name: three
hosts:
  desk: {cpus: 16, memory: 64GB, storage: 2GB/s}
  shelf: {cpus: 32, memory: 128GB}
devices:
  desk/gpu0: {type: rtx3090}
  desk/gpu1: {type: RTX2080, speed: 0.9}
  big: {host: shelf, kind: cpu, memory: 100GB}
matrix:
  bandwidth:
    desk/gpu0: [-, 6GB/s, 1GB/s]
    desk/gpu1: [5GB/s, 0, inf]
    big: [1GB/s, 1GB/s, 7]
  latency: 2
"""


@pytest.fixture(scope="session")
def lab(catalogue: Catalogue) -> Cluster:
    return read_cluster_yaml(LAB, catalogue)


def test_groups_become_named_hosts_and_devices(lab: Cluster):
    assert lab.name == "lab"
    assert [host.name for host in lab.hosts] == ["host0", "host1", "host2"]
    assert lab.device_names[4:] == (
        *("host1/gpu0", "host1/gpu1", "host1/gpu2", "host1/gpu3", "host2/gpu0", "host2/gpu1"),
    )


def test_what_a_group_says_goes_before_the_catalogue(lab: Cluster, catalogue: Catalogue):
    device, a100 = lab.devices[0], catalogue.device_type("a100")
    assert (device.memory_bytes, device.speed, device.price_per_hour) == (40e9, 1.5, 2.5)
    assert device.clocks_mhz == a100.clocks_mhz
    assert device.peak_flop_per_s == a100.peak_flop_per_s
    assert (lab.hosts[0].cpus, lab.hosts[0].memory_bytes) == (64, 512e9)
    v100_host = lab.hosts[2]
    assert (v100_host.cpus, v100_host.memory_bytes, v100_host.storage_bytes_per_s) == (
        24,
        500e9,
        2e9,
    )


def test_levels_are_innermost_first(lab: Cluster):
    host, rack = lab.levels
    assert (host.name, host.group_of.tolist()) == ("host", [0] * 4 + [1] * 4 + [2] * 2)
    assert host.bandwidth_bytes_per_s.tolist() == [25e9] * 3
    assert host.latency_s.tolist() == [5e-3] * 3
    assert (rack.name, rack.group_of.tolist(), rack.port_per_device) == ("rack", [0] * 10, False)
    assert rack.bandwidth_bytes_per_s.tolist() == [12.5e9]


def test_groups_say_in_which_rack_they_lie(catalogue: Catalogue):
    host, rack, room = read_cluster_yaml(RACKS, catalogue).levels
    assert host.group_of.tolist() == [0, 1, 2, 2]
    assert host.latency_s.tolist() == [0, 0, 0]
    assert rack.group_of.tolist() == [0, 0, 1, 1]
    assert rack.bandwidth_bytes_per_s.tolist() == [3e9, 2e9]
    assert rack.latency_s.tolist() == [1, 1]
    assert (room.group_of.tolist(), room.port_per_device) == ([0, 0, 0, 0], True)


def test_members_of_a_level_are_devices_or_hosts(catalogue: Catalogue):
    host, rack, room = read_cluster_yaml(MEMBERS, catalogue).levels
    assert host.bandwidth_bytes_per_s.tolist() == [2.74e11] * 3
    assert rack.group_of.tolist() == [0, 0, 1]
    assert rack.bandwidth_bytes_per_s.tolist() == [1e9, 1.25e9]
    assert rack.latency_s.tolist() == [0, catalogue.link_type("ethernet-10g").latency_s]
    assert (room.bandwidth_bytes_per_s.tolist(), room.latency_s.tolist()) == ([2.5e10], [2])


def test_without_levels_the_links_are_those_of_a_shorthand(catalogue: Catalogue):
    groups = "groups: [{type: A100, hosts: 2, count: 4}, {type: cpu, count: 2}]\n"
    text = f"name: 2x4xa100+2xcpu\n{groups}"
    assert read_cluster_yaml(text, catalogue) == read_shorthand("2x4xa100+2xcpu", catalogue)
    assert read_cluster_yaml(text + "levels: {}", catalogue).levels[1].name == "rack"


def test_a_host_level_that_is_missing_is_added_to_groups(catalogue: Catalogue):
    groups = "groups:\n- {type: a100, count: 2}\n- {type: t4, link: nvlink4}\n"
    text = f"{groups}levels: {{net: {{bandwidth: 1}}}}"
    host, net = read_cluster_yaml(text, catalogue).levels
    assert (host.name, host.bandwidth_bytes_per_s.tolist()) == ("host", [2.74e11, 3.76e11])
    assert (net.name, net.bandwidth_bytes_per_s.tolist()) == ("net", [1])


def test_single_devices_and_a_matrix(catalogue: Catalogue):
    cluster = read_cluster_yaml(SINGLE, catalogue)
    assert cluster.device_names == ("desk/gpu0", "desk/gpu1", "big")
    assert [device.host for device in cluster.devices] == [0, 0, 1]
    assert [device.type for device in cluster.devices] == ["rtx3090", "rtx2080", ""]
    assert cluster.devices[2].kind is DeviceKind.CPU
    assert cluster.hosts[0].storage_bytes_per_s == 2e9
    assert cluster.matrix is not None
    assert cluster.matrix.bandwidth_bytes_per_s.tolist() == [
        *(0, 6e9, 1e9),
        *(5e9, 0, float("inf")),
        *(1e9, 1e9, 7),
    ]
    assert cluster.matrix.latency_s.tolist() == [2] * 9


def test_single_devices_need_neither_hosts_nor_levels(catalogue: Catalogue):
    text = "devices:\n  h/a: {type: a100}\n  h/b: {type: a100-pcie}\n  c: {type: v100}\n"
    cluster = read_cluster_yaml(text, catalogue)
    assert [host.name for host in cluster.hosts] == ["h", "host0"]
    assert cluster.hosts[1].cpus == 24
    assert [level.name for level in cluster.levels] == ["host", "rack"]
    slower = catalogue.link_type("pcie4").bandwidth_bytes_per_s
    assert cluster.levels[0].bandwidth_bytes_per_s.tolist() == [slower, 1.5e11]


def test_a_device_lies_on_the_only_host(catalogue: Catalogue):
    text = (
        "hosts: {h: {}}\ndevices: {a: {type: a100}, b: {type: a100}}\nlevels: {net: {link: pcie4}}"
    )
    cluster = read_cluster_yaml(text, catalogue)
    assert [device.host for device in cluster.devices] == [0, 0]
    assert [level.name for level in cluster.levels] == ["net"]


def test_types_of_the_text_go_before_the_catalogue_as_a_whole(catalogue: Catalogue):
    text = """
types:
  A100: {kind: cpu, memory: inf, price_per_hour: unknown, clocks_mhz: [1, 2],
    peak_flop_per_s: {}, link: pcie3}
groups:
  - {type: a100, count: 2, idle_w: 3}
"""
    cluster = read_cluster_yaml(text, catalogue)
    device = cluster.devices[0]
    assert (device.type, device.name) == ("A100", "host0/cpu0")
    assert device.memory_bytes == float("inf")
    assert (device.clocks_mhz, device.peak_flop_per_s, device.idle_w) == ((1, 2), {}, 3)
    assert device.memory_bytes_per_s == 0
    assert cluster.hosts[0].cpus == 0


def test_a_type_beyond_the_catalogue_needs_kind_and_memory(catalogue: Catalogue):
    groups = "groups:\n- {type: B100, kind: gpu, memory: 192GB, count: 2}\n"
    text = f"{groups}levels: {{host: {{bandwidth: 1e9}}}}\n"
    device = read_cluster_yaml(text, catalogue).devices[1]
    assert (device.type, device.memory_bytes, device.memory_bytes_per_s) == ("B100", 192e9, 0)
    with pytest.raises(
        FormatError,
        match=r"2:.*0:.*'B100'.*'v100'.*'h100'.*'b300'\?.*a100",
    ):
        read_cluster_yaml(text.replace("kind: gpu, ", ""), catalogue)


@pytest.mark.parametrize(
    ("text", "line", "reason"),
    [
        ("name: x\n", 1, "expected either 'groups' or 'devices'"),
        ("groups: []\ndevices: {}\n", 1, "expected either 'groups' or 'devices'"),
        ("[1]\n", 1, "the cluster is a list; expected a mapping"),
        ("groups: []\n", 1, "groups is empty"),
        ("devices: {}\n", 1, "devices is empty"),
        ("groups: {}\n", 1, "groups is a mapping; expected a list"),
        ("groups: [a100]\n", 1, "group 0 is 'a100'; expected a mapping"),
        ("group: []\n", 1, "the cluster: unknown key 'group'; did you mean 'groups'"),
        ("name: [x]\ngroups: [{type: a100}]\n", 1, "name is a list; expected a text"),
        ("name:\ngroups: [{type: a100}]\n", 1, "name is nothing; expected a text"),
        ("groups:\n- {type: a100}\nhosts: {}\n", 3, "'hosts' goes with 'devices'"),
        ("groups:\n- {type: a100}\nlevels: {}\nmatrix: {}\n", 4, "a cluster has 'levels' or"),
        ("groups:\n- {typ: a100}\n", 2, "group 0: unknown key 'typ'; did you mean 'type'"),
        ("groups:\n- {type: a100}\n- {count: 2}\n", 3, "group 1: it has no type; give its kind"),
        ("groups:\n- {type: a100, rack: r0}\n", 2, "group 0: unknown key 'rack'"),
        (
            "groups:\n- type: a100\n  count: 0\n",
            3,
            "group 0: count is '0'; expected a whole number",
        ),
        ("groups:\n- {type: a100, count: 2.5}\n", 2, "group 0: count is '2.5'"),
        ("groups:\n- {type: a100, hosts: 9223372036854775808}\n", 2, "group 0: hosts is '9223"),
        ("groups:\n- {type: a100, hosts: 65536, count: 2}\n", 2, "group 0: more than 65536 dev"),
        ("groups:\n- {type: a100, memory: 0}\n", 2, "group 0: memory is '0'; expected more than 0"),
        ("groups:\n- {type: a100, memory: -1}\n", 2, "group 0: memory '-1' is negative"),
        ("groups:\n- {type: a100, memory: nan}\n", 2, "group 0: memory 'nan' is not understood"),
        ("groups:\n- {type: a100, memory: [1]}\n", 2, "group 0: memory is a list; expected a"),
        ("groups:\n- {type: a100, memory: 9223372036854775808}\n", 2, "group 0: memory is '922337"),
        ("groups:\n- {type: a100, host_memory: 1e19}\n", 2, "group 0: host_memory is '1e19'"),
        ("groups:\n- {type: a100, storage: 1e19}\n", 2, "host 'new': storage_bytes_per_s is 1e+19"),
        ("groups:\n- {type: a100, speed: 0}\n", 2, "group 0: speed is '0'; expected a number more"),
        ("groups:\n- {type: a100, speed: .nan}\n", 2, "group 0: speed is '.nan'"),
        ("groups:\n- {type: a100, cpus: -4}\n", 2, "group 0: cpus is '-4'"),
        ("groups:\n- {type: a100, price_per_hour: free}\n", 2, "group 0: price_per_hour is 'free'"),
        ("groups:\n- {type: a100, kind: tpu}\n", 2, "group 0: kind is 'tpu'; expected one of gpu"),
        ("groups:\n- {type: a100, link: wire}\n", 2, "link 'wire' is not in the catalogue"),
        (
            "groups:\n- {type: a100, clocks_mhz: [2, 1]}\n",
            2,
            "group 0: clocks_mhz is a list; expec",
        ),
        ("groups:\n- {type: x, kind: gpu, memory: 1}\n", 2, "the link of 'host0/gpu0' to others"),
        ("types:\n  x: {kind: gpu}\ngroups: [{type: x}]\n", 2, "type 'x': key 'memory' is missing"),
        ("types:\n  x: {king: gpu}\ngroups: [{type: x}]\n", 2, "type 'x': unknown key 'king'"),
        ("devices:\n  a: {cpus: 1}\n", 2, "device 'a': unknown key 'cpus'"),
        (
            "hosts: {h: {}}\ndevices:\n  i/a: {type: a100}\n",
            3,
            "device 'i/a': host 'i' is not there",
        ),
        ("hosts: {h: {cpu: 1}}\ndevices:\n  h/a: {type: a100}\n", 1, "host 'h': unknown key 'cpu'"),
        ("devices:\n  '': {type: a100}\n", 1, "devices: '' is not a name"),
        ("groups:\n- {type: a100}\nname: &n x\n", 3, "anchors and aliases"),
    ],
)
def test_a_wrong_cluster_is_an_error_with_its_line(
    catalogue: Catalogue, text: str, line: int, reason: str
):
    with pytest.raises(FormatError) as caught:
        read_cluster_yaml(text, catalogue)
    assert (caught.value.line, caught.value.reason[: len(reason)]) == (line, reason)


@pytest.mark.parametrize(
    ("levels", "line", "reason"),
    [
        ("[]", 3, "levels is a list; expected a mapping"),
        ("\n  host: 5", 4, "level 'host' is '5'; expected a mapping"),
        ("\n  host: {bandwith: 5}", 4, "level 'host': unknown key 'bandwith'; did you mean"),
        ("\n  host: {bandwidth: 5}\n  host: {bandwidth: 5}", 5, "key 'host' stands twice"),
        ("\n  host: {bandwidth: 0}", 4, "level 'host': bandwidth is '0'; expected more than 0"),
        ("\n  host: {bandwidth: 5, latency: -1}", 4, "level 'host': latency '-1' is negative"),
        ("\n  host: {bandwidth: 5, latency: inf}", 4, "level 'host': latency is 'inf'"),
        ("\n  host: {link: wire}", 4, "link 'wire' is not in the catalogue"),
        ("\n  host: {}", 3, "cluster 'cluster': no link between 'host0/gpu0' and 'host1/gpu0'"),
        ("\n  rack: {}", 4, "level 'rack', group 'all': no bandwidth; give 'bandwidth' or 'link'"),
        ("\n  rack: {bandwidth: 5, port_per_device: 1}", 4, "level 'rack': port_per_device is '1'"),
        ("\n  rack: {bandwidth: 5, groups: [a]}", 4, "level 'rack': groups is a list"),
        (
            "\n  rack: {bandwidth: 5, groups: {a: {}}}",
            4,
            "level 'rack': no group 'a'; known are all",
        ),
        (
            "\n  host: {groups: {host9: {bandwidth: 1}}}",
            4,
            "level 'host': no group 'host9'; did you",
        ),
        (
            "\n  rack: {bandwidth: 5, groups: {a: {members: 5}}}",
            4,
            "level 'rack', group 'a': members",
        ),
        (
            "\n  rack: {bandwidth: 5, groups: {a: {members: [x]}}}",
            4,
            "level 'rack', group 'a': mem",
        ),
        (
            "\n  rack: {bandwidth: 5, groups: {a: {members: [host0]}}}",
            *(4, "level 'rack': 'host1/gpu0' is in no group"),
        ),
        (
            "\n  rack: {bandwidth: 5, groups: {a: {members: [host0, host0/gpu1]}}}",
            *(4, "level 'rack', group 'a': member 'host0/gpu1' is in two groups"),
        ),
        (
            "\n  rack: {bandwidth: 5, groups: {a: {members: [host0, host1]}, b: {}}}",
            *(4, "level 'rack', group 'b': members are missing, other groups have them"),
        ),
        (
            "\n  rack: {bandwidth: 5, groups: {a: {members: [host0, host1]}, b: {members: []}}}",
            *(4, "level 'rack' has 1 groups and 2 bandwidths"),
        ),
        (
            "\n  a: {bandwidth: 5}\n  b: {bandwidth: 5, groups: {c: {members: [host0]}, "
            "d: {members: [host1]}}}",
            *(3, "level 'b' cuts through a group of the level below"),
        ),
    ],
)
def test_a_wrong_level_is_an_error_with_its_line(
    catalogue: Catalogue, levels: str, line: int, reason: str
):
    text = f"groups:\n- {{type: a100, hosts: 2, count: 2}}\nlevels: {levels}\n"
    with pytest.raises(FormatError) as caught:
        read_cluster_yaml(text, catalogue)
    assert (caught.value.line, caught.value.reason[: len(reason)]) == (line, reason)


def test_a_group_must_say_its_rack_where_others_do_and_members_are_not_listed(
    catalogue: Catalogue,
):
    with pytest.raises(FormatError, match=r"8:.*others"):
        read_cluster_yaml(RACKS.replace(", rack: r0", ""), catalogue)
    with pytest.raises(FormatError, match=r"7:.*'rack'"):
        read_cluster_yaml(RACKS.replace("bandwidth: 3e9", "members: [host0]"), catalogue)


@pytest.mark.parametrize(
    ("old", "new", "line", "reason"),
    [
        ("  bandwidth:\n", "  bandwith:\n", 11, "matrix: unknown key 'bandwith'; did you mean"),
        ("    big: [1GB/s, 1GB/s, 7]\n", "", 12, "matrix: bandwidth: row of 'big' is missing"),
        ("    big:", "    bug:", 14, "matrix: bandwidth: unknown key 'bug'; did you mean 'big'"),
        (", inf]", "]", 13, "matrix: bandwidth from 'desk/gpu1' has 2 values; expected 3"),
        (" inf]", " -]", 13, "matrix: bandwidth from 'desk/gpu1' to 'big' '-' is not understood"),
        (" inf]", " 0]", 13, "matrix: bandwidth from 'desk/gpu1' to 'big' is '0'; expected more"),
        (" 7]", " x]", 14, "matrix: bandwidth from 'big' to itself 'x' is not understood"),
        ("latency: 2", "latency: inf", 15, "matrix: latency is 'inf'; expected a number below"),
        ("latency: 2", "latency: []", 15, "matrix: latency is a list; expected a mapping"),
        ("[5GB/s, 0, inf]", "5", 13, "matrix: bandwidth from 'desk/gpu1' is '5'; expected a list"),
    ],
)
def test_a_wrong_matrix_is_an_error_with_its_line(
    catalogue: Catalogue, old: str, new: str, line: int, reason: str
):
    assert old in SINGLE
    with pytest.raises(FormatError) as caught:
        read_cluster_yaml(SINGLE.replace(old, new, 1), catalogue)
    assert (caught.value.line, caught.value.reason[: len(reason)]) == (line, reason)


def test_a_matrix_needs_a_bandwidth(catalogue: Catalogue):
    with pytest.raises(FormatError, match=r"2:.*'bandwidth'"):
        read_cluster_yaml("groups: [{type: a100}]\nmatrix: {}", catalogue)
    one = read_cluster_yaml("groups: [{type: a100}]\nmatrix: {bandwidth: 1}", catalogue)
    assert one.matrix is not None
    assert one.matrix.latency_s.tolist() == [0]


def test_every_example_of_the_documents_can_be_read(catalogue: Catalogue):
    blocks = re.findall(
        r"```yaml( \w+)?\n(.*?)```", DOCUMENTS.read_text(encoding="utf-8"), re.DOTALL
    )
    assert len(blocks) >= 5
    for kind, text in blocks:
        if kind:
            assert load_catalogue(text).device_type("b100").price_per_hour == 6
        else:
            assert len(read_cluster_yaml(text, catalogue)) >= 3


WORDS = st.sampled_from(
    [
        *(
            "name",
            "types",
            "groups",
            "hosts",
            "devices",
            "levels",
            "matrix",
            "type",
            "count",
            "kind",
        ),
        *(
            "memory",
            "speed",
            "bandwidth",
            "latency",
            "members",
            "link",
            "host",
            "rack",
            "a100",
            "gpu",
        ),
        *("host0", "host0/gpu0", "nvlink3", "1", "0", "-1", "1e9", "9223372036854775808", "nan"),
        *("inf", "", "~", "true", "1e999", "x", "clocks_mhz", "peak_flop_per_s", "price_per_hour"),
    ]
)
TREES = st.recursive(
    WORDS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORDS, inner, max_size=4),
    max_leaves=20,
)


def flow(tree: object) -> str:
    if isinstance(tree, dict):
        return "{" + ", ".join(f"{key or 'k'}: {flow(value)}" for key, value in tree.items()) + "}"
    if isinstance(tree, list):
        return "[" + ", ".join(map(flow, tree)) + "]"
    return str(tree)


def outcome(text: str) -> str:
    """Return the message of our error, or nothing for a cluster; any other error escapes."""
    try:
        cluster = read_cluster_yaml(text, load_catalogue())
    except PartitaError as exc:
        return str(exc)
    assert isinstance(cluster, Cluster)
    return ""


@settings(derandomize=True, deadline=None, max_examples=200)
@given(
    st.dictionaries(st.sampled_from(["name", "types", "hosts", "levels", "matrix"]), TREES),
    st.sampled_from(["groups", "devices"]),
    TREES,
)
def test_any_tree_gives_a_cluster_or_one_of_our_errors(
    sections: dict[str, object], section: str, tree: object
):
    text = flow({**sections, section: tree})
    assert "\n" not in outcome(text)


@settings(derandomize=True, deadline=None, max_examples=400)
@given(
    st.sampled_from([LAB, RACKS, MEMBERS, SINGLE]),
    st.integers(0, 500),
    st.integers(0, 30),
    st.sampled_from(
        ["", "-", ":", "{", "]", "\n", "0", "1e400", "nan", "é", "\x00", "&a", "'", "#"]
    ),
)
def test_damaged_texts_give_a_cluster_or_one_of_our_errors(
    text: str, start: int, length: int, patch: str
):
    damaged = text[:start] + patch + text[start + length :]
    assert "\n" not in outcome(damaged)


def test_levels_say_what_collectives_reach(catalogue: Catalogue):
    text = """
groups:
- {type: h100, count: 2, hosts: 2}
levels:
  host: {bandwidth: 400GB/s, collectives: {ring: [0.5, 0.6], start_s: 20us, compute_share: 0.1}}
  rack:
    link: infiniband-ndr
    port_per_device: true
    port_share: {host1: 0.5, host0/gpu1: 0.25}
"""
    host, rack = read_cluster_yaml(text, catalogue).levels
    assert host.collectives == (Collectives(ring=(0.5, 0.6), start_s=2e-5, compute_share=0.1),) * 2
    assert rack.collectives == (catalogue.link_type("infiniband-ndr").collectives,)
    assert rack.port_share.tolist() == [1.0, 0.25, 0.5, 0.5]
    plain = text.replace("link: infiniband-ndr", "link: infiniband-ndr\n    collectives: none")
    assert read_cluster_yaml(plain, catalogue).levels[1].collectives == ()
    with pytest.raises(FormatError, match=r"9:.*no"):
        read_cluster_yaml(text.replace("host1: 0.5", "host7: 0.5"), catalogue)
    with pytest.raises(FormatError, match=r"line 5: .*compute_share is 2"):
        read_cluster_yaml(text.replace("share: 0.1}", "share: 2}"), catalogue)
