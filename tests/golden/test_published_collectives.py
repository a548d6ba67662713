"""Published curves of collectives: ``benchmarks/_published_collectives.py`` on a few points.

Sources: stas00/ml-engineering (network), NVIDIA dgxc-benchmarking v26.06.01 (nccl), vTrain
(trace/a100, trace/v100), arXiv 2411.13055 (read from a plot).
"""

import importlib.util
import sys
from pathlib import Path

import pytest

BENCHMARK = Path(__file__).resolve().parents[2] / "benchmarks" / "_published_collectives.py"
CURVES = {
    ("A100 SXM", 2, 1): [(33554432, 230.0), (268435456, 1455.8), (1073741824, 5442.8)],
    ("A100 SXM", 8, 1): [(67108864, 579.9), (268435456, 2162.3), (1073741824, 8193.0)],
    ("V100 SXM", 2, 1): [(67108864, 2998.9), (1073741824, 47610.0)],
    ("V100 SXM", 8, 1): [(67108864, 911.3), (1073741824, 13969.0)],
    ("H100 SXM", 8, 1): [(67108864, 324.7), (1073741824, 4029.4), (17179869184, 62648.0)],
    ("H200 SXM", 8, 1): [(67108864, 338.9), (1073741824, 4053.3), (17179869184, 62341.4)],
    ("B200 SXM", 8, 1): [(67108864, 293.2), (1073741824, 2597.7), (17179869184, 35551.4)],
    ("B200 SXM", 32, 4): [(67108864, 829.5), (1073741824, 5747.1), (17179869184, 87181.8)],
}
PLOT = {
    "arxiv": "2411.13055",
    "64MiB": [217, 137, 112],
    "1GiB": [338, 305, 287],
    "4GiB": [352, 332, 328],
}


@pytest.fixture(scope="module")
def benchmark():
    spec = importlib.util.spec_from_file_location("benchmark_collectives", BENCHMARK)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


def test_curves_are_within_fifteen_percent_above_16_mib(benchmark):
    curves = [
        {
            "collective": "all_reduce",
            "gpu": gpu,
            "ranks": ranks,
            "hosts": hosts,
            "source": "above",
            "points": [(2**20, 1.0, 0.0), *((size, us, 0.0) for size, us in points)],
        }
        for (gpu, ranks, hosts), points in CURVES.items()
    ]
    rows = benchmark.compare({"curves": curves})
    assert [len(row.errors) for row in rows] == [len(points) for points in CURVES.values()]
    assert {row.name: row.worst for row in rows if abs(row.worst) > benchmark.LIMIT} == {}
    assert all(row.mean <= 0.1 for row in rows)


def test_all_reduces_of_many_hosts_are_within_fifteen_percent(benchmark):
    peaks = {"h100_multi_node_all_reduce_read_from_plot": PLOT}
    rows = benchmark.compare_plotted({"peaks": peaks})
    assert [len(row.errors) for row in rows] == [3, 3, 3]
    assert all(abs(row.worst) <= benchmark.LIMIT for row in rows)
