"""Simulated annealing of a split, in small kernels; see ``refine``.

The order in which random numbers are drawn is part of the result: a split follows from its seed.
Tables with two indices are flat: row times the length of a row, plus the column.
"""

import math
from typing import NamedTuple

from partita.kernels import Column, Number, kernel

MULTIPLIER, MODULUS = 48271, 2147483647
"""Of the random numbers x -> x * multiplier % modulus: alike on whole numbers and compiled."""
SINGLE, CLUSTER = 0.4, 0.75
"""A move takes one node below the first number, a cluster up to the second, then swaps two."""
NEAR, TRIES = 0.7, 8
"""Share of moves that go to the device of a neighbour; nodes that are tried for a swap."""
PENALTY = 100.0
"""Energy of a device that needs twice its memory."""
LOADS, ORDERED_LOADS, LATENCY = 0, 1, 2
"""Goals; see ``anneal_split``."""
WORD, MOVES, GOAL = 0, 1, 2
"""Places of the effort: state of the random numbers, moves to try, the goal."""
HOT, COLD, SCALE, DOUBLINGS, LARGEST = range(5)
"""Places of the setting: first and last temperature, the seconds of a load that is 1, how often a
load is squared, the nodes of the largest cluster."""


class Given(NamedTuple):
    """The costs of nodes on devices.

    Attributes:
        seconds: ``[class, node]``: seconds of a node, very many where it may not run.
        class_of: Class of each device.
        pays: Whether each class pays for the nets that it cuts.
        limit_bytes: Memory of a device of each class.
        node_bytes: Bytes that a node needs by itself.
        net_ptr: Node n is a pin of the nets ``net_of[net_ptr[n]:net_ptr[n + 1]]``.
        net_of: See ``net_ptr``.
        pin_ptr: The pins of net e are ``pin[pin_ptr[e]:pin_ptr[e + 1]]``.
        pin: See ``pin_ptr``.
        net_s: Seconds that a device pays for each net that it cuts.
        share_ptr: Node n uses the shared parts ``share_of[share_ptr[n]:share_ptr[n + 1]]``.
        share_of: See ``share_ptr``.
        share_bytes: Bytes of each shared part, held once on every device with a node that uses it.
    """

    seconds: Column
    class_of: Column
    pays: Column
    limit_bytes: Column
    node_bytes: Column
    net_ptr: Column
    net_of: Column
    pin_ptr: Column
    pin: Column
    net_s: Column
    share_ptr: Column
    share_of: Column
    share_bytes: Column


class OpFlow(NamedTuple):
    """How data flows between ops; empty where order means nothing.

    Attributes:
        node_of: Node of each op.
        succ_ptr: Op i comes before ``succ[succ_ptr[i]:succ_ptr[i + 1]]``.
        succ: See ``succ_ptr``.
        op_s: Seconds of each op on devices that run op by op.
        is_block: Whether each device runs all that it has as one call.
    """

    node_of: Column
    succ_ptr: Column
    succ: Column
    op_s: Column
    is_block: Column


class Split(NamedTuple):
    """A split, and what follows from it; kept up to date by ``_carry`` and ``_press``.

    Attributes:
        device_of: Device of each node.
        load: Seconds of each device: its nodes, and the nets that it cuts if it pays.
        used: Bytes of each device.
        inside: ``[net, device]``: pins of a net on a device.
        held: ``[shared part, device]``: nodes on a device that use a part.
        power: Energy of each device.
        best_of: Device of each node in the best split that fits.
        best: Its value, in seconds.
    """

    device_of: Column
    load: Column
    used: Column
    inside: Column
    held: Column
    power: Column
    best_of: Column
    best: Column


class Scratch(NamedTuple):
    """Columns of a move, and of a walk through the blocks (a call of a device, or one op).

    Attributes:
        chosen: Nodes that a move carries.
        target: Their new devices; once carried, their old ones.
        mark: ``[node]``: the last move that has looked at it.
        first_op: ``[device]``: first op of its call; -1 = none.
        next_op: ``[op]``: next op of the same call.
        block_of: ``[op]``: its block: its device, or the number of devices plus the op.
        waiting: ``[block]``: edges from blocks that have not ended.
        ready: ``[block]``: when all its inputs are there, in seconds.
        queue: Blocks that can run, in order.
    """

    chosen: Column
    target: Column
    mark: Column
    first_op: Column
    next_op: Column
    block_of: Column
    waiting: Column
    ready: Column
    queue: Column


@kernel
def anneal_split(
    given: Given, flow: OpFlow, setting: Column, effort: Column, split: Split, scratch: Scratch
) -> None:
    """Anneal a split for a number of moves, and keep the best one that fits.

    A move puts a node, or a cluster of nodes joined by nets, from one device on another, or swaps
    two nodes; only the two devices' loads change. By the goal the energy is

    * the sum over devices of (load / scale)^(2^doublings), nearly the largest load;
      ``ORDERED_LOADS``: and no data flows in a circle between devices;
    * ``LATENCY``: the time of the last result over scale, times 2^doublings, where each device of
      ``is_block`` is one call that waits for all its inputs, and others run op by op;

    plus a penalty for memory.
    """
    goal, scale = effort[GOAL], setting[SCALE]
    temperature = setting[HOT]
    cooling = (setting[COLD] / setting[HOT]) ** (1.0 / max(effort[MOVES], 1))
    steepness = 2.0 ** int(setting[DOUBLINGS])
    pressure = 0.0
    for device in range(len(given.class_of)):
        pressure += _press(given, setting, goal, split, device)
    energy, end = _judge(flow, split, scratch, goal, pressure, steepness, scale)
    _draw(effort)  # as for a move, so that the numbers that follow are the same
    _keep_best(given, split, goal, end)
    for stamp in range(1, effort[MOVES] + 1):
        temperature *= cooling
        here, there, size = _choose(given, setting, effort, split, scratch, stamp)
        if size == 0:
            continue
        load, used, power = split.load, split.used, split.power
        load_here, used_here, power_here = load[here], used[here], power[here]
        load_there, used_there, power_there = load[there], used[there], power[there]
        _carry(given, split, scratch, size)
        pressed = pressure - power_here - power_there
        pressed += _press(given, setting, goal, split, here)
        pressed += _press(given, setting, goal, split, there)
        moved, end = _judge(flow, split, scratch, goal, pressed, steepness, scale)
        chance = _draw(effort) / MODULUS
        if moved <= energy or chance < math.exp((energy - moved) / temperature):
            energy, pressure = moved, pressed
            _keep_best(given, split, goal, end)
            continue
        _carry(given, split, scratch, size)
        # The values as they were, so that rounding does not add up.
        load[here], used[here], power[here] = load_here, used_here, power_here
        load[there], used[there], power[there] = load_there, used_there, power_there


@kernel(inline=True)
def _draw(effort: Column) -> Number:
    """Return the next random number, from 1 to ``MODULUS - 1``."""
    word = effort[WORD] * MULTIPLIER % MODULUS
    effort[WORD] = word
    return word


@kernel(inline=True)
def _choose(
    given: Given, setting: Column, effort: Column, split: Split, scratch: Scratch, stamp: int
) -> tuple[Number, Number, Number]:
    """Choose a move; return the device that its first node leaves, the one it goes to, its size.

    A size of 0 is no move. Most moves go where another pin of one of the node's nets is.
    """
    num_nodes = len(split.device_of)
    sort = _draw(effort) / MODULUS
    first = _draw(effort) % num_nodes
    here = split.device_of[first]
    word = _draw(effort)
    there = word % len(given.class_of)
    begin, end = given.net_ptr[first], given.net_ptr[first + 1]
    if word / MODULUS < NEAR and end > begin:
        net = given.net_of[begin + _draw(effort) % (end - begin)]
        begin, end = given.pin_ptr[net], given.pin_ptr[net + 1]
        near = split.device_of[given.pin[begin + _draw(effort) % (end - begin)]]
        there = there if near == here else near
    if there == here:
        return here, there, 0
    scratch.mark[first] = stamp
    scratch.chosen[0], scratch.target[0], size = first, there, 1
    if SINGLE <= sort < CLUSTER:
        share = _draw(effort) / MODULUS
        most = min(num_nodes - 1, 2 + int(share * _draw(effort) / MODULUS * setting[LARGEST]))
        size = _grow(given, effort, split, scratch, stamp, most)
    word = _draw(effort)
    if sort >= CLUSTER or (sort >= SINGLE and word % 5 == 0):
        for _ in range(TRIES):
            other = _draw(effort) % num_nodes
            if split.device_of[other] == there:
                scratch.chosen[size], scratch.target[size] = other, here
                size += 1
                break
    return here, there, size


@kernel(inline=True)
def _grow(
    given: Given, effort: Column, split: Split, scratch: Scratch, stamp: int, most: int
) -> Number:
    """Add nodes of the same device to a cluster, along nets in random order; return its size."""
    chosen, target = scratch.chosen, scratch.target
    here, there = split.device_of[chosen[0]], target[0]
    head, size = 0, 1
    while head < size < most:
        spot = head + _draw(effort) % (size - head)
        node = chosen[spot]
        chosen[spot] = chosen[head]
        chosen[head] = node
        head += 1
        for row in range(given.net_ptr[node], given.net_ptr[node + 1]):
            net = given.net_of[row]
            for place in range(given.pin_ptr[net], given.pin_ptr[net + 1]):
                other = given.pin[place]
                if size < most and scratch.mark[other] != stamp and split.device_of[other] == here:
                    scratch.mark[other] = stamp
                    chosen[size], target[size] = other, there
                    size += 1
    return size


@kernel(inline=True)
def _carry(given: Given, split: Split, scratch: Scratch, size: int) -> None:
    """Carry the chosen nodes to their targets; these become where they were, ready to go back."""
    devices, nodes = len(given.class_of), len(split.device_of)
    load, used, inside, held = split.load, split.used, split.inside, split.held
    for index in range(size):
        node, after = scratch.chosen[index], scratch.target[index]
        before = split.device_of[node]
        split.device_of[node] = after
        scratch.target[index] = before
        old, new = given.class_of[before], given.class_of[after]
        load[before] -= given.seconds[old * nodes + node]
        load[after] += given.seconds[new * nodes + node]
        used[before] -= given.node_bytes[node]
        used[after] += given.node_bytes[node]
        for row in range(given.net_ptr[node], given.net_ptr[node + 1]):
            net = given.net_of[row]
            most = given.pin_ptr[net + 1] - given.pin_ptr[net]
            leaving = inside[net * devices + before]
            coming = inside[net * devices + after]
            inside[net * devices + before] = leaving - 1
            inside[net * devices + after] = coming + 1
            # A device cuts a net while it has some of the pins and not all.
            if given.pays[old]:
                if leaving == most:
                    load[before] += given.net_s[net]
                if leaving == 1:
                    load[before] -= given.net_s[net]
            if given.pays[new]:
                if coming == 0:
                    load[after] += given.net_s[net]
                if coming == most - 1:
                    load[after] -= given.net_s[net]
        for row in range(given.share_ptr[node], given.share_ptr[node + 1]):
            part = given.share_of[row]
            held[part * devices + before] -= 1
            if held[part * devices + before] == 0:
                used[before] -= given.share_bytes[part]
            if held[part * devices + after] == 0:
                used[after] += given.share_bytes[part]
            held[part * devices + after] += 1


@kernel(inline=True)
def _press(given: Given, setting: Column, goal: int, split: Split, device: int) -> Number:
    """Set and return the energy of a device: its load, raised, and what its memory lacks."""
    raised = 0.0
    if goal != LATENCY:
        raised = split.load[device] / setting[SCALE]
        for _ in range(int(setting[DOUBLINGS])):
            raised *= raised
    over = split.used[device] / given.limit_bytes[given.class_of[device]] - 1.0
    power = raised + (PENALTY * over if over > 0 else 0.0)
    split.power[device] = power
    return power


@kernel(inline=True)
def _judge(
    flow: OpFlow,
    split: Split,
    scratch: Scratch,
    goal: int,
    pressure: float,
    steepness: float,
    scale: float,
) -> tuple[Number, Number]:
    """Return the energy of a split, inf where data flows in a circle, and when its last op ends."""
    if goal == LOADS:
        return pressure, 0.0
    end, is_complete = _play(flow, split, scratch)
    if not is_complete:
        return math.inf, end
    if goal == LATENCY:
        return pressure + steepness * end / scale, end
    return pressure, end


@kernel
def _play(  # noqa: C901, PLR0912 (one walk)
    flow: OpFlow, split: Split, scratch: Scratch
) -> tuple[Number, Number]:
    """Run the blocks as soon as their inputs are there; return the end, and whether all could."""
    # A block runs without a pause. Numbers below num_devices are devices that run all their ops as
    # one block; op v of any other device is block num_devices + v, since such devices (CPUs) run
    # whatever is ready.
    num_devices, num_ops = len(split.load), len(flow.node_of)
    succ_ptr, succ, block_of = flow.succ_ptr, flow.succ, scratch.block_of
    first_op, next_op = scratch.first_op, scratch.next_op
    waiting, ready, queue = scratch.waiting, scratch.ready, scratch.queue
    for device in range(num_devices):
        first_op[device] = -1
    for block in range(num_devices + num_ops):
        waiting[block], ready[block] = 0, 0.0
    # The ops of a device's block are a linked list: first_op, then next_op until -1.
    for op in range(num_ops):
        device = split.device_of[flow.node_of[op]]
        block_of[op] = num_devices + op
        next_op[op] = -1
        if flow.is_block[device]:
            block_of[op] = device
            next_op[op] = first_op[device]
            first_op[device] = op
    # waiting counts edges, not blocks: each is taken off once below.
    for op in range(num_ops):
        for row in range(succ_ptr[op], succ_ptr[op + 1]):
            if block_of[succ[row]] != block_of[op]:
                waiting[block_of[succ[row]]] += 1
    tail, blocks = 0, 0
    for block in range(num_devices + num_ops):
        if block < num_devices:
            exists = first_op[block] >= 0
        else:
            exists = block_of[block - num_devices] == block
        if exists:
            blocks += 1
            if waiting[block] == 0:
                queue[tail] = block
                tail += 1
    # In topological order of the blocks, so that ready (seconds) is final when a block is taken.
    # Blocks in a circle never get there: fewer are queued than there are.
    head, end = 0, 0.0
    while head < tail:
        block = queue[head]
        head += 1
        if block < num_devices:
            done, op = ready[block] + split.load[block], first_op[block]
        else:
            done, op = ready[block] + flow.op_s[block - num_devices], block - num_devices
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
    return end, tail == blocks


@kernel(inline=True)
def _keep_best(given: Given, split: Split, goal: int, end: float) -> None:
    """Keep a split if it fits and none was better."""
    worst = end if goal == LATENCY else 0.0
    fits = True
    for device in range(len(given.class_of)):
        if goal != LATENCY:
            worst = max(worst, split.load[device])
        fits = fits and split.used[device] <= given.limit_bytes[given.class_of[device]]
    if fits and worst < split.best[0]:
        split.best[0] = worst
        for node in range(len(split.device_of)):
            split.best_of[node] = split.device_of[node]
