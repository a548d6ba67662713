"""Published runs of large transformers as shapes, layouts and jobs, and what is assumed of them.

Not everything is published. Assumed is, for all runs of a kind and never for a single one: a
microbatch of 1; microbatches of torchtitan's pipelines as many as its stages (its default); a layer
per virtual stage in Meta's; the degrees as printed where their product is not the number of
devices; expert tensor parallelism as wide as ``tp`` in NeMo's recipes (its default) and 1
elsewhere; eight microbatches per stage where no batch is printed; the release from the name of the
container; moments in bfloat16 in the recipe of Moonlight.
"""

import itertools
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from partita.catalogue.catalogue import load_catalogue
from partita.catalogue.overrides import apply_overrides
from partita.catalogue.shorthand import read_shorthand
from partita.core.precision import parse_precision
from partita.cost.links import fabric_of
from partita.transformer.kernels import (
    Arithmetic,
    Case,
    Constants,
    Job,
    Machine,
    Software,
    machine_of,
    software_of,
)
from partita.transformer.layout import Layout, Layouts, columns_of
from partita.transformer.price import job_of
from partita.transformer.shape import Shape, Sizes, sizes_of

LATENT = {
    "deepseek-v3": {"query_rank": 1536, "kv_rank": 512, "rope_dim": 64, "head_dim": 128},
    "kimi-k2": {"query_rank": 1536, "kv_rank": 512, "rope_dim": 64, "head_dim": 128},
    "moonlight-16b": {"kv_rank": 512, "rope_dim": 64, "head_dim": 128},
}
WINDOWED = {"gpt-oss-120b": {"window": 128, "window_layers": 18}}
DENSE_FRONT = {"deepseek-v3": 3, "kimi-k2": 1, "moonlight-16b": 1}
HOSTS = {
    "A100-80GB": "dgx-a100",
    "A100-40GB": "dgx-a100-40gb",
    "H100": "dgx-h100",
    "H200": "dgx-h200",
    "B200": "dgx-b200",
    "B300": "dgx-b300",
    "GB200": "gb200-nvl72",
    "GB300": "gb300-nvl72",
    "MI325X": "mi325x-platform",
    "MI355X": "mi355x-platform",
}
FAMILY = {"a100": "ampere", "h100": "hopper", "h200": "hopper", "mi": "cdna"}
ONE_LAYER = "Meta internal"
"""Interleaved pipelines of one layer per virtual stage, two of which have embedding and head alone:
126 layers and those two over 16 devices (Llama 3 herd of models, section 3.3.2)."""
SINGLE_NODE = "vTrain, single node of 8 A100"


@dataclass(frozen=True, kw_only=True)
class Row:
    """One published run.

    Attributes:
        source: Title of the publication.
        machine: Name of a host in the catalogue, with what differs from it.
        formats: Float8, scaled by blocks, scaled by rows.
        frozen: Share of the weights that is not trained.
        step_s: Measured seconds of a step.
        memory_bytes: Measured bytes per device; 0 = not published.
        guessed: Whether the microbatch or the batch is assumed.
    """

    id: str
    sets: frozenset[str]
    source: str
    model: str
    shape: Shape
    layout: Layout
    batch: float
    sequence_length: int
    machine: str
    formats: tuple[float, float, float]
    frozen: float
    step_s: float
    memory_bytes: float
    guessed: bool

    @property
    def family(self) -> str:
        """Family of devices."""
        name = self.machine.removeprefix("dgx-")
        return next((to for start, to in FAMILY.items() if name.startswith(start)), "blackwell")


def read_rows(path: Path) -> tuple[list[Row], dict[str, str]]:
    """Return the runs of a file, and why others are left out by id."""
    data = json.loads(path.read_text(encoding="utf-8"))
    shapes = {name: found for name, m in data["models"].items() if (found := _shape(name, m))}
    sets: dict[str, set[str]] = {}
    for name, members in data["sets"].items():
        lists = [members] if isinstance(members, list) else members.values()
        for found in itertools.chain.from_iterable(lists):
            sets.setdefault(found, set()).add(name)
    rows, skipped = [], {}
    for entry in data["rows"]:
        found = _row(entry, shapes.get(entry["model"]), frozenset(sets.get(entry["id"], ())))
        if isinstance(found, Row):
            rows.append(found)
        else:
            skipped[entry["id"]] = found
    return rows + _single_node(data["tables"][0]), skipped


def _shape(name: str, model: dict[str, Any]) -> Shape | None:
    if not model.get("hidden") or not model.get("vocab") or name == "qwen3-next-80b-a3b":
        return None
    experts = model.get("experts") or 0
    wide = model.get("moe_ffn") or (model.get("ffn") if experts else 0) or 0
    if experts and not wide:
        return None
    return Shape(
        name=name,
        hidden=model["hidden"],
        layers=model["layers"],
        heads=model["heads"],
        kv_heads=model.get("kv_heads") or 0,
        ffn=model.get("ffn") or 0,
        gated=model.get("mlp", "swiglu") in ("swiglu", "geglu"),
        vocab=model["vocab"],
        tied=bool(model.get("tied")),
        experts=experts,
        top_k=model.get("top_k") or 0,
        expert_ffn=wide,
        shared_ffn=(model.get("shared_experts") or 0) * wide,
        dense_layers=DENSE_FRONT.get(name, model.get("dense_layers") or 0),
        expert_interval=2 if "maverick" in name else 1,
        **{"head_dim": model.get("head_dim") or 0, **LATENT.get(name, {})},
        **WINDOWED.get(name, {}),
    )


def _framework(text: str) -> str:
    release = re.search(r"(\d\d)\.(\d\d)", text)
    number = int(release[1]) + int(release[2]) / 12 if release else 26.6 if "2026" in text else 24
    for start, name in (
        ("MegaScale", "megatron-25.04"),
        ("Megatron-LM", "megatron-2021"),
        ("Megatron-DeepSpeed", "megatron-2021"),
        ("Composer", "fsdp1"),
        ("Colossal", "fsdp1"),
        ("MaxText", "maxtext"),
        ("torchtitan 2025", "torchtitan"),
        ("torchtitan (FSDP2) 2025", "torchtitan"),
        ("torchtitan", "torchtitan-2024"),
        ("Meta", "torchtitan"),
        ("DeepSpeed", "deepspeed"),
    ):
        if text.startswith(start):
            return name
    steps = ((25, "megatron-24.07"), (25.7, "megatron-25.04"), (26.45, "megatron-26.02"))
    return next((name for limit, name in steps if number < limit), "megatron")


def _recompute(text: str) -> tuple[str, ...]:
    if text.startswith("full"):
        return ("full",)
    if "per op" in text or "every 2nd" in text:
        return ("products",)
    parts = {"selective": "attention", "core_attn": "attention", "mlp": "mlp", "moe": "experts"}
    parts |= {"mla_up_proj": "projections", "layernorm": "norm"}
    words = re.split(r"[,:]\s*", text)
    return tuple({parts[word] for word in words if word in parts})


def _machine(entry: dict[str, Any]) -> str | None:
    gpu = entry["gpu"]
    host = next((name for start, name in HOSTS.items() if gpu.startswith(start)), None)
    if host == "dgx-h100" and "96GB" in gpu:
        return "dgx-h100 500 W"
    if host == "dgx-a100" and "inter-node 800" in str(entry["network"]):
        return "dgx-a100 800 Gb/s"
    return host


def _missing(entry: dict[str, Any], shape: Shape | None) -> str:
    """Return why a run cannot be priced; empty = it can."""
    if shape is None:
        return "the shape is not published"
    if "fp4" in entry["precision"]:
        return "products of four bits are not priced"
    if _machine(entry) is None or entry["seq"] is None:
        return "the device or the length is not known"
    return ""


def _row(entry: dict[str, Any], shape: Shape | None, sets: frozenset[str]) -> Row | str:
    machine, length = _machine(entry), entry["seq"]
    extra = entry.get("extra") or {}
    if reason := _missing(entry, shape):
        return reason
    assert shape is not None
    assert machine is not None
    shape = replace(shape, layers=extra.get("layers_override") or shape.layers)
    tp, pp, cp = (entry[key] or 1 for key in ("tp", "pp", "cp"))
    vp, batch = entry["vp"] or 1, entry["gbs"]
    if "Interleaved" in str(extra.get("schedule")):
        vp = 2
    if entry["framework"].startswith(ONE_LAYER) and pp > 1:
        vp = round((shape.layers + 2) / pp)
    dp = entry["gpus"] / (tp * pp * cp)
    devices = entry["gpus"]
    if batch is None and entry["mbs"]:
        batch = entry["mbs"] * dp * 8 * pp
    if batch is None:
        return "the batch is not published"
    if dp > batch or dp != int(dp):
        dp = entry["dp"]
        devices = tp * pp * cp * dp
    framework = _framework(entry["framework"])
    microbatch = entry["mbs"] or 1
    by_stages = framework.startswith("torchtitan") and not entry["framework"].startswith(ONE_LAYER)
    if by_stages and pp > 1 and entry["mbs"] is None:
        microbatch = max(1, batch // (int(dp) * pp * vp))
    microbatch = max(1, min(microbatch, int(batch / dp)))
    step_s = _step_s(entry, shape, batch, devices)
    if step_s is None:
        return "no time is published"
    precision, formats = _precision(entry["precision"], framework)
    if entry["model"] == "moonlight-16b":
        precision = "bf16,state=bfloat16"
    zero = entry["zero"]
    zero = int(zero[0]) if isinstance(zero, str) else zero or 0
    stack = ""
    compiled = extra.get("compile")
    if framework == "torchtitan-2024" and not compiled and "nightly" not in entry["framework"]:
        stack = "eager"
    if compiled is False:
        stack = "eager"
    etp = entry["etp"] or (tp if entry["framework"].startswith("NeMo/") and shape.experts else 1)
    asynchronous = extra.get("async_tp")
    layout = Layout(
        tp=tp,
        sp=bool(entry["sequence_parallel"]) and tp > 1,
        pp=pp,
        vp=vp,
        cp=cp,
        ep=entry["ep"] or 1,
        etp=etp,
        dp=int(dp),
        zero=zero,
        shard_group=extra.get("shard_group") or 0,
        microbatch=microbatch,
        recompute=_recompute(str(entry["recompute"])),
        precision=precision,
        framework=framework,
        stack=stack,
        tp_overlap=asynchronous,
        expert_overlap="EP overlap" in str(entry["notes"]),
    )
    return Row(
        id=entry["id"],
        sets=sets,
        source=entry["source"]["title"],
        model=entry["model"],
        shape=shape,
        layout=layout,
        batch=batch,
        sequence_length=length,
        machine=machine,
        formats=formats,
        frozen=1.0 if "LoRA" in str(extra.get("task")) else 0.0,
        step_s=step_s,
        memory_bytes=_memory_bytes(entry["measured"]),
        guessed=entry["mbs"] is None or entry["gbs"] is None,
    )


def _precision(text: str, framework: str) -> tuple[str, tuple[float, float, float]]:
    low = text.lower()
    float8 = float("fp8" in low)
    block = float("mx" in low or "alternative" in low)
    formats = (float8, block, float("rowwise" in low))
    if "pure" in low:
        return "pure-bf16", formats
    if framework.startswith(("torchtitan", "fsdp1")):
        return "bf16-mixed", formats
    if low.startswith("fp16"):
        return "fp16", formats
    return ("fp8" if float8 else "bf16"), formats


def _step_s(entry: dict[str, Any], shape: Shape, batch: float, devices: float) -> float | None:
    """Return the measured step: printed, from tokens or samples per second, or from FLOP/s."""
    measured, derived = entry["measured"], entry.get("derived") or {}
    tokens = batch * entry["seq"]
    if step := measured.get("step_s") or derived.get("step_s"):
        return float(step)
    if rate := measured.get("tokens_per_s_per_gpu"):
        return float(tokens / (rate * devices))
    if rate := measured.get("samples_per_s"):
        return float(batch / rate)
    if rate := measured.get("tflops_per_gpu"):
        # Megatron-Bridge counts the causal half of attention, NeMo before it all of it.
        halved = "Bridge" in entry["source"]["title"]
        flops = 3 * shape.forward_flops(tokens, entry["seq"], halved=halved)
        return float(flops / (rate * 1e12 * devices))
    return None


def _memory_bytes(measured: dict[str, Any]) -> float:
    for key, unit in (
        ("memory_gib_per_gpu", 2**30),
        ("memory_gb_per_gpu", 1e9),
        ("memory_mib_per_gpu", 2**20),
    ):
        if key in measured:
            return float(measured[key] * unit)
    return 0.0


def _single_node(table: dict[str, Any]) -> list[Row]:
    rows = []
    for index, values in enumerate(table["rows"]):
        run = dict(zip(table["columns"], values, strict=True))
        shape = Shape(
            hidden=run["hidden"],
            layers=run["layers"],
            heads=run["heads"],
            ffn=4 * run["hidden"],
            gated=False,
            vocab=51200,
            tied=True,
        )
        layout = Layout(
            tp=run["tp"],
            pp=run["pp"],
            dp=run["dp"],
            microbatch=run["mbs"],
            recompute=("full",),
            precision="fp16",
            framework="megatron-2021",
        )
        rows.append(
            Row(
                id=f"vtrain-single-{index}",
                sets=frozenset({"vtrain_single_node"}),
                source=SINGLE_NODE,
                model="gpt",
                shape=shape,
                layout=layout,
                batch=run["gbs"],
                sequence_length=run["seq"],
                machine="dgx-a100",
                formats=(0.0, 0.0, 0.0),
                frozen=0.0,
                step_s=run["step_ms"] / 1e3,
                memory_bytes=0.0,
                guessed=False,
            )
        )
    return rows


@cache
def _links_and_device(text: str) -> tuple[Any, Any, float | None]:
    name, *changes = text.split(" ", 1)
    cluster = read_shorthand(f"2x{name}", load_catalogue())
    device, power = cluster.devices[0], None
    if changes == ["800 Gb/s"]:
        # Four ports of 200 Gb/s for eight devices.
        cluster = apply_overrides(cluster, bandwidth="rack=12.5e9")
    if changes == ["500 W"]:
        device = replace(device, memory_bytes=96e9, memory_bytes_per_s=2.4e12)
        power = 500.0
    return fabric_of(cluster), device, power


def machine_for(text: str, constants: Constants) -> Machine:
    """Return the machine of a row under some constants."""
    fabric, device, power = _links_and_device(text)
    return machine_of(device, fabric, power_w=power, constants=constants)


class Cases:
    """Rows in groups of one machine each, ready to be priced under other constants."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self.rows = list(rows)
        self.step_s = np.array([row.step_s for row in rows])
        self.groups: list[_Group] = []
        names = np.array([row.machine for row in rows])
        for name in sorted(set(names)):
            index = np.flatnonzero(names == name)
            members = [rows[i] for i in index]
            kinds: dict[tuple[Any, ...], int] = {}
            kind = [kinds.setdefault(_kind(row.layout), len(kinds)) for row in members]
            self.groups.append(
                _Group(
                    machine=name,
                    index=index,
                    sizes=sizes_of([row.shape for row in members]),
                    layouts=columns_of([row.layout for row in members]),
                    job=_jobs(members),
                    kinds=[members[kind.index(number)].layout for number in range(len(kinds))],
                    kind=np.array(kind),
                )
            )

    def cases(self, constants: Constants) -> list[tuple[np.ndarray, Case]]:
        """Return a case for each machine, with the rows it stands for."""
        found = []
        for group in self.groups:
            machine = machine_for(group.machine, constants)
            each = [software_of(row, machine, constants=constants) for row in group.kinds]
            parts: dict[str, Any] = {}
            for name in Software._fields:
                values = np.array([getattr(one, name) for one in each])[group.kind]
                parts[name] = values if values.ndim == 1 else tuple(values.T)
            case = Case(
                group.sizes, group.layouts, group.job, machine, Software(**parts), constants
            )
            found.append((group.index, case))
        return found


class _Group(NamedTuple):
    """Rows of one machine as columns, and the kinds of software among them."""

    machine: str
    index: np.ndarray
    sizes: Sizes
    layouts: Layouts
    job: Job
    kinds: list[Layout]
    kind: np.ndarray


def _kind(row: Layout) -> tuple[Any, ...]:
    return row.framework, row.stack, row.tp_overlap, row.expert_overlap


def _jobs(rows: Sequence[Row]) -> Job:
    jobs = [
        job_of(
            parse_precision(row.layout.precision),
            batch=1,
            sequence_length=row.sequence_length,
            frozen=row.frozen,
        )
        for row in rows
    ]
    parts = {
        name: np.array([getattr(job, name) for job in jobs])
        for name in Job._fields
        if name != "arithmetic"
    }
    parts["batch"] = np.array([row.batch for row in rows], dtype=float)
    return Job(arithmetic=Arithmetic(*np.array([row.formats for row in rows]).T), **parts)
