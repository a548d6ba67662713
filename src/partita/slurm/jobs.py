"""Jobs of Slurm: from ``squeue --json`` of any version, ``scontrol show job`` or ``sacct``."""

import json
import os
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from partita.errors import InvalidInputError
from partita.slurm.hostlist import expand_hosts, numbers_of
from partita.slurm.nodes import fields_of, records_of

_MIB = 2**20
_HELD = re.compile(r"\bNodes=(\S+) CPU_IDs=(\S+) Mem=(\d+) GRES=(\S*)")
_GPUS = re.compile(r"\bgpu(?::[^:(),]+)?:(\d+)(?:\(IDX:([\d,-]*)\))?")
SACCT_FORMAT = "JobID,JobName,State,ExitCode,Start,End"
"""Fields that `read_sacct` reads: ``sacct --parsable2 --noheader --allocations --format=...``."""


class Phase(StrEnum):
    """Where a job is in its life."""

    PENDING = "pending"
    RUNNING = "running"
    ENDED = "ended"


_PENDING = ("PENDING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "RESV_DEL_HOLD", "SPECIAL_EXIT")
_ENDED = (
    "BOOT_FAIL",
    "CANCELLED",
    "COMPLETED",
    "DEADLINE",
    "FAILED",
    "NODE_FAIL",
    "OUT_OF_MEMORY",
    "PREEMPTED",
    "REVOKED",
    "TIMEOUT",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldNode:
    """What a job holds on one node.

    Attributes:
        node: The node.
        gpus: Numbers of its GPUs.
        cpus: CPUs.
        memory_bytes: Memory.
    """

    node: str
    gpus: tuple[int, ...]
    cpus: int
    memory_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SlurmJob:
    """A job, or one component of a heterogeneous one.

    Attributes:
        id: Its number.
        leader: Number of the whole: of the first component, or its own.
        offset: Which component it is.
        name: Its name.
        states: Its states in Slurm's words, the base first.
        reason: Why it waits or ended, in Slurm's words.
        held: What it holds; empty unless it runs.
        exit_code: How it ended; negative = by that signal; None = it has not.
        restarts: How often Slurm has queued it again.
        ended_s: When it ended, in seconds since 1970; None = it has not.
    """

    id: int
    leader: int
    offset: int
    name: str
    states: tuple[str, ...]
    reason: str
    held: tuple[HeldNode, ...] = ()
    exit_code: int | None = None
    restarts: int = 0
    ended_s: float | None = None

    @property
    def phase(self) -> Phase:
        """Where it is in its life; what still cleans up is running."""
        if "COMPLETING" in self.states:
            return Phase.RUNNING
        if any(state.startswith(_PENDING) for state in self.states):
            return Phase.PENDING
        return Phase.ENDED if self.states[0].startswith(_ENDED) else Phase.RUNNING

    @property
    def state(self) -> str:
        """Its base state, such as ``NODE_FAIL``."""
        return self.states[0]


def read_squeue(text: str) -> tuple[SlurmJob, ...]:
    """Return the jobs that ``squeue --json`` printed.

    Versions differ: a number may be an object with ``number``, a state a list, an exit code a wait
    status or an object.

    Raises:
        InvalidInputError: It is no such JSON.
    """
    try:
        jobs = json.loads(text)["jobs"]
        return tuple(_from_json(job) for job in jobs)
    except (ValueError, KeyError, TypeError, AttributeError) as exc:
        raise InvalidInputError(f"squeue --json cannot be read: {exc!r}") from exc


def _from_json(job: Mapping[str, Any]) -> SlurmJob:
    states = job["job_state"]
    words = tuple(states) if isinstance(states, list) else tuple(str(states).split())
    number = _number(job["job_id"]) or 0
    ended = _number(job.get("end_time")) or 0
    made = SlurmJob(
        id=number,
        leader=_number(job.get("het_job_id")) or number,
        offset=_number(job.get("het_job_offset")) or 0,
        name=str(job["name"]),
        states=words or ("UNKNOWN",),
        reason=str(job.get("state_reason") or ""),
        held=_held_json(job),
        restarts=_number(job.get("restart_cnt")) or 0,
    )
    if made.phase is not Phase.ENDED:
        return made
    return _ended(made, _exit_json(job.get("exit_code")), float(ended) if ended else None)


def _ended(job: SlurmJob, code: int, ended_s: float | None) -> SlurmJob:
    return replace(job, held=(), exit_code=code, ended_s=ended_s)


def _number(value: Any) -> int | None:  # noqa: ANN401 (JSON)
    if isinstance(value, Mapping):
        value = value.get("number") if value.get("set", True) else None
    return None if value is None else int(value)


def _exit_json(value: Any) -> int:  # noqa: ANN401 (JSON)
    if isinstance(value, Mapping) and "return_code" in value:
        signal = value.get("signal", {})
        number = _number(signal.get("id", signal.get("signal_id"))) or 0
        return -number if number else _number(value["return_code"]) or 0
    return os.waitstatus_to_exitcode(_number(value) or 0)


def _held_json(job: Mapping[str, Any]) -> tuple[HeldNode, ...]:
    resources = job.get("job_resources") or {}
    found = resources.get("nodes")
    if isinstance(found, Mapping):  # since 23.11
        rows = found.get("allocation") or []
        nodes = [(row["name"], row["cpus"]["count"], row["memory"]["allocated"]) for row in rows]
    else:
        rows = resources.get("allocated_nodes") or []
        nodes = [(row["nodename"], _cpus_json(row), row["memory_allocated"]) for row in rows]
    gres = list(job.get("gres_detail") or ()) + [""] * len(nodes)
    return tuple(
        HeldNode(
            node=str(name),
            gpus=_gpus(gres[row]),
            cpus=_number(cpus) or 0,
            memory_bytes=(_number(memory) or 0) * _MIB,
        )
        for row, (name, cpus, memory) in enumerate(nodes)
    )


def _cpus_json(row: Mapping[str, Any]) -> int:
    """Return the CPUs on a node; those "used" are none before the first step runs."""
    cores = sum(len(one.get("cores", ())) for one in (row.get("sockets") or {}).values())
    return max(_number(row["cpus_used"]) or 0, cores)


def _gpus(text: str) -> tuple[int, ...]:
    """Return the numbers of GPUs in a list of generic resources; without numbers, the first."""
    found: list[int] = []
    for match in _GPUS.finditer(text):
        numbers = numbers_of(match.group(2) or "")
        found += numbers or range(int(match.group(1)))
    return tuple(found)


def read_jobs(text: str) -> tuple[SlurmJob, ...]:
    """Return the jobs that ``scontrol show job --details --oneliner`` printed."""
    return tuple(_from_text(record) for record in records_of(text, "JobId"))


def _from_text(record: str) -> SlurmJob:
    fields = fields_of(record)
    number = int(fields["JobId"])
    held = [
        HeldNode(
            node=node,
            gpus=_gpus(gres),
            cpus=len(numbers_of(cpus)),
            memory_bytes=int(memory) * _MIB,
        )
        for nodes, cpus, memory, gres in _HELD.findall(record)
        for node in expand_hosts(nodes)
    ]
    # Nodes that hold alike are listed together, not in the order of the allocation.
    order = {name: row for row, name in enumerate(expand_hosts(fields.get("NodeList", "")))}
    made = SlurmJob(
        id=number,
        leader=int(fields.get("HetJobId", number)),
        offset=int(fields.get("HetJobOffset", 0)),
        name=fields.get("JobName", ""),
        states=tuple(fields.get("JobState", "UNKNOWN").split()),
        reason=fields.get("Reason", ""),
        held=tuple(sorted(held, key=lambda one: order.get(one.node, len(order)))),
        restarts=int(fields.get("Restarts", "0")),
    )
    if made.phase is not Phase.ENDED:
        return made
    return _ended(made, _exit_text(fields.get("ExitCode", "0:0")), _time_s(fields.get("EndTime")))


def _exit_text(text: str) -> int:
    code, _, signal = text.partition(":")
    return -int(signal) if signal.isdigit() and int(signal) else int(code or 0)


def _time_s(text: str | None) -> float | None:
    try:
        return time.mktime(time.strptime(text or "", "%Y-%m-%dT%H:%M:%S"))
    except ValueError:
        return None


def read_sacct(text: str) -> tuple[SlurmJob, ...]:
    """Return the jobs that ``sacct`` printed with the fields of ``SACCT_FORMAT``."""
    jobs = []
    for line in text.splitlines():
        number, name, state, code, _, end = (*line.split("|"), *[""] * 6)[:6]
        whole, _, offset = number.partition("+")
        if not whole.isdigit() or not state:
            continue
        # "CANCELLED by 1000": who cancelled is the reason.
        word, _, who = state.partition(" ")
        made = SlurmJob(
            id=int(whole) + int(offset or 0),
            leader=int(whole),
            offset=int(offset or 0),
            name=name,
            states=(word,),
            reason=who,
        )
        ended = made.phase is Phase.ENDED
        jobs.append(_ended(made, _exit_text(code), _time_s(end)) if ended else made)
    return tuple(jobs)
