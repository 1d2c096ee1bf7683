"""The driver that one writes first: weights into the object store each step, gradients back as
lists of tensors.
"""

from __future__ import annotations

from typing import Any

import ray
import torch
from torch import Tensor

from benchmarks.measure import replicas_threads
from benchmarks.nets import CASES
from benchmarks.peers.base import Weights, optimizer_of, repeat, weights


@ray.remote(num_cpus=0)
class Worker:
    """A copy of the net.

    Args:
        threads: Torch's threads.
    """

    def __init__(self, threads: int) -> None:
        torch.set_num_threads(threads)

    def begin(self, case: str) -> None:
        """Make the net."""
        self._net = CASES[case].make()
        self._loss = CASES[case].loss

    def gradients(self, new: list[Tensor], x: Tensor, y: Tensor) -> list[Tensor]:
        """The gradients of one chunk."""
        with torch.no_grad():
            for parameter, value in zip(self._net.parameters(), new, strict=True):
                parameter.copy_(value)
        self._net.zero_grad()
        self._loss(self._net, x, y).backward()
        return [p.grad for p in self._net.parameters() if p.grad is not None]


class NaiveRay:
    """The driver's loop.

    Args:
        workers: How many workers.
    """

    def __init__(self, workers: int) -> None:
        self._workers: list[Any] = [
            Worker.remote(replicas_threads(workers)) for _ in range(workers)
        ]

    def begin(self, case: str) -> None:
        """Make the net, here and there."""
        self._net = CASES[case].make()
        self._optimizer = optimizer_of(case, self._net)
        self._chunks = [
            *zip(*(part.chunk(len(self._workers)) for part in CASES[case].batch()), strict=True)
        ]
        ray.get([worker.begin.remote(case) for worker in self._workers])

    def steps(self, count: int) -> float:
        """Make some steps."""
        return repeat(self._step, count)

    def _step(self) -> None:
        new = ray.put([p.detach() for p in self._net.parameters()])
        calls = [
            w.gradients.remote(new, x, y)
            for w, (x, y) in zip(self._workers, self._chunks, strict=True)
        ]
        shares = ray.get(calls)
        for parameter, *grads in zip(self._net.parameters(), *shares, strict=True):
            parameter.grad = sum(grads[1:], start=grads[0]) / len(grads)
        self._optimizer.step()

    def finish(self) -> Weights:
        """The weights."""
        return weights(self._net)

    def close(self) -> None:
        """End the workers."""
        for worker in self._workers:
            ray.kill(worker)
