"""All regular layouts of a transformer over equal devices, priced in closed form.

The space is small once what cannot run is left out: degrees that divide heads, layers, batch,
experts and devices, the sharding and recomputation that a framework knows, and a few microbatch
sizes. Every point is priced at once (microseconds each); those that do not fit in memory are kept
to say by how much. Degrees that are fixed leave the others free.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import permutations, product

import numpy as np

from partita.core.columns import Array
from partita.core.precision import DEFAULT_OPTIMIZER, parse_precision
from partita.errors import InvalidInputError
from partita.transformer.kernels import Case, Machine, block_s, load_constants, software_of
from partita.transformer.layout import (
    DEFAULT_FRAMEWORK,
    DEFAULT_ORDER,
    FRAMEWORKS,
    RANKED,
    Framework,
    Layout,
    columns_of,
)
from partita.transformer.memory import Memory, memory_of
from partita.transformer.price import Steps, job_of, price
from partita.transformer.shape import Shape, sizes_of

MOST_MICROBATCH = 16
MOST_VIRTUAL = 16
LEAST_CHUNK = 1024
"""Tokens below which no sequence is cut for context parallelism."""
SHARDED = (0, 1, 2, 3)
OFFLOADS = ("offload_optimizer", "offload_activations")
"""Fields of a layout that are 0 unless they are given, as one share or as several to search."""
MOST_ZERO_FROZEN = 2
"""Sharding stage of adapters: nobody reduces frozen weights, which are whole on every replica."""
EQUAL = 0.005
"""Share of a step by which two layouts are as good as equal."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """What is to be trained on how many equal devices.

    Attributes:
        shape: The transformer.
        devices: Number of devices.
        machine: Their type and links.
        batch: Sequences of a step.
        sequence_length: Tokens of a sequence.
        precision: Policy of dtypes.
        optimizer: Name of the optimizer.
        frozen: Share of the weights that is not trained.
        framework: Name of the framework.
        limit_bytes: Memory that a device may use.
        fixed: Fields of :class:`Layout` that are given.
    """

    shape: Shape
    devices: int
    machine: Machine
    batch: int
    sequence_length: int
    precision: str = "bf16"
    optimizer: str = DEFAULT_OPTIMIZER
    frozen: float = 0.0
    framework: str = DEFAULT_FRAMEWORK
    limit_bytes: float = float("inf")
    fixed: Mapping[str, object] = field(default_factory=dict)

    @property
    def tokens(self) -> int:
        """Tokens of a step."""
        return self.batch * self.sequence_length

    @property
    def model_flops(self) -> float:
        """FLOPs of a step that MFU counts; frozen weights have no gradient."""
        trained = 1.0 - self.frozen
        return self.shape.model_flops(self.tokens, self.sequence_length, trained=trained)

    @property
    def is_float8(self) -> bool:
        """Whether products of matrices are in float8."""
        return parse_precision(self.precision).compute == "float8"


@dataclass(frozen=True, kw_only=True)
class Priced:
    """Layouts with their prices, a row each, the fastest that fit first.

    Attributes:
        task: What they are for.
        layouts: The layouts.
        steps: Seconds of a step by what takes them.
        memory: Bytes per device by what takes them.
    """

    task: Task
    layouts: tuple[Layout, ...]
    steps: Steps
    memory: Memory

    def __len__(self) -> int:
        return len(self.layouts)

    @property
    def step_s(self) -> Array:
        """Seconds of a step."""
        return np.broadcast_to(np.asarray(self.steps.step_s), (len(self),))

    @property
    def total_bytes(self) -> Array:
        """Bytes per device."""
        return np.broadcast_to(np.asarray(self.memory.total), (len(self),))

    @property
    def fits(self) -> Array:
        """Whether each layout fits."""
        return self.total_bytes <= self.task.limit_bytes

    def some(self, rows: Array) -> "Priced":
        """Return some of the rows, in that order."""

        def pick(values: object) -> Array:
            return np.broadcast_to(np.asarray(values), (len(self),))[rows]

        return Priced(
            task=self.task,
            layouts=tuple(self.layouts[row] for row in rows.tolist()),
            steps=Steps(*(pick(part) for part in self.steps)),
            memory=Memory(*(pick(part) for part in self.memory)),
        )

    def mfu(self, row: int) -> float:
        """Return the share of the peak that the model's own arithmetic uses."""
        task = self.task
        peak = task.machine.peak8_flop_per_s if task.is_float8 else task.machine.peak_flop_per_s
        return task.model_flops / (task.devices * peak * float(self.step_s[row]))


def search(task: Task, layouts: tuple[Layout, ...] | None = None) -> Priced:
    """Return all layouts of a task with their prices: those that fit by time, then by memory.

    Args:
        task: What is to be trained.
        layouts: Its regular layouts, where they are known: those of other devices in as large
            hosts are the same.

    Raises:
        InvalidInputError: No layout has the degrees that are fixed; names a rule that is broken.
    """
    layouts = tuple(regular_layouts(task)) if layouts is None else layouts
    if not layouts:
        _refuse(task)
    return _sorted(price_all(task, layouts))


def _sorted(priced: Priced) -> Priced:
    """Return layouts in the order of :func:`search`."""
    layouts = priced.layouts
    key = np.where(priced.fits, priced.step_s, np.inf)
    order = np.lexsort((priced.total_bytes, key))
    # Of layouts that are as good as equal the one with least model parallelism goes first.
    if np.isfinite(key[order[0]]):
        near = order[key[order] <= key[order[0]] * (1 + EQUAL)]
        simple = min(near.tolist(), key=lambda row: (_model_parallel(layouts[row]), key[row]))
        order = np.r_[simple, order[order != simple]]
    return priced.some(order)


def with_orders(priced: Priced, most: int) -> Priced:
    """Return layouts with the best ones in other orders of ranks, where a step is shorter so.

    Args:
        priced: Layouts with their prices.
        most: How many are tried, of those that fit and of all.
    """
    task, known = priced.task, FRAMEWORKS[priced.task.framework].rank_orders
    if "rank_order" in task.fixed or task.devices <= task.machine.fabric.devices_per_host:
        return priced
    # Tensor parallelism is never outside: it has most to say.
    orders = [f"tp-{'-'.join(rest)}" for rest in permutations(RANKED[1:])]
    quick = np.argsort(priced.step_s, kind="stable")
    rows = [
        (row, replace(priced.layouts[row], rank_order=order))
        for row in dict.fromkeys([*np.flatnonzero(priced.fits)[:most], *quick[:most]])
        for order in orders
        if order in (known or orders) and order != DEFAULT_ORDER
    ]
    if not rows:
        return priced
    steps = price_all(task, [layout for _, layout in rows]).step_s
    better = [
        layout
        for (row, layout), step_s in zip(rows, steps, strict=True)
        if step_s < (1 - EQUAL) * priced.step_s[row]
    ]
    return _sorted(price_all(task, (*priced.layouts, *better))) if better else priced


def _model_parallel(layout: Layout) -> tuple[int, ...]:
    """Return how much a layout divides the model, and how much else it asks for."""
    degrees = layout.tp * layout.pp * layout.cp
    rest = (layout.zero, layout.vp, layout.ep, layout.expert_overlap, layout.shard_group)
    return (degrees, len(layout.recompute), *rest)


def price_all(task: Task, layouts: Sequence[Layout]) -> Priced:
    """Return the prices of layouts, in their order."""
    case = case_of(task, layouts, task.machine)
    policy = parse_precision(task.precision)
    memory = memory_of(case, policy, optimizer=task.optimizer, frozen=task.frozen)
    return Priced(task=task, layouts=tuple(layouts), steps=price(case), memory=memory)


def case_of(task: Task, layouts: Sequence[Layout], machine: Machine) -> Case:
    """Return all that prices of layouts of one framework depend on."""
    job = job_of(
        parse_precision(task.precision),
        batch=task.batch,
        sequence_length=task.sequence_length,
        optimizer=task.optimizer,
        frozen=task.frozen,
        block_scaled=machine.graphs,
    )
    software = software_of(layouts[0], machine)
    return Case(sizes_of(task.shape), columns_of(layouts), job, machine, software, load_constants())


def least_s(task: Task, machines: Sequence[tuple[Machine, int]]) -> float:
    """Return seconds that no step takes less than, on devices of some types.

    Kernels without waves, launches, communication and waiting, nothing computed again: blocks, head
    and embedding take device seconds that no degree makes less. Each type may do what it is best
    at: with the seconds of any one type as the worth of each part, no type does more worth per
    second than its best part has.

    Args:
        task: What is trained.
        machines: Types of devices with their numbers.
    """
    alone = Layout(precision=task.precision, framework=task.framework)
    rows = []
    for machine, _ in machines:
        of = block_s(case_of(task, [alone], machine), least=True)
        parts = (task.shape.layers * (of.forward + of.backward), of.head, of.embedding)
        rows.append([task.batch * float(np.ravel(part)[0]) for part in parts])
    seconds, counts = np.array(rows), np.array([count for _, count in machines])
    worth = seconds[:, None, :] / seconds[None, :, :]
    # worth[reference, type, part]; the best reference gives the highest bound.
    return float((seconds.sum(axis=1) / (worth.max(axis=2) @ counts)).max())


def regular_layouts(task: Task) -> Iterator[Layout]:
    """Yield the layouts of the regular space that keep all rules."""
    shape, framework = task.shape, FRAMEWORKS[task.framework]
    choices = _Choices(task, framework)
    for tp, cp in product(choices.degrees("tp"), choices.degrees("cp")):
        if task.devices % (tp * cp):
            continue
        stages = divisors(task.devices // (tp * cp)) if framework.pipelines else [1]
        for pp in choices.of("pp", stages):
            if task.devices % (tp * cp * pp):
                continue
            dp = task.devices // (tp * cp * pp)
            if pp > shape.layers or task.batch % dp or choices.of("dp", [dp]) != [dp]:
                continue
            yield from _inside(task, framework, choices, (tp, cp, pp, dp))


def _inside(
    task: Task, framework: Framework, choices: "_Choices", degrees: tuple[int, int, int, int]
) -> Iterator[Layout]:
    """Yield the layouts of given degrees: microbatch, virtual stages, experts, sharding."""
    tp, cp, pp, dp = degrees
    turns = task.batch // dp
    sizes = [size for size in divisors(turns) if size <= MOST_MICROBATCH]
    again_sets, cp_kind = recompute_sets(task), context_kind(task)
    for size, ep, again in product(
        choices.of("microbatch", sizes), choices.experts(tp, cp, dp), again_sets
    ):
        if turns % size:
            continue
        virtual = [1]
        if pp > 1 and framework.interleaving and (turns // size) % pp == 0:
            each = -(-task.shape.layers // pp)
            virtual = [v for v in range(1, MOST_VIRTUAL + 1) if each % v == 0]
        for vp, (zero, group), overlapped, state, kept in product(
            choices.of("vp", virtual),
            choices.sharding(framework, pp, dp * cp, tp),
            choices.overlaps(ep),
            offload_shares(task.fixed, "offload_optimizer"),
            offload_shares(task.fixed, "offload_activations"),
        ):
            layout = Layout(
                tp=tp,
                sp=bool(choices.of("sp", [tp > 1 and framework.sequence_parallel])[0]),
                pp=pp,
                vp=vp,
                cp=cp,
                ep=ep,
                dp=dp,
                zero=zero,
                shard_group=group,
                microbatch=size,
                cp_kind=cp_kind,
                expert_overlap=overlapped,
                recompute=again,
                offload_optimizer=state,
                offload_activations=kept,
                precision=task.precision,
                framework=task.framework,
                **choices.rest,  # type: ignore[arg-type]
            )
            rules = layout.broken_rules(
                task.shape, batch=task.batch, sequence_length=task.sequence_length
            )
            if next(rules, None) is None:
                yield layout


def recompute_sets(task: Task) -> list[tuple[str, ...]]:
    """Return sets of activations that may be computed again, the one that takes least first."""
    framework = FRAMEWORKS[task.framework]
    if "recompute" in task.fixed:
        return [tuple(task.fixed["recompute"])]  # type: ignore[arg-type]
    sets: list[tuple[str, ...]] = [(), ("full",)]
    if framework.attention == "unfused":
        sets.insert(1, ("attention",))
    if framework.stack in ("compile", "composer", "eager"):
        sets.insert(1, ("products",))
    if task.shape.experts:
        sets.insert(1, ("experts",))
    elif framework.stack in ("te", "xla"):
        sets.insert(1, ("mlp",))
    return [names for names in sets if set(names) <= set(framework.recompute)]


class _Choices:
    """Values of each degree that are tried: all sensible ones, or the one that is fixed."""

    def __init__(self, task: Task, framework: Framework) -> None:
        self.task, self.framework = task, framework
        known = ("tp", "cp", "pp", "dp", "vp", "ep", "zero", "shard_group", "microbatch", "sp")
        self.rest = {
            name: value
            for name, value in task.fixed.items()
            if name not in (*known, *OFFLOADS, "recompute", "cp_kind", "expert_overlap")
        }

    def of(self, name: str, usual: Sequence[int]) -> list[int]:
        """Return the values of a degree; a fixed one is tried even where it is not usual."""
        if name in self.task.fixed:
            return [int(self.task.fixed[name])]  # type: ignore[call-overload]
        return list(usual)

    def degrees(self, name: str) -> list[int]:
        """Return tensor- or context-parallel degrees."""
        task = self.task
        if name == "tp":
            domain = task.machine.fabric.devices_per_host
            usual = [t for t in divisors(task.shape.heads) if t <= min(domain, 64)]
            return self.of(name, [t for t in usual if task.devices % t == 0])
        longest = task.sequence_length // LEAST_CHUNK if self.framework.context else 1
        powers = [2**n for n in range(1, 11)]
        return self.of(name, [1, *(c for c in powers if c <= min(longest, task.devices))])

    def experts(self, tp: int, cp: int, dp: int) -> list[int]:
        """Return expert-parallel degrees."""
        if not self.task.shape.experts:
            return self.of("ep", [1])
        places = tp * cp * dp
        return self.of("ep", [e for e in divisors(self.task.shape.experts) if places % e == 0])

    def overlaps(self, ep: int) -> list[bool]:
        """Return whether the all-to-all of experts runs under another microbatch's work."""
        if "expert_overlap" in self.task.fixed:
            return [bool(self.task.fixed["expert_overlap"])]
        return [False, True] if ep > 1 and self.framework.expert_overlap else [False]

    def sharding(
        self, framework: Framework, pp: int, replicas: int, tp: int
    ) -> list[tuple[int, int]]:
        """Return levels of sharding with the groups that share a shard."""
        most = framework.max_zero if pp == 1 else framework.max_zero_with_pp
        levels = [zero for zero in SHARDED if zero <= most] if replicas > 1 else [0]
        found: list[tuple[int, int]] = []
        for zero in self.of("zero", levels):
            if self.task.frozen and zero > MOST_ZERO_FROZEN:
                continue
            groups = [0]
            inside = max(1, self.task.machine.fabric.devices_per_host // tp)
            if zero == 3:
                sizes = {inside, 2 * inside, 4 * inside, 16 * inside}
                groups += sorted(s for s in sizes if 1 < s < replicas and replicas % s == 0)
            found += [(zero, group) for group in self.of("shard_group", groups)]
        return found


def _refuse(task: Task) -> None:
    """Refuse degrees that no layout has, by a rule that the nearest one breaks."""
    fixed = {**task.fixed, **{name: offload_shares(task.fixed, name)[0] for name in OFFLOADS}}
    known = 1
    for name in ("tp", "cp", "pp"):
        known *= int(fixed.setdefault(name, 1))  # type: ignore[call-overload]
    fixed.setdefault("dp", max(1, task.devices // known))
    fixed.setdefault("sp", fixed["tp"] != 1 and FRAMEWORKS[task.framework].sequence_parallel)
    layout = replace(
        Layout(precision=task.precision, framework=task.framework),
        **fixed,  # type: ignore[arg-type]
    )
    if task.frozen and layout.zero > MOST_ZERO_FROZEN:
        raise InvalidInputError(
            f"layout {layout}: frozen weights are whole on every replica; adapters shard at most "
            f"zero {MOST_ZERO_FROZEN}"
        )
    if layout.devices != task.devices:
        # The batch is not to blame where the degrees do not divide the devices.
        even = layout.dp * layout.microbatch * layout.pp
        layout.check(task.shape, batch=even, sequence_length=task.sequence_length)
        raise InvalidInputError(
            f"layout {layout} covers {layout.devices} of {task.devices} devices; tp x cp x pp x dp "
            "must be their number"
        )
    layout.check(task.shape, batch=task.batch, sequence_length=task.sequence_length)
    raise InvalidInputError(
        f"no layout of {task.shape.name or 'the model'} with {words_of(task.fixed)} divides over "
        f"{task.devices} devices and {task.batch} sequences"
    )


def context_kind(task: Task) -> str:
    """Return the kind of context parallelism: the framework's first, unless it is fixed."""
    return str(task.fixed.get("cp_kind", (*FRAMEWORKS[task.framework].context, "ring")[0]))


def offload_shares(fixed: Mapping[str, object], name: str) -> tuple[float, ...]:
    """Return the shares that host memory may keep of something: one, or several to search."""
    given = fixed.get(name, 0.0)
    return given if isinstance(given, tuple) else (float(given),)  # type: ignore[arg-type]


def keeps(layout: Layout, fixed: Mapping[str, object]) -> bool:
    """Return whether a layout has all that is fixed."""
    return all(
        getattr(layout, name) in offload_shares(fixed, name)
        if name in OFFLOADS
        else getattr(layout, name) == value
        for name, value in fixed.items()
    )


def words_of(fixed: Mapping[str, object]) -> str:
    """Return degrees that are fixed in words."""
    return ", ".join(f"{name} {value}" for name, value in fixed.items()) or "free degrees"


def divisors(number: int) -> list[int]:
    """Return the divisors of a number, ascending.

    >>> divisors(12)
    [1, 2, 3, 4, 6, 12]
    """
    low = [d for d in range(1, int(number**0.5) + 1) if number % d == 0]
    return sorted({*low, *(number // d for d in low)})
