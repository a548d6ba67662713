"""Documents: every type comes back as it was, and broken texts are refused with one error."""

import copy
import json
import random
from dataclasses import replace
from typing import Any

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from partita.core.cluster import Cluster, Device, Dvfs, Host, Level, LinkMatrix
from partita.core.codec import decode, encode, read_json, write_json
from partita.core.graph import (
    DTYPE_BYTES,
    CostOrigin,
    DeviceKind,
    EdgeTable,
    Graph,
    Labels,
    OpCosts,
    OpTable,
    ParameterTable,
    SampleUnit,
    TensorTable,
    VariantTable,
)
from partita.core.placement import placement_plan
from partita.core.plan import Plan, Shard, Stage
from partita.core.problem import Metric, Mode, Objective, Problem, Schedule
from partita.core.solution import Proof, Solution
from partita.core.timeline import Timeline, TimelineOrigin
from partita.cost.predict import simulate
from partita.errors import FormatError, PartitaError
from partita.program.lower import lower
from partita.testing.builders import flat_cluster, host_cluster, random_dag

quick = settings(
    derandomize=True,
    deadline=None,
    max_examples=60,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)

NAMES = st.text(min_size=1, max_size=6)
SECONDS = st.floats(0, 1e15)
SIZES = st.floats(0, 2.0**60)
RATES = st.floats(1e-3, 1e20)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=4) | st.floats(-1e9, 1e9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=5,
)
REMARKS = st.dictionaries(st.text(max_size=4), JSON, max_size=3)


def check_round_trip(value: object) -> None:
    """Check that an object survives both ways of its document, to the last bit of the text."""
    again = decode(encode(value))
    assert again == value
    text = write_json(value)
    assert read_json(text) == value
    assert write_json(read_json(text)) == text
    assert json.loads(text) == encode(value)


def rows(values: st.SearchStrategy[Any], count: int) -> st.SearchStrategy[Any]:
    """Return columns of a length: all equal, few different, or any values."""
    several = st.lists(values, min_size=count, max_size=count)
    return values.map(lambda value: [value] * count) | several


def unique(count: int) -> st.SearchStrategy[list[str]]:
    return st.lists(NAMES, min_size=count, max_size=count, unique=True)


@st.composite
def labels(draw: st.DrawFn, count: int) -> Labels:
    names = draw(st.lists(NAMES, max_size=3, unique=True))
    filled = draw(st.booleans())
    of = draw(rows(st.integers(-1, len(names) - 1), count)) if filled else []
    return Labels(names=names, of=np.array(of, dtype=np.int32))


@st.composite
def op_tables(draw: st.DrawFn, count: int) -> OpTable:
    saved = np.array(draw(rows(SIZES, count)), dtype=float)
    return OpTable(
        names=draw(unique(count)),
        fixed_share=draw(rows(st.floats(0, 1), count)),
        flops=draw(rows(st.floats(0, 1e27), count)),
        saved_bytes=saved,
        saved_fixed_bytes=saved * draw(st.sampled_from([0.0, 0.5, 1.0])),
        workspace_bytes=draw(SIZES),
        phase=draw(rows(st.integers(0, 1), count)),
        colocation=draw(rows(st.integers(-1, 3), count)),
        device_kinds=draw(rows(st.integers(1, 3), count)),
        types=draw(labels(count)),
        layers=draw(labels(count)),
        blocks=draw(labels(count)),
        modules=draw(labels(count)),
    )


@st.composite
def op_costs(draw: st.DrawFn, kind: str, count: int) -> OpCosts:
    backward = np.array(draw(rows(SECONDS, count)), dtype=float)
    part = draw(rows(st.sampled_from([float("nan"), 0.0, 0.25, 1.0]), count))
    return OpCosts(
        device_type=kind,
        origin=draw(st.sampled_from(CostOrigin)),
        forward_s=draw(rows(SECONDS, count)),
        backward_s=backward,
        backward_input_s=backward * np.array(part),
        peak_flop_per_s=draw(st.sampled_from([0.0, 1e12])),
        memory_bytes_per_s=draw(st.sampled_from([0.0, 1e11])),
    )


@st.composite
def parameter_tables(draw: st.DrawFn, num_ops: int) -> ParameterTable:
    count = draw(st.integers(0, 12))
    uses = draw(st.integers(0, 12)) if count else 0
    trainable = np.array(draw(rows(st.booleans(), count)), dtype=bool)
    return ParameterTable(
        names=draw(unique(count)),
        bytes=draw(rows(SIZES, count)),
        dtypes=tuple(draw(rows(st.sampled_from(sorted(DTYPE_BYTES)), count))),
        trainable=trainable,
        buffer=~trainable & draw(st.booleans()),
        use_op=draw(rows(st.integers(0, num_ops - 1), uses)),
        use_parameter=draw(rows(st.integers(0, max(count - 1, 0)), uses)),
    )


@st.composite
def variant_tables(draw: st.DrawFn, num_ops: int) -> VariantTable:
    keys = st.tuples(st.integers(0, num_ops - 1), st.integers(1, 4), st.booleans())
    chosen = draw(st.lists(keys, max_size=10, unique=True))
    count = len(chosen)
    synced = draw(rows(st.integers(0, 2), count))
    pointers = np.concatenate([[0], np.cumsum(synced)]).astype(np.int32)
    return VariantTable(
        op=[op for op, _, _ in chosen],
        tp=[tp for _, tp, _ in chosen],
        recompute=[recompute for _, _, recompute in chosen],
        forward_s=draw(rows(SECONDS, count)),
        saved_bytes=draw(rows(SIZES, count)),
        sync_in_ptr=pointers,
        sync_in_bytes=draw(rows(SIZES, int(pointers[-1]))),
    )


@st.composite
def graphs(draw: st.DrawFn) -> Graph:
    """Return graphs of up to 12 ops, with any columns, labels, costs, parameters and variants."""
    count = draw(st.integers(1, 12))
    tensors = draw(st.integers(0, 14))
    producer = np.array(draw(rows(st.integers(-1, count - 1), tensors)), dtype=np.int32)
    sizes = np.array(draw(rows(SIZES, tensors)), dtype=float)
    pairs = st.tuples(st.integers(0, max(tensors - 1, 0)), st.integers(0, count - 1))
    edges = [
        (tensor, reader)
        for tensor, reader in (draw(st.lists(pairs, max_size=20)) if tensors else [])
        if producer[tensor] < reader
    ]
    kinds = draw(st.lists(NAMES | st.just(""), min_size=1, max_size=3, unique=True))
    return Graph(
        name=draw(NAMES),
        ops=draw(op_tables(count)),
        costs=tuple(draw(op_costs(kind, count)) for kind in kinds),
        tensors=TensorTable(
            names=draw(unique(tensors)),
            producer=producer,
            bytes=sizes,
            fixed_bytes=sizes * draw(st.sampled_from([0.0, 0.5])),
            transfer_s=draw(rows(SECONDS | st.just(float("nan")), tensors)),
            differentiable=draw(rows(st.booleans(), tensors)),
            load_s=draw(rows(SECONDS, tensors)),
        ),
        edges=EdgeTable(tensor=[t for t, _ in edges], reader=[r for _, r in edges]),
        parameters=draw(parameter_tables(count)),
        variants=draw(variant_tables(count)),
        outputs=draw(rows(st.integers(0, max(tensors - 1, 0)), draw(st.integers(0, tensors)))),
        loss=draw(st.integers(-1, tensors - 1)),
        batch_size=draw(st.integers(1, 2**31 - 1)),
        sample_unit=draw(st.sampled_from(SampleUnit)),
        tokens_per_sample=draw(st.integers(0, 2**31 - 1)),
        dtype=draw(st.sampled_from(sorted(DTYPE_BYTES))),
        annotations=draw(REMARKS),
    )


@st.composite
def devices(draw: st.DrawFn, name: str, num_hosts: int) -> Device:
    return Device(
        name=name,
        host=draw(st.integers(0, num_hosts - 1)),
        kind=draw(st.sampled_from(DeviceKind)),
        type=draw(st.text(max_size=4)),
        memory_bytes=draw(st.floats(1, 1e15) | st.just(float("inf"))),
        speed=draw(st.floats(1e-3, 1e3)),
        peak_flop_per_s=draw(st.dictionaries(NAMES, RATES, max_size=2)),
        memory_bytes_per_s=draw(SIZES),
        clocks_mhz=sorted(draw(st.sets(RATES, max_size=3))),
        idle_w=draw(st.floats(0, 1e4)),
        max_w=draw(st.floats(0, 1e4)),
        dvfs=Dvfs(full_w=draw(st.floats(0, 1e4)), knee=draw(st.floats(0, 0.9))),
        price_per_hour=draw(st.floats(0, 1e3) | st.just(float("nan"))),
    )


@st.composite
def clusters(draw: st.DrawFn) -> Cluster:
    """Return clusters with up to three levels, or with a matrix."""
    hosts = tuple(
        Host(name=name, cpus=draw(st.integers(0, 256)), memory_bytes=draw(st.floats(0, 1e15)))
        for name in draw(st.lists(NAMES, min_size=1, max_size=3, unique=True))
    )
    parts = tuple(draw(devices(name, len(hosts))) for name in draw(unique(draw(st.integers(1, 5)))))
    size, bandwidths = len(parts), RATES | st.just(float("inf"))
    if draw(st.booleans()):
        matrix = LinkMatrix(
            bandwidth_bytes_per_s=draw(rows(bandwidths, size**2)),
            latency_s=draw(rows(SECONDS, size**2)),
        )
        return Cluster(name=draw(NAMES), hosts=hosts, devices=parts, matrix=matrix)
    names = draw(st.lists(NAMES, min_size=1, max_size=3, unique=True))
    group_of, levels = list(range(size)), []
    for index, name in enumerate(names):
        last = index == len(names) - 1
        merge = [0 if last else draw(st.integers(0, group)) for group in range(size)]
        group_of = [merge[group] for group in group_of]
        groups = max(group_of) + 1
        levels.append(
            Level(
                name=name,
                group_of=group_of,
                bandwidth_bytes_per_s=draw(rows(bandwidths, groups)),
                latency_s=draw(rows(SECONDS, groups)),
                port_per_device=draw(st.booleans()),
            )
        )
    return Cluster(name=draw(NAMES), hosts=hosts, devices=parts, levels=levels)


@st.composite
def objectives(draw: st.DrawFn) -> Objective:
    mode = draw(st.sampled_from(Mode))
    fitting = [s for s in Schedule if (s is Schedule.INFERENCE) == (mode is Mode.INFERENCE)]
    count = st.none() | st.integers(1, 1_000_000)
    return Objective(
        metric=draw(st.sampled_from(Metric)),
        mode=mode,
        microbatches=draw(count),
        microbatch_size=draw(count),
        schedule=draw(st.none() | st.sampled_from(fitting)),
        memory_factor=draw(st.floats(1e-6, 1)),
        optimizer_bytes_per_element=draw(st.floats(0, 64)),
    )


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    """Return plans for no graph at all: any stages, replicas, ranks, shares and microbatches."""
    shards = st.sampled_from(Shard)
    stages, first = [], 0
    for _ in range(draw(st.integers(1, 12))):
        replicas, tp = draw(st.integers(1, 3)), draw(st.integers(1, 2))
        shared = draw(st.booleans()) and stages
        if shared:
            stages.append(draw(st.sampled_from(stages)))
            continue
        groups = tuple(tuple(first + r * tp + t for t in range(tp)) for r in range(replicas))
        share = draw(st.sampled_from([1, 2]))
        stages.append(Stage(devices=groups, shares=(share,) * replicas, shard=draw(shards)))
        first += replicas * tp
    count = len(stages)
    extra = draw(st.lists(st.integers(0, count - 1), max_size=12))
    turns = int(np.lcm.reduce([stage.round for stage in stages]))
    return Plan(
        fingerprint=draw(st.text(max_size=8)),
        devices=draw(unique(first)),
        stage_of=[*range(count), *extra],
        stages=stages,
        schedule=draw(st.sampled_from(Schedule)),
        microbatch_sizes=draw(rows(st.integers(1, 2**31 - 1), turns)),
        recompute=draw(rows(st.booleans(), count + len(extra))),
    )


@st.composite
def solved(draw: st.DrawFn) -> tuple[Problem, Plan]:
    """Return small problems with a placement that can be lowered and played."""
    rng = random.Random(draw(st.integers(0, 2**20)))
    graph = random_dag(draw(st.integers(2, 10)), rng)
    cluster = draw(
        st.sampled_from(
            [
                flat_cluster(2, bandwidth_bytes_per_s=1e3, memory_bytes=1e9),
                host_cluster(2, 2, inside_bytes_per_s=1e4, between_bytes_per_s=1e2),
            ]
        )
    )
    infers = draw(st.booleans())
    mode = Mode.INFERENCE if infers else Mode.TRAINING
    choices = [Schedule.GPIPE, Schedule.ONE_F_ONE_B, Schedule.ZERO_BUBBLE]
    plan = placement_plan(
        graph,
        cluster.device_names,
        np.array([rng.randrange(len(cluster)) for _ in range(len(graph))]),
        schedule=Schedule.INFERENCE if infers else draw(st.sampled_from(choices)),
        microbatch_sizes=np.array(draw(st.sampled_from([[1], [2, 1], [1, 1, 1]]))),
    )
    return Problem(graph=graph, cluster=cluster, objective=Objective(mode=mode)), plan


@quick
@given(graphs())
def test_every_graph_comes_back_equal_with_its_fingerprint(graph):
    check_round_trip(graph)
    assert read_json(write_json(graph)).fingerprint == graph.fingerprint


@quick
@given(clusters())
def test_every_cluster_comes_back_equal(cluster):
    check_round_trip(cluster)


@quick
@given(objectives())
def test_every_objective_comes_back_equal(objective):
    check_round_trip(objective)


@quick
@given(plans())
def test_every_plan_comes_back_equal(plan):
    check_round_trip(plan)


@quick
@given(graphs(), clusters(), objectives())
def test_every_problem_comes_back_equal(graph, cluster, objective):
    free = replace(graph, ops=replace(graph.ops, device_kinds=3))
    check_round_trip(Problem(graph=free, cluster=cluster, objective=objective))


@quick
@given(solved(), st.sampled_from(Proof), REMARKS, REMARKS, st.floats(0, 1))
def test_every_solution_comes_back_equal(case, proof, options, stats, share):
    problem, plan = case
    check_round_trip(
        Solution(
            problem=problem,
            plan=plan,
            metric=Metric.LATENCY,
            value=3.5,
            unit="s",
            lower_bound=3.5 * share,
            proof=proof,
            planner="some",
            options=options,
            stats=stats,
            alternatives=(plan, replace(plan, microbatch_sizes=[7])),
        )
    )


@quick
@given(solved())
def test_every_program_and_timeline_comes_back_equal(case):
    problem, plan = case
    program = lower(problem, plan)
    check_round_trip(program)
    timeline = simulate(problem, plan, program=program)
    check_round_trip(timeline)


@quick
@given(st.integers(0, 12), st.data())
def test_every_measured_timeline_comes_back_equal(count, data):
    draw = data.draw
    start = np.array(draw(rows(st.floats(0, 1e6), count)), dtype=float)
    check_round_trip(
        Timeline(
            origin=draw(st.sampled_from(TimelineOrigin)),
            devices=draw(unique(3)),
            device=draw(rows(st.integers(0, 2), count)),
            instruction=draw(rows(st.integers(0, 99), count)),
            kind=draw(rows(st.integers(0, 13), count)),
            stage=draw(rows(st.integers(-1, 5), count)),
            microbatch=draw(rows(st.integers(-1, 5), count)),
            peer=draw(rows(st.integers(-1, 2), count)),
            start_s=start,
            end_s=start + draw(st.floats(0, 9)),
            bytes=draw(rows(st.integers(0, 2**63 - 1), count)),
            clock_mhz=draw(rows(st.floats(0, 3000) | st.just(float("nan")), count)),
            energy_j=draw(rows(st.floats(0, 1e9) | st.just(float("nan")), count)),
            limit_bytes=draw(rows(st.floats(0, 1e12) | st.just(float("inf")), 3)),
            period_s=draw(st.floats(0, 1e6) | st.just(float("nan"))),
        )
    )


WRONG = (
    *(None, True, 0, 1, -1, 7, 2**31, 2**63, 10**20, 10**310, 1e308, 1.5, "", "x", "inf", [], {}),
    *([0], [None], [[]], ["a"], {"every": 0, "rows": 4}, {"every": None, "rows": 9}),
    *({"every": 1, "rows": 2**40}, {"distinct": [], "of": []}, {"a": 1}),
)


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return the path of every part of a document, of long lists only the first few."""
    keys: Any = ()
    if isinstance(value, dict | list):
        keys = value if isinstance(value, dict) else range(min(len(value), 3))
    return [path, *(place for key in keys for place in places(value[key], (*path, key)))]


def mutated(document: Any, changes: list[tuple[int, int]]) -> Any:
    """Return a document with parts replaced by wrong ones, or left out."""
    result = copy.deepcopy(document)
    for where, what in changes:
        found = places(result)
        *parents, last = found[1 + where % (len(found) - 1)]
        owner = result
        for key in parents:
            owner = owner[key]
        if what == len(WRONG):
            del owner[last]
        else:
            owner[last] = copy.deepcopy(WRONG[what])
        if not result or len(places(result)) == 1:
            break
    return result


def seeds() -> list[Any]:
    rng = random.Random(3)
    graph, cluster = (
        random_dag(10, rng),
        host_cluster(2, 2, inside_bytes_per_s=9, between_bytes_per_s=2),
    )
    problem = Problem(graph=graph, cluster=cluster)
    plan = placement_plan(graph, cluster.device_names, np.arange(10) % 4)
    solution = Solution(problem=problem, plan=plan, metric=Metric.LATENCY, value=1.0, unit="s")
    objects = (problem, plan, solution, lower(problem, plan), simulate(problem, plan))
    return [json.loads(write_json(value)) for value in objects]


SEEDS = seeds()
CHANGES = st.lists(
    st.tuples(st.integers(0, 10_000), st.integers(0, len(WRONG))), min_size=1, max_size=3
)


@settings(quick, max_examples=400)
@given(st.sampled_from(range(len(SEEDS))), CHANGES)
def test_a_document_with_wrong_parts_is_read_or_refused_and_nothing_else_happens(seed, changes):
    document = mutated(SEEDS[seed], changes)
    try:
        value = decode(document)
    except FormatError as exc:
        assert str(exc)  # noqa: PT017 (refusing is as good as reading)
        return
    check_round_trip(value)
    if isinstance(value, Solution):
        try:
            simulate(value.problem, value.plan)
        except PartitaError:
            return
    if isinstance(value, Timeline):
        try:
            assert len(value.critical_path) <= len(value)
        except PartitaError:
            return


@settings(quick, max_examples=200)
@given(JSON)
def test_any_json_value_is_refused(value):
    try:
        decode(value)
    except FormatError:
        return
    raise AssertionError("some JSON is a document by chance")


@settings(quick, max_examples=200)
@given(st.sampled_from(range(len(SEEDS))), st.integers(0, 10**6), st.text(max_size=3))
def test_a_text_that_is_cut_or_patched_is_read_or_refused(seed, place, patch):
    text = json.dumps(SEEDS[seed])
    place %= len(text)
    for wrong in (text[:place], text[:place] + patch + text[place + 1 :]):
        try:
            read_json(wrong)
        except FormatError:
            continue
