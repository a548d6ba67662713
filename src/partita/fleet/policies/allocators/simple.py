"""Synergy's three allocators by the paper's rules (OSDI 2022): fair, greedy and tune.

All keep jobs where they run and consolidate the others, which the released code does not. ``fair``
grants GPU-proportional shares; ``greedy`` the ideal demand or nothing; ``tune`` the ideal demand
where it fits, else the fastest choice along the job's matrix that leaves every other job on the
server its floor. The released tune knows ideal and fair only.
"""

from typing import Any

import numpy as np

from partita.core.columns import Longs
from partita.fleet.policies.allocators.round_tables import (
    RoundTables,
    largest_first,
    lay_out,
    outcome,
    run,
)
from partita.fleet.policies.kernels.sharing import FLOORS, IN_ORDER, share, share_greedily
from partita.fleet.policies.snapshot import Allocation, Snapshot


def fair(snapshot: Snapshot, order: Longs, *, effort: float = 0.0) -> Allocation:
    """Return GPU-proportional shares for the first jobs whose GPUs there are."""
    return outcome(snapshot, _share(FLOORS, snapshot, order, effort), proportional=True)


def tune(snapshot: Snapshot, order: Longs, *, effort: float = 0.0) -> Allocation:
    """Return ideal demands in order, demoted along the matrices as far as needed."""
    return outcome(snapshot, _share(IN_ORDER, snapshot, order, effort))


def greedy(snapshot: Snapshot, order: Longs, *, effort: float = 0.0) -> Allocation:
    """Return ideal demands for the jobs, in order, for which they fit; few jobs move for that."""
    tables = lay_out(snapshot)

    def call(kernel: Any, at: RoundTables) -> None:  # noqa: ANN401 (compiled or not)
        rank = np.zeros(len(snapshot), dtype=np.int64)
        kernel(order, rank, at.queue, at.site, at.table, at.class_free, at.quota)

    return outcome(snapshot, run(share_greedily, tables, call, effort=effort))


def _share(mode: int, snapshot: Snapshot, order: Longs, effort: float) -> RoundTables:
    newest = largest_first(snapshot)

    def call(kernel: Any, at: RoundTables) -> None:  # noqa: ANN401 (compiled or not)
        span = snapshot.least[:0]
        limits = (at.class_free, at.quota, span, 0)
        kernel(mode, order, newest, at.queue, at.site, at.table, limits)

    return run(share, lay_out(snapshot), call, effort=effort)
