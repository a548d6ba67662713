"""SparsePipedream's planner: PipeDream's pipelines on servers with several types of GPU.

The hybrid optimizer of SparsePipedream (a fork of PipeDream's) plans over servers whose GPUs
differ, each type with its own profile. A stage on devices D with shares w takes

    max over d in D of w_d C(d) + (g (m-1)/m P/B1 + g (q-1)/q P/B2) / r,    g = 2

with equal shares (``equal``, as there: the slowest type over the number of devices) or shares by
speed (``weighted``); cuts as in ``cost.objectives.repaired``. One server: exact over all ideals and
all numbers of devices of each type for every stage (``pipedream.mixed``), ``O(ideals^2 choices^2)``
a test of a period. Several servers: each one alone, and stages on consecutive devices of rows
through the servers and types in several orders (``pipedream.row``), where stages may span servers.

Departures from the released tool (numbers of its known faults):

* H1 any split is accepted, also of two units; H2 any devices for any stage, not a prefix of a list
  by count; H3 devices may stay unused by default, and H4 the plan says which are used;
* H5 straight pipelines are searched like all others; H6 nothing depends on an output folder;
* H7 the comparison with data parallelism is the cost model's, on the devices at hand; H8 impossible
  input is refused in one line; H9 shares by speed;
* transfers are divided among the replicas beside a cut; there they are not. So no value is above
  that of the released model for the same plan.
"""

import math
from typing import Any

from partita.core.problem import Metric, Problem
from partita.core.solution import Solution
from partita.errors import InvalidInputError
from partita.planners.effort import Effort, SearchTrace
from partita.planners.pipedream.build import check_positive
from partita.planners.pipedream.planner import ONE_DEVICE_AN_OP, repaired_solution
from partita.planners.pipedream.repaired import Breadth, repaired_search
from partita.planners.pipedream.state import Rules

ALLREDUCE_FACTOR = 2.0
SHARES = ("weighted", "equal")
FREE = "free"


def plan_sparse_pipedream(  # noqa: PLR0913 (the options of the released tool, and of our search)
    problem: Problem,
    *,
    shares: str = "weighted",
    straight: bool = False,
    fewer: bool = True,
    memory: bool = True,
    compression: float | str = 1.0,
    ideals: int = 3000,
    orders: int = 32,
    iterations: int = 3,
    time_limit: float = math.inf,
    trace: SearchTrace | None = None,
) -> Solution:
    """Return the pipeline of replicated stages with the least period on mixed servers.

    Args:
        problem: The problem, such as a server file makes it.
        shares: ``weighted`` = replicas take minibatches by their speed, ``equal`` = all alike.
        straight: One device per stage.
        fewer: Whether devices may stay unused.
        memory: Whether the search keeps within memory.
        compression: Activation compression ratio; ``free`` = transfers cost nothing.
        ideals: Ideals up to which all are looked at.
        orders: Linear orders to look at where there are more.
        iterations: Rounds of looking near the best pipeline where there are more.
        time_limit: Seconds after which nothing further is looked at, once there is a plan.
        trace: Called with every new best period.

    Raises:
        InfeasibleError: No pipeline keeps the limits.
        InvalidInputError: An option is out of range.
    """
    if shares not in SHARES:
        raise InvalidInputError(f"shares is {shares!r}; expected one of {', '.join(SHARES)}")
    for name, value in (("ideals", ideals), ("orders", orders)):
        check_positive(name, value)
    options: dict[str, Any] = {"shares": shares, "straight": straight, "fewer": fewer}
    options |= {"memory": memory, "compression": compression}
    metric = problem.objective.metric
    rules = Rules(
        straight=straight or metric in ONE_DEVICE_AN_OP,
        exact=not fewer,
        memory=memory,
        charge=_charge(compression),
        factor=ALLREDUCE_FACTOR,
        # The released objective knows equal shares alone.
        weighted=shares == "weighted" and metric is not Metric.PIPEDREAM,
    )
    breadth = Breadth(ideals=ideals, orders=orders, rounds=iterations)
    effort = Effort(time_limit=None if math.isinf(time_limit) else time_limit, trace=trace)
    search = repaired_search(problem, rules, breadth, effort)
    return repaired_solution(search, "sparse-pipedream", options)


def _charge(compression: float | str) -> float:
    """Return what a byte of a transfer counts."""
    if compression == FREE:
        return 0.0
    if isinstance(compression, str) or not compression > 0:
        raise InvalidInputError(
            f"compression is {compression!r}; expected a number above 0, or {FREE!r}"
        )
    return 1 / compression
