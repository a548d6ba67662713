"""All foreign formats in one table: a row each, graph and plan, cluster, energy and fleet alike.

A trace of Synergy names its models only, a log of submissions not even those: both need
sensitivities, so that they are recognised here but read where these are given (``partita fleet
trace``, ``partita fleet simulate``).
"""

import re
from collections.abc import Callable, Mapping
from typing import NoReturn

from partita.core.cluster import Cluster
from partita.core.codec import decode, format_of, write_json
from partita.core.energy import EnergyProfile, Frontier
from partita.core.fleet import Sensitivity, Trace
from partita.core.graph import Graph
from partita.core.plan import Plan
from partita.core.problem import Problem
from partita.core.solution import Solution
from partita.errors import FormatError, InvalidInputError
from partita.formats.baechi import read_baechi, read_placement, write_baechi, write_placement
from partita.formats.dnn_partitioning import (
    read_dnn_partitioning,
    read_split,
    write_dnn_partitioning,
    write_split,
)
from partita.formats.dynamicml import (
    NPY_MAGIC,
    read_assignment,
    read_dynamicml,
    read_speed_matrix,
    write_assignment,
    write_dynamicml,
    write_speed_matrix,
)
from partita.formats.format import Document, Format, Holds, Source
from partita.formats.hostfile import is_hostfile, read_hostfile
from partita.formats.kubernetes import is_kubernetes_nodes, read_kubernetes_nodes
from partita.formats.nccl_topology import is_nccl_topology, read_nccl_topology
from partita.formats.nvidia_smi import is_nvidia_smi, read_nvidia_smi
from partita.formats.perseus import read_energy_csv, write_energy_csv, write_frontier_csv
from partita.formats.pipedream import (
    KEYS,
    read_pipedream,
    read_pipedream_plan,
    write_pipedream,
    write_pipedream_plan,
)
from partita.formats.piper import read_piper, read_piper_plan, write_piper, write_piper_plan
from partita.formats.server_file import KEYWORD, read_server_file, write_server_file
from partita.formats.slurm_text import is_slurm_text, read_slurm_text
from partita.formats.submissions import is_submission_table
from partita.formats.synergy import (
    is_synergy_cluster,
    is_synergy_profile,
    read_cluster,
    read_synergy_profile,
    write_cluster_ini,
    write_synergy_profile,
    write_trace,
)

_TRACE_LINE = re.compile(r"\d+,[^,\s][^,]*,[0-9.eE+-]+,\d+,\d+\s*")
_BROKEN_TRACE_LINE = re.compile(r"\d+,\s*[A-Za-z][^,]*(,[^,]*){2,4}")
"""A number, a name and about as many cells as there are fields: the reader says what is wrong."""


def graph_of(value: Document) -> Graph:
    """Return the graph of a graph, problem or solution.

    Raises:
        InvalidInputError: It has none.
    """
    if isinstance(value, Graph):
        return value
    return problem_of(value, needed="a graph").graph


def problem_of(value: Document, *, needed: str = "a problem (graph and cluster)") -> Problem:
    """Return the problem of a problem or solution.

    Raises:
        InvalidInputError: It has none.
    """
    if isinstance(value, Problem):
        return value
    if isinstance(value, Solution):
        return value.problem
    raise InvalidInputError(f"this format holds {needed}, got a {type(value).__name__.lower()}")


def cluster_of(value: Document) -> Cluster:
    """Return the cluster of a cluster, problem or solution.

    Raises:
        InvalidInputError: It has none.
    """
    return value if isinstance(value, Cluster) else problem_of(value, needed="a cluster").cluster


def _solution_of(value: Document) -> Solution:
    if isinstance(value, Solution):
        return value
    raise InvalidInputError(
        f"this format holds a plan; it is written from a solution, not from a "
        f"{type(value).__name__.lower()}"
    )


def _profile_of(value: Document) -> EnergyProfile:
    if isinstance(value, Frontier) and value.profile is not None:
        return value.profile
    if isinstance(value, EnergyProfile):
        return value
    raise _refused("an energy profile", value)


def _frontier_of(value: Document) -> Frontier:
    if isinstance(value, Frontier):
        return value
    raise _refused("a frontier", value)


def _trace_of(value: Document) -> Trace:
    if isinstance(value, Trace):
        return value
    raise _refused("a trace", value)


def _sensitivity_of(value: Document) -> Sensitivity:
    if isinstance(value, Sensitivity):
        return value
    raise _refused("a sensitivity", value)


def _refused(held: str, value: Document) -> InvalidInputError:
    return InvalidInputError(f"this format holds {held}, got a {format_of(type(value))}")


def _problem_format(
    title: str,
    read: Callable[..., Problem],
    write: Callable[[Problem], str],
    keys: tuple[str, ...],
) -> Format:
    """Return the row of a JSON file that holds a graph and a cluster, known by its keys."""
    return Format(
        title=title,
        holds=Holds.PROBLEM,
        sniff=lambda source: source.has_keys(*keys),
        read=lambda source: read(source.text, **({"name": source.name} if source.name else {})),
        write=lambda value: write(problem_of(value)),
    )


def _plan_format(
    title: str,
    read: Callable[[str, Problem], Plan],
    write: Callable[[Problem, Plan], str],
    sniff: Callable[[Source], bool],
) -> Format:
    """Return the row of a file that holds a plan, which is read together with its problem."""
    return Format(
        title=title,
        holds=Holds.PLAN,
        sniff=sniff,
        read=lambda source: read(source.text, source.for_problem(title)),
        write=lambda value: write(_solution_of(value).problem, _solution_of(value).plan),
    )


def _is_own(source: Source) -> bool:
    return source.has_keys("format")


def _is_pipedream(source: Source) -> bool:
    return not source.begins_as_json and f"{KEYS[0]}=" in source.text


def _has_stages(source: Source) -> bool:
    return " -- stage_id=" in source.text


def _read_stages(source: Source) -> Graph | Plan:
    """Return the graph of a ``gpus=N.txt``, or with a problem its plan."""
    if source.problem is None:
        return read_pipedream(source.text, name=source.name or "graph")
    devices = source.problem.cluster.device_names
    return read_pipedream_plan(source.text, source.problem.graph, devices=devices)


def _is_split(source: Source) -> bool:
    names_kinds = (
        source.problem is not None and "dnn-partitioning" in source.problem.graph.annotations
    )
    if names_kinds and _is_assignment(source):
        return True
    # A plan of Piper may have a list of CPUs besides its stages.
    return (source.has_keys("fpgas") or source.has_keys("cpus")) and not source.has_keys("stages")


def _is_assignment(source: Source) -> bool:
    has_parts = source.has_keys("parts") or source.has_keys("assignment")
    return has_parts and not source.has_keys("placement")


def _is_energy_csv(source: Source) -> bool:
    if source.begins_as_json:
        return False
    return {"instruction", "frequency"} <= source.columns or {
        "instruction",
        "power limit",
    } <= source.columns


def _is_frontier_csv(source: Source) -> bool:
    return not source.begins_as_json and {"time", "energy"} <= source.columns


def _read_points(_: Source) -> NoReturn:
    raise FormatError(
        "these are times and energies without clocks, which are no document; 'partita energy "
        "compare' reads them as a frontier"
    )


def _is_trace(source: Source) -> bool:
    if _TRACE_LINE.fullmatch(source.first_line):
        return True
    return _BROKEN_TRACE_LINE.fullmatch(source.first_line) is not None and not (
        is_submission_table(source.text) or is_synergy_cluster(source.text)
    )


def _is_philly(source: Source) -> bool:
    found = source.json
    return (
        isinstance(found, list)
        and bool(found)
        and isinstance(found[0], dict)
        and found[0].keys() >= {"attempts", "submitted_time"}
        and not is_synergy_profile(found)
    )


def _needs_models(what: str) -> NoReturn:
    raise FormatError(
        f"this is {what}; 'partita fleet trace FILE --profiles SENSITIVITIES -o trace.json' "
        "makes it a document"
    )


def _read_models(_: Source) -> NoReturn:
    raise FormatError(
        "this is a file of several sensitivities; name it with --profiles of 'partita fleet'"
    )


def _cannot_write(what: str) -> NoReturn:
    raise InvalidInputError(f"{what} can be read only")


def _listing(title: str, sniff: Callable[[str], bool], read: Callable[..., Cluster]) -> Format:
    """Return the row of a list of hosts and GPUs that somebody's tool prints."""
    return Format(
        title=title,
        holds=Holds.CLUSTER,
        sniff=lambda source: not source.begins_as_json and sniff(source.text),
        read=lambda source: read(source.text, source.known, name=source.name or "cluster"),
        write=lambda _: _cannot_write(title),
        is_listing=True,
    )


FORMATS: Mapping[str, Format] = {
    "partita": Format(
        title="a document of Partita (JSON)",
        holds=Holds.ANYTHING,
        sniff=_is_own,
        read=lambda source: decode(source.json),
        write=write_json,
    ),
    "pipedream": Format(
        title="PipeDream's profile graph.txt",
        holds=Holds.GRAPH,
        sniff=lambda source: _is_pipedream(source) and not _has_stages(source),
        read=lambda source: read_pipedream(source.text, name=source.name or "graph"),
        write=lambda value: write_pipedream(graph_of(value)),
        endings=(".txt",),
    ),
    "pipedream-plan": Format(
        title="PipeDream's plan gpus=N.txt",
        holds=Holds.PLAN,
        sniff=lambda source: _is_pipedream(source) and _has_stages(source),
        read=_read_stages,
        write=lambda value: write_pipedream_plan(
            _solution_of(value).problem.graph, _solution_of(value).plan
        ),
        endings=(".txt",),
        writes_by_ending=(Solution,),
    ),
    "server-file": Format(
        title="SparsePipedream's server_file",
        holds=Holds.PROBLEM,
        sniff=lambda source: source.first_line.startswith(KEYWORD) and not _is_pipedream(source),
        read=lambda source: read_server_file(
            source.text, source.open_text, name=source.name or "servers"
        ),
        write=lambda value: write_server_file(problem_of(value)),
    ),
    "dnn-partitioning": _problem_format(
        "an input of dnn-partitioning",
        read_dnn_partitioning,
        write_dnn_partitioning,
        ("nodes", "edges", "maxFPGAs"),
    ),
    "dnn-partitioning-plan": _plan_format(
        "a split of dnn-partitioning", read_split, write_split, _is_split
    ),
    "piper": _problem_format(
        "an input of Piper", read_piper, write_piper, ("nodes", "edges", "mbsInBatch")
    ),
    "piper-plan": _plan_format(
        "a plan of Piper",
        read_piper_plan,
        write_piper_plan,
        lambda source: source.has_keys("stages"),
    ),
    "dynamicml": _problem_format(
        "an instance of DynamicMLTrainer",
        read_dynamicml,
        write_dynamicml,
        ("node_weights", "edges", "matrix"),
    ),
    "dynamicml-plan": _plan_format(
        "an assignment of nodes to devices", read_assignment, write_assignment, _is_assignment
    ),
    "dynamicml-speed": Format(
        title="DynamicMLTrainer's gpu_speed.npy",
        holds=Holds.CLUSTER,
        sniff=lambda source: source.data.startswith(NPY_MAGIC),
        read=lambda source: read_speed_matrix(source.data, name=source.name or "dynamicml"),
        write=lambda value: write_speed_matrix(cluster_of(value)),
        endings=(".npy",),
        is_binary=True,
    ),
    "baechi": _problem_format(
        "a cost graph of Baechi", read_baechi, write_baechi, ("nodes", "edges", "devices")
    ),
    "baechi-plan": _plan_format(
        "a placement of Baechi",
        read_placement,
        write_placement,
        lambda source: source.has_keys("placement"),
    ),
    "perseus-profile": Format(
        title="Perseus's profile.csv",
        holds=Holds.ENERGY_PROFILE,
        sniff=_is_energy_csv,
        read=lambda source: read_energy_csv(source.text, name=source.name or "profile"),
        write=lambda value: write_energy_csv(_profile_of(value)),
        endings=(".csv",),
    ),
    "perseus-frontier": Format(
        title="Perseus's iteration_time_energy.csv",
        holds=Holds.FRONTIER,
        sniff=_is_frontier_csv,
        read=_read_points,
        write=lambda value: write_frontier_csv(_frontier_of(value)),
        endings=(".csv",),
        writes_by_ending=(Frontier,),
    ),
    "synergy-profile": Format(
        title="a profile.json of Synergy's profiler",
        holds=Holds.SENSITIVITY,
        sniff=lambda source: is_synergy_profile(source.json),
        read=lambda source: read_synergy_profile(source.text, name=source.name or "job"),
        write=lambda value: write_synergy_profile(_sensitivity_of(value)),
    ),
    "synergy-trace": Format(
        title="a trace of Synergy (CSV)",
        holds=Holds.TRACE,
        sniff=_is_trace,
        read=lambda _: _needs_models("a trace of Synergy"),
        write=lambda value: write_trace(_trace_of(value)),
        endings=(".csv",),
        writes_by_ending=(Trace,),
    ),
    "synergy-cluster": Format(
        title="a cluster of Synergy (INI)",
        holds=Holds.CLUSTER,
        sniff=lambda source: is_synergy_cluster(source.text),
        read=lambda source: read_cluster(source.text, name=source.name or "cluster"),
        write=lambda value: write_cluster_ini(cluster_of(value)),
        endings=(".ini",),
    ),
    "synergy-models": Format(
        title="Synergy's matrices of models",
        holds=Holds.SENSITIVITY,
        sniff=lambda source: source.has_keys("cpu_axis_per_gpu", "mem_axis_gb_per_gpu", "sets"),
        read=_read_models,
        write=lambda _: _cannot_write("matrices of models"),
    ),
    "philly": Format(
        title="a job log of Philly",
        holds=Holds.TRACE,
        sniff=_is_philly,
        read=lambda _: _needs_models("a log of submissions"),
        write=lambda _: _cannot_write("a log of submissions"),
    ),
    "submissions": Format(
        title="a table of submissions (CSV with columns such as submitted, duration_s, gpus)",
        holds=Holds.TRACE,
        sniff=lambda source: not source.begins_as_json and is_submission_table(source.text),
        read=lambda _: _needs_models("a log of submissions"),
        write=lambda _: _cannot_write("a log of submissions"),
    ),
    "nvidia-smi": _listing("GPUs as nvidia-smi prints them", is_nvidia_smi, read_nvidia_smi),
    "nccl-topology": _listing(
        "a topology that NCCL wrote (XML)", is_nccl_topology, read_nccl_topology
    ),
    "slurm": _listing("nodes or switches of Slurm", is_slurm_text, read_slurm_text),
    "kubernetes": Format(
        title="nodes of Kubernetes (JSON)",
        holds=Holds.CLUSTER,
        sniff=lambda source: is_kubernetes_nodes(source.json),
        read=lambda source: read_kubernetes_nodes(
            source.parse(), source.known, name=source.name or "kubernetes"
        ),
        write=lambda _: _cannot_write("nodes of Kubernetes"),
        is_listing=True,
    ),
    "hostfile": _listing("a hostfile", is_hostfile, read_hostfile),
}
"""The formats by name, in the order in which they are listed."""
