"""Plans larger than this machine, walked through rank by rank."""

from collections import Counter
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch.distributed import HashStore

from partita.capture.origin import Captures, ModelOrigin
from partita.capture.sources import SourceOptions, load_source
from partita.core.problem import Objective, Problem
from partita.core.program import Kind
from partita.errors import InvalidInputError
from partita.runtime.dry_run import dry_run
from partita.runtime.executor import make_task
from partita.runtime.task import Task
from partita.runtime.workload import Workload, model_workload
from partita.testing.builders import flat_cluster, pipeline

RANKS = 64


@pytest.fixture(scope="module")
def large() -> tuple[Task, Workload]:
    """Return three stages with 32, 24 and 8 replicas, the weights of the ends tied."""
    origin = ModelOrigin(
        text="gpt3-small", options=SourceOptions(batch_size=1, sequence_length=4, scale=0.03)
    )
    source = load_source(origin.text, origin.options)
    graph = Captures(source, origin).at(1).graph
    problem = Problem(graph=graph, cluster=flat_cluster(RANKS), objective=Objective())
    groups = [list(range(32)), list(range(32, 56)), list(range(56, RANKS))]
    plan = pipeline(graph, problem.cluster, groups, microbatches=96)
    workload = model_workload(Captures(source, origin), problem, plan)
    return make_task(problem, plan, workload), workload


@pytest.fixture
def a_group() -> Iterator[None]:
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_every_rank_of_64_carries_out_all_of_its_instructions(
    large: tuple[Task, Workload],
) -> None:
    torch.set_num_threads(1)
    task, workload = large
    walked = dry_run(task, workload)
    assert [found.rank for found in walked] == list(range(RANKS))
    total = sum((found.instructions for found in walked), Counter())
    wanted = Counter(Kind(kind) for kind in task.program.kind.tolist())
    assert total == wanted
    assert total[Kind.FORWARD] == 3 * 96
    assert total[Kind.ALL_REDUCE] > RANKS
    sent = int(task.program.bytes[task.program.kind == Kind.SEND].sum())
    assert sum(found.sent_bytes for found in walked) == sent


@pytest.mark.usefixtures("a_group")
def test_a_process_that_belongs_to_a_group_is_refused(large: tuple[Task, Workload]) -> None:
    with pytest.raises(InvalidInputError, match="belongs to no process group"):
        dry_run(*large)
