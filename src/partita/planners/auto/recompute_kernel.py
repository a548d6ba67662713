"""Kernels of ``recompute``: the units of a stage that are worth computing again.

A unit that recomputes frees what it saves, and makes the stage keep what it reads of others that do
not. So what a set R of units gains is ``gain(R) - border(R)``, and the sets that gain most for
their seconds are minimum cuts: those that minimise ``weight * seconds(R) - gain(R) + border(R)``.
They are nested, the larger the lower the weight. Between the last that gains too little and the
first that gains enough, units of the latter that are not needed are dropped one by one.

Columns are by unit of the stage or by tensor that units of the stage make and read; units have
numbers of their own, from 0 on.
"""

import numpy as np

from partita.kernels import Column, Number, kernel

_MAX_CUTS = 40
"""Cuts after which the search for the weight ends; it usually takes fewer than ten."""
_MAX_PATHS = 64
"""Paths for each arc after which a flow counts as maximal; it usually takes fewer than one."""
_ROUNDING = 1e-9


@kernel(allocates=True)
def least_seconds(  # noqa: C901, PLR0912, PLR0913, PLR0917 (columns of a kernel)
    gain: Column,
    seconds: Column,
    source: Column,
    ptr: Column,
    pins: Column,
    size: Column,
    need: Number,
    again: Column,
) -> Number:
    """Choose units that gain enough in the least seconds, about; return what they gain.

    Args:
        gain: Bytes that each unit frees.
        seconds: To compute it again.
        source: The unit that makes each tensor.
        ptr: The units that read it are ``pins[ptr[net]:ptr[net + 1]]``.
        pins: See ``ptr``.
        size: Bytes that it takes to keep it.
        need: Bytes to gain. Where no set does, the one that gains most is chosen.
        again: Set to 1 for those that are chosen, 0 for others.
    """
    count = len(gain)
    low = np.zeros(count, np.int64)
    high = np.ones(count, np.int64)
    chosen = np.zeros(count, np.int64)
    for u in range(count):
        again[u] = 0
    _cut(0.0, gain, seconds, source, ptr, pins, size, low, high, chosen)
    most = _gained(gain, source, ptr, pins, size, chosen)
    for u in range(count):
        again[u] = high[u] = chosen[u]
    if most < need:
        return most
    low_gain, low_s = 0.0, 0.0
    high_gain, high_s = most, 0.0
    for u in range(count):
        high_s += seconds[u] * high[u]
    # The weight at which both ends are as good: a third set that is better lies between them.
    for _ in range(_MAX_CUTS):
        if high_s - low_s <= 0.0:
            break
        weight = (high_gain - low_gain) / (high_s - low_s)
        _cut(weight, gain, seconds, source, ptr, pins, size, low, high, chosen)
        inside = 0
        outside = 0
        spent = 0.0
        for u in range(count):
            inside += chosen[u] > low[u]
            outside += chosen[u] < high[u]
            spent += seconds[u] * chosen[u]
        if inside == 0 or outside == 0:
            break
        gained = _gained(gain, source, ptr, pins, size, chosen)
        enough = gained >= need
        for u in range(count):
            if enough:
                high[u] = chosen[u]
            else:
                low[u] = chosen[u]
        if enough:
            high_gain, high_s = gained, spent
        else:
            low_gain, low_s = gained, spent
    for u in range(count):
        again[u] = high[u]
    return _without_spare(gain, seconds, source, ptr, pins, size, high_gain - need, again) + need


@kernel
def _gained(
    gain: Column, source: Column, ptr: Column, pins: Column, size: Column, chosen: Column
) -> Number:
    """Return the bytes that a set gains."""
    total = 0.0
    for u in range(len(gain)):
        if chosen[u] == 1:
            total += gain[u]
    for net in range(len(source)):
        if chosen[source[net]] == 1:
            continue
        for pin in range(ptr[net], ptr[net + 1]):
            if chosen[pins[pin]] == 1:
                total -= size[net]
                break
    return total


@kernel(allocates=True)
def _without_spare(  # noqa: C901, PLR0912, PLR0913, PLR0917 (columns of a kernel)
    gain: Column,
    seconds: Column,
    source: Column,
    ptr: Column,
    pins: Column,
    size: Column,
    spare: Number,
    again: Column,
) -> Number:
    """Drop units while what is gained allows it, most seconds per byte first; return the rest."""
    count = len(gain)
    readers = np.zeros(len(source), np.int64)
    for net in range(len(source)):
        for pin in range(ptr[net], ptr[net + 1]):
            readers[net] += again[pins[pin]]
    loss = np.zeros(count, np.float64)
    while True:
        for u in range(count):
            loss[u] = gain[u]
        for net in range(len(source)):
            if again[source[net]] == 1:
                if readers[net] > 0:
                    loss[source[net]] += size[net]
            elif readers[net] == 1:
                for pin in range(ptr[net], ptr[net + 1]):
                    loss[pins[pin]] -= size[net]
        best = -1
        ratio = 0.0
        for u in range(count):
            if again[u] == 0 or loss[u] > spare:
                continue
            here = np.inf if loss[u] <= 0.0 else seconds[u] / loss[u]
            if best < 0 or here > ratio:
                best = u
                ratio = here
        if best < 0:
            return spare
        again[best] = 0
        spare -= loss[best]
        for net in range(len(source)):
            for pin in range(ptr[net], ptr[net + 1]):
                if pins[pin] == best:
                    readers[net] -= 1


@kernel(allocates=True)
def _cut(  # noqa: C901, PLR0912, PLR0913, PLR0915, PLR0917 (builds arcs, fills them)
    weight: Number,
    gain: Column,
    seconds: Column,
    source: Column,
    ptr: Column,
    pins: Column,
    size: Column,
    low: Column,
    high: Column,
    chosen: Column,
) -> None:
    """Choose the set between ``low`` and ``high`` that is best at a weight.

    Units are nodes, and so are tensors: one with a reader in the set is in it, and pays where its
    maker is not. Flow starts with what a unit gains and ends in what it pays. From what cannot flow
    off, the nodes that it still reaches are the set.
    """
    count, nets = len(gain), len(source)
    nodes = count + nets
    arcs = 2 * (nets + len(pins))
    first = np.full(nodes, -1)
    following = np.zeros(arcs, np.int64)
    head = np.zeros(arcs, np.int64)
    room = np.zeros(arcs, np.float64)
    # What flows in at a node, less what flows off there at once; below 0 more may flow off.
    left = np.zeros(nodes, np.float64)
    total = 0.0
    for u in range(count):
        left[u] = gain[u] - weight * seconds[u]
        total += gain[u]
    arc = 0
    for net in range(nets):
        maker = source[net]
        z = count + net
        if low[maker] == 1:
            continue
        # Units that are fixed are no nodes: those of ``low`` are a source, the others a drain.
        kept = 0
        for pin in range(ptr[net], ptr[net + 1]):
            kept += low[pins[pin]]
        if kept > 0:
            if high[maker] == 1:
                left[maker] += size[net]
            continue
        if high[maker] == 0:
            left[z] = -size[net]
        else:
            head[arc] = maker
            room[arc] = size[net]
            following[arc] = first[z]
            first[z] = arc
            head[arc + 1] = z
            following[arc + 1] = first[maker]
            first[maker] = arc + 1
            arc += 2
        for pin in range(ptr[net], ptr[net + 1]):
            reader = pins[pin]
            if high[reader] == 1:
                head[arc] = z
                room[arc] = np.inf
                following[arc] = first[reader]
                first[reader] = arc
                head[arc + 1] = reader
                following[arc + 1] = first[z]
                first[z] = arc + 1
                arc += 2
    least = _ROUNDING * (total + 1.0)
    # 0 = not reached, the number of a search = reached in it, -1 = nothing flows off from there.
    reached = np.zeros(nodes, np.int64)
    trail = np.zeros(nodes + 1, np.int64)
    place = np.zeros(nodes, np.int64)
    search = 0
    for start in range(count):
        if low[start] == 1 or high[start] == 0:
            continue
        while left[start] > least and reached[start] >= 0 and search < _MAX_PATHS * (arcs + 1):
            search += 1
            reached[start] = search
            place[start] = first[start]
            node = start
            depth = 0
            while left[node] >= -least or node == start:
                k = place[node]
                while k >= 0:
                    other = head[k]
                    if room[k] > least and reached[other] >= 0 and reached[other] != search:
                        break
                    k = following[k]
                place[node] = k
                if k >= 0:
                    trail[depth] = k
                    depth += 1
                    node = head[k]
                    reached[node] = search
                    place[node] = first[node]
                    continue
                if depth == 0:
                    node = -1
                    break
                depth -= 1
                node = head[trail[depth] ^ 1]
                place[node] = following[place[node]]
            if node < 0:
                # All that was reached stays so: no later path leads there and off again.
                for other in range(nodes):
                    if reached[other] == search:
                        reached[other] = -1
                break
            flow = min(left[start], -left[node])
            for d in range(depth):
                flow = min(flow, room[trail[d]])
            left[start] -= flow
            left[node] += flow
            for d in range(depth):
                room[trail[d]] -= flow
                room[trail[d] ^ 1] += flow
    for u in range(count):
        chosen[u] = 1 if low[u] == 1 or (reached[u] < 0 and high[u] == 1) else 0
