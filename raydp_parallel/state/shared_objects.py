"""Objects that forward shares with the caller: those among its arguments, and those that the module
refers to (`module_parts`). With one device upstream gives the module the caller's own caches,
counters and lists, so that what forward stores in them is there afterwards.

A replica has copies. Driver and replica find the objects in the same order, so that a number names
one of them on both sides. After a forward with one device the replica sends what changed: of a
tensor among the arguments that was written in place the contents, of any other object all that it
holds now, in which the objects of before stand by their numbers, and the module's own tensors and
submodules too.
"""

from __future__ import annotations

import array
import io
import pickle
import random
import types
from collections import OrderedDict, UserDict, deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import is_dataclass
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from raydp_parallel.state.container_copies import same
from raydp_parallel.state.python_state import (
    has_own_state,
    reduces_itself,
    slot_names,
)


class _StateRule(NamedTuple):
    """How the state of objects of a class is read and set that is not in their attributes."""

    kind: type
    read: Callable[[Any], Any]
    write: Callable[[Any, Any], object]


def _array_state(value: np.ndarray) -> tuple[Any, ...]:
    return value.shape, value.dtype, value.tobytes()


def _fill_array(value: np.ndarray, state: tuple[Any, ...]) -> None:
    shape, dtype, items = state
    if value.shape != shape:
        value.resize(shape, refcheck=False)
    if value.flags.writeable:
        value[...] = np.frombuffer(items, dtype).reshape(shape)


_RULES = (
    _StateRule(
        torch.Generator,
        lambda generator: generator.get_state().numpy().tobytes(),
        lambda generator, state: generator.set_state(
            torch.frombuffer(bytearray(state), dtype=torch.uint8)
        ),
    ),
    _StateRule(np.ndarray, _array_state, _fill_array),
    _StateRule(bytearray, bytes, lambda value, state: value.__setitem__(slice(None), state)),
    _StateRule(
        array.array,
        lambda value: value.tobytes(),
        lambda value, state: value.__setitem__(slice(None), array.array(value.typecode, state)),
    ),
    _StateRule(random.Random, random.Random.getstate, random.Random.setstate),
    _StateRule(
        np.random.Generator,
        lambda generator: pickle.dumps(generator.bit_generator.state),
        lambda generator, state: setattr(generator.bit_generator, "state", pickle.loads(state)),
    ),
    _StateRule(
        np.random.RandomState,
        lambda generator: pickle.dumps(generator.get_state()),
        lambda generator, state: generator.set_state(pickle.loads(state)),
    ),
)
"""Plain arrays, but those of objects, and generators of random numbers. States are compared by
``==``.
"""


def _rule_of(value: Any) -> _StateRule | None:
    if isinstance(value, np.ndarray) and (value.dtype.hasobject or type(value) is not np.ndarray):
        return None
    return next((rule for rule in _RULES if isinstance(value, rule.kind)), None)


ATOMS = frozenset((int, float, complex, str, bytes, bool, type(None), torch.dtype, torch.device))
_CODE = (type, types.FunctionType, types.BuiltinFunctionType, types.MethodType, types.ModuleType)
_CONTAINERS = (dict, list, deque, set)


class ObjectContents(NamedTuple):
    """What an object holds.

    Attributes:
        items: The items of a dict, list, deque or set, in a container of Python's own; the state of
            an object that `_RULES` names; else None.
        attributes: Its attributes; None if it has none.
        slots: The values of its slots, by name.
    """

    items: Any
    attributes: dict[str, Any] | None
    slots: dict[str, Any]

    def place(self, kind: str) -> Any:
        """Its items, attributes or slots."""
        return {"item": self.items, "attribute": self.attributes, "slot": self.slots}[kind]

    def flat(self) -> list[Any]:
        """All of it that is compared by identity."""
        items = self.items
        parts: Iterable[Any] = ()
        if isinstance(items, dict):
            parts = chain(items, items.values())
        elif isinstance(items, list):
            parts = items
        own = self.attributes or {}
        return [*parts, *own, *own.values(), *self.slots, *self.slots.values()]

    def is_like(self, other: ObjectContents) -> bool:
        """Whether it is the same, element for element."""
        if not isinstance(self.items, (dict, list)) and self.items != other.items:
            return False
        return same(self.flat(), other.flat())


def contents(value: Any) -> ObjectContents:
    """What an object holds now."""
    items: Any = None
    rule = _rule_of(value)
    if rule is not None:
        return ObjectContents(rule.read(value), None, {})
    if isinstance(value, OrderedDict):
        items = dict(zip(OrderedDict.keys(value), OrderedDict.values(value), strict=True))
    elif isinstance(value, dict):
        items = dict(zip(dict.keys(value), dict.values(value), strict=True))
    elif isinstance(value, list):
        items = list.__getitem__(value, slice(None))
    elif isinstance(value, deque):
        items = [*deque.__iter__(value)]
    elif isinstance(value, set):
        items = {*set.__iter__(value)}
    attributes = dict(vars(value)) if hasattr(value, "__dict__") else None
    names = slot_names(type(value)) if not isinstance(value, _CONTAINERS) else ()
    slots = {name: getattr(value, name) for name in names if hasattr(value, name)}
    return ObjectContents(items, attributes, slots)


def refill(value: Any, now: ObjectContents) -> None:
    """Let an object hold what another one like it does, without calling methods of its class."""
    rule = _rule_of(value)
    if rule is not None:
        rule.write(value, now.items)
    elif isinstance(value, dict):
        raw: Any = OrderedDict if isinstance(value, OrderedDict) else dict
        raw.clear(value)
        for key, item in now.items.items():
            raw.__setitem__(value, key, item)
    elif isinstance(value, list):
        list.__setitem__(value, slice(None), now.items)
    elif isinstance(value, deque):
        deque.clear(value)
        deque.extend(value, now.items)
    elif isinstance(value, set):
        set.clear(value)
        set.update(value, now.items)
    # An instance of a class that was sent by value has attributes besides its slots.
    if now.attributes is not None and hasattr(value, "__dict__"):
        vars(value).clear()
        vars(value).update(now.attributes)
    if rule is None and not isinstance(value, _CONTAINERS):
        for name in slot_names(type(value)):
            if name in now.slots:
                object.__setattr__(value, name, now.slots[name])
            elif hasattr(value, name):
                object.__delattr__(value, name)


class ObjectEdit(NamedTuple):
    """What code did to an object, so that it can be done to another one like it, which the program
    may have changed meanwhile.

    Attributes:
        length: Of a list or deque the items that it had; None for other objects.
        popped: How many of these it took from the end.
        added: What it appended to a list or deque, or added to a set.
        dropped: What it took out of a set.
        sets: Items, attributes and slots that it gave values: their kind, index or name, the value
            before if that is a plain one, else ``...``, and the value.
        removed: Those that it removed.
        state: The states before and after of an object that `_RULES` names.
    """

    length: int | None = None
    popped: int = 0
    added: tuple[Any, ...] = ()
    dropped: tuple[Any, ...] = ()
    sets: tuple[tuple[str, Any, Any, Any], ...] = ()
    removed: tuple[tuple[str, Any], ...] = ()
    state: tuple[Any, Any] | None = None

    def values(self) -> list[Any]:
        """The values in it."""
        return [*self.added, *(value for *_, value in self.sets)]

    def applied(self, value: Any) -> ObjectContents | None:
        """What an object holds when it is done to it; None if that would lose what the program did:
        it is about numbers that the program has changed, or items of a list of another length.
        """
        now = contents(value)
        if self.state is not None:
            return now._replace(items=self.state[1]) if now.items == self.state[0] else None
        items = now.items
        if isinstance(items, list):
            indices = [key for kind, key, _, _ in self.sets if kind == "item"]
            if (self.popped or indices) and len(items) != self.length:
                return None
            items = [*items[: len(items) - self.popped], *self.added]
        elif isinstance(items, set):
            items = (items - {*self.dropped}) | {*self.added}
        elif isinstance(items, dict):
            items = dict(items)
        made = ObjectContents(items, now.attributes and dict(now.attributes), dict(now.slots))
        for kind, key, before, new in self.sets:
            holder: Any = made.place(kind)
            old = items[key] if isinstance(holder, list) else holder.get(key, ...)
            if is_overtaken(before, old, new):
                return None
            holder[key] = new
        for kind, key in self.removed:
            made.place(kind).pop(key, None)
        return made


_NUMBERS = (int, float, complex)


def is_overtaken(before: Any, old: Any, new: Any) -> bool:
    """Whether a new value does not count what the program did: it was made of a plain value, and
    the program has another one now.

    Args:
        before: The value that the new one was made of; ``...`` if that is no plain one.
        old: The value that the program has.
        new: The new one.
    """
    if type(before) not in _NUMBERS or type(new) not in _NUMBERS or type(old) not in ATOMS:
        return False
    return not (old is before or old == before or (old != old and before != before))  # two NaNs


def edit_of(value: Any, then: ObjectContents, now: ObjectContents) -> ObjectEdit | None:
    """What code did to an object; None if it moved items of a list or dict.

    Args:
        value: The object.
        then: What it held.
        now: What it holds.
    """
    items = then.items
    sets: list[tuple[str, Any, Any, Any]] = []
    removed: list[tuple[str, Any]] = []
    length: int | None = None
    popped, added, dropped = 0, (), ()
    if isinstance(items, list):
        length = len(items)
        if isinstance(value, deque) and value.maxlen is not None:  # it drops items by itself
            fits = (k for k in range(length + 1) if same(items[k:], now.items[: length - k]))
            gone = next(fits)
            added = (*now.items[length - gone :],)
            if gone and length - gone + len(added) != value.maxlen:
                return None
        else:
            apart = [i for i, item in enumerate(now.items[:length]) if item is not items[i]]
            if len(now.items) == length:
                sets = [("item", i, _plain(items[i]), now.items[i]) for i in apart]
            else:
                popped = length - (apart[0] if apart else min(length, len(now.items)))
                added = (*now.items[length - popped :],)
            moved = (*added, *(new for *_, new in sets)) if popped or sets else ()
            known = {id(item) for item in items if type(item) not in ATOMS}
            if not known.isdisjoint(map(id, moved)):
                return None
    elif isinstance(items, set):
        added, dropped = (*(now.items - items),), (*(items - now.items),)
    elif not isinstance(items, (dict, type(None))):
        return ObjectEdit(state=(items, now.items))
    for kind in ("item", "attribute", "slot"):
        before, after = then.place(kind), now.place(kind)
        if isinstance(before, dict) and isinstance(after, dict):
            stay = [key for key in before if key in after]
            if [*after] != [*stay, *(key for key in after if key not in before)]:
                return None
            removed += [(kind, key) for key in before if key not in after]
            for key, new in after.items():
                if before.get(key, ...) is not new:
                    sets.append((kind, key, _plain(before.get(key, ...)), new))
    return ObjectEdit(length, popped, added, dropped, sets=(*sets,), removed=(*removed,))


def _plain(value: Any) -> Any:
    return value if type(value) in ATOMS else ...


def _is_followed(value: Any) -> bool:
    """Whether what an object holds is known on both sides: it is pickled part by part."""
    if isinstance(value, (*_CONTAINERS, types.SimpleNamespace)) or _rule_of(value) is not None:
        return True
    if isinstance(value, (*_CODE, io.IOBase)) or reduces_itself(value) or has_own_state(value):
        return False
    return hasattr(value, "__dict__") or bool(slot_names(type(value)))


def mutable_parts(root: Any, seen: dict[int, Any], but: tuple[type, ...] = ()) -> list[Any]:
    """An object and all that it holds, as far as it can change and both sides know what is in it.

    Args:
        root: The object.
        seen: What was found before, by its id; what is found is entered.
        but: Classes of objects that are left out, with what they hold.
    """
    left, found = [root], []
    while left:
        value = left.pop()
        if type(value) in ATOMS or id(value) in seen or isinstance(value, but):
            continue
        seen[id(value)] = value  # kept, so that no other object gets its number
        if isinstance(value, tuple):
            left.extend(value)
        elif isinstance(value, Tensor):
            found.append(value)
        elif _is_followed(value):
            found.append(value)
            if _rule_of(value) is None:
                left.extend(contents(value).flat())
    return found


def is_hidden(value: Any) -> bool:
    """Whether identities do not show a change of an object."""
    return _rule_of(value) is not None


def is_of_torch(value: Any) -> bool:
    """Whether it is torch's own, such as what a compiled module refers to, but no generator."""
    module = value.__module__ if isinstance(value, types.FunctionType) else type(value).__module__
    return (module or "").partition(".")[0] == "torch" and not isinstance(value, torch.Generator)


class SharedObjects:
    """The objects that the arguments of a call share with the caller, and all that they hold.

    Lists, tuples and dicts that hold something are made anew for each call, and what they hold is
    looked through; tensors that lie in them directly are copied to the device.

    Args:
        args: The positional arguments.
        kwargs: The keyword arguments.
        split: Whether they are one of several chunks, for which `UserDict` and dataclasses are made
            anew, too (row S9).

    Attributes:
        found: The objects, in the order in which both sides find them.
    """

    def __init__(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], *, split: bool = False
    ) -> None:
        self.found: list[Any] = []
        roots: list[Any] = []
        left, containers = [*kwargs.values(), *args], set()
        while left:
            value = left.pop()
            if type(value) in ATOMS or isinstance(value, Tensor) or id(value) in containers:
                continue
            if isinstance(value, tuple) or (isinstance(value, (dict, list)) and len(value)):
                containers.add(id(value))
                left.extend(value.values() if isinstance(value, dict) else value)
            elif split and (isinstance(value, UserDict) or is_dataclass(value)):
                left.extend(contents(value).flat())
            else:
                roots.append(value)
        seen: dict[int, Any] = {}
        self._ends: list[tuple[int, Any]] = []
        for root in roots:
            self.found += mutable_parts(root, seen)
            self._ends.append((len(self.found), root))

    def arguments(self, numbers: Iterable[int]) -> str:
        """The classes of the arguments that have some objects, for a sentence."""
        roots = [next(root for end, root in self._ends if number < end) for number in numbers]
        kinds = dict.fromkeys(type(root).__name__ for root in roots)
        return ", ".join(f"a {kind}" for kind in kinds)

    def written(self, changes: Mapping[int, Any]) -> list[Tensor]:
        """The caller's tensors that `refill` writes to."""
        return [self.found[number] for number, now in changes.items() if isinstance(now, Tensor)]

    def refill(self, changes: Mapping[int, Any]) -> None:
        """Let the caller's objects hold what those of the replica do.

        Args:
            changes: What `ObjectsBefore.changes` found, with the caller's objects in it.
        """
        for number, now in changes.items():
            value = self.found[number]
            if isinstance(now, Tensor):
                with torch.no_grad():
                    (value.data if value.is_inference() else value).copy_(now)
            else:
                refill(value, ObjectContents(*now))


class ObjectsBefore:
    """What some objects held before a forward.

    Args:
        found: The objects, as `mutable_parts` finds them.
    """

    def __init__(self, found: Sequence[Any]) -> None:
        self._found = found
        self._then: list[Any] = [
            (value._version, _kind(value)) if isinstance(value, Tensor) else contents(value)
            for value in found
        ]

    def edit(self, number: int, now: ObjectContents) -> ObjectEdit | None:
        """What was done to an object that is no tensor, see `edit_of`."""
        return edit_of(self._found[number], self._then[number], now)

    def held(self, number: int) -> list[tuple[int, Any]]:
        """What an object held that is neither a tensor nor a plain value, with its place."""
        return [
            (place, value)
            for place, value in enumerate(self._then[number].flat())
            if not (type(value) in ATOMS or isinstance(value, Tensor))
        ]

    def numbers(self) -> dict[int, int]:
        """The number of each object by its id, of those that are what they were: not of tensors
        that were given a graph, or another shape.
        """
        return {
            id(value): number
            for number, (value, then) in enumerate(zip(self._found, self._then, strict=True))
            if not isinstance(value, Tensor) or _kind(value) == then[1]
        }

    def changes(self, graphed: Collection[int] = ()) -> dict[int, Any]:
        """What the changed objects hold now, by their numbers.

        Args:
            graphed: The ids of other tensors that were given a graph.
        """
        known, found = self.numbers(), dict[int, Any]()
        others = {
            id(value)
            for value in self._found
            if isinstance(value, Tensor) and id(value) not in known
        }.union(graphed)
        for number, (value, then) in enumerate(zip(self._found, self._then, strict=True)):
            if isinstance(value, Tensor):
                if id(value) in known and value._version != then[0]:
                    found[number] = value.detach().clone()
                continue
            now = contents(value)
            if not now.is_like(then) or (others and not others.isdisjoint(map(id, now.flat()))):
                found[number] = (*now,)
        return found


def _kind(tensor: Tensor) -> tuple[Any, ...]:
    """What `copy_` cannot change of a tensor."""
    return tensor.shape, tensor.dtype, tensor.requires_grad, tensor.is_leaf
