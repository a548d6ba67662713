"""Merak's rules over layers."""

import itertools

import numpy as np
import pytest

from partita.catalogue.catalogue import load_catalogue
from partita.catalogue.examples import example
from partita.catalogue.shorthand import read_shorthand
from partita.core.graph import (
    EdgeTable,
    Graph,
    Labels,
    OpCosts,
    OpTable,
    ParameterTable,
    TensorTable,
)
from partita.core.problem import Problem
from partita.errors import InvalidInputError
from partita.planners.merak import (
    lightest_cut,
    plan_parameters,
    plan_uniform_floor,
    plan_uniform_transformer,
)


def layered(
    blocks: list[str], weights: list[float] | None = None, cluster: str = "4xa100"
) -> Problem:
    """Return a chain with one op a layer; an empty block name is an embedding or a head."""
    count = len(blocks)
    distinct = list(dict.fromkeys(name for name in blocks if name))
    names = [f"layer{i}" for i in range(count)]
    graph = Graph(
        name="layered",
        ops=OpTable(
            names=names,
            layers=Labels(names=tuple(names), of=np.arange(count)),
            blocks=Labels(
                names=tuple(distinct), of=[distinct.index(b) if b else -1 for b in blocks]
            ),
        ),
        costs=(OpCosts(forward_s=np.ones(count), backward_s=np.ones(count)),),
        tensors=TensorTable(names=names, producer=np.arange(count)),
        edges=EdgeTable(tensor=np.arange(count - 1), reader=np.arange(1, count)),
        parameters=ParameterTable(
            names=[f"w{i}" for i in range(count)],
            bytes=[4.0 * w for w in weights or [1.0] * count],
            use_op=np.arange(count),
            use_parameter=np.arange(count),
        ),
    )
    return Problem(graph=graph, cluster=read_shorthand(cluster, load_catalogue()))


def boundaries(solution) -> list[int]:
    return list(solution.stats["boundaries"])


def test_uniform_floor_gives_the_rest_to_the_last_stage():
    assert boundaries(plan_uniform_floor(layered([""] * 10))) == [0, 2, 4, 6, 10]


def test_fewer_layers_than_devices_give_one_each():
    assert boundaries(plan_uniform_floor(layered([""] * 3))) == [0, 1, 2, 3]


def test_uniform_transformer_shifts_by_the_embeddings():
    gpt = layered(["", ""] + [f"h.{i}" for i in range(32)] + [""], cluster="8xa100")
    bert = layered([""] + [f"layer.{i}" for i in range(24)] + [""], cluster="8xa100")
    assert boundaries(plan_uniform_transformer(gpt)) == [0, 6, 10, 14, 18, 22, 26, 30, 35]
    assert boundaries(plan_uniform_transformer(bert)) == [0, 4, 7, 10, 13, 16, 19, 22, 26]


def test_uniform_transformer_gives_encoder_and_decoder_half_of_the_stages():
    names = [f"encoder.{i}" for i in range(6)] + [f"decoder.{i // 2}" for i in range(12)]
    t5 = layered(["", *names, ""])
    assert boundaries(plan_uniform_transformer(t5)) == [0, 4, 7, 13, 20]
    with pytest.raises(InvalidInputError, match="3 is odd"):
        plan_uniform_transformer(t5, stages=3)


def test_uniform_transformer_refuses_models_without_blocks():
    with pytest.raises(InvalidInputError, match="blocks; 'layered'"):
        plan_uniform_transformer(layered([""] * 6))


def test_uniform_transformer_refuses_a_resnet():
    names = [f"layer{group}.{index}" for group in (1, 2, 3, 4) for index in range(3)]
    with pytest.raises(InvalidInputError, match="has 4"):
        plan_uniform_transformer(layered(["", *names, ""]))


def test_uniform_transformer_on_the_built_in_gpt():
    assert boundaries(plan_uniform_transformer(example("gpt-small"))) == [0, 5, 8, 11, 15]


@pytest.mark.parametrize("seed", range(20))
def test_parameters_is_as_good_as_trying_every_cut(seed):
    rng = np.random.default_rng(seed)
    weights = rng.integers(0, 9, 9).astype(float)
    stages = int(rng.integers(1, 6))

    def heaviest(cut):
        return max(weights[a:b].sum() for a, b in itertools.pairwise(cut))

    best = min(
        heaviest((0, *inner, 9)) for inner in itertools.combinations(range(1, 9), stages - 1)
    )
    found = lightest_cut(weights, stages)
    assert len(found) == stages + 1
    assert heaviest(found) == best


def test_parameters_balances_by_trainable_parameters():
    heavy = layered([""] * 6, weights=[10.0, 1.0, 1.0, 1.0, 1.0, 10.0], cluster="3xa100")
    assert boundaries(plan_parameters(heavy)) == [0, 1, 5, 6]


@pytest.mark.parametrize("planner", [plan_uniform_floor, plan_parameters, plan_uniform_transformer])
def test_too_many_stages_are_refused(planner):
    gpt = layered([""] + [f"h.{i}" for i in range(8)])
    with pytest.raises(InvalidInputError, match=r"5 stages.*1 replicas.*5 devices"):
        planner(gpt, stages=5)
    with pytest.raises(InvalidInputError, match="replicas is 0"):
        planner(gpt, replicas=0)
