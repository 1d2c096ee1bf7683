"""Dicts, lists and sets with copies of their contents: what changed since, and how it is undone.

Contents are compared by identity, see `python_state`. Most calls find no change, so the question
whether there is any is answered in C, over flat lists of all contents; which containers changed is
found one by one, where it is asked for.
"""

from __future__ import annotations

import functools
import operator
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import chain
from typing import Any

from torch import Tensor

_MISSING = object()


def same(now: Sequence[Any], then: Sequence[Any]) -> bool:
    """Whether two sequences hold the same objects, in the same order."""
    return now is then or (len(now) == len(then) and _identical(now, then))


def _identical(now: Iterable[Any], then: Iterable[Any]) -> bool:
    return all(map(operator.is_, now, then))


def _alike(node: dict[Any, Any], copy: dict[Any, Any]) -> bool:
    return (
        len(node) == len(copy) and _identical(node.values(), copy.values()) and [*node] == [*copy]
    )


def _shown(hidden: Mapping[int, Collection[str]], owner: Any) -> dict[str, Any]:
    """The attributes of an object but for hidden ones."""
    names = hidden.get(id(owner))
    attributes: dict[str, Any] = vars(owner)
    if names is None:
        return attributes
    return {name: value for name, value in attributes.items() if name not in names}


class _FlatDicts:
    """The contents of some dicts, in flat lists.

    Args:
        owners: The objects that have the first dicts as attributes.
        dicts: The other dicts.
        copies: The contents of all.
        attributes: Gives the attributes of an object.
    """

    def __init__(
        self,
        owners: Sequence[Any],
        dicts: Sequence[dict[Any, Any]],
        copies: Sequence[dict[Any, Any]],
        attributes: Callable[[Any], dict[str, Any]] = vars,
    ) -> None:
        self._attributes = attributes
        count = len(owners)
        nodes: list[Any] = [*map(attributes, owners), *dicts]
        # Most dicts of a module are for hooks and empty: one `any` checks all of them.
        empty = [
            not copy and (i >= count or isinstance(owners[i], Tensor))
            for i, copy in enumerate(copies)
        ]
        self._empty = [node for node, is_empty in zip(nodes, empty, strict=True) if is_empty]
        full = [i for i, is_empty in enumerate(empty) if not is_empty]
        ordered = [i for i in full if type(nodes[i]) is OrderedDict]
        full = [i for i in full if type(nodes[i]) is not OrderedDict]
        self._owners = [owners[i] for i in full if i < count]
        self._dicts = [nodes[i] for i in full if i >= count]
        self._ordered: list[Any] = [nodes[i] for i in ordered]
        chosen = [copies[i] for i in (*full, *ordered)]
        self._lengths = [*map(len, chosen)]
        self._keys = [*chain.from_iterable(chosen)]
        self._values = [*chain.from_iterable(map(dict.values, chosen))]

    def changed(self) -> bool:
        """Whether a dict has other contents than its copy."""
        plain = [*map(self._attributes, self._owners), *self._dicts]
        full = [*plain, *self._ordered]
        # An OrderedDict has an order of its own, which dict.values would not follow.
        values = (*map(dict.values, plain), *map(OrderedDict.values, self._ordered))
        return (
            any(self._empty)
            or [*map(len, full)] != self._lengths
            or [*chain.from_iterable(full)] != self._keys
            or not _identical(chain.from_iterable(values), self._values)
        )


class DictCopies:
    """The attributes of objects, and plain dicts, with copies of their contents.

    Args:
        owners: The objects.
        dicts: The dicts.
        hidden: The names of attributes that are not looked at, by the ids of their owners.
    """

    def __init__(
        self,
        owners: Sequence[Any],
        dicts: Sequence[dict[Any, Any]],
        hidden: Mapping[int, Collection[str]] | None = None,
    ) -> None:
        self._owners = [*owners]
        self._dicts = [*dicts]
        self._attributes: Any = functools.partial(_shown, hidden) if hidden else vars
        self._copies = [dict(node) for node in self._nodes()]
        self._index = {id(owner): i for i, owner in enumerate(owners)}
        self.settle()

    def _nodes(self) -> list[dict[Any, Any]]:
        nodes: list[Any] = [*map(self._attributes, self._owners)]
        return nodes + self._dicts

    def classes(self) -> list[type]:
        """The classes of the objects."""
        return [*map(type, self._owners)]

    def changed(self) -> bool:
        """Whether any of them has other contents than its copy."""
        return self._flat.changed()

    def recorded(self, owner: Any, name: str) -> Any:
        """The value of an attribute in the copy; None if there is none."""
        number = self._index.get(id(owner))
        return None if number is None else self._copies[number].get(name)

    def accept(self, owner: Any, name: str, value: Any) -> Any:
        """Record the new value of an attribute; `settle` must follow the last of several calls.

        Returns:
            The value before.
        """
        copy = self._copies[self._index[id(owner)]]
        old, copy[name] = copy.get(name), value
        return old

    def settle(self) -> None:
        """Compare with the copies as they are now."""
        self._flat = _FlatDicts(self._owners, self._dicts, self._copies, self._attributes)

    def differences(self) -> list[tuple[Any, str, Any]] | None:
        """The changed attributes as (owner, name, new value), or None if something else changed."""
        found = []
        for i, (node, copy) in enumerate(zip(self._nodes(), self._copies, strict=True)):
            if _alike(node, copy):
                continue
            if i >= len(self._owners) or [*node] != [*copy]:
                return None
            owner = self._owners[i]
            found += [(owner, name, new) for name, new in node.items() if new is not copy[name]]
        return found

    def changed_nodes(self) -> list[Any]:
        """The objects and dicts that changed."""
        nodes = zip(self._nodes(), self._copies, [*self._owners, *self._dicts], strict=True)
        return [value for node, copy, value in nodes if not _alike(node, copy)]

    def unlike(self) -> set[int]:
        """The ids of the dicts that changed."""
        pairs = zip(self._nodes(), self._copies, strict=True)
        return {id(node) for node, copy in pairs if not _alike(node, copy)}

    def culprits(self, changed: set[int]) -> list[tuple[Any, str]]:
        """The attributes that changed, or hold a container that did, as (owner, name).

        Args:
            changed: The ids of all containers that changed.
        """
        found = []
        for i, owner in enumerate(self._owners):
            now, then = self._attributes(owner), self._copies[i]
            for name in {**then, **now}:
                value = now.get(name, _MISSING)
                if value is not then.get(name, _MISSING) or id(value) in changed:
                    found.append((owner, name))
        return found

    def news(
        self, nodes: Sequence[dict[Any, Any]], besides: Collection[int]
    ) -> list[tuple[int, Any, Any]]:
        """The entries of ``nodes`` that are new, or have one of some values, by id: the number of
        the node, key and value of each.
        """
        before = dict(zip(map(id, self._nodes()), self._copies, strict=True))
        found = []
        for at, node in enumerate(nodes):
            then = before.get(id(node), {})
            for key, value in node.items():
                if value is not then.get(key, _MISSING) or id(value) in besides:
                    found.append((at, key, value))
        return found

    def restore(self) -> None:
        """Give them the contents of the copies."""
        for node, copy in zip(self._nodes(), self._copies, strict=True):
            if not _alike(node, copy):
                node.clear()
                node.update(copy)

    def replace(self, new: dict[int, Tensor], reached: Counter[int]) -> None:
        """Replace tensors, given by their ids, as values; counts them in ``reached``."""
        for node, copy in zip(self._nodes(), self._copies, strict=True):
            for name, value in copy.items():
                if id(value) in new:
                    reached[id(value)] += 1
                    copy[name] = node[name] = new[id(value)]

    def replace_owners(self, new: dict[int, Tensor]) -> None:
        """Let other tensors, given by the ids of those before, have their attributes."""
        for i, owner in enumerate(self._owners):
            if id(owner) in new:
                self._owners[i] = new[id(owner)]
                vars(self._owners[i]).update(self._copies[i])
        self._index = {id(owner): i for i, owner in enumerate(self._owners)}


class ListCopies:
    """Lists, deques and sets, with copies of their contents.

    Args:
        lists: The lists and deques.
        sets: The sets.
    """

    def __init__(self, lists: Sequence[Any], sets: Sequence[set[Any]]) -> None:
        self._lists, self._sets = lists, sets
        self._copies = [list(node) for node in lists]
        self._set_copies = [set(node) for node in sets]
        self._lengths = [*map(len, lists)]
        self._items = [*chain.from_iterable(lists)]

    def changed(self) -> bool:
        """Whether any of them has other contents than its copy."""
        return (
            [*map(len, self._lists)] != self._lengths
            or not _identical(chain.from_iterable(self._lists), self._items)
            or self._sets != self._set_copies
        )

    def settle(self) -> None:
        """Compare with the copies as they are now."""
        self._items = [*chain.from_iterable(self._copies)]

    def changed_nodes(self) -> list[Any]:
        """Those that changed."""
        lists = zip(self._lists, self._copies, strict=True)
        sets = zip(self._sets, self._set_copies, strict=True)
        found = [node for node, copy in lists if not same(node, copy)]
        return found + [node for node, copy in sets if node != copy]

    def unlike(self) -> set[int]:
        """The ids of those that changed."""
        return {*map(id, self.changed_nodes())}

    def restore(self) -> None:
        """Give them the contents of the copies."""
        for node, copy in zip(self._lists, self._copies, strict=True):
            if not same(node, copy):
                node.clear()
                node.extend(copy)
        for known, before in zip(self._sets, self._set_copies, strict=True):
            if known != before:
                known.clear()
                known.update(before)

    def replace(self, new: dict[int, Tensor], reached: Counter[int]) -> None:
        """Replace tensors, given by their ids, as items; counts them in ``reached``."""
        for node, items in zip(self._lists, self._copies, strict=True):
            for i, value in enumerate(items):
                if id(value) in new:
                    reached[id(value)] += 1
                    items[i] = node[i] = new[id(value)]
