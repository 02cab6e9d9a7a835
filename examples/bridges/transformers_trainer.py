"""A language model with the Trainer of transformers, on paceline.

Run it with `paceline run --workers 2 examples/bridges/transformers_trainer.py`.
"""

import sys

import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, TrainingArguments

from paceline.bridges.transformers import PacelineTrainer

WORDS, LENGTH = 20, 16


class Counting(Dataset):
    """Sentences that count upwards from a random number."""

    def __init__(self, count: int, seed: int) -> None:
        self.starts = torch.randint(
            0, WORDS, (count,), generator=torch.Generator().manual_seed(seed)
        )

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = (self.starts[index] + torch.arange(LENGTH)) % WORDS
        return {"input_ids": tokens, "labels": tokens}


sync = sys.argv[1] if len(sys.argv) > 1 else "AllReduce()"
arguments = TrainingArguments(
    output_dir="counting",
    use_cpu=not torch.cuda.is_available(),
    per_device_train_batch_size=8,
    per_device_eval_batch_size=16,
    gradient_accumulation_steps=2,
    learning_rate=0.01,
    num_train_epochs=3,
    logging_steps=5,
    eval_strategy="epoch",
    save_strategy="epoch",
    save_total_limit=1,
    report_to=[],
    disable_tqdm=True,
)
torch.manual_seed(0)
config = GPT2Config(vocab_size=WORDS, n_positions=LENGTH, n_embd=32, n_layer=1, n_head=2)
trainer = PacelineTrainer(
    model=GPT2LMHeadModel(config),
    args=arguments,
    train_dataset=Counting(300, seed=1),
    eval_dataset=Counting(50, seed=2),
    sync=sync,
)
trainer.train()
loss = trainer.evaluate()["eval_loss"]
if trainer.is_world_process_zero():
    print(f"{trainer.state.global_step} steps, loss {loss:.3f}")
