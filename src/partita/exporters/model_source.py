"""The files of a package beside its stages: the whole model, the entry, the self-test, the text."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from partita.capture.tree import Const, Param, Ref, Value, children_of
from partita.errors import InvalidInputError
from partita.exporters.blueprint import Blueprint
from partita.exporters.python_source import literal
from partita.exporters.statements import wrapped

_INIT = '''"""{title}"""

from pathlib import Path

import torch

from .whole import Model
{imports}

__all__ = [{names}]


def build() -> Model:
    """Return the whole model, with the weights of ``weights.pt`` if that file is beside."""
    model = Model()
    saved = Path(__file__).with_name("weights.pt")
    if saved.exists():
        model.load_state_dict(torch.load(saved, map_location="cpu", weights_only=True))
    return model{mode}
{contract}'''

_CONTRACT = '''

def arch() -> str:
    """Return the name of the model."""
    return "{name}"


def model(criterion: torch.nn.Module) -> list[tuple[torch.nn.Module, list[str], list[str]]]:
    """Return stages with the names of what they get and give, as PipeDream's runtime asks."""
    return [
{rows}
    ]


def full_model() -> Model:
    """Return the stages as one module."""
    return build()
'''

_MAIN = '''"""Runs the model once on inputs of the recorded shapes: ``python -m {package}``."""

import json
from pathlib import Path

import torch

from . import build


def inputs() -> dict[str, torch.Tensor]:
    """Return inputs: numbers as recorded, floating-point values drawn."""
    here = Path(__file__).parent
    wiring = json.loads((here / "wiring.json").read_text(encoding="utf-8"))
    kept = torch.load(here / "example.pt", weights_only=True)
    return {{
        entry["variable"]: kept[entry["variable"]]
        if entry["variable"] in kept
        else torch.randn(entry["shape"], dtype=getattr(torch, entry["dtype"]))
        for entry in wiring["inputs"]
    }}


def main() -> None:
    """Run the model, backward too where there is a loss, and print what it returns."""
    torch.manual_seed(0)
    model = build()
    output, loss = model.output_and_loss(**inputs())
    shapes = torch.utils._pytree.tree_map_only(torch.Tensor, lambda t: tuple(t.shape), output)
    print("returns", shapes)
    if loss is not None and loss.requires_grad:
        loss.backward()
        having = [name for name, weight in model.named_parameters() if weight.grad is not None]
        print(f"loss {{loss.item():.6g}}, gradients of {{len(having)}} parameters")


main()
'''


def model_source(blueprint: Blueprint, crossing: Mapping[int, str]) -> str:
    """Return ``whole.py``: the stages in order, with what each hands to the next."""
    count = len(blueprint.stages)
    plain = [row for row in blueprint.inputs if row not in blueprint.labels]
    labels = [row for row in blueprint.inputs if row in blueprint.labels]
    arguments = ["self", *(f"{crossing[row]}: Tensor" for row in plain)]
    arguments += [f"{crossing[row]}: Tensor | None = None" for row in labels]
    names = ", ".join(f"{crossing[row]}={crossing[row]}" for row in (*plain, *labels))
    output = _output(blueprint, crossing)
    loss = crossing[blueprint.loss] if blueprint.loss >= 0 else "None"
    lines = [
        f'"""{blueprint.name}: {count} stages as one model."""',
        "",
        "from typing import Any",
        "",
        "from torch import Tensor",
        "",
        *(f"from .stage{number} import Stage{number}" for number in range(count)),
        "from .support import Whole" + (", constant" if "constant(" in output else ""),
        "",
        "",
        "class Model(Whole):",
        '    """Runs the stages in order, in one process."""',
        "",
        "    def __init__(self) -> None:",
        "        super().__init__()",
        *(f"        self.stage{number} = Stage{number}()" for number in range(count)),
        *_indented(
            wrapped(
                "",
                "self.join",
                [
                    f"[{', '.join(f'self.stage{number}' for number in range(count))}]",
                    f"aliases={literal_dict(blueprint.aliases)}",
                    f"unused={list(blueprint.unused)!r}",
                ],
            )
        ),
        *(["        self.eval()"] if "training" not in blueprint.modes else []),
        "",
        *_definition("forward", arguments, "Any"),
        '        """Return what the original model returns."""',
        f"        return self.output_and_loss({names})[0]",
        "",
        *_definition("output_and_loss", arguments, "tuple[Any, Tensor | None]"),
        '        """Return what the original model returns, and the loss where it is known."""',
        *_mode_check(blueprint),
        *(line for number in range(count) for line in _stage_call(blueprint, number, crossing)),
        f"        return {output}, {loss}",
        "",
    ]
    return "\n".join(lines)


def literal_dict(values: Mapping[str, str]) -> str:
    """Return the source of a map of texts."""
    return "{" + ", ".join(f"{literal(k)}: {literal(v)}" for k, v in values.items()) + "}"


def _indented(lines: Iterable[str]) -> list[str]:
    return [f"        {line}" for line in lines]


def _definition(name: str, arguments: list[str], returned: str) -> list[str]:
    lines = wrapped("    def ", name, arguments, indent=len(returned) + 5)
    if len(lines) > 1:
        lines = [lines[0], *(f"    {line}" for line in lines[1:])]
    lines[-1] += f" -> {returned}:"
    return lines


def _mode_check(blueprint: Blueprint) -> list[str]:
    """Return lines that refuse a mode in which the model computes something else."""
    if len(blueprint.modes) > 1:
        return []
    (mode,) = blueprint.modes
    wrong = "self.training" if mode == "eval" else "not self.training"
    return [
        f"        if {wrong}:",
        f'            raise RuntimeError("this package computes the {mode} mode alone")',
    ]


def _stage_call(blueprint: Blueprint, number: int, crossing: Mapping[int, str]) -> list[str]:
    stage = blueprint.stages[number]
    ordered = sorted(stage.inputs, key=lambda row: row in blueprint.labels)
    args = [crossing[row] for row in ordered]
    targets = ", ".join(crossing[row] for row in stage.leaving)
    return _indented(wrapped(f"{targets} = " if targets else "", f"self.stage{number}", args))


def _output(blueprint: Blueprint, crossing: Mapping[int, str]) -> str:
    """Return the source of what the model returns; objects of other classes become dicts."""

    def name_of(ref: Ref) -> str:
        if isinstance(ref, Value):
            return crossing[ref.index]
        if isinstance(ref, Param):
            return f"dict(self.named_parameters())[{ref.name!r}]"
        assert isinstance(ref, Const)
        return f"constant({f'constant_{ref.index}'!r})"

    return _returned(blueprint.output, name_of)


def _returned(node: object, name_of: Callable[[Ref], str]) -> str:
    if isinstance(node, Ref):
        return name_of(node)
    children = children_of(node)
    if children is None:
        return _plain(node)
    inner = [_returned(child, name_of) for child in children.values]
    if isinstance(node, list):
        return f"[{', '.join(inner)}]"
    if isinstance(node, tuple):
        return f"({', '.join(inner)},)" if len(inner) == 1 else f"({', '.join(inner)})"
    keys = list(node) if isinstance(node, dict) else list(children.names)
    pairs = zip(keys, inner, children.values, strict=True)
    return "{" + ", ".join(f"{literal(k)}: {text}" for k, text, v in pairs if v is not None) + "}"


def _plain(node: object) -> str:
    try:
        return literal(node)
    except InvalidInputError:
        return "None"


def init_source(blueprint: Blueprint, crossing: Mapping[int, str]) -> str:
    """Return ``__init__.py``."""
    count = len(blueprint.stages)
    names = ["Model", "build", *(f"Stage{number}" for number in range(count))]
    contract = ""
    if not blueprint.has_shapes:
        names += ["arch", "full_model", "model"]
        contract = _contract(blueprint, crossing)
    return _INIT.format(
        title=f"{blueprint.name} in {count} stages: one module each, and the model they make.",
        imports="\n".join(f"from .stage{n} import Stage{n}" for n in range(count)),
        names=", ".join(f'"{name}"' for name in sorted(names)),
        mode="" if "training" in blueprint.modes else ".eval()",
        contract=contract,
    )


def _contract(blueprint: Blueprint, crossing: Mapping[int, str]) -> str:
    """Return the functions that PipeDream's runtime calls."""
    rows = []
    for number, stage in enumerate(blueprint.stages):
        given, made = ([crossing[row] for row in rows_] for rows_ in (stage.inputs, stage.leaving))
        rows.append(f"        (Stage{number}(), {_texts(given)}, {_texts(made)}),")
    last = [crossing[row] for row in blueprint.stages[-1].leaving]
    rows.append(f'        (criterion, {_texts(last)}, ["loss"]),')
    return _CONTRACT.format(name=blueprint.name, rows="\n".join(rows))


def _texts(names: Iterable[str]) -> str:
    return f"[{', '.join(map(literal, names))}]"


def main_source(package: str) -> str:
    """Return ``__main__.py``, the self-test."""
    return _MAIN.format(package=package)


def readme(blueprint: Blueprint, wiring: Mapping[str, Any], package: str) -> str:
    """Return the text that explains a package."""
    rows = [
        f"| stage{number} | {', '.join(_places(stage))} | {_tensors(stage['inputs'])} | "
        f"{_tensors(stage['outputs'])} | {len(stage['parameters'])} |"
        for number, stage in enumerate(wiring["stages"])
    ]
    inputs = ", ".join(entry["variable"] for entry in wiring["inputs"])
    lines = [
        f"# {blueprint.name} in {len(rows)} stages",
        "",
        f"Needs {' and '.join(wiring['needs'])}. `support.py` holds what the stages are made of, "
        "`wiring.json` who sends what to whom.",
        "",
        "```python",
        f"from {package} import build",
        "",
        "model = build()",
        "model.load_state_dict(original.state_dict())  # by the names of the original model",
        f"output, loss = model.output_and_loss({inputs})",
        "```",
        "",
        _sizes(blueprint, package),
        "",
        "| stage | devices | gets | gives | parameters and buffers |",
        "|---|---|---|---|---:|",
        *rows,
        *_tied(wiring["shared_parameters"]),
        "",
    ]
    return "\n".join(lines)


def _sizes(blueprint: Blueprint, package: str) -> str:
    if not blueprint.has_shapes:
        return "Made of descriptions of layers: weights are new ones, sizes are not recorded."
    return (
        f"`python -m {package}` runs one step. Sizes are those of the example that the model was "
        f"captured with. Modes: {', '.join(blueprint.modes)}."
    )


def _tied(shared: Mapping[str, list[str]]) -> list[str]:
    """Return what is to be said of parameters that several stages hold."""
    if not shared:
        return []
    rows = [f"* `{name}`: {', '.join(where)}" for name, where in shared.items()]
    return ["", "Parameters that several stages hold; their gradients are summed:", "", *rows]


def _places(stage: Mapping[str, Any]) -> list[str]:
    return ["+".join(group) for group in stage["devices"]]


def _tensors(entries: Iterable[Mapping[str, Any]]) -> str:
    return ", ".join(f"`{entry['variable']}` {_shape(entry)}" for entry in entries) or "-"


def _shape(entry: Mapping[str, Any]) -> str:
    if entry["shape"] is None:
        return ""
    return f"{entry['dtype']} {'×'.join(map(str, entry['shape'])) or 'scalar'}"
