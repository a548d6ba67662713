"""The best pipeline of a family of ideals, by whatever search the cluster asks for."""

import math
from collections.abc import Callable, Sequence
from itertools import permutations, product
from typing import Any

import numpy as np

from partita.core.columns import Array, Longs
from partita.planners.pipedream.build import (
    StageOn,
    free_microbatches,
    permitted_replicas,
    whole_shares,
)
from partita.planners.pipedream.family import Family
from partita.planners.pipedream.flat import Cut, FlatCluster, FlatSearch, ring
from partita.planners.pipedream.mixed import Chosen, MixedSearch, Server, is_small
from partita.planners.pipedream.row import Placed, Row, RowSearch
from partita.planners.pipedream.search import PRECISE, Best, minimise
from partita.planners.pipedream.site import Site
from partita.planners.pipedream.state import Search

MAX_ROWS = 150
"""Orders of the devices that are tried where devices differ."""
MAX_CLASS_ORDERS = 8
"""Orders of the classes in a server, and its devices, up to which all orders are tried."""
PROBE_STEPS = 100_000
"""Steps of a row's test that take as long as all that is done once a test."""
NEARER = 1e-6
"""Relative gain that makes another family of ideals worth a search."""
LONG_ROUND = 100
"""Microbatches of a step from which replicas are preferred that deal evenly with fewer."""
ROUND_DIVISORS = (12, 24, 60, 120, 360, 840, 2520, 5040, 55440)
"""Numbers of microbatches that many numbers of replicas divide."""


def is_flat(search: Search) -> bool:
    """Return whether devices and links are all alike, so that only their number matters."""
    return search.alike and search.free and search.site.num_servers == 1 and not search.rules.exact


def solve(search: Search, family: Family) -> bool:
    """Find the best pipeline of a family; return whether it is the best, if the family is all."""
    if is_flat(search):
        return _solve_flat(search, family)
    if search.alike and search.free and not search.rules.exact:
        _solve_servers(search, family)
    elif not (search.free and search.site.num_servers == 1) or (
        not _solve_server(search, family, search.site)
    ):
        _solve_rows(search, family)
    return False


def _solve_flat(search: Search, family: Family) -> bool:
    """Solve equal devices with equal links: exact, but for the number of microbatches."""
    rules, site = search.rules, search.site
    count = len(site.devices)
    limit = float(search.limits(site.memory_bytes)[0])
    kind = int(search.model.class_of[site.devices[0]])

    def at(divisors_of: int | None) -> FlatSearch:
        allowed = permitted_replicas(search.problem, count, divisors_of=divisors_of)
        rate = float(site.rate[0])
        sync = ring(count, rate, rules.factor)
        cluster = FlatCluster(rate, sync, limit, rules.straight, allowed)
        return FlatSearch(family, cluster, work_class=kind)

    found: Best[list[Cut]] = Best(value=search.best.value)
    _improve(at(None).probe, found, search)
    if found.found is None:
        return False
    value = search.offer(family, _consecutive(site, found.found), found.value)
    _deal_evenly(
        search,
        lambda number: at(number).probe,
        lambda cuts, period: search.offer(family, _consecutive(site, cuts), period),
    )
    proven = value <= found.value * (1 + PRECISE)
    fair = not search.model.shares_parameters and (not search.model.overcounts or math.isinf(limit))
    return proven and fair and free_microbatches(search.problem)


def _improve(probe: Callable[[float], Any], found: Best[Any], search: Search) -> None:
    """Lower ``found``; where it has a value from another family, first look if that is beaten."""
    if math.isfinite(found.value):
        found.probes += 1
        answer = probe(found.value * (1 - NEARER))
        if answer is None:
            return
        found.offer(*answer)
    minimise(probe, found, search.low)


def _deal_evenly(
    search: Search,
    at: Callable[[int], Callable[[float], Any]],
    offer: Callable[[Any, float], float],
) -> None:
    """Look for pipelines as good as the best whose replicas divide a small number.

    Where no plan was found, as all replicas together need too many microbatches, look for the best
    one that does with fewer.

    Args:
        search: The search.
        at: The test of periods with replicas that divide a number.
        offer: Notes a pipeline of some period.
    """
    if not free_microbatches(search.problem):
        return
    if search.best.found is None:
        found: Best[Any] = Best()
        _improve(at(ROUND_DIVISORS[-1]), found, search)
        if found.found is not None:
            offer(found.found, found.value)
        return
    rounds = search.best.found.plan.num_microbatches
    for number in ROUND_DIVISORS if rounds > LONG_ROUND else ():
        if number >= rounds:
            break
        answer = at(number)(search.best.value * (1 + 1e-12))
        if answer is not None:
            offer(answer[1], answer[0])
            break


def _consecutive(site: Site, cuts: Sequence[Cut], copies: int = 1) -> list[StageOn]:
    """Return stages on consecutive devices, in each of the first servers where there are copies."""
    stages, first = [], 0
    starts = np.searchsorted(site.server, np.arange(copies))
    for cut in cuts:
        places = [start + first + i for i in range(cut.replicas) for start in starts.tolist()]
        stages.append(StageOn(cut.low, cut.high, tuple(site.devices[places].tolist())))
        first += cut.replicas
    return stages


def _solve_server(search: Search, family: Family, site: Site) -> bool:
    """Solve one server whose devices differ, or must all be used; return whether it is small."""
    rules = search.rules
    kind = search.model.class_of[site.devices] * len(site.devices)
    limits = search.limits(site.memory_bytes)
    _, group = np.unique(np.stack([kind, limits]), axis=1, return_inverse=True)
    first = np.unique(group, return_index=True)[1]
    server = Server(
        classes=search.model.class_of[site.devices[first]],
        counts=tuple(np.bincount(group).tolist()),
        memory_bytes=limits[first],
        rate=float(site.rate[0]),
        factor=rules.factor,
        weighted=rules.weighted,
        straight=rules.straight,
        exact=rules.exact,
        allowed=permitted_replicas(search.problem, len(site.devices)),
    )
    if not is_small(family, server):
        return False

    def stages_of(chosen: Sequence[Chosen]) -> list[StageOn]:
        left = [site.devices[group == index].tolist() for index in range(len(first))]
        return [
            _on(
                search,
                family,
                Cut(stage.low, stage.high, sum(stage.counts)),
                [left[i].pop(0) for i, number in enumerate(stage.counts) for _ in range(number)],
                weighted=rules.weighted,
            )
            for stage in chosen
        ]

    def value_of(chosen: Sequence[Chosen], period: float) -> float:
        return search.offer(family, stages_of(chosen), period)

    found: Best[list[Chosen]] = Best(value=search.best.value)
    _improve(MixedSearch(family, server, value_of).probe, found, search)
    return True


def _on(
    search: Search, family: Family, cut: Cut, devices: Sequence[int], *, weighted: bool
) -> StageOn:
    """Return a stage on devices, with equal shares or shares by speed."""
    kinds = search.model.class_of[list(devices)]
    shares: tuple[int, ...] = ()
    if weighted and len(set(kinds.tolist())) > 1:
        dealt = None if free_microbatches(search.problem) else search.problem.microbatches
        work = family.seconds[kinds, cut.high] - family.seconds[kinds, cut.low]
        shares = whole_shares(work, dealt)
    return StageOn(cut.low, cut.high, tuple(devices), shares)


def _solve_servers(search: Search, family: Family) -> None:
    """Solve equal servers of equal devices: copies of one server's pipeline, then the row."""
    rules, site = search.rules, search.site
    each = int(np.bincount(site.server).min())
    limit = float(search.limits(site.memory_bytes)[0])
    kind = int(search.model.class_of[site.devices[0]])
    equal = permitted_replicas(search.problem, len(site.devices))
    for copies in range(1 if rules.straight else site.num_servers, 0, -1):
        allowed = np.array(
            [
                r if equal[min(r * copies, len(equal) - 1)] == r * copies else each + 1
                for r in range(each + 2)
            ]
        )
        rate = float(site.rate.min())
        outer = rules.factor * (copies - 1) / copies / site.outer_rate
        cluster = FlatCluster(
            rate=rate,
            sync=ring(each, rate, rules.factor) + outer,
            memory_bytes=limit,
            straight=rules.straight,
            allowed=np.minimum.accumulate(allowed[::-1])[::-1],
            copies=copies,
        )
        found: Best[list[Cut]] = Best(value=search.best.value)
        _improve(FlatSearch(family, cluster, work_class=kind).probe, found, search)
        if found.found is not None:
            search.offer(family, _consecutive(site, found.found, copies), found.value)
    _solve_row(search, family, site)


def _solve_rows(search: Search, family: Family) -> None:
    """Solve devices that differ: small servers by themselves, then rows in several orders.

    Rows through all servers come first, then those of each server that is not small.
    """
    sites = [search.site]
    if search.free and not search.rules.exact and search.site.num_servers > 1:
        servers = [search.site.only(server) for server in range(search.site.num_servers)]
        sites += [server for server in servers if not _solve_server(search, family, server)]
    for site in sites:
        for order in _row_orders(search, site):
            if search.is_late:
                return
            row = site.reordered(order)
            search.spent += _solve_row(search, family, row)
            if search.rules.weighted:
                search.spent += _solve_row(search, family, row, weighted=True)
            if search.spent > search.ration:
                return


def _row_orders(search: Search, site: Site) -> list[Longs]:
    """Return orders of the devices: of servers, and of the classes inside each.

    Devices of one class are equally fast and may run the same ops.
    """
    _, matrix = search.problem.allowed
    traits = np.vstack([search.model.class_of[site.devices], matrix[:, site.devices]])
    kinds = np.unique(traits, axis=1, return_inverse=True)[1].ravel()
    count = site.num_servers
    outer = list(permutations(range(count))) if count <= 4 else [range(count), range(count)[::-1]]
    inner = [_class_orders(np.flatnonzero(site.server == server), kinds) for server in range(count)]
    found: dict[bytes, Longs] = {}
    for parts in product(*inner):
        for servers in outer:
            order = np.concatenate([parts[server] for server in servers])
            key = np.stack([kinds[order], site.server[order]]).tobytes()
            found.setdefault(key, order)
            if len(found) == MAX_ROWS:
                return list(found.values())
    return list(found.values())


def _class_orders(places: Longs, kinds: Array) -> list[Longs]:
    """Return orders of the places of a server that differ in their classes.

    All of them where they are few; else the classes one after the other, in any order.
    """
    own = kinds[places].tolist()
    present = sorted(set(own))
    blocks = [sorted(own, key=order.index) for order in permutations(present[:4])]
    ways = math.factorial(len(own))
    for kind in present:
        ways //= math.factorial(own.count(kind))
    wanted = sorted(set(permutations(own))) if ways <= MAX_CLASS_ORDERS >= len(own) else blocks
    result = []
    for order in wanted:
        left = {kind: places[kinds[places] == kind].tolist() for kind in present}
        result.append(np.array([left[kind].pop(0) for kind in order]))
    return result


def _solve_row(search: Search, family: Family, site: Site, *, weighted: bool = False) -> int:
    """Lower the best by pipelines on consecutive devices of a row; return the steps that took."""
    rules, problem = search.rules, search.problem
    row = Row(
        server=site.server,
        rate=site.rate,
        outer_rate=site.outer_rate,
        class_of=search.model.class_of[site.devices].astype(np.int64),
        memory_bytes=search.limits(site.memory_bytes),
        factor=rules.factor,
        weighted=weighted,
        straight=rules.straight,
        exact=rules.exact,
        allowed=permitted_replicas(problem, len(site.devices)),
        banned=_banned(search, family, site),
    )

    def value_of(placed: Sequence[Placed], period: float) -> float:
        stages = [
            _on(
                search,
                family,
                Cut(stage.low, stage.high, stage.size),
                site.devices[stage.first : stage.first + stage.size].tolist(),
                weighted=weighted,
            )
            for stage in placed
        ]
        return search.offer(family, stages, period)

    def at(divisors_of: int) -> Callable[[float], Any]:
        allowed = permitted_replicas(problem, len(site.devices), divisors_of=divisors_of)
        return RowSearch(family, row._replace(allowed=allowed), value_of).probe

    found: Best[list[Placed]] = Best(value=search.best.value)
    tests = RowSearch(family, row, value_of)
    _improve(tests.probe, found, search)
    if not weighted and (found.found is not None or search.best.found is None):
        _deal_evenly(search, at, value_of)
    return found.probes * (tests.steps + PROBE_STEPS)


def _banned(search: Search, family: Family, site: Site) -> Array:
    """Return for each device how many ops below each ideal it must not run; empty = none at all."""
    row_of, matrix = search.problem.allowed
    barred = ~matrix[:, site.devices]
    if not barred.any():
        return np.zeros(0, dtype=np.int64)
    q, floating = search.model.q, search.model.floating
    table = [
        family.below(np.bincount(q.node_of, column[row_of] & ~floating, minlength=q.num_nodes))
        for column in barred.T
    ]
    return np.rint(table).astype(np.int64)
