"""Waiting for another thread, also in a thread that Ctrl-C interrupts.

`threading.Condition` takes its lock again when a wait ends. If Ctrl-C ends that, the caller's
``with`` gives up a lock that another thread holds by now: two threads are then in the guarded block
at once, and the other one's ``with`` raises. Here a thread waits without the lock of the state.
"""

from __future__ import annotations

import threading


class Waiters:
    """Threads that wait for a change of some state, each on a lock of its own.

    All methods are called with the state's lock held, which is entered by ``with`` directly. A
    thread that found nothing yet enters itself, leaves the state's lock, acquires what it got with
    a time limit, and looks again. A limit is needed: Ctrl-C may come between a change and the
    word of it.
    """

    def __init__(self) -> None:
        self._locks: list[threading.Lock] = []

    def enter(self) -> threading.Lock:
        """A lock that is free after the next change."""
        lock = threading.Lock()
        lock.acquire()
        self._locks.append(lock)
        return lock

    def leave(self, lock: threading.Lock) -> None:
        """Forget a lock that is no longer waited for."""
        if lock in self._locks:
            self._locks.remove(lock)

    def wake(self) -> None:
        """Something has changed: all look again."""
        locks, self._locks = self._locks, []
        for lock in locks:
            lock.release()
