"""Plans of large transformers: every degree searched in closed form, the best played exactly.

A model that is named by its shape (``catalogue/shapes.yaml``, or a Hugging Face configuration) is
never built: its blocks are equal, so that regular layouts over equal devices, and over types of
devices in a row or side by side, can all be priced. The answer is a plan like any other, with what
takes its time and its memory, the next best of other structure, and what the fixed degrees cost.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from partita.core.cluster import Cluster, Device
from partita.core.codec import encode
from partita.core.graph import DeviceKind
from partita.core.json_values import number_or_none
from partita.core.plan import Plan
from partita.core.precision import PRECISIONS, parse_precision
from partita.core.problem import Metric, Objective, Problem
from partita.core.solution import Solution
from partita.cost.links import fabric_of
from partita.cost.power import joules_of
from partita.cost.tables import GPU_RESERVE, SHARD_LEVEL
from partita.errors import InfeasibleError, InvalidInputError
from partita.flows.fields import (
    ChangeFields,
    ClusterFields,
    DegreeFields,
    MoveFields,
    SourceFields,
    StepFields,
)
from partita.flows.moves import DEFAULT_SLOWDOWN as MOVES_SLOWDOWN
from partita.flows.moves import (
    MoveCandidate,
    Offer,
    OldPlan,
    Replacement,
    read_old_plan,
    relabelled,
    weigh,
)
from partita.flows.problem import changed_cluster, read_cluster
from partita.flows.results import Result
from partita.names import suggest
from partita.requests import OnProgress, silent
from partita.transformer.kernels import Accuracy, accuracy_of, machine_of
from partita.transformer.layout import FRAMEWORKS, Layout
from partita.transformer.mixed import (
    Candidate,
    groups_of,
    mixed_candidates,
    place_memory,
    refined,
)
from partita.transformer.named import NamedShape
from partita.transformer.pipelines import (
    Pipeline,
    Place,
    as_number,
    graph_of,
    plan_of,
    played_s,
    regular_pipeline,
)
from partita.transformer.price import Steps
from partita.transformer.search import Priced, Task, least_s, price_all, search
from partita.transformer.shape import Shape
from partita.units import parse_count

DEFAULT_TOKENS = 4_194_304
"""Tokens of a step where nobody says how many."""
PLAYED = 24
"""Layouts that are played exactly."""
WEIGHED = 8
"""Layouts that are weighed against the state that they move."""
FAR = 1.25
"""How far behind the best one that was played a closed form may be for it to be played, too."""
REFINED = 3
"""Layouts over several types whose layers are moved while that makes a step shorter."""
SHOWN = 5
"""Layouts of different structure that are shown."""
DEGREES = ("tp", "pp", "vp", "dp", "cp", "ep", "zero", "shard_group")
MOST_TIMES = 64
"""How many times as many devices are tried where nothing fits."""
SECONDS_PER_DAY = 86_400.0


@dataclass(frozen=True, kw_only=True)
class Choice:
    """One way to train, and what it costs.

    Attributes:
        lanes: The pipelines; several where types of devices run side by side.
        step_s: Seconds of a step, played exactly.
        parts: Seconds of a step by what takes them; they add up to it.
        memory: Bytes per device by what takes them, of the fullest place.
        device_type: Type of the devices of that place.
    """

    lanes: tuple[Pipeline, ...]
    step_s: float
    parts: Mapping[str, float]
    memory: Mapping[str, float]
    device_type: str

    @property
    def layout(self) -> Layout:
        """The layout of the first place."""
        return self.lanes[0].layout

    @property
    def title(self) -> str:
        """The degrees in words; of several types one after the other."""
        words = [_layout_words(self.lanes[0])]
        if len(self.lanes) > 1:
            shares = ":".join(str(lane.microbatches) for lane in self.lanes)
            types = ", ".join(lane.places[0].device_type for lane in self.lanes)
            words.append(f"microbatches {shares} on {types}")
        return "; ".join(words)

    @property
    def total_bytes(self) -> float:
        """Bytes per device."""
        return sum(self.memory.values())

    def to_json(self) -> dict[str, Any]:
        """Return the choice as JSON values."""
        return {
            "title": self.title,
            "layout": _layout_json(self.layout),
            "stages": [
                {
                    "device_type": place.device_type,
                    "tp": place.layout.tp,
                    "replicas": len(place.devices),
                    "layers": [
                        n
                        for chunk, n in enumerate(lane.layers)
                        if chunk % len(lane.places) == number
                    ],
                }
                for lane in self.lanes
                for number, place in enumerate(lane.places)
            ],
            "step_s": self.step_s,
            "parts_s": dict(self.parts),
            "memory_bytes": dict(self.memory),
        }


def _layout_words(lane: Pipeline) -> str:
    layout = lane.layout
    kinds: dict[str, list[int]] = {}
    for place in lane.places:
        kinds.setdefault(f"{place.device_type} tp {place.layout.tp}", []).append(1)
    text = str(layout)
    if len(kinds) > 1:
        row = ", ".join(f"{len(found)} x {kind}" for kind, found in kinds.items())
        text = text.replace(f"tp {layout.tp}, ", "", 1) + f" [{row}; layers {_ranges(lane.layers)}]"
    return text


def _ranges(layers: Sequence[int]) -> str:
    words: list[str] = []
    for count in layers:
        if words and words[-1].split("x")[0] == str(count):
            times = int(words[-1].split("x")[1]) if "x" in words[-1] else 1
            words[-1] = f"{count}x{times + 1}"
        else:
            words.append(str(count))
    return " ".join(words)


def _layout_json(layout: Layout) -> dict[str, Any]:
    named = (*DEGREES, "sp", "microbatch", "expert_overlap", "precision", "framework")
    return {**{name: getattr(layout, name) for name in named}, "recompute": list(layout.recompute)}


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class LargePlanResult(Result):
    """A plan of a large transformer.

    Attributes:
        task: What is trained.
        cluster: The devices.
        best: The plan that was chosen.
        others: The next best of different structure.
        free: The best where no degree is fixed; None where none is.
        solution: The plan as a document.
        tokens: Tokens of the whole training; NaN = not given.
        replacement: State that moves, where the plan takes the place of another.
        remarks: What to know of the request.
    """

    task: Task
    cluster: Cluster
    best: Choice
    others: tuple[Choice, ...]
    free: Choice | None
    solution: Solution
    tokens: float = math.nan
    replacement: Replacement | None = None
    remarks: tuple[str, ...] = ()

    @property
    def plan(self) -> Plan:
        """The plan alone."""
        return self.solution.plan

    @property
    def accuracy(self) -> Accuracy | None:
        """How far estimates of this kind were off published runs; None = none is of it."""
        return accuracy_of(
            self.best.layout,
            self.best.device_type,
            self.task.sequence_length,
            experts=bool(self.task.shape.experts),
            float8=self.task.is_float8,
        )

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second of all devices."""
        return self.task.tokens / self.best.step_s

    @property
    def mfu(self) -> float:
        """Share of the devices' peak that the model's own arithmetic uses."""
        flops = self.task.shape.model_flops(self.task.tokens, self.task.sequence_length)
        return flops / (self._peak * self.best.step_s)

    @property
    def hfu(self) -> float:
        """The same with what is computed again."""
        again = self.best.parts["recompute_s"] / max(self.best.parts["compute_s"], 1e-30)
        share = 1.0 / max(1.0 - again, 0.5)
        return self.mfu * share

    @property
    def _peak(self) -> float:
        name = parse_precision(self.task.precision).compute
        used = {name for lane in self.best.lanes for p in lane.places for name in [p.device_type]}
        return sum(_peak_of(device, name) for device in self.cluster.devices if device.type in used)

    @property
    def price_per_hour(self) -> float:
        """Money for an hour of the devices that are used; NaN = not known."""
        used = set(self.plan.devices)
        return sum(d.price_per_hour for d in self.cluster.devices if d.name in used)

    @cached_property
    def joules_per_token(self) -> float:
        """Modelled energy of the devices that are used, highest clocks; NaN = powers not known."""
        step_s, joules = self.best.step_s, 0.0
        for lane in self.best.lanes:
            # Every stage of a lane waits as long as its first one.
            busy_s = _parts(lane, step_s)["compute_s"]
            places = [index for place in lane.places for group in place.devices for index in group]
            used = [self.cluster.devices[index] for index in dict.fromkeys(places)]
            if not all(device.max_w for device in used):
                return math.nan
            joules += joules_of(used, busy_s, step_s)
        return joules / self.task.tokens

    @property
    def training_s(self) -> float:
        """Seconds of the whole training; NaN without a number of tokens."""
        return self.tokens / self.tokens_per_s

    def to_json(self) -> dict[str, Any]:
        """Return everything as JSON values, the solution as its document."""
        task = self.task
        return {
            "model": task.shape.name,
            "parameters": task.shape.params,
            "active_parameters": task.shape.active_params,
            "cluster": self.cluster.name,
            "devices": len(self.plan.devices),
            "sequence_length": task.sequence_length,
            "batch": task.batch,
            "precision": task.precision,
            "framework": task.framework,
            "optimizer": task.optimizer,
            **self.best.to_json(),
            "limit_bytes": task.limit_bytes,
            "tokens_per_s": self.tokens_per_s,
            "tokens_per_s_per_device": self.tokens_per_s / len(self.plan.devices),
            "mfu": self.mfu,
            "hfu": self.hfu,
            "price_per_hour": number_or_none(self.price_per_hour),
            "price_per_step": number_or_none(self.price_per_hour * self.best.step_s / 3600),
            "price_per_million_tokens": number_or_none(
                self.price_per_hour / 3600 / self.tokens_per_s * 1e6
            ),
            "joules_per_token": number_or_none(self.joules_per_token),
            "training_s": number_or_none(self.training_s),
            "training_joules": number_or_none(self.joules_per_token * self.tokens),
            "training_price": number_or_none(self.price_per_hour * self.training_s / 3600),
            "gap": number_or_none(self.solution.gap),
            "alternatives": [other.to_json() for other in self.others],
            "free": None if self.free is None else self.free.to_json(),
            "accuracy": None if self.accuracy is None else self.accuracy._asdict(),
            "remarks": list(self.remarks),
            **({} if self.replacement is None else {"moves": self.replacement.to_json()}),
            "solution": encode(self.solution),
        }

    def lines(self) -> list[str]:
        """Return the plan in a few lines."""
        return [
            f"{self.task.shape.name} on {self.cluster.name}: {self.best.title}",
            f"{self.best.step_s:.4g} s per step, {self.tokens_per_s:,.0f} tokens/s, "
            f"MFU {self.mfu:.1%}",
            *([] if self.replacement is None else [self.replacement.line]),
        ]

    def rows(self) -> list[Mapping[str, object]]:
        """Return the choices for a notebook."""
        return [
            {"layout": choice.title, "step_s": choice.step_s, "bytes": choice.total_bytes}
            for choice in (self.best, *self.others)
        ]


@dataclass(frozen=True, kw_only=True)
class LargeFields(ClusterFields, ChangeFields, StepFields, DegreeFields, SourceFields, MoveFields):
    """All that planning a large transformer reads of a request."""


def plan_large(
    request: LargeFields, named: NamedShape, on_progress: OnProgress = silent
) -> LargePlanResult:
    """Plan a transformer that is named by its shape.

    Raises:
        InvalidInputError: Options that cannot be, or a cluster that cannot train it.
        InfeasibleError: Nothing fits; says what would make it fit.
    """
    cluster = changed_cluster(None, read_cluster(request)[0], request)
    task, remarks = _task(request, named, cluster)
    on_progress(f"{task.shape.name} over {len(cluster)} devices")
    found = _choices(task, cluster)
    if not found:
        raise InfeasibleError(_why_nothing_fits(task, cluster))
    free = _choices(replace(task, fixed={}), cluster)[:1] if task.fixed else []
    best, solution, replacement = found[0], _solution(task, cluster, found[0]), None
    if request.from_plan is not None:
        on_progress("counting the state that moves")
        best, solution, replacement = _replaced(request, task, cluster, found)
    others = tuple(choice for choice in found if choice is not best)[: SHOWN - 1]
    return LargePlanResult(
        task=task,
        cluster=cluster,
        best=best,
        others=others,
        free=free[0] if free else None,
        solution=solution,
        tokens=math.nan if request.tokens is None else parse_count(request.tokens, "tokens"),
        replacement=replacement,
        remarks=remarks,
    )


def _replaced(
    request: LargeFields, task: Task, cluster: Cluster, found: list[Choice]
) -> tuple[Choice, Solution, Replacement]:
    """Return the choice that takes the place of an old plan, as a solution, and what moves."""
    first = _solution(task, cluster, found[0])
    assert request.from_plan is not None
    old = read_old_plan(request.from_plan, first.problem)
    minimises = request.minimise_moves
    offers: list[Offer] = []
    choice_of: dict[int, Choice] = {}
    for choice in [*found[:WEIGHED], *_as_before(old, task, cluster)] if minimises else found[:1]:
        made = _solution(task, cluster, choice)
        plans = [made.plan]
        # Hosts are alike for the price of a step where one network joins all of them.
        if minimises and len(cluster.levels) <= 2:
            plans += relabelled(old, made.problem, made.plan, whole_hosts=True)
        for plan in plans:
            choice_of[id(plan)] = choice
            offers.append(Offer(plan, choice.step_s, old.moves(made.problem, plan)))

    def candidate(offer: Offer, _: Offer) -> MoveCandidate:
        choice = choice_of[id(offer.plan)]
        return MoveCandidate(
            plan=offer.plan,
            words=choice.title,
            value=offer.value,
            step_s=choice.step_s,
            moves=offer.moves,
        )

    slowdown = MOVES_SLOWDOWN if request.slowdown is None else request.slowdown
    replacement = weigh(old, offers, slowdown if minimises else 0.0, candidate)
    best, plan = choice_of[id(replacement.chosen.plan)], replacement.chosen.plan
    if not minimises:
        replacement = replace(replacement, candidates=())
    return best, replace(_solution(task, cluster, best), plan=plan), replacement


def _as_before(old: OldPlan, task: Task, cluster: Cluster) -> list[Choice]:
    """Return choices with the degrees of an old plan, as many replicas as there are devices for."""
    stage = old.plan.stages[0]
    degrees: dict[str, object] = {
        "tp": stage.tp,
        "pp": len({part.devices for part in old.plan.stages}),
        "cp": stage.cp,
        "ep": stage.ep,
        "zero": SHARD_LEVEL[stage.shard],
    }
    try:
        return _choices(replace(task, fixed={**degrees, **task.fixed}), cluster)[:1]
    except (InvalidInputError, InfeasibleError):
        return []


def _task(
    request: LargeFields, named: NamedShape, cluster: Cluster
) -> tuple[Task, tuple[str, ...]]:
    """Return what is trained, with the usual where nothing is said, and remarks on that."""
    if any(device.kind is DeviceKind.CPU for device in cluster.devices):
        raise InvalidInputError(
            f"{named.shape.name} is planned for accelerators; cluster {cluster.name!r} has CPUs"
        )
    length = request.sequence_length or named.sequence_length
    precision = request.precision or _usual_precision(cluster)
    _check_rates(cluster, precision)
    batch, remarks = _batch(request, length, len(cluster))
    framework = request.framework or "megatron"
    # Context and communicators are counted one by one (``Memory.fixed``): the reserve is for what
    # an allocator loses between allocations, a tenth of what it hands out in published figures.
    if framework not in FRAMEWORKS:
        raise InvalidInputError(
            f"there is no framework {framework!r}{suggest(framework, list(FRAMEWORKS))}"
        )
    reserve = GPU_RESERVE if request.reserve is None else request.reserve
    factor = 1.0 - reserve if request.memory_factor is None else request.memory_factor
    first = cluster.devices[0]
    shape, frozen = named.shape, 0.0
    if request.lora is not None:
        frozen = 1.0 - adapter_share(shape, request.lora)
    task = Task(
        shape=shape,
        devices=len(cluster),
        machine=machine_of(first, fabric_of(cluster)),
        batch=batch,
        sequence_length=length,
        precision=precision,
        optimizer=request.optimizer or "adam",
        frozen=frozen,
        framework=framework,
        limit_bytes=first.memory_bytes * factor,
        fixed=_fixed(request),
    )
    return task, remarks


def adapter_share(shape: Shape, rank: int) -> float:
    """Return the share of parameters that adapters on all matrices of a block add."""
    width = shape.hidden
    pairs = 4 * 2 * width + shape.matrices * (width + (shape.ffn or shape.expert_ffn))
    return shape.layers * rank * pairs / shape.params


def _usual_precision(cluster: Cluster) -> str:
    """Return bf16 where all devices have it, else fp16."""
    has = all("bfloat16" in device.peak_flop_per_s for device in cluster.devices)
    return "bf16" if has else "fp16"


def _check_rates(cluster: Cluster, precision: str) -> None:
    compute = parse_precision(precision).compute
    for device in cluster.devices:
        if compute not in device.peak_flop_per_s:
            able = [
                name
                for name, policy in PRECISIONS.items()
                if all(policy.compute in d.peak_flop_per_s for d in cluster.devices)
            ]
            raise InvalidInputError(
                f"device type {device.type!r} does not compute in {compute} (--precision "
                f"{precision}); use --precision {' or '.join(able)}, or leave it out"
            )


def _batch(request: LargeFields, length: int, devices: int) -> tuple[int, tuple[str, ...]]:
    """Return sequences per step, and a remark where nobody said how many."""
    if request.batch_size is not None:
        return request.batch_size, ()
    if request.microbatches is not None:
        return request.microbatches * (request.microbatch_size or 1), ()
    # A power of two keeps all degrees possible, and at least two sequences go to each device.
    batch = 2 ** max(0, round(math.log2(max(DEFAULT_TOKENS / length, 1))))
    while batch < 2 * devices and batch * length < 16 * DEFAULT_TOKENS:
        batch *= 2
    return batch, (f"a step has {batch} sequences of {length} tokens unless --batch-size says",)


def _fixed(request: LargeFields) -> dict[str, object]:
    """Return the degrees that a request fixes."""
    fixed: dict[str, object] = {}
    for name in DEGREES:
        text = getattr(request, name)
        if text is None or text == "auto":
            continue
        least = 0 if name in ("zero", "shard_group") else 1
        if not str(text).isdigit() or int(text) < least:
            raise InvalidInputError(
                f"--{name.replace('_', '-')} is {text!r}; expected a number of {least} or more, "
                "or auto"
            )
        fixed[name] = int(text)
    if request.microbatch_size is not None:
        fixed["microbatch"] = request.microbatch_size
    if request.recompute is not None:
        fixed["recompute"] = () if request.recompute == "none" else (request.recompute,)
    return fixed


def _choices(task: Task, cluster: Cluster) -> list[Choice]:
    """Return the best choices of different structure, the quickest first; empty = nothing fits."""
    groups = groups_of(cluster, task.limit_bytes / cluster.devices[0].memory_bytes)
    found: list[Candidate] = []
    refused: list[InvalidInputError] = []
    for group in groups:
        alone = replace(
            task, devices=len(group), machine=group.machine, limit_bytes=group.limit_bytes
        )
        try:
            priced = search(alone)
        except InvalidInputError as exc:
            refused.append(exc)
            continue
        for row in np.flatnonzero(priced.fits)[:PLAYED].tolist():
            lane = regular_pipeline(alone, priced.layouts[row], cluster, group.devices)
            found.append(Candidate(lanes=(lane,), step_s=float(priced.step_s[row])))
    if len(groups) > 1:
        found += mixed_candidates(task, cluster, groups)[:PLAYED]
    # Degrees that are fixed may be possible on all types together and on none alone.
    if not found and task.fixed and len(refused) == len(groups):
        raise refused[0]
    played: list[tuple[float, tuple[Pipeline, ...]]] = []
    for candidate in sorted(found, key=lambda candidate: candidate.step_s):
        # The closed form is near what is played: what is far behind need not be played.
        if len(played) >= SHOWN and candidate.step_s > FAR * min(played)[0]:
            break
        played.append((played_s(candidate.lanes), candidate.lanes))
    played.sort(key=lambda pair: pair[0])
    if len(groups) > 1:
        played[:REFINED] = [refined(*pair) for pair in played[:REFINED]]
        played.sort(key=lambda pair: pair[0])
    seen: set[tuple[object, ...]] = set()
    kept: list[Choice] = []
    for step_s, lanes in played:
        layout = lanes[0].layout
        places = tuple((p.device_type, p.layout.tp) for lane in lanes for p in lane.places)
        key = (layout.tp, layout.pp, layout.cp, layout.ep, layout.zero, places)
        if key not in seen and len(kept) < WEIGHED:
            seen.add(key)
            kept.append(_choice(lanes, step_s))
    return kept


def _choice(lanes: tuple[Pipeline, ...], step_s: float) -> Choice:
    """Return lanes whose step was played with what takes time and memory."""
    slowest = max(lanes, key=lambda lane: lane.microbatches * _place_weight(lane))
    parts = _parts(slowest, step_s)
    memory, place = max(
        (
            (place_memory(lane, number), place)
            for lane in lanes
            for number, place in _unlike_places(lane)
        ),
        key=lambda found: as_number(found[0].total) / found[1].machine.memory_bytes,
    )
    return Choice(
        lanes=lanes,
        step_s=step_s,
        parts=parts,
        memory={name: as_number(value) for name, value in memory._asdict().items()},
        device_type=place.device_type,
    )


def _unlike_places(lane: Pipeline) -> Iterator[tuple[int, Place]]:
    """Yield the places of a lane that hold something else than those before."""
    depth = len(lane.places)
    if lane.joined is not None or lane.more:
        yield from enumerate(lane.places)
        return
    held = [sum(lane.layers[number::depth]) for number in range(depth)]
    number = held.index(max(held))
    yield number, lane.places[number]


def _place_weight(lane: Pipeline) -> float:
    return 1.0 / lane.places[0].machine.peak_flop_per_s


def _parts(lane: Pipeline, step_s: float) -> dict[str, float]:
    """Return the seconds of a step by what takes them; waiting is what is left."""
    place = lane.places[0]
    alone = replace(lane.task, machine=place.machine)
    replicas = lane.task.batch // (lane.microbatches * place.layout.microbatch)
    layout = replace(place.layout, dp=max(1, replicas))
    priced: Steps = price_all(alone, [layout]).steps
    parts = {name: as_number(value) for name, value in priced._asdict().items()}
    busy = sum(v for k, v in parts.items() if k not in ("bubble_s", "recompute_s", "pipeline_s"))
    # What the exact play takes beyond the busy time is waiting for other stages.
    waiting = max(step_s - busy, 0.0)
    if busy > step_s:
        scale = step_s / busy
        parts = {name: value * scale for name, value in parts.items()}
    sends = min(parts["pipeline_s"], waiting)
    return {**parts, "pipeline_s": sends, "bubble_s": max(waiting - sends, 0.0)}


def _solution(task: Task, cluster: Cluster, best: Choice) -> Solution:
    """Return the plan as a document that every other command reads."""
    graph = graph_of(best.lanes)
    plan = plan_of(best.lanes, graph, cluster)
    policy = parse_precision(task.precision)
    objective = replace(
        Objective().with_precision(policy, task.optimizer),
        microbatches=plan.num_microbatches,
        microbatch_size=best.layout.microbatch,
        memory_factor=min(1.0, task.limit_bytes / cluster.devices[0].memory_bytes),
    )
    problem = Problem(graph=graph, cluster=cluster, objective=objective)
    groups = groups_of(cluster, 1.0)
    return Solution(
        problem=problem,
        plan=plan,
        metric=Metric.THROUGHPUT,
        value=best.step_s,
        unit="s",
        lower_bound=least_s(task, [(group.machine, len(group)) for group in groups]),
        planner="auto",
        options={"framework": task.framework, "precision": task.precision},
        stats={"layout": _layout_json(best.layout), "parts_s": dict(best.parts)},
    )


def _peak_of(device: Device, compute: str) -> float:
    return device.peak_flop_per_s.get(compute) or max(device.peak_flop_per_s.values())


def _why_nothing_fits(task: Task, cluster: Cluster) -> str:
    """Return how much is missing, and what would do; devices that differ stand for their mean."""
    mean = sum(device.memory_bytes for device in cluster.devices) / len(cluster)
    task = replace(task, limit_bytes=task.limit_bytes * mean / cluster.devices[0].memory_bytes)
    on_average = " on average" if len(set(cluster.memory_bytes.tolist())) > 1 else ""
    priced = search(task)
    row = int(np.argmin(priced.total_bytes))
    need, limit = float(priced.total_bytes[row]), task.limit_bytes
    words = (
        f"{task.shape.name} does not fit on {cluster.name}: the least is {need / 1e9:.0f} GB per "
        f"device ({priced.layouts[row]}), of which {limit / 1e9:.0f} GB may be used{on_average}"
    )
    ways = _what_would_do(task, cluster)
    return f"{words}; enough is {', or '.join(ways)}" if ways else words


def _what_would_do(task: Task, cluster: Cluster) -> list[str]:
    """Return changes with which it fits, as one would type them."""
    ways: list[str] = []
    if not task.frozen:
        adapters = replace(task, frozen=1.0 - adapter_share(task.shape, 16))
        if _fits(search(adapters)):
            ways.append("--lora 16 (weights frozen)")
    if task.fixed and _fits(search(replace(task, fixed={}))):
        ways.append("other degrees (leave them out)")
    away = replace(task, fixed={**task.fixed, "offload_optimizer": 1.0})
    if _fits(search(away)):
        ways.append("the optimizer's state in host memory")
    times = 2
    while times <= MOST_TIMES:
        more = replace(task, devices=task.devices * times)
        if more.batch % more.devices and more.batch < more.devices:
            more = replace(more, batch=more.devices)
        if _fits(search(more)):
            ways.append(f"{times} times as many devices ({more.devices})")
            break
        times *= 2
    return ways


def _fits(priced: Priced) -> bool:
    return bool(priced.fits.any())
