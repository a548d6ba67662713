"""Local search for placements with a short makespan, from given ones.

Simulated annealing over devices and orders (see ``annealing``) on the objective itself: makespan,
with parallel or sequential channels, under Baechi's memory rule. It goes in rounds. Each begins at
the best placement known, or now and then at another start, and cools from about a hundredth of the
makespan to a hundred-thousandth. A move costs O(ops + edges) at the most, less by checkpoints and
bounds.

The cost model puts ops that neither receive nor send in the order of the graph, which can change
what a device holds at its peak, never the makespan. So a placement counts only if it also keeps the
limits in the order of the cost model; where one does not, a short round goes on from there with so
much less memory.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from partita.core.columns import Array
from partita.core.problem import Problem
from partita.errors import InvalidInputError
from partita.objectives.makespan import commit_order
from partita.planners.annealing import anneal_rounds
from partita.planners.baechi.annealing import Annealer
from partita.planners.baechi.instance import (
    Instance,
    forward_ops,
)
from partita.planners.baechi.placement import Placed, plan_of
from partita.planners.baechi.replay import makespan_of
from partita.planners.effort import Effort

_STEPS = 24
"""Temperatures of a round."""
_HOT = (3e-3, 1e-2, 1e-3, 3e-2)
"""Temperatures that rounds begin with, one after the other, as shares of the makespan."""
_COLD = 1e-5
_REPAIRS, _REPAIR_HOT = 3, 3e-4
"""Rounds, and their temperature, until a placement keeps the limits in the model's order, too."""
_PRICE = 20.0
"""Makespans that a placement costs which needs all of a device's memory twice."""
_ROUND = 40_000
"""Moves of a round, at the most."""


def anneal_placements(
    problem: Problem, g: Instance, starts: Sequence[Placed], effort: Effort
) -> Placed:
    """Return the best placement that annealing finds from some that keep the limits.

    Args:
        problem: The problem.
        g: Its instance.
        starts: Where rounds begin, the best first.
        effort: Moves or seconds, one of them at least; a move is a step. Its goal is what no
            placement can beat, in seconds.
    """
    if effort.iterations is None and effort.time_limit is None:
        raise InvalidInputError("a search needs iterations or a time limit")
    effort.record(starts[0].makespan)
    rounds = _Rounds(problem=problem, g=g, starts=starts, effort=effort)
    return anneal_rounds(starts[0], rounds.run, effort)


@dataclass(slots=True, kw_only=True)
class _Rounds:
    """Rounds of annealing.

    Attributes:
        problem: The problem.
        g: Its instance.
        starts: Where every second round begins, in turn.
        effort: Limits.
        margin: Bytes of each device that are left free, so that the model's order fits, too.
    """

    problem: Problem
    g: Instance
    starts: Sequence[Placed]
    effort: Effort
    margin: float = 0.0

    def run(self, number: int, best: Placed) -> Placed:
        """Return what a round finds that keeps the limits; the best so far where that is worse."""
        origin = self.starts[number // 2 % len(self.starts)] if number % 2 else best
        hot = _HOT[number % len(_HOT)]
        for attempt in range(_REPAIRS):
            tight = self.g._replace(limit=self.g.limit - self.margin)
            search = _cooled(tight, origin, self.effort, hot=hot, turn=1000 * number + attempt)
            if search.excess > 0 or search.makespan >= best.makespan:
                break
            found = Placed(search.device_of, search.order, search.makespan)
            found = found._replace(order=_model_order(self.problem, found))
            excess = makespan_of(self.g, found.device_of, found.order)[1]
            if excess <= 0:
                return found
            # Again from there, and with less memory, so that the order of the model fits.
            self.margin = max(self.margin, excess)
            origin, hot = found, _REPAIR_HOT
        return best


def _model_order(problem: Problem, found: Placed) -> Array:
    """Return the forward ops in the order in which the cost model runs them."""
    number = np.full(len(problem.graph), -1, dtype=np.int64)
    forward = forward_ops(problem.graph)
    number[forward] = np.arange(len(forward))
    order: Array = number[commit_order(problem.graph, plan_of(problem, found))]
    return order


def _cooled(g: Instance, origin: Placed, effort: Effort, *, hot: float, turn: int) -> Annealer:
    """Return a search after one round of cooling."""
    search = Annealer(g, origin.device_of, origin.order, seed=effort.seed + turn, effort=_ROUND)
    smallest = float(g.limit.min())
    price = _PRICE * origin.makespan / smallest if 0 < smallest < np.inf else 0.0
    moves = max(1, _ROUND // _STEPS)
    for step in range(_STEPS):
        temperature = origin.makespan * hot * (_COLD / hot) ** (step / (_STEPS - 1))
        taken = effort.spend(moves)
        begin_s = effort.elapsed_s
        search.run(taken, temperature, price)
        spent_s = effort.elapsed_s - begin_s
        if effort.is_over():
            break
        if effort.time_limit is not None:
            # The rest of the round in the time that is left, but never more moves than planned.
            each = max(spent_s / max(taken, 1), 1e-9)
            moves = int(min(_ROUND // _STEPS, effort.left_s / (_STEPS - step) / each)) or 1
    return search
