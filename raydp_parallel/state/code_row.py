"""The attributes of classes, the parts of functions and the specs of modules, in one row that is
compared by identity.

A model of a library has some thirty of them, and to read each by Python code took a third of the
comparison before a forward. Here all are read by a few calls in C. What the row shows may differ
although nothing did that is sent: then the exact comparison of `python_state` decides.
"""

from __future__ import annotations

import operator
import sys
import types
from collections.abc import Iterable, Sequence
from itertools import chain, repeat
from typing import Any

_MISSING = object()
_code: Any = operator.attrgetter("__code__", "__defaults__", "__kwdefaults__")
_contents: Any = operator.attrgetter("cell_contents")
_bases: Any = operator.attrgetter("__mro__")


class CodeRow:
    """What is read of classes, functions and modules, one after the other."""

    def __init__(self) -> None:
        self._kinds: list[type] = []
        self._views: list[Iterable[Any]] = []
        self._functions: list[types.FunctionType] = []
        self._cells: list[types.CellType] = []
        self._spaces: list[dict[str, Any]] = []
        self._names: list[str] = []
        self._modules: list[str] = []
        self._then: list[Any] | None = None

    def add_class(self, kind: type, bases: Iterable[type] = ()) -> None:
        """Add the attributes of a class, and of some of its bases."""
        self._kinds.append(kind)
        for one in dict.fromkeys((kind, *bases)):
            attributes = vars(one)  # its views show what the class has now
            self._views += [attributes.keys(), attributes.values()]

    def add_function(self, function: types.FunctionType, names: Sequence[str]) -> None:
        """Add a function with its closure, and the globals with some names."""
        self._functions.append(function)
        self._cells += function.__closure__ or ()
        self._spaces += [function.__globals__] * len(names)
        self._names += names

    def add_modules(self, names: Iterable[str]) -> None:
        """Add the specs of loaded modules."""
        self._modules += names

    def unchanged(self) -> bool:
        """Whether all is as `note` noted it."""
        then, now = self._then, self.look()
        if then is None or now is None:
            return False
        return len(then) == len(now) and all(map(operator.is_, then, now))

    def note(self, look: list[Any] | None) -> None:
        """Note a look with which later ones are compared: one from before an exact comparison that
        found no change.
        """
        self._then = look

    def look(self) -> list[Any] | None:
        """What there is now; None if some part is missing, and has to be looked at alone."""
        modules = [*map(sys.modules.get, self._modules)]
        try:
            return [
                *chain.from_iterable(self._views),
                *map(_bases, self._kinds),
                *chain.from_iterable(map(_code, self._functions)),
                *map(_contents, self._cells),
                *map(dict.get, self._spaces, self._names, repeat(_MISSING)),
                *modules,
                *map(dict.get, map(vars, modules), repeat("__spec__")),
            ]
        except (TypeError, ValueError):  # a module that is not loaded, a cell without contents
            return None
