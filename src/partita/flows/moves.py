"""A plan in the place of another: what moves, and plans that trade step time for fewer moves.

Candidates are what the search found (its plan and its alternatives), the same with devices that are
alike exchanged so that more state stays where it is, plans that keep the old cut (over the devices
that are left, with lost ones replaced, with new ones as replicas), and plans between the old cut
and the new one. All are judged as every plan is; those that another one beats in value and in bytes
are left out.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from partita.core.columns import Array
from partita.core.plan import Plan, Shard, Stage, equal_microbatches
from partita.core.problem import Problem
from partita.core.solution import Proof, Solution
from partita.cost.judge import evaluate
from partita.cost.moves import Moves, kept_bytes, moves
from partita.cost.tables import device_classes
from partita.documents import OpenedFile, open_file
from partita.errors import InvalidInputError
from partita.flows.answer import distinct_words, value_within_limits
from partita.flows.fields import PlanSource
from partita.planners.auto.sketch import fair_shares
from partita.planners.pipeline import main_devices
from partita.units import format_bytes, format_seconds

MAX_CANDIDATES = 32
"""Plans that are judged."""
MAX_GROWN = 8
"""Stages that are tried to be given a replica, or a boundary that are tried to stay."""
MAX_PAIRS = 2**24
"""Pairs of a device of a plan and one of the cluster up to which devices are exchanged."""
DEFAULT_SLOWDOWN = 0.05
"""Share by which a plan may be slower than the fastest one for fewer moves."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class OldPlan:
    """The plan that ran before.

    Attributes:
        plan: The plan.
        problem: What it is a plan for: its graph, precision and optimizer say what devices hold.
        name: Its file; empty = none.
    """

    plan: Plan
    problem: Problem
    name: str = ""

    def moves(self, problem: Problem, plan: Plan) -> Moves:
        """Return what moves when a plan takes its place."""
        return moves(self.plan, plan, problem, self.problem)


def read_old_plan(source: PlanSource | Plan, problem: Problem) -> OldPlan:
    """Return the plan that ran before; a bare one is of the model that is planned.

    Raises:
        InvalidInputError: It is no plan, or a bare one of another model.
    """
    found: object = source
    name = ""
    if isinstance(source, str | OpenedFile):
        file = open_file(source) if isinstance(source, str) else source
        found, name = file.load(problem=problem), file.name
    elif not isinstance(source, Solution | Plan):
        found = source.solution
    if isinstance(found, Solution):
        return OldPlan(plan=found.plan, problem=found.problem, name=name)
    if not isinstance(found, Plan):
        kind = type(found).__name__.lower()
        raise InvalidInputError(
            f"{name!r} holds a {kind}, not a plan; --from names what 'partita plan' wrote"
        )
    if found.fingerprint != problem.graph.fingerprint:
        raise InvalidInputError(
            f"{name or 'the old plan'} is a bare plan of another graph than "
            f"{problem.graph.name!r}; expected a plan with its problem"
        )
    return OldPlan(plan=found, problem=problem, name=name)


@dataclass(frozen=True, kw_only=True, eq=False)
class MoveCandidate:
    """A plan that may take the place of the old one.

    Attributes:
        plan: The plan.
        words: The plan in a few words, and what sets it apart.
        value: Its value by the problem's metric.
        step_s: Seconds of a step.
        moves: What moves.
    """

    plan: Plan
    words: str
    value: float
    step_s: float
    moves: Moves

    def to_json(self) -> dict[str, Any]:
        """Return the figures as JSON values."""
        figures = self.moves.to_json()
        del figures["devices"]
        return {"plan": self.words, "value": self.value, "step_s": self.step_s, **figures}


@dataclass(frozen=True, kw_only=True, eq=False)
class Replacement:
    """What moves from the old plan to the new one, and what other plans would move.

    Attributes:
        old: The plan that ran before.
        chosen: The plan that takes its place.
        candidates: Plans that none beats in value and in bytes, and the one that the search
            found, the best value first; empty where moves are counted and not minimised.
        slowdown: Share by which the chosen plan may be above the best value.
    """

    old: OldPlan
    chosen: MoveCandidate
    candidates: tuple[MoveCandidate, ...]
    slowdown: float

    @property
    def line(self) -> str:
        """What moves, in one line."""
        return f"from {self.old.name or 'the old plan'}: {moves_words(self.chosen.moves)}"

    def to_json(self) -> dict[str, Any]:
        """Return everything as JSON values."""
        return {
            "from": self.old.name or None,
            **self.chosen.moves.to_json(),
            "slowdown": self.slowdown,
            "candidates": [
                {**each.to_json(), "chosen": each is self.chosen} for each in self.candidates
            ],
        }


def moves_words(found: Moves) -> str:
    """Return what moves, in a few words.

    A part that nobody holds any longer is said to be read from a checkpoint.
    """
    kept = float(found.kept.sum())
    if not found.total_bytes:
        return f"no state moves ({format_bytes(kept)} stay)"
    words = []
    if found.copied_bytes:
        words.append(
            f"{format_bytes(found.copied_bytes)} of state move between devices "
            f"({format_seconds(found.copy_s)} over the links)"
        )
    if found.read_bytes:
        seconds = "" if math.isnan(found.read_s) else f" ({format_seconds(found.read_s)})"
        words.append(f"{format_bytes(found.read_bytes)} are read from a checkpoint{seconds}")
    return f"{', '.join(words)}, {format_bytes(kept)} stay"


def replaced(
    old: OldPlan, solution: Solution, *, minimise: bool = False, slowdown: float | None = None
) -> tuple[Solution, Replacement]:
    """Return the plan that takes the place of an old one, and what moves.

    Args:
        old: The plan that ran before.
        solution: What the search found.
        minimise: Whether to take the plan that moves least of those that are nearly as good as the
            best (ties: the better value) instead of the one that was found.
        slowdown: Share by which its value may be above the best; None = 0.05.
    """
    problem = solution.problem
    if not minimise:
        plan, value = solution.plan, solution.value
        only = _candidate(old, problem, plan, value, distinct_words(problem, plan, plan))
        return solution, Replacement(old=old, chosen=only, candidates=(), slowdown=0.0)
    return _least_moves(old, solution, DEFAULT_SLOWDOWN if slowdown is None else slowdown)


def _least_moves(old: OldPlan, solution: Solution, slowdown: float) -> tuple[Solution, Replacement]:
    problem = solution.problem
    offers: dict[tuple[object, ...], Offer] = {}
    for plan in _candidates(old, solution):
        key = _key(plan)
        if key in offers:
            continue
        if len(offers) >= MAX_CANDIDATES:
            break
        is_best = plan is solution.plan
        value = solution.value if is_best else value_within_limits(problem, plan)
        if value is not None:
            offers[key] = Offer(plan, value, old.moves(problem, plan))

    def candidate(offer: Offer, top: Offer) -> MoveCandidate:
        words = distinct_words(problem, offer.plan, top.plan)
        step_s = evaluate(problem, offer.plan).step_s
        return MoveCandidate(
            plan=offer.plan, words=words, value=offer.value, step_s=step_s, moves=offer.moves
        )

    found = weigh(old, list(offers.values()), slowdown, candidate)
    chosen = found.chosen
    proof = solution.proof if chosen.plan is solution.plan else Proof.FEASIBLE
    made = replace(
        solution,
        plan=chosen.plan,
        value=chosen.value,
        lower_bound=min(solution.lower_bound, chosen.value),
        proof=Proof.OPTIMAL if chosen.value <= solution.lower_bound * (1 + 1e-9) else proof,
        alternatives=tuple(each.plan for each in found.candidates if each is not chosen),
    )
    return made, found


class Offer(NamedTuple):
    """A plan that may take the place of the old one, with its value and what moves."""

    plan: Plan
    value: float
    moves: Moves


def weigh(
    old: OldPlan,
    offers: Sequence[Offer],
    slowdown: float,
    candidate: Callable[[Offer, Offer], MoveCandidate],
) -> Replacement:
    """Return the plan that moves least of those that are nearly as good as the best.

    Args:
        old: The plan that ran before.
        offers: Plans to choose from; the first is the one that the search found.
        slowdown: Share by which a value may be above the best.
        candidate: Makes what is shown of an offer; its second argument is the best one.
    """
    # Values that differ by rounding alone are one value.
    ranked = sorted(offers, key=lambda one: (float(f"{one.value:.6g}"), one.moves.total_bytes))
    front: list[Offer] = []
    for offer in ranked:
        if not front or offer.moves.total_bytes < front[-1].moves.total_bytes:
            front.append(offer)
    top = front[0]
    near = [one for one in front if one.value <= top.value * (1 + slowdown) + 1e-12]
    best = min(near, key=lambda one: (one.moves.total_bytes, one.value))
    if all(offer is not offers[0] for offer in front):
        front.append(offers[0])
    front.sort(key=lambda one: (one.value, one.moves.total_bytes))
    found = [candidate(offer, top) for offer in front]
    return Replacement(
        old=old,
        chosen=next(one for one in found if one.plan is best.plan),
        candidates=tuple(found),
        slowdown=slowdown,
    )


def _candidate(
    old: OldPlan, problem: Problem, plan: Plan, value: float, words: str
) -> MoveCandidate:
    step_s = evaluate(problem, plan).step_s
    found = old.moves(problem, plan)
    return MoveCandidate(plan=plan, words=words, value=value, step_s=step_s, moves=found)


def _key(plan: Plan) -> tuple[object, ...]:
    columns = (plan.stage_of, plan.microbatch_sizes, plan.recompute)
    parts = tuple(column.tobytes() for column in columns)
    return (plan.devices, plan.stages, plan.schedule, *parts)


def _candidates(old: OldPlan, solution: Solution) -> Iterator[Plan]:
    """Yield plans to choose from, those of the search first."""
    problem = solution.problem
    searched = (solution.plan, *solution.alternatives)
    yield solution.plan
    kept = kept_cuts(old.plan, problem)
    yield from kept
    for plan in searched:
        yield plan
        for near in relabelled(old, problem, plan):
            yield near
            for base in kept[:1]:
                yield from _between(base, near)


def kept_cuts(old: Plan, problem: Problem) -> list[Plan]:
    """Return plans that keep the cut of an old one over the devices of another cluster.

    Lost devices are replaced by spare ones, or their replicas are left out (a stage without any
    joins its neighbour); spare devices become replicas of all stages, or of one. Plans that cannot
    be made are left out; an old plan of another graph has none.
    """
    if old.fingerprint != problem.graph.fingerprint or len(old.stage_of) != len(problem.graph):
        return []
    names = problem.cluster.device_names
    used = dict.fromkeys(n for group in _names(old) for replica in group for n in replica)
    spare = [names[d] for d in main_devices(problem) if names[d] not in used]
    bases: list[tuple[Plan, list[str]]] = []
    lost = [name for name in used if name not in problem.cluster.index_of]
    makers: list[Callable[[], tuple[Plan, list[str]]]] = []
    if len(lost) <= len(spare):
        filled = dict(zip(lost, spare, strict=False))
        makers.append(
            lambda: (_over(old, problem, _names(old, filled)), spare[len(lost) :]),
        )
    if lost:
        makers.append(lambda: _without(old, problem, spare))
    for make in makers:
        try:
            bases.append(make())
        except InvalidInputError:
            continue
    grown = [plan for base, free in bases for plan in _grown(base, problem, free)]
    return [*(base for base, _ in bases), *grown]


def _names(plan: Plan, renamed: dict[str, str] | None = None) -> list[list[tuple[str, ...]]]:
    """Return the names of the devices of each stage, replica and rank."""
    other = renamed or {}
    of = [other.get(name, name) for name in plan.devices]
    return [[tuple(of[d] for d in group) for group in stage.devices] for stage in plan.stages]


def _over(
    plan: Plan,
    problem: Problem,
    groups: Sequence[Sequence[tuple[str, ...]]],
    stage_of: Array | None = None,
    stages: Sequence[Stage] = (),
) -> Plan:
    """Return a plan over other devices, for the batch and the schedule that are asked.

    Raises:
        InvalidInputError: The stages cannot be spread so.
    """
    objective = problem.objective
    samples = problem.microbatches * problem.microbatch_size
    sizes = plan.microbatch_sizes
    if objective.microbatches is not None or plan.samples != samples:
        sizes = equal_microbatches(problem.microbatches, problem.microbatch_size)
    schedule = plan.schedule
    if objective.schedule is not None or schedule.row.infers != (objective.mode == "inference"):
        schedule = objective.pipeline_schedule
    number: dict[str, int] = {}
    for group in groups:
        for replica in group:
            for name in replica:
                number.setdefault(name, len(number))
    made = tuple(
        _spread(stage, [tuple(number[name] for name in replica) for replica in group], len(sizes))
        for stage, group in zip(stages or plan.stages, groups, strict=True)
    )
    return replace(
        plan,
        devices=tuple(number),
        stage_of=plan.stage_of if stage_of is None else stage_of,
        stages=made,
        schedule=schedule,
        microbatch_sizes=sizes,
    )


def _spread(stage: Stage, devices: Sequence[tuple[int, ...]], microbatches: int) -> Stage:
    """Return a stage over other devices, with its own shares and groups where they still fit."""
    shares: tuple[int, ...] | None = stage.shares
    if len(devices) != stage.num_replicas or microbatches % stage.round:
        shares = fair_shares((1.0,) * len(devices), microbatches)
    if shares is None:
        raise InvalidInputError(f"{len(devices)} replicas cannot share {microbatches} microbatches")
    alone = len(devices) * len(devices[0]) == 1
    changes: dict[str, Any] = {
        "devices": tuple(devices),
        "shares": shares,
        "shard": Shard.NONE if alone else stage.shard,
    }
    if alone:
        changes["shard_group"] = 0
    fallbacks: tuple[dict[str, int], ...] = (
        {},
        {"shard_group": 0},
        {"shard_group": 0, "ep": 1, "etp": 0},
    )
    for more in fallbacks:
        try:
            return replace(stage, **{**changes, **more})
        except InvalidInputError as exc:
            refused = exc
    raise refused


def _without(plan: Plan, problem: Problem, spare: list[str]) -> tuple[Plan, list[str]]:
    """Return a plan without the replicas that lost a device, and the devices that are free then."""
    there, free = problem.cluster.index_of, list(spare)
    groups: list[list[tuple[str, ...]]] = []
    for group in _names(plan):
        left = [replica for replica in group if all(name in there for name in replica)]
        free += [n for r in group if r not in left for n in r if n in there and n not in free]
        groups.append(left)
    keep = [number for number, group in enumerate(groups) if group]
    if not keep:
        raise InvalidInputError("no stage has a device that is left")
    # A stage without devices joins the one before it, the first ones the one behind them.
    home = [max([k for k in keep if k <= number], default=keep[0]) for number in range(len(groups))]
    stage_of = np.searchsorted(keep, np.array(home)[plan.stage_of])
    stages = [plan.stages[number] for number in keep]
    return _over(plan, problem, [groups[n] for n in keep], stage_of, stages), free


def _grown(base: Plan, problem: Problem, free: Sequence[str]) -> Iterator[Plan]:
    """Yield a plan with free devices as replicas: of all stages, and of each stage alone."""
    if not free:
        return
    groups = _names(base)
    distinct = list(dict.fromkeys(tuple(group) for group in groups))
    column = sum(len(group[0]) for group in distinct)

    def with_more(more: dict[tuple[tuple[str, ...], ...], int]) -> list[Plan]:
        left, added = list(free), {}
        for group in distinct:
            ranks = len(group[0])
            new = [tuple(left[i * ranks : (i + 1) * ranks]) for i in range(more.get(group, 0))]
            del left[: ranks * len(new)]
            added[group] = [*group, *new]
        try:
            return [_over(base, problem, [added[tuple(group)] for group in groups])]
        except InvalidInputError:
            return []

    if times := len(free) // column:
        yield from with_more(dict.fromkeys(distinct, times))
    if len(distinct) > 1:
        for group in distinct[:MAX_GROWN]:
            if len(free) >= len(group[0]):
                yield from with_more({group: 1})


def relabelled(
    old: OldPlan, problem: Problem, plan: Plan, *, whole_hosts: bool = False
) -> list[Plan]:
    """Return a plan with devices that are alike exchanged, so that more state stays in its place.

    Once whole hosts are exchanged, then devices inside them; once devices wherever they are, unless
    only whole hosts may be. Each takes the largest kept part first (ties: by index).
    """
    cluster = problem.cluster
    if len(plan.devices) * len(cluster) > MAX_PAIRS:
        return []
    stays = kept_bytes(old.plan, plan, problem, old.problem)
    classes = device_classes(problem).of
    own = np.array([cluster.index_of[name] for name in plan.devices])
    hosts = np.array([device.host for device in cluster.devices])
    alike = classes[own][:, None] == classes[None, :]
    found = []
    if not whole_hosts or len(cluster.hosts) == 1:
        found.append(_matched(stays, alike))
    if len(cluster.hosts) > 1:
        found.append(_matched(stays, alike & _same_host(stays, own, hosts, classes)))
    return [
        replace(plan, devices=tuple(cluster.device_names[d] for d in place.tolist()))
        for place in found
        if place is not None and not np.array_equal(place, own)
    ]


def _matched(stays: Array, may: Array) -> Array | None:
    """Return a device for each row, all different, where it may be; None = that was not found."""
    place = np.full(len(stays), -1, dtype=np.int64)
    free = np.ones(stays.shape[1], dtype=bool)
    rows, columns = np.nonzero(may & (stays > 0))
    for index in np.argsort(-stays[rows, columns], kind="stable").tolist():
        row, column = rows[index], columns[index]
        if place[row] < 0 and free[column]:
            place[row], free[column] = column, False
    for row in np.flatnonzero(place < 0).tolist():
        open_to = np.flatnonzero(may[row] & free)
        if not len(open_to):
            return None
        place[row], free[open_to[0]] = open_to[0], False
    return place


def _same_host(stays: Array, own: Array, hosts: Array, classes: Array) -> Array:
    """Return which devices lie in the host that takes the place of each row's host."""
    num_hosts = int(hosts.max()) + 1
    makeup = [
        tuple(sorted(Counter(classes[hosts == h].tolist()).items())) for h in range(num_hosts)
    ]
    same = np.array([[a == b for b in makeup] for a in makeup])
    gain = np.zeros((num_hosts, num_hosts))
    for target in range(num_hosts):
        inside = stays[:, hosts == target]
        np.add.at(gain[:, target], hosts[own], inside.max(axis=1, initial=0.0))
    to = _matched(gain, same)
    if to is None:  # pragma: no cover (a host may stay where it is)
        to = np.arange(num_hosts)
    result: Array = to[hosts[own]][:, None] == hosts[None, :]
    return result


def _between(base: Plan, plan: Plan) -> Iterator[Plan]:
    """Yield plans with one boundary between stages as in an old cut, the others as in a new one.

    The stage of an op is the number of boundaries that it lies behind. An op that reads another
    lies behind all that the other one does, in either plan, so data flows to higher stages still.
    """
    same = len(base.stages) == len(plan.stages) and _names(base) == _names(plan)
    if not same or np.array_equal(base.stage_of, plan.stage_of):
        return
    boundaries = range(1, len(plan.stages))
    behind = [plan.stage_of >= k for k in boundaries]
    before = [base.stage_of >= k for k in boundaries]
    differs = [int((a != b).sum()) for a, b in zip(behind, before, strict=True)]
    for number in sorted(range(len(differs)), key=lambda k: -differs[k])[:MAX_GROWN]:
        if not differs[number]:
            continue
        parts: Iterable[Array] = (
            before[k] if k == number else behind[k] for k in range(len(differs))
        )
        stage_of = np.sum(list(parts), axis=0)
        if len(np.unique(stage_of)) == len(plan.stages):
            yield replace(plan, stage_of=stage_of)
