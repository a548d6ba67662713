"""Lists of hosts and GPUs as people have them: read, or refused in one line that says why.

The files are written by hand after what the tools print: odd spacing, colours, old versions, fields
that are missing or N/A, parts of GPUs.
"""

from pathlib import Path

import pytest
from mutated_inputs import READERS, outcome

from partita.catalogue.catalogue import load_catalogue
from partita.catalogue.inventory import Completion
from partita.core.cluster import Cluster
from partita.documents import open_file
from partita.errors import PartitaError
from partita.flows.convert import convert
from partita.flows.fields import ClusterFields
from partita.flows.problem import read_cluster
from partita.formats.hostfile import is_hostfile
from partita.formats.nvidia_smi import is_nvidia_smi

FILES = Path(__file__).parents[2] / "golden" / "readers"
READ = {
    "nvidia-smi/a100-nvswitch.txt": ("", 4, "a100", "host"),
    "nvidia-smi/3090-pairs.txt": ("", 4, "rtx3090", "island host"),
    "nvidia-smi/dgx1-old-soc.txt": ("v100", 8, "v100", ""),
    "nvidia-smi/query-only-unknown-memory.txt": ("", 2, "h100-pcie", "host"),
    "nvidia-smi/vm-one-gpu.txt": ("l4", 1, "l4", "host"),
    "nvidia-smi/table.txt": ("", 2, "v100", "host"),
    "nccl-topology/two-direct.xml": ("v100", 2, "v100", "host"),
    "nccl-topology/h100-nvswitch.xml": ("h100", 8, "h100", "host"),
    "nccl-topology/two-sockets-pcie.xml": ("rtx3090", 4, "rtx3090", "island host"),
    "slurm/show-node.txt": ("", 8, "a100", "host rack spine"),
    "slurm/oneliner-mig.txt": ("l4", 18, "l4", "host"),
    "slurm/no-type-null.txt": ("t4", 2, "t4", "host"),
    "slurm/topology.conf": ("2xa100", 16, "a100", "host rack spine"),
    "slurm/any-case.conf": ("2xa100", 16, "a100", "host rack spine"),
    "slurm/topology.yaml": ("4xgb200", 16, "gb200", "host rack spine"),
    "hostfile/deepspeed.txt": ("a100", 10, "a100", "host rack"),
    "hostfile/users-and-ranges.txt": ("a100", 12, "a100", "host rack"),
    "hostfile/mpich.txt": ("h100", 16, "h100", "host rack"),
    "hostfile/open-mpi-mixed.txt": ("4xa100", 12, "a100", "host rack"),
    "hostfile/windows-repeated.txt": ("v100", 4, "v100", "host rack"),
    "kubernetes/h100-leaves.json": ("", 24, "h100", "host rack spine"),
    "kubernetes/no-labels.json": ("a100", 4, "a100", "host"),
    "kubernetes/time-sliced.json": ("", 4, "t4", "host"),
    "kubernetes/one-node.json": ("", 2, "a100-pcie", "host"),
}
"""Files with the type that is given, their number of GPUs, a type, and their levels."""
REFUSED = {
    "nvidia-smi/list-with-mig.txt": ("", r"parts of GPUs \(MIG\), .*3g.20gb"),
    "nvidia-smi/table-with-mig.txt": ("", r"parts of GPUs \(MIG\), 'NVIDIA A100-SXM4-80GB MIG'"),
    "nvidia-smi/query-mig-mode.txt": ("", r"parts of GPUs \(MIG\), 'NVIDIA A100-SXM4-40GB MIG'"),
    "nvidia-smi/failed.txt": ("", "could not make its matrix"),
    "nvidia-smi/torn.txt": ("a100", "torn.txt:1: the matrix has 1 rows for 2 GPUs"),
    "nvidia-smi/vm-one-gpu.txt": ("", "no type of the GPUs"),
    "nvidia-smi/a100-nvswitch.txt": ("v100", "--type v100 is for those without"),
    "nccl-topology/cloud-template.xml": ("a100", "no <gpu>"),
    "nccl-topology/entities.xml": ("a100", "entities.xml:2: declarations"),
    "nccl-topology/unknown-speed.xml": ("a100", "unknown-speed.xml:3: link_speed is"),
    "nccl-topology/two-direct.xml": ("", "no type of the GPUs"),
    "slurm/oneliner-mig.txt": ("", r"parts of GPUs \(MIG\), 'a100_1g.5gb'"),
    "slurm/all-down.txt": ("", "no node with GPUs that can be used .*Not responding"),
    "slurm/circle.conf": ("8xa100", "below itself"),
    "slurm/topology.conf": ("a100", "--type 8xa100"),
    "hostfile/no-slots.txt": ("a100", "none of its 2 hosts has a GPU"),
    "hostfile/words.txt": ("a100", "words.txt:1: 'n1 slots=four'"),
    "hostfile/mpich.txt": ("8xh100", "say how many GPUs they have"),
    "kubernetes/mig.json": ("", r"parts of GPUs \(MIG\)"),
    "kubernetes/no-gpus.json": ("", "none of 1 nodes is ready and has GPUs"),
    "kubernetes/bad-quantity.json": ("", "'b1': nvidia.com/gpu is 'eight'"),
}


def read(name: str, given: str) -> Cluster:
    return open_file(FILES / name).load(
        completion=Completion(catalogue=load_catalogue(), given=given)
    )


@pytest.mark.parametrize("name", READ)
def test_what_tools_print_is_read(name: str) -> None:
    given, size, kind, levels = READ[name]
    cluster = read(name, given)
    assert (len(cluster), cluster.devices[-1].type) == (size, kind)
    assert " ".join(level.name for level in cluster.levels) == levels
    assert open_file(FILES / name).format == name.split("/", maxsplit=1)[0]


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_read_is_refused_in_one_line(name: str) -> None:
    given, words = REFUSED[name]
    with pytest.raises(PartitaError, match=words) as caught:
        read(name, given)
    assert "\n" not in str(caught.value)


def test_a_matrix_of_unlike_ways_stays_a_matrix_with_nvlinks_by_their_number() -> None:
    cluster = read("nvidia-smi/dgx1-old-soc.txt", "v100")
    assert cluster.matrix is not None
    rates = cluster.matrix.bandwidth_bytes_per_s.reshape(8, 8)
    assert rates[0, 3] == 2 * rates[0, 1] == pytest.approx(50e9)
    assert rates[0, 7] == pytest.approx(15.754e9 / 2)


def test_nvlinks_of_nccl_are_counted_as_nccl_does() -> None:
    switched = read("nccl-topology/h100-nvswitch.xml", "h100")
    assert switched.levels[0].bandwidth_bytes_per_s.tolist() == [pytest.approx(18 * 20.6e9)]
    direct = read("nccl-topology/two-direct.xml", "v100")
    assert direct.levels[0].bandwidth_bytes_per_s.tolist() == [pytest.approx(40e9)]


def test_memory_tells_products_of_one_name_apart() -> None:
    text = "index, name, memory.total [MiB]\n0, NVIDIA A100-SXM4, 40960 MiB\n"
    known = Completion(catalogue=load_catalogue())
    from_text = READERS["nvidia-smi"](text.encode(), known)
    assert from_text.devices[0].type == "a100-sxm-40gb"


def test_users_and_ranges_of_hostfiles_are_their_hosts() -> None:
    cluster = read("hostfile/users-and-ranges.txt", "a100")
    assert [host.name for host in cluster.hosts] == ["gpu01.lab", "gpu02.lab", "10.0.0.7"]


@pytest.mark.parametrize(
    "text",
    ["a" * 50_000 + "_ slots=1", "a-" * 20_000 + " slots=1", "GPU 0: x" + " " * 40_000 + "y"],
    ids=["name", "dashes", "blanks"],
)
def test_long_lines_are_no_lists_and_take_no_time(text: str) -> None:
    assert not is_hostfile(text)
    assert not is_nvidia_smi(text)


def test_commands_take_such_files_as_clusters(tmp_path: Path) -> None:
    path = str(FILES / "hostfile" / "deepspeed.txt")
    found, _ = read_cluster(ClusterFields(cluster=path, type="a100", bandwidth="rack=1e9"))
    assert found is not None
    assert found.levels[-1].bandwidth_bytes_per_s.tolist() == [1e9]
    for fields in (ClusterFields(cluster="2xa100", type="a100"), ClusterFields(type="a100")):
        with pytest.raises(PartitaError, match=r"--type.*--cluster"):
            read_cluster(fields)
    lab = tmp_path / "lab.yaml"
    assert convert(path, str(lab), type="a100").kind == "cluster"
    again, _ = read_cluster(ClusterFields(cluster=str(lab)))
    assert again == read("hostfile/deepspeed.txt", "a100")


@pytest.mark.parametrize("name", READERS)
def test_mutated_files_are_read_or_refused_and_nothing_else(name: str) -> None:
    counts = outcome(name, 40, seed=17)
    assert sum(counts.values()) == 40
    assert counts["refused"] > 0
