"""What a module consists of and refers to: its submodules and tensors, the objects that its
attributes hold, and those of the program that its code knows, such as a dict in which a hook stores
activations, a list that forward appends to, a global counter.

A replica has copies. With one device what it changes of them comes back: driver and replica name
each by the same key. With several devices it is undone before the next forward, and is lost, so
that the program is told.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from enum import Enum
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from raydp_parallel.state.python_state import PythonState, by_value, global_names
from raydp_parallel.state.shared_objects import (
    ATOMS,
    ObjectContents,
    ObjectEdit,
    ObjectsBefore,
    is_of_torch,
    mutable_parts,
)

_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
_METHODS = (staticmethod, classmethod)
_FUNCTIONS = (types.FunctionType, types.MethodType, functools.partial, property, *_METHODS)


class CodePlace:
    """A name that code may give another value.

    Args:
        name: The name.
        holder: A variable of a closure, the globals of a function, or a class.
    """

    def __init__(self, name: str, holder: types.CellType | dict[str, Any] | type) -> None:
        self.name = name
        self._holder = holder

    @property
    def value(self) -> Any:
        """Its value; `AttributeError` if it has none."""
        holder = self._holder
        try:
            if isinstance(holder, types.CellType):
                return holder.cell_contents
            return (holder if isinstance(holder, dict) else vars(holder))[self.name]
        except (KeyError, ValueError):
            raise AttributeError(self.name) from None

    @value.setter
    def value(self, value: Any) -> None:
        holder = self._holder
        if isinstance(holder, types.CellType):
            holder.cell_contents = value
        elif isinstance(holder, dict):
            holder[self.name] = value
        else:
            setattr(holder, self.name, value)

    @value.deleter
    def value(self) -> None:
        holder = self._holder
        if isinstance(holder, types.CellType):
            del holder.cell_contents
        elif isinstance(holder, dict):
            holder.pop(self.name, None)
        else:
            delattr(holder, self.name)

    def read(self) -> Any:
        """Its value, or None."""
        return getattr(self, "value", None)


class CodeObjects:
    """What the hooks, methods and functions of a module refer to that is sent along by value.

    Args:
        modules: The module, and all its parts.

    Attributes:
        objects: The objects with their names in the program, by the path on which the code refers
            to them, which driver and replica find alike.
        places: The names that may be given other values, by such paths.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self.objects: dict[str, tuple[str, Any]] = {}
        self.places: dict[str, CodePlace] = {}
        self._seen: dict[Any, Any] = {}
        left = [*_code_of(modules)]
        kinds = dict.fromkeys(base for m in modules for base in type(m).__mro__)
        for number, kind in enumerate(kind for kind in kinds if kind is not object):
            if by_value(kind):
                left.extend(self._of_class(f"class {number}", kind))
        while left:
            path, name, value = left.pop()
            if id(value) in self._seen or is_of_torch(value):
                continue
            self._seen[id(value)] = value
            if isinstance(value, _FUNCTIONS):
                left.extend(self._of_function(path, value))
            elif not isinstance(value, (type, types.ModuleType, nn.Module, Tensor)):
                self.objects[path] = name, value

    def _of_class(self, path: str, kind: type) -> Iterator[tuple[str, str, Any]]:
        """A class's methods, and what else its attributes are."""
        # Unpickling makes classes with their attributes in another order.
        for name, value in sorted(vars(kind).items()):
            if isinstance(value, _FUNCTIONS):
                yield f"{path}.{name}", "", value
            elif not name.startswith("__") and name != "_abc_impl":
                yield from self._of_place(f"{path}.{name}", name, kind)

    def _of_function(self, path: str, value: Any) -> Iterator[tuple[str, str, Any]]:
        """What a function refers to, with the names of it."""
        parts: list[tuple[str, Any]] = []
        if isinstance(value, types.MethodType):
            parts = [(type(value.__self__).__name__, value.__self__), ("", value.__func__)]
        elif isinstance(value, functools.partial):
            given = [("an argument of a partial", part) for part in value.args]
            parts = [("", value.func), *given, *value.keywords.items()]
        elif isinstance(value, property):
            parts = [("", part) for part in (value.fget, value.fset) if part is not None]
        elif isinstance(value, _METHODS):
            parts = [("", value.__func__)]
        elif by_value(value):
            defaults = [("an argument's default", part) for part in value.__defaults__ or ()]
            parts = [*defaults, *(value.__kwdefaults__ or {}).items()]
            names = value.__code__.co_freevars
            for name, cell in zip(names, value.__closure__ or (), strict=True):
                yield from self._of_place(f"{path}.closure.{name}", name, cell)
            space = value.__globals__
            for name in global_names(value):
                if name in space and not isinstance(space[name], (types.ModuleType, type)):
                    yield from self._of_place(f"{path}.globals.{name}", name, space)
        for number, (name, part) in enumerate(parts):
            yield f"{path}.{number}", name, part

    def _of_place(self, path: str, name: str, holder: Any) -> Iterator[tuple[str, str, Any]]:
        key = id(holder), name
        if key not in self._seen:
            self._seen[key] = holder
            place = self.places[path] = CodePlace(name, holder)
            yield path, name, place.read()

    def before(
        self, objects: Collection[int] = (), places: Collection[str] = ()
    ) -> LostChanges | None:
        """What these objects hold now; None if there are none.

        Args:
            objects: The ids of objects of which changes are not lost.
            places: The paths of such names.
        """
        left = [place for path, place in self.places.items() if path not in places]
        if not (self.objects or left):
            return None
        return LostChanges([*self.objects.values()], left, objects)


def _code_of(modules: Iterable[nn.Module]) -> Iterator[tuple[str, str, Any]]:
    """The hooks of a module's parts, and attributes that are functions."""
    for at, module in enumerate(modules):
        attributes = vars(module)
        for holder in _HOOKS:
            for number, hook in enumerate(attributes.get(holder, {}).values()):
                yield f"{at}.{holder}.{number}", type(hook).__name__, hook
        found = [item for item in attributes.items() if isinstance(item[1], _FUNCTIONS)]
        for name, value in sorted(found):
            yield f"{at}.{name}", name, value


class LostChanges:
    """What some objects held before the module ran.

    Args:
        named: The objects, with their names in the program.
        places: The names that may be given other values.
        besides: The ids of objects that are not looked at.
    """

    def __init__(
        self,
        named: list[tuple[str, Any]],
        places: list[CodePlace],
        besides: Collection[int] = (),
    ) -> None:
        self._objects = []
        for name, value in named:
            parts = mutable_parts(value, {}, but=(nn.Module, Tensor))
            if left := [part for part in parts if id(part) not in besides]:
                self._objects.append((name, ObjectsBefore(left)))
        self._places = [(place, place.read()) for place in places]

    def found(self) -> str:
        """The names of those that hold something else now, for a sentence; empty for none."""
        names = [name for name, before in self._objects if before.changes()]
        names += [place.name for place, then in self._places if place.read() is not then]
        return ", ".join(dict.fromkeys(names))


_OF_TORCH = frozenset(vars(nn.Module()))
"""The attributes of every module: its parameters, buffers, submodules and hooks."""


_NOT_REBOUND = frozenset(
    ("_parameters", "_buffers", "_modules", "_output_capturing_hooks_installed")
)
"""The attributes of a module that users do not rebind, and the flag by which transformers notes
that a forward gave parts of its model hooks: these stay in the replica, which must make them again.
"""

_CODE, _PLACE, NEW = -1, -2, -3
"""Stand for the number of a submodule: the first two where a path of `CodeObjects` stands for the
attribute, with an object and with a name, the last with one of `NewObjects`.
"""

PartKey = tuple[Any, ...]
"""Names a part of a module for driver and replica: a submodule by its number, a tensor by None and
its slot, an object by the number of the submodule, the name of its attribute, and its place in it,
or by the path on which code refers to it; what an object held before the forward by the object's
key and the place in its contents.
"""


class NewObjects:
    """The objects that a forward and its backwards gave attributes, and put into objects, in an
    order that driver and replica find alike.

    Attributes:
        objects: These.
    """

    def __init__(self) -> None:
        self.objects: list[Any] = []
        self._seen: dict[int, Any] = {}

    def add(self, values: Iterable[Any], known: Callable[[], Iterable[Any]]) -> None:
        """Add those that some values are, or hold.

        Args:
            values: The values.
            known: Gives the objects that have keys already.
        """
        roots = [v for v in values if not (type(v) in ATOMS or isinstance(v, (Tensor, nn.Module)))]
        if roots:
            self._seen.update((id(value), value) for value in known())
            for root in roots:
                self.objects += mutable_parts(root, self._seen, but=(nn.Module, Tensor))


class HookChanges(NamedTuple):
    """What hooks changed in a backward of the only device.

    Attributes:
        revision: The revision of the master that the replica holds.
        rebound: Attributes, buffers and names of code that got new values: number and name, see
            `ModuleParts.holder`, the value before if that is a plain one, else ``...``, value.
        edits: What was done to objects, by key.
        made: How many `NewObjects` there were.
    """

    revision: int
    rebound: tuple[tuple[int, str, Any, Any], ...]
    edits: dict[PartKey, ObjectEdit]
    made: int

    def values(self) -> list[Any]:
        """The values in it."""
        inside = [value for edit in self.edits.values() for value in edit.values()]
        return [value for *_, value in self.rebound] + inside


class ModuleParts:
    """A module's parts, and the objects that their attributes hold and their code refers to, by
    keys that driver and replica make alike.

    Pickling may reorder or leave out attributes: each is looked through by itself, and a replica
    leaves out those in which it finds more or fewer objects than the driver.

    Args:
        modules: The module, and its parts.
        state: What they begin each forward with, in a replica.
        counts: What the driver's `counts` found.
        hidden: The names of attributes that replicas do without, by number of the module.

    Attributes:
        modules: These.
        hidden: These.
        reported: The attributes that the last forward rebound, by number of the module and name.
        then: What the objects held after it; None if that is not followed.
        stores: Whether it changed objects.
    """

    def __init__(
        self,
        modules: Iterable[nn.Module],
        state: PythonState | None = None,
        counts: Mapping[tuple[int, str], int] | None = None,
        hidden: Mapping[int, tuple[str, ...]] | None = None,
    ) -> None:
        self.modules = [*modules]
        self.hidden = dict(hidden or {})
        self._state = state
        self._counts = counts
        if state is not None:  # as it is now, so that later changes are seen
            self._values = {path: place.read() for path, place in self.code.places.items()}
        self.reported: dict[tuple[int, str], Any] = {}
        self.then: ObjectsBefore | None = None
        self.stores = False
        self._objects: dict[PartKey, Any] | None = None
        self._made = NewObjects()
        self._made_then = ObjectsBefore(())

    @functools.cached_property
    def code(self) -> CodeObjects:
        """What their code refers to."""
        return CodeObjects(self.modules)

    @property
    def objects(self) -> dict[PartKey, Any]:
        """The objects, and all that they hold, but for modules and tensors."""
        if self._objects is None:
            self._objects = {}
            for at, name, value in self._attributes():
                parts = mutable_parts(value, {}, but=(nn.Module, Tensor))
                if self._counts is None or self._counts.get((at, name)) == len(parts):
                    self._objects.update(((at, name, k), part) for k, part in enumerate(parts))
        return self._objects

    def counts(self) -> dict[tuple[int, str], int]:
        """How many there are in each attribute, by number of the submodule and its name, and by the
        paths of code.
        """
        found = dict.fromkeys([(_PLACE, path) for path in self.code.places], 1)
        for at, name, _ in self.objects:
            found[at, name] = found.get((at, name), 0) + 1
        return found

    def look_again(self, old: Any) -> None:
        """Find the objects anew if an attribute held one, and has another value now."""
        if type(old) not in ATOMS:
            self._objects, self.then = None, None

    def _attributes(self) -> Iterator[tuple[int, str, Any]]:
        """The attributes that may hold objects: number of the module, name, value."""
        for at, module in enumerate(self.modules):
            if isinstance(module, torch.jit.ScriptModule):
                continue
            besides = self.hidden.get(at, ())
            for name, value in vars(module).items():
                if name in _OF_TORCH or name in besides:
                    continue
                if not (type(value) in ATOMS or is_of_torch(value)):
                    yield at, name, value
        for path, (_, value) in self.code.objects.items():
            yield _CODE, path, value

    @functools.cached_property
    def followed(self) -> frozenset[str]:
        """The paths of code's names that the driver finds, too."""
        return frozenset(path for at, path in self._counts or () if at == _PLACE)

    def holder(self, at: int, name: str) -> tuple[Any, str]:
        """The object and the attribute for a number and a name of `rebound`."""
        return (self.code.places[name], "value") if at == _PLACE else (self.modules[at], name)

    def rebound(self, graphed: Collection[int]) -> list[tuple[int, str, Any]]:
        """The attributes, buffers and names of code with other values than a forward begins with:
        number of the module, name and value, see `holder`.

        Args:
            graphed: The ids of tensors that were made part of a graph, in place.
        """
        owners = [holder for module in self.modules for holder in (vars(module), module._buffers)]
        found = self._news(owners, graphed)
        rebound = [(at // 2, name, value) for at, name, value in found if name not in _NOT_REBOUND]
        for path in self.followed & self.code.places.keys():
            value = self.code.places[path].read()
            if value is not self._values[path]:
                rebound.append((_PLACE, path, value))
        return rebound

    def grown(self) -> list[str]:
        """The parameters and submodules that the modules were given, but those of torch's."""
        owners = [holder for m in self.modules for holder in (m._modules, m._parameters)]
        found = [(self.modules[at // 2], name) for at, name, _ in self._news(owners, ())]
        return [f"{type(m).__name__}.{name}" for m, name in found if not is_of_torch(m)]

    def _news(
        self, owners: Sequence[Any], besides: Collection[int]
    ) -> Iterator[tuple[int, Any, Any]]:
        found = [] if self._state is None else self._state.news(owners, besides)
        for at, name, value in found:
            if not isinstance(self.modules[at // 2], torch.jit.ScriptModule):
                yield at, name, value

    def changes_since(self, revision: int) -> tuple[HookChanges | None, list[str]]:
        """What a backward changed since the driver was told of changes; None for nothing.

        Args:
            revision: The revision of the master that the replica holds; 0 if these are the parts of
                an earlier structure of it, by which the driver does not find objects any more.

        Returns:
            What the driver is told, and the names of what it cannot be told.
        """
        state = self._state
        if self.then is None or state is None:
            return None, []
        told = self.reported or self.stores  # also what is now as it was before the forward
        if not (told or state.changed() or state.deep_changed()):
            return None, []
        now, then = {(at, name): value for at, name, value in self.rebound(())}, self.reported
        rebound = [(*key, value) for key, value in now.items() if then.get(key, then) is not value]
        for at, name in then.keys() - now.keys():  # perhaps it was set back
            owner, attribute = self.holder(at, name)
            value = getattr(owner, attribute, None)
            if value is not then[at, name]:
                rebound.append((at, name, value))
        edits: dict[PartKey, ObjectEdit] = {}
        lost = []
        made = [*self.made()]
        for keys, before in (([*self.objects], self.then), (made, self._made_then)):
            for number, contents in before.changes().items():
                edit = before.edit(number, ObjectContents(*contents))
                if edit is None or not revision:
                    lost.append(keys[number])
                else:
                    edits[keys[number]] = edit
        if not (rebound or edits or lost):
            return None, []
        news = [(at, name, self._before(at, name), value) for at, name, value in rebound]
        changes = HookChanges(revision, (*news,), edits, len(made))
        self.reported = {**then, **now}
        self._report(changes.values(), bool(edits or lost))
        return changes if rebound or edits else None, self.names(lost)

    def made(self) -> dict[PartKey, Any]:
        """The `NewObjects` that the driver was told of, by key."""
        return {(NEW, "", k): value for k, value in enumerate(self._made.objects)}

    def _before(self, at: int, name: str) -> Any:
        """The value of an attribute that the driver has, if that is a plain one, else ``...``."""
        value: Any = ...
        if (at, name) in self.reported:
            value = self.reported[at, name]
        elif at == _PLACE:
            value = self._values[name]
        elif self._state is not None:
            value = self._state.recorded(self.modules[at], name)
        return value if type(value) in ATOMS else ...

    def before(self) -> ObjectsBefore:
        """What the objects hold before a forward: what they held after the last one that changed
        none, as a replica restores them.
        """
        if self.then is None or self.stores:
            self.then, self.stores = ObjectsBefore([*self.objects.values()]), False
        return self.then

    def report(self, rebound: dict[tuple[int, str], Any], stored: Collection[Any]) -> None:
        """Note what the driver is told of a forward.

        Args:
            rebound: The attributes that it rebound, as `reported`.
            stored: What the objects that it changed hold now.
        """
        self.reported, self._made = rebound, NewObjects()
        self._report(given(rebound.values(), stored), bool(stored))

    def _report(self, values: Iterable[Any], stores: bool) -> None:
        if stores:
            self.then, self.stores = ObjectsBefore([*self.objects.values()]), True
        self._made.add(values, self.objects.values)
        self._made_then = ObjectsBefore(self._made.objects)

    def forget_changes(self) -> None:
        """Note that they were undone: a backward begins without them, too."""
        if self.then is not None and self.stores:
            self.then = ObjectsBefore([*self.objects.values()])
        self.reported, self.stores = {}, False
        self._made, self._made_then = NewObjects(), ObjectsBefore(())

    def names(self, keys: Iterable[PartKey]) -> list[str]:
        """How a program finds objects: the attributes, or the names in code."""
        found = []
        for at, name, *_ in keys:
            if at == NEW:
                found.append("an object that forward made")
            elif at == _CODE:
                found.append(self.code.objects[name][0] if name in self.code.objects else name)
            elif at == _PLACE:
                found.append(self.code.places[name].name if name in self.code.places else name)
            else:
                found.append(f"{type(self.modules[at]).__name__}.{name}")
        return [*dict.fromkeys(found)]

    def is_known(self, at: int, name: str) -> bool:
        """Whether there is what a number and a name of `rebound` stand for."""
        return name in self.code.places if at == _PLACE else at < len(self.modules)

    def still_holds(self, key: PartKey) -> bool:
        """Whether the attribute or the name by which an object was found has the value of then."""
        at, name = key[:2]
        if at == NEW:
            return True
        if at == _CODE:
            place = self.code.places.get(name)
            return place is None or place.read() is self.code.objects[name][1]
        value, root = getattr(self.modules[at], name, None), self.objects.get((at, name, 0))
        return value is root or isinstance(value, tuple)

    def holding(self, changed: Iterable[Any]) -> list[str]:
        """The attributes that hold some objects, directly or not."""
        wanted = {*map(id, changed)}
        found = []
        for at, name, value in self._attributes():
            if at == _CODE:
                continue
            inside: dict[int, Any] = {}
            mutable_parts(value, inside, but=(nn.Module, Tensor))
            if not wanted.isdisjoint(inside):
                found.append(f"{type(self.modules[at]).__name__}.{name}")
        return [*dict.fromkeys(found)]


def given(rebound: Iterable[Any], stored: Iterable[Any]) -> list[Any]:
    """The values that a forward gave attributes, and all that it stored."""
    inside = (part for held in stored for part in ObjectContents(*held).flat())
    return [*rebound, *inside]


class VainChange(Enum):
    """What a forward or backward does in vain, as a warning."""

    STORED = (
        "forward changed {}. Replicas have copies of what attributes hold, the module's own stays "
        "as it was, and each forward begins with it: return what is needed, keep it in a buffer, "
        "and take random numbers from the default generators, which are seeded for each chunk"
    )
    BUILT = (
        "forward gave the module {}: parameters and submodules that it makes stay in the replica, "
        "and each forward begins without them. Make them in __init__, or run the module itself "
        "once before it is wrapped"
    )
    HOOKED = (
        "a hook changed {} in backward, which stays in the replica, because other code changed it "
        "since the forward, or items of a list were moved. Let it append, or set items or "
        "attributes"
    )


class VainChanges:
    """The attributes that forwards changed in vain, of which the program is told once."""

    def __init__(self) -> None:
        self._told: dict[tuple[VainChange, str], bool] = {}

    def enter(self, kind: VainChange, names: Iterable[str]) -> None:
        """Enter some attributes."""
        for name in names:
            self._told.setdefault((kind, name), False)

    def take(self) -> list[str]:
        """Warnings of those that the program was not told of."""
        found = []
        for kind in VainChange:
            names = [name for (of, name), told in self._told.items() if of is kind and not told]
            if names:
                self._told.update({(kind, name): True for name in names})
                found.append(kind.value.format(", ".join(names)))
        return found
