"""The DP over ideals, written to run on lists (small inputs) and compiled on arrays."""

from partita.kernels import Column

UPPER, PAIRS, MOST_PAIRS = 0, 1, 2


def cut_ideals(  # noqa: PLR0913, PLR0917 (a kernel takes columns)
    step_ptr: Column,
    step_node: Column,
    step_target: Column,
    net_ptr: Column,
    net_of: Column,
    net_size: Column,
    net_s: Column,
    share_ptr: Column,
    share_of: Column,
    share_size: Column,
    share_bytes: Column,
    cut_s: Column,
    gone_bytes: Column,
    seen: Column,
    inside: Column,
    held: Column,
    path_ideal: Column,
    path_step: Column,
    path_node: Column,
) -> None:
    """Fill in the cost of the nets that each ideal cuts, and the shared bytes that it has whole."""
    depth = 0
    path_ideal[0], path_step[0] = 0, step_ptr[0]
    while depth >= 0:
        here = path_ideal[depth]
        if path_step[depth] == step_ptr[here + 1]:
            if depth > 0:
                node = path_node[depth]
                for row in range(net_ptr[node], net_ptr[node + 1]):
                    inside[net_of[row]] -= 1
                for row in range(share_ptr[node], share_ptr[node + 1]):
                    held[share_of[row]] -= 1
            depth -= 1
            continue
        step = path_step[depth]
        path_step[depth] += 1
        there, node = step_target[step], step_node[step]
        if seen[there] == 0:
            continue
        seen[there] = 0
        cut_s[there] = cut_s[here]
        for row in range(net_ptr[node], net_ptr[node + 1]):
            net = net_of[row]
            inside[net] += 1
            if inside[net] == 1:
                cut_s[there] += net_s[net]
            if inside[net] == net_size[net]:
                cut_s[there] -= net_s[net]
        gone_bytes[there] = gone_bytes[here]
        for row in range(share_ptr[node], share_ptr[node + 1]):
            held[share_of[row]] += 1
            if held[share_of[row]] == share_size[share_of[row]]:
                gone_bytes[there] += share_bytes[share_of[row]]
        depth += 1
        path_ideal[depth], path_step[depth], path_node[depth] = there, step_ptr[there], node


def push_loads(  # noqa: C901, PLR0912, PLR0913, PLR0915, PLR0917 (a kernel takes columns)
    step_ptr: Column,
    step_node: Column,
    step_target: Column,
    rest: Column,
    closing: Column,
    seconds: Column,
    pays: Column,
    limit_bytes: Column,
    node_bytes: Column,
    net_ptr: Column,
    net_of: Column,
    net_size: Column,
    net_s: Column,
    share_ptr: Column,
    share_of: Column,
    share_bytes: Column,
    next_state: Column,
    skip_state: Column,
    capacity: Column,
    left: Column,
    bound: Column,
    value: Column,
    origin: Column,
    came_by: Column,
    seen: Column,
    inside: Column,
    held: Column,
    path_ideal: Column,
    path_step: Column,
    path_node: Column,
    path_seconds: Column,
    path_bytes: Column,
    path_cut_s: Column,
    alive: Column,
) -> None:
    """Fill ``value[ideal, state]`` with the least max-load of a chain of devices up to an ideal.

    From every ideal that is reached, all larger ones are visited once, depth first, as long as the
    nodes between fit a device in time and memory; the nets cut by them are kept up to date along
    the way. The last device takes all that is left: ``closing[class, ideal]`` is its load, so that
    nothing is visited from states with one device ``left``. ``next_state[state, class]`` is -1 if
    there is none; ``skip_state`` (-1 = none) is where a device left unused leads to. Pruned is what
    exceeds ``bound[0]``, and where ``rest`` of an ideal exceeds the ``capacity`` of a state times
    it. Stops after ``bound[2]`` pairs of ideals.
    """
    num_states, num_classes = len(capacity), len(pays)
    num_nodes = len(node_bytes)
    full = len(rest) - 1
    pairs = 0
    for base in range(full):
        num_alive = 0
        for state in range(num_states):
            reached = value[base * num_states + state]
            after = skip_state[state]
            if after >= 0 and reached < value[base * num_states + after]:
                value[base * num_states + after] = reached
                origin[base * num_states + after] = base
                came_by[base * num_states + after] = -1 - state
            if reached > bound[UPPER] or rest[base] > bound[UPPER] * capacity[state]:
                continue
            if left[state] > 1:
                alive[num_alive] = state
                num_alive += 1
            for kind in range(num_classes):
                after = next_state[state * num_classes + kind]
                total = max(reached, closing[kind * (full + 1) + base])
                if (
                    after >= 0
                    and total <= bound[UPPER]
                    and total < value[full * num_states + after]
                ):
                    value[full * num_states + after] = total
                    origin[full * num_states + after] = base
                    came_by[full * num_states + after] = state * num_classes + kind
                    bound[UPPER] = min(bound[UPPER], total)
        if num_alive == 0:
            continue
        if pairs > bound[MOST_PAIRS]:
            break
        depth = 0
        path_ideal[0], path_step[0] = base, step_ptr[base]
        path_bytes[0], path_cut_s[0] = 0.0, 0.0
        for kind in range(num_classes):
            path_seconds[kind] = 0.0
        while depth >= 0:
            here = path_ideal[depth]
            if path_step[depth] == step_ptr[here + 1]:
                if depth > 0:
                    node = path_node[depth]
                    for row in range(net_ptr[node], net_ptr[node + 1]):
                        inside[net_of[row]] -= 1
                    for row in range(share_ptr[node], share_ptr[node + 1]):
                        held[share_of[row]] -= 1
                depth -= 1
                continue
            step = path_step[depth]
            path_step[depth] += 1
            there = step_target[step]
            if seen[there] == base or there == full:
                continue
            seen[there] = base
            node = step_node[step]
            used = path_bytes[depth] + node_bytes[node]
            for row in range(share_ptr[node], share_ptr[node + 1]):
                if held[share_of[row]] == 0:
                    used += share_bytes[share_of[row]]
            fits = False
            for kind in range(num_classes):
                total = path_seconds[depth * num_classes + kind] + seconds[kind * num_nodes + node]
                path_seconds[(depth + 1) * num_classes + kind] = total
                if total <= bound[UPPER] and used <= limit_bytes[kind]:
                    fits = True
            if not fits:
                continue
            pairs += 1
            cut_s = path_cut_s[depth]
            for row in range(net_ptr[node], net_ptr[node + 1]):
                net = net_of[row]
                inside[net] += 1
                if inside[net] == 1:
                    cut_s += net_s[net]
                if inside[net] == net_size[net]:
                    cut_s -= net_s[net]
            for row in range(share_ptr[node], share_ptr[node + 1]):
                held[share_of[row]] += 1
            depth += 1
            path_ideal[depth], path_step[depth], path_node[depth] = there, step_ptr[there], node
            path_bytes[depth], path_cut_s[depth] = used, cut_s
            for kind in range(num_classes):
                load = path_seconds[depth * num_classes + kind]
                if pays[kind]:
                    load += cut_s
                if load > bound[UPPER] or used > limit_bytes[kind]:
                    continue
                for index in range(num_alive):
                    state = alive[index]
                    after = next_state[state * num_classes + kind]
                    if after < 0:
                        continue
                    reached = max(load, value[base * num_states + state])
                    if (
                        reached < value[there * num_states + after]
                        and rest[there] <= bound[UPPER] * capacity[after]
                    ):
                        value[there * num_states + after] = reached
                        origin[there * num_states + after] = base
                        came_by[there * num_states + after] = state * num_classes + kind
    bound[PAIRS] = pairs
