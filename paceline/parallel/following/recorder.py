"""Follows a forward, and records which layers use results of which others, by their memory.

h = embed(x)            h: {embed}
h = h + position(x)     h: {embed, position}
h = block(h, mask)      block uses {embed, position}; h: {block}
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from paceline.errors import UsageError
from paceline.parallel.containers import tree_leaves
from paceline.parallel.torch_dispatch import TorchDispatchMode, written_arguments
from paceline.parallel.torch_pytree import tree_structure
from paceline.parallel.torch_tensor import storage_key

# A layer's number, or a name for random numbers that are drawn between layers.
Source = int | str
# Stands for a layer: values that decide where the forward goes, which every stage needs.
ALL_STAGES = -1


class UseRecorder(TorchDispatchMode):
    """Records in `uses` the direct sources of each layer.

    It sees operations between layers, and is paused inside of them. Tensors are known by their
    storages: `_sources` says what each of them depends on, and `_state` which ones belong to the
    model. Both hold the storages, so that no other one gets the key of one that was freed.
    """

    def __init__(self, model: nn.Module, places: Iterable[int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.uses: dict[int, set[Source]] = {place: set() for place in (ALL_STAGES, *places)}
        self._inside = False  # whether a layer is running
        state = (*model.named_parameters(), *model.named_buffers())
        self._state = {
            storage_key(tensor): (tensor.untyped_storage(), name) for name, tensor in state
        }
        self._sources = dict[int, tuple[torch.UntypedStorage, set[Source]]]()
        # Number of the layer that comes next, and of random operations since the one before it; and
        # the state of Python's generator after that layer.
        self._draw_position, self._python_state = (0, 0), random.getstate()

    @property
    def rows(self) -> list[list[Source]]:
        """`uses` as plain data: rows of a layer and its sources."""
        return [[layer, *sorted(sources, key=str)] for layer, sources in self.uses.items()]

    def begin_forward(self) -> None:
        """Begin a forward."""
        self._sources.clear()
        self._draw_position, self._python_state = (0, 0), random.getstate()

    def enter_layer(self, layer: int, values: Any) -> None:
        """Record that a layer uses these values."""
        self.uses[layer] |= self._find_sources(_find_tensors(values))
        if random.getstate() != self._python_state:
            self.uses[ALL_STAGES].add("random numbers of Python")

    def call_layer(
        self,
        layer: int,
        function: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> Any:
        """Call a layer, and record what it uses."""
        self.enter_layer(layer, (args, kwargs))
        self._inside, before = True, tree_structure((args, kwargs))
        try:
            returned = function(*args, **kwargs)
        finally:
            self._inside, self._python_state = False, random.getstate()
        if tree_structure((args, kwargs)) != before:
            raise UsageError(
                "a layer changes a list or dict that it is given, which layers on other stages "
                "wouldn't see: let it return one"
            )
        return returned

    def leave_layer(self, layer: int, values: Any) -> None:
        """Record that a layer has returned these values."""
        self._draw_position = (layer + 1, 0)
        for tensor in _find_tensors(values):
            # A result that fills its storage is the layer's alone from now on, even if the layer
            # returned an input, or changed one in place. A view shares its storage with older
            # values.
            if tensor.nbytes == tensor.untyped_storage().nbytes():
                self._sources.pop(storage_key(tensor), None)
            self._add_sources(tensor, {layer})

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if self._inside:
            return func(*args, **kwargs)
        inputs, written = (
            list(_find_tensors((args, kwargs))),
            list(_find_written(func, args, kwargs)),
        )
        self._refuse_state(inputs, written)
        output = func(*args, **kwargs)
        sources = self._find_sources(inputs)
        # Random numbers are a source of their own: each stage would draw others.
        if torch.Tag.nondeterministic_seeded in func.tags:
            after, count = self._draw_position
            self._draw_position = (after, count + 1)
            sources = {*sources, f"{func.overloadpacket.__name__} {count} before layer {after}"}
        results = list(_find_tensors(output))
        # Without a tensor, the result is a number that an `if` may test. So may a shape be.
        if not results or torch.Tag.dynamic_output_shape in func.tags:
            self.uses[ALL_STAGES] |= sources
        for tensor in (*results, *written) if sources else ():
            self._add_sources(tensor, sources)
        return output

    def _refuse_state(self, inputs: Sequence[Tensor], written: Sequence[Tensor]) -> None:
        """Refuse operations between layers that write to the model, or read an absent part."""
        if name := self._find_name(written):
            raise UsageError(
                f"the forward changes {name} between layers, so every stage would change it: name "
                "a layer that does so"
            )
        # A parameter of another stage has no elements here.
        if name := self._find_name(tensor for tensor in inputs if not tensor.numel()):
            raise UsageError(
                f"the forward uses {name} between layers, but it is on another stage, with its "
                "layer: use it in a layer of its own, or name "
                "one layer that contains both uses"
            )

    def _find_name(self, tensors: Iterable[Tensor]) -> str:
        """Find the model's name for the first of these tensors that is its own; "" if none is."""
        matches = (self._state.get(storage_key(tensor)) for tensor in tensors)
        return next((match[1] for match in matches if match), "")

    def _find_sources(self, tensors: Iterable[Tensor]) -> set[Source]:
        return {
            source
            for tensor in tensors
            for source in self._sources.get(storage_key(tensor), (None, ()))[1]
        }

    def _add_sources(self, tensor: Tensor, sources: set[Source]) -> None:
        self._sources.setdefault(storage_key(tensor), (tensor.untyped_storage(), set()))[1].update(
            sources
        )


def _find_tensors(values: Any) -> Iterator[Tensor]:
    return (
        leaf
        for leaf in tree_leaves(values)
        if isinstance(leaf, Tensor) and leaf.layout == torch.strided
    )


def _find_written(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[Tensor]:
    """Yield the tensors that an operation changes in place."""
    for position, name in written_arguments(func):
        yield from _find_tensors(args[position] if position < len(args) else kwargs.get(name))
