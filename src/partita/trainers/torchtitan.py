"""torchtitan: a Python function for 0.3 and main, TOML for 0.2; TOML and saved JSON are read.

The function derives from the user's own configuration. Fields that differ between releases are
looked for when it is called, so that a wrong release fails at once. Each child of the model stands
once among the parts: what is in none becomes ``None`` there, without an error.
"""

import json
import re
import tomllib
from collections.abc import Mapping
from typing import Any

from partita.core.grid import Grid
from partita.core.plan import Shard
from partita.core.schedules import DEFAULT_SCHEDULE, Schedule
from partita.errors import FormatError, InfeasibleError, InvalidInputError
from partita.names import short, suggest
from partita.trainers.rules import TRAINERS
from partita.trainers.target import PlanToWrite, Written, check_options, torchrun_words

RELEASES = ("0.3", "main", "0.2")
MAX_TEXT = 1_000_000
_EMBEDDING, _BLOCK, _NORM = "tok_embeddings", "layers", "norm"
_HEAD = {"0.2": "output"}
_RESHARD = {Shard.GRADIENTS: "never", Shard.PARAMETERS: "always"}


def parts_of(grid: Grid, rename: Mapping[str, str], *, head: str = "lm_head") -> list[list[str]]:
    """Return the modules of each stage.

    Args:
        grid: The grid.
        rename: Other names of ``tok_embeddings``, ``layers``, ``norm`` and the head.
        head: Name of the head.

    Raises:
        InvalidInputError: A name is renamed that is not there, or two have the same name.
    """
    names = {name: rename.get(name, name) for name in (_EMBEDDING, _BLOCK, _NORM, head)}
    for name in rename:
        if name not in names:
            raise InvalidInputError(
                f"--rename {name}={rename[name]}: there is no {name!r}{suggest(name, list(names))}"
            )
    if len(set(names.values())) != len(names):
        raise InvalidInputError(f"--rename gives two modules one name: {', '.join(names.values())}")
    parts: list[list[str]] = []
    block = 0
    for count in grid.cuts:
        parts.append([f"{names[_BLOCK]}.{number}" for number in range(block, block + count)])
        block += count
    parts[0].insert(0, names[_EMBEDDING])
    parts[-1] += [names[_NORM], names[head]]
    return parts


def parallelism_of(grid: Grid, rename: Mapping[str, str], head: str) -> dict[str, Any]:
    """Return the fields of the section ``parallelism`` that all releases share."""
    replicate, shard = _replicas(grid)
    fields: dict[str, Any] = {
        "pipeline_parallel_degree": grid.pp,
        "tensor_parallel_degree": grid.tp,
        "context_parallel_degree": grid.cp,
        "data_parallel_replicate_degree": replicate,
        "data_parallel_shard_degree": shard,
        "fsdp_reshard_after_forward": _RESHARD.get(grid.shard, "default"),
        "expert_parallel_degree": grid.ep,
    }
    if grid.pp > 1:
        fields["pipeline_parallel_schedule"] = TRAINERS["torchtitan"].schedules[grid.schedule]
        fields["module_fqns_per_model_part"] = parts_of(grid, rename, head=head)
    return fields


def _replicas(grid: Grid) -> tuple[int, int]:
    """Return in how many copies the state is held, and how many replicas divide each."""
    if grid.shard is Shard.NONE:
        return grid.dp, 1
    shard = grid.shard_group // grid.cp if grid.shard_group else grid.dp
    return grid.dp // shard, shard


def batch_of(grid: Grid) -> dict[str, int]:
    """Return the fields of the section ``training``: with a pipeline a step is one local batch."""
    local = grid.microbatch_size * (grid.microbatches if grid.pp > 1 else 1)
    return {"local_batch_size": local, "global_batch_size": grid.batch_size}


def write_torchtitan(plan: PlanToWrite) -> Written:
    """Return a plan as a configuration of torchtitan.

    Raises:
        InfeasibleError: torchtitan cannot run it.
        InvalidInputError: There is no such release, or a base that is no ``module:function``.
    """
    check_options(plan, (), "torchtitan")
    release = plan.release or RELEASES[0]
    if release not in RELEASES:
        raise InvalidInputError(f"torchtitan {release!r} is not known{suggest(release, RELEASES)}")
    grid = plan.grid_for("torchtitan")
    _check_groups(grid)
    if release == "0.2":
        return _toml(plan, grid)
    return _python(plan, grid, release)


def _check_groups(grid: Grid) -> None:
    if grid.shard_group and grid.shard_group % grid.cp:
        raise InfeasibleError(
            f"shard groups of {grid.shard_group} are no multiple of {grid.cp} context-parallel "
            "ranks, over which torchtitan always shards"
        )
    if grid.ep > 1 and grid.etp > 1:
        raise InfeasibleError(f"{grid.etp} ranks divide each expert; torchtitan divides none")


def _python(plan: PlanToWrite, grid: Grid, release: str) -> Written:
    module, sign, function = (plan.base or "my_configs:base").partition(":")
    names = [*module.split("."), function]
    if not sign or not all(name.isidentifier() for name in names):
        raise InvalidInputError(f"--base is {plan.base!r}; expected MODULE:FUNCTION")
    fields = parallelism_of(grid, plan.rename, "lm_head")
    parts = fields.pop("module_fqns_per_model_part", None)
    lines = [f"    p.{name} = {value!r}" for name, value in fields.items()]
    if grid.tp > 1:
        lines.append(f"    p.enable_sequence_parallel = {grid.sequence_parallel!r}")
    if parts is not None:
        rows = "".join(f"        {row!r},\n".replace("'", '"') for row in parts)
        lines.append(f"    p.module_fqns_per_model_part = [\n{rows}    ]")
    checked, batch = _batch_lines(grid, release, plan.problem.graph.tokens_per_sample)
    lines += batch
    if grid.pp > 1:
        lines.append("    # torchtitan refuses pipelines with captured graphs.")
        lines.append("    config.training.disable_cuda_graphs = True")
    recompute = {"full": "FullAC.Config()", "products": "SelectiveAC.Config()", "": "None"}
    if grid.recompute not in recompute:
        raise InfeasibleError(
            f"torchtitan cannot recompute {grid.recompute}; it has full and products"
        )
    lines.append(f"    config.activation_checkpoint = {recompute[grid.recompute]}")
    imports = f"from {module} import {function} as base\n"
    if grid.recompute:
        kind = recompute[grid.recompute].partition(".")[0]
        imports = f"from torchtitan.distributed.activation_checkpoint import {kind}\n\n{imports}"
    text = (
        f'{plan.comment()}"""Your configuration with the plan, for torchtitan {release}."""\n\n'
        f"{imports}\n\ndef planned():\n"
        f'    """Return the configuration of the plan."""\n'
        f"    config = base()\n    p = config.parallelism\n"
        f"    if not hasattr({checked[0]}, {checked[1]!r}):\n"
        f'        raise SystemExit("this file is for torchtitan {release}; export it again with '
        f'--release")\n' + "\n".join(lines) + "\n    return config\n"
    )
    file = f"{plan.name.replace('-', '_')}_titan.py"
    script = f"-m torchtitan.train --module {file.removesuffix('.py')} --config planned"
    left = ["data, optimizer, model flavor and precision of your base"]
    if not plan.base:
        left.append("the import of your own base (--base MODULE:FUNCTION)")
    return Written(
        files={file: text},
        command=torchrun_words(plan, script),
        process=f"exec python {script}",
        left_to_you=tuple(left),
        remarks=_remarks(grid),
    )


def _batch_lines(grid: Grid, release: str, tokens: int) -> tuple[tuple[str, str], list[str]]:
    """Return a field that only this release has, and the lines that set the batch."""
    if release == "main":
        length = tokens or 1
        lines = [
            f"    t.num_tokens_per_microbatch_per_dp_rank = {grid.microbatch_size * length}",
            f"    t.num_tokens_per_train_step = {grid.batch_size * length}",
        ]
        if grid.pp > 1:
            lines.append(f"    p.num_pp_microbatches = {grid.microbatches}")
        name = "num_tokens_per_train_step"
        return ("config.training", name), ["    t = config.training", *lines]
    batch = [f"    config.training.{name} = {value}" for name, value in batch_of(grid).items()]
    if grid.pp > 1:
        batch.append(f"    p.pipeline_parallel_microbatch_size = {grid.microbatch_size}")
    return ("config.training", "local_batch_size"), batch


def _remarks(grid: Grid) -> tuple[str, ...]:
    remarks = [f"{grid.microbatches} microbatches of {grid.microbatch_size} per replica and step"]
    if grid.pp == 1 and grid.microbatches > 1:
        remarks.append("without a pipeline they are steps of gradient accumulation")
    return tuple(remarks)


def _toml(plan: PlanToWrite, grid: Grid) -> Written:
    modes = {"": "none", "full": "full", "products": "selective"}
    if grid.recompute not in modes:
        raise InfeasibleError(
            f"torchtitan cannot recompute {grid.recompute}; it has full and products"
        )
    fields = parallelism_of(grid, plan.rename, _HEAD["0.2"])
    if grid.pp > 1:
        fields["pipeline_parallel_microbatch_size"] = grid.microbatch_size
    sections: dict[str, dict[str, Any]] = {
        "training": batch_of(grid),
        "parallelism": fields,
        "activation_checkpoint": {"mode": modes[grid.recompute]},
    }
    if grid.recompute == "products":
        sections["activation_checkpoint"]["selective_ac_option"] = "op"
    text = plan.comment()
    for section, values in sections.items():
        text += f"\n[{section}]\n"
        # A JSON text of numbers, strings and lists of them is the same in TOML.
        text += "".join(f"{name} = {json.dumps(value)}\n" for name, value in values.items())
    file = f"{plan.name}_titan.toml"
    script = f"-m torchtitan.train --job.config_file {file}"
    return Written(
        files={file: text},
        command=torchrun_words(plan, script),
        process=f"exec python {script}",
        left_to_you=("data, optimizer, model and precision: further sections of the file",),
        remarks=_remarks(grid),
    )


def read_toml(text: str) -> Grid:
    """Return the grid of a TOML of torchtitan 0.1 or 0.2.

    Raises:
        FormatError: It is no TOML, or a value is wrong.
    """
    if len(text) > MAX_TEXT:
        raise FormatError(f"a TOML of {len(text)} characters; expected {MAX_TEXT} at most")
    try:
        found = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as exc:
        line = re.search(r"line ([0-9]+)", str(exc))
        reason = re.sub(r" \(at .*\)", "", str(exc)).lower() or "is nested too deep"
        raise FormatError(f"no TOML: {reason}", line=int(line.group(1)) if line else 0) from exc
    return read_sections(found)


def read_sections(found: Mapping[str, Any]) -> Grid:
    """Return the grid of a configuration by sections: a TOML, or what 0.3 saves as JSON.

    Raises:
        FormatError: A value is wrong.
    """
    reader = _Sections(_of_one_section(found))
    pp = reader.count("parallelism", "pipeline_parallel_degree", 1)
    tp = reader.count("parallelism", "tensor_parallel_degree", 1)
    cp = reader.count("parallelism", "context_parallel_degree", 1)
    replicate = reader.count("parallelism", "data_parallel_replicate_degree", 1)
    shard = reader.count("parallelism", "data_parallel_shard_degree", -1, least=-1)
    policy = reader.text("parallelism", "fsdp_reshard_after_forward", "default")
    size, batch = _read_batch(reader, pp, replicate * max(shard, 0))
    cuts = _read_parts(reader, pp)
    schedule = _read_schedule(reader, len(cuts) // pp if cuts else 1)
    # All leftover ranks divide the state where no degree is given, if there are any.
    divides = shard != 1 or cp > 1
    always = policy == "always" or (policy == "default" and pp == 1)
    level = Shard.PARAMETERS if always else Shard.GRADIENTS
    return Grid(
        pp=pp,
        tp=tp,
        cp=cp,
        dp=replicate * shard if shard > 0 else 0,
        ep=reader.count("parallelism", "expert_parallel_degree", 1),
        etp=reader.count("parallelism", "expert_tensor_parallel_degree", 1)
        if reader.count("parallelism", "expert_parallel_degree", 1) > 1
        else 0,
        sequence_parallel=tp > 1 and reader.flag("parallelism", "enable_sequence_parallel", True),
        cuts=cuts,
        chunks=len(cuts) // pp if cuts else 2 if schedule is Schedule.INTERLEAVED else 1,
        shard=level if divides else Shard.NONE,
        shard_group=shard * cp if divides and replicate > 1 and shard > 0 else 0,
        recompute=_read_recompute(reader),
        batch_size=batch,
        microbatch_size=size,
        schedule=schedule,
        precision=_read_precision(reader),
        annotations={**reader.rest(), **_not_recomputed(reader)},
    )


def _of_one_section(found: Mapping[str, Any]) -> dict[str, Any]:
    """Return a configuration with its degrees in one section; those of 0.1 are in three."""
    moved: dict[str, Any] = {}
    for name in ("training", "experimental"):
        section = found.get(name)
        if isinstance(section, Mapping):
            moved |= {
                key: value
                for key, value in section.items()
                if str(key).startswith("pipeline_parallel_")
                or str(key).endswith(("_parallel_degree", "_parallel_replicate_degree"))
                or key == "data_parallel_shard_degree"
            }
    section = found.get("parallelism")
    if isinstance(section, Mapping) or (section is None and moved):
        return {**found, "parallelism": {**moved, **(section or {})}}
    return dict(found)


class _Sections:
    """Sections of a configuration; remembers what was read of ``parallelism``."""

    def __init__(self, found: Mapping[str, Any]) -> None:
        self._found = found
        self._read: set[str] = set()
        for name in ("parallelism", "training", "activation_checkpoint"):
            if not isinstance(found.get(name, {}), Mapping | None):
                raise FormatError(f"{name} is {short(found[name])}; expected a section")

    def value(self, section: str, key: str) -> Any:  # noqa: ANN401 (any value of a file)
        if section == "parallelism":
            self._read.add(key)
        return (self._found.get(section) or {}).get(key)

    def count(self, section: str, key: str, usual: int, *, least: int = 1) -> int:
        value = self.value(section, key)
        if value is None:
            return usual
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= 10**6:
            raise FormatError(f"{section}.{key} is {short(value)}; expected a number from {least}")
        if value == 0:
            raise FormatError(f"{section}.{key} is 0; expected 1 or more, or -1")
        return value

    def text(self, section: str, key: str, usual: str) -> str:
        value = self.value(section, key)
        if value is None:
            return usual
        if not isinstance(value, str):
            raise FormatError(f"{section}.{key} is {short(value)}; expected a text")
        return value

    def flag(self, section: str, key: str, usual: bool) -> bool:
        value = self.value(section, key)
        if value is None:
            return usual
        if not isinstance(value, bool):
            raise FormatError(f"{section}.{key} is {short(value)}; expected true or false")
        return value

    def rest(self) -> dict[str, str]:
        """Return what stands in ``parallelism`` and nobody has read, where it says something."""
        section = self._found.get("parallelism") or {}
        return {
            str(key)[:80]: short(value)
            for key, value in section.items()
            if key not in self._read and value not in (None, "", False, 1)
        }


def _read_batch(reader: _Sections, pp: int, replicas: int) -> tuple[int, int]:
    """Return samples of a microbatch and of a step; 0 = not said."""
    local = reader.count("training", "local_batch_size", 0) or reader.count(
        "training", "batch_size", 0
    )
    size = reader.count("parallelism", "pipeline_parallel_microbatch_size", 1) if pp > 1 else local
    whole = reader.value("training", "global_batch_size")
    batch = whole if isinstance(whole, int) and not isinstance(whole, bool) and whole > 0 else 0
    if not batch and local and replicas:
        batch = local * replicas
    if batch > 10**6 or (batch and size and batch % size):
        raise FormatError(f"training.global_batch_size {short(batch)} is no multiple of {size}")
    return size, batch


def _read_parts(reader: _Sections, pp: int) -> tuple[int, ...]:
    parts = reader.value("parallelism", "module_fqns_per_model_part")
    if not parts or pp == 1:
        return ()
    if not isinstance(parts, list) or not all(
        isinstance(part, list) and all(isinstance(name, str) for name in part) for part in parts
    ):
        raise FormatError("parallelism.module_fqns_per_model_part is no list of lists of names")
    names = [name for part in parts for name in part]
    if len(set(names)) != len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise FormatError(f"module {short(twice)} stands in two parts")
    numbers = [int(n.rpartition(".")[2]) for n in names if re.fullmatch(r".*\.[0-9]{1,6}", n)]
    if numbers != list(range(len(numbers))):
        raise FormatError("the parts leave out a layer, or have them out of order")
    if len(parts) % pp:
        raise FormatError(f"{len(parts)} parts are no multiple of {pp} pipeline ranks")
    return tuple(sum(bool(re.fullmatch(r".*\.[0-9]{1,6}", n)) for n in part) for part in parts)


def _read_schedule(reader: _Sections, chunks: int) -> Schedule:
    if reader.value("parallelism", "pipeline_parallel_schedule_csv"):
        return Schedule.INTERLEAVED if chunks > 1 else DEFAULT_SCHEDULE
    name = reader.text("parallelism", "pipeline_parallel_schedule", "1F1B")
    pp = reader.count("parallelism", "pipeline_parallel_degree", 1)
    if pp == 1:
        return DEFAULT_SCHEDULE
    known = {word.lower(): one for one, word in TRAINERS["torchtitan"].schedules.items()}
    found = known.get(name.lower())
    if found is None:
        raise FormatError(
            f"parallelism.pipeline_parallel_schedule {short(name)} is not modelled; modelled are "
            f"{', '.join(TRAINERS['torchtitan'].schedules.values())}"
        )
    return found


def _read_recompute(reader: _Sections) -> str:
    """Return what is recomputed: 0.2 has modes, 0.3 saves the fields of a class or nothing."""
    mode = reader.text("activation_checkpoint", "mode", "")
    if mode == "full":
        return "full"
    if mode in ("selective", "memory_budget"):
        option = reader.value("activation_checkpoint", "selective_ac_option")
        return "products" if option == "op" and mode == "selective" else ""
    if reader.value("activation_checkpoint", "force_recompute_mm_shapes_by_fqns") is not None:
        return "products"
    is_saved = reader.value("activation_checkpoint", "preserve_rng_state") is not None
    return "full" if is_saved and not mode else ""


def _not_recomputed(reader: _Sections) -> dict[str, str]:
    """Return how a part is recomputed that is none of the sets: every n-th block, by a budget."""
    mode = reader.text("activation_checkpoint", "mode", "")
    if mode not in ("selective", "memory_budget") or _read_recompute(reader):
        return {}
    option = reader.value("activation_checkpoint", "selective_ac_option")
    setting = mode if mode == "memory_budget" else f"{mode}, option {short(option)}"
    return {"activation_checkpoint": setting}


def _read_precision(reader: _Sections) -> str:
    if reader.value("training", "dtype") == "bfloat16":
        return "pure-bf16"
    mixed = reader.value("training", "mixed_precision_param")
    return "bf16-mixed" if mixed in (None, "bfloat16") else "fp32"
