"""Plans: a graph cut into stages and spread over devices.

Differences from the design's sketch: stages are numbered so that data flows from lower to higher
numbers, which makes "no cycle" one comparison and gives each device its order; recomputation is a
flag of each op; the route of a microbatch through replicas follows from the shares; weight stashing
is the schedule ``pipedream``.
"""

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from fractions import Fraction
from functools import cached_property, lru_cache

import numpy as np

from partita.core.columns import (
    Displayed,
    Flags,
    Ints,
    column,
    every,
    frozen_array,
    names,
    start,
)
from partita.core.graph import Graph
from partita.core.problem import Problem
from partita.core.schedules import DEFAULT_SCHEDULE, Schedule
from partita.errors import InvalidInputError

RECOMPUTE_SETS = ("attention", "norm", "mlp", "experts", "projections", "products", "full")
"""What may be computed again in the backward pass.

``attention`` is its core (scores and softmax), ``projections`` the up-projections of latent
attention, ``products`` every second matrix product and all that is element-wise (torchtitan's
selective checkpointing per op), ``full`` the whole block.
"""


class Shard(StrEnum):
    """State that the replicas of a stage divide among themselves instead of copying."""

    NONE = "none"
    OPTIMIZER = "optimizer"
    GRADIENTS = "gradients"
    PARAMETERS = "parameters"


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """A set of ops that runs as one unit on one group of devices.

    The ranks of a replica divide tensors (``tp``) and the sequence (``cp``): rank ``c * tp + t`` is
    tensor-parallel rank t of context-parallel rank c. Dense parameters are divided by tensor-
    parallel ranks, parameters of experts by ``ep * etp`` devices of the whole stage in its order,
    whatever replica they are in; devices that hold the same part are a team.

    Attributes:
        devices: Indices into the plan's devices, ``devices[replica][rank]``.
        shares: Microbatches that each replica takes of a round; empty = one each.
        shard: State that the members of a team divide.
        shard_group: Members of a team that divide it among themselves, each such group holding a
            whole; 0 = the whole team.
        cp: Context-parallel degree: ranks that divide the sequence.
        sequence_parallel: Whether tensor-parallel ranks divide tensors between ops, too.
        ep: Expert-parallel degree: devices that divide the experts.
        etp: Devices that divide each expert; 0 = expert parameters are divided as dense ones are.
        recompute: Name of the set of activations that backward recomputes, for ops whose costs are
            known by such sets (``Graph.degrees``); empty = none.
        offload_optimizer: Share of the optimizer's state that rests in the host's memory.
        offload_activations: Share of the saved activations that rests there between the passes.
    """

    devices: tuple[tuple[int, ...], ...]
    shares: tuple[int, ...] = ()
    shard: Shard = Shard.NONE
    shard_group: int = 0
    cp: int = 1
    sequence_parallel: bool = False
    ep: int = 1
    etp: int = 0
    recompute: str = ""
    offload_optimizer: float = 0.0
    offload_activations: float = 0.0

    def __post_init__(self) -> None:
        try:
            devices = tuple(tuple(map(operator.index, group)) for group in self.devices)
            shares = tuple(map(operator.index, self.shares))
        except TypeError as exc:
            raise InvalidInputError(
                f"a stage has devices {self.devices} and shares {self.shares}; "
                "expected whole numbers, the devices by replica"
            ) from exc
        object.__setattr__(self, "devices", devices)
        object.__setattr__(self, "shares", shares)
        self._check()

    def _check(self) -> None:
        if not self.devices or not self.devices[0]:
            raise InvalidInputError("a stage needs at least one device")
        if len({len(group) for group in self.devices}) != 1:
            sizes = [len(group) for group in self.devices]
            raise InvalidInputError(
                f"the replicas of a stage have {sizes} devices; "
                "replicas times the tensor-parallel degree must match the devices"
            )
        flat = [device for group in self.devices for device in group]
        if len(set(flat)) != len(flat) or min(flat) < 0:
            raise InvalidInputError(f"a stage uses devices {flat}; each may stand once, from 0 on")
        if not self.shares:
            object.__setattr__(self, "shares", (1,) * len(self.devices))
        if len(self.shares) != len(self.devices) or min(self.shares) < 1:
            raise InvalidInputError(
                f"shares {list(self.shares)} do not fit {len(self.devices)} replicas; "
                "expected a whole number of 1 or more for each"
            )
        if sum(self.shares) > 1_000_000:
            raise InvalidInputError(f"a round of {sum(self.shares)} microbatches is too long")
        self._check_degrees()
        uneven = len(set(self.shares)) > 1
        if uneven and self.shard in (Shard.GRADIENTS, Shard.PARAMETERS):
            raise InvalidInputError(
                f"sharded {self.shard.value} need equal shares, got {list(self.shares)}"
            )

    def _check_degrees(self) -> None:
        if self.cp < 1 or self.ranks % self.cp:
            raise InvalidInputError(
                f"a replica of {self.ranks} devices cannot have context-parallel degree {self.cp}; "
                "expected a divisor"
            )
        if self.ep < 1 or self.etp < 0 or len(self) % self.expert_parts:
            raise InvalidInputError(
                f"experts are divided by {self.ep} x {max(self.etp, 1)} devices; expected a "
                f"divisor of the {len(self)} devices of the stage"
            )
        if self.etp and self.ep == 1 and self.etp != self.tp:
            raise InvalidInputError(
                f"each expert is divided by {self.etp} devices without expert parallelism; "
                f"expected the tensor-parallel degree, {self.tp}, or 0"
            )
        if self.sequence_parallel and self.tp == 1:
            raise InvalidInputError("sequence parallelism needs tensor parallelism, got degree 1")
        copies = len(self) // self.tp
        if self.shard_group < 0 or (self.shard_group and copies % self.shard_group):
            raise InvalidInputError(
                f"a shard group of {self.shard_group} does not divide the {copies} devices that "
                "hold the same parameters; expected a divisor, or 0 for all of them"
            )
        if self.shard_group and self.shard is Shard.NONE:
            raise InvalidInputError(
                f"a shard group of {self.shard_group} needs state that is sharded, got shard 'none'"
            )
        for what in ("offload_optimizer", "offload_activations"):
            if not 0 <= getattr(self, what) <= 1:
                raise InvalidInputError(f"{what} is {getattr(self, what)}; expected 0 to 1")

    def __len__(self) -> int:
        return len(self.devices) * len(self.devices[0])

    @property
    def num_replicas(self) -> int:
        """Number of replicas."""
        return len(self.devices)

    @property
    def ranks(self) -> int:
        """Devices of a replica."""
        return len(self.devices[0])

    @property
    def tp(self) -> int:
        """Tensor-parallel degree."""
        return self.ranks // self.cp

    @property
    def tensor_parts(self) -> int:
        """Parts in which the ranks of a replica hold a tensor between stages."""
        return self.cp * (self.tp if self.sequence_parallel else 1)

    @property
    def expert_parts(self) -> int:
        """Parts in which the devices of the stage hold the parameters of experts."""
        return self.ep * max(self.etp, 1) if self.ep > 1 else self.tp

    def parts(self, *, experts: bool = False) -> int:
        """Return in how many parts the devices hold the parameters."""
        return self.expert_parts if experts else self.tp

    def teams(self, *, experts: bool = False) -> tuple[tuple[int, ...], ...]:
        """Return for each part of the parameters the devices that hold it.

        >>> Stage(devices=((0, 1, 2, 3), (4, 5, 6, 7)), cp=2).teams()
        ((0, 2, 4, 6), (1, 3, 5, 7))
        """
        # Rank c * tp + t of any replica holds part t, and replicas have a multiple of tp ranks.
        flat = tuple(device for group in self.devices for device in group)
        parts = self.parts(experts=experts)
        return tuple(flat[part::parts] for part in range(parts))

    def shard_size(self, *, experts: bool = False) -> int:
        """Return how many members of a team divide its state, where it is sharded."""
        team = len(self) // self.parts(experts=experts)
        # Teams of experts are smaller; where the group does not divide one, it is the group.
        return self.shard_group if self.shard_group and team % self.shard_group == 0 else team

    def divide(self, team: Sequence[int], *, experts: bool = False) -> tuple[tuple[int, ...], ...]:
        """Return the groups of a team that divide its state, in order."""
        size = self.shard_size(experts=experts)
        return tuple(tuple(team[first : first + size]) for first in range(0, len(team), size))

    @property
    def round(self) -> int:
        """Microbatches after which the route through the replicas repeats."""
        return sum(self.shares)

    @property
    def route(self) -> tuple[int, ...]:
        """The replica that takes each microbatch of a round.

        Replica r's k-th microbatch has the key ``((2k + 1) / (2 share_r), r)``; they go by key.

        >>> Stage(devices=((0,), (1,)), shares=(5, 3)).route
        (0, 1, 0, 0, 1, 0, 1, 0)
        """
        return _route(self.shares)


@lru_cache(maxsize=4096)
def _route(shares: tuple[int, ...]) -> tuple[int, ...]:
    if len(set(shares)) == 1:
        return tuple(range(len(shares))) * shares[0]
    keys = [
        (Fraction(2 * turn + 1, 2 * share), replica)
        for replica, share in enumerate(shares)
        for turn in range(share)
    ]
    return tuple(replica for _, replica in sorted(keys))


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Plan(Displayed):
    """A cut of a graph into stages, and how they run.

    Attributes:
        fingerprint: Of the graph it is for.
        devices: Names of the devices that it uses.
        stage_of: The stage of each op.
        stages: The stages; data flows from lower to higher numbers. The stages of one device run
            in the order of their numbers (backward: reversed) where the schedule leaves a choice.
        schedule: Order of the microbatches.
        microbatch_sizes: Samples of each microbatch of a step.
        recompute: Whether each op recomputes its activations in backward.
    """

    fingerprint: str
    devices: tuple[str, ...]
    stage_of: Ints
    stages: tuple[Stage, ...]
    schedule: Schedule = DEFAULT_SCHEDULE
    microbatch_sizes: Ints = start([1], np.int32)
    recompute: Flags = every(False)

    def __post_init__(self) -> None:
        rows = np.size(self.stage_of)
        sizes = np.size(self.microbatch_sizes)
        if not len(self.stages) or not sizes:
            raise InvalidInputError("a plan needs at least one stage and one microbatch")
        self._set(
            devices=names(self.devices, "devices of the plan"),
            stages=tuple(self.stages),
            stage_of=column(
                self.stage_of, np.int32, rows, "stage of an op", high=len(self.stages) - 1
            ),
            microbatch_sizes=column(
                self.microbatch_sizes, np.int32, sizes, "microbatch size", low=1
            ),
            recompute=column(self.recompute, np.bool_, rows, "recompute"),
        )
        empty = np.flatnonzero(np.bincount(self.stage_of, minlength=len(self.stages)) == 0)
        if len(empty):
            raise InvalidInputError(f"stage {empty[0]} holds no op; leave it out")
        self._check_stages()

    def _check_stages(self) -> None:
        """Check devices, shares and groups; equal stages are looked at once."""
        first_at: dict[Stage, int] = {}
        for index, stage in enumerate(self.stages):
            first_at.setdefault(stage, index)
        group_of: dict[int, tuple[int, ...]] = {}
        for stage, index in first_at.items():
            top = max(max(group) for group in stage.devices)
            if top >= len(self.devices):
                raise InvalidInputError(
                    f"stage {index} uses device {top}; the plan names {len(self.devices)}"
                )
            if self.num_microbatches % stage.round:
                raise InvalidInputError(
                    f"stage {index} deals rounds of {stage.round} microbatches (shares "
                    f"{list(stage.shares)}), which do not divide {self.num_microbatches}; "
                    f"use a multiple of {stage.round} microbatches, or other shares"
                )
            for group in stage.devices:
                for device in group:
                    if group_of.setdefault(device, group) != group:
                        raise InvalidInputError(
                            f"device {self.devices[device]!r} is in two tensor-parallel groups; "
                            "groups that share a device must be the same"
                        )

    def __len__(self) -> int:
        return len(self.stages)

    @property
    def num_microbatches(self) -> int:
        """Microbatches in a step."""
        return len(self.microbatch_sizes)

    @cached_property
    def samples(self) -> int:
        """Samples in a step."""
        return int(self.microbatch_sizes.sum())

    @property
    def stashes_weights(self) -> bool:
        """Whether backward uses the weights that forward saw, while later updates go on."""
        return self.schedule.row.stashes_weights

    @cached_property
    def stage_index(self) -> Mapping[Stage, int]:
        """A small number for each distinct stage."""
        index: dict[Stage, int] = {}
        for stage in self.stages:
            index.setdefault(stage, len(index))
        return index

    @cached_property
    def device_of(self) -> Ints:
        """The first device (replica 0, rank 0) of each op's stage."""
        first = np.array([stage.devices[0][0] for stage in self.stages], dtype=np.int32)
        return frozen_array(first[self.stage_of], np.int32)

    def why_not_placed(self) -> str | None:
        """Return why the plan does not put each op on exactly one device, or ``None``."""
        for stage in self.stages:
            if len(stage) > 1:
                return (
                    f"a stage runs on {stage.num_replicas} replicas of {stage.ranks} devices; "
                    "expected one device for each op"
                )
        return None

    def check_fits(self, problem: Problem) -> None:
        """Check that this is a plan for a problem.

        Raises:
            InvalidInputError: It is for another graph, misses an op, names a device that is not
                there, or its stages are not numbered along the data.
        """
        graph = problem.graph
        if len(self.stage_of) != len(graph):
            raise InvalidInputError(
                f"the plan places {len(self.stage_of)} ops, graph {graph.name!r} has {len(graph)}; "
                "every op must be placed once"
            )
        if self.fingerprint != graph.fingerprint:
            raise InvalidInputError(
                f"the plan is for a graph with fingerprint {self.fingerprint}, "
                f"{graph.name!r} has {graph.fingerprint}; plan this graph again"
            )
        missing = [name for name in self.devices if name not in problem.cluster.index_of]
        if missing:
            known = ", ".join(problem.cluster.device_names[:8])
            raise InvalidInputError(
                f"device {missing[0]!r} of the plan is not in cluster {problem.cluster.name!r} "
                f"({known}{', ...' if len(problem.cluster) > 8 else ''})"
            )
        _check_numbering(graph, self.stage_of)


def _check_numbering(graph: Graph, stage_of: Ints) -> None:
    """Check that no forward edge leads to a lower stage."""
    source, reader = graph.edge_source, graph.edges.reader
    inner = (source >= 0) & graph.is_forward[reader]
    inner[inner] &= graph.is_forward[source[inner]]
    back = np.flatnonzero(inner)[stage_of[source[inner]] > stage_of[reader[inner]]]
    if len(back):
        edge = int(back[0])
        before, after = int(source[edge]), int(reader[edge])
        raise InvalidInputError(
            f"op {graph.ops.names[after]!r} in stage {stage_of[after]} reads from "
            f"{graph.ops.names[before]!r} in the later stage {stage_of[before]}; "
            "data must flow to stages with higher numbers"
        )


def equal_microbatches(count: int, size: int) -> Ints:
    """Return the sizes of equal microbatches."""
    return frozen_array(np.full(count, size), np.int32)


def pipeline_stages(groups: Sequence[Sequence[int]]) -> tuple[Stage, ...]:
    """Return a stage for each group of devices, one replica a device."""
    return tuple(Stage(devices=tuple((device,) for device in group)) for group in groups)
