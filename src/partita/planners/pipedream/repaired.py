"""The best pipeline under the repaired objective, on whatever cluster.

Which search depends on the cluster: equal devices with equal links are solved exactly (``flat``),
one server with a few classes of devices too (``mixed``); else stages lie on consecutive devices of
a row through the servers (``row``), and on copies of one server's pipeline (``flat`` with copies).
Which ideals depends on the graph: all of them where there are few; else the prefixes of a portfolio
of linear orders, then the ideals near the best pipeline found, again while that helps.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from partita.core.problem import Problem
from partita.planners.effort import Effort
from partita.planners.lattice.ideals import enumerate_ideals, window
from partita.planners.lattice.orders import linear_orders
from partita.planners.pipedream.bound import bound_of, relaxed_cluster
from partita.planners.pipedream.build import free_microbatches
from partita.planners.pipedream.family import Family, lattice_family, order_family
from partita.planners.pipedream.flat import Cut, FlatSearch
from partita.planners.pipedream.model import Model, model_of
from partita.planners.pipedream.search import PRECISE, Best, minimise
from partita.planners.pipedream.site import site_of
from partita.planners.pipedream.solvers import NEARER, is_flat, solve
from partita.planners.pipedream.state import Rules, Search

MOST_STEPS = 800_000_000
"""Steps on rows of unequal devices, about three seconds, unless a time limit is given."""
ROW_TESTS = 40
"""Tests of periods that one row takes."""
ROW_STEPS = 4_000_000
MIN_PREFIXES, MAX_PREFIXES = 200, 1500
"""Prefixes of a linear order that are looked at."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Breadth:
    """How many ideals to look at.

    Attributes:
        ideals: Ideals up to which all are looked at, and of one neighbourhood.
        orders: Linear orders where there are more.
        rounds: Rounds of looking near the best pipeline.
    """

    ideals: int = 3000
    orders: int = 32
    rounds: int = 3


def repaired_search(problem: Problem, rules: Rules, breadth: Breadth, effort: Effort) -> Search:
    """Return a finished search for the pipeline of the least repaired period.

    Without a time limit it makes a fixed number of steps where devices differ, so that the result
    is always the same; with one, no further ideals or devices are looked at when that is up.

    Memory that ops share counts for each of them; only where nothing fits so, it counts once, and
    the plan has yet to be checked.
    """
    search = _searched(problem, rules, breadth, effort, model_of(problem))
    if search.best.found is None and search.model.overcounts and rules.memory:
        return _searched(problem, rules, breadth, effort, model_of(problem, once=True))
    return search


def _searched(
    problem: Problem, rules: Rules, breadth: Breadth, effort: Effort, model: Model
) -> Search:
    site = site_of(problem)
    low, term = bound_of(model, site, factor=rules.factor, charge=rules.charge)
    search = Search(
        problem=problem,
        rules=rules,
        model=model,
        site=site,
        best=Best(trace=effort.trace),
        low=low,
        term=term,
        effort=effort,
        most_steps=MOST_STEPS if effort.time_limit is None else math.inf,
    )
    most = _most_ideals(search, breadth)
    ideals = enumerate_ideals(model.q, most)
    if ideals is not None:
        family = lattice_family(model, ideals, charge=rules.charge)
        search.exact = solve(search, family)
        if not search.exact and search.best.found is not None and search.alike:
            _refute(search, family)
        return search
    families = breadth.orders + breadth.rounds
    for number, family in enumerate(_families(search, breadth, most)):
        if search.is_late:
            break
        search.ration = search.spent + (search.most_steps - search.spent) / (families - number)
        solve(search, family)
    return search


def _refute(search: Search, family: Family) -> None:
    """Raise the bound by a relaxation over all ideals; it may prove the best to be the best."""
    cluster = relaxed_cluster(search.model, search.site, search.rules.factor)
    kind = int(search.model.class_of[search.site.devices[0]])
    relaxed: Best[list[Cut]] = Best()
    probe = FlatSearch(family, cluster, work_class=kind).probe
    if probe(search.best.value * (1 - PRECISE)) is None:
        search.exact = free_microbatches(search.problem)
        search.low = search.best.value * (1 - PRECISE)
    else:
        minimise(probe, relaxed, search.low, precision=NEARER)
        search.low = max(search.low, relaxed.value * (1 - NEARER))
    search.term = "relaxed placement over all ideals"


def _most_ideals(search: Search, breadth: Breadth) -> int:
    """Return how many ideals to look at, so that one row of unequal devices takes no more steps."""
    if (search.alike and search.free) or math.isinf(search.most_steps):
        return breadth.ideals
    pairs = search.most_steps / ROW_TESTS / (len(search.site.devices) ** 2 / 4)
    return min(breadth.ideals, max(MIN_PREFIXES, int(math.sqrt(2 * pairs))))


def _families(search: Search, breadth: Breadth, most: int) -> Iterator[Family]:
    """Yield prefixes of linear orders, then the neighbourhoods of the best pipeline."""
    model, charge = search.model, search.rules.charge
    weight = model.seconds.min(axis=0)
    # On a row the devices count too: fewer prefixes where there are many of them.
    devices = 1 if is_flat(search) else len(search.site.devices)
    limit = int(np.clip(math.sqrt(2 * ROW_STEPS / devices), MIN_PREFIXES, MAX_PREFIXES))
    if most < breadth.ideals:
        limit = min(limit, most)
    for order in linear_orders(
        model.q, weight=weight, net_cost=model.net_bytes, count=breadth.orders
    ):
        yield order_family(model, order, charge=charge, limit=limit)
    for _ in range(breadth.rounds):
        found, value = search.best.found, search.best.value
        if found is None or value <= search.low * (1 + NEARER):
            return
        tops = [stage.high for stage in found.stages]
        stage = found.family.stage_of(tops, model.q.num_nodes)
        order = np.lexsort((np.arange(len(stage)), stage))
        near = window(model.q, order, most)
        if len(near) <= 2 * model.q.num_nodes and model.q.num_nodes > most:
            return
        yield lattice_family(model, near, charge=charge)
        if search.best.value > value * (1 - NEARER):
            return
