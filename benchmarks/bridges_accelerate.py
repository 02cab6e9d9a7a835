"""Steps of Accelerate and of the Trainer of transformers: on their own DDP, or on paceline.

`bridges.py` calls them in each worker.
"""

from __future__ import annotations

import itertools
import tempfile
import time
from typing import Any

from training import SETUPS, build

MODEL = "gpt-19m"


def train_with_accelerate(own: bool, warmup: int, count: int) -> tuple[list[float], Any]:
    """Train with Accelerate's loop.

    Args:
        own: Whether on Accelerate's own DDP, over Gloo.
        warmup: Steps before those that are timed.
        count: Timed steps.

    Returns:
        Seconds of each timed step, and the model.
    """
    import torch
    from accelerate import Accelerator
    from torch.utils.data import DataLoader

    if own:
        accelerator: Any = Accelerator(cpu=True)
    else:
        from paceline.bridges.accelerate import PacelineAccelerator

        accelerator = PacelineAccelerator(cpu=True)
    bare, loss, data = build(MODEL)
    loader = DataLoader(data, batch_size=SETUPS[MODEL].batch)
    optimizer: Any = torch.optim.SGD(bare.parameters(), lr=1e-3)
    model, optimizer, loader = accelerator.prepare(bare, optimizer, loader)
    seconds, start = [], time.perf_counter()
    for number, (x, y) in enumerate(loader):
        accelerator.backward(loss(model(x), y))
        optimizer.step()
        optimizer.zero_grad()
        if number >= warmup:
            seconds.append(time.perf_counter() - start)
        if number == warmup + count - 1:
            break
        start = time.perf_counter()
    return seconds, bare


def train_with_trainer(own: bool, warmup: int, count: int) -> tuple[list[float], Any]:
    """Train with the Trainer of transformers; arguments as of `train_with_accelerate`."""
    import torch
    from torch import nn
    from torch.utils.data import Dataset
    from transformers import Trainer, TrainerCallback, TrainingArguments

    bare, loss, data = build(MODEL)

    class Named(Dataset):  # type: ignore[type-arg]
        def __len__(self) -> int:
            return len(data)

        def __getitem__(self, index: int) -> dict[str, Any]:
            x, y = data[index]
            return {"x": x, "labels": y}

    class Losing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = bare

        def forward(self, x: Any, labels: Any) -> dict[str, Any]:
            return {"loss": loss(self.model(x), labels)}

    class Stopwatch(TrainerCallback):  # type: ignore[misc]
        def __init__(self) -> None:
            self.ends: list[float] = []

        def on_step_end(self, *_: Any, **__: Any) -> None:
            self.ends.append(time.perf_counter())

    stopwatch = Stopwatch()
    arguments = TrainingArguments(
        output_dir=tempfile.gettempdir(),
        use_cpu=True,
        per_device_train_batch_size=SETUPS[MODEL].batch,
        max_steps=warmup + count,
        logging_strategy="no",
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        max_grad_norm=0.0,
    )
    kind: Any = Trainer
    if not own:
        from paceline.bridges.transformers import PacelineTrainer

        kind = PacelineTrainer
    optimizer = torch.optim.SGD(bare.parameters(), lr=1e-3)
    kind(
        model=Losing(),
        args=arguments,
        train_dataset=Named(),
        optimizers=(optimizer, None),
        callbacks=[stopwatch],
    ).train()
    ends = stopwatch.ends[warmup - 1 :]
    return [end - start for start, end in itertools.pairwise(ends)], bare
