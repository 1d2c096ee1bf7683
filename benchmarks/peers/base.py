"""What every peer does, and the worker's side of those that run in processes of their own.

A worker waits at a connection for the name of a case, then for numbers of steps; it makes them
without a word, and answers how many seconds they took inside it. So a step of a peer is measured
without what it costs to tell its workers, and with whatever runs ahead from one step to the next:
that favours the peers: their workers need no driver.
"""

from __future__ import annotations

import functools
import hashlib
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn

from benchmarks.nets import CASES


class Weights(NamedTuple):
    """What a net's weights are.

    Attributes:
        checksum: The sum of their absolute values.
        digest: Of their bits.
    """

    checksum: float
    digest: str


class Peer(Protocol):
    """A way to train."""

    def begin(self, case: str) -> None:
        """Make the net of a case; the steps that follow train it."""

    def steps(self, count: int) -> float:
        """Make some steps; returns the seconds that they took."""

    def finish(self) -> Weights:
        """End the case; returns the weights."""

    def close(self) -> None:
        """End the workers."""


def weights(net: nn.Module) -> Weights:
    """Of a net on a CPU."""
    found = [p.detach() for p in net.parameters()]
    digest = hashlib.sha256(b"".join(p.contiguous().numpy().tobytes() for p in found)).hexdigest()
    return Weights(float(sum(p.double().abs().sum() for p in found)), digest)


def optimizer_of(case: str, net: nn.Module) -> torch.optim.Optimizer:
    """The same for all that train a case."""
    kind, keywords = CASES[case].optimizer
    made: torch.optim.Optimizer = kind(net.parameters(), **keywords)
    return made


def stepper(
    case: str,
    net: nn.Module,
    chunk: tuple[int, int] = (0, 1),
    made: Callable[[str, Any], torch.optim.Optimizer] = optimizer_of,
) -> Callable[[], None]:
    """One step of a plain loop, on one of so many chunks of the batch, with the optimizer that
    ``made`` gives.
    """
    optimizer = made(case, net)
    number, chunks = chunk
    x, y = (part.chunk(chunks)[number].clone() for part in CASES[case].batch())
    loss_of = CASES[case].loss

    def step() -> None:
        loss = loss_of(net, x, y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return step


def repeat(step: Callable[[], None], count: int) -> float:
    """Make some steps; returns the seconds that they took."""
    start = time.perf_counter()
    for _ in range(count):
        step()
    return time.perf_counter() - start


def serve(
    connection: Connection, begin: Callable[[str], tuple[nn.Module, Callable[[], None]]]
) -> None:
    """A worker's life: cases by name, a number of steps for each that comes, the weights after the
    last.
    """
    while case := connection.recv():
        net, step = begin(case)
        connection.send("ready")
        while count := connection.recv():
            connection.send(repeat(step, count))
        connection.send(weights(net))


class Workers:
    """The driver's side of some workers.

    Args:
        dial: Connects to each.
        end: Waits for them to end.
    """

    def __init__(self, dial: Callable[[], Sequence[Connection]], end: Callable[[], None]) -> None:
        self._dial = dial
        self._end = end

    @functools.cached_property
    def _connections(self) -> Sequence[Connection]:
        return self._dial()

    def begin(self, case: str) -> None:
        """Make the net of a case, and wait until it is made."""
        self._ask(case)

    def steps(self, count: int) -> float:
        """Make some steps; the slowest worker's seconds."""
        return max(self._ask(count))

    def finish(self) -> Weights:
        """End the case; returns the first worker's weights, which all have."""
        found = self._ask(0)
        assert all(other == found[0] for other in found), (
            f"workers ended with different weights: {found}"
        )
        return found[0]  # type: ignore[no-any-return]

    def close(self) -> None:
        """End them."""
        for connection in self._connections:
            connection.send("")
        self._end()

    def _ask(self, question: Any) -> list[Any]:
        for connection in self._connections:
            connection.send(question)
        return [connection.recv() for connection in self._connections]
