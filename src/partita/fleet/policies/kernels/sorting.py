"""Putting jobs in order: a natural merge sort, linear on an order that has hardly changed."""

from partita.kernels import Column, kernel


@kernel
def goes_before(a: int, b: int, key: Column, rank: Column) -> bool:
    """Return whether job a goes before job b: higher rank, lower key, lower number."""
    if rank[a] != rank[b]:
        return bool(rank[a] > rank[b])
    if key[a] != key[b]:
        return bool(key[a] < key[b])
    return a < b


@kernel
def run_end(jobs: Column, begin: int, count: int, key: Column, rank: Column) -> int:
    """Return where the ascending run that starts at ``begin`` ends."""
    end = begin + 1
    while end < count and goes_before(jobs[end - 1], jobs[end], key, rank):
        end += 1
    return end


@kernel
def sort_jobs(jobs: Column, count: int, key: Column, rank: Column, spare: Column) -> None:
    """Sort the first ``count`` jobs in place; ``spare`` is as long as ``jobs``."""
    source, target, here = jobs, spare, True
    while True:
        # Each round merges neighbouring runs into the other column, until one run is left.
        end = run_end(source, 0, count, key, rank) if count else 0
        if end >= count:
            break
        begin = 0
        while begin < count:
            middle = run_end(source, begin, count, key, rank)
            # A last run without a partner is copied as it is: the target needs every job.
            end = run_end(source, middle, count, key, rank) if middle < count else middle
            left, right, to = begin, middle, begin
            while to < end:
                if right >= end or (
                    left < middle and goes_before(source[left], source[right], key, rank)
                ):
                    target[to] = source[left]
                    left += 1
                else:
                    target[to] = source[right]
                    right += 1
                to += 1
            begin = end
        source, target, here = target, source, not here
    # An odd number of rounds has left the result in ``spare``.
    if not here:
        for i in range(count):
            jobs[i] = source[i]
