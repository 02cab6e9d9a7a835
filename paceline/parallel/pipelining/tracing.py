"""The forward of a model as operations, by torch.fx: layers are called whole, and what lies between
them is taken down call by call.

It is traced in training and in evaluation; an argument that differs, such as the probability of a
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
from torch.utils._pytree import tree_leaves

from paceline.errors import UsageError
from paceline.parallel.pipelining.operations import OUTPUT, Attribute, Operation, Ref, substitute

INSTEAD = (
    "name the module that does this as one layer, or say trace=False if the layers simply follow "
    "one another"
)
RANDOM = (torch.rand, torch.randint, torch.randn, torch.randperm)
FILLED = (torch.empty, torch.eye, torch.full, torch.ones, torch.zeros)
RANGES = (torch.arange, torch.linspace, torch.logspace)
FACTORIES = (*RANDOM, *FILLED, *RANGES, torch.tensor)  # torch.fx sees no tensor in their arguments
# bytecode between a value and the jump by its truth
SILENT = ("CACHE", "TO_BOOL", "NOT_TAKEN", "COPY", "EXTENDED_ARG")
FX = str(Path(torch.__file__).parent / "fx")
OURS = (str(Path(torch.__file__).parent), __file__)
TRACING = threading.RLock()  # torch.fx patches nn.Module while it traces


class Untraceable(UsageError):
    """A forward does what can't be taken down, for this reason."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"{reason}; {INSTEAD}")
        self.reason = reason


def trace_operations(
    model: nn.Module, layers: Sequence[str], inputs: Sequence[str]
) -> list[Operation]:
    """Take down what the forward of a model does, given these of its arguments; `layers` are
    called whole.
    """
    refuse_hooks(model, layers)
    with TRACING:
        training, evaluation, again = (
            _trace(model, layers, inputs, training=mode) for mode in (True, False, True)
        )
    _refuse_changes(model, training, again)
    return _merge(model, training, evaluation)


def _merge(
    model: nn.Module, training: Sequence[Operation], evaluation: Sequence[Operation]
) -> list[Operation]:
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
    return [one.merged(two) for one, two in zip(training, evaluation, strict=True)]


def _refuse_changes(
    model: nn.Module, first: Sequence[Operation], again: Sequence[Operation]
) -> None:
    """Refuse a forward that does something else each time: it would do the same ever after."""
    alike = [
        one.merged(two) for one, two in zip(first, again, strict=False) if one.target == two.target
    ]
    changed = next((operation.name for operation in alike if operation.by_mode), None)
    if changed or not len(alike) == len(first) == len(again):
        at = f" (at {changed})" if changed else ""
        kind = type(model).__name__
        raise UsageError(
            f"the forward of {kind} does other things each time{at}, as if it drew random numbers "
            f"by itself; {INSTEAD}"
        )


def _trace(
    model: nn.Module, layers: Sequence[str], inputs: Sequence[str], *, training: bool
) -> list[Operation]:
    through = {name: module for name, module in model.named_modules() if not is_whole(name, layers)}
    before = {name: dict(vars(module)) for name, module in through.items()}
    tracer = LayerTracer(layers, inputs)
    try:
        for module in through.values():
            vars(module)["training"] = training
        with tracer.recording():
            graph = tracer.trace(model)
    except UsageError:
        raise
    except Exception as error:
        raise Untraceable(_explain(model, error)) from error
    finally:
        after = {name: dict(vars(module)) for name, module in through.items()}
        for name, module in through.items():
            vars(module).clear()
            vars(module).update(before[name])
    _refuse_assignments(before, after)
    kept = {
        node: place
        for node in graph.nodes
        if node.op == "get_attr"
        for place in [tracer.constants.get(node.target, Attribute(node.target))]
    }
    return [
        tracer.operation(node, kept)
        for node in graph.nodes
        if node.op not in ("get_attr", "placeholder")
    ]


def is_whole(name: str, layers: Sequence[str]) -> bool:
    """Whether a module is called whole: it is a layer or has none inside."""
    return bool(name) and (
        name in layers or not any(layer.startswith(f"{name}.") for layer in layers)
    )


class LayerTracer(Tracer):
    """Records calls of layers, and of modules without layers inside, as one operation each."""

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
        self._modes = _modes()
        self._ungraded = set[str]()

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record functions of torch too that torch.fx doesn't see, as their arguments are no
        tensors.
        """
        places: list[tuple[Any, str, Any]] = [
            (torch, function.__name__, function) for function in FACTORIES
        ]
        places.append((checkpoint, "checkpoint", checkpoint.checkpoint))
        # private: what torch passes the arguments of each call of an autograd.Function to, however
        # that is called
        functions = torch._functorch.utils
        unwrap = functions.unwrap_dead_wrappers
        try:
            for module, name, function in places:
                setattr(module, name, self._recorder(function))
            functions.unwrap_dead_wrappers = functools.partial(self._refuse_own_backward, unwrap)
            yield
        finally:
            for module, name, function in places:
                setattr(module, name, function)
            functions.unwrap_dead_wrappers = unwrap

    def _recorder(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def record(*args: Any, **kwargs: Any) -> Any:
            # without arguments from the batch too, or the same numbers would be used ever after
            drawn = function in RANDOM
            if self._elsewhere or not (
                drawn or any(isinstance(leaf, Proxy) for leaf in tree_leaves((args, kwargs)))
            ):
                return function(*args, **kwargs)
            return self.create_proxy("call_function", function, args, kwargs)

        return record

    def _refuse_own_backward(self, unwrap: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        if not self._elsewhere and any(isinstance(leaf, Proxy) for leaf in tree_leaves(args)):
            raise TraceError("a torch.autograd.Function has a backward of its own")
        return unwrap(args)

    @property
    def _elsewhere(self) -> bool:
        """Whether another thread calls, whose modules torch.fx has patched too."""
        return threading.get_ident() != self._thread

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return is_whole(module_qualified_name, tuple(self._layers))

    def call_module(
        self,
        m: nn.Module,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        return (
            forward(*args, **kwargs)
            if self._elsewhere
            else super().call_module(m, forward, args, kwargs)
        )

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: dict[str, Proxy]) -> Any:
        if self._elsewhere:
            return attr_val
        buffers = self.root.named_buffers() if isinstance(attr_val, Tensor) else ()
        # else torch.fx keeps its value of this moment
        if path := next((name for name, buffer in buffers if buffer is attr_val), None):
            if path not in parameter_proxy_cache:
                parameter_proxy_cache[path] = self.create_proxy("get_attr", path, (), {})
            return parameter_proxy_cache[path]
        return super().getattr(attr, attr_val, parameter_proxy_cache)

    def create_args_for_root(
        self, root_fn: Callable[..., Any], is_module: bool, concrete_args: Any = None
    ) -> tuple[Any, list[Any]]:
        given = {name: self.create_proxy("placeholder", name, (), {}) for name in self._inputs}

        def forward(root: nn.Module) -> Any:
            return root_fn(root, **given)

        return forward, [self.root]

    def create_arg(self, a: Any) -> Any:
        if isinstance(a, Tensor) and a not in self.tensor_attrs and not _is_state(a, self.root):
            name = f"constant {len(self.constants)}"
            self.constants[name] = a
            return self.create_node("get_attr", name, (), {})
        # made again in each forward, as dicts of the script's own are
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
        graded, rest = _modes()
        if rest != self._modes[1]:
            raise TraceError(
                "torch.autocast (or torch.inference_mode) around a part of the forward can't be "
                "recorded"
            )
        if self._modes[0] and not graded:
            self._ungraded.add(node.name)
        return node

    def to_bool(self, obj: Proxy) -> bool:
        """Record an assertion, which leads the forward nowhere else; refuse any other branch."""
        place = _assertion()
        if place is None:
            return super().to_bool(obj)
        self.create_proxy("call_function", _hold, (obj, place), {})
        return True

    def operation(self, node: Node, kept: dict[Node, Any]) -> Operation:
        """Make the operation of a node; `kept`: what stands for nodes that only look something
        up.
        """

        def named(leaf: Any) -> Any:
            if not isinstance(leaf, Node):
                return leaf
            return kept.get(leaf, Ref(str(leaf.target) if leaf.op == "placeholder" else leaf.name))

        kinds = {
            "call_module": "module",
            "call_function": "function",
            "call_method": "method",
            "output": "output",
        }
        args, kwargs = substitute(node.args, named), substitute(node.kwargs, named)
        kind: Any = kinds[node.op]
        name = OUTPUT if node.op == "output" else node.name
        return Operation(name, kind, node.target, args, kwargs, node.name not in self._ungraded)


def _hold(condition: Any, place: str) -> None:
    if not condition:
        raise AssertionError(f"the assertion at {place} doesn't hold")


def _assertion() -> str | None:
    """Return file and line of an `assert` that asks for the truth of a proxy at this moment;
    None if something else asks.
    """
    stack = inspect.stack(context=0)
    frame = next(one.frame for one in stack if not one.filename.startswith(OURS))
    following = [
        one
        for one in dis.get_instructions(frame.f_code)
        if one.offset >= frame.f_lasti and one.opname not in SILENT
    ]
    jump, raised = following[0].opname, f"{following[1].opname} {following[1].argval}"
    # the latter from Python 3.14 on
    asserts = "LOAD_ASSERTION_ERROR" in raised or raised == "LOAD_COMMON_CONSTANT AssertionError"
    if asserts and jump.startswith("POP_JUMP") and jump.endswith("IF_TRUE"):
        return f"{frame.f_code.co_filename}:{frame.f_lineno}"
    return None


def _is_state(a: Tensor, root: nn.Module) -> bool:
    return isinstance(a, nn.Parameter) or any(a is buffer for buffer in root.buffers())


def _modes() -> tuple[bool, tuple[Any, ...]]:
    autocast = [
        (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
        for kind in ("cpu", "cuda")
    ]
    return torch.is_grad_enabled(), (torch.is_inference_mode_enabled(), *autocast)


def _refuse_assignments(
    before: Mapping[str, Mapping[str, Any]], after: Mapping[str, Mapping[str, Any]]
) -> None:
    for name, attributes in after.items():
        for key, value in attributes.items():
            if key != "training" and before[name].get(key, before) is not value:
                path = f"{name}.{key}" if name else key
                raise UsageError(
                    f"the forward sets the attribute {path}, which layers on other workers "
                    f"wouldn't see; {INSTEAD}"
                )


def refuse_hooks(model: nn.Module, layers: Sequence[str]) -> None:
    """Raise `UsageError` for what would be called in the place of, or beside, forwards that
    stages run a part of.
    """
    if "forward" in vars(model):
        raise UsageError(
            f"the forward of this {type(model).__name__} was set on the object, over that of its "
            "class, which is what stages run: "
            "a model is cut into layers once, before anything else takes its forward's place"
        )
    for name, module in model.named_modules():
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
        if name and not is_whole(name, layers) and of_scripts:
            raise UsageError(
                f"{name} has a hook, but isn't called where layers inside of it are; "
                f"put the hook on these, or name {name} itself"
            )


def _explain(model: nn.Module, error: Exception) -> str:
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
