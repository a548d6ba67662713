"""One entry for both sets of rules: ours, or those of Synergy's released code."""

from partita.core.fleet import FleetHistory, Trace
from partita.errors import InvalidInputError
from partita.fleet.policies.resources import Servers
from partita.fleet.policies.table import policy_of
from partita.fleet.simulate.options import Rules
from partita.fleet.simulate.released import simulate_released
from partita.fleet.simulate.rounds import Progress, simulate_rounds


def simulate_fleet(
    trace: Trace,
    servers: Servers,
    policy: str,
    *,
    as_released: bool = False,
    rules: Rules | None = None,
    progress: Progress | None = None,
) -> FleetHistory:
    """Return what a policy makes of a trace.

    Args:
        trace: The jobs.
        servers: The servers.
        policy: ``ORDERING:ALLOCATOR``.
        as_released: Whether to decide as Synergy's released code does, its oddities included.
        rules: How rounds are played; the released code has its own.
        progress: Is told the jobs done and all jobs, now and then.

    Raises:
        InvalidInputError: There is no such policy, or rules are given that are not the released.
        InfeasibleError: A job can never run.
    """
    found = policy_of(policy)
    if not as_released:
        return simulate_rounds(trace, servers, found, rules=rules, progress=progress)
    if rules is not None and rules != Rules():
        raise InvalidInputError(
            "rules of rounds cannot be given with the released ones: 300 s, no restart cost, no "
            "outages, quotas, leases or power cap"
        )
    ordering, _, allocator = policy.partition(":")
    return simulate_released(trace, servers, ordering=ordering, allocator=allocator)


DIFFERENCES = (
    "FTF serves the largest ratio of shared to lone time first; the released code the smallest",
    "DRF fills progressively by tenant and Tetris counts alignment; released, both are sort keys",
    "tune demotes along the matrix as far as needed; released, from the ideal to the fair share",
    "jobs stay on their GPUs and whole jobs go to one server; released, all is packed anew",
    "a resumption or move costs a restart; released, nothing",
    "a job ends with its last iteration and keeps parts of iterations; released, with the round",
    "an idle gap is waited through; released, the run ends there and later jobs are lost",
)
"""Where our rules depart from the released code's, for those who compare the two."""
