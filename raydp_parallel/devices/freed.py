"""Notes of objects that were freed, taken later.

A ``__del__``, or a callback in Python, runs at any moment, and Ctrl-C may come in it. Python
ignores what is raised there: the user's Ctrl-C is lost, and what was to be done is not done. So
objects that live as long as a call have no such finalizer. The interpreter itself puts their notes
aside, and a later call takes them.
"""

from __future__ import annotations

import weakref
from collections import deque
from typing import Generic, TypeVar

T = TypeVar("T")


class Watch(weakref.ref[object], Generic[T]):
    """A reference to an object, with a note about it."""

    __slots__ = ("note",)
    note: T


class Freed(Generic[T]):
    """The notes of objects that were freed. Threads may use it at once."""

    def __init__(self) -> None:
        self._watched: set[Watch[T]] = set()
        self._freed: deque[Watch[T]] = deque()

    def watch(self, thing: object, note: T) -> Watch[T]:
        """Keep a note until an object is freed and `take` is called."""
        watch: Watch[T] = Watch(thing, self._freed.append)
        watch.note = note
        self._watched.add(watch)
        return watch

    def forget(self, watch: Watch[T]) -> None:
        """Do not watch an object any more."""
        self._watched.discard(watch)

    def take(self) -> list[T]:
        """The notes of objects that were freed, each once."""
        notes: list[T] = []
        while self._freed:
            try:
                watch = self._freed.popleft()
            except IndexError:  # another thread took it
                break
            if watch in self._watched:
                self._watched.discard(watch)
                notes.append(watch.note)
        return notes
