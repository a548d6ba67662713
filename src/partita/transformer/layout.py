"""How a transformer is laid out over devices: degrees, sharding, recomputation, framework.

``devices = tp x pp x cp x dp``. Experts have their own mesh over the devices of a pipeline stage:
``ep x etp`` divides ``tp x cp x dp``, in the order of its ranks. Ranks are ordered tp, cp, dp, pp
from the inside unless a layout has another order, so that tensor-parallel groups lie on
neighbouring devices.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from partita.core.plan import RECOMPUTE_SETS as RECOMPUTE
from partita.errors import InvalidInputError
from partita.transformer.shape import Numbers, Shape

RANKED = ("tp", "cp", "dp", "pp")
"""Degrees that ranks are numbered by."""
DEFAULT_ORDER = "-".join(RANKED)
"""Order of ranks, the innermost first."""
PIPELINE_INSIDE = "tp-cp-pp-dp"
"""Order of Megatron's ``--use-tp-pp-dp-mapping``: replicas lie outside of pipelines."""


@dataclass(frozen=True, kw_only=True)
class Framework:
    """Switches of a framework: what it runs, what it overlaps and what it can combine.

    Attributes:
        stack: Kernels beside the matrix products: ``fused`` (Megatron-LM of 2021), ``te``, ``xla``,
            ``compile``, ``composer`` (llm-foundry, norms fused) or ``eager``.
        attention: Kernels of attention, oldest first: ``unfused``, ``flash1``, ``flash2``,
            ``cudnn24``, ``flash3``. On devices of another generation the names mean its own.
        experts: Generation of its kernels for experts: ``early`` (before mid 2025), ``grouped``
            or ``graphs`` (captured in CUDA graphs on Blackwell).
        tp_overlap: Whether tensor-parallel collectives run under matrix products.
        gradient_overlap: Whether gradients are reduced under the last backward, and sharded
            parameters gathered under the first forward.
        unit_overlap: Whether the gathers of fully sharded units run under the unit before.
        pipeline_overlap: Whether sends are hidden when stages are interleaved.
        sends_split: Whether a tensor-parallel group splits what it sends without ``sp`` too.
        context_overlap: Whether the ring of context parallelism runs under attention.
        expert_overlap: Whether the all-to-all of experts can run under another microbatch.
        fused_loss: Whether loss and logits are computed in one kernel or in pieces.
        max_zero: Highest sharding stage.
        max_zero_with_pp: Highest sharding stage beside pipeline parallelism.
        optimizer_alone: Whether the optimizer's state can be sharded alone (ZeRO-1).
        context: Kinds of context parallelism that it has.
        sequence_parallel: Whether tensor parallelism may split the norms along the sequence.
        pipelines: Whether layers may be divided into stages.
        interleaving: Whether a device may hold several virtual stages.
        expert_parallel: Whether experts may lie on different devices.
        wide_experts: Whether experts are divided at least as often as tensors are.
        recompute: Names of ``RECOMPUTE`` that it has switches for.
        rank_orders: Orders of ranks that it has switches for; empty = any.
        stages_differ: Whether stages may have different numbers of layers, and ranks of different
            stages other switches of recomputation.
    """

    name: str
    stack: str
    attention: str = "flash3"
    experts: str = "graphs"
    tp_overlap: bool = False
    gradient_overlap: bool = True
    unit_overlap: bool = True
    pipeline_overlap: bool = True
    sends_split: bool = False
    context_overlap: bool = True
    expert_overlap: bool = False
    fused_loss: bool = False
    max_zero: int = 3
    max_zero_with_pp: int = 3
    optimizer_alone: bool = True
    context: tuple[str, ...] = ("ring", "all-to-all")
    sequence_parallel: bool = True
    pipelines: bool = True
    interleaving: bool = True
    expert_parallel: bool = True
    wide_experts: bool = False
    recompute: tuple[str, ...] = RECOMPUTE
    rank_orders: tuple[str, ...] = (DEFAULT_ORDER,)
    stages_differ: bool = True


def _megatron(name: str, attention: str, experts: str, *, early: bool = False) -> Framework:
    """Return a release of Megatron-Core.

    Core 0.13 (July 2025) lets modules be recomputed by name, 0.14 (September 2025) runs the
    all-to-all of experts under another microbatch.
    """
    return Framework(
        name=name,
        stack="te",
        attention=attention,
        experts=experts,
        tp_overlap=True,
        expert_overlap=not early,
        max_zero_with_pp=1,
        recompute=("attention", "full") if early else RECOMPUTE,
        rank_orders=(DEFAULT_ORDER,) if early else (DEFAULT_ORDER, PIPELINE_INSIDE),
    )


def _torchtitan(name: str, *, fused_loss: bool) -> Framework:
    return Framework(
        name=name,
        stack="compile",
        attention="flash2",
        experts="grouped",
        context_overlap=False,
        fused_loss=fused_loss,
        max_zero_with_pp=2,
        optimizer_alone=False,
        wide_experts=True,
    )


FRAMEWORKS: Mapping[str, Framework] = MappingProxyType(
    {
        row.name: row
        for row in (
            _megatron("megatron", "flash3", "graphs"),
            _megatron("megatron-26.02", "flash3", "grouped"),
            _megatron("megatron-25.04", "flash3", "early", early=True),
            _megatron("megatron-24.07", "cudnn24", "early", early=True),
            Framework(
                name="megatron-2021",
                stack="fused",
                attention="unfused",
                experts="early",
                gradient_overlap=False,
                pipeline_overlap=False,
                sends_split=True,
                max_zero=1,
                max_zero_with_pp=1,
                context=(),
                recompute=("attention", "full"),
                # Layers have to divide by its stages.
                stages_differ=False,
            ),
            _torchtitan("torchtitan", fused_loss=True),
            _torchtitan("torchtitan-2024", fused_loss=False),
            Framework(
                name="fsdp1",
                stack="composer",
                attention="flash1",
                experts="early",
                unit_overlap=False,
                context_overlap=False,
                context=(),
                optimizer_alone=False,
                sequence_parallel=False,
                pipelines=False,
            ),
            # One program for all devices, which scans over equal stages.
            Framework(
                name="maxtext",
                stack="xla",
                experts="grouped",
                rank_orders=(),
                stages_differ=False,
            ),
            Framework(
                name="deepspeed",
                stack="eager",
                attention="flash2",
                experts="early",
                context_overlap=False,
                context=("all-to-all",),
                pipeline_overlap=False,
                max_zero_with_pp=1,
                interleaving=False,
                sequence_parallel=False,
                rank_orders=(),
            ),
            Framework(
                name="accelerate",
                stack="eager",
                attention="flash2",
                experts="early",
                context_overlap=False,
                context=("ring",),
                optimizer_alone=False,
                pipelines=False,
                sequence_parallel=False,
                expert_parallel=False,
                recompute=("full",),
            ),
            # torch alone: fully_shard per block and DTensor, as export --to fsdp writes it.
            Framework(
                name="fsdp",
                stack="eager",
                attention="flash2",
                experts="early",
                context=(),
                optimizer_alone=False,
                pipelines=False,
                expert_parallel=False,
                recompute=("full",),
            ),
            Framework(
                name="partita",
                stack="eager",
                attention="flash2",
                experts="early",
                gradient_overlap=False,
                unit_overlap=False,
                context_overlap=False,
                # What ``runtime/executor.py`` runs; it recomputes whole blocks.
                context=(),
                sequence_parallel=False,
                expert_parallel=False,
                recompute=("full",),
                rank_orders=(),
            ),
        )
    }
)
"""Frameworks by name; a release that computes otherwise has a row of its own."""
DEFAULT_FRAMEWORK = "megatron"


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Degrees and choices of one way to train a transformer on devices.

    Attributes:
        tp: Tensor-parallel degree.
        sp: Whether norms and dropouts are split along the sequence in the tensor-parallel group.
        pp: Pipeline stages.
        vp: Virtual stages per device.
        cp: Context-parallel degree.
        cp_kind: ``ring`` or ``all-to-all``.
        ep: Expert-parallel degree.
        etp: Tensor-parallel degree of the experts.
        dp: Data-parallel degree.
        zero: What is sharded over data-parallel ranks: 0 nothing, 1 optimizer state, 2 gradients
            too, 3 weights too.
        shard_group: Ranks that share a shard (HSDP); 0 = all data-parallel ranks.
        microbatch: Sequences per microbatch and data-parallel rank.
        recompute: Names of ``RECOMPUTE``.
        offload_optimizer: Share of the optimizer's state that lies in host memory.
        offload_activations: Share of the activations that lies in host memory.
        precision: Name of a preset of ``core/precision.py``.
        framework: Name of a row of ``FRAMEWORKS``.
        stack: Kernels beside the matrix products; empty = the framework's.
        tp_overlap: Whether tensor-parallel collectives overlap; ``None`` = as the framework does.
        expert_overlap: Whether the all-to-all of experts runs under another microbatch's work.
        rank_order: Degrees by which ranks are numbered, the innermost first.
    """

    tp: int = 1
    sp: bool = False
    pp: int = 1
    vp: int = 1
    cp: int = 1
    cp_kind: str = "ring"
    ep: int = 1
    etp: int = 1
    dp: int = 1
    zero: int = 0
    shard_group: int = 0
    microbatch: int = 1
    recompute: tuple[str, ...] = ()
    offload_optimizer: float = 0.0
    offload_activations: float = 0.0
    precision: str = "bf16"
    framework: str = DEFAULT_FRAMEWORK
    stack: str = ""
    tp_overlap: bool | None = None
    expert_overlap: bool = False
    rank_order: str = DEFAULT_ORDER

    @property
    def strides(self) -> dict[str, int]:
        """Devices from one rank to the next, by degree."""
        found, stride = {}, 1
        for name in self.rank_order.split("-"):
            found[name] = stride
            stride *= getattr(self, name)
        return found

    @property
    def devices(self) -> int:
        """Number of devices that the layout covers."""
        return self.tp * self.pp * self.cp * self.dp

    @property
    def chunks(self) -> int:
        """Number of pieces that the layers are cut into."""
        return self.pp * self.vp

    @property
    def sharding(self) -> int:
        """Ranks over which dense state is sharded."""
        return self.shard_group or self.dp * self.cp

    def check(self, shape: Shape, *, batch: int, sequence_length: int) -> None:
        """Refuse what cannot run, in one line that names the rule.

        Raises:
            InvalidInputError: A degree does not divide what it must, or the framework cannot.
        """
        for rule in self.broken_rules(shape, batch=batch, sequence_length=sequence_length):
            raise InvalidInputError(f"layout {self}: {rule}")

    def broken_rules(  # noqa: C901, PLR0912, PLR0915 (one rule after the other)
        self, shape: Shape, *, batch: int, sequence_length: int
    ) -> Iterator[str]:
        """Yield the rules that the layout breaks, in words, which are made where one is broken."""
        degrees = ("tp", "pp", "vp", "cp", "ep", "etp", "dp", "microbatch")
        low = [what for what in degrees if getattr(self, what) < 1]
        framework = FRAMEWORKS.get(self.framework)
        if low:
            yield f"{low[0]} is {getattr(self, low[0])}; expected 1 or more"
            return
        order = self.rank_order
        if order != DEFAULT_ORDER and sorted(order.split("-")) != sorted(RANKED):
            yield f"rank order {self.rank_order!r} has not each of {', '.join(RANKED)} once"
            return
        if framework is None:
            known = ", ".join(FRAMEWORKS)
            yield f"framework {self.framework!r} is not known; expected one of {known}"
            return
        unknown = [name for name in self.recompute if name not in RECOMPUTE]
        stage = self.tp * self.cp * self.dp
        name = framework.name
        missing = [one for one in self.recompute if one not in framework.recompute]
        kv_fits = shape.kv_heads % self.tp == 0 or self.tp % shape.kv_heads == 0
        if unknown:
            yield f"recompute {unknown[:1]} is not one of {', '.join(RECOMPUTE)}"
        if missing:
            yield (
                f"{name} cannot recompute {', '.join(missing)} alone; it has "
                f"{', '.join(framework.recompute)}"
            )
        if not shape.experts and "experts" in self.recompute:
            yield "a model without experts has none to recompute"
        if shape.heads % self.tp != 0:
            yield f"{shape.heads} heads are no multiple of tp"
        if not kv_fits:
            yield f"{shape.kv_heads} kv heads and tp do not divide each other"
        if shape.ffn % self.tp != 0:
            yield f"ffn {shape.ffn} is no multiple of tp"
        if shape.layers < self.chunks:
            yield f"{shape.layers} layers are fewer than pp x vp = {self.chunks} chunks"
        if self.pp != 1 and not framework.pipelines:
            yield f"{name} has no pipelines: pp is {self.pp}"
        if self.vp != 1 and self.pp <= 1:
            yield "virtual stages need pp > 1"
        if batch % (self.dp * self.microbatch) != 0:
            yield f"batch {batch} is no multiple of dp x microbatch"
        if self.vp != 1 and (batch // (self.dp * self.microbatch)) % self.pp != 0:
            yield (
                f"virtual stages need a number of microbatches that is a multiple of pp; got "
                f"{batch // max(1, self.dp * self.microbatch)}"
            )
        if self.sp and self.tp <= 1:
            yield "sequence parallelism needs tp > 1"
        if self.sp and sequence_length % (self.tp * self.cp) != 0:
            yield f"sequence length {sequence_length} is no multiple of tp"
        if self.cp != 1 and sequence_length % (2 * self.cp) != 0:
            yield f"sequence length {sequence_length} is no multiple of 2 cp"
        if self.cp != 1 and self.cp_kind != "ring" and self.tp * self.cp > shape.kv_heads:
            yield f"all-to-all context parallelism needs tp x cp <= {shape.kv_heads} kv heads"
        if not shape.experts and self.ep * self.etp != 1:
            yield "a model without experts has no ep or etp"
        if self.ep != 1 and shape.experts % self.ep != 0:
            yield f"{shape.experts} experts are no multiple of ep"
        if self.ep != 1 and not framework.expert_parallel:
            yield f"{name} has no expert parallelism"
        if framework.wide_experts and self.ep != 1 and self.ep < self.tp:
            yield f"{name} divides experts at least as often as tensors: ep {self.ep} is below tp"
        if stage % (self.ep * self.etp) != 0:
            yield "ep x etp does not divide tp x cp x dp"
        if self.tp != 1 and self.ep != 1 and not self.sp:
            yield "tp with ep needs sequence parallelism"
        if self.expert_overlap and not framework.expert_overlap:
            yield f"{name} cannot run the all-to-all of experts under other work"
        if self.expert_overlap and (
            self.ep <= 1
            or (self.pp != 1 and self.vp <= 1)
            or "full" in self.recompute
            or batch <= self.dp * self.microbatch
        ):
            yield (
                "experts overlapped need ep > 1, virtual stages where pp > 1, several microbatches "
                "and no full recomputation"
            )
        if not (0 <= self.zero <= 3):
            yield f"zero is {self.zero}; expected 0 to 3"
        if self.zero > framework.max_zero:
            yield f"{name} shards at most zero {framework.max_zero}"
        if self.zero == 1 and not framework.optimizer_alone:
            yield f"{name} shards no optimizer's state alone (zero 1)"
        if self.cp != 1 and self.cp_kind not in framework.context:
            yield f"{name} has no context parallelism of kind {self.cp_kind!r}"
        if self.pp != 1 and self.zero > framework.max_zero_with_pp:
            yield f"{name} shards at most zero {framework.max_zero_with_pp} beside pp > 1"
        if self.shard_group != 0 and (self.dp * self.cp) % self.shard_group != 0:
            yield f"a shard group of {self.shard_group} does not divide dp x cp"
        if self.vp != 1 and not framework.interleaving:
            yield f"{name} has no virtual stages"
        if framework.rank_orders and self.rank_order not in framework.rank_orders:
            yield f"{name} numbers ranks {' or '.join(framework.rank_orders)} from the inside"
        if self.sp and not framework.sequence_parallel:
            yield f"{name} has no sequence parallelism"
        if self.offload_activations != 0 and (self.pp != 1 or self.recompute):
            yield f"{name} cannot offload activations beside pp > 1 or recomputation"

    def __str__(self) -> str:
        parts = [f"tp {self.tp}", f"pp {self.pp}", f"dp {self.dp}"]
        parts += [f"vp {self.vp}"] * (self.vp > 1) + [f"cp {self.cp}"] * (self.cp > 1)
        parts += [f"ep {self.ep}"] * (self.ep > 1) + [f"etp {self.etp}"] * (self.etp > 1)
        parts += ["experts overlapped"] * self.expert_overlap
        parts += [f"zero {self.zero}"] * (self.zero > 0)
        parts += [f"shards of {self.shard_group}"] * (self.shard_group > 0)
        parts += [f"microbatch {self.microbatch}"]
        parts += [f"ranks {self.rank_order}"] * (self.rank_order != DEFAULT_ORDER)
        parts += [f"recompute {'+'.join(self.recompute)}"] * bool(self.recompute)
        if self.offload_optimizer:
            parts.append(f"{self.offload_optimizer:.0%} of the state in host memory")
        if self.offload_activations:
            parts.append(f"{self.offload_activations:.0%} of activations in host memory")
        return ", ".join(parts)


class Layouts(NamedTuple):
    """Degrees and choices of many layouts: columns, or a number where all have the same.

    ``shards`` are the ranks that share a shard, ``strides`` the devices from one rank to the next
    by degree; ``again`` has a column of 0 and 1 for each name of ``RECOMPUTE``. Precision and
    framework are one for all and stand elsewhere.
    """

    tp: Numbers
    sp: Numbers
    pp: Numbers
    vp: Numbers
    cp: Numbers
    ring: Numbers
    ep: Numbers
    etp: Numbers
    dp: Numbers
    zero: Numbers
    shards: Numbers
    microbatch: Numbers
    again: Mapping[str, Numbers]
    strides: Mapping[str, Numbers]
    expert_overlap: Numbers = 0.0
    offload_optimizer: Numbers = 0.0
    offload_activations: Numbers = 0.0


def columns_of(layouts: Sequence[Layout]) -> Layouts:
    """Return layouts as columns."""

    def column(name: str) -> Numbers:
        return np.array([getattr(layout, name) for layout in layouts], dtype=np.float64)

    names = ("tp", "sp", "pp", "vp", "cp", "ep", "etp", "dp", "zero", "microbatch")
    strides = [layout.strides for layout in layouts]
    return Layouts(
        **{name: column(name) for name in names},
        ring=np.array([layout.cp_kind == "ring" for layout in layouts], dtype=np.float64),
        shards=column("sharding"),
        again={
            name: np.array([name in layout.recompute for layout in layouts], dtype=np.float64)
            for name in RECOMPUTE
        },
        strides={
            name: np.array([found[name] for found in strides], dtype=np.float64) for name in RANKED
        },
        expert_overlap=column("expert_overlap"),
        offload_optimizer=column("offload_optimizer"),
        offload_activations=column("offload_activations"),
    )
