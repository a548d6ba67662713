"""Simulated annealing of a split, written to run on lists (small inputs) and compiled on arrays."""

import math

from partita.kernels import Column, kernel

MULTIPLIER, MODULUS = 48271, 2147483647
"""Of the random numbers x -> x * multiplier % modulus: alike on whole numbers and compiled."""
SINGLE, CLUSTER = 0.4, 0.75
"""A move takes one node below the first number, a cluster up to the second, then swaps two."""
NEAR, TRIES = 0.7, 8
PENALTY = 100.0
"""Energy of a device that needs twice its memory."""
LOADS, ORDERED_LOADS, LATENCY = 0, 1, 2


@kernel
def anneal_split(  # noqa: C901, PLR0912, PLR0913, PLR0915, PLR0917 (a kernel takes columns)
    seconds: Column,
    class_of: Column,
    pays: Column,
    limit_bytes: Column,
    node_bytes: Column,
    net_ptr: Column,
    net_of: Column,
    pin_ptr: Column,
    pin: Column,
    net_s: Column,
    share_ptr: Column,
    share_of: Column,
    share_bytes: Column,
    node_of_op: Column,
    succ_ptr: Column,
    succ: Column,
    op_s: Column,
    is_block: Column,
    setting: Column,
    effort: Column,
    device_of: Column,
    best_of: Column,
    best: Column,
    load: Column,
    used: Column,
    inside: Column,
    held: Column,
    power: Column,
    chosen: Column,
    target: Column,
    mark: Column,
    first_op: Column,
    next_op: Column,
    block_of: Column,
    waiting: Column,
    ready: Column,
    queue: Column,
) -> None:
    """Anneal ``device_of`` for ``effort[1]`` moves, and keep the best split in ``best_of``.

    A move puts a node, or a cluster of nodes joined by nets, from one device on another, or swaps
    two nodes; only the two devices' loads change. By the goal, ``effort[2]``, the energy is

    * the sum over devices of (load / scale)^(2^doublings), nearly the largest load; ``ordered``:
      and no data flows in a circle between devices;
    * the time of the last result over scale, times 2^doublings, where each device of ``is_block``
      is one call that waits for all its inputs, and others run op by op in ``op_s``;

    plus a penalty for memory. ``setting`` is (first temperature, last temperature, scale,
    doublings, largest cluster); ``effort`` is (state of the random numbers, moves, goal).
    """
    num_nodes, num_devices, num_ops = len(device_of), len(class_of), len(node_of_op)
    temperature, scale = setting[0], setting[2]
    doublings, largest = int(setting[3]), setting[4]
    cooling = (setting[1] / setting[0]) ** (1.0 / max(effort[1], 1))
    state, goal = effort[0], effort[2]
    steepness = 2.0**doublings
    # The first evaluation, of no move at all, sets the energy.
    energy, pressure, stamp = math.inf, 0.0, 0
    for turn_number in range(effort[1] + 1):
        here, there, size = 0, 0, 0
        if turn_number > 0:
            temperature *= cooling
            state = state * MULTIPLIER % MODULUS
            sort = state / MODULUS
            state = state * MULTIPLIER % MODULUS
            first = state % num_nodes
            here = device_of[first]
            state = state * MULTIPLIER % MODULUS
            there = state % num_devices
            if state / MODULUS < NEAR and net_ptr[first + 1] > net_ptr[first]:
                state = state * MULTIPLIER % MODULUS
                net = net_of[net_ptr[first] + state % (net_ptr[first + 1] - net_ptr[first])]
                state = state * MULTIPLIER % MODULUS
                near = device_of[pin[pin_ptr[net] + state % (pin_ptr[net + 1] - pin_ptr[net])]]
                there = there if near == here else near
            if there == here:
                continue
            stamp += 1
            mark[first] = stamp
            chosen[0], target[0], size = first, there, 1
            if SINGLE <= sort < CLUSTER:
                state = state * MULTIPLIER % MODULUS
                share = state / MODULUS
                state = state * MULTIPLIER % MODULUS
                most = min(num_nodes - 1, 2 + int(share * state / MODULUS * largest))
                head = 0
                while head < size < most:
                    state = state * MULTIPLIER % MODULUS
                    spot = head + state % (size - head)
                    node = chosen[spot]
                    chosen[spot] = chosen[head]
                    chosen[head] = node
                    head += 1
                    for row in range(net_ptr[node], net_ptr[node + 1]):
                        for place in range(pin_ptr[net_of[row]], pin_ptr[net_of[row] + 1]):
                            other = pin[place]
                            if size < most and mark[other] != stamp and device_of[other] == here:
                                mark[other] = stamp
                                chosen[size], target[size] = other, there
                                size += 1
            state = state * MULTIPLIER % MODULUS
            if sort >= CLUSTER or (sort >= SINGLE and state % 5 == 0):
                for _ in range(TRIES):
                    state = state * MULTIPLIER % MODULUS
                    other = state % num_nodes
                    if device_of[other] == there:
                        chosen[size], target[size] = other, here
                        size += 1
                        break
        old_load_here, old_load_there = load[here], load[there]
        old_used_here, old_used_there = used[here], used[there]
        old_power_here, old_power_there = power[here], power[there]
        accepted = False
        moved, pressed, end = 0.0, 0.0, 0.0
        for turn in range(2):
            for index in range(size):
                node, after = chosen[index], target[index]
                before = device_of[node]
                device_of[node] = after
                target[index] = before
                load[before] -= seconds[class_of[before] * num_nodes + node]
                load[after] += seconds[class_of[after] * num_nodes + node]
                used[before] -= node_bytes[node]
                used[after] += node_bytes[node]
                for row in range(net_ptr[node], net_ptr[node + 1]):
                    net = net_of[row]
                    most = pin_ptr[net + 1] - pin_ptr[net]
                    leaving = inside[net * num_devices + before]
                    coming = inside[net * num_devices + after]
                    inside[net * num_devices + before] = leaving - 1
                    inside[net * num_devices + after] = coming + 1
                    if pays[class_of[before]]:
                        if leaving == most:
                            load[before] += net_s[net]
                        if leaving == 1:
                            load[before] -= net_s[net]
                    if pays[class_of[after]]:
                        if coming == 0:
                            load[after] += net_s[net]
                        if coming == most - 1:
                            load[after] -= net_s[net]
                for row in range(share_ptr[node], share_ptr[node + 1]):
                    part = share_of[row]
                    held[part * num_devices + before] -= 1
                    if held[part * num_devices + before] == 0:
                        used[before] -= share_bytes[part]
                    if held[part * num_devices + after] == 0:
                        used[after] += share_bytes[part]
                    held[part * num_devices + after] += 1
            if turn == 1:
                break
            pressed = pressure - power[here] - power[there] if size else 0.0
            for index in range(2 if size else num_devices):
                device = (there if index else here) if size else index
                raised = 0.0
                if goal != LATENCY:
                    raised = load[device] / scale
                    for _ in range(doublings):
                        raised *= raised
                over = used[device] / limit_bytes[class_of[device]] - 1.0
                power[device] = raised + (PENALTY * over if over > 0 else 0.0)
                pressed += power[device]
            moved = pressed
            if goal != LOADS:
                for device in range(num_devices):
                    first_op[device] = -1
                for block in range(num_devices + num_ops):
                    waiting[block], ready[block] = 0, 0.0
                for op in range(num_ops):
                    device = device_of[node_of_op[op]]
                    block_of[op] = num_devices + op
                    if is_block[device]:
                        block_of[op] = device
                        next_op[op] = first_op[device]
                        first_op[device] = op
                    else:
                        next_op[op] = -1
                for op in range(num_ops):
                    for row in range(succ_ptr[op], succ_ptr[op + 1]):
                        if block_of[succ[row]] != block_of[op]:
                            waiting[block_of[succ[row]]] += 1
                tail, left = 0, 0
                for block in range(num_devices + num_ops):
                    holds = (
                        first_op[block] >= 0
                        if block < num_devices
                        else (block_of[block - num_devices] == block)
                    )
                    if holds:
                        left += 1
                        if waiting[block] == 0:
                            queue[tail] = block
                            tail += 1
                head = 0
                while head < tail:
                    block = queue[head]
                    head += 1
                    if block < num_devices:
                        done, op = ready[block] + load[block], first_op[block]
                    else:
                        done, op = ready[block] + op_s[block - num_devices], block - num_devices
                    end = max(end, done)
                    while op >= 0:
                        for row in range(succ_ptr[op], succ_ptr[op + 1]):
                            into = block_of[succ[row]]
                            if into != block:
                                ready[into] = max(ready[into], done)
                                waiting[into] -= 1
                                if waiting[into] == 0:
                                    queue[tail] = into
                                    tail += 1
                        op = next_op[op]
                if tail < left:
                    moved = math.inf
                elif goal == LATENCY:
                    moved += steepness * end / scale
            state = state * MULTIPLIER % MODULUS
            if moved <= energy or state / MODULUS < math.exp((energy - moved) / temperature):
                accepted = True
                break
        if not accepted:
            # The values as they were, so that rounding does not add up.
            load[here], load[there] = old_load_here, old_load_there
            used[here], used[there] = old_used_here, old_used_there
            power[here], power[there] = old_power_here, old_power_there
            continue
        energy, pressure = moved, pressed
        worst, fits = end if goal == LATENCY else 0.0, True
        for device in range(num_devices):
            if goal != LATENCY:
                worst = max(worst, load[device])
            fits = fits and used[device] <= limit_bytes[class_of[device]]
        if fits and worst < best[0]:
            best[0] = worst
            for node in range(num_nodes):
                best_of[node] = device_of[node]
    effort[0] = state
