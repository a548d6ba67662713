"""The regular middle between plans and other people's trainers.

A trainer numbers its ranks and cuts its model regularly: every stage has the same degrees, cuts lie
between blocks, and rank ``((pp_rank * dp + dp_rank) * cp + cp_rank) * tp + tp_rank`` holds the same
place in all of them. A ``Grid`` says just that. ``grid_of`` refuses a plan that is none, by the
first rule that it breaks::

    G1  equal degrees on all stages           G6  a schedule that the trainer has
    G2  equal shares and microbatches         G7  one level of sharding, which the trainer has
    G3  stages in a loop over ranks, or a V   G8  whole blocks recomputed, as many on each stage
    G4  cuts between blocks                   G9  tied weights that the trainer can tie
    G5  a chain: stages hand on to the next   G10 ranks of a host are consecutive

``trainers/rules.py`` has what depends on the trainer (G3 and G6 to G9).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cached_property
from itertools import accumulate, groupby
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from partita.core.columns import Ints, frozen_array
from partita.core.graph import Graph
from partita.core.plan import Plan, Shard, Stage, equal_microbatches
from partita.core.precision import PRECISIONS
from partita.core.problem import Problem
from partita.core.schedules import DEFAULT_SCHEDULE, Schedule
from partita.errors import InfeasibleError, InvalidInputError

MOST = 1_000_000
"""Largest degree, number of blocks and number of samples."""
WHOLE = "full"
"""The set of recomputation that is a whole block."""
AS_IT_IS = "export --to torchrun or sbatch runs the plan as it is"


class Placement(StrEnum):
    """The rank of the pipeline that holds stage s: ``s mod pp``, or to and fro."""

    LOOP = "loop"
    V = "v"


@dataclass(frozen=True, kw_only=True)
class Grid:
    """Degrees, cuts and choices of a regular way to train.

    Attributes:
        pp: Ranks of a pipeline.
        dp: Replicas of it; 0 = not said, as many as a cluster has devices for.
        tp: Ranks that divide tensors.
        cp: Ranks that divide the sequence.
        ep: Ranks that divide the experts.
        etp: Ranks that divide each expert; 0 = as dense parameters are divided.
        sequence_parallel: Whether tensor-parallel ranks divide tensors between ops, too.
        chunks: Stages of each rank. With one rank per pipeline they are the units in which
            sharded parameters are gathered.
        placement: Order of the stages over the ranks.
        cuts: Blocks of each stage; what comes before the first block is in the first stage, what
            comes after the last in the last. Empty = as even as can be.
        ranks: Names of the devices by rank; empty = those of a cluster in their order.
        shard: State that replicas divide.
        shard_group: Ranks that divide one copy of it; 0 = all.
        recompute: Set of activations that backward recomputes (``core.plan.RECOMPUTE_SETS``,
            joined by ``+``); empty = none.
        recompute_blocks: First blocks of each stage that do so; 0 = all of them.
        offload_optimizer: Share of the optimizer's state in host memory.
        batch_size: Samples of a step; 0 = not said.
        microbatch_size: Samples of a microbatch; 0 = not said.
        schedule: Order of the microbatches.
        tied: Whether weights of the first stage are used by the last one, too.
        precision: Policy of dtypes (``core.precision``); empty = not said.
        annotations: What a configuration says that is not modelled, by name.
    """

    pp: int = 1
    dp: int = 1
    tp: int = 1
    cp: int = 1
    ep: int = 1
    etp: int = 0
    sequence_parallel: bool = False
    chunks: int = 1
    placement: Placement = Placement.LOOP
    cuts: tuple[int, ...] = ()
    ranks: tuple[str, ...] = ()
    shard: Shard = Shard.NONE
    shard_group: int = 0
    recompute: str = ""
    recompute_blocks: int = 0
    offload_optimizer: float = 0.0
    batch_size: int = 0
    microbatch_size: int = 0
    schedule: Schedule = DEFAULT_SCHEDULE
    tied: bool = False
    precision: str = ""
    annotations: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "annotations", MappingProxyType(dict(self.annotations)))
        sizes = ("shard_group", "recompute_blocks", "batch_size", "microbatch_size")
        for least, names in ((1, ("pp", "tp", "cp", "ep", "chunks")), (0, ("dp", "etp", *sizes))):
            for what in names:
                value = getattr(self, what)
                if not least <= value <= MOST:
                    raise InvalidInputError(f"{what} is {value}; expected {least} to {MOST}")
        self._check_lengths()

    def _check_lengths(self) -> None:
        if self.ranks and len(self.ranks) != self.size:
            raise InvalidInputError(
                f"pp {self.pp} x dp {self.dp} x cp {self.cp} x tp {self.tp} are {self.size} ranks; "
                f"{len(self.ranks)} devices are named"
            )
        if self.cuts and (len(self.cuts) != self.num_stages or min(self.cuts) < 0):
            raise InvalidInputError(
                f"{len(self.cuts)} stages have blocks {list(self.cuts)}; pp {self.pp} with "
                f"{self.chunks} a rank are {self.num_stages} stages of 0 or more blocks"
            )

    @property
    def size(self) -> int:
        """Number of ranks; 0 = not said."""
        return self.pp * self.dp * self.cp * self.tp

    @property
    def num_stages(self) -> int:
        """Number of stages, or of sharded units where a pipeline has one rank."""
        return self.pp * self.chunks

    @property
    def recomputes_blocks(self) -> bool:
        """Whether backward computes whole blocks again."""
        return self.recompute == WHOLE

    @property
    def num_blocks(self) -> int:
        """Number of blocks; 0 = not said."""
        return sum(self.cuts)

    @property
    def microbatches(self) -> int:
        """Microbatches of a step for each replica; 0 = not said."""
        each = self.dp * self.microbatch_size
        return self.batch_size // each if each else 0

    def rank_of(self, stage: int) -> int:
        """Return the rank of the pipeline that holds a stage.

        >>> [Grid(pp=2, chunks=2).rank_of(stage) for stage in range(4)]
        [0, 1, 0, 1]
        >>> [Grid(pp=2, chunks=2, placement=Placement.V).rank_of(stage) for stage in range(4)]
        [0, 1, 1, 0]
        """
        turn, place = divmod(stage, self.pp)
        back = self.placement is Placement.V and turn % 2
        return self.pp - 1 - place if back else place

    @cached_property
    def pipeline_ranks(self) -> tuple[tuple[int, ...], ...]:
        """The ranks of each place in a pipeline, replica by replica."""
        each = self.size // self.pp
        return tuple(tuple(range(each * p, each * (p + 1))) for p in range(self.pp))


class BlockChain(NamedTuple):
    """The repeated blocks of a graph and where every op stands.

    Attributes:
        names: The blocks in order.
        place: 0 for what comes before all blocks, k + 1 for block k, and one more for what comes
            after the last.
        free: Whether a trainer makes what the op makes anew on every stage that reads it: it has
            no parameters, and no gradient flows through it (masks, positions, shifted labels).
    """

    names: tuple[str, ...]
    place: Ints
    free: tuple[bool, ...]

    def name_at(self, place: int) -> str:
        """Return the part of the model at a place, for people."""
        if place == 0:
            return "what comes before the blocks"
        return f"block {place - 1}" if place <= len(self.names) else "what follows the blocks"


def block_chain(graph: Graph) -> BlockChain:
    """Return the blocks of a graph, and for each op the one that it belongs to.

    An op that is in no block joins the latest block that it reads from; what reads from the last
    one comes after all.

    Raises:
        InfeasibleError: The graph has no repeated blocks (rule G4).
    """
    labels = graph.ops.blocks
    count = len(labels.names)
    if not count or not len(labels.of):
        raise InfeasibleError(
            f"graph {graph.name!r} has no repeated blocks to cut between; {AS_IT_IS}"
        )
    place = labels.of.astype(np.int64) + 1
    ptr, edges = graph.in_edges
    for op in graph.topological_order.tolist():
        if place[op] == 0:
            sources = graph.edge_source[edges[ptr[op] : ptr[op + 1]]]
            latest = max((int(place[s]) for s in sources.tolist() if s >= 0), default=0)
            place[op] = latest if latest < count else count + 1
    free = _free(graph)
    ptr, edges = graph.out_edges
    for op in graph.topological_order[::-1].tolist():
        readers = graph.edges.reader[edges[ptr[op] : ptr[op + 1]]]
        if place[op] == 0 and free[op] and len(readers) and place[readers].min() > count:
            place[op] = count + 1
    return BlockChain(labels.names, frozen_array(place, np.int32), free)


def _free(graph: Graph) -> tuple[bool, ...]:
    free = graph.parameter_bytes == 0
    made = graph.tensors.producer[graph.tensors.differentiable]
    free[made[made >= 0]] = False
    return tuple(free.tolist())


def grid_of(problem: Problem, plan: Plan) -> Grid:
    """Return a plan as a grid.

    Raises:
        InfeasibleError: It is none; says the first rule that it breaks.
    """
    plan.check_fits(problem)
    first = plan.stages[0]
    _check_degrees(plan)
    _check_shares(plan)
    groups, placement = _placement(plan)
    chain = block_chain(problem.graph)
    cuts = _cuts(problem.graph, plan, chain)
    _check_chain(problem.graph, plan)
    recompute, blocks = _recomputed(problem.graph, plan, chain)
    ranks = tuple(plan.devices[device] for group in groups for device in group)
    _check_hosts(problem, ranks)
    return Grid(
        pp=len(groups),
        dp=first.num_replicas,
        tp=first.tp,
        cp=first.cp,
        ep=first.ep,
        etp=first.etp,
        sequence_parallel=first.sequence_parallel,
        chunks=len(plan.stages) // len(groups),
        placement=placement,
        cuts=cuts,
        ranks=ranks,
        shard=first.shard,
        shard_group=first.shard_group,
        recompute=recompute,
        recompute_blocks=blocks,
        offload_optimizer=first.offload_optimizer,
        batch_size=plan.samples,
        microbatch_size=int(plan.microbatch_sizes[0]),
        schedule=plan.schedule,
        tied=is_tied(problem.graph, chain),
        precision=precision_of(problem),
    )


def precision_of(problem: Problem) -> str:
    """Return the policy of dtypes that a problem is priced with; empty = none that has a name."""
    if problem.objective.precision is not None:
        return problem.objective.precision.name
    dtype = problem.graph.dtype
    for name, policy in PRECISIONS.items():
        if policy.compute == policy.weights == dtype and policy.master is None:
            return name
    return ""


def is_tied(graph: Graph, chain: BlockChain) -> bool:
    """Return whether what comes before the blocks and what follows them share a parameter."""
    uses, last = graph.parameters, len(chain.names) + 1
    place = chain.place[uses.use_op]
    before = set(uses.use_parameter[place == 0].tolist())
    return bool(before & set(uses.use_parameter[place == last].tolist()))


def _check_degrees(plan: Plan) -> None:
    """Check rules G1 and G7: all stages have the same degrees and divide the same state."""
    first = plan.stages[0]
    degrees = (
        ("replicas", "num_replicas", "data-parallel"),
        ("tensor-parallel ranks", "tp", "tensor-parallel"),
        ("context-parallel ranks", "cp", "context-parallel"),
        ("ranks for its experts", "ep", "expert-parallel"),
        ("ranks for each expert", "etp", "expert-tensor-parallel"),
    )
    choices = (
        ("shards", "shard"),
        ("shards in groups of", "shard_group"),
        ("has sequence parallelism", "sequence_parallel"),
        ("offloads", "offload_optimizer"),
        ("recomputes", "recompute"),
    )
    for number, stage in enumerate(plan.stages):
        for what, name, degree in degrees:
            mine, theirs = getattr(stage, name), getattr(first, name)
            if mine != theirs:
                raise InfeasibleError(
                    f"stage {number} has {mine} {what}, stage 0 has {theirs}; trainers have one "
                    f"{degree} degree; {AS_IT_IS}"
                )
        for what, name in choices:
            mine, theirs = getattr(stage, name), getattr(first, name)
            if mine != theirs:
                raise InfeasibleError(
                    f"stage {number} {what} {mine}, stage 0 {theirs}; trainers do the same on all"
                )
        if stage.offload_activations:
            raise InfeasibleError(
                f"stage {number} keeps {stage.offload_activations:.0%} of its activations in host "
                "memory; no trainer here does"
            )


def _check_shares(plan: Plan) -> None:
    """Check rule G2."""
    for number, stage in enumerate(plan.stages):
        if len(set(stage.shares)) > 1:
            shares = ":".join(map(str, stage.shares))
            raise InfeasibleError(
                f"stage {number} deals shares {shares}; no trainer here has unequal shares"
            )
    sizes = sorted(set(plan.microbatch_sizes.tolist()))
    if len(sizes) > 1:
        raise InfeasibleError(
            f"microbatches have {sizes[0]} to {sizes[-1]} samples; trainers have one size"
        )


def _placement(plan: Plan) -> tuple[list[tuple[int, ...]], Placement]:
    """Return the devices of each place in a pipeline, and the order of the stages (rule G3)."""
    flat = [tuple(d for group in stage.devices for d in group) for stage in plan.stages]
    groups = list(dict.fromkeys(flat))
    seen: dict[int, int] = {}
    for number, group in enumerate(groups):
        for device in group:
            if seen.setdefault(device, number) != number:
                raise InfeasibleError(
                    f"{plan.devices[device]} is in two groups of devices; trainers put each device "
                    "at one place of one pipeline"
                )
    pp = len(groups)
    chunks = -(-len(flat) // pp)
    for placement in Placement:
        grid = Grid(pp=pp, chunks=chunks, placement=placement)
        wrong = [s for s, group in enumerate(flat) if group != groups[grid.rank_of(s)]]
        if not wrong and len(flat) == pp * chunks:
            return groups, placement
        if placement is Placement.LOOP:
            odd, wanted = (wrong or [len(flat) - 1])[0], grid
    if not len(flat) % pp:
        here, there = flat[odd][0], groups[wanted.rank_of(odd)][0]
        raise InfeasibleError(
            f"stage {odd} is on {plan.devices[here]}; trainers put it on {plan.devices[there]} "
            "(loop)"
        )
    raise InfeasibleError(
        f"{len(flat)} stages lie on {pp} groups of devices; trainers put as many on each"
    )


def _cuts(graph: Graph, plan: Plan, chain: BlockChain) -> tuple[int, ...]:
    """Return the blocks of each stage (rule G4)."""
    last = len(chain.names) + 1
    stage_at = np.full(last + 1, -1)
    stage_at[0], stage_at[last] = 0, len(plan.stages) - 1
    for op in np.flatnonzero(graph.is_forward).tolist():
        place, stage = int(chain.place[op]), int(plan.stage_of[op])
        if stage_at[place] < 0:
            stage_at[place] = stage
        if stage_at[place] != stage and not chain.free[op]:
            raise InfeasibleError(
                f"cut inside {chain.name_at(place)} (op {graph.ops.names[op]}); plan with "
                "--granularity block, or --for the trainer"
            )
    back = np.flatnonzero(np.diff(stage_at) < 0)
    if len(back):
        raise InfeasibleError(
            f"block {back[0]} is in a later stage than block {back[0] - 1}; trainers keep blocks "
            "in order"
        )
    return tuple(np.bincount(stage_at[1:-1], minlength=len(plan.stages)).tolist())


def _check_chain(graph: Graph, plan: Plan) -> None:
    """Check rule G5: what carries a gradient goes to the next stage alone."""
    source = graph.edge_source
    inner = (source >= 0) & graph.tensors.differentiable[graph.edges.tensor]
    inner[inner] &= graph.is_forward[source[inner]] & graph.is_forward[graph.edges.reader[inner]]
    left = plan.stage_of[source[inner]]
    right = plan.stage_of[graph.edges.reader[inner]]
    far = np.flatnonzero(right - left > 1)
    if len(far):
        raise InfeasibleError(
            f"stage {left[far[0]]} feeds stage {right[far[0]]}; pipelines of trainers hand on to "
            "the next stage alone"
        )


def _recomputed(graph: Graph, plan: Plan, chain: BlockChain) -> tuple[str, int]:
    """Return what is recomputed, and of how many blocks of each stage; 0 = all (rule G8)."""
    named = plan.stages[0].recompute
    if named not in ("", "none"):
        return named, 0
    flags = plan.recompute & graph.is_forward
    if not flags.any():
        return "", 0
    count = len(chain.names)
    inside = (chain.place >= 1) & (chain.place <= count) & graph.is_forward
    if bool((flags & ~inside).any()):
        op = graph.ops.names[int(np.argmax(flags & ~inside))]
        raise InfeasibleError(f"op {op} is recomputed; trainers recompute blocks alone")
    again: list[list[bool]] = [[] for _ in plan.stages]
    for block in range(count):
        mine = (chain.place == block + 1) & graph.is_forward
        if not flags[mine].all() and flags[mine].any():
            op = graph.ops.names[int(np.argmax(mine & ~flags))]
            raise InfeasibleError(
                f"block {block} is recomputed without its op {op}; trainers recompute whole blocks"
            )
        again[int(plan.stage_of[np.argmax(mine)])].append(bool(flags[mine].all()))
    if all(all(blocks) for blocks in again):
        return WHOLE, 0
    counts = [sum(blocks) for blocks in again]
    for stage, blocks in enumerate(again):
        # A stage with fewer blocks recomputes all that it has.
        if sum(blocks) != min(max(counts), len(blocks)) or sorted(blocks, reverse=True) != blocks:
            raise InfeasibleError(
                f"stage {stage} recomputes {sum(blocks)} of its {len(blocks)} blocks, another one "
                f"{max(counts)}; trainers recompute the first ones, as many on each stage"
            )
    return WHOLE, max(counts)


def _check_hosts(problem: Problem, ranks: Sequence[str]) -> None:
    """Check rule G10."""
    cluster = problem.cluster
    host_of = [cluster.devices[cluster.index_of[name]].host for name in ranks]
    runs = [host for host, _ in groupby(host_of)]
    for position, host in enumerate(runs):
        if host in runs[:position]:
            mine = [rank for rank, at in enumerate(host_of) if at == host]
            other = next(r for r in range(mine[0], mine[-1]) if host_of[r] != host)
            raise InfeasibleError(
                f"ranks {mine[0]} and {mine[-1]} are on {cluster.hosts[host].name}, rank {other} "
                f"on {cluster.hosts[host_of[other]].name}; trainers number ranks node by node"
            )


def even_cuts(blocks: int, stages: int) -> tuple[int, ...]:
    """Return as many blocks for each stage, the first ones one more where they do not divide.

    >>> even_cuts(10, 4)
    (3, 3, 2, 2)
    """
    each, more = divmod(blocks, stages)
    return tuple(each + (stage < more) for stage in range(stages))


def complete_grid(problem: Problem, grid: Grid) -> Grid:
    """Return a grid with replicas, cuts, devices and microbatches, where it says none.

    Raises:
        InfeasibleError: The cluster has too few devices, or the model too few blocks.
        InvalidInputError: The samples of a step do not divide.
    """
    grid = _with_replicas(problem, grid)
    count = len(block_chain(problem.graph).names)
    units = grid.pp == 1 and grid.shard is Shard.PARAMETERS
    cuts = grid.cuts or (unit_cuts(count) if units else even_cuts(count, grid.num_stages))
    if sum(cuts) != count:
        raise InfeasibleError(
            f"the stages have {sum(cuts)} blocks; graph {problem.graph.name!r} has {count}"
        )
    size = grid.microbatch_size or problem.microbatch_size
    batch = grid.batch_size or problem.microbatches * problem.microbatch_size
    if batch % (size * grid.dp):
        raise InvalidInputError(
            f"{batch} samples of a step are no multiple of microbatch {size} x dp {grid.dp}; give "
            "--batch-size"
        )
    return replace(
        grid,
        ranks=grid.ranks or problem.cluster.device_names[: grid.size],
        cuts=cuts,
        chunks=len(cuts) // grid.pp,
        # Units of one rank have no order to choose; this is the one of sharded plans.
        schedule=Schedule.INTERLEAVED if units and len(cuts) > 1 else grid.schedule,
        batch_size=batch,
        microbatch_size=size,
    )


def _with_replicas(problem: Problem, grid: Grid) -> Grid:
    """Return a grid with as many replicas as there are devices for, where it does not say."""
    cluster, each = problem.cluster, grid.pp * grid.cp * grid.tp
    grid = grid if grid.dp else replace(grid, dp=max(1, len(cluster) // each))
    if grid.size > len(cluster):
        raise InfeasibleError(
            f"pp {grid.pp} x dp {grid.dp} x cp {grid.cp} x tp {grid.tp} are {grid.size} ranks; "
            f"cluster {cluster.name!r} has {len(cluster)} devices"
        )
    return grid


def unit_cuts(blocks: int) -> tuple[int, ...]:
    """Return the units in which trainers gather sharded parameters: the ends, and each block."""
    return (0, *[1] * blocks, 0)


def plan_of_grid(problem: Problem, grid: Grid) -> Plan:
    """Return the plan of a grid; what it does not say is completed (``complete_grid``).

    Raises:
        InfeasibleError: It does not fit the model or the cluster.
        InvalidInputError: Its degrees do not fit one another, or a device is not there.
    """
    grid = complete_grid(problem, grid)
    graph = problem.graph
    chain = block_chain(graph)
    ends = np.array([0, *accumulate(grid.cuts)])
    # Block b is in the stage whose end is the first above b; an empty stage has no block.
    of_block = np.searchsorted(ends, np.arange(len(chain.names)), side="right") - 1
    stage_at = np.array([0, *of_block.tolist(), grid.num_stages - 1])
    stage_of = stage_at[chain.place]
    held = np.bincount(stage_of, minlength=grid.num_stages)
    if not held.all():
        raise InfeasibleError(
            f"stage {int(np.argmin(held))} holds nothing; a plan has no empty stages"
        )
    again = np.zeros(len(graph), dtype=bool)
    by_set = len(graph.degrees) > 0
    if grid.recompute and not by_set:
        if grid.recompute != WHOLE:
            raise InfeasibleError(
                f"recomputing {grid.recompute} is modelled for large transformers that are named "
                "by their shape; a graph of ops recomputes whole blocks"
            )
        nth = np.arange(len(chain.names)) - ends[of_block]
        most = grid.recompute_blocks or len(chain.names)
        flags = np.array([False, *(nth < most).tolist(), False])
        again = flags[chain.place] & graph.is_forward
    elif grid.recompute_blocks:
        raise InfeasibleError(
            f"{grid.recompute_blocks} blocks of each stage recompute; large transformers are "
            "modelled with all or none"
        )
    shared = grid.dp * grid.cp > 1
    each = grid.cp * grid.tp
    stages = []
    for stage in range(grid.num_stages):
        ranks = grid.pipeline_ranks[grid.rank_of(stage)]
        stages.append(
            Stage(
                devices=tuple(ranks[first : first + each] for first in range(0, len(ranks), each)),
                shard=grid.shard if shared else Shard.NONE,
                shard_group=grid.shard_group if shared else 0,
                cp=grid.cp,
                sequence_parallel=grid.sequence_parallel,
                ep=grid.ep,
                etp=grid.etp,
                recompute=(grid.recompute or "none") if by_set else "",
                offload_optimizer=grid.offload_optimizer,
            )
        )
    plan = Plan(
        fingerprint=graph.fingerprint,
        devices=grid.ranks,
        stage_of=stage_of,
        stages=tuple(stages),
        schedule=grid.schedule,
        microbatch_sizes=equal_microbatches(grid.microbatches * grid.dp, grid.microbatch_size),
        recompute=again,
    )
    plan.check_fits(problem)
    return plan
