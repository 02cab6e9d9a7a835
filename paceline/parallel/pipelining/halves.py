"""Backward in two halves, for schedules without bubbles (Qi et al. 2023): gradients of what came in
first, those of parameters later.

    came in --- a --- b --- output        first half    output to came in; what reaches a and b on
                                                        the way is kept
                |     |
                w     v                   second half   from a and b to the parameters w and v,
                                                        which see an ordinary backward pass

The nodes a and b are those where a way from a parameter to the output first meets one from what
came in.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node
from torch.nn import Parameter

from paceline.parallel.gradient_hooks import without_gradient_hooks


@dataclass
class _Branch:
    """Parameters beside the way from the output to what came in, the nodes where they leave it,
    and the gradients that came there.
    """

    parameters: list[Parameter]
    nodes: list[Node]
    grads: dict[int, tuple[Tensor | None, ...]] = field(default_factory=dict)


@dataclass
class Later:
    """What the first half leaves for the second.

    `direct`: parameters that are used without what came in, and their gradients.
    """

    branches: list[_Branch]
    direct: list[tuple[Parameter, Tensor | None]]

    def parameters(self) -> list[Parameter]:
        """Return the parameters whose gradients are still to be computed: what their layers keep
        for that may have to be there again.
        """
        return [parameter for branch in self.branches for parameter in branch.parameters]


def input_half(
    outputs: Sequence[Tensor], grads: Sequence[Tensor | None], entries: Sequence[Tensor]
) -> tuple[list[Tensor | None], Later]:
    """Return the gradients of `entries`, and what the other half goes on from.

    A gradient of None is that of a loss: one.
    """
    users, begins = (
        _users([_node(output) for output in outputs]),
        [_node(entry) for entry in entries],
    )
    leaves = ((node, getattr(node, "variable", None)) for node in users if node not in begins)
    owners: dict[Node, Parameter] = {node: leaf for node, leaf in leaves if leaf is not None}
    way = _upwards(begins, users, stop=frozenset())[0]
    ends = {node for node in map(_node, outputs) if node not in way}
    reached = {parameter: _upwards([node], users, stop=way) for node, parameter in owners.items()}
    # a parameter that an output uses beside the way too has all of its gradient from the first half
    branches = _branches(
        {parameter: met for parameter, (seen, met) in reached.items() if not ends & seen}
    )
    covered = {id(parameter) for branch in branches for parameter in branch.parameters}
    direct = [parameter for parameter in owners.values() if id(parameter) not in covered]
    hooks = [
        node.register_prehook(_keep(branch, number))
        for branch in branches
        for number, node in enumerate(branch.nodes)
    ]
    try:
        found = torch.autograd.grad(
            list(outputs), [*entries, *direct], list(grads), retain_graph=True, allow_unused=True
        )
    finally:
        for hook in hooks:
            hook.remove()
    return list(found[: len(entries)]), Later(
        branches, list(zip(direct, found[len(entries) :], strict=True))
    )


def weight_half(later: Later) -> None:
    """Add the gradients of parameters, in one backward pass that reaches nothing else."""
    found = [(parameter, grad) for parameter, grad in later.direct if grad is not None]
    # one goes through nodes of another: a layer is used twice
    crossing = any(len(branch.nodes) > 1 for branch in later.branches)
    for branch in later.branches:
        edges = [
            (GradientEdge(branch.nodes[at], slot), grad)
            for at, row in branch.grads.items()
            for slot, grad in enumerate(row)
        ]
        there = [(edge, grad) for edge, grad in edges if grad is not None]
        # a node that another one of them leads to gets what came to it in the first half, and not
        # that once more
        hooks = (
            [branch.nodes[at].register_prehook(_give(row)) for at, row in branch.grads.items()]
            if len(branch.nodes) > 1
            else []
        )
        try:
            if there:
                ends, grads = zip(*there, strict=True)
                mine = torch.autograd.grad(
                    ends, branch.parameters, grads, retain_graph=crossing, allow_unused=True
                )
                found += [
                    (parameter, grad)
                    for parameter, grad in zip(branch.parameters, mine, strict=True)
                    if grad is not None
                ]
        finally:
            for hook in hooks:
                hook.remove()
    later.branches, later.direct = [], []
    if found:
        # the hooks on these gradients were called by `torch.autograd.grad`
        with without_gradient_hooks(parameter for parameter, _ in found):
            torch.autograd.backward(
                [parameter for parameter, _ in found], [grad for _, grad in found]
            )


def _node(tensor: Tensor) -> Node:
    """Return the node of the graph that makes a tensor, or that adds to its gradient."""
    edge: Node = torch.autograd.graph.get_gradient_edge(tensor).node
    return edge


def _users(ends: Iterable[Node]) -> dict[Node, list[Node]]:
    """Return the nodes of the graph below these, each with those that use it directly."""
    users: dict[Node, list[Node]] = {node: [] for node in ends}
    waiting = list(users)
    while waiting:
        node = waiting.pop()
        for below, _ in node.next_functions:
            if below is not None:
                if below not in users:
                    users[below] = []
                    waiting.append(below)
                users[below].append(node)
    return users


def _upwards(
    nodes: Iterable[Node], users: Mapping[Node, Sequence[Node]], *, stop: Container[Node]
) -> tuple[set[Node], list[Node]]:
    """Return the nodes that use these, directly or not, but for those in `stop` and what is
    above; and those in `stop`, in order.
    """
    seen = {node for node in nodes if node in users}
    met = dict[Node, None]()
    waiting = list(seen)
    while waiting:
        for above in users[waiting.pop()]:
            if above in stop:
                met[above] = None
            elif above not in seen:
                seen.add(above)
                waiting.append(above)
    return seen, list(met)


def _branches(met: Mapping[Parameter, Sequence[Node]]) -> list[_Branch]:
    """Put parameters together that meet the way at the same nodes: those are gone through once."""
    at: dict[Node, _Branch] = {}
    for parameter, nodes in met.items():
        known = list({id(at[node]): at[node] for node in nodes if node in at}.values())
        whole = _Branch([parameter], list(nodes))
        for branch in known:
            whole.parameters += branch.parameters
            whole.nodes += [node for node in branch.nodes if node not in whole.nodes]
        at.update(dict.fromkeys(whole.nodes, whole))
    return list({id(branch): branch for branch in at.values()}.values())


def _keep(branch: _Branch, number: int) -> Callable[[Any], None]:
    def keep(grads: tuple[Tensor | None, ...]) -> None:
        branch.grads[number] = grads

    return keep


def _give(grads: tuple[Tensor | None, ...]) -> Callable[[Any], Any]:
    return lambda _: grads
