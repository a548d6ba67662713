r"""The split of least single-sample latency: DP over chains of calls, then annealing.

Tarnawski et al. 2020, second problem: an accelerator runs its ops as one call (copies in, work,
copies out) that waits for all its inputs, CPUs are a pool without limits. Over chains of ideals

    value[J, devices + d] = min over I of value[I, devices] + call of J \ I on d
    value[J, devices]     = min over I of value[I, devices] + longest path of J \ I on CPUs

is exact for plans that run one piece after another: O(pairs of ideals x states); of large graphs,
runs of an order are joined before. Pieces that run at the same time are left to annealing, on the
time of the last result itself, from that start.
Here every accelerator makes one call; several calls of one accelerator are not looked for, as the
objective would let them overlap.
"""

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from partita.core.columns import Array, Floats
from partita.core.order import csr
from partita.core.problem import Mode, Problem
from partita.kernels import ROWS, Threshold, run
from partita.objectives.placed import seconds_on
from partita.planners.effort import Effort
from partita.planners.lattice.ideals import Ideals, prefixes
from partita.planners.lattice.quotient import Quotient, collapse
from partita.planners.split.anneal_kernel import LATENCY
from partita.planners.split.calls_kernel import Order, push_calls
from partita.planners.split.max_load import (
    INTERPRETED_IDEALS,
    MAX_PAIRS,
    SLACK,
    Chain,
    States,
    counted_states,
)
from partita.planners.split.model import SplitModel, split_model
from partita.planners.split.refine import Flow
from partita.planners.split.walk_kernel import costs_of, new_path, new_table, steps_of

MAX_NODES = 1_000
"""Nodes up to which all chains of calls along an order are looked at."""


def latency_model(problem: Problem, q: Quotient) -> SplitModel:
    """Return the columns of a forward pass, with the fastest CPU in place of all CPUs."""
    model = split_model(problem, q, mode=Mode.INFERENCE)
    kept = np.flatnonzero(model.pays).tolist()
    cpus = np.flatnonzero(~model.pays)
    if len(cpus):
        barred = np.isinf(model.seconds[cpus]).sum(axis=1)
        total = np.where(np.isfinite(model.seconds[cpus]), model.seconds[cpus], 0.0).sum(axis=1)
        kept.append(int(cpus[np.lexsort((total, barred))[0]]))
    devices = [
        model.devices[kind] if model.pays[kind] else model.devices[kind][:1] for kind in kept
    ]
    return replace(
        model,
        devices=tuple(devices),
        seconds=model.seconds[kept],
        pays=model.pays[kept],
        limit_bytes=model.limit_bytes[kept],
    )


def latency_flow(problem: Problem, model: SplitModel) -> Flow:
    """Return how a sample flows: op by op on CPUs, call by call on accelerators."""
    graph = problem.graph
    inner = graph.edge_source >= 0
    ptr, succ = csr(graph.edge_source[inner], graph.edges.reader[inner], len(graph))
    op_s = np.zeros(len(graph))
    if not model.pays.all():
        cpu = problem.cluster.devices[model.devices[-1][0]]
        op_s = seconds_on(graph, [cpu], Mode.INFERENCE)[1][0]
    sizes = [len(members) for members in model.devices]
    return Flow(
        goal=LATENCY,
        node_of=model.q.node_of,
        succ_ptr=ptr,
        succ=succ,
        op_s=op_s,
        is_block=np.repeat(model.pays, sizes),
    )


def accelerators(model: SplitModel) -> SplitModel | None:
    """Return the part of a model without CPUs; ``None`` if nothing is left."""
    kept = np.flatnonzero(model.pays)
    if not len(kept):
        return None
    return replace(
        model,
        devices=tuple(model.devices[kind] for kind in kept.tolist()),
        seconds=model.seconds[kept],
        pays=model.pays[kept],
        limit_bytes=model.limit_bytes[kept],
    )


def best_calls(model: SplitModel, ideals: Ideals, upper: float = math.inf) -> Chain | None:
    """Return the best chain of calls between the given ideals; ``None`` if none is below.

    Args:
        model: The costs, CPUs as one device of the last class.
        ideals: Where the chain may be cut.
        upper: Time that the chain must not exceed.
    """
    parts = accelerators(model)
    states = _states(parts, len(ideals))
    num_ideals, num_states = len(ideals), len(states.next_state)
    table, bound = new_table(num_ideals, num_states), np.array([upper * (1 + SLACK), MAX_PAIRS])
    costs = costs_of(model, parts)
    order = Order(
        num_states=num_states,
        pred_ptr=model.q.pred_ptr,
        pred=model.q.pred,
        cpu_s=np.full(model.q.num_nodes, np.inf) if model.pays.all() else model.seconds[-1],
        tail_s=_tails(model, ideals),
        next_state=states.next_state.ravel(),
    )
    run(
        push_calls,
        num_ideals,
        (steps_of(ideals), costs, order),
        (bound, table, new_path(costs, num_ideals)),
        Threshold(INTERPRETED_IDEALS + 1, ROWS.total),
    )
    found = table.value.reshape(num_ideals, num_states)[-1]
    if not np.isfinite(found).any():
        return None
    pieces = _traced(model, ideals, states, (table.origin, table.came_by, int(np.argmin(found))))
    return Chain(float(found.min()), pieces)


def _states(parts: SplitModel | None, num_ideals: int) -> States:
    """Return the states of the accelerators; one state where there is none.

    Where they would be too many, the last devices of the largest classes are left out.
    """
    if parts is None:
        none = np.zeros((1, 0), dtype=np.int64)
        return States(next_state=none, skip_state=np.array([-1]), used=none, device=none)
    devices = list(parts.devices)
    while (states := counted_states(replace(parts, devices=tuple(devices)), num_ideals)) is None:
        largest = max(range(len(devices)), key=lambda kind: (len(devices[kind]), kind))
        devices[largest] = devices[largest][: len(devices[largest]) // 2]
    return states


def _tails(model: SplitModel, ideals: Ideals) -> Floats:
    """Return the longest path, at the least time of every node, of what each ideal lacks."""
    q = model.q
    path = model.seconds.min(axis=0)
    for node in range(q.num_nodes - 1, -1, -1):
        after = q.succ[q.succ_ptr[node] : q.succ_ptr[node + 1]]
        path[node] += path[after].max(initial=0.0)
    tails = np.zeros(len(ideals))
    open_rows = np.arange(len(ideals))
    for node in np.argsort(-path, kind="stable").tolist():
        word = ideals.sets[open_rows, node // 64]
        lacks = (word >> np.uint64(node % 64)) & np.uint64(1) == 0
        tails[open_rows[lacks]] = path[node]
        open_rows = open_rows[~lacks]
        if not len(open_rows):
            break
    return tails


def _traced(
    model: SplitModel, ideals: Ideals, states: States, found: tuple[Array, Array, int]
) -> tuple[tuple[Array, int], ...]:
    origin, came_by, state = found
    num_states, kinds = states.next_state.shape
    ideal, pieces = len(ideals) - 1, []
    while ideal > 0:
        cell = ideal * num_states + state
        before, by = int(origin[cell]), int(came_by[cell])
        device = model.devices[-1][0]
        if by < num_states * kinds:
            state, kind = divmod(by, kinds)
            device = int(states.device[state, kind])
        pieces.append((ideals.between(before, ideal, model.q.num_nodes), device))
        ideal = before
    return tuple(reversed(pieces))


def coarse_enough(q: Quotient, order: Array) -> Quotient:
    """Return a quotient of at most ``MAX_NODES`` nodes: runs of a linear order joined."""
    if q.num_nodes <= MAX_NODES:
        return q
    label = np.empty(q.num_nodes, dtype=np.int64)
    label[order] = np.arange(q.num_nodes) * MAX_NODES // q.num_nodes
    return collapse(q, label)


def best_calls_of_orders(
    model: SplitModel, orders: Sequence[Array], effort: Effort
) -> Chain | None:
    """Return the best chain of calls along any of some linear orders; ``None`` if nothing fits.

    While nothing is known, a time from the longest path on is tried that doubles. When the time is
    up, the orders after the first are left out.
    """
    best: Chain | None = None
    for number, order in enumerate(orders):
        if number and effort.is_over():
            break
        ideals = prefixes(model.q, order)
        if best is None:
            chain = _growing(model, ideals)
        else:
            chain = best_calls(model, ideals, best.value * (1 - 2 * SLACK))
        if chain is not None:
            best = chain
            effort.record(chain.value)
    return best


def _growing(model: SplitModel, ideals: Ideals) -> Chain | None:
    finite = np.where(np.isfinite(model.seconds), model.seconds, 0.0)
    most = float(finite.max(axis=0).sum() + 2 * model.net_s.sum())
    guess = 2 * float(_tails(model, ideals)[0])
    while 0 < guess < most:
        found = best_calls(model, ideals, guess)
        if found is not None:
            return found
        guess *= 2
    return best_calls(model, ideals)
