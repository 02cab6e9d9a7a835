"""Plans that models bring along, for `tensor("auto")`: an attribute `tensor_plan`, or what models
of transformers have.

    class Perceptron(nn.Module):
        tensor_plan = pl.tensor({"up": pl.column(), "down": pl.row()})      names as this module has them; divide= goes along

A model takes the plans of all modules inside of it that bring one. Those of transformers are
`base_model_tp_plan` of a configuration, and `_tp_plan` of heads.
"""  # noqa: E501

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import NamedTuple, Protocol

from torch import nn

from paceline.errors import UsageError
from paceline.parallel.tensor.styles import Style, column, experts, row, summed, vocab

HEADS = ("num_attention_heads", "num_key_value_heads")
STYLES: Mapping[str, Style | None] = {  # None: the module stays as it is
    "colwise": column(),
    "colwise_rep": column(gather=True),
    "colwise_gather_output": column(gather=True),
    "rowwise": row(),
    "rowwise_rep": row(split=True),
    "rowwise_split_input": row(split=True),
    "embedding_rowwise": vocab(),
    "packed_colwise": column(parts=2),
    "moe_tp_experts": experts(),
    "replicated_with_grad_allreduce": summed(),
    "replicate": None,
}


class BroughtPlan(Protocol):
    """A plan as a model brings it, which is what a script writes as `tensor(...)`."""

    @property
    def layers(self) -> Mapping[str, Style] | str: ...

    @property
    def divide(self) -> Sequence[str]: ...


class ModelPlan(NamedTuple):
    """How each layer of a model is cut, and the numbers that are divided, by patterns of names
    as the model has them.
    """

    layers: dict[str, Style]
    divide: list[str]


GPT2: Mapping[str, ModelPlan] = {  # modules of transformers, which has no plan for them
    "GPT2Attention": ModelPlan(
        {"c_attn": column(parts=3), "c_proj": row()}, ["split_size", "num_heads"]
    ),
    "GPT2MLP": ModelPlan({"c_fc": column(), "c_proj": row()}, []),
}


def of_model(model: nn.Module, size: int) -> ModelPlan:
    """Return the plan that a model brings along, for so many workers: that of its modules, else
    that of transformers.

    Raises `UsageError` for a model without one.
    """
    model = getattr(model, "_orig_mod", model)  # of torch.compile
    found = ModelPlan({}, [])
    for name, module in model.named_modules():
        # which has other layers, and stays whole
        kind, crossed = type(module), getattr(module, "is_cross_attention", False)
        known = (
            GPT2.get(kind.__name__)
            if kind.__module__.startswith("transformers.") and not crossed
            else None
        )
        plan: BroughtPlan | None = getattr(module, "tensor_plan", known)
        if plan is None:
            continue
        layers, before = plan.layers, f"{name}." if name else ""
        if isinstance(layers, str):
            raise UsageError(
                f"tensor_plan of {type(module).__name__} is tensor({layers!r}); "
                "a plan has to name layers"
            )
        for pattern, style in layers.items():
            found.layers.setdefault(before + pattern, style)
        found.divide.extend(before + pattern for pattern in plan.divide)
    return found if found.layers else ModelPlan(of_transformers(model, size), [])


def of_transformers(model: nn.Module, size: int) -> dict[str, Style]:
    """Read the plan of a model for so many workers.

    An embedding that is tied to a layer of the plan is cut with it.

    Raises `UsageError` for a model without a plan, a style that is not known here, and heads that
    can't be divided.
    """
    model = getattr(model, "_orig_mod", model)
    plan = _plan(model)
    if not plan:
        kind = type(model).__name__
        raise UsageError(
            f'tensor("auto"): {kind} has no plan (tensor_plan of its class, or base_model_tp_plan '
            "of its config); "
            'write tensor({"name.*": column(), ...})'
        )
    plan.update(_tied(model, plan))
    config = getattr(model, "config", None)
    for heads in HEADS:
        number = getattr(config, heads, None)
        if isinstance(number, int) and number % size:
            fits = (
                " or ".join(str(each) for each in range(2, number + 1) if number % each == 0) or "1"
            )
            raise UsageError(
                f'tensor("auto"): {heads} of the model is {number}, which {size} workers can\'t '
                f"divide; choose tensor={fits}"
            )
    return plan


def _plan(model: nn.Module) -> dict[str, Style]:
    """Gather the plans of a model and of the models inside of it, with names as this model has
    them.
    """
    found: dict[str, Style] = {}
    for prefix, module in model.named_modules():
        before = f"{prefix}." if prefix else ""
        own = vars(type(module)).get("_tp_plan") or {}
        inner = getattr(getattr(module, "config", None), "base_model_tp_plan", None) or {}
        base = _is_base(module, inner)
        words = {**(inner if base else {}), **own}
        for pattern, word in words.items():
            # a parameter of experts, which are cut as one
            if words.get(pattern.rpartition(".")[0]) == "moe_tp_experts":
                continue
            if word not in STYLES:
                raise UsageError(
                    f'tensor("auto"): the plan of {type(module).__name__} cuts {pattern} by '
                    f"{word!r}, which is not known here; "
                    f"known are {', '.join(sorted(STYLES))}. Write the plan out: tensor({{...}})"
                )
            if (style := STYLES[word]) is not None:
                found.setdefault(before + pattern, style)
    return found


def _tied(model: nn.Module, plan: Mapping[str, Style]) -> dict[str, Style]:
    """Cut embeddings by words whose weight is that of a layer of the plan, where the plan
    doesn't name them.
    """
    named = {
        name: module
        for name, module in model.named_modules()
        if any(fnmatchcase(name, pattern) for pattern in plan)
    }
    weights = {id(module.weight) for module in named.values() if isinstance(module, nn.Linear)}
    others = [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, nn.Embedding) and name not in named
    ]
    return {name: vocab() for name, module in others if id(module.weight) in weights}


def _is_base(module: nn.Module, plan: Mapping[str, str]) -> bool:
    """Whether a configuration's plan is about this module, and not about one inside of it."""
    return bool(plan) and all(hasattr(module, pattern.partition(".")[0]) for pattern in plan)
