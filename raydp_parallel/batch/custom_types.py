"""Types with rules of their own for splitting and joining (pytorch#52597)."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

Splitter = Callable[..., Sequence[Any]]
Joiner = Callable[[Sequence[Any], torch.device, int], Any]


@dataclass(frozen=True)
class _Rules:
    """How one class is split and joined.

    Attributes:
        scatter: ``(value, chunks, dim)`` to at most ``chunks`` values.
        gather: ``(values, target_device, dim)`` to one value.
    """

    scatter: Splitter
    gather: Joiner


_registered: dict[type, _Rules] = {}


class BatchTypeHandle:
    """What `register_batch_type` returns: ends the registration, by `remove` or at the end of a
    ``with``.
    """

    def __init__(self, cls: type, rules: _Rules) -> None:
        self._cls = cls
        self._rules = rules

    def remove(self) -> None:
        """Forget the rules; calling it again does nothing."""
        if _registered.get(self._cls) is self._rules:
            del _registered[self._cls]

    def __enter__(self) -> BatchTypeHandle:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.remove()


def register_batch_type(cls: type, *, scatter: Splitter, gather: Joiner) -> BatchTypeHandle:
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

        with register_batch_type(Ragged, scatter=split, gather=join):
            parts = scatter(Ragged([[1], [2, 3], [4]]), ["cpu", "cpu"])
        assert [part.rows for part in parts] == [[[1], [2, 3]], [[4]]]

    Args:
        cls: The class.
        scatter: ``(value, chunks, dim)`` to a sequence of at most ``chunks`` values, in the order
            of the rows. Split as ``torch.chunk`` does, so that the number of chunks agrees with
            that of the other arguments. A rule with a parameter named ``sizes`` is given a function
            from the value's number of rows to the rows of each chunk, and so works with
            ``Options(chunk_weights=...)``, too.
        gather: ``(values, target_device, dim)`` to one value, of what the replicas returned in the
            order of chunks.

    Returns:
        A handle whose ``remove()`` ends the registration; it works in a ``with`` too.

    Raises:
        ValueError: The class is registered already.
        TypeError: ``cls`` is not a class, or a rule is not callable.
    """
    if not isinstance(cls, type) or not callable(scatter) or not callable(gather):
        raise TypeError(
            f"expected a class and two callables, got {cls!r}, "
            f"scatter={scatter!r}, gather={gather!r}"
        )
    if cls in _registered:
        raise ValueError(f"{cls.__qualname__} is registered already: remove() its handle first")
    rules = _Rules(scatter, gather)
    _registered[cls] = rules
    return BatchTypeHandle(cls, rules)


def splitter_of(value: object) -> Callable[..., Sequence[Any]] | None:
    """The rule that splits a value, called with ``(chunks, dim)``, and with ``sizes`` if it
    `takes_sizes`; None if its class has none.
    """
    rules = _rules_of(type(value))
    own = getattr(type(value), "__scatter__", None) if rules is None else rules.scatter
    return None if own is None else partial(own, value)


def takes_sizes(rule: Callable[..., Any]) -> bool:
    """Whether a rule that splits has a parameter for the sizes of chunks."""
    try:
        return "sizes" in inspect.signature(rule).parameters
    except (TypeError, ValueError):  # of a builtin
        return False


def joiner_of(value: object) -> Joiner | None:
    """The rule that joins values of this value's class; None if the class has none."""
    rules = _rules_of(type(value))
    return getattr(type(value), "__gather__", None) if rules is None else rules.gather


def any_registered() -> bool:
    """Whether any class was registered, such as a tuple class that would be split otherwise."""
    return bool(_registered)


def _rules_of(cls: type) -> _Rules | None:
    if not _registered:  # the common case: do not walk the bases of every leaf
        return None
    return next((_registered[base] for base in cls.__mro__ if base in _registered), None)
