"""The ranks that divide the tensors of a stage, over torch.distributed."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from partita.capture.splits import Split
from partita.core.plan import Plan
from partita.ranks.device import has_ordered_groups
from partita.runtime.parts import Slice
from partita.runtime.task import Task


class ProcessGroup:
    """A tensor-parallel group of processes, seen by one of them.

    Every call waits: ranks of a group run the same stage code, so that the k-th call of each is the
    same one, in backward too.

    Attributes:
        rank: This rank in the group.
        size: Number of ranks.
    """

    def __init__(self, group: Any, order: Sequence[int], rank: int) -> None:  # noqa: ANN401  # torch's
        """Take a group of torch.

        Args:
            group: The group.
            order: For each tensor-parallel rank its place in the group.
            rank: This tensor-parallel rank.
        """
        self._group, self._order = group, tuple(order)
        self._by_place = sorted(range(len(order)), key=self._order.__getitem__)
        self.rank, self.size = rank, len(order)

    def sum(self, value: Tensor) -> Tensor:
        """Return the sum over all ranks, as a tensor of one's own."""
        made = value.detach().clone(memory_format=torch.contiguous_format)
        dist.all_reduce(made, group=self._group)
        return made

    def maximum(self, value: Tensor) -> Tensor:
        """Return the largest of all ranks, element by element, as a tensor of one's own."""
        made = value.detach().clone(memory_format=torch.contiguous_format)
        dist.all_reduce(made, op=dist.ReduceOp.MAX, group=self._group)
        return made

    def gather(self, value: Tensor) -> list[Tensor]:
        """Return the tensors of all ranks, which have one shape."""
        value = value.detach().contiguous()
        found = [torch.empty_like(value) for _ in self._order]
        dist.all_gather(found, value, group=self._group)
        return [found[place] for place in self._order]

    def sum_of_parts(self, parts: Sequence[Tensor]) -> Tensor:
        """Return the sum of what all ranks have for this one, of one tensor for each rank."""
        flat = torch.cat([parts[rank].detach().reshape(-1) for rank in self._by_place])
        if has_ordered_groups(dist.get_backend(self._group)):
            summed = torch.empty_like(parts[0], memory_format=torch.contiguous_format)
            dist.reduce_scatter_tensor(summed.view(-1), flat, group=self._group)
            return summed
        # gloo would sum all parts everywhere; sent part by part they are added up in the order of
        # the ranks.
        found = torch.empty_like(flat)
        dist.all_to_all_single(found, flat, group=self._group)
        rows = found.view(self.size, -1)
        made = sum((rows[place] for place in self._order[1:]), rows[self._order[0]])
        assert isinstance(made, Tensor)
        return made.view(parts[0].shape)


def is_divided(plan: Plan, device: int) -> bool:
    """Return whether a device has slices of tensors, in any of its stages."""
    return any(stage.tp > 1 and any(device in g for g in stage.devices) for stage in plan.stages)


def slices_of(task: Task, device: int) -> dict[str, Slice]:
    """Return the slices of parameters that a device holds, by name; others are held whole."""
    found: dict[str, Slice] = {}
    for index in task.stages_of(device):
        stage, border = task.plan.stages[index], task.borders[index]
        group = next(group for group in stage.devices if device in group)
        splits = task.code.parameter_splits(stage.tp)
        for name in (*border.trained, *border.frozen, *border.buffers):
            if name in splits:
                found[name] = _slice(splits[name], group.index(device), stage.tp)
    return found


def _slice(split: Split, index: int, count: int) -> Slice:
    return Slice(split.dim, index, count, split.blocks)


def tensor_parallel_remarks(task: Task) -> tuple[str, ...]:
    """Return what the groups of a plan divide and what they do not, a sentence each."""
    degrees = sorted({stage.tp for stage in task.plan.stages} - {1})
    found = [note for degree in degrees for note in task.code.split_notes(degree)]
    if any(stage.sequence_parallel for stage in task.plan.stages):
        found.append("between split regions tensors are divided along the sequence")
    return tuple(found)
