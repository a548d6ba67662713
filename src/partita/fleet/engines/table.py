"""The visible table of engines: who runs the jobs of a live fleet.

A new engine is a class with the methods of `protocol.Engine`, a function that makes one for the
declared servers, and a row here. Other packages add theirs by entry points of the group
``partita.fleet.engines``, which name such a function.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias, cast

from partita.fleet.engines.protocol import Engine
from partita.fleet.policies.resources import Servers
from partita.plugins import PluginGroup, guarded, load_target

PLUGINS = PluginGroup(group="partita.fleet.engines", noun="engine")
DEFAULT_ENGINE = "local"
MakeEngine: TypeAlias = Callable[..., Engine]
"""Takes the declared servers, ``groups``: whether control groups may be used, and, where the user
gave some, ``options`` of the engine by name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineEntry:
    """An engine.

    Attributes:
        target: Function that makes it, as ``"module:name"``; imported when it is asked for.
        title: Where jobs run, in a few words.
    """

    target: str
    title: str


ENGINES: Mapping[str, EngineEntry] = {
    "local": EngineEntry(
        target="partita.fleet.engines.local:make_local_engine", title="processes of this machine"
    ),
    "slurm": EngineEntry(
        target="partita.fleet.engines.slurm:make_slurm_engine", title="batch jobs of Slurm"
    ),
    "ray": EngineEntry(
        target="partita.fleet.engines.ray:make_ray_engine", title="jobs of a Ray cluster"
    ),
}


def engine_names() -> list[str]:
    """Return the names of all engines, built in and plugged in; loads none."""
    return list(dict.fromkeys([*ENGINES, *PLUGINS.names()]))


def make_engine(
    name: str,
    servers: Servers,
    *,
    groups: bool = True,
    options: Mapping[str, str] | None = None,
) -> Engine:
    """Return an engine for some servers.

    Args:
        name: A row of the table, or a plug-in.
        servers: The declared servers.
        groups: Whether control groups may be used where they are permitted.
        options: Options of the engine itself, by name.

    Raises:
        InvalidInputError: There is no such engine, or it has no such option.
        UnsupportedError: It is a plug-in that cannot be loaded, or fails.
    """
    given: dict[str, Any] = {"groups": groups, **({"options": options} if options else {})}
    if name in ENGINES:  # what is built in cannot be replaced
        return cast("Engine", load_target(ENGINES[name].target)(servers, **given))
    found = PLUGINS.find(name)
    if found is None:
        raise PLUGINS.unknown(name, ENGINES)
    make: MakeEngine = guarded("engine", name, found)
    return make(servers, **given)
