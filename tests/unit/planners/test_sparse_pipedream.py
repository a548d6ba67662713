"""SparsePipedream's planner against all choices of devices; its repaired faults by number."""

import math
import random
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.planners.pipelines import cuts

from partita.core.cluster import Cluster, Device, Host, Level
from partita.core.problem import Metric, Objective, Problem
from partita.errors import InvalidInputError
from partita.formats.pipedream import read_pipedream_plan, write_pipedream_plan
from partita.formats.server_file import read_server_file
from partita.objectives.repaired import pipedream_repaired_time
from partita.planners.pipedream.build import plan_on
from partita.planners.sparse_pipedream import plan_sparse_pipedream
from partita.testing.builders import Figures, chain, flat_cluster, random_dag

REPAIRED = Objective(metric=Metric.PIPEDREAM_REPAIRED)
SEEDS = st.integers(0, 10**6)
SMALL = settings(max_examples=10, deadline=None, derandomize=True)


def mixed_problem(seed: int) -> Problem:
    rng = random.Random(seed)
    graph = random_dag(4, rng, tied=0, window=3)
    speeds = rng.choice([(1.0, 2.0, 2.0), (1.0, 1.0, 3.0), (1.0, 2.0, 4.0)])
    cluster = flat_cluster(3, speeds=speeds, bandwidth_bytes_per_s=rng.choice([5.0, 40.0]))
    return Problem(graph=graph, cluster=cluster, objective=REPAIRED)


def best_choice(problem: Problem, *, straight: bool = False, exact: bool = False) -> float:
    """Return the least value over all cuts and all devices for each stage, with equal shares."""
    count = len(problem.cluster)
    best = math.inf
    for stage_of in cuts(problem.graph, count):
        parts = int(stage_of.max()) + 1
        for choice in product(range(parts + 1), repeat=count):
            groups = [[d for d in range(count) if choice[d] == part] for part in range(parts)]
            sizes = [len(group) for group in groups]
            if min(sizes) == 0 or (straight and max(sizes) > 1) or (exact and sum(sizes) < count):
                continue
            plan = plan_on(problem, stage_of, groups)
            best = min(best, pipedream_repaired_time(problem, plan, allreduce_factor=2.0).value)
    return best


@SMALL
@given(SEEDS, st.booleans(), st.booleans())
def test_one_server_is_solved_exactly_over_all_choices_of_devices(
    seed: int, straight: bool, fewer: bool
) -> None:
    """H1, H2, H3, H5: any devices for any stage, two units too, straight or with some unused."""
    problem = mixed_problem(seed)
    found = plan_sparse_pipedream(problem, shares="equal", straight=straight, fewer=fewer)
    best = best_choice(problem, straight=straight, exact=not fewer)
    assert found.stats["predicted_s"] == pytest.approx(best, rel=1e-7)
    assert fewer or len(found.plan.devices) == len(problem.cluster)


@SMALL
@given(SEEDS)
def test_shares_by_speed_are_no_worse_where_links_are_fast(seed: int) -> None:
    """H9."""
    problem = mixed_problem(seed)
    problem = replace(problem, cluster=flat_cluster(3, speeds=(1.0, 2.0, 4.0)))
    equal = plan_sparse_pipedream(problem, shares="equal").stats["predicted_s"]
    weighted = plan_sparse_pipedream(problem).stats["predicted_s"]
    assert weighted <= equal * (1 + 1e-3)
    total = (problem.graph.forward_s + problem.graph.backward_s).sum()
    assert weighted >= total / 7 * (1 - 1e-9)


def two_servers(bandwidth: float = 1e3) -> Cluster:
    kinds = ["slow", "fast", "slow", "fast", "fast"]
    host = np.array([0, 0, 0, 1, 1])
    return Cluster(
        hosts=(Host(name="Server0"), Host(name="Server1")),
        devices=tuple(
            Device(
                name=f"Server{host[i]}/gpu{i}",
                host=int(host[i]),
                type=kind,
                speed=2.0 if kind == "fast" else 1.0,
            )
            for i, kind in enumerate(kinds)
        ),
        levels=(
            Level(name="host", group_of=host, bandwidth_bytes_per_s=np.full(2, 1e4)),
            Level(name="rack", group_of=host * 0, bandwidth_bytes_per_s=np.full(1, bandwidth)),
        ),
    )


def test_servers_work_together_where_links_allow_and_alone_where_not() -> None:
    figures = Figures(forward_s=1.0, backward_s=1.0, tensor_bytes=10.0, parameter_bytes=10.0)
    problem = Problem(graph=chain(8, figures), cluster=two_servers(), objective=REPAIRED)
    together = plan_sparse_pipedream(problem)
    assert len(together.plan.devices) >= 4
    assert together.value < 3.0
    assert together.value >= 16.0 / 8
    apart = plan_sparse_pipedream(replace(problem, cluster=two_servers(1e-3)))
    hosts = {name.split("/")[0] for name in apart.plan.devices}
    assert len(hosts) == 1
    assert apart.value == pytest.approx(4.0, rel=0.05)


def test_many_devices_of_several_classes_are_searched_in_rows() -> None:
    speeds = (1.0,) * 6 + (2.0,) * 6 + (3.0,) * 6
    figures = Figures(forward_s=1.0, backward_s=1.0, tensor_bytes=1.0, parameter_bytes=1.0)
    cluster = flat_cluster(18, speeds=speeds, bandwidth_bytes_per_s=1e4)
    problem = Problem(graph=chain(30, figures), cluster=cluster, objective=REPAIRED)
    solution = plan_sparse_pipedream(problem)
    assert 60 / 36 <= solution.value <= 60 / 36 * 1.2


TOY = "node1 -- Input -- {zero}\n{nodes}\n\tnode1 -- node2\n\tnode2 -- node3\n\tnode3 -- node4"
ZERO = (
    "forward_compute_time=0.0, backward_compute_time=0.0, activation_size=0.0, parameter_size=0.0"
)


def toy_profile(scale: float) -> str:
    nodes = [
        f"node{k} -- Linear{k} -- forward_compute_time={scale * k:.3f}, "
        "backward_compute_time=1.000, "
        "activation_size=1000000.0, parameter_size=100000000.000"
        for k in (2, 3, 4)
    ]
    return TOY.format(zero=ZERO, nodes="\n".join(nodes))


SERVER_FILE = "Server0\n    TitanV 1 tv.txt\n    TitanXP 3 txp.txt\n"


def server_problem() -> Problem:
    profiles = {"tv.txt": toy_profile(1.0), "txp.txt": toy_profile(1.5)}
    return read_server_file(SERVER_FILE, profiles.__getitem__)


def test_a_server_file_is_planned_as_it_is_read() -> None:
    """H3, H4: synchronising four devices takes seconds; the plan names the one that it uses."""
    problem = server_problem()
    solution = plan_sparse_pipedream(problem)
    assert solution.plan.devices == ("Server0/gpu0",)
    assert solution.value == pytest.approx(0.012)
    forced = plan_sparse_pipedream(problem, fewer=False)
    assert len(forced.plan.devices) == 4
    assert forced.value > 0.1


def test_transfers_may_be_free() -> None:
    """The released tool without a compression ratio."""
    problem = replace(server_problem(), objective=REPAIRED)
    free = plan_sparse_pipedream(problem, compression="free")
    assert free.options["compression"] == "free"
    assert free.stats["predicted_s"] == pytest.approx(0.0055)
    assert len(free.plan.stages) == 3
    charged = plan_sparse_pipedream(problem)
    assert charged.stats["predicted_s"] == pytest.approx(0.012)


def test_the_stages_are_written_as_gpus_n_txt() -> None:
    problem = replace(server_problem(), objective=REPAIRED)
    solution = plan_sparse_pipedream(problem, compression="free")
    text = write_pipedream_plan(problem.graph, solution.plan)
    assert text.count("stage_id=") == 4
    again = read_pipedream_plan(
        text,
        problem.graph,
        replicas=[stage.num_replicas for stage in solution.plan.stages],
        devices=solution.plan.devices,
    )
    assert again.stage_of.tolist() == solution.plan.stage_of.tolist()


def test_shares_of_another_name_are_refused() -> None:
    """H8: one line for what cannot be."""
    with pytest.raises(InvalidInputError, match="'fair'"):
        plan_sparse_pipedream(server_problem(), shares="fair")
    with pytest.raises(InvalidInputError, match=r"0,.*'free'"):
        plan_sparse_pipedream(server_problem(), compression="none")
    with pytest.raises(InvalidInputError, match="orders is 0"):
        plan_sparse_pipedream(server_problem(), orders=0)
