"""The visible table of simulators: by which rules a trace is played.

``ours`` is the one of this package. Rules of published code are in ``partita.released``, which is
imported only when they are asked for. Other packages add theirs by entry points of the group
``partita.fleet.simulators``, which name a :class:`Simulator`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from partita.core.fleet import FleetHistory, Trace
from partita.errors import UnsupportedError
from partita.fleet.policies.resources import Servers
from partita.fleet.policies.table import Policy, policy_of
from partita.fleet.simulate.options import Rules
from partita.fleet.simulate.rounds import Progress, simulate_rounds
from partita.plugins import PluginGroup, load_target

PLUGINS = PluginGroup(group="partita.fleet.simulators", noun="simulator")
DEFAULT_SIMULATOR = "ours"


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulator:
    """A set of rules by which a trace is played.

    Attributes:
        name: Its name in results.
        simulate: Plays a trace: takes trace, servers, policy, rules (``None`` = its own) and
            progress.
        knows: Whether it has a policy, by name.
        suffix: Words after a policy's name in titles, where the rules are not ours.
        fixed_rules: Its rules in a line, where nobody can change them; empty = those of ``Rules``.
        not_counted: Figures that it does not count.
        differences: Where it departs from ours, a line each.
    """

    name: str
    simulate: Callable[[Trace, Servers, Policy, Rules | None, Progress | None], FleetHistory]
    knows: Callable[[str], bool] = lambda _: True
    suffix: str = ""
    fixed_rules: str = ""
    not_counted: tuple[str, ...] = ()
    differences: tuple[str, ...] = ()


def _by_rounds(
    trace: Trace,
    servers: Servers,
    policy: Policy,
    rules: Rules | None,
    progress: Progress | None,
) -> FleetHistory:
    return simulate_rounds(trace, servers, policy, rules=rules, progress=progress)


OURS = Simulator(name=DEFAULT_SIMULATOR, simulate=_by_rounds)
SIMULATORS: Mapping[str, str] = {
    DEFAULT_SIMULATOR: "partita.fleet.simulate.table:OURS",
    "released": "partita.released.synergy:SIMULATOR",
}
"""Simulators by name, each as ``"module:name"``; imported when it is asked for."""


def simulator_of(name: str) -> Simulator:
    """Return a simulator by name.

    Raises:
        InvalidInputError: There is no such simulator.
        UnsupportedError: It is a plug-in that cannot be loaded, or is none.
    """
    found = load_target(SIMULATORS[name]) if name in SIMULATORS else PLUGINS.find(name)
    if found is None:
        raise PLUGINS.unknown(name, SIMULATORS)
    if not isinstance(found, Simulator):
        raise UnsupportedError(f"simulator {name!r} is a plug-in, and is no Simulator")
    return found


def simulate_trace(
    trace: Trace,
    servers: Servers,
    policy: str,
    *,
    rules: Rules | None = None,
    progress: Progress | None = None,
    simulator: str = DEFAULT_SIMULATOR,
) -> FleetHistory:
    """Return what a policy makes of a trace.

    Args:
        trace: The jobs.
        servers: The servers.
        policy: ``ORDERING:ALLOCATOR``.
        rules: How rounds are played; ``None`` = as is usual.
        progress: Called with the jobs done and all jobs, now and then.
        simulator: By which rules; a row of ``SIMULATORS``, or a plug-in.

    Raises:
        InvalidInputError: There is no such policy or simulator, or a rule does not fit.
        InfeasibleError: A job can never run.
    """
    return simulator_of(simulator).simulate(trace, servers, policy_of(policy), rules, progress)
