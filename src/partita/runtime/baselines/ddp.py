"""``ddp``: torch's DistributedDataParallel over the untouched model.

Gradients are reduced once per step, with the last microbatch of each rank (``no_sync`` before it),
so that ranks may have different numbers of microbatches. Buffers are those of rank 0, which DDP
broadcasts at the begin of a step.
"""

import torch._dynamo  # noqa: F401 (torch imports it on first use; here it is once for all ranks)
from torch.nn.parallel import DistributedDataParallel

from partita.ranks.member import Member
from partita.runtime.baselines.replica import (
    ReplicaTrainer,
    Wrapping,
    check_replicas,
    num_replicas,
    prepared_model,
    rank_trainer,
    unused_parameters,
    verify_replicas,
)
from partita.runtime.baselines.torch_ways import Baseline, Subject
from partita.runtime.rank import RankOptions


def _make(subject: Subject, member: Member, options: RankOptions) -> ReplicaTrainer:
    whole = prepared_model(subject).to(member.device)
    if not subject.task.is_training:
        return rank_trainer(subject, whole, Wrapping(call=whole), member, options)
    wrapped = DistributedDataParallel(
        whole, find_unused_parameters=bool(unused_parameters(subject, whole))
    )
    wrapping = Wrapping(call=wrapped, pause=wrapped.no_sync)
    return rank_trainer(subject, whole, wrapping, member, options)


BASELINE = Baseline(
    check=lambda subject: check_replicas("ddp", subject.task.plan),
    world=num_replicas,
    make=_make,
    verify=verify_replicas,
)
