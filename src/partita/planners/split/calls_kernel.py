"""Loops of the latency planner, written to run on lists (small inputs) and compiled on arrays."""

from partita.kernels import Column

UPPER, MOST_PAIRS = 0, 1


def push_calls(  # noqa: C901, PLR0912, PLR0913, PLR0915, PLR0917 (a kernel takes columns)
    step_ptr: Column,
    step_node: Column,
    step_target: Column,
    tail_s: Column,
    pred_ptr: Column,
    pred: Column,
    cpu_s: Column,
    seconds: Column,
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
    path_cpu_s: Column,
    finish: Column,
) -> None:
    """Fill ``value[ideal, state]`` with the least time of a series of calls up to an ideal.

    A piece is a call of an accelerator (copies in, work, copies out), or runs on the CPUs in the
    time of its longest path; ``came_by`` is then beyond all (state, class) pairs. ``finish`` is -1
    for nodes that are not in the piece. Pruned is what exceeds ``bound[0]`` together with
    ``tail_s``, the longest path of what an ideal lacks. Stops after ``bound[1]`` pairs of ideals.
    """
    num_states = len(value) // len(tail_s)
    num_classes, num_nodes = len(limit_bytes), len(node_bytes)
    full = len(tail_s) - 1
    pairs = 0
    for base in range(full):
        least = bound[UPPER] * 2 + 1
        for state in range(num_states):
            least = min(least, value[base * num_states + state])
        if least + tail_s[base] > bound[UPPER]:
            continue
        if pairs > bound[MOST_PAIRS]:
            break
        depth = 0
        path_ideal[0], path_step[0] = base, step_ptr[base]
        path_bytes[0], path_cut_s[0], path_cpu_s[0] = 0.0, 0.0, 0.0
        for kind in range(num_classes):
            path_seconds[kind] = 0.0
        while depth >= 0:
            here = path_ideal[depth]
            if path_step[depth] == step_ptr[here + 1]:
                if depth > 0:
                    node = path_node[depth]
                    finish[node] = -1.0
                    for row in range(net_ptr[node], net_ptr[node + 1]):
                        inside[net_of[row]] -= 1
                    for row in range(share_ptr[node], share_ptr[node + 1]):
                        held[share_of[row]] -= 1
                depth -= 1
                continue
            step = path_step[depth]
            path_step[depth] += 1
            there = step_target[step]
            if seen[there] == base:
                continue
            seen[there] = base
            node = step_node[step]
            used = path_bytes[depth] + node_bytes[node]
            for row in range(share_ptr[node], share_ptr[node + 1]):
                if held[share_of[row]] == 0:
                    used += share_bytes[share_of[row]]
            ready = 0.0
            for row in range(pred_ptr[node], pred_ptr[node + 1]):
                ready = max(ready, finish[pred[row]])
            end = ready + cpu_s[node]
            longest = max(path_cpu_s[depth], end)
            room = bound[UPPER] - least
            fits = longest <= room
            for kind in range(num_classes):
                total = path_seconds[depth * num_classes + kind] + seconds[kind * num_nodes + node]
                path_seconds[(depth + 1) * num_classes + kind] = total
                if total <= room and used <= limit_bytes[kind]:
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
            finish[node] = end
            path_ideal[depth], path_step[depth], path_node[depth] = there, step_ptr[there], node
            path_bytes[depth], path_cut_s[depth], path_cpu_s[depth] = used, cut_s, longest
            for state in range(num_states):
                reached = value[base * num_states + state] + longest
                cell = there * num_states + state
                if reached < value[cell] and reached + tail_s[there] <= bound[UPPER]:
                    value[cell] = reached
                    origin[cell] = base
                    came_by[cell] = num_states * num_classes + state
            for kind in range(num_classes):
                call_s = path_seconds[depth * num_classes + kind] + cut_s
                if used > limit_bytes[kind] or call_s > room:
                    continue
                for state in range(num_states):
                    after = next_state[state * num_classes + kind]
                    if after < 0:
                        continue
                    reached = value[base * num_states + state] + call_s
                    cell = there * num_states + after
                    if reached < value[cell] and reached + tail_s[there] <= bound[UPPER]:
                        value[cell] = reached
                        origin[cell] = base
                        came_by[cell] = state * num_classes + kind
            if there == full:
                for state in range(num_states):
                    bound[UPPER] = min(bound[UPPER], value[full * num_states + state])
