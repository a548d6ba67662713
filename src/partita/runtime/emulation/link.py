"""A network link with a rate and a delay, between two network namespaces of this machine.

Each namespace has one TUN device; a relay process moves IP packets between the two. A packet leaves
when the ones before it have left at the given rate, and arrives the delay later; the two directions
are independent. This works below TCP, so programs need not know of it, and needs no ``netem``,
which many kernels lack. It does need root, ``/dev/net/tun`` and iproute2's ``ip``.

The relay owns the namespaces: it makes them, and removes them with every process that still runs
inside when the caller leaves, or dies in any way (the relay's stdin closes then). Nothing but these
namespaces is touched, and no packet leaves them.
"""

import ctypes
import errno
import fcntl
import os
import select
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import NamedTuple, NoReturn

from partita.errors import InvalidInputError, UnsupportedError, WorkerError
from partita.processes import run_soon

INTERFACE = "partita0"
_ADDRESSES = ("198.18.0.1", "198.18.0.2")  # RFC 2544: kept for measurements, routed nowhere
_TUN = Path("/dev/net/tun")
_TUNSETIFF = 0x400454CA
_IFF_TUN_NO_PI = 0x1001
_CLONE_NEWNET = 0x40000000
_COMMAND_LIMIT_S = 10.0
_STOP_LIMIT_S = 10.0
_READ_AHEAD = 64
_QUEUE_BYTES = 64 * 2**20
_serial = count()


class Namespace(NamedTuple):
    """One end of an emulated link.

    Attributes:
        name: Name of the network namespace, as ``ip netns`` has it.
        address: Its IPv4 address on the link.
        interface: Its interface on the link, for ``GLOO_SOCKET_IFNAME``.
    """

    name: str
    address: str
    interface: str

    def command(self, *arguments: str) -> list[str]:
        """Return a command line that runs a program inside the namespace."""
        return ["ip", "netns", "exec", self.name, *arguments]

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkShape:
    """How an emulated link behaves, the same in both directions.

    Attributes:
        rate_bytes_per_s: Rate of IP packets, headers included.
        delay_s: One-way delay.
        mtu_bytes: Largest IP packet.
    """

    rate_bytes_per_s: float
    delay_s: float = 0.0
    mtu_bytes: int = 9000

    def __post_init__(self) -> None:
        if not 1e3 <= self.rate_bytes_per_s <= 1e12:
            raise InvalidInputError(
                f"rate of a link is {self.rate_bytes_per_s}; expected 1e3 to 1e12 bytes/s"
            )
        if not 0 <= self.delay_s <= 10:
            raise InvalidInputError(f"delay of a link is {self.delay_s}; expected 0 to 10 s")
        if not 576 <= self.mtu_bytes <= 65_535:
            raise InvalidInputError(f"MTU of a link is {self.mtu_bytes}; expected 576 to 65535")


def why_unavailable() -> str | None:
    """Return why links cannot be emulated here, or None if they can."""
    if not sys.platform.startswith("linux"):
        return "emulating links needs Linux"
    if os.geteuid() != 0:
        return "emulating links needs root"
    if shutil.which("ip") is None:
        return "emulating links needs the command ip; install iproute2"
    if not _TUN.exists():
        return f"emulating links needs {_TUN}"
    name = f"partita-try-{os.getpid()}-{next(_serial)}"
    try:
        _ip("netns", "add", name)
        _ip("netns", "delete", name)
    except UnsupportedError as exc:
        return str(exc)
    return None


@contextmanager
def emulated_link(
    rate_bytes_per_s: float,
    delay_s: float = 0.0,
    *,
    mtu_bytes: int = 9000,
    start_limit_s: float = 30.0,
) -> Iterator[tuple[Namespace, Namespace]]:
    """Join two new network namespaces by a link, and remove them at the end.

    Processes that still run inside at the end are killed.

    Args:
        rate_bytes_per_s: Rate in each direction, of IP packets with their headers.
        delay_s: One-way delay.
        mtu_bytes: Largest IP packet; small ones cost the relay more processor time.
        start_limit_s: How long the relay may take to start.

    Raises:
        UnsupportedError: Links cannot be emulated here.
        WorkerError: The relay did not start, or died while the link was in use.
    """
    shape = LinkShape(rate_bytes_per_s=rate_bytes_per_s, delay_s=delay_s, mtu_bytes=mtu_bytes)
    reason = why_unavailable()
    if reason is not None:
        raise UnsupportedError(reason)
    stem = f"partita-{os.getpid()}-{next(_serial)}"
    ends = tuple(
        Namespace(f"{stem}{side}", address, INTERFACE)
        for side, address in zip("ab", _ADDRESSES, strict=True)
    )
    with ExitStack() as stack:
        log = stack.enter_context(tempfile.TemporaryFile("w+"))
        relay = _start_relay(stem, shape, log.fileno())
        stack.callback(_stop_relay, relay, stem)
        _await_ready(relay, log.fileno(), start_limit_s)
        yield ends[0], ends[1]
        if relay.poll() is not None:
            raise WorkerError(
                f"the relay of link {stem} died while in use, exit code {relay.returncode}: "
                f"{_tail(log.fileno())}"
            )


def _start_relay(stem: str, shape: LinkShape, log: int) -> subprocess.Popen[bytes]:
    figures = (repr(shape.rate_bytes_per_s), repr(shape.delay_s), str(shape.mtu_bytes))
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "partita.runtime.emulation.link", stem, *figures],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=log,
        bufsize=0,
        start_new_session=True,  # an interrupt of the caller must not end the link before its user
    )


def _await_ready(relay: subprocess.Popen[bytes], log: int, limit_s: float) -> None:
    assert relay.stdout is not None
    ready, _, _ = select.select([relay.stdout], [], [], limit_s)
    if not ready:
        raise WorkerError(f"the relay of an emulated link was not ready after {limit_s:g} s")
    if relay.stdout.read(1) != b"+":
        raise WorkerError(f"the relay of an emulated link did not start: {_tail(log)}")


def _stop_relay(relay: subprocess.Popen[bytes], stem: str) -> None:
    """End the relay, which removes the namespaces; remove them here if it is gone already."""
    assert relay.stdin is not None
    assert relay.stdout is not None
    relay.stdin.close()
    try:
        relay.wait(_STOP_LIMIT_S)
    except subprocess.TimeoutExpired:
        relay.kill()
        relay.wait()
    relay.stdout.close()
    _remove_namespaces(stem)


def _tail(log: int) -> str:
    size = os.fstat(log).st_size
    return os.pread(log, 400, max(0, size - 400)).decode(errors="replace").strip() or "no message"


def _ip(*arguments: str) -> str:
    """Run iproute2 and return what it prints."""
    try:
        result = subprocess.run(
            ["ip", *arguments],
            capture_output=True,
            text=True,
            timeout=_COMMAND_LIMIT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as exc:
        raise UnsupportedError(f"ip {' '.join(arguments)}: {exc}") from exc
    if result.returncode:
        raise UnsupportedError(f"ip {' '.join(arguments)}: {result.stderr.strip()}")
    return result.stdout


def _remove_namespaces(stem: str) -> None:
    """Kill what runs in both namespaces of a link and delete them; those gone already are fine."""
    spared = {os.getpid(), os.getppid()}
    for name in (f"{stem}a", f"{stem}b"):
        if not Path("/run/netns", name).exists():
            continue
        with suppress(UnsupportedError):
            for word in _ip("netns", "pids", name).split():
                if int(word) not in spared:
                    with suppress(ProcessLookupError):
                        os.kill(int(word), signal.SIGKILL)
        with suppress(UnsupportedError):
            _ip("netns", "delete", name)


def enter_namespace(name: str) -> None:
    """Move this thread, and the processes it starts from now on, into a network namespace.

    Raises:
        UnsupportedError: There is no such namespace, or this process may not enter it.
    """
    path = Path("/run/netns", name)
    try:
        with path.open("rb") as file:
            _set_namespace(file.fileno())
    except OSError as exc:
        raise UnsupportedError(f"cannot enter network namespace {name!r}: {exc}") from exc


def _set_namespace(descriptor: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(descriptor, _CLONE_NEWNET) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


def _open_tun(namespace: str, address: str, mtu_bytes: int) -> int:
    """Make a namespace with a TUN device that is up, and return the device's descriptor."""
    _ip("netns", "add", namespace)
    with Path("/proc/self/ns/net").open("rb") as home:
        enter_namespace(namespace)
        try:
            descriptor = os.open(_TUN, os.O_RDWR | os.O_NONBLOCK)
            request = struct.pack("16sH22x", INTERFACE.encode(), _IFF_TUN_NO_PI)
            fcntl.ioctl(descriptor, _TUNSETIFF, request)
        finally:
            _set_namespace(home.fileno())
    inside = ("-n", namespace)
    _ip(*inside, "link", "set", "lo", "up")
    _ip(*inside, "addr", "add", f"{address}/30", "dev", INTERFACE)
    # A long queue, so that TCP's bursts wait for the relay instead of being dropped.
    _ip(*inside, "link", "set", INTERFACE, "mtu", str(mtu_bytes), "txqueuelen", "10000", "up")
    return descriptor


class Direction:
    """Packets on their way from one device to the other."""

    def __init__(self, shape: LinkShape) -> None:
        self._shape = shape
        self._free_s = 0.0
        self._queued_bytes = 0
        self._waiting: deque[tuple[float, bytes]] = deque()

    def take(self, packet: bytes, now_s: float) -> bool:
        """Put a packet on the link; return False where its queue is full and the packet is lost."""
        if self._queued_bytes + len(packet) > _QUEUE_BYTES:
            return False
        self._free_s = max(now_s, self._free_s) + len(packet) / self._shape.rate_bytes_per_s
        self._waiting.append((self._free_s + self._shape.delay_s, packet))
        self._queued_bytes += len(packet)
        return True

    def due(self, now_s: float) -> Iterator[bytes]:
        """Yield the packets that have arrived by now, in order."""
        while self._waiting and self._waiting[0][0] <= now_s:
            packet = self._waiting.popleft()[1]
            self._queued_bytes -= len(packet)
            yield packet

    @property
    def next_s(self) -> float:
        """When the next packet arrives; ``inf`` if there is none."""
        return self._waiting[0][0] if self._waiting else float("inf")


def _relay(descriptors: tuple[int, int], shape: LinkShape, owner: int) -> None:
    """Move packets between two devices until the owner's pipe closes."""
    ways = (
        (descriptors[0], descriptors[1], Direction(shape)),
        (descriptors[1], descriptors[0], Direction(shape)),
    )
    sources = [*descriptors, owner]
    while True:
        now_s = time.monotonic()
        wait_s = min(1.0, *(max(0.0, way.next_s - now_s) for _, _, way in ways))
        ready, _, _ = select.select(sources, [], [], wait_s)
        if owner in ready and not os.read(owner, 1):
            return
        for source, target, way in ways:
            if source in ready:
                _take_packets(source, way, shape.mtu_bytes)
            for packet in way.due(time.monotonic()):
                _deliver(target, packet)


def _deliver(target: int, packet: bytes) -> None:
    """Hand a packet to a device; one with a full queue, or that is down, loses it."""
    try:
        os.write(target, packet)
    except OSError as exc:
        if exc.errno not in (errno.EAGAIN, errno.EIO):
            raise


def _take_packets(source: int, way: Direction, mtu_bytes: int) -> None:
    with suppress(BlockingIOError):
        for _ in range(_READ_AHEAD):
            packet = os.read(source, mtu_bytes)
            way.take(packet, time.monotonic())


def _stop(number: int, frame: object) -> NoReturn:
    """End by an exception, so that the namespaces are removed."""
    del frame
    raise SystemExit(128 + number)


def run_relay(arguments: list[str]) -> None:
    """Make a link, say ``+`` on stdout, relay until stdin closes, remove the link.

    Args:
        arguments: Stem of the namespaces' names, rate, delay, MTU.
    """
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, _stop)
    run_soon()
    stem, rate, delay, mtu = arguments
    shape = LinkShape(rate_bytes_per_s=float(rate), delay_s=float(delay), mtu_bytes=int(mtu))
    try:
        first = _open_tun(f"{stem}a", _ADDRESSES[0], shape.mtu_bytes)
        second = _open_tun(f"{stem}b", _ADDRESSES[1], shape.mtu_bytes)
        os.write(1, b"+")
        _relay((first, second), shape, 0)
    finally:
        _remove_namespaces(stem)


if __name__ == "__main__":
    run_relay(sys.argv[1:])
