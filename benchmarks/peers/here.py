"""The loops in the driver: ours, and one process with all threads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import raydp_parallel
from benchmarks.nets import CASES
from benchmarks.peers.base import Peer, Weights, optimizer_of, repeat, stepper, weights


class Here:
    """A loop in this process.

    Args:
        wrap: Makes of a net what the loop calls.
        end: Lets go of what it needed.
        made: Makes the optimizer.
    """

    def __init__(
        self,
        wrap: Callable[[nn.Module], nn.Module],
        end: Callable[[], None],
        made: Callable[[str, Any], torch.optim.Optimizer] = optimizer_of,
    ) -> None:
        self._wrap = wrap
        self._made = made
        self.close = end

    def begin(self, case: str) -> None:
        """Make the net."""
        self._net = CASES[case].make()
        self._model = self._wrap(self._net)
        self._step = stepper(case, self._model, made=self._made)

    def steps(self, count: int) -> float:
        """Make some steps."""
        return repeat(self._step, count)

    def finish(self) -> Weights:
        """The weights."""
        if isinstance(self._model, raydp_parallel.DataParallel):
            self._model.sync()
        found = weights(self._net)
        del self._net, self._model, self._step
        return found


def ours(workers: int) -> Peer:
    """Replicas on CPUs, the loop here."""
    return Here(
        lambda net: raydp_parallel.DataParallel(net, ["cpu"] * workers), raydp_parallel.shutdown
    )


def in_replicas(case: str, model: Any) -> torch.optim.Optimizer:
    """The case's optimizer, in the replicas."""
    kind, keywords = CASES[case].optimizer
    made: torch.optim.Optimizer = model.optimizer(kind, **keywords)
    return made


def ours_in_replicas(workers: int) -> Peer:
    """Replicas on CPUs, the loop here, the optimizer there."""
    return Here(
        lambda net: raydp_parallel.DataParallel(net, ["cpu"] * workers),
        raydp_parallel.shutdown,
        in_replicas,
    )


def plain(workers: int) -> Peer:
    """No workers: one process, and all threads of torch."""
    return Here(lambda net: net, lambda: None)
