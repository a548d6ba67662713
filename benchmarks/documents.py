"""Large documents: a graph of 100,000 ops and 300,000 edges is built, written and read.

Columns are random with the shapes that profiles have: long-tailed times and sizes, a third of the
ops with parameters, labels for types and layers. Building checks everything (names, ranges,
references, cycles), once in the order of the data and once with the ops numbered at random; writing
goes to text, reading comes back from it.
"""

from dataclasses import replace

import numpy as np
from _harness import Measured, cpu_s, run_benchmark

from partita.core.codec import decode, encode, parse_json, write_json
from partita.core.graph import (
    EdgeTable,
    Graph,
    Labels,
    OpCosts,
    OpTable,
    ParameterTable,
    TensorTable,
)

OPS, EDGES = 100_000, 300_000
WANTED_S = 3.0
TYPES = ("Linear", "LayerNorm", "Softmax", "Dropout", "GELU", "Add", "Embedding", "Conv2d")


class Columns:
    """Random columns of a graph, drawn before the clock runs."""

    def __init__(self, seed: int) -> None:
        rng = np.random.default_rng(seed)
        self.names = tuple(f"model.layers.{op // 100}.block.{op % 100}" for op in range(OPS))
        self.tensor_names = tuple(f"{name}:0" for name in self.names)
        self.forward_s = rng.lognormal(-8, 1.5, OPS)
        self.backward_s = 2 * self.forward_s * rng.uniform(0.8, 1.2, OPS)
        self.flops = np.round(rng.lognormal(18, 2, OPS))
        self.bytes = np.round(rng.lognormal(13, 2, OPS))
        self.types = rng.integers(0, len(TYPES), OPS)
        self.reader = np.concatenate([np.arange(1, OPS), rng.integers(1, OPS, EDGES - OPS + 1)])
        near = rng.integers(1, 2000, EDGES)
        self.source = np.maximum(self.reader - near, 0)
        self.source[: OPS - 1] = np.arange(OPS - 1)
        self.used = np.flatnonzero(rng.random(OPS) < 1 / 3)
        self.parameter_bytes = 4 * np.round(rng.lognormal(12, 2, len(self.used)))
        self.parameter_names = tuple(f"{self.names[op]}.weight" for op in self.used)
        self.number = rng.permutation(OPS)


def build(columns: Columns, *, shuffled: bool = False) -> Graph:
    """Return the graph of some columns; ``shuffled`` numbers the ops at random."""
    number = columns.number if shuffled else np.arange(OPS)
    return Graph(
        name="large",
        ops=OpTable(
            names=columns.names,
            flops=columns.flops,
            saved_bytes=columns.bytes,
            types=Labels(names=TYPES, of=columns.types),
            layers=Labels(
                names=tuple(f"layer{layer}" for layer in range(OPS // 100)),
                of=np.arange(OPS) // 100,
            ),
        ),
        costs=(OpCosts(forward_s=columns.forward_s, backward_s=columns.backward_s),),
        tensors=TensorTable(
            names=columns.tensor_names, producer=np.arange(OPS), bytes=columns.bytes
        ),
        edges=EdgeTable(tensor=number[columns.source], reader=number[columns.reader]),
        parameters=ParameterTable(
            names=columns.parameter_names,
            bytes=columns.parameter_bytes,
            use_op=columns.used,
            use_parameter=np.arange(len(columns.used)),
        ),
        outputs=np.array([OPS - 1]),
        loss=OPS - 1,
        batch_size=32,
    )


def measure() -> Measured:
    """Measure building, writing and reading."""
    columns = Columns(seed=1)
    graph = build(columns)
    shuffled = build(columns, shuffled=True)
    text = write_json(graph)
    document = parse_json(text)
    build_s = cpu_s(lambda: build(columns), repeats=3)
    shuffled_s = cpu_s(lambda: build(columns, shuffled=True), repeats=3)
    parts = {
        "encode_s": cpu_s(lambda: encode(graph), repeats=3),
        "write_s": cpu_s(lambda: write_json(graph), repeats=3),
        "parse_s": cpu_s(lambda: parse_json(text), repeats=3),
        "decode_s": cpu_s(lambda: decode(document), repeats=3),
    }
    total_s = shuffled_s + parts["write_s"] + parts["parse_s"] + parts["decode_s"]
    print(f"{len(graph):,} ops, {len(graph.edges):,} edges, {len(text) / 1e6:.1f} MB of text")
    print(f"build {build_s:.2f} s, with ops numbered at random {shuffled_s:.2f} s of CPU")
    print(", ".join(f"{name[:-2]} {seconds:.2f} s" for name, seconds in parts.items()))
    missed = []
    if len(graph.edges) != EDGES or decode(document) != graph:
        missed.append("the graph does not come back equal")
    if decode(encode(shuffled)).fingerprint != shuffled.fingerprint:
        missed.append("the fingerprint does not come back equal")
    if replace(graph, name="other").fingerprint != graph.fingerprint:
        missed.append("the fingerprint depends on the name")
    if total_s > WANTED_S:
        missed.append(f"build, write and read take {total_s:.2f} CPU s, limit {WANTED_S}")
    figures = {"ops": OPS, "edges": EDGES, "mb": len(text) / 1e6, "build_s": build_s}
    return figures | {"shuffled_s": shuffled_s, "total_s": total_s} | parts, missed


if __name__ == "__main__":
    run_benchmark(__doc__ or "", measure)
