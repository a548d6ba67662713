"""One rank's part in measuring a cluster: meet the others, compute, ping, reduce.

Devices compute all at once, as they will in a run. Pairs talk one after the other, so that none
disturbs another: a pair begins when the store has the mark of the one before. A message is answered
by one byte, and receives are posted ahead, so that a round trip is two one-way times and nothing
else (gloo's sends wait for the receive to be posted). Every wait has a limit, and what ends by it
names the ranks that were waited for.
"""

import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
from itertools import count
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]  # not in its stubs

from partita.processes import machine_cores
from partita.profiler.calibrate.records import (
    DeviceRecord,
    LinkRecord,
    Measurement,
    MeasureOptions,
    ReduceRecord,
    read_device_record,
    read_link_record,
    write_record,
)
from partita.ranks.failures import PeerError

_ROUNDS = 3
_MAX_ROUNDS = 12
_PATIENCE = 3.0
_STABLE = 0.98
_MAX_REPEATS = 40
_COPY_BYTES = 64 * 2**20
_MATMUL_S = 0.01
_PARTS = 5
_MAX_MATMUL = 8192


@dataclass(slots=True, kw_only=True)
class Rank:
    """This process among the others.

    Attributes:
        rank: Its number.
        num_ranks: How many there are.
        store: Where ranks leave marks and records for one another.
        device: The device that it measures.
        backend: ``"gloo"`` or ``"nccl"``.
        limit_s: How long it waits for others.
        report: Called with each step.
    """

    rank: int
    num_ranks: int
    store: Store
    device: torch.device
    backend: str = "gloo"
    limit_s: float = 60.0
    report: Callable[[str], None] = field(default=lambda _: None)
    _meetings: Iterator[int] = field(default_factory=count)

    def put(self, key: str, text: str = "") -> None:
        """Leave a text for the others."""
        with self._waiting(f"cannot leave {key!r} in the store"):
            self.store.set(key, text)

    def take(self, key: str, who: int) -> str:
        """Return a text that another rank leaves, as soon as it is there."""
        self._await([(key, who)], f"waiting for {key!r}", self.limit_s)
        with self._waiting(f"cannot read {key!r} from the store"):
            return str(self.store.get(key).decode())

    def await_mark(self, key: str, who: int, what: str, limit_s: float) -> None:
        """Wait until another rank has left a mark."""
        self._await([(key, who)], what, limit_s)

    def meet(self, what: str) -> None:
        """Wait until all ranks are here."""
        turn = next(self._meetings)
        self.put(f"meet/{turn}/{self.rank}")
        keys = [(f"meet/{turn}/{other}", other) for other in range(self.num_ranks)]
        self._await(keys, what, self.limit_s)

    def _await(self, keys: Sequence[tuple[str, int]], what: str, limit_s: float) -> None:
        wanted = [key for key, _ in keys]
        try:
            self.store.wait(wanted, timedelta(seconds=limit_s))
        except RuntimeError as exc:
            try:
                missing = [str(who) for key, who in keys if not self.store.check([key])]
            except RuntimeError:
                raise PeerError(
                    f"rank {self.rank}, {what}: the store is gone, rank 0's host or launcher died"
                ) from exc
            raise PeerError(
                f"rank {self.rank}, {what}: nothing from rank {', '.join(missing) or 'any'} "
                f"within {limit_s:g} s"
            ) from exc

    @contextmanager
    def _waiting(self, what: str) -> Iterator[None]:
        """Translate what torch raises when a peer hangs or dies."""
        try:
            yield
        except RuntimeError as exc:
            reason = str(exc).splitlines()[0][:160] if str(exc) else type(exc).__name__
            raise PeerError(
                f"rank {self.rank}, {what}, limit {self.limit_s:g} s: {reason}"
            ) from exc

    def send(self, value: Tensor, target: int) -> None:
        """Send a tensor and wait until it is taken."""
        with self._waiting(f"sending to rank {target}"):
            self._wait(dist.isend(value, target))

    def post(self, value: Tensor, source: int) -> dist.Work | None:
        """Post a receive ahead of its message; None where the backend must not (NCCL)."""
        if self.backend != "gloo":
            return None
        with self._waiting(f"receiving from rank {source}"):
            return dist.irecv(value, source)

    def receive(self, posted: dist.Work | None, value: Tensor, source: int) -> None:
        """Wait for a message."""
        with self._waiting(f"receiving from rank {source}"):
            self._wait(dist.irecv(value, source) if posted is None else posted)

    def _wait(self, work: dist.Work | None) -> None:
        assert work is not None
        if self.backend == "gloo":
            work.wait(timedelta(seconds=self.limit_s))
        else:
            work.wait()
            torch.cuda.synchronize(self.device)

    def collective(self, kind: str, value: Tensor, other: Tensor, group: dist.ProcessGroup) -> None:
        """Run one of ``COLLECTIVES`` over a group."""
        with self._waiting(f"in an {kind.replace('_', '-')}"):
            self._wait(COLLECTIVES[kind](value, other, group))

    def tensor(self, num_bytes: int) -> Tensor:
        """Return a buffer whose memory is really there."""
        return torch.ones(num_bytes, dtype=torch.uint8, device=self.device)


def measure(rank: Rank, options: MeasureOptions) -> Measurement | None:
    """Take part in a measurement; rank 0 returns all of it, the others None.

    Raises:
        WorkerError: Another rank died or did not come in time; says which.
    """
    rank.meet("meeting the other ranks")
    timeout = timedelta(seconds=rank.limit_s)
    with rank._waiting("connecting to the other ranks"):  # noqa: SLF001 (of this module)
        dist.init_process_group(
            rank.backend,
            store=PrefixStore("group", rank.store),
            rank=rank.rank,
            world_size=rank.num_ranks,
            timeout=timeout,
        )
    try:
        record = _measure_device(rank, options)
        _measure_links(rank, options)
        reductions = _measure_reductions(rank, options)
        rank.put(f"device/{rank.rank}", write_record(record))
        result = _gather(rank, reductions) if rank.rank == 0 else None
        rank.meet("leaving")
        return result
    finally:
        dist.destroy_process_group()


def _gather(rank: Rank, reductions: Sequence[ReduceRecord]) -> Measurement:
    everyone = range(rank.num_ranks)
    return Measurement(
        backend=rank.backend,
        devices=tuple(read_device_record(rank.take(f"device/{r}", r)) for r in everyone),
        links=tuple(
            read_link_record(rank.take(f"link/{source}/{target}", source))
            for source in everyone
            for target in everyone
            if source != target
        ),
        reductions=tuple(reductions),
    )


def host_identity() -> str:
    """Return what tells this host from others: its name, its boot and its network namespace."""
    parts = [socket.gethostname()]
    try:
        parts.append(
            Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()[:8]
        )
        parts.append(str(Path("/proc/self/ns/net").stat().st_ino))
    except OSError:
        pass  # not Linux: the name must do
    return "/".join(parts)


def _measure_device(rank: Rank, options: MeasureOptions) -> DeviceRecord:
    """Return the speed of this rank's device while all others compute too."""
    is_gpu = rank.device.type == "cuda"
    memory = float(os.sysconf("SC_PAGE_SIZE")) * float(os.sysconf("SC_PHYS_PAGES"))
    record = DeviceRecord(
        rank=rank.rank,
        host=host_identity(),
        kind="gpu" if is_gpu else "cpu",
        title=torch.cuda.get_device_name(rank.device) if is_gpu else "",
        threads=0 if is_gpu else torch.get_num_threads(),
        memory_bytes=float(torch.cuda.get_device_properties(rank.device).total_memory)
        if is_gpu
        else memory,
        host_cpus=machine_cores(),
        host_memory_bytes=memory,
    )
    dtypes = ("float32", "float16", "bfloat16") if is_gpu else ("float32",)
    rates = {}
    for dtype in dtypes:
        work, flops = matmul_work(rank.device, getattr(torch, dtype))
        what = f"matrix products in {dtype}"
        rates[dtype] = flops * _together(rank, what, work, options.compute_s)
    work, copied = copy_work(rank.device)
    copied *= _together(rank, "copies in memory", work, options.compute_s)
    return replace(record, flop_per_s=rates, memory_bytes_per_s=copied)


def _together(rank: Rank, what: str, work: Callable[[], object], seconds: float) -> float:
    """Return how often a second this rank does some work while all ranks do it."""
    rank.report(what)
    rank.meet(f"before {what}")
    return _work_per_s(work, rank.device, seconds)


def _timed(work: Callable[[], object], device: torch.device) -> float:
    begin = time.perf_counter()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - begin


def _work_per_s(work: Callable[[], object], device: torch.device, seconds: float) -> float:
    """Return how often a piece of work is done in a second: the median over parts of some seconds.

    A part counts all the time that passes, also where another process has the core.
    """
    rates = []
    for _ in range(_PARTS):
        begin, done = time.perf_counter(), 0
        while done == 0 or time.perf_counter() - begin < seconds / _PARTS:
            _timed(work, device)
            done += 1
        rates.append(done / (time.perf_counter() - begin))
    return median(rates)


def matmul_work(device: torch.device, dtype: torch.dtype) -> tuple[Callable[[], object], float]:
    """Return a square matrix product that takes 10 ms or so, and its FLOPs."""
    size = 256
    while True:
        left = torch.ones((size, size), dtype=dtype, device=device)
        work = partial(torch.mm, left, left.clone(), out=torch.empty_like(left))
        _timed(work, device)
        if _timed(work, device) >= _MATMUL_S or size >= _MAX_MATMUL:
            return work, 2.0 * size**3
        size *= 2


def copy_work(device: torch.device) -> tuple[Callable[[], object], float]:
    """Return a copy larger than caches, and the bytes that it reads and writes."""
    source = torch.ones(_COPY_BYTES, dtype=torch.uint8, device=device)
    return partial(torch.zeros_like(source).copy_, source), 2.0 * _COPY_BYTES


def _measure_links(rank: Rank, options: MeasureOptions) -> None:
    """Measure all ordered pairs, one after the other; each source leaves its record."""
    pairs = [(a, b) for a in range(rank.num_ranks) for b in range(rank.num_ranks) if a != b]
    budget_s = options.pair_budget_s(rank.num_ranks)
    done = 0
    for index, (source, target) in enumerate(pairs):
        if rank.rank not in (source, target):
            continue
        for before in range(done, index):
            one, other = pairs[before]
            what = f"waiting for ranks {one} and {other} to measure their link"
            rank.await_mark(f"pair/{before}", one, what, rank.limit_s + 4 * budget_s)
        done = index
        if rank.rank == source:
            rank.report(f"link {index + 1} of {len(pairs)}: {source} to {target}")
            record = _ping(rank, target, options.sizes_bytes, budget_s)
            rank.put(f"link/{source}/{target}", write_record(record))
            rank.put(f"pair/{index}")
        else:
            _answer(rank, source, options.sizes_bytes[-1])
    rank.meet("after measuring links")


def _ping(rank: Rank, target: int, sizes: Sequence[int], budget_s: float) -> LinkRecord:
    """Send messages of all sizes that the budget allows, and time the answers.

    The first message of each size only says how long the next will take. It also opens TCP's
    window; from then on the largest messages come first in each round, so that it stays open.
    There are more rounds, up to three times the budget, while fastest messages still get faster.
    """
    buffer = rank.tensor(sizes[-1])
    probe: list[float] = []
    for size in sizes:
        probe.append(min(_burst(rank, target, buffer[:size], 1)))
        if probe[-1] > budget_s / 4 and size > 1024:
            break
    kept = sizes[: len(probe)]
    share_s = budget_s / len(kept)
    repeats = [
        # Latency hangs on the fastest of the short ones, which a busy machine may delay.
        max(1, min(_MAX_REPEATS, int(share_s * (2 if size <= 1024 else 1) / took)) // _ROUNDS)
        for size, took in zip(kept, probe, strict=True)
    ]
    times: list[list[float]] = [[] for _ in kept]
    begin, is_stable = time.perf_counter(), False
    for turn in range(_MAX_ROUNDS):
        if turn >= _ROUNDS and (is_stable or time.perf_counter() - begin > _PATIENCE * budget_s):
            break
        is_stable = True
        for index in reversed(range(len(kept))):
            new = _burst(rank, target, buffer[: kept[index]], repeats[index])
            is_stable &= bool(times[index]) and min(new) > _STABLE * min(times[index])
            times[index] += new
    _say(rank, target, 0, 0)
    return LinkRecord(
        source=rank.rank,
        target=target,
        sizes_bytes=tuple(kept),
        round_trips_s=tuple(tuple(row) for row in times),
    )


def _say(rank: Rank, target: int, size: int, repeats: int) -> None:
    rank.send(torch.tensor([size, repeats], dtype=torch.int64, device=rank.device), target)


def _burst(rank: Rank, target: int, message: Tensor, repeats: int) -> list[float]:
    """Return the round trips of some equal messages."""
    answer = rank.tensor(1)
    _say(rank, target, len(message), repeats)
    rank.receive(None, answer, target)
    times = []
    for _ in range(repeats):
        posted = rank.post(answer, target)
        begin = time.perf_counter()
        rank.send(message, target)
        rank.receive(posted, answer, target)
        times.append(time.perf_counter() - begin)
    return times


def _answer(rank: Rank, source: int, largest: int) -> None:
    """Answer messages until the source says that there are no more."""
    buffer, answer = rank.tensor(largest), rank.tensor(1)
    header = torch.zeros(2, dtype=torch.int64, device=rank.device)
    while True:
        rank.receive(None, header, source)
        size, repeats = (int(value) for value in header.tolist())
        if repeats == 0:
            return
        message = buffer[:size]
        posted = rank.post(message, source)
        rank.send(answer, source)
        for index in range(repeats):
            rank.receive(posted, message, source)
            posted = rank.post(message, source) if index + 1 < repeats else None
            rank.send(answer, source)


def _measure_reductions(rank: Rank, options: MeasureOptions) -> list[ReduceRecord]:
    """Return the collectives over the first 2, 4, 8, ... and over all ranks, as rank 0 saw them.

    They are all-reduces; with NCCL, whose others do not follow from them, all of ``COLLECTIVES``.
    """
    kinds = tuple(COLLECTIVES) if rank.backend == "nccl" else ("all_reduce",)
    counts = [2**k for k in range(1, 32) if 2**k < rank.num_ranks]
    counts += [rank.num_ranks] if rank.num_ranks > 1 else []
    records = []
    for members in counts:
        rank.report(f"all-reduce over {members} ranks")
        with rank._waiting(f"making a group of {members} ranks"):  # noqa: SLF001 (of this module)
            group = dist.new_group(
                list(range(members)), timeout=timedelta(seconds=rank.limit_s), backend=rank.backend
            )
        if rank.rank < members:
            records += [_reduce(rank, group, members, options, kind) for kind in kinds]
        rank.meet(f"after all-reduces over {members} ranks")
    return records


def _all_gather(value: Tensor, other: Tensor, group: dist.ProcessGroup) -> dist.Work | None:
    part = value[: len(value) // group.size()]
    work: dist.Work | None = dist.all_gather_into_tensor(other, part, group=group, async_op=True)
    return work


def _reduce_scatter(value: Tensor, other: Tensor, group: dist.ProcessGroup) -> dist.Work | None:
    part = other[: len(value) // group.size()]
    work: dist.Work | None = dist.reduce_scatter_tensor(part, value, group=group, async_op=True)
    return work


def _all_to_all(value: Tensor, other: Tensor, group: dist.ProcessGroup) -> dist.Work | None:
    work: dist.Work | None = dist.all_to_all_single(other, value, group=group, async_op=True)
    return work


NCCL_SIZES_BYTES = (16 * 2**20, 64 * 2**20, 256 * 2**20)
"""Further sizes of collectives between GPUs, whose links need long messages to be busy."""
COLLECTIVES: Mapping[str, Callable[[Tensor, Tensor, dist.ProcessGroup], dist.Work | None]] = {
    "all_reduce": lambda value, _, group: dist.all_reduce(value, group=group, async_op=True),
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "all_to_all": _all_to_all,
}
"""How each collective is begun on a tensor, with another of its size to write into."""


def _reduce(
    rank: Rank, group: dist.ProcessGroup, members: int, options: MeasureOptions, kind: str
) -> ReduceRecord:
    rows = []
    sizes = options.reduce_sizes_bytes
    if rank.backend == "nccl":
        sizes += tuple(size for size in NCCL_SIZES_BYTES if size > sizes[-1])
    for size in sizes:
        # A multiple of the members, so that each has a part of the same size.
        count = max(1, size // 4) if kind == "all_reduce" else -(-size // (4 * members)) * members
        value = torch.ones(count, dtype=torch.float32, device=rank.device)
        other = value if kind == "all_reduce" else torch.empty_like(value)
        work = partial(rank.collective, kind, value, other, group)
        work()
        took = _timed(work, rank.device)
        key = f"{kind}/{members}/{size}"
        if rank.rank == 0:
            repeats = max(3, min(_MAX_REPEATS, int(options.reduce_s / max(took, 1e-6))))
            rank.put(key, str(repeats))
        repeats = int(rank.take(key, 0))
        row = []
        for _ in range(repeats):
            value.fill_(1.0)
            row.append(_timed(work, rank.device))
        rows.append(tuple(row))
    return ReduceRecord(kind=kind, num_ranks=members, sizes_bytes=sizes, seconds=tuple(rows))
