"""A study of a fleet: policies by loads by seeds, each simulated, measured and ranked.

With a power cap every run is made three times: without a cap, with the points of the jobs'
frontiers chosen under it, and with one limit for all. What a cap costs in throughput is taken
moment by moment, of the jobs that ran.

For the jobs that ran at a moment, the throughput kept is ``sum of gpus * share of full speed`` over
``sum of gpus``: with the points that the cap chose, and with one limit of the speed's share for
all. Both are taken of the same jobs, and the mean is over GPU seconds. What a whole run loses
differs from that: who runs longer also takes CPUs from others, which `Capped.held` counts.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np

from partita.core.columns import Flags, Longs, number_or_none
from partita.core.fleet import FleetHistory, Trace
from partita.errors import InvalidInputError
from partita.fleet.policies.metrics import Load, Metrics, by_kind, in_window, load_of, metrics_of
from partita.fleet.policies.power import choose_points, equal_limit
from partita.fleet.policies.resources import Servers
from partita.fleet.policies.table import policy_of
from partita.fleet.simulate.options import Rules
from partita.fleet.simulate.table import DEFAULT_SIMULATOR, Simulator, simulator_of
from partita.fleet.study.generated import at_load
from partita.workers import Workers


@dataclass(frozen=True, slots=True, kw_only=True)
class CapLoss:
    """Throughput lost under a cap, relative.

    Attributes:
        chosen: With points chosen job by job.
        equal: With one limit for all, for the same jobs.
    """

    chosen: float
    equal: float


def cap_loss(trace: Trace, history: FleetHistory, cap_w: float) -> CapLoss:
    """Return what a cap costs in a history that was simulated under it, with its leases."""
    held = lost = lost_equal = 0.0
    part_of = trace.sensitivity.astype(np.int64)
    seconds = history.usage.rounds * history.round_s
    for (jobs, gpus), span_s in zip(_running(history), seconds.tolist(), strict=True):
        if not len(jobs):
            continue
        asked = (trace.sensitivities, part_of[jobs], gpus, cap_w)
        held += span_s * float(gpus.sum())
        lost += span_s * float((gpus * (1 - choose_points(*asked)[0])).sum())
        lost_equal += span_s * float((gpus * (1 - equal_limit(*asked)[0])).sum())
    return (
        CapLoss(chosen=lost / held, equal=lost_equal / held)
        if held
        else CapLoss(chosen=0.0, equal=0.0)
    )


def _running(history: FleetHistory) -> list[tuple[Longs, Longs]]:
    """Return jobs and their GPUs in each stretch of a history."""
    leases, moments = history.leases, history.usage.start_s
    # A lease runs in the stretches from its start on that begin before its end.
    first = np.searchsorted(moments, leases.start_s - 1e-6)
    last = np.searchsorted(moments, leases.end_s - 1e-6)
    lengths = last - first
    rows = np.repeat(np.arange(len(leases)), lengths)
    offset = np.arange(len(rows)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    stretch = first[rows] + offset
    # A job on several servers has a lease on each: they count as one job.
    key = stretch.astype(np.int64) * len(history) + leases.job[rows]
    keys, of = np.unique(key, return_inverse=True)
    gpus = np.bincount(of.ravel(), weights=leases.gpus[rows], minlength=len(keys)).astype(np.int64)
    bounds = np.searchsorted(keys, np.arange(len(moments) + 1) * len(history))
    jobs = keys % len(history)
    return [
        (jobs[begin:end], gpus[begin:end])
        for begin, end in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True)
    ]


OnProgress = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What is to be simulated.

    Attributes:
        trace: The jobs.
        servers: The servers.
        policies: Orderings with allocators, such as ``"fifo:tune"``.
        loads: Jobs an hour of new Poisson arrivals; empty = arrivals as in the trace.
        rules: How our rounds are played.
        simulators: By whose rules, such as ``("ours", "released")``.
        window: First and last job id that count; ``None`` = all.
        seed: Of the arrivals.
        further: The jobs by further seeds, each of which is played, too.
    """

    trace: Trace
    servers: Servers
    policies: Sequence[str]
    loads: Sequence[float] = ()
    rules: Rules
    simulators: Sequence[str] = (DEFAULT_SIMULATOR,)
    window: tuple[int, int] | None = None
    seed: int = 1
    further: Mapping[int, Trace] = field(default_factory=dict)

    @property
    def traces(self) -> dict[int, Trace]:
        """The jobs of every seed."""
        return {self.seed: self.trace, **self.further}

    def __post_init__(self) -> None:
        for policy in self.policies:
            policy_of(policy)
        if len(set(self.policies)) < len(self.policies):
            raise InvalidInputError(f"a policy stands twice in {', '.join(self.policies)}")
        if self.window is not None:
            first, last = self.window
            ids = self.trace.job_id
            if not ((ids >= first) & (ids <= last)).any():
                raise InvalidInputError(
                    f"window {first}:{last} holds no job; ids go from {ids.min()} to {ids.max()}"
                )


@dataclass(frozen=True, kw_only=True, eq=False)
class Run:
    """One policy at one load with one seed.

    Attributes:
        policy: Ordering and allocator.
        load: Jobs an hour; NaN = arrivals of the trace.
        seed: Of the arrivals and all other draws.
        simulator: By whose rules.
        trace: The jobs that it was given; None where only the history is known.
        history: What became of them.
        counted: Which jobs count.
        metrics: Figures of the jobs that count.
        use: How busy the cluster was.
        kinds: Figures by class of jobs.
    """

    policy: str
    load: float
    seed: int
    simulator: Simulator
    trace: Trace | None
    history: FleetHistory
    counted: Flags
    metrics: Metrics
    use: Load
    kinds: Mapping[str, Metrics]

    @property
    def title(self) -> str:
        """The policy, with the rules where they are not ours."""
        return f"{self.policy}{self.simulator.suffix}"

    def to_json(self) -> dict[str, Any]:
        """Return the run as JSON values; what is not known is null."""
        return {
            "policy": self.policy,
            "rules": self.simulator.name,
            "load_per_hour": number_or_none(self.load),
            "seed": self.seed,
            "rounds": self.history.rounds,
            "events": self.history.events,
            **_metrics(self.metrics, self.simulator),
            "use": {name: _value(value) for name, value in asdict(self.use).items()},
            "classes": {
                kind: _metrics(found, self.simulator) for kind, found in self.kinds.items()
            },
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class OverSeeds:
    """One policy at one load, over all seeds.

    Attributes:
        title: The policy, with the rules where they are not ours.
        load: Jobs an hour; NaN = arrivals of the trace.
        means_s: Mean completion times by seed.
        wins: Seeds with which no other policy at this load was better.
    """

    title: str
    load: float
    means_s: Mapping[int, float]
    wins: int

    @property
    def mean_s(self) -> float:
        """The mean over seeds."""
        return sum(self.means_s.values()) / len(self.means_s)

    @property
    def deviation_s(self) -> float:
        """The standard deviation over seeds, of a sample."""
        return float(np.std(list(self.means_s.values()), ddof=1))

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON values."""
        return {
            "policy": self.title,
            "load_per_hour": number_or_none(self.load),
            "mean_s": number_or_none(self.mean_s),
            "deviation_s": number_or_none(self.deviation_s),
            "wins": self.wins,
            "means_s": {str(seed): number_or_none(mean) for seed, mean in self.means_s.items()},
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Capped:
    """What a power cap costs under a policy.

    Attributes:
        policy: Ordering and allocator.
        load: Jobs an hour; NaN = arrivals of the trace.
        seed: Of the arrivals and all other draws.
        cap_w: The cap.
        free_w: Highest power without it.
        peak_w: Highest power under it.
        equal_peak_w: The same with one limit of clocks for all.
        lost: Throughput lost under the cap, relative to the same jobs at full speed.
        equal_lost: What one limit for all would lose, of the same jobs.
        held: How much more GPU time the whole run takes than without a cap, as a share of it.
        equal_held: The same with one limit for all.
        mean_s: Mean completion times: without a cap, with it, with one limit for all.
        energy_j: Energies, likewise.
    """

    policy: str
    load: float
    seed: int
    cap_w: float
    free_w: float
    peak_w: float
    equal_peak_w: float
    lost: float
    equal_lost: float
    held: float
    equal_held: float
    mean_s: tuple[float, float, float]
    energy_j: tuple[float, float, float]

    def to_json(self) -> dict[str, Any]:
        """Return the comparison as JSON values."""
        return {
            **{name: _value(value) for name, value in asdict(self).items() if name != "load"},
            "load_per_hour": number_or_none(self.load),
            "mean_s": [number_or_none(value) for value in self.mean_s],
            "energy_j": [number_or_none(value) for value in self.energy_j],
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Study:
    """All runs of a question, by load, seed, and then the best mean completion time first.

    Attributes:
        question: What was asked.
        runs: The runs.
        capped: What the power cap costs; empty without one.
    """

    question: Question
    runs: tuple[Run, ...]
    capped: tuple[Capped, ...] = ()

    @property
    def differences(self) -> list[str]:
        """Where the rules of those who are compared depart from ours, a line each."""
        found = {run.simulator.name: run.simulator.differences for run in self.runs}
        return [line for lines in found.values() for line in lines] if len(found) > 1 else []

    @property
    def over_seeds(self) -> tuple[OverSeeds, ...]:
        """Policies over all seeds, by load and then the best mean first; none with one seed."""
        if not self.question.further:
            return ()
        means: dict[tuple[float, str], dict[int, float]] = {}
        best: dict[tuple[float, int], float] = {}
        for run in self.runs:
            load, mean_s = _order(run.load), run.metrics.mean_s
            means.setdefault((load, run.title), {})[run.seed] = mean_s
            best[load, run.seed] = min(mean_s, best.get((load, run.seed), math.inf))
        found = [
            OverSeeds(
                title=title,
                load=load if self.question.loads else math.nan,
                means_s=by_seed,
                wins=sum(mean_s == best[load, seed] for seed, mean_s in by_seed.items()),
            )
            for (load, title), by_seed in means.items()
        ]
        return tuple(sorted(found, key=lambda each: (_order(each.load), each.mean_s)))


def study(
    question: Question,
    *,
    workers: Workers | None = None,
    on_progress: OnProgress = lambda _: None,
) -> Study:
    """Return the runs of a question.

    Args:
        question: What is asked.
        workers: What simulates; None = this process. The runs are the same.
        on_progress: Called with what goes on, often.

    Raises:
        InvalidInputError: A simulator has no such policy, or a rule does not fit.
        InfeasibleError: A job can never run.
    """
    cases = list(_cases(question))
    here = partial(_play, on_progress=on_progress)
    played = map(here, cases) if workers is None else workers.map(_play, cases)
    made: list[Run] = []
    for done, (case, history) in enumerate(zip(cases, played, strict=True), 1):
        on_progress(f"{case.words}: done, {done} of {len(cases)} simulations")
        made.append(_run(question, case, history))
    capped = [
        _capped(question, made[at : at + 3])
        for at, case in enumerate(cases)
        if case.is_asked and case.is_capped
    ]
    runs = [run for run, case in zip(made, cases, strict=True) if case.is_asked]
    seeds = list(question.traces)
    runs.sort(key=lambda run: (_order(run.load), seeds.index(run.seed), run.metrics.mean_s))
    return Study(question=question, runs=tuple(runs), capped=tuple(capped))


def _order(load: float) -> float:
    """Return where a load stands among others; arrivals of the trace have none."""
    return 0.0 if math.isnan(load) else load


@dataclass(frozen=True, kw_only=True, eq=False)
class _Case:
    """One simulation, with all that it needs, so that any process can play it.

    Attributes:
        policy: Ordering and allocator.
        load: Jobs an hour; NaN = arrivals of the trace.
        seed: Of the arrivals and all other draws.
        simulator: By whose rules, by name.
        trace: The jobs.
        servers: The servers.
        rules: How rounds are played; None = the simulator's own.
        is_seeded: Whether there are several seeds.
        is_asked: Whether it is one of the runs, or only what one is compared with.
        is_capped: Whether two more follow, without a cap and with one limit of clocks for all.
    """

    policy: str
    load: float
    seed: int
    simulator: str
    trace: Trace
    servers: Servers
    rules: Rules | None
    is_seeded: bool = False
    is_asked: bool = True
    is_capped: bool = False

    @property
    def words(self) -> str:
        """What is played, for people."""
        words = self.policy if math.isnan(self.load) else f"{self.policy} at {self.load:g} jobs/h"
        return f"{words}, seed {self.seed}" if self.is_seeded else words


def _cases(question: Question) -> Iterator[_Case]:
    """Yield the simulations of a question; with a cap, each is followed by its comparisons."""
    for load, seed, trace in _loaded(question):
        for name in question.simulators:
            simulator = simulator_of(name)
            for policy in _policies(question, simulator):
                rules = _rules(question, simulator)
                cap = math.isfinite(question.rules.power_cap_w) and not simulator.fixed_rules
                case = _Case(
                    policy=policy,
                    load=load,
                    seed=seed,
                    simulator=name,
                    trace=trace,
                    servers=question.servers,
                    rules=replace(rules, record=True) if cap and rules else rules,
                    is_seeded=bool(question.further),
                    is_capped=cap,
                )
                yield case
                if cap:
                    free = replace(question.rules, power_cap_w=math.inf)
                    yield replace(case, rules=free, is_asked=False)
                    equal = replace(question.rules, equal_clocks=True)
                    yield replace(case, rules=equal, is_asked=False)


def _play(case: _Case, on_progress: OnProgress = lambda _: None) -> FleetHistory:
    """Simulate a case."""
    on_progress(case.words)
    return simulator_of(case.simulator).simulate(
        case.trace,
        case.servers,
        policy_of(case.policy),
        case.rules,
        lambda done, all_: on_progress(f"{case.words}: {done:,} of {all_:,} jobs"),
    )


def _policies(question: Question, simulator: Simulator) -> list[str]:
    """Return the policies; where several simulators are compared, those that one has."""
    if len(question.simulators) == 1:
        return list(question.policies)
    return [name for name in question.policies if simulator.knows(name)]


def _rules(question: Question, simulator: Simulator) -> Rules | None:
    """Return the rules to play by; in a comparison, one whose rules are fixed keeps its own."""
    return None if simulator.fixed_rules and len(question.simulators) > 1 else question.rules


def _loaded(question: Question) -> list[tuple[float, int, Trace]]:
    """Return the trace at each load with each seed; a seed gives all loads the same draws."""
    traces = question.traces.items()
    if not question.loads:
        return [(math.nan, seed, trace) for seed, trace in traces]
    return [
        (load, seed, at_load(trace, np.random.default_rng(seed), per_hour=load))
        for load in question.loads
        for seed, trace in traces
    ]


def _run(question: Question, case: _Case, history: FleetHistory) -> Run:
    """Return the figures of a case that was played."""
    chosen = np.ones(len(history), dtype=np.bool_)
    if question.window is not None:
        chosen = in_window(history, *question.window)
    return Run(
        policy=case.policy,
        load=case.load,
        seed=case.seed,
        simulator=simulator_of(case.simulator),
        trace=case.trace,
        history=history,
        counted=chosen,
        metrics=metrics_of(history, jobs=chosen),
        use=load_of(history),
        kinds=by_kind(history, chosen),
    )


def run_of(history: FleetHistory) -> Run:
    """Return the figures of a history that was read from a file, all of its jobs counted."""
    return Run(
        policy=history.policy,
        load=math.nan,
        seed=0,
        simulator=simulator_of(DEFAULT_SIMULATOR),
        trace=None,
        history=history,
        counted=np.ones(len(history), dtype=np.bool_),
        metrics=metrics_of(history),
        use=load_of(history),
        kinds=by_kind(history, np.ones(len(history), dtype=np.bool_)),
    )


def _capped(question: Question, played: Sequence[Run]) -> Capped:
    """Compare a run under a cap with none, and with one limit of clocks for all."""
    run, free, equal = played
    assert run.trace is not None  # it was simulated here
    three, rules = (free, run, equal), question.rules
    gpu_s = [float(each.history.attained_gpu_s.sum()) for each in three]
    lost = cap_loss(run.trace, run.history, rules.power_cap_w)
    means = tuple(each.metrics.mean_s for each in three)
    joules = tuple(each.metrics.energy_j for each in three)
    return Capped(
        policy=run.policy,
        load=run.load,
        seed=run.seed,
        cap_w=rules.power_cap_w,
        free_w=free.use.peak_w,
        peak_w=run.use.peak_w,
        equal_peak_w=equal.use.peak_w,
        lost=lost.chosen,
        equal_lost=lost.equal,
        held=1 - gpu_s[0] / gpu_s[1],
        equal_held=1 - gpu_s[0] / gpu_s[2],
        mean_s=(means[0], means[1], means[2]),
        energy_j=(joules[0], joules[1], joules[2]),
    )


def _metrics(found: Metrics, simulator: Simulator) -> dict[str, Any]:
    return {
        name: None if name in simulator.not_counted else _value(value)
        for name, value in asdict(found).items()
    }


def _value(value: Any) -> Any:  # noqa: ANN401 (a figure of any type)
    return number_or_none(value) if isinstance(value, float) else value
