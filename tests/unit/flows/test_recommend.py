import json
import math
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from partita.catalogue.catalogue import load_catalogue
from partita.catalogue.shorthand import read_shorthand
from partita.core.cluster import Cluster
from partita.cost.links import fabric_of
from partita.cost.tables import GPU_RESERVE
from partita.errors import InvalidInputError
from partita.flows.recommend import (
    Goal,
    Recommendation,
    TargetMissedError,
    near_batch,
    recommend,
)
from partita.transformer.kernels import machine_of
from partita.transformer.mixed import groups_of, mixed_candidates
from partita.transformer.named import find_shape
from partita.transformer.pipelines import played_s
from partita.transformer.search import Task, price_all, regular_layouts

CONFIG = {
    "hidden_size": 2048,
    "num_hidden_layers": 12,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "intermediate_size": 5632,
    "vocab_size": 32000,
    "max_position_embeddings": 2048,
    "model_type": "llama",
}


@pytest.fixture
def model(tmp_path: Path) -> str:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIG), encoding="utf-8")
    return str(path)


@pytest.fixture
def offer(tmp_path: Path) -> str:
    path = tmp_path / "offer.yaml"
    path.write_text(
        "- {machine: dgx-h100, count: 4, price_per_hour: 24}\n"
        "- {machine: dgx-a100, count: 2, price_per_device_hour: 1.1}\n",
        encoding="utf-8",
    )
    return str(path)


def figures(found: Recommendation) -> list[tuple[float, float]]:
    return [(option.tokens_per_s, option.price_per_hour) for option in found.front]


def task_on(cluster: Cluster, model: str, batch: int) -> Task:
    named = find_shape(model)
    assert named is not None
    first = cluster.devices[0]
    return Task(
        shape=named.shape,
        devices=len(cluster),
        machine=machine_of(first, fabric_of(cluster)),
        batch=batch,
        sequence_length=named.sequence_length,
        limit_bytes=first.memory_bytes * (1 - GPU_RESERVE),
    )


def best_step_s(shorthand: str, model: str, batch: int) -> float:
    """Return the least step of all layouts that fit, each looked at by itself."""
    cluster = read_shorthand(shorthand, load_catalogue())
    task = task_on(cluster, model, batch)
    if "+" in shorthand:
        groups = groups_of(cluster, 1 - GPU_RESERVE)
        found = mixed_candidates(task, cluster, groups) if len(groups) > 1 else []
        return min((played_s(candidate.lanes) for candidate in found[:3]), default=math.inf)
    layouts = list(regular_layouts(task))
    if not layouts:
        return math.inf
    priced = price_all(task, layouts)
    rows = zip(priced.step_s.tolist(), priced.total_bytes.tolist(), strict=True)
    return min((step_s for step_s, held in rows if held <= task.limit_bytes), default=math.inf)


TYPES = ("a100", "h100", "l40s", "a10", "b200")


def random_offers(draw: random.Random) -> list[dict[str, Any]]:
    kinds = draw.sample(TYPES, draw.randint(1, 3))
    return [
        {
            "name": f"offer{index}",
            "device": kind,
            "devices_per_host": draw.choice((1, 2, 4)),
            "count": draw.randint(1, 4),
            "price_per_hour": round(draw.uniform(1, 40), 2),
        }
        for index, kind in enumerate(kinds)
    ]


def choices(offers: list[dict[str, Any]], *, mix: bool) -> Iterator[tuple[str, float]]:
    """Yield the shorthand and the price of everything that may be taken."""
    rows = [
        (f"{n}x{each['devices_per_host']}x{each['device']}", n * each["price_per_hour"], at, n)
        for at, each in enumerate(offers)
        for n in range(1, each["count"] + 1)
    ]
    yield from ((words, price) for words, price, _, _ in rows)
    paired = [row for row in rows if row[3] in (1, 2, 4) or row[3] == offers[row[2]]["count"]]
    if mix:
        for left in paired:
            for right in paired:
                if left[2] < right[2]:
                    yield f"{left[0]}+{right[0]}", left[1] + right[1]


@pytest.mark.parametrize("seed", range(50))
def test_it_equals_exhaustive_search(seed: int, model: str, tmp_path: Path) -> None:
    draw = random.Random(seed)
    offers, batch, mix = random_offers(draw), draw.choice((16, 24, 32)), seed % 10 == 0
    if mix:
        small = {"devices_per_host": 2, "count": 2 if seed == 40 else 1}
        offers, batch = [{**each, **small} for each in offers[:2]], 16
    path = tmp_path / "offer.yaml"
    path.write_text(json.dumps({"mix": mix, "machines": offers}), encoding="utf-8")
    tokens = 2048 * batch
    everything = []
    for shorthand, price in choices(offers, mix=mix):
        step_s = best_step_s(shorthand, model, batch)
        if math.isfinite(step_s):
            everything.append((tokens / step_s, price))
    top = max(rate for rate, _ in everything)
    target = draw.uniform(0.2, 1.05) * top
    given: dict[str, str] = {"target": f"{target!r} tokens/s"}
    by_token = draw.random() < 0.5
    if by_token:
        cheap = min(price / rate for rate, price in everything)
        given = {"within": "10 days", "tokens": f"{target * 864000!r}"}
        if draw.random() < 0.5:
            given["budget"] = f"{cheap * 240 * target * draw.uniform(0.9, 3)!r}"
    most = float(given["budget"]) if "budget" in given else math.inf

    def money(rate: float, price: float) -> float:
        return 240 * target * price / rate if by_token else price

    kept = [x for x in everything if x[0] >= target * (1 - 1e-9) and money(*x) <= most]
    options: dict[str, Any] = {"offer": str(path), "batch_size": batch, **given}
    if not kept:
        with pytest.raises(TargetMissedError):
            recommend(model, **options)
        return
    front = {
        x for x in kept if not any(y != x and y[0] >= x[0] and money(*y) <= money(*x) for y in kept)
    }
    found = recommend(model, **options)
    assert figures(found) == [pytest.approx(x) for x in sorted(front)]
    assert money(found.cheapest.tokens_per_s, found.cheapest.price_per_hour) == pytest.approx(
        min(money(*x) for x in kept)
    )
    assert found.fastest.tokens_per_s == pytest.approx(max(rate for rate, _ in kept))
    least = min(price / rate for rate, price in kept) / 3600 * 1e6
    assert found.economical.price_per_million_tokens == pytest.approx(least)


def test_time_and_money_of_the_tokens_follow_from_speed_and_price(offer: str) -> None:
    found = recommend("llama3-8b", offer=offer, within="60 days", tokens="1T")
    best = found.to_json()["most_economical"]
    assert best["training_s"] == pytest.approx(1e12 / best["tokens_per_s"])
    assert best["training_s"] <= 60 * 86400
    money = best["training_s"] / 3600 * best["price_per_hour"]
    assert best["training_price"] == pytest.approx(money)
    assert found.cheapest is found.economical
    assert "1.00 T tokens in" in repr(found)
    assert "off by 3% in the mean on 48 published runs" in found.lines()[-1]
    assert [row["machines"] for row in found.rows()] == [option.name for option in found.front]
    assert found.plan_command(found.economical).startswith("partita plan llama3-8b --sequence-le")


def test_the_tokens_may_stand_beside_the_time(offer: str) -> None:
    two = recommend("llama3-8b", offer=offer, within="60 days --tokens 1T")
    assert two.goal == Goal(tokens=1e12, within_s=60 * 86400.0)
    with pytest.raises(InvalidInputError, match="given twice"):
        recommend("llama3-8b", offer=offer, within="60 days --tokens 1T", tokens="1T")


def test_a_budget_alone_buys_tokens(offer: str) -> None:
    found = recommend("llama3-8b", offer=offer, budget="$5k")
    best = found.to_json()["most_economical"]
    assert best["training_price"] == pytest.approx(5000)
    assert best["training_tokens"] == max(row["training_tokens"] for row in found.rows())


def test_a_budget_of_some_time_limits_the_price_of_an_hour(offer: str) -> None:
    found = recommend("llama3-8b", offer=offer, budget="$5k", within="100 h")
    assert max(option.price_per_hour for option in found.front) <= 50
    assert found.fastest.price_per_hour == 48


def test_a_missed_speed_says_how_far_and_what_would_do(offer: str) -> None:
    with pytest.raises(TargetMissedError, match="4 x dgx-h100") as at:
        recommend("llama3-8b", offer=offer, target="500k tokens/s")
    assert at.value.exit_code == 3
    assert at.value.would_do is not None
    assert at.value.would_do.tokens_per_s >= 500e3
    assert at.value.to_json()["nearest"]["devices"] == 32


def test_a_missed_budget_says_the_money(offer: str) -> None:
    with pytest.raises(TargetMissedError, match=r"\$[0-9,]+ instead of \$1,000"):
        recommend("llama3-8b", offer=offer, budget="$1k", tokens="1T")


def test_a_model_that_fits_on_nothing_says_the_memory(offer: str) -> None:
    with pytest.raises(TargetMissedError, match=r"fits.*nothing") as caught:
        recommend("llama3-405b", offer=offer, target="1k tokens/s")
    assert caught.value.nearest is None


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"target": "quick"}, "target 'quick' is not understood; write it like 2T or 500k"),
        ({"target": "0 tokens/s"}, "expected more than 0"),
        ({"within": "30 days"}, "does not say for how many tokens"),
        ({"within": "30", "tokens": "2T"}, "within '30' is not understood"),
        ({"budget": "much"}, "budget 'much' is not understood"),
        ({"framework": "megatrn"}, "no framework 'megatrn'; did you mean 'megatron'"),
        ({"machines": "dgx-h1"}, "is not in the catalogue"),
        ({"machines": "2x8xh100"}, "expected one machine"),
        ({"machines": "dgx-h100", "most_devices": 4}, "less than the 8 of one machine"),
        ({"machines": "dgx-a100", "precision": "fp8"}, "nothing on offer computes in fp8"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidInputError, match=words):
        recommend("llama3-8b", **options)


def test_an_unknown_model_is_refused_with_near_names() -> None:
    with pytest.raises(InvalidInputError, match=r"'llama3-7b' is no large.*llama3-8b"):
        recommend("llama3-7b")


def test_machines_without_the_arithmetic_are_left_out_and_named() -> None:
    found = recommend("llama3-8b", machines="dgx-h100,dgx-a100", precision="fp8", most_devices=16)
    assert found.remarks == ("left out, since they do not compute in fp8: dgx-a100",)
    assert {option.device_types for option in found.options} == {("h100",)}


def test_adapters_need_fewer_devices() -> None:
    found = recommend("llama3-70b", machines="dgx-h100", most_devices=8, lora=16)
    assert found.cheapest.devices == 8
    assert found.cheapest.accuracy is None
    assert "is not known" in found.lines()[-1]
    assert "--lora 16" in found.plan_command(found.cheapest)


@pytest.mark.parametrize("devices", [1, 8, 24, 40, 56, 72, 88, 720])
def test_a_batch_nobody_gave_is_near_and_divided(devices: int) -> None:
    batch = near_batch(512, devices)
    odd = devices // (devices & -devices)
    assert abs(batch - 512) <= 32
    assert batch % odd == 0


def test_the_batch_may_be_given_in_tokens(model: str) -> None:
    found = recommend(model, machines="8xh100", most_devices=8, batch_tokens="131072 tokens")
    assert found.cheapest.batch == 64


def test_each_answer_has_the_accuracy_of_its_own_kind(tmp_path: Path) -> None:
    path = tmp_path / "offer.yaml"
    path.write_text(
        "- {machine: dgx-h100, count: 1, price_per_hour: 20}\n"
        "- {machine: mi300x-platform, count: 2, price_per_hour: 90}\n",
        encoding="utf-8",
    )
    found = recommend("llama3-8b", offer=str(path))
    assert found.cheapest.accuracy is not None
    assert found.fastest.accuracy is None
    assert "fastest: no published run of this kind" in found.lines()[-1]
    assert found.to_json()["fastest"]["accuracy"] is None
