"""The test of a period for stages on consecutive devices of a row; see ``row``."""

from partita.kernels import Column, kernel

PERIOD, OUTER_RATE, WIDE, KEEP, WEIGHTED, STRAIGHT, EXACT = range(7)
"""Places of the options."""


@kernel
def place_stages(  # noqa: C901, PLR0912, PLR0913, PLR0915, PLR0917 (one pass, no calls)
    options: Column,
    ptr: Column,
    to: Column,
    seconds: Column,
    trained: Column,
    version: Column,
    fixed: Column,
    cut: Column,
    entering: Column,
    server: Column,
    begin: Column,
    end: Column,
    rate: Column,
    classes: Column,
    reduce: Column,
    most: Column,
    limit: Column,
    banned: Column,
    allowed: Column,
    stamp: Column,
    count: Column,
    replicas: Column,
    via: Column,
    goal: Column,
) -> None:
    """Fill in from which places of the row the graph can be finished from each ideal on.

    State (ideal, place): all above the ideal runs on the devices from that place on. For each there
    are up to ``options[KEEP]`` sizes of the next stage, ``replicas``, and behind each the state it
    leads to with the size there, ``via`` (state times KEEP plus option). Tables of a stage of r
    devices that ends before place p lie at ``p * (N + 1) + r``: ``reduce`` seconds a trained byte,
    ``most`` replicas in one server, ``limit`` memory. ``classes[k * (N + 1) + p]`` counts devices
    of class k before p; ``banned[p * ideals + i]`` the ops below ideal i that device p must not
    run. Work on the row from the end, so that the devices behind a stage are known. ``goal[0]``
    becomes the best option that finishes, or stays -1.

    By ideal, as sums whose differences belong to a stage: ``seconds[k * ideals + i]`` on class k,
    ``trained`` bytes, ``version`` bytes for each minibatch in flight, ``fixed`` bytes; ``cut`` and
    ``entering`` are bytes at an ideal. By place: ``server``, and that server's first place
    (``begin``) and the one after its last (``end``). ``rate`` is by server, in bytes per second.
    ``count`` says how many options a state has. ``stamp[first * (N + 1) + size]`` is the last ideal
    from which a stage of that size at that place was noted.
    """
    period, outer = options[PERIOD], options[OUTER_RATE]
    wide, keep = options[WIDE] > 0, int(options[KEEP])
    weighted, straight = options[WEIGHTED] > 0, options[STRAIGHT] > 0
    ideals, places = len(cut), len(server)
    row = places + 1
    kinds = len(classes) // row
    last = ideals - 1
    # Devices of the last server may stay unused behind the last stage.
    spare = begin[places - 1] if options[EXACT] == 0 and limit[places * row + 1] > 1e299 else places
    for place in range(max(spare, 1), places + 1):
        count[last * row + place] = 1
        replicas[(last * row + place) * keep] = 0
    for low in range(last - 1, -1, -1):
        # The largest stage first: options are noted until a state has ``keep`` of them.
        for pair in range(ptr[low + 1] - 1, ptr[low] - 1, -1):
            high = to[pair]
            size_bytes = cut[high]
            extra = trained[high] - trained[low]
            each = version[high] - version[low] + entering[low]
            once = fixed[high] - fixed[low]
            fastest = seconds[high] - seconds[low]
            before = seconds[low]
            # On the fastest class, what the stage takes, and what lies below it: both bound
            # devices.
            for kind in range(1, kinds):
                fastest = min(fastest, seconds[kind * ideals + high] - seconds[kind * ideals + low])
                before = min(before, seconds[kind * ideals + low])
            # Fewer devices than this cannot keep the period, and those that the work below needs
            # must be left to it. The tolerance is on the safe side.
            start = max(1, int(fastest / period * (1 - 1e-9)))
            held = int(before / period * (1 - 1e-9))
            # The stage ends before ``place``, where the stages after it are known to begin.
            for place in range(places, 0, -1):
                state = high * row + place
                if count[state] == 0:
                    continue
                if not wide and place < places and high < last:
                    # The same place of a later server leaves more devices.
                    later = place + end[place] - begin[place]
                    if later < places and count[high * row + later] > 0:
                        continue
                # Sizes grow towards the front of the row. Where some devices are banned each one
                # must be looked at, even below the least size.
                behind = places - place
                first_fit = 0
                size = start if len(banned) == 0 else 1
                while size <= place - held:
                    first = place - size
                    at, now = first * ideals, size
                    size += 1
                    if not wide and first_fit > 0 and now > first_fit:
                        # Next, stages that begin at the edge of a server.
                        size = place - begin[first - 1] if first > 0 else place + 1
                    # A larger stage has this device, too.
                    if len(banned) > 0 and banned[at + high] != banned[at + low]:
                        break
                    if straight and now > 1:
                        break
                    # Here: the state that the stage would make. It may be full, or have this size
                    # already from a larger stage; the stages added next see the size alone.
                    here = low * row + first
                    if now < start or allowed[now] != now or count[here] == keep:
                        continue
                    if stamp[first * row + now] == low:
                        continue
                    table = place * row + now
                    # Weighted shares add up speeds; equal ones wait for the slowest class.
                    spent = 0.0
                    for kind in range(kinds):
                        held_by = classes[kind * row + place] - classes[kind * row + first]
                        if held_by > 0:
                            work = seconds[kind * ideals + high] - seconds[kind * ideals + low]
                            if not weighted:
                                spent = max(spent, work / now)
                            elif work > 0:
                                spent += held_by / work
                            else:
                                spent = 1e300
                    if weighted:
                        spent = 1 / spent if spent > 0 else 0.0
                    if spent + extra * reduce[table] > period:
                        continue
                    if each * (-(-behind // now) + 1) + once > limit[table]:
                        continue
                    if first_fit == 0:
                        first_fit = now
                    # The cut between this stage and the next one, of size ``other``: ``wire`` and
                    # ``link`` are the multiples of its bytes that a server's port and a link inside
                    # carry in a period, both ways. The formulas are those of the module ``row``.
                    mine = server[place - 1]
                    shared = place < places and server[place] == mine
                    lower = max(first, begin[place - 1])
                    for option in range(count[state]):
                        other = replicas[state * keep + option]
                        fits = True
                        if high < last and size_bytes > 0:
                            wire = period * outer / (2 * size_bytes)
                            far = place + other
                            # All crosses between servers: the busiest port is that of the server
                            # with most replicas.
                            if not shared:
                                fits = (
                                    most[table] <= wire * now
                                    and most[far * row + other] <= wire * other
                                )
                            else:
                                link = period * rate[mine] / (2 * size_bytes)
                                upper = min(far, end[place])
                                # Shares of both stages in the server that they have in common. What
                                # one of them has there and the other has not passes the port.
                                leaving = (place - lower) / now
                                arriving = (upper - place) / other
                                if leaving < 1 or arriving < 1:
                                    cross = leaving * (1 - arriving) + arriving * (1 - leaving)
                                    fits = cross <= wire
                                    if first < lower:
                                        # The part of this stage in earlier servers leaves through
                                        # their ports.
                                        rest = lower - first
                                        fits = fits and most[lower * row + rest] <= wire * now
                                    if upper < far:
                                        rest = far - upper
                                        fits = fits and most[far * row + rest] <= wire * other
                                fits = fits and arriving <= link * now and leaving <= link * other
                        if fits:
                            # One way on is enough for a size: what lies before does not see the
                            # rest of it.
                            slot = here * keep + count[here]
                            replicas[slot] = now
                            via[slot] = state * keep + option
                            count[here] += 1
                            stamp[first * row + now] = low
                            break
    # From the empty ideal, the pipeline that leaves most of the row unused.
    for first in range(places, -1, -1):
        if count[first] > 0 and (first == 0 or options[EXACT] == 0):
            goal[0] = first * keep
            break
