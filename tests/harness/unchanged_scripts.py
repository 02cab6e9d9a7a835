"""Scripts of other libraries that know nothing of paceline; each returns its losses.

They make the calls of transformers' `run_clm.py`, of Accelerate's and Lightning's own examples and
of pytorch/examples, on data that they draw themselves.
"""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn, optim
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def make_data(count: int = 23) -> TensorDataset:
    drawn = torch.Generator().manual_seed(7)
    return TensorDataset(
        torch.randn(count, 4, generator=drawn), torch.randn(count, 1, generator=drawn)
    )


def make_model() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))


def train_by_accelerate() -> list[float]:
    """Accelerate's loop: accumulation, clipping, a scheduler, metrics and checkpoints."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    parts = make_model()
    optimizer: Any = optim.AdamW(parts.parameters(), 0.05)
    loader: Any = DataLoader(
        make_data(), 3, shuffle=True, generator=torch.Generator().manual_seed(1)
    )
    scheduler: Any = optim.lr_scheduler.StepLR(optimizer, 4, 0.5)
    model, optimizer, loader, scheduler = accelerator.prepare(parts, optimizer, loader, scheduler)
    losses = []
    for _ in range(2):
        for x, y in loader:
            with accelerator.accumulate(model):
                loss = F.mse_loss(model(x), y)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            losses.append(float(accelerator.reduce(loss.detach(), "mean")))
        accelerator.save_state("state")
        accelerator.wait_for_everyone()
        accelerator.load_state("state")
        accelerator.wait_for_everyone()
    losses.append(float(sum(len(accelerator.gather_for_metrics(x)) for x, _ in loader)))
    return losses


class RandomTokens(Dataset[dict[str, Tensor]]):
    """Sentences of random tokens."""

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        tokens = torch.randint(0, 50, (12,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": tokens, "labels": tokens}


def train_by_trainer() -> list[float]:
    """The calls of `run_clm.py`: a language model, the Trainer, an evaluation, a checkpoint."""
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

    torch.manual_seed(0)
    config = GPT2Config(vocab_size=50, n_positions=16, n_embd=8, n_layer=1, n_head=2)
    arguments = TrainingArguments(
        output_dir="out",
        use_cpu=True,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        max_steps=4,
        logging_steps=1,
        save_steps=2,
        report_to=[],
        disable_tqdm=True,
        seed=1,
    )
    data = RandomTokens()
    trainer = Trainer(
        model=GPT2LMHeadModel(config), args=arguments, train_dataset=data, eval_dataset=data
    )
    trainer.train()
    logged = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    return [*logged, trainer.evaluate()["eval_loss"]]


def train_by_fabric() -> list[float]:
    """Fabric with `strategy="ddp"`."""
    from lightning.fabric import Fabric

    workers = int(os.environ["WORLD_SIZE"])
    fabric = Fabric(accelerator="cpu", devices=workers, strategy="ddp")
    fabric.launch()
    parts = make_model()
    model, optimizer = fabric.setup(parts, optim.SGD(parts.parameters(), 0.1))
    losses = []
    for x, y in fabric.setup_dataloaders(DataLoader(make_data(24), 3)):
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        fabric.backward(loss)
        optimizer.step()
        losses.append(float(fabric.all_reduce(loss.detach())))
    return losses


def train_by_lightning() -> list[float]:
    """Lightning's Trainer with `strategy="ddp"`."""
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model, self.losses = make_model(), list[float]()

        def training_step(self, batch: Any, _: int) -> Tensor:
            loss = F.mse_loss(self.model(batch[0]), batch[1])
            self.losses.append(loss.item())
            return loss

        def configure_optimizers(self) -> optim.Optimizer:
            return optim.SGD(self.parameters(), 0.1)

    module, workers = Module(), int(os.environ["WORLD_SIZE"])
    lightning.Trainer(
        accelerator="cpu",
        devices=workers,
        strategy="ddp",
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    ).fit(module, DataLoader(make_data(24), 3))
    return module.losses


def _begin() -> int:
    dist.init_process_group("gloo")
    return dist.get_rank()


def train_toy() -> list[float]:
    """The calls of pytorch/examples `distributed/ddp`."""
    rank = _begin()
    model = DistributedDataParallel(make_model())
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    drawn, losses = torch.Generator().manual_seed(rank), []
    for _ in range(3):
        optimizer.zero_grad()
        loss = F.mse_loss(
            model(torch.randn(20, 4, generator=drawn)), torch.randn(20, 1, generator=drawn)
        )
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def train_gpt() -> list[float]:
    """The calls of pytorch/examples `distributed/minGPT-ddp`: a snapshot, resumed by all."""
    rank = _begin()
    model = nn.Sequential(
        nn.Embedding(50, 8), nn.TransformerEncoderLayer(8, 2, 16, 0.0), nn.Linear(8, 50)
    )
    torch.manual_seed(rank)  # DDP makes replicas equal
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.1)
    replica = DistributedDataParallel(model)
    optimizer = optim.AdamW(replica.parameters(), 0.01)
    data = RandomTokens()
    loader = DataLoader(data, 4, sampler=DistributedSampler(data, seed=5))
    losses = []
    for epoch in range(2):
        loader.sampler.set_epoch(epoch)
        for batch in loader:
            logits = replica(batch["input_ids"])
            loss = F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            nn.utils.clip_grad_norm_(replica.parameters(), 1.0)
            optimizer.step()
            losses.append(loss.item())
        if rank == 0:
            torch.save(replica.module.state_dict(), "snapshot.pt")
        dist.barrier()
        replica.module.load_state_dict(torch.load("snapshot.pt", weights_only=True))
    return losses


def train_images() -> list[float]:
    """The calls of pytorch/examples `mnist`, under DDP: convolutions, dropout and batch norm."""
    rank = _begin()
    torch.manual_seed(0)
    model = DistributedDataParallel(
        nn.Sequential(
            nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 10)
        )
    )
    optimizer = optim.Adadelta(model.parameters())
    scheduler = optim.lr_scheduler.StepLR(optimizer, 1, 0.7)
    drawn, losses = torch.Generator().manual_seed(rank), []
    for _ in range(3):
        x, y = torch.randn(6, 1, 8, 8, generator=drawn), torch.arange(6)
        optimizer.zero_grad()
        loss = F.nll_loss(F.log_softmax(model(x), 1), y)
        loss.backward()
        optimizer.step()
        scheduler.step()
        total = loss.detach().clone()
        dist.all_reduce(total)
        losses.append(float(total))
    return losses


def train_sharded() -> list[float]:
    """The calls of pytorch/examples `distributed/FSDP2`: fully_shard over layers."""
    rank = _begin()
    model = make_model()
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer)
    fully_shard(model)
    optimizer = optim.Adam(model.parameters(), 0.1)
    drawn, losses = torch.Generator().manual_seed(rank), []
    for _ in range(3):
        loss = model(torch.randn(8, 4, generator=drawn)).square().sum()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def train_compiled() -> list[float]:
    """`torch.compile` around DDP, with a backend that needs no C++ compiler."""
    rank = _begin()
    model = torch.compile(DistributedDataParallel(make_model()), backend="aot_eager")
    optimizer = optim.SGD(model.parameters(), 0.1)
    drawn, losses = torch.Generator().manual_seed(rank), []
    for _ in range(3):
        loss = model(torch.randn(4, 4, generator=drawn)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses
