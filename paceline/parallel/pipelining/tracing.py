"""Traces the forward of a model with torch.fx: layers are called whole, all else is recorded.

It is traced in training and in evaluation. An argument that differs, such as the probability of a
dropout, is kept for both.
"""

from __future__ import annotations

import dataclasses
import dis
import functools
import inspect
import math
import threading
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Node, Proxy, Tracer
from torch.fx.proxy import TraceError
from torch.utils import checkpoint

from paceline.errors import UsageError
from paceline.parallel.pipelining.operations import (
    OUTPUT,
    ModelPath,
    Operation,
    ValueRef,
    substitute_leaves,
)
from paceline.parallel.torch_pytree import tree_leaves

REMEDY = (
    "name the module that does this as one layer, "
    "or say trace=False if the layers simply follow one another"
)
RANDOM = (torch.rand, torch.randint, torch.randn, torch.randperm)
FILLED = (torch.empty, torch.eye, torch.full, torch.ones, torch.zeros)
RANGES = (torch.arange, torch.linspace, torch.logspace)
# torch.fx overlooks them: no argument is a tensor.
FACTORIES = (*RANDOM, *FILLED, *RANGES, torch.tensor)
# Bytecode that may lie between a value and the jump that depends on its truth.
SKIPPED_BYTECODE = ("CACHE", "TO_BOOL", "NOT_TAKEN", "COPY", "EXTENDED_ARG")
FX = str(Path(torch.__file__).parent / "fx")
OURS = (str(Path(torch.__file__).parent), __file__)
# One thread at a time, as torch.fx patches nn.Module while it traces.
TRACING = threading.RLock()


class Untraceable(UsageError):
    """A forward that can't be traced, with the reason."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"{reason}; {REMEDY}")
        self.reason = reason


def trace_operations(
    model: nn.Module, layers: Sequence[str], inputs: Sequence[str]
) -> list[Operation]:
    """Trace the forward of a model for these of its arguments; `layers` are called whole."""
    refuse_hooks(model, layers)
    with TRACING:
        # The third trace shows what differs between two traces of the same mode.
        training, evaluation, again = (
            _trace_mode(model, layers, inputs, training=mode) for mode in (True, False, True)
        )
    _refuse_changes(model, training, again)
    return _merge_modes(model, training, evaluation)


def _merge_modes(
    model: nn.Module, training: Sequence[Operation], evaluation: Sequence[Operation]
) -> list[Operation]:
    """Merge the traces of two modes, which may differ in arguments alone."""
    pairs = zip(training, evaluation, strict=False)
    other = next(
        (
            one.name
            for one, two in pairs
            if (one.name, one.kind, one.target) != (two.name, two.kind, two.target)
        ),
        None,
    )
    if other or len(training) != len(evaluation):
        at = f" from {other} on" if other else ""
        raise Untraceable(
            f"the forward of {type(model).__name__} does other things in training than in "
            f"evaluation{at}"
        )
    return [one.merge_evaluation(two) for one, two in zip(training, evaluation, strict=True)]


def _refuse_changes(
    model: nn.Module, first: Sequence[Operation], again: Sequence[Operation]
) -> None:
    """Raise `UsageError` for a forward that does something else each time."""
    alike = [
        one.merge_evaluation(two)
        for one, two in zip(first, again, strict=False)
        if one.target == two.target
    ]
    changed = next((operation.name for operation in alike if operation.depends_on_mode), None)
    if changed or not len(alike) == len(first) == len(again):
        at = f" (at {changed})" if changed else ""
        kind = type(model).__name__
        raise UsageError(
            f"the forward of {kind} does other things each time{at}, such as drawing random "
            f"numbers in Python; {REMEDY}"
        )


def _trace_mode(
    model: nn.Module, layers: Sequence[str], inputs: Sequence[str], *, training: bool
) -> list[Operation]:
    """Trace a forward once, and set back whatever it changes in modules around the layers."""
    through = {
        name: module for name, module in model.named_modules() if not is_called_whole(name, layers)
    }
    before = {name: dict(vars(module)) for name, module in through.items()}
    tracer = LayerTracer(layers, inputs)
    try:
        for module in through.values():
            vars(module)["training"] = training
        with tracer.record_functions():
            graph = tracer.trace(model)
    except UsageError:
        raise
    except Exception as error:
        raise Untraceable(_explain_failure(model, error)) from error
    finally:
        after = {name: dict(vars(module)) for name, module in through.items()}
        for name, module in through.items():
            vars(module).clear()
            vars(module).update(before[name])
    _refuse_assignments(before, after)
    # Nodes that only look something up are no operations: put it into the arguments of others.
    replacements = {
        node: place
        for node in graph.nodes
        if node.op == "get_attr"
        for place in [tracer.constants.get(node.target, ModelPath(node.target))]
    }
    return [
        tracer.make_operation(node, replacements)
        for node in graph.nodes
        if node.op not in ("get_attr", "placeholder")
    ]


def is_called_whole(name: str, layers: Sequence[str]) -> bool:
    """Whether a module is called whole: it is a layer, or has no layer inside."""
    return bool(name) and (
        name in layers or not any(layer.startswith(f"{name}.") for layer in layers)
    )


class LayerTracer(Tracer):
    """Records calls of layers, and of modules without layers inside, as one operation each.

    Names and signatures of overridden methods are those of torch.fx. While it traces, torch.fx
    patches nn.Module, and `record_functions` patches torch, for all threads. So calls of
    other threads (`_is_other_thread`) are passed on.
    """

    def __init__(self, layers: Sequence[str], inputs: Sequence[str]) -> None:
        super().__init__(
            autowrap_modules=(math,),
            autowrap_functions=(checkpoint.checkpoint, *FACTORIES),
            param_shapes_constant=True,
        )
        self.constants = dict[str, Tensor]()
        self._layers, self._inputs, self._thread = (
            frozenset(layers),
            tuple(inputs),
            threading.get_ident(),
        )
        self._modes = _current_modes()
        self._no_grad_names = set[str]()

    @contextmanager
    def record_functions(self) -> Iterator[None]:
        """Record functions of torch that torch.fx overlooks, inside of the block."""
        places: list[tuple[Any, str, Any]] = [
            (torch, function.__name__, function) for function in FACTORIES
        ]
        places.append((checkpoint, "checkpoint", checkpoint.checkpoint))
        # Private to torch: every call of an autograd.Function passes its arguments through this
        # function. If it is renamed, this raises; if it isn't called any more, such functions are
        # traced through, and their own backward is lost.
        functions = torch._functorch.utils
        unwrap = functions.unwrap_dead_wrappers
        try:
            for module, name, function in places:
                setattr(module, name, self._make_recorder(function))
            functions.unwrap_dead_wrappers = functools.partial(self._refuse_own_backward, unwrap)
            yield
        finally:
            for module, name, function in places:
                setattr(module, name, function)
            functions.unwrap_dead_wrappers = unwrap

    def _make_recorder(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def record(*args: Any, **kwargs: Any) -> Any:
            # Random numbers are recorded without arguments from the batch, too: the values drawn
            # now would be used for ever.
            drawn = function in RANDOM
            if self._is_other_thread or not (
                drawn or any(isinstance(leaf, Proxy) for leaf in tree_leaves((args, kwargs)))
            ):
                return function(*args, **kwargs)
            return self.create_proxy("call_function", function, args, kwargs)

        return record

    def _refuse_own_backward(self, unwrap: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        if not self._is_other_thread and any(isinstance(leaf, Proxy) for leaf in tree_leaves(args)):
            raise TraceError("a torch.autograd.Function has a backward of its own")
        return unwrap(args)

    @property
    def _is_other_thread(self) -> bool:
        """Whether another thread is calling."""
        return threading.get_ident() != self._thread

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return is_called_whole(module_qualified_name, tuple(self._layers))

    def call_module(
        self,
        m: nn.Module,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        return (
            forward(*args, **kwargs)
            if self._is_other_thread
            else super().call_module(m, forward, args, kwargs)
        )

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: dict[str, Proxy]) -> Any:
        if self._is_other_thread:
            return attr_val
        # torch.fx would keep the buffer's value of this moment.
        buffers = self.root.named_buffers() if isinstance(attr_val, Tensor) else ()
        if path := next((name for name, buffer in buffers if buffer is attr_val), None):
            if path not in parameter_proxy_cache:
                parameter_proxy_cache[path] = self.create_proxy("get_attr", path, (), {})
            return parameter_proxy_cache[path]
        return super().getattr(attr, attr_val, parameter_proxy_cache)

    def create_args_for_root(
        self, root_fn: Callable[..., Any], is_module: bool, concrete_args: Any = None
    ) -> tuple[Any, list[Any]]:
        proxies = {name: self.create_proxy("placeholder", name, (), {}) for name in self._inputs}

        def forward(root: nn.Module) -> Any:
            return root_fn(root, **proxies)

        return forward, [self.root]

    def create_arg(self, a: Any) -> Any:
        # Tensors that the forward has made or found elsewhere are constants.
        if isinstance(a, Tensor) and a not in self.tensor_attrs and not _is_state(a, self.root):
            name = f"constant {len(self.constants)}"
            self.constants[name] = a
            return self.create_node("get_attr", name, (), {})
        # Dataclasses, and mappings of the script's own classes, are made again in each forward.
        if dataclasses.is_dataclass(a) and not isinstance(a, type):
            fields = {
                field.name: self.create_arg(getattr(a, field.name))
                for field in dataclasses.fields(a)
                if field.init
            }
            return self.create_node("call_function", type(a), (), fields)
        if isinstance(a, Mapping) and type(a) not in (dict, defaultdict):
            return self.create_node("call_function", type(a), (self.create_arg(dict(a)),), {})
        return super().create_arg(a)

    def create_node(self, kind: str, target: Any, *args: Any, **kwargs: Any) -> Node:
        node = super().create_node(kind, target, *args, **kwargs)
        graded, rest = _current_modes()
        if rest != self._modes[1]:
            raise TraceError(
                "torch.autocast (or torch.inference_mode) around a part "
                "of the forward can't be recorded"
            )
        if self._modes[0] and not graded:
            self._no_grad_names.add(node.name)
        return node

    def to_bool(self, obj: Proxy) -> bool:
        """Record an assertion, and go on as if it held; refuse any other branch."""
        place = _find_assertion()
        if place is None:
            return super().to_bool(obj)
        self.create_proxy("call_function", _check_assertion, (obj, place), {})
        return True

    def make_operation(self, node: Node, replacements: dict[Node, Any]) -> Operation:
        """Make the operation of a node; `replacements` is for look-up nodes."""

        def named(leaf: Any) -> Any:
            if not isinstance(leaf, Node):
                return leaf
            return replacements.get(
                leaf, ValueRef(str(leaf.target) if leaf.op == "placeholder" else leaf.name)
            )

        kinds = {
            "call_module": "module",
            "call_function": "function",
            "call_method": "method",
            "output": "output",
        }
        args, kwargs = substitute_leaves(node.args, named), substitute_leaves(node.kwargs, named)
        kind: Any = kinds[node.op]
        name = OUTPUT if node.op == "output" else node.name
        return Operation(
            name, kind, node.target, args, kwargs, node.name not in self._no_grad_names
        )


def _check_assertion(condition: Any, place: str) -> None:
    """Check an assertion of the forward, when the trace runs."""
    if not condition:
        raise AssertionError(f"the assertion at {place} doesn't hold")


def _find_assertion() -> str | None:
    """File and line of an `assert` that tests a proxy at this moment; None if something else does.

    The bytecode after the test tells: a jump if it is true, over the loading of AssertionError.
    """
    stack = inspect.stack(context=0)
    frame = next(one.frame for one in stack if not one.filename.startswith(OURS))
    following = [
        one
        for one in dis.get_instructions(frame.f_code)
        if one.offset >= frame.f_lasti and one.opname not in SKIPPED_BYTECODE
    ]
    jump, raised = following[0].opname, f"{following[1].opname} {following[1].argval}"
    # From Python 3.14 on, AssertionError is a common constant.
    asserts = "LOAD_ASSERTION_ERROR" in raised or raised == "LOAD_COMMON_CONSTANT AssertionError"
    if asserts and jump.startswith("POP_JUMP") and jump.endswith("IF_TRUE"):
        return f"{frame.f_code.co_filename}:{frame.f_lineno}"
    return None


def _is_state(a: Tensor, root: nn.Module) -> bool:
    return isinstance(a, nn.Parameter) or any(a is buffer for buffer in root.buffers())


def _current_modes() -> tuple[bool, tuple[Any, ...]]:
    autocast = [
        (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
        for kind in ("cpu", "cuda")
    ]
    return torch.is_grad_enabled(), (torch.is_inference_mode_enabled(), *autocast)


def _refuse_assignments(
    before: Mapping[str, Mapping[str, Any]], after: Mapping[str, Mapping[str, Any]]
) -> None:
    """Raise `UsageError` if a forward has set an attribute, which other workers wouldn't see."""
    for name, attributes in after.items():
        for key, value in attributes.items():
            if key != "training" and before[name].get(key, before) is not value:
                path = f"{name}.{key}" if name else key
                raise UsageError(
                    f"the forward sets the attribute {path}, which layers on other workers "
                    f"wouldn't see; {REMEDY}"
                )


def refuse_hooks(model: nn.Module, layers: Sequence[str]) -> None:
    """Raise `UsageError` for hooks and replaced forwards that stages would pass over."""
    if "forward" in vars(model):
        raise UsageError(
            f"the forward of this {type(model).__name__} was set on the object, and stages run the "
            "forward of its class: "
            "cut a model into layers once, and before anything else replaces its forward"
        )
    for name, module in model.named_modules():
        # Private to torch: dicts of hooks by handle. If they are renamed, this raises.
        hooks = [
            *module._forward_hooks.values(),
            *module._forward_pre_hooks.values(),
            *module._backward_hooks.values(),
        ]
        of_scripts = [
            hook
            for hook in hooks
            if not str(getattr(hook, "__module__", None)).startswith("paceline.")
        ]
        if name and not is_called_whole(name, layers) and of_scripts:
            raise UsageError(
                f"{name} has a hook, but isn't called itself, as layers inside of it are; put the "
                f"hook on them, or name {name} as a layer"
            )


def _explain_failure(model: nn.Module, error: Exception) -> str:
    """Explain why and where a forward can't be traced, from the error that torch.fx has raised."""
    every = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith((__file__, FX))
    ]
    frames = [frame for frame in every if not frame.filename.startswith(OURS)] or every
    place = (
        f"{frames[-1].filename}:{frames[-1].lineno} ({frames[-1].line})"
        if frames
        else inspect.getfile(type(model))
    )
    reason = str(error).splitlines()[0] if str(error) else type(error).__name__
    if "cannot be iterated" in reason:
        reason = "a loop there goes over a value that is known only when the model runs"
    elif "control flow" in reason:
        reason = (
            "an if, while or assert there depends on a value that is known only when the model runs"
        )
    elif reason.startswith("argument of type"):
        reason = "an object there holds values, and is no tuple, list, dict or dataclass"
    return f"the forward of {type(model).__name__} can't be traced at {place}: {reason}"
