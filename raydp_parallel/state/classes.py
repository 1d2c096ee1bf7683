"""Edits of classes that replicas import by name.

Many scripts change a library's model by ``SomeNet.forward = mine``. The class is sent by name, and
a replica imports it as it is on disk; so attributes that were set on it must be sent too. They are
what changed since the class was first seen here, and functions with a qualified name of another
place. A wrapper with `functools.wraps` that was put around a method before the class was first seen
looks like a function of the class's body, and is not found.
"""

from __future__ import annotations

import operator
import sys
import types
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

from torch import nn

from raydp_parallel.state.introspection import by_value
from raydp_parallel.state.module_sources import PROCESS

_PYTHONS_OWN = frozenset(
    ("__dict__", "__weakref__", "__slotnames__", "__doc__", "__abstractmethods__", "_abc_impl")
)
_MISSING = object()


class _Record:
    """What is known of classes, which belong to the process as they do.

    Attributes:
        first: Their attributes when they were first seen here.
        seen: Their attributes when they were last looked at: names, values, and both of those that
            are compared.
        originals: What was replaced by the driver's, by class and name.
    """

    def __init__(self) -> None:
        self.first: weakref.WeakKeyDictionary[type, dict[str, Any]] = weakref.WeakKeyDictionary()
        self.seen: weakref.WeakKeyDictionary[type, tuple[list[str], list[Any], list[Any]]] = (
            weakref.WeakKeyDictionary()
        )
        self.originals: dict[tuple[type, str], Any] = {}


_record = _Record()

Patch = tuple[type, str, Any]
"""A class, the name of one of its attributes, and its value."""


def of(module: nn.Module) -> list[type]:
    """The classes of a module tree that can be imported."""
    kinds = dict.fromkeys(type(m) for m in module.modules())
    bases = dict.fromkeys(
        base for kind in kinds for base in kind.__mro__ if issubclass(base, nn.Module)
    )
    return [base for base in bases if not by_value(base)]


def attributes(kind: type) -> list[Any]:
    """The attributes of a class, to be compared by identity; if nothing changed, the same list as
    before.
    """
    names, values = [*vars(kind)], [*vars(kind).values()]
    seen = _record.seen.get(kind)
    if seen is None or seen[0] != names or not all(map(operator.is_, seen[1], values)):
        own = {
            name: value
            for name, value in zip(names, values, strict=True)
            if name not in _PYTHONS_OWN
        }
        seen = _record.seen[kind] = names, values, [*own, *own.values()]
    return seen[2]


def patches(kinds: Sequence[type]) -> Iterator[tuple[Patch, bool]]:
    """The attributes that were set on classes after they were made, and whether that is certain."""
    for kind in kinds:
        first = _record.first.setdefault(kind, dict(vars(kind)))
        for name, value in list(vars(kind).items()):
            changed = value is not first.get(name, _MISSING) and not _is_own(kind, name, value)
            if name not in _PYTHONS_OWN and (changed or _is_foreign(kind, name, value)):
                yield (kind, name, value), changed


def apply(process: str, kinds: Sequence[type], found: list[Patch]) -> None:
    """Give some of this process's classes the attributes that were set in the driver, and take back
    all others that were set here.
    """
    if process == PROCESS:
        return  # a replica in the driver's process
    wanted = {(kind, name) for kind, name, _ in found}
    for kind, name in [key for key in _record.originals if key[0] in kinds and key not in wanted]:
        _set(kind, name, _record.originals.pop((kind, name)))
    for kind, name, value in found:
        now = vars(kind).get(name, _MISSING)
        if now is not value:
            _record.originals.setdefault((kind, name), now)
            _set(kind, name, value)


def _set(kind: type, name: str, value: Any) -> None:
    if value is _MISSING:
        delattr(kind, name)
    else:
        setattr(kind, name, value)


def function_of(value: Any) -> types.FunctionType | None:
    """The function behind a method, a static method or a class method."""
    function = getattr(value, "__func__", value)
    return function if isinstance(function, types.FunctionType) else None


def _is_foreign(kind: type, name: str, value: Any) -> bool:
    """Whether a function was made elsewhere, by its name."""
    function = function_of(value)
    return function is not None and not _has_name_of(kind, name, function)


def _is_own(kind: type, name: str, value: Any) -> bool:
    """Whether a function is the one of the class's body: a replica has it, or restores it."""
    function = function_of(value)
    if (
        function is None
        or not _has_name_of(kind, name, function)
        or hasattr(function, "__wrapped__")
    ):
        return False
    return function.__globals__ is vars(sys.modules[kind.__module__])


def _has_name_of(kind: type, name: str, function: types.FunctionType) -> bool:
    return (function.__module__, function.__qualname__) == (
        kind.__module__,
        f"{kind.__qualname__}.{name}",
    )
