"""The objects of the program that the code of a module refers to: a dict in which a hook stores
activations, a list that forward appends to, a global counter.

A replica has copies of them, as it has of functions and classes that are sent by value. What
forward does to such a copy is undone before the next one, and is lost: `LostChanges` finds it, so
that the program can be told.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from torch import Tensor, nn

from raydp_parallel.state.python_state import by_value, global_names
from raydp_parallel.state.shared_objects import ObjectsBefore, is_of_torch, mutable_parts

_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
_METHODS = (staticmethod, classmethod)
_FUNCTIONS = (types.FunctionType, types.MethodType, functools.partial, property, *_METHODS)


class _Named(NamedTuple):
    """A name of a function's globals, of its closure, or of a class's attributes."""

    name: str
    read: Callable[[], Any]


class CodeObjects:
    """What the hooks, methods and functions of a module refer to that is sent along by value.

    Args:
        modules: The module, and all its parts.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._places: list[_Named] = []
        self._named: dict[int, tuple[str, Any]] = {}
        seen: dict[int, Any] = {}
        left = [*_code_of(modules)]
        for kind in dict.fromkeys(map(type, modules)):
            for base in kind.__mro__:
                if base is not object and by_value(base):
                    left.extend(self._of_class(base))
        while left:
            name, value = left.pop()
            if id(value) in seen or is_of_torch(value):
                continue
            seen[id(value)] = value
            if isinstance(value, _FUNCTIONS):
                left.extend(self._of_function(value))
            elif not isinstance(value, (type, types.ModuleType, nn.Module, Tensor)):
                self._named[id(value)] = name, value

    def _of_class(self, kind: type) -> Iterator[tuple[str, Any]]:
        """A class's methods, and what else its attributes are."""
        for name, value in vars(kind).items():
            if isinstance(value, _FUNCTIONS):
                yield "", value
            elif not name.startswith("_"):
                self._places.append(_Named(name, functools.partial(vars(kind).get, name)))
                yield name, value

    def _of_function(self, value: Any) -> Iterator[tuple[str, Any]]:
        """What a function refers to, with the names of it."""
        if isinstance(value, types.MethodType):
            yield type(value.__self__).__name__, value.__self__
            yield "", value.__func__
        elif isinstance(value, functools.partial):
            yield "", value.func
            yield from (("an argument of a partial", part) for part in value.args)
            yield from value.keywords.items()
        elif isinstance(value, property):
            yield from (("", part) for part in (value.fget, value.fset) if part is not None)
        elif isinstance(value, _METHODS):
            yield "", value.__func__
        elif by_value(value):
            for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
                self._places.append(_Named(name, functools.partial(_inside, cell)))
                yield name, _inside(cell)
            space = value.__globals__
            for name in global_names(value):
                if name in space and not isinstance(space[name], (types.ModuleType, type)):
                    self._places.append(_Named(name, functools.partial(space.get, name)))
                    yield name, space[name]

    def before(self) -> LostChanges | None:
        """What these objects hold now; None if there are none."""
        if not (self._named or self._places):
            return None
        return LostChanges([*self._named.values()], self._places)


def _inside(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # a name that has no value yet
        return None


def _code_of(modules: Iterable[nn.Module]) -> Iterator[tuple[str, Any]]:
    """The hooks of a module's parts, and attributes that are functions."""
    for module in modules:
        attributes = vars(module)
        for holder in _HOOKS:
            for hook in attributes.get(holder, {}).values():
                yield type(hook).__name__, hook
        for name, value in attributes.items():
            if isinstance(value, _FUNCTIONS):
                yield name, value


class LostChanges:
    """What some objects held before the module ran.

    Args:
        named: The objects, with their names in the program.
        places: The names that may be given other values.
    """

    def __init__(self, named: list[tuple[str, Any]], places: list[_Named]) -> None:
        self._objects = [
            (name, ObjectsBefore(mutable_parts(value, {}, but=(nn.Module, Tensor))))
            for name, value in named
        ]
        self._places = [(place, place.read()) for place in places]

    def found(self) -> str:
        """The names of those that hold something else now, for a sentence; empty for none."""
        names = [name for name, before in self._objects if before.changes()]
        names += [place.name for place, then in self._places if place.read() is not then]
        return ", ".join(dict.fromkeys(names))
