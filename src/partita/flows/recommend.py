"""What to rent or buy for a large transformer: machines and numbers of them that keep a target.

Every machine of an offer is tried in sensible numbers; for each the best layout is searched in
closed form. Two figures are traded for each other: tokens per second, and money: that of the whole
training where its tokens (or the budget they are bought for) are given, else that of an hour. What
cannot keep the target, or cannot beat what was found in both, is not searched: kernels at the rate
that they reach bound the tokens per second from above, so that the answer is that of an exhaustive
search.
"""

import math
import shlex
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import numpy as np

from partita.catalogue.catalogue import Catalogue
from partita.catalogue.shorthand import read_shorthand
from partita.core.cluster import MAX_DEVICES, Cluster
from partita.core.columns import number_or_none
from partita.core.precision import parse_precision
from partita.documents import open_catalogue, read_text
from partita.errors import FormatError, InfeasibleError, InvalidInputError
from partita.flows.fields import LengthFields, StateFields, TrainingFields, WorkerFields
from partita.flows.offers import Offer, Offers, catalogue_offers, mixtures, read_offers
from partita.flows.problem import memory_share
from partita.flows.results import Result
from partita.flows.transformer_task import (
    DEFAULT_TOKENS,
    framework_of,
    task_of,
    usual_precision,
)
from partita.names import suggest
from partita.requests import OnProgress, declare, make, silent
from partita.transformer.kernels import (
    Accuracy,
    Machine,
    accuracy_line,
    accuracy_of,
)
from partita.transformer.layout import Layout
from partita.transformer.mixed import groups_of, mixed_candidates
from partita.transformer.named import NamedShape, find_shape, named_shapes
from partita.transformer.pipelines import played_s
from partita.transformer.search import Task, least_s, regular_layouts, search
from partita.units import (
    format_bytes,
    format_count,
    format_duration,
    format_money,
    parse_duration,
    parse_money,
    parse_tokens,
)
from partita.workers import Workers

PLAYED = 3
"""Layouts over several types of devices that are played, of which the best counts."""
MOST_TIMES = 16
"""How many times as many machines as there are tried, to say what would keep a target."""
BATCH_SHARE = 1 / 16
"""Share by which a batch that nobody gave may differ, so that numbers of devices divide it."""
MOST_LAYOUTS = 300_000
"""Layouts that are kept in memory."""


@dataclass(frozen=True, kw_only=True)
class RecommendRequest(StateFields, LengthFields, TrainingFields, WorkerFields):
    """A model, a target, and what is on offer."""

    model: str = declare("", is_argument=True, help="Large transformer, or its config.json.")
    target: str | None = declare(None, help="Least speed, such as '500k tokens/s'.")
    within: str | None = declare(None, help="Most time for the tokens, such as '30 days'.")
    budget: str | None = declare(None, help="Most money, such as '$50k'.")
    offer: str | None = declare(
        None, path="existing file", help="Machines with prices and counts, a YAML file."
    )
    machines: str | None = declare(
        None, usual="all with a price", help="Machines of the catalogue: dgx-h100,8xa100."
    )
    most_devices: int = declare(
        1024, minimum=1, maximum=MAX_DEVICES, help="Devices to use at most."
    )
    mix: bool = declare(False, help="Let two kinds of machines train together.")
    batch_size: int | None = declare(
        None, minimum=1, usual="about 4M tokens", help="Sequences in a step."
    )
    batch_tokens: str | None = declare(
        None, help="About as many tokens in a step, such as 16M, instead of --batch-size."
    )
    catalogue: str | None = declare(None, help="Your own device types, a YAML file.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """What a recommendation must keep.

    Attributes:
        tokens_per_s: Least speed; 0 = any.
        tokens: Tokens of the training; NaN = not given.
        within_s: Seconds that the training may take; inf = any.
        budget: Money that it may cost; inf = any.
    """

    tokens_per_s: float = 0.0
    tokens: float = math.nan
    within_s: float = math.inf
    budget: float = math.inf

    @property
    def is_by_token(self) -> bool:
        """Whether money is that of tokens: those that are given, or that the budget buys."""
        return not math.isnan(self.tokens) or (
            math.isfinite(self.budget) and math.isinf(self.within_s)
        )

    @property
    def least_tokens_per_s(self) -> float:
        """Speed that keeps the target and ends in time."""
        in_time = 0.0 if math.isnan(self.tokens) else self.tokens / self.within_s
        return max(self.tokens_per_s, in_time)

    def money(self, tokens_per_s: float, price_per_hour: float) -> float:
        """Return what is to be small beside time: money per million tokens, or per hour."""
        if not self.is_by_token:
            return price_per_hour
        return price_per_hour / 3600 / tokens_per_s * 1e6

    @property
    def most_money(self) -> float:
        """Limit of :meth:`money`."""
        if not math.isfinite(self.budget):
            return math.inf
        if self.is_by_token:
            return math.inf if math.isnan(self.tokens) else self.budget / self.tokens * 1e6
        return self.budget / self.within_s * 3600

    def keeps(self, tokens_per_s: float, price_per_hour: float) -> bool:
        """Return whether a speed at a price keeps the target."""
        fast = tokens_per_s >= self.least_tokens_per_s * (1 - 1e-12)
        return fast and self.money(tokens_per_s, price_per_hour) <= self.most_money * (1 + 1e-12)

    def training_s(self, tokens_per_s: float, price_per_hour: float) -> float:
        """Return seconds of the training; NaN where neither tokens nor a budget say how long."""
        if not math.isnan(self.tokens):
            return self.tokens / tokens_per_s
        if not math.isfinite(self.budget):
            return math.nan
        return min(self.within_s, self.budget / max(price_per_hour, 1e-300) * 3600)

    def words(self) -> str:
        """Return the target for people."""
        parts = []
        if self.tokens_per_s:
            parts.append(f"{format_count(self.tokens_per_s)} tokens/s")
        if not math.isnan(self.tokens):
            parts.append(f"{format_count(self.tokens)} tokens")
        if math.isfinite(self.within_s):
            parts.append(f"within {format_duration(self.within_s)}")
        if math.isfinite(self.budget):
            parts.append(f"for {format_money(self.budget)}")
        return ", ".join(parts) or "any speed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """Machines, the best layout over them, and what they do.

    Attributes:
        machines: Names of the offers, and how many of each.
        cluster: Their shorthand, as ``partita plan --cluster`` takes it.
        devices: Number of devices.
        device_types: Types of the devices.
        layout: The layout, of the first stage where they differ.
        way: How types of devices share the work, where there are several.
        batch: Sequences of a step.
        step_s: Seconds of a step.
        tokens_per_s: Tokens per second.
        mfu: Share of the devices' peak that the model's own arithmetic uses.
        memory_bytes: Bytes of the fullest device; NaN over several types.
        limit_bytes: Bytes that a device may use.
        price_per_hour: Money for an hour of all of them.
        accuracy: How far estimates of the kind were off published runs; None = not known.
    """

    machines: tuple[tuple[str, int], ...]
    cluster: str
    devices: int
    device_types: tuple[str, ...]
    layout: Layout
    way: str
    batch: int
    step_s: float
    tokens_per_s: float
    mfu: float
    memory_bytes: float
    limit_bytes: float
    price_per_hour: float
    accuracy: Accuracy | None

    @property
    def title(self) -> str:
        """The layout in words."""
        return f"{self.layout}, {self.way}" if self.way else str(self.layout)

    @property
    def name(self) -> str:
        """The machines in words."""
        return " + ".join(f"{count} x {name}" for name, count in self.machines)

    @property
    def price_per_million_tokens(self) -> float:
        """Money for a million tokens."""
        return self.price_per_hour / 3600 / self.tokens_per_s * 1e6

    def to_json(self, goal: Goal) -> dict[str, Any]:
        """Return the option as JSON values, with time and money of the training."""
        seconds = goal.training_s(self.tokens_per_s, self.price_per_hour)
        return {
            "machines": [{"name": name, "count": count} for name, count in self.machines],
            "cluster": self.cluster,
            "devices": self.devices,
            "layout": self.title,
            "batch": self.batch,
            "step_s": self.step_s,
            "tokens_per_s": self.tokens_per_s,
            "tokens_per_s_per_device": self.tokens_per_s / self.devices,
            "mfu": self.mfu,
            "memory_bytes": number_or_none(self.memory_bytes),
            "limit_bytes": self.limit_bytes,
            "price_per_hour": self.price_per_hour,
            "price_per_million_tokens": self.price_per_million_tokens,
            "training_s": number_or_none(seconds),
            "training_tokens": number_or_none(seconds * self.tokens_per_s),
            "training_price": number_or_none(seconds * self.price_per_hour / 3600),
            "accuracy": None if self.accuracy is None else self.accuracy._asdict(),
        }


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Recommendation(Result):
    """Machines for a model.

    Attributes:
        model: Name of the model.
        goal: The target.
        cheapest: Least money of the training, or per hour where its length is not given.
        fastest: Most tokens per second.
        economical: Least money per token.
        front: All options that keep the target and that none beats in speed and money, the
            slowest first.
        options: All options that keep the target and were priced.
        command: What plans an option, but for its cluster and batch.
        sequence_length: Tokens of a sequence.
        remarks: What to know of the offer.
    """

    model: str
    goal: Goal
    cheapest: Option
    fastest: Option
    economical: Option
    front: tuple[Option, ...]
    options: tuple[Option, ...]
    command: tuple[str, ...]
    sequence_length: int
    remarks: tuple[str, ...] = ()

    def titles(self, option: Option) -> list[str]:
        """Return what an option is the best in."""
        named = {
            "cheapest": self.cheapest,
            "fastest": self.fastest,
            "most economical": self.economical,
        }
        return [title for title, best in named.items() if best is option]

    def plan_command(self, option: Option) -> str:
        """Return the command that plans an option."""
        words = [*self.command, "--cluster", option.cluster, "--batch-size", str(option.batch)]
        return shlex.join(words)

    def to_json(self) -> dict[str, Any]:
        """Return everything as JSON values under stable keys."""
        goal = self.goal
        return {
            "model": self.model,
            "sequence_length": self.sequence_length,
            "target": {
                "tokens_per_s": goal.least_tokens_per_s or None,
                "tokens": number_or_none(goal.tokens),
                "within_s": number_or_none(goal.within_s),
                "budget": number_or_none(goal.budget),
            },
            "cheapest": self.cheapest.to_json(goal),
            "fastest": self.fastest.to_json(goal),
            "most_economical": self.economical.to_json(goal),
            "front": [option.to_json(goal) for option in self.front],
            "options": [option.to_json(goal) for option in self.options],
            "command": self.plan_command(self.economical),
            "remarks": list(self.remarks),
        }

    def rows(self) -> list[Mapping[str, object]]:
        """Return the front, a row each."""
        found: list[Mapping[str, object]] = []
        for option in self.front:
            values = option.to_json(self.goal)
            values["machines"] = option.name
            found.append({"best": ", ".join(self.titles(option)), **values})
        return found

    def lines(self) -> list[str]:
        """Return the three answers and how good the estimate is."""
        lines = [f"{self.model}, {self.goal.words()}: {len(self.front)} choices that none beats"]
        answers: dict[str, list[str]] = {}
        errors: dict[str, list[str]] = {}
        for title, option in (
            ("cheapest", self.cheapest),
            ("fastest", self.fastest),
            ("most economical", self.economical),
        ):
            answers.setdefault(self._words(option), []).append(title)
            errors.setdefault(accuracy_line(option.accuracy), []).append(title)
        lines += [f"{' and '.join(titles)}: {words}" for words, titles in answers.items()]
        if len(errors) == 1:
            return [*lines, f"nothing was measured; {next(iter(errors))}"]
        said = [f"{' and '.join(titles)}: {words}" for words, titles in errors.items()]
        return [*lines, f"nothing was measured; {'; '.join(said)}"]

    def _words(self, option: Option) -> str:
        seconds = self.goal.training_s(option.tokens_per_s, option.price_per_hour)
        words = [
            f"{option.name} ({option.title})",
            f"{format_count(option.tokens_per_s)} tokens/s",
            f"{format_money(option.price_per_hour)}/h",
            f"{format_money(1e3 * option.price_per_million_tokens)} per billion tokens",
        ]
        if not math.isnan(seconds):
            money = format_money(seconds * option.price_per_hour / 3600)
            known = self.goal.tokens
            bought = seconds * option.tokens_per_s if math.isnan(known) else known
            tokens = format_count(bought)
            words.append(f"{tokens} tokens in {format_duration(seconds)} for {money}")
        return ", ".join(words)


class TargetMissedError(InfeasibleError):
    """Nothing that is offered keeps the target.

    Attributes:
        nearest: The option that misses least; None = the model fits on none.
        would_do: An option with more machines than there are that keeps it; None = none found.
        goal: The target.
    """

    def __init__(
        self, message: str, goal: Goal, nearest: Option | None, would_do: Option | None
    ) -> None:
        super().__init__(message)
        self.goal, self.nearest, self.would_do = goal, nearest, would_do

    def to_json(self) -> dict[str, Any]:
        """Return what is missing as JSON values."""
        return {
            "error": str(self),
            "nearest": None if self.nearest is None else self.nearest.to_json(self.goal),
            "would_do": None if self.would_do is None else self.would_do.to_json(self.goal),
        }


def recommend(
    model: str,
    /,
    *,
    on_progress: OnProgress = silent,
    **options: Any,  # noqa: ANN401 (fields of RecommendRequest)
) -> Recommendation:
    """Recommend machines for a large transformer.

    Args:
        model: A large transformer by name, or a file with its configuration.
        on_progress: Called with each step, in a few words.
        options: The options of ``partita recommend``, such as ``target="500k tokens/s"``.

    Raises:
        InvalidInputError: An option that does not exist, or has no such value.
        TargetMissedError: Nothing that is offered keeps the target; says what is missing.
    """
    return recommend_request(make(RecommendRequest, model=model, **options), on_progress)


def recommend_request(
    request: RecommendRequest, on_progress: OnProgress = silent
) -> Recommendation:
    """Recommend what a request asks for; see :func:`recommend`."""
    named = find_shape(request.model)
    if named is None:
        raise InvalidInputError(
            f"model {request.model!r} is no large transformer"
            f"{suggest(request.model, named_shapes())}; 'partita models' lists them, and a "
            "config.json of Hugging Face is read too"
        )
    goal = _goal(request)
    catalogue = open_catalogue(request.catalogue)
    offers = _offers(request, catalogue)
    pricing = _Pricing(request, named, catalogue)
    with request.working() as workers:
        found = _best_of(pricing, offers, goal, workers, on_progress)
        kept = [each for each in found if goal.keeps(each.tokens_per_s, each.price_per_hour)]
        if not kept:
            raise _missed(pricing, offers, goal, workers, on_progress)
    economical = min(kept, key=lambda x: (x.price_per_million_tokens, -x.tokens_per_s))
    return Recommendation(
        model=named.shape.name,
        goal=goal,
        cheapest=min(kept, key=lambda x: (_money(goal, x), -x.tokens_per_s)),
        fastest=min(kept, key=lambda x: (-x.tokens_per_s, x.price_per_hour)),
        economical=economical,
        front=tuple(pareto(kept, goal)),
        options=tuple(kept),
        command=pricing.command,
        sequence_length=pricing.length,
        remarks=(*_left_out(offers), *pricing.remarks),
    )


def _left_out(offers: Offers) -> Iterator[str]:
    if offers.left_out:
        names = ", ".join(offers.left_out)
        yield f"not tried, since others with the same devices cost no more: {names} (--machines)"


def _goal(request: RecommendRequest) -> Goal:
    """Return the target of a request; ``--within`` may hold the tokens too."""
    within, tokens = request.within, request.tokens
    if within is not None and "--tokens" in within:
        within, _, inside = within.partition("--tokens")
        if tokens is not None:
            raise InvalidInputError("the tokens are given twice, by --within and by --tokens")
        tokens = inside.lstrip("= ")
    goal = Goal(
        tokens_per_s=_positive(parse_tokens, request.target, "target", 0.0),
        tokens=_positive(parse_tokens, tokens, "tokens", math.nan),
        within_s=_positive(parse_duration, within, "within", math.inf),
        budget=_positive(parse_money, request.budget, "budget", math.inf),
    )
    if within is not None and tokens is None and request.budget is None:
        raise InvalidInputError(
            f"--within {within.strip()!r} does not say for how many tokens; add --tokens 2T"
        )
    return goal


def _positive(parse: Any, text: str | None, what: str, default: float) -> float:  # noqa: ANN401 (a parser of units)
    if text is None:
        return default
    value = float(parse(text, what))
    if not 0 < value < math.inf:
        raise InvalidInputError(f"{what} is {text!r}; expected more than 0, and finite")
    return value


def _offers(request: RecommendRequest, catalogue: Catalogue) -> Offers:
    """Return what is on offer."""
    if request.offer is None:
        names = [name.strip() for name in (request.machines or "").split(",") if name.strip()]
        found = catalogue_offers(catalogue, names)
    else:
        if request.machines is not None:
            raise InvalidInputError("--machines names some of the catalogue; --offer has its own")
        try:
            found = read_offers(read_text(request.offer), catalogue)
        except FormatError as exc:
            raise (exc if exc.path else exc.at(request.offer)) from exc
    return replace(found, mix=found.mix or request.mix)


@dataclass(frozen=True, kw_only=True, eq=False)
class _Trial:
    """Machines that may be priced, and what bounds them.

    Attributes:
        parts: Offers and their numbers.
        price_per_hour: Money for an hour.
        most_tokens_per_s: Tokens per second that no layout beats.
    """

    parts: tuple[tuple[Offer, int], ...]
    price_per_hour: float
    most_tokens_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class _Need:
    """Least memory that a model needs per device of some machines.

    Attributes:
        parts: The machines.
        need_bytes: What it needs.
        limit_bytes: What may be used.
    """

    parts: tuple[tuple[Offer, int], ...]
    need_bytes: float
    limit_bytes: float

    @property
    def share(self) -> float:
        """What is needed, as a share of what may be used."""
        return self.need_bytes / self.limit_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class _Priced:
    """What came of pricing machines.

    Attributes:
        option: The best layout over them; None = nothing fits.
        need: What is missing where nothing fits, if it is known.
    """

    option: Option | None = None
    need: _Need | None = None


class _Pricing:
    """Prices of machines for one model: the best layout over each number of them.

    Machines that differ in name and price alone are searched once.
    """

    def __init__(self, request: RecommendRequest, named: NamedShape, catalogue: Catalogue) -> None:
        self.request, self.catalogue, self.named = request, catalogue, named
        self.shape = named.shape
        framework_of(request)  # one that is not there is refused before anything is searched
        self.length = request.sequence_length or named.sequence_length
        self.remarks: list[str] = []
        self.least_need: _Need | None = None
        self._machines: dict[str, Machine] = {}
        self._layouts: dict[tuple[int, int, str], tuple[Layout, ...]] = {}
        self._found: dict[tuple[object, ...], _Priced] = {}

    @property
    def command(self) -> tuple[str, ...]:
        """The command that plans, but for cluster and batch."""
        words = ["partita", "plan", self.request.model, "--sequence-length", str(self.length)]
        for name in ("precision", "optimizer", "framework", "lora", "reserve", "catalogue"):
            value = getattr(self.request, name)
            words += [] if value is None else [f"--{name}", f"{value}"]
        return tuple(words)

    def usable(self, offers: Sequence[Offer]) -> list[Offer]:
        """Return the offers whose devices compute in the precision; notes the others.

        Raises:
            InvalidInputError: None of them does.
        """
        kept: list[Offer] = []
        left_out: list[Offer] = []
        for offer in offers:
            device = self._cluster(offer.cluster(1)).devices[0]
            usual = usual_precision(self._cluster(offer.cluster(1)))
            compute = parse_precision(self.request.precision or usual).compute
            (kept if compute in device.peak_flop_per_s else left_out).append(offer)
        if left_out:
            names = ", ".join(offer.name for offer in left_out)
            precision = self.request.precision
            if not kept:
                raise InvalidInputError(f"nothing on offer computes in {precision}: {names}")
            self.remarks.append(f"left out, since they do not compute in {precision}: {names}")
        return kept

    def trial(self, *parts: tuple[Offer, int]) -> _Trial:
        """Return machines with what bounds them."""
        machines = [(self._machine(offer), offer.devices * n) for offer, n in parts]
        task = self._task(self._cluster(_shorthand([(offer, 1) for offer, _ in parts])))
        # In the closed form the head may take the place of a layer that the last stage lacks.
        room = 1 + 2 / self.shape.layers
        rate = room * task.tokens / least_s(task, machines)
        return _Trial(
            parts=parts,
            price_per_hour=sum(offer.price_per_hour * count for offer, count in parts),
            most_tokens_per_s=rate,
        )

    def best(self, trial: _Trial) -> Option | None:
        """Return the best layout over machines; None where nothing fits, which is noted."""
        priced = self.price(trial)
        self.note(priced.need)
        return priced.option

    def note(self, need: _Need | None) -> None:
        """Take note of what is missing where nothing fits; the least of all counts."""
        least = self.least_need
        if need is not None and (least is None or need.share < least.share):
            self.least_need = need

    def price(self, trial: _Trial) -> _Priced:
        """Return the best layout over machines, or what is missing."""
        kinds = tuple((self._kind(offer), count) for offer, count in trial.parts)
        if kinds not in self._found:
            whole = self._regular if len(trial.parts) == 1 else self._mixed
            self._found[kinds] = whole(trial)
        found = self._found[kinds]
        if found.option is None:
            need = None if found.need is None else replace(found.need, parts=trial.parts)
            return _Priced(need=need)
        option = replace(
            found.option,
            machines=tuple((offer.name, count) for offer, count in trial.parts),
            cluster=_shorthand(trial.parts),
            price_per_hour=trial.price_per_hour,
        )
        return _Priced(option=option)

    def _regular(self, trial: _Trial) -> _Priced:
        """Return the best layout over equal devices, or what is missing."""
        cluster = self._cluster(_shorthand(trial.parts))
        task = self._task(cluster)
        layouts = self._layouts_of(task)
        if not layouts:  # the number of devices divides neither batch nor layers
            return _Priced()
        priced = search(task, layouts)
        row = int(np.argmin(np.where(priced.fits, priced.step_s, np.inf)))
        if not priced.fits[row]:
            need = float(priced.total_bytes.min())
            return _Priced(
                need=_Need(parts=trial.parts, need_bytes=need, limit_bytes=task.limit_bytes)
            )
        layout, step_s = priced.layouts[row], float(priced.step_s[row])
        held = float(priced.total_bytes[row])
        return _Priced(option=self._option(cluster, task, layout, step_s, held=held))

    def _mixed(self, trial: _Trial) -> _Priced:
        """Return the best layout that uses devices of two types; the best few are played."""
        cluster = self._cluster(_shorthand(trial.parts))
        task = self._task(cluster)
        share = task.limit_bytes / cluster.devices[0].memory_bytes
        groups = groups_of(cluster, share, compute=parse_precision(task.precision).compute)
        if len(groups) < 2:
            return _Priced()
        found = mixed_candidates(task, cluster, groups)[:PLAYED]
        if not found:
            return _Priced()
        step_s, lanes = min(
            ((played_s(candidate.lanes), candidate.lanes) for candidate in found),
            key=lambda row: row[0],
        )
        way = "side by side" if len(lanes) > 1 else "in a row"
        return _Priced(option=self._option(cluster, task, lanes[0].layout, step_s, way=way))

    def _layouts_of(self, task: Task) -> tuple[Layout, ...]:
        """Return the layouts of a task, which hosts with as many devices have in common."""
        key = (task.devices, task.machine.fabric.devices_per_host, task.precision)
        if key not in self._layouts:
            if sum(map(len, self._layouts.values())) > MOST_LAYOUTS:
                self._layouts.clear()
            self._layouts[key] = tuple(regular_layouts(task))
        return self._layouts[key]

    def _option(
        self,
        cluster: Cluster,
        task: Task,
        layout: Layout,
        step_s: float,
        *,
        way: str = "",
        held: float = math.nan,
    ) -> Option:
        compute = parse_precision(task.precision).compute
        types = tuple(dict.fromkeys(device.type for device in cluster.devices))
        peak = sum(device.peak_flop_per_s.get(compute, math.nan) for device in cluster.devices)
        return Option(
            machines=(),
            cluster="",
            devices=len(cluster),
            device_types=types,
            layout=layout,
            way=way,
            batch=task.batch,
            step_s=step_s,
            tokens_per_s=task.tokens / step_s,
            mfu=task.model_flops / (peak * step_s),
            memory_bytes=held,
            limit_bytes=task.limit_bytes,
            price_per_hour=math.nan,
            accuracy=accuracy_of(
                layout,
                types,
                self.length,
                experts=bool(self.shape.experts),
                compute=compute,
                frozen=task.frozen,
            ),
        )

    def _task(self, cluster: Cluster) -> Task:
        batch, share = self._batch(len(cluster)), memory_share(self.request)
        return task_of(self.request, self.named, cluster, batch=batch, memory_share=share)

    def _batch(self, devices: int) -> int:
        if self.request.batch_size is not None:
            return self.request.batch_size
        tokens = float(DEFAULT_TOKENS)
        if self.request.batch_tokens is not None:
            tokens = _positive(parse_tokens, self.request.batch_tokens, "batch tokens", 0.0)
        return near_batch(max(1, round(tokens / self.length)), devices)

    def _machine(self, offer: Offer) -> Machine:
        if offer.machine not in self._machines:
            self._machines[offer.machine] = self._task(self._cluster(offer.machine)).machine
        return self._machines[offer.machine]

    def _kind(self, offer: Offer) -> tuple[object, ...]:
        """Return what the speed of a machine depends on."""
        host = self.catalogue.hosts.get(offer.machine)
        if host is None:
            return (offer.machine,)
        return (host.device, host.num_devices, host.num_hosts, host.network, host.num_ports)

    def _cluster(self, shorthand: str) -> Cluster:
        return read_shorthand(shorthand, self.catalogue)


def _shorthand(parts: Sequence[tuple[Offer, int]]) -> str:
    return "+".join(offer.cluster(count) for offer, count in parts)


def near_batch(batch: int, devices: int) -> int:
    """Return a batch near another one that a number of devices divides well.

    The odd part of the number of devices divides it, with as many powers of two as a sixteenth
    more or less allows; batches of fewer sequences stay as they are.

    >>> near_batch(512, 64), near_batch(512, 24), near_batch(512, 56)
    (512, 480, 504)
    """
    odd = devices // (devices & -devices)
    if odd == 1:
        return batch
    for power in range(batch.bit_length(), -1, -1):
        unit = odd << power
        near = max(1, round(batch / unit)) * unit
        if abs(near - batch) <= BATCH_SHARE * batch:
            return near
    return batch


def _trials(pricing: _Pricing, offers: Offers, request: RecommendRequest) -> Iterator[_Trial]:
    """Yield all machines that are to be considered."""
    usable = pricing.usable(offers.offers)
    for offer in usable:
        for count in offer.counts(request.most_devices):
            yield pricing.trial((offer, count))
    if offers.mix:
        for parts in mixtures(usable, request.most_devices):
            yield pricing.trial(*parts)


def _best_of(
    pricing: _Pricing,
    offers: Offers,
    goal: Goal,
    workers: Workers | None,
    on_progress: OnProgress,
) -> list[Option]:
    """Return the options that may be the best in anything.

    Trials go by their least money per token, so that what is beaten by others comes after them.
    Workers price some of them before it is known whether they are beaten; what comes of those that
    are is dropped, so that the options are the same.
    """
    request = pricing.request
    trials = sorted(
        _trials(pricing, offers, request),
        key=lambda trial: (
            len(trial.parts),
            trial.price_per_hour / trial.most_tokens_per_s,
            -trial.most_tokens_per_s,
        ),
    )
    if not trials:
        least = min(offer.devices for offer in offers.offers)
        raise InvalidInputError(
            f"--most-devices {request.most_devices} is less than the {least} of one machine"
        )
    found: list[Option] = []

    def is_beaten(trial: _Trial) -> bool:
        rate, price = trial.most_tokens_per_s, trial.price_per_hour
        money = goal.money(rate, price)
        return any(x.tokens_per_s >= rate and _money(goal, x) <= money for x in found)

    asked = deque(t for t in trials if goal.keeps(t.most_tokens_per_s, t.price_per_hour))
    while asked:
        ahead = 1 if workers is None else 2 * workers.size
        some: list[_Trial] = []
        while asked and len(some) < ahead:
            if not is_beaten(trial := asked.popleft()):
                some.append(trial)
        priced = (
            map(pricing.price, some)
            if workers is None
            else workers.map(partial(_price, request), some)
        )
        for trial, one in zip(some, priced, strict=True):
            if is_beaten(trial):
                continue
            on_progress(_shorthand(trial.parts))
            pricing.note(one.need)
            if one.option is not None:
                found.append(one.option)
    return found


def _price(request: RecommendRequest, trial: _Trial) -> _Priced:
    """Price machines in a worker, which keeps what it has found so far."""
    return _pricing_of(request).price(trial)


@cache
def _pricing_of(request: RecommendRequest) -> _Pricing:
    named = find_shape(request.model)
    assert named is not None  # seen where the request was made
    return _Pricing(request, named, open_catalogue(request.catalogue))


def _money(goal: Goal, option: Option) -> float:
    return goal.money(option.tokens_per_s, option.price_per_hour)


def pareto(options: Sequence[Option], goal: Goal) -> Iterator[Option]:
    """Yield the options that none beats in speed and money, the slowest first.

    Of options that are equal in both the one with fewer devices is taken, then the first.
    """
    order = sorted(
        options, key=lambda option: (-option.tokens_per_s, _money(goal, option), option.devices)
    )
    kept: list[Option] = []
    for option in order:
        if not kept or _money(goal, option) < _money(goal, kept[-1]):
            kept.append(option)
    yield from reversed(kept)


def _missed(
    pricing: _Pricing,
    offers: Offers,
    goal: Goal,
    workers: Workers | None,
    on_progress: OnProgress,
) -> TargetMissedError:
    """Return the error of a target that nothing keeps: how far the nearest is, what would do."""
    everything = replace(goal, tokens_per_s=0.0, within_s=math.inf, budget=math.inf)
    found = _best_of(pricing, offers, everything, workers, on_progress)
    by_name = {offer.name: offer for offer in offers.offers}
    if not found:
        return _does_not_fit(pricing, goal)

    def shortfall(option: Option) -> float:
        slow = goal.least_tokens_per_s / option.tokens_per_s
        return max(slow, _money(goal, option) / goal.most_money)

    nearest = min(found, key=shortfall)
    rate, words = nearest.tokens_per_s, []
    if rate < goal.least_tokens_per_s:
        words.append(
            f"{format_count(rate)} tokens/s of {format_count(goal.least_tokens_per_s)} "
            f"({100 * rate / goal.least_tokens_per_s:.0f} %)"
        )
    if _money(goal, nearest) > goal.most_money:
        needed = goal.budget * _money(goal, nearest) / goal.most_money
        words.append(f"{format_money(needed)} instead of {format_money(goal.budget)}")
    message = (
        f"nothing on offer keeps {goal.words()}: the nearest is {nearest.name} with "
        f"{' and '.join(words)}"
    )
    (name, count), *more = nearest.machines
    would_do = None if more else _grown(pricing, by_name[name], count, goal)
    if would_do is not None:
        message += (
            f"; {would_do.name} would do ({format_count(would_do.tokens_per_s)} tokens/s, "
            f"{format_money(would_do.price_per_hour)}/h)"
        )
    return TargetMissedError(message, goal, nearest, would_do)


def _grown(pricing: _Pricing, offer: Offer, count: int, goal: Goal) -> Option | None:
    """Return the first option that keeps a target with more machines than there are."""
    more = count
    while (more := more + max(1, more // 4)) <= MOST_TIMES * count:
        if more * offer.devices > MAX_DEVICES:
            return None
        trial = pricing.trial((offer, more))
        if not goal.keeps(trial.most_tokens_per_s, trial.price_per_hour):
            continue
        option = pricing.best(trial)
        if option is not None and goal.keeps(option.tokens_per_s, option.price_per_hour):
            return option
    return None


def _does_not_fit(pricing: _Pricing, goal: Goal) -> TargetMissedError:
    need, name = pricing.least_need, pricing.shape.name
    if need is None:
        return TargetMissedError(
            f"no layout of {name} divides over what is on offer", goal, None, None
        )
    (offer, count), *_ = need.parts
    would_do = _grown(pricing, offer, count, Goal())
    message = (
        f"{name} fits on nothing on offer: the nearest is {count} x {offer.name} with "
        f"{format_bytes(need.need_bytes)} per device, of which {format_bytes(need.limit_bytes)} "
        "may be used"
    )
    if would_do is not None:
        message += f"; {would_do.name} would do"
    return TargetMissedError(message, goal, None, would_do)
