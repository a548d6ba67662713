"""Names of variables and attributes in exported source."""

import builtins
import keyword
import re
from collections.abc import Iterable

RESULT = "result"
"""The variable of a result that several tensors are taken out of."""

_TAKEN = frozenset(
    {RESULT, "self", "torch", "nn", "functional", "operator", "constant", "copied", "drawn"}
)
_NO_LETTER = re.compile(r"\W+", re.ASCII)


def identifier(text: str) -> str:
    """Return a text as the name of a variable.

    >>> identifier("encoder.layers.0/add"), identifier("3d"), identifier("in")
    ('encoder_layers_0_add', 'x3d', 'in_')
    """
    name = _NO_LETTER.sub("_", text).strip("_") or "x"
    if name[0].isdigit():
        name = f"x{name}"
    is_taken = keyword.iskeyword(name) or name in _TAKEN or hasattr(builtins, name)
    return f"{name}_" if is_taken else name


def module_word(path: str) -> str:
    """Return what to call the result of a module: the last part of its path that is no number.

    >>> module_word("blocks.0.attention.query"), module_word("features.3"), module_word("0")
    ('query', 'features_3', 'x0')
    """
    steps = path.split(".")
    begin = len(steps) - 1
    while begin > 0 and steps[begin].isdigit():
        begin -= 1
    return identifier("_".join(steps[begin:]))


def attribute(path: str) -> str:
    """Return the source of what stands at a path of a stage.

    >>> attribute("blocks.0.query.weight"), attribute("0.in.bias")
    ('self.blocks[0].query.weight', "self[0]['in'].bias")
    """
    steps = []
    for step in path.split("."):
        if step.isdigit() and str(int(step)) == step:
            steps.append(f"[{step}]")
        elif step.isidentifier() and not keyword.iskeyword(step):
            steps.append(f".{step}")
        else:
            steps.append(f"[{step!r}]")
    return f"self{''.join(steps)}"


def distinct(names: Iterable[str]) -> list[str]:
    """Return names with numbers after those that stand again.

    >>> distinct(["a", "b", "a"])
    ['a', 'b', 'a_2']
    """
    taken: set[str] = set()
    found = []
    for name in names:
        free, turn = name, 1
        while free in taken:
            turn += 1
            free = f"{name}_{turn}"
        taken.add(free)
        found.append(free)
    return found


class Variables:
    """Gives names to the values of one function; a name is free again when its value is dead.

    Args:
        fixed: Names that are never given.
    """

    def __init__(self, fixed: Iterable[str]) -> None:
        self._fixed = frozenset(fixed)
        self._until: dict[str, float] = {}

    def name(self, wanted: str, now: float, until: float) -> str:
        """Return a name for a value that is made at a place and last read at another."""
        free, turn = wanted, 1
        while free in self._fixed or self._until.get(free, -1) > now:
            turn += 1
            free = f"{wanted}_{turn}"
        self._until[free] = until
        return free
