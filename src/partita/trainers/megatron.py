"""Megatron-LM and Megatron-Core: their command line, written and read.

The cut is written as ``--pipeline-model-parallel-layout``, always: without one 30 layers on four
stages have become 28. A script or file of arguments is read word by word and never executed.
"""

import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from partita.core.grid import Grid, even_cuts, unit_cuts
from partita.core.plan import Shard
from partita.core.schedules import DEFAULT_SCHEDULE, Schedule
from partita.errors import FormatError, InfeasibleError
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
    start = torchrun_words(plan, 'pretrain_gpt.py "${PLAN_ARGS[@]}" "${YOUR_ARGS[@]}"')
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
        command=f"source {FILE} && {start}",
        left_to_you=tuple(left),
        remarks=tuple(remarks),
    )


def _values(name: str, value: str) -> str:
    return value if name == "--recompute-modules" else shlex.quote(value)


@dataclass(frozen=True, slots=True)
class _Word:
    """A word of a script and its line."""

    text: str
    line: int


MAX_TEXT = 200_000
"""Characters of a script."""
_MOST_JOINED = 200
"""Lines that backslashes and open quotes may join."""
_ASSIGNED = re.compile(r"([A-Za-z_]\w*)(\+?)=(.*)", re.DOTALL)
_VARIABLE = re.compile(r"\$\(\(([^()]{1,200})\)\)|\$\{(\w+)(:-([^{}]*))?\}|\$(\w+)")


def read_megatron(text: str) -> Grid:
    """Return the grid of a script or a file of arguments; nothing is executed.

    Raises:
        FormatError: A value is wrong, or stands in a variable that the file does not set.
    """
    if len(text) > MAX_TEXT:
        raise FormatError(f"a script of {len(text)} characters; expected {MAX_TEXT} at most")
    return _grid(_Arguments(_flags(text)))


def looks_like_megatron(text: str) -> bool:
    """Return whether a text has flags of Megatron."""
    return bool(re.search(r"--(tensor|pipeline)-model-parallel-size|--micro-batch-size\b", text))


def _flags(text: str) -> dict[str, list[_Word]]:
    """Return each flag of all commands and arrays in a script, with a word for each value.

    The first word of a flag is empty and has its line.
    """
    variables: dict[str, str] = {}
    found: dict[str, list[_Word]] = {}
    for line, words in _lines(text):
        flag: str | None = None
        for word in words:
            assigned = None if flag else _ASSIGNED.fullmatch(word)
            if assigned:
                name, more, value = assigned.groups()
                value = value.lstrip("(").rstrip(")")
                variables[name] = f"{variables.get(name, '')} {value}" if more else value
                parts = value.split()
            else:
                # The bracket that closes an array may touch its last word.
                closes = word.endswith(")") and word.count("(") < word.count(")")
                parts = [word[:-1] if closes else word]
            for part in parts:
                if part.startswith("--") and len(part) > 2:
                    flag, sign, value = part.partition("=")
                    flag = flag.replace("_", "-")
                    found[flag] = [_Word("", line), *([_Word(value, line)] if sign else [])]
                elif flag is not None and part:
                    found[flag].append(_Word(part, line))
    return {
        flag: [
            _Word(part, word.line)
            for word in words
            for part in (_expanded(word, variables).split() or [""])
        ]
        for flag, words in found.items()
    }


def _lines(text: str) -> Iterator[tuple[int, list[str]]]:
    """Yield the words of each line with its number; backslashes and open quotes join lines."""
    joined, first = "", 0
    for number, line in enumerate(text.replace("\r\n", "\n").split("\n"), 1):
        bare = line.strip()
        if not joined and bare.startswith("#"):
            continue
        first = first if joined else number
        if not bare.startswith("#"):
            joined += f" {bare.removesuffix(chr(92))}"
        if bare.endswith(chr(92)) and number - first < _MOST_JOINED:
            continue
        try:
            words = shlex.split(joined, comments=True)
        except ValueError as exc:
            if number - first < _MOST_JOINED:
                continue
            raise FormatError("a quote is not closed", line=first) from exc
        yield first, words
        joined = ""
    if joined.strip():
        raise FormatError("a quote is not closed, or a backslash ends the text", line=first)


def _expanded(word: _Word, variables: Mapping[str, str]) -> str:
    """Return a word with the values of variables that the file itself sets."""
    text = word.text
    for _ in range(16):
        for found in _VARIABLE.finditer(text):
            terms, braced, fallback, usual, bare = found.groups()
            if terms is not None:
                value = _product(terms, variables)
            else:
                value = variables.get(braced or bare, usual if fallback else None)
            if value is not None and len(value) < 10_000:
                text = text[: found.start()] + value + text[found.end() :]
                break
        else:
            return text
    raise FormatError(f"variables in {word.text[:40]!r} refer to one another", line=word.line)


def _product(text: str, variables: Mapping[str, str]) -> str | None:
    """Return the value of ``$A * B / 2`` over whole numbers; None = a variable is not set."""
    total, sign = 0, "+"
    for name, operator in re.findall(r"(\w+)|([*/+-])", text.replace("$", "")):
        if operator:
            sign = operator
            continue
        value = variables.get(name, name).strip()
        if not re.fullmatch(r"[0-9]{1,9}", value) or (sign == "/" and not int(value)):
            return None
        number = int(value)
        if sign == "+":
            total += number
        elif sign == "-":
            total -= number
        elif sign == "*":
            total *= number
        else:
            total //= number
    return str(total)


class _Arguments:
    """The flags of a script, read as numbers, names and switches."""

    def __init__(self, flags: "dict[str, list[_Word]]") -> None:
        self._flags = flags
        self._read: set[str] = set()

    def text(self, name: str, usual: str = "") -> str:
        self._read.add(name)
        words = [word for word in self._flags.get(name, []) if word.text]
        if not words:
            return usual
        value = words[0]
        if "$" in value.text:
            raise FormatError(
                f"{name} is {value.text[:60]!r}, a variable that the file does not set; write its "
                "value",
                line=value.line,
            )
        return value.text

    def texts(self, name: str) -> list[str]:
        self._read.add(name)
        return [word.text for word in self._flags.get(name, []) if word.text]

    def known(self, name: str) -> str:
        """Return a value that may stand in a variable from outside; then empty."""
        self._read.add(name)
        words = [word.text for word in self._flags.get(name, []) if word.text]
        return words[0] if words and "$" not in words[0] else ""

    def has(self, name: str) -> bool:
        self._read.add(name)
        return name in self._flags

    def count(self, name: str, usual: int) -> int:
        text = self.text(name)
        if not text:
            return usual
        if not re.fullmatch(r"[0-9]{1,7}", text) or int(text) < 1:
            line = self._flags[name][0].line
            raise FormatError(f"{name} is {text[:40]!r}; expected a number from 1 on", line=line)
        return int(text)

    def rest(self) -> dict[str, str]:
        """Return the flags that nobody has read."""
        return {
            name.lstrip("-"): " ".join(word.text for word in words if word.text)[:200]
            for name, words in sorted(self._flags.items())
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
    layout = args.text("--pipeline-model-parallel-layout")
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
