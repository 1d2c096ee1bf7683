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
import types
import weakref
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain, repeat
from typing import Any, NamedTuple

import cloudpickle
import numpy as np
import torch
from cloudpickle.cloudpickle import _extract_code_globals
from torch import Tensor, nn

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
    """The state of torch's generator, whose pickle differs each time."""
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


_IMMUTABLE = (
    *(int, float, complex, str, bytes, bool, type(None), type(...)),
    *(range, slice, tuple, frozenset, property, functools.partial),
    *(types.BuiltinFunctionType, types.MethodType, types.ModuleType, types.MethodDescriptorType),
    *(types.CodeType, types.CellType, types.GenericAlias, types.UnionType),
    *(staticmethod, classmethod, enum.Enum, weakref.ref),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format, re.Pattern, logging.Logger),
    *(datetime.date, datetime.time, datetime.timedelta, decimal.Decimal, np.generic, np.dtype),
)
_ATOMS = frozenset((int, float, complex, str, bytes, bool, type(None)))


class _Reader(NamedTuple):
    """An object with contents that a function returns: the function, and what it returned."""

    read: Callable[[], list[Any]]
    then: list[Any]


class _Content(NamedTuple):
    """An object that only a comparison of contents can judge: the function that returns them, and
    what it returned.
    """

    take: Callable[[], Any]
    then: Any


class PythonState:
    """The contents of mutable objects, at one moment.

    `visit` is called for everything that pickle reaches; `freeze` ends that.
    """

    def __init__(self) -> None:
        self._seen: dict[int, Any] = {}
        self._owners: list[object] = []
        self._dicts: list[dict[Any, Any]] = []
        self._lists: list[Any] = []
        self._sets: list[set[Any]] = []
        self._readers: list[_Reader] = []
        self._code = CodeRow()
        self._code_readers: list[_Reader] = []
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
            self._compare(functools.partial(array_bytes, value))
        elif isinstance(value, types.FunctionType):
            if by_value(value):
                names = global_names(value)
                self._code.add_function(value, names)
                self._read_code(functools.partial(function_parts, value, names))
        elif issubclass(kind, type):  # Python 3.10 takes list[int] for an instance of type
            if by_value(value):
                self._code.add_class(value, filter(by_value, value.__mro__))
                self._read_code(functools.partial(class_parts, value))
        elif isinstance(value, torch.jit.ScriptModule):
            self._opaque = True
            self._read(functools.partial(script_parts, value))
            self._compare(functools.partial(script_values, value))
        elif not isinstance(value, _IMMUTABLE) or hasattr(value, "__dict__"):
            self._visit_object(value)

    def _visit_container(self, value: Any) -> None:
        if isinstance(value, dict):
            self._read(functools.partial(mapping_parts, value))
        elif isinstance(value, set):
            self._sets.append(value)
        else:
            self._lists.append(value)
        if hasattr(value, "__dict__"):
            self._owners.append(value)

    def _visit_object(self, value: Any) -> None:
        if isinstance(value, (types.ModuleType, logging.Logger, types.MethodType)):
            return
        if codec.stream_name(value):
            return
        reduces = not isinstance(value, torch.nn.Module) and reduces_itself(value)
        plain = not reduces or isinstance(value, types.SimpleNamespace)
        slots = slot_names(type(value)) if plain else ()
        if plain and hasattr(value, "__dict__"):
            self._owners.append(value)
        elif not slots and not isinstance(value, _IMMUTABLE):
            self._visit_opaque(value)
        if slots:
            self._read(functools.partial(slot_parts, value, slots))
        self._opaque |= bool(slots) or reduces or has_own_state(value)

    def _visit_opaque(self, value: Any) -> None:
        take: Callable[[Any], Any] = pickled
        if isinstance(value, torch.Generator):
            take = generator_state
        then, again = take(value), take(value)
        if then[0] == again[0]:  # some pickles differ each time, and show nothing
            self._contents.append(_Content(lambda: take(value)[0], then[0]))
            self._kept.append(then)

    def _compare(self, take: Callable[[], Any]) -> None:
        self._contents.append(_Content(take, take()))

    def _read(self, read: Callable[[], list[Any]]) -> None:
        self._readers.append(_Reader(read, read()))

    def _read_code(self, read: Callable[[], list[Any]]) -> None:
        self._code_readers.append(_Reader(read, read()))

    def watch_class(self, kind: type, read: Callable[[], list[Any]]) -> None:
        """Add a class that is sent by name, with a function that returns what to compare."""
        self._code.add_class(kind)
        self._read_code(read)

    def watch_modules(self, names: Sequence[str], read: Callable[[], list[Any]]) -> None:
        """Add loaded modules, with a function that returns their specs."""
        self._code.add_modules(names)
        self._read_code(read)

    def freeze(self) -> None:
        """Take the copies that later moments are compared with."""
        self._classes = [*map(type, self._owners)]
        # Pickle reaches an object's attributes as a dict too, and a module's as a copy of it; they
        # are compared with their owner.
        attributes = {id(vars(owner)) for owner in self._owners}
        states = {
            id(vars(owner).get("_parameters", 1))
            for owner in self._owners
            if isinstance(owner, torch.nn.Module)
        }
        dicts = (
            d
            for d in self._dicts
            if id(d) not in attributes and id(d.get("_parameters", 0)) not in states
        )
        self._nodes: list[dict[Any, Any]] = [*map(vars, self._owners), *dicts]
        self._copies = [dict(node) for node in self._nodes]
        self._list_copies = [list(node) for node in self._lists]
        self._set_copies = [set(node) for node in self._sets]
        self._owner_index = {id(owner): i for i, owner in enumerate(self._owners)}
        self.settle()

    def settle(self) -> None:
        """Prepare the flat lists that `changed` compares."""
        # Most dicts of a module are for hooks and empty: one `any` checks all of them.
        count = len(self._owners)
        empty = [
            not copy and (i >= count or _is_tensor(self._owners[i]))
            for i, copy in enumerate(self._copies)
        ]
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
        """Whether any identity differs."""
        return self.attributes_changed() or self._readers_changed()

    def attributes_changed(self) -> bool:
        """Whether an attribute, or a plain dict, list or set, has other contents."""
        plain = [*map(vars, self._full_owners), *self._full_dicts]
        full = [*plain, *self._full_ordered]
        # An OrderedDict has an order of its own, which dict.values would not follow.
        values = (*map(dict.values, plain), *map(OrderedDict.values, self._full_ordered))
        return (
            any(self._empty)
            or [*map(len, full)] != self._lengths
            or [*chain.from_iterable(full)] != self._keys
            or not _identical(chain.from_iterable(values), self._values)
            or self._lists_changed()
        )

    def _lists_changed(self) -> bool:
        return (
            [*map(len, self._lists)] != self._list_lengths
            or not _identical(chain.from_iterable(self._lists), self._items)
            or self._sets != self._set_copies
        )

    def _readers_changed(self) -> bool:
        # some programs assign `__class__` to change what a layer does
        classes = [*map(type, self._owners)]
        return classes != self._classes or self._code_changed() or _differ(self._readers)

    def _code_changed(self) -> bool:
        if self._code.unchanged():
            return False
        look = self._code.look()  # before the exact comparison, so that no later change is missed
        if _differ(self._code_readers):
            return True
        self._code.note(look)
        return False

    def deep_changed(self) -> bool:
        """Whether any contents differ that identities do not show."""
        return any(content.take() != content.then for content in self._contents)

    def differences(self) -> list[tuple[Any, str, Any]] | None:
        """The changed attributes as (owner, name, new value), or None if something else changed
        besides.
        """
        found = []
        for i, copy in enumerate(self._copies):
            node = self._node(i)
            if _alike(node, copy):
                continue
            if i >= len(self._owners) or [*node] != [*copy]:
                return None
            owner = self._owners[i]
            found += [(owner, name, new) for name, new in node.items() if new is not copy[name]]
        return None if self._lists_changed() or self._readers_changed() else found

    def culprits(self) -> list[tuple[Any, str]]:
        """The attributes that changed, or that hold a container that did, as (owner, name)."""
        changed = self._changed_containers()
        found = []
        for i, owner in enumerate(self._owners):
            now, then = vars(owner), self._copies[i]
            for name in {**then, **now}:
                value = now.get(name, _MISSING)
                if value is not then.get(name, _MISSING) or id(value) in changed:
                    found.append((owner, name))
        return found

    def _node(self, i: int) -> dict[Any, Any]:
        return vars(self._owners[i]) if i < len(self._owners) else self._nodes[i]

    def news(self, nodes: Sequence[dict[Any, Any]]) -> list[tuple[int, Any, Any]]:
        """The entries of dicts that are new, or hold a dict, list or set with other contents.

        Returns:
            For each entry: the number of its dict, its key, its value.
        """
        changed = self._changed_containers()
        before = {id(self._node(i)): copy for i, copy in enumerate(self._copies)}
        found = []
        for at, node in enumerate(nodes):
            then = before.get(id(node), {})
            for key, value in node.items():
                if value is not then.get(key, _MISSING) or id(value) in changed:
                    found.append((at, key, value))
        return found

    def _changed_containers(self) -> set[int]:
        dicts = {
            id(self._node(i))
            for i, copy in enumerate(self._copies)
            if not _alike(self._node(i), copy)
        }
        lists = {
            id(n)
            for n, then in zip(self._lists, self._list_copies, strict=True)
            if not _same(n, then)
        }
        sets = {id(n) for n, then in zip(self._sets, self._set_copies, strict=True) if n != then}
        return dicts | lists | sets

    def accept(self, owner: Any, name: str, value: Any) -> None:
        """Record the new value of an attribute; `settle` must follow the last of several calls."""
        self._copies[self._owner_index[id(owner)]][name] = value

    def restore(self) -> bool:
        """Restore the recorded contents in place. False if something changed that cannot be
        restored.
        """
        if self._readers_changed() or self.deep_changed():
            return False
        if not self.attributes_changed():
            return True
        for i, copy in enumerate(self._copies):
            if not _alike(self._node(i), copy):
                _put_back(self._node(i), copy)
        for items, then in zip(self._lists, self._list_copies, strict=True):
            if not _same(items, then):
                _put_back(items, then)
        for known, before in zip(self._sets, self._set_copies, strict=True):
            if known != before:
                _put_back(known, before)
        return True

    def replace(self, new: dict[int, torch.Tensor]) -> bool:
        """Replace tensors, given by their ids, in all places that hold them, and in the copies.

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
        self._occurrences = Counter(
            {id(new[k]) if k in new else k: n for k, n in self._occurrences.items()}
        )
        self._owner_index = {id(owner): i for i, owner in enumerate(self._owners)}
        self.settle()


def _differ(readers: Iterable[_Reader]) -> bool:
    return any(not _same(reader.read(), reader.then) for reader in readers)


def _put_back(node: Any, then: Any) -> None:
    node.clear()
    node.extend(then) if hasattr(node, "extend") else node.update(then)


def _identical(now: Iterable[Any], then: Iterable[Any]) -> bool:
    return all(map(operator.is_, now, then))


def _same(now: Sequence[Any], then: Sequence[Any]) -> bool:
    return now is then or (len(now) == len(then) and _identical(now, then))


def _alike(node: dict[Any, Any], copy: dict[Any, Any]) -> bool:
    return (
        len(node) == len(copy) and _identical(node.values(), copy.values()) and [*node] == [*copy]
    )


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


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
        for attributes, name, old, _ in reversed(undone):
            if old is _MISSING:
                attributes.pop(name, None)
            else:
                attributes[name] = old
        try:
            yield
        finally:
            for attributes, name, _, value in undone:
                attributes[name] = value

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
