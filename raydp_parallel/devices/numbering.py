"""Numbers that name things of this process, each once."""

from __future__ import annotations

import collections
import functools
import itertools

_counters: collections.defaultdict[str, itertools.count[int]] = collections.defaultdict(
    functools.partial(itertools.count, 1)
)
"""The next number of each kind. Threads need no lock: each step is one of C's."""


def number(kind: str) -> int:
    """The next number for a kind of thing, from 1."""
    return next(_counters[kind])
