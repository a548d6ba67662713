"""Every published plan, evaluated by ``partita.objectives`` and compared with its record.

    python benchmarks/objectives.py [--check] [--json]

Data from ``$PARTITA_SHARED/data``, else ``../shared/data`` beside the repository. ``--check`` exits
with 1 when a number is missed and with 4 when the data is absent. Tolerances are relative: 1e-9 for
numbers recorded with all digits, 5e-6 for those with six. A family of rows can be limited to some
inputs; none named = all.
"""

import gzip
import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from _harness import load_script, run_benchmark, shared_data

from partita.core.cluster import Cluster, Device, Host, Level
from partita.core.graph import Graph
from partita.core.plan import Plan
from partita.core.problem import Metric, Problem
from partita.formats.baechi import read_baechi, read_placement
from partita.formats.dnn_partitioning import read_dnn_partitioning, read_split
from partita.formats.dynamicml import read_assignment, read_dynamicml
from partita.formats.pipedream import read_pipedream, read_pipedream_plan
from partita.formats.piper import read_piper, read_piper_plan
from partita.objectives.makespan import makespan_parallel, makespan_sequential
from partita.objectives.pipedream import pipedream_time
from partita.objectives.piper import piper_time
from partita.objectives.repaired import pipedream_repaired_time
from partita.objectives.sharding import sharding_cost
from partita.objectives.tarnawski import max_load, single_sample_latency
from partita.objectives.value import Value

FULL, SIX = 1e-9, 5e-6
MS = 1e3
GIB = 2.0**30

# Values of PipeDream's repaired objective for its own plans where they differ from its prediction
# (recorded runs, last column; six digits). Elsewhere in that table the two are equal.
REPAIRED_S = {
    "vgg16__n8x4_b10_1": 0.0615004,
    "vgg16__n8x8_b10_1": 0.0409276,
    "resnet18__n4x4_b10_1": 0.0485127,
    "resnet18__n8x4_b10_1": 0.030859,
    "resnet18__n8x8_b10_1": 0.0173613,
    "squeezenet1_0__n16_b1": 0.0238879,
    "squeezenet1_0__n32_b1": 0.0119439,
    "squeezenet1_0__n4x4_b10_1": 0.0207514,
    "resnet50__n4x4_b10_1": 0.0852477,
    "resnet50__n8x4_b10_1": 0.0558461,
    "resnet50__n8x8_b10_1": 0.0314551,
    "resnext50__n4x4_b10_1": 0.0947914,
    "resnet101__n16_b1": 0.10276,
    "resnet101__n4x4_b10_1": 0.0963478,
    "gnmt__n64_b1": 0.0251658,
    "gnmt__n8x8_b10_1": 0.0257434,
}
# inception_v3 after compress_branches (recorded runs): seconds and replicas.
COMPRESSED = {
    "compressed_inception__n4_b1": (0.227279, "1,2,1"),
    "compressed_inception__n4_b10": (0.174613, "3,1"),
    "compressed_inception__n8_b10": (0.0872430, "3,2,1,1,1"),
}


class Row(NamedTuple):
    """A number and its record.

    Attributes:
        source: File of the record.
        case: Which of its rows.
        expected: The recorded number; NaN = this row cannot be evaluated.
        found: Our number.
        tolerance: Relative difference allowed.
        note: Why the row cannot be evaluated, or what else differs; empty = nothing.
    """

    source: str
    case: str
    expected: float
    found: float = math.nan
    tolerance: float = FULL
    note: str = ""

    @property
    def evaluable(self) -> bool:
        """Whether there is a plan to evaluate."""
        return not math.isnan(self.expected)

    @property
    def error(self) -> float:
        """Relative difference."""
        if self.found == self.expected:
            return 0.0
        return abs(self.found - self.expected) / max(abs(self.expected), 1e-300)

    @property
    def missed(self) -> bool:
        """Whether the number is beyond its tolerance, or something else differs."""
        return self.evaluable and (not self.error <= self.tolerance or bool(self.note))


def read_json(path: Path) -> Any:
    """Return the content of a JSON file, packed or not."""
    if path.suffix == ".gz":
        return json.loads(gzip.decompress(path.read_bytes()))
    return json.loads(path.read_text())


class PipeDreamRun(NamedTuple):
    """Options of a recorded run, as its ``cfg`` has them: ``n4x4_b10_1_noacr``."""

    units: list[int]
    bandwidths: list[float]
    options: list[str]

    @property
    def num_devices(self) -> int:
        """Devices of the cluster."""
        return math.prod(self.units)

    @property
    def compression(self) -> float | None:
        """Activation compression ratio."""
        return None if "noacr" in self.options else 1.0


def pipedream_run(cfg: str) -> PipeDreamRun:
    """Return the options that a configuration name stands for."""
    words = cfg.split("_")
    units = [int(unit) for unit in words[0].removeprefix("n").split("x")]
    rates = words[1 : 1 + len(units)]
    bandwidths = [float(rate.removeprefix("b")) * 1e9 for rate in rates]
    return PipeDreamRun(units, bandwidths, words[1 + len(units) :])


def pipedream_cluster(run: PipeDreamRun) -> Cluster:
    """Return the cluster of a run: one level, or servers."""
    each = run.units[0]
    hosts = run.num_devices // each
    memory = 16e9 if "mem16" in run.options else math.inf
    levels = [("host", np.repeat(np.arange(hosts), each)), ("rack", np.zeros(hosts * each, int))]
    return Cluster(
        hosts=tuple(Host(name=f"host{host}") for host in range(hosts)),
        devices=tuple(
            Device(name=f"host{host}/gpu{gpu}", host=host, memory_bytes=memory)
            for host in range(hosts)
            for gpu in range(each)
        ),
        levels=tuple(
            Level(name=name, group_of=groups, bandwidth_bytes_per_s=np.full(groups.max() + 1, rate))
            for (name, groups), rate in zip(levels, run.bandwidths, strict=False)
        ),
    )


def pipedream_devices(plan: str) -> tuple[list[int], list[str]]:
    """Return the replicas of each stage, and the devices stage by stage.

    ``"3,1"`` is flat; ``"2x[3,1] | 1x[4]"`` has outer stages on 2 and 1 servers. Neighbours of a
    stage are on different servers, so that equal shares keep a microbatch in its server.
    """
    replicas, devices = [], []
    host = 0
    for outer in plan.split(" | "):
        servers, _, inner = outer.rpartition("x")
        count, first = int(servers or 1), 0
        for number in [int(word) for word in inner.strip("[]").split(",")]:
            replicas.append(count * number)
            devices += [
                f"host{host + server}/gpu{first + gpu}"
                for gpu in range(number)
                for server in range(count)
            ]
            first += number
        host += count
    return replicas, devices


def pipedream_case(data: Path, tag: str, graph: Graph | None, plan: str) -> tuple[Problem, Plan]:
    """Return a recorded run; the graph is the plan's own file where ``None``."""
    run = pipedream_run(tag.split("__")[1])
    text = (data / "pipedream/plans" / tag / f"gpus={run.num_devices}.txt").read_text()
    graph = read_pipedream(text) if graph is None else graph
    replicas, devices = pipedream_devices(plan)
    return (
        Problem(graph=graph, cluster=pipedream_cluster(run)),
        read_pipedream_plan(text, graph, replicas=replicas, devices=devices),
    )


def pipedream_rows(data: Path, models: Sequence[str] = ()) -> Iterator[Row]:
    """Yield PipeDream's predictions, and the repaired objective of the same plans.

    A repeated run has no record of its own: its plan must have the value of the first.
    """
    runs = read_json(data / "pipedream/answers.json")
    optima = exact_optima(data)
    graphs: dict[str, Graph] = {}
    for run in runs:
        model, tag = run["model"], run["tag"]
        if "T" not in run or (models and model not in models):
            continue
        if model not in graphs:
            graphs[model] = read_pipedream(
                (data / "pipedream/profiles" / model / "graph.txt").read_text()
            )
        options = pipedream_run(run["cfg"])
        case = pipedream_case(data, tag, graphs[model], run["plan"])
        value = pipedream_time(*case, compression=options.compression)
        yield Row(
            "pipedream/answers.json", tag, run["T"], value.value, note="; ".join(value.errors)
        )
        if not options.options:
            expected = REPAIRED_S.get(tag, run["T"])
            repaired = pipedream_repaired_time(*case).value
            yield Row("recorded runs (T_E)", tag, expected, repaired, SIX)
            if tag in optima:
                # No plan is better than the best one: only a smaller value is an error.
                bound = min(repaired, optima[tag])
                yield Row("pipedream/exact_E.txt (bound)", tag, optima[tag], bound, SIX)
        for path in sorted((data / "pipedream/plans").glob(f"{tag}__rep*")):
            again = pipedream_case(data, path.name, graphs[model], run["plan"])
            yield Row("pipedream/plans/*__rep*", path.name, run["T"], pipedream_time(*again).value)
    for tag, (expected, plan) in COMPRESSED.items() if not models else ():
        value = pipedream_time(*pipedream_case(data, tag, None, plan))
        yield Row("recorded runs (compressed)", tag, expected, value.value, SIX)


def exact_optima(data: Path) -> dict[str, float]:
    """Return the proven optima of the repaired objective on flat clusters, by tag."""
    found = {}
    for line in (data / "pipedream/exact_E.txt").read_text().splitlines():
        words = line.split()
        if "exact" in words:
            model, devices, rate = words[0], words[4], float(words[6]) / 1e9
            found[f"{model}__n{devices}_b{rate:g}"] = float(words[8].removeprefix("E="))
    return found


def split_rows(data: Path, cases: Sequence[str] = ()) -> Iterator[Row]:
    """Yield max-load and latency of the splits, against the scorer and against the records."""
    scorer = load_script(data, "evaluate")
    folder = data / "dnn-partitioning"
    for answer in read_json(folder / "answers.json"):
        case = answer["case"]
        if cases and not any(word in case for word in cases):
            continue
        text = (folder / f"{case}.json").read_text()
        latency = case.startswith("latency")
        metric = Metric.SINGLE_SAMPLE_LATENCY if latency else Metric.MAX_LOAD
        problem = read_dnn_partitioning(text, metric=metric)
        for path in sorted((folder / "plans").glob(f"{case.replace('/', '_')}.*.json")):
            measure = single_sample_latency if latency else max_load
            score = scorer.score_latency if latency else scorer.score_throughput
            value = measure(problem, read_split(path.read_text(), problem))
            scored = score(json.loads(text), json.loads(path.read_text()))
            record = answer["best" if path.stem.endswith("best") else "dp_plan"]
            key = "latency" if latency else "max_load"
            note = _split_note(value, scored, record)
            found = value.value * MS
            yield Row("dnn-partitioning/evaluate.py", path.stem, scored[key], found, note=note)
            yield Row("dnn-partitioning/answers.json", path.stem, record[key], found)


def _split_note(value: Value, *records: dict[str, Any]) -> str:
    """Return which of the other figures of a score differ."""
    ours = dict(value.details)
    if value.metric is Metric.MAX_LOAD:
        ours["diffmaxima"] = ours["diffmaxima_s"] * MS
    else:
        ours["nodes_on_cpu"] = ours["ops_on_cpu"]
    keys = [*("diffmaxima", "contiguous", "acyclic_quotient", "devices")]
    keys += ["pieces", "accelerators", "nodes_on_cpu"]
    wrong = {
        key
        for record in records
        for key in keys
        if key in record and not math.isclose(ours[key], record[key], rel_tol=FULL)
    }
    if bool(value.errors) != bool(records[0]["errors"]):
        wrong.add("errors")
    return f"differs in {', '.join(sorted(wrong))}" if wrong else ""


def piper_rows(data: Path, inputs: Sequence[str] = ()) -> Iterator[Row]:
    """Yield Piper's times per sample."""
    texts: dict[str, str] = {}
    for answer in read_json(data / "piper/answers.json"):
        name = answer["input"]
        if answer["tps"] < 0 or (inputs and name not in inputs):
            continue
        if name not in texts:
            texts[name] = (data / "piper" / name).read_text()
        problem = read_piper(
            texts[name],
            devices=answer["k"],
            memory_bytes=answer["memGiB"] * GIB,
            microbatches=answer["mbs"],
            bandwidth_bytes_per_s=25 * GIB,
        )
        plan = read_piper_plan(json.dumps({"stages": answer["stages"]}), problem)
        value = piper_time(problem, plan)
        case = f"{answer['case']} {answer['mode']}".strip()
        note = "; ".join(value.errors)
        yield Row("piper/answers.json", case, answer["tps"], value.value, note=note)


def sharding_rows(data: Path, instances: Sequence[str] = ()) -> Iterator[Row]:
    """Yield DynamicMLTrainer's sharding costs."""
    source = "dynamicml/answers.json"
    folder = data / "dynamicml"
    for answer in read_json(folder / "answers.json"):
        if instances and answer["instance"] not in instances:
            continue
        problem = read_dynamicml((folder / f"{answer['instance']}.json").read_text())
        text = (folder / f"plan_{answer['plan']}.json").read_text()
        value = sharding_cost(problem, read_assignment(text, problem))
        parts = [(value.details[key], answer[key]) for key in ("variance", "cross_edge")]
        same = all(math.isclose(ours, theirs, rel_tol=FULL, abs_tol=FULL) for ours, theirs in parts)
        note = "; ".join([*value.errors, *([] if same else ["its two sums differ"])])
        yield Row(source, answer["plan"], answer["metric"], value.value, note=note)


def baechi_graph(data: Path, name: str) -> str:
    """Return the text of a Baechi graph."""
    path = data / "baechi/graphs" / f"{name}.json"
    if path.exists():
        return path.read_text()
    return gzip.decompress(path.with_suffix(".json.gz").read_bytes()).decode()


def parallel_rows(data: Path, graphs: Sequence[str] = ()) -> Iterator[Row]:
    """Yield Baechi's makespans with parallel channels, with the memory used."""
    plans = read_json(data / "baechi/plans.json.gz")
    for name in ("answers.json", "dummy_results.json", "real_model_results.json"):
        for answer in read_json(data / "baechi" / name):
            if "makespan" not in answer or (graphs and answer["graph"] not in graphs):
                continue
            case = _baechi_case(answer)
            record = answer if "placement" in answer else plans.get(answer.get("case"))
            if record is None:
                yield Row(f"baechi/{name}", case, math.nan, note="its placement was not kept")
                continue
            memory = float(answer["memory_limit"]) if "memory_limit" in answer else None
            problem = read_baechi(
                baechi_graph(data, answer["graph"]),
                devices=answer.get("n_devices"),
                memory_bytes=memory,
            )
            text = json.dumps({key: record[key] for key in ("placement", "order")})
            value = makespan_parallel(problem, read_placement(text, problem))
            note = _memory_note(value, answer)
            yield Row(f"baechi/{name}", case, answer["makespan"], value.value * MS, note=note)


def _baechi_case(answer: dict[str, Any]) -> str:
    keys = ("graph", "algo", "solver", "n_devices", "mem_mode", "mem_factor", "threshold")
    return " ".join(str(answer[key]) for key in keys if answer.get(key) not in {None, "", "-"})


def _memory_note(value: Value, answer: dict[str, Any]) -> str:
    """Return what of the memory differs; m-TOPO with a cap is known to break the limit."""
    used = value.details["used_bytes"]
    for device, expected in answer.get("device_used", {}).items():
        if not math.isclose(used.get(f"host0/gpu{device}", 0.0), expected, rel_tol=FULL):
            return f"used_bytes of device {device} differ"
    return "; ".join(value.errors) if answer["algo"] != "topo" else ""


def sequential_rows(data: Path, graphs: Sequence[str] = ()) -> Iterator[Row]:
    """Yield Baechi's makespans with sequential channels.

    Ops are committed by recorded start; ties by id. That is the placer's own order on the dummy
    graphs, inception and transformer. On the layered graphs it commits ops that start later first,
    and the record does not say which.
    """
    name = "tf_sequential_results.json"
    for answer in read_json(data / "baechi" / name):
        if graphs and answer["graph"] not in graphs:
            continue
        case = _baechi_case(answer)
        if answer["graph"].startswith("layered"):
            yield Row(f"baechi/{name}", case, math.nan, note="the order of commitment is not kept")
            continue
        problem = read_baechi(
            baechi_graph(data, answer["graph"]), devices=answer["n_devices"], memory_bytes=1e15
        )
        start = answer["start"]
        order = sorted(range(len(start)), key=lambda op: (start[op], op))
        text = json.dumps({"placement": answer["placement"], "order": order})
        value = makespan_sequential(
            problem, read_placement(text, problem), per_edge=answer["tensor_names"] == "per edge"
        )
        yield Row(f"baechi/{name}", case, answer["makespan"], value.value * MS)


FAMILIES = (pipedream_rows, split_rows, piper_rows, sharding_rows, parallel_rows, sequential_rows)


def summary(rows: Sequence[Row]) -> dict[str, Any]:
    """Return the figures: rows checked, missed and not evaluable, and the worst error, by file."""
    by_source: dict[str, list[Row]] = {}
    for row in rows:
        by_source.setdefault(row.source, []).append(row)
    files = {}
    for source, found in by_source.items():
        checked = [row for row in found if row.evaluable]
        files[source] = {
            "checked": len(checked),
            "missed": sum(row.missed for row in checked),
            "not_evaluable": len(found) - len(checked),
            "worst_error": max((row.error for row in checked), default=0.0),
            "tolerance": max((row.tolerance for row in checked), default=FULL),
        }
    return {
        "files": files,
        "checked": sum(row.evaluable for row in rows),
        "missed": [
            f"{row.source}: {row.case}: {row.found!r}, not {row.expected!r} {row.note}".strip()
            for row in rows
            if row.missed
        ],
        "not_evaluable": [f"{r.source}: {r.case}: {r.note}" for r in rows if not r.evaluable],
    }


def print_summary(figures: dict[str, Any]) -> None:
    """Print the figures for people."""
    print(f"{'record':44} {'rows':>5} {'missed':>6} {'skipped':>7} {'worst':>8} {'allowed':>8}")
    for source, file in figures["files"].items():
        counts = f"{file['checked']:5} {file['missed']:6} {file['not_evaluable']:7}"
        print(f"{source:44} {counts} {file['worst_error']:8.1e} {file['tolerance']:8.0e}")
    for line in figures["not_evaluable"]:
        print(f"not evaluable: {line}")


def measure() -> tuple[dict[str, Any], list[str]]:
    """Compare every row of every family."""
    data = shared_data()
    figures = summary([row for family in FAMILIES for row in family(data)])
    print_summary(figures)
    rows = {source: file["checked"] for source, file in figures["files"].items()}
    counts = {"checked": figures["checked"], "not_evaluable": len(figures["not_evaluable"])}
    return {**counts, "rows": rows}, figures["missed"]


if __name__ == "__main__":
    run_benchmark(__doc__.split("\n")[0], measure)
