"""What a writer is given and what it returns."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from partita.core.graph import DeviceKind
from partita.core.grid import Grid, grid_of
from partita.core.plan import Plan
from partita.core.problem import Problem
from partita.core.solution import Solution
from partita.errors import InvalidInputError
from partita.names import suggest
from partita.trainers.rules import get_trainer
from partita.units import format_seconds


@dataclass(frozen=True, kw_only=True)
class PlanToWrite:
    """A plan on its way into the files of another tool.

    Attributes:
        solution: The plan and its problem.
        step_s: Predicted seconds of a step.
        made_by: The version of Partita and the command that makes the files, a line each.
        release: Release of the tool that the files are for; empty = the usual one.
        base: The user's own configuration that the plan is added to, ``module:function``.
        rename: Names of modules in the user's model by ours.
        options: Options of the target, by name.
        command: The user's command that every process runs; empty = ``partita run``.
    """

    solution: Solution
    step_s: float
    made_by: tuple[str, ...] = ()
    release: str = ""
    base: str = ""
    rename: Mapping[str, str] = field(default_factory=dict)
    options: Mapping[str, str] = field(default_factory=dict)
    command: tuple[str, ...] = ()

    @property
    def problem(self) -> Problem:
        """The problem."""
        return self.solution.problem

    @property
    def plan(self) -> Plan:
        """The plan alone."""
        return self.solution.plan

    @property
    def name(self) -> str:
        """The name of the model as part of a file's name."""
        kept = (c if c.isascii() and c.isalnum() else "-" for c in self.problem.graph.name.lower())
        return "-".join(part for part in "".join(kept).split("-") if part)[:40] or "model"

    @cached_property
    def grid(self) -> Grid:
        """The plan as a grid.

        Raises:
            InfeasibleError: It is none.
        """
        return grid_of(self.problem, self.plan)

    def grid_for(self, trainer: str) -> Grid:
        """Return the plan as a grid that a trainer can run.

        Raises:
            InfeasibleError: It is none, or the trainer cannot.
        """
        get_trainer(trainer).check(self.grid)
        return self.grid

    @property
    def header(self) -> list[str]:
        """The lines that every file begins with, without the sign of a comment."""
        graph = self.problem.graph
        step = f"predicted step {format_seconds(self.step_s)}"
        return [
            *self.made_by,
            f"plan of {_one_line(graph.name)} ({self.plan.fingerprint}) on "
            f"{_one_line(self.problem.cluster.name)}, {step}",
        ]

    def comment(self, sign: str = "#") -> str:
        """Return the header as comment lines."""
        return "".join(f"{sign} {line}\n" for line in self.header)

    @cached_property
    def nodes(self) -> "tuple[Node, ...]":
        """The hosts of the plan in the order in which they are first used, with their devices."""
        cluster = self.problem.cluster
        held: dict[int, list[int]] = {}
        for name in self.plan.devices:
            device = cluster.index_of[name]
            held.setdefault(cluster.devices[device].host, []).append(device)
        nodes = []
        for host, devices in held.items():
            mine = [d for d, device in enumerate(cluster.devices) if device.host == host]
            kind = cluster.devices[devices[0]].kind
            same = [d for d in mine if cluster.devices[d].kind is kind]
            nodes.append(
                Node(
                    name=cluster.hosts[host].name,
                    type=cluster.devices[devices[0]].type or kind.value,
                    cpus=cluster.hosts[host].cpus,
                    local=tuple(same.index(d) for d in devices if d in same),
                    has=len(same),
                    is_gpu=kind is DeviceKind.GPU,
                )
            )
        return tuple(nodes)

    def renamed(self, name: str) -> str:
        """Return a module by the user's name: the longest part that is renamed at its start."""
        for old in sorted(self.rename, key=len, reverse=True):
            if name == old or name.startswith(f"{old}."):
                return self.rename[old] + name[len(old) :]
        return name

    def option(self, name: str, usual: str = "") -> str:
        """Return an option of the target."""
        return self.options.get(name, usual)


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A host that runs processes of a plan.

    Attributes:
        name: Its name.
        type: Type of its devices.
        cpus: Its cores; 0 = not known.
        local: Numbers of the devices that the plan uses, among those of the host.
        has: Devices that the host has.
        is_gpu: Whether they are accelerators.
    """

    name: str
    type: str
    cpus: int
    local: tuple[int, ...]
    has: int
    is_gpu: bool

    @property
    def shape(self) -> tuple[str, int, int]:
        """What a scheduler is asked for."""
        return self.type, len(self.local), self.cpus


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """The files of a plan, and how they are used.

    Attributes:
        files: Texts by name of the file.
        command: The command to type.
        left_to_you: What the files do not say.
        remarks: What should be known, a sentence each.
        process: Command of the shell that each process under torchrun runs; empty = the trainer is
            started in another way.
    """

    files: Mapping[str, str]
    command: str
    left_to_you: tuple[str, ...] = ()
    remarks: tuple[str, ...] = ()
    process: str = ""


def check_options(plan: PlanToWrite, known: tuple[str, ...], target: str) -> None:
    """Refuse options that a target does not take.

    Raises:
        InvalidInputError: One is not known.
    """
    for name in plan.options:
        if name not in known:
            has = suggest(name, known) if known else "; it takes none"
            raise InvalidInputError(f"target {target} has no option {name!r}{has}")


def torchrun_words(plan: PlanToWrite, script: str) -> str:
    """Return the command that starts a trainer's own script on every node."""
    nodes = plan.nodes
    per_node = sorted({len(node.local) for node in nodes})
    each = str(per_node[0]) if len(per_node) == 1 else "$PROCESSES_OF_THIS_NODE"
    words = ["torchrun", "--nproc-per-node", each]
    if len(nodes) > 1:
        words += ["--nnodes", str(len(nodes)), "--node-rank", "$NODE_RANK"]
        words += ["--master-addr", nodes[0].name, "--master-port", "29500"]
    return " ".join([*words, script])


def _one_line(text: str) -> str:
    return " ".join(text.split())
