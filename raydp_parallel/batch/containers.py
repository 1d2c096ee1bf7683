"""Containers: which values are, what they hold, and how another one like it is made."""

from __future__ import annotations

import copy
import dataclasses
from collections import UserDict
from collections.abc import Callable, Iterator
from enum import Enum
from typing import Any, TypeGuard

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

Function = Callable[..., Any]
Keywords = dict[str, Any]
Parts = dict[Any, Any]
"""The parts of a container by key, position, or field name."""


ContainerKind = Enum(
    "ContainerKind", "TENSOR PACKED MAPPING SEQUENCE FIELDS ITERABLE NONE LEAF", module=__name__
)
"""How a value is treated."""


def kind_of(value: object) -> ContainerKind:
    """The kind of a value; the order matters, since HF's ModelOutput is a dict and a dataclass."""
    if isinstance(value, torch.Tensor):
        return ContainerKind.TENSOR
    # a namedtuple too, but its fields do not split one by one (pytorch#31422)
    if isinstance(value, PackedSequence):
        return ContainerKind.PACKED
    if isinstance(value, (dict, UserDict)):
        return ContainerKind.MAPPING
    if isinstance(value, (list, tuple)):
        return ContainerKind.SEQUENCE
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return ContainerKind.FIELDS
    return ContainerKind.NONE if value is None else ContainerKind.LEAF


def is_namedtuple(value: object) -> TypeGuard[Any]:
    """Recognise a class that was made by ``namedtuple``, as upstream does."""
    return isinstance(value, tuple) and hasattr(value, "_asdict") and hasattr(value, "_fields")


def iterates_over_tensors(value: object) -> bool:
    """Recognise a class that iterates over its parts, as transformers' caches do, with tensors
    among them. Iterators, such as generators, are left alone: they can be used only once.
    """
    if isinstance(value, (type, str, bytes, bytearray, range, Iterator)):
        return False
    try:
        return any(True for part in iter(value) for _ in tensors_in(part))  # type: ignore[call-overload]
    except Exception:  # a class of the user's own may do anything when it is iterated over
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


def tensors_in(value: object) -> Iterator[Tensor]:
    """The tensors of a nested value, those of packed sequences included."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, PackedSequence):
        yield value.data
    else:
        for part in contents(value, kind_of(value)).values():
            yield from tensors_in(part)


def moved(value: object, device: torch.device) -> Any:
    """Bring all tensors in containers to a device."""
    return mapped(value, lambda part: part.to(device) if isinstance(part, Tensor) else part)


def mapped(value: object, swap: Callable[[object], object]) -> Any:
    """A nested value whose leaves went through ``swap``. Containers in which nothing changes stay
    the same objects.
    """
    kind = kind_of(value)
    parts = contents(value, kind)
    if not parts:
        return swap(value)
    found = {key: mapped(part, swap) for key, part in parts.items()}
    if all(found[key] is part for key, part in parts.items()):
        return value
    return container_like(value, kind, found)


def container_like(like: Any, kind: ContainerKind, parts: Parts) -> Any:
    """A container of the same class with other contents."""
    if kind is ContainerKind.FIELDS:
        made = copy.copy(like)  # keeps what is no field
        for name, part in parts.items():
            object.__setattr__(made, name, part)  # a frozen one refuses setattr
        return made
    if kind is not ContainerKind.MAPPING:
        items = list(parts.values())
        return like._make(items) if is_namedtuple(like) else type(like)(items)
    if type(like) is dict:
        return dict(parts)
    # Upstream calls the class with the items, which fails for a defaultdict, and for constructors
    # of the user's own (pytorch#52597).
    made = copy.copy(like)
    made.clear()
    for key, part in parts.items():  # not update(): Counter's adds, and HF's ModelOutput forbids it
        made[key] = part
    return made
