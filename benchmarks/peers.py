"""Ways to train the same net, which make steps when told and time themselves; and plain Ray actors.

DDP's workers wait at a pipe for the name of a case, then for numbers of steps; they make them
without a word, and answer how many seconds they took inside. So a step of DDP is measured without
what it costs to tell its workers, and with whatever runs ahead from one step to the next, which
favours it.
"""

from __future__ import annotations

import hashlib
import os
import socket
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any, NamedTuple, Protocol

import ray
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import raydp_parallel
from benchmarks.measure import replicas_threads
from benchmarks.nets import CASES


class Weights(NamedTuple):
    """The weights of a net, in short.

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
    """Describe a net's weights."""
    found = [p.detach() for p in net.parameters()]
    digest = hashlib.sha256(b"".join(p.contiguous().numpy().tobytes() for p in found)).hexdigest()
    return Weights(float(sum(p.double().abs().sum() for p in found)), digest)


def sgd(net: nn.Module) -> torch.optim.Optimizer:
    """Make the optimizer of the plain loop."""
    return torch.optim.SGD(net.parameters(), lr=1e-3)


def adamw(net: nn.Module) -> torch.optim.Optimizer:
    """Make one that has twice the weights as its state."""
    return torch.optim.AdamW(net.parameters(), lr=1e-4)


def resident(net: Any) -> torch.optim.Optimizer:
    """Make the same, whose steps the replicas make."""
    made: torch.optim.Optimizer = net.optimizer(torch.optim.AdamW, lr=1e-4)
    return made


def resident_sgd(net: Any) -> torch.optim.Optimizer:
    """Make the plain loop's, whose steps the replicas make."""
    made: torch.optim.Optimizer = net.optimizer(torch.optim.SGD, lr=1e-3)
    return made


def stepper(
    case: str,
    net: nn.Module,
    chunk: tuple[int, int] = (0, 1),
    make: Callable[[Any], torch.optim.Optimizer] = sgd,
) -> Callable[[], None]:
    """Give one step of a plain loop, on one of so many chunks of the batch."""
    optimizer = make(net)
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


class Here:
    """A loop in this process.

    Args:
        wrap: Makes of a net what the loop calls.
        make: Makes of that the optimizer.
    """

    def __init__(
        self,
        wrap: Callable[[nn.Module], nn.Module],
        make: Callable[[Any], torch.optim.Optimizer] = sgd,
    ) -> None:
        self._wrap, self._make = wrap, make

    def begin(self, case: str) -> None:
        """Make the net."""
        self._net = CASES[case].make()
        self._model: Any = self._wrap(self._net)
        self._step = stepper(case, self._model, make=self._make)

    def steps(self, count: int) -> float:
        """Make some steps, and wait for the last one if replicas make it."""
        start = time.perf_counter()
        repeat(self._step, count)
        if self._make in (resident, resident_sgd):
            self._model.executor.flush()
        return time.perf_counter() - start

    def finish(self) -> Weights:
        """The weights."""
        found = weights(self._model)
        del self._net, self._model, self._step
        return found

    def close(self) -> None:
        """End replicas, if there are any."""
        raydp_parallel.shutdown()


class Ddp:
    """DDP over gloo, in processes as torchrun would start them.

    Args:
        workers: How many.
        make: Makes the optimizer.
    """

    def __init__(self, workers: int, make: Callable[[Any], torch.optim.Optimizer] = sgd) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self._lines: list[Connection] = []
        for rank in range(workers):
            ours, theirs = mp.get_context("spawn").Pipe()
            arguments = (rank, workers, port, theirs, make)
            mp.get_context("spawn").Process(target=_train, args=arguments, daemon=True).start()
            theirs.close()
            self._lines.append(ours)

    def begin(self, case: str) -> None:
        """Make the net of a case, and wait until it is made."""
        self._ask(case)

    def steps(self, count: int) -> float:
        """Make some steps; the slowest worker's seconds."""
        return max(self._ask(count))

    def finish(self) -> Weights:
        """End the case; returns the weights, which all have."""
        found = self._ask(0)
        assert all(other == found[0] for other in found), f"workers have different weights: {found}"
        return Weights(*found[0])

    def close(self) -> None:
        """End the processes."""
        for line in self._lines:
            line.send("")

    def _ask(self, question: Any) -> list[Any]:
        for line in self._lines:
            line.send(question)
        return [line.recv() for line in self._lines]


def _train(
    rank: int,
    workers: int,
    port: int,
    line: Connection,
    make: Callable[[Any], torch.optim.Optimizer],
) -> None:
    """Train cases by name, as many steps as each number says, until an empty name comes."""
    place = {"RANK": rank, "WORLD_SIZE": workers, "MASTER_PORT": port, "MASTER_ADDR": "127.0.0.1"}
    threads = replicas_threads(workers)
    os.environ.update({name: str(value) for name, value in place.items()})
    os.environ["OMP_NUM_THREADS"] = str(threads)  # as the launchers set it
    torch.set_num_threads(threads)
    dist.init_process_group("gloo")
    while case := line.recv():
        net = CASES[case].make()
        step = stepper(case, DistributedDataParallel(net), (rank, workers), make)
        line.send("ready")
        while count := line.recv():
            line.send(repeat(step, count))
        line.send(weights(net))
    dist.destroy_process_group()


DDP, OURS, PLAIN = "DDP gloo", "raydp_parallel", "one process"

PEERS: dict[str, Callable[[int], Peer]] = {
    DDP: Ddp,
    OURS: lambda workers: Here(lambda net: raydp_parallel.DataParallel(net, ["cpu"] * workers)),
    PLAIN: lambda _: Here(lambda net: net),
}
"""By name: a function that starts it, given the number of workers."""


@ray.remote(num_cpus=0)
class Echo:
    """An actor as one writes it first."""

    def empty(self) -> None:
        """Nothing at all."""


def fan_out(actors: Sequence[Any]) -> None:
    """Make one round trip to all that carries nothing."""
    ray.get([actor.empty.remote() for actor in actors])
