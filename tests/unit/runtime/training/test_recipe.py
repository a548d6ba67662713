"""What a recipe does to weights, whatever plan carries it out: as a plain loop of torch does it."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from partita.core.plan import Plan, Shard, Stage
from partita.core.problem import Schedule as PipelineSchedule
from partita.errors import InvalidInputError, UnsupportedError
from partita.runtime.training.optimizers import make_optimizer
from partita.runtime.training.recipe import GroupRule, NanPolicy, Recipe, Schedule, ScriptRecipe
from partita.testing.networks import gradient_error, residual_network

NETWORK = residual_network(tied=True)
STEPS = 4
RULE = GroupRule(names=("*0*",), learning_rate=0.3, weight_decay=0.0)


def plan_of(groups: Sequence[Sequence[int]], shard: Shard = Shard.NONE, **changes: Any) -> Plan:
    stages = tuple(
        Stage(
            devices=tuple((d,) for d in group),
            shard=shard if len(group) > 1 else Shard.NONE,
        )
        for group in groups
    )
    ops = len(NETWORK.graph)
    settings: dict[str, Any] = {
        "fingerprint": NETWORK.graph.fingerprint,
        "devices": tuple(f"d{d}" for d in range(1 + max(max(group) for group in groups))),
        "stage_of": np.arange(ops) * len(groups) // ops,
        "stages": stages,
        "schedule": PipelineSchedule.ONE_F_ONE_B,
        "microbatch_sizes": np.full(4, 2),
    }
    return Plan(**{**settings, **changes})


ONE = plan_of([[0]])


def parameters() -> dict[str, Tensor]:
    return {name: torch.from_numpy(value) for name, value in NETWORK.parameters(1).items()}


def data_of(steps: int = STEPS) -> list[list[dict[str, Tensor]]]:
    return [
        [
            {name: torch.from_numpy(value) for name, value in inputs.items()}
            for inputs in NETWORK.microbatches([2] * 4, 2 + step)
        ]
        for step in range(steps)
    ]


def plain(run_network, recipe: Recipe, make: Callable[[list[Any]], torch.optim.Optimizer], clip):
    """Train by torch's own optimizer, one step of gradients at a time; returns the weights."""
    state = parameters()
    trained = [n for n, t in zip(*_trained(), strict=True) if t]
    held = {name: torch.nn.Parameter(state[name].clone()) for name in trained}
    rules = [{"params": [p], **recipe.options_of(n, p.shape)} for n, p in held.items()]
    optimizer = make(rules)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, recipe.schedule.factor)
    for step in range(STEPS):
        now = {**state, **{name: value.detach() for name, value in held.items()}}
        found = run_network(NETWORK, ONE, now, data_of()[step : step + 1])
        for name, value in held.items():
            value.grad = found.steps[0].gradients[name].clone()
        if clip:
            torch.nn.utils.clip_grad_norm_(held.values(), clip)
        optimizer.step()
        scheduler.step()
    return {name: value.detach() for name, value in held.items()}


def _trained() -> tuple[Sequence[str], Sequence[bool]]:
    return NETWORK.graph.parameters.names, NETWORK.graph.parameters.trainable.tolist()


PLANS = {
    "one": ONE,
    "pipeline": plan_of([[0], [1], [2]]),
    "replicas": plan_of([[0, 1], [2]]),
    "two-stages-a-device": plan_of([[0], [1], [0]]),
    "shard-optimizer": plan_of([[0, 1], [2, 3]], Shard.OPTIMIZER),
    "shard-parameters": plan_of([[0, 1], [2]], Shard.PARAMETERS),
}


@pytest.mark.parametrize("name", PLANS)
def test_clipping_groups_and_schedule_give_the_weights_of_a_plain_loop(run_network, name) -> None:
    recipe = Recipe(
        optimizer="adamw",
        learning_rate=0.05,
        weight_decay=0.1,
        groups=(RULE,),
        clip_norm=0.3,
        schedule=Schedule(name="cosine", warmup=2, steps=6, floor=0.1),
    )
    wanted = plain(
        run_network, recipe, lambda g: torch.optim.AdamW(g, lr=0.05, weight_decay=0.1), 0.3
    )
    found = run_network(NETWORK, PLANS[name], parameters(), data_of(), recipe=recipe)
    assert gradient_error({n: found.state[n] for n in wanted}, wanted) < 1e-9


@pytest.mark.parametrize(
    ("optimizer", "make"),
    [
        ("sgd", lambda g: torch.optim.SGD(g, lr=0.1)),
        ("momentum", lambda g: torch.optim.SGD(g, lr=0.1, momentum=0.9)),
        ("adam", lambda g: torch.optim.Adam(g, lr=1e-3)),
        ("adamw", lambda g: torch.optim.AdamW(g, lr=1e-3)),
    ],
)
def test_optimizers_of_a_name_are_torchs(run_network, optimizer, make) -> None:
    recipe = Recipe(optimizer=optimizer)
    found = run_network(NETWORK, PLANS["pipeline"], parameters(), data_of(), recipe=recipe)
    wanted = plain(run_network, recipe, make, None)
    assert gradient_error({n: found.state[n] for n in wanted}, wanted) < 1e-10


def test_a_scripts_optimizer_is_made_once_per_device_with_groups_and_names(run_network) -> None:
    calls: list[list[dict[str, Any]]] = []

    def make(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        calls.append(groups)
        return torch.optim.RMSprop(groups, lr=0.01)

    names = NETWORK.graph.parameters.names
    recipe = ScriptRecipe(
        make_optimizer=make,
        options={names[0]: {"lr": 0.5}},
        make_scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.1),
        clip_norm=0.5,
    )
    found = run_network(NETWORK, PLANS["pipeline"], parameters(), data_of(), recipe=recipe)
    assert len(calls) == 3
    one = run_network(NETWORK, ONE, parameters(), data_of(), recipe=recipe)
    assert gradient_error(found.state, one.state) < 1e-10
    whole = calls[-1]
    assert sorted(n for group in whole for n in group["param_names"]) == sorted(
        n for n, trains in zip(*_trained(), strict=True) if trains
    )
    rates = [group["lr"] for group in whole if names[0] in group["param_names"]]
    assert rates == pytest.approx([0.5 * 0.1**2])  # after four steps


def test_state_goes_by_name_and_is_taken_over() -> None:
    held = {"a": torch.zeros(3), "b": torch.zeros(2, 2)}
    for recipe in (
        Recipe(optimizer="adam"),
        ScriptRecipe(make_optimizer=lambda groups: torch.optim.Adam(groups, lr=1e-3)),
    ):
        first, second = make_optimizer(recipe, held), make_optimizer(recipe, held)
        first.step({name: (value, torch.ones_like(value)) for name, value in held.items()})
        second.load_state(first.state())
        for name, entries in first.state().items():
            assert set(entries) == {"step", "exp_avg", "exp_avg_sq"}
            assert all(
                torch.equal(value, second.state()[name][entry]) for entry, value in entries.items()
            )


def test_a_step_without_numbers_is_skipped_on_every_device(run_network) -> None:
    data = data_of(2)
    names = NETWORK.graph.tensors.names
    first = next(name for name in data[0][0] if name in names)
    data[0][1][first] = data[0][1][first] * float("inf")
    recipe = Recipe(on_nan=NanPolicy.SKIP)
    found = run_network(NETWORK, PLANS["pipeline"], parameters(), data, recipe=recipe)
    only = run_network(NETWORK, PLANS["pipeline"], parameters(), data[1:], recipe=recipe)
    trained = [n for n, trains in zip(*_trained(), strict=True) if trains]
    assert all(torch.equal(found.state[n], only.state[n]) for n in trained)


def test_clipping_is_refused_where_stages_step_at_different_times(run_network) -> None:
    network = residual_network(tied=False)
    plan = plan_of(
        [[0], [1]],
        schedule=PipelineSchedule.PIPEDREAM,
        fingerprint=network.graph.fingerprint,
        stage_of=np.arange(len(network.graph)) * 2 // len(network.graph),
    )
    state = {name: torch.from_numpy(value) for name, value in network.parameters(1).items()}
    with pytest.raises(UnsupportedError, match="weight stashing"):
        run_network(network, plan, state, data_of(1), recipe=Recipe(clip_norm=1.0))


def test_schedules_rise_and_fall() -> None:
    cosine = Schedule(name="cosine", warmup=2, steps=6, floor=0.2)
    assert [cosine.factor(step) for step in (0, 1, 2, 4, 6, 9)] == pytest.approx(
        [0.5, 1.0, 1.0, 0.6, 0.2, 0.2]
    )
    linear = Schedule(name="linear", steps=4)
    assert [linear.factor(step) for step in range(5)] == pytest.approx([1, 0.75, 0.5, 0.25, 0])


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Recipe(optimizer="lion"), "'lion' is not one of sgd"),
        (lambda: Recipe(clip_norm=0.0), "clip_norm of a recipe is 0"),
        (lambda: Recipe(weight_decay=-1.0), "weight_decay of a recipe is -1"),
        (lambda: Schedule(name="square"), "'square' is not one of constant"),
        (lambda: Schedule(name="cosine", warmup=5, steps=5), "more steps than warm-up"),
    ],
)
def test_an_impossible_recipe_is_refused(make, words: str) -> None:
    with pytest.raises(InvalidInputError, match=words):
        make()
