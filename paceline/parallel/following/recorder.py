"""Follows a forward, and notes which layers use what other layers have returned, by the memory of
tensors.

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
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_structure

from paceline.errors import UsageError
from paceline.parallel.containers import tree_leaves

# the number of a layer, or a name for random numbers that are drawn between layers
Source = int | str
# in the place of a layer: what decides where the forward goes, which every stage has to know
EVERY = -1


class UseRecorder(TorchDispatchMode):
    """Notes in `uses`, for each layer, what it depends on directly.

    It sees operations between layers, and is paused inside of them.
    """

    def __init__(self, model: nn.Module, places: Iterable[int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.uses: dict[int, set[Source]] = {place: set() for place in (EVERY, *places)}
        self._inside = False  # of a layer, where nothing is noted
        state = (*model.named_parameters(), *model.named_buffers())
        self._state = {
            (storage := tensor.untyped_storage())._cdata: (storage, name) for name, tensor in state
        }
        # by storage, which is held so that no other takes its place
        self._sources = dict[int, tuple[torch.UntypedStorage, set[Source]]]()
        self._drawn, self._python = (0, 0), random.getstate()

    @property
    def plain(self) -> list[list[Source]]:
        """What was noted as plain data: each layer and what it uses."""
        return [[layer, *sorted(sources, key=str)] for layer, sources in self.uses.items()]

    def begin(self) -> None:
        """Begin a forward."""
        self._sources.clear()
        self._drawn, self._python = (0, 0), random.getstate()

    def enter(self, layer: int, values: Any) -> None:
        """Note that a layer uses these values."""
        self.uses[layer] |= self._of(_tensors(values))
        if random.getstate() != self._python:
            self.uses[EVERY].add("random numbers of Python")

    def call(
        self,
        layer: int,
        function: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> Any:
        """Call a layer, and note what it uses."""
        self.enter(layer, (args, kwargs))
        self._inside, before = True, tree_structure((args, kwargs))
        try:
            returned = function(*args, **kwargs)
        finally:
            self._inside, self._python = False, random.getstate()
        if tree_structure((args, kwargs)) != before:
            raise UsageError(
                "a layer changes a list or dict that it is given, which layers on other stages "
                "wouldn't see: let it return one"
            )
        return returned

    def leave(self, layer: int, values: Any) -> None:
        """Note that a layer has returned these values."""
        self._drawn = (layer + 1, 0)
        for tensor in _tensors(values):
            # what was returned as it came, or changed in place, is the layer's now
            if tensor.nbytes == tensor.untyped_storage().nbytes():
                self._sources.pop(tensor.untyped_storage()._cdata, None)
            self._add(tensor, {layer})

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
        taken, written = list(_tensors((args, kwargs))), list(_written(func, args, kwargs))
        self._refuse_state(taken, written)
        made = func(*args, **kwargs)
        sources = self._of(taken)
        if torch.Tag.nondeterministic_seeded in func.tags:
            after, count = self._drawn
            self._drawn = (after, count + 1)
            sources = {*sources, f"{func.overloadpacket.__name__} {count} before layer {after}"}
        results = list(_tensors(made))
        if not results or torch.Tag.dynamic_output_shape in func.tags:
            self.uses[EVERY] |= sources  # a number of Python, which an `if` may ask for, or a shape
        for tensor in (*results, *written) if sources else ():
            self._add(tensor, sources)
        return made

    def _refuse_state(self, taken: Sequence[Tensor], written: Sequence[Tensor]) -> None:
        if name := self._name(written):
            raise UsageError(
                f"the forward changes {name} between layers, which every stage would do: "
                "name a layer that does it"
            )
        if name := self._name(tensor for tensor in taken if not tensor.numel()):
            raise UsageError(
                f"the forward uses {name} between layers, and another stage has it, with its "
                "layer: tie it to a layer of its own, or name "
                "one layer that holds both uses"
            )

    def _name(self, tensors: Iterable[Tensor]) -> str:
        """Return what the model calls the first of these that it has; "" if there is none."""
        found = (self._state.get(tensor.untyped_storage()._cdata) for tensor in tensors)
        return next((each[1] for each in found if each), "")

    def _of(self, tensors: Iterable[Tensor]) -> set[Source]:
        return {
            source
            for tensor in tensors
            for source in self._sources.get(tensor.untyped_storage()._cdata, (None, ()))[1]
        }

    def _add(self, tensor: Tensor, sources: set[Source]) -> None:
        storage = tensor.untyped_storage()
        self._sources.setdefault(storage._cdata, (storage, set()))[1].update(sources)


def _tensors(values: Any) -> Iterator[Tensor]:
    return (
        leaf
        for leaf in tree_leaves(values)
        if isinstance(leaf, Tensor) and leaf.layout == torch.strided
    )


def _written(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[Tensor]:
    """Yield the tensors that an operation changes in place."""
    for place, argument in enumerate(func._schema.arguments if func._schema.is_mutable else ()):
        if argument.alias_info is not None and argument.alias_info.is_write:
            yield from _tensors(args[place] if place < len(args) else kwargs.get(argument.name))
