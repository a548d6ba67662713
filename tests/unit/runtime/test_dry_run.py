"""Plans larger than this machine, walked through rank by rank."""

import gc
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import HashStore
from torch.testing._internal.distributed.fake_pg import FakeStore

from partita.capture.origin import Captures, ModelOrigin
from partita.capture.sources import SourceOptions, load_source
from partita.core.problem import Objective, Problem
from partita.core.program import Kind
from partita.errors import InvalidInputError
from partita.runtime import process_transport
from partita.runtime.dry_run import Recorder, dry_run
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
    with pytest.raises(InvalidInputError, match=r"belongs.*process"):
        dry_run(*large)


def waited(recorder: Recorder, name: str, *tensors: Any, change: bool = False) -> list[str]:
    """Return the faults of handing tensors over, and of changing the first or letting go of all."""
    handed = list(tensors)
    with recorder.recording():
        work = (
            dist.isend(*handed, 0) if name == "isend" else dist.all_reduce(*handed, async_op=True)
        )
        if change:
            handed[0] += 1
        else:
            handed.clear()
            del tensors
            gc.collect()
        assert work is not None
        work.wait()
    return recorder.faults


@pytest.mark.usefixtures("a_fake_group")
def test_the_stand_in_finds_tensors_that_change_move_or_go() -> None:
    device = torch.device("cpu")
    assert "was changed" in waited(Recorder(device), "isend", torch.ones(3), change=True)[0]
    kept = torch.ones(3)
    assert waited(Recorder(device), "all_reduce", kept) == []
    recorder = Recorder(device)
    with recorder.recording():
        work = dist.all_reduce(torch.ones(4), async_op=True)  # nobody keeps it
        assert work is not None
        work.wait()
    assert "let go of" in recorder.faults[0]
    recorder = Recorder(device)
    with recorder.recording():
        dist.all_reduce(kept, async_op=True)
    assert "never waited for" in recorder.faults[0]
    recorder = Recorder(torch.device("meta"))
    with recorder.recording():
        dist.all_reduce(torch.ones(3, 2).t().contiguous(), async_op=False)
    assert "on cpu is handed to all_reduce" in recorder.faults[0]
    assert recorder.handed == 1


@pytest.fixture
def a_fake_group() -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield
    dist.destroy_process_group()


def test_a_transport_that_sends_what_it_changes_is_refused(
    large: tuple[Task, Workload], monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = process_transport.ProcessTransport.send

    def send(self: Any, message: Any, value: Any) -> Any:
        found = plain(self, message, value)
        value.data.add_(1)  # behind the back of autograd, which would complain
        return found

    monkeypatch.setattr(process_transport.ProcessTransport, "send", send)
    with pytest.raises(InvalidInputError, match="changed before"):
        dry_run(*large, ranks=[0])
