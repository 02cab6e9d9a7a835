"""The Trainer on paceline: what it computes, saves and refuses."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset
from transformers import (
    EarlyStoppingCallback,
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
    TrainingArguments,
)

from paceline.bridges.transformers import PacelineTrainer
from paceline.errors import UsageError
from tests.harness.torchrun_workers import run_workers

GLOBAL_BATCH = 6
SIZES = pytest.mark.parametrize("size", [1, 2, 3])


class Sentences(Dataset[dict[str, Tensor]]):
    """Random tokens; samples have from 2 to 11 labels that count."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        drawn = torch.Generator().manual_seed(index)
        tokens = torch.randint(0, 50, (12,), generator=drawn)
        labels = tokens.clone()
        labels[3 + index % 10 :] = -100
        return {"input_ids": tokens, "labels": labels}


class Points(Dataset[dict[str, Tensor]]):
    """Points of a regression."""

    def __init__(self, count: int) -> None:
        self.x = torch.randn(count, 4, generator=torch.Generator().manual_seed(7))

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"x": self.x[index], "labels": self.x[index].sum().reshape(1)}


class Regression(nn.Module):
    """A model whose loss is a plain mean over its batch."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        answers = self.layer(x)
        return {"loss": nn.functional.mse_loss(answers, labels), "logits": answers}


def make_model(kind: str) -> nn.Module:
    torch.manual_seed(0)
    if kind == "regression":
        return Regression()
    options = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    config = GPT2Config(
        vocab_size=50, n_positions=16, n_embd=8, n_layer=1, n_head=2, eos_token_id=0, **options
    )
    return GPT2LMHeadModel(config).eval()  # as `from_pretrained` gives it


class Trained(NamedTuple):
    """What a training came to."""

    losses: list[float]
    norms: list[float]
    evaluation: float
    predictions: int
    parameters: list[float]


def make_arguments(folder: Path, batch: int, **options: Any) -> TrainingArguments:
    chosen = {
        "max_steps": 4,
        "logging_steps": 1,
        "save_strategy": "no",
        "learning_rate": 0.01,
        "lr_scheduler_type": "linear",
        "max_grad_norm": 0.5,
        **options,
    }
    return TrainingArguments(
        output_dir=str(folder / "out"),
        use_cpu=True,
        per_device_train_batch_size=batch,
        per_device_eval_batch_size=batch,
        report_to=[],
        disable_tqdm=True,
        seed=1,
        **chosen,
    )


def count_all(prediction: Any) -> dict[str, float]:
    return {"count": float(len(prediction.label_ids))}


def train(
    size: int,
    folder: Path,
    kind: str = "sentences",
    count: int = 23,
    *,
    plain: bool = False,
    resume: bool = False,
    callbacks: Any = None,
    strategy: dict[str, Any] | None = None,
    **options: Any,
) -> Trained:
    arguments = make_arguments(folder, GLOBAL_BATCH if plain else GLOBAL_BATCH // size, **options)
    data = Sentences(count) if kind == "sentences" else Points(count)
    model = make_model(kind)
    common: dict[str, Any] = {
        "model": model,
        "args": arguments,
        "train_dataset": data,
        "eval_dataset": data,
        "compute_metrics": count_all,
        "callbacks": callbacks,
    }
    trainer: Any = (
        Trainer(**common) if plain else PacelineTrainer(**common, **(strategy or {"trace": "off"}))
    )
    trainer.train(resume_from_checkpoint=resume or None)
    evaluated = trainer.evaluate()
    assert evaluated["eval_count"] == count
    predicted = trainer.predict(data)
    logged = [line for line in trainer.state.log_history if "loss" in line]
    return Trained(
        [line["loss"] for line in logged],
        [line["grad_norm"] for line in logged],
        evaluated["eval_loss"],
        len(predicted.predictions),
        [float(value) for part in model.parameters() for value in part.detach().flatten()],
    )


def check_alike(found: list[Trained], wanted: Trained) -> None:
    for each in found:
        assert each.losses == pytest.approx(wanted.losses, rel=1e-4)
        assert each.norms == pytest.approx(wanted.norms, rel=1e-3)
        assert each.evaluation == pytest.approx(wanted.evaluation, rel=1e-4)
        assert each.predictions == wanted.predictions
        difference = np.linalg.norm(np.subtract(each.parameters, wanted.parameters))
        assert difference < 1e-3 * np.linalg.norm(wanted.parameters)


@SIZES
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("sentences", {"gradient_accumulation_steps": 3, "max_steps": 5}),
        ("sentences", {"label_smoothing_factor": 0.1, "count": 25, "max_steps": 6}),
        ("regression", {"gradient_accumulation_steps": 2, "max_steps": 5, "count": 25}),
    ],
)
def test_training_equals_one_process_with_the_global_batch(
    kind: str, options: dict[str, Any], size: int, tmp_path: Path
) -> None:
    """Samples have different numbers of tokens, and the last batch is uneven."""
    run = functools.partial(train, size, tmp_path, kind, **options)
    (wanted,) = run_workers(1, functools.partial(run, plain=True), tmp_path)
    check_alike(run_workers(size, run, tmp_path), wanted)


@pytest.mark.parametrize("sync", ["AllReduce(codec=int8())", "LocalSGD(every=2)"])
def test_strategies_come_as_text(sync: str, tmp_path: Path) -> None:
    run = functools.partial(train, 2, tmp_path)
    exact = run_workers(2, run, tmp_path)
    found = run_workers(2, functools.partial(run, strategy={"sync": sync}), tmp_path)
    assert found[0].losses != exact[0].losses
    assert found[0].losses == pytest.approx(exact[0].losses, rel=0.1)


def test_a_checkpoint_goes_on_with_another_number_of_processes(tmp_path: Path) -> None:
    """2 processes take 4 of 8 steps, 3 take 2 more, and one the rest; the epoch has 4 steps."""
    common: dict[str, Any] = {"save_strategy": "steps", "save_steps": 1, "save_total_limit": 2}

    def run(size: int, *, stop: int, resume: bool, plain: bool = False) -> Trained:
        callbacks = [StopAt(stop)]
        body = functools.partial(
            train, size, folder, resume=resume, plain=plain, callbacks=callbacks, max_steps=8
        )
        return run_workers(size, functools.partial(body, **common), tmp_path)[0]

    folder = tmp_path / "one"
    wanted = run(1, stop=8, resume=False, plain=True)
    folder = tmp_path / "several"
    run(2, stop=5, resume=False)
    run(3, stop=6, resume=True)
    found = run(1, stop=8, resume=True)
    check_alike([found], wanted)
    assert len(found.losses) == 8, "the log goes on"
    assert len(list((folder / "out").glob("checkpoint-*"))) == 2


class StopAt(EarlyStoppingCallback):
    """Ends the training after this step, as if the job were at an end."""

    def __init__(self, step: int) -> None:
        super().__init__()
        self.step = step

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        """Nothing to prepare."""

    def on_evaluate(self, *_: Any, **__: Any) -> None:
        """Nothing to compare."""

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        control.should_training_stop = state.global_step >= self.step


def stop_early(size: int, folder: Path) -> tuple[int, bool]:
    arguments = make_arguments(
        folder,
        3,
        eval_strategy="steps",
        eval_steps=1,
        save_strategy="steps",
        save_steps=1,
        load_best_model_at_end=True,
        metric_for_best_model="eval_loss",
        learning_rate=0.0,
        max_steps=20,
    )
    trainer = PacelineTrainer(
        model=make_model("regression"),
        args=arguments,
        train_dataset=Points(24),
        eval_dataset=Points(7),
        callbacks=[EarlyStoppingCallback(2)],
        trace="off",
    )
    trainer.train()
    trainer.save_model()
    return trainer.state.global_step, trainer.run.steps == trainer.state.global_step


def test_it_stops_early_on_all_processes(tmp_path: Path) -> None:
    # the first evaluation is the best, and two more don't improve it
    assert run_workers(2, functools.partial(stop_early, 2, tmp_path), tmp_path) == [(3, True)] * 2
    assert (tmp_path / "out" / "model.safetensors").exists()


def refuse_lonely(folder: Path) -> str:
    arguments = TrainingArguments(output_dir=str(folder), report_to=[])
    with pytest.raises(UsageError) as refused:
        PacelineTrainer(model=make_model("regression"), args=arguments, trace="off")
    return str(refused.value)


def test_arguments_that_see_one_process_alone_are_refused(tmp_path: Path) -> None:
    for said in run_workers(2, functools.partial(refuse_lonely, tmp_path), tmp_path):
        assert "sees 1 processes, and the run has 2: say TrainingArguments(use_cpu=True)" in said


def refuse(options: dict[str, Any], folder: Path) -> str:
    strategy = {"sync": options.pop("sync")} if "sync" in options else {}
    arguments = make_arguments(folder, 2, **options)
    with pytest.raises(UsageError) as refused:
        PacelineTrainer(
            model=make_model("regression"), args=arguments, train_dataset=Points(8), **strategy
        )
    return str(refused.value)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"torch_compile": True}, "torch_compile=True: call torch.compile on the model"),
        ({"auto_find_batch_size": True}, "auto_find_batch_size=True: workers would end with"),
        ({"ddp_bucket_cap_mb": 25}, "ddp_bucket_cap_mb=25: there is no DDP here"),
        ({"train_sampling_strategy": "batch_rebalance"}, "cuts the data by rank itself"),
        ({"sync": "ParameterServer()"}, "servers keep it with ParameterServer"),
    ],
)
def test_what_cannot_be_honoured_is_refused_in_one_line(
    options: dict[str, Any], words: str, tmp_path: Path
) -> None:
    (said,) = run_workers(1, functools.partial(refuse, options, tmp_path), tmp_path)
    assert words in said and "\n" not in said
