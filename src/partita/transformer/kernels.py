"""Seconds of the parts of a transformer block on one device, by kernels and stacks.

A matrix product of ``m x k`` and ``k x n`` takes ``2 m n k / (peak S w k / (k + K))``, at least its
bytes over the memory bandwidth, and a launch: ``S`` is the share that large products reach, ``w``
the share of busy processors when tiles of 128 x 256 down to 64 x 64 run in whole waves, and ``K``
what filling the pipeline costs. Attention reaches a share of the peak that depends on the kernel's
generation, counted over what a causal mask leaves, and falls with narrow heads, whose exponentials
take as long as their products; unfused attention writes and reads its scores.
All else is element-wise: passes over activations at the memory bandwidth, times a factor of the
stack. A block whose kernels are shorter than their launches takes the host's time instead.

Figures stand in ``catalogue/large_models.yaml``: fitted ones by family of devices, by stack and by
generation of expert kernels, assumed ones with their reason.
"""

from collections.abc import Mapping, Sequence
from functools import cache
from importlib import resources
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from partita.catalogue.kernel_rates import kernels_on
from partita.core.cluster import Device
from partita.cost.links import Fabric
from partita.transformer.layout import FRAMEWORKS, Layout, Layouts
from partita.transformer.shape import Numbers, Sizes
from partita.yaml_nodes import Scalar, Table, parse_yaml, read_number, read_table

Constants = Mapping[str, float]
"""Figures by dotted name, such as ``hopper.matmul`` or ``stack.te.traffic``."""

_TILES = ((128, 256, 1.0), (128, 128, 0.93), (64, 128, 0.8), (64, 64, 0.6))
"""Rows, columns and relative rate of the tiles that a library chooses from."""
_LAUNCH_S = 3e-6
_HEAD = 128.0
"""Width of the heads that attention's share of the peak is of."""
_SHARPNESS = 6.0
"""Exponent with which the longer of device and host wins."""


@cache
def _entries() -> tuple[Constants, Mapping[str, str]]:
    """Return the figures of the package, and the family of each device type."""
    text = resources.files("partita.catalogue").joinpath("large_models.yaml")
    root = read_table(parse_yaml(text.read_text(encoding="utf-8")), "large models")
    figures: dict[str, float] = {}
    families: dict[str, str] = {}

    def walk(table: Table, prefix: str) -> None:
        for key, node in table.entries.items():
            name = f"{prefix}{key}"
            if key == "devices":
                members = read_table(node, name).entries
                families.update(dict.fromkeys(members, prefix[:-1]))
                for member, value in members.items():
                    figures[f"{prefix}scale.{member}"] = read_number(value, f"{name}.{member}")
            elif isinstance(node, Table):
                walk(node, f"{name}.")
            elif isinstance(node, Scalar) and key != "source":
                figures[name] = read_number(node, name)

    walk(root, "")
    return MappingProxyType(figures), MappingProxyType(families)


def load_constants() -> Constants:
    """Return the figures of ``catalogue/large_models.yaml`` by dotted name."""
    return _entries()[0]


def family_of(device_type: str) -> str:
    """Return the family whose figures a type of device has; ``default`` = none was measured."""
    return _entries()[1].get(device_type, "default")


class Accuracy(NamedTuple):
    """How far estimates of a kind were off published runs.

    Attributes:
        kind: The kind, in words.
        error: Mean absolute error of the step time, constants fitted without a run's source.
        runs: Number of runs.
    """

    kind: str
    error: float
    runs: int


class _Kind(NamedTuple):
    """Published runs of a kind: in words, the types of device and the frameworks they were on."""

    words: str
    types: tuple[str, ...]
    frameworks: tuple[str, ...] = ("megatron",)


_A100 = ("a100", "a100-sxm-40gb")
_BLACKWELL = ("b200", "b300", "gb200", "gb300")
_SHARDING = ("megatron", "torchtitan", "fsdp1", "maxtext")
_KINDS = {
    "ampere": _Kind("A100, 16 bit, Megatron-LM", _A100),
    "hopper": _Kind("H100, bf16, Megatron-Core", ("h100",)),
    "sharded": _Kind("fully sharded, H100 and A100", ("h100", *_A100), _SHARDING),
    "float8_hopper": _Kind("H100, fp8", ("h100",), _SHARDING),
    "float8_blackwell": _Kind("Blackwell, fp8", ("b200", "gb200", "gb300")),
    "experts": _Kind("mixtures of experts", ("h100", *_BLACKWELL)),
    "long": _Kind(
        "sequences of 8k to 1M tokens, context parallel", ("h100", "b200"), _SHARDING[:2]
    ),
}
LONG = 32_768
"""Tokens of a sequence from which context parallelism has a kind of its own."""


def accuracy_of(
    layout: Layout,
    device_types: Sequence[str],
    sequence_length: int,
    *,
    experts: bool,
    compute: str,
    frozen: float = 0.0,
) -> Accuracy | None:
    """Return the accuracy of estimates of one kind; None = no published run is of it.

    Args:
        layout: Degrees.
        device_types: Types of the devices in use; no run was on several.
        sequence_length: Tokens of a sequence.
        experts: Whether the model has experts.
        compute: Dtype of the arithmetic.
        frozen: Share of the weights that is not trained; adapters were in none of the runs.
    """
    family = family_of(device_types[0])
    float8 = compute == "float8"
    kind = f"float8_{family}" if float8 else "sharded" if layout.zero == 3 else family
    if layout.cp > 1 and sequence_length >= LONG:
        kind = "long"
    if experts:
        kind = "experts"
    runs, away = _KINDS.get(kind), layout.offload_optimizer + layout.offload_activations
    if runs is None or frozen or away or compute not in ("bfloat16", "float16", "float8"):
        return None
    mixed = len(set(device_types)) > 1 or device_types[0] not in runs.types
    if mixed or not layout.framework.startswith(runs.frameworks):
        return None
    figures = load_constants()
    error, count = (figures[f"accuracy.{kind}.{name}"] for name in ("error", "runs"))
    return Accuracy(runs.words, error, int(count))


def accuracy_line(found: Accuracy | None) -> str:
    """Return how good an estimate is, for people."""
    if found is None:
        return "no published run of this kind was compared: the error of this estimate is not known"
    return (
        f"estimates of this kind are off by {found.error:.0%} in the mean on {found.runs} "
        f"published runs ({found.kind})"
    )


class Machine(NamedTuple):
    """One type of device and its links: published figures, and shares that kernels reach.

    Attributes:
        peak_flop_per_s: Peak rate of matrix products in the dtype of activations.
        peak8_flop_per_s: Peak rate of float8 products; that of activations where there are none.
        memory_bytes: Memory of a device.
        memory_bytes_per_s: Memory bandwidth.
        processors: Multiprocessors; 0 = not known.
        memory: Share of the memory bandwidth that element-wise kernels reach.
        traffic8: Element-wise traffic with float8 layers, which cast, relative to that without.
        fabric: Links.
        host_bytes_per_s: Rate between a device and its host's memory.
        matmul: Share of the peak that large products reach.
        matmul8: The same of float8 products with one scale per tensor.
        block8: Rate of block-scaled float8 products relative to those.
        row8: Rate of row-scaled ones.
        attention: Share of the peak by kernel, at heads of 128.
        softmax: Width of a head at which exponentials take as long as products; 0 = not known.
        graphs: Whether expert kernels are captured in graphs where the framework can.
        speed: Factor on the rates above by which the device differs from others of its type.
    """

    peak_flop_per_s: float
    peak8_flop_per_s: float
    memory_bytes: float
    memory_bytes_per_s: float
    processors: int
    memory: float
    traffic8: float
    fabric: Fabric
    host_bytes_per_s: float
    matmul: float
    matmul8: float
    block8: float
    row8: float
    attention: Mapping[str, float]
    softmax: float
    graphs: bool
    speed: float = 1.0

    def at_speed(self, speed: float) -> "Machine":
        """Return the machine with compute and memory at another speed."""
        factor = speed / self.speed
        return self._replace(
            peak_flop_per_s=self.peak_flop_per_s * factor,
            peak8_flop_per_s=self.peak8_flop_per_s * factor,
            memory_bytes_per_s=self.memory_bytes_per_s * factor,
            speed=speed,
        )

    @property
    def bytes_per_s(self) -> float:
        """Memory bandwidth that element-wise kernels reach."""
        return self.memory * self.memory_bytes_per_s


ATTENTION = ("unfused", "flash1", "flash2", "cudnn24", "flash3")


def machine_of(
    device: Device,
    fabric: Fabric,
    *,
    compute: str = "bfloat16",
    power_w: float | None = None,
    constants: Constants | None = None,
) -> Machine:
    """Return a device and its links as prices need them.

    Args:
        device: The device; its type names the family whose figures count.
        fabric: The links of the devices that train.
        compute: Dtype of the arithmetic. The shares of the peak are those of 16 bits, also where
            it is wider.
        power_w: Power limit of the board, where it is below the usual one.
        constants: Figures; the package's unless given.
    """
    figures = load_constants() if constants is None else constants
    family = family_of(device.type)

    def figure(name: str, default: float) -> float:
        return figures.get(f"{family}.{name}", default)

    narrow = ("bfloat16", "float16")
    rates = narrow if compute in (*narrow, "float8") else (compute,)
    peak = max(device.peak_flop_per_s.get(name, 0.0) for name in rates)
    scale = figures.get(f"{family}.scale.{device.type}", 1.0)
    if power_w is not None and 0 < power_w < device.max_w:
        scale *= (power_w / device.max_w) ** figures["common.power"]
    matmul = figure("matmul", 0.6)
    latest = figure("attention", 0.35)
    return Machine(
        peak_flop_per_s=peak * scale,
        peak8_flop_per_s=device.peak_flop_per_s.get("float8", peak) * scale,
        memory_bytes=device.memory_bytes,
        memory_bytes_per_s=device.memory_bytes_per_s,
        processors=kernels_on(device.type).processors or int(figure("processors", 0)),
        memory=figure("memory", 0.7),
        traffic8=figure("traffic8", 1.2),
        fabric=fabric,
        host_bytes_per_s=figures["common.host_bytes_per_s"],
        matmul=matmul,
        matmul8=figure("matmul8", matmul * 0.85),
        block8=figure("block8", figures["common.block8"]),
        row8=figure("row8", figures["common.row8"]),
        attention={
            name: figure(f"attention_{name}", figures["common.unfused"] if not index else latest)
            for index, name in enumerate(ATTENTION)
        },
        softmax=figure("softmax", 0.0),
        graphs=figure("graphs", 0) > 0,
    )


class Software(NamedTuple):
    """Figures of a framework and its stack on a machine: numbers, or columns over several.

    Attributes:
        traffic: Element-wise traffic relative to one pass per operation.
        host_s: Host's seconds per block and pass.
        expert_host_s: Further seconds in a block with experts.
        expert_each_s: Further seconds for each expert on the device.
        expert_passes: Passes over the tokens sent to experts, to permute and copy them.
        expert_exposed: Share of the all-to-all inside a host that shows.
        expert_late: The same where it runs under the work of another microbatch.
        expert_once: 1 where tokens for several experts of one host cross the network once.
        tp_exposed: Share of tensor-parallel collectives that shows, with ``sp`` and without.
        unit_exposed: Share of the gathers of fully sharded units that shows in any case.
        attention: Share of the peak that attention reaches.
        unfused: 1 where attention writes its scores.
        gradients_hidden: 1 where gradients are reduced under backward.
        sends_shown: Share of pipeline sends that shows, without virtual stages and with.
        sends_split: 1 where sends are split without ``sp`` too.
        ring_hidden: 1 where the ring of context parallelism runs under attention.
        kept: Activations that the stack keeps relative to those of the formula.
        kept8: 1 where inputs of float8 layers are kept in float8.
        logit_bytes: Bytes per logit, with loss and gradient.
    """

    traffic: Numbers
    host_s: Numbers
    expert_host_s: Numbers
    expert_each_s: Numbers
    expert_passes: Numbers
    expert_exposed: Numbers
    expert_late: Numbers
    expert_once: Numbers
    tp_exposed: tuple[Numbers, Numbers]
    unit_exposed: Numbers
    attention: Numbers
    unfused: Numbers
    gradients_hidden: Numbers
    sends_shown: tuple[Numbers, Numbers]
    sends_split: Numbers
    ring_hidden: Numbers
    kept: Numbers
    kept8: Numbers
    logit_bytes: Numbers


def software_of(
    layout: Layout, machine: Machine, *, constants: Constants | None = None
) -> Software:
    """Return the figures of a layout's framework and stack on a machine."""
    figures = load_constants() if constants is None else constants
    framework = FRAMEWORKS[layout.framework]
    stack = layout.stack or framework.stack
    generation = framework.experts
    if generation == "graphs" and not machine.graphs:
        generation = "grouped"
    experts = f"experts.{generation}"
    overlaps = framework.tp_overlap if layout.tp_overlap is None else layout.tp_overlap
    overlap = "tensor" if framework.tp_overlap else "tensor_async"
    exposed = figures[f"{experts}.exposed"]
    return Software(
        traffic=figures[f"stack.{stack}.traffic"],
        host_s=figures[f"stack.{stack}.host_s"],
        expert_host_s=figures[f"{experts}.host_s"],
        expert_each_s=figures[f"{experts}.each_s"],
        expert_passes=figures[f"{experts}.passes"],
        expert_exposed=exposed,
        expert_late=min(exposed, figures["overlap.experts"]),
        expert_once=figures[f"{experts}.once"],
        tp_exposed=(figures[f"overlap.{overlap}"] if overlaps else 1.0, 1.0),
        unit_exposed=0.0 if framework.unit_overlap else figures["overlap.units"],
        attention=machine.attention[framework.attention],
        unfused=float(framework.attention == "unfused"),
        gradients_hidden=float(framework.gradient_overlap),
        sends_shown=(1.0, figures["overlap.sends"] if framework.pipeline_overlap else 1.0),
        sends_split=float(framework.sends_split),
        ring_hidden=float(framework.context_overlap),
        kept=figures[f"stack.{stack}.kept"],
        kept8=float(stack == "te"),
        logit_bytes=figures["common.fused_logit_bytes"]
        if framework.fused_loss
        else figures[f"stack.{stack}.logit_bytes"],
    )


class Arithmetic(NamedTuple):
    """Formats of the matrix products: numbers, or columns.

    Attributes:
        float8: 1 where linear layers compute in float8.
        block: 1 where float8 is scaled by blocks (MX).
        row: 1 where it is scaled by rows.
    """

    float8: Numbers = 0.0
    block: Numbers = 0.0
    row: Numbers = 0.0


class Job(NamedTuple):
    """What is trained in one step: numbers, or columns over several jobs.

    Attributes:
        batch: Sequences of a step.
        sequence_length: Tokens of a sequence.
        arithmetic: Formats of the matrix products.
        reduced_bytes: Bytes per gradient on the wire.
        gathered_bytes: Bytes per weight on the wire.
        update_bytes: Bytes that the update moves per parameter.
        trained: Share of the weights that is trained; 0 = adapters only.
        element_bytes: Bytes of a number among activations.
        loading_s: Seconds of reading data that nothing hides.
    """

    batch: Numbers
    sequence_length: Numbers
    arithmetic: Arithmetic = Arithmetic()
    reduced_bytes: Numbers = 2.0
    gathered_bytes: Numbers = 2.0
    update_bytes: Numbers = 28.0
    trained: Numbers = 1.0
    element_bytes: Numbers = 2.0
    loading_s: Numbers = 0.0


class Case(NamedTuple):
    """All that a price depends on; each part is of numbers or of columns that broadcast."""

    sizes: Sizes
    layouts: Layouts
    job: Job
    machine: Machine
    software: Software
    figures: Constants

    @property
    def tokens(self) -> Numbers:
        """Tokens of a microbatch on one rank, before tensor parallelism splits them."""
        layouts = self.layouts
        return layouts.microbatch * self.job.sequence_length / layouts.cp

    @property
    def split_tokens(self) -> Numbers:
        """Tokens of a microbatch that norms, and the way to experts, see on one rank."""
        tokens, tp = self.tokens, self.layouts.tp
        return np.where(np.asarray(self.layouts.sp) > 0, tokens / tp, tokens)

    @property
    def microbatches(self) -> Numbers:
        """Microbatches of a step."""
        layouts = self.layouts
        return np.maximum(1.0, self.job.batch / (layouts.dp * layouts.microbatch))

    @property
    def has_experts(self) -> bool:
        """Whether any row has experts."""
        return bool(np.any(np.asarray(self.sizes.expert_share) > 0))


Pair = tuple[Numbers, Numbers]
"""Seconds of forward and of backward."""


class _Products:
    """Matrix products on a device."""

    def __init__(self, case: Case) -> None:
        machine, formats = case.machine, case.job.arithmetic
        block = np.where(np.asarray(formats.block) > 0, machine.block8, 1.0)
        scaled = np.where(np.asarray(formats.row) > 0, machine.row8, block)
        self.machine = machine
        self.fill = case.figures["common.fill"]
        self.element_bytes = case.job.element_bytes
        self.trained = case.job.trained
        self.rate16: Numbers = machine.peak_flop_per_s * machine.matmul
        rate8 = machine.peak8_flop_per_s * machine.matmul8 * scaled
        self.rate: Numbers = np.where(np.asarray(formats.float8) > 0, rate8, self.rate16)

    def seconds(
        self,
        m: Numbers,
        n: Numbers,
        k: Numbers,
        rate: Numbers,
        *,
        count: Numbers = 1.0,
        out_bytes: Numbers | None = None,
    ) -> Numbers:
        """Return seconds of ``count`` equal products in one launch."""
        machine = self.machine
        busy: Numbers = 0.0 if machine.processors else 0.9
        for rows, columns, relative in _TILES if machine.processors else ():
            tiles = np.ceil(m / rows) * np.ceil(n / columns) * count
            area = np.ceil(tiles / machine.processors) * (machine.processors * rows * columns)
            busy = np.maximum(busy, relative * m * n * count / area)
        work = 2.0 * m * n * k * count / (rate * busy * (k / (k + self.fill)))
        each = self.element_bytes
        written = each if out_bytes is None else out_bytes
        moved = count * (each * k * (m + n) + written * m * n)
        return np.maximum(work, moved / machine.bytes_per_s) + _LAUNCH_S

    def linear(
        self, m: Numbers, n: Numbers, k: Numbers, *, count: Numbers = 1.0, scale: float = 1.0
    ) -> Pair:
        """Return seconds of a linear layer: forward, and backward with its weights' gradient."""
        rate = self.rate * scale
        forward = self.seconds(m, n, k, rate, count=count)
        inputs = self.seconds(m, k, n, rate, count=count)
        # Gradients are added to float32 sums in memory: read and written.
        weights = self.seconds(k, n, m, rate, count=count, out_bytes=8.0)
        return forward, inputs + self.trained * weights


def _sum(*pairs: Pair) -> Pair:
    return sum(pair[0] for pair in pairs), sum(pair[1] for pair in pairs)


def _where(condition: Numbers, yes: Pair, no: Pair) -> Pair:
    return np.where(condition, yes[0], no[0]), np.where(condition, yes[1], no[1])


class Block(NamedTuple):
    """Seconds for one microbatch on one device, without communication.

    Attributes:
        forward: A block's forward.
        backward: Its backward.
        again: What backward computes again; all of forward where ``replay`` is 1.
        replay: 1 where recomputation repeats the forward's communication.
        expert_replay: The same of the experts' communication.
        core: Attention's core in forward, under which the ring of context parallelism runs.
        host: Least seconds of a pass, by the host's launches.
        head: Head, loss and their backward.
        embedding: Embedding and its backward.
    """

    forward: Numbers
    backward: Numbers
    again: Numbers
    replay: Numbers
    expert_replay: Numbers
    core: Numbers
    host: Numbers
    head: Numbers
    embedding: Numbers


class _FeedForward(NamedTuple):
    """Products and element-wise seconds of the feed-forward part, and the host's for experts."""

    products: Pair
    widen: Numbers
    routed: Numbers
    elementwise: Numbers
    host: Numbers


class _LeastProducts(_Products):
    """Matrix products at the share of the peak that large ones reach, nothing lost."""

    def seconds(
        self,
        m: Numbers,
        n: Numbers,
        k: Numbers,
        rate: Numbers,
        *,
        count: Numbers = 1.0,
        out_bytes: Numbers | None = None,
    ) -> Numbers:
        """Return seconds of ``count`` equal products, without waves, filling and launches."""
        del out_bytes
        return 2.0 * m * n * k * count / rate


def block_s(case: Case, *, least: bool = False) -> Block:
    """Return seconds of one block and of the head for one microbatch on one device.

    Args:
        case: The transformer, its layouts and the rest.
        least: Whether products take what no size and no degree can go below.
    """
    sizes, layouts, figures = case.sizes, case.layouts, case.figures
    t, tokens = layouts.tp, case.tokens
    speed = case.machine.bytes_per_s
    products = _LeastProducts(case) if least else _Products(case)
    attention, up = _projections(case, products)
    core = _core(case)
    part = _feed_forward(case, products)
    widths = 10.0 * sizes.hidden * case.split_tokens
    widths = widths + 2.0 * (sizes.queries + sizes.kv_width) / t * tokens
    around = case.job.element_bytes * _traffic(case) * widths / speed
    elementwise = around + part.elementwise
    forward = attention[0] + part.products[0] + core[0] + elementwise
    again = layouts.again
    partly = (
        again["attention"] * core[0]
        + again["norm"] * 0.4 * around
        + again["mlp"] * (part.widen + part.elementwise)
        + again["experts"] * part.routed
        + again["projections"] * up
        + again["products"] * (0.5 * (attention[0] + part.products[0]) + elementwise)
    )
    vocab, rate = sizes.vocab / t, products.rate16
    head = products.seconds(tokens, vocab, sizes.hidden, rate)
    head = head + products.seconds(tokens, sizes.hidden, vocab, rate)
    weights = products.seconds(sizes.hidden, vocab, tokens, rate, out_bytes=8.0)
    loss = tokens * vocab * figures["common.loss_bytes"] / speed
    return Block(
        forward=forward,
        backward=attention[1] + part.products[1] + core[1] + 1.6 * elementwise,
        again=np.where(np.asarray(again["full"]) > 0, forward, partly),
        replay=again["full"],
        expert_replay=np.maximum(again["full"], again["experts"]),
        core=core[0],
        host=case.software.host_s + figures["common.host_rank_s"] * (t - 1.0) + part.host,
        head=head + case.job.trained * weights + loss,
        embedding=6.0 * case.job.element_bytes * tokens * sizes.hidden / speed,
    )


def _traffic(case: Case) -> Numbers:
    """Return the element-wise traffic relative to one pass per operation."""
    float8 = np.asarray(case.job.arithmetic.float8) > 0
    return case.software.traffic * np.where(float8, case.machine.traffic8, 1.0)


def _projections(case: Case, products: _Products) -> tuple[Pair, Numbers]:
    """Return attention's linear layers, and the forward of latent attention's up-projections."""
    sizes, t, tokens, h = case.sizes, case.layouts.tp, case.tokens, case.sizes.hidden
    kv = np.maximum(sizes.kv_heads / t, 1.0) * sizes.key_dim
    into = products.linear(tokens, sizes.queries / t + 2.0 * kv, h)
    out = products.linear(tokens, h, sizes.values / t)
    latent = np.asarray(sizes.kv_rank) > 0
    if not latent.any():
        return _sum(into, out), 0.0
    rank, ranked = np.maximum(sizes.query_rank, 1.0), np.asarray(sizes.query_rank) > 0
    down = _where(ranked, products.linear(tokens, rank, h), (0.0, 0.0))
    both = np.maximum(sizes.values + sizes.queries - sizes.heads * sizes.rope_dim, 1.0)
    up = _sum(
        products.linear(tokens, sizes.queries / t, np.where(ranked, rank, h)),
        products.linear(tokens, both / t, np.maximum(sizes.kv_rank, 1.0)),
    )
    narrow = np.maximum(sizes.kv_rank + sizes.rope_dim, 1.0)
    found = _sum(down, up, products.linear(tokens, narrow, h))
    return _sum(_where(latent, found, into), out), np.where(latent, up[0], 0.0)


def _core(case: Case) -> Pair:
    """Return seconds of attention's core."""
    sizes, machine, figures = case.sizes, case.machine, case.figures
    length, tokens = case.job.sequence_length, case.tokens / case.layouts.tp
    width = sizes.queries + sizes.values
    seen = np.where(np.asarray(sizes.causal) > 0, 0.5, 1.0) * length
    pairs = sizes.window_share * np.minimum(sizes.window, seen)
    pairs = pairs + (1.0 - sizes.window_share) * seen
    share = case.software.attention * length / (length + figures["common.attention_length"])
    # A score costs one exponential however narrow its head is; wider heads than those that the
    # kernels were made for gain nothing.
    head = np.minimum(width / (2.0 * sizes.heads), _HEAD)
    share = share * (head / (head + machine.softmax)) * ((_HEAD + machine.softmax) / _HEAD)
    flash = 2.0 * tokens * pairs * width / (machine.peak_flop_per_s * share)
    split = 1.0 + figures["common.ring_kernel"]
    flash = flash * np.where(np.asarray(case.layouts.cp) > 1, split, 1.0)
    rate = machine.peak_flop_per_s * figures["common.unfused"]
    unfused = 2.0 * tokens * length * width / rate
    scores = tokens * length * sizes.heads * figures["common.score_bytes"]
    unfused = unfused + scores / machine.bytes_per_s
    is_unfused = np.asarray(case.software.unfused) > 0
    return _where(is_unfused, (unfused, 2.0 * unfused), (flash, 2.5 * flash))


def _feed_forward(case: Case, products: _Products) -> _FeedForward:
    """Return the feed-forward part: dense in some layers, experts beside shared ones in others."""
    sizes, t, tokens, h = case.sizes, case.layouts.tp, case.tokens, case.sizes.hidden
    gate, speed, share = sizes.matrices - 1.0, case.machine.bytes_per_s, sizes.expert_share
    # Passes over the widened activations: two, or three with a gate.
    element = case.job.element_bytes
    passes = element * _traffic(case) * sizes.matrices * tokens / t / speed
    ffn = np.maximum(sizes.ffn, 1.0)
    widen = products.linear(tokens, gate * ffn / t, h)
    dense = _sum(widen, products.linear(tokens, h, ffn / t))
    part = (1.0 - share) * dense[0], (1.0 - share) * dense[1]
    inside = (1.0 - share) * passes * ffn
    if not case.has_experts:
        return _FeedForward(part, (1.0 - share) * widen[0], 0.0, inside, 0.0)
    layouts, software = case.layouts, case.software
    sent = case.split_tokens * sizes.top_k
    local = np.maximum(1.0, sizes.experts / layouts.ep)
    each = np.maximum(sent * layouts.etp / local, 1.0)
    wide = np.maximum(sizes.expert_ffn, 1.0) / layouts.etp
    scale = case.figures["common.grouped"]
    routed = _sum(
        products.linear(each, gate * wide, h, count=local, scale=scale),
        products.linear(each, h, wide, count=local, scale=scale),
    )
    shared = np.maximum(sizes.shared_ffn, 1.0)
    beside = _sum(
        products.linear(tokens, gate * shared / t, h), products.linear(tokens, h, shared / t)
    )
    with_shared = share * (np.asarray(sizes.shared_ffn) > 0)
    moved = sent * (h * software.expert_passes + sizes.matrices * wide * software.traffic)
    return _FeedForward(
        products=(
            part[0] + share * routed[0] + with_shared * beside[0],
            part[1] + share * routed[1] + with_shared * beside[1],
        ),
        widen=(1.0 - share) * widen[0],
        routed=share * routed[0],
        elementwise=inside + element * share * moved / speed + with_shared * passes * shared,
        host=share * (software.expert_host_s + software.expert_each_s * local),
    )


def longer_s(device_s: Numbers, host_s: Numbers) -> Numbers:
    """Return about the longer of a device's and its host's seconds, without a kink."""
    return (device_s**_SHARPNESS + host_s**_SHARPNESS) ** (1.0 / _SHARPNESS)
