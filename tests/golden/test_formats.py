"""Every published file is read, and comes back with the same nodes, edges and numbers.

Files: the shared data folder; its README says where they come from.
"""

import gzip
import json
import math
from pathlib import Path

import pytest

from partita.core.codec import read_json, write_json
from partita.core.problem import Metric
from partita.formats.baechi import read_baechi, read_placement, write_baechi, write_placement
from partita.formats.detect import FORMATS, detect_format, read_any, unpacked
from partita.formats.dnn_partitioning import (
    read_dnn_partitioning,
    read_split,
    write_dnn_partitioning,
    write_split,
)
from partita.formats.dynamicml import (
    read_assignment,
    read_dynamicml,
    write_assignment,
    write_dynamicml,
)
from partita.formats.pipedream import (
    read_pipedream,
    read_pipedream_plan,
    stage_ids,
    write_pipedream,
    write_pipedream_plan,
)
from partita.formats.piper import read_piper, read_piper_plan, write_piper, write_piper_plan
from partita.formats.server_file import (
    open_beside,
    read_server_file,
    server_profiles,
    write_server_file,
)

GIB = 2.0**30


def text_of(path):
    return unpacked(path.read_bytes()).decode()


def same_numbers(a, b):
    """Return whether two JSON values agree, numbers to the last bit but one."""
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same_numbers(a[key], b[key]) for key in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(map(same_numbers, a, b))
    if isinstance(a, int | float):
        return math.isclose(a, b, rel_tol=2.3e-16)
    return a == b


def comes_back(text, read, write):
    """Check the round trip of one JSON file, and return the problem."""
    problem = read(text)
    written = write(problem)
    assert same_numbers(json.loads(text), json.loads(written))
    assert write(read(written)) == written
    return problem


def lines_of(text):
    """Return the nodes of a profile without their numbers, and the edges into each in order."""
    nodes, edges = [], {}
    for line in text.strip().splitlines():
        if line.startswith("\t"):
            source, target = line.strip().split(" -- ")
            edges.setdefault(target, []).append(source)
        else:
            nodes.append(tuple(line.split(" -- ")[:2]))
    return nodes, edges


def profiles(shared_data):
    found = sorted(shared_data.glob("*pipedream/**/*.txt"))
    return [path for path in found if "forward_compute_time=" in path.read_text()]


def test_every_profile_and_stage_file_comes_back(shared_data):
    files = profiles(shared_data)
    exact = 0
    for path in files:
        text = path.read_text()
        graph = read_pipedream(text, name=path.stem)
        written = write_pipedream(graph)
        assert lines_of(written) == lines_of(text), path
        assert read_pipedream(written, name=path.stem) == graph
        assert write_pipedream(read_pipedream(written)) == written
        exact += written == text
    # Nine older profiles write "8.000" for "8.0", three hand-made files end in a line break.
    assert (len(files), exact) == (125, 113)


def test_lists_of_activations_come_back(shared_data):
    text = (shared_data / "pipedream/profiles/gnmt/graph.txt").read_text()
    assert text.count("activation_size=[") == 7
    assert write_pipedream(read_pipedream(text)) == text


@pytest.mark.parametrize(
    ("model", "ops", "edges", "total_ms", "parameter_mb"),
    [
        ("alexnet", 22, 22, 85.3, 244.4),
        ("vgg16", 40, 40, 672.5, 553.4),
        ("resnet50", 176, 192, 443.4, 102.2),
        ("gnmt", 45, None, 89.4, 775.1),
        ("nasnetalarge", 1250, 1467, 658.3, 369.0),
    ],
)
def test_sums_of_the_profiles_are_those_of_the_specification(
    shared_data, model, ops, edges, total_ms, parameter_mb
):
    graph = read_pipedream((shared_data / "pipedream/profiles" / model / "graph.txt").read_text())
    assert len(graph) == ops
    assert edges is None or (graph.edge_source >= 0).sum() == edges
    total_s = (graph.forward_s + graph.backward_s).sum()
    assert 1000 * total_s == pytest.approx(total_ms, abs=0.06)
    assert graph.parameters.bytes.sum() / 1e6 == pytest.approx(parameter_mb, abs=0.06)


def test_every_stage_file_is_a_plan_of_its_profile(shared_data):
    files = sorted(shared_data.glob("pipedream/plans/*/gpus=*.txt"))
    for path in files:
        profile = shared_data / "pipedream/profiles" / path.parent.name.split("__")[0] / "graph.txt"
        graph = read_pipedream((profile if profile.exists() else path).read_text())
        plan = read_pipedream_plan(path.read_text(), graph)
        written = write_pipedream_plan(graph, plan)
        assert read_pipedream_plan(written, graph) == plan
        ids = stage_ids(read_pipedream(path.read_text()))
        assert len(plan) == len(set(ids.tolist()))
    assert len(files) == 109


def test_recorded_replicas_make_plans(shared_data):
    rows = json.loads((shared_data / "pipedream/answers.json").read_text())
    counted = 0
    for row in rows:
        if "T" not in row or "x" in row["cfg"].split("_")[0]:
            continue
        folder = shared_data / "pipedream/plans" / row["tag"]
        graph = read_pipedream(
            (shared_data / "pipedream/profiles" / row["model"] / "graph.txt").read_text()
        )
        replicas = [int(count) for count in str(row["plan"]).strip("[]").split(",")]
        (path,) = folder.glob("gpus=*.txt")
        plan = read_pipedream_plan(path.read_text(), graph, replicas=replicas)
        assert [stage.num_replicas for stage in plan.stages] == replicas
        counted += 1
    assert counted == 77


@pytest.mark.parametrize(
    ("name", "types", "hosts", "devices"),
    [
        ("test_server", ["TitanV", "TitanXP"], 1, 4),
        ("mink_1srv", ["TitanV", "TitanXP"], 1, 4),
        ("mink_2srv", ["TitanV", "TitanXP", "RTX"], 2, 8),
        ("mink_3srv", ["TitanV", "TitanXP", "RTX"], 3, 12),
    ],
)
def test_server_files_come_back_with_their_profiles(shared_data, name, types, hosts, devices):
    path = shared_data / f"sparsepipedream/{name}.txt"
    opener = open_beside(str(path), lambda file: Path(file).read_text())
    problem = read_server_file(path.read_text(), opener)
    assert [costs.device_type for costs in problem.graph.costs] == types
    assert (len(problem.cluster.hosts), len(problem.cluster)) == (hosts, devices)
    assert write_server_file(problem) == path.read_text()
    written = server_profiles(problem)
    assert read_server_file(path.read_text(), written.__getitem__) == problem
    for file, text in written.items():
        original = (path.parent / file).read_text()
        assert read_pipedream(text) == read_pipedream(original)
        assert text == original or name == "test_server"


def test_every_input_of_dnn_partitioning_comes_back(shared_data):
    files = sorted(shared_data.glob("dnn-partitioning/[tl]*/*Graphs/*.json"))
    for path in files:
        text = path.read_text()
        problem = comes_back(text, read_dnn_partitioning, write_dnn_partitioning)
        document = json.loads(text)
        assert problem.graph.ops.saved_bytes.tolist() == [n["size"] for n in document["nodes"]]
        assert sum(d.type == "accelerator" for d in problem.cluster.devices) == document["maxFPGAs"]
        assert read_json(write_json(problem)) == problem
    assert len(files) == 20


def test_every_split_places_the_ops_where_it_says(shared_data):
    counted = 0
    for path in sorted(shared_data.glob("dnn-partitioning/plans/*.json")):
        kind, level, case = path.name.split(".")[0].split("_", 2)
        metric = Metric.MAX_LOAD if kind == "throughput" else Metric.SINGLE_SAMPLE_LATENCY
        folder = shared_data / "dnn-partitioning" / kind / level
        problem = read_dnn_partitioning((folder / f"{case}.json").read_text(), metric=metric)
        check_split(path.read_text(), problem)
        counted += 1
    for path in sorted(shared_data.glob("dnn-partitioning/human-experts/*.json")):
        case = path.name.replace("_expert", "")
        file = shared_data / "dnn-partitioning/throughput/LayerGraphs" / case
        if file.exists():
            check_split(path.read_text(), read_dnn_partitioning(file.read_text()))
            counted += 1
    assert counted == 37


def check_split(text, problem):
    plan = read_split(text, problem)
    device_of = dict(
        zip(problem.graph.ops.names, [plan.devices[d] for d in plan.device_of], strict=True)
    )
    document = json.loads(text)
    for prefix, machines in (("acc", document["fpgas"]), ("cpu", document["cpus"])):
        for number, machine in enumerate(machines):
            for node in machine["nodes"]:
                assert device_of[str(node)] == f"{prefix}{number}"
    written = write_split(problem, plan)
    assert read_split(written, problem) == plan


@pytest.mark.parametrize(("name", "ops", "edges"), [("bert32a100", 37, 67), ("resnet", 177, 193)])
def test_inputs_of_piper_come_back(shared_data, name, ops, edges):
    problem = comes_back((shared_data / f"piper/{name}.json").read_text(), read_piper, write_piper)
    assert (len(problem.graph), len(problem.graph.edges)) == (ops, edges)
    assert read_json(write_json(problem)) == problem


def test_every_recorded_plan_of_piper_comes_back(shared_data):
    rows = json.loads((shared_data / "piper/answers.json").read_text())
    texts = {row["input"]: (shared_data / "piper" / row["input"]).read_text() for row in rows}
    counted = 0
    for row in rows:
        if not row["stages"]:
            continue
        problem = read_piper(
            texts[row["input"]],
            devices=row["k"],
            memory_bytes=row["memGiB"] * GIB,
            microbatches=row["mbs"],
            bandwidth_bytes_per_s=25 * GIB,
        )
        text = json.dumps({"stages": row["stages"]})
        plan = read_piper_plan(text, problem)
        written = json.loads(write_piper_plan(problem, plan))["stages"]
        for stage, other in zip(row["stages"], written, strict=True):
            assert sorted(stage["nodes"]) == sorted(other["nodes"])
            assert {**stage, "nodes": 0} == {**other, "nodes": 0}
        counted += 1
    assert counted == 114


def test_every_instance_of_dynamicml_comes_back_with_its_plans(shared_data):
    folder = shared_data / "dynamicml"
    instances = {
        path.stem: comes_back(path.read_text(), read_dynamicml, write_dynamicml)
        for path in sorted(folder.glob("*.json"))
        if not path.name.startswith(("plan_", "answers"))
    }
    assert len(instances) == 22
    rows = json.loads((folder / "answers.json").read_text())
    for row in rows:
        text = (folder / f"plan_{row['plan']}.json").read_text()
        problem = instances[row["instance"]]
        plan = read_assignment(text, problem)
        given = json.loads(text)["assignment"]
        assert plan.device_of.tolist() == [given[name] for name in problem.graph.ops.names]
        assert json.loads(write_assignment(problem, plan))["assignment"] == given
    assert len(rows) == 77


def test_every_cost_graph_of_baechi_comes_back(shared_data):
    files = sorted(shared_data.glob("baechi/graphs/*.json*"))
    for path in files:
        problem = comes_back(text_of(path), read_baechi, write_baechi)
        assert problem.graph.name == path.name.split(".")[0]
    assert len(files) == 10


def test_every_recorded_placement_of_baechi_comes_back(shared_data):
    rows = json.loads(gzip.decompress((shared_data / "baechi/plans.json.gz").read_bytes()))
    cases = [(("_").join(case.split("_")[:2]), row) for case, row in sorted(rows.items())]
    for name in ("dummy_results", "real_model_results"):
        recorded = json.loads((shared_data / f"baechi/{name}.json").read_text())
        cases += [(row["graph"], row) for row in recorded if "placement" in row]
    problems = {}
    for graph, row in cases:
        if graph not in problems:
            text = (shared_data / f"baechi/graphs/{graph}.json").read_text()
            problems[graph] = read_baechi(text, devices=8)
        problem = problems[graph]
        plan = read_placement(json.dumps(row), problem)
        assert plan.device_of.tolist() == row["placement"]
        written = write_placement(problem, plan)
        assert read_placement(written, problem) == plan
    assert len(cases) == 123


def test_every_file_is_known_by_its_content(shared_data):
    counted = dict.fromkeys(FORMATS, 0)
    for folder in (
        "pipedream",
        "sparsepipedream",
        "dnn-partitioning",
        "piper",
        "dynamicml",
        "baechi",
    ):
        for path in sorted((shared_data / folder).rglob("*")):
            skipped = "answers" in path.name or "results" in path.name or "plans.json" in path.name
            if path.suffix not in (".txt", ".json", ".gz") or skipped or "LICENSE" in path.name:
                continue
            if path.name == "exact_E.txt":
                continue
            counted[detect_format(unpacked(path.read_bytes()))] += 1
    assert counted == dict.fromkeys(FORMATS, 0) | {
        "pipedream": 16,
        "pipedream-plan": 109,
        "server-file": 4,
        "dnn-partitioning": 20,
        "dnn-partitioning-plan": 38,
        "piper": 2,
        "dynamicml": 22,
        "dynamicml-plan": 77,
        "baechi": 10,
    }


def test_a_server_file_is_read_by_content(shared_data):
    path = shared_data / "sparsepipedream/mink_2srv.txt"
    opener = open_beside(str(path), lambda file: Path(file).read_text())
    problem = read_any(path.read_bytes(), name="mink", open_text=opener)
    assert problem.graph.name == problem.cluster.name == "mink"
