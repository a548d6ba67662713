"""Recomputation block by block, as a graph says it: what is kept, brought back and computed again.

A block (a layer of the published partitions where there are layers, else a repeated block) keeps
the tensors that it reads from elsewhere. Its backward first computes its forward again, so all that
its ops save is live while it runs, and only then: it counts as scratch memory of its ops.
"""

from dataclasses import replace

import numpy as np

from partita.core.columns import Array
from partita.core.graph import EdgeTable, Graph, OpCosts

ANNOTATION = "recomputation"


def recomputed_ops(graph: Graph) -> Array:
    """Return whether each op runs again in backward when activations are recomputed.

    All do but those of layers that embed an input of the model, since no gradient flows into
    these, and of the last layer. Without layers the repeated blocks are computed again.
    """
    ops, count = graph.ops, len(graph.ops)
    if not ops.layers.names:
        blocks = ops.blocks.of
        return np.asarray(blocks >= 0) if len(blocks) else np.zeros(count, dtype=np.bool_)
    embeds = np.zeros(count, dtype=np.bool_)
    if len(ops.types.of):
        named = np.array([name.lower() == "embedding" for name in ops.types.names])
        embeds = (ops.types.of >= 0) & named[ops.types.of]
    reads_input = np.zeros(count, dtype=np.bool_)
    inputs = graph.tensors.producer[graph.edges.tensor] < 0
    reads_input[graph.edges.reader[inputs]] = True
    layer = ops.layers.of
    kept = np.append(layer[embeds & reads_input], len(ops.layers.names) - 1)
    return ~np.isin(layer, kept)


def is_recomputed(graph: Graph) -> bool:
    """Return whether the figures of a graph contain recomputation already."""
    return ANNOTATION in graph.annotations


def with_recomputation(graph: Graph) -> Graph:
    """Return a graph whose blocks keep their inputs and compute the rest again in backward.

    Where nothing can be computed again, or already is, it is the same graph.
    """
    again = recomputed_ops(graph)
    if is_recomputed(graph) or not bool(again.any()):
        return graph
    ops = graph.ops
    labels = ops.layers.of if ops.layers.names else ops.blocks.of
    block = np.where(again, labels, -1)
    inside = block >= 0
    brought = np.bincount(block[inside], weights=ops.saved_bytes[inside])
    back = np.where(inside, brought[block] if len(brought) else 0.0, 0.0)
    kept, fixed = _inputs_kept(graph, block)
    changed = replace(
        ops,
        saved_bytes=np.where(inside, 0.0, ops.saved_bytes) + kept,
        saved_fixed_bytes=np.where(inside, 0.0, ops.saved_fixed_bytes) + fixed,
        workspace_bytes=ops.workspace_bytes + back,
    )
    said = {"blocks": len(np.unique(block[inside])), "ops": int(again.sum())}
    return replace(
        graph,
        ops=changed,
        edges=EdgeTable(tensor=graph.edges.tensor, reader=graph.edges.reader),  # inputs are kept
        costs=tuple(_with_forward(costs, again) for costs in graph.costs),
        annotations={**graph.annotations, ANNOTATION: said},
    )


def _with_forward(costs: OpCosts, again: Array) -> OpCosts:
    """Return costs with the forward of recomputed ops in their backward."""
    added = np.where(again, costs.forward_s, 0.0)
    return replace(
        costs,
        backward_s=costs.backward_s + added,
        backward_input_s=costs.backward_input_s + added,
    )


def _inputs_kept(graph: Graph, block: Array) -> tuple[Array, Array]:
    """Return, by op, bytes of the tensors that its block reads from elsewhere, and the fixed part.

    A tensor counts once, at the first op that reads it so; inputs of the model do not count.
    """
    reader, tensor = graph.edges.reader, graph.edges.tensor
    source = graph.edge_source
    enters = (source >= 0) & (block[reader] >= 0) & (block[source] != block[reader])
    rows = np.flatnonzero(enters)
    _, first = np.unique(tensor[rows], return_index=True)
    rows = rows[first]
    count = len(graph)
    table = graph.tensors
    return (
        np.bincount(reader[rows], weights=table.bytes[tensor[rows]], minlength=count),
        np.bincount(reader[rows], weights=table.fixed_bytes[tensor[rows]], minlength=count),
    )
