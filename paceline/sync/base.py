"""What a strategy is: when replicas agree, told through the same few calls whichever it is."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable

from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from paceline.comm.breaker import Breaker
from paceline.comm.desk import Desk
from paceline.comm.group import Group, Traffic
from paceline.comm.messages import Keys
from paceline.comm.ordered import Agreement
from paceline.errors import PacelineError
from paceline.sync.paying import Account
from paceline.trace import Served, Trace

if TYPE_CHECKING:
    from paceline.sync.freerows import FreeRows
    from paceline.sync.replacing import Replacing

Axes = tuple[str, ...]


class Slot(NamedTuple):
    """What a strategy is given for each parameter: it is replicated over some axes of the mesh and sharded over others."""

    name: str
    parameter: Parameter
    optimizer: Optimizer | None
    replicate: Axes = ("data",)
    shard: Axes = ()
    scripted: bool = False  # used where Python doesn't see it (torch.jit.script)


@dataclass
class Moment:
    """Where training stands, as the strategies need it; the session keeps it up to date."""

    step: int = 0
    scale: float = 1.0  # what my gradient counts in the mean: my weight / the weight of the global batch
    ghost: bool = False  # my share is empty: my gradients count as zeros
    loss_scale: Callable[[], float] = lambda: 1.0  # what a GradScaler multiplies the loss by: residuals are kept without it
    part: float = 1.0  # mine of the weights of the step, over all workers and micro-batches
    cut: bool = False  # a worker was lost: what of this turn has not been exchanged can't be any more
    silent: bool = False  # this backward is not exchanged yet (no_sync, or a micro-batch before the last)


class Sending(Protocol):
    """Whatever sends on behalf of a strategy."""

    @property
    def traffic(self) -> Traffic:
        """See `Group.traffic`."""
        ...

    @property
    def waited(self) -> float:
        """See `Group.waited`."""
        ...

    def close(self) -> None:
        """See `Group.close`."""
        ...

    def abort(self) -> None:
        """See `Group.abort`."""
        ...


@dataclass
class Scene:
    """All that a strategy works with: the group it exchanges in, the meeting of all workers, the moment, and the trace."""

    group: Group
    agreement: Agreement
    moment: Moment = field(default_factory=Moment)
    trace: Trace = field(default_factory=Trace)
    hosts: tuple[int, ...] = ()  # the host of each rank
    say: Callable[[str], None] = print  # how announcements are made, once each
    native: Callable[[], Group] | None = None  # makes a group of all workers on torch.distributed; collective
    local: Callable[[], Group] | None = None  # the workers of my host; collective
    servers: Callable[[int | None, int], Room] | None = None  # starts so many (None: one on each host), each so many times; collective
    table_servers: Callable[[int | None, int], Room] | None = None  # the same, of sparse tables
    deadline: float = 30.0  # seconds, of waits that are no call of all
    survives: bool = False  # the run goes on when workers are lost
    breaker: Breaker | None = None  # trips when the workers become others
    sides: list[Sending] = field(default_factory=list)  # other groups of the same workers, whose traffic and waits count too
    accounts: list[Account] = field(default_factory=list)  # of the codecs in use, the same number on all workers
    aside: Traffic = field(default_factory=Traffic)  # what was sent to measure links: no part of a step
    past: Traffic = field(default_factory=Traffic)  # what was sent in groups that have been left
    past_waited: float = 0.0
    pulling: float = 0.0  # seconds for parameters that were on their way when they were used, but for steps

    def leave(self) -> None:
        """The groups have broken: forget them, but not what they sent."""
        self.past, self.past_waited = self.traffic, self.waited
        self.sides = []

    @property
    def waited(self) -> float:
        """Seconds spent waiting for workers that came later."""
        return self.past_waited + self.group.waited + sum(group.waited for group in self.sides)

    @property
    def traffic(self) -> Traffic:
        """What this worker has sent in all groups."""
        found = [group.traffic for group in (self.group, *self.sides)]
        return self.past + Traffic(sum(t.within for t in found), sum(t.between for t in found))


class House(Protocol):
    """Servers that outlive the workers which have started them. `next`: the number of the one that is started next, alike on all."""

    next: int

    def layout(self) -> Any:
        """What who has just come has to know for `join`: JSON."""
        ...

    def join(self, told: Any) -> Room:
        """Where servers are, as others have told."""
        ...

    @property
    def here(self) -> str:
        """My host, as no other is called."""
        ...

    def lose(self, numbers: Collection[int]) -> Room:
        """These servers are no more."""
        ...

    def spawn(self, shard: int, *, mine: bool) -> int:
        """Begin to start a server, if it is mine to do, which is to keep a copy of this shard; gives its number. On all workers."""
        ...

    def spawned(self, number: int) -> Any:
        """What all have to know of one that I start, for `add`, once it has begun (JSON); None before that; False if it couldn't begin."""
        ...

    def add(self, told: Any) -> Room:
        """A server has begun, and has what it is to keep."""
        ...

    def at(self, told: Any) -> Room:
        """One that has begun and isn't added yet, by itself."""
        ...

    def homes(self) -> list[tuple[str, int]]:
        """The host of each server, and its shard."""
        ...

    def on(self, hosts: Collection[str]) -> list[int]:
        """The numbers of the servers on these hosts."""
        ...

    def leave(self) -> None:
        """Go without ending any server."""
        ...


class Room(NamedTuple):
    """Where servers are."""

    addresses: tuple[str, ...]
    names: tuple[str, ...]  # what they are called in messages
    keys: Keys
    watch: Callable[[Callable[[PacelineError], None]], None]  # who wants to know when one is lost, from another thread
    close: Callable[[], None]  # ends those that this worker has started
    numbers: tuple[int, ...] = ()  # of each server, never used twice
    shards: tuple[int, ...] = ()  # which each of them keeps
    house: House | None = None  # where losses are survived; then `addresses` are empty for who has just come


class Arriving(Protocol):
    """Parameters that are on their way."""

    def use(self, parameters: Collection[Any] | None = None) -> None:
        """These parameters (None: all) are about to be used where torch may not ask them: they have to be there."""
        ...

    def end(self) -> None:
        """The run is over, here at least: parameters are plain ones again."""
        ...


@runtime_checkable
class Steps(Protocol):
    """A strategy in which optimizers step elsewhere than here."""

    @property
    def attached(self) -> bool:
        """Whether it has charge of any parameters."""
        ...

    @property
    def desk(self) -> Desk | None:
        """Where workers that are not in lockstep while they train get their samples; None where they are."""
        ...

    def steps(self, optimizer: Optimizer) -> bool:
        """Whether this one does."""
        ...

    @property
    def rows(self) -> FreeRows:
        """What steps sparse tables with them, where workers are not in lockstep."""
        ...

    @property
    def arriving(self) -> Arriving | None:
        """What knows of the parameters that are on their way after a step; None where they have come with it."""
        ...

    def step(self, optimizer: Optimizer) -> None:
        """Have it step. Collective, if in lockstep."""
        ...

    def clip(self, parameters: Sequence[Tensor], max_norm: float, norm_type: float) -> Tensor:
        """See `Run.clip`; nothing is changed here. Collective, if in lockstep."""
        ...

    @property
    def copies(self) -> Replacing | None:
        """Who looks after the servers, where losses are survived."""
        ...

    def servers_begun(self) -> list[str]:
        """What those are called that have begun since in the place of others, where everybody came together for it."""
        ...

    def facts(self) -> list[dict[str, Any]]:
        """What was done elsewhere, for the summary."""
        ...

    def served(self) -> list[Served]:
        """And when, for the timeline."""
        ...


@runtime_checkable
class Lends(Protocol):
    """A strategy that hands out p.grad in memory which it uses again."""

    def overwrites(self, number: int, grad: Tensor) -> bool:
        """Whether the exchange that this pass is for writes over `grad`, which is p.grad of slot `number` now."""
        ...


class Sync(Protocol):
    """When replicas agree. A strategy is told of every gradient and every step; its docstring says what p.grad is and what step does."""

    @property
    def apart(self) -> bool:
        """Whether replicas, and so what their optimizers remember, may differ between two steps."""
        ...

    @property
    def meets(self) -> bool:
        """Whether there are moments between two turns, without being asked for, at which all replicas are equal."""
        ...

    @property
    def together(self) -> bool:
        """Whether backward passes exchange gradients with all workers."""
        ...

    def attach(self, slots: Sequence[Slot]) -> None:
        """Take charge of these parameters (again with more of them at the end, when some were unfrozen)."""
        ...

    def ready(self, number: int, grad: Tensor, scale: float) -> None:
        """Backward has made what it adds to the gradient of slot `number`; it counts `scale` in the mean (0: as zeros)."""
        ...

    def backward_done(self, where: str) -> list[tuple[int, Tensor]]:
        """The outermost backward has ended, or a rank without one joins it: number and final addend of each slot that any rank has used."""
        ...

    def stepped(self, optimizer: Optimizer) -> None:
        """An optimizer has stepped."""
        ...

    def commit(self) -> None:
        """The turn of the loader is over and nothing failed."""
        ...

    def abort(self) -> None:
        """The turn has failed: forget what it exchanged."""
        ...

    def mirrored(self) -> dict[str, Tensor] | None:
        """Between two turns: what it keeps that is equal on all workers, as all replicas are now; None, on all workers, if they aren't."""
        ...

    def converge(self) -> None:
        """Replicas are about to be looked at as one (evaluated, saved, ended): make them equal. Collective."""
        ...

    def layout(self) -> Any:
        """What who has just come has to know for `regroup`: JSON."""
        ...

    def regroup(self, scene: Scene, layout: Any = None) -> None:
        """The workers are others now: go on with the new group of the scene. Collective; what was under way is void, or sent anew.

        `layout`: what `layout` gave where somebody has just come, on all workers.
        """
        ...

    def inherit(self, state: dict[str, Any]) -> None:
        """Take over what `state_dict` gave on another worker when replicas were equal, but for its residuals; the parameters are here."""
        ...

    @property
    def owns(self) -> bool:
        """Whether this worker may have something that no other has; quick."""
        ...

    def own(self) -> dict[str, Any] | None:
        """What this worker alone has, between two turns; None if that is nothing. Its tensors stay as they are until the next call."""
        ...

    def take_over(self, state: dict[str, Any], step: int) -> bool:
        """What `own` gave after `step` on a worker that is lost becomes mine to send; False where that is out of date, or can't be used."""
        ...

    def detach(self) -> None:
        """Let go of parameters and memory."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """What has to survive of this worker: residuals, outer optimizers, clocks. The turn under way counts as over."""
        ...

    def adopt(self, states: Sequence[dict[str, Any]]) -> None:
        """Take up what `state_dict` gave on each worker, in rank order; there may be more or fewer workers now. Collective."""
        ...


class Strategy(Protocol):
    """A strategy as it is written: plain data that `begin` turns into what runs."""

    def begin(self, scene: Scene) -> Sync:
        """Start running in this scene."""
        ...
