"""Types that bring rules of their own for splitting and joining (pytorch#52597)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

Splitter = Callable[..., Sequence[Any]]
Joiner = Callable[[Sequence[Any], torch.device, int], Any]

registered: dict[type, tuple[Splitter, Joiner]] = {}
"""The rules of the classes that `register_batch_type` was told."""


def register_batch_type(cls: type, *, scatter: Splitter, gather: Joiner) -> None:
    """Register how values of a class are split and joined; the rules hold for subclasses too, and
    take precedence over all others.

    A class of your own can have ``__scatter__(self, chunks, dim)`` and a classmethod
    ``__gather__(cls, parts, target_device, dim)`` instead.

    ::

        class Ragged:
            def __init__(self, rows):
                self.rows = rows

        def split(value, chunks, dim, sizes):
            rest = iter(value.rows)
            counts = sizes(len(value.rows))
            return [Ragged([next(rest) for _ in range(count)]) for count in counts]

        def join(values, target_device, dim):
            return Ragged([row for value in values for row in value.rows])

        register_batch_type(Ragged, scatter=split, gather=join)
        parts = scatter(Ragged([[1], [2, 3], [4]]), ["cpu", "cpu"])
        assert [part.rows for part in parts] == [[[1], [2, 3]], [[4]]]

    Args:
        cls: The class.
        scatter: ``(value, chunks, dim)`` to at most ``chunks`` values, in the order of the rows. A
            parameter named ``sizes`` gets a function from the value's number of rows to the rows of
            each chunk: those of ``torch.chunk``, or as ``Options(chunk_weights=...)`` says.
        gather: ``(values, target_device, dim)`` to one value, of what the replicas returned.
    """
    if not isinstance(cls, type) or not callable(scatter) or not callable(gather):
        raise TypeError(
            f"expected a class and two callables, got {cls!r}, {scatter=!r}, {gather=!r}"
        )
    registered[cls] = scatter, gather


def splitter_of(value: object) -> Splitter | None:
    """The rule that splits a value, called with ``(chunks, dim)``; None without one."""
    rules = _rules_of(type(value))
    own = getattr(type(value), "__scatter__", None) if rules is None else rules[0]
    return None if own is None else partial(own, value)


def joiner_of(value: object) -> Joiner | None:
    """The rule that joins values of this value's class; None if the class has none."""
    rules = _rules_of(type(value))
    return getattr(type(value), "__gather__", None) if rules is None else rules[1]


def _rules_of(cls: type) -> tuple[Splitter, Joiner] | None:
    if not registered:  # the common case: do not walk the bases of every leaf
        return None
    return next((registered[base] for base in cls.__mro__ if base in registered), None)
