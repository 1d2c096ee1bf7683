"""The Python state of a module: each mutable object that pickle reaches from it, with a copy of its
contents.

[Note: what changed]
The driver must see every edit between two forwards, and a replica must start each forward from the
driver's state. Both compare the same objects, so both use a `PythonState`. Contents are compared by
identity, element for element: equality would take a new tensor for an old one with the same
numbers. The comparison runs in C over flat lists (0.2 to 0.4 ms for the 286 modules of a
ResNet-50); a fresh pickle to compare would cost 4 to 15 ms. Attributes of classes, parts of
functions and specs of modules, of which a model of a library has some thirty, are read into one row
by a few calls in C (`CodeRow`).

Changes that identity cannot show, inside of arrays and of objects with their state in C, are found
by comparing contents in `deep_changed`, while replicas run.

Plain containers and attributes can be restored in place, and given other tensors. Other objects
(slots, closures, tuples of tensors, arrays, objects that define their own pickling) cannot: then
`restore` and `replace` return False, and the replica builds its module anew from the structure,
which is always right and costs milliseconds.
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
import threading
import types
import weakref
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import chain, repeat
from typing import Any, NamedTuple

import cloudpickle
import numpy as np
import torch
from cloudpickle.cloudpickle import _extract_code_globals
from torch import Tensor, nn

from raydp_parallel.state.container_copies import DictCopies, ListCopies, same
from raydp_parallel.transport import codec

_MISSING = object()


def array_bytes(array: np.ndarray) -> tuple[Any, ...]:
    """An array's shape, dtype and contents."""
    contents = pickle.dumps(array) if array.dtype.hasobject else array.tobytes()
    return array.shape, array.dtype, contents


class _ContentPickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Pickles tensors by identity: their contents are compared elsewhere."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self.tensors: list[torch.Tensor] = []

    def persistent_id(self, value: Any) -> int | None:
        if not isinstance(value, torch.Tensor):
            return None
        self.tensors.append(value)
        return id(value)


def pickled(value: Any) -> tuple[bytes, list[torch.Tensor]]:
    """A value's pickle, and the tensors in it, which stand in the pickle by identity."""
    file = io.BytesIO()
    pickler = _ContentPickler(file)
    # The pickler of the structure raises the error for what cannot be pickled, with the path.
    with contextlib.suppress(Exception):
        pickler.dump(value)
    return file.getvalue(), pickler.tensors


def generator_state(generator: torch.Generator) -> tuple[bytes, None]:
    """The state of torch's generator; its pickle differs each time."""
    return generator.get_state().numpy().tobytes(), None


def reduces_itself(value: Any) -> bool:
    """Whether a value's class defines how it is pickled."""
    kind: Any = type(value)
    return (
        kind.__reduce_ex__ is not object.__reduce_ex__ or kind.__reduce__ is not object.__reduce__
    )


def has_own_state(value: Any) -> bool:
    """Whether a value's class defines which of its attributes are pickled."""
    base = torch.nn.Module if isinstance(value, torch.nn.Module) else object
    return getattr(type(value), "__getstate__", None) is not getattr(base, "__getstate__", None)


def slot_names(kind: type) -> tuple[str, ...]:
    """The names under which a class's slots are attributes."""
    names = []
    for base in kind.__mro__:
        slots = base.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            private = name.startswith("__") and not name.endswith("__")
            names.append(f"_{base.__name__.lstrip('_')}{name}" if private else name)
    return tuple(name for name in names if name not in ("__dict__", "__weakref__"))


def slot_parts(value: Any, names: tuple[str, ...]) -> list[Any]:
    """What is in a value's slots."""
    return [getattr(value, name, _MISSING) for name in names]


def by_value(value: Any) -> bool:
    """Whether a class or function is sent by value, and not by name."""
    return not cloudpickle.cloudpickle._should_pickle_by_reference(value)


def mapping_parts(value: dict[Any, Any]) -> list[Any]:
    """The contents of a dict's subclass, in its order, without calling methods of the subclass."""
    raw: Any = OrderedDict if isinstance(value, OrderedDict) else dict
    return [getattr(value, "default_factory", None), *raw.keys(value), *raw.values(value)]


def global_names(function: types.FunctionType) -> list[str]:
    """The globals that are sent along with a function that is sent by value."""
    return sorted(_extract_code_globals(function.__code__))


def function_parts(function: types.FunctionType, names: Iterable[str]) -> list[Any]:
    """The parts of a function that is sent by value: its code, defaults, closure and globals."""
    cells = [_cell(cell) for cell in function.__closure__ or ()]
    used = [function.__globals__.get(name, _MISSING) for name in names]
    return [function.__code__, function.__defaults__, function.__kwdefaults__, *cells, *used]


def _cell(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return _MISSING


def class_parts(kind: type) -> list[Any]:
    """The attributes of a class that is sent by value."""
    attributes = chain.from_iterable(vars(base).items() for base in kind.__mro__ if by_value(base))
    # copyreg's cache
    return [*chain.from_iterable(item for item in attributes if item[0] != "__slotnames__")]


def script_parts(module: torch.jit.ScriptModule) -> list[Any]:
    """The tensors and modes of a script."""
    tensors = chain(module.named_parameters(), module.named_buffers())
    # the names are new strings each time
    named = ((sys.intern(name), tensor) for name, tensor in tensors)
    return [*chain.from_iterable(named), *(m.training for m in module.modules())]


def script_values(module: torch.jit.ScriptModule) -> list[str]:
    """A script's plain attributes. It returns copies only, so they are compared as text."""
    scripts: Iterable[Any] = module.modules()
    values = (m._c.getattr(name) for m in scripts for name in m._concrete_type.get_attributes())
    return [repr(value) for value in values if not isinstance(value, torch.Tensor)]


_code: Any = operator.attrgetter("__code__", "__defaults__", "__kwdefaults__")
_contents: Any = operator.attrgetter("cell_contents")
_bases: Any = operator.attrgetter("__mro__")


class _Reader(NamedTuple):
    """An object with contents that a function returns: the function, and what it returned."""

    read: Callable[[], list[Any]]
    then: list[Any]


class CodeRow:
    """What is read of classes, functions and modules, one after the other, and functions that
    return exactly what counts of it.
    """

    def __init__(self) -> None:
        self._kinds: list[type] = []
        self._views: list[Iterable[Any]] = []
        self._functions: list[types.FunctionType] = []
        self._cells: list[types.CellType] = []
        self._spaces: list[dict[str, Any]] = []
        self._names: list[str] = []
        self._modules: list[str] = []
        self._readers: list[_Reader] = []
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

    def add_reader(self, read: Callable[[], list[Any]]) -> None:
        """Add a function that returns what counts of something that was added."""
        self._readers.append(_Reader(read, read()))

    def changed(self) -> bool:
        """Whether anything that counts is another than it was."""
        if self.unchanged():
            return False
        look = self.look()  # before the exact comparison, so that no later change is missed
        if _differ(self._readers):
            return True
        self.note(look)
        return False

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


SIMPLE = (bool, int, float, str, type(None))
"""The classes of attributes that are sent one by one."""

LOCKS: dict[type, Callable[[], Any]] = {
    type(threading.Lock()): threading.Lock,
    type(threading.RLock()): threading.RLock,
}
"""The classes of locks, and what makes one."""

_IMMUTABLE = (
    *LOCKS,
    *(int, float, complex, str, bytes, bool, type(None), type(...)),
    *(range, slice, tuple, frozenset, property, functools.partial),
    *(types.BuiltinFunctionType, types.MethodType, types.ModuleType, types.MethodDescriptorType),
    *(types.CodeType, types.CellType, types.GenericAlias, types.UnionType),
    *(staticmethod, classmethod, enum.Enum, weakref.ref),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format, re.Pattern, logging.Logger),
    *(datetime.date, datetime.time, datetime.timedelta, decimal.Decimal, np.generic, np.dtype),
)
_ATOMS = frozenset((int, float, complex, str, bytes, bool, type(None)))


class _Content(NamedTuple):
    """An object that only a comparison of contents can judge: the function that returns them, and
    what it returned.
    """

    value: Any
    take: Callable[[], Any]
    then: Any


class _ObjectReader(NamedTuple):
    """An object with contents that a function returns: the object, the function, and what it
    returned.
    """

    value: Any
    read: Callable[[], list[Any]]
    then: list[Any]


_NO_OBJECTS = (nn.Module, Tensor, pickle.PickleBuffer)
"""What holds no state of its own, or has its own ways."""


class StateVisitor:
    """Finds what is mutable among all that pickle reaches: `visit` is called for each part of it.

    Attributes:
        reached: All parts but atoms, by their ids.
        owners: Objects with attributes that are compared; all tensors are among them.
        dicts: Plain dicts.
        lists: Lists and deques.
        sets: Sets.
        readers: Objects of which a function returns what to compare.
        code: Classes, functions and modules.
        contents: What only a comparison of contents can judge.
        pickles: Pickles with the tensors that stand in them by identity.
        occurrences: How often each tensor was reached, by its id.
        is_opaque: Whether a part was reached that no tensor in it can be replaced in.
    """

    def __init__(self) -> None:
        self.reached: dict[int, Any] = {}
        self.owners: list[object] = []
        self.dicts: list[dict[Any, Any]] = []
        self.lists: list[Any] = []
        self.sets: list[set[Any]] = []
        self.readers: list[_ObjectReader] = []
        self.code = CodeRow()
        self.contents: list[_Content] = []
        self.pickles: list[tuple[bytes, Any]] = []
        self.occurrences: Counter[int] = Counter()
        self.is_opaque = False

    def visit(self, value: Any) -> None:
        """Note what is mutable about ``value``."""
        kind = type(value)
        if kind in _ATOMS:
            return
        if isinstance(value, torch.Tensor):
            self.occurrences[id(value)] += 1
        if id(value) in self.reached:
            return
        self.reached[id(value)] = value
        if kind is dict or kind is OrderedDict:
            self.dicts.append(value)
        elif isinstance(value, (dict, list, deque, set)):
            self._visit_container(value)
        elif isinstance(value, torch.Tensor):
            self.owners.append(value)
        elif isinstance(value, np.ndarray):
            self._compare(value, functools.partial(array_bytes, value))
        elif isinstance(value, types.FunctionType):
            if by_value(value):
                names = global_names(value)
                self.code.add_function(value, names)
                self.code.add_reader(functools.partial(function_parts, value, names))
        elif issubclass(kind, type):  # Python 3.10 takes list[int] for an instance of type
            if by_value(value):
                self.code.add_class(value, filter(by_value, value.__mro__))
                self.code.add_reader(functools.partial(class_parts, value))
        elif isinstance(value, torch.jit.ScriptModule):
            self.is_opaque = True
            self._read(value, functools.partial(script_parts, value))
            self._compare(value, functools.partial(script_values, value))
        elif not isinstance(value, _IMMUTABLE) or hasattr(value, "__dict__"):
            self._visit_object(value)

    def _visit_container(self, value: Any) -> None:
        if isinstance(value, dict):
            self._read(value, functools.partial(mapping_parts, value))
        elif isinstance(value, set):
            self.sets.append(value)
        else:
            self.lists.append(value)
        if hasattr(value, "__dict__"):
            self.owners.append(value)

    def _visit_object(self, value: Any) -> None:
        if isinstance(value, (types.ModuleType, logging.Logger, types.MethodType)):
            return
        if codec.stream_name(value):
            return
        reduces = not isinstance(value, torch.nn.Module) and reduces_itself(value)
        plain = not reduces or isinstance(value, types.SimpleNamespace)
        slots = slot_names(type(value)) if plain else ()
        if plain and hasattr(value, "__dict__"):
            self.owners.append(value)
        elif not slots and not isinstance(value, _IMMUTABLE):
            self._visit_opaque(value)
        if slots:
            self._read(value, functools.partial(slot_parts, value, slots))
        self.is_opaque |= bool(slots) or reduces or has_own_state(value)

    def _visit_opaque(self, value: Any) -> None:
        take: Callable[[Any], Any] = pickled
        if isinstance(value, torch.Generator):
            take = generator_state
        then, again = take(value), take(value)
        if then[0] == again[0]:  # some pickles differ each time, and show nothing
            self.contents.append(_Content(value, lambda: take(value)[0], then[0]))
            self.pickles.append(then)

    def _compare(self, value: Any, take: Callable[[], Any]) -> None:
        self.contents.append(_Content(value, take, take()))

    def _read(self, value: Any, read: Callable[[], list[Any]]) -> None:
        self.readers.append(_ObjectReader(value, read, read()))

    def plain_dicts(self) -> list[dict[Any, Any]]:
        """The dicts that are not compared with their owner: pickle reaches an object's attributes
        as a dict too, and a module's as a copy of it.
        """
        attributes = {id(vars(owner)) for owner in self.owners}
        states = {
            id(vars(owner).get("_parameters", 1))
            for owner in self.owners
            if isinstance(owner, torch.nn.Module)
        }
        return [
            d
            for d in self.dicts
            if id(d) not in attributes and id(d.get("_parameters", 0)) not in states
        ]


class PythonState:
    """The contents of mutable objects, at one moment.

    Args:
        found: The objects.
        hidden: The names of attributes that are not looked at, by the ids of their owners. Such a
            state cannot be restored.
    """

    def __init__(
        self, found: StateVisitor, hidden: Mapping[int, Collection[str]] | None = None
    ) -> None:
        self._dicts = DictCopies(found.owners, found.plain_dicts(), hidden)
        self._lists = ListCopies(found.lists, found.sets)
        self._classes = self._dicts.classes()
        self._code = found.code
        self._readers = found.readers
        self._contents = found.contents
        self._occurrences = found.occurrences
        self._is_opaque = found.is_opaque
        # an identity is that of one object only as long as the object is alive
        self._alive = found.reached, found.pickles

    def settle(self) -> None:
        """Compare with what `accept` recorded."""
        self._dicts.settle()
        self._lists.settle()

    def changed(self) -> bool:
        """Whether any identity differs."""
        return self.attributes_changed() or self._readers_changed()

    def attributes_changed(self) -> bool:
        """Whether an attribute, or a plain dict, list or set, has other contents."""
        return self._dicts.changed() or self._lists.changed()

    def _readers_changed(self) -> bool:
        # some programs assign `__class__` to change what a layer does
        return (
            self._dicts.classes() != self._classes or self._code.changed() or _differ(self._readers)
        )

    def deep_changed(self) -> bool:
        """Whether any contents differ that identities do not show."""
        return any(content.take() != content.then for content in self._contents)

    def differences(self) -> list[tuple[Any, str, Any]] | None:
        """The changed attributes as (owner, name, new value), or None if something else changed
        besides.
        """
        found = self._dicts.differences()
        return None if self._lists.changed() or self._readers_changed() else found

    def recorded(self, owner: Any, name: str) -> Any:
        """The recorded value of an attribute; None if there is none."""
        return self._dicts.recorded(owner, name)

    def changed_objects(self) -> list[Any]:
        """The objects and containers with other contents, without modules and tensors."""
        found = [*self._dicts.changed_nodes(), *self._lists.changed_nodes()]
        found += [r.value for r in self._readers if not same(r.read(), r.then)]
        found += [content.value for content in self._contents if content.take() != content.then]
        return [value for value in found if not isinstance(value, _NO_OBJECTS)]

    def culprits(self) -> list[tuple[Any, str]]:
        """The attributes that changed, or that hold a container that did, as (owner, name)."""
        return self._dicts.culprits(self._dicts.unlike() | self._lists.unlike())

    def news(
        self, nodes: Sequence[dict[Any, Any]], besides: Collection[int]
    ) -> list[tuple[int, Any, Any]]:
        """The entries of dicts that are new, and those with a value of which the id is given.

        Returns:
            For each entry: the number of its dict, its key, its value.
        """
        return self._dicts.news(nodes, besides)

    def accept(self, owner: Any, name: str, value: Any) -> Any:
        """Record the new value of an attribute; `settle` must follow the last of several calls.

        Returns:
            The value before.
        """
        return self._dicts.accept(owner, name, value)

    def restore(self, note: Callable[[list[Any]], None] | None = None) -> bool:
        """Restore the recorded contents in place. False if something changed that cannot be
        restored.

        Args:
            note: Gets the objects that changed.
        """
        stays = self._readers_changed() or self.deep_changed()
        if stays or self.attributes_changed():
            if note is not None:
                note(self.changed_objects())
            if not stays:
                self._dicts.restore()
                self._lists.restore()
        return not stays

    def replace(self, new: dict[int, torch.Tensor]) -> bool:
        """Replace tensors, given by their ids, in all places that hold them, and in the copies.

        Returns:
            Whether all places were reached.
        """
        reached: Counter[int] = Counter()
        self._dicts.replace(new, reached)
        self._lists.replace(new, reached)
        if self._is_opaque or any(reached[old] < self._occurrences[old] for old in new):
            return False
        self._dicts.replace_owners(new)
        self._occurrences = Counter(
            {id(new[k]) if k in new else k: n for k, n in self._occurrences.items()}
        )
        self.settle()
        return True


def _differ(readers: Iterable[_Reader | _ObjectReader]) -> bool:
    return any(not same(reader.read(), reader.then) for reader in readers)


_MOST = 3
"""Names that are shown at most."""

_HOLDERS = {"_parameters": "a parameter", "_buffers": "a buffer", "_modules": "a submodule"}


def change_reason(module: nn.Module, state: PythonState) -> str:
    """The names of what changed since the Python state was recorded."""
    paths = {id(part): path for path, part in module.named_modules()}
    names = []
    for owner, name in state.culprits():
        where = paths.get(id(owner))
        if where is None:
            names.append(f"{type(owner).__name__}.{name}")
        elif name in _HOLDERS:
            names.append(f"{_HOLDERS[name]} of {where or type(module).__name__}")
        else:
            names.append(f"{where}.{name}".lstrip("."))
    if not names:
        return "something inside the module (a container in a container, a class, a function)"
    more = f" and {len(names) - _MOST} more" if len(names) > _MOST else ""
    return ", ".join(names[:_MOST]) + more


def _set_entry(entries: dict[str, Any], name: str, value: Any) -> None:
    if value is _MISSING:
        entries.pop(name, None)
    else:
        entries[name] = value


class Held:
    """The tensors that one module holds, by slot, and the attributes that the driver changed.

    Args:
        python_state: The places where it holds them.
        tensors: The tensors that it holds now.
    """

    def __init__(self, python_state: PythonState, tensors: Mapping[int, Tensor]) -> None:
        self._python_state = python_state
        self._tensors = dict(tensors)
        self._edits: list[tuple[dict[str, Any], str, Any, Any]] = []

    @property
    def edits(self) -> int:
        """How many attributes were changed so far."""
        return len(self._edits)

    def edit(self, owner: nn.Module, name: str, value: Any) -> None:
        """Change an attribute of a submodule."""
        attributes = vars(owner)
        self._edits.append((attributes, name, attributes.get(name, _MISSING), value))
        attributes[name] = value

    def forget_edits(self) -> None:
        """Forget the edits: no graph is left that was made before them."""
        self._edits.clear()

    @contextlib.contextmanager
    def as_of(self, edits: int) -> Iterator[None]:
        """Give the module, in the block, the attributes that it had after so many edits."""
        undone = self._edits[edits:]
        now = {
            (id(owner), name): (owner, name, owner.get(name, _MISSING))
            for owner, name, *_ in undone
        }
        for attributes, name, old, _ in reversed(undone):
            _set_entry(attributes, name, old)
        then = {key: owner.get(name, _MISSING) for key, (owner, name, _) in now.items()}
        try:
            yield
        finally:
            for key, (attributes, name, value) in now.items():
                if attributes.get(name, _MISSING) is then[key]:  # else a hook gave it another value
                    _set_entry(attributes, name, value)

    def holds(self, tensors: Mapping[int, Tensor]) -> bool:
        """Whether the module holds exactly these tensors."""
        return len(tensors) == len(self._tensors) and all(
            map(operator.is_, tensors.values(), self._tensors.values())
        )

    def replace(self, tensors: Mapping[int, Tensor]) -> bool:
        """Give the module other tensors for those slots that it has. False if a place could not be
        reached.
        """
        known = {slot: self._tensors[slot] for slot in tensors if slot in self._tensors}
        others = {slot: tensors[slot] for slot, old in known.items() if tensors[slot] is not old}
        self._tensors.update(others)
        return not others or self._python_state.replace(
            {id(known[slot]): new for slot, new in others.items()}
        )
