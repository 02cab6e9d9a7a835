"""Backward in two halves (Qi et al. 2023): gradients of inputs first, of parameters later.

    input --- a --- b --- output    first half    from the output to the input; gradients that come
              |     |                             to a and b on the way are kept
              w     v               second half   from a and b to the parameters w and v, in what
                                                  looks like an ordinary backward pass

The nodes a and b are those at which a path from a parameter to the output first meets one from an
input. Schedules without bubbles do the second half when a rank would wait.
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
class _ParameterBranch:
    """Parameters beside the paths from inputs to outputs, and the nodes at which they join these.

    `grads` has the gradients that came to the nodes in the first half, by the node's index.
    """

    parameters: list[Parameter]
    nodes: list[Node]
    grads: dict[int, tuple[Tensor | None, ...]] = field(default_factory=dict)


@dataclass
class SecondHalf:
    """What the first half leaves for the second.

    `direct` are parameters whose gradients the first half has computed already, with these.
    """

    branches: list[_ParameterBranch]
    direct: list[tuple[Parameter, Tensor | None]]

    def missing_parameters(self) -> list[Parameter]:
        """Parameters whose gradients are still missing; their units may have to be whole again."""
        return [parameter for branch in self.branches for parameter in branch.parameters]


def compute_input_gradients(
    outputs: Sequence[Tensor], grads: Sequence[Tensor | None], entries: Sequence[Tensor]
) -> tuple[list[Tensor | None], SecondHalf]:
    """Compute the gradients of `entries`, and prepare the second half.

    A gradient of None in `grads` is that of a loss: 1.
    """
    users, begins = (
        _find_users([_gradient_node(output) for output in outputs]),
        [_gradient_node(entry) for entry in entries],
    )
    leaves = ((node, getattr(node, "variable", None)) for node in users if node not in begins)
    owners: dict[Node, Parameter] = {node: leaf for node, leaf in leaves if leaf is not None}
    # All nodes on paths from the inputs, and outputs that are on none of them.
    way = _follow_upwards(begins, users, stop=frozenset())[0]
    ends = {node for node in map(_gradient_node, outputs) if node not in way}
    reached = {
        parameter: _follow_upwards([node], users, stop=way) for node, parameter in owners.items()
    }
    # A parameter that leads to an output beside these paths, too, gets its whole gradient in this
    # half.
    branches = _group_parameters(
        {parameter: met for parameter, (seen, met) in reached.items() if not ends & seen}
    )
    covered = {id(parameter) for branch in branches for parameter in branch.parameters}
    direct = [parameter for parameter in owners.values() if id(parameter) not in covered]
    hooks = [
        node.register_prehook(_make_keep_hook(branch, index))
        for branch in branches
        for index, node in enumerate(branch.nodes)
    ]
    try:
        gradients = torch.autograd.grad(
            list(outputs), [*entries, *direct], list(grads), retain_graph=True, allow_unused=True
        )
    finally:
        for hook in hooks:
            hook.remove()
    return list(gradients[: len(entries)]), SecondHalf(
        branches, list(zip(direct, gradients[len(entries) :], strict=True))
    )


def compute_weight_gradients(later: SecondHalf) -> None:
    """Add the gradients of parameters, in one backward pass that reaches nothing else."""
    results = [(parameter, grad) for parameter, grad in later.direct if grad is not None]
    # If a layer is used twice, one branch may go through nodes of another. Keep the graph for it
    # then.
    crossing = any(len(branch.nodes) > 1 for branch in later.branches)
    for branch in later.branches:
        edges = [
            (GradientEdge(branch.nodes[at], slot), grad)
            for at, row in branch.grads.items()
            for slot, grad in enumerate(row)
        ]
        present = [(edge, grad) for edge, grad in edges if grad is not None]
        # One node of a branch may lead to another. The latter gets its gradient of the first half,
        # and not the same once more through the former.
        hooks = (
            [
                branch.nodes[at].register_prehook(_make_replace_hook(row))
                for at, row in branch.grads.items()
            ]
            if len(branch.nodes) > 1
            else []
        )
        try:
            if present:
                ends, grads = zip(*present, strict=True)
                gradients = torch.autograd.grad(
                    ends, branch.parameters, grads, retain_graph=crossing, allow_unused=True
                )
                results += [
                    (parameter, grad)
                    for parameter, grad in zip(branch.parameters, gradients, strict=True)
                    if grad is not None
                ]
        finally:
            for hook in hooks:
                hook.remove()
    later.branches, later.direct = [], []
    if results:
        # `torch.autograd.grad` has called hooks on these gradients already. A backward from the
        # parameters themselves calls all that follows an ordinary pass, such as post-accumulate
        # hooks.
        with without_gradient_hooks(parameter for parameter, _ in results):
            torch.autograd.backward(
                [parameter for parameter, _ in results], [grad for _, grad in results]
            )


def _gradient_node(tensor: Tensor) -> Node:
    """The node of the graph that computes a tensor, or that accumulates its gradient."""
    edge: Node = torch.autograd.graph.get_gradient_edge(tensor).node
    return edge


def _find_users(ends: Iterable[Node]) -> dict[Node, list[Node]]:
    """Find all nodes of the graph below `ends`, and the nodes that use each directly."""
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


def _follow_upwards(
    nodes: Iterable[Node], users: Mapping[Node, Sequence[Node]], *, stop: Container[Node]
) -> tuple[set[Node], list[Node]]:
    """Follow the users of `nodes` upwards; return all nodes seen, and those met in `stop`.

    Nodes in `stop` are not followed further, and come in the order in which they were met.
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


def _group_parameters(met: Mapping[Parameter, Sequence[Node]]) -> list[_ParameterBranch]:
    """Group parameters that join the paths at common nodes; each node is gone through once."""
    at: dict[Node, _ParameterBranch] = {}
    for parameter, nodes in met.items():
        joined = list({id(at[node]): at[node] for node in nodes if node in at}.values())
        merged = _ParameterBranch([parameter], list(nodes))
        for branch in joined:
            merged.parameters += branch.parameters
            merged.nodes += [node for node in branch.nodes if node not in merged.nodes]
        at.update(dict.fromkeys(merged.nodes, merged))
    return list({id(branch): branch for branch in at.values()}.values())


def _make_keep_hook(branch: _ParameterBranch, index: int) -> Callable[[Any], None]:
    def keep(grads: tuple[Tensor | None, ...]) -> None:
        branch.grads[index] = grads

    return keep


def _make_replace_hook(grads: tuple[Tensor | None, ...]) -> Callable[[Any], Any]:
    return lambda _: grads
