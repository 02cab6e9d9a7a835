"""The strategies that are compared, and how near to exact each has to end, as plain data."""

from __future__ import annotations

from dataclasses import dataclass

DDP = "train_ddp.py"


@dataclass(frozen=True)
class Way:
    """One way to train: paceline with `sync`, or DDP with `arguments`.

    `bound`: how much worse than exact it may end, if it has one.
    """

    name: str
    title: str
    sync: str = ""
    bound: float | None = None
    # steps between two validations where there is a race: a multiple of the steps in a round
    stretch: int = 20
    arguments: tuple[str, ...] = ()
    warm: int = 0  # steps of exact sums at first

    @property
    def program(self) -> str:
        """The program that trains this way."""
        return "train.py" if self.sync else DDP


def _by_name(*ways: Way) -> dict[str, Way]:
    return {way.name: way for way in ways}


TUNING = 99  # the seed that rates are tried with
WARM = 100  # steps of exact sums, where a way loses so much that papers start it late

TABLE = _by_name(
    Way("exact", "exact", "AllReduce()"),
    Way("half", "half", "AllReduce(codec=half())", 0.005),
    Way("int8", "int8", "AllReduce(codec=int8())", 0.005),
    Way(
        "sign",
        "sign, error feedback",
        f"AllReduce(codec=error_feedback(after({WARM}, gathered(sign()))))",
        0.01,
        warm=WARM,
    ),
    Way(
        "powersgd-4",
        "PowerSGD rank 4, error feedback",
        f"AllReduce(codec=error_feedback(after({WARM}, powersgd(4))))",
        0.01,
        warm=WARM,
    ),
    Way(
        "powersgd-8",
        "PowerSGD rank 8, error feedback",
        f"AllReduce(codec=error_feedback(after({WARM}, powersgd(8))))",
        0.01,
        warm=WARM,
    ),
    Way(
        "topk",
        "top-k 1 %, error feedback",
        f"AllReduce(codec=error_feedback(after({WARM}, topk(0.01))))",
        0.01,
        warm=WARM,
    ),
    Way(
        "local",
        "local SGD every 8",
        f"LocalSGD(every=8, after={WARM}, momentum='averaged')",
        0.02,
        warm=WARM,
    ),
    Way(
        "diloco",
        "DiLoCo every 16",
        f"LocalSGD(every=16, outer=nesterov(0.7, 0.5), after={WARM}, momentum='averaged')",
        0.02,
        warm=WARM,
    ),
    Way("gossip", "gossip, exponential graph", "Gossip(graph='exponential')", 0.02),
    Way(
        "sign-bare",
        "sign, nothing kept",
        f"AllReduce(codec=after({WARM}, gathered(sign())))",
        warm=WARM,
    ),
    Way(
        "topk-bare",
        "top-k 1 %, nothing kept",
        f"AllReduce(codec=after({WARM}, topk(0.01)))",
        warm=WARM,
    ),
    Way(
        "sign-cold",
        "sign, error feedback, from the first step",
        "AllReduce(codec=error_feedback(gathered(sign())))",
    ),
    Way(
        "topk-cold",
        "top-k 1 %, error feedback, from the first step",
        "AllReduce(codec=error_feedback(topk(0.01)))",
    ),
)

RACE = _by_name(
    Way("ddp", "DDP"),
    Way(
        "local-16",
        "paceline, local SGD every 16, int8",
        "LocalSGD(every=16, codec=int8())",
        stretch=16,
    ),
    Way(
        "local-8",
        "paceline, local SGD every 8, int8",
        "LocalSGD(every=8, codec=int8())",
        stretch=16,
    ),
    Way(
        "ddp-local-8",
        "DDP, post-local SGD every 8",
        stretch=24,
        arguments=("--hook", "local", "--period", "8"),
    ),
    Way(
        "ddp-local-16",
        "DDP, post-local SGD every 16",
        stretch=16,
        arguments=("--hook", "local", "--period", "16"),
    ),
    Way("ddp-fp16", "DDP, fp16 hook", arguments=("--hook", "fp16")),
    Way(
        "powersgd",
        "paceline, PowerSGD rank 4, error feedback",
        "AllReduce(codec=error_feedback(powersgd(4)))",
    ),
    Way("int8", "paceline, int8", "AllReduce(codec=int8())"),
    Way("exact", "paceline, exact", "AllReduce()"),
)
