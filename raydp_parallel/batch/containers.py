"""Containers: which values are, what they hold, and how another one like it is made; and types that
bring rules of their own for splitting and joining (pytorch#52597).
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import operator
from collections import UserDict
from collections.abc import Callable, Iterator, Sequence
from enum import Enum
from typing import Any, TypeGuard

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

Function = Callable[..., Any]
Keywords = dict[str, Any]
Parts = dict[Any, Any]
"""The parts of a container by key, position, or field name."""
Splitter = Callable[..., Sequence[Any]]
Joiner = Callable[[Sequence[Any], torch.device, int], Any]

registered: dict[type, tuple[Splitter, Joiner]] = {}
"""The rules of the classes that `register_batch_type` was told."""

ContainerKind = Enum(
    "ContainerKind", "TENSOR PACKED MAPPING SEQUENCE FIELDS ITERABLE LEAF", module=__name__
)
"""How a value is treated."""
_CONSTANTS = {type(None), bool, int, float, complex, str, bytes}


def kind_of(value: object) -> ContainerKind:
    """The kind of a value; the order matters, since HF's ModelOutput is a dict and a dataclass."""
    if isinstance(value, torch.Tensor):
        return ContainerKind.TENSOR
    # a namedtuple too, but its fields do not split one by one (pytorch#31422)
    if isinstance(value, PackedSequence):
        return ContainerKind.PACKED
    if isinstance(value, (list, tuple)):
        return ContainerKind.SEQUENCE
    if type(value) in _CONSTANTS:
        return ContainerKind.LEAF
    if isinstance(value, (dict, UserDict)):
        return ContainerKind.MAPPING
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return ContainerKind.FIELDS
    return ContainerKind.LEAF


def is_namedtuple(value: object) -> TypeGuard[Any]:
    """Recognise a class that was made by ``namedtuple``, as upstream does."""
    return isinstance(value, tuple) and hasattr(value, "_asdict") and hasattr(value, "_fields")


def iterates_over_tensors(value: object) -> bool:
    """Recognise a class that iterates over its parts, as transformers' caches do, with tensors
    among them. Iterators, such as generators, are left alone: they can be used only once.
    """
    if isinstance(value, (type, str, bytes, bytearray, range, Iterator)):
        return False
    with contextlib.suppress(Exception):  # a class of the user's own may do anything
        return any(True for part in iter(value) for _ in tensors_in(part))  # type: ignore[call-overload]
    return False


def contents(value: Any, kind: ContainerKind) -> Parts:
    """The parts of a container; none for a leaf."""
    if kind is ContainerKind.MAPPING:
        return {key: value[key] for key in value}
    if kind in (ContainerKind.SEQUENCE, ContainerKind.ITERABLE):
        return dict(enumerate(value))
    if kind is ContainerKind.FIELDS:
        names = (field.name for field in dataclasses.fields(value))
        return {name: getattr(value, name) for name in names if hasattr(value, name)}
    return {}


def step(kind: ContainerKind, key: object) -> str:
    """One step of a path: ``[0]``, ``['mask']`` or ``.mask``."""
    return f".{key}" if kind is ContainerKind.FIELDS else f"[{key!r}]"


def leaves(value: object) -> Iterator[object]:
    """The leaves of a nested value; empty containers are some."""
    parts = contents(value, kind_of(value))
    if not parts:
        yield value
    for part in parts.values():
        yield from leaves(part)


def tensors_in(value: object) -> Iterator[Tensor]:
    """The tensors of a nested value, those of packed sequences included."""
    for leaf in leaves(value):
        if isinstance(leaf, (Tensor, PackedSequence)):
            yield leaf if isinstance(leaf, Tensor) else leaf.data


def mapped(value: object, cls: type, swap: Function) -> Any:
    """A nested value whose leaves of a class went through ``swap``. Containers in which nothing
    changes stay the same objects.
    """
    kind = kind_of(value)
    parts = contents(value, kind)
    if not parts:
        return swap(value) if isinstance(value, cls) else value
    found = {key: mapped(part, cls, swap) for key, part in parts.items()}
    alike = all(map(operator.is_, found.values(), parts.values()))
    return value if alike else container_like(value, kind, found)


def container_like(like: Any, kind: ContainerKind, parts: Parts) -> Any:
    """A container of the same class with other contents, of the same keys or fields."""
    if kind in (ContainerKind.SEQUENCE, ContainerKind.ITERABLE):
        items = list(parts.values())
        return like._make(items) if is_namedtuple(like) else type(like)(items)
    # Upstream calls the class with the items, which fails for a defaultdict, and for constructors
    # of the user's own (pytorch#52597). A copy keeps what is no field.
    made = copy.copy(like)
    for key, part in parts.items():
        if kind is ContainerKind.MAPPING:
            made[key] = part  # not update(): Counter's adds, and HF's ModelOutput forbids it
        # HF's ModelOutput has each of its items as a field, too; a frozen one refuses setattr.
        if kind is ContainerKind.FIELDS or (dataclasses.is_dataclass(made) and key in vars(made)):
            object.__setattr__(made, key, part)
    return made


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


def split_by_rule(value: object) -> list[object]:
    """The leaves of a nested value that a rule of their class splits."""
    return [leaf for leaf in leaves(value) if rules_of(type(leaf))[0] is not None]
