"""``fsdp``: torch's fully_shard over every block of the untouched model and over the rest.

Every forward gathers parameters, so all ranks need the same number of microbatches. Gradients are
reduced with the last one of a step.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import torch._dynamo  # noqa: F401 (torch imports it on first use; here it is once for all ranks)
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from partita.capture.setting import CONTAINERS
from partita.errors import UnsupportedError
from partita.ranks.member import Member
from partita.runtime.baselines.replica import (
    ReplicaTrainer,
    WholeModel,
    Wrapping,
    check_replicas,
    microbatches_of,
    num_replicas,
    prepared_model,
    rank_trainer,
    verify_replicas,
)
from partita.runtime.baselines.torch_ways import Baseline, Subject
from partita.runtime.rank import RankOptions


def _check(subject: Subject) -> None:
    task = subject.task
    check_replicas("fsdp", task.plan)
    counts = [len(microbatches_of(task, rank)) for rank in range(num_replicas(task))]
    if len(set(counts)) > 1:
        raise UnsupportedError(
            f"fsdp gathers weights in every microbatch, so that all ranks need as many; they have "
            f"{', '.join(map(str, counts))}: use a multiple of {len(counts)} microbatches"
        )


def _make(subject: Subject, member: Member, options: RankOptions) -> ReplicaTrainer:
    whole = prepared_model(subject).to(member.device)
    mesh = init_device_mesh(member.device.type, (member.world,))
    for block in _blocks(whole):
        fully_shard(block, mesh=mesh)
    sharded = fully_shard(whole, mesh=mesh)

    @contextmanager
    def pause() -> Iterator[None]:
        sharded.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            sharded.set_requires_gradient_sync(True)

    wrapping = Wrapping(call=whole, pause=pause, local=_local, whole=_whole, divides=True)
    return rank_trainer(subject, whole, wrapping, member, options)


def _blocks(whole: WholeModel) -> list[nn.Module]:
    """Return the children of module lists, innermost first, that share no parameter with others."""
    uses = Counter(
        id(parameter)
        for module in whole.modules()
        for parameter in module.parameters(recurse=False)
    )
    found = []
    for container in whole.modules():
        if not isinstance(container, CONTAINERS):
            continue
        for block in container.children():
            inside = Counter(
                id(parameter)
                for module in block.modules()
                for parameter in module.parameters(recurse=False)
            )
            if inside and all(uses[key] == count for key, count in inside.items()):
                found.append(block)
    return list(dict.fromkeys(reversed(found)))


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


BASELINE = Baseline(check=_check, world=num_replicas, make=_make, verify=verify_replicas)
