"""Pickle values of users' classes: more than cloudpickle takes, and errors that name the path.

Each entry here answers a traceback that a user saw: standard streams, cached functions, operators
of torch, objects whose `__getattr__` asks another object.
"""

from __future__ import annotations

import collections
import contextlib
import contextvars
import functools
import importlib
import io
import operator
import pickle
import sys
import types
import weakref
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import cloudpickle
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from raydp_parallel.batch import containers
from raydp_parallel.errors import TransferError

Reduced = Any
"""A description of a value for pickle: a name, a function with its arguments, or `NotImplemented`,
with which pickle does as it likes.
"""

_NAMES: dict[object, str] = {"<stdin>": "stdin", "<stdout>": "stdout", "<stderr>": "stderr"}
_NAMES |= {0: "stdin", 1: "stdout", 2: "stderr"}
"""The names that standard streams have when Python opened them, or when a number did."""

_HOOKS = (
    *("__setstate__", "__getstate__", "__reduce__", "__reduce_ex__"),
    *("__getnewargs__", "__getnewargs_ex__"),
)

_OPERATORS = (type(torch.ops.aten.relu), type(torch.ops.aten.relu.default))
"""The classes of torch's operators, with all their overloads and with one."""


class Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Extend cloudpickle's pickler by the values that this file handles."""

    def reducer_override(self, value: Any) -> Reduced:
        """Reduce a value that pickle cannot handle itself."""
        kind: Any = type(value)
        if issubclass(kind, type):  # by its name, even if its metaclass has a `__getattr__`
            if _is_renamed(value):
                return getattr, (sys.modules[value.__module__], value.__name__)
            return super().reducer_override(value)
        if kind is types.FunctionType and value.__globals__.get("__name__") == "__main__":
            # `functools.wraps` may have given it the name of a function of an imported module.
            return self._dynamic_function_reduce(value)
        name = stream_name(value)
        if name is not None:
            return getattr, (sys, name)
        if isinstance(value, _OPERATORS):
            return operator.attrgetter(str(value)), (torch.ops,)
        if _delegates(kind):
            return *object.__reduce_ex__(value, self.proto), set_state
        if kind is types.GeneratorType:
            raise TypeError("return or give a list or a tuple, instead of yielding")
        if kind is Tensor and value.is_meta:
            raise TypeError("on the device 'meta' it has no contents; make it on the CPU or a GPU")
        if isinstance(value, io.TextIOWrapper):
            # cloudpickle would send a copy of its contents
            raise TypeError("cannot pickle an open file")
        if isinstance(value, types.ModuleType):
            return _reduce_module(value)
        if kind is ContextVar:
            return _reduce_variable(value)
        # Tensors of a message go to the receiver's GPU; torch wants these on the CPU.
        if kind is PackedSequence:
            return _pack, (value.data, value.batch_sizes.tolist(), *value[2:])
        if kind is torch.Generator and value.device.type == "cpu":
            return _seed, (value.get_state().tolist(),)
        if isinstance(value, torch.jit.ScriptFunction):
            return _reduce_script_function(value)
        return super().reducer_override(value)

    def _dynamic_function_reduce(self, func: types.FunctionType) -> Reduced:
        """Reduce a function that pickle finds under no name, as cloudpickle does; but one of an
        imported module gets that module's globals, not copies of those that it uses.

        To find the submodules that a function uses cloudpickle looks through all loaded modules,
        for half a millisecond: here once for each code.
        """
        space, code = func.__globals__, func.__code__
        module, there = module_of(space), [*space]
        known = _reduced.get(id(code))
        if known is None or known[0] != there:
            make, _, (_, parts), *rest = super()._dynamic_function_reduce(func)
            uses = [*parts.pop("__globals__")]
            # Others than the function's own are names of submodules.
            parts = {k: None if hasattr(func, k) else part for k, part in parts.items()}
            if known is None:
                weakref.finalize(code, _reduced.pop, id(code))
            known = _reduced[id(code)] = there, make, rest, uses, parts
        _, make, rest, uses, parts = known
        parts = {name: getattr(func, name, part) for name, part in parts.items()}
        arguments = self._function_getnewargs(func)
        if module is not None:
            make, arguments, uses = _make_in, (module, code, arguments[-1]), []
        parts["__globals__"] = {name: space[name] for name in uses}
        return make, arguments, (dict(vars(func)), parts), *rest


def _pack(data: Tensor, sizes: list[int], *order: Tensor | None) -> PackedSequence:
    return PackedSequence(data, torch.tensor(sizes, device="cpu"), *order)


def _seed(state: list[int]) -> torch.Generator:
    return torch.Generator("cpu").set_state(torch.tensor(state, dtype=torch.uint8, device="cpu"))


_reduced: dict[int, tuple[Any, ...]] = {}
"""How functions are reduced, by the id of their code, for as long as that lives: begins with the
names of their globals, of which a later one may be another one that the code uses.
"""


def module_of(space: dict[str, object]) -> types.ModuleType | None:
    """The module whose globals these are, if another process gets it by its name."""
    name = str(space.get("__name__"))
    found, package = sys.modules.get(name), name.partition(".")[0]
    by_value = [other.partition(".")[0] for other in cloudpickle.list_registry_pickle_by_value()]
    by_name = space.get("__spec__") is not None and package not in ("__main__", "__mp_main__")
    mine = by_name and package not in by_value and getattr(found, "__dict__", None) is space
    return found if mine else None


def _make_in(module: types.ModuleType, code: types.CodeType, closure: Any) -> types.FunctionType:
    return types.FunctionType(code, vars(module), closure=closure)


def _reduce_cache(value: functools._lru_cache_wrapper[object]) -> Reduced:
    """Reduce a cached function to its name, or to an empty cache."""
    if value.__module__ in sys.modules and value.__module__ != "__main__":
        with contextlib.suppress(AttributeError):
            if operator.attrgetter(value.__qualname__)(sys.modules[value.__module__]) is value:
                return value.__reduce__()
    return _new_cache, (value.__wrapped__, value.cache_parameters())


def _new_cache(function: Callable[..., object], parameters: dict[str, Any]) -> object:
    return functools.lru_cache(**parameters)(function)


def _reduce_cached_property(value: functools.cached_property[object]) -> Reduced:
    """Leave out the lock that it has up to Python 3.11, and keep the name, which nothing sets for a
    class that is made anew.
    """
    return functools.cached_property, (value.func,), {"attrname": value.attrname}


def _reduce_number_limits(value: torch.finfo | torch.iinfo) -> Reduced:
    return type(value), (getattr(torch, value.dtype),)


Pickler.dispatch_table = collections.ChainMap(
    {
        functools._lru_cache_wrapper: _reduce_cache,
        functools.cached_property: _reduce_cached_property,
        torch.finfo: _reduce_number_limits,
        torch.iinfo: _reduce_number_limits,
    },
    cloudpickle.Pickler.dispatch_table,
)


def _reduce_module(value: types.ModuleType) -> Reduced:
    """Reduce a module to its name, also one of a class of its own, such as `torch.ops`, or without
    an entry of its own, such as `torch._C._functions`.
    """
    name = value.__name__
    parent, _, last = name.rpartition(".")
    if sys.modules.get(name) is value:
        plain = type(value) is types.ModuleType
        return NotImplemented if plain else (importlib.import_module, (name,))
    found = getattr(sys.modules.get(parent), last, None) is value
    return (getattr, (sys.modules[parent], last)) if found else NotImplemented


@functools.lru_cache(256)
def _reduce_variable(value: ContextVar[object]) -> Reduced:
    """Reduce a context variable to its name in an imported module, or to a new one like it."""
    for module in [*sys.modules.values()]:
        for name, part in [*getattr(module, "__dict__", {}).items()]:
            if part is value and module_of(vars(module)) is module:
                return getattr, (module, name)
    default = {}
    with contextlib.suppress(LookupError):
        default["default"] = contextvars.Context().run(value.get)
    return functools.partial(ContextVar, value.name, **default), ()


def _reduce_script_function(value: Any) -> Reduced:
    if any(argument.has_default_value() for argument in value.schema.arguments):
        return NotImplemented  # what torch saves of it has no defaults
    return torch.jit.load, (io.BytesIO(value.save_to_buffer()),)


def stream_name(value: object) -> str | None:
    """The name of a standard stream, ``"stdout"``, ``"stderr"`` or ``"stdin"``; None for any other
    value.
    """
    for name in ("stdout", "stderr", "stdin"):
        if value is getattr(sys, name):
            return name
    # The original stream, where a notebook, a test or Ray has replaced it.
    opened = type(value) is io.TextIOWrapper
    return _NAMES.get(getattr(value, "name", None)) if opened else None


@functools.lru_cache(maxsize=4096)
def _delegates(kind: type) -> bool:
    """Tell if unpickling would ask an object's own `__getattr__` for `__setstate__`, before the
    object has attributes.
    """
    make: object = kind.__new__
    if make is not object.__new__ and not hasattr(make, "__code__"):
        return False  # a list, a dict, or another type that keeps its contents in C
    inherited = object.__dict__
    no_hooks = all(getattr(kind, name, None) in (None, inherited.get(name)) for name in _HOOKS)
    return no_hooks and any("__getattr__" in vars(base) for base in kind.__mro__)


def _is_renamed(kind: type) -> bool:
    """Tell if a class is found by ``__name__`` and not, as pickle seeks it, by ``__qualname__``,
    as some that were made in C++, such as torch's ``SDPBackend``.
    """
    if kind.__name__ == kind.__qualname__.rpartition(".")[2]:
        return False
    return getattr(sys.modules.get(kind.__module__), kind.__name__, None) is kind


def set_state(value: object, state: object) -> None:
    """Set an object's attributes without its own `__setattr__`."""
    attributes, slots = state if isinstance(state, tuple) else (state, {})
    if attributes:
        object.__getattribute__(value, "__dict__").update(attributes)
    for name, part in slots.items():
        object.__setattr__(value, name, part)


_ADVICE = ". Leave it out, make it where it is used, or give its class a __reduce__"


def dumps(value: object) -> bytes:
    """Pickle a value that may be of a script's classes."""
    file = io.BytesIO()
    Pickler(file).dump(value)
    return file.getvalue()


def unsendable(value: object, path: str, error: Exception) -> TransferError:
    """Make the error for a value that cannot be pickled, with the path to the innermost part."""
    return _blaming(value, path, dumps, f"cannot be sent to another process: {error}")


def refuse_unloadable(value: object, path: str, cause: Exception, error: str) -> None:
    """Raise an error for a value that a replica could not load, if it cannot be loaded here."""
    if not _works(_reload, value):
        raise _blaming(value, path, _reload, f"can be pickled, but not loaded: {error}") from cause


def _reload(value: object) -> object:
    return pickle.loads(dumps(value))


def _works(action: Callable[[object], object], value: object) -> bool:
    with contextlib.suppress(Exception):  # of the user's classes
        action(value)
        return True
    return False


def _blaming(
    value: object, path: str, action: Callable[[object], object], what: str
) -> TransferError:
    """Make an error that names the path to the innermost part for which an action does not work."""
    seen: set[int] = set()
    while id(value) not in seen:
        seen.add(id(value))
        for name, part in _parts(value):
            if not _works(action, part):
                path, value = path + name, part
                break
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    advice = "" if isinstance(value, (types.GeneratorType, Tensor)) else _ADVICE  # `what` has it
    return TransferError(f"{path.lstrip('.')} is a {kind}, which {what}{advice}")


def _parts(value: object) -> list[tuple[str, object]]:
    kind = containers.kind_of(value)
    found = containers.contents(value, kind)
    if found or isinstance(value, (Tensor, type)) or not hasattr(value, "__dict__"):
        return [(containers.step(kind, key), part) for key, part in found.items()]
    found = dict(vars(value))
    for name in _CONTENTS if isinstance(value, nn.Module) else ():
        found |= found.pop(name, {})
    return [(f".{name}", part) for name, part in found.items()]


_CONTENTS = ("_parameters", "_buffers", "_modules")
"""Attributes of a module whose items are attributes of it, too."""
