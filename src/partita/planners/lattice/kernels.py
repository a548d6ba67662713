"""Loops over ideals, written to run on lists (small inputs) and compiled on arrays.

A kernel indexes its arguments and nothing else; results go to the arguments after the inputs. Bits
of a set come from a table of words, so that plain whole numbers and 64-bit words behave alike.
"""

from partita.kernels import Column, kernel

COUNT, STEPS, OVER = 0, 1, 2


@kernel
def count_sets(  # noqa: PLR0913, PLR0917 (a kernel takes columns)
    succ_ptr: Column,
    succ: Column,
    rank: Column,
    limit: Column,
    waiting: Column,
    stack: Column,
    begin: Column,
    place: Column,
    totals: Column,
) -> None:
    """Count ideals and covering steps depth first, until there are more than ``limit[0]``.

    Every ideal is reached once: nodes are added in the order of their rank, a linear extension.
    ``limit[1]`` nodes that can be added at once make more ideals than the limit, as any subset of
    them is one; this also bounds the stack.
    """
    top = 0
    for node in range(len(waiting)):
        if waiting[node] == 0:
            stack[top] = node
            top += 1
    # ``ready`` counts the nodes that can be added to the current ideal, of any rank: its covering
    # steps. The candidates of a depth, those that may be added without reaching an ideal twice, are
    # ``stack[begin[depth]:begin[depth + 1]]``; ``place`` is the next one to try.
    ready = top
    count, steps, depth = 1, ready, 0
    begin[0], begin[1], place[0] = 0, top, 0
    over = ready >= limit[1] or count > limit[0]
    while depth >= 0 and not over:
        # All candidates are done: take the node back that led here.
        if place[depth] == begin[depth + 1]:
            depth -= 1
            if depth >= 0:
                node = stack[place[depth] - 1]
                ready += 1
                for edge in range(succ_ptr[node], succ_ptr[node + 1]):
                    if waiting[succ[edge]] == 0:
                        ready -= 1
                    waiting[succ[edge]] += 1
            continue
        node = stack[place[depth]]
        place[depth] += 1
        ready -= 1
        # Candidates one deeper: those of a higher rank, and what the node sets free. A successor
        # always has a higher rank, as ranks are a linear extension.
        top = begin[depth + 1]
        for other in range(begin[depth], begin[depth + 1]):
            if rank[stack[other]] > rank[node]:
                stack[top] = stack[other]
                top += 1
        for edge in range(succ_ptr[node], succ_ptr[node + 1]):
            waiting[succ[edge]] -= 1
            if waiting[succ[edge]] == 0:
                ready += 1
                stack[top] = succ[edge]
                top += 1
        count += 1
        steps += ready
        over = ready >= limit[1] or count > limit[0]
        depth += 1
        place[depth] = begin[depth]
        begin[depth + 1] = top
    totals[COUNT], totals[STEPS], totals[OVER] = count, steps, over


@kernel
def fill_sets(  # noqa: C901, PLR0912, PLR0913, PLR0917 (a kernel takes columns)
    pred_ptr: Column,
    pred: Column,
    succ_ptr: Column,
    succ: Column,
    rank: Column,
    word_of: Column,
    bit_of: Column,
    words: Column,
    sets: Column,
    parent: Column,
    last: Column,
    step_ptr: Column,
    step_node: Column,
    step_target: Column,
) -> None:
    """Fill in all ideals by ascending size, and their covering steps; sizes are known.

    The parent of an ideal lacks its node of highest rank. A step that adds a lower node v to an
    ideal I with the highest node m goes where (step of the parent by v) goes by m: no hashing.
    ``step_node`` of row 0 holds the sources already.
    """
    width = words[0]
    count = len(parent)
    tail, level = 1, 0
    # Ideals ``level`` to ``end`` have one size. Their steps by higher nodes make the next size, in
    # order; only then are the targets of steps by lower nodes known.
    while level < count:
        end = tail
        for ideal in range(level, end):
            highest = rank[last[ideal]] if ideal else -1
            for step in range(step_ptr[ideal], step_ptr[ideal + 1]):
                node = step_node[step]
                if rank[node] <= highest:
                    continue
                step_target[step] = tail
                parent[tail] = ideal
                last[tail] = node
                for word in range(width):
                    sets[tail * width + word] = sets[ideal * width + word]
                # The set and its steps: those of the ideal below without this node, and what it
                # sets free.
                sets[tail * width + word_of[node]] |= bit_of[node]
                into = step_ptr[tail]
                for other in range(step_ptr[ideal], step_ptr[ideal + 1]):
                    if step_node[other] != node:
                        step_node[into] = step_node[other]
                        into += 1
                for edge in range(succ_ptr[node], succ_ptr[node + 1]):
                    after = succ[edge]
                    free = True
                    for back in range(pred_ptr[after], pred_ptr[after + 1]):
                        before = pred[back]
                        if sets[tail * width + word_of[before]] & bit_of[before] == 0:
                            free = False
                            break
                    if free:
                        step_node[into] = after
                        into += 1
                step_ptr[tail + 1] = into
                tail += 1
        # Steps by lower nodes. The parent's steps all have targets, and from there the node m is
        # higher than all in the set, so that its step got its target above.
        for ideal in range(level, end):
            if ideal == 0:
                continue
            node, above = last[ideal], parent[ideal]
            for step in range(step_ptr[ideal], step_ptr[ideal + 1]):
                if rank[step_node[step]] > rank[node]:
                    continue
                aside = step_ptr[above]
                while step_node[aside] != step_node[step]:
                    aside += 1
                onward = step_ptr[step_target[aside]]
                while step_node[onward] != node:
                    onward += 1
                step_target[step] = step_target[onward]
        level = end
