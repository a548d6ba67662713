"""The client of an energy server for training loops, of ours or of any framework.

    client = EnergyClient(open_device("nvml", local_rank), rank=RankInfo(rank=3, pp_rank=3))
    client.connect("http://127.0.0.1:7787", job_id)      # leave out: measures only
    for batch in data:
        with client.step():
            for ...:
                with client.instruction("forward"):
                    ...
    client.close()

It sets the clock that the plan has for each instruction, notes time and energy, reports after every
``profile_steps`` steps, and takes a new plan between two steps. All talk with the server is that of
threads: a server that is slow, dead or wrong never stops a step; the last plan stays in force, and
that is said once. A plan of its profiling does not: it may have the lowest clocks, so that these go
back to the highest when the server has been silent for a step or two, until it answers again. One
rank of a job calls ``register_job`` and tells the others the name. ``ClockController`` sets the
clock of a device without holding up the step that asks for it.
"""

import atexit
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from partita.core.program import Kind
from partita.energy.client.counter import EnergyUse, Stamp, StepUse, Window, open_counter
from partita.energy.client.mailbox import PROFILING, Mailbox, RankPlan
from partita.energy.client.registration import RankInfo
from partita.energy.devices.protocol import PowerDevice, WorkingDevice
from partita.energy.frontier.clock_plan import NAMES, Entry
from partita.energy.policies.stragglers import Instruction, Sensitivity, SlowdownWatch
from partita.errors import PartitaError
from partita.http import split_address


class ClockController:
    """Sets clocks: at once where the device can, otherwise by a thread in which the latest wins.

    A device that refuses is left alone from then on; that is said once, and stops nothing.

    Attributes:
        current_mhz: The clock that is really set; 0 = none was.
    """

    def __init__(self, device: PowerDevice, say: Callable[[str], None]) -> None:
        """Take over a device.

        Args:
            device: The device.
            say: Called with the reason why clocks cannot be set.
        """
        self.current_mhz = 0
        self._device, self._say = device, say
        self._can_set = bool(device.clocks_mhz)
        self._wanted = 0
        self._changed = threading.Condition()
        self._stopped = False
        self._thread: threading.Thread | None = None

    def open(self) -> bool:
        """Set the highest clock, and return whether that could be done."""
        if self._can_set:
            self._set(self._device.clocks_mhz[0])
            self._wanted = self.current_mhz
        if self._can_set and not self._device.at_once:
            self._thread = threading.Thread(target=self._serve, daemon=True, name="clocks")
            self._thread.start()
            atexit.register(self._give_back)
        return self._can_set

    def request(self, mhz: int) -> None:
        """Ask for a clock; 0 = leave it as it is. Returns at once."""
        if not mhz or not self._can_set:
            return
        if self._thread is None:
            self._set(mhz)
            return
        with self._changed:
            self._wanted = mhz
            self._changed.notify()

    def close(self) -> None:
        """Stop, and give the clocks back."""
        if self._thread is not None:
            with self._changed:
                self._stopped = True
                self._changed.notify()
            self._thread.join()
            atexit.unregister(self._give_back)
        self._give_back()

    def _give_back(self) -> None:
        try:
            self._device.reset()
        except Exception as exc:  # noqa: BLE001 (a driver's error must not end a run that is done)
            self._say(f"{self._device.name}: the clocks could not be given back: {exc}")

    def _serve(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(
                    lambda: self._stopped or self._wanted != self.current_mhz or not self._can_set
                )
                if self._stopped or not self._can_set:
                    return
                wanted = self._wanted
            self._set(wanted)

    def _set(self, mhz: int) -> None:
        if mhz == self.current_mhz:
            return
        try:
            self._device.set_clock(mhz)
        except PartitaError as exc:
            self._can_set = False
            self._say(f"{exc}; clocks are left alone from now on")
        else:
            self.current_mhz = mhz


_LOG = logging.getLogger("partita.energy")
_NEVER = Stamp(0.0)
_NOT_COMPUTED = (NAMES[Kind.LOAD], NAMES[Kind.UPDATE])
"""Instructions that say little about how fast a device computes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientOptions:
    """How a client measures.

    Attributes:
        profile_steps: Steps after which results are reported.
        silence_steps: Steps that may begin while a server that profiles is silent; with the next
            one its clocks are put aside.
        silence_s: Seconds that it may be silent in any case, however short steps are.
        back_to_back: Whether a step lasts until the next one begins, so that the time in which a
            rank waits for the others at its end counts; for loops that do nothing in between.
        sensitivity: When this rank is a straggler.
        keep_log: Whether all instructions and readings are kept for files.
        clock: Tells the time, in seconds.
        synchronize: Waits until the device has done what it was given; called around instructions.
        peers: Called with this rank's slowdown when it is one, returns those of the others.
        say: Called with what goes wrong, once.
    """

    profile_steps: int = 5
    silence_steps: int = 1
    silence_s: float = 1.0
    back_to_back: bool = False
    sensitivity: Sensitivity = field(default_factory=Sensitivity)
    keep_log: bool = False
    clock: Callable[[], float] = time.perf_counter
    synchronize: Callable[[], None] = lambda: None
    peers: Callable[[float], Sequence[float]] = lambda _: ()
    say: Callable[[str], None] = _LOG.warning


class EnergyClient:
    """Sets clocks and measures, instruction by instruction."""

    def __init__(
        self,
        device: PowerDevice,
        *,
        rank: RankInfo | None = None,
        options: ClientOptions | None = None,
    ) -> None:
        """Take over a device; its clock is set to the highest.

        Args:
            device: The device.
            rank: This process in its job.
            options: How to measure.
        """
        self._device, self._rank = device, rank or RankInfo()
        self._options = options = options or ClientOptions()
        self._remarks: list[str] = []
        self._controller = ClockController(device, self._say)
        self._counter = open_counter(device, options.clock, keep_log=options.keep_log)
        self._epoch_s = time.time() - options.clock()
        self._watch = SlowdownWatch(options.sensitivity)
        self._mailbox: Mailbox | None = None
        self._plan = RankPlan()
        self._measured = _Measured(self._plan)
        self._step = _Step()
        self._unread: deque[tuple[StepUse, Stamp, Stamp]] = deque()
        self._steps = count()
        self._silent_steps = 0
        self._uses: list[StepUse] = []
        self._windows: list[Window] = []
        self._can_set = self._controller.open()

    def connect(
        self,
        server_url: str,
        job_id: str | Callable[[], str],
        *,
        token: str | None = None,
        transport: Any = None,  # noqa: ANN401 (of httpx)
    ) -> None:
        """Take part in a job of a server from now on; returns at once.

        Args:
            server_url: The server.
            job_id: The job, as ``register_job`` has returned it; or what finds it, called by a
                thread until it does not raise a ``ServerError`` that may pass.
            token: The server's bearer token.
            transport: An ``httpx`` transport to use instead of the network.

        Raises:
            InvalidInputError: The address makes no sense.
            UnsupportedError: httpx is not installed.
        """
        if not self._can_set:
            self._say(
                f"{self._device.name}: its clocks cannot be set, so that energy server "
                f"{split_address(server_url)[0]} is not asked"
            )
            return
        self._mailbox = Mailbox(
            server_url,
            job_id,
            self._rank.rank,
            self._rank.body(self._device),
            say=self._say,
            token=token,
            transport=transport,
        )

    @property
    def plan(self) -> RankPlan:
        """The clock plan that is in force."""
        return self._plan

    @property
    def clock_mhz(self) -> int:
        """The clock that is set; 0 = none was."""
        return self._controller.current_mhz

    def on_step_begin(self) -> None:
        """Begin a step: a new plan counts from here on."""
        number, begin = next(self._steps), self._counter.stamp()
        if self._options.back_to_back and number:
            self._finish(begin)
        if isinstance(self._device, WorkingDevice):
            self._device.begin_step(number)
        self._take_newest_plan()
        self._step = _Step(number, iter(self._plan.entries), begin)

    def _take_newest_plan(self) -> None:
        """Let the newest plan count, unless it is one of a profiling that nobody goes on with."""
        newest = None if self._mailbox is None else self._mailbox.newest_plan()
        if self._mailbox is None or newest is None:
            return
        if self._is_deserted(self._mailbox.silence_s, newest):
            if self._plan.version is not None:
                self._plan = RankPlan()
                self._measured = _Measured(self._plan)
                self._controller.request(self._device.clocks_mhz[0])
                self._say(
                    "the energy server fell silent while it profiles; clocks are at their highest "
                    "until it answers"
                )
        elif newest.version != self._plan.version:
            self._plan = newest.after(self._plan)
            self._measured = _Measured(newest)

    def _is_deserted(self, silence_s: float, plan: RankPlan) -> bool:
        """Return whether a step begins under a plan of a profiling that nobody goes on with."""
        self._silent_steps = self._silent_steps + 1 if silence_s else 0
        if plan.state != PROFILING or silence_s <= self._options.silence_s:
            return False
        return silence_s == math.inf or self._silent_steps > self._options.silence_steps

    def on_instruction_begin(self, name: str) -> None:
        """Begin an instruction: its clock is asked for, its time begins."""
        self._options.synchronize()
        self._controller.request(self._step.clock_for(name, self._plan, self._say))
        self._step.open = self._counter.stamp()

    def on_instruction_end(self, name: str) -> None:
        """End the instruction that was begun last."""
        self._options.synchronize()
        step, clock_mhz = self._step, self._controller.current_mhz
        step.windows.append(Window(name, step.open, self._counter.stamp(), clock_mhz))
        step.computed += name not in _NOT_COMPUTED
        if name not in _NOT_COMPUTED and step.computed == self._watch.early:
            slowdown = self._watch.suspect(_times(step.windows))
            if slowdown >= self._options.sensitivity.slow:
                self._announce(slowdown)

    def on_step_end(self) -> None:
        """End a step: results are reported when there are enough."""
        step, end = self._step, self._counter.stamp()
        step.end, step.slowdown = end, self._observe(step.windows)
        if not self._options.back_to_back:
            self._finish(end)

    def _finish(self, end: Stamp) -> None:
        """Take note of a step that is over, and report it with others."""
        step, plan = self._step, self._plan
        seconds = end.time_s - step.begin.time_s
        use = StepUse(step.number, seconds, None, plan.since, plan.state, step.slowdown)
        self._unread.append((use, step.begin, end))
        self._read_steps(end.time_s - 2 * self._device.resolution_s)
        if self._options.keep_log:
            self._windows.extend(step.windows)
        if self._mailbox is None or plan.version is None:
            return
        measured = self._measured
        measured.steps.append((step.begin, end, step.windows))
        if len(measured.steps) >= self._options.profile_steps:
            self._mailbox.report(self._result, measured, 2 * self._device.resolution_s)
            self._measured = _Measured(plan)

    def _read_steps(self, until_s: float = math.inf) -> None:
        """Read the counter for the steps that ended by then: it may know them later only."""
        while self._unread and self._unread[0][2].time_s <= until_s:
            use, begin, end = self._unread.popleft()
            self._uses.append(use._replace(joules=self._counter.used_j(begin, end)))

    @contextmanager
    def step(self) -> Iterator[None]:
        """Be within a step."""
        self.on_step_begin()
        yield
        self.on_step_end()

    @contextmanager
    def instruction(self, name: str) -> Iterator[None]:
        """Be within an instruction."""
        self.on_instruction_begin(name)
        yield
        self.on_instruction_end(name)

    def close(self) -> EnergyUse:
        """Stop all threads, give the clocks back, and return what was used."""
        if self._options.back_to_back and self._step.number >= 0:
            self._finish(self._step.end)
        if self._mailbox is not None:
            self._mailbox.close()
        self._controller.close()
        self._counter.close()
        self._read_steps()
        return EnergyUse(
            device=self._device.name,
            origin=self._device.origin,
            steps=self._uses,
            windows=self._windows,
            readings=self._counter.readings if self._options.keep_log else [],
            epoch_s=self._epoch_s,
            remarks=self._remarks,
        )

    def _say(self, text: str) -> None:
        self._remarks.append(text)
        self._options.say(text)

    def _observe(self, windows: Sequence[Window]) -> float:
        """Look for a slowdown in a step that is over, and announce a new one; returns it."""
        slowdown = self._watch.observe(_times(windows))
        if slowdown >= self._options.sensitivity.slow or self._watch.announced > 1:
            self._announce(slowdown)
        return slowdown

    def _announce(self, slowdown: float) -> None:
        """Tell the peers of a slowdown, and announce it if it is news."""
        announced = self._watch.decide(slowdown, self._options.peers(slowdown))
        if announced is not None and self._mailbox is not None:
            self._mailbox.announce({"rank": self._rank.rank, "slowdown": announced})

    def _result(self, measured: "_Measured") -> dict[str, Any]:
        """Return results as the server takes them; called by the thread that sends them."""
        names = sorted({window.name for *_, windows in measured.steps for window in windows})
        windows_of = {
            name: [[w for w in windows if w.name == name] for *_, windows in measured.steps]
            for name in names
        }
        joules_of = {
            name: [[self._counter.used_j(w.begin, w.end) for w in step] for step in steps]
            for name, steps in windows_of.items()
        }
        iteration_j = [self._counter.used_j(begin, end) for begin, end, _ in measured.steps]
        return {
            "rank": self._rank.rank,
            "version": measured.plan.version,
            "iter_time": [end.time_s - begin.time_s for begin, end, _ in measured.steps],
            "iter_energy": None if None in iteration_j else iteration_j,
            "time_breakdown": {
                name: [[w.seconds for w in step] for step in steps]
                for name, steps in windows_of.items()
            },
            "energy_breakdown": {
                name: steps
                for name, steps in joules_of.items()
                if all(used is not None for step in steps for used in step)
            },
        }


def _times(windows: Sequence[Window]) -> list[tuple[Instruction, float]]:
    """Return what the computing instructions of a step are, clocks included, and their seconds."""
    return [
        (((place, w.name), w.clock_mhz), w.seconds)
        for place, w in enumerate(windows)
        if w.name not in _NOT_COMPUTED
    ]


@dataclass(slots=True)
class _Measured:
    """Steps that were measured under one plan and not reported yet."""

    plan: RankPlan
    steps: list[tuple[Stamp, Stamp, list[Window]]] = field(default_factory=list)


@dataclass(slots=True)
class _Step:
    """The step that is carried out."""

    number: int = -1
    entries: Iterator[Entry] = field(default_factory=lambda: iter(()))
    begin: Stamp = _NEVER
    end: Stamp = _NEVER
    open: Stamp = _NEVER
    windows: list[Window] = field(default_factory=list)
    slowdown: float = 1.0
    computed: int = 0
    is_lost: bool = False

    def clock_for(self, name: str, plan: RankPlan, say: Callable[[str], None]) -> int:
        """Return the clock that a plan has for the next instruction; 0 = leave it as it is.

        A plan for other instructions is left alone from there on to the end of the step.
        """
        if self.is_lost or name not in plan.names:
            return 0
        planned, mhz = next(self.entries, ("nothing", 0))
        if planned == name:
            return mhz
        self.is_lost = True
        if not plan.is_doubted:
            plan.is_doubted = True
            say(
                f"plan {plan.version} has {planned!r} where the step does {name!r}; the rest of "
                "each step keeps the clock that is set"
            )
        return 0
