"""Text from a GPT, token by token, with keys and values kept: in any layout, the same tokens on all
workers.

prompt     d e f _            one pass over all of it
token 1    d e f _ m          a pass over the newest token alone, as keys and values of the others
                              are kept
...
full       e f _ m ... x      the context is full: each token is drawn from the newest `context`
                              ones, in a pass over all of them
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

BYTES = 256  # the vocabulary of models that read and write text byte by byte


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn: from softmax(logits / temperature), by a generator of this seed; at
    a temperature of 0 the likeliest ones.
    """

    temperature: float = 0.8
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.temperature >= 0:
            raise UsageError(
                f"temperature={self.temperature:g}: give 0 (always the likeliest token) or more"
            )

    def pick_token(self, logits: Tensor, chance: Generator) -> Tensor:
        """Draw one token by the logits of all, a tensor of one dimension; the token is one of
        one element.
        """
        if self.temperature == 0:
            return logits.argmax(keepdim=True)
        return torch.multinomial(
            (logits.double() / self.temperature).softmax(-1), 1, generator=chance
        )


def generate_tokens(
    run: pl.Run, model: GPT, prompt: Sequence[int], count: int, sampling: Sampling
) -> Iterator[int]:
    """Yield `count` tokens that go on from those of `prompt`, on all workers the same.

    Collective: all go through all of them.

    The first worker draws, for all.
    """
    if not prompt:
        raise UsageError("the prompt is empty: give one token or more to go on from")
    tokens, context = list(prompt), model.shape.context
    chance = Generator(run.device).manual_seed(sampling.seed)
    with model.cache_tokens() as cache:
        for _ in range(count):
            if len(tokens) > context:
                cache.clear()
            fresh = tokens[cache.length :] if len(tokens) <= context else tokens[-context:]
            logits = run.forward(model, torch.tensor([fresh], device=run.device))[0, -1]
            cache.count_tokens(len(fresh))
            token = (
                sampling.pick_token(logits, chance)
                if run.is_first
                else torch.zeros(1, dtype=torch.int64, device=run.device)
            )
            tokens.append(int(run.group.broadcast(token, name="token").wait()))
            yield tokens[-1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--of", type=Path, required=True, help="the run, or one checkpoint")
    parser.add_argument("--prompt", required=True, help="the text to go on from")
    parser.add_argument("--tokens", type=int, required=True, help="tokens to write")
    parser.add_argument(
        "--temperature", type=float, required=True, help="0: always the likeliest token"
    )
    parser.add_argument(
        "--best",
        action="store_true",
        help="the best checkpoint of the run in the place of the newest",
    )
    parser.add_argument("--seed", type=int, default=None, help="default: another one each time")
    options = parser.parse_args()

    with pl.load(options.of, mesh="tensor", best=options.best) as loaded:
        run, model = loaded.run, loaded.model
        if not isinstance(model, GPT) or model.shape.vocab != BYTES:
            raise UsageError(
                f"{options.of} has no GPT that writes bytes; give a run of paceline demo"
            )
        sampling = Sampling(options.temperature, run.seed if options.seed is None else options.seed)
        write = sys.stdout.write if run.is_first else len
        # a letter may take several tokens
        letters = codecs.getincrementaldecoder("utf-8")(errors="replace")
        write(options.prompt)
        began = time.perf_counter()
        for token in generate_tokens(run, model, options.prompt.encode(), options.tokens, sampling):
            write(letters.decode(bytes([token])))
            sys.stdout.flush()
        write(letters.decode(b"", final=True) + "\n")
        sys.stdout.flush()
        if run.is_first:
            seconds = time.perf_counter() - began
            where = (
                f"{format_count(run.size, 'worker')}, mesh {run.mesh}"
                if run.size > 1
                else "1 worker"
            )
            text = (
                f"paceline: {format_count(options.tokens, 'token')} in {seconds:.2f} s, "
                f"{options.tokens / seconds:.0f} a second ({where})"
            )
            print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    try:
        main()
    except PacelineError as error:  # in one line, as errors of commands are
        print(f"paceline: {error}", file=sys.stderr, flush=True)
        sys.exit(2 if isinstance(error, UsageError) else 1)
