"""Local search on the simulator: from a few starts to the best neighbour, again and again.

The neighbours of a sketch are estimated, those that cannot be better are left out, and the rest is
measured by promise until one is better. All starts go a few steps, then the better half goes on for
twice as long, and so forth (successive halving). Where no neighbour is better, the best sketch is
shaken by a few random moves and the search goes on; where that does not help, other good sketches
are shaken, too. It ends when ``MAX_SHAKES`` in a row have not helped, or, where the clock is the
limit, when the time is up. With a count of iterations the result depends on that and the seed
alone.
"""

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, islice

from partita.core.problem import Metric
from partita.cost.judge import Judgement
from partita.planners.auto.estimate import Estimate, Estimator
from partita.planners.auto.evaluator import Evaluator
from partita.planners.auto.frame import Frame
from partita.planners.auto.moves import CHEAP, NEIGHBOURHOODS, Move, Position
from partita.planners.auto.recompute import beyond_estimate, fitted, refitted
from partita.planners.auto.sketch import Sketch, shape
from partita.planners.auto.starts import Recuts

FIRST_ROUND = 8
"""Candidates that each start may measure before the worse half of them is given up."""
SHAKE_ROUND = 40
MAX_SETTLING = 12
"""Steps by estimate alone."""
MAX_SHAKES = 4
MAX_CHEAP_SHAKES = 40
"""The same where candidates are measured condensed."""
PATIENCE, SHAKES_PER_PLACE = 12, 8
"""Shakes of the best sketch in vain after which another place is shaken, and how often each is."""
MAX_PLACES = 6
"""Shapes among which that place is chosen."""
GOOD_ENOUGH = 1.005
"""A value that is no more than this above the bound is not improved further."""
RECUT_SHARE = 0.5
"""Of the places that are searched, those that are cut anew."""
FIRST_RECUTS, MAX_FIRST_RECUTS, RECUTS_UNTIL, GOOD_ENDS = 4, 40, 0.45, 3
"""Cuts near the best few starts before any is improved: of a counted search, and of one by the
clock up to a share of its time."""
WORTH_CUTTING = 1.25
"""Cuts that are estimated to be more than this above the best plan are not measured."""
MAX_REFITS, REFIT_SHARE = 3, 0.3
"""How often a sketch that does not fit recomputes more, where it exceeds less of the memory."""
MAX_NEIGHBOURS = 300
"""Neighbours that are estimated around one sketch."""
MAX_FAILURES = 48
"""Neighbours that are measured around one sketch without finding a better one."""
FEW_FAILURES = 16
"""The same of moves that change the stages where others are measured condensed: such a plan costs
as much as thirty of those that leave them."""
SLACK = 1.05
"""Neighbours whose estimate is more than this above that of the sketch are not measured."""
WIDE_SLACK = 1.3
"""The same where the schedule or the microbatches change, which estimates compare less well."""


@dataclass(frozen=True, slots=True)
class End:
    """Where the search stands after some steps from a start.

    Attributes:
        judgement: What becomes of the sketch.
        sketch: The sketch.
        is_exhausted: Whether none of its neighbours is better.
    """

    judgement: Judgement
    sketch: Sketch
    is_exhausted: bool = False


@dataclass(slots=True)
class Search:
    """A local search over the sketches of one frame.

    Attributes:
        frame: The frame.
        evaluator: Measures candidates.
        estimator: Estimates them.
        bound: No plan is below; reaching it ends the search.
        seed: Of the random moves.
        recuts: Cuts along other lines of devices; ``None`` = they are not tried.
        met: Everything measured.
    """

    frame: Frame
    evaluator: Evaluator
    estimator: Estimator
    bound: float = 0.0
    seed: int = 0
    recuts: Recuts | None = None
    met: list[tuple[Judgement, Sketch]] = field(default_factory=list)

    def measure(self, sketch: Sketch, cutoff: float = math.inf) -> Judgement:
        """Return what becomes of a sketch, and note it."""
        fresh = not self.evaluator.seen(sketch.key)
        judgement = self.evaluator.evaluate(sketch, cutoff)
        if fresh:
            self.met.append((judgement, sketch))
        return judgement

    def measure_fitted(
        self, sketch: Sketch, cutoff: float = math.inf, *, eases: bool = False
    ) -> End:
        """Return what becomes of a sketch that recomputes as much as it needs to, once measured.

        Args:
            sketch: The sketch.
            cutoff: A value that interests.
            eases: Whether to recompute less where memory is left, too.
        """
        end = best = End(self.measure(sketch, cutoff), sketch)
        model = self.evaluator.model
        for _ in range(MAX_REFITS):
            if model is None or not model.excess:
                break
            over = max(model.excess.values())
            if over > REFIT_SHARE * float(self.frame.limit_bytes.max()):
                break
            if over <= 0 and not (eases and end.sketch.recompute.any()):
                break
            beyond = beyond_estimate(self.estimator, end.sketch, model.excess)
            again = fitted(self.estimator, end.sketch, reserve_bytes=beyond)
            if self.evaluator.seen(again.key):
                break
            end = End(self.measure(again, cutoff), again)
            if end.judgement.rank < best.judgement.rank:
                best = end
        return best

    @property
    def is_done(self) -> bool:
        """Whether the budget is used up, or nothing can be better to speak of."""
        return self.evaluator.effort.is_over() or self.evaluator.best <= self.bound * GOOD_ENOUGH

    def improve(self, end: End, most: int) -> End:
        """Return where a sketch leads within a number of measured candidates."""
        left = most
        while left > 0 and not self.is_done:
            better, left = self._better_neighbour(end, left)
            if better is None:
                # Out of tries says nothing about the neighbours; only a full look does.
                return end if left <= 0 else replace(end, is_exhausted=True)
            end = better
        return end

    def _better_neighbour(self, end: End, left: int) -> tuple[End | None, int]:
        """Return the first better neighbour that is met, and how many may still be measured."""
        here = self.estimator.estimate(end.sketch)
        position = Position(self.frame, self.estimator, end.sketch, here.load)
        # A later group is looked at only where those before it find nothing.
        for moves in NEIGHBOURHOODS:
            failures = 0
            is_cheap = moves in CHEAP and self.evaluator.model is not None
            most = MAX_NEIGHBOURS if is_cheap else MAX_FAILURES
            if self.evaluator.model is not None and not is_cheap:
                most = FEW_FAILURES
            near = (
                self._all_near(position, moves)
                if is_cheap
                else self._promising(position, moves, end.judgement, here.guess)
            )
            for candidate in near:
                if failures >= most:
                    break
                if left <= 0 or self.is_done:
                    return None, 0
                self.evaluator.spend()
                left, failures = left - 1, failures + 1
                found = self.measure_fitted(candidate, end.judgement.score)
                if found.judgement.rank < end.judgement.rank:
                    return found, left
        return None, left

    def _all_near(self, position: Position, moves: Sequence[Move]) -> Iterator[Sketch]:
        """Yield the neighbours that were not measured yet, in their order."""
        for near in chain.from_iterable(move(position) for move in moves):
            candidate = refitted(self.estimator, position.sketch, near)
            if not self.evaluator.seen(candidate.key):
                yield candidate

    def _promising(
        self, position: Position, moves: Sequence[Move], judged: Judgement, guess: float
    ) -> list[Sketch]:
        """Return the neighbours that may be better, the best estimate first."""
        fits = judged.score < math.inf
        ranked: list[tuple[float, int, Sketch]] = []
        near = chain.from_iterable(move(position) for move in moves)
        for number, neighbour in enumerate(islice(near, MAX_NEIGHBOURS)):
            candidate = refitted(self.estimator, position.sketch, neighbour)
            if self.evaluator.seen(candidate.key):
                continue
            estimate = self.estimator.estimate(candidate)
            # A sketch that does not fit is led towards memory first, whatever its speed.
            if not fits:
                ranked.append((estimate.over_bytes, number, candidate))
            elif self._may_help(estimate, judged.score, guess * _slack(position.sketch, candidate)):
                ranked.append((estimate.guess, number, candidate))
        # Ties by number: sketches have no order, and the result must not depend on chance.
        return [candidate for _, _, candidate in sorted(ranked, key=lambda row: row[:2])]

    def _may_help(self, estimate: Estimate, value: float, most: float) -> bool:
        if self.frame.problem.objective.metric is not Metric.THROUGHPUT:
            return True
        limit = float(self.frame.limit_bytes.max())
        # Estimates of memory are rough: a little too much is still measured.
        if estimate.over_bytes > 0.2 * limit:
            return False
        # The floor is a bound, so that dropping by it loses nothing; the guess is a judgement.
        return estimate.floor < value and estimate.guess <= most

    def settle(self, sketch: Sketch) -> Sketch:
        """Return where the best neighbours by estimate lead, without measuring any."""
        here = self.estimator.estimate(sketch)
        for _ in range(MAX_SETTLING):
            position = Position(self.frame, self.estimator, sketch, here.load)
            # Moves of single units are left to the search that measures.
            for moves in NEIGHBOURHOODS[:2]:
                near = islice(chain.from_iterable(move(position) for move in moves), MAX_NEIGHBOURS)
                found = []
                for candidate in near:
                    # On thousands of devices an estimate takes milliseconds.
                    if self.evaluator.effort.is_over():
                        return sketch
                    found.append((self.estimator.estimate(candidate), candidate))
                best = min(found, key=lambda pair: _promise(pair[0]), default=None)
                if best is not None and _promise(best[0]) < _promise(here):
                    here, sketch = best
                    break
            else:
                break
        return sketch

    def shake(self, sketch: Sketch, rng: random.Random) -> Sketch:
        """Return a sketch a few random moves away."""
        for _ in range(rng.randint(2, 4)):
            here = self.estimator.estimate(sketch)
            position = Position(self.frame, self.estimator, sketch, here.load)
            moves = rng.choice(NEIGHBOURHOODS)
            near = list(
                islice(chain.from_iterable(move(position) for move in moves), MAX_NEIGHBOURS)
            )
            if near:
                sketch = refitted(self.estimator, sketch, rng.choice(near))
        return sketch

    def run(self, starts: Sequence[Sketch]) -> None:
        """Improve the starts, the better half of them ever longer; then shake the best."""
        ends = [self.measure_fitted(start, eases=True) for start in starts]
        ends = self._recut(ends)
        best = min(ends, key=lambda end: end.judgement.rank, default=None)
        most = FIRST_ROUND
        while ends and not self.is_done:
            ends = sorted((self.improve(end, most) for end in ends), key=lambda e: e.judgement.rank)
            best = ends[0]
            # The better half goes on, without those whose neighbours are all known to be no better.
            ends = [end for end in ends[: max(1, len(ends) // 2)] if not end.is_exhausted]
            most *= 2
        if best is not None:
            self._shaken(best)

    def _recut(self, ends: list[End]) -> list[End]:
        """Return as many ends, the best of them and of what is cut anew along other lines."""
        effort, rng = self.evaluator.effort, random.Random(self.seed)
        most = FIRST_RECUTS if effort.is_counted else MAX_FIRST_RECUTS
        if self.recuts is None or not ends:
            return ends
        found = sorted(ends, key=lambda end: end.judgement.rank)
        for _ in range(most):
            if self.is_done or (not effort.is_counted and effort.used() > RECUTS_UNTIL):
                break
            near = rng.choice(found[:GOOD_ENDS]).sketch
            below = self.evaluator.best * WORTH_CUTTING
            cuts = self.recuts.near(near, rng, below)
            found += [self.measure_fitted(one, eases=True) for one in cuts]
            unlike = {end.sketch.key: end for end in found}
            found = sorted(unlike.values(), key=lambda end: end.judgement.rank)[: len(ends)]
        return found

    def _shaken(self, best: End) -> None:
        """Search around a sketch from random places nearby, until that no longer helps.

        What does not help for a while goes on from other good sketches and from the best in turns.
        """
        rng, effort = random.Random(self.seed), self.evaluator.effort
        by_clock = effort.time_limit is not None and not effort.is_counted
        here, idle, fresh, stale = best, 0, len(self.met), 0
        most = MAX_SHAKES if self.evaluator.model is None else MAX_CHEAP_SHAKES
        # A small problem has nothing new at some time, whatever time is left.
        while not self.is_done and (idle < most or (by_clock and stale < MAX_CHEAP_SHAKES)):
            turn, begun = divmod(idle - PATIENCE, SHAKES_PER_PLACE)
            if turn >= 0 and not begun:
                here = best if turn % 2 else self._elsewhere(rng)
            end = self.improve(self._start_near(here, rng), SHAKE_ROUND)
            idle += 1
            stale = stale + 1 if len(self.met) == fresh else 0
            fresh = len(self.met)
            if end.judgement.rank < here.judgement.rank:
                here = end
            if end.judgement.rank < best.judgement.rank:
                best, idle = end, 0

    def _start_near(self, here: End, rng: random.Random) -> End:
        """Return a place to search from: a shaken sketch, or the best of some that are cut anew."""
        if self.recuts is None or rng.random() >= RECUT_SHARE:
            return self.measure_fitted(self.shake(here.sketch, rng))
        cuts = self.recuts.near(here.sketch, rng, self.evaluator.best * WORTH_CUTTING)
        ends = [self.measure_fitted(sketch, eases=True) for sketch in cuts]
        best = min(ends, key=lambda end: end.judgement.rank, default=None)
        return best if best is not None else self.measure_fitted(self.shake(here.sketch, rng))

    def _elsewhere(self, rng: random.Random) -> End:
        """Return one of the best few sketches of different shapes."""
        ranked: dict[tuple[object, ...], End] = {}
        for judged, sketch in sorted(self.met, key=lambda pair: pair[0].rank):
            ranked.setdefault(shape(sketch), End(judged, sketch))
            if len(ranked) == MAX_PLACES:
                break
        return rng.choice(list(ranked.values()))


def _promise(estimate: Estimate) -> tuple[float, float]:
    return max(0.0, estimate.over_bytes), estimate.guess


def _slack(sketch: Sketch, other: Sketch) -> float:
    same = sketch.schedule is other.schedule and sketch.batch == other.batch
    return SLACK if same else WIDE_SLACK
