"""Slurm's texts: host lists, nodes, switches and jobs of several versions."""

import json

import pytest

from partita.catalogue.catalogue import load_catalogue
from partita.catalogue.gpu_names import gpu_type
from partita.catalogue.inventory import Completion, FoundGpu, FoundHost, inventory_cluster
from partita.catalogue.slurm_nodes import slurm_cluster
from partita.errors import InvalidInputError, UnsupportedError
from partita.fleet.engines.slurm import servers_of_nodes
from partita.flows.slurm_cluster import read_slurm_cluster
from partita.slurm.allocation import read_allocation
from partita.slurm.hostlist import expand_hosts, numbers_of
from partita.slurm.jobs import HeldNode, Phase, read_jobs, read_sacct, read_squeue
from partita.slurm.nodes import auth_socket, read_nodes
from partita.slurm.topology import read_topology, read_topology_yaml, switches_above


def known(given: str = "") -> Completion:
    return Completion(catalogue=load_catalogue(), given=given)


NODES = """\
NodeName=gpu10 Arch=x86_64 CoresPerSocket=16
   CPUAlloc=0 CPUEfctv=30 CPUTot=32 CPULoad=4.54
   Gres=gpu:a100:4(S:0-1)
   OS=Linux 6.1 #1 SMP PREEMPT_DYNAMIC @0
   RealMemory=512000 AllocMem=0 FreeMem=15917 Sockets=2 Boards=1
   State=IDLE ThreadsPerCore=1 TmpDisk=0 Weight=1
   Partitions=main,urgent

NodeName=gpu2 CPUTot=32 Gres=gpu:a100:4 RealMemory=512000 State=MIXED+DRAIN Partitions=main
   Reason=bad fan [root@2026-11-18T13:35:40]
NodeName=gpu3 CPUTot=32 Gres=gpu:v100:2 RealMemory=256000 State=DOWN* Partitions=main
NodeName=gpu4 CPUTot=32 Gres=gpu:v100:2 RealMemory=256000 State=ALLOCATED Partitions=main
NodeName=login CPUTot=8 Gres=(null) RealMemory=64000 State=IDLE Partitions=main
"""
TOPOLOGY = """\
SwitchName=rack0 Level=0 LinkSpeed=1 Nodes=gpu[2,10]
SwitchName=rack1 Level=0 LinkSpeed=1 Nodes=gpu[3-4]
SwitchName=spine Level=1 LinkSpeed=1 Nodes=gpu[2-4,10] Switches=rack[0-1]
"""


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("n1", ["n1"]),
        ("n[1-3,07]", ["n1", "n2", "n3", "n07"]),
        ("n[09-11],gpu2", ["n09", "n10", "n11", "gpu2"]),
        ("r[1-2]n[1,3]", ["r1n1", "r1n3", "r2n1", "r2n3"]),
        ("(null)", []),
    ],
)
def test_host_lists_are_expanded_in_their_order(text: str, hosts: list[str]) -> None:
    assert list(expand_hosts(text)) == hosts


@pytest.mark.parametrize("text", ["n[1-3", "n[a-b]", "n[1-999999999]", "n[1-9999]m[1-9999]"])
def test_what_is_no_host_list_is_refused(text: str) -> None:
    with pytest.raises(InvalidInputError, match="host list"):
        expand_hosts(text)


def test_number_lists_may_be_empty() -> None:
    assert numbers_of("") == ()
    assert numbers_of("0-2,5") == (0, 1, 2, 5)


def test_nodes_are_read_with_states_and_reasons() -> None:
    nodes = {node.name: node for node in read_nodes(NODES)}
    assert nodes["gpu10"].cpus == 30
    assert nodes["gpu10"].gpus == (("a100", 4),)
    assert nodes["gpu10"].memory_bytes == 512000 * 2**20
    assert nodes["gpu10"].away == ""
    assert nodes["gpu4"].away == ""
    assert nodes["gpu2"].away == "DRAIN bad fan [root@2026-11-18T13:35:40]"
    assert nodes["gpu3"].away == "DOWN"
    assert nodes["gpu3"].states == ("DOWN", "NOT_RESPONDING")
    (silent,) = read_nodes("NodeName=a CPUTot=1 RealMemory=1 State=IDLE*")
    assert silent.away == ""
    assert nodes["login"].gpus == ()


def test_other_text_is_refused_with_its_first_line() -> None:
    with pytest.raises(InvalidInputError, match="no nodes: slurm_load_node error"):
        read_nodes("slurm_load_node error: Unable to contact\n")


def test_a_cluster_has_the_usable_nodes_in_slurms_order_and_racks_without_linkspeed() -> None:
    cluster = slurm_cluster(read_nodes(NODES), read_topology(TOPOLOGY), known())
    assert [host.name for host in cluster.hosts] == ["gpu10", "gpu4"]
    assert [device.name for device in cluster.devices][-3:] == [
        "gpu10/gpu3",
        "gpu4/gpu0",
        "gpu4/gpu1",
    ]
    assert [level.name for level in cluster.levels] == ["host", "rack", "spine"]
    assert cluster.levels[1].group_of.tolist() == [0, 0, 0, 0, 1, 1]
    assert cluster.levels[1].bandwidth_bytes_per_s.min() > 1e9


def test_a_fleet_keeps_nodes_that_are_away_because_they_may_come_back() -> None:
    servers = servers_of_nodes(read_nodes(NODES))
    assert servers.names == ("gpu10", "gpu2", "gpu3", "gpu4")
    assert servers.gpu_types == ("a100", "v100")


def test_types_of_gpus_are_found_by_their_words() -> None:
    catalogue = load_catalogue()
    assert gpu_type("Tesla_V100", catalogue) == "v100"
    assert gpu_type("nvidia_a100-sxm4-40gb", catalogue) == "a100-sxm-40gb"
    assert gpu_type("a100_1g.5gb", catalogue) == ""
    assert gpu_type("NVIDIA GeForce RTX 3080 Ti", catalogue) == ""
    for title, words in (
        ("", "no type of the GPUs of node 'n'"),
        ("quantum9", "catalogue does not know"),
        ("1g.5gb", r"parts of GPUs \(MIG\)"),
    ):
        host = FoundHost(name="n", gpus=(FoundGpu(title=title),))
        with pytest.raises(InvalidInputError, match=words):
            inventory_cluster("c", [host], known())
        assert inventory_cluster("c", [host], known("t4")).devices[0].type == "t4"


def test_gres_of_parts_and_of_names_that_begin_with_digits_are_counted() -> None:
    line = "NodeName=a CPUTot=1 RealMemory=1 State=IDLE Gres="
    for gres, gpus in (
        ("gpu:1g.5gb:7", (("1g.5gb", 7),)),
        ("gpu:3090:4(S:0-1)", (("3090", 4),)),
        ("gpu:8", (("", 8),)),
        ("gpu:a100:2,gpu:v100:2,mps:a100:200", (("a100", 2), ("v100", 2))),
    ):
        assert read_nodes(line + gres)[0].gpus == gpus


def test_slurm_conf_describes_nodes_by_lists_and_defaults() -> None:
    nodes = read_nodes(
        "ClusterName=lab\nNodeName=DEFAULT RealMemory=1000 Sockets=2 CoresPerSocket=8\n"
        "# NodeName=old Gres=gpu:k80:2\n"
        "NodeName=gpu[01-02] Gres=gpu:a100:4 \\\n  State=UNKNOWN\nPartitionName=main Nodes=ALL\n"
    )
    assert [(node.name, node.cpus, node.gpus) for node in nodes] == [
        ("gpu01", 16, (("a100", 4),)),
        ("gpu02", 16, (("a100", 4),)),
    ]


CONF = """\
# three levels
SwitchName=a Nodes=n[1-2]
SwitchName=b Nodes=n[3-4] LinkSpeed=900  # a hint
SwitchName=c Nodes=n[5-6]
SwitchName=left Switches=a,b
SwitchName=right Switches=c
SwitchName=top Switches=left,right
"""
YAML = """\
---
- topology: flat
  cluster_default: false
  flat: true
- topology: racks
  cluster_default: true
  tree:
    switches:
      - switch: top
        children: s[1-2]
      - switch: s1
        nodes: n[1-2]
      - switch: s2
        nodes: n[3-4]
"""


def test_switches_of_a_configuration_become_levels() -> None:
    cluster = slurm_cluster((), read_topology(CONF), known("2xa100"))
    assert [host.name for host in cluster.hosts] == [f"n{number}" for number in range(1, 7)]
    assert [level.name for level in cluster.levels] == ["host", "rack", "spine", "core"]
    assert cluster.levels[1].group_of[::2].tolist() == [0, 0, 1, 1, 2, 2]
    assert cluster.levels[2].group_of[::2].tolist() == [0, 0, 0, 0, 1, 1]
    assert cluster.levels[2].bandwidth_bytes_per_s[0] == cluster.levels[3].bandwidth_bytes_per_s[0]
    assert switches_above(read_topology_yaml(YAML)) == {
        "n1": ("s1", "top"), "n2": ("s1", "top"), "n3": ("s2", "top"), "n4": ("s2", "top"),
    }  # fmt: skip
    assert len(read_topology("BlockName=b1 Nodes=n[1-2]\nBlockSizes=2,4\nRingName=r Nodes=m1")) == 2


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("SwitchName=a Switches=b\nSwitchName=b Switches=a", "below itself"),
        ("SwitchName=a Nodes=n[1-", "bracket"),
    ],
)
def test_switches_that_cannot_be_are_refused(text: str, words: str) -> None:
    with pytest.raises(InvalidInputError, match=words):
        read_topology(text)


@pytest.mark.parametrize(
    ("variables", "nodes"),
    [
        ({}, []),
        (
            {"SLURM_JOB_NODELIST": "n[09-10]", "SLURM_GPUS_PER_NODE": "a100:4"},
            [("n09", "a100", 4), ("n10", "a100", 4)],
        ),
        ({"SLURM_JOB_NODELIST": "n1", "SLURM_GPUS_ON_NODE": "2"}, [("n1", "", 2)]),
        (
            {"SLURM_JOB_NODELIST": "n[1-3]", "SLURM_TASKS_PER_NODE": "4(x2),2"},
            [("n1", "", 4), ("n2", "", 4), ("n3", "", 2)],
        ),
        (
            {
                "SLURM_JOB_NODELIST_HET_GROUP_0": "a[1-2]",
                "SLURM_GPUS_PER_NODE_HET_GROUP_0": "a100:8",
                "SLURM_JOB_NODELIST_HET_GROUP_1": "v1",
                "SLURM_TASKS_PER_NODE_HET_GROUP_1": "2",
            },
            [("a1", "a100", 8), ("a2", "a100", 8), ("v1", "", 2)],
        ),
        ({"SLURM_NODELIST": "old"}, [("old", "", None)]),
    ],
)
def test_variables_describe_an_allocation(variables: dict, nodes: list) -> None:
    found = read_allocation(variables)
    assert [(node.name, node.gpu_type, node.gpus) for node in found] == nodes


def test_an_allocation_is_a_cluster_even_without_slurms_commands(monkeypatch) -> None:
    monkeypatch.setenv("PATH", "")
    variables = {"SLURM_JOB_NODELIST": "n[1-2]", "SLURM_TASKS_PER_NODE": "2(x2)"}
    cluster = read_slurm_cluster("slurm", known("h100"), variables)
    assert cluster.device_names == ("n1/gpu0", "n1/gpu1", "n2/gpu0", "n2/gpu1")
    assert {device.type for device in cluster.devices} == {"h100"}
    with pytest.raises(UnsupportedError, match=r"scontrol.*installed"):
        read_slurm_cluster("slurm:main", known(), variables)
    with pytest.raises(InvalidInputError, match="such as 4"):
        read_slurm_cluster("slurm", known(), {**variables, "SLURM_TASKS_PER_NODE": "many"})


OLD = {
    "job_id": 7, "het_job_id": 0, "het_job_offset": 0, "name": "a", "job_state": "RUNNING",
    "state_reason": "None", "restart_cnt": 0, "exit_code": 0, "end_time": 0,
    "gres_detail": ["gpu:v100:2(IDX:0-1)"],
    "job_resources": {
        "nodes": "n3",
        "allocated_nodes": [
            {"nodename": "n3", "cpus_used": 0, "memory_allocated": 1000,
             "sockets": {"0": {"cores": {"0": "allocated", "1": "allocated"}}}},
        ],
    },
}  # fmt: skip
NEW = {
    "job_id": 7, "het_job_id": {"set": True, "number": 0}, "name": "a", "job_state": ["RUNNING"],
    "het_job_offset": {"set": True, "number": 0}, "state_reason": "None", "restart_cnt": 0,
    "gres_detail": ["gpu:v100:2(IDX:0-1)"], "end_time": {"set": True, "number": 0},
    "job_resources": {
        "nodes": {"allocation": [
            {"name": "n3", "cpus": {"count": 2, "used": 0}, "memory": {"allocated": 1000}},
        ]},
    },
}  # fmt: skip


@pytest.mark.parametrize("job", [OLD, NEW])
def test_json_of_any_version_says_what_a_job_holds(job: dict) -> None:
    (found,) = read_squeue(json.dumps({"jobs": [job]}))
    assert found.phase is Phase.RUNNING
    assert found.leader == 7
    assert found.held == (HeldNode(node="n3", gpus=(0, 1), cpus=2, memory_bytes=1000 * 2**20),)


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        (35072, 137),
        (15, -15),
        ({"return_code": {"set": True, "number": 3}, "signal": {"id": {"number": 0}}}, 3),
        ({"return_code": {"set": False}, "signal": {"signal_id": 9}}, -9),
    ],
)
def test_exit_codes_of_any_version(code: object, expected: int) -> None:
    job = {**OLD, "job_state": "FAILED", "exit_code": code, "end_time": 5}
    (found,) = read_squeue(json.dumps({"jobs": [job]}))
    assert (found.phase, found.exit_code, found.ended_s) == (Phase.ENDED, expected, 5.0)


def test_what_is_no_json_is_refused() -> None:
    with pytest.raises(InvalidInputError, match="--json"):
        read_squeue("squeue: unrecognized option")


def test_jobs_as_text_with_components_and_nodes_that_hold_alike() -> None:
    text = (
        "JobId=2 HetJobId=1 HetJobOffset=1 JobName=x JobState=RUNNING Reason=None Restarts=0 "
        "NodeList=n[4,1] Nodes=n[1,4] CPU_IDs=21-23 Mem=100 GRES=gpu:v100:1(IDX:2) MinCPUsNode=3\n"
        "JobId=3 JobName=y JobState=CANCELLED ExitCode=0:15 EndTime=2026-11-18T13:50:48\n"
        "JobId=4 JobName=z JobState=COMPLETING Reason=None ExitCode=0:0\n"
    )
    first, second, third = read_jobs(text)
    assert [one.node for one in first.held] == ["n4", "n1"]
    assert first.held[0].gpus == (2,)
    assert (first.leader, first.offset, first.held[0].cpus) == (1, 1, 3)
    assert (second.phase, second.exit_code) == (Phase.ENDED, -15)
    assert second.ended_s is not None
    assert third.phase is Phase.RUNNING


def test_the_accounting_says_who_cancelled() -> None:
    text = (
        "12|a|CANCELLED by 1000|0:15|2026-11-18T13:00:00|2026-11-18T13:50:48\n"
        "12.batch|batch|CANCELLED|0:15||\n"
        "13+1|b|RUNNING|0:0|2026-11-18T13:00:00|Unknown\n"
    )
    first, second = read_sacct(text)
    assert (first.state, first.reason, first.exit_code) == ("CANCELLED", "by 1000", -15)
    assert (second.id, second.leader, second.phase) == (14, 13, Phase.RUNNING)


def test_the_socket_of_munge_is_the_one_that_slurm_is_configured_with() -> None:
    config = "AccountingStorageHost = localhost\nAuthInfo        = {}\nAuthType = auth/munge\n"
    assert auth_socket(config.format("socket=/run/own/munge.socket")) == "/run/own/munge.socket"
    assert auth_socket(config.format("cred_expire=60,socket=/a/b,ttl=3")) == "/a/b"
    assert auth_socket(config.format("(null)")) == ""
