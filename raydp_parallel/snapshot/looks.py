"""What is cheap to see of a row of tensors: versions, addresses, flags."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import Any, NamedTuple

from torch import Tensor

_version = attrgetter("_version")
_flag = attrgetter("requires_grad")


class Look(NamedTuple):
    """What was to see at a moment, by row.

    Attributes:
        versions: How often each tensor was written to.
        pointers: Where each lies.
        flags: Whether each requires a gradient.
    """

    versions: list[int]
    pointers: list[int]
    flags: list[bool]


def look(row: Sequence[Tensor]) -> Look:
    """What there is to see now."""
    return Look(versions(row), pointers(row), [*map(_flag, row)])


def versions(row: Sequence[Tensor]) -> list[int]:
    """The version of every tensor; 0 for inference tensors, which have none."""
    try:
        return [*map(_version, row)]
    except RuntimeError:
        return [0 if t.is_inference() else t._version for t in row]


def pointers(row: Sequence[Tensor]) -> list[int]:
    """Where every tensor lies."""
    return [*map(Tensor.data_ptr, row)]


def unlike(then: Sequence[Any], now: Sequence[Any]) -> list[int]:
    """The places in a row where two of its looks differ."""
    return [i for i, (a, b) in enumerate(zip(then, now, strict=True)) if a != b]
