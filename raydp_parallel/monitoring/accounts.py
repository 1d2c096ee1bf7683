"""What the recorder of an executor adds up: what a replica did for each model, what concerns the
replica whatever it runs, and the phases of a call.

In the replica a call has four phases, one after the other, with no time between them: adopt (undo
what the last forward changed, adopt what the driver changed), copy in, forward or backward, copy
out. The driver adds three that only it can measure: a replica waits (its call is on its way, or
other replicas are not done yet), the driver reduces gradients, or the replica is idle, without a
call.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import weakref
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from raydp_parallel.devices.buffers import SharedBuffer
from raydp_parallel.monitoring.stats import PhaseSeconds
from raydp_parallel.transport.links import Exposed, ForeignMemory

FORWARD = ("adopt", "copy in", "forward", "copy out")
BACKWARD = ("adopt", "copy in", "backward", "copy out")
IN_REPLICA = {"forward": FORWARD, "backward": BACKWARD}
"""The phases of a replica's call, by the method that is called."""

OpenSpan = Callable[[str], contextlib.AbstractContextManager[Any] | None]
"""Opens a span for a phase, for a profiler; None where no profiler runs."""


def unseen(_phase: str) -> None:
    """No span: no profiler runs."""


class Clock:
    """The difference between a replica's clock and the driver's, worked out from calls alone.

    A call is sent before it begins and answered after it ends, which bounds the difference from
    both sides. Processes of one machine have one clock: as long as the bounds allow 0, the
    difference is 0.

    Attributes:
        offset: What to add to the replica's times to get the driver's.
    """

    def __init__(self) -> None:
        self.offset = 0.0
        self._least = float("-inf")
        self._most = float("inf")

    def heard(self, sent: float, stamps: tuple[float, ...], received: float) -> None:
        """Take a call into account.

        Args:
            sent: When it was sent, by the driver's clock.
            stamps: Its phases, by the replica's clock.
            received: When its answer was received, by the driver's clock.
        """
        self._least = max(self._least, sent - stamps[0])
        self._most = min(self._most, received - stamps[-1])
        within = self._least <= 0 <= self._most
        self.offset = 0.0 if within else (self._least + self._most) / 2


class ChunkSpan(NamedTuple):
    """One chunk of a call, as it happened.

    Attributes:
        replica: The number of the replica that ran it.
        sent: When it was sent, by the driver's clock.
        laps: When each of its phases began, and when the last ended, by the driver's clock; empty
            if it failed.
    """

    replica: int
    sent: float
    laps: tuple[float, ...]


class CallSpan(NamedTuple):
    """One call, as it happened. Times are by the driver's clock, in seconds.

    Attributes:
        method: ``"forward"``, ``"backward"`` or ``"reduce"``.
        number: Its number among calls of this method.
        model: The name of the model.
        began: When the driver began to prepare it.
        sent: When all chunks were sent.
        ended: When all had answered.
        chunks: Its chunks.
    """

    method: str
    number: int
    model: str
    began: float
    sent: float
    ended: float
    chunks: tuple[ChunkSpan, ...]


_RECENT = 20
"""Calls of a replica that count as its recent ones."""

_GONE = -1
"""Stands for all deleted modules."""

_PATIENCE = 16
"""Deleted modules that keep their accounts until the last report on them."""


@dataclass
class Account:
    """What one replica did for one model."""

    rows: int = 0
    forwards: int = 0
    backwards: int = 0
    seconds: list[float] = field(default_factory=lambda: [0.0] * 6)
    """Adopt, copy in, forward, backward, copy out, wait."""
    busy: dict[str, float] = field(default_factory=lambda: {"forward": 0.0, "backward": 0.0})
    """All of the replica's own phases together, by method."""
    state_sent: int = 0
    state_skipped: int = 0
    chunk_rows: int = 0
    traffic: Counter[tuple[str, str]] = field(default_factory=Counter)
    """Bytes by link and direction."""

    def add(self, other: Account) -> None:
        """Add the account of another model to this one."""
        self.rows += other.rows
        self.forwards += other.forwards
        self.backwards += other.backwards
        self.seconds = [a + b for a, b in zip(self.seconds, other.seconds, strict=True)]
        self.busy = {method: spent + other.busy[method] for method, spent in self.busy.items()}
        self.state_sent += other.state_sent
        self.state_skipped += other.state_skipped
        self.traffic.update(other.traffic)


class Accounts(dict[tuple[int, int], Account]):
    """The accounts, by replica and model.

    A module that `replicate` is called with in each step gets a new number each time, but keeps its
    account. The accounts of deleted modules are added up into one for each replica, so that the
    number of accounts is bounded by the number of modules.

    Attributes:
        names: The models' names in metrics.
        same: For each later number of a module, its first number.
    """

    def __init__(self) -> None:
        super().__init__()
        self.names: dict[int, str] = {}
        self._modules: dict[int, tuple[weakref.ref[Any], int]] = {}
        self.same: dict[int, int] = {}
        # Finalizers append here, from any thread and at any moment, also under the recorder's lock.
        self._gone: deque[int] = deque()

    def meet(self, model: int, module: Any) -> None:
        """Enter a module under a new number."""
        found, first = self._modules.get(id(module), (None, 0))
        if found is not None and found() is module:
            self.same[model] = first
            return
        self._modules[id(module)] = weakref.ref(module), model
        self.names[model] = f"{type(module).__name__}-{model}"
        weakref.finalize(module, self._gone.append, model).atexit = False

    def part(self, model: int) -> None:
        """Forget a number that is no longer used; its module may be. Finalizers call this."""
        self.same.pop(model, None)

    def number(self, model: int) -> int:
        """The number that a model's accounts are kept under: the first one of its module."""
        return self.same.get(model, model)

    def of(self, index: int, model: int) -> Account:
        """What a replica did for a model."""
        key = index, self.same.get(model, model)
        found = self.get(key)
        if found is None:
            found = self[key] = Account()
        return found

    def reported(self) -> list[tuple[int, str, Account]]:
        """Copies for a report, with the models' names. Deleted modules are reported a last time;
        notes of modules that are deleted while this runs may still come.
        """
        gone = len(self._gone)
        found = [
            (i, self.names.get(m, ""), copy.deepcopy(account))
            for (i, m), account in self.items()
            if m != _GONE
        ]
        self._settle(gone)
        return found

    def tidy(self) -> None:
        """Merge the accounts of deleted modules, where no report does it."""
        if (gone := len(self._gone)) > _PATIENCE:
            self._settle(gone)

    def _settle(self, count: int) -> None:
        """Merge the accounts of so many modules that were deleted first."""
        gone = {self._gone.popleft() for _ in range(count)}
        for index, model in [key for key in self if key[1] in gone]:
            self.setdefault((index, _GONE), Account()).add(self.pop((index, model)))
        for key, known in [*self._modules.items()] if gone else ():
            if known[1] in gone:
                del self._modules[key]
        for model in gone:
            self.names.pop(model, None)


class Recent(NamedTuple):
    """One of a replica's last calls.

    Attributes:
        work: Seconds of forward and backward.
        copies: Seconds of adopting state and copying.
        rows: Rows of its chunk.
    """

    work: float
    copies: float
    rows: int


@dataclass
class ReplicaAccount:
    """What concerns a replica whatever it runs."""

    since: float
    free: float
    reduce: float = 0.0
    idle: float = 0.0
    memory: tuple[int, int] = (0, 0)
    owed: float = 0.0
    """Seconds that were entered as waiting, but were work on a call that was answered later."""
    clock: Clock = field(default_factory=Clock)
    recent: deque[Recent] = field(default_factory=lambda: deque(maxlen=_RECENT))


def phases_of(
    replica: ReplicaAccount, found: Sequence[Account], now: float, sent: float | None
) -> PhaseSeconds:
    """Where a replica's time went, up to now.

    Args:
        replica: What concerns the replica.
        found: What it did for each model.
        now: The time.
        sent: When the first of the calls under way was sent; None if no call is under way.
    """
    adopt, copy_in, forward, backward, copy_out, wait = (
        sum((account.seconds[phase] for account in found), 0.0) for phase in range(6)
    )
    # The phases of a call under way are not known yet: until it ends its time counts as waiting.
    since = max(0.0, now - replica.free)
    waited = max(0.0, min(since, now - sent)) if sent is not None else 0.0
    return PhaseSeconds(
        adopt=adopt,
        copy_in=copy_in,
        forward=forward,
        backward=backward,
        copy_out=copy_out,
        wait=max(0.0, wait - replica.owed) + waited,
        reduce=replica.reduce,
        idle=replica.idle + since - waited,
    )


def for_model(found: Sequence[Account]) -> dict[str, Any]:
    """The counters of one model that a replica's tally has for all models together."""
    ways = list(itertools.chain.from_iterable(account.traffic.items() for account in found))
    return {
        "calls": sum(account.forwards for account in found),
        "rows": sum(account.rows for account in found),
        "chunk_rows": found[-1].chunk_rows if found else 0,
        "forward_seconds": sum(account.busy["forward"] for account in found),
        "backward_seconds": sum(account.busy["backward"] for account in found),
        "bytes_in": sum(size for (_, direction), size in ways if direction == "in"),
        "bytes_out": sum(size for (_, direction), size in ways if direction == "out"),
    }


Ways = tuple[tuple[str, int], ...]
"""Bytes of a message by the links that carried them."""


def ways(beside: Sequence[Any], size: int) -> Ways:
    """The links that carried a message's tensors, and how many bytes each.

    Args:
        beside: The message's packets.
        size: The tensors' bytes.
    """
    found: list[tuple[str, int]] = []
    for packet in beside:
        link, part = way_of(packet)
        part = size if part is None else min(size, part)
        size -= part
        found.append((link, part))
    return (*found, ("inline", size)) if size else tuple(found)


def way_of(packet: Any) -> tuple[str, int | None]:
    """The link that carries a packet beside a message, and its bytes; None if only the message
    has their number.
    """
    if isinstance(packet, SharedBuffer):
        return "shared", packet.size
    if isinstance(packet, ForeignMemory):
        return "shared", packet.descriptor.size
    if isinstance(packet, Exposed):
        return "shared", 0  # read where it lies: no byte is moved
    if isinstance(packet, np.ndarray):
        return "beside", packet.nbytes
    return "object store", None
