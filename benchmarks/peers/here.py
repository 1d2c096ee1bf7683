"""The loops in the driver: ours, and one process with all threads."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

import raydp_parallel
from benchmarks.nets import CASES
from benchmarks.peers.base import Peer, Weights, repeat, stepper, weights


class Here:
    """A loop in this process.

    Args:
        wrap: Makes of a net what the loop calls.
        end: Lets go of what it needed.
    """

    def __init__(self, wrap: Callable[[nn.Module], nn.Module], end: Callable[[], None]) -> None:
        self._wrap = wrap
        self.close = end

    def begin(self, case: str) -> None:
        """Make the net."""
        self._net = CASES[case].make()
        self._step = stepper(case, self._wrap(self._net))

    def steps(self, count: int) -> float:
        """Make some steps."""
        return repeat(self._step, count)

    def finish(self) -> Weights:
        """The weights."""
        found = weights(self._net)
        del self._net, self._step
        return found


def ours(workers: int) -> Peer:
    """Replicas on CPUs, the loop here."""
    return Here(
        lambda net: raydp_parallel.DataParallel(net, ["cpu"] * workers), raydp_parallel.shutdown
    )


def plain(workers: int) -> Peer:
    """No workers: one process, and all threads of torch."""
    return Here(lambda net: net, lambda: None)
