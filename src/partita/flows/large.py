"""Plans of large transformers: every degree searched in closed form, the best played exactly.

A model that is named by its shape (``catalogue/shapes.yaml``, or a Hugging Face configuration) is
never built: its blocks are equal, so that regular layouts over equal devices, and over types of
devices in a row or side by side, can all be priced. The answer is a plan like any other, with what
takes its time and its memory, the next best of other structure, and what the fixed degrees cost.
"""

import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from partita.core.cluster import Cluster, Device
from partita.core.codec import encode
from partita.core.columns import number_or_none, thawed
from partita.core.plan import Plan
from partita.core.precision import parse_precision
from partita.core.problem import Metric, Objective, Problem
from partita.core.solution import Solution
from partita.cost.links import fabric_of
from partita.cost.power import joules_of
from partita.cost.tables import SHARD_LEVEL
from partita.errors import InfeasibleError, InvalidInputError
from partita.flows.fields import (
    ChangeFields,
    ClusterFields,
    DegreeFields,
    MoveFields,
    ObjectiveFields,
    SourceFields,
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
from partita.flows.problem import (
    changed_cluster,
    memory_share,
    objective_remarks,
    read_cluster,
)
from partita.flows.results import Result
from partita.flows.solutions import TASK
from partita.flows.transformer_task import DEFAULT_TOKENS, adapter_share, task_of
from partita.requests import OnProgress, silent
from partita.transformer.choices import (
    DEGREES,
    KEPT,
    Choice,
    find_choices,
    layout_json,
    parts_of,
)
from partita.transformer.kernels import Accuracy, accuracy_of, machine_of
from partita.transformer.mixed import groups_of
from partita.transformer.named import NamedShape
from partita.transformer.pipelines import graph_of, plan_of
from partita.transformer.search import OFFLOADS, Priced, Task, least_s, search
from partita.transformer.shape import Shape
from partita.units import parse_count

SHOWN = 5
"""Layouts of different structure that are shown."""
OFFLOAD_SHARES = (0.0, 0.5, 1.0)
"""Shares of what host memory may keep that are searched where asked for."""
SPARE = 0.05
"""Share of the memory that must be left where a change is said to be enough: forecasts of memory
are off by about as much in the mean (docs/large-models.md)."""
RIVALS = ("megatron", "torchtitan", "deepspeed", "partita")
"""Frameworks that a plan for one of them is held against."""
BALANCED = (
    "experts are taken as equally busy, which published benchmarks force: routing as learned "
    "took Qwen3-235B 9 % (128k tokens) to 24 % (16k) longer"
)
MOST_TIMES = 64
"""How many times as many devices are tried where nothing fits."""


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class LargePlanResult(Result):
    """A plan of a large transformer.

    Attributes:
        task: What is trained.
        cluster: The devices.
        best: The plan that was chosen.
        others: The next best of different structure.
        free: The best where no degree is fixed; None where none is.
        rival: The best that other frameworks could run; None where no framework was asked for.
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
    rival: Choice | None
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
            self.best.device_types,
            self.task.sequence_length,
            experts=bool(self.task.shape.experts),
            compute=parse_precision(self.task.precision).compute,
            frozen=self.task.frozen,
        )

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second of all devices."""
        return self.task.tokens / self.best.step_s

    @property
    def mfu(self) -> float:
        """Share of the devices' peak that the model's own arithmetic uses."""
        return self.task.model_flops / (self._peak * self.best.step_s)

    @property
    def mfu_causal(self) -> float:
        """The same with what a causal mask leaves of attention."""
        task = self.task
        done = task.shape.model_flops(
            task.tokens, task.sequence_length, trained=1.0 - task.frozen, halved=True
        )
        return done / (self._peak * self.best.step_s)

    @property
    def hfu(self) -> float:
        """The same with what is computed again."""
        again = self.best.parts["recompute_s"] / max(self.best.parts["compute_s"], 1e-30)
        share = 1.0 / max(1.0 - again, 0.5)
        return self.mfu * share

    @property
    def _peak(self) -> float:
        name = parse_precision(self.task.precision).compute
        used = set(self.plan.devices)
        return sum(_peak_of(device, name) for device in self.cluster.devices if device.name in used)

    @property
    def price_per_hour(self) -> float:
        """Money for an hour of the devices that are used; NaN = not known."""
        return self.best.price_per_hour

    @cached_property
    def joules_per_token(self) -> float:
        """Modelled energy of the devices that are used, highest clocks; NaN = powers not known."""
        step_s, joules = self.best.step_s, 0.0
        for lane in self.best.lanes:
            # Every stage of a lane waits as long as its first one.
            busy_s = parts_of(lane, step_s)["compute_s"]
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
            "tokens_per_s": self.tokens_per_s,
            "tokens_per_s_per_device": self.tokens_per_s / len(self.plan.devices),
            "mfu": self.mfu,
            "mfu_causal": self.mfu_causal,
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
            "rival": None if self.rival is None else self.rival.to_json(),
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
class LargeFields(
    ClusterFields, ChangeFields, ObjectiveFields, DegreeFields, SourceFields, MoveFields
):
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
    by_price = request.objective == Metric.COST.value
    found = find_choices(task, cluster, by_price=by_price)
    if not found:
        raise InfeasibleError(_why_nothing_fits(task, cluster))
    free: list[Choice] = []
    if task.fixed:
        free = find_choices(replace(task, fixed={}), cluster, by_price=by_price)[:1]
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
        rival=None if request.framework is None or by_price else _rival(task, cluster),
        solution=solution,
        tokens=math.nan if request.tokens is None else parse_count(request.tokens, "tokens"),
        replacement=replacement,
        remarks=(*remarks, *_idle(cluster, best), *[BALANCED] * bool(task.shape.experts)),
    )


def _rival(task: Task, cluster: Cluster) -> Choice | None:
    """Return the quickest plan of the frameworks that were not asked for; None = none has one."""
    found: list[Choice] = []
    for name in RIVALS:
        if name != task.framework:
            # A degree that is fixed may be none of another framework.
            with suppress(InvalidInputError, InfeasibleError):
                found += find_choices(replace(task, framework=name), cluster)[:1]
    return min(found, key=lambda choice: choice.step_s, default=None)


def _idle(cluster: Cluster, best: Choice) -> list[str]:
    """Return a remark where a plan does not use all devices."""
    idle = len(cluster) - best.num_devices
    return [f"{idle} of {len(cluster)} devices stay idle: no plan with them is better"] * (idle > 0)


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
    for choice in [*found[:KEPT], *_as_before(old, task, cluster)] if minimises else found[:1]:
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
        return find_choices(replace(task, fixed={**degrees, **task.fixed}), cluster)[:1]
    except (InvalidInputError, InfeasibleError):
        return []


def _task(
    request: LargeFields, named: NamedShape, cluster: Cluster
) -> tuple[Task, tuple[str, ...]]:
    """Return what is trained, with the usual where nothing is said, and remarks on that."""
    length = request.sequence_length or named.sequence_length
    batch, size, remarks = _batch(request, length, len(cluster))
    fixed = _fixed(request) | ({} if size is None else {"microbatch": size})
    share = memory_share(request)
    task = task_of(request, named, cluster, batch=batch, memory_share=share, fixed=fixed)
    return task, (*remarks, *named.remarks, *objective_remarks(request))


def _batch(
    request: LargeFields, length: int, devices: int
) -> tuple[int, int | None, tuple[str, ...]]:
    """Return sequences per step, those of a microbatch where given, and a remark on the usual."""
    count, size, batch = request.microbatches, request.microbatch_size, request.batch_size
    if count is not None:
        size = size or (1 if batch is None else batch // count)
        batch = count * size if batch is None else batch
        if count * size != batch:
            raise InvalidInputError(
                f"{count} microbatches of {size or 'equal'} sequences are not --batch-size {batch}"
            )
    if batch is not None:
        return batch, size, ()
    # A power of two keeps all degrees possible, and at least two sequences go to each device.
    batch = 2 ** max(0, round(math.log2(max(DEFAULT_TOKENS / length, 1))))
    while batch < 2 * devices and batch * length < 16 * DEFAULT_TOKENS:
        batch *= 2
    some = f"{batch} sequence{'s' * (batch != 1)}"
    return batch, size, (f"a step has {some} of {length} tokens unless --batch-size says",)


def _fixed(request: LargeFields) -> dict[str, object]:
    """Return the degrees that a request fixes."""
    fixed: dict[str, object] = {}
    for name in DEGREES:
        text = getattr(request, name)
        if text is None or text == "auto":
            continue
        fixed[name] = _whole(text, name, least=0 if name in ("zero", "shard_group") else 1)
    if request.etp is not None:
        fixed["etp"] = _whole(request.etp, "etp", least=1)
    if request.sp not in (None, "auto"):
        fixed["sp"] = request.sp == "yes"
    if request.rank_order not in (None, "auto"):
        # Experts lie over the first devices of a stage, wherever their degree is named.
        names = [name for name in str(request.rank_order).split("-") if name != "ep"]
        fixed["rank_order"] = "-".join(names)
    if request.cp_kind is not None:
        fixed["cp_kind"] = request.cp_kind
    for name in OFFLOADS:
        if (text := getattr(request, name)) is not None:
            fixed[name] = OFFLOAD_SHARES if text == "auto" else _share(text, name)
    if request.recompute is not None:
        none = request.recompute == "none"
        fixed["recompute"] = () if none else tuple(request.recompute.split("+"))
    return fixed


def _whole(text: str, name: str, *, least: int) -> int:
    if not str(text).isdigit() or int(text) < least:
        raise InvalidInputError(
            f"--{name.replace('_', '-')} is {text!r}; expected a number of {least} or more, or auto"
        )
    return int(text)


def _share(text: str, name: str) -> float:
    try:
        share = float(text)
    except ValueError:
        share = math.nan
    if not 0 <= share <= 1:
        raise InvalidInputError(
            f"--{name.replace('_', '-')} is {text!r}; expected a share from 0 to 1, or auto"
        )
    return share


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
    groups = groups_of(cluster, 1.0, compute=policy.compute)
    return Solution(
        problem=problem,
        plan=plan,
        metric=Metric.THROUGHPUT,
        value=best.step_s,
        unit="s",
        lower_bound=least_s(task, [(group.machine, len(group)) for group in groups]),
        planner="auto",
        options={"framework": task.framework, "precision": task.precision},
        stats={
            "layout": layout_json(best.layout),
            "parts_s": dict(best.parts),
            TASK: _task_json(task),
        },
    )


def _task_json(task: Task) -> dict[str, Any]:
    """Return what is trained as JSON values, so that a written plan can be planned again."""
    named = ("batch", "sequence_length", "precision", "optimizer", "frozen", "framework")
    fixed = {k: list(v) if isinstance(v, tuple) else v for k, v in task.fixed.items()}
    return {
        "shape": asdict(task.shape),
        "memory_share": task.limit_bytes / task.machine.memory_bytes,
        "fixed": fixed,
        **{name: getattr(task, name) for name in named},
    }


def plan_again(solution: Solution, cluster: Cluster) -> list[Solution]:
    """Return the best plans of different structure for what a plan trains, on another cluster.

    Args:
        solution: A plan of a large transformer.
        cluster: The devices, as quick as they are.
    """
    found: dict[str, Any] = thawed(solution.stats)[TASK]
    share, shape = found.pop("memory_share"), Shape(**found.pop("shape"))
    fixed = {k: tuple(v) if isinstance(v, list) else v for k, v in found.pop("fixed").items()}
    first, compute = cluster.devices[0], parse_precision(found["precision"]).compute
    task = Task(
        shape=shape,
        devices=len(cluster),
        machine=machine_of(first, fabric_of(cluster), compute=compute),
        limit_bytes=share * first.memory_bytes,
        fixed=fixed,
        **found,
    )
    return [_solution(task, cluster, choice) for choice in find_choices(task, cluster)[:SHOWN]]


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
    from partita.flows.least_change import least_number  # noqa: PLC0415 (only where nothing fits)

    ways: list[str] = []
    if not task.frozen:
        adapters = replace(task, frozen=1.0 - adapter_share(task.shape, 16))
        if _fits(search(adapters)):
            ways.append("--lora 16 (weights frozen)")
    if task.fixed and _fits(search(replace(task, fixed={}))):
        ways.append("other degrees (leave them out)")
    away = replace(task, fixed={**task.fixed, "offload_optimizer": 1.0})
    if _fits(search(away)):
        ways.append("--offload-optimizer 1 (the optimizer's state in host memory)")
    power = least_number(
        lambda power: _fits(search(_enlarged(task, 2**power))),
        lambda power: 2**power <= MOST_TIMES,
    )
    if power is not None:
        devices = _enlarged(task, 2**power).devices
        ways.append(f"{2**power} times as many devices ({devices})")
    return ways


def _enlarged(task: Task, times: int) -> Task:
    """Return a task on several times as many devices, which have a sequence each."""
    devices = task.devices * times
    batch = devices if task.batch % devices and task.batch < devices else task.batch
    return replace(task, devices=devices, batch=batch)


def _fits(priced: Priced) -> bool:
    """Return whether some layout fits with as much to spare as forecasts of memory are off."""
    return bool((priced.total_bytes <= (1.0 - SPARE) * priced.task.limit_bytes).any())
