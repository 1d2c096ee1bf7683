"""What a module's Python side looked like: each mutable thing that pickle reaches from it, with a copy of its contents.

[Note: what changed]
The driver must see every edit between two forwards, and a replica must start each forward from the driver's state. Both
ask the same question of the same things, so both use an `Image`. Contents are compared by identity, element for
element: equality would take a new tensor for an old one that holds the same numbers. The comparison runs in C over
flat lists (0.2 to 0.4 ms for the 286 modules of a ResNet-50); a fresh pickle to compare would cost 4 to 15 ms.

What identity cannot see, the inside of arrays and of objects that keep their state in C, is compared by content in
`deep_changed`, for which there is time while replicas run.

Plain containers and attributes can be put back in place, and given other tensors. The rest (slots, closures, tuples of
tensors, arrays, whatever reduces itself) cannot: then `restore` and `replace` say so, and the replica makes its module
anew from the structure, which is always right and costs milliseconds.
"""

from __future__ import annotations

import contextlib
import datetime
import decimal
import enum
import functools
import io
import logging
import operator
import pickle
import re
import sys
import types
import weakref
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from typing import Any, NamedTuple

import cloudpickle
import numpy as np
import torch
from cloudpickle.cloudpickle import _extract_code_globals

_IMMUTABLE = (
    *(int, float, complex, str, bytes, bool, type(None), type(...), range, slice, tuple, frozenset, property),
    *(types.BuiltinFunctionType, types.MethodType, types.ModuleType, types.MethodDescriptorType, functools.partial),
    *(types.CodeType, types.CellType, staticmethod, classmethod, enum.Enum, weakref.ref),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format, re.Pattern, logging.Logger),
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
        self._kept: list[Any] = []
        self._occurrences: Counter[int] = Counter()
        self._opaque = False

    def visit(self, value: Any) -> None:
        """Note what is mutable about ``value``."""
        kind = type(value)
        if kind in _ATOMS:
            return
        if isinstance(value, torch.Tensor):
            self._occurrences[id(value)] += 1
        if id(value) in self._seen:
            return
        self._seen[id(value)] = value
        if kind is dict or kind is OrderedDict:
            self._dicts.append(value)
        elif isinstance(value, (dict, list, deque, set)):
            self._visit_container(value)
        elif isinstance(value, torch.Tensor):
            self._owners.append(value)
        elif isinstance(value, np.ndarray):
            self._contents.append(_Content(functools.partial(_array_bytes, value), _array_bytes(value)))
        elif isinstance(value, types.FunctionType):
            if _by_value(value):
                names = sorted(_extract_code_globals(value.__code__))
                self._read(functools.partial(_function_parts, value, names))
        elif isinstance(value, type):
            if _by_value(value):
                self._read(functools.partial(_class_parts, value))
        elif isinstance(value, torch.jit.ScriptModule):
            self._opaque = True
            self._read(functools.partial(_script_parts, value))
            self._contents.append(_Content(functools.partial(_script_values, value), _script_values(value)))
        elif not isinstance(value, _IMMUTABLE) or hasattr(value, "__dict__"):
            self._visit_object(value)

    def _visit_container(self, value: Any) -> None:
        if isinstance(value, dict):
            self._read(functools.partial(_mapping_parts, value))
        elif isinstance(value, set):
            self._sets.append((value, set(value)))
        else:
            self._lists.append(value)
        if hasattr(value, "__dict__"):
            self._owners.append(value)

    def _visit_object(self, value: Any) -> None:
        if isinstance(value, (types.ModuleType, logging.Logger, types.MethodType)):
            return
        is_module = isinstance(value, torch.nn.Module)
        plain = is_module or not _reduces_itself(value) or isinstance(value, types.SimpleNamespace)
        slots = _slot_names(type(value)) if plain else ()
        if plain and hasattr(value, "__dict__"):
            self._owners.append(value)
        elif not slots and not isinstance(value, _IMMUTABLE):
            self._visit_opaque(value)
        if slots:
            self._read(functools.partial(_slot_parts, value, slots))
        self._opaque |= bool(slots) or (not is_module and _reduces_itself(value)) or _has_own_state(value)

    def _visit_opaque(self, value: Any) -> None:
        take = _generator_state if isinstance(value, torch.Generator) else _pickled
        then, again = take(value), take(value)
        if then[0] == again[0]:  # some pickles differ each time, and say nothing
            self._contents.append(_Content(lambda: take(value)[0], then[0]))
            self._kept.append(then)

    def _read(self, read: Callable[[], list[Any]]) -> None:
        self._readers.append(_Reader(read, read()))

    def freeze(self) -> None:
        """Take the copies that later moments are compared with."""
        self._classes = [*map(type, self._owners)]
        # Pickle reaches an object's attributes as a dict too, and a module's as a copy of it; they are their owner's.
        attributes = {id(vars(owner)) for owner in self._owners}
        states = {id(vars(owner).get("_parameters", 1)) for owner in self._owners if isinstance(owner, torch.nn.Module)}
        dicts = (d for d in self._dicts if id(d) not in attributes and id(d.get("_parameters", 0)) not in states)
        self._nodes = [*map(vars, self._owners), *dicts]
        self._copies = [dict(node) for node in self._nodes]
        self._list_copies = [list(node) for node in self._lists]
        self._owner_index = {id(owner): i for i, owner in enumerate(self._owners)}
        self._flatten()

    def _flatten(self) -> None:
        # Most dicts of a module are hooks' and empty: whether they all still are is one question.
        count = len(self._owners)
        empty = [not copy and (i >= count or _is_tensor(self._owners[i])) for i, copy in enumerate(self._copies)]
        self._empty = [node for node, is_empty in zip(self._nodes, empty, strict=True) if is_empty]
        full = [i for i, is_empty in enumerate(empty) if not is_empty]
        ordered = [i for i in full if type(self._nodes[i]) is OrderedDict]
        full = [i for i in full if type(self._nodes[i]) is not OrderedDict]
        self._full_owners = [self._owners[i] for i in full if i < count]
        self._full_dicts = [self._nodes[i] for i in full if i >= count]
        self._full_ordered: list[Any] = [self._nodes[i] for i in ordered]
        copies = [self._copies[i] for i in (*full, *ordered)]
        self._lengths = [*map(len, copies)]
        self._keys = [*chain.from_iterable(copies)]
        self._values = [*chain.from_iterable(map(dict.values, copies))]
        self._list_lengths = [*map(len, self._list_copies)]
        self._items = [*chain.from_iterable(self._list_copies)]

    def changed(self) -> bool:
        """Whether anything differs that identity can see."""
        plain = [*map(vars, self._full_owners), *self._full_dicts]
        full = [*plain, *self._full_ordered]
        # An OrderedDict has an order of its own, which dict.values would not follow.
        values = (*map(dict.values, plain), *map(OrderedDict.values, self._full_ordered))
        return (
            any(self._empty)
            or [*map(len, full)] != self._lengths
            or (not _identical(chain.from_iterable(full), self._keys) and [*chain.from_iterable(full)] != self._keys)
            or not _identical(chain.from_iterable(values), self._values)
            or self._lists_changed()
            or self._readers_changed()
        )

    def _lists_changed(self) -> bool:
        return (
            [*map(len, self._lists)] != self._list_lengths
            or not _identical(chain.from_iterable(self._lists), self._items)
            or any(node != copy for node, copy in self._sets)
        )

    def _readers_changed(self) -> bool:
        classes = [*map(type, self._owners)]  # assigned by who swaps a layer's behaviour and keeps its weights
        return classes != self._classes or any(not _same(reader.read(), reader.then) for reader in self._readers)

    def deep_changed(self) -> bool:
        """Whether anything differs that only a comparison of contents can see."""
        return any(content.take() != content.then for content in self._contents)

    def differences(self) -> list[tuple[Any, str, Any]] | None:
        """The changed attributes as (owner, name, new value), or None if something else changed besides."""
        found = []
        for i, copy in enumerate(self._copies):
            node = self._node(i)
            if _alike(node, copy):
                continue
            if i >= len(self._owners) or [*node] != [*copy]:
                return None
            found += [(self._owners[i], name, new) for name, new in node.items() if new is not copy[name]]
        return None if self._lists_changed() or self._readers_changed() else found

    def _node(self, i: int) -> dict[Any, Any]:
        return vars(self._owners[i]) if i < len(self._owners) else self._nodes[i]

    def accept(self, owner: Any, name: str, value: Any) -> None:
        """Take an attribute's new value for how it looks from now on; `settle` ends a series of these."""
        self._copies[self._owner_index[id(owner)]][name] = value

    def settle(self) -> None:
        """Make ready to compare again."""
        self._flatten()

    def restore(self) -> bool:
        """Put everything back as it was. False if something changed that cannot be put back in place."""
        if self._readers_changed() or self.deep_changed():
            return False
        if not self.changed():
            return True
        for i, copy in enumerate(self._copies):
            node = self._node(i)
            if not _alike(node, copy):
                node.clear()
                node.update(copy)
        for items, then in zip(self._lists, self._list_copies, strict=True):
            if not _same(items, then):
                items.clear()
                items.extend(then)
        for known, before in self._sets:
            if known != before:
                known.clear()
                known.update(before)
        return True

    def replace(self, new: dict[int, torch.Tensor]) -> bool:
        """Let every place that held a tensor, known by its id, hold another; the copies and the things themselves.

        Returns:
            Whether all places were reached.
        """
        reached: Counter[int] = Counter()
        for i, copy in enumerate(self._copies):
            node = self._node(i)
            for name, value in copy.items():
                if id(value) in new:
                    reached[id(value)] += 1
                    copy[name] = node[name] = new[id(value)]
        for node, items in zip(self._lists, self._list_copies, strict=True):
            for i, value in enumerate(items):
                if id(value) in new:
                    reached[id(value)] += 1
                    items[i] = node[i] = new[id(value)]
        if self._opaque or any(reached[old] < self._occurrences[old] for old in new):
            return False
        self._adopt_tensors(new)
        return True

    def _adopt_tensors(self, new: dict[int, torch.Tensor]) -> None:
        for i, owner in enumerate(self._owners):
            if id(owner) in new:
                self._owners[i] = new[id(owner)]
                self._nodes[i] = vars(self._owners[i])
                self._nodes[i].update(self._copies[i])
        self._occurrences = Counter({id(new[k]) if k in new else k: n for k, n in self._occurrences.items()})
        self._owner_index = {id(owner): i for i, owner in enumerate(self._owners)}
        self._flatten()


def _identical(now: Iterable[Any], then: Iterable[Any]) -> bool:
    return all(map(operator.is_, now, then))


def _same(now: Sequence[Any], then: Sequence[Any]) -> bool:
    return len(now) == len(then) and _identical(now, then)


def _alike(node: dict[Any, Any], copy: dict[Any, Any]) -> bool:
    return len(node) == len(copy) and _identical(node.values(), copy.values()) and [*node] == [*copy]


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


def _array_bytes(array: np.ndarray) -> tuple[Any, ...]:
    contents = pickle.dumps(array) if array.dtype.hasobject else array.tobytes()
    return array.shape, array.dtype, contents


class _ContentPickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Knows tensors by identity: their contents are watched as tensors are."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self.tensors: list[torch.Tensor] = []

    def persistent_id(self, value: Any) -> int | None:
        if not isinstance(value, torch.Tensor):
            return None
        self.tensors.append(value)
        return id(value)


def _pickled(value: Any) -> tuple[bytes, list[torch.Tensor]]:
    file = io.BytesIO()
    pickler = _ContentPickler(file)
    # What cannot be pickled is refused by the pickler that reached it, with the path to it.
    with contextlib.suppress(Exception):
        pickler.dump(value)
    return file.getvalue(), pickler.tensors


def _generator_state(generator: torch.Generator) -> tuple[bytes, None]:
    return generator.get_state().numpy().tobytes(), None


def _reduces_itself(value: Any) -> bool:
    kind = type(value)
    return kind.__reduce_ex__ is not object.__reduce_ex__ or kind.__reduce__ is not object.__reduce__


def _has_own_state(value: Any) -> bool:
    base = torch.nn.Module if isinstance(value, torch.nn.Module) else object
    return getattr(type(value), "__getstate__", None) is not getattr(base, "__getstate__", None)


def _slot_names(kind: type) -> tuple[str, ...]:
    names = []
    for base in kind.__mro__:
        slots = base.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            private = name.startswith("__") and not name.endswith("__")
            names.append(f"_{base.__name__.lstrip('_')}{name}" if private else name)
    return tuple(name for name in names if name not in ("__dict__", "__weakref__"))


def _slot_parts(value: Any, names: tuple[str, ...]) -> list[Any]:
    return [getattr(value, name, _MISSING) for name in names]


def _by_value(value: Any) -> bool:
    return not cloudpickle.cloudpickle._should_pickle_by_reference(value)


def _mapping_parts(value: dict[Any, Any]) -> list[Any]:
    raw: Any = OrderedDict if isinstance(value, OrderedDict) else dict
    return [getattr(value, "default_factory", None), *raw.keys(value), *raw.values(value)]


def _function_parts(function: types.FunctionType, names: Iterable[str]) -> list[Any]:
    """What a function that travels by value takes along: its code, its defaults, its closure and its globals."""
    cells = [_cell(cell) for cell in function.__closure__ or ()]
    used = [function.__globals__.get(name, _MISSING) for name in names]
    return [function.__code__, function.__defaults__, function.__kwdefaults__, *cells, *used]


def _cell(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return _MISSING


def _class_parts(kind: type) -> list[Any]:
    attributes = chain.from_iterable(vars(base).items() for base in kind.__mro__ if _by_value(base))
    return [*chain.from_iterable(item for item in attributes if item[0] != "__slotnames__")]  # copyreg's cache


def _script_parts(module: torch.jit.ScriptModule) -> list[Any]:
    tensors = chain(module.named_parameters(), module.named_buffers())
    named = ((sys.intern(name), tensor) for name, tensor in tensors)  # the names are new strings each time
    return [*chain.from_iterable(named), *(m.training for m in module.modules())]


def _script_values(module: torch.jit.ScriptModule) -> list[str]:
    """A script's plain attributes, of which it gives copies only."""
    values = (m._c.getattr(name) for m in module.modules() for name in m._concrete_type.get_attributes())
    return [repr(value) for value in values if not _is_tensor(value)]
