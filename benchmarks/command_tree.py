"""The command tree: every command with its options, defaults and choices, and what has changed.

The tree is what a user of the command line can see. It is kept as JSON (``--json``) and held
against that of another version (``--against FILE``): commands, options and their attributes that
came, went or differ are printed, one per line. An option is recognised by any flag that it shares
with one of before, an argument by its position, so that an option with a new alias is one
difference and not two. ``--texts`` compares help texts too. ``--reasons PAGE`` leaves out what a
table of that page explains. With ``--check`` a difference that is left is an error.

To dump the tree of another source folder, set ``PYTHONPATH`` to it.
"""

import argparse
import json
import re
import sys
from collections.abc import Iterator, Mapping
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Any

import click

from partita.cli import main as entry

TEXTS = ("help", "summary", "epilog")


def tree_of(command: click.Command, name: str, parent: click.Context | None = None) -> dict:
    """Return a command, its parameters and all commands below it as JSON values."""
    context = command.make_context(name, [], parent=parent, resilient_parsing=True)
    found: dict[str, Any] = {
        "help": command.help or "",
        "summary": command.get_short_help_str(200),
        "epilog": command.epilog or "",
        "hidden": command.hidden,
        "deprecated": bool(command.deprecated),
        "parameters": [parameter_of(one, context) for one in command.get_params(context)],
    }
    if isinstance(command, click.Group):
        children = {}
        for child in command.list_commands(context):
            below = command.get_command(context, child)
            if below is None:
                raise ValueError(f"{name} lists {child!r} and does not know it")
            children[child] = tree_of(below, child, context)
        found["commands"] = children
    return found


def parameter_of(parameter: click.Parameter, context: click.Context) -> dict:
    """Return an option or argument as JSON values."""
    is_option = isinstance(parameter, click.Option)
    kind = parameter.type
    found = {
        "kind": parameter.param_type_name,
        "flags": sorted([*parameter.opts, *parameter.secondary_opts]) if is_option else [],
        "type": kind.name,
        "metavar": parameter.make_metavar(context),
        "choices": [plain(choice) for choice in getattr(kind, "choices", ())],
        "range": [plain(getattr(kind, end, None)) for end in ("min", "max")],
        "open": [bool(getattr(kind, end, False)) for end in ("min_open", "max_open")],
        "must_exist": bool(getattr(kind, "exists", False)),
        "default": plain(parameter.default),
        "required": parameter.required,
        "multiple": parameter.multiple,
        "values": parameter.nargs,
        "environment": plain(parameter.envvar),
    }
    if isinstance(parameter, click.Option):
        found |= {
            "is_flag": parameter.is_flag,
            "counts": parameter.count,
            "hidden": parameter.hidden,
            "default_if_bare": plain(parameter.flag_value),
            "help": parameter.help or "",
        }
    return found


def plain(value: object) -> Any:
    """Return a value as JSON; what click leaves unset is None.

    A function, and what another machine would have otherwise, is its mark alone.
    """
    if type(value).__name__ == "Sentinel":
        return None
    if isinstance(value, Enum):
        return plain(value.value)
    if isinstance(value, list | tuple):
        return [plain(part) for part in value]
    if callable(value) or value == sys.executable:
        return "(computed)"
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)


def differences(old: Mapping, new: Mapping, path: str, *, texts: bool) -> Iterator[str]:
    """Yield what differs between a command of before and of now, and below them."""
    yield from changed(old, new, path, texts=texts)
    for before, now in matched(old["parameters"], new["parameters"]):
        if now is None:
            yield f"{path}: {title(before)} is gone"
        elif before is None:
            yield f"{path}: {title(now)} is new"
        else:
            yield from changed(before, now, f"{path}: {title(before)}", texts=texts)
    below_old, below_new = old.get("commands", {}), new.get("commands", {})
    for name in below_old:
        if name in below_new:
            step = partial(differences, path=f"{path} {name}", texts=texts)
            yield from step(below_old[name], below_new[name])
        else:
            yield f"{path} {name}: command is gone"
    yield from (f"{path} {name}: command is new" for name in below_new if name not in below_old)


def changed(old: Mapping, new: Mapping, path: str, *, texts: bool) -> Iterator[str]:
    """Yield the attributes that differ, other than what lies below."""
    skipped = {"parameters", "commands"} if texts else {"parameters", "commands", *TEXTS}
    for key in (old.keys() | new.keys()) - skipped:
        if old.get(key) != new.get(key):
            yield f"{path}: {key} was {old.get(key)!r}, is {new.get(key)!r}"


def matched(old: list[dict], new: list[dict]) -> Iterator[tuple[dict | None, dict | None]]:
    """Yield the parameters of before and now in pairs, None where one has no partner."""
    left = list(new)
    place = 0
    for before in old:
        now = None
        if before["kind"] == "argument":
            arguments = [one for one in new if one["kind"] == "argument"]
            now = arguments[place] if place < len(arguments) else None
            place += 1
        else:
            now = next((one for one in left if set(one["flags"]) & set(before["flags"])), None)
        if now is not None:
            left.remove(now)
        yield before, now
    yield from ((None, now) for now in left)


def title(parameter: Mapping) -> str:
    """Return what a person calls a parameter: its longest flag, or the name of an argument."""
    return max(parameter["flags"], key=len) if parameter["flags"] else str(parameter["metavar"])


def explained(page: str) -> set[tuple[str, str]]:
    """Return what the tables of a page name: options and the commands they are in.

    A row names options in its first cell and commands in its second, as code; a row about commands
    themselves has no code there.
    """
    found = set()
    for line in page.splitlines():
        cells = line.split(" | ")
        if line.startswith("| ") and len(cells) == 4:
            names, places = (re.findall("`([^`]+)`", cell) for cell in cells[:2])
            found |= {(name, place) for name in names for place in places or ["command"]}
    return found


def is_explained(difference: str, named: set[tuple[str, str]]) -> bool:
    """Return whether a page names what differs."""
    path, what = difference.removeprefix("partita ").split(": ", maxsplit=1)
    name = what.split(": ")[0].removesuffix(" is new").removesuffix(" is gone")
    every = (name, "command") in named  # an option of every command
    return every or (path, "command") in named or (name, path) in named


def commands_of(tree: Mapping, path: str) -> Iterator[tuple[str, Mapping]]:
    """Yield all commands with their paths."""
    yield path, tree
    for name, below in tree.get("commands", {}).items():
        yield from commands_of(below, f"{path} {name}")


def main() -> None:
    """Print the tree, or what has changed since another one."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="exit 1 when something differs")
    parser.add_argument("--json", action="store_true", help="print the tree as JSON")
    parser.add_argument("--against", type=Path, metavar="FILE", help="print what differs from this")
    parser.add_argument("--reasons", type=Path, metavar="PAGE", help="leave out what this explains")
    parser.add_argument("--texts", action="store_true", help="compare help texts too")
    options = parser.parse_args()
    tree = tree_of(entry.partita, "partita")
    found: list[str] = []
    if options.against is not None:
        before = json.loads(options.against.read_text(encoding="utf-8"))
        found = sorted(differences(before, tree, "partita", texts=options.texts))
    if options.reasons is not None:
        named = explained(options.reasons.read_text(encoding="utf-8"))
        found = [one for one in found if not is_explained(one, named)]
    commands = list(commands_of(tree, "partita"))
    parameters = sum(len(command["parameters"]) for _, command in commands)
    if options.json and options.against is None:
        print(json.dumps(tree, indent=1))
    elif options.json:
        print(json.dumps(found, indent=1))
    else:
        for path, command in commands if options.against is None else ():
            print(path, *map(title, command["parameters"]))
        print(*found, sep="\n", end="\n" if found else "")
        verdict = "missed" if options.check and found else "ok"
        print(
            f"{verdict} commands={len(commands)} parameters={parameters} differences={len(found)}"
        )
    raise SystemExit(1 if options.check and found else 0)


if __name__ == "__main__":
    main()
