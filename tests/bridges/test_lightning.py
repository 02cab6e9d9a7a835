"""The Lightning Trainer on paceline: losses, logs and checkpoints, and the loss of workers."""

from __future__ import annotations

import contextlib
import io
import re
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, TensorDataset

from paceline.errors import DataError, UsageError
from tests.harness.bridge_workers import fork_workers
from tests.harness.jobs import ROOT, Jobs

pytestmark = pytest.mark.xdist_group("lightning")
LIBRARY = "lightning.pytorch", "paceline.bridges.lightning", "torch.distributed.nn"
SAMPLES, BATCH, VALIDATED = 22, 7, 5  # last batches have 1 and 2 samples, so there are ghosts


def make_data() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(
        torch.randn(SAMPLES, 4, generator=generator), torch.randn(SAMPLES, 1, generator=generator)
    )


def make_network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))


def flatten(model: nn.Module) -> list[float]:
    """All weights; as numbers, which a process can send and end."""
    return torch.cat([p.detach().flatten() for p in model.parameters()]).tolist()


def close(found: list[float], expected: list[float]) -> bool:
    return found == pytest.approx(expected, rel=1e-4, abs=1e-5)


def make_module(**overridden: Any) -> Any:
    """A LightningModule that keeps what it has logged."""
    from lightning.pytorch import LightningModule

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.network, self.steps, self.epochs = make_network(), [], []

        def training_step(self, batch, index):
            x, y = batch
            loss = ((self.network(x) - y) ** 2).mean()
            self.log("loss", loss, on_step=True, on_epoch=True, sync_dist=True)
            whole = {"on_step": False, "on_epoch": True, "sync_dist": True}
            self.log("most", float(self.trainer.global_rank), reduce_fx="max", **whole)
            self.log("samples", float(len(x)), reduce_fx="sum", **whole)
            return loss

        def validation_step(self, batch, index):
            x, y = batch
            self.log("validated", ((self.network(x) - y) ** 2).mean(), sync_dist=True)

        def on_train_batch_end(self, *_):
            self.steps.append(float(self.trainer.callback_metrics["loss_step"]))

        def on_train_epoch_end(self):
            names = ("loss_epoch", "samples", "most", "validated")
            found = self.trainer.callback_metrics
            self.epochs.append({name: float(found[name]) for name in names if name in found})

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), 0.1, momentum=0.9)

    for name, method in overridden.items():
        setattr(Module, name, method)
    return Module()


def make_trainer(strategy: Any = None, **options: Any) -> Any:
    from lightning.pytorch import Trainer

    from paceline.bridges.lightning import PacelineStrategy

    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False}
    usual = {"accelerator": "cpu", "max_epochs": 2, "enable_checkpointing": False}
    chosen = PacelineStrategy() if strategy is None else strategy
    return Trainer(strategy=chosen, **{**quiet, **usual, **options})


def make_loaders(*, shuffle: bool = False) -> tuple[Any, Any]:
    data = make_data()
    return DataLoader(data, BATCH, shuffle=shuffle), DataLoader(data, VALIDATED)


def train_plainly(epochs: int = 2, accumulate: int = 1, clip: float | None = None) -> Any:
    """The same training without Lightning and paceline: losses, validations and weights."""
    model, (loader, validated) = make_network(), make_loaders()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    losses, validations = [], []
    for _ in range(epochs):
        for index, (x, y) in enumerate(loader):
            loss = ((model(x) - y) ** 2).mean()
            losses.append(loss.item())
            (loss / accumulate).backward()
            if (index + 1) % accumulate == 0 or index + 1 == len(loader):
                if clip is not None:
                    nn.utils.clip_grad_norm_(model.parameters(), clip)
                optimizer.step()
                optimizer.zero_grad()
        with torch.no_grad():
            total = sum(float(((model(x) - y) ** 2).sum()) for x, y in validated)
        validations.append(total / SAMPLES)
    return losses, validations, flatten(model)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_losses_and_logs_are_those_of_one_process(size, tmp_path, capfd):
    """Also with `strategy="paceline"`, and with ghosts in the last batches."""

    def body(_: int) -> Any:
        module, trainer = make_module(), make_trainer("paceline")
        trainer.fit(module, *make_loaders())
        steps, counted = trainer.strategy.run.steps, trainer.global_step
        (tested,) = trainer.validate(module, make_loaders()[1], verbose=False)
        return module.steps, module.epochs, flatten(module), steps, counted, tested["validated"]

    losses, validations, weights = train_plainly()
    sizes = [BATCH] * 3 + [1]
    for rank, (steps, epochs, found, taken, counted, tested) in enumerate(
        fork_workers(size, tmp_path, body, *LIBRARY)
    ):
        assert close(steps, losses) and close(found, weights), rank
        assert taken == counted == 8
        for place, logged in enumerate(epochs):
            part = losses[4 * place : 4 * place + 4]
            mean = sum(a * b for a, b in zip(part, sizes, strict=True)) / SAMPLES
            assert logged["loss_epoch"] == pytest.approx(mean, rel=1e-4)
            assert logged["samples"] == SAMPLES, "samples of ghosts don't count"
            assert logged["validated"] == pytest.approx(validations[place], rel=1e-4)
            assert logged["most"] == size - 1
        assert tested == pytest.approx(validations[-1], rel=1e-4)
    said = capfd.readouterr().err
    assert said.count("global batch 7") == 1, "the batch is global, and that is said once"
    assert "torchmetrics" not in said, "Lightning has it in memory, whether it is used or not"


def test_accumulation_clipping_and_shuffling(tmp_path):
    def accumulate(_: int) -> list[float]:
        module = make_module()
        trainer = make_trainer(accumulate_grad_batches=3, gradient_clip_val=0.2)
        trainer.fit(module, *make_loaders())
        assert trainer.global_step == 4  # the last batch of an epoch steps, too
        return flatten(module)

    def shuffle(_: int) -> list[float]:
        from paceline.bridges.lightning import PacelineStrategy

        module, trainer = make_module(), make_trainer(PacelineStrategy(seed=4))
        trainer.fit(module, make_loaders(shuffle=True)[0])
        return list(module.steps)

    expected = train_plainly(accumulate=3, clip=0.2)[2]
    assert not close(expected, train_plainly(accumulate=3)[2])
    for found in fork_workers(2, tmp_path, accumulate, *LIBRARY):
        assert close(found, expected)
    alone, pair = (fork_workers(size, tmp_path, shuffle, *LIBRARY)[0] for size in (1, 2))
    assert close(alone, pair) and not close(alone, train_plainly()[0])


def test_manual_optimization(tmp_path):
    """Two optimizers that take turns in one batch, as of a GAN."""

    def training_step(self, batch, index):
        x, y = batch
        for part, optimizer in zip(("0", "2"), self.optimizers(), strict=True):
            self.toggle_optimizer(optimizer)
            loss = ((self.network(x) - y) ** 2).mean()
            optimizer.zero_grad()
            self.manual_backward(loss)
            assert next(self.network.get_submodule(part).parameters()).grad is not None
            optimizer.step()
            self.untoggle_optimizer(optimizer)

    def configure_optimizers(self):
        return [torch.optim.SGD(self.network[place].parameters(), 0.1) for place in (0, 2)]

    def body(_: int) -> list[float]:
        manual = {"training_step": training_step, "configure_optimizers": configure_optimizers}
        module = make_module(**manual, on_train_batch_end=lambda *_: None)
        module.automatic_optimization = False
        make_trainer().fit(module, make_loaders()[0])
        return flatten(module)

    model, (loader, _) = make_network(), make_loaders()
    optimizers = [torch.optim.SGD(model[place].parameters(), 0.1) for place in (0, 2)]
    for _ in range(2):
        for x, y in loader:
            for optimizer in optimizers:
                model.zero_grad()
                ((model(x) - y) ** 2).mean().backward()
                optimizer.step()
    for found in fork_workers(2, tmp_path, body, *LIBRARY):
        assert close(found, flatten(model))


class TestCheckpoints:
    @pytest.mark.parametrize("every", [3, 4, 6], ids=["mid-epoch", "end", "second epoch"])
    def test_goes_on_with_another_number_of_workers(self, every, tmp_path):
        """Written by 2 workers, read by 3, and by 1 from the end of an epoch."""

        def write(_: int) -> None:
            from lightning.pytorch.callbacks import ModelCheckpoint

            saving = ModelCheckpoint(tmp_path, "kept", every_n_train_steps=every)
            options = {"callbacks": [saving], "enable_checkpointing": True, "max_steps": every}
            make_trainer(**options).fit(make_module(), make_loaders()[0])

        def read(_: int) -> Any:
            module, trainer = make_module(), make_trainer()
            trainer.fit(module, make_loaders()[0], ckpt_path=tmp_path / "kept.ckpt")
            return module.steps, flatten(module), trainer.strategy.run.steps

        fork_workers(2, tmp_path, write, *LIBRARY)
        losses, _, weights = train_plainly()
        for steps, found, taken in fork_workers(1 if every == 4 else 3, tmp_path, read, *LIBRARY):
            assert close(steps, losses[every:]) and close(found, weights) and taken == 8

    def test_of_an_epoch_and_best_of_validation(self, tmp_path):
        """The shuffled order of the second epoch is that of a run that wasn't stopped."""

        def fit(epochs: int, path: Path | None) -> Any:
            from lightning.pytorch.callbacks import ModelCheckpoint

            from paceline.bridges.lightning import PacelineStrategy

            saving = ModelCheckpoint(
                tmp_path / str(epochs), "best", monitor="validated", mode="min"
            )
            module = make_module()
            trainer = make_trainer(
                PacelineStrategy("AllReduce(codec=int8())", seed=3),
                callbacks=[saving],
                enable_checkpointing=True,
                max_epochs=epochs,
            )
            trainer.fit(module, *make_loaders(shuffle=True), ckpt_path=path)
            return flatten(module), saving.best_model_path, float(saving.best_model_score)

        whole = fork_workers(2, tmp_path, lambda _: fit(2, None), *LIBRARY)
        first = fork_workers(2, tmp_path, lambda _: fit(1, None), *LIBRARY)
        path = Path(first[0][1])
        assert path.exists() and first[0][1:] == first[1][1:], "workers agree on the best"
        resumed = fork_workers(2, tmp_path, lambda _: fit(2, path), *LIBRARY)
        assert [each[0] for each in resumed] == [each[0] for each in whole], "to the bit"

    def test_weights_alone_have_no_entry(self, tmp_path):
        def body(_: int) -> None:
            module, trainer = make_module(), make_trainer(max_epochs=1)
            trainer.fit(module, make_loaders()[0])
            trainer.save_checkpoint(tmp_path / "a.ckpt", weights_only=True)
            trainer.save_checkpoint(tmp_path / "b.ckpt")

        fork_workers(2, tmp_path, body, *LIBRARY)
        saved = [torch.load(tmp_path / name, weights_only=True) for name in ("a.ckpt", "b.ckpt")]
        assert "paceline" not in saved[0] and len(saved[1]["paceline"]["workers"]) == 2


def test_early_stopping_stops_all_workers(tmp_path):
    """Also where the metric isn't reduced, and only one worker would stop."""

    def validation_step(self, batch, index):
        self.log("validated", float(self.current_epoch * (self.global_rank == 1)))

    def body(_: int) -> int:
        from lightning.pytorch.callbacks import EarlyStopping

        stopping = EarlyStopping("validated", patience=1, mode="min", verbose=False)
        module = make_module(validation_step=validation_step)
        trainer = make_trainer(callbacks=[stopping], max_epochs=9)
        trainer.fit(module, *make_loaders())
        return trainer.current_epoch

    found = fork_workers(2, tmp_path, body, *LIBRARY)
    assert found[0] == found[1] < 9


def test_strategies_and_options(tmp_path):
    """Local SGD leaves equal weights, and differs from an exchange of gradients in each step."""

    def body(sync: str, shares: Any) -> Any:
        from paceline.bridges.lightning import PacelineStrategy

        module = make_module()
        trainer = make_trainer(PacelineStrategy(sync, shares=shares, name=None, seed=2))
        trainer.fit(module, *make_loaders())
        trainer.strategy.close()  # replicas are equal at the end
        return flatten(module), module.epochs[-1]["samples"]

    exact = train_plainly()[2]
    for sync in ("LocalSGD(every=3, codec=int8())", 'AllReduce(via="ring")'):
        (one, samples), (other, _) = fork_workers(
            2, tmp_path, lambda _, text=sync: body(text, "auto"), *LIBRARY
        )
        assert one == other and samples == SAMPLES, sync
        assert close(one, exact) == sync.startswith("AllReduce"), sync


SURVIVING = """
import signal, warnings
warnings.simplefilter("ignore")
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from paceline.bridges.lightning import PacelineStrategy

class Module(LightningModule):
    def __init__(self):
        super().__init__()
        self.network, self.seen, self.epochs = nn.Linear(4, 1), [], []
    def training_step(self, batch, index):
        x, y = batch
        if rank == LOST and self.trainer.strategy.run.steps == 4:
            os.kill(os.getpid(), signal.SIGKILL)
        whole = {"on_step": False, "on_epoch": True, "sync_dist": True}
        self.log("samples", float(len(x)), reduce_fx="sum", **whole)
        return ((self.network(x).squeeze(1) - y) ** 2).mean()
    def validation_step(self, batch, index):
        self.log("validated", float(len(batch[0])), reduce_fx="sum", sync_dist=True)
    def on_train_epoch_end(self):
        found = self.trainer.callback_metrics
        self.epochs.append((float(found["samples"]), float(found["validated"])))
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 1e-3)

torch.manual_seed(0)
data = TensorDataset(torch.randn(48, 4), torch.arange(48.0))
module = Module()
trainer = Trainer(
    strategy=PacelineStrategy(name="kept", seed=1), accelerator="cpu", max_epochs=2, logger=False,
    enable_progress_bar=False, enable_model_summary=False,
    callbacks=[ModelCheckpoint("saved", "{step}", every_n_train_steps=5, save_top_k=-1)],
)
trainer.fit(module, DataLoader(data, batch_size=6), DataLoader(data, batch_size=6))
if trainer.is_global_zero:
    print("END", trainer.global_step, trainer.strategy.run.steps, trainer.world_size,
          module.network.weight.tolist()[0], module.epochs, sorted(os.listdir("saved")))
"""


@pytest.mark.parametrize("lost", [1, 0])
def test_a_killed_worker_is_survived(job: Jobs, lost):
    """Its batch is dealt again, the Trainer counts it once, and the first worker may be the one."""
    ended = job.run(f"LOST = {lost}\n{SURVIVING}", 3, "--min-workers", "2").end()
    found = re.findall(r"END (\d+) (\d+) (\d+) \[(.*?)\] (\[.*?\]) (\[.*\])", ended.out)
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(48, 4), torch.arange(48.0))
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    for x, y in [*DataLoader(data, batch_size=6)] * 2:
        ((model(x).squeeze(1) - y) ** 2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert found and found[0][:3] == ("16", "16", "2"), ended
    weights = [float(word) for word in found[0][3].split(",")]
    assert weights == pytest.approx(model.weight[0].tolist(), rel=1e-4)
    assert found[0][4].endswith(", (48.0, 48.0)]"), "the second epoch counts all samples"
    assert found[0][5] == "['step=10.ckpt', 'step=15.ckpt', 'step=5.ckpt']"


class Stream(IterableDataset):
    def __iter__(self):
        yield from range(40)


class TestRefusals:
    def refuse(self, message: str, act: Any, error: type = UsageError) -> None:
        with pytest.raises(error, match=re.escape(message)):
            act()

    def test_of_a_trainer(self, tmp_path):
        from torch.optim.lr_scheduler import ReduceLROnPlateau

        def fit(loader: Any, options: dict[str, Any], overridden: dict[str, Any]) -> None:
            make_trainer(**options).fit(make_module(**overridden), loader)

        def body(_: int) -> None:
            data, (loader, other) = make_data(), make_loaders()
            sampled = DataLoader(data, sampler=DistributedSampler(data, 2, 0))
            cases = [
                ("2 training loaders", [loader, other], {}),
                (
                    "reload_dataloaders_every_n_epochs",
                    loader,
                    {"reload_dataloaders_every_n_epochs": 1},
                ),
                ("reads a stream without a length one batch ahead", DataLoader(Stream(), 4), {}),
                ("a Stream in place of a DataLoader", Stream(), {}),
                ("devices=3, and this host has 2 workers", loader, {"devices": 3}),
                ("num_nodes=2, and the workers are on 1 hosts", loader, {"num_nodes": 2}),
            ]
            for message, given, options in cases:
                self.refuse(message, lambda g=given, o=options: fit(g, o, {}))
            self.refuse("DistributedSampler", lambda: fit(sampled, {}, {}), DataError)
            trainer, module = make_trainer(), make_module(forward=lambda *_: None)
            self.refuse("trainer.predict", lambda: trainer.predict(module, loader))
            self.refuse(
                "all_gather(sync_grads=True)",
                lambda: trainer.strategy.all_gather(torch.ones(1), sync_grads=True),
            )

            def plateau(self):
                optimizer = torch.optim.SGD(self.parameters(), 0.1)
                return {
                    "optimizer": optimizer,
                    "lr_scheduler": {
                        "scheduler": ReduceLROnPlateau(optimizer),
                        "monitor": "own",
                        "interval": "epoch",
                    },
                }

            def own(self, batch, index):
                self.log("own", float(self.global_rank), on_epoch=True)
                return self.network(batch[0]).mean()

            unequal = {
                "configure_optimizers": plateau,
                "training_step": own,
                "on_train_batch_end": lambda *_: None,
                "on_train_epoch_end": lambda *_: None,
            }
            self.refuse("different metrics", lambda: fit(loader, {}, unequal))

        fork_workers(2, tmp_path, body, *LIBRARY)

    def test_of_a_plateau_that_steps_with_batches(self, tmp_path, monkeypatch):
        from paceline.bridges.bridge_run import BridgeRun

        def configure_optimizers(self):
            from torch.optim.lr_scheduler import ReduceLROnPlateau

            optimizer = torch.optim.SGD(self.parameters(), 0.1)
            plateau = ReduceLROnPlateau(optimizer)
            scheduler = {"scheduler": plateau, "monitor": "loss", "interval": "step"}
            return {"optimizer": optimizer, "lr_scheduler": scheduler}

        def body(_: int) -> None:
            module, trainer = make_module(configure_optimizers=configure_optimizers), make_trainer()
            self.refuse('interval="step"', lambda: trainer.fit(module, make_loaders()[0]))

        monkeypatch.setattr(BridgeRun, "survives", True)
        fork_workers(1, tmp_path, body, *LIBRARY)

    def test_of_a_strategy(self, tmp_path):
        def body(_: int) -> None:
            from paceline.bridges.lightning import PacelineStrategy

            self.refuse("cut can't be honoured", lambda: PacelineStrategy(cut="shard(zero=3)"))
            served = PacelineStrategy("ParameterServer()")
            self.refuse(
                "ParameterServer keeps optimizers on servers",
                lambda: make_trainer(served).fit(make_module(), make_loaders()[0]),
            )
            local = make_trainer(PacelineStrategy(batchnorm="local"), sync_batchnorm=True)
            self.refuse(
                "sync_batchnorm=True",
                lambda: local.fit(make_module(), make_loaders()[0]),
            )

        fork_workers(1, tmp_path, body, *LIBRARY)


def test_a_stream_with_a_limit(tmp_path):
    def body(_: int) -> tuple[int, int]:
        def training_step(self, batch, index):
            return self.network(batch.unsqueeze(1).expand(-1, 4).float()).mean()

        quiet = {name: lambda *_: None for name in ("on_train_batch_end", "on_train_epoch_end")}
        trainer = make_trainer(limit_train_batches=3, max_epochs=2)
        trainer.fit(make_module(training_step=training_step, **quiet), DataLoader(Stream(), 4))
        return trainer.strategy.run.steps, trainer.global_step

    assert fork_workers(2, tmp_path, body, *LIBRARY) == [(6, 6), (6, 6)]


def test_metrics_count_no_ghosts(tmp_path):
    """A metric of torchmetrics in the module, which all workers compute together."""

    def body(_: int) -> list[float]:
        from torchmetrics import SumMetric

        module = make_module()
        module.add_module("total", SumMetric())
        found = []

        def validation_step(self, batch, index):
            self.total.update(batch[0][:, 0])
            self.log("total", self.total, on_epoch=True)

        type(module).validation_step = validation_step
        trainer = make_trainer(max_epochs=1, limit_train_batches=1)
        (result,) = trainer.validate(module, make_loaders()[1], verbose=False)
        found.append(float(result["total"]))
        return found

    expected = float(make_data().tensors[0][:, 0].sum())
    for found in fork_workers(2, tmp_path, body, *LIBRARY):
        assert found == [pytest.approx(expected, rel=1e-4)]


@pytest.mark.parametrize("size", [1, 2, 3])
def test_the_example(size, tmp_path):
    """It learns as well with any number of workers."""

    def body(_: int) -> str:
        said = io.StringIO()
        with contextlib.redirect_stdout(said):
            runpy.run_path(
                str(ROOT / "examples" / "bridges" / "lightning_trainer.py"), run_name="__main__"
            )
        return said.getvalue()

    first, *others = fork_workers(size, tmp_path, body, *LIBRARY)
    assert float(re.findall(r"accuracy (\S+)", first)[-1]) > 0.9 and not any(others), first


def test_validation_in_the_middle_of_an_epoch_with_several_loaders(tmp_path):
    """Training isn't changed by it, and each loader's values are those of its own samples."""

    def validation_step(self, batch, index, dataloader_idx=0):
        self.log("mean", batch[0][:, 0].mean(), sync_dist=True)
        self.log("count", float(len(batch[0])), reduce_fx="sum", sync_dist=True)

    def on_validation_end(self):
        self.kept.append({name: float(x) for name, x in self.trainer.callback_metrics.items()})

    def body(_: int) -> Any:
        hooks = {"validation_step": validation_step, "on_validation_end": on_validation_end}
        module = make_module(**hooks)
        module.kept = []
        other = DataLoader(make_data(), 4)
        options = {"val_check_interval": 2, "limit_val_batches": 2, "num_sanity_val_steps": 0}
        make_trainer(**options).fit(module, make_loaders()[0], [make_loaders()[1], other])
        return module.steps, module.kept, flatten(module)

    losses, _, weights = train_plainly()
    x = make_data().tensors[0][:, 0]
    for steps, kept, found in fork_workers(3, tmp_path, body, *LIBRARY):
        assert close(steps, losses) and close(found, weights) and len(kept) == 4
        for values in kept:
            assert values["count/dataloader_idx_0"] == 2 * VALIDATED
            assert values["count/dataloader_idx_1"] == 2 * 4
            assert values["mean/dataloader_idx_0"] == pytest.approx(float(x[:10].mean()), abs=1e-5)
            assert values["mean/dataloader_idx_1"] == pytest.approx(float(x[:8].mean()), abs=1e-5)
