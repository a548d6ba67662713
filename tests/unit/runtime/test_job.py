"""Jobs as files, and where their ranks run."""

import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from partita.capture.origin import ModelOrigin
from partita.core.cluster import Cluster, Device, Host
from partita.core.graph import DeviceKind
from partita.core.precision import parse_precision
from partita.core.problem import Metric, Objective, Problem
from partita.core.program import TransferMode
from partita.core.solution import Solution
from partita.errors import FormatError, InvalidInputError
from partita.program.lower import lower
from partita.program.order import ListOrder
from partita.runtime.device_parts import DeviceStatistics
from partita.runtime.emulation.rehearsal import Emulation
from partita.runtime.job import Job, JobDirectory, Placement, place_ranks, read_job, write_job
from partita.runtime.power import Power
from partita.runtime.rank import RankReport, StepNews
from partita.runtime.rendezvous import Host as LaunchHost
from partita.runtime.training.recipe import GroupRule, Recipe, Schedule
from partita.testing.builders import chain, paired_cluster, pipeline

MODEL = ModelOrigin(text="gpt3-small")


def solution_over(hosts: list[int], groups: list[int]) -> Solution:
    """Return a pipeline over GPUs, each on the host that is given for it."""
    cluster = Cluster(
        hosts=tuple(Host(name=f"host{k}") for k in range(max(hosts) + 1)),
        devices=tuple(Device(name=f"g{d}", host=host) for d, host in enumerate(hosts)),
        matrix=paired_cluster(len(hosts)).matrix,
    )
    problem = Problem(graph=chain(6), cluster=cluster, objective=Objective())
    plan = pipeline(problem.graph, cluster, groups)
    return Solution(problem=problem, plan=plan, metric=Metric.THROUGHPUT, value=1.0, unit="s")


def placed(solution: Solution, num_hosts: int) -> Placement:
    program = lower(solution.problem, solution.plan)
    return place_ranks(solution.problem, program, num_hosts)


@pytest.mark.parametrize(
    "job",
    [
        Job(model=MODEL),
        Job(
            model=replace(MODEL, loss="mse"),
            steps=7,
            recipe=Recipe(
                optimizer="adamw",
                learning_rate=0.5,
                groups=(GroupRule(names=("*.bias",), weight_decay=0.0),),
                clip_norm=1.0,
                schedule=Schedule(name="cosine", warmup=2, steps=9, floor=0.1),
                precision=parse_precision("bf16,state=bf16"),
            ),
            seed=3,
            order=ListOrder.GLOBAL,
            transfers=TransferMode.BLOCKING,
            same_data=True,
            keep_results=False,
            stall_limit_s=2.5,
            device=DeviceKind.GPU,
        ),
        Job(emulate=Emulation(scale=3.0)),
    ],
)
def test_a_job_is_read_as_it_was_written(job: Job) -> None:
    assert read_job(write_job(job)) == job


def test_an_emulated_job_has_the_steps_and_transfers_of_the_job() -> None:
    job = Job(emulate=Emulation(scale=2.0), steps=5, transfers=TransferMode.BLOCKING)
    assert job.emulation() == Emulation(scale=2.0, steps=5, blocking=True)
    assert Job(model=MODEL).emulation() is None


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({}, "a model to run, or a script, or settings"),
        ({"emulate": Emulation(), "order": ListOrder.GLOBAL}, "order 'global' is for real runs"),
        ({"model": MODEL, "steps": 0}, "steps of a job is 0"),
        ({"model": MODEL, "stall_limit_s": 0.0}, "stall_limit_s of a job is 0"),
    ],
)
def test_an_impossible_job_is_refused(settings: dict[str, object], words: str) -> None:
    with pytest.raises(InvalidInputError, match=words):
        Job(**settings)  # type: ignore[arg-type]


def test_a_job_of_before_recipes_is_read() -> None:
    job = read_job('{"model": {"text": "vgg16"}, "optimizer": "adam", "learning_rate": 0.5}')
    assert job == Job(
        model=ModelOrigin(text="vgg16"), recipe=Recipe(optimizer="adam", learning_rate=0.5)
    )
    assert read_job('{"model": {"text": "vgg16"}}').recipe == Recipe()


def test_an_unknown_field_of_a_job_is_named() -> None:
    with pytest.raises(FormatError, match="speed"):
        read_job('{"model": {"text": "vgg16"}, "speed": 3}')


def test_a_directory_holds_plan_and_job(tmp_path: Path) -> None:
    files = JobDirectory(tmp_path / "a" / "b")
    solution = solution_over([0, 0], [0, 1])
    files.create(solution, Job(model=MODEL, steps=3))
    assert files.read_job().steps == 3
    assert files.read_solution().plan == solution.plan
    assert sorted(path.name for path in files.path.iterdir()) == ["job.json", "plan.json"]


@pytest.mark.parametrize(("server", "others"), [("http://a:TOKEN@h:1", 0), ("http://h:1", 0o044)])
def test_a_job_with_a_token_is_private(tmp_path: Path, server: str, others: int) -> None:
    files = JobDirectory(tmp_path)
    before = os.umask(0o022)
    try:
        files.create(solution_over([0, 0], [0, 1]), Job(model=MODEL, power=Power(server=server)))
    finally:
        os.umask(before)
    assert (files.path / "job.json").stat().st_mode & 0o077 == others
    assert files.read_job().power == Power(server=server)


def test_a_directory_without_a_job_is_named(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match=r"job\.json"):
        JobDirectory(tmp_path).read_job()


def test_news_are_read_from_where_one_stopped(tmp_path: Path) -> None:
    files = JobDirectory(tmp_path)
    files.prepare()
    assert files.read_news(0, 0) == ([], 0)
    write = files.news_writer(0)
    write(StepNews(0, 1.5))
    first, place = files.read_news(0, 0)
    write(StepNews(1, 1.25))
    second, end = files.read_news(0, place)
    assert (first, second) == ([StepNews(0, 1.5)], [StepNews(1, 1.25)])
    assert files.read_news(0, end) == ([], end)


def test_hosts_with_different_numbers_of_devices_get_their_own_ranks() -> None:
    found = placed(solution_over([0, 1, 0, 1, 1], [0, 1, 2, 4]), 2)
    assert found == Placement(hosts=((0, 2), (1, 3)), local_index=(0, 0, 1, 2))


def test_hosts_that_the_plan_does_not_use_are_not_counted() -> None:
    assert placed(solution_over([0, 1, 2, 2], [1, 2, 3]), 2).hosts == ((0,), (1, 2))


def test_one_host_runs_everything() -> None:
    assert placed(solution_over([0, 1], [0, 1]), 1) == Placement(((0, 1),), (0, 1))
    assert placed(solution_over([0, 0, 0], [1, 2]), 1) == Placement(((0, 1),), (1, 2))


def test_another_number_of_hosts_is_refused() -> None:
    with pytest.raises(InvalidInputError, match=r"2 hosts \(host0, host1\), NNODES.*4; set"):
        placed(solution_over([0, 1], [0, 1]), 4)


def test_the_environment_says_which_host_this_is() -> None:
    assert LaunchHost.of({}) == LaunchHost()
    found = LaunchHost.of({"NNODES": "2", "NODE_RANK": "1", "MASTER_ADDR": "10.0.0.1"})
    assert found == LaunchHost(index=1, num_hosts=2, address="10.0.0.1", port=29500)


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        ({"NNODES": "two"}, "are numbers"),
        ({"NNODES": "2"}, "MASTER_ADDR does not say where the first host is"),
        ({"NNODES": "2", "NODE_RANK": "2", "MASTER_ADDR": "a"}, "NODE_RANK is 2; expected 0 to 1"),
        ({"NNODES": "0"}, "NNODES is 0"),
    ],
)
def test_an_environment_that_cannot_be_is_refused(
    environment: dict[str, str], words: str
) -> None:  # fmt: skip
    with pytest.raises(InvalidInputError, match=words):
        LaunchHost.of(environment)


def test_reports_of_ranks_on_gpus_are_read_where_there_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = JobDirectory(tmp_path)
    files.prepare()
    report = RankReport(
        device=0,
        records=[],
        state={"w": torch.ones(2)},
        statistics=DeviceStatistics(),
        step_ns=[],
    )
    with monkeypatch.context() as patched:
        patched.setattr(torch.serialization, "location_tag", lambda _: "cuda:0")
        files.write_report(0, report)
    (found,) = files.read_reports([0])
    assert found.state["w"].tolist() == [1.0, 1.0]
    assert files.left_by(0) == [files.report(0)]
    assert files.left_by(1) == []
