"""Megatron-LM and Megatron-Core: their command line, written and read.

The cut is written as ``--pipeline-model-parallel-layout``, always: without one 30 layers on four
stages have become 28. A script or file of arguments is read word by word and never executed.
"""

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, replace

from partita.core.grid import Grid, even_cuts, unit_cuts
from partita.core.plan import Shard
from partita.core.schedules import DEFAULT_SCHEDULE, Schedule
from partita.errors import FormatError, InfeasibleError
from partita.trainers.shell import Word, commands
from partita.trainers.target import PlanToWrite, Written, check_options, torchrun_words

FILE = "megatron_args.sh"
_MODULES = {
    "attention": "core_attn",
    "norm": "layernorm",
    "mlp": "mlp",
    "experts": "moe",
    "projections": "mla_up_proj",
}
"""Names of sets of recomputation in ``--recompute-modules``."""
_STRATEGIES = {Shard.GRADIENTS: "optim_grads", Shard.PARAMETERS: "optim_grads_params"}
_PRECISIONS: Mapping[str, tuple[str, ...]] = {
    "fp32": (),
    "bf16-fp32-grads": ("--bf16",),
    "bf16": ("--bf16", "--grad-reduce-in-bf16"),
    "fp16": ("--fp16",),
    "fp8": ("--bf16", "--fp8-format hybrid"),
}
Flags = dict[str, str | None]
MAX_BLOCKS = 10_000


def flags_of(grid: Grid) -> Flags:
    """Return a grid as flags of Megatron; those that are at their default are left out.

    Raises:
        InfeasibleError: It recomputes what Megatron cannot.
    """
    flags: Flags = {
        "--tensor-model-parallel-size": str(grid.tp),
        "--pipeline-model-parallel-size": str(grid.pp),
    }
    if grid.sequence_parallel:
        flags["--sequence-parallel"] = None
    if grid.cp > 1:
        flags["--context-parallel-size"] = str(grid.cp)
    if grid.ep > 1:
        flags["--expert-model-parallel-size"] = str(grid.ep)
        flags["--expert-tensor-parallel-size"] = str(max(grid.etp, 1))
    flags["--num-layers"] = str(grid.num_blocks)
    if grid.pp > 1:
        flags["--pipeline-model-parallel-layout"] = write_layout(grid.cuts)
    flags["--micro-batch-size"] = str(grid.microbatch_size)
    flags["--global-batch-size"] = str(grid.batch_size)
    flags |= _sharding(grid) | _recomputation(grid)
    if grid.offload_optimizer:
        flags["--optimizer-cpu-offload"] = None
        flags["--optimizer-offload-fraction"] = f"{grid.offload_optimizer:g}"
    if not grid.tied:
        flags["--untie-embeddings-and-output-weights"] = None
    for text in _PRECISIONS.get(grid.precision, ()):
        name, _, value = text.partition(" ")
        flags[name] = value or None
    return flags


def _sharding(grid: Grid) -> Flags:
    flags: Flags = {}
    if grid.shard is Shard.OPTIMIZER:
        flags["--use-distributed-optimizer"] = None
    elif grid.shard in _STRATEGIES:
        flags["--use-megatron-fsdp"] = None
        flags["--data-parallel-sharding-strategy"] = _STRATEGIES[grid.shard]
    if grid.shard_group:
        copies = grid.dp * grid.cp // grid.shard_group
        flags["--num-distributed-optimizer-instances"] = str(copies)
    return flags


def _recomputation(grid: Grid) -> Flags:
    if not grid.recompute:
        return {}
    if grid.recomputes_blocks:
        if grid.recompute_blocks:
            method, count = "block", grid.recompute_blocks
        else:
            method, count = "uniform", 1
        return {
            "--recompute-granularity": "full",
            "--recompute-method": method,
            "--recompute-num-layers": str(count),
        }
    modules = [_MODULES.get(name) for name in grid.recompute.split("+")]
    if None in modules:
        raise InfeasibleError(
            f"Megatron cannot recompute {grid.recompute}; it has full, {', '.join(_MODULES)}"
        )
    return {
        "--recompute-granularity": "selective",
        "--recompute-modules": " ".join(map(str, modules)),
    }


def write_layout(cuts: tuple[int, ...]) -> str:
    """Return the cut as a layout of stages.

    >>> write_layout((2, 3, 5, 0))
    'Ett|ttt|t*5|L'
    """
    parts = [f"t*{count}" if count > 3 else "t" * count for count in cuts]
    parts[0] = f"E{parts[0]}"
    parts[-1] = f"{parts[-1]}L"
    return "|".join(parts)


def read_layout(text: str) -> tuple[int, ...]:
    """Return the blocks of each stage in a layout.

    >>> read_layout("Ett|(t|)*2tL"), read_layout("E,t*3 | tL")
    ((2, 1, 1, 1), (3, 1))

    Raises:
        FormatError: It is none, or has what a plan cannot hold (MTP layers).
    """
    flat = _unrolled(re.sub(r"[\s,]", "", text))
    stages = flat.split("|")
    odd = sorted(set(flat) - set("Etm|L"))
    if odd:
        raise FormatError(f"layout {text[:60]!r} has {odd[0]!r}; expected E, t, m, L and |")
    joined = "".join(stages)
    if joined.count("E") != 1 or joined.count("L") != 1 or joined[0] != "E" or joined[-1] != "L":
        raise FormatError(f"layout {text[:60]!r} does not begin with one E and end with one L")
    if "m" in joined:
        raise FormatError(f"layout {text[:60]!r} has MTP layers, which are not modelled")
    return tuple(stage.count("t") for stage in stages)


def _unrolled(text: str) -> str:
    """Return a layout without ``x*n`` and ``(...)*n``."""
    pattern = re.compile(r"\(([^()]*)\)\*([0-9]{1,5})|([Etm|L])\*([0-9]{1,5})")
    for _ in range(64):
        found = pattern.search(text)
        if found is None:
            return text
        inner, times = found.group(1) or found.group(3) or "", found.group(2) or found.group(4)
        if len(inner) * int(times) + len(text) > 4 * MAX_BLOCKS:
            raise FormatError(f"a layout has more than {MAX_BLOCKS} blocks")
        text = text[: found.start()] + inner * int(times) + text[found.end() :]
    raise FormatError("a layout repeats parts more than 64 times")


def write_megatron(plan: PlanToWrite) -> Written:
    """Return a plan as arguments of Megatron, in an array of bash.

    Raises:
        InfeasibleError: Megatron cannot run it.
    """
    check_options(plan, (), "megatron")
    grid = plan.grid_for("megatron")
    flags = flags_of(grid)
    lines = [
        f"  {name}" if value is None else f"  {name} {_values(name, value)}"
        for name, value in flags.items()
    ]
    text = f"#!/bin/bash\n{plan.comment()}PLAN_ARGS=(\n" + "\n".join(lines) + "\n)\n"
    nodes = plan.nodes
    if len({len(node.local) for node in nodes}) == 1:
        each = len(nodes[0].local)
        text += f"PLAN_NODES=(--nproc-per-node {each} --nnodes {len(nodes)})\n"
    script = 'pretrain_gpt.py "${PLAN_ARGS[@]}" "${YOUR_ARGS[@]}"'
    left = ["model sizes, data, optimizer and checkpoints"]
    if grid.precision not in _PRECISIONS:
        left.append(f"precision {grid.precision or 'of the model'}")
    remarks = [
        f"global batch {grid.batch_size} = {grid.microbatches} microbatches x "
        f"{grid.microbatch_size} x dp {grid.dp}"
    ]
    if grid.pp > 1:
        remarks.append("a checkpoint keeps its layout: load it with the same pipeline")
    return Written(
        files={FILE: text},
        command=f"source {FILE} && {torchrun_words(plan, script)}",
        process=f"source {FILE} && exec python {script}",
        left_to_you=tuple(left),
        remarks=tuple(remarks),
    )


def _values(name: str, value: str) -> str:
    return value if name == "--recompute-modules" else shlex.quote(value)


_KEYS = re.compile(
    r"--((tensor-|pipeline-|expert-)?model-parallel-[a-z-]+|context-parallel-size|num-layers"
    r"|micro-batch-size|global-batch-size|use-distributed-optimizer|recompute-[a-z-]+"
    r"|sequence-parallel|fp16|bf16|fp8-format)"
)
"""Flags that only a command of Megatron has."""
_OLD = {
    "--model-parallel-size": "--tensor-model-parallel-size",
    "--intra-layer-model-parallel-size": "--tensor-model-parallel-size",
    "--inter-layer-model-parallel-size": "--pipeline-model-parallel-size",
    "--batch-size": "--micro-batch-size",
    "--num-gpus": "--nproc-per-node",
    "--num-nodes": "--nnodes",
}
"""Names of flags in releases before 2021 and in launchers of others."""


def read_megatron(text: str) -> Grid:
    """Return the grid of a script or a file of arguments; nothing is executed.

    Raises:
        FormatError: A value is wrong, stands in a variable that the file does not set, depends on
            a branch, or differs between two commands.
    """
    flags = _flags(text)
    if not any(map(_KEYS.fullmatch, flags)):
        raise FormatError("no flags of Megatron with values; expected a script or arguments")
    return _grid(_Arguments(flags))


def looks_like_megatron(text: str) -> bool:
    """Return whether a text has flags of Megatron."""
    flags = r"--[a-z_-]*model[-_]parallel[-_]size\b|--micro[-_]batch[-_]size\b"
    return bool(re.search(flags, text))


@dataclass(frozen=True, slots=True)
class _Flag:
    """A flag of a command.

    Attributes:
        line: Where it stands.
        values: The words behind it.
        branch: Line of a branch that it or a value depends on; 0 = none.
        other: Another value that a later command has for it, and its line.
    """

    line: int
    values: tuple[str, ...]
    branch: int = 0
    other: tuple[int, tuple[str, ...]] | None = None


def _flags(text: str) -> dict[str, _Flag]:
    """Return the flags of the commands of Megatron in a script."""
    found: dict[str, _Flag] = {}
    for command in commands(text):
        flags = _flags_of(command)
        # A line that begins with a flag is one of a list of arguments.
        is_list = command[:1] and command[0].text.startswith("--")
        if not is_list and not any(map(_KEYS.fullmatch, flags)):
            continue
        for name, flag in flags.items():
            before = found.setdefault(name, flag)
            if before.values != flag.values and before.other is None:
                found[name] = replace(before, other=(flag.line, flag.values))
    return found


def _flags_of(command: list[Word]) -> dict[str, _Flag]:
    found: dict[str, _Flag] = {}
    name = ""
    for word in command:
        if word.text.startswith("--") and len(word.text) > 2:
            name, sign, value = word.text.partition("=")
            name = name.replace("_", "-")
            name = _OLD.get(name, name)
            values = (value,) if sign and value else ()
            found[name] = _Flag(word.line, values, word.branch)
        elif name:
            flag = found[name]
            branch = flag.branch or word.branch
            found[name] = replace(flag, values=(*flag.values, word.text), branch=branch)
    return found


class _Arguments:
    """The flags of a script, read as numbers, names and switches."""

    def __init__(self, flags: Mapping[str, _Flag]) -> None:
        self._flags = flags
        self._read: set[str] = set()

    def texts(self, name: str) -> tuple[str, ...]:
        """Return the words behind a flag, which must not depend on what the file does not say."""
        if not self.has(name):
            return ()
        flag = self._flags[name]
        for value in flag.values:
            self._check_known(name, value)
        return flag.values

    def _check_known(self, name: str, value: str) -> None:
        if "$" in value:
            raise FormatError(
                f"{name} is {value[:60]!r}, a variable that the file does not set; write its value",
                line=self._flags[name].line,
            )

    def text(self, name: str, usual: str = "") -> str:
        """Return the first word behind a flag."""
        if not self.has(name) or not self._flags[name].values:
            return usual
        value = self._flags[name].values[0]
        self._check_known(name, value)
        return value

    def known(self, name: str) -> str:
        """Return a value that may stand in a variable from outside; then empty."""
        self._read.add(name)
        flag = self._flags.get(name)
        value = flag.values[0] if flag and flag.values else ""
        return "" if "$" in value else value if self.has(name) else ""

    def has(self, name: str) -> bool:
        """Return whether a flag is given, in all that the file could mean."""
        self._read.add(name)
        flag = self._flags.get(name)
        if flag is None:
            return False
        if flag.branch:
            raise FormatError(
                f"{name} is set within a branch, which depends on what the file does not say; "
                "write it outside, or leave it out",
                line=flag.branch,
            )
        if flag.other is not None:
            line, values = flag.other
            raise FormatError(
                f"{name} is {' '.join(flag.values)[:40]!r} for one command and "
                f"{' '.join(values)[:40]!r} for another (line {line}); give a file with one",
                line=flag.line,
            )
        return True

    def count(self, name: str, usual: int) -> int:
        """Return a number from 1 on."""
        text = self.text(name)
        if not text:
            return usual
        if not re.fullmatch(r"[0-9]{1,7}", text) or int(text) < 1:
            line = self._flags[name].line
            raise FormatError(f"{name} is {text[:40]!r}; expected a number from 1 on", line=line)
        return int(text)

    def rest(self) -> dict[str, str]:
        """Return the flags that nobody has read."""
        return {
            name.lstrip("-"): " ".join(flag.values)[:200]
            for name, flag in sorted(self._flags.items())
            if name not in self._read
        }


_OF_START = ("--node-rank", "--master-addr", "--master-port", "--max-restarts")
"""Flags of torchrun that say nothing of a plan."""


def _grid(args: _Arguments) -> Grid:
    tp, pp = (
        args.count("--tensor-model-parallel-size", 1),
        args.count("--pipeline-model-parallel-size", 1),
    )
    cp, ep = args.count("--context-parallel-size", 1), args.count("--expert-model-parallel-size", 1)
    layers = args.count("--num-layers", 0)
    cuts, chunks = _cuts(args, pp, layers)
    size = args.count("--micro-batch-size", 0)
    batch = args.count("--global-batch-size", 0)
    dp = _replicas(args, tp * pp * cp)
    if size and batch % (size * max(dp, 1)):
        raise FormatError(
            f"--global-batch-size {batch} is no multiple of micro-batch {size} x dp {max(dp, 1)}"
        )
    recompute, blocks = _recompute(args)
    shard, group = _shard(args, dp * cp)
    if shard is Shard.PARAMETERS and pp == 1 and cuts:
        cuts = unit_cuts(layers)
        chunks = len(cuts)
    fraction = args.text("--optimizer-offload-fraction", "1")
    offloads = args.has("--optimizer-cpu-offload")
    return Grid(
        tp=tp,
        pp=pp,
        cp=cp,
        ep=ep,
        etp=args.count("--expert-tensor-parallel-size", tp) if ep > 1 else 0,
        dp=dp,
        sequence_parallel=args.has("--sequence-parallel") and tp > 1,
        chunks=chunks,
        cuts=cuts,
        shard=shard,
        shard_group=group,
        recompute=recompute,
        recompute_blocks=blocks,
        offload_optimizer=_share(fraction) if offloads else 0.0,
        batch_size=batch,
        microbatch_size=size,
        schedule=Schedule.INTERLEAVED if chunks > 1 else DEFAULT_SCHEDULE,
        tied=not args.has("--untie-embeddings-and-output-weights"),
        precision=_precision(args),
        annotations=args.rest(),
    )


def _share(text: str) -> float:
    try:
        share = float(text)
    except ValueError:
        share = -1.0
    if not 0 <= share <= 1:
        raise FormatError(f"--optimizer-offload-fraction is {text[:40]!r}; expected 0 to 1")
    return share


def _cuts(args: _Arguments, pp: int, layers: int) -> tuple[tuple[int, ...], int]:
    """Return the blocks of each stage and the stages of each rank."""
    layout = "".join(args.texts("--pipeline-model-parallel-layout"))
    per_stage = args.count("--num-layers-per-virtual-pipeline-stage", 0)
    virtual = args.count("--num-virtual-stages-per-pipeline-rank", 0)
    first = args.count("--decoder-first-pipeline-num-layers", 0)
    last = args.count("--decoder-last-pipeline-num-layers", 0)
    if layout:
        cuts = read_layout(layout)
        if len(cuts) % pp:
            raise FormatError(
                f"a layout of {len(cuts)} stages is no multiple of {pp} pipeline ranks"
            )
        if layers and sum(cuts) != layers:
            raise FormatError(f"the layout has {sum(cuts)} blocks, --num-layers is {layers}")
        return cuts, len(cuts) // pp
    if not layers:
        return (), max(virtual, 1)
    if first or last:
        rest, inner = layers - first - last, pp - bool(first) - bool(last)
        if inner < 1 or rest < inner or rest % inner:
            raise FormatError(f"{rest} blocks cannot be dealt to {inner} pipeline ranks")
        each = [rest // inner] * inner
        return tuple([first] * bool(first) + each + [last] * bool(last)), 1
    chunks = virtual or 1
    if per_stage:
        chunks, odd = divmod(layers, pp * per_stage)
        if odd or not chunks:
            raise FormatError(
                f"{layers} blocks are no multiple of {per_stage} for each stage of {pp} ranks"
            )
    if layers % (pp * chunks):
        raise FormatError(
            f"{layers} blocks cannot be dealt to {pp * chunks} stages; Megatron drops or refuses "
            "the rest: give --pipeline-model-parallel-layout"
        )
    return even_cuts(layers, pp * chunks), chunks


def _replicas(args: _Arguments, model: int) -> int:
    """Return the data-parallel degree; 0 = the script does not say how many processes there are."""
    each, nodes = (args.known(name) for name in ("--nproc-per-node", "--nnodes"))
    for name in _OF_START:
        args.known(name)
    if not re.fullmatch(r"[0-9]{1,6}", each) or not re.fullmatch(r"[0-9]{1,6}", nodes or "1"):
        return 0
    world = int(each) * int(nodes or "1")
    if not world or world % model:
        raise FormatError(f"{world} processes are no multiple of {model}, the ranks of one replica")
    return world // model


def _recompute(args: _Arguments) -> tuple[str, int]:
    kind = args.text("--recompute-granularity")
    method, count = args.text("--recompute-method"), args.count("--recompute-num-layers", 0)
    modules = args.texts("--recompute-modules")
    if args.has("--recompute-activations") and not kind:
        kind = "selective"
    # Releases before 2022 have no granularity.
    old = args.text("--activations-checkpoint-method")
    if not kind and (args.has("--checkpoint-activations") or old):
        kind, method = "full", old
        count = count or args.count("--activations-checkpoint-num-layers", 0)
    if kind == "full":
        return "full", count if method == "block" else 0
    if kind == "selective":
        names = {module: name for name, module in _MODULES.items()}
        unknown = [module for module in modules if module not in names]
        if unknown:
            raise FormatError(f"--recompute-modules {unknown[0][:40]!r} is not modelled")
        return "+".join(names[module] for module in modules) or "attention", 0
    if kind:
        raise FormatError(f"--recompute-granularity is {kind[:40]!r}; expected full or selective")
    return "", 0


def _shard(args: _Arguments, team: int) -> tuple[Shard, int]:
    strategy = args.text("--data-parallel-sharding-strategy", "no_shard")
    copies = args.count("--num-distributed-optimizer-instances", 1)
    distributed = args.has("--use-distributed-optimizer")
    shard = Shard.OPTIMIZER if distributed else Shard.NONE
    stage = args.text("--zero-stage")  # Megatron-DeepSpeed
    if stage:
        if stage not in "0123":
            raise FormatError(f"--zero-stage is {stage[:40]!r}; expected 0 to 3")
        shard = tuple(Shard)[int(stage)]
    if args.has("--use-megatron-fsdp") or args.has("--use-custom-fsdp"):
        known = {"no_shard": Shard.NONE, "optim": Shard.OPTIMIZER}
        known |= {name: level for level, name in _STRATEGIES.items()}
        if strategy not in known:
            raise FormatError(f"--data-parallel-sharding-strategy is {strategy[:40]!r}")
        shard = known[strategy]
    if team == 1:
        shard = Shard.NONE
    if team and copies > 1 and team % copies:
        raise FormatError(f"{copies} instances of the optimizer do not divide {team} ranks")
    return shard, team // copies if copies > 1 and shard is not Shard.NONE else 0


def _precision(args: _Arguments) -> str:
    fp8, low = args.text("--fp8-format"), args.has("--grad-reduce-in-bf16")
    if fp8:
        args.has("--bf16")
        return "fp8"
    if args.has("--bf16"):
        return "bf16" if low else "bf16-fp32-grads"
    return "fp16" if args.has("--fp16") else "fp32"
