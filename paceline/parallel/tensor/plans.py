"""Plans that models bring along, for `tensor("auto")`: `tensor_plan`, or those of transformers.

    class Perceptron(nn.Module):
        tensor_plan = pl.tensor({"up": pl.column(), "down": pl.row()})    names within this module

A model takes the plans of all modules inside of it that have one, with their divide=. Plans of
transformers are `base_model_tp_plan` of a configuration, and `_tp_plan` of heads.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import NamedTuple, Protocol

from torch import nn

from paceline.errors import UsageError
from paceline.parallel.tensor.styles import Style, column, experts, row, summed, vocab

HEAD_COUNTS = ("num_attention_heads", "num_key_value_heads")
# The names of styles in transformers' plans. None: the module stays as it is.
STYLES: Mapping[str, Style | None] = {
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


class OwnPlan(Protocol):
    """A plan as an attribute of a model; a script writes it as `tensor(...)`."""

    @property
    def layers(self) -> Mapping[str, Style] | str: ...

    @property
    def divide(self) -> Sequence[str]: ...


class ModelPlan(NamedTuple):
    """How layers of a model are cut, and which numbers are divided, by patterns of names."""

    layers: dict[str, Style]
    divide: list[str]


# Transformers has no plan for these modules of its own.
GPT2: Mapping[str, ModelPlan] = {
    "GPT2Attention": ModelPlan(
        {"c_attn": column(parts=3), "c_proj": row()}, ["split_size", "num_heads"]
    ),
    "GPT2MLP": ModelPlan({"c_fc": column(), "c_proj": row()}, []),
}


def find_plan(model: nn.Module, size: int) -> ModelPlan:
    """Find the plan that a model brings along, for `size` workers.

    It is that of its modules, or else that of transformers.

    Raises `UsageError` for a model without one.
    """
    # Private: the model that torch.compile has wrapped.
    model = getattr(model, "_orig_mod", model)
    model_plan = ModelPlan({}, [])
    for name, module in model.named_modules():
        # Cross-attention of GPT-2 has other layers, and stays whole.
        kind, crossed = type(module), getattr(module, "is_cross_attention", False)
        built_in = (
            GPT2.get(kind.__name__)
            if kind.__module__.startswith("transformers.") and not crossed
            else None
        )
        plan: OwnPlan | None = getattr(module, "tensor_plan", built_in)
        if plan is None:
            continue
        layers, before = plan.layers, f"{name}." if name else ""
        if isinstance(layers, str):
            raise UsageError(
                f"tensor_plan of {type(module).__name__} is tensor({layers!r}); "
                "a plan has to name layers"
            )
        for pattern, style in layers.items():
            model_plan.layers.setdefault(before + pattern, style)
        model_plan.divide.extend(before + pattern for pattern in plan.divide)
    return model_plan if model_plan.layers else ModelPlan(read_transformers_plan(model, size), [])


def read_transformers_plan(model: nn.Module, size: int) -> dict[str, Style]:
    """Read transformers' plan of a model for `size` workers.

    An embedding that is tied to a layer of the plan is cut with it.

    Raises `UsageError` for a model without a plan, a style that is not known here, and heads that
    can't be divided.
    """
    model = getattr(model, "_orig_mod", model)
    plan = _collect_plans(model)
    if not plan:
        kind = type(model).__name__
        raise UsageError(
            f'tensor("auto"): {kind} has no plan (tensor_plan of its class, or base_model_tp_plan '
            "of its config); "
            'write tensor({"name.*": column(), ...})'
        )
    plan.update(_find_tied_embeddings(model, plan))
    config = getattr(model, "config", None)
    for heads in HEAD_COUNTS:
        head_count = getattr(config, heads, None)
        if isinstance(head_count, int) and head_count % size:
            fits = (
                " or ".join(
                    str(each) for each in range(2, head_count + 1) if head_count % each == 0
                )
                or "1"
            )
            raise UsageError(
                f'tensor("auto"): {heads} of the model is {head_count}, which {size} workers '
                f"can't divide; choose tensor={fits}"
            )
    return plan


def _collect_plans(model: nn.Module) -> dict[str, Style]:
    """Collect the plans of a model and of models inside of it, with names from this model on."""
    layers: dict[str, Style] = {}
    for prefix, module in model.named_modules():
        before = f"{prefix}." if prefix else ""
        own = vars(type(module)).get("_tp_plan") or {}
        inner = getattr(getattr(module, "config", None), "base_model_tp_plan", None) or {}
        applies = _is_plan_for(module, inner)
        words = {**(inner if applies else {}), **own}
        for pattern, word in words.items():
            # Experts are cut as a whole, so their parameters have no entries of their own.
            if words.get(pattern.rpartition(".")[0]) == "moe_tp_experts":
                continue
            if word not in STYLES:
                raise UsageError(
                    f'tensor("auto"): the plan of {type(module).__name__} cuts {pattern} by '
                    f"{word!r}, which is not known here; "
                    f"known are {', '.join(sorted(STYLES))}. Write the plan out: tensor({{...}})"
                )
            if (style := STYLES[word]) is not None:
                layers.setdefault(before + pattern, style)
    return layers


def _find_tied_embeddings(model: nn.Module, plan: Mapping[str, Style]) -> dict[str, Style]:
    """Find embeddings that share a weight with a layer of the plan, to cut them by words."""
    planned = {
        name: module
        for name, module in model.named_modules()
        if any(fnmatchcase(name, pattern) for pattern in plan)
    }
    weights = {id(module.weight) for module in planned.values() if isinstance(module, nn.Linear)}
    others = [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, nn.Embedding) and name not in planned
    ]
    return {name: vocab() for name, module in others if id(module.weight) in weights}


def _is_plan_for(module: nn.Module, plan: Mapping[str, str]) -> bool:
    """Whether a configuration's plan is for this module, and not for one inside of it."""
    return bool(plan) and all(hasattr(module, pattern.partition(".")[0]) for pattern in plan)
