"""Slurm's texts: host lists, nodes, switches and jobs of several versions."""

import json

import pytest

from partita.catalogue.catalogue import load_catalogue
from partita.catalogue.slurm_nodes import gpu_type, slurm_cluster
from partita.errors import InvalidInputError
from partita.fleet.engines.slurm import servers_of_nodes
from partita.slurm.hostlist import expand_hosts, numbers_of
from partita.slurm.jobs import HeldNode, Phase, read_jobs, read_sacct, read_squeue
from partita.slurm.nodes import read_nodes, read_topology

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


@pytest.mark.parametrize("text", ["n[1-3", "n[a-b]", "n[1-999999999]"])
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
    catalogue = load_catalogue()
    cluster = slurm_cluster(read_nodes(NODES), read_topology(TOPOLOGY), catalogue)
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
    assert gpu_type("Tesla_V100", "n", catalogue).name == "v100"
    assert gpu_type("nvidia_a100-sxm4-40gb", "n", catalogue).name.startswith("a100")
    with pytest.raises(InvalidInputError, match="no type of the GPUs of node 'n'"):
        gpu_type("", "n", catalogue)
    with pytest.raises(InvalidInputError, match="catalogue does not know"):
        gpu_type("quantum9", "n", catalogue)


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
    with pytest.raises(InvalidInputError, match="squeue --json cannot be read"):
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
