"""The dynamic programme of least max-load over chains of ideals; see ``max_load``."""

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

UPPER, PAIRS, MOST_PAIRS = 0, 1, 2
"""Places of the bounds: value that a chain must not exceed, pairs of ideals visited, most pairs."""


class Devices(NamedTuple):
    """The states of the devices, and what is left to do at each ideal.

    Attributes:
        next_state: ``[state, class]``: the state after one more device of a class; -1 = none left.
        skip_state: The state after a device is left unused; -1 = there is no such thing.
        capacity: ``[state]``: what the devices left do in a second, in seconds of the reference.
        left: ``[state]``: devices left.
        rest: ``[ideal]``: work beyond it, in seconds of the reference, if it were a liquid.
        closing: ``[class, ideal]``: load of a device that takes all beyond an ideal; inf = no room.
    """

    next_state: Column
    skip_state: Column
    capacity: Column
    left: Column
    rest: Column
    closing: Column


@kernel
def cut_ideals(steps: Steps, costs: Costs, cut_s: Column, gone_bytes: Column, path: Path) -> None:
    """Fill in the cost of the nets that each ideal cuts, and the shared bytes that it has whole."""
    begin_walk(steps, costs, path, 0)
    step, depth = next_step(steps, costs, path, 0, 0)
    while depth >= 0:
        here, there, node = path.ideal[depth], steps.target[step], steps.node[step]
        cut_s[there] = enter(steps, costs, path, depth, step, 0.0)
        gone_bytes[there] = gone_bytes[here]
        for row in range(costs.share_ptr[node], costs.share_ptr[node + 1]):
            part = costs.share_of[row]
            if path.held[part] == costs.share_size[part]:
                gone_bytes[there] += costs.share_bytes[part]
        step, depth = next_step(steps, costs, path, 0, depth + 1)


@kernel
def push_loads(
    steps: Steps,
    costs: Costs,
    devices: Devices,
    bound: Column,
    table: Table,
    path: Path,
    alive: Column,
) -> None:
    """Fill the table with the least max-load of a chain of devices up to each ideal.

    Ideals ascend, so that all chains to a base are known when it is its turn. The last device takes
    all that is left, hence nothing is visited from states with one device left, and the full ideal
    is never visited. Stops after ``bound[MOST_PAIRS]`` pairs of ideals.

    Pruned is what exceeds ``bound[UPPER]``, which falls with every chain that is complete, and
    states whose devices could not take the rest within it even if it were a liquid.
    """
    full = len(devices.rest) - 1
    pairs = 0
    for base in range(full):
        _close(devices, bound, table, alive, base)
        if alive[0] == 0:
            continue
        if pairs > bound[MOST_PAIRS]:
            break
        begin_walk(steps, costs, path, base)
        step, depth = next_step(steps, costs, path, base, 0)
        while depth >= 0:
            if steps.target[step] != full:
                node = steps.node[step]
                used = bytes_with(costs, path, depth, node)
                if any_class_fits(costs, path, depth, node, used, bound[UPPER]):
                    pairs += 1
                    enter(steps, costs, path, depth, step, used)
                    depth += 1
                    _extend(costs, devices, bound, table, path, alive, depth)
            step, depth = next_step(steps, costs, path, base, depth)
    bound[PAIRS] = pairs


@kernel(inline=True)
def _close(devices: Devices, bound: Column, table: Table, alive: Column, base: int) -> None:
    """End chains at an ideal with a device for all the rest; list the states to go on from.

    ``alive[0]`` becomes their number, and they follow.
    A device that is left unused hands its value on to the next state first, which comes later.
    """
    states, full = len(devices.capacity), len(devices.rest) - 1
    classes = len(devices.closing) // (full + 1)
    num_alive = 0
    for state in range(states):
        reached = table.value[base * states + state]
        after = devices.skip_state[state]
        if after >= 0 and reached < table.value[base * states + after]:
            note_chain(table, base * states + after, reached, base, -1 - state)
        if reached > bound[UPPER] or devices.rest[base] > bound[UPPER] * devices.capacity[state]:
            continue
        if devices.left[state] > 1:
            num_alive += 1
            alive[num_alive] = state
        for kind in range(classes):
            after = devices.next_state[state * classes + kind]
            total = max(reached, devices.closing[kind * (full + 1) + base])
            cell = full * states + after
            if after >= 0 and total <= bound[UPPER] and total < table.value[cell]:
                note_chain(table, cell, total, base, state * classes + kind)
                bound[UPPER] = min(bound[UPPER], total)
    alive[0] = num_alive


@kernel(inline=True)
def _extend(
    costs: Costs,
    devices: Devices,
    bound: Column,
    table: Table,
    path: Path,
    alive: Column,
    depth: int,
) -> None:
    """Give the piece at a depth to a device of each class, after every chain that is alive."""
    states, classes = len(devices.capacity), len(costs.limit_bytes)
    base, there = path.ideal[0], path.ideal[depth]
    before, beyond = base * states, there * states
    # Columns that may not change are read once: stores to the table would make it read them again.
    upper, rest = bound[UPPER], devices.rest[there]
    used, cut_s, num_alive = path.bytes[depth], path.cut_s[depth], alive[0]
    for kind in range(classes):
        load = path.seconds[depth * classes + kind]
        if costs.pays[kind]:
            load += cut_s
        if load > upper or used > costs.limit_bytes[kind]:
            continue
        for index in range(num_alive):
            state = alive[1 + index]
            after = devices.next_state[state * classes + kind]
            if after < 0:
                continue
            reached = max(load, table.value[before + state])
            cell = beyond + after
            if reached < table.value[cell] and rest <= upper * devices.capacity[after]:
                note_chain(table, cell, reached, base, state * classes + kind)
