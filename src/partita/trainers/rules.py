"""What each trainer can run of a grid: the rules G3 and G6 to G9 of ``core/grid.py``.

What may be combined at all (levels of sharding, kinds of parallelism, sets of recomputation) is
said by the trainer's row of ``transformer.layout.FRAMEWORKS``; here stands what a configuration of
it cannot express.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from partita.core.grid import Grid, Placement, unit_cuts
from partita.core.plan import Shard
from partita.core.schedules import Schedule
from partita.errors import InfeasibleError, InvalidInputError
from partita.names import suggest
from partita.transformer.layout import FRAMEWORKS

LEVEL: Mapping[Shard, int] = {shard: level for level, shard in enumerate(Shard)}
"""The stage of ZeRO that divides as much."""


@dataclass(frozen=True, kw_only=True)
class Trainer:
    """A trainer that runs grids.

    Attributes:
        name: Its name, that of its row of ``FRAMEWORKS``.
        title: Its name for people.
        schedules: Its names of pipeline schedules; empty = it has no pipelines.
        placements: Orders of the stages over the ranks that it has.
        shards: Levels of sharding that its configuration can say.
        shards_context: Whether state is divided among context-parallel ranks in any case.
        tensor: Whether it divides tensors.
        ties: Whether it ties weights of the first and the last stage.
        blocks: Whether it can recompute some of the blocks of a stage.
        offloads: Whether the optimizer's state can be in host memory in part.
        equal_hosts: Whether every node has the same number of processes.
        replicas_with_tensors: Whether replicas that divide nothing may divide tensors.
    """

    name: str
    title: str
    schedules: Mapping[Schedule, str]
    placements: tuple[Placement, ...] = (Placement.LOOP,)
    shards: tuple[Shard, ...] = tuple(Shard)
    shards_context: bool = False
    tensor: bool = True
    ties: bool = True
    blocks: bool = False
    offloads: bool = False
    equal_hosts: bool = False
    replicas_with_tensors: bool = True

    def check(self, grid: Grid) -> None:
        """Refuse a grid that the trainer cannot run.

        Raises:
            InfeasibleError: Says the first rule that it breaks.
        """
        for refusal in self.refusals(grid):
            raise InfeasibleError(refusal)

    def refusals(self, grid: Grid) -> Iterator[str]:
        """Yield the rules that a grid breaks, in words."""
        yield from self._of_pipeline(grid)
        yield from self._of_state(grid)
        yield from self._of_degrees(grid)
        yield from self._of_recomputation(grid)
        if grid.tied and grid.pp > 1 and not self.ties:
            yield (
                f"the head is tied to the embedding; {self.title} refuses that with pipelines: "
                "untie them, or plan without stages"
            )

    def _of_pipeline(self, grid: Grid) -> Iterator[str]:
        row = grid.schedule.row
        if not row.flushes or row.infers:
            old = "keeps old weights" if row.stashes_weights else "does not train"
            yield f"schedule {grid.schedule.value} {old}; choose 1f1b"
        if grid.pp == 1:
            return
        if not self.schedules:
            yield (
                f"{grid.pp} stages of a pipeline; {self.title} has no pipelines: export --to "
                "megatron, torchtitan or torchrun"
            )
            return
        if grid.placement not in self.placements:
            odd = next(s for s in range(grid.pp, grid.num_stages) if grid.rank_of(s) != s % grid.pp)
            yield (
                f"stage {odd} is on rank {grid.rank_of(odd)} of the pipeline; {self.title} puts it "
                f"on rank {odd % grid.pp} (loop)"
            )
        if grid.schedule not in self.schedules:
            has = ", ".join(schedule.value for schedule in self.schedules)
            yield f"{self.title} has no schedule {grid.schedule.value}; choose {has}"
        elif grid.chunks > 1 and not row.interleaves:
            yield (
                f"schedule {grid.schedule.value} with {grid.chunks} stages a rank; {self.title} "
                "interleaves them: choose interleaved-1f1b"
            )
        elif grid.chunks == 1 and row.interleaves:
            yield (
                f"schedule {grid.schedule.value} with one stage a rank is 1f1b in {self.title}; "
                "choose that"
            )
        if row.interleaves and grid.microbatches % grid.pp:
            yield (
                f"{grid.microbatches} microbatches of a replica are no multiple of {grid.pp} "
                f"pipeline ranks, which {self.title} needs where stages are interleaved"
            )

    def _of_state(self, grid: Grid) -> Iterator[str]:
        framework = FRAMEWORKS[self.name]
        level = LEVEL[grid.shard]
        most = framework.max_zero if grid.pp == 1 else framework.max_zero_with_pp
        if grid.shard not in self.shards:
            others = " or ".join(shard.value for shard in self.shards)
            yield f"{self.title} cannot shard {grid.shard.value} alone; choose {others}"
        elif level > most:
            beside = " beside a pipeline" if grid.pp > 1 else ""
            yield f"{self.title} shards at most ZeRO-{most}{beside}, the plan ZeRO-{level}"
        if self.shards_context and grid.cp > 1 and grid.shard is Shard.NONE:
            yield f"{self.title} shards over context-parallel ranks; the plan copies the state"
        if grid.shard is Shard.PARAMETERS and grid.pp == 1:
            units = [size for size in grid.cuts if size]
            if units != [1] * len(units) or grid.cuts != unit_cuts(grid.num_blocks):
                yield (
                    f"sharded parameters are gathered in {grid.chunks} units; {self.title} gathers "
                    "block by block"
                )
        if grid.offload_optimizer and not self.offloads:
            yield (
                f"{grid.offload_optimizer:.0%} of the optimizer's state is in host memory; "
                f"{self.title} has no such share"
            )

    def _of_degrees(self, grid: Grid) -> Iterator[str]:
        framework = FRAMEWORKS[self.name]
        if grid.tp > 1 and not self.tensor:
            yield f"{grid.tp} ranks divide tensors; {self.title} has no tensor parallelism"
        if grid.cp > 1 and not framework.context:
            yield f"{grid.cp} ranks divide the sequence; {self.title} has no context parallelism"
        if grid.ep > 1 and not framework.expert_parallel:
            yield f"{grid.ep} ranks divide the experts; {self.title} has no expert parallelism"
        if grid.sequence_parallel and not framework.sequence_parallel:
            yield f"{self.title} has no sequence parallelism"
        copies = grid.shard is Shard.NONE and grid.tp > 1 and grid.dp > 1
        if copies and not self.replicas_with_tensors:
            yield f"{self.title} refuses copies of the state beside tensor parallelism"

    def _of_recomputation(self, grid: Grid) -> Iterator[str]:
        names = FRAMEWORKS[self.name].recompute
        for name in grid.recompute.split("+") if grid.recompute else ():
            if name not in names:
                yield f"{self.title} cannot recompute {name}; it has {', '.join(names)}"
        if grid.recompute_blocks and not self.blocks:
            yield (
                f"{grid.recompute_blocks} blocks of each stage are recomputed; {self.title} "
                "recomputes all or none"
            )


_LOOPED = {Schedule.ONE_F_ONE_B: "1F1B", Schedule.INTERLEAVED: "Interleaved1F1B"}

TRAINERS: Mapping[str, Trainer] = {
    row.name: row
    for row in (
        Trainer(name="megatron", title="Megatron", schedules=_LOOPED, blocks=True, offloads=True),
        Trainer(
            name="torchtitan",
            title="torchtitan",
            schedules={**_LOOPED, Schedule.GPIPE: "GPipe"},
            shards=(Shard.NONE, Shard.GRADIENTS, Shard.PARAMETERS),
            shards_context=True,
            ties=False,
        ),
        Trainer(
            name="deepspeed",
            title="DeepSpeed",
            schedules={Schedule.ONE_F_ONE_B: "1F1B"},
            offloads=True,
        ),
        Trainer(
            name="accelerate",
            title="accelerate",
            schedules={},
            shards=(Shard.NONE, Shard.GRADIENTS, Shard.PARAMETERS),
            shards_context=True,
            equal_hosts=True,
            replicas_with_tensors=False,
        ),
    )
}
"""Trainers by name."""


def get_trainer(name: str) -> Trainer:
    """Return a trainer by name.

    Raises:
        InvalidInputError: There is none.
    """
    if name not in TRAINERS:
        raise InvalidInputError(f"there is no trainer {name!r}{suggest(name, list(TRAINERS))}")
    return TRAINERS[name]
