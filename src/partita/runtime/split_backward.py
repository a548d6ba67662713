"""Backward in two halves: gradients of the inputs first, those of the parameters later.

Differentiating twice walks the way from the outputs to the inputs twice. Here the first half keeps
the gradient that comes to every op which uses a parameter, on that way; the second half starts at
these ops and takes one step from each to its own parameters. Results are the same to the bit.

A parameter that several ops on the way use, or one beside it, is differentiated from the outputs;
so are all where tensors are small.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeAlias

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

Gradients: TypeAlias = dict[str, Tensor]
"""Gradients of parameters by name; those that nothing depends on are left out."""

_WORTH_SPLITTING = 2**14
"""Elements of the largest tensor that enters or leaves, from which on the way is worth saving: for
smaller ones a call for each op costs more.
"""


class SplitBackward:
    """The backward of one stage for one microbatch, between its two halves."""

    def __init__(
        self,
        outputs: Sequence[Tensor],
        cotangents: Sequence[Tensor],
        inputs: Sequence[Tensor],
        weights: Mapping[str, Tensor],
    ) -> None:
        """Prepare the halves.

        Args:
            outputs: What is differentiated; each needs a gradient.
            cotangents: Its gradients.
            inputs: Leaves whose gradients are wanted first; at least one.
            weights: Leaves whose gradients are wanted later, by name.
        """
        self._outputs, self._cotangents = outputs, cotangents
        self._inputs, self._weights = inputs, weights
        largest = max(tensor.numel() for tensor in (*outputs, *inputs))
        self._weights_of = (
            _weights_beside_the_way(outputs, inputs, weights) if largest >= _WORTH_SPLITTING else {}
        )
        self._kept: dict[Node, tuple[Tensor | None, ...]] = {}

    def input_gradients(self) -> Sequence[Tensor | None]:
        """Return the gradients of the inputs, None where nothing depends on one."""
        # A prehook sees the gradients of a node's outputs, summed over all that use them.
        hooks = [node.register_prehook(self._keeper(node)) for node in self._weights_of]
        try:
            # The second half needs what forward saved for the ops, so the graph is kept.
            return torch.autograd.grad(
                self._outputs, self._inputs, self._cotangents, retain_graph=True, allow_unused=True
            )
        finally:
            for hook in hooks:
                hook.remove()

    def _keeper(self, node: Node) -> Callable[[tuple[Tensor | None, ...]], None]:
        def keep(gradients: tuple[Tensor | None, ...]) -> None:
            self._kept[node] = gradients

        return keep

    def weight_gradients(self) -> Gradients:
        """Return the gradients of the parameters, in their order."""
        found: Gradients = {}
        for node, names in self._weights_of.items():
            # A node has one gradient for each of its outputs, None where nothing came back; nodes
            # that were not reached at all have no entry.
            kept = [(i, g) for i, g in enumerate(self._kept.get(node, ())) if g is not None]
            if kept:
                edges = [GradientEdge(node, place) for place, _ in kept]
                # From the node to its parameters only: autograd computes what the wanted leaves
                # need.
                found |= self._differentiate(edges, [gradient for _, gradient in kept], names)
        once = {name for names in self._weights_of.values() for name in names}
        # Parameters with several uses: their gradient is a sum that autograd has to form.
        others = [name for name in self._weights if name not in once]
        if others:
            found |= self._differentiate(self._outputs, self._cotangents, others)
        return {name: found[name] for name in self._weights if name in found}

    def _differentiate(
        self,
        outputs: Sequence[Tensor] | Sequence[GradientEdge],
        gradients: Sequence[Tensor],
        names: Iterable[str],
    ) -> Gradients:
        wanted = list(names)
        leaves = [self._weights[name] for name in wanted]
        made = torch.autograd.grad(outputs, leaves, gradients, retain_graph=True, allow_unused=True)
        return {name: g for name, g in zip(wanted, made, strict=True) if g is not None}


def _weights_beside_the_way(
    outputs: Sequence[Tensor], inputs: Sequence[Tensor], weights: Mapping[str, Tensor]
) -> dict[Node, list[str]]:
    """Return the nodes on the way to the inputs that lead to parameters beside it, with these.

    Only parameters to which a single such node leads.
    """
    # By identity, as leaves are compared with the variables of the graph's last nodes.
    entered = {id(tensor) for tensor in inputs}
    names = {id(tensor): name for name, tensor in weights.items()}
    roots = list(dict.fromkeys(get_gradient_edge(output).node for output in outputs))
    # ``on_way``: an input is reached from there. ``reached``: of the other nodes, the parameters
    # they lead to. ``beside``: of nodes on the way, the parameters they lead to off it.
    on_way: set[Node] = set()
    reached: dict[Node, frozenset[str]] = {}
    beside: dict[Node, frozenset[str]] = {}
    for node, after in _children_first(roots):
        if not after:
            leaf = id(getattr(node, "variable", None))
            if leaf in entered:
                on_way.add(node)
            elif leaf in names:
                reached[node] = frozenset((names[leaf],))
            continue
        # Mostly one child: no new set is made for it.
        aside = [reached[child] for child in after if child in reached]
        leads = aside[0] if len(aside) == 1 else frozenset().union(*aside)
        if not on_way.isdisjoint(after):
            on_way.add(node)
            if leads:
                beside[node] = leads
        elif leads:
            reached[node] = leads
    # An output off the way leads to parameters without passing a node that is kept.
    others = [reached[root] for root in roots if root in reached]
    # With two uses, one kept gradient would be a part of the sum only.
    uses = Counter(name for group in (*beside.values(), *others) for name in group)
    shared = frozenset[str]().union(*others)
    single = {
        node: [name for name in sorted(group) if uses[name] == 1 and name not in shared]
        for node, group in beside.items()
    }
    return {node: found for node, found in single.items() if found}


def _children_first(roots: Iterable[Node]) -> list[tuple[Node, list[Node]]]:
    """Return the nodes of a graph with those they lead to, which come before them."""
    found: list[tuple[Node, list[Node]]] = []
    seen: set[Node] = set()
    # Not by recursion: a graph is as deep as the stage has ops. A node is put back with its
    # children, and comes up again when these are done.
    stack: list[tuple[Node, list[Node] | None]] = [(root, None) for root in roots]
    while stack:
        node, after = stack.pop()
        if after is not None:
            found.append((node, after))
        elif node not in seen:
            seen.add(node)
            after = [child for child, _ in node.next_functions if child is not None]
            stack.append((node, after))
            stack.extend((child, None) for child in after if child not in seen)
    return found
