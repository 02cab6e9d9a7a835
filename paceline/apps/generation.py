"""Generates text with a GPT, token by token, and caches keys and values.

All workers get the same tokens, whatever the mesh.

    prompt     d e f _            one pass over the whole prompt
    token 1    d e f _ m          a pass over the newest token alone, because the keys and values
                                  of the others are in the cache
    ...
    full       e f _ m ... x      The context is full: each token follows from the newest `context`
                                  tokens, in one pass over all of them.
"""

from __future__ import annotations

import argparse
import codecs
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Generator, Tensor

import paceline as pl
from paceline.apps.gpt import GPT
from paceline.errors import PacelineError, UsageError
from paceline.formatting import format_count

BYTES = 256  # vocabulary of models whose tokens are bytes


@dataclass(frozen=True)
class Sampling:
    """The way in which tokens are drawn: from softmax(logits / temperature).

    Attributes:
        temperature: 0 always gives the likeliest token. Larger values give more variety.
        seed: Seed of the generator.
    """

    temperature: float = 0.8
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.temperature >= 0:
            raise UsageError(
                f"temperature={self.temperature:g}: give 0 (always the likeliest token) or more"
            )

    def pick_token(self, logits: Tensor, chance: Generator) -> Tensor:
        """Draw the next token.

        Args:
            logits: Logits of all tokens, a tensor of one dimension.
            chance: Source of random numbers.

        Returns:
            The token, a tensor of one element.
        """
        if self.temperature == 0:
            return logits.argmax(keepdim=True)
        return torch.multinomial(
            (logits.double() / self.temperature).softmax(-1), 1, generator=chance
        )


def generate_tokens(
    run: pl.Run, model: GPT, prompt: Sequence[int], count: int, sampling: Sampling
) -> Iterator[int]:
    """Yield the tokens that follow a prompt, the same on all workers.

    Collective: each worker has to take all tokens. The first worker draws, and sends each token to
    the others.

    Args:
        run: The run.
        model: The model, prepared by the run.
        prompt: Tokens to continue, at least one.
        count: Number of tokens to generate.
        sampling: How tokens are drawn.

    Raises:
        UsageError: The prompt is empty.
    """
    if not prompt:
        raise UsageError("the prompt is empty: give one token or more to continue")
    tokens, context = list(prompt), model.shape.context
    chance = Generator(run.device).manual_seed(sampling.seed)
    with model.cache_tokens() as cache:
        for _ in range(count):
            # In a full context all positions shift with each token, so the cache is of no use.
            if len(tokens) > context:
                cache.clear()
            new_tokens = tokens[cache.length :] if len(tokens) <= context else tokens[-context:]
            logits = run.forward(model, torch.tensor([new_tokens], device=run.device))[0, -1]
            cache.count_tokens(len(new_tokens))
            token = (
                sampling.pick_token(logits, chance)
                if run.is_first
                else torch.zeros(1, dtype=torch.int64, device=run.device)
            )
            tokens.append(int(run.group.broadcast(token, name="token").wait()))
            yield tokens[-1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--of", type=Path, required=True, help="a run, or one of its checkpoints")
    parser.add_argument("--prompt", required=True, help="text to continue")
    parser.add_argument("--tokens", type=int, required=True, help="number of tokens to write")
    parser.add_argument(
        "--temperature", type=float, required=True, help="0: always the likeliest token"
    )
    parser.add_argument(
        "--best",
        action="store_true",
        help="use the best checkpoint of the run, not the newest",
    )
    parser.add_argument("--seed", type=int, default=None, help="default: a different one each time")
    options = parser.parse_args()

    with pl.load(options.of, mesh="tensor", best=options.best) as loaded:
        run, model = loaded.run, loaded.model
        if not isinstance(model, GPT) or model.shape.vocab != BYTES:
            raise UsageError(
                f"{options.of} has no GPT that writes bytes: give a run of paceline demo"
            )
        sampling = Sampling(options.temperature, run.seed if options.seed is None else options.seed)
        write = sys.stdout.write if run.is_first else len
        # A letter may take several tokens.
        decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        write(options.prompt)
        start = time.perf_counter()
        for token in generate_tokens(run, model, options.prompt.encode(), options.tokens, sampling):
            write(decoder.decode(bytes([token])))
            sys.stdout.flush()
        write(decoder.decode(b"", final=True) + "\n")
        sys.stdout.flush()
        if run.is_first:
            seconds = time.perf_counter() - start
            workers = (
                f"{format_count(run.size, 'worker')}, mesh {run.mesh}"
                if run.size > 1
                else "1 worker"
            )
            text = (
                f"paceline: {format_count(options.tokens, 'token')} in {seconds:.2f} s, "
                f"{options.tokens / seconds:.0f} a second ({workers})"
            )
            print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    try:
        main()
    except PacelineError as error:  # shown in one line, as commands do
        print(f"paceline: {error}", file=sys.stderr, flush=True)
        sys.exit(2 if isinstance(error, UsageError) else 1)
