"""Types that bring rules of their own for splitting and joining (pytorch#52597)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
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


def rules_of(cls: type) -> tuple[Splitter | None, Joiner | None]:
    """The rules that split values of a class, and join them; None where the class has none."""
    for base in cls.__mro__ if registered else ():  # do not walk the bases of every leaf
        if base in registered:
            return registered[base]
    return getattr(cls, "__scatter__", None), getattr(cls, "__gather__", None)
