"""The dynamic programme of least latency over chains of calls; see ``latency``."""

from typing import NamedTuple

from partita.kernels import Column, kernel
from partita.planners.split.walk_kernel import (
    Costs,
    Path,
    Steps,
    Table,
    any_class_fits,
    begin_walk,
    bytes_with,
    enter,
    next_step,
    note_chain,
)

UPPER, MOST_PAIRS = 0, 1
"""Places of the bounds: time that a chain must not exceed, most pairs of ideals visited."""


class Order(NamedTuple):
    """What runs when.

    Attributes:
        num_states: Number of states of the accelerators; a division in a kernel would take long.
        pred_ptr: Node n reads ``pred[pred_ptr[n]:pred_ptr[n + 1]]``.
        pred: See ``pred_ptr``.
        cpu_s: Seconds of each node on the CPUs; inf = it may not run there.
        tail_s: ``[ideal]``: the longest path, at the least time of every node, of what it lacks.
        next_state: ``[state, class]``: the state after a call of an accelerator; -1 = none left.
    """

    num_states: int
    pred_ptr: Column
    pred: Column
    cpu_s: Column
    tail_s: Column
    next_state: Column


@kernel
def push_calls(
    steps: Steps, costs: Costs, order: Order, bound: Column, table: Table, path: Path
) -> None:
    """Fill the table with the least time of a series of calls up to each ideal.

    A piece is a call of an accelerator (copies in, work, copies out), or runs on the CPUs in the
    time of its longest path, which uses no device up; ``came_by`` is then beyond all pairs of state
    and class. Pruned is what exceeds ``bound[UPPER]`` together with the longest path of what is
    left. Stops after ``bound[MOST_PAIRS]`` pairs of ideals.
    """
    full = len(order.tail_s) - 1
    states = order.num_states
    pairs = 0
    for base in range(full):
        least = bound[UPPER] * 2 + 1
        for state in range(states):
            least = min(least, table.value[base * states + state])
        if least + order.tail_s[base] > bound[UPPER]:
            continue
        if pairs > bound[MOST_PAIRS]:
            break
        begin_walk(steps, costs, path, base)
        step, depth = next_step(steps, costs, path, base, 0)
        while depth >= 0:
            node = steps.node[step]
            room_s = bound[UPPER] - least
            used = bytes_with(costs, path, depth, node)
            end = _end_on_cpus(order, path, node)
            longest = max(path.cpu_s[depth], end)
            fits = any_class_fits(costs, path, depth, node, used, room_s)
            if fits or longest <= room_s:
                pairs += 1
                enter(steps, costs, path, depth, step, used)
                depth += 1
                path.finish[node] = end
                path.cpu_s[depth] = longest
                _extend(costs, order, bound, table, path, depth, room_s)
            step, depth = next_step(steps, costs, path, base, depth)


@kernel(inline=True)
def _end_on_cpus(order: Order, path: Path, node: int) -> float:
    """Return when a node would end if the piece ran on CPUs; what is outside is there before."""
    ready = 0.0
    for row in range(order.pred_ptr[node], order.pred_ptr[node + 1]):
        ready = max(ready, path.finish[order.pred[row]])
    end: float = ready + order.cpu_s[node]
    return end


@kernel(inline=True)
def _extend(
    costs: Costs, order: Order, bound: Column, table: Table, path: Path, depth: int, room_s: float
) -> None:
    """Run the piece at a depth after every chain to its base: on CPUs, or as a call of a class."""
    full = len(order.tail_s) - 1
    states, classes = order.num_states, len(costs.limit_bytes)
    base, there = path.ideal[0], path.ideal[depth]
    before, beyond = base * states, there * states
    # Columns that may not change are read once: stores to the table would make it read them again.
    upper, tail_s, longest = bound[UPPER], order.tail_s[there], path.cpu_s[depth]
    used, cut_s = path.bytes[depth], path.cut_s[depth]
    for state in range(states):
        reached, cell = table.value[before + state] + longest, beyond + state
        if reached < table.value[cell] and reached + tail_s <= upper:
            note_chain(table, cell, reached, base, states * classes + state)
    for kind in range(classes):
        call_s = path.seconds[depth * classes + kind] + cut_s
        if used > costs.limit_bytes[kind] or call_s > room_s:
            continue
        for state in range(states):
            after = order.next_state[state * classes + kind]
            if after < 0:
                continue
            reached, cell = table.value[before + state] + call_s, beyond + after
            if reached < table.value[cell] and reached + tail_s <= upper:
                note_chain(table, cell, reached, base, state * classes + kind)
    if there == full:
        for state in range(states):
            bound[UPPER] = min(bound[UPPER], table.value[full * states + state])
