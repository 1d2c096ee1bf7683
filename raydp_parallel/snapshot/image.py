"""What a module's Python side looked like: every mutable thing that pickle reaches from it, with a copy of its contents.

[Note: what changed]
The driver must see every edit between two forwards, and a replica must start each forward from the driver's state. Both
ask the same question of the same things, so both use an `Image`. Contents are compared by identity, element for
element: equality would take a new tensor for an old one that holds the same numbers. The comparison runs in C over
flat lists (0.2 to 0.4 ms for the 286 modules of a ResNet-50); a fresh pickle to compare would cost 4 to 15 ms.

What identity cannot see, the inside of arrays and of objects that keep their state in C, is compared by content in
`deep_changed`, for which there is time while replicas run.
"""

from __future__ import annotations

import datetime
import decimal
import enum
import functools
import logging
import operator
import pickle
import re
import types
from collections import deque
from collections.abc import Callable, Iterable
from itertools import chain
from typing import Any, NamedTuple

import cloudpickle
import numpy as np
import torch

_IMMUTABLE = (
    *(int, float, complex, str, bytes, bool, type(None), type(...), range, slice, tuple, frozenset, property),
    *(types.BuiltinFunctionType, types.MethodType, types.ModuleType, types.MethodDescriptorType, functools.partial),
    *(types.CodeType, types.CellType, staticmethod, classmethod, enum.Enum),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Tensor, re.Pattern, logging.Logger),
    *(datetime.date, datetime.time, datetime.timedelta, decimal.Decimal, np.generic, np.dtype),
)
_ATOMS = frozenset((int, float, complex, str, bytes, bool, type(None)))
_MISSING = object()


class _Reader(NamedTuple):
    """Something whose contents have to be asked for: how, and what the answer was."""

    read: Callable[[], list[Any]]
    then: list[Any]


class _Content(NamedTuple):
    """Something that only a comparison of contents can judge: how to take them, and what they were."""

    take: Callable[[], Any]
    then: Any


class Image:
    """The contents of mutable things, at one moment.

    `visit` is called for everything that pickle reaches; `freeze` ends that.
    """

    def __init__(self) -> None:
        self._seen: dict[int, Any] = {}
        self._owners: list[Any] = []
        self._dicts: list[dict[Any, Any]] = []
        self._lists: list[Any] = []
        self._sets: list[tuple[set[Any], set[Any]]] = []
        self._readers: list[_Reader] = []
        self._contents: list[_Content] = []

    def visit(self, value: Any) -> None:
        """Note what is mutable about ``value``."""
        kind = type(value)
        if kind in _ATOMS or id(value) in self._seen:
            return
        self._seen[id(value)] = value
        if isinstance(value, dict):
            self._dicts.append(value)
        elif isinstance(value, (list, deque)):
            self._lists.append(value)
        elif isinstance(value, set):
            self._sets.append((value, set(value)))
        elif isinstance(value, np.ndarray):
            self._contents.append(_Content(functools.partial(_array_bytes, value), _array_bytes(value)))
        elif isinstance(value, types.FunctionType):
            self._read(functools.partial(_function_parts, value))
        elif isinstance(value, type):
            if _by_value(value):
                self._read(functools.partial(_class_parts, value))
        elif isinstance(value, torch.jit.ScriptModule):
            self._read(functools.partial(_script_parts, value))
        elif not isinstance(value, _IMMUTABLE) or hasattr(value, "__dict__"):
            self._visit_object(value)

    def _visit_object(self, value: Any) -> None:
        if isinstance(value, (types.ModuleType, logging.Logger, types.MethodType)):
            return
        if hasattr(value, "__dict__") and (isinstance(value, torch.nn.Module) or not _reduces_itself(value)):
            self._owners.append(value)
            slots = _slot_names(type(value))
            if slots:
                self._read(functools.partial(_slot_parts, value, slots))
        elif _slot_names(type(value)) and not _reduces_itself(value):
            self._read(functools.partial(_slot_parts, value, _slot_names(type(value))))
        elif not isinstance(value, _IMMUTABLE):
            self._contents.append(_Content(functools.partial(_pickled, value), _pickled(value)))

    def _read(self, read: Callable[[], list[Any]]) -> None:
        self._readers.append(_Reader(read, read()))

    def freeze(self) -> None:
        """Take the copies that later moments are compared with."""
        self._nodes = [*map(vars, self._owners), *self._dicts]
        self._copies = [dict(node) for node in self._nodes]
        self._list_copies = [list(node) for node in self._lists]
        self._owner_index = {id(owner): i for i, owner in enumerate(self._owners)}
        self._flatten()

    def _flatten(self) -> None:
        # Most dicts of a module are hooks' and empty: whether they all still are is one question.
        self._full = [i for i, copy in enumerate(self._copies) if copy]
        self._empty = [node for node, copy in zip(self._nodes, self._copies, strict=True) if not copy]
        self._full_dicts = [self._nodes[i] for i in self._full if i >= len(self._owners)]
        self._full_owners = [self._owners[i] for i in self._full if i < len(self._owners)]
        copies = [self._copies[i] for i in self._full]
        self._lengths = [*map(len, copies)]
        self._keys = [*chain.from_iterable(copies)]
        self._values = [*chain.from_iterable(map(dict.values, copies))]
        self._list_lengths = [*map(len, self._list_copies)]
        self._items = [*chain.from_iterable(self._list_copies)]

    def changed(self) -> bool:
        """Whether anything differs that identity can see."""
        full = [*map(vars, self._full_owners), *self._full_dicts]
        return (
            any(self._empty)
            or [*map(len, full)] != self._lengths
            or not _identical(chain.from_iterable(full), self._keys)
            and [*chain.from_iterable(full)] != self._keys
            or not _identical(chain.from_iterable(map(dict.values, full)), self._values)
            or [*map(len, self._lists)] != self._list_lengths
            or not _identical(chain.from_iterable(self._lists), self._items)
            or any(node != copy for node, copy in self._sets)
            or any(not _same(reader.read(), reader.then) for reader in self._readers)
        )

    def deep_changed(self) -> bool:
        """Whether anything differs that only a comparison of contents can see."""
        return any(content.take() != content.then for content in self._contents)

    def differences(self) -> list[tuple[Any, str, Any]] | None:
        """The changed attributes as (owner, name, new value), or None if something else changed besides."""
        found = []
        for i, copy in enumerate(self._copies):
            node = vars(self._owners[i]) if i < len(self._owners) else self._nodes[i]
            if len(node) == len(copy) and _identical(node.values(), copy.values()) and [*node] == [*copy]:
                continue
            if i >= len(self._owners) or [*node] != [*copy]:
                return None
            found += [(self._owners[i], name, new) for name, new in node.items() if new is not copy[name]]
        rest = [*map(len, self._lists)] != self._list_lengths or not _identical(
            chain.from_iterable(self._lists), self._items
        )
        if rest or any(n != c for n, c in self._sets) or any(not _same(r.read(), r.then) for r in self._readers):
            return None
        return found

    def accept(self, owner: Any, name: str, value: Any) -> None:
        """Take an attribute's new value for how it looks from now on; `settle` ends a series of these."""
        self._copies[self._owner_index[id(owner)]][name] = value

    def settle(self) -> None:
        """Make ready to compare again."""
        self._flatten()

    def restore(self) -> None:
        """Put everything back as it was."""
        if not self.changed():
            return
        for i, copy in enumerate(self._copies):
            node = vars(self._owners[i]) if i < len(self._owners) else self._nodes[i]
            if len(node) != len(copy) or not _identical(node.values(), copy.values()) or [*node] != [*copy]:
                node.clear()
                node.update(copy)
        for node, items in zip(self._lists, self._list_copies, strict=True):
            if len(node) != len(items) or not _identical(node, items):
                node.clear()
                node.extend(items)
        for known, then in self._sets:
            if known != then:
                known.clear()
                known.update(then)

    def replace(self, new: dict[int, Any]) -> None:
        """Let every place that held an object, known by its id, hold another; the copies and the things themselves."""
        for i, copy in enumerate(self._copies):
            node = vars(self._owners[i]) if i < len(self._owners) else self._nodes[i]
            for name, value in copy.items():
                if id(value) in new:
                    copy[name] = node[name] = new[id(value)]
        for node, items in zip(self._lists, self._list_copies, strict=True):
            for i, value in enumerate(items):
                if id(value) in new:
                    items[i] = node[i] = new[id(value)]
        self._flatten()


def _identical(now: Iterable[Any], then: Iterable[Any]) -> bool:
    return all(map(operator.is_, now, then))


def _same(now: list[Any], then: list[Any]) -> bool:
    return len(now) == len(then) and _identical(now, then)


def _array_bytes(array: np.ndarray) -> tuple[Any, ...]:
    contents = pickle.dumps(array) if array.dtype.hasobject else array.tobytes()
    return array.shape, array.dtype, contents


def _pickled(value: Any) -> bytes:
    # What cannot be pickled is refused by the pickler that reached it, with the path to it.
    try:
        return cloudpickle.dumps(value)  # type: ignore[no-any-return]
    except Exception:
        return b""


def _reduces_itself(value: Any) -> bool:
    kind = type(value)
    return kind.__reduce_ex__ is not object.__reduce_ex__ or kind.__reduce__ is not object.__reduce__


def _slot_names(kind: type) -> tuple[str, ...]:
    names = chain.from_iterable(
        (s,) if isinstance(s, str) else s for s in (c.__dict__.get("__slots__", ()) for c in kind.__mro__)
    )
    return tuple(name for name in names if name not in ("__dict__", "__weakref__"))


def _slot_parts(value: Any, names: tuple[str, ...]) -> list[Any]:
    return [getattr(value, name, _MISSING) for name in names]


def _by_value(value: Any) -> bool:
    return not cloudpickle.cloudpickle._should_pickle_by_reference(value)


def _function_parts(function: types.FunctionType) -> list[Any]:
    """What a function that travels by value takes along: its code, its defaults, its closure and its globals."""
    if not _by_value(function):
        return []
    cells = [_cell(cell) for cell in function.__closure__ or ()]
    names = _global_names(function.__code__)
    used = [function.__globals__.get(name, _MISSING) for name in names]
    return [function.__code__, function.__defaults__, function.__kwdefaults__, *cells, *used]


def _global_names(code: types.CodeType) -> list[str]:
    inner = (const for const in code.co_consts if isinstance(const, types.CodeType))
    return [*code.co_names, *chain.from_iterable(map(_global_names, inner))]


def _cell(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return _MISSING


def _class_parts(kind: type) -> list[Any]:
    attributes = [vars(base) for base in kind.__mro__ if _by_value(base)]
    return [*chain.from_iterable(attributes), *chain.from_iterable(a.values() for a in attributes)]


def _script_parts(module: torch.jit.ScriptModule) -> list[Any]:
    tensors = chain(module.named_parameters(), module.named_buffers())
    return [*chain.from_iterable(tensors), *(m.training for m in module.modules())]
