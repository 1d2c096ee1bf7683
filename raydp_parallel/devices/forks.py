"""What a forked process does with the objects that it inherits: it leaves them to its parent.

[Note: after a fork]
The child has a copy of everything: sockets that it shares with the parent, descriptors of processes
that it could end, locks held by threads that the child does not have. If it called a replica,
parent and child would read each other's answers. So each object that reaches beyond the process, or
has a lock, is notified right after the fork, before any code of the user runs: sockets are closed
without a message to the other end; executors belong to the parent, and each use in the child raises
`ForkedProcess`; threads that do not exist report nothing; locks are new. Only executors with
replicas are refused: an executor that has none yet, or has them in its own process, works in the
child.
"""

from __future__ import annotations

import contextlib
import os
import weakref
from collections.abc import Callable
from typing import Protocol


class Closable(Protocol):
    """An object that holds a descriptor."""

    def close(self) -> object:
        """Close it."""


class Inherited(Protocol):
    """An object that is notified in a forked child."""

    def after_fork(self) -> None:
        """Called in the child, where no other thread runs."""


class _AfterFork:
    """What is notified in a forked child."""

    def __init__(self) -> None:
        self.closed: weakref.WeakSet[Closable] = weakref.WeakSet()
        self.told: weakref.WeakSet[Inherited] = weakref.WeakSet()
        self.called: list[Callable[[], object]] = []

    def in_child(self) -> None:
        """Notify it."""
        for thing in [*self.closed]:
            with contextlib.suppress(Exception):
                thing.close()
        for told in [*self.told]:
            with contextlib.suppress(Exception):
                told.after_fork()
        for work in self.called:
            with contextlib.suppress(Exception):
                work()


_after_fork = _AfterFork()


def close_in_child(thing: Closable) -> None:
    """Close an object in each forked child, before other objects are notified."""
    _after_fork.closed.add(thing)


def tell_child(thing: Inherited) -> None:
    """Notify an object in each forked child."""
    _after_fork.told.add(thing)


def call_in_child(work: Callable[[], object]) -> None:
    """Call a function of a module in each forked child."""
    _after_fork.called.append(work)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork.in_child)
